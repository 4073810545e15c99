"""Tells what happened in a run that did not end well: who failed first, where each rank stood."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from grader.judging import messages
from grader.judging.crashes import sends_to_itself, why_crashed
from grader.judging.group_and_world import MADE_BY_SOME, NOT_PASSED_ON
from grader.judging.verdicts import CheckEnded, Verdict
from grader.judging.wording import of_ranks
from grader.ranks.launcher import Limits, RankReport, RunReport
from grader.ranks.recording import COLLECTIVES, Event

Locate = Callable[[str, int], str]
"""File and line of the learner's code → such as "cell 3, line 7: `dist.all_reduce(x)`"; "" for other code."""

_CONNECTION = re.compile(r"connection (reset|closed|refused)|socket timeout|broken pipe|peer", re.IGNORECASE)
_NEW_GROUP = re.compile(r'distributed_c10d\.py", line \d+ in (?:new_group|new_subgroups)')
_OTHER_ARGUMENTS = re.compile(
    r"\) got an unexpected keyword argument|\) missing \d+ required |\) takes .* but "
)
_MEMORY = re.compile(r"can't allocate memory|out of memory|cannot allocate", re.IGNORECASE)


def ending(
    report: RunReport, locate: Locate, limits: Limits, group: Sequence[int], alone: bool = False
) -> CheckEnded | None:
    """How a run's end reads to the learner; None when every rank answered and all agreed.

    `alone`: the exercise knows of no ranks, so none is spoken of.
    """
    name = _Names(group, alone)
    ranks = [_renamed(report.ranks[r], group) for r in group]
    if report.ended == "complete":
        return disagreement(ranks, locate, name) or messages.too_short(ranks, locate)
    forged = [r for r, rank in enumerate(ranks) if rank.status == "forged"]
    if forged:
        reason = (ranks[forged[0]].error or {}).get("message", "")
        return CheckEnded(
            Verdict.REFUSED,
            f"the submission wrote to the grader's result channel {name.on(forged[0])}".rstrip(),
            reason,
        )
    if report.ended == "memory":
        return CheckEnded(
            Verdict.OUT_OF_MEMORY,
            f"{name.together} took more than {limits.memory_bytes / 2**30:.1f} GiB and {name.were} stopped",
            help="Is something kept that grows with every step, or is a loop without end?",
        )
    if report.ended == "processes":
        return CheckEnded(Verdict.REFUSED, f"{name.all} started more than {limits.max_processes} processes")
    if report.ended == "threads":
        return CheckEnded(Verdict.REFUSED, f"{name.all} started more than {limits.max_threads} threads")
    if report.ended == "lost":
        return CheckEnded(
            Verdict.REFUSED,
            "the process that keeps the ranks was killed or stopped by something the submission did",
        )
    if report.ended == "fault":
        return CheckEnded(
            Verdict.GRADER_ERROR,
            f"the process that keeps the ranks failed: {report.reason}",
            help="This is a fault of the grader or of the machine: grade again, and report it if it stays.",
        )
    if report.ended == "trouble":
        nobody = messages.to_nobody([report.ranks[r] for r in group], locate)
        outside = [rank for r, rank in enumerate(report.ranks) if r not in group]
        return _trouble(ranks, outside, locate, name, nobody)
    return _hang(report.ended, ranks, locate, limits, name)


class _Names:
    """What ranks are called: by their number in the group, or "it" where there are none to speak of."""

    def __init__(self, group: Sequence[int], alone: bool) -> None:
        self.group = tuple(group)
        self.alone = alone
        self.all, self.together, self.were = (
            ("it", "it", "was") if alone else ("the ranks", "the ranks together", "were")
        )

    def who(self, r: int) -> str:
        return "it" if self.alone else f"rank {r}"

    def on(self, r: int) -> str:
        return "" if self.alone else f"on rank {r} "

    def rank(self, world_rank: int) -> int:
        return self.group.index(world_rank) if world_rank in self.group else world_rank


def _renamed(rank: RankReport, group: Sequence[int]) -> RankReport:
    """With all peers called as the ranks of the run are."""
    return replace(rank, events=[messages.seen_from(event, group) for event in rank.events])


