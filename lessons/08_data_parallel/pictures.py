"""The pictures of the lesson, a line each to call."""

import statistics
from typing import Any

import matplotlib.pyplot as plt

from grader import run_ranks
from lessons.data_parallel import measures
from lessons.page.look import BLUE, COMPUTE, GREEN, ORANGE, RED, figure
from lessons.page.timeline import Step, draw_timeline
from nanogpt.data import Tokens
from nanogpt.model import GPTConfig


def draw_step_times(config: GPTConfig, tokens: Tokens) -> None:
    """One process: the time of a step grows with the batch."""
    batch_sizes = [4, 8, 16, 32]
    seconds = measures.step_seconds(config, tokens, batch_sizes)
    speeds = [b * config.block_size / s for b, s in zip(batch_sizes, seconds, strict=True)]
    speed = speeds[-1]
    _, axes = figure(figsize=(6, 2.8))
    axes.plot(batch_sizes, [1000 * s for s in seconds], "o-", color=BLUE)
    axes.set(xlabel="sequences in the batch", ylabel="milliseconds a step", ylim=0, xticks=batch_sizes)
    axes.set_title(f"One rank: {min(speeds):,.0f} to {max(speeds):,.0f} tokens a second")
    plt.show()
    print(f"A step of 491,520 tokens would take this small model {491_520 / speed / 60:.1f} minutes.")


def draw_ranks(num_ranks: int = 2, blocks: int = 4) -> None:
    """What lies on which rank, before and after the all-reduce."""
    columns = [
        ("its rows\nof the batch", 1, True),
        ("weights", blocks, False),
        ("gradients\nafter backward", blocks, True),
        ("gradients\nafter the mean", blocks, False),
        ("optimizer\nstate", blocks, False),
    ]
    _, axes = figure(figsize=(9, 2.6))
    for r in range(num_ranks):
        x = 0.0
        for title, cells, own in columns:
            color = (BLUE, ORANGE)[r] if own else GREEN
            for c in range(cells):
                place = (x + c * 0.42, -r)
                axes.add_patch(plt.Rectangle(place, 0.36, 0.7, facecolor=color, edgecolor="black"))
            if r == 0:
                axes.text(x + cells * 0.21, 0.85, title, ha="center", va="bottom")
            x += cells * 0.42 + 0.5
        axes.text(-0.15, -r + 0.35, f"rank {r}", ha="right", va="center")
    axes.set(xlim=(-1.0, x), ylim=(-num_ranks + 0.8, 1.6))
    axes.set_title("Green is the same on every rank. Blue and orange are not.")
    axes.axis("off")
    plt.show()


def draw_drift(distances: list[float]) -> None:
    """How far the ranks' weights are apart, step by step."""
    _, axes = figure(figsize=(6, 2.6))
    axes.plot(distances, "o-", color=RED)
    axes.set(xlabel="step", ylabel="largest difference\nof a weight", ylim=0)
    axes.set_title("Two ranks that never talk: two models")
    plt.show()


def draw_buckets() -> None:
    """Layers, the buckets that they share, and the order in which these leave."""
    layers = ["embedding,\nand head", "block 0", "block 1", "block 2", "block 3", "last norm"]
    buckets = [("bucket 0", "first", 3, 5, RED), ("bucket 1", "second", 1, 2, ORANGE)]
    buckets.append(("bucket 2", "last", 0, 0, BLUE))
    _, axes = figure(figsize=(9, 2.4))
    for name, order, a, b, color in buckets:
        for i in range(a, b + 1):
            axes.add_patch(plt.Rectangle((i, 0), 0.92, 0.6, facecolor=color, alpha=0.45, edgecolor="black"))
            axes.text(i + 0.46, 0.3, layers[i], ha="center", va="center")
        axes.plot([a + 0.05, b + 0.87], [-0.15, -0.15], color=color, linewidth=5, solid_capstyle="butt")
        left = 0.05 if a == 0 else a + 0.1
        axes.text(left, -0.35, f"{name}:\nleaves {order}", ha="left", va="top")
    axes.annotate("", (0.1, 0.95), (5.9, 0.95), arrowprops={"arrowstyle": "->"})
    axes.text(3, 1.05, "backward goes this way", ha="center")
    axes.set(xlim=(-0.1, 6.1), ylim=(-1.0, 1.4))
    axes.axis("off")
    plt.show()


