"""The builder of notebooks, on a small course made up for the purpose."""

import itertools
import json
import shutil
from pathlib import Path

import nbformat
import pytest

from infra.lessons import __main__ as command
from infra.lessons import build, derived, notebooks
from infra.lessons.exercises import LessonError, read_exercises
from infra.lessons.source import Lesson, discover

ROOT = Path(__file__).parents[1]

TEXT = """\
# Adding up

You add numbers, e.g. two of them. A second sentence.

```python
from operator import add, mul

def check(exercise):
    display({"text/plain": f"{exercise.__name__} passed"}, raw=True)
```

## Build

```python exercise="total"
```

```python exercise="Adder"
```

```bash
echo text
```

```python tags=["demo", "nbval-ignore-output"]
print(total([1, 2]), Adder(1)(2), START)
```

```python tags=["demo", "nbval-ignore-output"]
print(total([1, 2]), Adder(1)(2), START)
```

```python exercise="average"
def average(numbers):
    return total(numbers)  # the bug
```
"""

SOLUTION = '''\
"""Adding, by hand."""

from collections.abc import Iterable

__all__ = ["total"]

START = 0
"""Where counting begins."""


def total(numbers: "Iterable[float]") -> float:
    """The sum.

    # answer is a word that may stand in a docstring
    """
    # answer: a "short" way
    result = START
    for number in numbers:
        result = add(result, number)
    return result
    # end of answer


# --- objects ---------------------------------------------------------


# answer: a helper
def _helper(x: float) -> float:
    return x
# end of answer


class Adder:
    """Adds a constant."""

    def __init__(self, constant: float) -> None:
        """Keep it."""
        # answer
        self.constant = constant
        # end of answer

    # answer: a method
    def doubled(self) -> float:
        return mul(2, self.constant)
    # end of answer

    def __call__(self, x: float) -> float:
        # answer
        return _helper(x) + self.constant
        # end of answer

    name = "adder"


def average(numbers: "list[float]") -> float:
    # answer
    return total(numbers) / len(numbers)
    # end of answer


# --- training ---------------------------------------------------------

PARALLEL = {}
'''


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course of one lesson, not yet built."""
    folder = tmp_path / "lessons" / "07_adding_up"
    folder.mkdir(parents=True)
    (tmp_path / "solutions").mkdir()
    (folder / "lesson.md").write_text(TEXT)
    (folder / "checks").mkdir()
    (folder / "checks" / "__init__.py").write_text("")
    (tmp_path / "solutions" / "adding_up.py").write_text(SOLUTION)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "README.md").write_text(
        f"# A course\n\n{derived.OPENS_TABLE}\n{derived.CLOSES_TABLE}\n\nAfter.\n"
    )
    return tmp_path


@pytest.fixture
def lesson(course: Path) -> Lesson:
    return discover(course)[0]


def quiet(_: str) -> None:
    pass


def sources(path: Path) -> dict[str, str]:
    """The cells of a notebook by id."""
    return {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def build_everything(course: Path) -> None:
    assert command.main(["--root", str(course)]) == 0


def read_from(tmp_path: Path, text: str):
    path = tmp_path / "made_up.py"
    path.write_text(text)
    return read_exercises(path)


# --- cutting a solution into exercises


def test_the_stub_keeps_signature_and_docstring_and_what_stands_before(lesson: Lesson) -> None:
    stub = lesson.exercises["total"].stub
    assert stub.startswith('START = 0\n"""Where counting begins."""\n\n\ndef total(')
    assert '    raise NotImplementedError("about 4 lines: a \\"short\\" way")' in stub.splitlines()
    assert "may stand in a docstring" in stub
    assert "result" not in stub
    assert "import" not in stub
    assert "__all__" not in stub


def test_a_class_keeps_its_methods_and_loses_the_helpers(lesson: Lesson) -> None:
    exercise = lesson.exercises["Adder"]
    assert (
        exercise.stub
        == '''\
class Adder:
    """Adds a constant."""

    def __init__(self, constant: float) -> None:
        """Keep it."""
        raise NotImplementedError("about 1 line, plus about 4 lines in helpers: a helper, a method")

    def __call__(self, x: float) -> float:
        raise NotImplementedError("about 1 line")

    name = "adder"'''
    )
    assert exercise.answer.startswith("def _helper(x: float)")
    assert "def doubled" in exercise.answer
    assert "answer" not in exercise.answer
    assert "---" not in exercise.answer


def test_what_follows_the_last_exercise_is_no_part_of_it(lesson: Lesson) -> None:
    exercises = lesson.exercises
    assert list(exercises) == ["total", "Adder", "average"]
    assert "PARALLEL" not in "".join(e.answer for e in exercises.values())
    assert exercises["average"].stub.endswith('raise NotImplementedError("about 1 line")')


def test_every_stub_can_be_defined_without_the_answers(lesson: Lesson) -> None:
    namespace: dict = {}
    for exercise in lesson.exercises.values():
        exec(exercise.stub, namespace)
    with pytest.raises(NotImplementedError, match="about 4"):
        namespace["total"]([1])


def test_decorators_and_nested_functions_stay(tmp_path: Path) -> None:
    text = """\
