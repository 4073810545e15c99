"""Checks of `DataParallel` over passes that differ: unused layers, another order, a step after a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grader.checks import CheckEnded, Fault, Trial, Verdict, check, is_close

from .means import (
    BOTH,
    ZEROS_IN_ITS_DTYPE,
    draw_passes,
    expected_gradients,
    require_bytes,
    require_mean,
    sizes_of,
    told_if_zeros_are_float32,
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
        if any(words in end.message for words in ("the ranks parted", "never did")) and not end.cause:
            end.cause, end.help = cause, OWN_PLACE if cause else end.help
        raise


OWN_PLACE = (
    "Each parameter has its bucket from the beginning, the same on every rank. Where it gets no gradient it "
    "counts as zero, and its bucket leaves all the same."
)


INSIDE, LEAVING = "inside no_sync", "as no_sync ends"
NOTHING_PENDING = "finish after no_sync"
INSIDE_STILL = "inside no_sync, after an inner one"
FINISH = "finish"


def passes(
    rank: Any,
    seed: int,
    quiet: list[bool],
    broken: bool,
    other: bool,
    cleared: bool,
    between: bool,
    double: bool,
    bucket_bytes: int,
    batches: list[tuple],
) -> dict:
    """Backward passes of the awkward model; `quiet` passes are inside no_sync().

    Not in the first pass, an inner no_sync() has ended by then. With `broken`, an exception leaves each of
    them. With `other`, the passes that are not quiet are inside the no_sync() of another module, and one more
    backward goes through both. With `cleared`, every pass is a step of its own: gradients are None when it
    begins; with `between`, too, they are cleared when its forward is over. With `double`, all is in float64.
    """
    model = build(Mixed, seed).to(rank.device)
    model = model.double() if double else model
    wrapped = rank.submission.DataParallel(model, rank.group, bucket_bytes=bucket_bytes)
    after = []
    if other:
        second = build(Skipping, seed).to(rank.device)
        beside = rank.submission.DataParallel(second, rank.group)
    with rank.record() as recording:
        for number, (silent, (tokens, targets, order)) in enumerate(zip(quiet, batches, strict=True)):
            recording.mark(INSIDE if silent else "synchronised")
            if cleared and not between:
                wrapped.zero_grad(set_to_none=True)
            if silent:
                with suppress(UnreadableError), wrapped.no_sync():
                    if number > 0:
                        with suppress(UnreadableError), wrapped.no_sync():
                            if broken:
                                raise UnreadableError
                        recording.mark(INSIDE_STILL)
                    F.cross_entropy(wrapped(tokens, order), targets).backward()
                    recording.mark(LEAVING if number == 0 else "")
                    if broken:
                        raise UnreadableError
                recording.mark(NOTHING_PENDING if number == 0 else "")
                wrapped.finish_gradient_synchronization()
            else:
                with beside.no_sync() if other else nullcontext():
                    loss = F.cross_entropy(wrapped(tokens, order), targets)
                    if between:
                        wrapped.zero_grad(set_to_none=True)
                    loss.backward()
                    recording.mark(FINISH)
                    wrapped.finish_gradient_synchronization()
            after.append(gradients(model))
    result = {"gradients": after[-1], "after": after, "recording": recording}
    if other:
        wrapped.zero_grad()
        y = beside(torch.full((4, 7), rank.rank + 1.0, device=rank.device), True)
        (F.cross_entropy(wrapped(tokens, order), targets) + y.sum()).backward()
        wrapped.finish_gradient_synchronization()
        beside.finish_gradient_synchronization()
        result |= {"together": gradients(model), "beside": gradients(second)}
    return result


def observe_passes(
    trial: Trial,
    quiet: list[bool],
    *orders: list[tuple[str, ...]],
    broken: bool = False,
    other: bool = False,
    cleared: bool = False,
    between: bool = False,
    double: bool = False,
    bucket_bytes: int = 1,
) -> SimpleNamespace:
    seed, drawn = trial.seed(), draw_passes(trial, *orders)
    given = [([p[r] for p in drawn],) for r in range(trial.num_ranks)]
    with told_if_ranks_part(
        "the ranks use other layers, or use them in another order, and so other buckets left, or in another "
        "order: every rank sends all buckets, and each one waits until those before it have left"
        if any(len(set(order)) > 1 for order in orders)
        else ""
    ):
        results = trial.run(
            passes, seed, quiet, broken, other, cleared, between, double, bucket_bytes, per_rank=given
        )
    first, steps = drawn[0], [[each] for each in drawn]
    drawn = steps[-1] if cleared else drawn
    expected, own = expected_gradients(seed, drawn)
    return SimpleNamespace(
        results=results,
        expected=expected,
        own=own,
        seed=seed,
        first=first,
        steps=steps,
        drawn=drawn,
        sizes=sizes_of(drawn),
    )


def trained(seen: SimpleNamespace) -> list[str]:
    """The parameters that have a gradient."""
    return [name for name in seen.expected if name != "frozen.weight"]


def require_gradients(
    trial: Trial,
    seen: SimpleNamespace,
    when: str,
    slips: Callable[[SimpleNamespace, str], dict[str, Any]],
    help: str,
    terms: Callable[[SimpleNamespace, str], dict[str, Tensor]] | None = None,
) -> None:
    """Every parameter's gradient is the expected one on all ranks; slips and terms are those of a name."""
    for name in trained(seen):
        trial.close(
            f"the gradient of {name} {when}",
            by_rank(seen.results, "gradients", name),
            seen.expected[name],
            alternatives=partial(slips, seen, name),
            terms=partial(terms, seen, name) if terms else None,
            help=help,
        )


