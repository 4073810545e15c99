"""Checks of `reduce_gradients`: the whole gradients of a unit become the mean in its shards."""

from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import CheckEnded, Trial, check, exercise, is_close
from lessons_shared.infinite import LEAVE_THEM, REPLACED

from .units import FROZEN, SHAPES, draw_tensors, make_parameters, whole_gradients
from .wire import SMALL, travelled

exercise(
    "reduce_gradients",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    uses=("ShardedUnit",),
    hints=(
        "Lay the gradients out as you laid out the weights, zeros where one is None: row r of n is what rank "
        "r has shards of.",
        "dist.reduce_scatter(row, list_of_n_rows, group=unit.group) gives this rank the sum of its row: "
        "divide by n, and cut it into the shards' sizes.",
        "A shard's .grad may be there from an earlier pass: add. Then set each whole parameter.grad to None.",
    ),
)

MISSING = 1
"""The parameter that has no gradient, but in the second of two passes."""


def give(given: list[Any], gradients: list[Tensor], without: tuple[int, ...] = (FROZEN, MISSING)) -> None:
    for i, (parameter, gradient) in enumerate(zip(given, gradients, strict=True)):
        parameter.grad = None if i in without else gradient.clone().to(parameter.device)


def reduce_twice(rank: Any, tensors: list[Tensor], first: list[Tensor], second: list[Tensor]) -> dict:
    given = make_parameters(tensors, rank.device)
    unit = rank.submission.ShardedUnit(given, rank.group)
    unit.gather()
    rank.submission.reduce_gradients(unit)  # there is none yet
    untouched = [shard.grad is None for shard in unit.shards]
    seen = {}
    give(given, first)
    with rank.record() as recording:
        rank.submission.reduce_gradients(unit)
    seen["left"] = [parameter.grad is not None for parameter in given]
    seen["frozen"] = unit.shards[FROZEN].grad is not None
    seen["dtypes"] = [str(shard.grad.dtype) for shard in unit.shards if shard.grad is not None]
    seen["none"] = [shard.numel() > 0 and shard.grad is None for shard in unit.shards]
    seen["has"] = [shard.numel() > 0 and shard.grad is not None for shard in unit.shards]
    once = [None if shard.grad is None else shard.grad.clone() for shard in unit.shards]
    with rank.record() as silence:
        rank.submission.reduce_gradients(unit)  # all are dropped: nothing is left to do
    give(given, second, (FROZEN,))
    rank.submission.reduce_gradients(unit)
    twice = [None if shard.grad is None else shard.grad.clone() for shard in unit.shards]
    for name, gradients in (("once", once), ("twice", twice)):
        for shard, gradient in zip(unit.shards, gradients, strict=True):
            shard.grad = gradient
        seen[name] = whole_gradients([unit])
    return seen | {"recording": recording, "silence": silence, "untouched": untouched}


def observe(trial: Trial) -> SimpleNamespace:
    tensors, first, second = (draw_tensors(trial) for _ in range(3))
    per_rank = list(zip(tensors, first, second, strict=True))
    results = trial.run(reduce_twice, per_rank=per_rank)
    return SimpleNamespace(results=results, first=first, second=second)


def by_parameter(
    gradients: list[list[Tensor]], i: int, without: tuple[int, ...] = (FROZEN, MISSING)
) -> Tensor:
    """Of all ranks: (n, ...); zeros where a parameter has none."""
    own = torch.stack([each[i] for each in gradients])
    return torch.zeros_like(own) if i in without else own


SKIPPED = "the unit was skipped because one gradient is None: a single missing one counts as zero"


def skipped(seen: SimpleNamespace) -> bool:
    """Whether all ranks have nothing of the first pass, and the second, which misses none, is right."""
    return all(
        not result["once"][i].any() and is_close(result["twice"][i], mean)
        for i in range(len(SHAPES))
        for mean in [by_parameter(seen.second, i, (FROZEN,)).mean(0)]
        for result in seen.results
    )


