"""Every mistake in the bank is rejected, by the check that names it, with the words that it promises."""

from collections import Counter

import pytest

from grader.judging.course import lessons
from grader.judging.verdicts import Verdict
from tests.bank import Mistake, judge, mistakes

BANK = mistakes()
EXERCISES = [(lesson, exercise) for lesson in lessons() for exercise in lesson.exercises.values()]


@pytest.mark.parametrize("mistake", BANK, ids=lambda m: f"{m.lesson.slug}-{m.exercise}-{m.name}")
def test_mistake_is_rejected_by_the_check_that_names_it(mistake: Mistake) -> None:
    exercise = mistake.lesson.exercises[mistake.exercise]
    assert mistake.check in [check.name for check in exercise.checks], f"no check is called {mistake.check}"
    report = judge(mistake.submission(), mistake.lesson, exercise, (mistake.check,))
    rejected = [
        c for c in report.checks if c.verdict not in (Verdict.PASSED, Verdict.SKIPPED, Verdict.GRADER_ERROR)
    ]
    text = "\n".join(check.text for check in report.checks)
    assert [check.name for check in rejected] == [mistake.check], f"survived: {text}"
    # What the check holds is said whether it fails or not: the promise is about the rest.
    said = "\n".join(rejected[0].said)
    assert mistake.says in said, f"{mistake.says!r} is not in:\n{said}"


@pytest.mark.parametrize(("lesson", "exercise"), EXERCISES, ids=lambda x: x.name)
def test_bank_is_rich(lesson, exercise) -> None:
    mine = [m for m in BANK if m.lesson == lesson and m.exercise == exercise.name]
    assert len(mine) >= 6, f"{exercise.name} has {len(mine)} mistakes in the bank: at least six"
    tags = Counter(m.tag for m in mine)
    assert tags["mechanism"], f"{exercise.name}: no mistake with the right numbers by the wrong mechanism"
    assert tags["special_case"], f"{exercise.name}: no mistake that is right in a special case only"


def test_names_are_unique() -> None:
    twice = [name for name, count in Counter((m.exercise, m.name) for m in BANK).items() if count > 1]
    assert not twice
