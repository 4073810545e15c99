"""What was recorded on one rank, as plain data: communication, FLOPs and bytes, in order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)


_LISTS = ("waited_after", "span", "failed")
"""Fields of a recording that are numbers in a row."""

MARK = "__recording__"
"""The key that tells a recording from other dictionaries on the wire."""


@dataclass(frozen=True)
class Event:
    """One collective or message, as one rank started it."""

    kind: str
    """A name of COLLECTIVES, or "send" or "recv"."""
    num_bytes: int
    """Of the whole tensor: the gathered one for all_gather, the input for reduce_scatter and all_to_all.

    Of a scatter and a gather, what leaves this rank: n-1 pieces from the root of a scatter, none from others;
    one piece to the root of a gather, none from there.
    """
    num_elements: int
    dtype: str
    """Such as "float32"; "" where no tensor travels."""
    shape: tuple[int, ...]
    """Shape of the first tensor handed over."""
    group: tuple[int, ...]
    """World ranks of the group."""
    peer: int | None
    """The other side of a message, or the root of a rooted collective: a rank in the group."""
    op: str
    """Such as "SUM"; "" where nothing is reduced or where the call does not tell."""
    asynchronous: bool
    file: str
    line: int
    """Where the learner's code was: file "" when no frame of it was on the stack."""
    after: str
    """Name of the last mark, "" before the first."""
    index: int
    """Position in the stream of all operations of this rank."""
    tag: int = 0
    """Of a message: it meets the one that has the same."""
    in_one_piece: bool = True
    """Of a collective: what it reads and writes lies in order in one piece of memory, as NCCL requires."""

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Event":
        """Read an event. Raises ValueError for anything that is not one, field by field."""
        if not isinstance(plain, dict) or plain.keys() != _FIELDS.keys():
            raise ValueError("not an event")
        for name, is_such in _FIELDS.items():
            if not is_such(plain[name]):
                raise ValueError("not an event")
        return cls(**{**plain, "shape": tuple(plain["shape"]), "group": tuple(plain["group"])})

    def describe(self) -> str:
        """Such as `all_reduce (SUM) of 12 float32`."""
        op = f" ({self.op})" if self.op else ""
        rooted = self.kind in ("scatter", "gather")
        says_how_many = self.dtype and (self.num_elements or not rooted)
        what = f" of {self.num_elements} {self.dtype}" if says_how_many else ""
        other = "any rank" if self.peer is None else f"rank {self.peer}"
        peer = {"send": f" to {other}", "recv": f" from {other}"}.get(self.kind, "")
        if rooted and self.peer is not None:
            peer = f" from {other}" if self.kind == "scatter" else f" to {other}"
        tag = f" (tag {self.tag})" if self.tag else ""
        return f"{self.kind}{op}{what}{peer}{tag}"


def _is_number(value: Any) -> bool:
    """Numbers have an end, when they come from outside."""
    return type(value) is int and -(2**63) < value < 2**63


def _are_numbers(values: Any, *kinds: type) -> bool:
    return type(values) in kinds and all(map(_is_number, values))


_IS_OF: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: type(value) is str,
    "bool": lambda value: type(value) is bool,
    "int": _is_number,
    "int | None": lambda value: value is None or _is_number(value),
    "tuple[int, ...]": lambda value: _are_numbers(value, list, tuple),
}
_FIELDS = {
    item.name: _IS_OF[item.type.__name__ if isinstance(item.type, type) else str(item.type)]
    for item in fields(Event)
}
"""Of an event: name → whether a value from outside can be that field's."""


USES = ("shared", "read", "overwritten", "twice", "changed", "left")


@dataclass(frozen=True)
class Race:
    """A buffer that was used, or left, while nobody had waited for the communication that it was given to."""

    event: Event
    """What was started with the buffer."""
    use: str
    """One of USES: "shared" is sent and received into at once; "overwritten" was read while what comes next
    was under way into it; "left" was never waited for, nor seen used."""
    file: str
    line: int
    """Where the buffer was used: file "" for code that is not the learner's."""

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Race":
        """Read a race. Raises ValueError for anything that is not one."""
        kinds = {name: type(plain.get(name)) for name in ("use", "file", "line")}
        if len(plain) != 4 or kinds != {"use": str, "file": str, "line": int} or plain["use"] not in USES:
            raise ValueError("not a race")
        return cls(Event.from_plain(plain["event"]), plain["use"], plain["file"], plain["line"])


