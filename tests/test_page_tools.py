"""What pages measure with: the tap counts what is sent, and imitates a wire; lessons are found by name."""

import importlib
import time

import pytest
import torch
import torch.distributed as dist

from grader import run_ranks
from lessons.page.tap import Tap
from lessons.page.timeline import Step


def tapped(bytes_per_second: float | None) -> dict:
    """All that a tap sees on a rank, and how long the rank waited for it."""
    group, n, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    numbers = torch.full((2500,), float(rank))
    dist.barrier()
    with Tap(bytes_per_second) as tap:
        began = time.perf_counter()
        work = dist.all_reduce(numbers, group=group, async_op=True)
        called = time.perf_counter() - began
        work.wait()
        waited = time.perf_counter() - began
        parts = [torch.empty(2500) for _ in range(n)]
        dist.all_gather(parts, numbers)
        request = dist.isend(numbers, (rank + 1) % n)
        received = torch.empty(2500)
        dist.recv(received, (rank - 1) % n)
        request.wait()
    log = [(entry["kind"], entry["bytes"], entry["end"] >= entry["start"]) for entry in tap.log]
    original = dist.all_reduce.__module__ == "torch.distributed.distributed_c10d"
    return {"log": log, "called": called, "waited": waited, "sum": numbers[0].item(), "original": original}


def test_the_tap_writes_down_what_is_sent() -> None:
    for found in run_ranks(tapped, None, ranks=2):
        assert found["log"] == [
            ("all_reduce", 10_000, True),
            ("all_gather", 20_000, True),
            ("isend", 10_000, True),
        ]
        assert found["sum"] == 1.0
        assert found["original"]


def test_an_imitated_wire_takes_its_time_and_holds_up_nobody_before() -> None:
    for found in run_ranks(tapped, 50_000.0, ranks=2):
        assert found["waited"] >= 0.2  # 2 (n-1)/n of 10,000 bytes, at 50,000 a second
        assert found["called"] < 0.15
        assert found["sum"] == 1.0


def test_a_step_says_what_is_exposed() -> None:
    assert Step(1.0, 5.0, 7.5, []).exposed == 2.5


def test_a_lesson_is_found_without_its_number() -> None:
    assert importlib.import_module("lessons.data_parallel.answers").__file__.endswith(
        "08_data_parallel/answers.py"
    )
    with pytest.raises(ModuleNotFoundError, match=r"lessons\.no_such_lesson"):
        importlib.import_module("lessons.no_such_lesson")
