"""The pictures of the lesson, a line each to call."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import nanogpt.model
from grader import run_ranks
from lessons.fsdp import measures
from lessons.page.look import BLUE, GREEN, GREY, ORANGE, PINK, RANKS, SKY, WAITING, figure
from nanogpt.data import Tokens
from nanogpt.model import GPT, GPTConfig

PARTS = {"weights": BLUE, "gradients": ORANGE, "optimizer": GREEN}


def show_copies(config: GPTConfig, tokens: Tokens) -> None:
    """What two data-parallel ranks hold, and whether it is the same."""
    first, second = run_ranks(measures.held_by_data_parallel, config, tokens, ranks=2)
    print("           MB on rank 0   MB on rank 1   the same numbers")
    for name, (megabytes, total) in first.items():
        same = abs(total - second[name][1]) < 1e-9 * abs(total)
        print(f"{name:10} {megabytes:12.2f} {second[name][0]:14.2f}   {same}")


def draw_wall() -> None:
    """Bytes of three models on every rank, in mixed precision, and one GPU."""
    models = {"GPT-2 124M": 0.124, "GPT-2 XL 1.5B": 1.5, "7.5B": 7.5}
    _, axes = figure(figsize=(8.5, 2.4))
    for i, billions in enumerate(models.values()):
        left = 0.0
        for part, per_parameter in zip(PARTS, (2, 2, 12), strict=True):
            label = f"{part}, {per_parameter} bytes" if i == 0 else None
            axes.barh(i, per_parameter * billions, left=left, color=PARTS[part], label=label)
            left += per_parameter * billions
        axes.text(left, i, f"  {left:,.0f} GB", va="center")
    axes.axvline(80, color="black", linestyle="--")
    axes.text(81, 1.1, "one GPU of 80 GB", va="center")
    axes.set(yticks=range(len(models)), yticklabels=models, xlim=(0, 135))
    axes.set_xlabel("GB on every rank, however many ranks there are")
    axes.legend(loc="lower center", ncols=3, bbox_to_anchor=(0.45, 1.0))
    plt.tight_layout()
    plt.show()


def draw_stages(num_ranks: int = 4) -> None:
    """What lies on which rank in each stage: one row a rank, one cell a share."""
    _, panels = figure(1, 4, figsize=(9.5, 2.2))
    titles = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    for stage, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        for column, (name, cut_from) in enumerate(zip(PARTS, (3, 2, 1), strict=True)):
            x = column * (num_ranks + 1.5)
            axes.text(x + num_ranks / 2, 1.0, name, ha="center", fontsize=8)
            for r in range(num_ranks):
                for share in range(num_ranks):
                    color = PARTS[name] if stage < cut_from or share == r else "white"
                    place = (x + share, -r)
                    axes.add_patch(plt.Rectangle(place, 0.9, 0.8, facecolor=color, edgecolor="gray", lw=0.6))
        for r in range(num_ranks if stage == 0 else 0):
            axes.text(-0.5, -r + 0.4, f"rank {r}", ha="right", va="center", fontsize=9)
        axes.set(xlim=(-0.5, 3 * num_ranks + 3), ylim=(-num_ranks + 0.8, 1.6), title=title)
        axes.axis("off")
    plt.tight_layout()
    plt.show()


def show_stages(state_bytes_per_rank: Callable, communication_elements: Callable) -> None:
    """The learner's formulas for a model of 7.5 billion parameters."""
    size = 7_500_000_000
    print("7.5 billion parameters, GB on each rank             elements that a rank sends in a step, in P")
    print("ranks   stage 0   stage 1   stage 2   stage 3       stage 0   stage 1   stage 2   stage 3")
    for n in (1, 4, 64, 1024):
        gigabytes = [state_bytes_per_rank(size, n, stage)["total"] / 1e9 for stage in range(4)]
        sent = [sum(communication_elements(size, n, stage).values()) / size for stage in range(4)]
        print(f"{n:5} ", *(f"{g:9.2f}" for g in gigabytes), "   ", *(f"{s:9.2f}" for s in sent))


def draw_cuts() -> None:
    """Two ways to cut five parameters for three ranks."""
    sizes, owners = [6, 3, 4, 1, 2], [0, 1, 2, 1, 1]
    shown, panels = figure(2, 1, figsize=(9, 2.1))
    for axes, way in zip(
        panels, ("whole parameters have owners", "every parameter in three pieces"), strict=True
    ):
        x = 0.0
        for size, owner in zip(sizes, owners, strict=True):
            for i in range(size):
                rank = owner if way.startswith("whole") else i // -(-size // 3)
                axes.add_patch(plt.Rectangle((x + i, 0), 1, 1, facecolor=RANKS[rank], edgecolor="white"))
            axes.add_patch(plt.Rectangle((x, 0), size, 1, fill=False, edgecolor="black", lw=1.5))
            x += size + 0.5
        axes.text(x, 0.5, way, va="center")
        axes.set(xlim=(0, 30), ylim=(-0.1, 1.1))
        axes.axis("off")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in RANKS[:3]]
    shown.legend(
        handles, ["rank 0", "rank 1", "rank 2"], loc="upper left", ncols=3, bbox_to_anchor=(0.1, 1.02)
    )
    plt.show()


