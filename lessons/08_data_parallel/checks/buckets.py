"""Checks of `DataParallel`'s buckets: how many there are, when they leave, who waits for them."""

from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import CheckEnded, Event, Recording, Trial, check
from lessons_shared.infinite import require_shown

from .means import (
    require_bytes,
)
from .models import (
    GRADIENT_BYTES,
    build,
    chain,
    gradients,
    tapering,
)
from .passes import FINISH, observe_after_quiet, observe_other_order


def fill(rank: Any, x: Tensor) -> dict:
    """Two steps of the chain for each bucket size: room for 1, 2 and all 6 gradients. What each step did."""
    recordings, means, again = {}, {}, {}
    for layers in (1, 2, 6):
        model = build(chain, 1).to(rank.device)
        wrapped = rank.submission.DataParallel(model, rank.group, bucket_bytes=layers * GRADIENT_BYTES)
        with rank.record() as recording:
            loss = wrapped(x).square().mean()
            recording.mark("backward")
            loss.backward()
            recording.mark(FINISH)
            wrapped.finish_gradient_synchronization()
            means[layers] = gradients(model)  # what a functional collective returns waits when it is read
        recordings[layers] = recording
        model.zero_grad()
        with rank.record() as again[layers]:
            wrapped(x).square().mean().backward()
            again[layers].mark(FINISH)
            wrapped.finish_gradient_synchronization()
    return {"recordings": recordings, "gradients": means, "again": again, "device": rank.device.type}


