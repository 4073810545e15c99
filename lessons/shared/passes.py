"""Two passes, of which the second is half as large: whose gradient was summed twice is told by its size."""

from collections.abc import Sequence

from torch import Tensor

from grader.checks import Fault

HALF = 0.5
"""What the second pass's gradient is of the first one's."""
BOTH = 1 + HALF
"""What both passes' gradients are, added up, of the first one's."""


def sums_of_two_passes(first: Sequence[Tensor], times: float) -> dict[str, Sequence[Tensor] | Fault]:
    """By cause: gradients after two passes, where those of the first are right.

    A gradient that is summed over the ranks once more is so many `times` as large.
    """
    if times == 1:
        return {}
    return {
        "the second backward summed .grad, in which the first one's sum is already": Fault(
            [(times + HALF) * g for g in first],
            "Sum what a backward adds, before it is added: parameter.register_hook is given that, and a hook "
            "that comes after the gradient was accumulated sees all that is in .grad.",
        ),
        "the first pass's is right, and the second's is summed twice: is a hook registered in forward, once "
        "more at each call?": [(1 + times * HALF) * g for g in first],
    }
