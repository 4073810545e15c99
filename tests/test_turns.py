"""Ranks and the threads of gloo run in whole turns: see nanogpt/turns.py."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from grader import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has such turns")


def policies() -> list[int]:
    """Of all threads of a rank that has communicated."""
    dist.all_reduce(torch.ones(3))
    return [os.sched_getscheduler(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]


def test_every_thread_of_a_rank_takes_whole_turns() -> None:
    assert {policy for rank in run_ranks(policies, ranks=2) for policy in rank} == {os.SCHED_BATCH}
