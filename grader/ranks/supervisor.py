"""Keeps a run: forks its ranks, holds the clock and the limits, gathers what they send, leaves nothing.

It runs in a process of its own between the judge and the ranks, never loads a submission, and does not rely
on any rank's cooperation: what it can not get in time it does without. After a run in which every rank has
answered, the judge may ask the same ranks for another one; between the two they are frozen.
"""

import contextlib
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from grader.beside.tampering import Guard
from grader.beside.worker import run_worker
from grader.ranks.box import FRESH
from grader.ranks.event_log import EventLog
from grader.ranks.frames import FrameBuffer, receive_frame, send_frame
from grader.ranks.leftovers import Segments, SharedMemory, let_trackers_end
from grader.ranks.limits import MOST_DENIED
from grader.ranks.processes import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    could_run,
    cpu_seconds,
    descendants,
    kill,
    memory_in_files,
    memory_in_folders,
    prctl,
    reap_all,
    tasks_on_the_machine,
    those_of,
)
from nanogpt.turns import keep_to_one_core

TICK_SECONDS = 0.03
TREE_SECONDS = 0.5
GRACE_SECONDS = 0.25
WORDS_SECONDS = 1.0
"""That a rank may take, beyond a tenth, to write where it stands."""
STALL_SECONDS = 0.5
"""Between two looks; where it is more, the machine was held up, and not the ranks alone."""
STAND_SECONDS = 0.1
"""That ranks may take to stand still between two runs."""
LEAST_CPU = 0.015
"""Seconds of the processor's time that show that somebody computes."""
WAITING_CPU = 0.02
"""Share of a processor up to which a rank only waits: gloo's thread looks a hundred times a second."""
THREADS_PATIENCE = 3
"""How many times as long a rank may only wait whose other threads compute: gloo's may spin for ever."""
OUTPUT_LIMIT = 64 * 1024
CUDA_BYTES = 3 * 2**30
"""That a rank on a GPU may take beyond its limit: CUDA, its libraries, and NCCL's buffers on the machine."""


@dataclass
class RankState:
    """What is known of one rank."""

    status: str = "running"
    """running, done (a complete record), failed (it raised), dead (it ended without a word), forged."""
    error: dict[str, Any] | None = None
    began: bool = False
    """It was connected with the others, and then only was there code of the submission in it."""
    exit_code: int | None = None
    stack: str = ""
    """Where it stood when it was stopped, innermost call first, as faulthandler writes it."""
    waits_for: int = 0
    """`Event.index` of what it waited for then; 0 for nothing that was seen to start."""
    output: str = ""
    ended_at: float | None = None
    """Seconds since the run began."""


@dataclass
class _Rank:
    pid: int
    connection: socket.socket
    output: BinaryIO
    dump: BinaryIO
    log: EventLog
    state: RankState = field(default_factory=RankState)
    frames: FrameBuffer = field(default_factory=FrameBuffer)
    record: bytes = b""


def supervise(judge: socket.socket, guard: Guard) -> None:
    """Serve one run for the judge on the other side of the socket, or several on the same ranks."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_DUMPABLE, 0)  # no rank can read its memory, where the other ranks' orders pass through
    _, body = receive_frame(judge)
    header = json.loads(body)
    shared = SharedMemory()
    _make_whole([*FRESH] if header["shut_in"] else [], tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix="scale-by-hand-"))
    run = _Run(judge, header, directory, guard)
    try:
        run.start()
        run.watch()
        while run.ended == "complete" and run.rest():
            run.watch()
    finally:
        run.stop(shared)
        shutil.rmtree(directory, ignore_errors=True)
        shared.remove()
        run.segments.remove()
    if run.ended != "let go":
        run.report()


def _make_whole(fresh: list[str], own: str) -> None:
    """The folders as they were at first: a run before may have closed them, or removed the server's own."""
    for folder in fresh:
        os.chmod(folder, 0o1777)
    if os.path.islink(own) or not os.path.isdir(own):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(own)
        os.mkdir(own)
    os.chmod(own, 0o700)


@dataclass
class _Progress:
    """When something last spent more of the processor than who only waits."""

    last: float
    cpu: float = 0.0

    def see(self, cpu: float, now: float, num_ranks: int) -> None:
        if cpu > self.cpu + max(LEAST_CPU, WAITING_CPU * num_ranks * (now - self.last)):
            self.last, self.cpu = now, cpu


