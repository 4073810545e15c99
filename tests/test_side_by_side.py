"""Exercises graded at the same time get what they would get alone."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grader.checks import Trial
from grader.grading import in_two_parts
from grader.judging.judge import Settings, grade_exercise
from grader.judging.side_by_side import Neighbours, side_by_side
from grader.judging.trial import Check, Exercise
from grader.judging.verdicts import ExerciseReport
from grader.ranks.launcher import CannotGradeError, Code, Launcher, Limits

LIMITS = Limits(timeout=20.0)


@pytest.fixture
def neighbours() -> Iterator[Neighbours]:
    with closing(Neighbours()) as launcher:
        yield launcher


def results(
    work: Callable[[Any, Launcher], Any], tasks: Sequence[Any], jobs: int, launcher: Launcher
) -> list:
    """All of them; what is under way when one fails is stopped."""
    with closing(side_by_side(work, tasks, jobs, launcher)) as found:
        return list(found)


def ranks(launcher: Launcher) -> str:
    """How a run of two ranks ended."""

    def answer(rank):  # inside, so that it travels by value
        return rank.rank

    return launcher.run(answer, Code(), [[], []], limits=LIMITS).ended


def test_results_come_in_the_order_of_the_tasks(neighbours: Neighbours) -> None:
    def work(seconds: float, launcher: Launcher) -> float:
        assert ranks(launcher) == "complete"
        return seconds

    tasks = [0.3, 0.0, 0.1, 0.2]
    assert results(work, tasks, 3, neighbours) == tasks


def test_who_is_lent_the_reference_runs_when_nobody_else_does(neighbours: Neighbours) -> None:
    """A lock on a file that both see, or how busy a core is, can tell from one box to another."""
    told: list[str] = []

    def work(task: SimpleNamespace, launcher: Launcher) -> str:
        told.append(f"begin {task.lesson.lent}")
        with launcher.turn.let_go():
            time.sleep(0.05)
        told.append(f"end {task.lesson.lent}")
        return task.name

    tasks = [SimpleNamespace(name=name, lesson=SimpleNamespace(lent=name == "b")) for name in "abc"]
    assert list(in_two_parts(work, tasks, 3, neighbours)) == ["a", "c", "b"]  # type: ignore[arg-type]
    assert sorted(told[:4]) == ["begin False"] * 2 + ["end False"] * 2
    assert told[4:] == ["begin True", "end True"]


def test_judges_take_turns_while_ranks_run_side_by_side(neighbours: Neighbours) -> None:
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
        patch.setattr(Launcher, "_exchange", meet)
        results(work, [0, 1], 2, neighbours)
    assert max(most) == 1
    assert sorted(running) == [0, 1]


def test_each_task_draws_its_own_random_numbers(neighbours: Neighbours) -> None:
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

    assert results(work, [1, 2, 3], 3, neighbours) == [alone(seed) for seed in (1, 2, 3)]


def test_who_kills_the_keeper_of_the_ranks_hurts_no_neighbour(neighbours: Neighbours) -> None:
    def work(task: str, launcher: Launcher) -> str:
        if task == "honest":
            return ", ".join(ranks(launcher) for _ in range(6))
        launcher.warm_up()
        launcher._servers[False]._process.kill()
        return "killed it"

    found = results(work, ["honest", "hostile"], 2, neighbours)
    assert found == [", ".join(["complete"] * 6), "killed it"]


def test_a_grading_that_is_stopped_starts_no_more_runs(neighbours: Neighbours) -> None:
    began = []

    def work(task: int, launcher: Launcher) -> None:
        began.append(task)
        ranks(launcher)
        if task == 0:
            raise CannotGradeError("the machine is full")
        time.sleep(0.2)
        ranks(launcher)

    with pytest.raises(CannotGradeError, match="full"):
        results(work, list(range(20)), 2, neighbours)
    assert len(began) < 6


def test_what_runs_when_a_grading_is_stopped_ends_at_once_and_is_no_verdict(neighbours: Neighbours) -> None:
    endings = []
    runs = threading.Event()

    def sleep(rank):
        import time

        time.sleep(15)

    def work(task: str, launcher: Launcher) -> None:
        if task == "fails":
            with launcher.turn.let_go():
                runs.wait(20)
                time.sleep(0.5)
            raise CannotGradeError("the machine is full")
        runs.set()
        endings.append(launcher.run(sleep, Code(), [[], []], limits=LIMITS).ended)

    neighbours.warm_up()
    began = time.monotonic()
    with pytest.raises(CannotGradeError, match="full"):
        results(work, ["fails", "sleeps"], 2, neighbours)
    assert time.monotonic() - began < 8
    assert endings == []
    assert ranks(neighbours) == "complete"


def test_a_thread_that_comes_late_starts_no_ranks_that_nobody_would_end() -> None:
    launcher = Launcher()
    with launcher.stopped(), pytest.raises(CannotGradeError, match="stopped"):
        launcher.warm_up()
    assert not launcher._servers


@pytest.mark.parametrize("bad_at", [(), (2,), (4,), (1, 4)])
def test_layouts_side_by_side_tell_what_they_tell_one_after_the_other(
    bad_at: tuple[int, ...], launcher: Launcher
) -> None:
    def answer(rank):
        return rank.rank

    def counts(trial: Trial) -> None:
        trial.equal("ranks", trial.run(answer), list(range(trial.num_ranks)))

    def is_good(trial: Trial) -> None:
        trial.run(answer)
        trial.require(trial.num_ranks not in bad_at, f"bad with {trial.num_ranks}, {trial.integer(0, 10**6)}")

    def reports(at_a_time: int) -> ExerciseReport:
        checks = [Check(f.__name__, "made_up", "", f, list) for f in (counts, is_good, counts)]
        exercise = Exercise("made_up", (2, 1, 4), True, (), False, True, (), checks)
        settings = Settings(limits=LIMITS, seed=5, layouts_at_a_time=at_a_time)
        return grade_exercise(exercise, "00", Code(), launcher, settings, lambda file, line: "")

    alone, together = reports(1), reports(3)
    assert alone.verdict.value == ("wrong" if bad_at else "passed")
    assert together.checks == alone.checks
