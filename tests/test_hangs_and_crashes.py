"""Ranks that hang, crash, or take more than they may: the verdict, the words, and what is left behind."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from grader import run_ranks
from grader.judging.stories import ending
from grader.judging.verdicts import Verdict
from grader.ranks import launcher as launching
from grader.ranks import server
from grader.ranks.gloos_words import without_gloos_places
from grader.ranks.isolation import Isolation
from grader.ranks.launcher import Code, Launcher, Limits, shared_launcher
from tests.attempts import FORWARD, grade, look, twisted

CRASHES = {
    "one rank raises, its peer waits": (
        "if group.rank() == 1: raise ValueError('the story')\ndist.barrier(group)",
        "rank 1 raised ValueError: the story",
    ),
    "one rank leaves, its peer waits": (
        "if group.rank() == 1: os._exit(3)\ndist.barrier(group)",
        "rank 1 ended with exit status 3 before it had given its result",
    ),
    "segmentation fault": ("import ctypes; ctypes.string_at(0)", "was killed by signal 11"),
    "abort": ("os.abort()", "was killed by signal 6"),
    "its own alarm": ("import signal; signal.alarm(1); time.sleep(60)", "was killed by signal 14"),
    "recursion": ("return copy_to_group(x, group)", "raised RecursionError"),
    "an exception that can not be printed": (
        "class Odd(Exception):\n    def __str__(self): raise RuntimeError\nraise Odd",
        "raised Odd",
    ),
    "no ordinary exception": ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    "control characters": ("raise ValueError('\\x1b[31m \\ud800')", "ValueError: \\x1b[31m \\ud800"),
    "all descriptors closed": ("os.closerange(3, 200)", "before it had given its result"),
    "a float meets a double": (
        "dist.all_reduce(torch.ones(4, dtype=torch.float32 if group.rank() else torch.float64), group=group)",
        "the ranks parted: rank 0 called all_reduce (SUM) of 4 float64",
    ),
}

HANGS = {
    "shapes differ": (
        "dist.all_reduce(torch.ones(3 + group.rank()), group=group)",
        "rank 0 called all_reduce (SUM) of 3 float32",
    ),
    "another order": (
        """
        a, b = torch.ones(2), torch.ones(2)
        first, second = (a, b) if group.rank() else (b, a)
        if group.rank(): dist.broadcast(a, group=group, group_src=0)
        dist.all_reduce(b, group=group)
        if not group.rank(): dist.broadcast(a, group=group, group_src=0)
        """,
        "the ranks parted",
    ),
    "all send first": (
        """
        other = 1 - group.rank()
        dist.send(torch.ones(16), group=group, group_dst=other)
        dist.recv(torch.ones(16), group=group, group_src=other)
        """,
        "every rank sends before any of them receives",
    ),
    "nobody sends": (
        "dist.recv(torch.ones(3), group=group, group_src=1 - group.rank())",
        "waits for a message from rank 1 that was never sent",
    ),
    "a barrier on one rank": ("if group.rank() == 0: dist.barrier(group)", "rank 0 called barrier"),
    "a sub-group of its own": (
        "mine = dist.new_group([0, 1])\nif group.rank() == 0: dist.barrier(mine)",
        "waiting in barrier",
    ),
    "a signal handler": (
        """
        import signal
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        dist.recv(torch.ones(3), group=group, group_src=1 - group.rank())
        """,
        "deadlock: no rank moved",
    ),
}


def everything(report) -> str:
    return "\n".join([report.message, report.cause, report.help, *report.details])


@pytest.mark.parametrize("name", CRASHES)
def test_crash_is_told(name: str, tmp_path: Path, launcher: Launcher) -> None:
    lines, words = CRASHES[name]
    report = look(tmp_path, twisted(lines), launcher)
    assert (
        report.verdict in (Verdict.CRASHED, Verdict.HUNG) if "meets" in name else report.verdict == "crashed"
    )
    assert words in everything(report)


@pytest.mark.parametrize("name", HANGS)
def test_deadlock_is_told_in_seconds(name: str, tmp_path: Path, launcher: Launcher) -> None:
    lines, words = HANGS[name]
    launcher.warm_up()
    began = time.monotonic()
    report = look(tmp_path, twisted(lines), launcher, idle=1.5)
    assert report.verdict in (Verdict.HUNG, Verdict.CRASHED)  # gloo may abort where sizes or calls differ
    assert words in everything(report)
    assert time.monotonic() - began < 20  # of the 30 minutes that gloo would wait


def test_a_group_that_its_members_alone_make_is_told(tmp_path: Path, launcher: Launcher) -> None:
    lines = "dist.barrier(group)\ndist.new_group([0, 1] if group.rank() == 0 else [1])"
    report = look(tmp_path, twisted(lines), launcher, timeout=4)  # torch polls meanwhile, which is no rest
    assert report.verdict == Verdict.HUNG
    assert "waited in dist.new_group" in report.message
    assert "made by all ranks of the world together" in report.cause
    assert "waiting in barrier" not in everything(report)  # which it called last, and which is over


def test_a_check_that_makes_a_group_while_others_hang_is_no_cause(launcher: Launcher) -> None:
    def probe(rank):
        if rank.rank == 0:
            dist.barrier(rank.group)
        dist.new_group([0, 1])

    limits = Limits(timeout=4)
    report = launcher.run(probe, Code(), [(), ()], limits=limits)
    end = ending(report, lambda file, line: "", limits, [0, 1])
    assert end.verdict == Verdict.HUNG
    assert "rank 0 called barrier, and rank 1 never did" in end.message


@pytest.mark.parametrize("nobody", [2, -3])
def test_a_message_to_a_rank_that_is_not_there_is_told(
    nobody: int, tmp_path: Path, launcher: Launcher
) -> None:
    lines = (
        f"if not group.rank(): dist.send(x.detach(), group=group, group_dst={nobody})\ndist.barrier(group)"
    )
    report = look(tmp_path, twisted(lines), launcher)
    assert report.verdict == Verdict.CRASHED
    assert f"there is no rank {nobody}: its ranks are 0 to 1" in report.cause


def words_of(function: Callable[[], None], ranks: int) -> str:
    """What is said of a run that fails, in one line."""
    with pytest.raises(RuntimeError) as told:
        run_ranks(function, ranks=ranks)
    return " ".join(str(told.value).split())


def test_a_message_that_nobody_waits_for_is_told_in_seconds() -> None:
    """Gloo's thread spins for ever on the dropped message: that is no progress."""

    def send_and_forget() -> None:  # here, so that it travels by value: ranks need not import this file
        group = dist.group.WORLD
        dist.barrier(group)
        if group.rank() == 0:
            dist.isend(torch.ones(30), group=group, group_dst=1)  # nobody keeps the handle
        else:
            time.sleep(0.5)
            dist.recv(torch.ones(30), group=group, group_src=0)

    shared_launcher().warm_up()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 0\s+had\s+returned.*did\s+not\s+wait\s+for"):
        run_ranks(send_and_forget, ranks=2)
    assert time.monotonic() - began < 25


