"""Lesson 04's numbers: the micro-batch that fits, beside real steps; what its notebook has printed."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nanogpt.model import GPT, GPTConfig
from solutions.flops_and_memory import activation_bytes, count_parameters, model_state_bytes
from solutions.gradient_accumulation import accumulate_gradients, largest_microbatch
from tests.peak import peak_bytes
from tests.printed import numbers, printed

GPT2 = GPTConfig(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, bias=False)
LESSON = GPTConfig(block_size=64, vocab_size=4096, n_layer=4, n_head=4, n_embd=128, bias=False)
LOOP_BYTES = 24
"""What the reference's loop itself works with: counts, the mean, a loss and its gradient."""


def step_bytes(config: GPTConfig, batch_size: int, length: int) -> int:
    """Bytes of weights and optimizer, and at the peak of two micro-batches and a step of AdamW."""
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    model.zero_grad()
    tokens, targets = torch.randint(config.vocab_size, (2, batch_size, length)).unbind()

    def step() -> None:
        for _ in range(2):
            accumulate_gradients(model, tokens, targets, 1)
        optimizer.step()

    states = model_state_bytes(count_parameters(config)["total"], "fp32")
    return states["weights"] + states["optimizer"] + tokens.nbytes + targets.nbytes + peak_bytes(step)


def draw(rng: random.Random) -> tuple[GPTConfig, int, int]:
    """A model whose vocabulary is at least twice its width, and a batch of at least as many tokens."""
    heads = rng.randint(2, 4)
    width = heads * rng.randint(3, 9)
    length = rng.randint(8, 40)
    config = GPTConfig(
        block_size=length + rng.randint(0, 8),
        vocab_size=rng.randint(2 * width, 8 * width),
        n_layer=rng.randint(1, 4),
        n_head=heads,
        n_embd=width,
        dropout=rng.choice([0.0, 0.1]),
        bias=rng.choice([True, False]),
    )
    return config, rng.randint(max(2, -(-width // length)), 9), length


@pytest.mark.parametrize("seed", range(8))
def test_a_real_step_needs_what_the_formula_says(seed: int) -> None:
    """To the 24 bytes that the loop itself works with."""
    config, batch_size, length = draw(random.Random(seed))
    needed = step_bytes(config, batch_size, length) - LOOP_BYTES
    assert largest_microbatch(config, needed, "fp32", length) == batch_size
    assert largest_microbatch(config, needed - 1, "fp32", length) == batch_size - 1


def test_gpt2_fits_where_the_page_says() -> None:
    """On tensors without numbers: eleven sequences fit in 16 GB, and twelve do not."""
    assert largest_microbatch(GPT2, 16 * 10**9, "fp32", 1024) == 11
    with FakeTensorMode():
        assert step_bytes(GPT2, 11, 1024) <= 16 * 10**9 < step_bytes(GPT2, 12, 1024)


def test_shares_of_the_head() -> None:
    """Without its two tensors one plans with half as much again for GPT-2; the shares of the page."""
    for config, length, share in ((GPT2, 1024, 1 / 3), (LESSON, 64, 2 / 5)):
        one, two = (activation_bytes(config, b, length)["total"] for b in (1, 2))
        kept, head = two - one, 2 * 4 * length * config.vocab_size
        assert head / (kept + head) == pytest.approx(share, rel=0.03)
        assert config is LESSON or (kept + head) / kept == pytest.approx(1.5, rel=0.01)


def test_printed_peaks_are_the_predicted_ones() -> None:
    """To 24 bytes, but for k = 32, which the page explains: gradients, and three token tables."""
    lines = printed("gradient_accumulation", "pictures.show_peaks(")
    rows = {int(row[0]): row[1:] for row in map(numbers, lines[1:7])}
    assert set(rows) == {1, 2, 4, 8, 16, 32}
    for k, (predicted, measured, difference) in rows.items():
        assert measured - predicted == difference
        assert k == 32 or difference == LOOP_BYTES
    assert abs(rows[32][1] - (5_280_256 + 3 * 2_097_152)) <= 40


def test_printed_searches_find_what_the_formula_finds() -> None:
    rows = [numbers(line) for line in printed("gradient_accumulation", "pictures.show_search(")[1:]]
    assert len(rows) == 4
    assert all(formula == search for _, formula, search in rows)
