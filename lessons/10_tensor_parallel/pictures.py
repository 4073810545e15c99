"""The pictures of the lesson, a line each to call."""

from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from grader import run_ranks
from lessons.page.look import BLUE, GREEN, GREY, ORANGE, RANKS, RED, figure
from lessons.tensor_parallel import answers, measures
from nanogpt.model import GPT, MLP, GPTConfig

TRAINED = {"GPT-2 small": 768, "GPT-2 XL": 1600, "GPT-3 175B": 12288, "MT-NLG 530B": 20480}


def draw_wall() -> None:
    """The bytes of one block over its width, by formula and measured, and one GPU."""
    measured = {width: measures.block_bytes(width) for width in (128, 256, 512)}
    widths = [2**k for k in range(7, 16)]
    _, axes = figure(figsize=(8.5, 3.6))
    axes.loglog(widths, [192 * h**2 / 1e9 for h in widths], color=BLUE, label="$16 · 12h^2$ bytes")
    axes.loglog(
        widths, [48 * h**2 / 1e9 for h in widths], ":", color=BLUE, label="$4 · 12h^2$: FSDP, while it runs"
    )
    found = [state / 1e9 for state, _ in measured.values()]
    axes.loglog(list(measured), found, "o", color="black", label="measured on nanoGPT's block")
    for name, h in TRAINED.items():
        size = 192 * h**2 / 1e9
        axes.plot(h, size, "o", color=BLUE)
        place = (-7, 6) if size > 50 else (-7, 3)  # above the line of a GPU
        axes.annotate(name, (h, size), place, textcoords="offset points", ha="right", fontsize=9)
    axes.axhline(80, color=RED, linestyle="--")
    axes.text(130, 100, "one GPU of 80 GB", color=RED)
    axes.set(
        xlabel="width h",
        ylabel="GB",
        ylim=(1e-3, 1e3),
        title="One block: weights, gradients, optimizer state",
    )
    axes.legend(loc="lower right")
    plt.show()
    for h, (state, kept) in measured.items():
        assert abs(state / (192 * h**2) - 1) < 0.02
        formula = f"state {state / 1e6:5.2f} MB (formula {192 * h**2 / 1e6:5.2f})"
        print(f"h = {h}: {formula}, kept for the backward of one sequence {kept / 1e6:4.2f} MB")


def draw_mlp() -> None:
    """An MLP by columns and then by rows, from the whole X to the whole Y."""
    _, axes = figure(figsize=(10, 3))
    _draw_matrix(axes, (0, 0.3, 0.7, 1.4), "rows", "X\n(b·s, h)", [GREEN])
    _draw_matrix(axes, (1.1, 0.65, 1.7, 0.7), "columns", "c_fc: A (h, 4h)\ncut by columns")
    _draw_matrix(axes, (3.6, 0.3, 1.7, 1.4), "columns", "hidden\n(b·s, 4h), cut")
    _draw_matrix(axes, (5.8, 0.1, 0.7, 1.8), "rows", "c_proj: B\n(4h, h)\ncut by rows")
    _draw_matrix(axes, (7.0, 0.3, 0.7, 1.4), "rows", "rank 0's\npartial sum", [BLUE])
    _draw_matrix(axes, (8.4, 0.3, 0.7, 1.4), "rows", "rank 1's\npartial sum", [ORANGE])
    _draw_matrix(axes, (10.4, 0.3, 0.7, 1.4), "rows", "Y\n(b·s, h)", [GREEN])
    for x, sign in ((0.9, "×"), (5.55, "×"), (6.75, "="), (8.05, "+")):
        axes.text(x, 1.0, sign, fontsize=14, ha="center", va="center")
    for left, right, told in ((2.9, 3.5, "GELU"), (9.3, 10.25, "all-reduce")):
        axes.annotate("", (right, 1.0), (left, 1.0), arrowprops={"arrowstyle": "->"})
        axes.text((left + right) / 2, 1.1, told, ha="center")
    axes.set_title("Blue is on rank 0, orange on rank 1. Green is the same on both.")
    axes.set(xlim=(-0.2, 11.2), ylim=(-0.65, 2.1))
    axes.axis("off")
    plt.show()


