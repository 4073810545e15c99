"""Checks of `all_reduce_gradients`: mean gradients after backward."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import CheckEnded, Recording, Trial, Verdict, check, exercise, is_close
from lessons_shared.infinite import require_shown

from .means import (
    BOTH,
    NOTHING_AVERAGED,
    REDUCTIONS,
    draw_passes,
    expected_gradients,
    require_bytes,
    require_mean,
    require_waits,
    sizes_of,
    told_if_zeros_are_float32,
)
from .models import (
    Mixed,
    build,
    by_rank,
    gradients,
    seeds,
    turn,
    weights,
)

exercise(
    "all_reduce_gradients",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "model.parameters() names a tied weight once. The gradient stands in parameter.grad.",
        "An all-reduce needs every rank. If one rank leaves a parameter out because its gradient is None, "
        "who answers the "
        "ranks that have one?",
        "requires_grad is the same on every rank; grad being None is not. Decide by the first, and fill in "
        "zeros.",
    ),
)

SHAPES = ((5,), (2, 3))


def average(
    rank: Any,
    double: bool,
    turned: bool,
    twice: bool,
    seed: int,
    tokens: Tensor,
    targets: Tensor,
    order: tuple[str, ...],
) -> dict:
    """Backward on this rank's data, then the mean; with `turned`, another order in memory on later ranks.

    With `twice`, the gradients of another model are averaged afterwards, and then this one's, all trained.
    """
    model = build(Mixed, seed).to(rank.device)
    model = model.double() if double else model
    if turned and rank.rank > 0:
        turn(model)
    F.cross_entropy(model(tokens, order), targets).backward()
    with rank.record() as recording:
        rank.submission.all_reduce_gradients(model, rank.group)
        means = gradients(model)  # what a functional collective returns waits when it is read
    return {
        "gradients": means,
        "overwritten": overwritten(rank, model, means) if twice else [],
        "weights": weights(model),
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "recording": recording,
        "device": rank.device.type,
        "thawed": thawed(rank, model) if twice else None,
    }


def overwritten(rank: Any, model: nn.Module, means: dict[str, Tensor | None]) -> list[str]:
    """Of a model's mean gradients, those that averaging another model's of the same sizes has changed."""
    other = deepcopy(model)
    for parameter in other.parameters():
        parameter.grad = torch.full_like(parameter, 7.0) if parameter.requires_grad else None
    rank.submission.all_reduce_gradients(other, rank.group)
    now = gradients(model)
    return [name for name, mean in means.items() if mean is not None and not torch.equal(now[name], mean)]


def thawed(rank: Any, model: Mixed) -> dict[str, Tensor | None]:
    """The means in another call, before which a frozen weight was made one that is trained."""
    model.frozen.requires_grad_(True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, rank.rank + 1.0)
    rank.submission.all_reduce_gradients(model, rank.group)
    return gradients(model)


def observe_average(
    trial: Trial,
    order: list[tuple[str, ...]],
    double: bool = False,
    turned: bool = False,
    numbers: list[int] | None = None,
) -> SimpleNamespace:
    """All ranks start with the same weights, or with those of their own seeds."""
    numbers = numbers or [trial.seed()] * trial.num_ranks
    passes = draw_passes(trial, order)
    per_rank = [(number, *batch) for number, batch in zip(numbers, passes[0], strict=True)]
    twice = order == [BOTH]  # else ranks that wait for ever would meet in a later call
    results = trial.run(average, double, turned, twice, per_rank=per_rank)
    expected, own = expected_gradients(numbers, passes)
    models = [build(Mixed, number) for number in numbers]
    return SimpleNamespace(
        results=results,
        expected=expected,
        own=own,
        starts=[weights(model) for model in models],
        buffers=[dict(model.named_buffers()) for model in models],
        sizes=sizes_of(passes),
    )


def observe_all_used(trial: Trial) -> SimpleNamespace:
    return observe_average(trial, [BOTH])


def observe_some_unused(trial: Trial) -> SimpleNamespace:
    return observe_average(trial, [("left",), BOTH])


def observe_double(trial: Trial) -> SimpleNamespace:
    with told_if_zeros_are_float32():
        return observe_average(trial, [("left",), BOTH], double=True)


def observe_turned(trial: Trial) -> SimpleNamespace:
    return observe_average(trial, [BOTH], turned=True)


def observe_different_weights(trial: Trial) -> SimpleNamespace:
    return observe_average(trial, [BOTH], numbers=seeds(trial))


def weights_were_averaged(trial: Trial) -> bool:
    """Whether ranks whose weights differ have the mean of these afterwards."""
    try:
        seen = trial.once(observe_different_weights)
    except CheckEnded:
        return False
    mean = torch.stack([start["left.weight"] for start in seen.starts]).mean(0)
    return all(is_close(result["weights"]["left.weight"], mean) for result in seen.results)


@check("all_reduce_gradients")
def gradients_are_the_mean_over_ranks(trial: Trial) -> None:
    """After the call every rank has the mean of all ranks' gradients."""
    try:
        require_mean(
            trial, trial.once(observe_all_used), help="All-reduce the sum, divide by group.size(), once."
        )
    except CheckEnded as end:
        if end.cause == NOTHING_AVERAGED and weights_were_averaged(trial):
            end.cause = "what is averaged are the weights, not the gradients"
            end.help = "The gradient is parameter.grad; the parameter itself is the weight."
        raise


