"""Finds what a killed run may leave behind: processes that fled from their parents, and shared memory."""

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

MARK = "SCALE_BY_HAND_LAUNCHER"
"""Environment variable by which the processes below one launcher are known, whoever is their parent now."""
SHARED = Path("/dev/shm")
SEGMENTS = Path("/proc/sysvipc/shm")
IPC_RMID = 0
TRACKER = "multiprocessing.resource_tracker"
"""In the command line of the process that Python starts beside one that makes shared memory."""
TRACKER_SECONDS = 1.0


def kill_marked(mark: str, kept: Iterable[int] = ()) -> None:
    """Kill every process that was started below the launcher of this mark, except this one and those kept."""
    spared = {os.getpid(), *kept}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in spared and process.environ().get(MARK) == mark:
                process.kill()


def let_trackers_end(processes: Iterable[psutil.Process]) -> None:
    """Kill all but Python's trackers, which remove what is left of shared memory when its makers are gone."""
    trackers = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if any(TRACKER in word for word in process.cmdline()):
                trackers.append(process)
                process.resume()  # it may stand still, as ranks do between two runs
            else:
                process.kill()
    psutil.wait_procs(trackers, timeout=TRACKER_SECONDS)


class SharedMemory:
    """The files below /dev/shm that the processes of one run have made, out of all that come meanwhile.

    They are known by their inode: a semaphore is mapped under a name that it never has in the folder.
    """

    def __init__(self) -> None:
        self._before = set(_files())
        self._seen: set[int] = set()

    def new(self) -> dict[int, Path]:
        """Inode → file of this user that was not there when the run began, whoever made it."""
        return {inode: path for inode, path in _files().items() if inode not in self._before}

    def see(self, processes: Iterable[psutil.Process]) -> None:
        """Take down what these processes, which belong to the run, have open or mapped."""
        for process in processes:
            self._seen |= _inodes_in_use(process.pid)

    def remove(self) -> None:
        """Remove what the run has made, unless somebody still has it open."""
        made = {inode: path for inode, path in self.new().items() if inode in self._seen}
        if made:
            elsewhere = set().union(*(_inodes_in_use(pid) for pid in psutil.pids()))
            for inode in made.keys() - elsewhere:
                made[inode].unlink(missing_ok=True)


class Segments:
    """System V shared memory that the processes of one run have made: it stays when they have gone.

    No process's own memory counts it once it is detached. Only Linux tells who has made it.
    """

    def __init__(self) -> None:
        self._before = set(_segments())
        self._makers: set[int] = set()

    def see(self, pids: Iterable[int]) -> None:
        """Take down processes that belong to the run."""
        self._makers.update(pids)

    def num_bytes(self) -> int:
        """What lies in them."""
        return sum(size for _, size in self._made().values())

    def remove(self) -> None:
        """Remove them; who still has one attached keeps it until then."""
        for number in self._made():
            ctypes.CDLL(None).shmctl(number, IPC_RMID, None)

    def _made(self) -> dict[int, tuple[int, int]]:
        found = _segments()
        return {n: found[n] for n in found.keys() - self._before if found[n][0] in self._makers}


def _segments() -> dict[int, tuple[int, int]]:
    """Number → process that has made it, and bytes that it takes, of every System V segment in sight."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # not there, or written in another way
        names, *rows = (line.split() for line in SEGMENTS.read_text().splitlines())
        tables = (dict(zip(names, map(int, row), strict=True)) for row in rows)
        return {one["shmid"]: (one["cpid"], one["rss"] + one["swap"]) for one in tables}
    return {}


def _files() -> dict[int, Path]:
    """Inode → file of this user below /dev/shm."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(SHARED) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and entry.is_file(follow_symlinks=False):
                    found[status.st_ino] = SHARED / entry.name
    return found


def _inodes_in_use(pid: int) -> set[int]:
    """Inodes of /dev/shm's file system that a process has open or mapped, as far as one may look."""
    found: set[int] = set()
    folder = Path("/proc") / str(pid)
    with contextlib.suppress(OSError):
        device = SHARED.stat().st_dev
        name = f"{os.major(device):02x}:{os.minor(device):02x}"
        for line in (folder / "maps").read_text(errors="replace").splitlines():
            _, _, _, where, inode, *_ = line.split(maxsplit=5)
            if where == name:
                found.add(int(inode))
        for descriptor in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                status = descriptor.stat()
                if status.st_dev == device:
                    found.add(status.st_ino)
    return found
