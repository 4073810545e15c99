"""What a rank writes down of its communication, where its keeper finds it whatever becomes of the rank.

It is memory that both share: to write an event wakes nobody. Nothing in it is trusted.
"""

import mmap
import struct
from collections.abc import Iterator
from threading import Lock

ROOM = 8 << 20
"""Bytes for the events of one rank in a run; those that find no room are not kept."""
MOST_EVENTS = 20_000
MAX_EVENT = 16 << 10
NOT_OURS = "something other than the grader wrote into the list of events"
_HEAD = struct.Struct("<QQ")
_WAITS = struct.Struct("<Q")
_BEGIN = _HEAD.size + _WAITS.size
_LENGTH = struct.Struct("<I")


class EventLog:
    """Made by the keeper before it forks the rank; cleared by it while the rank stands still."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, ROOM)
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        _HEAD.pack_into(self._memory, 0, 0, _BEGIN)
        self.waits_for = 0

    def add(self, body: bytes) -> None:
        """Write an event down: the head, which counts it, comes last."""
        with self._lock:
            count, end = _HEAD.unpack_from(self._memory)
            behind = end + _LENGTH.size + len(body)
            if count < MOST_EVENTS and len(body) <= MAX_EVENT and behind <= ROOM:
                _LENGTH.pack_into(self._memory, end, len(body))
                self._memory[end + _LENGTH.size : behind] = body
                _HEAD.pack_into(self._memory, 0, count + 1, behind)

    @property
    def waits_for(self) -> int:
        """`Event.index` of the message or collective in whose wait() the rank stands; 0 for none."""
        return _WAITS.unpack_from(self._memory, _HEAD.size)[0]

    @waits_for.setter
    def waits_for(self, index: int) -> None:
        _WAITS.pack_into(self._memory, _HEAD.size, index)

    @property
    def head(self) -> bytes:
        """Changes with every event. Who asks a handle again and again gets no further, so a wait is none."""
        return self._memory[: _HEAD.size]

    def contents(self) -> bytes:
        """All of it, for `events_in`."""
        end = _HEAD.unpack_from(self._memory)[1]
        return self._memory[_BEGIN : min(end, ROOM)]


def is_whole(contents: bytes, num_events: int) -> bool:
    """Whether every event has found room."""
    return num_events < MOST_EVENTS and len(contents) + MAX_EVENT < ROOM - _BEGIN


def events_in(contents: bytes) -> Iterator[bytes]:
    """The events, one by one. Raises ValueError for what `add` does not write."""
    begin, count = 0, 0
    while begin < len(contents):
        if len(contents) < begin + _LENGTH.size or count == MOST_EVENTS:
            raise ValueError(NOT_OURS)
        (length,) = _LENGTH.unpack_from(contents, begin)
        begin, end = begin + _LENGTH.size, begin + _LENGTH.size + length
        if length > MAX_EVENT or end > len(contents):
            raise ValueError(NOT_OURS)
        yield contents[begin:end]
        begin, count = end, count + 1
