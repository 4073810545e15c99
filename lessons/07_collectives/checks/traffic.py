"""Who sent how much to whom: what a ring may do, and nothing else."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from grader.checks import COLLECTIVES, Event, Recording, Trial

SMALL = 64
"""Bytes that a message may have and not count: a size or a flag that somebody sends ahead."""


def events(recording: Recording, case: int) -> list[Event]:
    """What one rank did in one case."""
    return [event for event in recording.events if event.after == f"{case}"]


def sends(recording: Recording, case: int) -> list[Event]:
    """The messages of one rank in one case."""
    return [event for event in events(recording, case) if event.kind == "send"]


def require_messages_alone(trial: Trial, seen: SimpleNamespace) -> None:
    """No collective of torch.distributed, a barrier included."""
    for r, recording in enumerate(seen.recordings):
        for event in recording.events:
            trial.require(
                event.kind not in COLLECTIVES,
                f"it calls {event.describe()}, a collective of torch.distributed",
                help="Build it from isend and irecv alone. Who has waited for its messages needs no barrier.",
                rank=r,
            )


def unwaited(recordings: Sequence[Recording], case: int | None = None) -> str:
    """Which rank asked for the end of fewer messages than it started, in one case or in all; "" for none."""
    for r, recording in enumerate(recordings):
        mark = None if case is None else f"{case}"
        started = [kind for kind in recording.kinds(after=mark) if kind in ("send", "recv")]
        waits = recording.waits(after=mark)
        if waits < len(started):
            calls = [f"i{kind}" for kind in ("send", "recv") if kind in started]
            messages = "1 message" if len(started) == 1 else f"{len(started)} messages"
            at_once = f"{calls[0]} returns" if len(calls) == 1 else f"{' and '.join(calls)} return"
            return (
                f"rank {r} starts {messages} in this call and waits for {waits} of them: {at_once} at once, "
                "and a handle that nobody waits for says nothing of its message"
            )
    return ""


def require_waits(trial: Trial, seen: SimpleNamespace) -> None:
    """Every message is over when the call returns: its handle was asked."""
    if seen.device != "cpu":
        return  # NCCL has one handle for several messages
    for i, case in enumerate(seen.cases):
        forgotten = unwaited(seen.recordings, i)
        trial.require(
            not forgotten,
            f"given {case}, not every message is waited for",
            cause=forgotten,
            help="Keep what isend and irecv return, and call wait() on each before you return.",
        )


def require_neighbours(trial: Trial, seen: SimpleNamespace) -> None:
    """A rank of a ring sends to the next rank, or to the one before, and to no other."""
    n = trial.num_ranks
    for r, recording in enumerate(seen.recordings):
        near = {(r + 1) % n, (r - 1) % n}
        for case in range(len(seen.cases)):
            for event in sends(recording, case):
                trial.require(
                    event.peer is None or event.peer in near,
                    f"given {seen.cases[case]} it sends to rank {event.peer}, and its neighbours are "
                    f"{_listed(near)}",
                    help="In a ring a tensor goes from neighbour to neighbour, one step at a time.",
                    rank=r,
                )


def direction(recordings: Sequence[Recording], case: int) -> int:
    """1 where all messages of a case go to the next rank of the ring, else -1."""
    n = len(recordings)
    sent = [(r, event.peer) for r in range(n) for event in sends(recordings[r], case)]
    return 1 if all(peer == (r + 1) % n for r, peer in sent) else -1


def _listed(ranks: set[int]) -> str:
    return " and ".join(map(str, sorted(ranks)))


def require_ring_bytes(trial: Trial, seen: SimpleNamespace, rounds: int, gathered: bool = False) -> None:
    """In each round of n - 1 steps a rank sends all chunks but one: (n-1)/n of the bytes.

    How an all-reduce cuts is its own affair: one chunk may have all that is left over.

    Args:
        rounds: 2 for an all-reduce, else 1.
        gathered: whether each rank starts with a chunk instead of the whole.
    """
    n = trial.num_ranks
    for i, case in enumerate(seen.cases):
        size = case.values[0].element_size()
        chunk = case.num_bytes if gathered else case.chunk_size * size
        whole = n * case.num_bytes if gathered else case.num_bytes
        longest = chunk if rounds == 1 else sum(divmod(case.num_elements, n)) * size
        most, least = rounds * (n - 1) * chunk, rounds * max(whole - longest, 0)
        times = "2·" if rounds == 2 else ""
        by_rank = [sum(event.num_bytes for event in sends(each, i)) for each in seen.recordings]
        known = _wide_bytes(seen, i, chunk, most, whole)
        for r, recording in enumerate(seen.recordings):
            messages, sent = sends(recording, i), by_rank[r]
            cause, step = known or _why(r, by_rank, most, whole, messages, size, case)
            trial.require(
                least <= sent <= most + SMALL * n,
                f"given {case} it sends {sent:,} bytes in {len(messages)} "
                f"message{'s' * (len(messages) != 1)}, where a ring sends "
                f"{most:,}, {times}(n-1)/n of S = {whole:,}{'' if gathered else rounded_up(case, n)}",
                cause=cause,
                help=step or "Each step sends one chunk, an n-th of the whole, to one neighbour.",
                rank=r,
            )
            if not gathered and case.num_elements % n == 0:
                require_no_filling(trial, case, chunk // size, messages, r)


def rounded_up(case: Any, parts: int) -> str:
    """What is to be said beside the bytes of so many parts of a tensor, where they do not divide it."""
    return " with chunks rounded up" if case.num_elements % parts else ""


TOO_MUCH_FILLING = "it fills up with n - numel % n elements, which are n too many where n divides numel"
NO_FILLING = "-numel % n is how many elements are missing: 0 where n divides numel."


def require_no_filling(trial: Trial, case: Any, chunk: int, messages: list[Event], r: int) -> None:
    """Where n divides the tensor, no message of its dtype has an element more than a chunk."""
    dtype = str(case.values[0].dtype).removeprefix("torch.")
    longest = max((event.num_elements for event in messages if event.dtype == dtype), default=0)
    trial.require(
        longest != chunk + 1,
        f"given {case} it sends messages of {longest:,} elements, and a chunk has {chunk:,}",
        cause=TOO_MUCH_FILLING,
        help=NO_FILLING,
        rank=r,
    )


def _why(
    r: int, by_rank: list[int], most: int, whole: int, messages: list[Event], size: int, case: object
) -> tuple[str, str]:
    """The cause, and the next step where it is another than for all. `by_rank` is how much each sends."""
    large = [event for event in messages if event.num_bytes > SMALL]
    if not by_rank[r]:
        return "it sends nothing: others do its work?", ""
    if wider := wider_events(large, size):
        return f"what travels is {wider[0].dtype}, and the tensor is {case}", OWN_DTYPE
    if large and by_rank[r] > most and all(event.num_bytes >= whole for event in large):
        return f"it passes whole tensors round, {len(large)} of them, not chunks", ""
    chunk = large[0].num_bytes if large else 0
    if len(large) > 1 and [event.num_bytes for event in large] == [
        k * chunk for k in range(1, len(large) + 1)
    ]:
        return "its messages grow: it passes on all that it has, where what came last is enough", ""
    busiest = max(range(len(by_rank)), key=by_rank.__getitem__)
    if by_rank[r] < most < by_rank[busiest]:
        return f"the ranks share the work unevenly: rank {busiest} sends {by_rank[busiest]:,} bytes", ""
    return "", ""


def _wide_bytes(seen: SimpleNamespace, i: int, chunk: int, most: int, whole: int) -> tuple[str, ...]:
    """The cause and the next step where bytes travel, as many as a chunk has in a wider dtype; else nothing.

    On two ranks whole tensors have as many bytes as chunks of numbers twice as wide.
    """
    dtype = seen.cases[i].values[0].dtype
    for width in (4, 8):
        wider = width // dtype.itemsize  # 0 or 1 where it is none
        by_rank = [[e for e in sends(each, i) if e.num_bytes > SMALL] for each in seen.recordings]
        if (
            wider > 1
            and all(sum(event.num_bytes for event in large) == wider * most for large in by_rank)
            and all(
                event.num_elements == event.num_bytes == wider * chunk
                and event.dtype != str(dtype).removeprefix("torch.")
                for large in by_rank
                for event in large
            )
        ):
            name = f"{'float' if dtype.is_floating_point else 'int'}{8 * width}"
            told = f"what travels has {width} bytes an element, as if it went as {name}"
            if any(case.values[0].dtype == torch.float32 for case in seen.cases[:i]):
                return f"{told}. float32 tensors send the right bytes", OWN_DTYPE
            if wider * chunk == whole:
                step = "Each step sends one chunk, in the tensor's own dtype, to one neighbour."
                return f"either it passes whole tensors round, or {told}", step
            return told, OWN_DTYPE
    return ()


OWN_DTYPE = "Send and receive in the tensor's own dtype."


def wider_events(of: Sequence[Event], size: int) -> list[Event]:
    """Those whose numbers have more bytes than so many."""
    return [event for event in of if event.dtype and event.num_bytes // max(event.num_elements, 1) > size]
