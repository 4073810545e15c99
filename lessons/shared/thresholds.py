"""Checks of the fewest tokens for which computing hides the wire: a quotient of speeds, rounded up."""

from grader.checks import Answers, Trial, show


def is_off_by_rounding(answers: Answers) -> bool:
    """Wrong by one token, and only for some calls: divisions that were rounded."""
    pairs = list(zip(answers.given, answers.true, strict=True))
    if not all(isinstance(given, int | float) and abs(given - true) <= 1 for given, true in pairs):
        return False
    off = [given != true for given, true in pairs]
    return any(off) and not all(off)


def require_one_division(trial: Trial, answers: Answers, cause: str, help: str) -> None:
    """Where both times are equal for whole tokens, an answer beside it comes of several divisions."""
    if not is_off_by_rounding(answers):
        return
    i = next(i for i, given in enumerate(answers.given) if given != answers.true[i])
    trial.wrong(
        f"{answers.asked(answers.calls[i])} is {show(answers.given[i])}, and {answers.true[i]:,} tokens "
        "take exactly as long",
        cause=cause,
        asked=help,
    )


def require_refused(trial: Trial, answers: Answers, help: str) -> None:
    """Every call is a ValueError."""
    for call, given in zip(answers.calls, answers.given, strict=True):
        trial.require(
            isinstance(given, str) and given.startswith("ValueError"),
            f"{answers.asked(call)} gave {given!r} where a ValueError belongs",
            help=help,
        )