@dataclass
class _Denied:
    """The seconds in which a rank could have run and no core was free for any: they are not its own."""

    looked: float
    could_run: float = 0.0
    first_cpu: float | None = None
    cpu: float = 0.0

    def see(self, runnable: bool, cpu: float, now: float) -> None:
        self.first_cpu = cpu if self.first_cpu is None else self.first_cpu
        self.could_run += now - self.looked if runnable else 0.0
        self.looked, self.cpu = now, cpu

    @property
    def seconds(self) -> float:
        return max(0.0, self.could_run - (self.cpu - (self.first_cpu or 0.0)))


class _Run:
    def __init__(self, judge: socket.socket, header: dict[str, Any], directory: Path, guard: Guard) -> None:
        self.judge = judge
        self.header = header
        self.directory = directory
        self.guard = guard
        self.ranks: list[_Rank] = []
        self.selector = selectors.DefaultSelector()
        self.ended = ""
        self.cpu: dict[int, tuple[float, float]] = {}
        self.began = self.next_tree = time.monotonic()
        self.heads = b""
        self.segments = Segments()
        self.fork_server = os.getppid()
        self.base_rss = psutil.Process().memory_info().rss

    def start(self) -> None:
        """Fork the ranks, then hand each its own order: no rank ever holds another's data."""
        for world_rank in range(self.header["world_size"]):
            self.ranks.append(self._fork(world_rank))
        self.segments.see(rank.pid for rank in self.ranks)
        self._hand_out_orders()
        for rank in self.ranks:
            self.selector.register(rank.connection, selectors.EVENT_READ, (rank, self._read_frames))
            self.selector.register(rank.output, selectors.EVENT_READ, (rank, self._read_output))
        self.selector.register(self.judge, selectors.EVENT_READ, None)

    def _hand_out_orders(self) -> None:
        for rank in self.ranks:
            _, body = receive_frame(self.judge)
            rank.connection.setblocking(True)
            with contextlib.suppress(ConnectionError):  # a rank that has ended is noticed soon enough
                send_frame(rank.connection, b"P", body)
            rank.connection.setblocking(False)

    def rest(self) -> bool:
        """Tell the judge how the run ended; the ranks stand still until it asks for another. Has it?"""
        self._read_what_is_left()
        self._tell_all(signal.SIGSTOP)
        self._wait_until_they_stand()
        self.report()
        try:
            _, body = receive_frame(self.judge)
        except ConnectionError:
            self.ended = "let go"
            return False
        self.header = json.loads(body)
        self.began, self.ended, self.cpu = time.monotonic(), "", {}
        for rank in self.ranks:
            rank.state, rank.record = RankState(began=True), b""
            rank.log.clear()
        self._tell_all(signal.SIGCONT)
        self._hand_out_orders()
        return True

    def _tell_all(self, number: int) -> None:
        """Send a signal to every rank and what it has started; one that has ended is noticed elsewhere."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the second is macOS's word
                os.killpg(rank.pid, number)

    def _wait_until_they_stand(self) -> None:
        """A signal takes a moment to arrive; who has left its group is not told, and not waited for long."""
        latest = time.monotonic() + STAND_SECONDS
        for rank in self.ranks:
            while rank.state.exit_code is None and time.monotonic() < latest:
                pid, status = os.waitpid(rank.pid, os.WNOHANG | os.WUNTRACED)
                if pid and os.WIFSTOPPED(status):
                    break
                if pid:
                    rank.state.exit_code = os.waitstatus_to_exitcode(status)
                time.sleep(0.0002)

    def _read_what_is_left(self) -> None:
        """What ranks have printed may still be on its way."""
        for key, _ in self.selector.select(0):
            if key.data is not None:
                rank, read = key.data
                read(rank)

    def _fork(self, world_rank: int) -> _Rank:
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        dump = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115 (it lives as long as the rank)
        log = EventLog()
        pid = os.fork()
        if pid == 0:
            try:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                _become_rank(theirs, write_end, dump)
                _limit(self.header["memory_bytes"], self.directory)
                if self.header["timed"]:
                    keep_to_one_core(world_rank, self.header["world_size"])
                run_worker(theirs, world_rank, self.header, self.directory, dump, log, self.guard)
            finally:
                os._exit(0)
        theirs.close()
        os.close(write_end)
        return _Rank(pid, ours, os.fdopen(read_end, "rb", buffering=0), dump, log)

    def watch(self) -> None:
        """Listen until every rank has answered, or until something ends the run early."""
        timeout = self.header["timeout"]
        trouble_at, next_look, before = None, self.began + TICK_SECONDS, self.began
        life, threads, denied = _Progress(self.began), _Progress(self.began), _Denied(self.began)
        tasks = tasks_on_the_machine()
        while not self.ended:
            progressed = self._listen()
            now = time.monotonic()
            held_up, before = now - before, now
            if held_up > STALL_SECONDS:  # by a laptop's lid, or by another virtual machine
                life.last, threads.last = life.last + held_up, threads.last + held_up
            self._reap()
            states = [rank.state.status for rank in self.ranks]
            if all(status == "done" for status in states):
                self.ended = "complete"
            elif any(status in ("failed", "dead", "forged") for status in states):
                trouble_at = trouble_at or now
                if now > trouble_at + GRACE_SECONDS or "running" not in states:
                    self.ended = "trouble"
            elif now > self.began + timeout + min(denied.seconds, MOST_DENIED * timeout):
                self.ended = "timeout"
            if progressed:
                life.last = now
            if now < next_look:  # looking costs a millisecond, and most runs are over before the first time
                continue
            crowded = tasks_on_the_machine() > tasks + self.header["max_processes"]
            tree = crowded or now >= self.next_tree
            main_cpu, other_cpu, runnable = self._measure(tree)
            next_look = now + TICK_SECONDS
            if tree:
                self.next_tree, tasks = now + TREE_SECONDS, tasks_on_the_machine()
            if runnable:
                life.last = now
            denied.see(runnable, main_cpu + other_cpu, now)
            life.see(main_cpu, now, len(self.ranks))
            threads.see(other_cpu, now, len(self.ranks))
            idle = self.header["idle"]
            patience = idle * THREADS_PATIENCE if now < threads.last + idle else idle
            if now > life.last + patience and not self.ended:
                self.ended = "idle"

    def _listen(self) -> bool:
        progressed = False
        for key, _ in self.selector.select(TICK_SECONDS):
            if key.data is None:
                self.ended = "cancelled"
                continue
            rank, read = key.data
            progressed |= read(rank)
        before, self.heads = self.heads, b"".join(rank.log.head for rank in self.ranks)
        return progressed or self.heads != before

    def _read_frames(self, rank: _Rank) -> bool:
        try:
            data = rank.connection.recv(1 << 20)
        except (BlockingIOError, ConnectionError):
            data = b""
        if not data:
            self.selector.unregister(rank.connection)
            return False
        try:
            for kind, body in rank.frames.feed(data):
                self._take(rank, kind, body)
        except ValueError as error:
            self._finish(rank, "forged", {"message": str(error)})
            self.selector.unregister(rank.connection)
        return True

    def _take(self, rank: _Rank, kind: bytes, body: bytes) -> None:
        state = rank.state
        if state.status != "running":
            self._finish(rank, "forged", {"message": "a rank sent more than one result"})
        elif kind == b"B":
            state.began = True
        elif kind == b"R":
            rank.record = body
            self._finish(rank, "done")
        elif kind == b"X":
            rank.record = body
            self._finish(rank, "failed")

    def _finish(self, rank: _Rank, status: str, error: dict[str, Any] | None = None) -> None:
        rank.state.status = status
        rank.state.error = error
        rank.state.ended_at = time.monotonic() - self.began

    def _read_output(self, rank: _Rank) -> bool:
        data = rank.output.read(1 << 16)
        if not data:
            self.selector.unregister(rank.output)
            return False
        room = OUTPUT_LIMIT - len(rank.state.output)
        if room > 0:
            rank.state.output += data.decode(errors="replace")[:room]
        return False

    def _reap(self) -> None:
        """Notice ranks that ended. Their last words may still be on the way: those are read first."""
        for rank in self.ranks:
            if rank.state.exit_code is None:
                pid, status = os.waitpid(rank.pid, os.WNOHANG)
                if pid:
                    rank.state.exit_code = os.waitstatus_to_exitcode(status)
            if rank.state.exit_code is not None and rank.state.status == "running":
                while rank.connection in _registered(self.selector) and self._read_frames(rank):
                    pass
                if rank.state.status == "running":
                    self._finish(rank, "dead")

    def _measure(self, tree: bool) -> tuple[float, float, bool]:
        """CPU seconds of main threads and of others, and whether one could run; a limit passed ends the run.

        A rank that has answered only waits for its peers. What it still spends is no progress: gloo's thread
        may spin for ever on a message whose handle was dropped.
        """
        runnable, rss, num_threads = False, 0, 0
        answered = {r.pid for r in self.ranks if r.state.status == "done"}
        processes = (
            descendants()
            if tree
            else those_of(rank.pid for rank in self.ranks if rank.state.exit_code is None)
        )
        if len(processes) > self.header["max_processes"]:
            self.ended = "processes"
            return 0.0, 0.0, True
        for process in processes:
            try:
                with process.oneshot():
                    if process.pid not in answered:
                        self.cpu[process.pid] = cpu_seconds(process)
                        runnable |= could_run(process)
                    rss += max(process.memory_info().rss - self.base_rss, 0)
                    num_threads += process.num_threads()
            except psutil.Error:
                continue
        if tree:
            self.segments.see(process.pid for process in processes)
            rss += memory_in_files(processes) + self.segments.num_bytes()
            rss += memory_in_folders(FRESH) if self.header["shut_in"] else 0
            self._wake_fork_server()
        if num_threads > self.header["max_threads"]:
            self.ended = "threads"
        cuda = len(self.ranks) * CUDA_BYTES if self.header["device"] == "cuda" else 0
        if rss > self.header["memory_bytes"] + cuda:
            self.ended = "memory"
        mains, others = zip(*self.cpu.values(), strict=True) if self.cpu else ((), ())
        return sum(mains), sum(others), runnable

    def stop(self, shared: SharedMemory) -> None:
        """Ask every unfinished rank where it stands, then end every process below this one."""
        asked = [r for r in self.ranks if r.state.status == "running" and r.state.exit_code is None]
        if self.ended in ("timeout", "idle", "trouble"):
            for rank in asked:
                os.kill(rank.pid, signal.SIGUSR1)
            _wait_for_words(asked)
            self._listen()
        for rank in self.ranks:
            rank.dump.seek(0)
            rank.state.stack = rank.dump.read(OUTPUT_LIMIT).decode(errors="replace")
            rank.state.waits_for = rank.log.waits_for
        if shared.new():  # mostly there is none
            below = descendants()
            shared.see(below)
            let_trackers_end(below)
        self._tell_all(signal.SIGKILL)  # at one blow, also what forks faster than it can be counted
        for rank in self.ranks:
            if rank.state.exit_code is None:
                os.kill(rank.pid, signal.SIGKILL)  # wherever it has gone: it is not reaped, so it is this one
                os.waitpid(rank.pid, 0)
        for _ in range(200):
            below = descendants()
            if not below:
                break
            for process in below:
                kill(process)
            reap_all()
            time.sleep(0.002)

    def _wake_fork_server(self) -> None:
        """A rank may have stopped it, and the next run would wait for it in vain."""
        if os.getppid() == self.fork_server:
            with contextlib.suppress(OSError):  # it may end between these two lines
                os.kill(self.fork_server, signal.SIGCONT)

    def report(self) -> None:
        """Tell the judge everything, as plain data."""
        states = [asdict(rank.state) for rank in self.ranks]
        seconds = time.monotonic() - self.began
        summary = {"ended": self.ended, "seconds": seconds, "ranks": states}
        self._wake_fork_server()
        self.judge.setblocking(True)
        send_frame(self.judge, b"S", json.dumps(summary).encode())
        for rank in self.ranks:
            send_frame(self.judge, b"R", rank.record)
            send_frame(self.judge, b"E", rank.log.contents())


def _wait_for_words(asked: list[_Rank]) -> None:
    """Until every rank has written where it stands: a moment, or a little longer on a busy machine."""
    time.sleep(0.1 if asked else 0)
    latest = time.monotonic() + WORDS_SECONDS
    while time.monotonic() < latest and any(os.fstat(r.dump.fileno()).st_size == 0 for r in asked):
        time.sleep(0.02)


def _become_rank(connection: socket.socket, output: int, dump: BinaryIO) -> None:
    """Leave the supervisor's world: a process group, and no inherited descriptor but the rank's own."""
    os.setpgid(0, 0)
    prctl(PR_SET_DUMPABLE, 1)
    os.dup2(output, 1)
    os.dup2(output, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    keep = {0, 1, 2, connection.fileno(), dump.fileno()}
    for name in os.listdir("/dev/fd"):
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                continue
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)


def _limit(memory_bytes: int, directory: Path) -> None:
    """No core files, no file larger than the memory limit; temporary files go where they are removed."""
    for kind, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, memory_bytes)):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)


def _registered(selector: selectors.BaseSelector) -> set[Any]:
    return {key.fileobj for key in selector.get_map().values()}
