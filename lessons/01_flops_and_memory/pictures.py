"""The pictures of the lesson, a line each to call."""

from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import torch

from lessons.flops_and_memory import measures
from lessons.page.look import BLUE, GREEN, ORANGE, PINK, RED, SKY, YELLOW, figure
from nanogpt.model import GPT, GPTConfig

T4 = 16e9


def draw_wall(config: GPTConfig) -> None:
    """A step of larger and larger batches: what is kept for backward, and how long it takes."""
    torch.manual_seed(0)
    model, s = GPT(config), config.block_size
    weights = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    batch_sizes = [2, 4, 8, 16, 32]
    held = [measures.kept_in_all(config, b, s) / 1e6 for b in batch_sizes]
    seconds = [measures.step_seconds(model, b, s) for b in batch_sizes]
    _, (left, right) = figure(1, 2, figsize=(9, 3.2))
    left.plot(batch_sizes, held, "o-", color=BLUE)
    left.axhline(weights, color=RED)
    left.text(32, weights + 4, "the weights", color=RED, ha="right")
    left.text(20, 0.72 * held[-1], "kept for backward", color=BLUE, ha="right")
    left.set(ylabel="MB", title="Memory")
    right.plot(batch_sizes, seconds, "o-", color=BLUE)
    right.set(ylabel="seconds a step", title="Time")
    for axes in (left, right):
        axes.set(xlabel=f"sequences in the batch, of {s} tokens each", xticks=batch_sizes, ylim=0)
    plt.tight_layout()
    plt.show()
    print(f"weights {weights:.1f} MB; 32 sequences keep {held[-1]:.0f} MB for backward")


def draw_to_scale(config: GPTConfig) -> None:
    """Every matrix of the model as a rectangle; an area of 1 is h·h parameters."""
    h = config.n_embd
    _, axes = figure(figsize=(10, 3.6))

    def rectangle(x: float, y: float, width: float, color: str, label: str | None = None) -> None:
        patch = plt.Rectangle((x, y), width, 1, facecolor=color, edgecolor="black", linewidth=0.6)
        axes.add_patch(patch)
        patch.set_label(label)

    rectangle(0, 6, config.vocab_size / h, GREEN, "token table, and head")
    rectangle(0, 4.5, config.block_size / h, RED, "position table")
    matrices = (
        ("c_attn", 3, BLUE),
        ("attention's c_proj", 1, SKY),
        ("c_fc", 4, ORANGE),
        ("MLP's c_proj", 4, YELLOW),
    )
    for layer in range(config.n_layer):
        x, y = 13.5 * (layer % 4) + 3, 4.5 - 1.5 * (layer // 4)
        for name, width, color in matrices:
            rectangle(x, y, width, color, name if layer == 0 else None)
            x += width
    axes.set(xlim=(-0.5, 67), ylim=(1.2, 7.3), aspect="equal")
    axes.axis("off")
    axes.set_title(f"{config.n_layer} blocks and two tables; the norms are too thin to be seen")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.05), ncols=6, columnspacing=1.2)
    plt.show()


def show_kept(config: GPTConfig, batch_size: int, sequence_length: int, only: str = "") -> None:
    """A table of the storages that are kept for backward."""
    print(f"{'kept first by':24} {'tensor':16} {'type':9} {'bytes of its storage':>20}")
    for each in measures.kept(config, batch_size, sequence_length):
        name = each.module.removeprefix("transformer.") or "loss"
        shape, dtype = str(tuple(each.tensor.shape)), str(each.tensor.dtype).removeprefix("torch.")
        if only in name:
            print(f"{name:24} {shape:16} {dtype:9} {each.num_bytes:20,}")


def show_counts(config: GPTConfig, count: Any, forward: Any, training: Any) -> None:
    """Parameters and FLOPs of one sequence: the learner's functions, and a real model."""
    with torch.device("meta"):
        real = sum(parameter.numel() for parameter in GPT(config).parameters())
    total, s = count(config)["total"], config.block_size
    predicted = total, forward(config, 1, s)["total"], training(config, 1, s)
    names = "parameters", "FLOPs of a forward", "FLOPs of forward and backward"
    print(f"{'':30} {'predicted':>18} {'measured':>18}")
    for name, yours, true in zip(
        names, predicted, (real, *measures.counted_flops(config, 1, s)), strict=True
    ):
        print(f"{name:30} {yours:18,} {true:18,}")
    a_token = [flops / s / total for flops in predicted[1:]]
    print(f"\na token's forward: {a_token[0]:.2f} P; with backward: {a_token[1]:.2f} P")


def draw_cost_of_a_token(config: GPTConfig, forward: Any, training: Any) -> None:
    """FLOPs of one token's forward, by part, as the sequence grows."""
    measured = [64, 256, 1024, 4096, 16384]
    lengths = [round(64 * 256 ** (i / 59)) for i in range(60)]
    parts: dict[str, list[float]] = {"attention's core": [], "its projections": [], "MLP": [], "head": []}
    for s in lengths:
        model = replace(config, block_size=s)
        flops = forward(model, 1, s)
        core = training(model, 1, s, "attention") - training(model, 1, s)
        each = core, flops["attention"] - core, flops["mlp"], flops["head"]
        for heights, part in zip(parts.values(), each, strict=True):
            heights.append(part / s / 1e6)
    counted = [measures.counted_flops(replace(config, block_size=s), 1, s)[0] / s / 1e6 for s in measured]
    _, axes = figure(figsize=(7.5, 3.6))
    axes.stackplot(lengths, list(parts.values()), labels=list(parts), colors=(RED, ORANGE, SKY, GREEN))
    axes.plot(measured, counted, "ko", label="counted on the model", clip_on=False, zorder=3)
    axes.set(xscale="log", xlabel="sequence length s, tokens", ylabel="MFLOPs a token, forward")
    axes.set(xlim=(64, 16384), title="GPT-2: what one token costs")
    axes.set_xticks(measured, [f"{s:,}" for s in measured])
    axes.minorticks_off()
    axes.legend(loc="upper left")
    plt.show()