FILL_IN = "Fill in zeros where a gradient is None, and return only where all of them are."


def require_a_gradient(trial: Trial, seen: SimpleNamespace) -> None:
    """Where a parameter has a gradient, the .grad of its shard is not None."""
    trained = [i for i in range(len(SHAPES)) if i not in (FROZEN, MISSING)]
    left_out = [i for i in trained if not any(result["has"][i] for result in seen.results)]
    cause, help = "", "shard.grad = mean, or shard.grad + mean where there is one already."
    if skipped(seen):
        cause, help = SKIPPED, FILL_IN
    elif left_out == [i for i in trained if i > FROZEN]:
        cause = f"what comes after parameter {FROZEN}, which is frozen, is left out; what comes before is not"
        help = "Pass over a frozen parameter by continue: return or break ends the loop."
    elif left_out == trained:
        help = (
            f"Return early only where no parameter has a gradient: parameter {FROZEN} is frozen. Then {help}"
        )
    for r, result in enumerate(seen.results):
        for i in trained:
            trial.require(
                not result["none"][i],
                f"unit.shards[{i}].grad is None, and unit.parameters[{i}] had a gradient",
                help=help,
                rank=r,
                cause=cause,
            )


@check("reduce_gradients")
def shards_get_the_mean(trial: Trial) -> None:
    """The shards' `.grad` are this rank's share of the mean of all ranks' gradients."""
    seen, n = trial.once(observe), trial.num_ranks
    require_a_gradient(trial, seen)
    for i, shape in enumerate(SHAPES):
        own = by_parameter(seen.first, i)
        alternatives = {
            "it is the sum of the ranks' gradients: divide by the number of ranks": own.sum(0),
            "it is rank 0's gradient": own[0],
            SKIPPED if skipped(seen) else "it is zero": torch.zeros_like(own[0]),
        }
        found = [result["once"][i] for result in seen.results]
        parts = all(bool((own == each).any(0).all()) for each in found if each.shape == own.shape[1:])
        if n > 1 and parts and i not in (FROZEN, MISSING):
            alternatives["each shard has its own rank's gradient: nothing was reduced"] = found
        trial.close(
            f"the gradient of the parameter of shape {shape}",
            found,
            own.mean(0),
            alternatives=alternatives if n > 1 else {},
            help=FILL_IN
            if skipped(seen)
            else "Reduce-scatter sums, in rows of one size: pad, divide by n, cut the padding off.",
        )
    if n > 1:
        require_mean_without_one(trial)


ALONE = 3
"""The parameter that, in another pass, has no gradient on the last rank, and has one on the others."""


@dataclass(frozen=True)
class Unit:
    """A unit that has a parameter without a gradient on the last rank."""

    told: str
    frozen: int | None
    dtype: torch.dtype
    """Of the parameter that has none; the others are in float64."""
    cause: str


UNITS = (
    Unit(
        "of one dtype", FROZEN, torch.float64, "Where a parameter has none on any rank, the same call returns"
    ),
    Unit(
        "without a frozen one", None, torch.float64, "In a unit with a frozen parameter the same call returns"
    ),
    Unit(
        "of two dtypes",
        None,
        torch.float32,
        "It is the only one of its dtype there, and in a unit of one dtype the same call returns",
    ),
)


def reduce_once(rank: Any, count: int, tensors: list[Tensor], gradients: list[Tensor]) -> list:
    """Of the first units: whether the shard got no gradient, and the mean gradients."""
    found = []
    for each in UNITS[:count]:
        own = [x.to(each.dtype) if i == ALONE else x for i, x in enumerate(tensors)]
        given = make_parameters(own, rank.device, each.frozen)
        unit = rank.submission.ShardedUnit(given, rank.group)
        unit.gather()
        last = rank.group.rank() == rank.group.size() - 1
        give(given, [g.to(w.dtype) for g, w in zip(gradients, own, strict=True)], without(each, last))
        rank.submission.reduce_gradients(unit)
        shard = unit.shards[ALONE]
        none = shard.numel() > 0 and shard.grad is None
        found.append({"none": none, "mean": [mean.double() for mean in whole_gradients([unit])]})
    return found