def _trouble(
    ranks: Sequence[RankReport],
    outside: Sequence[RankReport],
    locate: Locate,
    name: _Names,
    nobody: CheckEnded | None,
) -> CheckEnded:
    """The first failing rank is the story, not the peers that lost their connection to it.

    Where one rank sends to itself and another to a rank that its group has not, the latter says why.
    `nobody` is what is said where a message went to a rank that is not there.
    """
    failed = sorted(
        (r for r, rank in enumerate(ranks) if rank.status in ("failed", "dead")),
        key=lambda r: (_is_echo(ranks[r]), _is_to_itself(ranks[r]), ranks[r].ended_at or 0.0, r),
    )
    if not failed and any((rank.exit_code or 0) < 0 for rank in outside if rank.status == "dead"):
        return CheckEnded(
            Verdict.REFUSED, "a rank outside the group, which runs nothing of it, was killed meanwhile"
        )
    if not failed:
        return CheckEnded(Verdict.GRADER_ERROR, "a rank outside the group failed")
    first = ranks[failed[0]]
    others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    parted = nobody or disagreement(ranks, locate, name) or messages.misfit(ranks, locate)
    if first.status == "dead":
        return _dead(name.who(failed[0]), first, locate, parted)
    error = first.error or {}
    if error.get("machine"):
        return CheckEnded(Verdict.GRADER_ERROR, str(error.get("message")))
    kind, message = str(error.get("type", "")), str(error.get("message", ""))
    if kind == "ModuleNotFoundError" and "'solutions" in message:  # it is not there in an isolated run
        kind, message = "RefusedError", "it imports the course's own solutions"
    if kind == "RefusedError":
        return CheckEnded(
            Verdict.REFUSED,
            f"the submission can not be graded: {message}",
            help="Remove that, and grade again.",
        )
    if nobody:
        return nobody
    if error.get("waited_twice"):
        return _waits_twice(failed[0], error, locate, name)
    if kind == "NotPlainError":
        what = message.rpartition(" is ")[2]  # and not where it lies in what the check has put together
        kind = (
            "that nothing is computed in" if what.startswith("a tensor of") else "that is no tensor or number"
        )
        return CheckEnded(Verdict.WRONG, f"{name.on(failed[0])}it gave something {kind}: {what}")
    places = _places(error, locate)
    if kind == "NotImplementedError" and (not message or "raise NotImplementedError" in "".join(places[-1:])):
        return CheckEnded(Verdict.NOT_ATTEMPTED, "a part of it is still to be written", details=places)
    if _MEMORY.search(message) or kind in ("MemoryError", "OutOfMemoryError"):
        return CheckEnded(
            Verdict.OUT_OF_MEMORY, f"{name.who(failed[0])} ran out of memory: {_first_line(message) or kind}"
        )
    if "'NoneType' object" in message and not places:
        return CheckEnded(
            Verdict.WRONG,
            f"{name.on(failed[0])}it gave None where a value is needed",
            "is the `return` missing?",
        )
    if parted and _is_echo(first):
        return parted
    raised = f"{kind}: {_first_line(message)}".rstrip(": ")
    unusable = kind in ("AttributeError", "TypeError", "IndexError", "KeyError") and not places
    if unusable and not _OTHER_ARGUMENTS.search(message):
        return CheckEnded(
            Verdict.WRONG,
            f"{name.who(failed[0])}{others} returned something that the check can not use: {raised}",
            help="Look at the docstring: what must come out?",
        )
    return CheckEnded(
        Verdict.CRASHED,
        f"{name.who(failed[0])}{others} raised {raised}",
        *why_crashed(
            kind,
            message,
            places,
            error.get("notes", ()),
            0 if name.alone else len(ranks),
            [function for _, _, function in error.get("frames", [])],
        ),
        details=places,
    )


def _dead(who: str, report: RankReport, locate: Locate, parted: CheckEnded | None) -> CheckEnded:
    if parted:
        return CheckEnded(
            Verdict.CRASHED,
            f"{who} was aborted: {parted.message}",
            parted.cause,
            parted.help,
            parted.details,
        )
    last = f"its last communication was {messages.told(report.events[-1], locate)}" if report.events else ""
    output = [line for line in report.output.splitlines() if line.strip()][-3:]
    code = report.exit_code
    how = (
        f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit status {code}"
    )
    return CheckEnded(
        Verdict.CRASHED,
        f"{who} {how} before it had given its result",
        help="Leaving the process is not passing: every rank must return." if code == 0 else "",
        details=tuple(line for line in (last, *output) if line),
    )


