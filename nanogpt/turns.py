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


def keep_to_one_core(rank: int, num_ranks: int) -> None:
    """Let a rank that computes in one thread have one core, where there are no more cores than ranks.

    A thread of gloo that wakes on the core that has woken it begins sooner than on another: a small
    collective takes half the time (tests/bench/gloo_turns.py). Where cores are left over, the system spreads
    threads better, and so it does where several runs go on side by side. Call it before
    `init_process_group`; it does nothing but on Linux.
    """
    with contextlib.suppress(AttributeError, OSError):
        cores = sorted(os.sched_getaffinity(0))
        if 1 < num_ranks >= len(cores):
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
