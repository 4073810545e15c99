"""A submission may import what its lesson's text imports of earlier solutions, and nothing else of them."""

import pathlib
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

from grader.judging.course import Lesson, lessons
from grader.judging.judge import Settings, grade_exercise
from grader.judging.submission import read_submission
from grader.judging.verdicts import CheckReport, Verdict
from grader.ranks.launcher import ROOT, Code, Launcher, Limits
from tests.attempts import EXERCISE, FORWARD, LESSON, twisted

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not import tests
LENT = (
    ("solutions.early", "def negate(x):\n    return -x\n"),
    ("solutions.late", "from solutions.early import negate\n\ndef twice(x):\n    return negate(negate(x))\n"),
)


def look(folder: Path, source: str, launcher: Launcher) -> CheckReport:
    path = folder / "submission.py"
    path.write_text(source)
    submission = read_submission(path)
    code = replace(submission.code(), lent=LENT)
    (report,) = grade_exercise(
        EXERCISE, LESSON.name, code, launcher, Settings(ranks=(2,)), submission.locate, (FORWARD,)
    ).checks
    return report


@pytest.fixture(params=["launcher", "isolated"])
def either(request: pytest.FixtureRequest) -> Launcher:
    return request.getfixturevalue(request.param)


def test_what_is_lent_works(tmp_path: Path, either: Launcher) -> None:
    source = "from solutions.late import twice\n" + twisted(returns="twice(Copy.apply(x, group))")
    report = look(tmp_path, source, either)
    assert report.verdict == Verdict.PASSED, report.text


def test_what_is_not_lent_is_refused(tmp_path: Path, either: Launcher) -> None:
    report = look(tmp_path, "import solutions.tensor_parallel\n" + twisted(), either)
    assert report.verdict != Verdict.PASSED
    assert "the course's own solution" in report.text
    assert "__pycache__" not in report.text


def test_an_error_inside_is_told_with_the_learners_line(tmp_path: Path, either: Launcher) -> None:
    source = "from solutions.early import negate\n" + twisted("negate('text')")
    report = look(tmp_path, source, either)
    assert report.verdict == Verdict.CRASHED
    assert "negate('text')" in report.text


def test_a_lesson_lends_what_its_text_imports(tmp_path: Path) -> None:
    folder = tmp_path / "99_late"
    folder.mkdir()
    (folder / "lesson.md").write_text(
        "# Late\n\n```python\nfrom solutions.tensor_parallel import copy_to_group\n```\n"
    )
    ((name, source),) = Lesson(folder).lent
    assert name == "solutions.tensor_parallel"
    reference = (ROOT / "solutions" / "tensor_parallel.py").read_text()
    assert reference.startswith(source)
    assert "PARALLEL" not in source


FRESH = ("/tmp", "/dev/shm")


def leave(rank, name: str):
    for folder in FRESH:
        pathlib.Path(folder, name).write_text("an answer")


def find(rank, name: str):
    return [folder for folder in FRESH if pathlib.Path(folder, name).exists()]


def test_nothing_reaches_ranks_that_are_lent_something_else(isolated: Launcher) -> None:
    """A later lesson's text imports an earlier lesson's answers; both may be in one file."""
    name, plain = "what-was-lent", Code(cells=(("cell 1", ""),))
    code = replace(plain, lent=LENT)
    isolated.run(leave, code, [(name,)], limits=Limits())
    for other, found in ((code, list(FRESH)), (plain, [])):
        assert isolated.run(find, other, [(name,)], limits=Limits()).ranks[0].result == found


def test_lessons_that_are_lent_something_hold_no_answers_that_others_are_lent() -> None:
    """Their ranks share a server (see Launcher): a lesson that breaks this needs one of its own."""
    lent = {lesson.solution.stem: {name for name, _ in lesson.lent} for lesson in lessons() if lesson.lent}
    assert lent
    for names in lent.values():
        assert not names & {f"solutions.{other}" for other in lent}