def without(unit: Unit, last: bool) -> tuple[int, ...]:
    """The parameters that have no gradient."""
    frozen = () if unit.frozen is None else (unit.frozen,)
    return (*frozen, ALONE) if last else frozen


def reduce_units(trial: Trial, tensors: list[list[Tensor]], gradients: list[list[Tensor]]) -> list[list]:
    """By rank, what is found of each unit; where it ends early, the first unit in which it does is told."""
    per_rank = list(zip(tensors, gradients, strict=True))
    try:
        return trial.run(reduce_once, len(UNITS), per_rank=per_rank)
    except CheckEnded as end:
        returns = 0
        with suppress(CheckEnded):
            for count in range(1, len(UNITS)):
                trial.run(reduce_once, count, per_rank=per_rank)
                returns = count
        end.cause, end.help = f"{ON_THE_LAST.format(trial.num_ranks - 1)}. {UNITS[returns].cause}", SAME_CALLS
        raise


ON_THE_LAST = "a parameter has no gradient on rank {}, and has one on every other"
SAME_CALLS = (
    "Fill in zeros where a gradient is None: every rank makes the same calls, and n counts them all. Whether "
    "there is any is asked of the whole unit."
)


def require_mean_without_one(trial: Trial) -> None:
    """A gradient that the last rank alone has not counts as zero, and all ranks make the same calls."""
    n = trial.num_ranks
    tensors, gradients = draw_tensors(trial), draw_tensors(trial)
    told = ON_THE_LAST.format(n - 1)
    results = reduce_units(trial, tensors, gradients)
    gradients[-1][ALONE].zero_()
    for k, unit in enumerate(UNITS):
        for r, result in enumerate(results):
            trial.require(
                not result[k]["none"],
                f"{told}, and the shard that this rank has of it is left without a .grad",
                help="The mean of the others' gradients, this one counting as zero, comes to every rank's "
                "shard.",
                rank=r,
            )
        for i, shape in enumerate(SHAPES):
            own = by_parameter(gradients, i, without(unit, last=False))
            trial.close(
                f"the gradient of the parameter of shape {shape}, where {told}, in a unit {unit.told},",
                [result[k]["mean"][i] for result in results],
                own.mean(0),
                rtol=1e-6,
                alternatives={"the mean over those ranks that have one": own[:-1].mean(0)}
                if i == ALONE
                else {},
                help=SAME_CALLS,
            )


@check("reduce_gradients")
def passes_add_up(trial: Trial) -> None:
    """A second call adds the mean of the new gradients to what is there."""
    seen = trial.once(observe)
    for i, shape in enumerate(SHAPES):
        first = by_parameter(seen.first, i).mean(0)
        second = by_parameter(seen.second, i, (FROZEN,)).mean(0)
        trial.close(
            f"the gradient of the parameter of shape {shape} after two calls",
            [result["twice"][i] for result in seen.results],
            first + second,
            alternatives={
                "the second call's gradient replaced the first's": second,
                "the first call's counts twice: is the whole gradient dropped?": 2 * first + second,
            },
            help="shard.grad = mean, or shard.grad + mean where there is one already.",
        )


@check("reduce_gradients", world_sizes=(2, 3))
def whole_gradients_are_dropped(trial: Trial) -> None:
    """Afterwards no whole gradient is left, and a unit without gradients sends nothing and gets none."""
    for r, result in enumerate(trial.once(observe).results):
        trial.require(
            not any(result["left"]),
            f"of the parameters' .grad, {sum(result['left'])} are still there",
            help="parameter.grad = None, once it is reduced: a whole gradient is as large as the weight.",
            rank=r,
        )
        trial.require(
            all(result["untouched"]) and not result["silence"].events,
            "a unit of which no parameter has a gradient was reduced all the same",
            help="Return at once where all of them are None: frozen weights, or what no backward reached.",
            rank=r,
        )
        trial.require(
            not result["frozen"],
            "the shard of a frozen parameter has a .grad",
            help="AdamW decays whatever has a gradient, even one of zeros.",
            rank=r,
        )


