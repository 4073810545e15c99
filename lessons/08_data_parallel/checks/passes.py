"""Checks of `DataParallel` over passes that differ: unused layers, `no_sync()`, several backwards."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grader.checks import CheckEnded, Trial, check

from .means import (
    BOTH,
    draw_passes,
    expected_gradients,
    require_bytes,
    require_mean,
    sizes_of,
)
from .models import (
    Mixed,
    Skipping,
    build,
    by_rank,
    gradients,
)


class UnreadableError(Exception):
    """A batch that can not be read."""


@contextmanager
def told_if_ranks_part(cause: str) -> Iterator[None]:
    """Inside, ranks that call different collectives, or wait for one that others never call, have a cause."""
    try:
        yield
    except CheckEnded as end:
        if any(words in end.message for words in ("the ranks parted", "never did")):
            end.cause = end.cause or cause
        raise


NOT_REDUCED = "each rank's own sum: it was not reduced"
INSIDE, LEAVING = "inside no_sync", "as no_sync ends"
NOTHING_PENDING = "finish after no_sync"
INSIDE_STILL = "inside no_sync, after an inner one"
FINISH = "finish"


def passes(
    rank: Any, seed: int, quiet: list[bool], broken: bool, other: bool, cleared: bool, batches: list[tuple]
) -> dict:
    """Backward passes of the awkward model, one bucket a parameter; `quiet` passes are inside no_sync().

    Not in the first pass, an inner no_sync() has ended by then. With `broken`, an exception leaves it each
    time. With `other`, the passes that are not quiet are inside the no_sync() of another module. With
    `cleared`, every pass is a step of its own: gradients are None when it begins.
    """
    model = build(Mixed, seed).to(rank.device)
    wrapped = rank.submission.DataParallel(model, rank.group, bucket_bytes=1)
    if other:
        beside = rank.submission.DataParallel(build(Skipping, seed).to(rank.device), rank.group)
    with rank.record() as recording:
        for number, (silent, (tokens, targets, order)) in enumerate(zip(quiet, batches, strict=True)):
            recording.mark(INSIDE if silent else "synchronised")
            if cleared:
                wrapped.zero_grad(set_to_none=True)
            if silent:
                with suppress(UnreadableError), wrapped.no_sync():
                    if number > 0:
                        with wrapped.no_sync():
                            pass
                        recording.mark(INSIDE_STILL)
                    F.cross_entropy(wrapped(tokens, order), targets).backward()
                    recording.mark(LEAVING if number == 0 else "")
                    if broken:
                        raise UnreadableError
                recording.mark(NOTHING_PENDING if number == 0 else "")
                wrapped.finish_gradient_synchronization()
            else:
                with beside.no_sync() if other else nullcontext():
                    F.cross_entropy(wrapped(tokens, order), targets).backward()
                    recording.mark(FINISH)
                    wrapped.finish_gradient_synchronization()
    return {"gradients": gradients(model), "recording": recording}


def observe_passes(
    trial: Trial,
    quiet: list[bool],
    *orders: list[tuple[str, ...]],
    broken: bool = False,
    other: bool = False,
    cleared: bool = False,
) -> SimpleNamespace:
    seed, drawn = trial.seed(), draw_passes(trial, *orders)
    given = [([p[r] for p in drawn],) for r in range(trial.num_ranks)]
    with told_if_ranks_part(
        "the ranks use other layers, or use them in another order, and so other buckets left, or in another "
        "order: every rank sends all buckets, and each one waits until those before it have left"
        if any(len(set(order)) > 1 for order in orders)
        else ""
    ):
        results = trial.run(passes, seed, quiet, broken, other, cleared, per_rank=given)
    first, drawn = drawn[0], drawn[-1:] if cleared else drawn
    expected, own = expected_gradients(seed, drawn)
    return SimpleNamespace(
        results=results,
        expected=expected,
        own=own,
        seed=seed,
        first=first,
        drawn=drawn,
        sizes=sizes_of(drawn),
    )


def other_sums(seen: SimpleNamespace, name: str) -> dict[str, Any]:
    """A parameter's gradient where not all passes are in it, or not all of them are averaged."""
    own = [gradient[name] for gradient in seen.own]
    last = expected_gradients(seen.seed, seen.drawn[-1:])[0][name]
    before = expected_gradients(seen.seed, seen.drawn[:-1])
    known = {
        "the last pass alone: what accumulated was dropped": last,
        NOT_REDUCED: own,
        "the last pass alone was averaged: what was there before it is each rank's own": [
            gradient[name] + last for gradient in before[1]
        ],
        "the passes before alone: what the last one added was dropped": before[0][name],
        "what was there before counts n times: it was averaged, and summed over the ranks once more": (
            len(own) * before[0][name] + last
        ),
    }
    if len(seen.drawn) > 2:
        told = "the first pass is gone: what was there is cleared when the next no_sync() begins"
        known[told] = expected_gradients(seen.seed, seen.drawn[1:])[0][name]
    return known


