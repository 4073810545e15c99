"""The pictures of the lesson, a line each to call."""

from collections.abc import Callable, Mapping
from typing import Any

import matplotlib.pyplot as plt
from torch import nn

from grader import run_ranks
from lessons.page.look import BLUE, GREEN, GREY, RANKS, figure
from lessons.sequence_parallel import answers, measures
from lessons.sequence_parallel.measures import CONFIG, LENGTH, ROWS, WIDTH, S


def draw_floor() -> None:
    """What a tensor-parallel block keeps on each rank: what the ranks divide, and what they do not."""
    kept = {
        n: run_ranks(measures.kept_with_whole_tokens, measures.WITH_DROPOUT, ranks=n)[0] / S
        for n in (1, 2, 4)
    }
    whole = 6 + 4 / WIDTH  # norms' inputs and outputs, two masks; a mean and a deviation a token and norm
    _, axes = figure(figsize=(7.5, 3.2))
    axes.bar(range(4), [12 / n for n in (1, 2, 4, 8)], bottom=whole, color=BLUE, label="divided by the ranks")
    axes.bar(range(4), [whole] * 4, color=GREY, label="whole on every rank")
    axes.plot(range(3), kept.values(), "D", color="black", markerfacecolor="white", label="measured")
    axes.set_xticks(range(4), ["1 rank", "2 ranks", "4 ranks", "8 ranks"])
    axes.set(ylabel="kept of one block, in $S$", title="Tensor parallelism: the floor is not divided")
    axes.legend(loc="upper right")
    plt.tight_layout()
    plt.show()
    for n, measured in kept.items():
        print(f"n = {n}: {measured:5.2f} S a block kept on each rank, of them {whole:.2f} S the same on all")
    print(f"n = 8: by the same count, {whole / (whole + 12 / 8):.0%} are the same on all")


def draw_block() -> None:
    """A block on two ranks: what is cut by tokens, what by features, and what travels in between."""
    _, axes = figure(figsize=(11, 3.0))
    places = [
        ("x", "tokens"), ("norm", "tokens"), ("gather", ""), ("c_attn", "features"), ("core", "features"),
        ("c_proj,\nreduce-\nscatter", ""), ("dropout,\n+", "tokens"), ("norm", "tokens"), ("gather", ""),
        ("c_fc", "features"), ("GELU", "features"), ("c_proj,\nreduce-\nscatter", ""),
        ("dropout,\n+", "tokens"),
    ]  # fmt: skip
    for place, (name, cut) in enumerate(places):
        for rank in (0, 1):
            if cut == "tokens":
                corner, size = (place + 0.1, 0.5 - 0.5 * rank), (0.8, 0.5)
            else:
                corner, size = (place + 0.1 + 0.4 * rank, 0), (0.4, 1)
            if cut:
                axes.add_patch(plt.Rectangle(corner, *size, facecolor=RANKS[rank], edgecolor="black"))
        if not cut:
            axes.annotate("", (place + 0.9, 0.5), (place + 0.1, 0.5), arrowprops={"arrowstyle": "->"})
        axes.text(place + 0.5, -0.12, name, ha="center", va="top")
    axes.text(0.1, 1.2, "blue: rank 0, orange: rank 1; rows are tokens, columns are features")
    axes.set(xlim=(0, len(places)), ylim=(-0.75, 1.5))
    axes.axis("off")
    plt.tight_layout()
    plt.show()


def show_layers(**layers: Callable) -> None:
    """What a layer keeps of its input and what it sends in a step, on two ranks."""
    for told, layer in layers.items():
        found = run_ranks(measures.costs_of_a_layer, layer, ranks=2)[0]
        sent = (found["forward"] + found["backward"]) / (S / 2)
        print(f"{told:16} keeps {found['kept'] / S:.2f} S, sends {sent:.0f} units in a step")


def draw_shares(cut: Any) -> None:
    """Which share of the dense gradient each of two ranks has, without the sum over ranks and with it."""
    _, panels = figure(1, 2, figsize=(10, 3.3), sharey=True)
    for axes, summed in zip(panels, (False, True), strict=True):
        shares = measures.shares_of_gradients(cut, summed)
        for i, (name, (zero, one)) in enumerate(shares.items()):
            if summed:
                axes.barh([i - 0.2, i + 0.2], [zero, one], height=0.38, color=RANKS[:2])
            else:
                axes.barh(i, zero, color=RANKS[0])
                axes.barh(i, one, left=zero, color=RANKS[1])
                axes.text(-0.03, i, name, ha="right", va="center")
        axes.axvline(1.0, color="black", linestyle=":")
        axes.set(yticks=[], xlabel="share of the dense gradient", xlim=(0, 1.15))
        axes.set_title("Your block" if summed else "Without hooks: parts, put end to end")
        right = [abs((min(each) if summed else sum(each)) - 1) < 1e-3 for each in shares.values()]
        whose = "with hooks, each rank's gradient" if summed else "without hooks, the sum of both gradients"
        print(f"{whose} is the dense one for {sum(right)} of {len(right)} parameters")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in RANKS[:2]]
    panels[1].legend(handles, ["rank 0", "rank 1"], loc="center left", bbox_to_anchor=(1.0, 0.5))
    panels[0].invert_yaxis()
    plt.tight_layout()
    plt.show()