@check("reduce_gradients", world_sizes=(2, 4), subgroup=False)
def p_elements_travel(trial: Trial) -> None:
    """Each rank receives the mean of its own share alone: P elements travel, no all-reduce."""
    n = trial.num_ranks
    size = 8 * sum(torch.Size(shape).numel() + n * 7 for shape in SHAPES)
    for r, result in enumerate(trial.once(observe).results):
        sent = travelled(result["recording"], n)
        trial.require(
            not sent.all_reduced,
            f"{sent.all_reduced // 2} bytes of gradients were all-reduced",
            help="dist.reduce_scatter: half the bytes.",
            rank=r,
            cause="every rank got every mean, and threw most of it away",
        )
        trial.require(
            0 < sent.total <= size + SMALL,
            f"{sent.total} bytes of tensors travelled for gradients of {size} at most",
            help="One reduce-scatter carries each gradient once.",
            rank=r,
        )


LOW, HIGH = torch.bfloat16, torch.float32


def keeps_digits(rank: Any, unit: Any, given: list[Tensor]) -> bool:
    """Whether a third in a shard's `.grad`, which bfloat16 rounds, is as it was once zeros were added."""
    before = [shard.grad for shard in unit.shards]
    thirds = [torch.full_like(shard, 1 / 3) for shard in unit.shards]
    for shard, gradient, third in zip(unit.shards, before, thirds, strict=True):
        shard.grad = None if gradient is None else third.clone()
    give(given, [torch.zeros_like(whole) for whole in given])
    rank.submission.reduce_gradients(unit)
    after = [shard.grad for shard in unit.shards]
    for shard, gradient in zip(unit.shards, before, strict=True):
        shard.grad = gradient
    return all(x is None or torch.equal(x, third) for x, third in zip(after, thirds, strict=True))


def narrowed(rank: Any, tensors: list[Tensor], gradients: list[Tensor]) -> dict:
    """What travels where gradients in HIGH are to be summed in LOW, and whether all means are finite.

    One number on rank 0 is not.
    """
    given = make_parameters(tensors, rank.device)
    unit = rank.submission.ShardedUnit(given, rank.group, reduce_dtype=LOW)
    unit.gather()
    give(given, [gradient.to(HIGH) for gradient in gradients])
    if rank.rank == 0:
        given[-1].grad[0, 0] = torch.inf
    with rank.record() as recording:
        rank.submission.reduce_gradients(unit)
    finite = all(shard.grad is None or bool(shard.grad.isfinite().all()) for shard in unit.shards)
    return {"recording": recording, "finite": finite}


def reduce_low(rank: Any, tensors: list[Tensor], gradients: list[Tensor], high: bool) -> dict:
    given = make_parameters(tensors, rank.device)
    unit = rank.submission.ShardedUnit(
        given, rank.group, param_dtype=LOW, reduce_dtype=HIGH if high else None
    )
    unit.gather()
    give(given, gradients)
    with rank.record() as recording:
        rank.submission.reduce_gradients(unit)
    dtypes = [str(shard.grad.dtype) for shard in unit.shards if shard.grad is not None]
    keeps = keeps_digits(rank, unit, given)
    for shard in unit.shards:  # gathering rounds to bfloat16: two halves are both exact enough
        shard.grad = None if shard.grad is None else shard.grad.to(shard.dtype)
    whole = whole_gradients([unit])
    rest = [None if s.grad is None else s.grad - s.grad.to(LOW).to(s.dtype) for s in unit.shards]
    for shard, gradient in zip(unit.shards, rest, strict=True):
        shard.grad = gradient
    low = whole_gradients([unit])
    return {
        "mean": [a.double() + b.double() for a, b in zip(whole, low, strict=True)],
        "recording": recording,
        "dtypes": dtypes,
        "keeps": keeps,
        "narrowed": narrowed(rank, tensors, gradients) if high else None,
    }


