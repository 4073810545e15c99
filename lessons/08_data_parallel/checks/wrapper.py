"""Checks of `DataParallel` as a whole: weights at the start, gradients, training."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import Trial, check, exercise

from .means import (
    require_mean,
)
from .models import (
    build,
    by_rank,
    gradients,
    seeds,
    tiny_gpt,
    weights,
)

exercise(
    "DataParallel",
    world_sizes=(2, 1, 4),
    subgroup=True,
    hints=(
        "Start with buckets as lists of parameters, made once in the constructor, and a hook that counts "
        "which gradients of "
        "a bucket are there. parameter.register_post_accumulate_grad_hook(hook) calls hook(parameter).",
        "Send with async_op=True and keep the work object: finish_gradient_synchronization() waits for it, "
        "and only then "
        "puts the means back.",
        "A bucket that is full must not leave before the bucket in front of it: the ranks' hooks may fire "
        "in different "
        "orders, the all-reduces may not. What stays back because of an unused parameter leaves in finish.",
    ),
)


def step(rank: Any, seed: int, tokens: Tensor, targets: Tensor) -> dict:
    """One backward of a tiny GPT whose ranks start with different weights."""
    model = build(tiny_gpt, seed).to(rank.device)
    model.register_buffer("mask", torch.full((3,), float(seed % 7919)), persistent=False)
    wrapped = rank.submission.DataParallel(model, rank.group)
    start = {**weights(model), "mask": model.mask.clone()}
    own = [id(p) for p in model.parameters()]
    with rank.record() as recording:
        wrapped.finish_gradient_synchronization()
        recording.mark("step")
        _, loss = wrapped(tokens, targets)
        loss.backward()
        wrapped.finish_gradient_synchronization()
        first = gradients(model)
        recording.mark("finished again")
        wrapped.finish_gradient_synchronization()
    return {
        "start": start,
        "gradients": first,
        "again": gradients(model),
        "loss": loss.detach(),
        "weights": weights(model),
        "same": sorted(id(p) for p in wrapped.parameters()) == sorted(own),
        "recording": recording,
    }


def observe_step(trial: Trial) -> SimpleNamespace:
    numbers, n = seeds(trial), trial.num_ranks
    data = [(trial.tokens(23, 2, 8), trial.tokens(23, 2, 8)) for _ in range(n)]
    results = trial.run(step, per_rank=[(s, *d) for s, d in zip(numbers, data, strict=True)])
    own = []
    for tokens, targets in data:
        model = build(tiny_gpt, numbers[0]).double()
        model(tokens, targets)[1].backward()
        own.append(gradients(model))
    expected = {name: torch.stack([g[name] for g in own]).mean(0) for name in own[0]}
    starts = [{**weights(build(tiny_gpt, s)), "mask": torch.full((3,), float(s % 7919))} for s in numbers]
    return SimpleNamespace(results=results, own=own, expected=expected, starts=starts)


@check("DataParallel")
def ranks_start_with_the_weights_of_rank_0(trial: Trial) -> None:
    """The constructor gives every rank the parameters and buffers of the group's rank 0."""
    seen = trial.once(observe_step)
    for name, start in seen.starts[0].items():
        starts = [s[name] for s in seen.starts]
        trial.close(
            f"{name} after the constructor",
            by_rank(seen.results, "start", name),
            start,
            alternatives={"each rank still has what it started with": starts} if trial.num_ranks > 1 else {},
            help="Call broadcast_parameters in the constructor.",
        )


@check("DataParallel")
def gradient_is_that_of_the_whole_batch(trial: Trial) -> None:
    """After backward and finish_gradient_synchronization(), all ranks have the whole batch's gradient."""
    seen = trial.once(observe_step)
    require_mean(
        trial,
        seen,
        list(seen.expected),
        "Average each gradient over the group, once, and put it back into .grad.",
    )


@check("DataParallel")
def weights_change_in_the_optimizer_only(trial: Trial) -> None:
    """Synchronisation leaves the weights as they are; the wrapper trains the module's own parameters."""
    seen = trial.once(observe_step)
    for name in seen.expected:
        trial.close(
            f"the weight {name} after backward",
            by_rank(seen.results, "weights", name),
            by_rank(seen.results, "start", name),
            rtol=0.0,
            help="A hook is handed the parameter. What has to be averaged is parameter.grad.",
        )
    for r, result in enumerate(seen.results):
        trial.require(
            result["same"],
            "wrapped.parameters() are not the parameters of the given module",
            rank=r,
            help="Keep the module as an attribute (self.module = module), and do not copy it.",
        )


