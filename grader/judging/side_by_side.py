"""Several exercises, or several layouts of one, at the same time: their ranks run side by side.

Ranks wait for each other for much of a run, which leaves cores idle. What a check computes on the judge's
side uses torch's global state, and is little: only one computes at a time, and lets go while its ranks run.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from grader.ranks.launcher import Answer, Code, Launcher
from nanogpt.cores import usable_cores

Task = TypeVar("Task")
Result = TypeVar("Result")

MOST_JOBS = 4


def sensible_jobs(device: str) -> int:
    """How many runs to have at a time: as many as cores, four at most; on GPUs one."""
    if device != "cpu":
        return 1
    return min(usable_cores(), MOST_JOBS)


def side_by_side(
    work: Callable[[Task, Launcher], Result], tasks: Sequence[Task], jobs: int, launcher: Launcher
) -> Iterator[Result]:
    """Yield `work(task, launcher)` of every task, in the tasks' order; up to `jobs` of them run at a time.

    Who wants no more of them closes it, which stops those that run; so does an exception.
    """

    def one(task: Task) -> Result:
        with launcher.turn:
            return work(task, launcher)

    futures: list[Future[Result]] = []
    with ThreadPoolExecutor(max(1, min(jobs, len(tasks)))) as pool:
        try:
            futures += [pool.submit(one, task) for task in tasks]
            for future in futures:
                with launcher.turn.let_go():
                    result = future.result()
                yield result
        except BaseException:
            for future in futures:
                future.cancel()
            with launcher.stopped(), launcher.turn.let_go():
                wait(futures)
            raise


class Neighbours(Launcher):
    """A launcher for submissions side by side, one of which may harm what all of them need."""

    def exchange(
        self, line: socket.socket, header: dict[str, Any], orders: list[bytes], fresh: bool
    ) -> tuple[dict[str, Any], list[Answer]]:
        summary, answers = super().exchange(line, header, orders, fresh)
        if fresh and summary["ended"] in ("lost", "fault"):  # by this run or its neighbour: alone it shows
            alone = Launcher(self.isolation)
            try:
                with self.turn.let_go(), alone.connect(Code()) as own_line:
                    summary, answers = alone.exchange(own_line, header, orders, fresh)
            finally:
                alone.close()
        return summary, answers