@pytest.mark.parametrize("waits_twice", ["isend", "irecv"])
def test_a_second_wait_for_a_message_is_told_at_once_and_by_its_lines(waits_twice: str) -> None:
    def wait_twice() -> None:
        group = dist.group.WORLD
        tensor, other = torch.ones(30), 1 - group.rank()
        call = "isend" if group.rank() == 0 else "irecv"
        peer = {"group_dst" if call == "isend" else "group_src": other}
        work = getattr(dist, call)(tensor, group=group, **peer)
        work.wait()
        if call == waits_twice:
            work.wait()

    shared_launcher().warm_up()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"calls wait\(\) a second time") as told:
        run_ranks(wait_twice, ranks=2)
    words = " ".join(str(told.value).split())
    assert f"on the work of one {waits_twice}, which would never return" in words
    assert words.count("`work.wait()`") == 2  # where it stands, and the one before
    assert f"the {waits_twice} was waited for before, in" in words
    assert "deadlock" not in words
    assert time.monotonic() - began < 5  # no silence is waited for


def test_whoever_asks_first_or_waits_for_a_collective_twice_may_wait() -> None:
    def ask_and_wait() -> None:
        group = dist.group.WORLD
        tensor = torch.ones(30)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        work.wait()
        call, peer = (dist.irecv, "group_src") if group.rank() else (dist.isend, "group_dst")
        work = call(tensor, group=group, **{peer: 1 - group.rank()})
        work.is_completed()
        work.wait()
        work.is_completed()

    assert run_ranks(ask_and_wait, ranks=2) == [None, None]