class Halves(nn.Module):
    """The chain, its second half in float32."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.first, self.second = layers[:3].double(), layers[3:].float()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).float())


OTHER_DTYPES = (torch.float64, torch.bfloat16, torch.float16)


def fill_other_dtypes(rank: Any, x: Tensor) -> list[dict]:
    """The chain in each of these dtypes, with room for two gradients; one number on rank 0 is infinite."""
    if rank.rank == 0:
        x[0, 0] = torch.inf
    found = []
    for dtype in OTHER_DTYPES:
        model = build(chain, 1).to(dtype)
        recording = step_of(rank, model, x.to(dtype), 2 * dtype.itemsize // 4)
        gradient = model[0][0].weight.grad
        found.append(
            {"recording": recording, "finite": gradient is not None and bool(gradient.isfinite().all())}
        )
    return found


def observe_other_dtypes(trial: Trial) -> list[list[dict]]:
    x = [(trial.normal(4, 16, dtype=torch.float64),) for _ in range(trial.num_ranks)]
    return trial.run(fill_other_dtypes, per_rank=x)


def fill_halves(rank: Any, x: Tensor) -> Recording:
    """The chain in float64 and float32, with room for all gradients."""
    return step_of(rank, Halves(build(chain, 1)), x, 12)


def step_of(rank: Any, model: nn.Module, x: Tensor, room: int) -> Recording:
    """On a rank: what a step sends, with room for so many gradients in float32."""
    model = model.to(rank.device)
    wrapped = rank.submission.DataParallel(model, rank.group, bucket_bytes=room * GRADIENT_BYTES)
    with rank.record() as recording:
        wrapped(x).square().mean().backward()
        wrapped.finish_gradient_synchronization()
    return recording


def observe_buckets(trial: Trial, delays: bool = False) -> SimpleNamespace:
    x = [(trial.normal(4, 16),) for _ in range(trial.num_ranks)]
    model = build(chain, 1).double()
    (sum(model(rows.double()).square().mean() for (rows,) in x) / trial.num_ranks).backward()
    return SimpleNamespace(results=trial.run(fill, per_rank=x, delays=delays), expected=gradients(model))


def observe_delays(trial: Trial) -> SimpleNamespace:
    return observe_buckets(trial, delays=True)


@check("DataParallel", world_sizes=(2,), subgroup=False)
def finish_waits_for_the_network(trial: Trial) -> None:
    """On a network that takes its time the gradients are as right as on a fast one."""
    seen = trial.once(observe_delays)
    for layers in (1, 2, 6):
        actual = [result["gradients"][layers] for result in seen.results]
        for name, expected in seen.expected.items():
            try:
                trial.close(
                    f"the gradient of {name}",
                    [g[name] for g in actual],
                    expected,
                    help="Until work.wait() has returned, what async_op=True left behind is not the result.",
                )
            except CheckEnded as end:
                end.cause = unwaited([result["recordings"][layers] for result in seen.results]) or end.cause
                raise
        if seen.results[0]["device"] == "cpu":  # NCCL's collectives wait for each other
            told = unwaited([result["recordings"][layers] for result in seen.results])
            trial.require(
                not told,
                "a gradient may not be the mean yet when finish_gradient_synchronization() returns",
                cause=told,
                help="Call wait() for every bucket: that the last is over says nothing of those before it.",
            )


def unwaited(recordings: list[Recording]) -> str:
    """Which rank asks for the end of fewer all-reduces than it starts, as a cause; "" for none.

    What PyTorch's C++ starts, below no line of the learner's, it waits for by itself.
    """
    for r, recording in enumerate(recordings):
        started = sum(event.file != "" for event in recording.select("all_reduce"))
        waits = recording.waits()
        if waits < started:
            return f"rank {r} starts {started} all-reduces and waits for {waits} of them"
    return ""


OTHER_ROOM: dict[str, Callable[[int], int]] = {
    "bytes are counted as elements of 4 bytes: four times bucket_bytes go into a bucket": lambda k: 4 * k,
    "a bucket is closed when it has become larger than bucket_bytes: one gradient too many": lambda k: k + 1,
    "a bucket is closed when the next gradient would fill it exactly: that one fits": lambda k: k - 1,
    "every gradient has a bucket of its own, whatever bucket_bytes is (or elements count as 16 bytes)": (
        lambda k: 1
    ),
    "all gradients are in one bucket, whatever bucket_bytes is": lambda k: 6,
}
"""Cause → how many gradients a bucket then holds that has room for k of the six."""


def why_so_many(by_room: dict[int, list[int]]) -> str:
    """What explains the bytes of the all-reduces, for every bucket size: room for 1, 2 and 6 gradients."""

    def split(number: int) -> list[int]:
        number = min(max(number, 1), 6)
        return sorted([number] * (6 // number) + [6 % number] * (6 % number > 0))

    return next(
        (
            told
            for told, number in OTHER_ROOM.items()
            if all(
                sorted(size / GRADIENT_BYTES for size in sizes) == split(number(room))
                for room, sizes in by_room.items()
            )
        ),
        "",
    )


def tell_sizes(sizes: list[int]) -> str:
    """How many all-reduces there were, and of how many bytes."""
    count = "was 1 all-reduce" if len(sizes) == 1 else f"were {len(sizes)} all-reduces"
    return f"{count}, of {', '.join(map(str, sizes))} bytes" if sizes else count


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def gradients_travel_in_buckets(trial: Trial) -> None:
    """Six gradients of 1024 bytes make 6, 3 or 1 all-reduces, as bucket_bytes is 1024, 2048 or 6144."""
    for r, result in enumerate(trial.once(observe_buckets).results):
        by_room = {
            layers: [e.num_bytes for e in recording.select("all_reduce") if e.num_bytes >= GRADIENT_BYTES]
            for layers, recording in result["recordings"].items()
        }
        for layers, recording in result["recordings"].items():
            sizes = by_room[layers]
            full = 6 // layers
            trial.require(
                full <= len(sizes) <= (full if layers == 1 else full + 1),  # a smaller first bucket is fine
                f"with bucket_bytes={layers * GRADIENT_BYTES} there {tell_sizes(sizes)}; expected: {full}",
                cause=why_so_many(by_room)
                if sizes
                else f"a bucket is all-reduced, and there were {', '.join(recording.kinds()) or 'none'}",
                help="Gradients share an all-reduce until the next one would make it larger than "
                "bucket_bytes.",
                rank=r,
            )
            require_bytes(trial, r, recording, 6 * GRADIENT_BYTES)
            sent = [e for e in result["again"][layers].select("all_reduce") if e.num_bytes >= GRADIENT_BYTES]
            trial.require(
                len(sent) <= full + 1,
                f"with bucket_bytes={layers * GRADIENT_BYTES} the first step made {len(sizes)} "
                f"all-reduces, and the second {len(sent)}",
                cause="what a pass has marked as ready, or as sent, is still marked in the next one",
                help="When a pass is finished, all of that begins anew.",
                rank=r,
            )


@check("DataParallel", world_sizes=(2,), subgroup=False)
def bytes_are_those_of_the_dtype(trial: Trial) -> None:
    """Gradients in float64 fill a bucket with half as many elements; those in 16 bits stay in 16 bits."""
    for r, result in enumerate(trial.once(observe_other_dtypes)):
        for dtype, each in zip(OTHER_DTYPES, result, strict=True):
            recording = each["recording"]
            size, room = GRADIENT_BYTES * dtype.itemsize // 4, 2 * dtype.itemsize // 4
            large = [e for e in recording.select("all_reduce") if e.num_bytes >= size]
            sizes, told = [e.num_bytes for e in large], str(dtype).removeprefix("torch.")
            other = sorted({e.dtype for e in large} - {told})
            trial.require(
                not other,
                f"six gradients of {size} bytes, {told}, made all-reduces of {sizes} bytes, in {other}",
                help="Flatten and send them as they are, and the mean has their dtype, too.",
                rank=r,
                cause="what travels is in another dtype than the gradients",
            )
            require_bytes(trial, r, recording, 6 * size)
            trial.require(
                3 <= len(sizes) <= 4,
                f"six gradients of {size} bytes, {told}, with bucket_bytes={2 * size} made all-reduces of "
                f"{sizes} bytes: 3 are expected",
                help="A gradient has numel() * element_size() bytes.",
                rank=r,
                cause="elements are counted as 4 bytes, whatever their dtype is"
                if len(sizes) == -(-6 // room)
                else "",
            )


@check("DataParallel", world_sizes=(2,), subgroup=False)
def what_is_infinite_is_not_hidden(trial: Trial) -> None:
    """Where a number on one rank is infinite, no rank has a finite mean gradient: a scaler looks for that."""
    seen = trial.once(observe_other_dtypes)
    require_shown(
        trial,
        [any(each["finite"] for each in result) for result in seen],
        "an input of rank 0 is infinite, and the mean gradient of what it is multiplied by is finite",
    )


UNEQUAL = (3, 2, 1, 5, 3, 2, 1)
"""Gradients in the order in which backward finds them, in units of GRADIENT_BYTES."""
UNEQUAL_ROOM = 4


class Scales(nn.Module):
    """Parameters of these sizes, one after the other."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(size * GRADIENT_BYTES // 4) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.tanh(x * scale.mean())
        return x


