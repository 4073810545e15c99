"""How much of the wire's time computing hides: measured beside a formula, and on published machines."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from lessons.page.look import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, figure

GIGABIT = 1e9 / 8
"""Bytes a second of an office network."""

MACHINES: dict[str, tuple[float, float]] = {
    "H100, NVLink": (989e12, 450e9),
    "H100, between machines": (989e12, 400e9),
    "A100, NVLink": (312e12, 300e9),
    "A100, between AWS machines": (312e12, 50e9),
    "A100, 10 Gbit/s a machine": (312e12, 10 * GIGABIT),
}
"""Dense bf16 FLOP/s of a GPU, and bytes a second in one direction: of a GPU, or of a machine of eight.

Where the GPUs of a machine share what comes in and goes out, its wire carries S once and not eight times. The
published figures are in tests/published_figures.yaml (stas00/ml-engineering and jax-ml/scaling-book).
"""


def paces(measure: Callable[[], float], ahead: int = 3) -> Iterator[float]:
    """On a rank: how long computing takes now, measured anew for each, in seconds; the mean over the ranks.

    An imitated wire is as slow as that says. A machine that stood still for a moment has not computed, and
    would give a wire on which nothing arrives: so it is at most twice the shortest. Some are measured ahead.
    """
    found: list[float] = []
    while True:
        seconds = torch.tensor(measure(), dtype=torch.float64)
        dist.all_reduce(seconds)
        found.append(seconds.item() / dist.get_world_size())
        if len(found) > ahead:
            yield min(found[-1], 2 * min(found))


def draw_shares(
    ratios: Sequence[float],
    told: Mapping[str, Callable[[float], float]],
    measured: Mapping[str, Sequence[float]],
    columns: Sequence[str],
) -> None:
    """The hidden part over the tokens of a rank: as formulas tell it, and measured; then the same as a table.

    Args:
        ratios: tokens of a rank, as multiples of the smallest hidden share.
        told: formulas of such a multiple, by the words of the legend.
        measured: the part at each of the ratios, by the words of the legend.
        columns: how the table calls them all.
    """
    _, axes = figure(figsize=(7, 3))
    every = [ratios[0] * (ratios[-1] / ratios[0]) ** (i / 50) for i in range(51)]
    for (words, formula), (color, line) in zip(told.items(), ((GREY, "-"), (ORANGE, "--")), strict=False):
        axes.plot(every, [formula(x) for x in every], line, color=color, label=words)
    for (words, seen), color in zip(measured.items(), (BLUE, GREEN), strict=False):
        axes.plot(ratios, seen, "o", color=color, label=words)
    axes.set_xscale("log", base=2)
    axes.set(xticks=ratios, xticklabels=[f"{x:g}" for x in ratios], ylim=(-0.05, 1.1))
    axes.set(xlabel="tokens of a rank, as a multiple of the smallest hidden share", ylabel="hidden part")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    plt.show()
    print("share  ", *(f"{column:>18}" for column in columns))
    for i, x in enumerate(ratios):
        parts = [*(formula(x) for formula in told.values()), *(seen[i] for seen in measured.values())]
        print(f"{x:5g}  ", *(f"{part:18.0%}" for part in parts))


def draw_machines(
    least_tokens: Callable[[float, float], int], mark: tuple[int, str], what: str, title: str
) -> None:
    """On published machines: which part is hidden, over the tokens of a rank.

    Args:
        least_tokens: of FLOP/s and bytes a second, how many hide everything.
        mark: the tokens of a published run, and its name.
        what: what is hidden.
        title: of the legend.
    """
    _, axes = figure(figsize=(9, 3.4))
    every = [2 ** (i / 20) for i in range(120, 375)]
    for (told, (flops, speed)), color in zip(MACHINES.items(), (GREEN, BLUE, SKY, ORANGE, RED), strict=True):
        least = least_tokens(flops, speed)
        axes.plot(every, [min(1, t / least) for t in every], color=color, label=f"{told}: {least:,} tokens")
    tokens, name = mark
    axes.axvline(tokens, color=PINK, linestyle=":")
    axes.text(tokens * 1.08, 0.5, name, color=PINK)
    axes.set_xscale("log")
    axes.set(xlabel="tokens of a rank in one backward", ylabel=f"hidden part of\n{what}, at most")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), title=title)
    plt.show()