def test_a_message_that_does_not_fit_is_told_without_the_lines_of_gloo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def send_too_much() -> None:
        group = dist.group.WORLD
        if group.rank() == 0:
            dist.send(torch.ones(20), group=group, group_dst=1)
        else:
            dist.recv(torch.empty(10), group=group, group_src=0)

    with pytest.raises(RuntimeError, match="rank 0 called send of 20 float32 to rank 1") as told:
        run_ranks(send_too_much, ranks=2)
    shown = " ".join((str(told.value) + capsys.readouterr().out).split())
    assert "rank 1 called recv of 10 float32 from rank 0" in shown
    assert "[rank 1] gloo: 80 bytes arrived where 40 were expected" in shown
    assert "pair.cc" not in shown
    assert "terminate called" not in shown


def test_a_message_that_fills_a_part_of_its_buffer_is_told() -> None:
    def send_too_little() -> None:
        group = dist.group.WORLD
        if group.rank() == 0:
            dist.send(torch.ones(10), group=group, group_dst=1)
        else:
            dist.recv(torch.empty(20), group=group, group_src=0)

    with pytest.raises(RuntimeError, match="send of 10 float32 to rank 1") as told:
        run_ranks(send_too_little, ranks=2)
    words = " ".join(str(told.value).split())
    assert "recv of 20 float32 from rank 0" in words
    assert "the message fills only the beginning of that tensor" in words


def test_who_waits_for_whom_in_a_smaller_group_is_told_by_the_run_s_ranks() -> None:
    def send_across() -> None:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = pairs[dist.get_rank() % 2]
        dist.send(torch.ones(100_000), group=group, group_dst=1 - group.rank())

    words = words_of(send_across, ranks=4)
    assert all(f"waiting in send of 100000 float32 to rank {peer}" in words for peer in range(4))


def test_what_gloo_found_stays() -> None:
    closed = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    )
    assert without_gloos_places(closed) == "gloo: Connection closed by peer [127.0.0.1]:1"
    other = (
        "mine\nterminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    )
    assert without_gloos_places(other) == other
    enforced = (
        "mine\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at /x/gloo/gloo/transport/tcp/unbound_buffer.cc:12] a > b. \nlast\n"
    )
    assert without_gloos_places(enforced) == "mine\ngloo: a > b. \nlast\n"


def test_waiting_is_not_computing_however_many_wait() -> None:
    """The threads with which gloo waits take a little of the processor, all together for ever."""

    def everyone_sends_first() -> None:
        group = dist.group.WORLD
        rank, n = group.rank(), group.size()
        dist.send(torch.ones(100_000), group=group, group_dst=(rank + 1) % n)
        dist.recv(torch.empty(100_000), group=group, group_src=(rank - 1) % n)

    shared_launcher().warm_up()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)deadlock.*every rank sends before any of them receives"):
        run_ranks(everyone_sends_first, ranks=4)
    assert time.monotonic() - began < 15  # ranks that nobody stops waited 20 to 90 seconds here


def test_a_ring_whose_sends_are_not_waited_for_is_named() -> None:
    def drop() -> None:
        group = dist.group.WORLD
        rank, n = group.rank(), group.size()
        dist.isend(torch.ones(1000), group=group, group_dst=(rank + 1) % n)  # nobody keeps the handle
        dist.recv(torch.empty(1000), group=group, group_src=(rank - 1) % n)

    shared_launcher().warm_up()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)deadlock.*rank\s+\d\s+did\s+not\s+wait\s+for"):
        run_ranks(drop, ranks=4)
    assert time.monotonic() - began < 40  # of the 120 seconds that it may take


def test_a_machine_that_was_held_up_is_no_deadlock(launcher: Launcher) -> None:
    """As by a laptop's lid: who keeps the ranks wakes, and has not looked for a long time."""

    def hold_up(rank):
        if rank.rank == 0:
            keeper = psutil.Process(os.getppid())
            server = keeper.parent()  # it ends a keeper that it sees stopped, and its keeper wakes it
            for process in (server, keeper, server):
                process.suspend()
            time.sleep(3)
            for process in (keeper, server):
                process.resume()
        time.sleep(3.5 - 3 * (rank.rank == 0))

    report = launcher.run(hold_up, Code(trusted=True), [(), ()], limits=Limits(idle=1.5))
    assert report.ended == "complete"


