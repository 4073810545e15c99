"""How many cores this process may use: a container often sees all of its machine's, and is given a few."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path("/")


def usable_cores() -> int:
    """Cores, at least one: as many as the process may run on, and as its cgroups' quotas of time are worth.

    A quota is a number of cores that need not be whole; of 2.5 two are counted. It may stand at any level
    above the process (Linux: cpu.max of cgroup v2, cpu.cfs_quota_us of v1).
    """
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min([visible, *_quotas()])))


def keep_to_quota() -> None:
    """Let torch compute with no more threads than cores; without this it takes one for each that it sees.

    Where OMP_NUM_THREADS says how many, that holds.
    """
    if "OMP_NUM_THREADS" not in os.environ and usable_cores() < torch.get_num_threads():
        torch.set_num_threads(usable_cores())


def _quotas() -> Iterator[float]:
    """The quotas, in cores, of this process's cgroups and of all above them that can be seen from here."""
    for controllers, path in _memberships():
        for folder in _folders(controllers):
            place = folder / path.lstrip("/")
            for level in (place, *place.parents):
                if level.is_relative_to(folder):
                    yield from _quota(level)


def _memberships() -> Iterator[tuple[str, str]]:
    """Of each hierarchy of cgroups its controllers, "" in version 2, and this process's path in it."""
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            yield controllers, path


def _folders(controllers: str) -> list[Path]:
    """Where a hierarchy is mounted by custom; a container's own cgroup is its root there."""
    mounts = ROOT / "sys/fs/cgroup"
    return [mounts / controllers, mounts / "cpu"] if controllers else [mounts]


def _quota(level: Path) -> Iterator[float]:
    """Microseconds of processor time over microseconds of clock; nothing where there is no limit."""
    numbers = _text(level / "cpu.max").split() or [
        _text(level / "cpu.cfs_quota_us").strip(),
        _text(level / "cpu.cfs_period_us").strip(),
    ]
    if all(number.isdecimal() for number in numbers):  # "max" and -1 are no limits
        quota, period = map(int, numbers)
        yield quota / period


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
