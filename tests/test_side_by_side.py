"""Exercises graded at the same time get what they would get alone."""

import threading
import time

import pytest
import torch

from grader.judging.side_by_side import _Neighbour, _Turn, side_by_side
from grader.ranks.launcher import CannotGradeError, Code, Launcher, Limits

LIMITS = Limits(timeout=20.0)


def ranks(launcher: Launcher) -> str:
    """How a run of two ranks ended."""

    def answer(rank):  # inside, so that it travels by value
        return rank.rank

    return launcher.run(answer, Code(), [[], []], limits=LIMITS).ended


def test_results_come_in_the_order_of_the_tasks() -> None:
    def work(seconds: float, launcher: Launcher) -> float:
        assert ranks(launcher) == "complete"
        return seconds

    tasks = [0.3, 0.0, 0.1, 0.2]
    assert list(side_by_side(work, tasks, 3)) == tasks


def test_judges_take_turns_while_ranks_run_side_by_side() -> None:
    computing, most, running = [], [], []
    started = threading.Barrier(2, timeout=20)

    def work(task: int, launcher: Launcher) -> None:
        computing.append(task)
        most.append(len(computing))
        time.sleep(0.05)
        computing.remove(task)
        ranks(launcher)
        running.append(task)

    def meet(*arguments):
        started.wait()  # passes only when both jobs wait for ranks at the same time
        return {"ended": "complete", "seconds": 0.0, "ranks": []}, []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launcher, "exchange", meet)
        list(side_by_side(work, [0, 1], 2))
    assert max(most) == 1
    assert sorted(running) == [0, 1]


def test_each_task_draws_its_own_random_numbers() -> None:
    def work(seed: int, launcher: Launcher) -> list[float]:
        torch.manual_seed(seed)
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand(())))
            ranks(launcher)
        return drawn

    def alone(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [float(torch.rand(())) for _ in range(3)]

    assert list(side_by_side(work, [1, 2, 3], 3)) == [alone(seed) for seed in (1, 2, 3)]


def test_who_kills_the_keeper_of_the_ranks_hurts_no_neighbour() -> None:
    def work(task: str, launcher: Launcher) -> str:
        if task == "honest":
            return ", ".join(ranks(launcher) for _ in range(6))
        launcher.warm_up()
        launcher._server.kill()
        return "killed it"

    assert list(side_by_side(work, ["honest", "hostile"], 2)) == [", ".join(["complete"] * 6), "killed it"]


def test_a_grading_that_is_stopped_starts_no_more_runs() -> None:
    began = []

    def work(task: int, launcher: Launcher) -> None:
        began.append(task)
        ranks(launcher)
        if task == 0:
            raise CannotGradeError("the machine is full")
        time.sleep(0.2)
        ranks(launcher)

    with pytest.raises(CannotGradeError, match="full"):
        list(side_by_side(work, list(range(20)), 2))
    assert len(began) < 6


def test_a_thread_that_comes_late_starts_no_ranks_that_nobody_would_end() -> None:
    turn = _Turn()
    launcher = _Neighbour(turn)
    turn.end()
    launcher.close()
    with pytest.raises(CannotGradeError, match="stopped"):
        launcher.warm_up()
    assert launcher._server is None
