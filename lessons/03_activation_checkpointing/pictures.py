"""The pictures and tables of the lesson, a line each to call."""

from collections.abc import Callable
from dataclasses import replace

import matplotlib.pyplot as plt

from lessons.activation_checkpointing import answers, measures
from lessons.activation_checkpointing.answers import GPT2, ActivationBytes
from lessons.activation_checkpointing.measures import BATCH_SIZE, Change
from lessons.page.look import BLUE, COMPUTE, GREEN, GREY, ORANGE, RED, figure
from lessons.page.mountain import draw_mountains
from nanogpt.model import GPTConfig
from solutions.flops_and_memory import training_flops


def draw_mountain(config: GPTConfig) -> None:
    """The bytes alive over one step of a GPT."""
    meter = measures.step_of(measures.new_model(config))
    draw_mountains({"plain": meter}, f"A GPT with {config.n_layer} blocks")
    plt.show()
    weights = sum(p.nbytes for p in measures.new_model(config).parameters())
    print(f"weights {weights / 1e6:.1f} MB; at the top {meter.peak / 1e6:.1f} MB more")


def draw_kept(num_blocks: int = 6, tensors: int = 16) -> None:
    """What is kept of each block: its input, the first square, and what it computes."""
    rows = [
        ("nothing thrown away", lambda block, t: BLUE),
        ("the input of every block", lambda block, t: BLUE if t == 0 else None),
        (
            "the same, when backward\nis in block 4",
            lambda block, t: None if block > 4 else BLUE if t == 0 else ORANGE if block == 4 else None,
        ),
        ("the input of every\nthird block", lambda block, t: BLUE if t == 0 and block % 3 == 0 else None),
        (
            "the same, when backward\nis in blocks 3 to 5",
            lambda block, t: BLUE if t == 0 and block % 3 == 0 else ORANGE if block >= 3 else None,
        ),
    ]
    _, axes = figure(figsize=(10, 0.95 * len(rows)))
    for r, (title, kept) in enumerate(rows):
        for block in range(num_blocks):
            for t in range(tensors):
                place = block * 5.2 + (t // 4) * 1.1, -r * 5.4 - (t % 4) * 1.0
                color = kept(block, t)
                style = {"facecolor": color} if color else {"facecolor": "white", "linestyle": ":"}
                axes.add_patch(plt.Rectangle(place, 0.95, 0.85, edgecolor="gray", linewidth=0.7, **style))
        axes.text(-0.6, -r * 5.4 - 1, title, ha="right", va="center")
    for block in range(num_blocks):
        axes.text(block * 5.2 + 2.1, 1.3, f"block {block}", ha="center")
    axes.set(xlim=(-9, num_blocks * 5.2), ylim=(-5.4 * len(rows) + 1, 2.2))
    axes.axis("off")
    plt.show()


def draw_checkpointed(checkpoint_blocks: Callable, config: GPTConfig) -> None:
    """The mountain, with nothing checkpointed, with groups of four blocks, and with every block."""
    lengths = {"nothing checkpointed": 0, "groups of 4 blocks": 4, "every block": 1}
    meters = {}
    for told, every in lengths.items():
        model = measures.new_model(config)
        meters[told] = measures.step_of(checkpoint_blocks(model, every) if every else model)
    draw_mountains(meters, f"A GPT with {config.n_layer} blocks")
    plt.show()


def draw_group_lengths(best_segment_length: Callable[[int, int, int], int]) -> None:
    """What is alive at the worst moment for every length of a group, in three models."""
    cases = [
        ("12 blocks, each like its input", 12, 1),
        ("12 blocks of a GPT", 12, 16),
        ("96 blocks of a GPT", 96, 16),
    ]
    _, panels = figure(1, 3, figsize=(11, 3))
    for axes, (title, num_blocks, block_size) in zip(panels, cases, strict=True):
        lengths = range(1, min(num_blocks, 16) + 1)
        totals = [-(-num_blocks // k) + k * block_size for k in lengths]
        best = best_segment_length(num_blocks, block_size, 1)
        axes.plot(lengths, totals, "o-", color=BLUE)
        axes.plot([best], [totals[best - 1]], "o", color=RED, markersize=10)
        axes.set(xlabel="blocks in a group, k", ylim=0, title=f"{title}: k = {best}")
        axes.set_xticks(range(1, len(totals) + 1, 3))
    panels[0].set_ylabel("alive at the worst moment,\nin inputs of a block")
    plt.tight_layout()
    plt.show()


def show_cores() -> None:
    """What goes with the core of attention, in a layer of two large models."""
    for name, a, length, width in (("GPT-3", 96, 2048, 12288), ("a 530B model", 128, 2048, 20480)):
        scores = 5 * a * length / width
        linear, core = 24 * width**2, 4 * length * width
        share, price = scores / (34 + scores), core / (3 * (linear + core))
        print(
            f"{name:13} 5as/h = {scores:.0f}: {share:.0%} of a layer's bytes go, for {price:.1%} more FLOPs"
        )


def draw_moments(checkpoint_blocks: Callable, bytes_of: ActivationBytes, config: GPTConfig) -> None:
    """Predicted and measured, for every length of a group, in inputs of a block."""
    stream = 4 * BATCH_SIZE * config.block_size * config.n_embd  # bytes of a block's input
    colors = {
        "kept of the blocks": BLUE,
        "kept of the rest": GREY,
        "one group, computed again": ORANGE,
        "gradients": GREEN,
    }
    _, axes = figure(figsize=(9, 3.6))
    print(f"{'':8}{'kept after the forward':>24}{'the worst moment':>28}")
    print(f"{'k':>8}{'predicted':>13}{'measured':>11}{'predicted':>16}{'measured':>12}  where")
    for place, every in enumerate((0, 1, 2, 3, 4, 5, 6, 12)):
        model = measures.new_model(config)
        meter = measures.step_of(checkpoint_blocks(model, every) if every else model)
        moments = answers.worst_moments(config, BATCH_SIZE, every, bytes_of)
        where = max(moments, key=lambda each: sum(moments[each].values()))
        foot = 0.0
        for told, size in moments[where].items():
            axes.bar(place, size / stream, 0.7, bottom=foot, color=colors[told])
            foot += size / stream
        axes.plot(place, meter.peak / stream, "D", color="black", markersize=5)
        kept = answers.kept(config, BATCH_SIZE, every, bytes_of) / stream
        measured, worst = meter.at("backward") / stream, meter.peak / stream
        print(f"{every or 'none':>8}{kept:13.2f}{measured:11.2f}{foot:16.2f}{worst:12.2f}  {where}")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    handles.append(plt.Line2D([], [], color="black", marker="D", linestyle=""))
    axes.legend(handles, [*colors, "measured"], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_xticks(range(8), ["none", "1", "2", "3", "4", "5", "6", "12"])
    axes.set(xlabel="blocks in a group, k", ylabel="inputs of a block")
    axes.set_title("What is alive at the worst moment")
    plt.tight_layout()
    plt.show()


def show_gpt2(checkpoint_blocks: Callable, bytes_of: ActivationBytes) -> None:
    """One sequence of GPT-2, predicted and measured, and how many fit."""
    for told, every in (("without", 0), ("with every block checkpointed", 1)):
        change = checkpoint_blocks if every else None
        predicted = answers.worst_moment(GPT2, 1, every, bytes_of) / 1e6
        measured = measures.step_of_gpt2(change, 1).peak / 1e6
        print(f"{told}: one sequence {predicted:,.1f} MB predicted, {measured:,.1f} MB measured")
        most = answers.most_sequences(every, bytes_of)
        for n in (most, most + 1):
            total = answers.STATE_BYTES + measures.step_of_gpt2(change, n).peak
            fit = "fit" if total <= answers.MEMORY_BYTES else "do not fit"
            print(f"  {n} sequences: {total / 1e9:.2f} GB with model states, {fit}")


def show_chunks(checkpoint_blocks: Callable, chunked_cross_entropy: Callable, batch_size: int = 8) -> None:
    """The worst moment of a batch of GPT-2, by the length of the head's chunks."""
    tokens = batch_size * GPT2.block_size
    logits = 4 * tokens * GPT2.vocab_size / 1e6
    whole = measures.step_of_gpt2(checkpoint_blocks, batch_size).peak / 1e6
    print(f"{'tokens in a chunk':>18}{'their logits':>15}{'worst moment':>15}")
    print(f"{f'all {tokens:,}':>18}{logits:12,.0f} MB{whole:12,.0f} MB")
    for size in (2048, 512, 128):
        meter = measures.step_of_gpt2_in_chunks(checkpoint_blocks, batch_size, chunked_cross_entropy, size)
        print(f"{size:18,}{logits * size / tokens:12,.0f} MB{meter.peak / 1e6:12,.0f} MB")


def show_costs(changes: dict[str, Change], config: GPTConfig) -> None:
    """FLOPs and bytes of plain attention, changed; predicted where a name is one of `training_flops`."""
    _costs(changes, config)


def _costs(changes: dict[str, Change], config: GPTConfig) -> dict[str, tuple[float, float]]:
    """Shows the table; gives the percentage of FLOPs more, and the inputs of a block that are kept."""
    none = training_flops(config, BATCH_SIZE, config.block_size)
    stream = 4 * BATCH_SIZE * config.block_size * config.n_embd  # bytes of a block's input
    found = {}
    predicted = set(changes) <= {"none", "attention", "full"}
    print(f"{'':28}{'more FLOPs in a step':>{16 + 16 * predicted}}{'in inputs of a block':>24}")
    print(f"{'':28}{'predicted' if predicted else '':>{16 * predicted}}{'counted':>16}", end="")
    print(f"{'kept':>10}{'worst moment':>14}")
    for told, change in changes.items():
        again = ""
        if predicted:
            more = training_flops(config, BATCH_SIZE, config.block_size, told) - none
            again = f"{more:16,}"
        counted = measures.counted_flops(change(measures.new_model(config, plain=True))) - none
        meter = measures.step_of(change(measures.new_model(config, plain=True)))
        kept, worst = meter.at("backward") / stream, meter.peak / stream
        print(f"{told:28}{again}{counted:16,}{kept:10.1f}{worst:14.1f}")
        found[told] = 100 * counted / none, kept
    return found


def draw_costs(changes: dict[str, Change], config: GPTConfig) -> None:
    """FLOPs against what is kept."""
    found = _costs(changes, config)
    _, axes = figure(figsize=(7, 3))
    for told, (percent, kept) in found.items():
        color, above = (ORANGE, 12) if told.startswith("PyTorch") else (BLUE, -4)
        axes.plot(percent, kept, "o", markersize=9, color=color)
        axes.annotate(told, (percent, kept), (9, above), textcoords="offset points")
    axes.set(xlabel="% more FLOPs", ylabel="kept, in inputs of a block", ylim=(0, 280), xlim=(-2, 55))
    axes.set_title("Further down is less memory, further left is less work")
    plt.show()


def show_fused(recompute_attention: Change, config: GPTConfig) -> None:
    """The same core with the fused kernel, which keeps little."""
    found = []
    for told, change in (("fused", lambda model: model), ("fused, core again", recompute_attention)):
        found.append(measures.step_of(change(measures.new_model(config))).at("backward"))
        print(f"{told:22} kept  {found[-1]:12,} bytes")
    core = 4 * BATCH_SIZE * config.n_head * config.block_size * config.n_layer
    print(f"{'gained':22}       {found[0] - found[1]:12,} bytes; predicted, 4·b·a·s·L: {core:,}")


def draw_seconds(changes: dict[str, Change], config: GPTConfig) -> None:
    """The step's time with each change, and what is to be expected of one more forward of the blocks."""
    models = {told: change(measures.new_model(config, plain=True)) for told, change in changes.items()}
    models["no blocks"] = measures.new_model(replace(config, n_layer=0))
    seconds = measures.seconds_in_turns(models)
    (forward, base), (outside, _) = seconds["none"], seconds.pop("no blocks")
    expected = 1 + (forward - outside) / base
    _, axes = figure(figsize=(8, 2.4))
    for told, (_, whole) in seconds.items():
        more = training_flops(config, BATCH_SIZE, config.block_size, told) / training_flops(
            config, BATCH_SIZE, config.block_size
        )
        axes.barh(told, whole / base, color=COMPUTE)
        axes.text(
            max(whole / base, expected + 0.02 if told == "full" else 0.0),
            told,
            f" {whole / base:.2f} times the seconds, {more:.2f} times the FLOPs",
            va="center",
        )
    axes.plot([expected] * 2, [1.6, 2.4], color="black", linewidth=3)
    axes.set(xlabel="time of a step; black: one more forward of the blocks", xlim=(0, 2.6))
    axes.set_title(f"A forward of the blocks is {expected - 1:.0%} of a plain step")
    axes.invert_yaxis()
    plt.tight_layout()
    plt.show()