@decorated
def outer():
    def inner():
        # answer
        return 1
        # end of answer
    return inner
"""
    expected = """\
@decorated
def outer():
    def inner():
        raise NotImplementedError("about 1 line")
    return inner"""
    assert read_from(tmp_path, text)["outer"].stub == expected


def test_how_long_an_answer_is_is_counted_with_its_helpers(tmp_path: Path) -> None:
    helper = "\n".join(["# answer: parts", "def _part():", '    """Not counted."""', *["    _ = 1"] * 23])
    answer = ['    """Told."""', "    # answer", "    # not counted", "", "    x = (", "        1", "    )"]
    text = "\n".join(
        [helper, "# end of answer", "", "", "def f():", *answer, "    return x", "    # end of answer"]
    )
    stub = read_from(tmp_path, text)["f"].stub
    assert 'raise NotImplementedError("about 4 lines, plus about 25 lines in helpers: parts")' in stub


def test_a_long_announcement_takes_several_lines(tmp_path: Path) -> None:
    note = " ".join(["a long and winding description"] * 5)
    text = f"def f():\n    # answer: {note}\n    return 1\n    # end of answer\n"
    stub = read_from(tmp_path, text)["f"].stub
    assert max(map(len, stub.splitlines())) <= 110
    namespace: dict = {}
    exec(stub, namespace)
    with pytest.raises(NotImplementedError, match=f"^about 1 line: {note}$"):
        namespace["f"]()


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("def f():\n    # answer\n    return 1\n", 2, "not closed"),
        (
            "def f():\n    # answer\n    return 1\n\ndef g():\n    # answer\n    return 1\n",
            2,
            "before line 6",
        ),
        ("def f():\n    return 1\n    # end of answer\n", 3, "without `# answer`"),
        ("def f():\n    # answer\n    return 1\n# end of answer\n", 4, "indent this"),
        ("def f():\n    # answer: about 3 lines\n    return 1\n    # end of answer\n", 2, "is counted"),
        ("def f(:\n", 1, "Python can not read"),
        ("class A:\n    # answer\n    x = 1\n    # end of answer\n", 1, "not Python"),
        ("def _f():\n    # answer\n    return 1\n    # end of answer\n", 1, "public name"),
        ("# --- training ---\ndef f():\n    # answer\n    return 1\n    # end of answer\n", 2, "training"),
    ],
)
def test_a_wrong_marker_is_named_with_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    with pytest.raises(LessonError, match=message) as error:
        read_from(tmp_path, text)
    assert f"made_up.py:{line}: " in str(error.value)


# --- the two notebooks


def test_the_learner_gets_stubs_checks_and_the_broken_program(lesson: Lesson) -> None:
    build.build_lesson(lesson, execute=False, say=quiet)
    cells = sources(lesson.learner_notebook)
    order = list(cells)
    assert cells["exercise-total"] == lesson.exercises["total"].stub
    assert cells["check-total"] == "check(total)"
    assert order.index("check-total") == order.index("exercise-total") + 1
    assert cells["exercise-average"].endswith("# the bug")
    assert "mul(2" not in "".join(cells.values())
    assert "```bash\necho text\n```" in cells.values()


def test_a_check_waits_until_the_next_code_cell_has_been_seen(lesson: Lesson) -> None:
    text = lesson.text_path.read_text()
    lesson.text_path.write_text(text.replace('exercise="Adder"', 'exercise="Adder" tags=["look-first"]'))
    build.build_lesson(lesson, execute=False, say=quiet)
    cells = nbformat.read(lesson.learner_notebook, as_version=4).cells
    code = [cell.id for cell in cells if cell.cell_type == "code"]
    assert code.index("check-Adder") == code.index("exercise-Adder") + 2


def test_the_colab_cell_comes_before_the_setup_cell_and_does_nothing_here(lesson: Lesson) -> None:
    build.build_lesson(lesson, execute=False, say=quiet)
    notebook = nbformat.read(lesson.learner_notebook, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code[0].id == "colab"
    assert code[1].source.startswith("from operator import")
    namespace: dict = {}
    exec(code[0].source, namespace)
    assert set(namespace) == {"__builtins__", "sys"}
    badge = "colab.research.google.com/github/scale-by-hand/scale-by-hand/blob/main/lessons/07_adding_up/"
    assert badge in notebook.cells[0].source


def test_cells_keep_tags_and_say_which_exercise_they_are(lesson: Lesson) -> None:
    build.build_lesson(lesson, execute=False, say=quiet)
    notebook = nbformat.read(lesson.learner_notebook, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    demos = [c for c in notebook.cells if c.metadata.get("tags") == ["demo", "nbval-ignore-output"]]
    assert len(demos) == 2
    assert demos[1].id == f"{demos[0].id}-2"  # the same text twice: two ids
    exercises = [c.metadata.exercise for c in notebook.cells if "exercise" in c.metadata]
    assert exercises == [c.metadata.check for c in notebook.cells if "check" in c.metadata]
    assert exercises == ["total", "Adder", "average"]


FRONT = """\
---
reading: 5
needs: [subtracting]
exercises:
  total: {stars: 1, minutes: 5}
  Adder: {stars: 2, minutes: 10}
  average: {stars: 1, minutes: 5, optional: true}
