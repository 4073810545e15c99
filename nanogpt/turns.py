"""More ranks than cores, as on a laptop: how the ranks and the threads of gloo take turns."""

import contextlib
import os


def take_whole_turns() -> None:
    """Let this thread, and those that it starts from now on, run until they wait; nothing but on Linux.

    A collective of gloo wakes a thread for every message, and each that wakes would interrupt another that
    is sending: with four ranks on two cores a small all-reduce takes several times as long
    (tests/bench/gloo_turns.py). Call it before `init_process_group`, where gloo starts its threads.
    """
    with contextlib.suppress(AttributeError, OSError):  # another system, or a container that forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
