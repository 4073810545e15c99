"""What follows a green check: the learner's own model, beside the course's."""

from typing import Any

import matplotlib.pyplot as plt

from grader import run_ranks
from lessons.page.look import BLUE, ORANGE, figure
from lessons.tensor_parallel import measures
from nanogpt.data import load_tokens
from nanogpt.model import GPTConfig
from solutions import tensor_parallel as ours

CONFIG = GPTConfig(block_size=64, vocab_size=4096, n_layer=4, n_head=4, n_embd=128, bias=True)
RANKS = 4


def tensor_parallelize(yours: Any) -> None:  # the name of its exercise
    """One step on four ranks: every message, when and how large, and what is kept for backward."""
    batch = load_tokens("stdlib").batch(8, CONFIG.block_size, seed=0, step=0)
    _, panels = figure(2, 1, figsize=(9.5, 4.4))
    for axes, (how, parallelize) in zip(
        panels, (("Yours", yours), ("The course's", ours.tensor_parallelize)), strict=True
    ):
        step = run_ranks(measures.step, parallelize, CONFIG, *batch, ranks=RANKS)[0]
        for stretch, color in (("", BLUE), ("backward", ORANGE)):
            bars = [(i, size / 1e6) for i, size, after in step["events"] if after == stretch]
            axes.vlines([i for i, _ in bars], 0, [size for _, size in bars], color=color, linewidth=4)
        axes.set(ylabel="MB", ylim=0, xlim=0)
        axes.set_title(f"{how}: {step['kept'] / 1e6:.2f} MB kept for backward on each of {RANKS} ranks")
        sent = step["sent"] / 1e6
        print(f"{how}: {len(step['events'])} collectives, {sent:.2f} MB sent by a rank")
    panels[1].set_xlabel("operations of rank 0, in their order")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (BLUE, ORANGE)]
    labels = ["an all-reduce of the forward", "of the backward"]
    panels[0].legend(handles, labels, loc="lower right", ncols=2, bbox_to_anchor=(1.0, 1.15))
    plt.tight_layout()
    plt.show()
    print("Lesson 11 will keep fewer bytes than the course's does here. Can yours, today?")
