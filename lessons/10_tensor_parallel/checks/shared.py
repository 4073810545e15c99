"""What the checks of this lesson share: what one all-reduce costs, and one all-gather."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import Trial, each_rank, told
from lessons_shared.wire import where, wire_bytes

SIZES = (2, 1, 4, 3)
PADDING = 16
"""Bytes a rank's part may be off by."""


def one_all_reduce(trial: Trial, seen: SimpleNamespace, stretch: str, num_bytes: int, help: str) -> None:
    """One all-reduce of so many bytes, or as many bytes by reduce-scatter and all-gather, or by messages."""
    for rank, recording in enumerate(each_rank(seen, "recording")):
        events = recording.select(None, stretch)
        reduces = [event for event in events if event.kind == "all_reduce"]
        if trial.num_ranks == 1 and not events:
            continue
        if not events:
            trial.wrong(
                f"{where(stretch)} communicated nothing, where one all-reduce belongs", help=help, rank=rank
            )
        if len(reduces) > 1 or (reduces and len(events) > 1):
            trial.wrong(
                f"{where(stretch)} communicated more than one all-reduce: {told(events)}",
                help=help,
                rank=rank,
            )
        one = 2 * (trial.num_ranks - 1) / trial.num_ranks * num_bytes
        sent = wire_bytes(events, trial.num_ranks)
        if sent > one + PADDING * trial.num_ranks or (reduces and reduces[0].num_bytes != num_bytes):
            trial.wrong(
                f"{where(stretch)} sent {told(events)}: about {sent:,.0f} bytes from this rank, "
                f"where one all-reduce of {num_bytes:,} bytes sends {one:,.0f}",
                help=help,
                rank=rank,
            )


def gather_costs(
    trial: Trial,
    seen: SimpleNamespace,
    stretch: str,
    num_bytes: int,
    help: str = "Each part has to reach each rank once: dist.all_gather.",
) -> None:
    """At most what one all-gather of so many bytes (gathered) sends."""
    n = trial.num_ranks
    for rank, recording in enumerate(each_rank(seen, "recording")):
        events = recording.select(None, stretch)
        if n == 1:
            continue
        trial.require(
            bool(events), f"{where(stretch)} communicated nothing, where one all-gather belongs", rank=rank
        )
        sent, allowed = wire_bytes(events, n), (n - 1) / n * num_bytes
        trial.require(
            sent <= allowed + PADDING * n,
            f"{where(stretch)} sent {told(events)}: about {sent:,.0f} bytes from this rank, where an "
            f"all-gather sends {allowed:,.0f}",
            help=help,
            rank=rank,
            cause="parts that are filled up with zeros are summed: that joins them, at twice the price"
            if {(e.kind, e.num_bytes) for e in events} == {("all_reduce", num_bytes)}
            else "",
        )


def used_twice(use: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor, beside: Tensor) -> Tensor | None:
    """On a rank: the gradient of an x that is used, and that something else needs as well."""
    leaf = x.clone().requires_grad_()
    handed = leaf * 1.0
    y = use(handed)
    if isinstance(y, Tensor) and y.requires_grad and y.shape == upstream.shape:
        torch.autograd.backward([y, handed], [upstream, beside])
    return leaf.grad


def uses_add_up(trial: Trial, results: list[dict], summed: Tensor, beside: Tensor) -> None:
    """The gradient of x is that of all ranks' uses, and once what came from elsewhere."""
    n, summed, beside = trial.num_ranks, summed.double(), beside.double()
    trial.close(
        "the gradient of an x that a residual connection uses, too",
        [result["gradient"] for result in results],
        summed + beside,
        alternatives={
            "the residual connection's part was summed over the ranks as well, where each of them has all of "
            "it: the sum stands on x itself": summed + n * beside,
        },
        help="Give the result a node of its own in the graph: an autograd.Function, x.view_as(x) forward.",
    )
