"""The reference passes, so do correct implementations of another structure; stubs are not attempted."""

from pathlib import Path

import pytest

from grader.judging.course import Lesson, lessons
from grader.judging.judge import Settings, grade_submission
from grader.judging.submission import read_submission
from grader.judging.verdicts import Verdict
from grader.ranks.launcher import shared_launcher
from grader.work import find_work
from tests.bank import judge

ALTERNATIVES = sorted((Path(__file__).parent / "alternatives").glob("*.py"))
LESSONS = lessons()


def failures(reports) -> str:
    return "\n".join(
        f"{report.name}: {check.text}"
        for report in reports
        for check in report.checks
        if check.verdict != Verdict.PASSED
    )


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.slug)
def test_reference_passes(lesson: Lesson) -> None:
    """The first exercise, as `grade solutions` runs it; the solved notebooks' own checks grade them all."""
    exercise = next(iter(lesson.exercises.values()))
    submission = read_submission(lesson.solution, module=f"solutions.{lesson.slug}", trusted=True)
    report = judge(submission, lesson, exercise)
    assert report.verdict == Verdict.PASSED, failures([report])
    assert {check.verdict for check in report.checks} == {Verdict.PASSED}, failures([report])


@pytest.mark.slow
@pytest.mark.parametrize("path", ALTERNATIVES, ids=lambda path: path.stem)
def test_other_structures_pass(path: Path) -> None:
    """Not isolated and not trusted: graded as a learner's file is, but for four ranks, which take longest."""
    ((submission, lesson),) = find_work(str(path), ())
    names = tuple(name for name in lesson.exercises if name in submission.definitions)
    launcher, settings = shared_launcher(), Settings(ranks=(1, 2, 3), keep_ranks=True)
    reports = grade_submission(submission, lesson, launcher, settings, names)
    launcher.dismiss()
    assert reports
    assert {report.verdict for report in reports} == {Verdict.PASSED}, failures(reports)


@pytest.mark.parametrize(
    "path",
    [p for p in ALTERNATIVES if p.stem.startswith(("context_parallel", "collectives"))],
    ids=lambda path: path.stem,
)
def test_other_rings_pass_on_four_ranks(path: Path) -> None:
    """What a ring holds is looked at where there are four ranks, and chunks may differ by more than one."""
    ((submission, lesson),) = find_work(str(path), ())
    rings = ("ring_attention", "zigzag_ring_attention", "ring_all_reduce")
    names = tuple(name for name in rings if name in submission.definitions)
    reports = grade_submission(submission, lesson, shared_launcher(), Settings(ranks=(4,)), names)
    assert {report.verdict for report in reports} == {Verdict.PASSED}, failures(reports)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [p for p in ALTERNATIVES if "def hybrid_shard" in p.read_text()], ids=lambda path: path.stem
)
def test_other_machines_pass_on_four_ranks(path: Path) -> None:
    """Two machines of two ranks, where shards of another size cross, need four."""
    ((submission, lesson),) = find_work(str(path), ())
    reports = grade_submission(submission, lesson, shared_launcher(), Settings(ranks=(4,)), ("hybrid_shard",))
    assert {report.verdict for report in reports} == {Verdict.PASSED}, failures(reports)


def test_every_lesson_has_another_structure() -> None:
    slugs = {path.stem.partition("__")[0] for path in ALTERNATIVES}
    assert {lesson.slug for lesson in LESSONS} <= slugs


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.slug)
def test_untouched_notebook_is_not_attempted(lesson: Lesson) -> None:
    reports = grade_submission(read_submission(lesson.notebook), lesson, shared_launcher(), Settings())
    assert [report.name for report in reports] == [
        e.name for e in lesson.exercises.values() if not e.optional
    ]
    assert {report.verdict for report in reports} == {Verdict.NOT_ATTEMPTED}
