"""The `grade` command: what it prints, what it writes, and its exit status."""

import json
import platform
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from grader.cli import grade
from grader.judging.catalogue import Entry, catalogue
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
    assert data["verdict"] == "passed" and data["message"] == ""
    assert data["exercises"][0]["checks"][0]["verdict"] == "passed"
    assert data["isolated"] == ("isolated run" in result.output)
    assert data["submissions"] == [{"path": str(file), "sha256": sha256(file.read_bytes()).hexdigest()}]
    assert data["seed"] == data["exercises"][0]["seed"]
    assert f"--seed {data['seed']} draws the same again" in result.output
    assert data["machine"]["python"] == platform.python_version()
    assert data["started"] <= data["ended"]


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


def test_only_the_first_failing_check_gives_advice(file: Path) -> None:
    file.write_text("def shard_batch(tensor, group):\n    return tensor\n")
    output = run(file, "--only", "shard_batch", "--ranks", "2").output
    assert output.count("✗") > 2
    assert output.count("next step: ") == 1
    assert "only their titles" in output


def test_broken_checks_are_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "99_broken" / "checks").mkdir(parents=True)
    (tmp_path / "99_broken" / "checks" / "__init__.py").write_text("x = (\n")
    monkeypatch.setattr("grader.work.lessons", lambda: (Lesson(tmp_path / "99_broken"),))
    result = run("solutions", "--only", "shard_batch")
    assert result.exit_code == 2
    sentence = "grade: the checks of 99_broken can not be loaded: SyntaxError: '(' was never closed"
    assert result.output.startswith(sentence)


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


def test_the_catalogue_is_what_the_checks_declare() -> None:
    exercises = [(lesson.name, exercise) for lesson in lessons() for exercise in lesson.exercises.values()]
    assert list(catalogue().values()) == [
        Entry(lesson, exercise.name, exercise.hints, exercise.optional, len(exercise.checks))
        for lesson, exercise in exercises
    ]


@pytest.mark.parametrize("arguments", [["list"], ["hint", "shard_batch"], ["--help"]])
def test_a_list_or_a_hint_needs_no_torch(arguments: list[str]) -> None:
    look = (
        "import sys\nfrom grader.cli import grade\n"
        f"try: grade({arguments})\nfinally: assert not {{'torch', 'nbformat'}} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_tells_the_exit_status() -> None:
    assert "Exit status: 0" in run("--help").output
    assert "--watch" in run("run", "--help").output