@check("DataParallel")
def finish_does_nothing_when_nothing_is_pending(trial: Trial) -> None:
    """finish_gradient_synchronization() before any backward, or a second time, sends and changes nothing."""
    seen = trial.once(observe_step)
    for r, result in enumerate(seen.results):
        for when, told in (("", "before any backward"), ("finished again", "a second time")):
            trial.require(
                result["recording"].count(after=when) == 0,
                f"called {told}, finish_… communicates",
                rank=r,
                help="A forward outside no_sync() makes a pass pending, and finish_… ends it. Remember "
                "that, on all ranks alike, not which hooks fired: of a module that a rank did not use, "
                "none does.",
            )
    for name in seen.expected:
        trial.close(
            f"the gradient of {name} after a second finish",
            by_rank(seen.results, "again", name),
            by_rank(seen.results, "gradients", name),
            rtol=0.0,
            help="Forget the buckets that are done.",
        )


def train(rank: Any, seed: int, steps: list[tuple[Tensor, Tensor]]) -> dict:
    """A few steps in float64, where the order of a sum does not show."""
    ends = {}
    for name in OPTIMIZERS:
        model = build(tiny_gpt, seed).double().to(rank.device)
        wrapped = rank.submission.DataParallel(model, rank.group, bucket_bytes=4000)
        optimizer = make_optimizer(name, wrapped)
        for tokens, targets in steps:
            optimizer.zero_grad(set_to_none=name == "SGD")
            wrapped(tokens, targets)[1].backward()
            wrapped.finish_gradient_synchronization()
            optimizer.step()
        ends[name] = weights(model)
    return ends


OPTIMIZERS = ("SGD", "AdamW")


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD shows a sum that should be a mean, which AdamW hides."""
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.5)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def observe_training(trial: Trial) -> SimpleNamespace:
    numbers, n = seeds(trial), trial.num_ranks
    steps = [(trial.tokens(23, 2 * n, 8), trial.tokens(23, 2 * n, 8)) for _ in range(3)]
    shares = [[(t[2 * r : 2 * r + 2], y[2 * r : 2 * r + 2]) for t, y in steps] for r in range(n)]
    results = trial.run(train, per_rank=list(zip(numbers, shares, strict=True)))
    return SimpleNamespace(results=results, seed=numbers[0], steps=steps)


def train_alone(seen: SimpleNamespace, name: str, factor: float) -> dict[str, Tensor]:
    """The weights of one process on the whole batches, gradients times a factor."""
    model = build(tiny_gpt, seen.seed).double()
    optimizer = make_optimizer(name, model)
    for tokens, targets in seen.steps:
        optimizer.zero_grad()
        (factor * model(tokens, targets)[1]).backward()
        optimizer.step()
    return weights(model)


def require_training(trial: Trial, optimizer: str) -> None:
    """Three steps end at the weights of one process on the whole batch."""
    seen, n = trial.once(observe_training), trial.num_ranks
    expected = train_alone(seen, optimizer, 1.0)
    others = {}
    if n > 1:
        others["the weights after training on the sum of the gradients"] = train_alone(seen, optimizer, n)
        others["the weights after training on the mean divided by n"] = train_alone(seen, optimizer, 1 / n)
    for name in expected:
        trial.close(
            f"{name} after three steps of {optimizer}",
            by_rank(seen.results, optimizer, name),
            expected[name],
            alternatives={told: end[name] for told, end in others.items()},
            help="Compare the gradients of each step with those of one process on the whole batch.",
        )


@check("DataParallel")
def sgd_trains_as_one_process_does(trial: Trial) -> None:
    """Three steps of SGD end at the weights of one process that had the whole batches."""
    require_training(trial, "SGD")


@check("DataParallel")
def adamw_trains_as_one_process_does(trial: Trial) -> None:
    """Three steps of AdamW, gradients zeroed in place, end at the weights of one process."""
    require_training(trial, "AdamW")
