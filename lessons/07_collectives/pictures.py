"""The pictures of the lesson, a line each to call."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import MaxNLocator

from grader import run_ranks
from lessons.collectives import measures
from lessons.page.look import BLUE, GREEN, GREY, ORANGE, RED, figure

ELEMENTS = 840
"""Divides by all numbers of ranks up to 8."""


def draw_bytes(function: measures.Collective) -> None:
    """What each of 2, 4 and 8 ranks sends, in units of the tensor."""
    _, panels = figure(1, 3, figsize=(9, 2.4), sharey=True)
    for axes, n in zip(panels, (2, 4, 8), strict=True):
        messages = run_ranks(measures.messages_of, function, ELEMENTS, ranks=n)
        units = [sum(sizes) / (4 * ELEMENTS) for sizes in messages]
        _bars(axes, units, [RED if u == max(units) > 2 else BLUE for u in units])
        axes.set(title=f"{n} ranks")
        print(f"{n} ranks: rank 0 sends {units[0]:.0f} S, each of the others {units[1]:.0f} S")
    panels[0].set_ylabel("sent, in tensors S")
    plt.tight_layout()
    plt.show()


def draw_bytes_of(mine: dict[str, Any], n: int = 4) -> None:
    """What each of four ranks sends in each of the learner's collectives, and what a ring's formula says."""
    _, panels = figure(1, len(mine), figsize=(9, 2.6), sharey=True)
    for axes, (kind, function) in zip(panels, measures.alike(mine).items(), strict=True):
        messages = run_ranks(measures.messages_of, function, ELEMENTS, ranks=n)
        units = [sum(sizes) / (4 * ELEMENTS) for sizes in messages]
        _bars(axes, units, [BLUE] * n)
        for r, (u, sizes) in enumerate(zip(units, messages, strict=True)):
            axes.text(r, u, f"{len(sizes)}", ha="center", va="bottom")
        if kind != "broadcast":
            axes.axhline((2 if kind == "all_reduce" else 1) * (n - 1) / n, color="black", linestyle=":")
        axes.set(title=kind)
        shown = ", ".join(f"{u:.2f}" for u in units)
        print(f"{kind:15} messages {', '.join(str(len(sizes)) for sizes in messages)}; tensors S {shown}")
    panels[0].set_ylabel("sent, in tensors S")
    plt.suptitle("Four ranks. Above a bar: how many messages. Dotted: the ring's formula", fontsize=11)
    plt.tight_layout()
    plt.show()


def _bars(axes: plt.Axes, units: Sequence[float], colors: Sequence[str]) -> None:
    axes.bar(range(len(units)), units, color=colors)
    axes.set(xlabel="rank", xticks=range(len(units)), ylim=(0, 1.15 * max(*axes.get_ylim(), *units) / 1.05))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def draw_tree(n: int = 8) -> None:
    """Who has the tensor after each step, and who told whom."""
    steps = (n - 1).bit_length()
    _, axes = figure(figsize=(9, 2.7))
    for s in range(steps + 1):
        for place in range(n):
            color = GREEN if place < 2**s else "white"
            axes.add_patch(plt.Rectangle((place, -s), 0.7, 0.45, facecolor=color, edgecolor="black"))
        axes.text(-0.2, -s + 0.2, "start" if s == 0 else f"after step {s}", ha="right", va="center")
        for sender in range(min(2**s, n - 2**s) if s < steps else 0):
            start, end = (sender + 0.35, -s), (sender + 2**s + 0.35, -s - 0.55)
            axes.annotate("", end, start, arrowprops={"arrowstyle": "->"})
    for place in range(n):
        axes.text(place + 0.35, 0.6, f"place {place}", ha="center", fontsize=9)
    axes.set(xlim=(-1.6, n), ylim=(-steps - 0.1, 0.9))
    axes.set_title("A binomial tree: place 0 is the source; green has the tensor")
    axes.axis("off")
    plt.show()


def draw_reduce_scatter(n: int = 4) -> None:
    """Whose parts are in each chunk, on each rank, after each step."""
    held = [[{rank} for _ in range(n)] for rank in range(n)]
    _draw_ring(held, [(rank - 1) % n for rank in range(n)])


def draw_all_gather(n: int = 4) -> None:
    """Which chunks are on each rank after each step."""
    everyone = set(range(n))
    held = [[everyone if chunk == rank else set() for chunk in range(n)] for rank in range(n)]
    _draw_ring(held, list(range(n)))


def _draw_ring(held: list[list[set[int]]], leaving: list[int]) -> None:
    """Panels, one a step: rank r sends chunk `leaving[r]` to the next, which adds it to what it holds."""
    n = len(held)
    shown, panels = figure(1, n, figsize=(9.5, 2.7), sharey=True)
    shown.suptitle("framed: what a rank sends next", y=0.02, fontsize=9, color=RED)
    for step, axes in enumerate(panels):
        for rank in range(n):
            for chunk in range(n):
                _chunk(axes, (chunk, -rank), sorted(held[rank][chunk]), n)
            if step < n - 1:
                place = (leaving[rank], -rank)
                axes.add_patch(plt.Rectangle(place, 0.94, 0.8, fill=False, edgecolor=RED, linewidth=2.5))
        axes.set(xlim=(-0.1, n), ylim=(-n + 0.9, 0.9), title=f"after step {step}" if step else "start")
        axes.set(xticks=[c + 0.47 for c in range(n)], xticklabels=range(n), xlabel="chunk")
        axes.set(yticks=[0.4 - r for r in range(n)], yticklabels=[f"rank {r}" for r in range(n)])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        sent = [set(held[rank][leaving[rank]]) for rank in range(n)]
        leaving = [leaving[rank - 1] for rank in range(n)]
        for rank in range(n):
            held[rank][leaving[rank]] = held[rank][leaving[rank]] | sent[rank - 1]
    plt.tight_layout()
    plt.show()


def _chunk(axes: plt.Axes, place: tuple[float, float], parts: Sequence[int], n: int, told: str = "") -> None:
    """A box, the greener the more ranks' parts are in it."""
    whose = "all" if len(parts) == n else "+".join(map(str, parts))
    shade = plt.cm.Greens(0.75 * (len(parts) - 1) / (n - 1)) if len(parts) > 1 else "white"
    axes.add_patch(plt.Rectangle(place, 0.94, 0.8, facecolor=shade, edgecolor="gray"))
    ink = "white" if len(parts) == n else "black"
    middle = (place[0] + 0.47, place[1] + 0.4)
    axes.text(*middle, told + whose, ha="center", va="center", fontsize=8.5, color=ink)