@contextmanager
def crowded(core: int) -> Iterator[None]:
    """Six others compute on this core."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    try:
        for other in others:
            os.sched_setaffinity(other.pid, {core})
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


only_where_waiting_is_told = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="only Linux tells who waits for a core"
)


def compute_on(rank, core: int, seconds: float) -> None:
    os.sched_setaffinity(0, {core})
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        pass


@only_where_waiting_is_told
def test_time_in_which_others_have_the_core_is_not_the_ranks_own(launcher: Launcher) -> None:
    """It computes for longer than its timeout, and has the core for a part of that."""
    core = min(os.sched_getaffinity(0))
    with crowded(core):
        report = launcher.run(compute_on, Code(trusted=True), [(core, 2.3)], limits=Limits(timeout=2))
    assert report.ended == "complete"
    assert report.seconds > 2


@only_where_waiting_is_told
def test_the_judge_waits_for_as_long_as_a_run_may_take(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others took of the core is given back, and the one who waits knows: it is hung, and not lost."""
    monkeypatch.setattr(launching, "ANSWER_SECONDS", 2.0)
    core = min(os.sched_getaffinity(0))
    with crowded(core):
        report = launcher.run(compute_on, Code(trusted=True), [(core, 60.0)], limits=Limits(timeout=3))
    assert report.ended == "timeout"
    assert report.seconds > 3


def test_messages_whose_tags_differ_are_named() -> None:
    def shift() -> None:
        group = dist.group.WORLD
        rank, n = group.rank(), group.size()
        works = [
            dist.isend(torch.ones(1000), group=group, group_dst=(rank + 1) % n, tag=rank),
            dist.irecv(torch.empty(1000), group=group, group_src=(rank - 1) % n, tag=rank),
        ]
        for work in works:
            work.wait()

    words = words_of(shift, ranks=2)
    assert "their tags differ, 0 and 1" in words
    assert "waiting in send of 1000 float32 to rank 0 (tag 1)" in words  # and not in what it started last


def test_messages_of_another_tag_may_overtake() -> None:
    def overtake() -> None:
        group = dist.group.WORLD
        if group.rank() == 0:
            works = [dist.isend(torch.ones(n), group=group, group_dst=1, tag=n) for n in (20, 10)]
        else:
            works = [dist.irecv(torch.ones(n), group=group, group_src=0, tag=n) for n in (10, 20)]
        for work in works:
            work.wait()

    assert run_ranks(overtake, ranks=2) == [None, None]


def test_messages_of_another_group_may_overtake() -> None:
    def overtake() -> None:
        group, other = dist.group.WORLD, dist.new_group([0, 1])
        if dist.get_rank() == 0:
            works = [dist.isend(torch.ones(n), group=g, group_dst=1) for g, n in ((group, 20), (other, 10))]
        else:
            works = [dist.irecv(torch.ones(n), group=g, group_src=0) for g, n in ((other, 10), (group, 20))]
        for work in works:
            work.wait()

    assert run_ranks(overtake, ranks=2) == [None, None]


def test_messages_whose_groups_differ_are_named() -> None:
    def name_a_group_and_the_world() -> None:
        pair = dist.new_group([0, 1])
        if dist.get_rank() == 0:
            dist.send(torch.ones(1000), dst=1)
        elif dist.get_rank() == 1:
            dist.recv(torch.empty(1000), group=pair, group_src=0)

    words = words_of(name_a_group_and_the_world, ranks=3)
    assert "their groups differ: one in a group of 3 ranks, the other in one of 2" in words


def test_who_stands_in_the_very_message_is_not_said_to_have_dropped_it() -> None:
    def name_two_groups() -> None:
        group, other = dist.group.WORLD, dist.new_group([0, 1])
        if group.rank() == 0:
            dist.send(torch.ones(1000), group=group, group_dst=1)
        else:
            dist.recv(torch.empty(1000), group=other, group_src=0)

    words = words_of(name_two_groups, ranks=2)
    assert "the two did not meet" in words
    assert "Both sides of a message must name the same group." in words
    assert "handle" not in words


def test_who_receives_from_any_rank_is_not_told_which_message_is_missing() -> None:
    def from_anyone() -> None:
        group = dist.group.WORLD
        if group.rank() == 0:
            dist.send(torch.ones(1000), group=group, group_dst=1)
        else:
            dist.recv(torch.empty(1000), group=group)
            dist.recv(torch.empty(1000), group=group)

    words = words_of(from_anyone, ranks=2)
    assert "waiting in recv of 1000 float32 from any rank" in words
    assert "never" not in words


