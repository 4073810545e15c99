"""Messages that do not go together: one that nobody sent, took or waited for, or two sizes that differ."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from grader.judging.verdicts import CheckEnded, Verdict
from grader.ranks.launcher import RankReport
from grader.ranks.recording import Event

Locate = Callable[[str, int], str]
"""File and line of the learner's code → the words for it; "" for other code."""

SAME_SIZE = "Both sides of a message need tensors of the same size and dtype."
SAME_GROUP = "Both sides of a message must name the same group."
EARLIER_ONES = (
    "Call wait() on all that isend, irecv and batch_isend_irecv return, also before the last one: a message "
    "whose handle is dropped may never travel, and the next ones stand behind it."
)


def seen_from(event: Event, group: Sequence[int]) -> Event:
    """An event of a smaller group, whose peer is called by its number in the group of the run."""
    if event.peer is None or not is_there(event) or not set(event.group) <= set(group):
        return event
    return replace(event, peer=group.index(event.group[event.peer]))


def is_there(event: Event) -> bool:
    """Whether its peer is a rank of its group."""
    return event.peer is None or 0 <= event.peer < len(event.group)


def to_nobody(ranks: Sequence[RankReport], locate: Locate) -> CheckEnded | None:
    """A message to or from a rank that its group does not have. gloo would wait, or read past its end.

    Peers are as they were called: by their number in the event's own group.
    """
    for r, rank in enumerate(ranks):
        for event in rank.events:
            if not is_there(event):
                return CheckEnded(
                    Verdict.CRASHED,
                    f"rank {r} called {told(event, locate)}, in a group of {len(event.group)} ranks",
                    f"there is no rank {event.peer}: its ranks are 0 to {len(event.group) - 1}",
                    "Is it right for powers of two alone? Who has no partner in a round sends nothing.",
                )
    return None


def waited_for(rank: RankReport) -> Event | None:
    """The message or collective in whose wait() a rank stood when it was stopped."""
    if rank.status != "running" or not rank.waits_for:
        return None
    return next((event for event in rank.events if event.index == rank.waits_for), None)


def told(event: Event, locate: Locate) -> str:
    """An event, and where it was started."""
    place = locate(event.file, event.line) if event.file else ""
    return f"{event.describe()}" + (f" ({place})" if place else "")


def misfit(ranks: Sequence[RankReport], locate: Locate) -> CheckEnded | None:
    """The first message that is longer than the tensor it was received into: gloo ends the process."""
    receives = _messages(ranks, "recv")
    for channel, events in _messages(ranks, "send").items():
        r, peer = channel[:2]
        for sent, received in zip(events, receives.get(channel, []), strict=False):
            if sent.num_bytes > received.num_bytes:
                return CheckEnded(
                    Verdict.WRONG,
                    f"rank {r} called {told(sent, locate)}, and rank {peer} called "
                    f"{told(received, locate)}: the message does not fit in",
                    help=SAME_SIZE,
                )
    return None


def too_short(ranks: Sequence[RankReport], locate: Locate) -> CheckEnded | None:
    """A message that is shorter than the tensor that it was received into: gloo says nothing, others do.

    Only where as many were sent as received, and of other sizes: two groups may have the same ranks, and
    what is sent in one may overtake what is sent in the other.
    """
    receives = _messages(ranks, "recv")
    for channel, events in _messages(ranks, "send").items():
        r, peer = channel[:2]
        taken = receives.get(channel, [])
        if sorted(e.num_bytes for e in events) == sorted(e.num_bytes for e in taken):
            continue
        for sent, received in zip(events, taken, strict=True) if len(events) == len(taken) else ():
            if sent.num_bytes < received.num_bytes:
                return CheckEnded(
                    Verdict.WRONG,
                    f"rank {r} called {told(sent, locate)}, and rank {peer} called "
                    f"{told(received, locate)}: the message fills only the beginning of that tensor",
                    help=f"{SAME_SIZE} gloo says nothing of it; do not count on that elsewhere.",
                )
    return None


def unmatched(ranks: Sequence[RankReport], locate: Locate) -> CheckEnded | None:
    """Messages that nobody took, that nobody sent, or that nobody waited for."""
    sends, receives = _messages(ranks, "send"), _messages(ranks, "recv")
    if any(channel.source is None for channel in receives):  # from any rank: nobody knows which send is meant
        return None
    for r, rank in enumerate(ranks):
        lost = _lost(r, rank, ranks, sends, receives, locate)
        if lost:
            return lost
    for channel, events in sends.items():
        r, peer = channel[:2]
        count = len(receives.get(channel, []))
        if len(events) > count:
            message = f"rank {r} called {told(events[count], locate)}, and rank {peer} never received it"
            return CheckEnded(Verdict.WRONG, message, *_why_not_received(peer, ranks, sends, receives))
    never_sent = [
        (waited_for(ranks[channel.destination]) not in events, channel.destination, channel.source)
        for channel, events in receives.items()
        if len(events) > len(sends.get(channel, []))
    ]
    if never_sent:  # of several, the one in whose wait a rank stands
        _, r, source = min(never_sent, key=lambda one: one[0])
        return CheckEnded(
            Verdict.WRONG, f"rank {r} waits for a message from rank {source} that was never sent"
        )
    return None


