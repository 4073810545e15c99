"""What follows a green check: the learner's own run, beside what was measured."""

from typing import Any

import matplotlib.pyplot as plt

from lessons.flops_and_memory import measures
from lessons.page.look import BLUE, ORANGE, figure
from nanogpt.model import GPTConfig


def activation_bytes(yours: Any) -> None:  # the name of its exercise
    """Each part of a model: what the learner's function says, and what autograd kept."""
    _, panels = figure(1, 2, figsize=(9.5, 3.2), sharey=True)
    for axes, dropout in zip(panels, (0.0, 0.1), strict=True):
        config = GPTConfig(block_size=128, vocab_size=1024, n_layer=4, n_head=4, n_embd=128, dropout=dropout)
        kept, told = measures.by_part(config, 8, 128), yours(config, 8, 128)
        for i, part in enumerate(kept):
            axes.bar(i - 0.2, told[part] / 1e6, 0.38, color=BLUE, label="your terms" if i == 0 else None)
            axes.bar(i + 0.2, kept[part] / 1e6, 0.38, color=ORANGE, label="autograd kept" if i == 0 else None)
        axes.set_xticks(range(len(kept)), list(kept))
        axes.set_title(f"dropout={dropout}")
    panels[0].set_ylabel("MB")
    panels[0].legend()
    plt.tight_layout()
    plt.show()
    print("Modules that could claim the same storage may differ by it; the sums agree.")