def _draw_matrix(
    axes: plt.Axes, place: tuple[float, ...], cut: str, title: str, colors: Any = (BLUE, ORANGE)
) -> None:
    """A rectangle at (left, low, width, height) with a part for each colour: side by side, or stacked."""
    left, low, width, height = place
    n = len(colors)
    for i, color in enumerate(colors):
        if cut == "columns":
            corner, size = (left + i * width / n, low), (width / n, height)
        else:
            corner, size = (left, low + height - (i + 1) * height / n), (width, height / n)
        axes.add_patch(plt.Rectangle(corner, *size, facecolor=color, edgecolor="black", alpha=0.75))
    axes.text(left + width / 2, low - 0.12, title, ha="center", va="top", fontsize=9)


def draw_tax(overhead: Any) -> None:
    """Communication over compute, by the width of the model, as the learner's function has it."""
    widths = [512 * 2 ** (k / 2) for k in range(12)]
    _, axes = figure(figsize=(8.5, 3.2))
    for told, speed, color in (
        ("network, 50 GB/s", answers.NETWORK, ORANGE),
        ("NVLink, 450 GB/s", answers.NVLINK, BLUE),
    ):
        for n, line in ((8, "-"), (2, ":")):
            percent = [100 * overhead(h, n, answers.FLOPS, speed) for h in widths]
            axes.loglog(widths, percent, line, color=color, label=f"{told}, {n} ranks")
    guessed = [
        (answers.GPT_2, answers.NVLINK),
        (answers.GPT_3, answers.NVLINK),
        (answers.GPT_3, answers.NETWORK),
    ]
    for h, speed in guessed:
        axes.plot(h, 100 * answers.tax(h, 8, speed), "o", color=BLUE if speed == answers.NVLINK else ORANGE)
    axes.plot([], [], "o", color="grey", label="the widths that you guessed")
    axes.axhline(100, color="black", linewidth=0.8)
    marked = list(TRAINED.items())[:3]
    axes.set_xticks([h for _, h in marked], [f"{name}\nh = {h:,}" for name, h in marked])
    axes.set_xticks([], minor=True)
    axes.set_yticks([1, 10, 100, 1000], ["1%", "10%", "100%: as long\nas it computes", "1000%"])
    axes.set_title("Time to communicate, in percent of the time to compute")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    plt.tight_layout()
    plt.show()


def show_overheads(parallelize: Any, overhead: Any) -> None:
    """Blocks of several widths on two ranks: how long they wait for an imitated wire, over computing."""
    wire, found = run_ranks(measures.overheads, parallelize, ranks=2)[0]
    widest = found[-1][0]
    print(f"a rank computes {widest / 1e9:.1f} GFLOP/s in the widest blocks, and sends {wire / 1e6:.0f} MB/s")
    print("width   predicted   with its own FLOP/s   measured")
    for width, (own, seen) in zip(measures.WIDTHS, found, strict=True):
        told = [overhead(width, 2, each, wire, 4) for each in (widest, own)]
        print(f"{width:5} {told[0]:10.0%} {told[1]:20.0%} {seen:12.0%}")


def draw_twins() -> None:
    """What two ranks with the same seed have learned, by how their slices were drawn."""
    _, panels = figure(1, 4, figsize=(9.5, 1.9), gridspec_kw={"wspace": 0.15})
    for place, (own, told) in enumerate(
        ((True, "each draws its slice"), (False, "each keeps a slice of the whole"))
    ):
        (first, loss), (second, _) = run_ranks(measures.trained_slice, own, ranks=2)
        for r, weight in enumerate((first, second)):
            axes = panels[2 * place + r]
            axes.imshow(weight, cmap="PuOr", vmin=-0.8, vmax=0.8)
            axes.set(xticks=[], yticks=[], xlabel=f"rank {r}")
            if r == 0:
                axes.set_title(told)
        same = torch.equal(first, second)
        print(f"{told}: after 50 steps a loss of {loss:.2f}; the same features, bit for bit: {same}")
    plt.show()


