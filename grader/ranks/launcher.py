"""The judge's side of a run: starts the fork server once, hands it runs, and reads back plain data."""

import contextlib
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from grader.ranks import plain
from grader.ranks.by_value import function_by_value
from grader.ranks.event_log import events_in, is_whole
from grader.ranks.faults import CannotGradeError
from grader.ranks.frames import receive_frame, send_frame
from grader.ranks.gloos_words import without_gloos_places
from grader.ranks.isolation import ROOT, Isolation
from grader.ranks.limits import MOST_DENIED, Limits
from grader.ranks.recording import Event, Race, recordings_in
from grader.ranks.server import Server
from grader.ranks.turn import STOPPED, Turn

TOKEN_BYTES = 32
ANSWER_SECONDS = 30.0
"""That a run's answer may take, beyond all that the run may."""


@dataclass(frozen=True)
class Code:
    """A submission, in one of three forms: source cells, pickled names, or a trusted module's name."""

    cells: tuple[tuple[str, str], ...] = ()
    pickled: bytes = b""
    module: str = ""
    directory: str = ""
    """Folder whose other files may be imported."""
    trusted: bool = False
    """The course's own code, which may read the reference."""
    lent: tuple[tuple[str, str], ...] = ()
    """Modules of the reference that it may import: name and source."""

    @property
    def kin(self) -> "Code":
        """What can be asked of the same ranks is equal in this: the course's own modules trust each other."""
        return Code(trusted=True) if self.trusted and self.module else self


class Answer(NamedTuple):
    """What came from a rank, as it came."""

    record: bytes = b""
    """Its result, or its error."""
    events: bytes = b""
    """Its list of events."""


@dataclass
class RankReport:
    """How one rank ended."""

    status: str
    result: Any = None
    error: dict[str, Any] | None = None
    began: bool = False
    events: list[Event] = field(default_factory=list)
    waits_for: int = 0
    """`Event.index` of what it waited for when it was stopped; 0 for nothing that was seen to start."""
    races: list[Race] = field(default_factory=list)
    exit_code: int | None = None
    stack: str = ""
    output: str = ""
    ended_at: float | None = None


@dataclass
class RunReport:
    """How a run ended: `complete`, or trouble, timeout, idle, memory, processes, threads, lost, fault."""

    ended: str
    seconds: float
    ranks: list[RankReport]
    """By world rank."""
    reason: str = ""
    """Of a fault, which is the grader's own."""
    fresh: bool = True
    """The ranks were started for this run; else they had worked before."""