def observe_corners(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [False], [("left",), BOTH])


def observe_double(trial: Trial) -> SimpleNamespace:
    with told_if_zeros_are_float32():
        return observe_passes(trial, [False], [("left",), BOTH], double=True)


def observe_other_order(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [False], [BOTH, BOTH[::-1]])


def observe_orders(trial: Trial) -> SimpleNamespace:
    """Three steps in which odd ranks use the layers in the other order, and one in which no rank does."""
    orders = [*[[BOTH, BOTH[::-1]]] * 3, [BOTH]]
    return observe_passes(trial, [False] * len(orders), *orders, cleared=True)


def observe_after_quiet(trial: Trial) -> SimpleNamespace:
    """A pass that reaches all parameters, after one like it inside no_sync()."""
    return observe_passes(trial, [True, False], [BOTH], [BOTH])


def observe_two_steps(trial: Trial) -> SimpleNamespace:
    """In the second step rank 0 does not use the layer that all ranks have used in the first."""
    return observe_passes(trial, [False, False], [BOTH], [("left",), BOTH], cleared=True)


def observe_later_use(trial: Trial, first: tuple[str, ...] = ("left",)) -> SimpleNamespace:
    """In the second step all ranks use a layer that none has used in the first, and all share a bucket."""
    return observe_passes(trial, [False, False], [first], [BOTH], cleared=True, bucket_bytes=2**20)


def observe_same_use(trial: Trial) -> SimpleNamespace:
    """The same where all ranks have used it in the first, too."""
    return observe_later_use(trial, BOTH)


@check("DataParallel")
def ranks_may_use_different_layers(trial: Trial) -> None:
    """A layer that some ranks did not use counts as zero there, and no rank waits for ever."""
    require_mean(
        trial,
        trial.once(observe_corners),
        help="finish_gradient_synchronization() sends the buckets that never became full.",
    )


@check("DataParallel", world_sizes=(2,), subgroup=False)
def zeros_travel_in_the_modules_dtype(trial: Trial) -> None:
    """Of a float64 module, zeros of a layer that a rank did not use travel in float64, too."""
    require_mean(trial, trial.once(observe_double), help=ZEROS_IN_ITS_DTYPE)


@check("DataParallel", world_sizes=(2,), subgroup=False)
def a_step_counts_afresh(trial: Trial) -> None:
    """A layer that no rank has used in the step before is averaged, with all that are in its bucket."""
    help = "When a step ends, nothing of its gradients has come yet: forget which, or how many, had."
    seen = trial.once(observe_later_use)
    slips = partial(counted_on, trial)
    require_gradients(trial, seen, "in a second step, the first that uses all layers,", slips, help)


def counted_on(trial: Trial, seen: SimpleNamespace, name: str) -> dict[str, Any]:
    """What is there if a bucket leaves when as many gradients have come as it has, over two steps."""
    own = [own[name] for own in seen.own]
    known: dict[str, Any] = {
        "each rank's own: its bucket left before it was there. What came in the step before, where a layer "
        "of the bucket was unused, was still counted": own
    }
    if comes_out_right(trial, observe_same_use):
        known[
            "zero, and right after a step that has used all layers: something is kept of a step that has not"
        ] = torch.zeros_like(own[0])
    return known


def comes_out_right(trial: Trial, observe: Callable[[Trial], SimpleNamespace]) -> bool:
    """Whether an observation of other passes has the expected gradients."""
    try:
        seen = trial.once(observe)
    except CheckEnded:
        return False
    return all(is_right(seen, name) for name in trained(seen))


def is_right(seen: SimpleNamespace, name: str) -> bool:
    """Whether a parameter's gradient is the expected one on all ranks."""
    return all(
        found is not None and is_close(found, seen.expected[name])
        for found in by_rank(seen.results, "gradients", name)
    )


@check("DataParallel", world_sizes=(2,), subgroup=False)
def each_step_has_its_own_gradients(trial: Trial) -> None:
    """After zero_grad(), a layer that a rank used in the step before and does not use now counts as zero."""
    seen = trial.once(observe_two_steps)
    help = "Where a parameter has no gradient in this step, its place in the bucket is zero."
    require_gradients(trial, seen, "in a second step, after zero_grad(),", stale, help)


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


PLAINLY, EVALUATING, NAMED, WITHOUT_GRAPH = range(4)
"""How a pass goes: plainly; after eval(); where the module returns a dictionary; where what rank 0's returns
has no graph, and the loss adds something that has one."""


