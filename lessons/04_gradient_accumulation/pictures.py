"""The pictures and tables of the lesson, a line each to call."""

from collections.abc import Callable
from itertools import zip_longest

import matplotlib.pyplot as plt

from lessons.gradient_accumulation import answers, measures
from lessons.gradient_accumulation.answers import GPT2
from lessons.page.look import BLUE, RED, figure
from lessons.page.mountain import draw_mountains
from nanogpt.data import Tokens
from nanogpt.model import GPTConfig
from solutions.flops_and_memory import activation_bytes, count_parameters, model_state_bytes

COUNTS = [1, 2, 4, 8, 16, 32]


def show_gpt2() -> None:
    """What GPT-2's recipe would keep at once."""
    states = model_state_bytes(count_parameters(GPT2)["total"], "fp32")["total"]
    print(f"model states of GPT-2, fp32       {states / 1e9:6.1f} GB")
    for b in (1, 8, 480):
        kept = activation_bytes(GPT2, b, 1024)["total"]
        print(f"activations of {b:3} sequence{'s' if b > 1 else ' '}      {kept / 1e9:6.1f} GB")


def draw_peaks(config: GPTConfig, tokens: Tokens) -> None:
    """The most bytes alive in forward and backward grow with the batch."""
    sizes = [1, 4, 8, 16, 32]
    batches = {b: tokens.batch(b, config.block_size, seed=0, step=0) for b in sizes}
    peaks = [
        measures.metered(measures.one_pass, measures.new_model(config), *batches[b]).peak / 1e6 for b in sizes
    ]
    weights = 4 * count_parameters(config)["total"] / 1e6
    _, axes = figure(figsize=(7, 3))
    axes.plot(sizes, peaks, "o-", color=BLUE)
    axes.text(15, peaks[3] - 25, "most bytes alive, without the weights", color=BLUE, ha="left")
    axes.axhline(weights, color=RED)
    axes.text(32, weights + 3, "the weights", color=RED, ha="right")
    axes.set(xlabel="sequences in the batch, b", ylabel="MB", ylim=0, xticks=sizes)
    axes.set_title("One forward and backward, measured")
    plt.show()


def draw_weights(counted: tuple = ((30, 30), (3, 1)), length: int = 32) -> None:
    """What every target weighs in the mean of means, and in the mean over all counted targets."""
    _, panels = figure(1, 2, figsize=(9.5, 2.8), sharey=True)
    counts = [sum(rows) for rows in counted]
    for axes, title in zip(panels, ("mean of the two means", "mean over counted targets"), strict=True):
        of_means = title == "mean of the two means"
        each = [1 / (len(counts) * count) if of_means else 1 / sum(counts) for count in counts]
        weights = [
            [weight] * n + [float("nan")] * (length - n)
            for weight, rows in zip(each, counted, strict=True)
            for n in rows
        ]
        axes.imshow(weights, cmap="Blues", vmin=-0.03, vmax=0.13, aspect="auto")
        axes.axhline(1.5, color="black", linewidth=2)
        axes.set(xlabel="target in the sequence", yticks=range(4), title=title)
        for number, (count, weight) in enumerate(zip(counts, each, strict=True)):
            start = 4.5 if number else 15
            axes.text(
                start,
                2 * number + 0.5,
                f"{'← ' * number}{count} targets, each weighs {weight:.4f}",
                ha="left" if number else "center",
                va="center",
            )
    panels[0].set_ylabel("sequence")
    plt.tight_layout()
    plt.show()


def show_microbatches(largest_microbatch: Callable) -> None:
    """GPT-2 on GPUs of several sizes, and nanoGPT's 480 sequences."""
    print(f"{'memory':>7}  {'largest micro-batch':>20}  {'micro-batches of a step':>24}")
    for gigabytes in (8, 16, 24, 40, 80, 141):
        size = largest_microbatch(GPT2, gigabytes * 10**9, "fp32", 1024)
        print(f"{gigabytes:4} GB  {size:20}  {-(-480 // size) if size else 'does not fit':>24}")