class Launcher:
    """Starts ranks. Keep one for many runs: the fork server stays warm.

    Ranks that are shut in share what they can write with the others of their server. So those that are lent
    modules of the reference have a server of their own: what they are lent may answer another's exercise.

    Args:
        isolation: whether to shut the ranks in. Where that is impossible, "on" raises CannotGradeError at the
            first run, and "auto" writes down why and does without.
        begun: a server for this isolation that has been started already, and that it ends.
    """

    def __init__(self, isolation: Isolation | None = None, begun: Server | None = None) -> None:
        self.isolation = isolation or Isolation()
        self.turn = Turn()
        self._under_way: set[socket.socket] = set()
        """Lines on whose other ends ranks run."""
        self._lock = threading.Lock()
        self._begun = begun
        self._servers: dict[bool, Server] = {}
        """By whether its ranks, shut in, may be lent modules of the reference."""
        self._idle: dict[tuple[int, int], list[Session]] = {}
        """Sessions that nobody uses at the moment, by size of the group and of the world."""

    def run(self, probe: Callable[..., Any] | None, code: Code, *arguments: Any, **options: Any) -> RunReport:
        """One run on ranks of its own: as `Session.run`."""
        with Session(self) as session:
            return session.run(probe, code, *arguments, **options)

    def exchange(
        self, line: socket.socket, header: dict[str, Any], orders: list[bytes], fresh: bool
    ) -> tuple[dict[str, Any], list[Answer]]:
        """Send the orders of a run, and wait for its summary and each rank's answer."""
        self.turn.goes_on()
        self._under_way.add(line)
        try:
            with self.turn.let_go():
                told = self._exchange(line, header, orders)
            if line not in self._under_way:
                raise CannotGradeError(STOPPED)
        finally:
            self._under_way.discard(line)
        if told is None and fresh:
            self.close()
        return told or _without_an_answer("lost", len(orders))

    def _exchange(
        self, line: socket.socket, header: dict[str, Any], orders: list[bytes]
    ) -> tuple[dict[str, Any], list[Answer]] | None:
        line.settimeout(header["timeout"] * (1 + MOST_DENIED) + ANSWER_SECONDS)
        try:
            send_frame(line, b"H", json.dumps(header).encode())
            for order in orders:
                send_frame(line, b"P", order)
            summary = json.loads(receive_frame(line)[1])
            if summary["ended"] == "fault":
                return _without_an_answer("fault", len(orders), summary["reason"])
            return summary, [Answer(receive_frame(line)[1], receive_frame(line)[1]) for _ in orders]
        except (OSError, ValueError):
            return None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """End the runs that are under way; inside, none begins."""
        self.turn.end()
        lines, self._under_way = self._under_way, set()
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            self.turn.begin_anew()

    def borrow(self, num_ranks: int, world_size: int, code: Code) -> "Session":
        """A session whose ranks may have this code already, from an earlier exercise of the submission."""
        with self._lock:
            of_this_size = self._idle.setdefault((num_ranks, world_size), [])
            known = [session for session in of_this_size if session.kin == code.kin]
            for session in known[:1] or of_this_size[:1]:
                of_this_size.remove(session)
                return session
        return Session(self)

    def give_back(self, num_ranks: int, world_size: int, session: "Session") -> None:
        """Keep a session for the next exercise."""
        with self._lock:
            self._idle.setdefault((num_ranks, world_size), []).append(session)

    def dismiss(self) -> None:
        """End the ranks that were kept for a next exercise."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for session in [session for sessions in idle.values() for session in sessions]:
            session.close()

    def connect(self, code: Code) -> socket.socket:
        """A line to the keeper of new ranks for this code."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as where_it_fails:
            where_it_fails.callback(ours.close)
            with self.turn.let_go(), self._lock:
                self._server_for(code).hand_over(theirs)
            where_it_fails.pop_all()
        return ours

    def _server_for(self, code: Code) -> Server:
        is_lent = bool(code.lent) and self.isolation.closed
        if is_lent in self._servers and not self._servers[is_lent].serves:
            self._servers.pop(is_lent).end()
        if is_lent not in self._servers:
            server = self._started()
            is_lent = is_lent and self.isolation.closed  # it may have turned out to be impossible
            self._servers[is_lent] = server
        return self._servers[is_lent]

    def _started(self) -> Server:
        self.turn.goes_on()
        if self.isolation.closed:
            try:
                return self._started_server(shut_in=True)
            except (CannotGradeError, OSError) as error:
                if self.isolation.wish == "on":
                    raise CannotGradeError(f"isolation is not available: {error}") from None
                self.isolation.why_open = str(error)
        return self._started_server(shut_in=False)

    def _started_server(self, shut_in: bool) -> Server:
        begun, self._begun = self._begun, None
        if begun is not None and not begun.serves:  # a notebook's may have waited for an hour
            begun.end()
            begun = None
        server = begun or Server(self.isolation, shut_in)
        server.wait_until_ready()
        return server

    def begin(self) -> None:
        """Start the fork server and wait for nothing. Where none starts, who needs it will hear why."""
        with self._lock, contextlib.suppress(CannotGradeError, OSError):
            if not self._servers and self._begun is None:
                self._begun = Server(self.isolation, self.isolation.closed)

    def warm_up(self) -> None:
        """Start the fork server now."""
        with self._lock:
            self._server_for(Code())

    def close(self) -> None:
        """End the fork server and everything below it."""
        self.dismiss()
        with self._lock:
            self._end()

    def _end(self) -> None:
        for server in (*self._servers.values(), self._begun):
            if server is not None:
                server.end()
        self._servers, self._begun = {}, None