def draw_kept(activation_bytes: Any, textbook: Any) -> None:
    """Bytes kept for backward as the sequence grows: predicted, measured, and the textbook's."""
    lengths, fine = [8, 16, 32, 64, 128], range(8, 129, 4)
    _, axes = figure(figsize=(7.5, 3.4))
    print("dropout    s     predicted      measured")
    for dropout, color in ((0.0, BLUE), (0.1, ORANGE)):
        config = GPTConfig(block_size=128, vocab_size=65, n_layer=2, n_head=4, n_embd=64, dropout=dropout)
        measured = [measures.kept_in_all(config, 4, s) for s in lengths]
        line = [activation_bytes(config, 4, s)["total"] / 1e6 for s in fine]
        axes.plot(fine, line, color=color, label=f"predicted, dropout={dropout}")
        axes.plot(lengths, [m / 1e6 for m in measured], "o", color=color, label="measured")
        for s, bytes_kept in zip(lengths, measured, strict=True):
            print(f"{dropout:7} {s:4} {activation_bytes(config, 4, s)['total']:13,} {bytes_kept:13,}")
    axes.plot(fine, [textbook(config, 4, s) / 1e6 for s in fine], "k:", label="the textbook's formula")
    axes.set(xlabel="sequence length s, tokens", ylabel="MB kept for backward", xticks=lengths, ylim=0)
    axes.legend()
    plt.show()


def draw_a_layer() -> None:
    """One layer in units of s·b·h bytes, at a·s/h = 8: the textbook's count and two that are measured."""
    rows = {
        "textbook:\n16 bits, dropout": {"norms": 4, "attention": 11, "MLP": 19, "s × s matrices": 5 * 8},
        "measured:\nfp32, dropout": measures.units_of_a_layer(0.1),
        "measured:\nfp32, no dropout": measures.units_of_a_layer(0.0),
    }
    _, axes = figure(figsize=(9.5, 2.9))
    for row, (name, parts) in enumerate(rows.items()):
        left = 0.0
        for part, color in zip(parts, (GREEN, ORANGE, SKY, PINK), strict=True):
            axes.barh(
                row, parts[part], left=left, color=color, edgecolor="white", label=part if row == 0 else None
            )
            if parts[part] >= 4:
                axes.text(left + parts[part] / 2, row, f"{parts[part]:g}", ha="center", va="center")
            left += parts[part]
        axes.text(left + 1, row, f"{left:g}", va="center", fontweight="bold")
        print(f"{name.replace(chr(10), ' '):28} {left:g}")
    axes.set(yticks=range(3), yticklabels=list(rows), xlabel="bytes of one layer / (s·b·h), at a·s/h = 8")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    axes.invert_yaxis()
    plt.tight_layout()
    plt.show()


def draw_totals(config: GPTConfig, states: dict[str, int], activation_bytes: Any) -> None:
    """What a step holds when backward begins, in larger and larger batches, without and with dropout."""
    batch_sizes, s = [1, 2, 4, 8, 16], config.block_size
    names = [("weights", "#707070"), ("gradients", "#9A9A9A"), ("optimizer", "#C8C8C8")]
    names += [("attention", "#003F66"), ("mlp", BLUE), ("norm", SKY), ("head", "#B5DCF4")]
    _, panels = figure(1, 2, figsize=(10, 3.8), sharey=True)
    for axes, dropout in zip(panels, (0.0, 0.1), strict=True):
        for b in batch_sizes:
            held = states | activation_bytes(replace(config, dropout=dropout), b, s)
            bottom = 0.0
            for name, color in names:
                height = (held[name] + (held["embedding"] if name == "head" else 0)) / 1e9
                label = {"mlp": "MLP", "norm": "norms", "head": "embedding, head, loss"}.get(name, name)
                axes.bar(str(b), height, bottom=bottom, color=color, label=label if b == 1 else None)
                bottom += height
            made = 2 * 4 * b * s * config.vocab_size / 1e9
            told = "made by backward, kept by nobody" if b == 1 else None
            axes.bar(str(b), made, bottom=bottom, facecolor="white", edgecolor=RED, hatch="///", label=told)
        axes.axhline(T4 / 1e9, color="black", linestyle=":")
        axes.text(-0.45, T4 / 1e9 + 0.7, "16 GB: a T4")
        axes.set(xlabel=f"sequences of {s:,} tokens in the batch", title=f"dropout={dropout}")
    panels[0].set_ylabel("GB")
    handles, labels = panels[0].get_legend_handles_labels()
    panels[1].legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    plt.tight_layout()
    plt.show()
    for dropout in (0.0, 0.1):
        total = activation_bytes(replace(config, dropout=dropout), 8, s)["total"]
        told = f"8 sequences, dropout={dropout}: {total / 1e9:5.2f} GB kept for backward"
        print(f"{told}, {total / states['total']:4.1f} times the states")
