"""What travels: how much of a tensor's (n-1)/n goes over the wire in collectives, however they are called."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from grader.checks import Trial
from lessons_shared.cut_gpt import local

SMALL = 2048
"""Bytes of flags, lengths and losses that nobody minds."""


def travelled(recording: Any, n: int, after: str | None = None) -> SimpleNamespace:
    """Bytes of whole tensors: what a rank sends of each is (n-1)/n of them, of an all-reduce twice that.

    Messages count as what they are a part of: who sends (n-1)/n of a tensor has sent the tensor once.
    """
    all_reduced = 2 * recording.bytes("all_reduce", after)
    reduced = sum(recording.bytes(kind, after) for kind in ("reduce_scatter", "reduce"))
    gathered = sum(recording.bytes(kind, after) for kind in ("all_gather", "broadcast"))
    parts = sum(recording.bytes(kind, after) for kind in ("send", "gather", "scatter"))
    others = recording.bytes("all_to_all", after) + parts * n // max(1, n - 1)
    return SimpleNamespace(
        all_reduced=all_reduced,
        reduced=reduced,
        gathered=gathered,
        others=others,
        total=all_reduced + reduced + gathered + others,
    )


def padded_bytes(model: nn.Module, n: int) -> int:
    """Of the parameters, each padded to n equal shares of whole rows, the most that padding can ask for."""
    total = 0
    for p in model.parameters():
        rows = p.size(0) if p.dim() else 1
        total += -(-rows // n) * n * (p.numel() // rows) * p.element_size()
    return total


def own_bytes(tensors: Iterable[Tensor | None]) -> int:
    """On a rank, the bytes of its part of these tensors; None has none."""
    return sum(local(t).numel() * t.element_size() for t in tensors if t is not None)


def share_bytes(own: Sequence[int], whole: int) -> list[int]:
    """By rank, the bytes of its share: an n-th, or more if whole parameters went to it and not to another.

    `own` are the bytes of each rank's shards. Where the ranks together have more than `whole`, some is there
    twice, and a share is an n-th.
    """
    even = whole // len(own)
    return [max(each, even) if sum(own) <= whole else even for each in own]


def require_travelled(
    trial: Trial,
    rank: int,
    recording: Any,
    model: nn.Module,
    times: int,
    extra: int = 0,
    what: str = "a step",
    after: str | None = None,
) -> None:
    """At most `times` the parameters of `model`, and `extra` bytes, travel in a step; and not far less."""
    n = trial.num_ranks
    if n == 1:
        return
    seen, size = travelled(recording, n, after), sum(p.numel() * p.element_size() for p in model.parameters())
    most, told = times * padded_bytes(model, n) + extra + SMALL, f"{times}P elements are {times * size} bytes"
    cause = ""
    if seen.all_reduced > size:
        cause = (
            "gradients were all-reduced: every rank got the mean of every gradient, and uses 1/n of it. A "
            "reduce-scatter gives each rank its share, for half the bytes"
        )
    elif seen.gathered > most - size:
        cause = "more was gathered than the new weights of each share"
    elif seen.reduced > most - (times - 1) * size:
        cause = "more was reduced than every gradient once"
    trial.require(
        seen.total <= most,
        f"{seen.total} bytes of tensors travelled in {what} (an all-reduce counts twice): {told}",
        help="Count what your collectives carry: a reduce-scatter P, an all-gather P, an all-reduce 2P.",
        rank=rank,
        cause=cause,
    )
    trial.require(
        seen.total >= times * size - extra - SMALL,
        f"only {seen.total} bytes of tensors travelled in {what}: {told}",
        help="Every gradient must reach its owners, and every new weight must reach everyone.",
        rank=rank,
        cause="nothing travelled: was everything computed on every rank?" if not seen.total else "",
    )
    calls = recording.count(after=after) - recording.count("send", after) - recording.count("recv", after)
    num_parameters = sum(1 for _ in model.parameters())
    trial.require(
        calls <= times * n * num_parameters + 16,
        f"{calls} collectives in {what}, for {num_parameters} parameters",
        help="One collective for each parameter is plenty: every call has a fixed price.",
        rank=rank,
    )