def test_who_stands_elsewhere_than_in_its_message_does_not_blame_its_peer() -> None:
    def sleep() -> None:
        group = dist.group.WORLD
        if group.rank() == 0:
            work = dist.isend(torch.ones(1000), group=group, group_dst=1)
            time.sleep(60)
            work.wait()
        else:
            dist.recv(torch.empty(1000), group=group, group_src=0)

    words = words_of(sleep, ranks=2)
    assert "`time.sleep(60)`" in words
    assert "did not wait" not in words
    assert "waiting in" not in words


def test_who_sends_to_a_rank_that_has_finished_is_not_told_to_receive_first() -> None:
    def send_to_one_who_left() -> None:
        group = dist.group.WORLD
        if group.rank() == 0:
            dist.isend(torch.ones(1000), group=group, group_dst=1).wait()

    words = words_of(send_to_one_who_left, ranks=2)
    assert "Every message needs its receive: what makes rank 1 return without this one?" in words
    assert "Start the receive" not in words


def test_who_receives_from_the_wrong_neighbour_is_named() -> None:
    def confuse() -> None:
        group = dist.group.WORLD
        rank, n = group.rank(), group.size()
        works = [
            dist.isend(torch.ones(1000), group=group, group_dst=(rank + 1) % n),
            dist.irecv(torch.empty(1000), group=group, group_src=(rank + 1) % n),
        ]
        for work in works:
            work.wait()

    with pytest.raises(RuntimeError, match="rank 1 waits for a message from rank 2, who sends it none"):
        run_ranks(confuse, ranks=4)


def test_a_rank_that_loops_is_stopped_and_its_peer_is_not_blamed(tmp_path: Path, launcher: Launcher) -> None:
    loops = twisted("while group.rank() == 1: pass\ndist.barrier(group)")
    report = look(tmp_path, loops, launcher, timeout=2)
    assert report.verdict == Verdict.HUNG
    assert "had not finished after 2 seconds" in report.message
    assert "rank 1 never did" in report.message
    assert "rank 1 stood in submission.py, line 24: `while group.rank() == 1: pass`" in report.details


def test_endless_output_is_stopped_and_much_output_is_no_fault(tmp_path: Path, launcher: Launcher) -> None:
    assert look(tmp_path, twisted("while True: print('x' * 1000)"), launcher, timeout=2).verdict == "hung"
    assert look(tmp_path, twisted("print('x' * 20_000_000)"), launcher).verdict == "passed"


@pytest.mark.parametrize(
    "lines",
    ["hoard = []\nwhile group.rank() == 1: hoard.append(bytearray(30_000_000))", "torch.empty(10**13)"],
)
def test_out_of_memory(lines: str, tmp_path: Path, launcher: Launcher) -> None:
    report = look(tmp_path, twisted(lines), launcher, memory_bytes=2**29)
    assert report.verdict == Verdict.OUT_OF_MEMORY


def test_a_file_without_end_is_stopped(tmp_path: Path, launcher: Launcher) -> None:
    lines = "with open('big', 'wb') as file:\n    while True: file.write(bytes(10**7))"
    report = look(tmp_path, twisted(lines), launcher, memory_bytes=2**28)
    assert report.verdict == Verdict.CRASHED
    assert "File too large" in report.message


def test_a_fork_bomb_is_refused(tmp_path: Path, launcher: Launcher) -> None:
    lines = "for _ in range(6): os.fork()\ntime.sleep(60)"
    report = look(tmp_path, twisted(lines), launcher, max_processes=20)
    assert report.verdict == Verdict.REFUSED
    assert "more than 20 processes" in report.message


def test_nothing_is_left_behind(tmp_path: Path, launcher: Launcher) -> None:
    """A daemon, shared memory, temporary files: all gone when the verdict is there."""
    lines = f"""
        import subprocess, tempfile
        from multiprocessing import shared_memory
        shared_memory.SharedMemory(create=True, size=100, name=f"left-{{os.getpid()}}")
        made = [os.path.abspath("file"), tempfile.mkdtemp()]
        open("file", "w").close()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                made.append(str(os.getpid()))
                with open("{tmp_path}/made", "a") as file: print(*made, file=file)
                time.sleep(1000)
            time.sleep(0.5)
            os._exit(0)
        time.sleep(0.5)
    """
    assert look(tmp_path, twisted(lines), launcher).verdict == Verdict.PASSED
    rows = [line.split() for line in (tmp_path / "made").read_text().splitlines()]
    assert len(rows) == 4  # two ranks in each of two layouts
    for file, folder, pid in rows:
        assert not Path(file).exists()
        assert not Path(folder).exists()
        assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    shared = Path("/dev/shm")
    assert not shared.is_dir() or not list(shared.glob("left-*"))


