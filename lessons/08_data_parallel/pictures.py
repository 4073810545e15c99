"""The pictures of the lesson, a line each to call."""

import statistics
from functools import partial
from typing import Any

import matplotlib.pyplot as plt

from grader import run_ranks
from lessons.data_parallel import answers, measures
from lessons.page import hidden
from lessons.page.look import BLUE, GREEN, ORANGE, RED, figure
from lessons.page.tap import SHARE_SENT
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
    axes.set(
        xlabel=f"sequences in the batch, of {config.block_size} tokens each",
        ylabel="milliseconds a step",
        ylim=0,
        xticks=batch_sizes,
    )
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


def draw_drift(config: GPTConfig, average: Any) -> None:
    """How far the weights of two ranks are apart, step by step, where they talk and where they do not."""
    _, axes = figure(figsize=(6, 2.6))
    ways = (("they never talk", RED, measures.never_talk), (average.__name__, GREEN, average))
    for told, color, way in ways:
        first, second = run_ranks(measures.train_on_halves, way, config, ranks=2)
        apart = [(a - b).abs().max().item() for a, b in zip(first, second, strict=True)]
        steps = range(1, len(apart) + 1)
        axes.plot(steps, apart, "o-", color=color, label=told)
    axes.set(xlabel="after step", ylabel="largest difference\nof a weight", xticks=steps)
    axes.legend()
    axes.set_title("Two ranks that never talk are two models")
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


def draw_timelines(steps: dict[tuple[str, str], list[Step]], *ways: str, wire: str = measures.SLOW) -> None:
    """Rank 0's fastest step on one wire, in each way: the processor above, the wire below."""
    ways = ways or tuple(how for told, how in steps if told == wire)
    _, panels = figure(len(ways), 1, figsize=(9, 2.1 * len(ways)), sharex=True)
    for axes, how in zip(panels, ways, strict=True):
        draw_timeline(axes, min(steps[wire, how], key=lambda step: step.end), f"Rank 0, {how}")
    panels[-1].set_xlabel("milliseconds; each orange piece is one message; dotted: the step is complete")
    plt.tight_layout()
    plt.show()


def show_ways(steps: dict[tuple[str, str], list[Step]], num_ranks: int = 2) -> None:
    """A line for each way, of its fastest step: messages, bytes and times."""
    fastest = {how: min(found, key=lambda step: step.end) for (_, how), found in steps.items()}
    first = next(iter(fastest.values())).end
    print(f"{'':32} messages   MB sent   exposed   step   step, the first line's = 1")
    for how, step in fastest.items():
        sizes = [SHARE_SENT[entry["kind"]](num_ranks) * entry["bytes"] for entry in step.sent]
        times = f"{step.exposed:6.0f} ms {step.end:3.0f} ms {step.end / first:15.2f}"
        print(f"{how:32} {len(sizes):8} {sum(sizes) / 1e6:9.2f} {times}")


def draw_bucket_sizes(data_parallel: Any, config: GPTConfig) -> None:
    """The step on a slow wire for buckets of several sizes, beside the fastest of them."""
    sizes = {
        "1 B": 1,
        "64 KiB": 2**16,
        "256 KiB": 2**18,
        "1 MiB": 2**20,
        "4 MiB": 2**22,
        "25 MiB": 25 * 2**20,
    }

    def way(num_bytes: int) -> Any:
        def make(model: Any, group: Any) -> tuple:
            wrapped = data_parallel(model, group, num_bytes)
            return wrapped, wrapped.finish_gradient_synchronization

        return make

    steps = measures.timed_steps({told: way(size) for told, size in sizes.items()}, [measures.SLOW], config)
    times = {told: min(step.end for step in found) for (_, told), found in steps.items()}
    counts = [len(found[-1].sent) for found in steps.values()]
    names = [
        f"{told}\n{count} all-reduce{'s' * (count > 1)}" for told, count in zip(sizes, counts, strict=True)
    ]
    _, axes = figure(figsize=(9, 2.8))
    best = min(times.values())
    axes.bar(names, [time / best for time in times.values()], color=BLUE, width=0.6)
    for i, time in enumerate(times.values()):
        axes.text(i, time / best, f"{time / best:.2f}", ha="center", va="bottom")
    axes.set(ylabel="step, the fastest = 1", ylim=(0, 1.15 * max(times.values()) / best))
    axes.set_title("Buckets of up to ...: too many have their price, one alone can hide nothing")
    plt.show()


def draw_hidden_shares(way: Any, config: GPTConfig, tokens: Tokens) -> None:
    """Which part of an all-reduce is hidden behind a shorter or longer backward."""
    ratios = [0.25, 0.5, 1.0, 2.0, 4.0]
    inputs, targets = tokens.batch(16, config.block_size, seed=0, step=0)
    run = run_ranks(measures.hidden_shares, way, config, ratios, inputs, targets, ranks=2)
    late = config.vocab_size * config.n_embd / answers.num_parameters(config)
    idle = answers.before_the_first_bucket(config)
    hidden.draw_shares(
        ratios,
        {
            "the formula: gradients come evenly": lambda x: min(1, x),
            "with a late start, and the token table last": lambda x: min(1 - late, (1 - idle) * x),
        },
        {"measured with your DataParallel": [statistics.fmean(shares) for shares in zip(*run, strict=True)]},
        ("formula", "with both delays", "measured"),
    )


def draw_machines(smallest_hidden_share: Any) -> None:
    """On published machines: which part is hidden, over the tokens of a rank; the learner's thresholds."""
    hidden.draw_machines(
        partial(smallest_hidden_share, answers.GPT2_PARAMETERS),
        (answers.MICRO_BATCH, "nanoGPT's\nmicro-batch"),
        "the all-reduce",
        "bf16 gradients, all of the data sheet's FLOP/s",
    )


def show_counts(data_parallel: Any, config: GPTConfig) -> None:
    """All-reduces and bytes of a step, for several sizes of bucket and with micro-batches."""
    for told, bucket_bytes, num_microbatches, quiet in (
        ("a bucket a parameter", 1, 1, False),
        ("buckets of 1 MiB", 2**20, 1, False),
        ("buckets of 25 MiB", 25 * 2**20, 1, False),
        ("4 micro-batches, 1 MiB", 2**20, 4, False),
        ("the same with no_sync", 2**20, 4, True),
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