def _waits_twice(rank: int, error: dict, locate: Locate, name: _Names) -> CheckEnded:
    """A second wait() for a message: gloo would never return from it, so it was stopped."""
    event, file, line = error["waited_twice"]
    event = messages.seen_from(event, name.group)
    call = {"send": "isend", "recv": "irecv"}[event.kind]
    places = _places(error, locate)
    here = f" ({places[-1].removeprefix('at ')})" if places else ""
    first = locate(file, line) if file else ""
    return CheckEnded(
        Verdict.HUNG,
        f"rank {rank} calls wait() a second time{here} on the work of one {call}, which would never return: "
        f"{messages.told(event, locate)}",
        f"the {call} was waited for before, in {first}"
        if first
        else f"the {call} was waited for before: its message is over",
        help=f"Call wait() once on each work that {call} returns: a message ends once. A list of works is "
        "emptied when they have been waited for, and a variable set to None.",
        details=places[:-1],
    )


def _is_echo(rank: RankReport) -> bool:
    return bool(rank.error and _CONNECTION.search(str(rank.error.get("message", ""))))


def _is_to_itself(rank: RankReport) -> bool:
    return bool(rank.error and sends_to_itself(str(rank.error.get("message", ""))))


def _hang(
    ended: str, ranks: Sequence[RankReport], locate: Locate, limits: Limits, name: _Names
) -> CheckEnded:
    places = tuple(f"{name.who(r)} {_standing(rank, locate)}" for r, rank in enumerate(ranks))
    busy = ended == "timeout"
    if busy:
        what = f"{name.all} had not finished after {limits.timeout:g} seconds and {name.were} stopped"
    else:
        what = f"deadlock: {'nothing' if name.alone else 'no rank'} moved for {limits.idle:g} seconds"
    parted = (
        _making_groups(ranks, locate)
        or _outside(ranks, locate, name)
        or disagreement(ranks, locate, name)
        or messages.unmatched(ranks, locate)
    )
    if parted:
        return CheckEnded(Verdict.HUNG, f"{what}; {parted.message}", parted.cause, parted.help, places)
    return CheckEnded(
        Verdict.HUNG,
        what,
        help="Is there a loop that does not end? `grade --timeout` allows more seconds."
        if busy or name.alone
        else "Every rank must reach every collective of its group, in the same order.",
        details=places,
    )


def _making_groups(ranks: Sequence[RankReport], locate: Locate) -> CheckEnded | None:
    """Ranks that make groups which others do not make: torch waits for all of them, and says nothing.

    A check makes groups, too: where it waits for ranks that are in the learner's code, that is no cause.
    """
    there = [
        r
        for r, rank in enumerate(ranks)
        if rank.status == "running" and _NEW_GROUP.search(rank.stack) and _places_in(rank.stack, locate)
    ]
    if not there:
        return None
    return CheckEnded(
        Verdict.WRONG,
        f"{of_ranks(there)} waited in dist.new_group",
        MADE_BY_SOME,
        "Use the group that you are given. Where you must make some, call new_group on every rank for every "
        "group, in the same order, and keep the one that this rank is in.",
    )


def _outside(ranks: Sequence[RankReport], locate: Locate, name: _Names) -> CheckEnded | None:
    """A collective on more ranks than the group that was given: the others will never come."""
    for r, rank in enumerate(ranks):
        for event in rank.events:
            if set(event.group) - set(name.group):
                return CheckEnded(
                    Verdict.WRONG,
                    f"rank {r} called {messages.told(event, locate)} on {len(event.group)} ranks, "
                    f"where its group has {len(ranks)}",
                    NOT_PASSED_ON,
                    "Pass the group that you are given to every call of torch.distributed.",
                )
    return None


