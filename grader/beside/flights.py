"""Follows what is on its way: buffers that a message or collective still uses, until somebody waits for it.

From its start until its handle is waited for, the network owns a buffer: what it brings may not be there
yet, and what it takes may not have left. Who uses the buffer meanwhile is right or wrong by luck of timing.
Nothing in torch notices; this does, and says in which lines.
"""

import os
import sys
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grader.beside.measure import leaves_in, tensors_in
from grader.ranks.recording import Event, Race

OURS = os.path.dirname(__file__) + os.sep
TORCH = os.path.dirname(torch.__file__) + os.sep
DISTRIBUTED = os.path.join(TORCH, "distributed", "")
WAITS_ITSELF = tuple(
    os.path.join(TORCH, *names)
    for names in (("autograd", ""), ("nn", "parallel", ""), ("distributed", "utils.py"))
)
"""Python of torch's below which its C++ communicates, and waits by itself: DistributedDataParallel's does."""
MOST_RACES = 4
MOST_UNREAD = 8
"""Of what has arrived, how much is remembered until somebody reads it."""
WAITING = ("wait", "synchronize", "get_future", "get_future_result", "is_completed", "is_success", "result")
"""Methods of a handle that learn whether it is done, or wait until it is."""

READS_NOTHING = ("empty", "new_", "zeros_like", "ones_like", "full_like", "rand", "_unsafe_view", "set_")
"""Beginnings of operations that look at no number of what they are given."""


@dataclass(frozen=True)
class Stretch:
    """The memory of a tensor."""

    first: int
    last: int
    tensor: Callable[[], Any]
    """The storage, while it is there: memory that was freed may be somebody else's by now."""
    sizes: tuple[tuple[int, ...], tuple[int, ...], int]
    """Shape, strides and bytes of an element."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Stretch | None":
        """None where nothing lies in memory that can be compared."""
        if tensor.numel() == 0 or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu":  # a fake tensor says cpu, and has no memory
            return None
        start, item = tensor.data_ptr(), tensor.element_size()
        shape, strides = tuple(tensor.shape), tensor.stride()
        length = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        return cls(start, start + length * item, weakref.ref(storage), (shape, strides, item))

    def meets(self, other: "Stretch") -> bool:
        """Whether both have an element in the same place."""
        if self.first >= other.last or other.first >= self.last or self.tensor() is None:
            return False
        if self._is_dense() and other._is_dense():
            return True
        return not self._places().isdisjoint(other._places())

    def _is_dense(self) -> bool:
        count, item = 1, self.sizes[2]
        for n in self.sizes[0]:
            count *= n
        return count * item == self.last - self.first

    def _places(self) -> set[int]:
        shape, strides, item = self.sizes
        places = {self.first}
        for n, stride in zip(shape, strides, strict=True):
            places = {place + i * stride * item for place in places for i in range(n)}
        return places


@dataclass(eq=False)
class Flight:
    """A message or collective on its way."""

    event: Event
    fills: list[Stretch]
    sends: list[Stretch]
    ends_once: bool = False
    """A message of gloo's: a second wait() for it never returns."""
    too_soon: bool = False
    """It was started into memory of which nobody had read yet what came there before."""
    told: bool = False
    ended_at: tuple[str, int] | None = None
    """File and line of the wait() that has returned."""


class WaitedTwiceError(RuntimeError):
    """A second wait() for a message that is over, which would stand still for ever."""

    def __init__(self, flight: Flight) -> None:
        super().__init__(f"wait() a second time for one {flight.event.describe()}")
        self.flight = flight

    def told(self) -> dict[str, Any]:
        """The message, and the file and line of the wait() that returned, as plain data."""
        return {"event": vars(self.flight.event), "first": self.flight.ended_at}


