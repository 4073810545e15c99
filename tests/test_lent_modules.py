"""A submission may import what its lesson's text imports of earlier solutions, and nothing else of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from grader.judging.course import Lesson
from grader.judging.judge import Settings, grade_exercise
from grader.judging.submission import read_submission
from grader.judging.verdicts import CheckReport, Verdict
from grader.ranks.launcher import ROOT, Launcher
from tests.attempts import EXERCISE, FORWARD, LESSON, twisted

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
