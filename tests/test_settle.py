"""Before bytes alive are counted, threads that carry messages have let go, however busy the machine is."""

import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from grader.beside import measure
from grader.checks import settle


def busy(until: Callable[[], bool]) -> threading.Thread:
    """A thread that computes without Python's lock, as gloo's do."""

    def compute() -> None:
        x = torch.ones(300, 300)
        while not until():
            torch.mm(x, x)

    thread = threading.Thread(target=compute)
    thread.start()
    return thread


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_it_waits_for_a_thread_that_has_work() -> None:
    end = time.monotonic() + 10 * measure.MOMENT
    thread = busy(lambda: time.monotonic() > end)
    settle()
    assert time.monotonic() > end
    thread.join()


def test_it_does_not_wait_for_threads_that_sleep_nor_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    woken, done = threading.Event(), threading.Event()
    sleeper = threading.Thread(target=woken.wait)
    sleeper.start()
    began = time.monotonic()
    settle()
    alone = time.monotonic() - began
    woken.set()
    sleeper.join()
    monkeypatch.setattr(measure, "AT_MOST", 0.2)
    thread = busy(done.is_set)
    began = time.monotonic()
    settle()
    beside_work = time.monotonic() - began
    done.set()
    thread.join()
    assert alone < 1 and beside_work < 5
