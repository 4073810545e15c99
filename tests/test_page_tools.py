"""What pages measure with: meters, the tap that imitates a wire; lessons are found by name."""

import importlib
import itertools
import time

import pytest
import torch
import torch.distributed as dist

from grader import run_ranks
from lessons.page.hidden import paces
from lessons.page.memory import Meter, kept_bytes, kept_for_backward
from lessons.page.messages import Messages
from lessons.page.mountain import draw_mountains
from lessons.page.tap import Tap
from lessons.page.timeline import Step
from lessons.page.watch import Watch


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
            ("send", 10_000, True),
        ]
        assert found["sum"] == 1.0
        assert found["original"]


def test_an_imitated_wire_takes_its_time_and_holds_up_nobody_before() -> None:
    for found in run_ranks(tapped, 50_000.0, ranks=2):
        assert found["waited"] >= 0.2  # 2 (n-1)/n of 10,000 bytes, at 50,000 a second
        assert found["called"] < 0.15
        assert found["sum"] == 1.0


def on_two_wires() -> list[float]:
    """Seconds to the next rank and to the one before, as a message; and a collective of all."""
    n, rank = dist.get_world_size(), dist.get_rank()
    group, seconds = dist.group.WORLD, []
    with Tap(1e9, across=50_000.0, machine_size=2) as tap:
        for way in (1, -1):
            request = dist.isend(torch.ones(2500), group=group, group_dst=(rank + way) % n)
            dist.recv(torch.empty(2500), (rank - way) % n)
            request.wait()
        dist.all_reduce(torch.ones(2500))
    for entry in tap.log:
        seconds.append(entry["end"] - entry["start"])
    return seconds


def test_a_second_wire_carries_what_crosses_machines() -> None:
    for rank, (ahead, back, together) in enumerate(run_ranks(on_two_wires, ranks=4)):
        crosses, stays = (ahead, back) if rank % 2 else (back, ahead)
        assert crosses > 0.19  # 10,000 bytes at 50,000 a second
        assert stays < 0.1
        assert together > 0.29  # 2 (n-1)/n of them


def batched(bytes_per_second: float | None) -> dict:
    """What a tap sees of a batch of messages, and what arrives."""
    n, rank = dist.get_world_size(), dist.get_rank()
    mine, received = torch.full((2500,), float(rank)), torch.empty(2500)
    dist.barrier()
    with Tap(bytes_per_second) as tap:
        began = time.perf_counter()
        messages = [
            dist.P2POp(dist.isend, mine, (rank + 1) % n),
            dist.P2POp(dist.irecv, received, (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        waited = time.perf_counter() - began
    again = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, (rank + 1) % n),
            dist.P2POp(dist.irecv, mine.new_empty(2500), (rank - 1) % n),
        ]
    )
    for work in again:
        work.wait()
    log = [(entry["kind"], entry["bytes"]) for entry in tap.log]
    return {"log": log, "from": received[0].item(), "waited": waited, "told": repr(messages[0])[:12]}


def test_the_tap_sees_the_messages_of_a_batch() -> None:
    for rank, found in enumerate(run_ranks(batched, 50_000.0, ranks=2)):
        assert found["log"] == [("send", 10_000)]  # none after the tap is closed
        assert found["from"] == 1 - rank
        assert found["waited"] >= 0.2
        assert found["told"] == "P2POp(isend "


def paced(readings: list[float]) -> list[float]:
    """What a rank takes for the pace of computing, from its own readings."""
    return list(itertools.islice(paces(iter(readings).__next__), len(readings) - 3))


def test_a_machine_that_stood_still_makes_no_wire_on_which_nothing_arrives() -> None:
    readings = [9.0, 0.5, 0.4, 0.6, 9.0, 0.7]
    for found in run_ranks(paced, readings, ranks=2):
        assert found == [0.6, 0.8, 0.7]