def fill_unequal(rank: Any, x: Tensor) -> Recording:
    return step_of(rank, Scales(UNEQUAL[::-1]), x, UNEQUAL_ROOM)


def closed_late(sizes: tuple[int, ...], room: int) -> list[int]:
    """What buckets hold that are closed when they are full, or more than that."""
    buckets, free = [], 0
    for size in sizes:
        if free <= 0:
            buckets, free = [*buckets, 0], room
        buckets[-1], free = buckets[-1] + size, free - size
    return buckets


def first_fit(sizes: tuple[int, ...], room: int) -> list[int]:
    """What buckets hold where each gradient goes into the first that has room."""
    buckets: list[int] = []
    for size in sizes:
        fits = next((i for i, held in enumerate(buckets) if held + size <= room), None)
        if fits is None:
            buckets.append(size)
        else:
            buckets[fits] += size
    return buckets


def are_neighbours(held: list[int], sizes: tuple[int, ...]) -> bool:
    """Whether buckets that hold so much can be the gradients in their order, cut into pieces."""
    return set(accumulate(sizes)).issuperset(accumulate(held))


@check("DataParallel", world_sizes=(2,), subgroup=False)
def buckets_hold_neighbours(trial: Trial) -> None:
    """Of gradients of unequal sizes a bucket holds neighbours in backward, and no more than bucket_bytes."""
    x = [(trial.normal(4),) for _ in range(trial.num_ranks)]
    told = [size * GRADIENT_BYTES for size in UNEQUAL]
    for r, recording in enumerate(trial.run(fill_unequal, per_rank=x)):
        sent = [e.num_bytes for e in recording.select("all_reduce") if e.num_bytes >= GRADIENT_BYTES]
        held = [num_bytes // GRADIENT_BYTES for num_bytes in sent]
        message = (
            f"with bucket_bytes={UNEQUAL_ROOM * GRADIENT_BYTES}, and gradients of {told} bytes in the order "
            f"in which backward finds them, there {tell_sizes(sent)}"
        )
        # PyTorch goes through the parameters from the first to the last, and then turns its buckets round.
        late = closed_late(UNEQUAL, UNEQUAL_ROOM), closed_late(UNEQUAL[::-1], UNEQUAL_ROOM)[::-1]
        trial.require(
            held in late or all(units <= UNEQUAL_ROOM or units in UNEQUAL for units in held),
            f"{message}: some are larger than bucket_bytes",
            help="Look whether the next gradient still fits before you add it. One that is larger than "
            "bucket_bytes has a bucket to itself.",
            rank=r,
        )
        trial.require(
            are_neighbours(held, UNEQUAL),
            f"{message}: their gradients do not follow each other",
            cause="a gradient goes back into an earlier bucket that has room left: that one, and all buckets "
            "behind it, wait until backward has come so far"
            if held == first_fit(UNEQUAL, UNEQUAL_ROOM)
            else "",
            help="A bucket holds neighbours: when the next gradient does not fit, close the bucket, and open "
            "a new one.",
            rank=r,
        )


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def first_bucket_leaves_before_backward_ends(trial: Trial) -> None:
    """The first all-reduce starts while backward is still computing, in the second step as in the first."""
    results = trial.once(observe_buckets).results
    learns = not any(leaves_early(result["recordings"][1]) for result in results)
    learns = learns and all(leaves_early(result["again"][1]) for result in results)
    for r, result in enumerate(results):
        recording = result["recordings"][1]
        sent = recording.select("all_reduce")
        if leaves_early(recording):
            require_early_again(trial, r, result["again"][1])
            continue
        cause, help = (FROM_THE_SECOND, DEAL_OUT) if learns else why_late(trial, sent)
        trial.wrong(
            "no gradient was sent before the last matrix product of backward: the network idles, then the "
            "processor",
            cause=cause,
            help=help,
            rank=r,
        )


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def every_full_bucket_leaves_during_backward(trial: Trial) -> None:
    """Where backward reaches all parameters, no bucket is left for finish, whichever is ready first."""
    help = "In the hook: while the next bucket in order has all of its gradients, send it."
    for r, result in enumerate(trial.once(observe_buckets).results):
        for room in (1, 2):
            recording, full = result["recordings"][room], 6 // room
            left = left_for_finish(recording, GRADIENT_BYTES)
            sent = sum(e.num_bytes >= GRADIENT_BYTES for e in recording.select("all_reduce"))
            trial.require(
                left == 0,
                f"with bucket_bytes={room * GRADIENT_BYTES}, {left} of {sent} buckets have not left when "
                "backward is over, though all gradients are there",
                cause="the first bucket alone leaves during backward" if left == sent - 1 == full - 1 else "",
                help=help,
                rank=r,
            )
    results = trial.once(observe_other_order).results
    left_over = [left_for_finish(result["recording"], LEAST_BYTES) for result in results]
    for r, left in enumerate(left_over):
        trial.require(
            left == 0,
            f"{left} buckets have not left when backward is over, though all gradients are there: here a "
            "later bucket's gradients come before those of the bucket before it",
            cause="a hook sends one bucket at most: when it completes the one that others have waited for, "
            "they stay"
            if one_a_hook(left_over)
            else "",
            help=help,
            rank=r,
        )
    for r, result in enumerate(trial.once(observe_after_quiet).results if trial.in_full else ()):
        left = left_for_finish(result["recording"], LEAST_BYTES)
        trial.require(
            left == 0,
            f"{left} buckets have not left when the backward after one inside no_sync() is over",
            cause="what a hook counts inside no_sync() is still counted in the pass after it",
            help="Inside no_sync() the hooks have nothing to do: return before anything is counted.",
            rank=r,
        )


LEAST_BYTES = 7 * 7 * 4
"""Of a weight of the awkward model: its biases are no larger than flags may be."""


def one_a_hook(left_over: list[int]) -> bool:
    """Whether that is what is left where a hook sends at most one of the awkward model's five buckets.

    On every other rank the last two parameters come first, and so two hooks send nothing.
    """
    return left_over == [2 * (r % 2) for r in range(len(left_over))]


def left_for_finish(recording: Recording, least: int) -> int:
    """How many buckets are all-reduced in finish, not in backward."""
    return sum(e.num_bytes >= least for e in recording.select("all_reduce", after=FINISH))


def leaves_early(recording: Recording) -> bool:
    """Whether an all-reduce starts before the last matrix product."""
    sent = recording.select("all_reduce")
    return bool(sent) and sent[0].index < recording.last_compute()


def require_early_again(trial: Trial, rank: int, recording: Recording) -> None:
    """The second step, where the first one has sent in time."""
    sent = recording.select("all_reduce")
    trial.require(
        leaves_early(recording),
        "in the second step no gradient was sent before the last matrix product of backward, as one was in "
        "the first: from then on the network idles, then the processor",
        cause="only in the first step do buckets leave during backward: in the second, all of them leave in "
        "finish_gradient_synchronization()"
        if sent and all(event.after == FINISH for event in sent)
        else "",
        help="When a pass is finished, begin anew: no bucket has left, and all wait to be sent.",
        rank=rank,
    )


FROM_THE_SECOND = "in the first step no gradient is sent during backward, and in the second one is"
DEAL_OUT = "Deal the parameters out to buckets in the constructor: then the first backward can send, too."


def fill_by_one(rank: Any) -> dict:
    """One backward with a bucket for each layer; the layers differ in size."""
    model = build(tapering, 1).to(rank.device)
    wrapped = rank.submission.DataParallel(model, rank.group, bucket_bytes=1)
    with rank.record() as recording:
        wrapped(torch.ones(2, 16, device=rank.device)).sum().backward()
        wrapped.finish_gradient_synchronization()
    return {"recording": recording}


def observe_order(trial: Trial) -> list[int]:
    """The bytes of rank 0's all-reduces, in order."""
    return [e.num_bytes for e in trial.run(fill_by_one)[0]["recording"].select("all_reduce")]


def why_late(trial: Trial, sent: list[Event]) -> tuple[str, str]:
    """Why nothing leaves during backward, and what to do about it."""
    if sent and sent[0].after != "backward":
        return (
            "it sends in finish_gradient_synchronization()",
            "Send from the hooks, as soon as a bucket is full.",
        )
    with suppress(CheckEnded):
        if trial.once(observe_order) == [4 * p.numel() for p in build(tapering, 1).parameters()]:
            return (
                "the first bucket holds the first layer, whose gradient comes last: all buckets wait for it",
                "Fill the buckets from the last parameter to the first: backward meets them in this order.",
            )
    return "", "Send from the hooks, as soon as a bucket is full, the one of the last layers first."


def run_ahead(rank: Any, x: Tensor) -> dict:
    """Rank 1 begins backward only when rank 0's has come to its end, or after a while."""
    wrapped = rank.submission.DataParallel(
        build(chain, 1).to(rank.device), rank.group, bucket_bytes=GRADIENT_BYTES
    )
    x.requires_grad_()
    loss = wrapped(x).square().mean()
    ran_ahead = True
    if rank.rank == 0:
        x.register_hook(lambda gradient: rank.tell("rank 0 is through"))
    else:
        ran_ahead = rank.hears(["rank 0 is through"], 1.5)
    loss.backward()
    wrapped.finish_gradient_synchronization()
    return {"ran_ahead": ran_ahead, "reached": x.grad is not None}


@check("DataParallel", world_sizes=(2,), subgroup=False)
def backward_does_not_wait_for_other_ranks(trial: Trial) -> None:
    """A rank's backward computes all of its gradients though another rank has not begun its own."""
    for _ in range(3):  # a machine that is busy elsewhere gets more chances
        results = trial.run(run_ahead, per_rank=[(trial.normal(4, 16),) for _ in range(2)])
        if results[-1]["ran_ahead"]:
            return
    trial.require(
        all(result["reached"] for result in results),
        "the input asks for a gradient, and backward has not brought it one",
        cause="what the module was called with is not what forward was given: it was detached, or copied",
        help="return self.module(*args, **kwargs): a layer in front of the module learns through its input.",
    )
    trial.wrong(
        "rank 0's backward did not get through before rank 1 began its own: the hooks wait for the "
        "all-reduce",
        help="async_op=True, and wait() in finish_gradient_synchronization(), not in the hook.",
    )


@check("DataParallel", world_sizes=(2,), subgroup=False, optional=True)
def no_gradient_travels_in_anothers_dtype(trial: Trial) -> None:
    """In a module of two dtypes, no gradient travels in another's."""
    x = [(trial.normal(4, 16, dtype=torch.float64),) for _ in range(trial.num_ranks)]
    due = 3 * 2 * GRADIENT_BYTES + 3 * GRADIENT_BYTES
    for r, recording in enumerate(trial.run(fill_halves, per_rank=x)):
        num_bytes = sum(e.num_bytes for e in recording.select("all_reduce") if e.num_bytes >= GRADIENT_BYTES)
        trial.require(
            num_bytes == due,
            f"three gradients in float64 and three in float32 were all-reduced in {num_bytes:,} bytes: they "
            f"have {due:,}",
            help="A tensor has one dtype: gradients of another one need another bucket.",
            rank=r,
            cause="gradients of two dtypes share a bucket: those of the narrower one were widened"
            if num_bytes == 6 * 2 * GRADIENT_BYTES
            else "",
        )