def show_peaks(accumulate: Callable, config: GPTConfig, tokens: Tokens) -> None:
    """Predicted and measured bytes of a batch of 32 sequences in k micro-batches."""
    batch = tokens.batch(32, config.block_size, seed=0, step=0)
    print(f"{'k':>3} {'predicted bytes':>16} {'measured bytes':>16} {'difference':>11}")
    for k in COUNTS:
        predicted = answers.peak_at_the_head(config, 32 // k, k)
        measured = measures.metered(accumulate, measures.new_model(config), *batch, k).peak
        print(f"{k:3} {predicted:16,} {measured:16,} {measured - predicted:11,}")
    table = 4 * config.vocab_size * config.n_embd
    print(f"\ngradients are {4 * count_parameters(config)['total']:,} bytes, the token table's {table:,}")


def draw_teeth(accumulate: Callable, checkpoint_blocks: Callable, config: GPTConfig, tokens: Tokens) -> None:
    """The bytes alive over a step of 32 sequences, in 1, 2 and 4 micro-batches, and with checkpoints."""
    batch = tokens.batch(32, config.block_size, seed=0, step=0)
    meters = {
        f"k = {k}": measures.metered(accumulate, measures.new_model(config), *batch, k) for k in (1, 2, 4)
    }
    checkpointed = checkpoint_blocks(measures.new_model(config))
    meters["k = 4, checkpointed"] = measures.metered(accumulate, checkpointed, *batch, 4)
    axes = draw_mountains(meters, "A batch of 32 sequences in k micro-batches", share=True)
    axes.axhline(4 * count_parameters(config)["total"] / 1e6, color="black", linestyle=":")
    axes.set_xlim(0, 1)
    axes.text(1.02, 5, "dotted: the gradients", va="center")
    plt.show()


def draw_seconds(accumulate: Callable, config: GPTConfig, tokens: Tokens) -> None:
    """The time of a step in k micro-batches."""
    seconds = measures.step_seconds(accumulate, config, tokens, COUNTS)
    _, axes = figure(figsize=(6, 2.8))
    axes.plot(COUNTS, [1000 * each for each in seconds], "o-", color=BLUE)
    axes.set(xscale="log", xlabel="micro-batches, k", ylabel="milliseconds a step")
    axes.set_ylim(0, 1100 * max(seconds))
    axes.set_xticks(COUNTS, [str(k) for k in COUNTS])
    axes.minorticks_off()
    axes.set_title("The same 32 sequences, in smaller portions")
    plt.show()


def show_search(
    largest_microbatch: Callable,
    accumulate: Callable,
    config: GPTConfig,
    megabytes: tuple = (20, 50, 100, 200),
) -> None:
    """The formula, and a search with real steps."""
    needed = measures.step_bytes(accumulate, config)
    print(f"{'memory':>9}  {'largest_microbatch':>19}  {'search':>7}")
    for each in megabytes:
        formula = largest_microbatch(config, each * 10**6, "fp32", config.block_size)
        print(f"{each:6} MB  {formula:19}  {measures.search(needed, each * 10**6):7}")


def show_two_epochs(train_epoch: Callable, config: GPTConfig, tokens: Tokens) -> None:
    """Two epochs in micro-batches, beside two epochs in whole batches."""
    rates, losses, moved = measures.two_epochs(train_epoch, config, tokens)
    right_rates, right_losses, right = measures.two_epochs(measures.in_whole_batches, config, tokens)
    shown = lambda value, digits: "-" if value is None else f"{value:.{digits}f}"  # noqa: E731
    print(f"{'':4} {'micro-batches':>25}   {'whole batches':>25}")
    print(f"step {'learning rate':>16} {'loss':>8}   {'learning rate':>16} {'loss':>8}")
    for i, row in enumerate(zip_longest(rates, right_rates, losses, right_losses), start=1):
        rate, right_rate, loss, right_loss = (shown(x, n) for x, n in zip(row, (5, 5, 3, 3), strict=True))
        print(f"{i:4} {rate:>16} {loss:>8}   {right_rate:>16} {right_loss:>8}")
    error = ((moved - right).norm() / right.norm()).item()
    told = "less than 0.1%" if error < 0.001 else f"{error:.0%}"
    print(f"After two epochs the weights differ by {told} of the way that they went.")
