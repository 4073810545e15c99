"""Reading a person's notebook or `.py` file."""

from pathlib import Path
from types import ModuleType

import nbformat
import pytest

from nanogpt.implementation import load_implementation, read_cells, require, without_magics
from nanogpt.unfinished import fill_in


def notebook(path: Path, *sources: str | tuple[str, list[str]]) -> Path:
    """A notebook of code cells, each a source or a (source, tags) pair, after a text cell."""
    cells = [nbformat.v4.new_markdown_cell("# A lesson")]
    for each in sources:
        source, tags = each if isinstance(each, tuple) else (each, [])
        cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags}))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_cells_in_order_with_tags_and_labels(tmp_path: Path) -> None:
    path = notebook(tmp_path / "a.ipynb", "x = 1", ("y = x", ["demo"]), "", "z = 3")
    cells = read_cells(path)
    assert [(cell.label, cell.source, cell.tags) for cell in cells] == [
        ("cell 2", "x = 1", ()),
        ("cell 3", "y = x", ("demo",)),
        ("cell 5", "z = 3", ()),
    ]


def test_py_file_is_one_cell(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("\ufeffx = 1\n", encoding="utf-8")
    (cell,) = read_cells(tmp_path / "a.py")
    assert (cell.label, cell.source) == ("a.py", "x = 1\n")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("%matplotlib inline\nx = 1", "pass  # %matplotlib inline\nx = 1"),
        ("if True:\n    !ls\nx = 1", "if True:\n    pass  # !ls\nx = 1"),
        ("files = !ls\n", "pass  # files = !ls\n"),
        ("x = (7\n  % 4)", "x = (7\n  % 4)"),
        ("%pip install a\nx = (7\n  % 4)", "pass  # %pip install a\nx = (7\n  % 4)"),
        ("%pip install a\nx = '''\n%d\n'''", "pass  # %pip install a\nx = '''\n%d\n'''"),
        ("%%bash\nls -l", "# %%bash\n# ls -l"),
        ("%%time\nx = 1", "# %%time\nx = 1"),
        ("%time x = f(1)", "x = f(1)"),
        ("!pip install a \\\n  b\nx = 1", "pass  # !pip install a \\\n#   b\nx = 1"),
        ("print?", "pass  # print?"),
    ],
)
def test_magics_go_and_python_stays(source: str, expected: str) -> None:
    assert without_magics(source) == expected


def test_unreadable_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.ipynb").write_text("{")
    (tmp_path / "list.ipynb").write_text("[1]")
    (tmp_path / "number.ipynb").write_text('{"nbformat": 4, "cells": 3}')
    (tmp_path / "none.ipynb").write_text(
        '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": null}'
    )
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "null.py").write_bytes(b"x = 1\x00")
    for name, says in [
        ("broken.ipynb", "not a notebook"),
        ("list.ipynb", "not a notebook"),
        ("number.ipynb", "not a notebook"),
        ("none.ipynb", "not what Jupyter writes"),
        ("missing.ipynb", "no such file"),
        ("bytes.py", "UTF-8"),
        ("null.py", "null"),
        ("a.txt", "expected a notebook"),
    ]:
        with pytest.raises(ValueError, match=says) as caught:
            read_cells(tmp_path / name)
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)


def test_syntax_error_names_cell_and_line(tmp_path: Path) -> None:
    path = notebook(tmp_path / "a.ipynb", "good = 1", "x = 1\ny = = 2", "after = 3")
    with pytest.raises(ValueError, match=r"cell 3, line 2: invalid syntax at 'y = = 2'"):
        read_cells(path)
    assert [bool(cell.error) for cell in read_cells(path, tolerant=True)] == [False, True, False]
    assert load_implementation(path).after == 3


def test_a_long_line_is_quoted_from_its_start(tmp_path: Path) -> None:
    path = notebook(tmp_path / "a.ipynb", f"y = = {'1' * 10_000}")
    with pytest.raises(ValueError, match=r"invalid syntax at 'y = = 1+' \(Python 3\.\d+\)$") as caught:
        read_cells(path)
    assert len(str(caught.value)) < 300


def test_a_cell_that_is_indented_or_has_no_list_of_tags_is_read_as_jupyter_does(tmp_path: Path) -> None:
    path = notebook(tmp_path / "a.ipynb", "  x = 1\n  if x:\n      y = 2")
    path.write_text(path.read_text().replace('"tags": []', '"tags": null'))
    assert read_cells(path)[0].source == "x = 1\nif x:\n    y = 2"


def test_syntax_error_in_a_demo_harms_nobody(tmp_path: Path) -> None:
    assert len(read_cells(notebook(tmp_path / "a.ipynb", ("y = = 2", ["demo"])))) == 1


def test_failed_cells_are_passed_over_and_remembered(tmp_path: Path) -> None:
    path = notebook(
        tmp_path / "a.ipynb",
        "from grader import check, run_ranks",
        "def first():\n    return 1",
        "check(first)\nprint('never seen')",
        "base = undefined\nclass Second:\n    pass",
        ("third = 3", ["demo"]),
        "def fourth():\n    return first() + 3",
    )
    implementation = load_implementation(path)
    assert require(implementation, "fourth")() == 4
    with pytest.raises(ValueError, match=r"does not define Second: cell 5, line 1 failed with NameError"):
        require(implementation, "Second")
    assert not hasattr(implementation, "third")


def test_a_script_that_nbconvert_has_made_runs(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "get_ipython().run_line_magic('load_ext', 'autoreload')\n"
        "in_a_notebook = bool(get_ipython())\n"
        "def first():\n    return 1\n"
    )
    implementation = load_implementation(path)
    assert require(implementation, "first")() == 1
    assert implementation.in_a_notebook is False


def test_real_grader_is_back_afterwards(tmp_path: Path) -> None:
    import sys

    before = sys.modules.get("grader")
    load_implementation(notebook(tmp_path / "a.ipynb", "import grader"))
    assert sys.modules.get("grader") is before


def test_nothing_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_implementation(notebook(tmp_path / "a.ipynb", "print('hello')\ndisplay(1)"))
    assert capsys.readouterr() == ("", "")


def test_helpers_beside_the_file_and_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "beside_the_file.py").write_text("value = 5")
    (tmp_path / "a.py").write_text(
        "from dataclasses import dataclass\nfrom beside_the_file import value\n"
        "@dataclass\nclass Pair:\n    left: 'int' = value\n"
    )
    assert load_implementation(tmp_path / "a.py").Pair().left == 5


def test_what_is_not_written_yet_is_lent(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        """
from contextlib import contextmanager

def unwritten(x):
    "With a docstring."
    raise NotImplementedError("about 1 line")

def written(x):
    if x is None:
        raise NotImplementedError
    return 10 * unwritten(x)

class Half:
    @staticmethod
    def ready():
        return unwritten(1)

    @property
    def rest(self):
        raise NotImplementedError

class Managing:
    @contextmanager
    def managed(self):
        raise NotImplementedError("about 3 lines")

def of_no_exercise():
    raise NotImplementedError
"""
    )
    ours = ModuleType("ours")
    ours.__dict__.update(unwritten=lambda x: x + 1, written=None, Half="half", Managing="managing")
    mine = load_implementation(tmp_path / "mine.py")
    assert fill_in(mine, ours) == ["unwritten", "Half", "Managing"]
    assert mine.written(1) == 20
    assert (mine.Half, mine.Managing) == ("half", "managing")
    with pytest.raises(NotImplementedError):
        mine.of_no_exercise()
