"""Whose turn it is to compute on the judge's side, where several runs of ranks are under way."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from grader.ranks.faults import CannotGradeError

STOPPED = "the grading was stopped"


class Turn:
    """The right to compute, which one thread has at a time. torch's random numbers stay each thread's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._ended = False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder = None
        self._lock.release()

    def end(self) -> None:
        """No run begins any more, and how one ended is no verdict."""
        self._ended = True

    def begin_anew(self) -> None:
        """Runs may begin again."""
        self._ended = False

    def goes_on(self) -> None:
        """Raise CannotGradeError when the grading was stopped."""
        if self._ended:
            raise CannotGradeError(STOPPED)

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Let the others compute meanwhile, if it is this thread's turn."""
        if self._holder != threading.get_ident():
            yield
            return
        state = torch.get_rng_state()
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()
            torch.set_rng_state(state)
