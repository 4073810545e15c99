"""Time: a step and the bytes that are alive in it, how much of the machine is used, and what runs cost."""

import statistics
from typing import Any

import matplotlib.pyplot as plt

from lessons.flops_and_memory import measures
from lessons.flops_and_memory.answers import LLAMAS, MACHINES
from lessons.page.look import BLUE, COMPUTE, GREEN, RED, figure
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


def show_llamas(plan: Any, utilization: float = 0.4) -> None:
    """Meta's model cards, beside the learner's plan of the same runs on H100."""
    peak, _, memory = MACHINES["H100"]
    print(f"{'':16}{'GPUs for the':>13}{'GPU hours, planned':>20}{'GPU hours,':>12}{'so in all an':>14}")
    print(
        f"{'':16}{'states alone':>13}{f'at an MFU of {utilization:.0%}':>20}{'published':>12}{'MFU of':>14}"
    )
    for name, (parameters, tokens, published) in LLAMAS.items():
        told = plan(int(parameters), int(tokens), 1000, peak, utilization, memory)
        mfu = utilization * told["gpu_hours"] / published
        print(
            f"{name:16}{told['fewest_gpus']:13,}{told['gpu_hours'] / 1e6:18.2f} M"
            f"{published / 1e6:10.2f} M{mfu:14.0%}"
        )
