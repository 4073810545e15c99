"""Says of each number of the weights which ranks' gradients it was trained on, after a plain step of SGD."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from grader.checks import is_close

from .models import build
from .training import LEARNING_RATE, LOST, PASSES, TWICE, Batches

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


def means_by_pass(make_model: Any, seed: int, by_rank: Sequence[Batches]) -> list[Weights]:
    """The mean over the ranks of each pass's gradient in the first step; 0 where a pass reaches nothing."""
    found = []
    for number in range(PASSES[0]):
        model = build(make_model, seed, torch.float64)
        for batches in by_rank:
            (model(*batches[number])[1] / len(by_rank)).backward()
        found.append(
            {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        )
    return found


def counted_passes(start: Weights, ends: Sequence[Weights], means: Sequence[Weights]) -> str:
    """How often the passes of the first step count, where that explains every weight; else "".

    All weights alike, or one part of them wrong alike and the rest right.
    """
    names = list(means[0])
    if any(name not in end for end in ends for name in names):
        return ""
    moved = [torch.cat([(start[name] - end[name].double()).flatten() for name in names]) for end in ends]
    one, two = (torch.cat([each[name].flatten() for name in names]) for each in means)
    allowed = 1e-8 * max(one.abs().max().item(), two.abs().max().item())

    def fits(first: int, second: int) -> Tensor:
        guess = LEARNING_RATE * (first * one + second * two)
        return torch.stack([(each - guess).abs() <= allowed for each in moved]).all(0)

    right = fits(1, 1)
    for first, second in product(range(4), repeat=2):
        wrong = fits(first, second)
        if (first, second) in ((1, 1), (0, 0)) or right.all() or not (right | wrong).all():
            continue
        if (first, second) == (0, 1):
            return LOST
        if (first, second) == (2, 1) and wrong.all():
            return TWICE
        times = {0: "is lost", 1: "counts once", 2: "counts twice", 3: "counts three times"}
        told = f"the first backward pass of a step {times[first]}, and the second {times[second]}"
        told += ": is .grad dropped once it was sent?" if first > 1 else ""
        if (first, second) == (0, 2):
            told += ": is what it left kept in a buffer that the second is received into? Keep a copy of it"
        return told if wrong.all() else f"of a part of the weights {told}"
    return ""


def misses_last_pass(part: str, start: Weights, ends: Sequence[Weights], means: Sequence[Weights]) -> bool:
    """Whether weights with `part` in their name, and they alone, miss the first step's last pass."""
    for name, first in start.items():
        counted = means[:-1] if part in name else means
        expected = first - LEARNING_RATE * sum(each[name] for each in counted)
        if not all(name in end and is_close(end[name], expected) for end in ends):
            return False
    return True
