"""Gradients that are told by their size: of two passes, of which the second is half as large, and of a loss
that is multiplied before it goes back."""

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


def of_the_loss_alone(gradients: Sequence[Tensor], factor: float) -> dict[str, Fault]:
    """By cause: what comes if backward does not look at the gradient that comes in, which is `factor`."""
    told = (
        f"the loss was multiplied by {factor:g} before backward(), and this is the gradient of the loss "
        "alone: backward does not multiply by the gradient that comes in"
    )
    step = "A loss may be weighed or scaled by who calls: multiply what backward returns by what it is given."
    return {told: Fault([g / factor for g in gradients], step)}
