"""The pictures of the lesson, a line each to call."""

import math
import statistics
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from grader import run_ranks
from lessons.context_parallel import answers, measures
from lessons.context_parallel.measures import LENGTH, LENGTHS
from lessons.page.hidden import draw_shares
from lessons.page.look import BLUE, GREEN, GREY, ORANGE, PINK, RANKS, RED, figure


def draw_kept() -> None:
    """What one sequence keeps for backward as it grows, with plain attention and with fused."""
    kept = [
        [measures.kept(measures.small_gpt(s, plain), s) / 1e6 for s in LENGTHS] for plain in (True, False)
    ]
    _, axes = figure(figsize=(6.5, 3))
    for megabytes, color, told in zip(kept, (RED, BLUE), ("plain attention", "fused attention"), strict=True):
        axes.plot(LENGTHS, megabytes, "o-", color=color)
        axes.text(LENGTHS[-1] * 0.97, megabytes[-1], told, color=color, ha="right", va="bottom")
    axes.set(xlabel="tokens in the sequence", ylabel="MB kept for backward", ylim=0, xticks=LENGTHS)
    axes.set_title("One sequence, two layers of width 128")
    plt.show()
    for s, plain, fused in zip(LENGTHS, *kept, strict=True):
        print(f"s = {s:5}: plain {plain:6.2f} MB, fused {fused:6.2f} MB, {1000 * fused / s:.1f} kB a token")


def draw_errors_by_position(errors: list[list[float]]) -> None:
    """How far the output of each position is from attention over the whole sequence."""
    _, axes = figure(figsize=(7.5, 2.6))
    begin = 0
    for r, found in enumerate(errors):
        axes.bar(range(begin, begin + len(found)), found, color=RANKS[r])
        axes.text(
            begin + len(found) / 2 - 0.5, -0.2 * max(map(max, errors)), f"rank {r}", ha="center", va="top"
        )
        begin += len(found)
    axes.set(ylabel="largest error\nof an output", xlim=(-1, begin))
    axes.set_title("Every rank attends to its own tokens: position by position")
    plt.show()


def draw_ring(n: int = 4) -> None:
    """Left: who sends to whom. Right: whose keys and values are on which rank at which step."""
    _, (left, right) = figure(1, 2, figsize=(10, 3.6), gridspec_kw={"width_ratios": [1, 1.7]})
    places = [(math.cos(a), math.sin(a)) for a in (math.pi / 2 - 2 * math.pi * r / n for r in range(n))]
    for r, (x, y) in enumerate(places):
        left.add_patch(plt.Circle((x, y), 0.35, color=RANKS[r], alpha=0.6))
        left.text(x, y, f"rank {r}\n$q_{r}$ stays", ha="center", va="center", fontsize=9)
        u, v = places[(r + 1) % n]
        start, end = (0.68 * x + 0.32 * u, 0.68 * y + 0.32 * v), (0.32 * x + 0.68 * u, 0.32 * y + 0.68 * v)
        left.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": RANKS[r], "lw": 2})
    left.text(0, 0, "k, v travel", ha="center", va="center")
    left.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
    left.axis("off")
    held = [[(r - step) % n for step in range(n)] for r in range(n)]
    names = ["the diagonal", "all of it", "the future"]
    told = [[names[(j != r) + (j > r)] for j in held[r]] for r in range(n)]
    draw_steps(right, held, [[j <= r for j in held[r]] for r in range(n)], told)
    plt.show()


def draw_steps(
    axes: plt.Axes, held: list[list[int]], computed: list[list[bool]], told: list[list[str]]
) -> None:
    """Rank × ring step: whose block is there, in the owner's colour, pale where nothing is computed."""
    n = len(held)
    for r, blocks in enumerate(held):
        for step, source in enumerate(blocks):
            alpha = 0.6 if computed[r][step] else 0.12
            axes.add_patch(plt.Rectangle((step, -r), 0.94, 0.85, color=RANKS[source], alpha=alpha))
            label = f"$k_{source}, v_{source}$\n{told[r][step]}"
            axes.text(step + 0.47, 0.43 - r, label, ha="center", va="center", fontsize=9)
        axes.text(-0.08, 0.43 - r, f"rank {r}", ha="right", va="center")
    for step in range(n):
        axes.text(step + 0.47, 0.95, f"step {step}", ha="center")
    axes.set(xlim=(-0.7, n), ylim=(1 - n - 0.1, 1.3))
    axes.axis("off")


