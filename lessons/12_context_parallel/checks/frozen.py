"""Attention over cut sequences where nothing needs a gradient, or not all of q, k and v do."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from torch import Tensor

from grader.checks import Trial
from lessons_shared.evaluation import HELP

from .ring_slips import wrong_outputs

NEEDING = {
    "q alone needs a gradient": (0,),
    "k alone needs one": (1,),
    "v alone needs one": (2,),
    "k and v need one, and q does not": (1, 2),
}
"""Which of them need one."""


def gradients_of_some(
    attention_of: Callable, group: object, parts: list[Tensor], d_out: Tensor, told: str
) -> list[Tensor | None]:
    """On a rank: the gradients of those of q, k and v that need one, in their order."""
    those = NEEDING[told]
    leaves = [x.clone().requires_grad_(i in those) for i, x in enumerate(parts)]
    try:
        out = attention_of(*leaves, group)
        if out.requires_grad:
            out.backward(d_out)
    except Exception as error:
        error.add_note(f"of q, k and v some are frozen in this call: {told}")
        raise
    return [leaves[i].grad for i in those]


def require_silent(
    trial: Trial, exact: SimpleNamespace, slips: Callable[[SimpleNamespace], dict] = wrong_outputs
) -> None:
    """Under no_grad the output is what it is with gradients; `slips` tells what it might be instead."""
    alone = [r["out"] for r in exact.results]
    if all(isinstance(x, Tensor) for x in alone) and all("silent" in r for r in exact.results):
        trial.close(
            "the output under torch.no_grad(), as validation has it,",
            [r["silent"] for r in exact.results],
            alone,
            partial(slips, exact),
            help=HELP,
        )


def require_where_needed(trial: Trial, exact: SimpleNamespace) -> None:
    """Whichever of q, k and v need a gradient, those get it."""
    for told, those in NEEDING.items():
        for place, i in enumerate(those):
            right = [r["gradients"][i] for r in exact.results]
            if not all(
                "needing" in r and isinstance(x, Tensor) for r, x in zip(exact.results, right, strict=True)
            ):
                continue
            found = [r["needing"][told][place] for r in exact.results]
            for r, gradient in enumerate(found):
                trial.require(
                    gradient is not None,
                    f"the gradient of {'qkv'[i]} is None where {told}",
                    help="ctx.needs_input_grad has a place for each argument of forward, in their order. A "
                    "gradient that nobody needs may be computed all the same: autograd drops it.",
                    rank=r,
                    cause=f"whether {'qkv'[i]} gets a gradient hangs on what the others need",
                )
            trial.close(f"the gradient of {'qkv'[i]} where {told}", found, right)
