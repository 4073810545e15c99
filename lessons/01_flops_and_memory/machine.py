"""Pictures of a step in time: the bytes that are alive, and how much of this machine is used."""

import statistics
from typing import Any

import matplotlib.pyplot as plt
import torch

from lessons.flops_and_memory import measures
from lessons.page.look import BLUE, COMPUTE, GREEN, ORANGE, RED, figure
from nanogpt.model import GPTConfig


def draw_step(config: GPTConfig, activation_bytes: Any, batch_size: int = 8) -> None:
    """The bytes alive after every operation of a step, weights left out."""
    meter = measures.alive_through_a_step(config, batch_size)
    predicted = activation_bytes(config, batch_size, config.block_size)["total"]
    forward, last = meter.marks["forward"], meter.marks["backward"]
    _, axes = figure(figsize=(9, 3.2))
    gigabytes = [alive / 1e9 for alive in meter.history]
    axes.fill_between(range(forward + 1), gigabytes[: forward + 1], color=GREEN, alpha=0.8)
    axes.fill_between(range(forward, last + 1), gigabytes[forward : last + 1], color=COMPUTE)
    axes.axhline(predicted / 1e9, color="black", linestyle="--")
    axes.text(0, predicted / 1e9 * 1.04, "your activation_bytes")
    axes.text(forward * 0.6, 0.25 * predicted / 1e9, "forward", ha="center")
    axes.text((forward + last) / 2, 0.25 * predicted / 1e9, "backward", ha="center")
    place = meter.history.index(meter.peak)
    axes.annotate(
        f"the peak, {meter.peak / 1e9:.1f} GB",
        (place, meter.peak / 1e9),
        (place + 0.08 * last, meter.peak / 1e9),
        va="center",
        arrowprops={"arrowstyle": "->"},
    )
    axes.set(xlabel="operations", ylabel="GB alive, besides the weights", ylim=0, xlim=(0, last))
    axes.set_title(f"GPT-2, {batch_size} sequences: one step")
    plt.show()


def draw_peak(mfu: Any) -> float:
    """How fast matrix products are, and how much of that narrow and wide models reach; returns the peak."""
    sizes, widths = [32, 64, 128, 256, 512, 1024, 1536], [32, 64, 128, 256, 512]
    speeds = [measures.matmul_flops_per_second(size) for size in sizes]
    peak = max(speeds)
    utilizations = measures.utilization_by_width(mfu, widths, peak)
    _, (left, right) = figure(1, 2, figsize=(9, 3.2))
    left.plot(sizes, [speed / 1e9 for speed in speeds], "o-", color=BLUE)
    left.set(xscale="log", xlabel="size of the square matrices", ylabel="GFLOP/s", ylim=0)
    left.set_title("One matrix product")
    left.set_xticks([32, 128, 512, 1536], ["32", "128", "512", "1536"])
    right.plot(widths, [100 * u for u in utilizations], "o-", color=ORANGE)
    right.set(xscale="log", xlabel="width h of a GPT of 2 layers", ylabel="MFU, %", ylim=0)
    right.set_title("Forward and backward of a model")
    right.set_xticks(widths, [str(h) for h in widths])
    for axes in (left, right):
        axes.minorticks_off()
    plt.tight_layout()
    plt.show()
    print(f"peak of this machine: {peak / 1e9:.0f} GFLOP/s with {torch.get_num_threads()} thread(s)")
    return peak


def draw_utilization(utilizations: list[float]) -> float:
    """The MFU of every step of a training; returns the median."""
    typical = statistics.median(utilizations)
    _, axes = figure(figsize=(7, 2.6))
    steps = range(1, len(utilizations) + 1)
    axes.plot(steps, [100 * u for u in utilizations], ".-", color=BLUE)
    axes.axhline(100 * typical, color=RED, linestyle=":")
    axes.set(xlabel="step", ylabel="MFU, %", ylim=0, xticks=range(5, len(utilizations) + 1, 5))
    axes.set_title(f"Half of the steps use more than {typical:.0%} of the peak")
    plt.show()
    return typical


def show_bill(flops: float, peak: float, utilization: float) -> None:
    """How long a training run of so many FLOPs takes, here and on eight A100."""
    years = flops / (utilization * peak) / 86400 / 365
    days = flops / (0.3 * 8 * 312e12) / 86400
    print(f"GPT-2 on 300 billion tokens is {flops:.2e} FLOPs:")
    print(f"  on this machine, at {utilization:.0%} of {peak / 1e9:.0f} GFLOP/s: {years:,.0f} years")
    print(f"  on eight A100, at 30% of 312 TFLOP/s each: {days:.1f} days")


def show_tracked(tracker: Any, states: dict[str, int], activations: int) -> None:
    """The bytes at a MemTracker's peak, by what they are for, beside the learner's."""
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    peak = {str(kind).rpartition(".")[2].partition(":")[0]: size for kind, size in snapshot.items()}
    print(f"{'bytes at the peak':18} {'MemTracker':>14} {'yours':>14}")
    print(f"{'weights':18} {peak['PARAM']:14,} {states['weights']:14,}")
    print(f"{'optimizer':18} {peak['OPT']:14,} {states['optimizer']:14,}")
    print(f"{'activations':18} {peak['ACT']:14,} {activations:14,}")
    print(f"{'temporary':18} {peak['TEMP']:14,}")
