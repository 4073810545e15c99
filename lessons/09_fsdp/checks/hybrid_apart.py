"""Checks of `hybrid_shard` on a mesh that is a part of the world: two of them, side by side."""

from typing import Any

import torch
from torch import Tensor

from grader.checks import Trial, check

from .fully_sharded import full
from .hybrid_shard import whole_gradients
from .meshes import NAMES
from .models import build, draw, odd_gpt, seeds, weights
from .runs import run

SIDE_BY_SIDE = [[[0], [1]], [[2], [3]]]
"""World ranks of two meshes, each of two machines of one rank."""


def on_one_of_two(rank: Any, seed: int, batch: tuple[Tensor, Tensor]) -> dict:
    """The weights that training begins with, and the gradients of one backward."""
    both = rank.mesh(SIDE_BY_SIDE, ("apart", *NAMES))
    model = build(odd_gpt, seed, torch.float64).to(rank.device)
    sharded = rank.submission.hybrid_shard(model, both[NAMES]).eval()
    start = full(sharded)
    sharded(*batch)[1].backward()
    with torch.no_grad():
        return {"start": start, "gradients": whole_gradients(sharded)}


@check("hybrid_shard", world_sizes=(4,))
def the_world_may_be_larger_than_the_mesh(trial: Trial) -> None:
    """On two meshes side by side, each begins with its own first rank's weights and has its own means."""
    numbers, by_rank = seeds(trial), draw(trial, 1)
    per_rank = [(number, batches[0]) for number, batches in zip(numbers, by_rank, strict=True)]
    results = run(trial, on_one_of_two, per_rank=per_rank)
    starts, means = [], []
    for machines in SIDE_BY_SIDE:
        ranks = [rank for machine in machines for rank in machine]
        model = build(odd_gpt, numbers[ranks[0]], torch.float64).eval()
        starts += [weights(model)] * len(ranks)
        torch.stack([model(*by_rank[rank][0])[1] for rank in ranks]).mean().backward()
        trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        means += [trained] * len(ranks)
    for name in starts[0]:
        right = [start[name] for start in starts]
        trial.close(
            f"{name} in full_state_dict(), where ranks 0 and 1 are one mesh and 2 and 3 another,",
            [result["start"][name] for result in results],
            right,
            alternatives={"every mesh has the weights of rank 0 of the world": right[:1] * len(results)},
            help="The first rank of the mesh is rank 0 of each of its groups: group_src=0 counts in a group.",
        )
    for name in means[0]:
        trial.close(
            f"the gradient of {name}, where ranks 0 and 1 are one mesh and 2 and 3 another,",
            [result["gradients"][name] for result in results],
            [mean[name] for mean in means],
            help="What is in .grad when backward is over is the mean over all ranks of the mesh.",
        )