def show_mlp(cut: Any, config: GPTConfig, num_ranks: int = 4) -> None:
    """What lies on each rank of a cut MLP, and whether its output is the dense one."""
    torch.manual_seed(0)
    dense, x = MLP(config), torch.randn(2, 8, config.n_embd)
    found = run_ranks(measures.mlp_on_a_rank, cut, config, x, ranks=num_ranks)
    for name, p in dense.named_parameters():
        print(f"{name:14} dense {list(p.shape)!s:12} on each of {num_ranks} ranks {found[0]['shapes'][name]}")
    for r, each in enumerate(found):
        difference = (each["output"] - dense(x)).abs().max().item()
        print(f"rank {r}: differs from the dense output by less than 1e-6: {difference < 1e-6}")


def draw_fused(heads: int = 4, ranks: int = 2) -> None:
    """The rows of the fused c_attn, cut as one matrix and cut by heads."""
    _, panels = figure(2, 1, figsize=(9, 2.8))
    owners = {
        "Cut as one matrix: rank 0 has all queries and half of the keys": lambda i: i * ranks // (3 * heads),
        "Cut by heads: each rank has its heads' queries, keys and values": lambda i: (
            i % heads * ranks // heads
        ),
    }
    for axes, (title, owner) in zip(panels, owners.items(), strict=True):
        for i in range(3 * heads):
            color = (BLUE, ORANGE)[owner(i)]
            axes.add_patch(plt.Rectangle((i, 0), 0.94, 0.8, facecolor=color, edgecolor="black", alpha=0.75))
            name = f"${'qkv'[i // heads]}_{i % heads}$"
            axes.text(i + 0.47, 0.4, name, ha="center", va="center", fontsize=12)
        axes.set(title=title, xlim=(-0.1, 3 * heads), ylim=(-0.1, 0.9))
        axes.axis("off")
    plt.tight_layout()
    plt.show()


def draw_grouped(heads: int = 8) -> None:
    """Query heads above the key and value heads that they read, on four ranks: a head each, and copies."""
    _, panels = figure(1, 2, figsize=(10, 2.6))
    for axes, kv_heads in zip(panels, (4, 2), strict=True):
        for i in range(heads):
            rank = i * 4 // heads
            _draw_head(axes, (i, 1.5, 0.92), RANKS[rank], f"$q_{i}$")
            axes.plot([i + 0.46, (rank + 0.5) * heads / 4 - 0.04], [1.5, 0.8], color=GREY, zorder=0)
        for rank in range(4):
            head = rank * kv_heads // 4
            place = (rank * heads / 4, 0, heads / 4 - 0.08)
            _draw_head(axes, place, RANKS[rank], f"$k_{head} \\; v_{head}$")
        told = "one on each rank" if kv_heads == 4 else "each is copied to two ranks"
        axes.set(title=f"4 ranks, {kv_heads} key heads: {told}", xlim=(-0.1, heads), ylim=(-0.1, 2.4))
        axes.axis("off")
    names = [plt.Rectangle((0, 0), 1, 1, color=color, alpha=0.75) for color in RANKS]
    panels[0].legend(names, [f"rank {r}" for r in range(4)], ncols=4, loc="upper left", bbox_to_anchor=(0, 0))
    plt.tight_layout()
    plt.show()


def _draw_head(axes: plt.Axes, place: tuple[float, float, float], color: str, name: str) -> None:
    left, bottom, width = place
    axes.add_patch(plt.Rectangle((left, bottom), width, 0.8, facecolor=color, edgecolor="black", alpha=0.75))
    axes.text(left + width / 2, bottom + 0.4, name, ha="center", va="center", fontsize=11)


def steps_by_size(parallelize: Any, config: GPTConfig, batch: tuple[Tensor, Tensor]) -> dict[int, dict]:
    """Number of ranks → what rank 0 sent, kept and computed in a step."""
    return {n: run_ranks(measures.step, parallelize, config, *batch, ranks=n)[0] for n in (1, 2, 4)}


