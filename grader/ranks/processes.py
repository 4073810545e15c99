"""The processes below this one: which there are, what they take, and their end."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable

import psutil


def prctl(option: int, value: int) -> None:
    """Set a process attribute where the system has prctl (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


def descendants() -> list[psutil.Process]:
    """All processes below this one."""
    try:
        return psutil.Process().children(recursive=True)
    except psutil.Error:
        return []


def those_of(pids: Iterable[int]) -> list[psutil.Process]:
    """The processes with these numbers that are still there."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def cpu_seconds(process: psutil.Process) -> tuple[float, float]:
    """Of the main thread and of the others; where the system does not tell, all is the main thread's."""
    times = process.cpu_times()
    total = times.user + times.system
    main = _main_thread_seconds(process)
    return (total, 0.0) if main is None else (main, total - main)


def _main_thread_seconds(process: psutil.Process) -> float | None:
    """Linux has a file for it. To ask for all threads takes milliseconds: each group of gloo's has three."""
    try:
        with open(f"/proc/{process.pid}/task/{process.pid}/stat", "rb") as file:
            user, system = file.read().rpartition(b")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except OSError:
        pass
    with contextlib.suppress(psutil.AccessDenied):  # macOS tells nobody but root
        return next((t.user_time + t.system_time for t in process.threads() if t.id == process.pid), None)
    return None


def could_run(process: psutil.Process) -> bool:
    """Whether a process runs, or waits for a core or a disk; only Linux tells it from one that sleeps."""
    waits = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    return sys.platform == "linux" and process.status() in waits


def tasks_on_the_machine() -> int:
    """Threads of all processes there are; 0 where the system does not tell."""
    try:
        with open("/proc/loadavg") as file:
            return int(file.read().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return 0


def memory_in_files(processes: Iterable[psutil.Process]) -> int:
    """Bytes of the anonymous files (memfd) that processes have open: no process's own memory counts them."""
    sizes = {}
    for process in processes:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{process.pid}/fd"):
                file = f"/proc/{process.pid}/fd/{name}"
                with contextlib.suppress(OSError):
                    if os.readlink(file).startswith("/memfd:"):
                        status = os.stat(file)
                        sizes[status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())


def memory_in_folders(folders: Iterable[str]) -> int:
    """Bytes of all files in folders that lie in memory, each on a file system of its own."""
    systems = [os.statvfs(folder) for folder in folders]
    return sum((system.f_blocks - system.f_bfree) * system.f_frsize for system in systems)


def kill(process: psutil.Process) -> None:
    """End a process that may have ended."""
    try:
        process.kill()
    except psutil.Error:
        return


def reap_all() -> None:
    """Collect every child that has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