class Taken:
    """The memory of many stretches, by where they begin: one look tells, however many there are."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        ordered = sorted(stretches, key=lambda stretch: stretch.first)
        self._firsts = [stretch.first for stretch in ordered]
        self._furthest = list(accumulate((stretch.last for stretch in ordered), max))
        """The last end of all up to here."""

    def meet(self, first: int, last: int) -> bool:
        """Whether one of them has a place from `first` on and before `last`."""
        before = bisect_left(self._firsts, last)
        return before > 0 and self._furthest[before - 1] > first


class Flights:
    """All that one rank has started and not waited for.

    Args:
        place: file and line of the learner's innermost frame.
    """

    def __init__(self, place: Callable[[], tuple[str, int]]) -> None:
        self._place = place
        self._aloft: list[Flight] = []
        self._taken: Taken | None = None
        """What these use; None when it has to be looked up again."""
        self._by_handle: dict[int, Flight] = {}
        self._references: dict[int, Any] = {}
        self._races: list[Race] = []
        self._unread: deque[Stretch] = deque(maxlen=MOST_UNREAD)
        """Memory into which a message has come that was waited for, until somebody reads it."""
        self._strangers = 0  # handles that were waited for and are none of these

    def before(self, func: Any, args: Any, kwargs: Any, event: Event | None) -> None:
        """See an operation that is about to run: does it use a buffer that is on its way?

        Args:
            event: what it is about to communicate, if it does.
        """
        if self._unread:
            self._forget_what_is_read(func, args, kwargs, event)
        if not self._aloft or len(self._races) >= MOST_RACES:
            return
        if self._taken is None:
            self._taken = Taken([s for flight in self._aloft for s in (*flight.fills, *flight.sends)])
        if not self._is_near(self._taken, args, kwargs):
            return
        reads, writes = _touched(func, args, kwargs, event)
        for flight in self._aloft:
            if flight.told:
                continue
            if self._shares(func, flight, reads, writes):
                self._tell(flight, "shared")
            elif _meet(flight.fills, reads):
                self._tell(flight, "overwritten" if flight.too_soon else "read")
            elif _is_of_c10d(func, event) and _meet(flight.fills, writes):
                self._tell(flight, "twice")
            elif _meet(flight.fills, writes) or _meet(flight.sends, writes):
                self._tell(flight, "changed")

    def _forget_what_is_read(self, func: Any, args: Any, kwargs: Any, event: Event | None) -> None:
        if self._is_near(Taken(self._unread), args, kwargs):
            reads, _ = _touched(func, args, kwargs, event)
            kept = [stretch for stretch in self._unread if not _meet([stretch], reads)]
            self._unread = deque(kept, MOST_UNREAD)

    @staticmethod
    def _is_near(taken: Taken, args: Any, kwargs: Any) -> bool:
        """Whether a tensor lies in a storage with something on its way: a quick look, as most do not."""
        for tensor in tensors_in(args) + tensors_in(kwargs):
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage.device.type != "cpu":
                continue
            first = storage.data_ptr()
            if taken.meet(first, first + storage.nbytes()):
                return True
        return False

    def _shares(self, func: Any, flight: Flight, reads: list[Stretch], writes: list[Stretch]) -> bool:
        """Whether a message comes into the tensor that another, not over, is sent from.

        A send after the receive is one line's doing, such as a batch's: else it passes on what is not there.
        """
        if func.namespace != "c10d" or flight.event.kind not in ("send", "recv"):
            return False
        if func._opname == "send":
            here = flight.event.file, flight.event.line
            alike = bool(here[0]) and here == self._place()
            return alike and flight.event.kind == "recv" and _meet(flight.fills, reads)
        return func._opname.startswith("recv") and _meet(flight.sends, writes)

    def started(self, func: Any, args: Any, event: Event, result: Any) -> None:
        """See a message or collective that has just been started."""
        handles = leaves_in(result, torch.ScriptObject)
        caller = _caller()
        if len(handles) != 1 or caller is None:
            return
        handle = dist.Work.unbox(handles[0])
        if handle is None:  # NCCL has none for what its stream puts in order, nor for one message of a batch
            return
        sends, fills = _buffers(func._opname, args, event)
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors_in(args[:1]))
        too_soon = _meet(fills, self._unread)
        flight = Flight(event, fills, sends, event.kind in ("send", "recv") and on_cpu, too_soon)
        key = id(handle)
        # The caller is handed this same object as long as it lives, and a handle that is dropped must go: so
        # it lives as long as the frame of torch that was asked for it.
        caller.f_locals["handle of the recorder"] = handle
        self._aloft.append(flight)
        self._taken = None
        self._by_handle[key] = flight
        self._references[key] = weakref.ref(handle, lambda _: self._dropped(key))

    def _dropped(self, key: int) -> None:
        """Nobody has the handle any more, so nobody will wait: the flight stays what it is."""
        self._by_handle.pop(key, None)
        self._references.pop(key, None)

    def index(self, handle: Any) -> int:
        """`Event.index` of what a handle stands for; 0 where nobody knows."""
        flight = self._by_handle.get(id(handle))
        return flight.event.index if flight else 0

    def waited(self, handle: Any, blocks: bool = False) -> bool:
        """Its buffers are the learner's again; says whether they were not before, as far as is known.

        Args:
            blocks: whether it is a wait(), which returns when the message is over.

        Raises:
            WaitedTwiceError: it would never return.
        """
        flight = self._by_handle.get(id(handle))
        if flight is None:
            self._strangers += 1
            return True
        if blocks and flight.ended_at is not None:
            raise WaitedTwiceError(flight)
        if flight not in self._aloft:
            return False
        self._aloft.remove(flight)
        self._taken = None
        if flight.event.kind == "recv":
            self._unread.extend(flight.fills)
        return True

    def ended(self, handle: Any) -> None:
        """See that a wait() has returned."""
        flight = self._by_handle.get(id(handle))
        if flight is not None and flight.ends_once and flight.ended_at is None:
            flight.ended_at = self._place()

    def _tell(self, flight: Flight, use: str) -> None:
        flight.told = True
        self._races.append(Race(flight.event, use, *self._place()))

    def races(self) -> list[Race]:
        """Every use of a buffer too early, and what was to be filled and never waited for.

        Where handles were waited for that are not known here, nobody knows which: nothing is said then.
        """
        left = [f for f in self._aloft if f.fills and not f.told]
        found = [*self._races, *(Race(f.event, "left", "", 0) for f in left)]
        return [] if self._strangers else found[:MOST_RACES]


def _caller() -> FrameType | None:
    """The frame that asked for a handle; None for torch's C++, which waits in ways of its own.

    Between it and here stand dispatch modes, of which this recorder is the innermost.
    """
    frame: FrameType | None = sys._getframe(2)
    caller: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "__torch_dispatch__":
            caller = None
        elif caller is None and _may_ask(file):
            caller = frame
        frame = frame.f_back
    return None if caller is None or caller.f_code.co_filename.startswith(WAITS_ITSELF) else caller


@cache
def _may_ask(file: str) -> bool:
    """Whether code of this file can be who asked for a handle."""
    return file.startswith((*WAITS_ITSELF, DISTRIBUTED)) or not file.startswith((OURS, TORCH))


def _buffers(name: str, args: Any, event: Event) -> tuple[list[Stretch], list[Stretch]]:
    """What a call of torch.distributed sends from, and what it fills."""
    first, second = list(_stretches(args[:1])), list(_stretches(args[1:2]))
    at_root = event.peer is not None and event.group[event.peer : event.peer + 1] == (dist.get_rank(),)
    if name == "send" or (name == "broadcast_" and at_root) or (name == "reduce_" and not at_root):
        return first, []
    return second, first


def _touched(func: Any, args: Any, kwargs: Any, event: Event | None) -> tuple[list[Stretch], list[Stretch]]:
    """The memory that an operation reads, and that it writes, where it communicates and where not."""
    if _is_of_c10d(func, event):
        return _buffers(func._opname, args, event)
    return _used(func, args, kwargs)


def _is_of_c10d(func: Any, event: Event | None) -> bool:
    """Whether an operation communicates, and is torch.distributed's own, not a functional one."""
    return func.namespace == "c10d" and event is not None


def _used(func: Any, args: Any, kwargs: Any) -> tuple[list[Stretch], list[Stretch]]:
    """The memory that an operation reads, and that it writes."""
    roles = _roles(func)
    if roles is None:
        return [], []
    names, written = roles
    given = dict(zip(names, args, strict=False)) | (kwargs or {})
    reads = _stretches([value for name, value in given.items() if name not in written])
    return list(reads), list(_stretches([given[name] for name in written if name in given]))


@cache
def _roles(func: Any) -> tuple[list[str], set[str]] | None:
    """The arguments' names, and those that are written; None for a view, or what looks at no number."""
    schema = func._schema
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return None
    if func._opname.startswith(READS_NOTHING):
        return None
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return [a.name for a in schema.arguments], written


def _stretches(value: Any) -> Iterator[Stretch]:
    for tensor in tensors_in(value):
        stretch = Stretch.of(tensor)
        if stretch is not None:
            yield stretch


def _meet(some: Iterable[Stretch], others: Iterable[Stretch]) -> bool:
    return any(one.meets(other) for one in some for other in others)
