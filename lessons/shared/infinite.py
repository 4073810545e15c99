"""What is infinite in a rank's gradient is not made a number: who steps looks for it."""

from collections.abc import Sequence

from grader.checks import Trial

REPLACED = "infinity and NaN are replaced, as nan_to_num and clamp do, and nobody learns of them"
LEAVE_THEM = "Leave them: who steps looks whether a gradient is finite, and leaves the batch out."


def require_shown(trial: Trial, finite: Sequence[bool], told: str) -> None:
    """By rank, whether what an infinite number went into is `finite`: it is on none."""
    for rank, hidden in enumerate(finite):
        trial.require(not hidden, told, cause=REPLACED if all(finite) else "", help=LEAVE_THEM, rank=rank)
