"""The `grade` command: what it prints, what it writes, and its exit status."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from grader.__main__ import main
from grader.cli import grade
from grader.judging.course import Lesson, lessons
from grader.judging.submission import from_cells
from grader.ranks.launcher import ROOT
from tests.attempts import CORRECT

QUICK = ["--only", "copy_to_group", "--ranks", "1"]
RIGHT = f"from grader import check\n{CORRECT}\ncheck(copy_to_group)\n"
WRONG = "def copy_to_group(x, group):\n    return 2 * x\n"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(grade, [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(RIGHT)
    return path


def test_a_right_file_passes(file: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = run(file, *QUICK, "--json", report)
    assert result.exit_code == 0, result.output
    assert "✓ copy_to_group: passed" in result.output and "1 of 1 exercises passed" in result.output
    assert "\x1b" not in result.output
    data = json.loads(report.read_text())
    assert (data["passed"], data["total"]) == (1, 1)
    assert data["exercises"][0]["checks"][0]["verdict"] == "passed"
    assert ("isolated" in data["score_is"]) or data["isolated"] in (True, False)


def test_a_wrong_file_is_told_what_is_wrong(file: Path) -> None:
    file.write_text(WRONG)
    result = run(file, *QUICK)
    assert result.exit_code == 1
    assert "✗ The forward returns x as it is." in result.output
    assert "every element is 2 times what it should be" in result.output


def test_a_notebook_is_graded_like_a_file(tmp_path: Path) -> None:
    import nbformat

    path = tmp_path / "mine.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in ("%matplotlib inline\n1 / 0", RIGHT)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    assert run(path, *QUICK).exit_code == 0


def test_the_learners_own_notebooks_are_the_default() -> None:
    result = run("--only", "copy_to_group")
    assert result.exit_code == 1
    assert "not attempted" in result.output and "0 of 1 exercises passed" in result.output


def test_a_lesson_may_be_named_in_several_ways() -> None:
    lesson = lessons()[0]
    for path in (lesson.directory, lesson.name, lesson.slug):
        result = run(path)
        assert result.exit_code == 1
        assert "not attempted" in result.output


def test_a_place_is_the_learners_own_wherever_the_course_lies(tmp_path: Path) -> None:
    """A submission's folder may hold the course, or the environment that it runs in."""
    import torch.distributed.distributed_c10d as installed

    for file, text in ((installed.__file__, ""), (str(ROOT / "grader" / "beside" / "worker.py"), "")):
        above = from_cells(Path("/mine.py"), ())
        assert above.locate(file, 1) == text
    helper = str(tmp_path / "helper.py")
    assert from_cells(tmp_path / "mine.py", ()).locate(helper, 3) == "helper.py, line 3"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.py", None, "there is no such file"),
        ("broken.py", b"def f(:\n", "line 1"),
        ("empty.py", b"", "there is no exercise in it"),
        ("other.py", b"x = 1\n", "there is no exercise in it"),
        ("bytes.py", b"\xff\xfe\x00", "not text"),
        ("nobook.ipynb", b"{}", "is not a notebook"),
        ("nobook.ipynb", b"not json", "is not a notebook"),
        ("notes.txt", b"hello", "expected a notebook"),
    ],
)
def test_what_can_not_be_graded_is_one_sentence(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    result = run(path)
    assert result.exit_code == 2
    assert words in result.output
    assert result.output.strip().count("\n") == 0 and "Traceback" not in result.output


def test_only_the_first_failing_check_gives_advice(file: Path) -> None:
    file.write_text("def shard_batch(tensor, group):\n    return tensor\n")
    output = run(file, "--only", "shard_batch", "--ranks", "2").output
    assert output.count("✗") > 2
    assert output.count("next step: ") == 1
    assert "begin with the first ✗" in output


def test_broken_checks_are_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "99_broken"
    folder.mkdir()
    (folder / "checks").mkdir()
    (folder / "checks" / "__init__.py").write_text("x = (\n")
    monkeypatch.setattr("grader.cli.lessons", lambda: (Lesson(folder),))
    monkeypatch.setattr("sys.argv", ["grade", "list"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    sentence = "grade: the checks of 99_broken can not be loaded: SyntaxError: '(' was never closed"
    assert capsys.readouterr().err.startswith(sentence)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "copy_to_grup"], "did you mean copy_to_group?"),
        (["--ranks", "two"], "give numbers of ranks"),
        (["--ranks", "0"], "give numbers of ranks"),
        (["hint", "nothing_like_it"], "there is no exercise"),
        (["hint", "copy_to_group", "99"], "hints"),
    ],
)
def test_bad_words_are_explained(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_list_and_hint() -> None:
    result = run("list")
    assert result.exit_code == 0
    for lesson in lessons():
        assert lesson.name in result.output
        for exercise in lesson.exercises.values():
            assert exercise.name in result.output
            assert exercise.hints, f"{exercise.name} has no hint"
            assert run("hint", exercise.name).exit_code == 0


def test_help_tells_the_exit_status() -> None:
    assert "Exit status: 0" in run("--help").output
    assert "--watch" in run("run", "--help").output