def draw_block() -> None:
    """What happens to one block's weights in a step."""
    steps = [
        ("all-gather", PINK),
        ("forward", GREEN),
        ("free", GREY),
        ("...", "white"),
        ("all-gather", PINK),
        ("backward", SKY),
        ("reduce-scatter", ORANGE),
        ("free", GREY),
    ]
    _, axes = figure(figsize=(9.5, 1.6))
    for i, (told, color) in enumerate(steps):
        edge = "white" if told == "..." else "black"
        axes.add_patch(plt.Rectangle((i, 0), 0.95, 0.5, facecolor=color, edgecolor=edge))
        axes.text(i + 0.47, 0.25, told, ha="center", va="center", fontsize=8)
    for a, b in ((0, 3), (4, 8)):
        axes.plot([a + 0.9, b - 0.3], [0.7, 0.7], color="black", linewidth=4, solid_capstyle="butt")
        axes.text((a + b) / 2 + 0.3, 0.8, "the block is whole", ha="center")
    axes.set(xlim=(-0.1, 8.1), ylim=(-0.1, 1.15))
    axes.axis("off")
    plt.show()


def draw_unit(num_ranks: int = 2) -> None:
    """The parameters of a block end to end, cut for the ranks; what a rank keeps, and what is whole."""
    parts = [("ln_1", 1.0), ("c_attn", 5.0), ("c_proj", 2.5), ("ln_2", 1.0), ("mlp", 6.3)]
    total = sum(size for _, size in parts)
    piece = -(-total // num_ranks)
    _, axes = figure(figsize=(9.5, 2.1))
    x = 0.0
    for name, size in parts:
        axes.add_patch(plt.Rectangle((x, 1.2), size, 0.7, facecolor=SKY, edgecolor="black"))
        axes.text(x + size / 2, 1.55, name, ha="center", va="center", fontsize=8)
        x += size
    axes.add_patch(plt.Rectangle((x, 1.2), piece * num_ranks - x, 0.7, facecolor="white", edgecolor="grey"))
    for r in range(num_ranks):
        axes.add_patch(plt.Rectangle((r * piece, 0), piece, 0.7, facecolor=RANKS[r], edgecolor="black"))
        axes.text((r + 0.5) * piece, 0.35, f"piece of rank {r}", ha="center", va="center", fontsize=9)
    x = 0.0
    for _, size in parts:  # a shard is what of a parameter lies in a piece
        x += size
        axes.plot([x, x], [0, 0.7], color="black", linewidth=0.8, linestyle=":")
    right = piece * num_ranks + 0.3
    axes.text(right, 1.55, "whole: one buffer,\nfrom gather() to free()", va="center", fontsize=9)
    axes.text(right, 0.35, "always: this rank's shards", va="center", fontsize=9)
    axes.set(xlim=(-0.1, right + 5), ylim=(-0.1, 2.0))
    axes.axis("off")
    plt.show()


def draw_ahead() -> None:
    """Forward of four blocks: each gather when it is due, and one block ahead."""
    _, panels = figure(1, 2, figsize=(9.5, 1.9))
    for axes, ahead in zip(panels, (False, True), strict=True):
        wire, processor = 0.0, 0.0
        for block in range(4):
            start = wire if ahead else processor
            wire = start + 1.0
            begins = max(wire, processor)
            for row, (a, width, color, told) in enumerate(
                ((begins, 1.3, GREEN, f"block {block}"), (start, 1.0, PINK, f"gather\n{block}"))
            ):
                axes.add_patch(plt.Rectangle((a, -row), width, 0.8, facecolor=color, edgecolor="black"))
                axes.text(a + width / 2, 0.4 - row, told, ha="center", va="center", fontsize=7.5)
            if ahead:
                wire = max(wire, begins)  # one block ahead, no more: it starts when this one computes
            processor = begins + 1.3
        axes.text(-0.2, 0.4, "processor", ha="right", va="center", fontsize=8)
        axes.text(-0.2, -0.6, "wire", ha="right", va="center", fontsize=8)
        axes.set(xlim=(-2, 9.6), ylim=(-1.2, 1.2), title="one block ahead" if ahead else "when it is due")
        axes.axis("off")
    plt.tight_layout()
    plt.show()


def draw_prefetch(shard: Any) -> None:
    """A step of two ranks on a wire of 1 Gbit/s, without and with prefetch, and what each waits."""
    ways = {"each gather when it is due": shard, "one block ahead": partial(shard, prefetch=True)}
    steps = run_ranks(measures.steps_in_time, ways, 4, ranks=2)[0]
    _, axes = figure(figsize=(9.5, 3.2))
    draw_steps_into(axes, steps)
    plt.tight_layout()
    plt.show()
    print("milliseconds that rank 0 waits for the wire, in the fastest of five steps")
    print("                               gathers   reduce-scatters   of a step of")
    for how, step in steps.items():
        gathers, reduces = (sum(t for k, t in step["exposed"] if k == kind) for kind in WIRE_KINDS)
        print(f"{how:28} {gathers:9.0f} {reduces:17.0f} {step['end']:14.0f}")


WIRE_KINDS = {"all_gather": PINK, "reduce_scatter": ORANGE}


def draw_steps_into(axes: plt.Axes, steps: dict[str, dict[str, Any]]) -> None:
    """For each way, what its rank computes and waits for, and what travels meanwhile."""
    for i, (how, step) in enumerate(steps.items()):
        y = 2.6 * i
        for a, b, color in ((0.0, step["forward"], GREEN), (step["forward"], step["end"], SKY)):
            axes.barh(y, b - a, left=a, color=color, edgecolor="black")
        for _, a, b in step["waits"]:
            axes.barh(y, b - a, left=a, color=WAITING)
        free = 0.0
        for kind, start, end in step["sent"]:
            a = max(start, free)  # the wire carries one message at a time
            axes.barh(
                y + 0.9, end - a, left=a, color=WIRE_KINDS.get(kind, "black"), edgecolor="white", lw=0.3
            )
            free = end
        axes.text(0, y - 0.5, f"{how}: {step['end']:.0f} ms", va="bottom")
    axes.set(yticks=[], xlabel="milliseconds", ylim=(2.6 * len(steps) - 0.9, -1.3))
    colors = {"forward": GREEN, "backward": SKY, "waiting": WAITING, "gather": PINK, "reduce": ORANGE}
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    axes.legend(handles, colors, loc="lower center", ncols=5, bbox_to_anchor=(0.5, 1.0), columnspacing=0.8)


def show_held_and_sent(
    wrap: Any, formulas: tuple[Callable, Callable], config: GPTConfig, tokens: Tokens
) -> None:
    """Bytes and elements of each way, measured beside predicted. A difference without a name is an error."""
    state_bytes, elements = formulas
    size = sum(p.numel() for p in GPT(config).parameters())
    outside = size - sum(p.numel() for p in GPT(config).transformer.h.parameters())
    scale = {"weights": 4 / 2, "gradients": 4 / 2, "optimizer": 8 / 12}  # fp32, and no copy of the weights
    print(f"P = {size:,} in fp32. On rank 0: MB measured (predicted), M elements recorded (predicted)")
    print("ranks                      weights        gradients        optimizer             sent")
    for n in (2, 4):
        for stage, how in enumerate(measures.WAYS):
            found = run_ranks(measures.held_and_sent, wrap, how, config, tokens, ranks=n)[0]
            predicted = {part: scale[part] * state_bytes(size, n, stage)[part] for part in scale}
            predicted["sent"] = sum(elements(size, n, stage).values())
            cells = [f"{found[k] / 1e6:6.2f} ({predicted[k] / 1e6:5.2f})" for k in predicted]
            print(f"{n}   {how:15}", "  ".join(cells))
            named = dict.fromkeys(predicted, 0.0)
            if how == "data parallel":
                named["weights"] = 4 * size  # DDP's buckets
            if how == "ZeRO-3":
                named["sent"] = -outside * (n - 1) / n  # gathered once
            for k in predicted:
                assert abs(found[k] - predicted[k] - named[k]) < 0.01 * predicted[k], (n, how, k)


def show_all_ways() -> None:
    """The memory table of the whole course, as it was measured."""
    from IPython.display import Image, display

    course = Path(nanogpt.model.__file__).parents[1]
    display(Image(course / "infra" / "memory_table" / "memory_table.png", width=900))


def draw_alive(ways: dict[str, tuple[Any, int]]) -> None:
    """MB alive over one step of a deep model: each way is what shards it, and on how many ranks."""
    _, axes = figure(figsize=(9, 3.4))
    draw_alive_into(
        axes,
        {how: run_ranks(measures.alive_over_step, shard, ranks=n)[0] for how, (shard, n) in ways.items()},
    )
    plt.tight_layout()
    plt.show()


def draw_alive_into(axes: plt.Axes, curves: dict[str, list[float]]) -> None:
    """Curves of bytes alive, from the first block's forward to its backward."""
    looks = ((BLUE, 5), (ORANGE, 1.5), (GREEN, 1.5))  # a later one may lie on the first
    for (how, megabytes), (color, width) in zip(curves.items(), looks, strict=False):
        axes.plot(megabytes, "o-", color=color, label=how, linewidth=width, markersize=width + 2)
    whole = sum(p.numel() for p in GPT(measures.DEEP).parameters()) * 4 / 1e6
    axes.axhline(whole, color="black", linestyle=":", label="all weights")
    axes.axvline(11.5, color="gray", linewidth=0.8)
    axes.set_xticks(range(24), [*range(12), *reversed(range(12))])
    axes.set(xlabel="block at work: forward 0 to 11, backward 11 to 0", ylabel="MB alive on rank 0", ylim=0)
    axes.legend(loc="best")