def _standing(rank: RankReport, locate: Locate) -> str:
    if rank.status == "done":
        return "had finished"
    if rank.status == "failed":
        return f"had raised {(rank.error or {}).get('type')}"
    communicates = _in_torch(rank.stack) and not _NEW_GROUP.search(rank.stack)
    last = rank.events[-1] if rank.events and communicates else None
    event = messages.waited_for(rank) or last
    for place in _places_in(rank.stack, locate)[:1]:
        return f"stood in {place}" + (f", waiting in {event.describe()}" if event else "")
    if event or rank.events:
        return f"waited in {messages.told(event or rank.events[-1], locate)}"
    return "had not started to communicate"


def _places_in(stack: str, locate: Locate) -> list[str]:
    """The places of the learner's code on a stack, the innermost first."""
    found = (locate(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', stack))
    return [place for place in found if place]


def _in_torch(stack: str) -> bool:
    main = stack.split("Current thread")[-1]
    files = (file for file in re.findall(r'File "([^"]+)"', main) if "/grader/beside/" not in file)
    return "torch" in next(files, "")


def disagreement(ranks: Sequence[RankReport], locate: Locate, name: _Names) -> CheckEnded | None:
    """The first collective of a group that its ranks did not call alike: kind, reduction, dtype or size.

    Nothing in torch notices a SUM that meets a MAX, or a float that meets a double: the result is garbage.
    """
    queues: dict[tuple[int, ...], dict[int, list[Event]]] = defaultdict(dict)
    for r, rank in enumerate(ranks):
        for event in rank.events:
            if event.kind in COLLECTIVES:
                queues[event.group].setdefault(name.group[r], []).append(event)
    without: list[tuple[bool, CheckEnded]] = []
    for group, by_rank in queues.items():
        for position in range(max(len(events) for events in by_rank.values())):
            calls = {
                name.rank(r): events[position] for r, events in by_rank.items() if position < len(events)
            }
            found = _differ(calls, locate)
            if found:
                return found
            missing = [name.rank(r) for r in group if len(by_rank.get(r, [])) <= position and r in name.group]
            if missing and any(ranks[r].status == "running" for r in calls):
                r, event = next(iter(calls.items()))
                who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
                end = CheckEnded(
                    Verdict.WRONG,
                    f"rank {r} called {messages.told(event, locate)}, and {who} never did",
                    help="A collective returns only when every rank of its group has called it.",
                )
                without.append((any(_is_held_up(ranks[r]) for r in missing), end))
                break
    return min(without, key=lambda one: one[0])[1] if without else None


def _is_held_up(rank: RankReport) -> bool:
    """Whether it waits in a collective itself, for others: who is missing where is told elsewhere."""
    event = messages.waited_for(rank)
    return event is not None and event.kind in COLLECTIVES and event.kind != "barrier"


def _differ(calls: dict[int, Event], locate: Locate) -> CheckEnded | None:
    def key(event: Event) -> tuple:
        size = event.num_elements
        if event.kind == "all_to_all":  # which may be uneven
            size = 0
        elif event.kind in ("scatter", "gather"):  # of which ranks send more or less
            size = math.prod(event.shape)
        return event.kind, event.op, event.dtype, size

    counts = Counter(key(event) for event in calls.values())
    if len(counts) < 2:
        return None
    odd = min(calls, key=lambda r: (counts[key(calls[r])], -r))
    other = next(r for r in calls if key(calls[r]) != key(calls[odd]))
    first, second = sorted((odd, other))
    if key(calls[first])[:-1] == key(calls[second])[:-1]:
        help = (
            "Each rank gives a collective as many elements as all others do: pad what is shorter or empty. "
            "And each calls them in the same order: a set has another one in every process."
        )
    else:
        help = "All ranks must call the same collectives, in the same order, on the same kind of tensor."
    return CheckEnded(
        Verdict.WRONG,
        f"the ranks parted: rank {first} called {messages.told(calls[first], locate)}, "
        f"rank {second} called {messages.told(calls[second], locate)}",
        help=help,
    )


def _places(error: dict, locate: Locate) -> tuple[str, ...]:
    places = [locate(str(file), int(line or 0)) for file, line, _ in error.get("frames", [])]
    if error.get("type") == "RecursionError":  # the circle, and not where it happened to be cut
        times = Counter(places)
        places = [place for place in places if times[place] > 1] or places
    return tuple(dict.fromkeys(f"at {place}" for place in places if place))[-3:]


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