def draw_timelines(steps: dict[tuple[str, str], list[Step]], wire: str = measures.SLOW) -> None:
    """Rank 0's fastest step on one wire, in each way: the processor above, the wire below."""
    ways = [how for told, how in steps if told == wire]
    _, panels = figure(len(ways), 1, figsize=(9, 2.1 * len(ways)), sharex=True)
    for axes, how in zip(panels, ways, strict=True):
        draw_timeline(axes, min(steps[wire, how], key=lambda step: step.end), f"Rank 0, {how}")
    panels[-1].set_xlabel("milliseconds; each orange piece is one all-reduce; dotted: the step is complete")
    plt.tight_layout()
    plt.show()


def draw_exposed(steps: dict[tuple[str, str], list[Step]]) -> None:
    """On each wire and in each way: what a step computes, and what it waits for afterwards."""
    _, axes = figure(figsize=(9, 3.3))
    colors = dict(zip(dict.fromkeys(how for _, how in steps), (ORANGE, BLUE), strict=True))
    widest = 0.0
    for i, (wire, how) in enumerate(steps):
        compute = statistics.median(step.backward for step in steps[wire, how])
        exposed = statistics.median(step.exposed for step in steps[wire, how])
        place = i + i // 2 * 0.5
        axes.barh(place, compute, color=COMPUTE)
        axes.barh(place, exposed, left=compute, color=colors[how])
        axes.text(compute + exposed, place, f" {exposed:.0f} ms exposed", va="center")
        if i % 2 == 0:
            axes.text(-3, place + 0.5, wire, ha="right", va="center")
        widest = max(widest, compute + exposed)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (COMPUTE, *colors.values())]
    labels = ["forward and backward", *(f"exposed: {how}" for how in colors)]
    axes.legend(handles, labels, loc="lower center", ncols=3, bbox_to_anchor=(0.5, 1.0))
    axes.set(yticks=[], xlabel="milliseconds a step, on 2 ranks", xlim=(0, 1.25 * widest))
    axes.invert_yaxis()
    plt.tight_layout()
    plt.show()


def show_counts(data_parallel: Any, config: GPTConfig) -> None:
    """All-reduces and bytes of a step, for several sizes of bucket and with micro-batches."""
    for told, bucket_bytes, num_microbatches, quiet in (
        ("a bucket a parameter", 1, 1, False),
        ("buckets of 1 MiB", 2**20, 1, False),
        ("buckets of 25 MiB", 25 * 2**20, 1, False),
        ("4 micro-batches", 2**20, 4, False),
        ("4 micro-batches, no_sync", 2**20, 4, True),
    ):
        arguments = data_parallel, config, bucket_bytes, num_microbatches, quiet
        sizes = run_ranks(measures.all_reduced_bytes, *arguments, ranks=2)[0]
        plural = "s" if len(sizes) > 1 else " "
        total, largest = sum(sizes) / 1e6, max(sizes) / 1e6
        print(f"{told:26}{len(sizes):3} all-reduce{plural} {total:6.2f} MB, the largest {largest:.2f} MB")


def show_bytes_on_the_wire(data_parallel: Any, config: GPTConfig, gradient_bytes: int) -> None:
    """What the ring's formula says, and what the loopback interface counts."""
    print("ranks   predicted MB   witnessed MB")
    for n in (2, 3, 4):
        counted = run_ranks(measures.loopback_bytes_of_a_step, data_parallel, config, ranks=n)[0]
        told = "not counted by this system" if counted is None else f"{counted / 1e6:14.2f}"
        print(f"{n:5} {2 * (n - 1) * gradient_bytes / 1e6:14.2f} {told}")


def show_errors(loss_of: Any, config: GPTConfig, tokens: Tokens, **learners: Any) -> list[float]:
    """How far the mean gradient of two ranks is from that of the whole batch, for several batches."""
    errors = []
    for told, (inputs, targets) in measures.batches(config, tokens).items():
        error = run_ranks(measures.relative_error, loss_of, config, inputs, targets, learners, ranks=2)[0]
        shown = "less than 0.0001%" if error < 1e-6 else f"{error:.0%}"
        print(f"{told:24} on 2 ranks: off by {shown}")
        errors.append(error)
    return errors


def show_buckets(found: dict[str, list[int]]) -> None:
    """How many buckets there were, and how many megabytes each had."""
    for told, sizes in found.items():
        plural = "s" if len(sizes) > 1 else ""
        print(
            f"{told:11}{len(sizes)} bucket{plural} of {', '.join(f'{size / 1e6:.2f}' for size in sizes)} MB"
        )