def by_pass(seen: SimpleNamespace, name: str) -> dict[str, Tensor]:
    """What each pass adds to the mean."""
    return {
        f"pass {i + 1} of {len(seen.drawn)}": expected_gradients(seen.seed, [drawn])[0][name]
        for i, drawn in enumerate(seen.drawn)
    }


def observe_corners(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [False], [("left",), BOTH])


def observe_other_order(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [False], [BOTH, ("right", "left")])


def observe_no_sync(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [True, True, False], [BOTH], [("left",), BOTH], [("right",)])


def observe_exception(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [True, False], [BOTH], [BOTH], broken=True)


def observe_another(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [False], [BOTH], other=True)


def observe_two_passes(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [False, False], [BOTH], [BOTH])


def observe_two_steps(trial: Trial) -> SimpleNamespace:
    """In the second step rank 0 does not use the layer that all ranks have used in the first."""
    return observe_passes(trial, [False, False], [BOTH], [("left",), BOTH], cleared=True)


@check("DataParallel")
def ranks_may_use_different_layers(trial: Trial) -> None:
    """A layer that some ranks did not use counts as zero there, and no rank waits for ever."""
    require_mean(
        trial,
        trial.once(observe_corners),
        help="finish_gradient_synchronization() sends the buckets that never became full.",
    )


@check("DataParallel", world_sizes=(2,), subgroup=False)
def each_step_has_its_own_gradients(trial: Trial) -> None:
    """After zero_grad(), a layer that a rank used in the step before and does not use now counts as zero."""
    seen = trial.once(observe_two_steps)
    for name in [n for n in seen.expected if n != "frozen.weight"]:
        trial.close(
            f"the gradient of {name} in a second step, after zero_grad(),",
            by_rank(seen.results, "gradients", name),
            seen.expected[name],
            alternatives=partial(stale, seen, name),
            help="Where a parameter has no gradient in this step, its place in the bucket is zero.",
        )


def stale(seen: SimpleNamespace, name: str) -> dict[str, Tensor]:
    """A mean in which rank 0, which has no gradient, sends what its bucket still holds of the first step."""
    n = len(seen.own)
    mean, own = expected_gradients(seen.seed, [seen.first])
    if seen.own[0][name].any():
        return {}
    return {
        f"rank 0 has no gradient of it in this step, and sends {what} once more: its bucket still holds it": (
            seen.expected[name] + value / n
        )
        for what, value in (
            ("the mean of the step before", mean[name]),
            ("its own gradient of the step before", own[0][name]),
            ("its share of the step before", own[0][name] / n),
        )
    }


def skip_all(rank: Any, seed: int, evaluating: bool, used: bool, x: Tensor) -> dict:
    """One pass of a module of which this rank may use no parameter; with `evaluating`, after eval()."""
    model = build(Skipping, seed).to(rank.device)
    wrapped = rank.submission.DataParallel(model, rank.group)
    wrapped.train(not evaluating)
    wrapped(x.requires_grad_(), used).square().sum().backward()
    wrapped.finish_gradient_synchronization()
    return {"gradients": gradients(model)}


def observe_evaluating(trial: Trial) -> SimpleNamespace:
    return observe_skipping(trial, evaluating=True)


