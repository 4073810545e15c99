"""What mean gradients must be: computed in one process, and compared with what the ranks have."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grader.checks import Trial

from .models import (
    VOCAB,
    Mixed,
    build,
    by_rank,
)

BOTH = ("left", "right")


def expected_gradients(
    seed: int, passes: list[list[tuple[Tensor, Tensor, tuple]]]
) -> tuple[dict, list[dict]]:
    """The mean over ranks and each rank's own; `passes` has a list of (tokens, targets, order) by rank."""
    own = []
    for rank in range(len(passes[0])):
        model = build(Mixed, seed).double()
        for batches in passes:
            tokens, targets, order = batches[rank]
            F.cross_entropy(model(tokens, order), targets).backward()
        own.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        )
    return {name: torch.stack([g[name] for g in own]).mean(0) for name in own[0]}, own


def draw_passes(trial: Trial, *orders: list[tuple[str, ...]]) -> list[list[tuple]]:
    """For each pass, and each rank, tokens, targets and the order in which the branches are used."""
    return [
        [
            (trial.tokens(VOCAB, 5), trial.tokens(VOCAB, 5), order[r % len(order)])
            for r in range(trial.num_ranks)
        ]
        for order in orders
    ]


def alternatives_to_the_mean(own: list[Tensor], mean: Tensor) -> dict[str, Any]:
    """What other rules make of the ranks' own gradients."""
    n, total, having = len(own), torch.stack(own).sum(0), sum(bool(g.any()) for g in own)
    some = {"the mean over those ranks that had a gradient": total / having} if 0 < having < n else {}
    return {
        **some,
        "the mean on rank 0, the sum on the others": [mean, *[total] * (n - 1)],
        "the sum over ranks: divide by the number of ranks": total,
        "each rank has only its own gradient: nothing was averaged": own,
        "the mean, divided by the number of ranks once more": mean / n,
        "the gradient of rank 0": own[0],
    }


def require_mean(trial: Trial, seen: SimpleNamespace, names: list[str] | None = None, help: str = "") -> None:
    """The gradients on every rank are the mean over ranks."""
    for name in names or [n for n in seen.expected if n != "frozen.weight"]:
        own = [gradient[name] for gradient in seen.own]
        alternatives = alternatives_to_the_mean(own, seen.expected[name]) if trial.num_ranks > 1 else {}
        actual = by_rank(seen.results, "gradients", name)
        if all(gradient is None for gradient in actual) and not any(gradient.any() for gradient in own):
            continue  # no rank used it: there is nothing to average
        for r, gradient in enumerate(actual):
            trial.require(
                gradient is not None, f"rank {r} has no gradient of {name} (None)", help=help, rank=r
            )
        trial.close(
            f"the gradient of {name}", actual, seen.expected[name], alternatives=alternatives, help=help
        )


def require_bytes(trial: Trial, rank: int, recording: Any, size: int, what: str = "the gradients") -> None:
    """Reductions see each gradient once; a reduce-scatter and an all-gather by hand are as good."""
    slack = 128 + size // 8  # flags, lengths, padding
    reduced = sum(recording.bytes(kind) for kind in ("all_reduce", "reduce_scatter", "reduce"))
    gathered = recording.bytes("all_gather") + recording.bytes("gather") + recording.bytes("all_to_all")
    trial.require(
        gathered <= size + slack,
        f"{gathered} bytes were gathered: {what} of all ranks on every rank. One rank's are {size} bytes",
        help="An all-reduce sends 2(n-1)/n of that size, whatever n is; gathering grows with n.",
        rank=rank,
    )
    trial.require(
        reduced <= size + slack,
        f"{reduced} bytes were reduced, and {what} have {size}: some went twice, or weights that are not "
        "trained went too",
        help="model.parameters() names a tied weight once. Leave out what has requires_grad False.",
        rank=rank,
    )
    trial.require(
        trial.num_ranks == 1 or reduced + recording.bytes("send") >= size - slack,
        f"only {reduced} bytes were reduced, and {what} have {size}",
        help="All gradients travel.",
        rank=rank,
    )