def draw_rounds(n: int = 4) -> None:
    """In which round a tensor travels, by sender and owner: all begin with rank 0, or each with the next."""
    _, panels = figure(1, 2, figsize=(7.4, 2.9))
    told = ("everybody begins with rank 0", "rank r sends to r + round")
    for axes, title in zip(panels, told, strict=True):
        for sender in range(n):
            others = [rank for rank in range(n) if rank != sender]
            for owner in range(n):
                number = (
                    (owner - sender) % n
                    if axes is panels[1]
                    else 1 + others.index(owner)
                    if owner in others
                    else 0
                )
                color = ("white", ORANGE, BLUE, GREEN)[number % 4]
                place = (owner, -sender)
                axes.add_patch(plt.Rectangle(place, 0.94, 0.8, facecolor=color, edgecolor="gray", alpha=0.6))
                text = f"round {number}" if number else "stays"
                axes.text(owner + 0.47, 0.4 - sender, text, ha="center", va="center", fontsize=9)
        axes.set(xlim=(-0.1, n), ylim=(-n + 0.9, 0.9), title=title, xlabel="to rank")
        axes.set(xticks=[r + 0.47 for r in range(n)], xticklabels=range(n))
        axes.set(yticks=[0.4 - r for r in range(n)], yticklabels=[f"rank {r}" for r in range(n)])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    plt.tight_layout()
    plt.show()


def draw_two_wires(
    flat: Any, two_levels: Any, collective_time: Any, megabytes: int = 2, inside: float = 100e6
) -> None:
    """One ring and two levels on 2 machines of 2 ranks, clock and formula, as the wire between them slows."""
    size, slower = megabytes * 1e6, [1, 2, 4, 8, 16]
    speeds = [inside / times for times in slower]
    rows = run_ranks(
        measures.seconds_on_two_wires, flat, two_levels, int(size) // 4, inside, speeds, ranks=4
    )[0]
    home = sum(collective_time(kind, size, 2, 0.0, inside) for kind in ("reduce_scatter", "all_gather"))
    predicted = [
        [collective_time("all_reduce", size, 4, 0.0, speed) for speed in speeds],
        [home + collective_time("all_reduce", size / 2, 2, 0.0, speed) for speed in speeds],
    ]
    _, axes = figure(figsize=(7, 3.2))
    names, colors = ("one ring", "two levels"), (ORANGE, BLUE)
    for name, color, line, clock in zip(names, colors, predicted, zip(*rows, strict=True), strict=True):
        axes.loglog(slower, [1e3 * s for s in line], color=color, label=f"{name}: your formula")
        axes.loglog(slower, [1e3 * s for s in clock], "o", color=color, label=f"{name}: the clock")
    axes.set(xlabel="times that the wire across machines is slower", ylabel="milliseconds")
    axes.set_title(f"An all-reduce of {megabytes} MB on 2 machines of 2 ranks")
    axes.set_xticks(slower, [str(times) for times in slower])
    axes.minorticks_off()
    axes.set_yticks([30, 100, 300], ["30", "100", "300"])
    axes.legend(loc="upper left", fontsize=9)
    plt.tight_layout()
    plt.show()
    clock, formula = rows[-1][0] / rows[-1][1], predicted[0][-1] / predicted[1][-1]
    print(
        f"wire across {slower[-1]} times slower: two levels {clock:.1f} times faster, formula {formula:.1f}"
    )


