"""Checks of the fewest tokens for which computing hides the wire: a quotient of speeds, rounded up."""

from collections.abc import Callable

from grader.checks import Answers, Slips, Trial, compare_answers, show


def is_off_by_rounding(answers: Answers) -> bool:
    """Wrong by one token, and only for some calls: divisions that were rounded."""
    pairs = list(zip(answers.given, answers.true, strict=True))
    if not all(isinstance(given, int | float) and abs(given - true) <= 1 for given, true in pairs):
        return False
    off = [given != true for given, true in pairs]
    return any(off) and not all(off)


ROUNDS = "each division rounds: a quotient that is whole on paper comes out a little above or below it"


def require_equal_times(
    trial: Trial, answers: Answers, truth: Callable[..., int], slips: Slips, hidden: str, cause: str
) -> None:
    """Where both times are equal for whole tokens, that is the answer: not rounded, and not one more.

    Args:
        truth: of a call, the answer.
        hidden: what is hidden where the times are equal.
        cause: why an answer lies one beside, for some of the calls.
    """
    help = "Solve for t on paper, and divide once."
    if is_off_by_rounding(answers):
        i = next(i for i, given in enumerate(answers.given) if given != answers.true[i])
        trial.wrong(
            f"{answers.asked(answers.calls[i])} is {show(answers.given[i])}, and {answers.true[i]:,} tokens "
            "take exactly as long",
            cause=cause,
            asked=help,
        )

    def known(*call: float) -> dict[str, float]:
        one_more = f"one token more than is needed: where the times are equal, {hidden} is hidden"
        return {one_more: truth(*call) + 1, **slips(*call)}

    compare_answers(trial, answers, slips=known, help=help)
