"""Every mistake in the bank is rejected, by the check that names it, with the words that it promises."""

from collections.abc import Iterator

import pytest

from grader.judging.verdicts import ExerciseReport, Verdict
from grader.ranks.launcher import Launcher, shared_launcher
from tests.bank import BankLauncher, Mistake, judge, mistakes

BANK = mistakes()


@pytest.fixture(scope="module")
def bank_launcher() -> Iterator[BankLauncher]:
    launcher = BankLauncher()
    yield launcher
    launcher.close()


@pytest.mark.parametrize("mistake", BANK, ids=lambda m: f"{m.lesson.slug}-{m.exercise}-{m.name}")
def test_mistake_is_rejected_by_the_check_that_names_it(
    mistake: Mistake, bank_launcher: BankLauncher
) -> None:
    """On ranks that others had before it; what is wrong there is tried again on ranks of its own."""
    exercise = mistake.lesson.exercises[mistake.exercise]
    assert mistake.check in [check.name for check in exercise.checks], f"no check is called {mistake.check}"
    wrong = differs(mistake, judge_mistake(mistake, bank_launcher))
    assert not (wrong and differs(mistake, judge_mistake(mistake, shared_launcher()))), wrong


def judge_mistake(mistake: Mistake, launcher: Launcher) -> ExerciseReport:
    exercise = mistake.lesson.exercises[mistake.exercise]
    return judge(mistake.submission(), mistake.lesson, exercise, (mistake.check,), launcher=launcher)


def differs(mistake: Mistake, report: ExerciseReport) -> str:
    """What a report should say of a mistake and does not, as a sentence; "" if it does."""
    rejected = [
        c for c in report.checks if c.verdict not in (Verdict.PASSED, Verdict.SKIPPED, Verdict.GRADER_ERROR)
    ]
    if [check.name for check in rejected] != [mistake.check]:
        return "survived: " + "\n".join(check.text for check in report.checks)
    # What the check holds is said whether it fails or not: the promise is about the rest.
    said = "\n".join(rejected[0].said)
    return "" if mistake.says in said else f"{mistake.says!r} is not in:\n{said}"