@check("all_reduce_gradients")
def every_model_has_its_own(trial: Trial) -> None:
    """The gradients of one model stay as they are when another model's are averaged."""
    for r, result in enumerate(trial.once(observe_all_used).results):
        changed = result["overwritten"]
        trial.require(
            not changed,
            f"the gradients of {', '.join(changed[:3])} changed when those of another model of the same "
            "sizes were averaged",
            cause="a buffer that is kept between calls is what .grad points into",
            help="Make a new buffer in each call, or copy the means out of it into each .grad.",
            rank=r,
        )


@check("all_reduce_gradients")
def a_missing_gradient_counts_as_zero(trial: Trial) -> None:
    """A layer that only some ranks used: the others, whose gradient is None, count as zero."""
    seen = trial.once(observe_some_unused)
    require_mean(
        trial,
        seen,
        help="Every rank takes part, with zeros where it has no gradient, n counts all ranks, and the mean "
        "becomes .grad also where there was none.",
    )


def average_what_is_there(rank: Any, *own: Tensor | None) -> list[Tensor | None]:
    """The means of two gradients, whose shapes all ranks know; None is one that this rank has not."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape, device=rank.device)) for shape in SHAPES])
    for parameter, gradient in zip(model, own, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    rank.submission.all_reduce_gradients(model, rank.group)
    return [parameter.grad for parameter in model]


@check("all_reduce_gradients", world_sizes=(2, 3), subgroup=False)
def a_rank_may_have_no_gradient_at_all(trial: Trial) -> None:
    """A rank on which every gradient is None counts as zero, and nobody waits for it."""
    last = trial.num_ranks - 1
    own = [tuple(trial.normal(*shape) for shape in SHAPES) for _ in range(last)]
    try:
        results = trial.run(average_what_is_there, per_rank=[*own, (None, None)])
    except CheckEnded as end:
        left = end.verdict == Verdict.HUNG and f"rank {last} had finished" in end.details
        if left and returns_where_each_has_one(trial):
            end.cause = (
                f"rank {last} has no gradient at all, and leaves before the others' collectives, which wait "
                "for it. Where every rank has one, all of it returns"
            )
            end.help = "Send zeros for what is None, also where all are: requires_grad is alike on all ranks."
        raise
    for i, shape in enumerate(SHAPES):
        trial.close(
            f"the gradient of shape {shape}, where rank {last} has none at all,",
            [result[i] for result in results],
            torch.stack([gradients[i] for gradients in own]).sum(0) / trial.num_ranks,
            help="Zeros take part in the mean, and what all ranks get becomes .grad, also where it was None.",
        )


def returns_where_each_has_one(trial: Trial) -> bool:
    """Whether the ranks return where each has one gradient of two, not all of them the same."""
    ones = [torch.ones(shape) for shape in SHAPES]
    some = [(ones[0], None), (None, ones[1])]
    by_rank = [some[r % 2] for r in range(trial.num_ranks)]
    try:
        trial.run(average_what_is_there, per_rank=by_rank)
    except CheckEnded:
        return False
    return True


@check("all_reduce_gradients")
def frozen_parameters_keep_none(trial: Trial) -> None:
    """A frozen parameter gets no gradient."""
    for r, gradient in enumerate(by_rank(trial.once(observe_all_used).results, "gradients", "frozen.weight")):
        trial.require(
            gradient is None,
            "frozen.weight (requires_grad False) got a gradient",
            rank=r,
            help="Leave parameters out that are not trained: an optimizer would decay them.",
        )


@check("all_reduce_gradients")
def what_is_trained_may_change(trial: Trial) -> None:
    """A weight that was frozen in one call, and is trained before the next, is averaged in that."""
    results, n = trial.once(observe_all_used).results, trial.num_ranks
    own = [torch.full((7, 7), r + 1.0) for r in range(n)]
    kept = "each rank's own: what is trained was listed in the call before, and the list is kept"
    trial.close(
        "the gradient of frozen.weight, which is trained in a second call,",
        [result["thawed"]["frozen.weight"] for result in results],
        torch.full((7, 7), (n + 1) / 2),
        alternatives={kept: own} if n > 1 else {},
        help="Ask for requires_grad in each call.",
    )


def average_twice(rank: Any, own: Tensor) -> Tensor | None:
    """The mean of a gradient that all ranks have in one call, and rank 0 has not in the next."""
    model = nn.ParameterList([nn.Parameter(torch.zeros_like(own))])
    for gradient in (own.clone(), own.clone() if rank.rank else None):
        model[0].grad = gradient
        rank.submission.all_reduce_gradients(model, rank.group)
    return model[0].grad


@check("all_reduce_gradients", world_sizes=(2,), subgroup=False)
def each_call_has_its_own_gradients(trial: Trial) -> None:
    """A gradient that was there in the call before, and is None on a rank in this one, counts as zero."""
    own = [trial.normal(5, 3) for _ in range(2)]
    right, mean = own[1] / 2, (own[0] + own[1]) / 2
    trial.close(
        "the gradient that rank 0 has in one call, and lacks in the next,",
        trial.run(average_twice, per_rank=[(each,) for each in own]),
        right,
        alternatives={
            "rank 0 sends the mean of the call before: memory that is kept from call to call holds it": (
                right + mean / 2
            ),
            "rank 0 sends its gradient of the call before: memory that is kept still holds it": mean,
        },
        help="Where .grad is None, send zeros: in memory that is kept, write them in each call.",
    )


@check("all_reduce_gradients")
def weights_are_left_alone(trial: Trial) -> None:
    """Gradients are averaged, weights and buffers are not touched, also where those of the ranks differ."""
    seen = trial.once(observe_different_weights)
    for name in seen.starts[0]:
        what, help = f"the weight {name}", "It is parameter.grad that travels, not the parameter."
        starts, now = [start[name] for start in seen.starts], by_rank(seen.results, "weights", name)
        alternatives = {"the mean of all ranks' weights": torch.stack(starts).mean(0)}
        trial.close(what, now, starts, alternatives=alternatives, help=help)
        trial.close(what, now, starts, rtol=0.0, help=help)
    for name in seen.buffers[0]:
        own = [buffers[name] for buffers in seen.buffers]
        trial.close(
            f"the buffer {name}",
            by_rank(seen.results, "buffers", name),
            own,
            alternatives={"the mean of all ranks' buffers": torch.stack(own).mean(0)}
            if own[0].is_floating_point()
            else {},
            rtol=0.0,
            help="A buffer has no gradient: nothing of it travels.",
        )


@check("all_reduce_gradients", world_sizes=(2, 4), subgroup=False)
def gradients_may_lie_in_another_order(trial: Trial) -> None:
    """Gradients that lie in memory transposed on some ranks, and not on others, are averaged by element."""
    seen = trial.once(observe_turned)
    require_mean(
        trial,
        seen,
        help="A collective sends memory as it lies: reduce gradient.contiguous(), and put the result back.",
    )


@check("all_reduce_gradients")
def gradients_keep_the_models_dtype(trial: Trial) -> None:
    """A float64 model is averaged in float64, and its gradients stay float64."""
    require_mean(trial, trial.once(observe_double), help="Make buffers and zeros in the parameter's dtype.")


@check("all_reduce_gradients")
def every_gradient_is_sent_once(trial: Trial) -> None:
    """What is reduced is one copy of the gradients: a tied weight's once, and frozen weights' not at all."""
    seen = trial.once(observe_all_used)
    size = sum(weight.numel() * 4 for name, weight in seen.starts[0].items() if name != "frozen.weight")
    for r, result in enumerate(seen.results):
        require_bytes(trial, r, result["recording"], size)


def mostly_frozen() -> nn.Sequential:
    """Two layers in bfloat16; the first, which is twice as large, is frozen."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)).to(torch.bfloat16)
    model[0].requires_grad_(False)
    return model


