"""Checks of `guarded_step`: a broken batch on one rank is left out by all."""

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import CheckEnded, Recording, Trial, check, exercise, is_close, of_ranks

from .means import (
    require_bytes,
)
from .models import (
    Regression,
    build,
    weights,
)

exercise(
    "guarded_step",
    world_sizes=(2, 1, 4),
    subgroup=True,
    hints=(
        "Read the report of the hang: which rank stands in the all-reduce, and where is the other one?",
        "A rank may leave the function only if all ranks leave it. How does a rank learn what the others "
        "saw?",
        "One more all-reduce, of one number, before the decision. Which reduction answers 'is it finite "
        "everywhere'?",
    ),
)


def guarded_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and decay: even a step on zero gradients changes the weights. Biases are a group of theirs."""
    matrices, biases = ([p for p in model.parameters() if (p.dim() > 1) == large] for large in (True, False))
    groups = [{"params": matrices}, {"params": biases}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1)


def guarded(rank: Any, seed: int, batches: list[tuple[Tensor, Tensor]]) -> dict:
    model = build(Regression, seed).to(rank.device)
    optimizer = guarded_optimizer(model)
    taken, seen, state, changed = [], [], [], []
    with rank.record() as recording:
        for inputs, targets in batches:
            recording.mark("a step")
            before = state_of(optimizer)
            answer = rank.submission.guarded_step(model, optimizer, inputs, targets, rank.group)
            taken.append(None if answer is None else bool(answer))
            seen.append(weights(model))
            state.append(finite([state_of(optimizer)]))
            changed.append(other_numbers(before, state_of(optimizer)))
    return {
        "taken": taken,
        "weights": seen,
        "state": state,
        "changed": changed,
        "recording": recording,
    }


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Clones of what an optimizer keeps, by the parameter's number and the name."""
    state = optimizer.state_dict()["state"]
    return {
        f"{key} of parameter {number}": value.clone()
        for number, named in state.items()
        for key, value in named.items()
        if isinstance(value, Tensor)
    }


def other_numbers(before: dict[str, Tensor], now: dict[str, Tensor]) -> list[str]:
    """Names of what has come, gone or changed; NaN is NaN still."""
    return [
        name
        for name in {**before, **now}
        if name not in before
        or name not in now
        or not torch.allclose(before[name], now[name], rtol=0.0, atol=0.0, equal_nan=True)
    ]


def finite(tensors: Iterable[dict[str, Any]]) -> bool:
    """Whether all numbers in these are finite: of a model, or of an optimizer's state."""
    return all(t.isfinite().all() for named in tensors for t in named.values() if isinstance(t, Tensor))


def observe_guarded(trial: Trial, broken: list[list[int]], scale: float = 1.0) -> SimpleNamespace:
    """`broken` lists, for each step, the ranks whose targets hold a number that is not finite.

    They are NaN, inf and -inf in turn; `kinds` tells which a step has.
    """
    seed, n = trial.seed(), trial.num_ranks
    steps, kinds = [], cycle(("NaN", "inf", "-inf"))
    told: list[set[str]] = []
    for ranks in broken:
        batches = [(trial.normal(4, 5), scale * trial.normal(4, 3)) for _ in range(n)]
        told.append(set())
        for r in ranks:
            told[-1].add(kind := next(kinds))
            batches[r % n][1][trial.integer(0, 3), trial.integer(0, 2)] = float(kind)
        steps.append(batches)
    try:
        results = trial.run(guarded, seed, per_rank=[([batches[r] for batches in steps],) for r in range(n)])
    except CheckEnded as end:
        if any(broken):
            tell_who_returned(end, n)
        raise
    return SimpleNamespace(results=results, seed=seed, steps=steps, broken=broken, kinds=told)


def tell_who_returned(end: CheckEnded, n: int) -> None:
    """Where ranks wait for others that have returned from every step, this is told as the cause."""
    gone = [r for r in range(n) if f"rank {r} had finished" in end.details]
    rest = [r for r in range(n) if r not in gone]
    if gone and "never did" in end.message:
        parted = f"{of_ranks(gone)} returned while {of_ranks(rest)} went on"
        end.cause = f"{parted}: not all ranks decide by the same number"
        end.help = "Let all ranks of the group agree on one number before any of them returns."