def show_sent(step: dict[str, Any], config: GPTConfig, num_tokens: int) -> None:
    """What two ranks handed to their all-reduces in a step, beside the prediction."""
    large, each_way = num_tokens * config.n_embd, 2 * config.n_layer + 1
    rows = [
        ("forward, tensors of b·s·h", each_way, step["forward"].count(large)),
        ("forward, vectors of b·s", 3, step["forward"].count(num_tokens)),
        ("backward, tensors of b·s·h", each_way, step["backward"].count(large)),
        (
            "all bytes, fp32",
            4 * (2 * each_way * large + 3 * num_tokens),
            4 * sum(step["forward"] + step["backward"]),
        ),
    ]
    print(f"{'two ranks, one step':28}{'predicted':>12}{'recorded':>12}")
    for told, predicted, recorded in rows:
        print(f"{told:28}{predicted:12,}{recorded:12,}")
        assert recorded == predicted, told
    logits = 4 * num_tokens * config.vocab_size / 1e6
    print(f"\nThe logits are {logits:.1f} MB. The loss sent {4 * 3 * num_tokens / 1e3:.1f} kB instead.")


def draw_shares(by_size: dict[int, dict], config: GPTConfig) -> None:
    """Parameters, bytes kept and FLOPs of a rank, for each number of ranks."""
    h, layers = config.n_embd, config.n_layer
    can_be_cut = 12 * layers * h**2 + config.vocab_size * h + layers * 7 * h
    rest = sum(p.numel() for p in GPT(config).parameters()) - can_be_cut
    _, (left, middle, right) = figure(1, 3, figsize=(9.5, 3.2))
    one = by_size[1]
    for place, (n, seen) in enumerate(by_size.items()):
        total, predicted = seen["cut"] + seen["replicated"], can_be_cut // n + rest
        left.bar(place, (total - rest) / 1e6, color=BLUE)
        left.bar(place, rest / 1e6, bottom=(total - rest) / 1e6, color=GREEN)
        middle.bar(place, seen["kept"] / 1e6, color=BLUE)
        right.bar(place, seen["flops"] / 1e9, color=BLUE)
        assert total == predicted and seen["flops"] * n == one["flops"]
        told = f"{total:9,} parameters a rank, predicted {predicted:9,}"
        print(f"n = {n}: {told}; {seen['flops'] / 1e9:.3f} GFLOPs forward")
    for axes, whole, title in (
        (left, one["cut"] + one["replicated"], "Millions of parameters"),
        (middle, one["kept"], "MB kept for backward"),
        (right, one["flops"] / 1e3, "GFLOPs of the forward"),
    ):
        shares = [whole / n / 1e6 for n in by_size]
        axes.plot(range(3), shares, "D", color="black", markerfacecolor="none", label="1/n of one rank")
        axes.set_xticks(range(3), [f"{n} rank{'s' * (n > 1)}" for n in by_size])
        axes.set(title=title)
    left.set(xlabel="green: the same on every rank")
    right.legend()
    plt.tight_layout()
    plt.show()


def draw_drift(attention: Any) -> None:
    """How far two ranks' copies of the same weights are apart, step by step."""
    zero, one = run_ranks(measures.copies, attention, ranks=2)
    apart = [
        [(a - b).abs().max().item() for a, b in zip(*pair, strict=True)]
        for pair in zip(zero, one, strict=True)
    ]
    _, axes = figure(figsize=(7, 2.8))
    steps = range(1, len(apart) + 1)
    axes.plot(steps, [norm for _, norm in apart], "o-", color=RED, markersize=8, label="the norm below")
    axes.plot(steps, [shared for shared, _ in apart], "s-", color=BLUE, markersize=4, label="key_value")
    axes.set(xlabel="after step", ylabel="largest difference\nof a weight", ylim=(-0.003, 0.06))
    axes.set_title("Copies of the same weights, on rank 0 and on rank 1")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    plt.tight_layout()
    plt.show()
    for name, place in (("key_value", 0), ("the norm below", 1)):
        print(f"{name}: the same on both ranks after {len(apart)} steps: {apart[-1][place] < 1e-5}")