def skip_all(rank: Any, seed: int, way: int, used: bool, x: Tensor) -> dict:
    """One pass of a module of which this rank may use no parameter."""
    model = build(Skipping, seed).to(rank.device)
    wrapped = rank.submission.DataParallel(model, rank.group)
    wrapped.train(way != EVALUATING)
    beside = torch.zeros((), device=rank.device, requires_grad=True)
    output = wrapped(x.requires_grad_(way != WITHOUT_GRAPH), used, way == NAMED)
    y = output["y"] if way == NAMED else output
    (y.square().sum() + beside).backward()
    wrapped.finish_gradient_synchronization()
    return {"gradients": gradients(model)}


def observe_skipping(trial: Trial, way: int = PLAINLY) -> SimpleNamespace:
    """Rank 0 uses no parameter."""
    seed, n = trial.seed(), trial.num_ranks
    x = [trial.normal(4, 7) for _ in range(n)]
    with told_if_ranks_part(
        "rank 0's backward reached no parameter, and no hook was called there: a pass is pending since its "
        "forward, on all ranks alike, and finish_gradient_synchronization() sends what no hook has sent"
    ):
        results = trial.run(skip_all, seed, way, per_rank=[(r > 0, x[r]) for r in range(n)])
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
    require_reduced(
        trial,
        EVALUATING,
        "the same pass is reduced in training: after eval() it is not",
        "eval() switches dropout off, and no gradient. torch.is_grad_enabled() tells whether a backward "
        "may follow, and self.training does not.",
    )


def require_reduced(trial: Trial, way: int, cause: str, help: str) -> None:
    """A pass that goes in another way is reduced as it is where it goes plainly, which has been looked at."""
    try:
        require_mean(trial, observe_skipping(trial, way))
    except CheckEnded as end:
        if end.verdict != Verdict.CRASHED:
            end.cause, end.help = cause, help
        raise


@check("DataParallel", world_sizes=(2,), subgroup=False)
def a_pass_is_pending_since_its_forward(trial: Trial) -> None:
    """A pass is pending whatever the module returns: a dictionary, or on some ranks what has no graph."""
    require_mean(trial, trial.once(observe_skipping))
    help = (
        "Ask torch.is_grad_enabled(), and whether no_sync() is on: no rank knows what its backward reaches."
    )
    for way, cause in NOT_REDUCED.items():
        require_reduced(trial, way, f"the same pass is reduced elsewhere: {cause}, it is not", help)


NOT_REDUCED = {
    NAMED: "where the module returns a dictionary",
    WITHOUT_GRAPH: "where what the module returns has no graph on rank 0",
}


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
    seen = trial.once(observe_orders)
    by_step = [expected_gradients(seen.seed, step) for step in seen.steps]
    owns = [own for _, own in by_step]
    for number, (expected, _) in enumerate(by_step):
        for name in IN_EITHER_ORDER:
            trial.close(
                f"the gradient of {name} in step {number + 1}",
                found_after(seen, number, name),
                expected[name],
                alternatives=partial(mixed_slips, seen, owns, number, name),
                help="Send bucket 0, 1, 2… in this order on all ranks, whichever is ready first.",
            )
    require_mean(trial, seen, help="Send buckets in one order on all ranks.")


IN_EITHER_ORDER = [f"{side}.{part}" for part in ("weight", "bias") for side in BOTH]


def found_after(seen: SimpleNamespace, number: int, name: str) -> list[Tensor | None]:
    """By rank, a parameter's gradient after a step."""
    return [result["after"][number][name] for result in seen.results]


def mixed_up(own: list[dict[str, Tensor]], name: str) -> list[Tensor]:
    """By rank, a layer's mean where it meets the other layer's on odd ranks."""
    side, part = name.split(".")
    names = [name, f"{BOTH[1 - BOTH.index(side)]}.{part}"]
    met = [torch.stack([each[names[(r + s) % 2]] for r, each in enumerate(own)]).mean(0) for s in range(2)]
    return [met[r % 2] for r in range(len(own))]


def mixed_slips(
    seen: SimpleNamespace, owns: list[list[dict[str, Tensor]]], number: int, name: str
) -> dict[str, Fault]:
    """What ranks that send in different orders have after a step: `owns` are their own gradients by step."""
    kept = number > 0 and all(
        found is not None and is_close(found, mixed)
        for each in IN_EITHER_ORDER
        for found, mixed in zip(found_after(seen, -1, each), mixed_up(owns[-1], each), strict=True)
    )
    cause, step = ORDER_KEPT if kept else ("ranks sent them in different orders", "")
    return {f"the gradients of two layers mixed up: {cause}": Fault(mixed_up(owns[number], name), step)}


ORDER_KEPT = (
    "each rank sends in the order that its own backward took in a step before. In the last step all ranks "
    "take the same, and mix them up as well",
    "Deal out buckets in an order that all ranks share: the parameters' own, or the one that rank 0's "
    "backward took, broadcast to all.",
)
"""Cause and next step where a first step is right, and later ones are not."""
