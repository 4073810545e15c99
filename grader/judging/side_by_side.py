"""Grades several exercises at the same time: their ranks run side by side, their judges take turns.

Ranks wait for each other for much of a run, which leaves cores idle. What a check computes on the judge's
side uses torch's global state, and is little: only one computes at a time, and lets go while its ranks run.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from grader.ranks.isolation import Isolation
from grader.ranks.launcher import Answer, CannotGradeError, Launcher
from nanogpt.cores import usable_cores

Task = TypeVar("Task")
Result = TypeVar("Result")

MOST_JOBS = 4


def sensible_jobs(device: str) -> int:
    """How many exercises to grade at a time: as many as cores, four at most; on GPUs one."""
    if device != "cpu":
        return 1
    return min(usable_cores(), MOST_JOBS)


def side_by_side(
    work: Callable[[Task, Launcher], Result],
    tasks: Sequence[Task],
    jobs: int,
    isolation: Isolation | None = None,
) -> Iterator[Result]:
    """Yield `work(task, launcher)` of every task, in the tasks' order; up to `jobs` of them run at a time."""
    turn = _Turn()
    launcher = _Neighbour(turn, isolation)

    def one(task: Task) -> Result:
        with turn:
            return work(task, launcher)

    pool = ThreadPoolExecutor(max(1, min(jobs, len(tasks))))
    try:
        yield from pool.map(one, tasks)
    finally:
        turn.end()
        pool.shutdown(wait=False, cancel_futures=True)
        launcher.close()


class _Turn:
    """The right to compute, which one thread has at a time. torch's random numbers stay each thread's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def end(self) -> None:
        """No run begins any more, and how one ended is no verdict."""
        self._ended = True

    def goes_on(self) -> None:
        """Raise CannotGradeError when the grading was stopped."""
        if self._ended:
            raise CannotGradeError("the grading was stopped")

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Let the others compute meanwhile."""
        self.goes_on()
        state = torch.get_rng_state()
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            torch.set_rng_state(state)


class _Neighbour(Launcher):
    """A launcher for several threads, each of which lets the others compute while it waits for its ranks."""

    def __init__(self, turn: _Turn, isolation: Isolation | None = None) -> None:
        super().__init__(isolation)
        self._turn = turn

    def _start(self) -> None:
        """Not any more when the grading was stopped: `close` has come, or is to come, and only once."""
        self._turn.goes_on()
        super()._start()

    def exchange(
        self, line: socket.socket, header: dict[str, Any], orders: list[bytes], fresh: bool
    ) -> tuple[dict[str, Any], list[Answer]]:
        with self._turn.let_go():
            summary, answers = super().exchange(line, header, orders, fresh)
            self._turn.goes_on()
            if fresh and summary["ended"] in (
                "lost",
                "fault",
            ):  # by this run or its neighbour: alone it shows
                alone = Launcher(self.isolation)
                try:
                    with alone.connect() as own_line:
                        summary, answers = alone.exchange(own_line, header, orders, fresh)
                finally:
                    alone.close()
            return summary, answers