class Session:
    """Ranks that stay for several runs of one submission, as long as every rank answers.

    Starting ranks takes many times as long as asking them. Who has asked ranks that had worked before
    (`RunReport.fresh` tells) should ask fresh ones before it calls anything wrong: the submission may have
    left something behind.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._line: socket.socket | None = None
        self._ranks: Any = None
        """What the ranks were started for: only the same can be asked of them."""
        self._token = b""

    @property
    def kin(self) -> Code | None:
        """What its ranks have been started for (see `Code.kin`)."""
        return None if self._line is None else self._ranks[1]

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def run(
        self,
        probe: Callable[..., Any] | None,
        code: Code,
        arguments: Sequence[Sequence[Any]],
        *,
        limits: Limits,
        group: Sequence[int] | None = None,
        world_size: int | None = None,
        distributed: bool = True,
        device: str = "cpu",
        seeds: Sequence[int] | None = None,
        delay_seed: int | None = None,
    ) -> RunReport:
        """Run `probe(rank, *arguments[r])` on the ranks of a group, and wait for how it ends.

        Without a probe, the argument is a pickled (function, args).

        Args:
            group: the world's ranks that are in it; all, if it is left out.
        """
        world_size = world_size or len(arguments)
        group = list(range(world_size) if group is None else group)
        header = {
            "world_size": world_size,
            "group": group,
            "distributed": distributed,
            "device": device,
            "timed": probe is None and device == "cpu",  # a page's run is alone, and may be timed
            "timeout": limits.timeout,
            "idle": limits.idle,
            "memory_bytes": limits.memory_bytes,
            "max_processes": limits.max_processes,
            "max_threads": limits.max_threads,
        }
        order = {
            "probe": function_by_value(probe) if probe else b"",
            "pickled": code.pickled,
            "module": code.module,
            "cells": [list(cell) for cell in code.cells],
            "directory": code.directory,
            "lent": [list(module) for module in code.lent],
            "labels": [label for label, _ in code.cells],
            "ours": [str(ROOT / "nanogpt"), str(ROOT / "lessons")],
            "guarded": not code.trusted,
            "forbidden": [str(ROOT / "solutions"), str(ROOT / "tests")],
            "delay_seed": delay_seed,
        }
        orders = []
        for world_rank in range(world_size):
            place = group.index(world_rank) if world_rank in group else None
            mine = () if place is None else arguments[place]
            seed = seeds[place] if seeds and place is not None else secrets.randbits(31)
            delay = None if delay_seed is None else delay_seed + world_rank
            orders.append({**order, "arguments": list(mine), "seed": seed, "delay_seed": delay})
        summary, answers, fresh = self._ask(header, code, orders)
        ranks = [
            _read_rank(state, answer, self._token, graded=probe is not None)
            for state, answer in zip(summary["ranks"], answers, strict=True)
        ]
        ended = _ending(summary["ended"], ranks)
        if ended != "complete":
            self.close()
        return RunReport(ended, summary["seconds"], ranks, summary.get("reason", ""), fresh)

    def _ask(
        self, header: dict[str, Any], code: Code, orders: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], list[Answer], bool]:
        """Have a run done, by the ranks that are there or by new ones: summary, answers, whether new."""
        fresh = self._line is None or self._ranks != (header, code.kin)
        if fresh:
            self.close()
            self._ranks, self._token = (header, code.kin), secrets.token_bytes(TOKEN_BYTES)
            self._line = self._launcher.connect(code)
        told = [plain.encode({**order, "token": self._token} if fresh else order) for order in orders]
        assert self._line is not None
        shut_in = {"shut_in": self._launcher.isolation.closed}  # known when a server has been started
        summary, answers = self._launcher.exchange(self._line, header | shut_in, told, fresh)
        if summary["ended"] in ("lost", "fault") and not fresh:
            self.close()
            return self._ask(header, code, orders)
        return summary, answers, fresh

    def close(self) -> None:
        """End the ranks, and wait until nothing is left of them."""
        if self._line is None:
            return
        with self._line as line, contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_WR)
            while line.recv(1 << 16):
                pass
        self._line = None


def _without_an_answer(ended: str, num_orders: int, reason: str = "") -> tuple[dict[str, Any], list[Answer]]:
    """What stands for the summary and the answers of a run whose keeper is gone, or failed."""
    ranks = [asdict(RankReport("dead"))] * num_orders
    return {"ended": ended, "seconds": 0.0, "ranks": ranks, "reason": reason}, [Answer()] * num_orders


def _read_rank(state: dict[str, Any], answer: Answer, token: bytes, graded: bool) -> RankReport:
    """What a rank sent, as plain data. Whatever is not in the grader's own form counts as forged.

    Args:
        graded: what was recorded comes from the rank's own recorder, and so does its list of events.
    """
    report, record = RankReport(**state), answer.record
    report.output = without_gloos_places(report.output)
    try:
        report.events = [Event.from_plain(json.loads(event)) for event in events_in(answer.events)]
        if report.status not in ("done", "failed"):
            return report
        if record[:TOKEN_BYTES] != token:
            raise ValueError("a result that the grader did not write")
        if report.status == "failed":
            if len(record) > plain.MAX_TEXT:
                raise ValueError("an error with more text than the grader tells")
            report.error = _error(json.loads(record[TOKEN_BYTES:]))
            if report.error["machine"] and report.began:
                raise ValueError("an error that the grader did not write")
        else:
            told = plain.decode(record[TOKEN_BYTES:], plain.MAX_TEXT)
            report.result = told["result"]
            report.races = [Race.from_plain(race) for race in told["races"]]
            recordings = recordings_in(report.result) if graded else ()
            if is_whole(answer.events, len(report.events)) and not all(
                recording.agrees(report.events) for recording in recordings
            ):
                raise ValueError("what was recorded is not what the list of events says")
    except Exception as error:
        report.status, report.error = "forged", {"message": str(error)[:300]}
    return report


def _error(fields: Any) -> dict[str, Any]:
    frames = [(str(file), int(line or 0), str(name)) for file, line, name in fields.get("frames", [])]
    twice = fields.get("waited_twice")
    if twice is not None:
        file, line = twice["first"]
        twice = Event.from_plain(twice["event"]), str(file), int(line)
        if twice[0].kind not in ("send", "recv"):
            raise ValueError("not a message")
    return {
        "type": str(fields["type"]),
        "message": without_gloos_places(str(fields["message"])),
        "frames": frames,
        "notes": [str(note)[:500] for note in fields.get("notes", [])][:3],
        "machine": fields.get("machine") is True,
        "waited_twice": twice,  # the message, and the file and line of the wait() that returned
    }


def _ending(ended: str, ranks: list[RankReport]) -> str:
    if ended == "complete" and any(rank.status != "done" for rank in ranks):
        return "trouble"
    return ended


_shared: dict[str, Launcher] = {}


def shared_launcher() -> Launcher:
    """The launcher of this process, without isolation: for notebooks, and for tests."""
    if "launcher" not in _shared:
        import atexit

        _shared["launcher"] = Launcher()
        atexit.register(_shared["launcher"].close)
    return _shared["launcher"]
