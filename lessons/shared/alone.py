"""Which of several cases an error belongs to, found out by running each of them alone."""

from collections.abc import Callable, Collection, Mapping, Sequence

from grader.checks import CheckEnded, Verdict

NO_BIAS = {
    "there is no bias": "bias is None then, as in nn.Linear: add it, and give it a gradient, only where "
    "there is one."
}
"""A kind of case, and its next step."""


def tell_cases(
    end: CheckEnded,
    run_one: Callable[[int], object],
    kinds: Sequence[Collection[str]],
    steps: Mapping[str, str],
) -> None:
    """Give an error of which no cause is known the kind of case that it comes with.

    Args:
        run_one: runs the case of a number, alone.
        kinds: by case, the kinds that it is of, in words that go on after "where".
        steps: for each kind the next step. One is told only if all of its cases end so, and no other does.
    """
    if end.verdict != Verdict.CRASHED or end.cause:
        return
    verdicts = [_verdict(run_one, i) for i in range(len(kinds))]
    if set(verdicts) != {Verdict.PASSED, Verdict.CRASHED}:
        return
    for kind, step in steps.items():
        if [kind in each for each in kinds] == [verdict == Verdict.CRASHED for verdict in verdicts]:
            end.cause, end.help = f"it happens where {kind}, and nowhere else", step
            return


def _verdict(run_one: Callable[[int], object], number: int) -> Verdict:
    try:
        run_one(number)
    except CheckEnded as end:
        return end.verdict
    return Verdict.PASSED
