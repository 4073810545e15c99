"""What follows a green check: the learner's own run, beside the course's."""

from typing import Any

import matplotlib.pyplot as plt

from lessons.gradient_accumulation import answers, measures
from lessons.page.mountain import draw_mountains
from nanogpt.data import load_tokens
from nanogpt.model import GPTConfig
from solutions import gradient_accumulation as ours

CONFIG = GPTConfig(block_size=64, vocab_size=4096, n_layer=4, n_head=4, n_embd=128, bias=False)


def accumulate_gradients(yours: Any) -> None:  # the name of its exercise
    """The bytes of a batch of 32 sequences in four micro-batches."""
    batch = load_tokens("stdlib").batch(32, CONFIG.block_size, seed=0, step=0)
    ways = {"the course's": ours.accumulate_gradients, "yours": yours}
    meters = {
        told: measures.metered(way, measures.new_model(CONFIG), *batch, 4) for told, way in ways.items()
    }
    draw_mountains(meters, "A batch of 32 sequences in four micro-batches", reference="the course's")
    plt.show()
    predicted = answers.peak_at_the_head(CONFIG, 8, 4)
    print(f"lesson 01's formulas allow {predicted:,} bytes at the worst moment")
    for told, meter in meters.items():
        print(f"{told:13} {meter.peak - predicted:,} bytes more")
    print("Is yours below the course's?")
