"""Checks of `DataParallel`'s buckets: how many there are, when they leave, who waits for them."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from grader.checks import Trial, check

from .means import (
    require_bytes,
)
from .models import (
    GRADIENT_BYTES,
    build,
    chain,
    gradients,
)


def fill(rank: Any, x: Tensor) -> dict:
    """One backward of the chain for each bucket size: room for 1, 2 and all 6 gradients."""
    recordings, means = {}, {}
    for layers in (1, 2, 6):
        model = build(chain, 1).to(rank.device)
        wrapped = rank.submission.DataParallel(model, rank.group, bucket_bytes=layers * GRADIENT_BYTES)
        with rank.record() as recording:
            loss = wrapped(x).square().mean()
            recording.mark("backward")
            loss.backward()
            recording.mark("finish")
            wrapped.finish_gradient_synchronization()
        recordings[layers], means[layers] = recording, gradients(model)
    return {"recordings": recordings, "gradients": means}


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
            trial.close(
                f"the gradient of {name}",
                [g[name] for g in actual],
                expected,
                help="Until work.wait() has returned, what async_op=True left behind is not the result.",
            )


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def gradients_travel_in_buckets(trial: Trial) -> None:
    """Six gradients of 1024 bytes make 6, 3 or 1 all-reduces, as bucket_bytes is 1024, 2048 or 6144."""
    for r, result in enumerate(trial.once(observe_buckets).results):
        for layers, recording in result["recordings"].items():
            sizes = [
                event.num_bytes
                for event in recording.select("all_reduce")
                if event.num_bytes >= GRADIENT_BYTES
            ]
            full = 6 // layers
            trial.require(
                full <= len(sizes) <= (full if layers == 1 else full + 1),  # a smaller first bucket is fine
                f"with bucket_bytes={layers * GRADIENT_BYTES} there were {len(sizes)} all-reduces of "
                f"{sizes} bytes, "
                f"expected {full}",
                help="Gradients share an all-reduce until the next one would make it larger than "
                "bucket_bytes.",
                rank=r,
            )
            require_bytes(trial, r, recording, 6 * GRADIENT_BYTES)


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def first_bucket_leaves_before_backward_ends(trial: Trial) -> None:
    """The first all-reduce starts while backward is still computing."""
    for r, result in enumerate(trial.once(observe_buckets).results):
        recording = result["recordings"][1]
        sent = [event.index for event in recording.select("all_reduce")]
        trial.require(
            bool(sent) and sent[0] < recording.last_compute(),
            "no gradient was sent before the last matrix product of backward: the network idles, then the "
            "processor",
            help="Send from the hooks, as soon as a bucket is full, not in "
            "finish_gradient_synchronization().",
            rank=r,
        )


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
    return {"ran_ahead": ran_ahead}


@check("DataParallel", world_sizes=(2,), subgroup=False)
def backward_does_not_wait_for_other_ranks(trial: Trial) -> None:
    """A rank's backward computes all of its gradients though another rank has not begun its own."""
    for _ in range(3):  # a machine that is busy elsewhere gets more chances
        results = trial.run(run_ahead, per_rank=[(trial.normal(4, 16),) for _ in range(2)])
        if results[-1]["ran_ahead"]:
            return
    trial.wrong(
        "rank 0's backward did not get through before rank 1 began its own: the hooks wait for the "
        "all-reduce",
        help="async_op=True, and wait() in finish_gradient_synchronization(), not in the hook.",
    )