def draw_travels(ways: dict[str, list], milliseconds: dict[str, float]) -> None:
    """What each rank sends in each of its messages, in several ways; and how long they take."""
    shape = {"width_ratios": [2.4, 1]}
    _, panels = figure(len(ways), 2, figsize=(9.5, 0.4 + 1.9 * len(ways)), gridspec_kw=shape, squeeze=False)
    for axes, (how, by_rank) in zip(panels[:, 0], ways.items(), strict=True):
        n, num_messages = len(by_rank), max(map(len, by_rank))
        for rank, messages in enumerate(by_rank):
            for m, chunks in enumerate(messages):
                chunk, parts = chunks[0]
                more = "…" if len(chunks) > 1 else ""
                _chunk(axes, (m, -rank), parts, n, f"{chunk}{more}: ")
        axes.set(xlim=(-0.1, num_messages), ylim=(-n + 0.9, 0.9), title=f"{how}. In a message, chunk: parts")
        axes.set(xticks=[m + 0.47 for m in range(num_messages)], xticklabels=range(1, num_messages + 1))
        axes.set(yticks=[0.4 - r for r in range(n)], yticklabels=[f"rank {r}" for r in range(n)])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    for axes in panels[1:, 1]:
        axes.axis("off")
    clock = panels[0, 1]
    clock.barh(range(len(milliseconds)), list(milliseconds.values()), color=[BLUE, ORANGE, GREY])
    clock.set(yticks=range(len(milliseconds)), yticklabels=milliseconds, xlabel="ms for 8 MB on 4 ranks")
    clock.invert_yaxis()
    plt.tight_layout()
    plt.show()


def show_last_bits(all_reduce: measures.Collective, num_elements: int = 10_001) -> None:
    """Four ranks' sums beside each other, and beside a sum in the order of ranks."""
    sums = run_ranks(measures.sum_of_random_numbers, all_reduce, num_elements, ranks=4)
    parts = [torch.randn(num_elements, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    in_order = parts[0] + parts[1] + parts[2] + parts[3]
    print("the same bits on every rank:", all(torch.equal(each, sums[0]) for each in sums))
    print("the same bits as the sum in the order of ranks:", torch.equal(sums[0], in_order))
    print("within rounding of it:", torch.allclose(sums[0], in_order, atol=1e-6))


def show_bytes_on_the_wire(mine: dict[str, Any], megabytes: int = 4) -> None:
    """All ranks together: what the formula says, and what the loopback interface counts."""
    own, torchs = measures.alike(mine), {"all_reduce": measures.torchs_all_reduce}
    torchs["broadcast"] = measures.torchs_broadcast
    print("MB of all ranks together   predicted      yours   PyTorch's")
    for n in (2, 4):
        for kind, times in (("all_reduce", 2 * (n - 1)), ("broadcast", n - 1)):
            pair = own[kind], torchs[kind]
            counts = run_ranks(measures.counted_bytes, pair, megabytes * 250_000, ranks=n)[0]
            yours, theirs = ("not counted" if c is None else f"{c / 1e6:.1f}" for c in counts)
            print(f"{kind + ',':11} {n} ranks {times * megabytes:15.1f} {yours:>10} {theirs:>11}")


def show_seconds(functions: dict[str, measures.Collective], n: int = 4) -> None:
    """How long several ways to add up take, for small tensors and large ones."""
    columns = [
        run_ranks(measures.seconds_of, list(functions.values()), num_elements, 8, ranks=n)[0]
        for num_elements in (250, 250_000, 2_000_000)
    ]
    print(f"milliseconds, {n} ranks           1 KB      1 MB      8 MB")
    for told, row in zip(functions, zip(*columns, strict=True), strict=True):
        print(f"{told:23}" + "".join(f"{1e3 * s:10.2f}" for s in row))
