"""Pictures of rooflines: GPUs by their datasheets, and this machine as it is measured."""

from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from lessons.flops_and_memory import measures
from lessons.flops_and_memory.answers import MACHINES
from lessons.page.look import BLUE, GREEN, ORANGE, PINK, RED, figure
from nanogpt.model import GPTConfig

Product = tuple[int, int, int]
"""m, k and n of (m, k) times (k, n)."""


def intensity(product: Product, size: int) -> float:
    """FLOPs a byte of a product of numbers of `size` bytes."""
    m, k, n = product
    return 2 * m * k * n / (size * (m * k + k * n + m * n))


def draw_roof(axes: Axes, peak: float, bandwidth: float, **look: Any) -> None:
    """The slope of the memory and the ceiling of the peak."""
    lowest, highest = 0.01, 2e3
    axes.plot([lowest, peak / bandwidth, highest], [lowest * bandwidth, peak, peak], **look)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="FLOP/s")


def draw_gpus(config: GPTConfig, attainable: Any) -> None:
    """Products of a GPT in 16 bits, under the roofs of three GPUs."""
    h, s = config.n_embd, config.block_size
    _, axes = figure(figsize=(9, 4.2))
    for (name, (peak, bandwidth, _)), color in zip(MACHINES.items(), (GREEN, ORANGE, BLUE), strict=True):
        draw_roof(axes, peak, bandwidth, color=color, label=f"{name}: ridge at {peak / bandwidth:.0f}")
    peak, bandwidth, _ = MACHINES["H100"]
    products = {f"c_fc, {t:,} token{'s' * (t > 1)}": (t, h, 4 * h) for t in (1, 32, 256, 8192)}
    products |= {
        "a head's scores": (s, h // config.n_head, s),
        "lm_head, 8,192": (8192, h, config.vocab_size),
    }
    for name, product in products.items():
        x, y = intensity(product, 2), attainable(*product, 2, peak, bandwidth)
        axes.plot(x, y, "o", color=PINK if "c_fc" in name else RED, zorder=3)
        side = "left" if "lm_head" in name else "right"
        offset = (0, 14) if y == peak else (-7, 4)
        axes.annotate(name, (x, y), offset, textcoords="offset points", ha=side)
        print(f"{name:20} {x:6.1f} FLOPs a byte: at most {y / peak:6.1%} of an H100's peak")
    axes.plot(1 / 6, bandwidth / 6, "s", color=RED)
    axes.annotate(
        "adding two tensors", (1 / 6, bandwidth / 6), (-7, 4), textcoords="offset points", ha="right"
    )
    axes.set_title(f"GPT-2 in 16 bits: products of width {h}")
    axes.legend(loc="lower right")
    axes.set_ylim(top=9e15)
    plt.show()


def draw_this_machine(attainable: Any, mfu: Any, h: int = 2048) -> float:
    """Products of few and many tokens under this machine's roof, and what models use; returns the peak."""
    bandwidth = measures.bytes_read_per_second(h, 4 * h)
    tokens, widths = [1, 4, 16, 64, 512], [32, 64, 128, 256, 512]
    products = [(t, h, 4 * h) for t in tokens]
    speeds = [measures.matmul_flops_per_second(*product) for product in products]
    peak = max(*speeds, *(measures.matmul_flops_per_second(n, n, n) for n in (512, 1024, 1536)))
    utilizations = measures.utilization_by_width(mfu, widths, peak)
    _, (left, right) = figure(1, 2, figsize=(10, 3.6))
    draw_roof(left, peak, bandwidth, color=BLUE)
    for t, product, speed in zip(tokens, products, speeds, strict=True):
        left.plot(intensity(product, 4), speed, "o", color=PINK)
        left.annotate(f"{t:,}", (intensity(product, 4), speed), (5, -5), textcoords="offset points", va="top")
    left.set_title(f"Products of so many tokens, width {h:,}")
    right.plot(widths, [100 * u for u in utilizations], "o-", color=ORANGE)
    right.set(xscale="log", xlabel="width h of a GPT of 2 layers", ylabel="MFU, %", ylim=0)
    right.set_title("Forward and backward of a model")
    right.set_xticks(widths, [str(width) for width in widths])
    right.minorticks_off()
    plt.tight_layout()
    plt.show()
    told = f"{peak / 1e9:.0f} GFLOP/s with {torch.get_num_threads()} thread(s), {bandwidth / 1e9:.0f} GB/s"
    print(f"this machine: {told}, ridge at {peak / bandwidth:.0f} FLOPs a byte")
    for product, speed in ((products[0], speeds[0]), (products[-1], speeds[-1])):
        share = speed / attainable(*product, 4, peak, bandwidth)
        print(f"{product[0]:5,} tokens reach {speed / 1e9:5.1f} GFLOP/s, {share:.0%} of what the roof allows")
    return peak
