"""What a run tells besides its numbers: buffers used too early, and results that one rank alone was given.

Where numbers are wrong, these are causes that were seen, and not guessed from the numbers. A buffer that is
used too early may give any numbers, and by chance those of a fault that a check knows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grader.judging.wording import of_ranks
from grader.ranks.recording import USES, Event, Race

Locate = Callable[[str, int], str]


@dataclass
class Evidence:
    """Of the runs that a check looks at."""

    races: list[tuple[int, Race]] = field(default_factory=list)
    """With the rank in the group."""
    events: list[tuple[int, Event]] = field(default_factory=list)

    def add(self, other: "Evidence") -> None:
        """Look at another run, too."""
        self.races += other.races
        self.events += other.events

    def without(self, use: str) -> "Evidence":
        """The same, but for races of one kind."""
        return Evidence([each for each in self.races if each[1].use != use], self.events)

    def cause(self, wrong: Sequence[int], num_ranks: int, locate: Locate) -> tuple[str, str]:
        """Why the numbers of some ranks are wrong, and the next step; nothing where nothing was seen."""
        if races := sorted(self.races, key=lambda each: (USES.index(each[1].use), each[0] not in wrong)):
            return _race(*races[0], locate)
        right = [r for r in range(num_ranks) if r not in wrong]
        for _, event in self.events if len(right) == 1 else ():
            if event.kind == "reduce" and event.peer == right[0]:
                told = f"the {_at(event, locate)} gives its result to {of_ranks(right)} alone"
                return told, "dist.all_reduce gives it to every rank."
        return "", ""

    def explains(self, wrong: Sequence[int]) -> bool:
        """Whether a rank that is wrong, or that exchanged with one, used a buffer too early.

        A handle that is left may be harmless, and so may a tensor that is filled twice with the same: a fault
        that gives the same numbers is likelier then.
        """
        return any(
            race.use not in ("left", "twice") and (rank in wrong or race.event.peer in wrong)
            for rank, race in self.races
        )


def _race(rank: int, race: Race, locate: Locate) -> tuple[str, str]:
    event = race.event
    call = {"send": "isend", "recv": "irecv"}.get(event.kind, event.kind)
    place = locate(race.file, race.line) if race.file else ""
    same = (race.file, race.line) == (event.file, event.line)
    where = f", in {place}" if place and not same else ""
    it = f"its {_at(event, locate)}"
    told = {
        "shared": f"rank {rank} sends from a tensor and receives into it at once: {it}{where}",
        "read": f"rank {rank} used what {it} brings before anybody had waited for it{where}",
        "overwritten": f"rank {rank} used what had arrived in a tensor{where}, when the next message was "
        f"under way into it already: {it}",
        "twice": f"rank {rank} lets two fill one tensor at once: {it}, and another before anybody had waited "
        f"for it{where}",
        "changed": f"rank {rank} wrote into the buffer of {it} before anybody had waited for it{where}",
        "left": f"rank {rank} never waited for {it}: what it brings comes at any time, or never",
    }[race.use]
    step = f"Keep the handle that {call} returns, and call its wait() before the buffer is used again."
    if race.use == "twice":
        return (
            told,
            "Is a tensor in the list twice, as a tied weight is in state_dict()? Else each needs its own.",
        )
    if race.use == "overwritten":
        return told, (
            "Receive what comes next into another tensor, two of them by turns, or start that receive once "
            "this one's numbers have been used."
        )
    if race.use == "shared":
        own = "What comes needs a tensor of its own, such as torch.empty_like(what is sent)"
        return told, f"{own}; or wait for the send first."
    return told, step if race.use != "changed" else step + " Or give every message a buffer of its own."


def _at(event: Event, locate: Locate) -> str:
    place = locate(event.file, event.line) if event.file else ""
    return event.describe() + (f" ({place})" if place else "")