def watched() -> dict:
    """A matrix multiply, its backward, and messages, under the recorder."""
    group, n, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    weight = torch.ones(100, 100, requires_grad=True)
    with Watch(memory=True) as watch:
        loss = (torch.ones(10, 100) @ weight).sum()
        watch.mark("backward")
        loss.backward()
        dist.all_reduce(weight.grad, group=group)
        message = dist.P2POp(dist.isend, torch.ones(5), (rank + 1) % n)
        answer = dist.P2POp(dist.irecv, torch.empty(5), (rank - 1) % n)
        for work in dist.batch_isend_irecv([message, answer]):
            work.wait()
    return {
        "sent": watch.sent_bytes(),
        "by kind": [watch.sent_bytes(kind) for kind in ("all_reduce", "send", "recv")],
        "before": watch.sent_bytes(after=""),
        "flops": [watch.recording.flops(after) for after in ("", "backward")],
        "alive": watch.recording.alive("end") >= 40_000,
    }


def test_a_watched_rank_says_what_it_sent_and_computed() -> None:
    for found in run_ranks(watched, ranks=4):
        assert found["by kind"] == [1.5 * 40_000, 20.0, 0.0]
        assert found["sent"] == 60_020.0
        assert found["before"] == 0.0
        assert found["flops"] == [2 * 10 * 100 * 100] * 2
        assert found["alive"]


def told_in_turn() -> list[tuple[int, float]]:
    """What the second of two ranks sends, in a group whose ranks are the world's last two."""
    group, rank = dist.new_group([1, 2]), dist.get_rank()
    number = torch.full((3,), 5.0)
    with Messages() as messages:
        if rank == 2:
            dist.send(number, group=group, group_dst=0)
            number.zero_()
        if rank == 1:
            dist.recv(number, group=group, group_src=1)
        dist.all_reduce(number)
    return [(to, sent.sum().item()) for to, sent in messages.sent]


def test_messages_are_kept_as_they_were_when_they_left() -> None:
    assert run_ranks(told_in_turn, ranks=3) == [[], [], [(1, 15.0)]]


def test_the_meter_sees_what_lives_and_what_is_freed() -> None:
    given = torch.ones(1000)
    with Meter() as meter:
        doubled = given + given
        given.add_(1.0)
        meter.mark("one is there")
        tripled = doubled + given
        assert meter.alive == 8000
        del doubled
        assert meter.alive == 4000
        meter.mark("one is gone")
    assert meter.peak == 8000
    assert meter.history[meter.marks["one is there"]] == meter.at("one is there") == 4000
    assert meter.at("one is gone") == 4000
    assert tripled.numel() == 1000


def test_mountains_have_a_dot_where_backward_begins() -> None:
    meters = {}
    for told in ("yours", "the course's"):
        with Meter() as meters[told]:
            kept = torch.ones(1000) + 1.0
            meters[told].mark("backward")
            del kept
    axes = draw_mountains(meters, "two", share=True, reference="the course's")
    curve, dot, *_ = axes.lines
    assert [len(axes.lines), curve.get_xdata()[-1], dot.get_ydata()[0]] == [4, 1.0, 0.004]
    assert [line.get_linewidth() for line in axes.lines[::2]] == [1.5, 5]


def test_what_is_kept_for_backward_has_the_module_that_kept_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    x = torch.ones(8, 10, requires_grad=True)
    kept = kept_for_backward(model, x)
    assert [(each.module, each.num_bytes) for each in kept] == [("0", 8 * 10 * 4), ("1", 8 * 20 * 4)]
    assert kept_bytes(model, x) == sum(each.num_bytes for each in kept)


def test_a_step_says_what_is_exposed() -> None:
    assert Step(1.0, 5.0, 7.5, []).exposed == 2.5


def test_a_lesson_is_found_without_its_number() -> None:
    assert importlib.import_module("lessons.data_parallel.answers").__file__.endswith(
        "08_data_parallel/answers.py"
    )
    assert importlib.import_module("lessons.three_axes.answers").__file__.endswith(
        "12b_three_axes/answers.py"
    )
    with pytest.raises(ModuleNotFoundError, match=r"lessons\.parallel"):
        importlib.import_module("lessons.parallel")  # the end of many names
    with pytest.raises(ModuleNotFoundError, match=r"lessons\.no_such_lesson"):
        importlib.import_module("lessons.no_such_lesson")