def observe_skipping(trial: Trial, evaluating: bool = False) -> SimpleNamespace:
    """Rank 0 uses no parameter."""
    seed, n = trial.seed(), trial.num_ranks
    x = [trial.normal(4, 7) for _ in range(n)]
    with told_if_ranks_part(
        "rank 0's backward reached no parameter, and no hook was called there: a pass is pending since its "
        "forward, on all ranks alike, and finish_gradient_synchronization() sends what no hook has sent"
    ):
        results = trial.run(skip_all, seed, evaluating, per_rank=[(r > 0, x[r]) for r in range(n)])
    own = []
    for r in range(n):
        model = build(Skipping, seed).double()
        model(x[r].double().requires_grad_(), r > 0).square().sum().backward()
        own.append({name: torch.zeros_like(p) if r == 0 else p.grad for name, p in model.named_parameters()})
    expected = {name: torch.stack([g[name] for g in own]).mean(0) for name in own[0]}
    return SimpleNamespace(results=results, own=own, expected=expected, sizes=[4] * n)


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def a_rank_may_use_no_parameter(trial: Trial) -> None:
    """A rank whose backward reaches none of the parameters counts as zero, and nobody waits for it."""
    require_mean(
        trial,
        trial.once(observe_skipping),
        help="No hook fires there: what tells a rank that a pass is pending is its forward.",
    )


@check("DataParallel", world_sizes=(2,), subgroup=False)
def evaluation_with_gradients_counts(trial: Trial) -> None:
    """After eval(), with gradients switched on, the same pass is reduced as it is in training."""
    require_mean(trial, trial.once(observe_skipping))
    try:
        require_mean(trial, trial.once(observe_evaluating))
    except CheckEnded as end:
        end.cause = "the same pass is reduced in training: after eval() it is not"
        end.help = (
            "eval() switches dropout off, and no gradient. torch.is_grad_enabled() tells whether a backward "
            "may follow, and self.training does not."
        )
        raise


@check("DataParallel")
def frozen_parameters_get_no_gradient(trial: Trial) -> None:
    """A frozen parameter keeps None, and a tied weight is sent once."""
    seen = trial.once(observe_corners)
    size = sum(g.numel() * 4 for name, g in seen.expected.items() if name != "frozen.weight")
    for r, result in enumerate(seen.results):
        trial.require(
            result["gradients"]["frozen.weight"] is None,
            "frozen.weight got a gradient",
            rank=r,
            help="Put only parameters with requires_grad into buckets.",
        )
        require_bytes(trial, r, result["recording"], size)


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def order_of_hooks_does_not_matter(trial: Trial) -> None:
    """Where one rank's backward reaches two layers in the other order, gradients are not mixed up."""
    seen = trial.once(observe_other_order)
    for part in ("weight", "bias"):
        left, right = (torch.stack([own[f"{side}.{part}"] for own in seen.own]) for side in BOTH)
        odd = (torch.arange(trial.num_ranks) % 2 == 1).view(-1, *[1] * (left.dim() - 1))
        mixed = torch.where(odd, right, left).mean(0), torch.where(odd, left, right).mean(0)
        for side, i in (("left", 0), ("right", 1)):
            own = [mixed[i] if r % 2 == 0 else mixed[1 - i] for r in range(trial.num_ranks)]
            trial.close(
                f"the gradient of {side}.{part}",
                by_rank(seen.results, "gradients", f"{side}.{part}"),
                seen.expected[f"{side}.{part}"],
                alternatives={
                    "the gradients of two layers mixed up: ranks sent them in different orders": own
                },
                help="Send bucket 0, 1, 2… in this order on all ranks, whichever is ready first.",
            )
    require_mean(trial, seen, help="Send buckets in one order on all ranks.")


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def nothing_is_pending_after_no_sync(trial: Trial) -> None:
    """finish_gradient_synchronization() after a pass inside no_sync() does nothing."""
    for r, result in enumerate(trial.once(observe_no_sync).results):
        kinds = result["recording"].kinds(after=NOTHING_PENDING)
        trial.require(
            not kinds,
            f"called after a pass inside no_sync(), finish_… communicates: {kinds[:3]}",
            rank=r,
            cause="a forward inside no_sync() made a pass pending",
            help="A pass is pending since its forward, outside no_sync() alone.",
        )


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def nothing_is_sent_inside_no_sync(trial: Trial) -> None:
    """Forward and backward inside no_sync() communicate nothing, and neither does its end."""
    for r, result in enumerate(trial.once(observe_no_sync).results):
        kinds, ending, still = (
            result["recording"].kinds(after=mark) for mark in (INSIDE, LEAVING, INSIDE_STILL)
        )
        trial.require(
            not kinds,
            f"inside no_sync() there were {len(kinds)} communications: {kinds[:3]}",
            rank=r,
            help="The hooks fire during backward: it is they who must know that no_sync() is on.",
        )
        trial.require(
            not ending,
            f"as no_sync() ends there are {len(ending)} communications: {ending[:3]}",
            cause="what has added up is sent where no_sync() ends, not by the next backward outside",
            help="Its end switches sending on, and nothing more: the next micro-batch may be quiet too.",
            rank=r,
        )
        trial.require(
            not still,
            f"inside no_sync(), after an inner no_sync() has ended, there were {len(still)} communications: "
            f"{still[:3]}",
            cause="the end of the inner no_sync() has ended the outer one",
            help="Remember what was on before it, and put that back at its end.",
            rank=r,
        )


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def what_accumulated_is_reduced(trial: Trial) -> None:
    """The backward after no_sync() reduces the sum of all passes, also of layers that it did not use."""
    seen = trial.once(observe_no_sync)
    for name in [n for n in seen.expected if n != "frozen.weight"]:
        actual = by_rank(seen.results, "gradients", name)
        for r, gradient in enumerate(actual):
            trial.require(
                gradient is not None, f"{name} has no gradient: what accumulated was dropped", rank=r
            )
        trial.close(
            f"the gradient of {name} after two passes in no_sync() and one outside",
            actual,
            seen.expected[name],
            alternatives=partial(other_sums, seen, name),
            terms=partial(by_pass, seen, name),
            help="Send parameter.grad as it is then, with all that no_sync() added up.",
        )


