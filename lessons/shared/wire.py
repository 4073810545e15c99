"""What left a rank, in bytes."""

from collections.abc import Callable
from types import SimpleNamespace

from grader.checks import Event, Recording, Trial, each_rank, told

SLACK = 64
"""Bytes a collective may be off by: padding, a length, a few numbers about it."""


def wire_bytes(events: list[Event], num_ranks: int) -> float:
    """Bytes that one rank sends, with rings, whichever calls they were made of."""
    share = (num_ranks - 1) / num_ranks
    factor = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}
    factor |= {"reduce": share, "broadcast": share}  # one rank of the chain sends nothing
    return sum(event.num_bytes * factor.get(event.kind, 0 if event.kind == "recv" else 1) for event in events)


def where(stretch: str) -> str:
    """The name of a stretch: before the mark "backward begins" it is "", and the forward."""
    return "the backward" if stretch else "the forward"


def nothing_travels(trial: Trial, seen: SimpleNamespace, stretch: str, help: str) -> None:
    """No rank sends anything in a stretch."""
    for rank, recording in enumerate(each_rank(seen, "recording")):
        events = recording.select(None, stretch)
        trial.require(
            trial.num_ranks == 1 or not events,
            f"{where(stretch)} communicated: {told(events)}; nothing has to travel there",
            help=help,
            rank=rank,
        )


def sends_at_most(
    trial: Trial, seen: SimpleNamespace, stretch: str, num_bytes: float, means: str, help: str
) -> None:
    """No more than (n-1)/n times so many bytes leaves a rank in a stretch; `means` says what they are."""
    n = trial.num_ranks
    for rank, recording in enumerate(each_rank(seen, "recording")):
        events = recording.select(None, stretch)
        sent, allowed = wire_bytes(events, n), (n - 1) / n * num_bytes
        if n > 1 and sent > allowed + SLACK * max(1, len(events)):
            largest = sorted(events, key=lambda event: -event.num_bytes)
            trial.wrong(
                f"{where(stretch)} sent about {sent:,.0f} bytes from here, where {means} send "
                f"{allowed:,.0f}: {told(largest)}",
                help=help,
                rank=rank,
            )


def lie_in_one_piece(trial: Trial, recordings: list[Recording], help: str) -> None:
    """What collectives read and write does: gloo takes other tensors, too, and NCCL does not."""
    for rank, recording in enumerate(recordings):
        strewn = [event for event in recording.events if not event.in_one_piece]
        trial.require(
            not strewn,
            f"{told(strewn)}: gloo takes this tensor, and NCCL refuses it, on GPUs, since it does not lie in "
            "order in one piece of memory",
            help=help,
            rank=rank,
        )


def computes_a_share(
    trial: Trial, seen: SimpleNamespace, num_flops: float, cause: Callable[[Recording], str] = lambda _: ""
) -> None:
    """Matrix products of the forward cost each rank no more than its share; `cause` may know why they do."""
    for rank, recording in enumerate(each_rank(seen, "recording")):
        flops = recording.flops(after="")
        trial.require(
            flops <= 1.05 * num_flops,
            f"the forward computed {flops:,} FLOPs on this rank, where {num_flops:,.0f}, 1/{trial.num_ranks} "
            "of the dense products, are its share",
            help="Multiply with this rank's shard alone. Cutting a whole product afterwards is not parallel.",
            rank=rank,
            cause=cause(recording),
        )
