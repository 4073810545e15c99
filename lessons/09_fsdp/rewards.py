"""What follows a green check: the learner's own run, beside the course's."""

from typing import Any

import matplotlib.pyplot as plt

from grader import run_ranks
from lessons.fsdp import measures, pictures
from lessons.page.look import figure
from solutions import fsdp as ours


def FullySharded(yours: Any) -> None:  # the name of its exercise
    """Bytes alive over a step of two ranks; and the step in time, on a wire of 1 Gbit/s."""
    print("Twelve blocks on two ranks. Left, what is alive; right, a step on an imitated wire of 1 Gbit/s.")
    ways = {"yours": yours, "the course's": ours.FullySharded}
    alive = {}
    for how, shard in ways.items():
        megabytes = run_ranks(measures.alive_over_step, shard, ranks=2)[0]
        alive[f"{how}: at most {max(megabytes):.1f} MB"] = megabytes
    steps = run_ranks(measures.steps_in_time, ways, ranks=2)[0]
    _, (left, right) = figure(1, 2, figsize=(9.5, 3.4))
    pictures.draw_alive_into(left, alive)
    left.set_xticks(range(0, 24, 4), [0, 4, 8, 11, 7, 3])
    left.set(xlabel="block at work: forward, then backward")
    pictures.draw_steps_into(right, steps)
    plt.tight_layout()
    plt.show()
    print("While a block computes, the wire rests. The next cell switches `prefetch` on.")