@dataclass
class Totals:
    """What one stretch between two marks added up to."""

    flops: int = 0
    last_compute: int = -1
    """Index of the last matrix multiply; -1 for none."""
    waits: int = 0
    """How often a handle of a message or collective was asked for its end; a blocking call asks once."""


@dataclass
class Recording:
    """Everything that one rank did while it was recorded."""

    events: list[Event] = field(default_factory=list)
    totals: dict[str, Totals] = field(default_factory=lambda: {"": Totals()})
    """By the name of the mark that opened the stretch, "" for the first."""
    waited_after: list[int] = field(default_factory=list)
    """For each handle that was waited for, in order: how many events had been started by then."""
    saved_bytes: int = 0
    """Distinct storages that autograd kept for backward, without parameters and buffers."""
    alive_at: dict[str, int] = field(default_factory=dict)
    """Bytes of storages made while recording and still there, at each mark and at the "end"."""
    peak_bytes: int = 0
    """The most bytes, of storages made while recording, that were there at once."""
    largest_elements: int = 0
    """Elements of the largest tensor that an operation returned."""
    span: tuple[int, int] = (0, 0)
    """How many operations of this rank there had been when it began, and when it ended."""
    failed: list[int] = field(default_factory=list)
    """`Event.index` of what raised an error where it should have started."""

    def to_plain(self) -> dict[str, Any]:
        events = [vars(event) for event in self.events]
        totals = {name: vars(totals) for name, totals in self.totals.items()}
        return {MARK: {**vars(self), "events": events, "totals": totals}}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Recording":
        """Read a recording. Raises ValueError, KeyError or TypeError for anything that is not one."""
        told = dict(plain[MARK])
        events, totals = told.pop("events"), told.pop("totals")
        lists, alive = {name: told.pop(name) for name in _LISTS}, told.pop("alive_at")
        for numbers in (told, alive, *totals.values()):
            if type(numbers) is not dict or not _are_numbers(list(numbers.values()), list):
                raise ValueError("not a recording")
        rows = all(_are_numbers(numbers, list, tuple) for numbers in lists.values())
        if not rows or len(lists["span"]) != 2:
            raise ValueError("not a recording")
        lists["span"] = tuple(lists["span"])
        return cls(
            events=[Event.from_plain(event) for event in events],
            totals={name: Totals(**total) for name, total in totals.items()},
            alive_at=alive,
            **lists,
            **told,
        )

    def select(self, kind: str | None = None, after: str | None = None) -> list[Event]:
        """The events of one kind and one stretch; None is any. Barriers count only when asked for by name."""
        return [
            event
            for event in self.events
            if (event.kind == kind if kind else event.kind != "barrier")
            and (after is None or event.after == after)
        ]

    def count(self, kind: str | None = None, after: str | None = None) -> int:
        """How many events."""
        return len(self.select(kind, after))

    def bytes(self, kind: str | None = None, after: str | None = None) -> int:
        """The sum of their `num_bytes`."""
        return sum(event.num_bytes for event in self.select(kind, after))

    def kinds(self, after: str | None = None) -> list[str]:
        """The kinds of the events, in order."""
        return [event.kind for event in self.select(None, after)]

    def flops(self, after: str | None = None) -> int:
        """Floating point operations of matrix multiplies, convolutions and attention, 2 a multiply-add."""
        return sum(totals.flops for name, totals in self.totals.items() if after in (None, name))

    def last_compute(self, after: str | None = None) -> int:
        """Index of the last matrix multiply of a stretch, -1 for none; compare with `Event.index`."""
        return max((t.last_compute for name, t in self.totals.items() if after in (None, name)), default=-1)

    def waits(self, after: str | None = None) -> int:
        """How often a handle was waited for. On gloo each message and collective has one handle."""
        return sum(totals.waits for name, totals in self.totals.items() if after in (None, name))

    def alive(self, mark: str) -> int:
        """Bytes of storages made while recording that were still there at a mark, or at the "end"."""
        return self.alive_at[mark]

    def agrees(self, log: list[Event]) -> bool:
        """Whether its events are those that a rank has written down one by one before they began."""
        first, last = self.span
        began = [e for e in log if first < e.index <= last and e.index not in self.failed]
        return sorted(self.events, key=_index) == sorted(began, key=_index)


def _index(event: Event) -> int:
    return event.index


def recordings_in(value: Any) -> Iterator[Recording]:
    """The recordings in a decoded result."""
    if isinstance(value, Recording):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from recordings_in(item)
