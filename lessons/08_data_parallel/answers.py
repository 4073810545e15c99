"""What is true of the questions that the page asks."""

from collections.abc import Callable

import torch
from torch import nn

from grader.guessing import Truth
from lessons.page.hidden import GIGABIT
from nanogpt.model import GPT, GPTConfig

MICRO_BATCH = 12 * 1024
"""Tokens of one backward on one GPU in nanoGPT's config/train_gpt2.py."""

GPT2_PARAMETERS = 124_337_664
"""GPT-2 with nanoGPT's default, no bias."""

TRAINED_TOKENS, DAYS = 600_000 * 491_520, 4
"""Of nanoGPT's run on 8 A100: its configuration, and its README."""


def num_parameters(config: GPTConfig) -> int:
    """Of a model that is not built."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


def before_the_first_bucket(config: GPTConfig) -> float:
    """The part of backward, in FLOPs, before a bucket of one block is full: the head, and a block."""
    head, block = config.vocab_size * config.n_embd, 12 * config.n_embd**2
    return (head + block) / (head + config.n_layer * block)


def achieved_flops() -> float:
    """FLOP/s of each of the 8 GPUs of nanoGPT's run, at 6·P a token."""
    return 6 * GPT2_PARAMETERS * TRAINED_TOKENS / (8 * DAYS * 86_400)


def show_published_run(smallest_hidden_share: Callable[..., int]) -> None:
    """What the learner's function says of nanoGPT's run, with its fp32 gradients."""
    flops = achieved_flops()
    print(f"each GPU computed {flops / 1e12:.1f} TFLOP/s, and had {MICRO_BATCH:,} tokens in a backward")
    for told, speed in (("NVLink, 300 GB/s", 300e9), ("10 Gbit/s a machine", 10 * GIGABIT)):
        least = smallest_hidden_share(GPT2_PARAMETERS, flops, speed, 4)
        print(f"{told:20} needs {least:7,} tokens: {MICRO_BATCH / least:.2g} times as many are there")


def predictions(model: nn.Module) -> list[Truth]:
    """Section 2: what an all-reduce of the model's gradients costs."""
    size = 4 * sum(p.numel() for p in model.parameters()) / 1e6

    def ring(n: int) -> float:
        return 2 * (n - 1) / n * size

    return [
        Truth(
            "ring_of_2", "MB sent by a rank, ring of 2", ring(2), "MB", f"2 · 1/2 · S, and S is {size:.2f} MB"
        ),
        Truth(
            "ring_of_64",
            "MB sent by a rank, ring of 64",
            ring(64),
            "MB",
            "2 · 63/64 · S: never more than 2 S",
        ),
        Truth("everyone_to_all_64", "MB to all 63 others", 63 * size, "MB", "63 · S"),
        Truth(
            "milliseconds",
            "milliseconds for 2 ranks on 1 Gbit/s",
            1000 * ring(2) * 1e6 / GIGABIT,
            "ms",
            "the bytes of the first line, 125 MB a second",
        ),
    ]
