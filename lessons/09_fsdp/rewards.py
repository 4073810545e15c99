"""What follows a green check: the learner's own run, beside the course's."""

from typing import Any

import matplotlib.pyplot as plt

from grader import run_ranks
from lessons.fsdp import measures, pictures
from lessons.page.look import GREEN, ORANGE, PINK, SKY, figure
from solutions import fsdp as ours

KINDS = {"all_gather": PINK, "reduce_scatter": ORANGE}


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
    _draw_steps(right, steps)
    plt.tight_layout()
    plt.show()
    print("While a block computes, the wire rests. How much do you win if the next gather starts before?")


def _draw_steps(axes: plt.Axes, steps: dict[str, dict[str, Any]]) -> None:
    """For each way, what its rank does, and what travels meanwhile."""
    for i, (how, step) in enumerate(steps.items()):
        for a, b, color in ((0.0, step["forward"], GREEN), (step["forward"], step["end"], SKY)):
            axes.barh(2.4 * i, b - a, left=a, color=color, edgecolor="black")
        free = 0.0
        for kind, start, end in step["sent"]:
            a = max(start, free)  # the wire carries one message at a time
            axes.barh(2.4 * i + 0.9, end - a, left=a, color=KINDS.get(kind, "black"))
            free = end
        axes.text(0, 2.4 * i - 0.55, f"{how}: {step['end']:.0f} ms", va="bottom")
    axes.set(yticks=[], xlabel="milliseconds", ylim=(2.4 * len(steps) - 0.9, -1.3))
    colors = {"forward": GREEN, "backward": SKY, "all-gather": PINK, "reduce-scatter": ORANGE}
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    axes.legend(handles, colors, loc="lower center", ncols=4, bbox_to_anchor=(0.5, 1.0), columnspacing=1.0)
