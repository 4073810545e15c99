"""What Linux alone has may be missing: macOS's roads, gone on Linux, as far as that can be.

The fork server is told that it runs on macOS, and loses what macOS has not, or refuses to a user: the
scheduler's policies, prctl, large pages, the times of a process's threads, and the difference between one
that runs and one that sleeps. What stays Linux's: its fork, its gloo, its kernel's answers.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from grader.judging.verdicts import Verdict
from grader.ranks import server as module
from grader.ranks.launcher import Launcher
from grader.ranks.server import FORK_SERVER
from tests.attempts import look, twisted

MACOS = """
import ctypes, os, sys
import psutil

def refused(*arguments):
    raise psutil.AccessDenied

def missing(*arguments):
    raise AssertionError("macOS has no such call")

sys.platform = "darwin"
psutil.Process.threads = refused
psutil.Process.status = lambda process: psutil.STATUS_RUNNING
for name in [name for name in vars(os) if name.startswith(("sched_", "SCHED_"))] + ["O_PATH"]:
    delattr(os, name)
class Library:
    prctl = madvise = missing
ctypes.CDLL = lambda *arguments, **options: Library
"""


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Ranks below a fork server that takes this system for macOS; the loopback device keeps its name."""
    first, begin = FORK_SERVER.rsplit(";", 1)
    monkeypatch.setattr(module, "FORK_SERVER", f"{first}\n{MACOS}\n{begin.strip()}")
    launcher = Launcher()
    yield launcher
    launcher.close()


def test_ranks_answer(macos: Launcher, tmp_path: Path) -> None:
    assert look(tmp_path, twisted(), macos).verdict == Verdict.PASSED


def test_who_computes_is_not_taken_for_deadlocked(macos: Launcher, tmp_path: Path) -> None:
    says = twisted("until = time.monotonic() + 3\nwhile time.monotonic() < until: pass")
    report = look(tmp_path, says, macos, idle=1.0)
    assert report.verdict == Verdict.PASSED, report.text


def test_a_deadlock_is_told_in_seconds(macos: Launcher, tmp_path: Path) -> None:
    says = twisted("if dist.get_rank() == 0: dist.barrier(group=group)\nelse: time.sleep(100)")
    report = look(tmp_path, says, macos, idle=1.5, timeout=60.0)
    assert report.verdict == Verdict.HUNG
    assert "deadlock: no rank moved" in report.text


def test_memory_is_still_counted(macos: Launcher, tmp_path: Path) -> None:
    says = twisted("kept = []\nwhile True: kept.append(torch.ones(2**24)); time.sleep(0.02)")
    report = look(tmp_path, says, macos, memory_bytes=2**29)
    assert report.verdict == Verdict.OUT_OF_MEMORY


def test_a_killed_supervisor_leaves_nothing(macos: Launcher, tmp_path: Path) -> None:
    says = twisted(f"""
        import signal
        with open("{tmp_path}/pids", "a") as file: print(os.getpid(), file=file)
        time.sleep(0.5)
        if dist.get_rank() == 0: os.kill(os.getppid(), signal.SIGKILL)
        until = time.monotonic() + 60
        while time.monotonic() < until: pass
    """)
    assert look(tmp_path, says, macos).verdict == Verdict.REFUSED
    gone = [int(line) for line in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, gone)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(gone) >= 2 and not any(map(psutil.pid_exists, gone))
