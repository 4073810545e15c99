"""The process that forks ranks, as its judge sees it.

Nothing here needs torch: so the process can import its own, while the judge still imports what it needs.
"""

import contextlib
import errno
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys

from grader.ranks.faults import WHAT_TO_DO, CannotGradeError
from grader.ranks.isolation import ROOT, Isolation, inner_environment, isolated_command, last_line
from grader.ranks.leftovers import MARK, kill_marked
from nanogpt import loopback

START_SECONDS = 120
FORKS_ON_MACOS = {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES", "VECLIB_MAXIMUM_THREADS": "1"}
"""Read there alone: a process that has loaded the system's frameworks may fork, and BLAS has no threads."""
FORK_SERVER = "import gc; gc.disable(); from grader.ranks.forkserver import main; main()"
"""Imports make much and free little: collecting garbage meanwhile takes most of a second."""


class Server:
    """A fork server that has been started: wait until it is ready, then hand it a line for every run.

    Args:
        isolation: what its ranks see.
        shut_in: whether they are shut in.

    Raises:
        CannotGradeError: ranks could not talk to each other here.
        OSError: the process can not be started.
    """

    def __init__(self, isolation: Isolation, shut_in: bool) -> None:
        if not shut_in and not loopback.is_up():
            raise CannotGradeError(loopback.DOWN)
        self.isolation = isolation
        self.shut_in = shut_in
        self._mark = secrets.token_hex(8)
        self._preloaded = _preloaded()
        self._directory = ""
        self._is_ready = self._has_ended = False
        self._control, theirs = socket.socketpair()
        with contextlib.ExitStack() as where_it_fails, theirs:
            where_it_fails.callback(self._control.close)
            self._process = self._started(theirs.fileno())
            where_it_fails.pop_all()

    @property
    def serves(self) -> bool:
        """Whether nobody has killed it, or edited what it has imported."""
        return self._process.poll() is None and self._preloaded == _preloaded()

    @property
    def directory(self) -> str:
        """Where its runs keep what they need, and leave nothing; "" where it is shut in."""
        return self._directory

    def wait_until_ready(self) -> None:
        """Wait for its first word.

        Raises:
            CannotGradeError: it did not start, and why.
        """
        ready = self._hear(START_SECONDS)
        if self._is_ready:
            return
        self._process.kill()
        message = self._process.communicate()[1].decode(errors="replace")
        self.end()
        why = last_line(message) if ready else f"it gave no answer for {START_SECONDS} seconds"
        if why.startswith("unshare: "):  # it calls too many namespaces a lack of space as well
            raise CannotGradeError(f"this system allows no namespaces of one's own ({why})")
        if os.strerror(errno.ENOSPC) in why:
            why = f"{WHAT_TO_DO[errno.ENOSPC]}, and grade again ({why})"
        raise CannotGradeError(f"the rank server did not start: {why}")

    def hand_over(self, end: socket.socket) -> None:
        """Give it one end of a line: a keeper of new ranks takes it."""
        socket.send_fds(self._control, [b"x"], [end.fileno()])

    def end(self) -> None:
        """End it and everything below it; a second time does nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        if not self._is_ready:  # there is nothing below it yet
            self._process.kill()
            self._process.wait()
            self._hear(0)
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)  # it leaves nothing behind when it ends by itself
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says that of ended ones
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if not self.shut_in:
            kill_marked(self._mark)
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._process.stderr:
            self._process.stderr.close()

    def _hear(self, seconds: float) -> bool:
        """Whether it says within so many seconds that it is ready, or that it never will be."""
        heard, _, _ = select.select([self._control], [], [], seconds)
        answer = self._control.recv(4096) if heard else b""
        if answer.startswith(b"ready "):
            self._is_ready = True
            self._directory = "" if self.shut_in else answer[6:].decode()
        return bool(heard)

    def _started(self, control: int) -> subprocess.Popen:
        command = [sys.executable, "-P", "-c", FORK_SERVER, str(control)]
        return subprocess.Popen(
            isolated_command(command, self.isolation) if self.shut_in else command,
            pass_fds=[control],
            env={
                **(inner_environment() if self.shut_in else os.environ),
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "MPLBACKEND": "Agg",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "TORCH_COMPILE_DISABLE": "1",  # it would take longer than all checks together
                **FORKS_ON_MACOS,
                MARK: self._mark,
            },
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )


def _preloaded() -> list[tuple[str, int]]:
    """The course's files that the fork server imports for all ranks, as they are now."""
    return [(path.name, path.stat().st_mtime_ns) for path in sorted((ROOT / "nanogpt").glob("*.py"))]