def observe_low(trial: Trial) -> SimpleNamespace:
    tensors = draw_tensors(trial, HIGH)
    gradients = draw_tensors(trial, LOW)
    per_rank = list(zip(tensors, gradients, strict=True))
    results = {
        str(dtype): trial.run(reduce_low, per_rank=[(*each, dtype == HIGH) for each in per_rank])
        for dtype in (HIGH, None)
    }
    return SimpleNamespace(results=results, gradients=gradients)


@check("reduce_gradients", world_sizes=(2, 3), subgroup=False)
def what_is_infinite_stays_infinite(trial: Trial) -> None:
    """Where a number is infinite in a rank's gradient, so is its mean: a scaler of losses looks for that."""
    results = trial.once(observe_low).results[str(HIGH)]
    trial.require(
        not all(result["narrowed"]["finite"] for result in results),
        "a number of rank 0's gradient is infinite, and on all ranks all means are finite",
        cause=REPLACED,
        help=LEAVE_THEM,
    )


@check("reduce_gradients", world_sizes=(2, 3), subgroup=False)
def sums_are_in_reduce_dtype(trial: Trial) -> None:
    """Gradients are summed in the unit's reduce_dtype, or as they are; means have the shards' dtype."""
    seen = trial.once(observe_low)
    for asked, dtype in ((HIGH, HIGH), (None, LOW)):
        results = seen.results[str(asked)]
        told = f"with reduce_dtype={str(asked).removeprefix('torch.')}"
        for r, result in enumerate(results):
            kinds = {e.dtype for e in result["recording"].events if e.num_bytes > 8}
            trial.require(
                kinds == {str(dtype).removeprefix("torch.")},
                f"{told}, gradients travelled in {', '.join(sorted(kinds)) or 'no dtype'}",
                help="gradient.to(reduce_dtype) before the reduce-scatter, where there is one.",
                rank=r,
            )
            trial.require(
                set(result["dtypes"]) == {str(HIGH)},
                f"{told}, the shards are in {HIGH}, and their .grad in {', '.join(set(result['dtypes']))}",
                help="mean.to(shard.dtype): an optimizer in fp32 wants gradients in fp32.",
                rank=r,
            )
            trial.require(
                result["keeps"],
                f"{told}, a shard's .grad in {HIGH} lost digits when another mean, of zeros, was added to it",
                help="Bring the mean to the shard's dtype, and not the shard's .grad to the mean's.",
                rank=r,
                cause="it was added up in the dtype of the mean" if dtype == LOW else "",
            )
    for r, result in enumerate(seen.results[str(HIGH)]):
        kinds = {e.dtype for e in result["narrowed"]["recording"].events if e.num_bytes > 8}
        trial.require(
            kinds == {"bfloat16"},
            f"with reduce_dtype=bfloat16, gradients in float32 travelled in {', '.join(sorted(kinds))}",
            help="gradient.to(reduce_dtype), whichever of the two has more digits: half the bytes.",
            rank=r,
        )
    for i, shape in enumerate(SHAPES):
        own = by_parameter(seen.gradients, i).double()
        trial.close(
            f"the mean in float32 of bfloat16 gradients of shape {shape}",
            [result["mean"][i] for result in seen.results[str(HIGH)]],
            own.mean(0),
            rtol=1e-4,
            alternatives={
                "it was rounded to bfloat16": own.sum(0).to(LOW).div(trial.num_ranks).to(LOW).double(),
                "each rank divided its gradient by the number of ranks in bfloat16, before the cast": (
                    own.to(LOW).div(trial.num_ranks).double().sum(0)
                ),
            },
            help="Cast first, then divide and sum; do not cast back before the mean is in the shard's .grad.",
        )