def test_a_killed_supervisor_leaves_nothing_and_the_next_run_works(tmp_path: Path) -> None:
    launcher = Launcher()
    try:
        lines = f"""
            import signal
            if os.fork() == 0:
                os.setsid()
                with open("{tmp_path}/pids", "a") as file: print(os.getpid(), file=file)
                time.sleep(1000)
            time.sleep(0.5)
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        """
        report = look(tmp_path, twisted(lines), launcher)
        assert report.verdict == Verdict.REFUSED
        assert "the process that keeps the ranks was killed" in report.message
        gone = [int(line) for line in (tmp_path / "pids").read_text().split()]
        deadline = time.monotonic() + 10
        while any(psutil.pid_exists(pid) for pid in gone) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in gone if psutil.pid_exists(pid)]
        assert look(tmp_path, twisted(), launcher).verdict == Verdict.PASSED
    finally:
        launcher.close()


def test_two_gradings_at_once(tmp_path: Path, launcher: Launcher) -> None:
    """No port is shared: ranks find each other through a file of their own."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(3) as pool:
        reports = pool.map(lambda folder: grade(folder, twisted(), launcher, FORWARD), folders)
    assert {report.verdict for report in reports} == {Verdict.PASSED}


def test_the_machines_fault_is_not_the_learners(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_card = "import socket; socket.if_nameindex = lambda: []; "
    monkeypatch.setattr(server, "FORK_SERVER", no_card + server.FORK_SERVER)
    launcher = Launcher()
    try:
        report = look(tmp_path, twisted(), launcher)
    finally:
        launcher.close()
    assert report.verdict == Verdict.GRADER_ERROR
    assert "the ranks could not connect" in report.message


@pytest.mark.parametrize("wish", ["off", "on"])
def test_the_card_that_a_shell_names_is_not_the_ranks(
    wish: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, isolated: Launcher
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-card")
    launcher = Launcher(Isolation(wish))
    try:
        assert look(tmp_path, twisted(), launcher).verdict == Verdict.PASSED
    finally:
        launcher.close()


def test_what_fails_in_the_keeper_of_the_ranks_is_not_the_learners(tmp_path: Path) -> None:
    launcher = Launcher()
    try:
        report = look(tmp_path, twisted(), launcher, max_processes=None)  # no number to compare with
        assert look(tmp_path, twisted(), launcher).verdict == Verdict.PASSED
    finally:
        launcher.close()
    assert report.verdict == Verdict.GRADER_ERROR
    assert report.message.startswith("the process that keeps the ranks failed: TypeError: ")
    assert "(supervisor.py:" in report.message


def test_a_group_has_a_time_limit_of_its_own(launcher: Launcher) -> None:
    def probe(rank):
        return rank.group._get_backend(rank.device).options._timeout.total_seconds()

    limits = Limits(timeout=20)
    report = launcher.run(probe, Code(), [()], limits=limits)
    assert ending(report, lambda file, line: "", limits, [0]) is None
    assert report.ranks[0].result < 30 * 60


def test_shared_memory_of_other_programs_survives_a_run(tmp_path: Path, launcher: Launcher) -> None:
    """Made while the run goes on, open or not: a semaphore's name in the folder is not that in its maps."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("this system keeps shared memory elsewhere")
    lines = f"""
        from multiprocessing import shared_memory
        mine = shared_memory.SharedMemory(create=True, size=100, name=f"made-by-a-rank-{{os.getpid()}}")
        time.sleep(0.5)
        open("{tmp_path}/begun", "w").close()
        while not os.path.exists("{tmp_path}/go-on"): time.sleep(0.05)
    """
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(look, tmp_path, twisted(lines), launcher)
        while not (tmp_path / "begun").exists() and not run.done():
            time.sleep(0.05)
        assert list(shared.glob("made-by-a-rank-*"))
        semaphore = multiprocessing.get_context("spawn").Semaphore()
        kept = shared_memory.SharedMemory(create=True, size=100)
        kept.close()  # nobody has it open; somebody may want it all the same
        theirs = {shared / f"sem.{semaphore._semlock.name.strip('/')}", shared / kept.name}
        assert theirs <= set(shared.iterdir())
        (tmp_path / "go-on").touch()
        assert run.result().verdict == Verdict.PASSED
    assert theirs <= set(shared.iterdir())
    assert not list(shared.glob("made-by-a-rank-*"))
    assert semaphore.acquire(timeout=1)
    kept.unlink()