def reference_weights(
    seen: SimpleNamespace,
    average_first: bool = True,
    clip_each: bool = False,
    clip_first_group: bool = False,
    forget: bool = True,
    clip: bool = True,
    times: float = 1.0,
    step_on_zero: bool = False,
    scale_up: bool = False,
) -> list[dict[str, Tensor]]:
    """The weights after each step, as one process would have them, or one that does something else."""
    model = build(Regression, seen.seed).double()
    optimizer = guarded_optimizer(model)
    after = []
    means = [torch.zeros_like(p) for p in model.parameters()]
    for batches, ranks in zip(seen.steps, seen.broken, strict=True):
        if not ranks:
            means = [torch.zeros_like(mean) if forget else mean.clone() for mean in means]
            for inputs, targets in batches:
                optimizer.zero_grad()
                model(inputs.double(), targets.double())[1].backward()
                if not average_first:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for mean, parameter in zip(means, model.parameters(), strict=True):
                    mean += parameter.grad / len(batches)
            for mean, parameter in zip(means, model.parameters(), strict=True):
                parameter.grad = mean.mul_(times)
            together = [[p] for p in model.parameters()] if clip_each else [list(model.parameters())]
            together = [optimizer.param_groups[0]["params"]] if clip_first_group else together
            for parameters in together if clip else ():
                norm = nn.utils.clip_grad_norm_(parameters, 1.0).clamp(max=1.0)
                for parameter in parameters if scale_up else ():
                    parameter.grad /= norm
            optimizer.step()
        elif step_on_zero:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        after.append(weights(model))
    return after


def taken_for_finite(kinds: list[set[str]], taken: list[bool | None]) -> str:
    """Which infinities alone were not noticed, in words; else "". After a step on NaN every loss is NaN."""
    found = {(kind, step) for one, step in zip(kinds, taken, strict=True) if len(one) == 1 for kind in one}
    if not {("NaN", False), ("-inf", True)} <= found:
        return ""
    if ("inf", True) in found:
        return TAKEN_FOR_FINITE if len(found) == 3 else ""
    return (
        "a loss of -inf was taken for finite: it is below every number, as a finite loss is below inf; "
        "ask loss.isfinite()"
    )


TAKEN_FOR_FINITE = (
    "a loss of inf was taken for finite: it is no NaN, and its gradient may be finite; ask loss.isfinite()"
)


def taken_for_broken(trial: Trial, seen: SimpleNamespace, rank: int) -> str:
    """That finite losses were left out for their size, where this rank takes steps on small ones; else ""."""
    if any(seen.broken):
        return ""
    try:
        small = trial.once(observe_mixture)
    except CheckEnded:
        return ""
    took = small.results[rank]["taken"] == [not ranks for ranks in small.broken]
    return LARGE if took else ""


LARGE = (
    "a large loss was taken for a broken one: the losses are above 65504 here, which is more than float16 "
    "holds, and finite; steps on small ones are taken"
)


def how_decided(recording: Recording) -> str:
    """Why a rank takes a step though a loss is not finite, as far as the reduction of its flag tells."""
    ways = {
        "MAX": "the largest number that a rank sends decides. If it is 1 for a finite loss, one rank whose "
        "loss is finite is enough; if it is the loss, -inf is never the largest, and NaN may be left out",
        "MIN": "the smallest number that a rank sends decides. If it is 1 for a broken loss, one rank whose "
        "loss is finite is enough; if it is the loss, inf is never the smallest, and NaN may be left out",
        "SUM": "the sum of the ranks' flags decides: is it what it should be when all are finite?",
        "PRODUCT": "the product of the ranks' flags decides: one 0 among them makes it 0",
    }
    first = next(iter(recording.select()), None)
    if first is None or first.num_elements > 4:
        return "nothing travels but gradients: each rank decides by its own loss"
    if first.kind == "broadcast":
        return f"the flag of rank {first.peer} alone decides: it is broadcast, and nobody asks the others"
    return ways.get(first.op, "")