class _Channel(NamedTuple):
    """What messages have in common that keep their order: those of another may overtake them."""

    source: int | None
    destination: int | None
    group: tuple[int, ...]
    tag: int


_Messages = dict[_Channel, list[Event]]


def _channel(r: int, event: Event) -> _Channel:
    source, destination = (r, event.peer) if event.kind == "send" else (event.peer, r)
    return _Channel(source, destination, event.group, event.tag)


def _messages(ranks: Sequence[RankReport], kind: str) -> _Messages:
    found: _Messages = defaultdict(list)
    for r, rank in enumerate(ranks):
        for event in rank.events:
            if event.kind == kind:
                found[_channel(r, event)].append(event)
    return found


def _why_not_received(
    peer: int | None, ranks: Sequence[RankReport], sends: _Messages, receives: _Messages
) -> tuple[str, str]:
    """The cause, and the next step."""
    for channel, events in receives.items():
        if channel.destination == peer and len(events) > len(sends.get(channel, [])):
            cause = f"rank {peer} waits for a message from rank {channel.source}, who sends it none"
            return cause, "A send and its receive must name each other: who sends to whom?"
    if peer is not None and ranks[peer].status == "done":
        return "", f"Every message needs its receive: what makes rank {peer} return without this one?"
    stuck = all(
        rank.status != "running" or (rank.events and rank.events[-1].kind == "send") for rank in ranks
    )
    return (
        "every rank sends before any of them receives" if stuck else "",
        "Start the receive before waiting for the send: isend and irecv, then wait for both.",
    )


def _lost(
    r: int,
    rank: RankReport,
    ranks: Sequence[RankReport],
    sends: _Messages,
    receives: _Messages,
    locate: Locate,
) -> CheckEnded | None:
    """A message that rank r waits for, although its other side was started too: the two do not meet."""
    event = waited_for(rank)
    if event is None or event.kind not in ("send", "recv"):
        return None
    ours, theirs = (sends, receives) if event.kind == "send" else (receives, sends)
    channel = _channel(r, event)
    met = f"rank {r} stood in {told(event, locate)}, and rank {event.peer}"
    other = theirs.get(channel, [])[ours[channel].index(event) :][:1]
    if not other:
        return _crossed(channel, ours, theirs, met, locate)
    if (event.num_elements, event.dtype) != (other[0].num_elements, other[0].dtype):
        return CheckEnded(
            Verdict.WRONG,
            f"{met} called {told(other[0], locate)}",
            help=SAME_SIZE,
        )
    if waited_for(ranks[event.peer]) == other[0]:
        return CheckEnded(
            Verdict.WRONG,
            f"{met} in {told(other[0], locate)}: the two did not meet",
            help=EARLIER_ONES if ours[channel].index(event) else SAME_GROUP,
        )
    what = "had returned" if ranks[event.peer].status == "done" else f"had called {told(other[0], locate)}"
    call, way = ("isend", "to") if event.kind == "recv" else ("irecv", "from")
    return CheckEnded(
        Verdict.WRONG,
        f"{met} {what}",
        f"rank {event.peer} did not wait for its {call} {way} rank {r}: a message whose handle is dropped "
        "may never travel",
        help=f"Keep what {call} returns, and call its wait(): for each one, before the function returns.",
    )


def _crossed(
    channel: _Channel, ours: _Messages, theirs: _Messages, met: str, locate: Locate
) -> CheckEnded | None:
    """A message whose other side has another tag, or is in a group of other ranks."""
    for there, events in theirs.items():
        alone = events[len(ours.get(there, [])) :]
        if there[:2] != channel[:2] or not alone:
            continue
        message = f"{met} called {told(alone[0], locate)}"
        if there.group != channel.group:
            groups = f"one in a group of {len(channel.group)} ranks, the other in one of {len(there.group)}"
            return CheckEnded(Verdict.WRONG, message, f"their groups differ: {groups}", SAME_GROUP)
        return CheckEnded(
            Verdict.WRONG,
            message,
            f"their tags differ, {channel.tag} and {there.tag}: a message is received under the tag that it "
            "was sent with",
            "Give both sides one tag, or none.",
        )
    return None