---

"""


def test_what_a_lesson_takes_stands_below_its_title_and_above_each_exercise(
    course: Path, lesson: Lesson
) -> None:
    (course / "lessons" / "03_subtracting").mkdir()
    lesson.text_path.write_text(FRONT + TEXT)
    lesson = discover(course)[0]
    build.build_lesson(lesson, execute=False, say=quiet)
    cells = nbformat.read(lesson.learner_notebook, as_version=4).cells
    told = (
        "5 minutes to read and 15 to build. Another 5 minutes of exercises may be left out. Lesson 03 comes"
    )
    assert f"*About {told} before.*" in cells[0].source
    above = [a.source for a, b in itertools.pairwise(cells) if "exercise" in b.metadata]
    assert above[1:] == [
        "**Exercise: `Adder`** · ★★☆ · about 10 minutes",
        "**Exercise: `average`** · ★☆☆ · about 5 minutes, and may be left out",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reading: 5\n", "", "stand reading, needs and exercises"),
        ("minutes: 10", "hours: 1", "stand reading, needs and exercises"),
        ("reading: 5", "reading: [", "stand reading, needs and exercises"),
        (
            "  average: {stars: 1, minutes: 5, optional: true}\n",
            "",
            "the exercises, in their order: total, Adder, average",
        ),
    ],
)
def test_a_wrong_front_is_named(lesson: Lesson, old: str, new: str, message: str) -> None:
    lesson.text_path.write_text(FRONT.replace(old, new) + TEXT)
    with pytest.raises(LessonError, match=message):
        build.build_lesson(lesson, execute=False, say=quiet)


def test_a_cell_with_a_title_is_folded(lesson: Lesson) -> None:
    lesson.text_path.write_text(TEXT.replace("from operator", "# @title Set-up\nfrom operator"))
    build.build_lesson(lesson, execute=False, say=quiet)
    code = [cell for cell in nbformat.read(lesson.learner_notebook, as_version=4).cells if cell.source]
    folded = [cell.metadata.get("cellView") for cell in code if cell.cell_type == "code"]
    assert folded[:3] == ["form", "form", None]


@pytest.mark.slow
def test_the_learner_sees_what_needs_no_exercise_and_no_answers(course: Path, lesson: Lesson) -> None:
    shown = """
