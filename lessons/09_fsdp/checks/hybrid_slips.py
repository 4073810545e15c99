"""What known slips of `hybrid_shard` lead to, and the sentences that tell them."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from .meshes import Machines, groups_of
from .models import build, odd_gpt
from .training import Rule, mean

LATE = (
    "what was averaged across machines is what .grad held before this backward: its own gradients came after "
    "that, and are those of its own machine"
)
FIRST_ALONE = (
    "the first backward's gradients are averaged across machines, and what the second adds is the mean of "
    "its own machine"
)
SUMMED = "it is that of a sum over the machines: divide by how many there are"
SHRUNK = "it is divided by all ranks of the mesh: inside a machine the mean is taken already, m is left"


def by_factor(machines: Machines) -> dict[str, tuple[float, float]]:
    """What a slip multiplies gradients by, and what of the first of two passes it multiplies besides."""
    m, n = len(machines), len(machines[0])
    summed = SUMMED if n > 1 else f"{SUMMED} (and not by the ranks of a machine)"
    halved = f"it is divided by 2, and there are {m} machines"
    by_two = {halved: (m / 2, 1.0), f"{halved}. What the first pass left was so once more": (m / 2, m / 2)}
    return {
        **(by_two if m > 2 else {}),
        summed: (m, 1.0),
        f"{summed}. What the first pass left was summed once more": (m, m),
        SHRUNK: (1 / n, 1.0),
        f"{SHRUNK}. What the first pass left was divided once more": (1 / n, 1 / n),
    }


def rules(machines: Machines) -> dict[str, list[Callable[[], Rule]]]:
    """Wrong rules for the gradients of all ranks, by the sentence that tells them; one a rank, or for all."""
    ranks = sorted(r for row in machines for r in row)
    inside = [partial(of, groups_of(machines, r)[0]) for r in ranks]
    return {
        "each machine was trained on the mean of its own ranks: nothing was averaged across machines": [
            partial(Rule, combine) for combine in inside
        ],
        LATE: [partial(late, combine) for combine in inside],
        "each rank was trained on its own gradient: nothing was reduced": [
            partial(Rule, partial(of, (r,))) for r in ranks
        ],
        **{
            slip: [partial(Rule, partial(scaled, factor), first_counts=of_first)]
            for slip, (factor, of_first) in by_factor(machines).items()
        },
    }


def of(ranks: tuple[int, ...], losses: list[Tensor]) -> Tensor:
    return mean([losses[r] for r in ranks])


def scaled(factor: float, losses: list[Tensor]) -> Tensor:
    return factor * mean(losses)


def gradients_after(seen: SimpleNamespace, ranks: list[int], passes: int) -> dict[str, Tensor]:
    """The gradients of one process after some passes, on these ranks' batches; zeros for none."""
    model = build(odd_gpt, seen.seed, torch.float64)
    for number in range(passes):
        mean([model(*seen.by_rank[r][number])[1] for r in ranks]).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def late(combine: Callable[[list[Tensor]], Tensor]) -> Rule:
    """Right for what a pass finds there already, the first one's of two; the rest is a machine's own."""
    turns = iter([mean])
    return Rule(lambda losses: next(turns, combine)(losses))
