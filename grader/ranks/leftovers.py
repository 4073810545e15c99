"""Finds what a killed run may leave behind: processes that fled from their parents, and shared memory."""

import contextlib
import os
from pathlib import Path

import psutil

MARK = "SCALE_BY_HAND_LAUNCHER"
"""Environment variable by which the processes below one launcher are known, whoever is their parent now."""
SHARED = Path("/dev/shm")


def kill_marked(mark: str) -> None:
    """Kill every process that was started below the launcher of this mark."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                process.kill()


def remove_abandoned_memory(since: float) -> None:
    """Remove shared memory made since a time (seconds of time.time()) that no process has open any more."""
    new = [path for path in _files(SHARED) if _is_ours(path, since)]
    if not new:
        return
    in_use = _open_files()
    for path in new:
        if str(path) not in in_use:
            path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _is_ours(path: Path, since: float) -> bool:
    with contextlib.suppress(OSError):
        status = path.lstat()
        return status.st_uid == os.getuid() and status.st_ctime >= since - 1.0 and not path.is_dir()
    return False


def _open_files() -> set[str]:
    """Files below /dev/shm that a process of this machine has open or mapped, as far as one may look."""
    found: set[str] = set()
    for process in psutil.process_iter():
        folder = Path("/proc") / str(process.pid)
        with contextlib.suppress(OSError):
            for line in (folder / "maps").read_text(errors="replace").splitlines():
                found.add(line.partition("/")[1] + line.partition("/")[2])
        with contextlib.suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(descriptor))
    return found
