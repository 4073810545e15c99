"""Whom each rank of an `all_to_all` meets, in which round, and what it sends there."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from grader.checks import Event, Recording, Trial

from .exchanges import Exchange, is_power_of_two
from .traffic import OWN_DTYPE, SMALL, events, sends, wider_events


def never_met(seen: SimpleNamespace, i: int) -> str:
    """Why some pairs exchange nothing, if these are what partners rank ^ k for k < n leave out; else ""."""
    n, case = len(seen.recordings), seen.cases[i]
    if is_power_of_two(n):
        return ""
    for r, recording in enumerate(seen.recordings):
        peers = {event.peer for event in sends(recording, i)}
        if any((s in peers) != (r ^ s < n) for s in range(n) if s != r and case.rows[r][s].numel()):
            return ""
    r, s = next((r, s) for r in range(n) for s in range(r + 1, n) if r ^ s >= n)
    return (
        f"ranks {r} and {s} exchange nothing with one another, as with the partner rank ^ k in round k < n: "
        f"{r} ^ {s} = {r ^ s}. Such partners meet everybody only where n is a power of two"
    )


def left_out(seen: SimpleNamespace, i: int) -> str:
    """Why some tensors are not sent, if it is those whose sender gets nothing in the same round; else ""."""
    n, case = len(seen.recordings), seen.cases[i]
    told = ""
    for r, recording in enumerate(seen.recordings):
        peers = {event.peer for event in sends(recording, i)}
        sources = {event.peer for event in events(recording, i) if event.kind == "recv"}
        for to in (s for s in range(n) if s != r and case.rows[r][s].numel()):
            source = (2 * r - to) % n
            comes = case.rows[source][r].numel() > 0
            if comes != (to in peers) or comes != (source in sources):
                return ""
            if not comes:
                told = told or (
                    f"rank {r} leaves out the round in which its tensors[{to}] goes: what comes from rank "
                    f"{source} then is empty"
                )
    return told


def in_a_round_left_out(case: Exchange, source: int, rank: int) -> bool:
    """Whether something of a round is empty, for one of two ranks that meet in it."""
    n, rows = len(case.rows), case.rows
    before, after = rows[(2 * source - rank) % n][source], rows[rank][(2 * rank - source) % n]
    return not (before.numel() and rows[source][rank].numel() and after.numel())


def others_are_right(
    case: Exchange, answers: list[dict[str, Any]], is_left_out: Callable[[int, int], bool]
) -> bool:
    """Whether what came is right for all pairs of a source and a rank but those that are left out."""
    n = len(answers)
    return all(
        len(answer["entries"]) == n
        and answer["entries"][s] is not None
        and torch.equal(answer["entries"][s], case.rows[s][r])
        for r, answer in enumerate(answers)
        for s in range(n)
        if s == r or not is_left_out(s, r)
    )


def why_two_meet(peers: list[list[int]]) -> str:
    """Why two ranks send to the same one, by whom each rank sends to in turn; "" where that is unknown.

    On three ranks, those who go through all partners rank ^ k and leave out who is not there do what those
    do who go by the numbers of the ranks. Where there are four as well, only the first come this far.
    """
    n = len(peers)
    if not is_power_of_two(n) and all(
        row == [r ^ k for k in range(1, 2 * n) if r ^ k < n] for r, row in enumerate(peers)
    ):
        words = (
            f"each rank goes through rank ^ 1, rank ^ 2, ... and leaves out who is not there. {n} is no "
            "power of two, so it is in its next round before the others are"
        )
        by_number = all(row == sorted(row) for row in peers)
        return f"{words}. To go by the numbers of the others is the same on {n} ranks" if by_number else words
    by_sum = [[(k - r) % n for k in range(n) if (k - r) % n != r] for r in range(n)]
    if n > 2 and peers == by_sum:
        return (
            "in round k partners are those whose ranks add up to k, or to k + n: a rank that is its own "
            "partner then is in its next round before the others are, and there are n rounds in all"
        )
    if all(row == sorted(row) for row in peers):
        return "every rank goes through the others in the same order, rank 0 first"
    return ""


def require_bytes(trial: Trial, case: Exchange, i: int, r: int, recording: Recording, unmet: str) -> None:
    """What one rank sends to each in one case; `unmet` says why some pairs exchange nothing, or is ""."""
    messages = sends(recording, i)
    if any(event.peer is None for event in messages):
        return
    everything = sum(t.numel() * t.element_size() for t in case.rows[r])
    for to in range(trial.num_ranks):
        to_it = [event for event in messages if event.peer == to]
        sent, tensor = sum(event.num_bytes for event in to_it), case.rows[r][to]
        has = tensor.numel() * tensor.element_size() if to != r else 0
        large = [event for event in to_it if event.num_bytes > SMALL]
        wide = wider_events(large, tensor.element_size())
        cause = ""
        if wide and sum(event.num_elements for event in to_it) == tensor.numel():
            dtype = str(tensor.dtype).removeprefix("torch.")
            cause = f"what travels is {wide[0].dtype}, and the tensors are {dtype}"
        elif sent > has and large and all(event.num_bytes >= everything > has for event in large):
            cause = "it sends all that it has, and the receiver picks its own"
        elif not sent and has:
            cause = unmet or "what it has for that rank travels by way of another one, or not at all"
        elif sent > has + SMALL:
            cause = "what is others' travels by way of this rank, is padded, or goes twice"
        trial.require(
            has <= sent <= has + SMALL,
            f"given {case} it sends {sent:,} bytes to rank {to}, and has {has:,} for it",
            cause=cause,
            help=OWN_DTYPE
            if wide
            else "tensors[to], and nothing else, goes to rank `to`, and straight there.",
            rank=r,
        )
        trial.require(
            len(large) <= 1,
            f"given {case} it sends rank {to} its tensor in {len(large)} messages",
            help="Each tensor goes in one message: n - 1 rounds are enough.",
            rank=r,
        )


def large_messages(recording: Recording, kind: str) -> list[Event]:
    """The messages of the first case that are more than a header."""
    return [e for e in events(recording, 0) if e.kind == kind and e.num_bytes > SMALL]


def require_turns(trial: Trial, seen: SimpleNamespace, i: int) -> None:
    """In a case, no more than a send and a receive are under way at a time."""
    for r, recording in enumerate(seen.recordings):
        for started, event in enumerate(recording.events):
            if event.after != f"{i}":
                continue
            over = sum(before <= started for before in recording.waited_after)
            trial.require(
                started - over < 2,
                f"given {seen.cases[i]} it starts a {event.describe()} while {started - over} messages are "
                "still under way",
                cause="messages of an earlier round have not been waited for when those of the next start",
                help="Wait for both messages of a round before the next one begins.",
                rank=r,
            )