```python tags=["demo"]
def double(numbers):
    return 2 * total(numbers)


print("nothing is asked for")
```

```python tags=["demo"]
print("plain")
```

```python tags=["demo"]
print(double([1]))
```

```python tags=["demo", "answer"]
print("the truth")
```
"""
    lesson.text_path.write_text(TEXT + shown)
    build_everything(course)
    cells = nbformat.read(lesson.learner_notebook, as_version=4).cells
    outputs = {cell.source: cell.outputs for cell in cells if cell.cell_type == "code" and cell.outputs}
    assert list(outputs) == ['print("plain")']
    assert outputs['print("plain")'][0].text == "plain\n"
    assert command.main(["--root", str(course), "--check"]) == 0


@pytest.mark.slow
def test_the_solved_notebook_is_executed_and_the_same_twice(course: Path, lesson: Lesson) -> None:
    build_everything(course)
    first = {p: p.read_bytes() for p in (lesson.learner_notebook, lesson.solved_notebook)}
    notebook = nbformat.read(lesson.solved_notebook, as_version=4)
    cells = {cell.id: cell for cell in notebook.cells}
    assert build.report_of(cells["check-Adder"]) == "Adder passed"
    assert "the bug" not in cells["exercise-average"].source
    assert set(notebook.metadata) == {"kernelspec", "language_info", "scale_by_hand"}
    assert command.main(["--root", str(course), "--force"]) == 0
    assert {path: path.read_bytes() for path in first} == first


@pytest.mark.slow
def test_only_a_changed_lesson_is_executed_again(course: Path, lesson: Lesson, capsys) -> None:
    build_everything(course)
    capsys.readouterr()
    build_everything(course)
    assert "solved notebook up to date" in capsys.readouterr().out
    with lesson.checks_path.open("a") as file:
        file.write("# changed\n")
    build_everything(course)
    assert "executing the solved notebook (checks/__init__.py changed since" in capsys.readouterr().out


@pytest.mark.slow
def test_new_prose_keeps_the_outputs(course: Path, lesson: Lesson, capsys) -> None:
    build_everything(course)
    before = nbformat.read(lesson.solved_notebook, as_version=4)
    lesson.text_path.write_text(TEXT.replace("## Build", "## Build it\n\nNew words."))
    capsys.readouterr()
    build_everything(course)
    assert "solved notebook has new text, the same code" in capsys.readouterr().out
    after = nbformat.read(lesson.solved_notebook, as_version=4)
    assert "New words." in "".join(cell.source for cell in after.cells)
    code = [[cell for cell in nb.cells if cell.cell_type == "code"] for nb in (before, after)]
    assert code[0] == code[1]
    assert command.main(["--root", str(course), "--check"]) == 0


@pytest.mark.slow
def test_a_failing_solved_cell_is_named_with_its_line(lesson: Lesson) -> None:
    lesson.text_path.write_text(TEXT.replace("Adder(1)(2), START", "1 / 0", 1))
    line = line_of(TEXT, "print(total")
    with pytest.raises(LessonError, match=rf"lesson\.md:{line}: [\s\S]*ZeroDivisionError"):
        build.build_lesson(lesson, say=quiet)
    assert not lesson.solved_notebook.exists()


@pytest.mark.slow
def test_a_check_that_did_not_pass_is_not_shown_as_solved(lesson: Lesson) -> None:
    lesson.text_path.write_text(TEXT.replace(" passed", ": grader error"))
    line = line_of(lesson.text_path.read_text(), 'exercise="total"')
    with pytest.raises(LessonError, match=rf"lesson\.md:{line}: total did not pass: total: grader error"):
        build.build_lesson(lesson, say=quiet)
    assert not lesson.solved_notebook.exists()


def test_somebodys_work_is_never_overwritten(lesson: Lesson) -> None:
    build.build_lesson(lesson, execute=False, say=quiet)
    notebook = nbformat.read(lesson.learner_notebook, as_version=4)
    notebook.metadata["language_info"] = {"name": "python", "version": "3.12"}  # as JupyterLab does
    nbformat.write(notebook, lesson.learner_notebook)
    build.build_lesson(lesson, execute=False, say=quiet)
    notebook.cells[5].source = "def total(numbers): return sum(numbers)"
    nbformat.write(notebook, lesson.learner_notebook)
    with pytest.raises(build.EditedError, match="left alone"):
        build.build_lesson(lesson, execute=False, say=quiet)
    assert "return sum(numbers)" in lesson.learner_notebook.read_text()
    build.build_lesson(lesson, execute=False, force=True, say=quiet)
    assert "return sum(numbers)" not in lesson.learner_notebook.read_text()


# --- errors between lesson.md and the solution


def test_an_exercise_without_an_answer_is_named(lesson: Lesson) -> None:
    lesson.solution_path.write_text(SOLUTION.replace("def average", "def mean"))
    line = line_of(TEXT, '```python exercise="average"')
    with pytest.raises(LessonError, match=rf"lesson\.md:{line}: .*average.* has no answer"):
        build.build_lesson(lesson, say=quiet)


def test_an_exercise_without_a_cell_is_named(lesson: Lesson) -> None:
    lesson.text_path.write_text(TEXT.replace('```python exercise="Adder"\n```\n', ""))
    line = line_of(SOLUTION, "class Adder")
    with pytest.raises(LessonError, match=rf"adding_up\.py:{line}: Adder has no cell"):
        build.build_lesson(lesson, say=quiet)


def test_an_exercise_that_stands_twice_is_named(lesson: Lesson) -> None:
    lesson.text_path.write_text(TEXT + '\n```python exercise="total"\n```\n')
    line = line_of(TEXT, '```python exercise="total"')
    with pytest.raises(LessonError, match=rf"lesson\.md:{line}: .* twice"):
        build.build_lesson(lesson, say=quiet)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def average(numbers):\n    return", "def mean(numbers):\n    return", "does not define average"),
        ("    return total(numbers)  #", "    return total(  #", "can not read the program of average"),
        ("```python\nfrom", '```python tags=["demo"]\nfrom', "must be the setup cell"),
    ],
)
def test_a_wrong_fence_is_named(lesson: Lesson, old: str, new: str, message: str) -> None:
    assert old in TEXT
    lesson.text_path.write_text(TEXT.replace(old, new))
    with pytest.raises(LessonError, match=message):
        build.build_lesson(lesson, say=quiet)


def test_nothing_is_hidden_from_who_repairs_a_broken_program(lesson: Lesson) -> None:
    lesson.solution_path.write_text(SOLUTION.replace("def average", "SCALE = 2\n\n\ndef average"))
    with pytest.raises(LessonError, match="would not see the code"):
        build.build_lesson(lesson, say=quiet)


def test_a_missing_solution_is_named(lesson: Lesson) -> None:
    lesson.solution_path.unlink()
    with pytest.raises(LessonError, match=r"adding_up\.py:1: missing"):
        build.build_lesson(lesson, say=quiet)


def test_the_command_says_what_failed_and_fails(course: Path, capsys) -> None:
    (course / "solutions" / "adding_up.py").unlink()
    assert command.main(["--root", str(course), "--no-execute"]) == 1
    assert "adding_up.py:1: missing" in capsys.readouterr().err
    assert command.main(["--root", str(course), "99"]) == 1
    assert "no lesson '99'; there are: 07 adding_up" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["7", "07", "adding_up", "07_adding_up"])
def test_a_lesson_is_chosen_by_number_or_name(course: Path, word: str) -> None:
    assert [lesson.slug for lesson in command.choose(discover(course), [word])] == ["adding_up"]


# --- what is stale


def test_the_readme_has_a_row_for_each_lesson(course: Path, lesson: Lesson) -> None:
    text = derived.readme_text(course, [lesson])
    assert text.endswith("\n\nAfter.\n")
    row = next(line for line in text.splitlines() if line.startswith("| 07 |"))
    assert "**[Adding up](lessons/07_adding_up/adding_up.ipynb)**" in row
    assert "You add numbers, e.g. two of them. |" in row
    assert "| 3 |" in row


def test_the_readme_says_how_long_a_lesson_takes_and_what_is_planned(course: Path, lesson: Lesson) -> None:
    lesson.text_path.write_text(FRONT + TEXT)
    (course / "lessons" / "planned.yaml").write_text('"08": [Multiplying, "Many at once."]\n')
    lines = derived.readme_text(course, [Lesson(course, "07", "adding_up")]).splitlines()
    assert "| 3 | ¼ h, and ¼ h more<br>★★☆ |" in next(line for line in lines if line.startswith("| 07 |"))
    assert lines[lines.index(next(line for line in lines if line.startswith("| 07 |"))) + 1] == (
        "| 08 | *Multiplying*<br>*Many at once.* | | *planned* | |"
    )


def test_a_readme_without_the_markers_is_an_error(course: Path, lesson: Lesson) -> None:
    (course / "README.md").write_text("# A course\n")
    with pytest.raises(ValueError, match="once each"):
        derived.readme_text(course, [lesson])


@pytest.mark.slow
def test_each_derived_file_is_known_to_be_stale(course: Path, lesson: Lesson, capsys) -> None:
    build_everything(course)
    assert command.main(["--root", str(course), "--check"]) == 0
    before = {path: path.read_text() for path in course.rglob("*") if path.is_file()}

    def stale_after(path: Path, old: str, new: str) -> dict[str, str]:
        assert old in before[path]
        path.write_text(before[path].replace(old, new, 1))
        stale = {one.path.name: one.why for one in build.find_stale(course, discover(course))}
        assert command.main(["--root", str(course), "--check"]) == 1
        assert "run `make lessons`" in capsys.readouterr().out
        path.write_text(before[path])
        return stale

    def changed(name: str) -> str:
        return f"{name} changed since it was executed"

    notebook = "adding_up.ipynb"
    text, checks, solution = lesson.text_path, lesson.checks_path, lesson.solution_path
    assert stale_after(text, "operator import add, mul", "operator import mul, add") == {
        notebook: "code of lesson.md changed since it was executed"
    }
    cells = "its cells are not what its sources say"
    assert stale_after(text, "# Adding up", "# Adding") == {
        notebook: cells,
        "README.md": "its table of lessons is not today's",
    }
    checks.write_text("# changed\n")
    assert [one.why for one in build.find_stale(course, discover(course))] == [changed("checks/__init__.py")]
    checks.write_text("from lessons_shared import pairs\n")
    shared = checks.parents[2] / "shared" / "pairs.py"
    shared.parent.mkdir()
    shared.write_text("")
    assert [one.why for one in build.find_stale(course, discover(course))] == [
        changed("checks/__init__.py, shared/pairs.py")
    ]
    shutil.rmtree(shared.parent)
    page = shared.parents[1] / "page"
    page.mkdir()
    (page / "curves.py").write_text("from lessons.page.look import figure\n")
    (page / "look.py").write_text("")
    (page / "tap.py").write_text("")
    checks.write_text("from lessons.page.curves import draw_differences\n")
    assert [one.why for one in build.find_stale(course, discover(course))] == [
        changed("checks/__init__.py, page/curves.py, page/look.py")
    ]
    shutil.rmtree(page)
    checks.write_text(before[checks])
    assert stale_after(solution, "START", "BEGIN") == {notebook: changed(solution.name)}
    hand = json.dumps("the bug")[1:-1]
    assert stale_after(lesson.learner_notebook, hand, "my edit") == {notebook: "edited by hand"}
    assert stale_after(lesson.solved_notebook, "_helper", "_other") == {notebook: cells}
    assert "README.md" in stale_after(course / "README.md", "You add", "We add")
    assert "environment.yml" in stale_after(course / "environment.yml", "pip", "pipx")
    assert "environment.yml" in stale_after(course / "pyproject.toml", ">=3.11", ">=3.12")
    lesson.solved_notebook.unlink()
    assert [str(one) for one in build.find_stale(course, discover(course))] == [
        f"{lesson.solved_notebook}: missing"
    ]


def test_ids_and_text_come_from_the_content_alone(course: Path, lesson: Lesson) -> None:
    repository = derived.read_repository(course)
    first = notebooks.as_text(notebooks.learner_notebook(lesson, repository))
    again = notebooks.as_text(notebooks.learner_notebook(discover(course)[0], repository))
    assert first == again
    lesson.text_path.write_text(TEXT.replace("## Build", "New text.\n\n## Build"))
    moved = notebooks.learner_notebook(discover(course)[0], repository)
    before = {c["id"] for c in json.loads(first)["cells"]}
    assert len({cell.id for cell in moved.cells} - before) == 1  # only the text that changed