def other_weights(seen: SimpleNamespace) -> dict[str, list[dict[str, Tensor]]]:
    """What known slips lead to, by step."""
    ways: dict[str, dict[str, Any]] = {
        "the step of gradients that were clipped before they were averaged": {"average_first": False},
        "every parameter's gradient was clipped to norm 1 by itself: the norm is that of all together": {
            "clip_each": True
        },
        "the optimizer's first group of parameters alone was clipped: the norm is that of all gradients": {
            "clip_first_group": True
        },
        "the gradient of the steps before is still there: zero_grad() comes first": {"forget": False},
        OF_THE_SUM: {"times": len(seen.results)},
        SCALED_UP: {"scale_up": True},
        "the step of gradients that were not clipped": {"clip": False},
        STEPPED_ON_ZERO: {"step_on_zero": True},
    }
    return {told: reference_weights(seen, **way) for told, way in ways.items()}


OF_THE_SUM = "the step of the gradients' sum: divide by the number of ranks"
SCALED_UP = "the gradient was scaled up to norm 1: one that is shorter stays as it is"
OF_EITHER = (
    "the step of the gradients' sum, clipped to norm 1, or of their mean, scaled up to it: divide by the "
    "number of ranks, and scale what is longer than 1 alone"
)
"""What tells the sum and the mean apart is lost where the sum is longer than 1."""
STEPPED_ON_ZERO = (
    "a broken batch was a step with gradients of zero: weight decay and momentum move weights all the same"
)


