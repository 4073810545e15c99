"""The number of cores: what the process may run on, and what its cgroups' quotas are worth."""

import os
from pathlib import Path

import pytest
import torch

from grader.judging.side_by_side import MOST_JOBS, sensible_jobs
from nanogpt import cores

V2 = {"proc/self/cgroup": "0::/user.slice/pod\n"}
V1 = {"proc/self/cgroup": "11:memory:/kube/pod\n4:cpu,cpuacct:/kube/pod\n3:cpuset:/\n0::/\n"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts files where the system would have them, on a machine of 64 cores."""
    monkeypatch.setattr(cores, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)

    def put(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return put


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({**V2, "sys/fs/cgroup/user.slice/pod/cpu.max": "max 100000\n"}, 64),
        ({**V2, "sys/fs/cgroup/user.slice/pod/cpu.max": "900000 100000\n"}, 9),
        ({**V2, "sys/fs/cgroup/user.slice/pod/cpu.max": "250000 100000\n"}, 2),
        ({**V2, "sys/fs/cgroup/user.slice/pod/cpu.max": "50000 100000\n"}, 1),
        (
            {
                **V2,
                "sys/fs/cgroup/user.slice/pod/cpu.max": "max 100000\n",
                "sys/fs/cgroup/user.slice/cpu.max": "300000 100000\n",
            },
            3,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/kube/pod/cpu.cfs_quota_us": "500000\n",
                "sys/fs/cgroup/cpu,cpuacct/kube/pod/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/kube/pod/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/kube/pod/cpu.cfs_period_us": "100000\n",
            },
            64,
        ),
        (  # the path is the host's, and the container's own files lie at the mount
            {
                **V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "700000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            7,
        ),
        ({**V1, "sys/fs/cgroup/memory/kube/pod/cpu.cfs_quota_us": "100000\n"}, 64),
    ],
)
def test_a_quota_counts_wherever_it_stands(machine, files: dict[str, str], expected: int) -> None:
    machine(files)
    assert cores.usable_cores() == expected
    assert sensible_jobs("cpu") == min(expected, MOST_JOBS)


def test_a_quota_gives_no_cores_that_the_process_may_not_run_on(
    machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine({**V2, "sys/fs/cgroup/cpu.max": "900000 100000\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    assert cores.usable_cores() == 2


@pytest.mark.parametrize(("told", "expected"), [(None, 3), ("8", 8)])
def test_torch_keeps_to_the_quota(
    machine, monkeypatch: pytest.MonkeyPatch, told: str | None, expected: int
) -> None:
    machine({**V2, "sys/fs/cgroup/cpu.max": "300000 100000\n"})
    monkeypatch.delenv("OMP_NUM_THREADS")
    if told:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        cores.keep_to_quota()
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