def show_errors_and_work(measured: dict[int, list[dict]]) -> None:
    """Whether a ring is plain attention, and what each rank has multiplied in the forward."""
    for n, ranks in measured.items():
        good = max(rank["error"] for rank in ranks) < 1e-5
        flops = ", ".join(f"{rank['flops'][0] / 1e6:.2f}" for rank in ranks)
        told = f"{n} rank{'s' * (n > 1)}: output and gradients are plain attention's: {good}"
        print(f"{told}; forward MFLOPs by rank: {flops}")


def chunk_owners(n: int, zigzag: bool) -> list[int]:
    """The rank that has each of 2n chunks."""
    return [min(c, 2 * n - 1 - c) for c in range(2 * n)] if zigzag else [c // 2 for c in range(2 * n)]


def work_by_step(n: int, zigzag: bool) -> list[list[float]]:
    """Pairs of chunks that each rank computes at each step, by step; a diagonal one is half."""
    owner = chunk_owners(n, zigzag)
    table = [[0.0] * n for _ in range(n)]
    for i in range(2 * n):
        for j in range(i + 1):
            table[(owner[i] - owner[j]) % n][owner[i]] += 0.5 if i == j else 1.0
    return table


def draw_work(n: int = 4) -> None:
    """Left: which rank computes which pair of chunks. Right: when, and who waits."""
    _, panels = figure(2, 2, figsize=(9.5, 5.2), gridspec_kw={"width_ratios": [1, 2.2]})
    for (left, right), zigzag in zip(panels, (False, True), strict=True):
        owner = chunk_owners(n, zigzag)
        for i in range(2 * n):
            for j in range(i + 1):
                corners = [(j, -i), (j + 1, -i - 1), (j, -i - 1)] if i == j else None
                corners = corners or [(j, -i), (j + 1, -i), (j + 1, -i - 1), (j, -i - 1)]
                left.add_patch(plt.Polygon(corners, facecolor=RANKS[owner[i]], edgecolor="white"))
            left.text(-0.2, -i - 0.5, f"rank {owner[i]}", ha="right", va="center", fontsize=8)
        left.set(xlim=(-2.2, 2 * n), ylim=(-2 * n, 0.2), aspect="equal")
        left.set_title("queries down, keys across", fontsize=10)
        left.axis("off")
        begin = 0.0
        for step in work_by_step(n, zigzag):
            for r, pairs in enumerate(step):
                right.barh(r, max(step), left=begin, color="white", edgecolor=GREY)
                if pairs:
                    right.barh(r, pairs, left=begin, color=RANKS[r], edgecolor="black")
            begin += max(step)
        useful = sum(map(sum, work_by_step(n, zigzag))) / n
        name = "Zigzag" if zigzag else "Plain ring"
        right.set_title(f"{name}: {begin:.0f} units of time, {useful / begin:.0%} busy")
        right.set(yticks=range(n), yticklabels=[f"rank {r}" for r in range(n)], xlim=(0, 14.5))
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        right.invert_yaxis()
    panels[1][1].set_xlabel("time, in products of two chunks (half on the diagonal); empty: the rank waits")
    plt.tight_layout()
    plt.show()


DOCUMENTS = (3, 11, 2, 8)
"""Tokens of the documents that are packed into one sequence."""


def draw_documents(n: int = 4) -> None:
    """Which pairs of a query and a key are left to each rank, for one document and for several."""
    _, panels = figure(1, 2, figsize=(8.5, 3.7))
    length = sum(DOCUMENTS)
    print(f"{'pairs computed by':22}" + "".join(f"  rank {r}" for r in range(n)) + "  slowest over mean")
    for axes, documents in zip(panels, ((length,), DOCUMENTS), strict=True):
        number = [i for i, tokens in enumerate(documents) for _ in range(tokens)]
        pairs = [(i, j) for i in range(length) for j in range(i + 1) if number[i] == number[j]]
        name = f"{len(documents)} documents" if len(documents) > 1 else "one document"
        for i, j in pairs:
            color = RANKS[i * n // length]
            axes.add_patch(plt.Rectangle((j, i), 1, 1, facecolor=color, edgecolor="white", linewidth=0.5))
        for r in range(n):
            axes.axhline(r * length / n, color=GREY, linewidth=0.5)
            axes.axvline(r * length / n, color=GREY, linewidth=0.5)
            axes.text(-0.5, (r + 0.5) * length / n, f"rank {r}", ha="right", va="center", fontsize=9)
        axes.set(xlim=(-0.2, length + 0.2), ylim=(length + 0.2, -0.2), aspect="equal")
        axes.set_title(f"{name} in {length} tokens\nqueries down, keys across", fontsize=10)
        axes.axis("off")
        for way, zigzag in (("parts", False), ("zigzag", True)):
            owner = chunk_owners(n, zigzag)
            counts = [sum(owner[i * 2 * n // length] == r for i, _ in pairs) for r in range(n)]
            told = "".join(f"{count:8}" for count in counts)
            print(f"  {name:12} {way:7}{told}{n * max(counts) / sum(counts):19.2f}")
    plt.tight_layout()
    plt.show()


def show_leak(ring: Any, within_documents: Any, changed: int = 1) -> None:
    """The documents whose outputs move when the keys and values of one are changed."""
    for told, attention in (("ring_attention", ring), ("document_attention", within_documents)):
        whole = attention is within_documents
        moved = run_ranks(measures.moved_by, attention, DOCUMENTS, changed, whole, ranks=3)
        print(f"{told:18} document {changed} moves the outputs of documents {sorted(set().union(*moved))}")


def show_blocks_sent(rings: dict[str, dict[int, list[dict]]]) -> None:
    """Blocks that a rank sends, predicted and measured."""
    print(f"{'':14} ranks   blocks forward   predicted   blocks backward   predicted")
    for name, measured in rings.items():
        for n in (2, 4):
            forward, backward = measures.blocks_sent(measured[n])
            range_ = f"{4 * (n - 1)} to {4 * n - 2}"
            print(f"{name:14} {n:5} {forward:16.0f} {2 * (n - 1):11} {backward:17.0f} {range_:>11}")


def show_three_ways(ring: Any, ulysses: Any) -> None:
    """Parts that a rank sends in forward and backward of attention, predicted and recorded."""
    print(f"{'':10} ranks   heads of k, v   parts sent   predicted")
    for n in (2, 4):
        for name, a_kv, sent in max(run_ranks(measures.parts_sent, ring, ulysses, ranks=n)):
            g = a_kv / measures.HEADS
            right = {"sequence": 4 * (n - 1), "ring": 6 * g * (n - 1), "Ulysses": 4 * (1 + g) * (n - 1) / n}
            print(f"{name:10} {n:5} {a_kv:9} of {measures.HEADS} {sent:12.2f} {right[name]:11.2f}")


def draw_measured_work(rings: dict[str, dict[int, list[dict]]], n: int = 4) -> None:
    """What each rank has multiplied in the forward, in pairs of chunks."""
    unit = 4 * 2 * (LENGTH // (2 * n)) ** 2 * 16
    _, axes = figure(figsize=(7.5, 2.8))
    for i, ((name, measured), color) in enumerate(zip(rings.items(), (ORANGE, BLUE), strict=True)):
        flops = [rank["flops"][0] for rank in measured[n]]
        axes.bar([r + 0.4 * i for r in range(n)], [f / unit for f in flops], 0.36, label=name, color=color)
        busiest = max(flops) * n / sum(flops)
        print(f"{name:21} on {n} ranks: the busiest rank works {busiest:.2f} times the mean")
    axes.set(xticks=[r + 0.2 for r in range(n)], xticklabels=[f"rank {r}" for r in range(n)])
    axes.set(ylabel="pairs of chunks\nmultiplied")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left")
    plt.show()


def draw_hidden_parts(ring: Any) -> None:
    """Predicted and measured: which part of a hop is hidden behind a shorter or longer block."""
    ratios = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0]
    run = run_ranks(measures.hidden_parts, ring, ratios, ranks=2)
    measured = [statistics.fmean(parts) for parts in zip(*run, strict=True)]
    draw_shares(
        ratios,
        {"the formula": lambda x: min(1.0, x)},
        {"measured with your ring_attention": measured},
        ("formula", "measured"),
    )


def draw_machines(smallest_hidden_part: Any) -> None:
    """On published machines: which part of a hop is hidden, over a rank's tokens."""
    _, axes = figure(figsize=(9, 3.4))
    every = [2 ** (i / 20) for i in range(100, 340)]
    for (told, call), color in zip(answers.RINGS.items(), (GREEN, BLUE, ORANGE, RED), strict=True):
        least = smallest_hidden_part(*call)
        axes.plot(every, [min(1, t / least) for t in every], color=color, label=f"{told}: {least:,} tokens")
    axes.axvline(answers.LLAMA_PART, color=PINK, linestyle=":")
    axes.text(answers.LLAMA_PART * 1.1, 0.1, "Llama 3 405B's part\nof 131,072 tokens", color=PINK)
    axes.set_xscale("log")
    axes.set(xlabel="tokens of one sequence on a rank", ylabel="hidden part of\na hop, at most")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), title="bf16, all of the data sheet's FLOP/s")
    plt.show()


def draw_kept_by_ranks(parallelize: Any) -> None:
    """What a rank keeps for the backward of one sequence, on 1, 2 and 4 ranks."""
    alone = [measures.kept(measures.small_gpt(s), s) / 1e6 for s in LENGTHS]
    _, axes = figure(figsize=(6.5, 3))
    axes.plot(LENGTHS, alone, "k:", linewidth=4, label="GPT, one process")
    for n, color in ((1, BLUE), (2, ORANGE), (4, GREEN)):
        kept = [run_ranks(measures.kept_on_this_rank, parallelize, s, ranks=n)[0] / 1e6 for s in LENGTHS]
        ranks = f"{n} rank{'s' * (n > 1)}"
        axes.plot(LENGTHS, kept, "o-", color=color, label=f"your GPT on {ranks}")
        a_token = [1000 * each / LENGTHS[-1] for each in (kept[-1], alone[-1] / n)]
        print(f"{ranks}: {a_token[0]:5.1f} kB a token; 1/n of one process: {a_token[1]:5.1f}")
    axes.set(xlabel="tokens in the sequence", ylabel="MB kept on a rank", ylim=0, xticks=LENGTHS)
    axes.legend()
    plt.show()


def compare_with_pytorch(ours: Any, cut: Any) -> None:
    """Whether PyTorch's ring gives what ours gives, on 2 and 4 ranks."""
    for n in (2, 4):
        differences = run_ranks(measures.pytorchs_ring, ours, cut, ranks=n)
        if None in differences:
            print("this torch keeps its ring elsewhere: there is nothing to compare with")
        else:
            print(f"{n} ranks: PyTorch's ring and yours differ by less than 1e-5: {max(differences) < 1e-5}")


def show_losses(loss_of: Any, count: bool = False) -> None:
    """The loss of the same text on 1, 2 and 4 ranks; with `count`, how many positions learn."""
    for n in (1, 2, 4):
        ranks = run_ranks(measures.loss_of_parts, loss_of, ranks=n)
        learn = f", {sum(found for _, found in ranks)} of 32 positions learn something" if count else ""
        if count:
            before = run_ranks(measures.loss_of_parts, measures.loss_as_found, ranks=n)
            learn += f" (as found: {sum(found for _, found in before)})"
        print(f"{n} rank{'s' * (n > 1)}: loss {ranks[0][0]:.4f}{learn}")