def _at(
    others: Callable[[], dict[str, list[dict[str, Tensor]]]], step: int, name: str, before: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What a weight is after a step, by slip."""
    found = {cause: weights[step][name] for cause, weights in others().items()}
    if torch.allclose(found[OF_THE_SUM], found[SCALED_UP]):
        found[OF_EITHER] = found.pop(OF_THE_SUM)
        del found[SCALED_UP]
    return {"what it was before the step": before[name], **found}


def require_nothing_left(trial: Trial, rank: int, result: dict, want: list[bool]) -> None:
    """A good batch makes no weight NaN: a broken one before it has left something behind if it does."""
    for i in range(1, len(want)):
        after_a_broken_one = want[i] and not want[i - 1]
        if not (after_a_broken_one and finite(result["weights"][i - 1 : i]) and result["state"][i - 1]):
            continue
        trial.require(
            finite(result["weights"][i : i + 1]),
            f"step {i + 1}, on a good batch, made weights NaN or infinite, and until then they were finite",
            help="zero_grad() before backward, also where the batch before was left out.",
            rank=rank,
            cause="the gradient of the broken batch before it is still in .grad, and is added to",
        )


def require_state_kept(trial: Trial, rank: int, result: dict, start: dict[str, Tensor]) -> None:
    """Where a step returned False, and left the weights alone, the optimizer's state stays, too."""
    for i, changed in enumerate(result["changed"]):
        before, now = [start, *result["weights"]][i : i + 2]
        left_out = result["taken"][i] is False and not other_numbers(before, now)
        until_then = i == 0 or result["state"][i - 1]
        trial.require(
            not left_out or not changed,
            f"step {i + 1} returned False and left the weights as they were, and the optimizer's state is "
            f"another: {', '.join(changed[:2])}{', ...' if len(changed) > 2 else ''}",
            help="Decide before the optimizer's step: then nothing has to be put back.",
            rank=rank,
            cause="a step was made with the broken gradient, and only the weights were put back: the state "
            "holds numbers that are not finite"
            if until_then and not result["state"][i]
            else "",
        )


RETURNS_ITS_OWN = (
    "all ranks leave the same batches out, as the weights show, and what a rank returns is whether its own "
    "loss is finite"
)


def returns_its_own(
    seen: SimpleNamespace, rank: int, result: dict, expected: list[dict[str, Tensor]]
) -> bool:
    """Whether every step is right on this rank, and what it returned speaks of its own loss alone."""
    return result["taken"] == [rank not in broken for broken in seen.broken] and all(
        is_close(step[name], right[name])
        for step, right in zip(result["weights"], expected, strict=True)
        for name in right
    )


def require_guarded(trial: Trial, seen: SimpleNamespace) -> None:
    """Which steps were taken, and the weights after each."""
    expected = reference_weights(seen)
    others = cache(partial(other_weights, seen))  # only a wrong answer needs them
    want = [not ranks for ranks in seen.broken]
    start = weights(build(Regression, seen.seed))
    agreed = all(result["taken"] == seen.results[0]["taken"] for result in seen.results)
    for r, result in enumerate(seen.results):
        require_nothing_left(trial, r, result, want)
        require_state_kept(trial, r, result, start)
        stepped = any(taken and not good for taken, good in zip(result["taken"], want, strict=True))
        its_own = result["taken"] != want and returns_its_own(seen, r, result, expected)
        trial.require(
            result["taken"] == want,
            f"the steps returned {result['taken']}, expected {want}: a batch is left out by all ranks or by "
            "none",
            help="Return what all ranks have decided: True where a step was made."
            if its_own
            else "One rank's loss that is not finite is enough for all: let all learn of it."
            if agreed and stepped
            else "All ranks decide by the same number: let them agree on it before anyone returns.",
            rank=r,
            cause=RETURNS_ITS_OWN
            if its_own
            else taken_for_finite(seen.kinds, result["taken"])
            or (how_decided(result["recording"]) if stepped else "")
            or taken_for_broken(trial, seen, r),
        )
    for i in range(len(want)):
        for name in expected[i]:
            actual = [result["weights"][i][name] for result in seen.results]
            before = expected[i - 1] if i else start
            trial.close(
                f"{name} after step {i + 1} ({'a good' if want[i] else 'a broken'} batch)",
                actual,
                expected[i][name],
                alternatives=partial(_at, others, i, name, before)
                if want[i]
                else lambda i=i, name=name: {STEPPED_ON_ZERO: others()[STEPPED_ON_ZERO][i][name]},
                help="Average, then clip, then step. A broken batch changes nothing.",
            )


def observe_broken(trial: Trial) -> SimpleNamespace:
    return observe_guarded(trial, [[trial.num_ranks - 1]] * 3)


def observe_good(trial: Trial) -> SimpleNamespace:
    return observe_guarded(trial, [[], []], scale=1e3)


def observe_mixture(trial: Trial) -> SimpleNamespace:
    return observe_guarded(
        trial, [[], [trial.num_ranks - 1], [], [0], list(range(trial.num_ranks)), []], scale=0.1
    )


@check("guarded_step")
def a_good_batch_is_a_step_on_the_mean(trial: Trial) -> None:
    """Where losses and gradients are finite, all ranks step on the mean gradient, clipped after averaging."""
    require_guarded(trial, trial.once(observe_good))


@check("guarded_step")
def all_ranks_leave_a_broken_batch_out(trial: Trial) -> None:
    """When the loss of the last rank is NaN, inf or -inf, every rank returns False, and nothing changes."""
    require_guarded(trial, trial.once(observe_broken))


@check("guarded_step")
def training_goes_on_after_a_broken_batch(trial: Trial) -> None:
    """Good and broken batches in turn, broken on one rank, on another, on all: only the good ones count."""
    require_guarded(trial, trial.once(observe_mixture))


@check("guarded_step", world_sizes=(2, 4))
def gradients_and_a_flag_travel(trial: Trial) -> None:
    """What travels in a good step is one copy of the gradients and a few bytes for the decision: no data."""
    seen = trial.once(observe_good)
    size = len(seen.steps) * sum(p.numel() * 4 for p in build(Regression, 0).parameters())
    for r, result in enumerate(seen.results):
        recording = result["recording"]
        gathered = sum(recording.bytes(kind) for kind in ("all_gather", "gather", "broadcast"))
        trial.require(
            gathered <= size,
            f"{gathered} bytes were gathered or broadcast: ranks exchange more than a decision",
            help="Each rank computes on its own share; gradients are averaged.",
            rank=r,
        )
        require_bytes(trial, r, recording, size)