def draw_kept(cut: Any, predict: Callable[..., int]) -> None:
    """What a block keeps on each rank: predicted for three schemes, measured for two."""
    ranks, measured = (1, 2, 4, 8), {"tensor_parallel": {}, "gather_again": {}}
    for n in ranks[:3]:
        measured["tensor_parallel"][n] = run_ranks(measures.kept_with_whole_tokens, CONFIG, ranks=n)[0]
        measured["gather_again"][n] = run_ranks(measures.costs_of_a_block, cut, ranks=n)[0]["kept"]
    _, axes = figure(figsize=(9, 3.3))
    for scheme, color, told in (
        ("tensor_parallel", GREY, "tensor parallel"),
        ("sequence_parallel", GREEN, "sequence parallel,\ngathered inputs kept"),
        ("gather_again", BLUE, "sequence parallel,\ngathered again"),
    ):
        axes.plot(
            ranks, [predict(CONFIG, ROWS, LENGTH, n, scheme) / S for n in ranks], color=color, label=told
        )
    for found in measured.values():
        axes.plot(found.keys(), [size / S for size in found.values()], "D", color="black", mfc="white")
    axes.plot([], [], "D", color="black", mfc="white", label="measured")
    axes.set(xlabel="ranks", ylabel="kept of one block, in $S$", ylim=0, xscale="log")
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.minorticks_off()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    plt.tight_layout()
    plt.show()
    print(f"{'bytes kept of one block':26}{'n':>3}{'predicted':>12}{'measured':>12}")
    for scheme, found in measured.items():
        for n, size in found.items():
            print(f"{scheme:26}{n:3}{predict(CONFIG, ROWS, LENGTH, n, scheme):12,}{size:12,}")


def show_wire(**ways: Any) -> None:
    """What a step of the whole model sends, in units of (n-1)/n S, and how many times the first way."""
    print(f"{'in (n-1)/n·S':32}{'n':>3}{'forward':>10}{'backward':>10}{'times':>8}")
    for n in (2, 4):
        unit, first = (n - 1) / n * S, 0.0
        for name, parallelize in ways.items():
            found = run_ranks(measures.wire_of_a_step, parallelize, ranks=n)[0]
            forward, backward = found["forward"] / unit, found["backward"] / unit
            first = first or forward + backward
            print(f"{name:32}{n:3}{forward:10.2f}{backward:10.2f}{(forward + backward) / first:8.2f}")


def draw_published() -> None:
    """GPT-3 by the paper's formulas: what 96 layers keep on each of 8 ranks."""
    _, axes = figure(figsize=(8, 2.8))
    found = answers.published_bytes(s=2048, b=1, h=12288, a=96, n=8)
    for i, num_bytes in enumerate(found.values()):
        size = 96 * num_bytes / 1e9
        axes.barh(i, size, color=(GREY, BLUE)[i % 2])
        axes.text(size, i, f" {size:.1f} GB", va="center")
    axes.set_yticks(range(len(found)), found)
    axes.set_xlabel("GB kept on each rank")
    axes.set_title("GPT-3 175B: all 96 layers, one sequence of 2048 tokens, 8 ranks")
    axes.invert_yaxis()
    plt.tight_layout()
    plt.show()


def show_fine_tuning(layer: type[nn.Module]) -> None:
    """The loss of two ranks that fine-tune an adapter after a prompt, and what each has learned."""
    for rank, (first, last, norm) in enumerate(run_ranks(measures.fine_tune, layer, ranks=2)):
        told = "is zero, as before training" if norm == 0 else "is not zero"
        print(f"rank {rank}: the loss went from {first:.1f} to {last:.1f}, and `up` {told}")


def draw_costs(found: Mapping[str, Mapping[str, float]], num_ranks: int) -> None:
    """Left what a block keeps, right what it sends, for each of several blocks."""
    _, (left, right) = figure(1, 2, figsize=(9.5, 2.4), sharey=True)
    unit = (num_ranks - 1) / num_ranks * S
    for i, cost in enumerate(found.values()):
        left.barh(i, cost["kept"] / S, color=(BLUE, GREY)[i])
        left.text(cost["kept"] / S, i, f" {cost['kept'] / S:.2f}", va="center")
        done = 0.0
        for way, shade in (("forward", 1.0), ("backward", 0.6)):
            size = cost[way] / unit
            right.barh(i, size, left=done, color=(BLUE, GREY)[i], alpha=shade, edgecolor="black")
            right.text(done + size / 2, i, f"{way}\n{size:.2f}", ha="center", va="center")
            done += size
    left.set_yticks(range(len(found)), found)
    left.set(xlabel="kept, in $S$", title="What autograd keeps")
    right.set(xlabel="sent in a step, in units of (n-1)/n $S$", title="What a rank sends")
    left.margins(x=0.15)
    left.invert_yaxis()
    plt.tight_layout()
    plt.show()
