"""What gloo sends for what torch asks of it, by the algorithms of its version of 2024 and later, over TCP.

Source: github.com/pytorch/gloo, gloo/allreduce.cc, allgather.cc, broadcast.cc, alltoall.cc and
transport/tcp/pair.cc; for reduce-scatter torch's ProcessGroupGloo.cpp.
"""

import math
from collections import Counter
from collections.abc import Iterable

from grader.ranks.recording import Event

TRAVELS = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "broadcast": 1,
    "reduce": 1,
    "all_to_all": 1,
}
"""Collective → how often (n-1)/n of its tensor leaves each rank, on a ring (lesson 07)."""

HEADERS_BYTES = 3 * 48
"""Of each message: the sender's announcement, the receiver's, and the head of the message itself."""
SEGMENT_BYTES = 1 << 20
"""The longest message of an all-reduce."""


def asked_for(events: Iterable[Event]) -> float:
    """Bytes that a rank sends for its events, if every collective goes round a ring."""
    total = 0.0
    for event in events:
        n = len(event.group)
        if event.kind == "send":
            total += event.num_bytes
        elif event.kind in TRAVELS:
            total += TRAVELS[event.kind] * event.num_bytes * (n - 1) / n
    return total


def beyond(events: Iterable[Event]) -> dict[str, float]:
    """What gloo sends beyond `asked_for` → bytes of one rank."""
    extra: Counter[str] = Counter()
    messages = 0.0
    for event in events:
        n = len(event.group)
        messages += _messages(event)
        if event.kind == "reduce_scatter":
            extra["gloo reduce-scatters by an all-reduce"] += event.num_bytes * (n - 1) / n
    extra["gloo's headers: three of 48 bytes for each message"] = messages * HEADERS_BYTES
    return {reason: num_bytes for reason, num_bytes in extra.items() if num_bytes}


def _messages(event: Event) -> float:
    """Messages that a rank sends for an event, the mean of the group's ranks."""
    n = len(event.group)
    if n == 1:
        return 0.0
    if event.kind == "send":
        return 1.0
    if event.kind == "all_reduce":
        return _all_reduce_messages(event.num_bytes, event.num_elements, n)
    if event.kind == "reduce_scatter":
        # Of a list of parts torch all-reduces each by itself.
        parts = n if math.prod(event.shape) < event.num_elements else 1
        return parts * _all_reduce_messages(event.num_bytes // parts, event.num_elements // parts, n)
    if event.kind == "all_gather":  # a ring, and each part in two messages
        return 2.0 * (n - 1)
    if event.kind == "broadcast":  # a tree: every rank but one receives once
        return (n - 1) / n
    if event.kind == "all_to_all":
        return n - 1.0
    return 0.0


def _all_reduce_messages(num_bytes: int, num_elements: int, n: int) -> float:
    """A ring of segments: at least two for each rank, as many for each, none without elements."""
    if num_elements == 0:
        return 0.0
    element = num_bytes // num_elements
    segments = _round_up(max(-(-num_bytes // SEGMENT_BYTES), 2 * n), n)
    segment_bytes = _round_up(-(-num_bytes // segments), element)
    filled = -(-num_bytes // segment_bytes)
    return 2 * (n - 1) * filled / n


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
