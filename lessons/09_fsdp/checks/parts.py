"""Says of each number of the weights which ranks' gradients it was trained on, after a plain step of SGD."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from .models import build
from .training import LEARNING_RATE, PASSES, Batches

Weights = dict[str, Tensor]


def gradients_by_rank(make_model: Any, seed: int, by_rank: Sequence[Batches]) -> list[Weights]:
    """Each rank's own gradient of the first step, the sum over its passes."""
    found = []
    for batches in by_rank:
        model = build(make_model, seed, torch.float64)
        for batch in batches[: PASSES[0]]:
            model(*batch)[1].backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return found


def trained_on(start: Weights, ends: Sequence[Weights], gradients: Sequence[Weights]) -> str:
    """What explains every number of all weights after the first step, if something does; else ""."""
    names = list(gradients[0])
    if len(gradients) == 1 or any(name not in end for end in ends for name in names):
        return ""
    flat = [torch.cat([end[name].flatten().double() for name in names]) for end in ends]
    if any(not torch.allclose(other, flat[0], rtol=1e-8, atol=1e-10) for other in flat):
        return ""
    moved = (torch.cat([start[name].flatten() for name in names]) - flat[0]) / LEARNING_RATE
    own = [torch.cat([each[name].flatten() for name in names]) for each in gradients]
    right, still, alone, some = _where(moved, own)
    if bool(right.all()):
        return ""
    if bool((right | still).all()):
        return (
            "a part of the weights is right, and the rest did not move: the shares of some ranks were not "
            "updated, or not handed round"
        )
    if bool(alone.all()):
        return "each part of it was trained on the gradient of one rank alone: nothing was reduced"
    if bool((right | some).all()):
        return (
            "a part of the weights was trained on the mean, and the rest on the gradients of some ranks "
            "alone: the mean did not come to all of its owners (dist.reduce fills the tensor of one rank)"
        )
    return ""


def _where(moved: Tensor, own: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where a step was the mean; where nothing; where one rank's gradient; where some ranks' sum or mean."""
    n, scale = len(own), max(gradient.abs().max().item() for gradient in own)

    def same(value: Tensor | float) -> Tensor:
        return (moved - value).abs() <= 1e-8 * scale

    alone = torch.zeros_like(moved, dtype=torch.bool)
    some = alone.clone()
    for size in range(1, n):
        for ranks in combinations(own, size):
            total = sum(ranks)
            found = same(total) | same(total / size) | same(total / n)
            some |= found
            alone |= found if size == 1 else False
    return same(sum(own) / n), same(0.0), alone, some