@check("DataParallel", world_sizes=(2,), subgroup=False)
def no_sync_is_of_one_module(trial: Trial) -> None:
    """Inside no_sync() of one module, the gradients of another one are reduced as ever."""
    seen = trial.once(observe_another)
    for name in [n for n in seen.expected if n != "frozen.weight"]:
        trial.close(
            f"the gradient of {name} after a pass inside another module's no_sync()",
            by_rank(seen.results, "gradients", name),
            seen.expected[name],
            alternatives={
                "each rank's own: no_sync() of one module has switched off the other one too": [
                    own[name] for own in seen.own
                ]
            },
            help="Whether it is on belongs to self: what is set on the class, or is global, is everybody's.",
        )


@check("DataParallel", world_sizes=(2,), subgroup=False)
def an_exception_ends_no_sync(trial: Trial) -> None:
    """After an exception has left no_sync(), the next backward reduces, with all that had added up."""
    seen = trial.once(observe_exception)
    for name in [n for n in seen.expected if n != "frozen.weight"]:
        trial.close(
            f"the gradient of {name} after an exception in no_sync() and a pass outside",
            by_rank(seen.results, "gradients", name),
            seen.expected[name],
            alternatives=lambda name=name: {
                "no_sync() is still on: it is each rank's own sum" if told == NOT_REDUCED else told: value
                for told, value in other_sums(seen, name).items()
            },
            terms=partial(by_pass, seen, name),
            help="try: yield, finally: what switches sending on again.",
        )


@check("DataParallel", world_sizes=(2,), subgroup=False)
def two_passes_add_up(trial: Trial) -> None:
    """Two synchronised passes without zero_grad add up, as they do on one process."""
    seen = trial.once(observe_two_passes)
    for name in [n for n in seen.expected if n != "frozen.weight"]:
        trial.close(
            f"the gradient of {name} after two passes",
            by_rank(seen.results, "gradients", name),
            seen.expected[name],
            alternatives=partial(other_sums, seen, name),
            terms=partial(by_pass, seen, name),
            help="Nothing of the first pass may be lost, or be counted twice.",
        )
