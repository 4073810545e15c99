"""What a step of messages costs on this machine, and the learner's formula beside the clock."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor

from grader import run_ranks
from lessons.collectives import measures
from lessons.page.look import BLUE, GREEN, ORANGE, figure

DRAWN = ("all_reduce", "broadcast", "all_to_all")
"""The collectives whose seconds are drawn; an all-reduce is the two others, one after the other."""


@dataclass(frozen=True)
class Machine:
    """What a step costs here, with 1, 2 or 4 of four ranks that send at once."""

    sizes: list[int]
    """Bytes of the steps that were measured."""
    seconds: dict[int, list[float]]
    """By the number of senders, for each size."""
    lines: dict[int, tuple[float, float]]
    """By the number of senders: latency and bandwidth."""
    extra: dict[str, float]
    """Seconds that a received byte costs more where it is copied to its place, or added."""


def measure() -> Machine:
    """What a step costs on the machine that this runs on."""
    sizes, ways = [1024 * 4**k for k in range(7)], ((1, ""), (2, ""), (4, ""), (4, "copy"), (4, "add"))
    by_rank = run_ranks(step_seconds, sizes, ways, ranks=4)
    slowest = [[max(column) for column in zip(*rows, strict=True)] for rows in zip(*by_rank, strict=True)]
    seconds = dict(zip(ways, slowest, strict=True))
    lines = {way: fit(sizes, row) for way, row in seconds.items()}
    plain = [senders for senders, then in ways if not then]
    return Machine(
        sizes,
        {senders: seconds[senders, ""] for senders in plain},
        {senders: lines[senders, ""] for senders in plain},
        {then: max(0.0, 1 / lines[4, then][1] - 1 / lines[4, ""][1]) for _, then in ways if then},
    )


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and bandwidth: the line with the least relative error."""
    x, y = torch.tensor(sizes, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    columns = torch.stack([torch.ones_like(x), x], dim=1) / y[:, None]
    start, slope = torch.linalg.lstsq(columns, torch.ones(len(x), 1, dtype=torch.float64)).solution.flatten()
    return start.item(), 1 / slope.item()


def step_seconds(
    sizes: Sequence[int], ways: Sequence[tuple[int, str]], in_a_row: int = 6, repeat: int = 8
) -> list[list[float]]:
    """On a rank: seconds of a step in each way, for each size; the best of some rounds, in turns.

    A way is how many ranks send at a time, and what is done with what arrives: "" for nothing; with "copy"
    and "add" it arrives in new memory, as in the learner's ring.
    """
    best = [[float("inf")] * len(sizes) for _ in ways]
    for i, num_bytes in enumerate(sizes):
        chunks = torch.ones(dist.get_world_size(), num_bytes // 4)
        spare = torch.empty_like(chunks[0])
        for _ in range(repeat):
            for row, (senders, then) in zip(best, ways, strict=True):
                dist.barrier()
                begin = time.perf_counter()
                for step in range(in_a_row):  # as in a ring, each sends another chunk
                    outgoing, place = chunks[-step % len(chunks)], chunks[(-step - 1) % len(chunks)]
                    incoming = torch.empty_like(place) if then else spare
                    _step(outgoing, place, incoming, senders, then)
                row[i] = min(row[i], (time.perf_counter() - begin) / in_a_row)
    return best


def _step(outgoing: Tensor, place: Tensor, incoming: Tensor, senders: int, then: str) -> None:
    """Send as in a ring, or from the first ranks to the next ones; what arrives goes to its place."""
    group = dist.group.WORLD
    rank, n = group.rank(), group.size()
    hop = 1 if senders == n else senders
    source = (rank - hop) % n
    messages = []
    if rank < senders:
        messages.append(dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + hop) % n))
    if source < senders:
        messages.append(dist.P2POp(dist.irecv, incoming, group=group, group_peer=source))
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    if then == "copy":
        place.copy_(incoming)
    if then == "add":
        place += incoming


def draw_lines(machine: Machine) -> None:
    """The seconds of a step by its bytes, and the straight lines through them."""
    _, axes = figure(figsize=(7, 3.2))
    for (senders, seconds), color in zip(machine.seconds.items(), (GREEN, BLUE, ORANGE), strict=True):
        latency, bandwidth = machine.lines[senders]
        axes.loglog(machine.sizes, [1e3 * s for s in seconds], "o", color=color)
        told = f"{senders} at a time: {1e3 * latency:.2f} ms, {bandwidth / 1e9:.2f} GB/s"
        line = [1e3 * (latency + size / bandwidth) for size in machine.sizes]
        axes.loglog(machine.sizes, line, color=color, label=told)
    axes.set(
        xlabel="bytes of a step", ylabel="milliseconds", title="A step on four ranks, of which some send"
    )
    axes.set_yscale("log", subs=[2, 5])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(loc="upper left")
    plt.tight_layout()
    plt.show()
    send = 1e9 / machine.lines[4][1]
    for then, extra in machine.extra.items():
        print(f"to {then:4} a received byte: {1e9 * extra:.2f} ns; to send it: {send:.2f} ns")


def draw_formula_and_clock(
    collective_time: Callable[..., float], mine: dict[str, Any], machine: Machine
) -> None:
    """The learner's formula as curves, the learner's collectives as points, on four ranks."""
    functions = measures.alike(mine)
    add, copy = machine.extra["add"], machine.extra["copy"]
    costs = {"all_reduce": (add + copy) / 2, "reduce_scatter": add, "all_gather": copy}

    def predicted(kind: str, size: float, gamma: bool = True) -> float:
        if kind == "broadcast":  # two trees of two ranks: one sender, then two
            return sum(collective_time(kind, size, 2, *machine.lines[senders]) for senders in (1, 2))
        extra = costs.get(kind, 0.0) if gamma else 0.0
        return collective_time(kind, size, 4, *machine.lines[4], seconds_per_byte=extra)

    sizes, many = [4096 * 8**k for k in range(5)], torch.logspace(12, 24, 60, base=2).tolist()
    everything = [*functions.values(), measures.nothing]
    rows = [run_ranks(measures.seconds_of, everything, size // 4, 8, ranks=4)[0] for size in sizes]
    shown, panels = figure(1, len(DRAWN), figsize=(9.5, 3.2), sharey=True)
    ratios = {}
    for i, kind in enumerate(functions):
        seconds = [row[i] - row[-1] for row in rows]
        ratios[kind] = seconds[-1] / predicted(kind, sizes[-1])
        if kind not in DRAWN:
            continue
        axes = panels[DRAWN.index(kind)]
        axes.loglog(many, [1e3 * predicted(kind, s) for s in many], color=BLUE, label="your formula")
        if kind in costs:
            without = [1e3 * predicted(kind, s, gamma=False) for s in many]
            axes.loglog(many, without, ":", color="black", label="without γ")
        axes.loglog(sizes, [1e3 * s for s in seconds], "o", color=ORANGE, label="the clock")
        axes.set(title=kind, xlabel="S, bytes", xticks=[1e4, 1e5, 1e6, 1e7])
    panels[0].set_ylabel("milliseconds")
    handles, labels = panels[DRAWN.index("all_reduce")].get_legend_handles_labels()
    shown.legend(handles, labels, loc="upper center", ncols=3)
    plt.tight_layout(rect=(0, 0, 1, 0.92))
    plt.show()
    print("clock / formula, for the largest tensor:")
    for kind, ratio in ratios.items():
        within = 1 / 1.6 < ratio < 1.6
        print(
            f"  {kind:15} {ratio:.2f}{'' if within else '   beyond 1.6: a busy machine? Run the cell again'}"
        )
