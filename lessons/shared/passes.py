"""Gradients that are told by their size: of two passes, of which the second is half as large, of one after
zero_grad, and of a loss that is multiplied before it goes back."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from grader.checks import Fault, Trial

from .cut_gpt import gradients_of

HALF = 0.5
"""What the second pass's gradient is of the first one's."""
BOTH = 1 + HALF
"""What both passes' gradients are, added up, of the first one's."""
CLEARED = {
    "anew": "after zero_grad() and another pass",
    "zeroed": "after zero_grad(set_to_none=False) and another pass",
}
"""Where a rank's gradients are among its results → when they were looked at."""


def after_clearing(module: nn.Module, run_pass: Callable[[], None]) -> dict[str, dict[str, Tensor]]:
    """On a rank, after two passes: the gradients under each name of CLEARED."""
    found = {}
    for name in CLEARED:
        module.zero_grad(set_to_none=name == "anew")
        run_pass()
        found[name] = gradients_of(module)
    return found


def after_zero_grad(right: Sequence[Tensor], times: float, name: str) -> dict[str, Fault]:
    """By cause: gradients under a name of CLEARED, where those before are right; none for another name."""
    if name not in CLEARED:
        return {}
    held = BOTH if name == "anew" else 1.0
    return of_what_was_cleared(right, [held * g for g in right], times)


def require_after_clearing(
    trial: Trial,
    told: str,
    seen: str,
    actual: Mapping[str, Sequence[Tensor | None]],
    right: Sequence[Tensor],
    times: float,
) -> None:
    """A gradient, `told` by its name, is that of one pass under every name of CLEARED.

    Args:
        seen: in which of several runs; "" if there is one.
        actual: names of CLEARED → each rank's gradient.
    """
    for name, when in CLEARED.items():
        alternatives = after_zero_grad(right, times, name)
        trial.close(f"{told} {when}{seen and f' ({seen})'}", actual[name], right, alternatives=alternatives)


def of_what_was_cleared(right: Sequence[Tensor], held: Sequence[Tensor], times: float) -> dict[str, Fault]:
    """By cause: gradients after zero_grad and a pass, by what .grad held before that.

    What is summed over the ranks once more is so many `times` as large.
    """
    if times == 1:
        return {}
    step = (
        "Remember nothing that .grad has held: who trains clears it. parameter.register_hook is given what a "
        "backward adds, before it is added to whatever is there."
    )
    return {
        "a hook remembers what .grad held after the pass before, and takes it off, though zero_grad has "
        "cleared .grad since": Fault(
            [g + (1 - times) * old for g, old in zip(right, held, strict=True)], step
        ),
        "what zero_grad has cleared is in it again: the sum of all passes is kept elsewhere than in .grad": (
            Fault([g + old for g, old in zip(right, held, strict=True)], step)
        ),
    }


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