def average_in_16_bits(rank: Any) -> Recording:
    """What travels where all gradients are in bfloat16, and most of the model is frozen."""
    model = mostly_frozen().to(rank.device)
    for parameter in model[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    with rank.record() as recording:
        rank.submission.all_reduce_gradients(model, rank.group)
    return recording


def observe_16_bits(trial: Trial) -> list[Recording]:
    return trial.run(average_in_16_bits)


@check("all_reduce_gradients", world_sizes=(2,), subgroup=False)
def frozen_weights_do_not_travel(trial: Trial) -> None:
    """Where two thirds of a model are frozen, a third travels: a frozen weight has no place in a buffer."""
    frozen, trained = (sum(p.numel() for p in layer.parameters()) for layer in mostly_frozen())
    for r, recording in enumerate(trial.once(observe_16_bits)):
        reduced = sum(e.num_elements for e in recording.select() if e.kind in REDUCTIONS)
        trial.require(
            reduced < trained + frozen // 2,
            f"{reduced} numbers were reduced, the gradients have {trained}, and frozen weights {frozen}",
            cause="the frozen weights travel as well, or places for them"
            if reduced == trained + frozen
            else "",
            help="Make the buffer as long as the parameters that have requires_grad, and send no more of it.",
            rank=r,
        )


@check("all_reduce_gradients", world_sizes=(2,), subgroup=False)
def gradients_travel_in_their_dtype(trial: Trial) -> None:
    """Gradients in bfloat16 travel as bfloat16: as float32 they would be twice the bytes."""
    for r, recording in enumerate(trial.once(observe_16_bits)):
        large = {event.dtype for event in recording.select() if event.num_elements >= 16}
        trial.require(
            large <= {"bfloat16"},
            f"the gradients are bfloat16, and what travels is {', '.join(sorted(large))}",
            help="Send them in their own dtype: the mean has no more digits than that in the end.",
            rank=r,
        )


@check("all_reduce_gradients")
def every_all_reduce_is_over(trial: Trial) -> None:
    """When the call returns, every all-reduce is over: each one that was started was waited for."""
    results = trial.once(observe_all_used).results
    require_waits(trial, results, "a gradient may not be the mean yet when the call returns")


def average_two(rank: Any, narrow: Tensor, wide: Tensor) -> list[Tensor]:
    """The means of two gradients, the first in float32, the second in float64."""
    model = nn.ParameterList([nn.Parameter(torch.zeros_like(gradient)) for gradient in (narrow, wide)])
    for parameter, gradient in zip(model, (narrow, wide), strict=True):
        parameter.grad = gradient.clone()
    rank.submission.all_reduce_gradients(model, rank.group)
    return [parameter.grad for parameter in model]


def average_opposites(rank: Any) -> dict:
    """The means of a weight whose gradients cancel out, and of a bias whose gradients do not.

    One of these is infinite, on the first rank.
    """
    model = nn.Linear(3, 2).to(rank.device)
    n, r = rank.group.size(), rank.rank
    model.weight.grad = torch.full_like(model.weight, (r == 0) - float(r == n - 1))
    model.bias.grad = torch.ones_like(model.bias)
    model.bias.grad[0] = torch.inf if r == 0 else 1.0
    rank.submission.all_reduce_gradients(model, rank.group)
    return gradients(model)


def observe_opposites(trial: Trial) -> list[dict]:
    return trial.run(average_opposites)


@check("all_reduce_gradients")
def a_mean_of_zero_is_a_gradient(trial: Trial) -> None:
    """Where the ranks' gradients cancel out, the mean is zero, and not None: AdamW's decay goes by that."""
    for r, found in enumerate(trial.once(observe_opposites)):
        trial.require(
            found["weight"] is not None,
            "the ranks' gradients of a weight cancel out, and its .grad is None",
            cause="a mean that is zero is taken for that of a weight that nobody used"
            if found["bias"] is not None
            else "",
            help="Zero is a number: decide by requires_grad, or by whether .grad was None on all ranks.",
            rank=r,
        )
        trial.close("a mean of gradients that cancel out", found["weight"], torch.zeros(2, 3), rtol=0.0)


@check("all_reduce_gradients")
def what_is_infinite_stays_infinite(trial: Trial) -> None:
    """Where a rank's gradient is infinite, so is the mean on all ranks: a scaler of losses looks for that."""
    means = [found["bias"] for found in trial.once(observe_opposites)]
    require_shown(
        trial,
        [mean is not None and bool(mean.isfinite().all()) for mean in means],
        "the first rank's gradient of a bias is infinite, and the mean is finite",
    )


@check("all_reduce_gradients", world_sizes=(2,), subgroup=False, optional=True)
def no_gradient_loses_digits_to_another(trial: Trial) -> None:
    """In a model of two dtypes, each gradient is averaged to its own dtype's digits."""
    dtypes = (torch.float32, torch.float64)
    own = [[trial.normal(64, dtype=dtype) for dtype in dtypes] for _ in range(trial.num_ranks)]
    results = trial.run(average_two, per_rank=[tuple(gradients) for gradients in own])
    for i, dtype in enumerate(dtypes):
        told = str(dtype).removeprefix("torch.")
        expected = torch.stack([gradients[i].double() for gradients in own]).mean(0)
        trial.close(
            f"the gradient in {told}, in a model of float32 and float64,",
            [result[i] for result in results],
            expected.to(dtype),
            alternatives={
                "it was averaged in float32, as the model's first parameter is": torch.stack(
                    [gradients[i].float() for gradients in own]
                )
                .mean(0)
                .to(dtype)
            }
            if i
            else {},
            rtol=1e-12 if i else None,
            help="A tensor has one dtype: flatten gradients of one dtype together, or send each by itself.",
        )
