"""Attention over cut sequences where nothing needs a gradient, or not all of q, k and v do."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import Fault, Trial, is_close
from lessons_shared.evaluation import HELP, stay_in_silence
from lessons_shared.needed import none_is_missing

from .ring_slips import attention_weights, by_parts, gradients_from, wrong_journeys, wrong_outputs
from .rings import shares

BOTH = "k and v need one, and q does not"
NEEDING = {
    "q alone needs a gradient": (0,),
    "k alone needs one": (1,),
    "v alone needs one": (2,),
    BOTH: (1, 2),
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
    """Under no_grad the output is what it is with gradients; `slips` tells what it might be instead.

    Neither then is anything changed that was given.
    """
    alone = [r["out"] for r in exact.results]
    if all(isinstance(x, Tensor) for x in alone) and all("silent" in r for r in exact.results):
        stay_in_silence(trial, exact.results)
        trial.close(
            "the output under torch.no_grad(), as validation has it,",
            [r["silent"] for r in exact.results],
            alone,
            partial(slips, exact),
            help=HELP,
        )


def require_where_needed(trial: Trial, exact: SimpleNamespace, travels: bool = True) -> None:
    """Whichever of q, k and v need a gradient, those get it; with `travels` k's and v's come round a ring."""
    for told, those in NEEDING.items():
        found, right = {}, {}
        for place, i in enumerate(those):
            with_all = [r["gradients"][i] for r in exact.results]
            if all(
                "needing" in r and isinstance(x, Tensor) for r, x in zip(exact.results, with_all, strict=True)
            ):
                right[i] = with_all
                found["qkv"[i]] = [r["needing"][told][place] for r in exact.results]
        none_is_missing(trial, found, told)
        for i, with_all in right.items():
            slips = None
            if travels:
                slips = partial(not_home, exact, i, with_all) if i else partial(of_own_block, exact)
            trial.close(f"the gradient of {'qkv'[i]} where {told}", found["qkv"[i]], with_all, slips)


def of_own_block(exact: SimpleNamespace) -> dict[str, Fault]:
    """Cause → each rank's gradient of q, where backward meets its own keys and values alone."""
    told = (
        "it has the term of this rank's own block alone: where k and v need no gradient, backward does not "
        "let them travel, and q's needs every block that its queries see"
    )
    step = "In backward keys and values travel whichever of q, k and v needs a gradient."
    weights = torch.zeros((*exact.out.shape[:2], exact.length, exact.length), dtype=torch.float64)
    whole = attention_weights(exact)
    for where in exact.where:
        rows, columns = where.unsqueeze(1), where.unsqueeze(0)
        weights[..., rows, columns] = whole[..., rows, columns]
    delta = (exact.d_out * exact.out.detach()).sum(-1, keepdim=True)
    return {told: Fault(by_parts(exact, gradients_from(exact, weights, delta)[0]), step)}


def not_home(exact: SimpleNamespace, i: int, right: list[Tensor]) -> dict[str, Fault]:
    """Cause → each rank's gradient of k (i is 1) or v (2), of which a term stays away with others frozen."""
    mine, other = ("kv", "vk")[i - 1]
    with_the_other = [r["needing"][BOTH][i - 1] for r in exact.results]
    alike = all(isinstance(x, Tensor) and is_close(x, y) for x, y in zip(with_the_other, right, strict=True))
    why = f"whether the gradient of {mine} travels hangs on whether {other if alike else 'another'} needs one"
    seen = SimpleNamespace(**vars(exact), shares=shares(exact))
    step = f"Let it travel wherever k or v needs a gradient, {mine} alone as well."
    return {f"{cause}: {why}": Fault(value, step) for cause, value in wrong_journeys(seen, i).items()}
