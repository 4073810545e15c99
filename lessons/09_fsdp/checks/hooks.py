"""Checks of `FullySharded`: hooks that others have put on the parameters, as lessons 11 and 12 do."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from grader.checks import Trial, check

from .fully_sharded import full
from .models import build, draw, odd_gpt, weights
from .runs import run


def factor(name: str, r: int) -> float:
    """What the hook on a parameter multiplies its gradient by on rank r: another number everywhere."""
    return 1.0 + len(name) % 5 / 4 + r


def multiplied(times: float, gradient: Tensor) -> Tensor:
    return times * gradient


def step_with_hooks(rank: Any, seed: int, r: int, tokens: Tensor, targets: Tensor) -> dict:
    model = build(odd_gpt, seed, torch.float64).to(rank.device)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(partial(multiplied, factor(name, r)))
    sharded = rank.submission.FullySharded(model, rank.group)
    optimizer = SGD(sharded.parameters(), lr=1.0)
    sharded(tokens, targets)[1].backward()
    optimizer.step()
    return {"end": full(sharded)}


def observe_hooks(trial: Trial) -> SimpleNamespace:
    seed, n = trial.seed(), trial.num_ranks
    data = [batches[0] for batches in draw(trial, 1)]
    results = run(trial, step_with_hooks, seed, per_rank=[(r, *batch) for r, batch in enumerate(data)])
    start = weights(build(odd_gpt, seed, torch.float64))
    gradients = []
    for batch in data:
        model = build(odd_gpt, seed, torch.float64)
        model(*batch)[1].backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})

    def end(name: str, times: Any) -> Tensor:
        if name not in gradients[0]:
            return start[name]
        mean = sum(times(name, r) * gradients[r][name] for r in range(n)) / n
        return start[name] - mean

    expected = {name: end(name, factor) for name in start}
    without = {name: end(name, lambda name, r: 1.0) for name in start}
    return SimpleNamespace(results=results, expected=expected, without=without)


@check("FullySharded", world_sizes=(2, 3))
def hooks_on_parameters_go_on_working(trial: Trial) -> None:
    """A hook on a parameter of the GPT still changes its gradient: the rank's own, before the mean."""
    seen = trial.once(observe_hooks)
    for name, expected in seen.expected.items():
        trial.close(
            f"{name} after a step, with a hook on it that multiplies its gradient",
            [result["end"][name] for result in seen.results],
            expected,
            alternatives={"the hook on the parameter was lost: nothing called it": seen.without[name]},
            help="Backward must reach the GPT's own Parameter, which has the hooks: give it new memory "
            "through `.data`, or put its hooks on the tensor that takes its place.",
        )
