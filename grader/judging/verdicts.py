"""The words of a verdict, and how a check ends with one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """How a check, or a whole exercise, came out."""

    PASSED = "passed"
    WRONG = "wrong"
    NOT_ATTEMPTED = "not attempted"
    CRASHED = "crashed"
    HUNG = "hung"
    OUT_OF_MEMORY = "out of memory"
    REFUSED = "refused"
    UNREADABLE = "unreadable"
    """What was handed in is no notebook and no Python file, or nothing in it can be graded."""
    GRADER_ERROR = "grader error"
    SKIPPED = "skipped"
    """Not looked at: an earlier check ended the run that this one needs, or the machine can not show it."""


class CheckEnded(Exception):
    """Ends a check with anything but a pass.

    Args:
        verdict: how it ended.
        message: one sentence: what is wrong, on which rank, expected and actual.
        cause: the likely cause.
        help: the next step: it follows from the cause, or from what the message says.
        asked: what the check asks for, where nothing says which step is the next.
        sure: whether more ranks would tell nothing more of the cause.
        observed: whether it is of what was seen beside the numbers: bytes alive, messages, waiting.
        details: lines such as where every rank stood.
    """

    def __init__(
        self,
        verdict: Verdict,
        message: str,
        cause: str = "",
        help: str = "",
        details: tuple[str, ...] = (),
        asked: str = "",
        sure: bool = True,
        observed: bool = False,
    ) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.message = readable(message)
        self.cause = readable(cause)
        self.help = help
        self.asked = asked
        self.sure = sure
        self.observed = observed
        self.details = tuple(map(readable, details))


def readable(text: str, limit: int = 1000) -> str:
    """Text that may hold what a submission wrote, without control characters, and not endless."""
    short = text if len(text) <= limit else f"{text[:limit]} …"
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in short
    )


@dataclass(frozen=True)
class CheckReport:
    """One check of one exercise."""

    name: str
    sentence: str
    """What holds when it passes: the check's docstring."""
    verdict: Verdict
    where: str = ""
    """Such as "with 4 ranks"; "" where it passed everywhere, or where no ranks are told apart."""
    message: str = ""
    cause: str = ""
    help: str = ""
    details: tuple[str, ...] = ()
    asked: str = ""
    """What is asked for, where no next step follows from a cause."""
    optional: bool = False
    """Whether it is an extra, without which the exercise passes."""

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against it: passed, or not looked at."""
        return self.verdict in (Verdict.PASSED, Verdict.SKIPPED)

    @property
    def said(self) -> tuple[str, ...]:
        """What is said of a failure, beside the sentence that does not hold."""
        return tuple(filter(None, (self.message, self.cause, self.help, self.asked, *self.details)))

    @property
    def explains(self) -> bool:
        """Whether more is said than that numbers differ."""
        return bool(self.cause or self.help) or self.verdict != Verdict.WRONG

    @property
    def text(self) -> str:
        """Everything that the learner reads of it."""
        return "\n".join([self.sentence, self.where, *self.said])


@dataclass(frozen=True)
class ExerciseReport:
    """One exercise."""

    lesson: str
    name: str
    verdict: Verdict
    checks: tuple[CheckReport, ...] = ()
    message: str = ""
    """Why there are no checks, where there are none."""
    seconds: float = 0.0
    seed: int | None = None
    """What its inputs were drawn with; None where nothing was drawn."""
    notes: tuple[str, ...] = field(default=())
    """What was left out, such as world sizes that this machine has no GPUs for."""

    @property
    def failed(self) -> list[CheckReport]:
        """Its checks that do not hold; what is optional is in `missed`."""
        return [check for check in self.checks if not (check.holds or check.optional)]

    @property
    def missed(self) -> list[CheckReport]:
        """Its optional checks that do not hold."""
        return [check for check in self.checks if check.optional and not check.holds]


def combine(reports: Sequence[CheckReport]) -> Verdict:
    """An exercise's verdict; of an optional check it says only that the grader failed.

    Of several kinds of failure it is the first failing check's, which is the one that is told.
    """
    verdicts = [r.verdict for r in reports if not r.optional or r.verdict == Verdict.GRADER_ERROR]
    failed = [verdict for verdict in verdicts if verdict not in (Verdict.PASSED, Verdict.SKIPPED)]
    for verdict in (Verdict.GRADER_ERROR, Verdict.REFUSED):
        if verdict in failed:
            return verdict
    if failed:
        stubs = set(failed) == {Verdict.NOT_ATTEMPTED, Verdict.WRONG}  # a stub inside makes the rest wrong
        return Verdict.NOT_ATTEMPTED if stubs else failed[0]
    return Verdict.PASSED if Verdict.PASSED in verdicts else Verdict.SKIPPED
