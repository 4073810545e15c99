"""Lesson 03's numbers: the moments of a step of GPT-2, and what its notebook has printed."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lessons.activation_checkpointing import answers, measures
from nanogpt.model import GPT, GPTConfig
from solutions.activation_checkpointing import checkpoint_blocks
from solutions.flops_and_memory import activation_bytes, training_flops
from tests.peak import peak_bytes
from tests.printed import numbers, printed

GPT2 = GPTConfig(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, bias=False)
STATES = 16 * 124_337_664
INPUT = 4 * 1024 * 768
"""Bytes of a block's input, for one sequence."""


def peak(batch_size: int, every: int) -> int:
    """Bytes at the worst moment of a step of GPT-2, besides model states, on tensors without numbers."""
    with FakeTensorMode():
        model = checkpoint_blocks(GPT(GPT2), every) if every else GPT(GPT2)
        tokens = torch.zeros(batch_size, 1024, dtype=torch.long)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return peak_bytes(lambda: model(tokens, tokens.clone())[1].backward())


@pytest.mark.parametrize(("every", "megabytes", "most"), [(0, 1228.6, 11), (1, 661.6, 21)])
def test_sequences_of_gpt2_in_16_gb(every: int, megabytes: float, most: int) -> None:
    assert peak(1, every) / 1e6 == pytest.approx(megabytes, abs=0.1)
    assert STATES + peak(most, every) <= 16e9 < STATES + peak(most + 1, every)


def test_up_to_six_blocks_stay_below_the_head() -> None:
    """Where a group has more blocks, its own moment is the worst one."""
    head = 3 * 4 * 1024 * GPT2.vocab_size
    kept = {k: -(-12 // k) * INPUT for k in (6, 12)}
    outside = activation_bytes(GPTConfig(**{**vars(GPT2), "n_layer": 0}), 1, 1024)["total"]
    at_the_head = {k: inputs + outside - head // 3 + head for k, inputs in kept.items()}
    assert peak(1, 6) == pytest.approx(at_the_head[6], rel=0.001)
    assert peak(1, 12) > 1.1 * at_the_head[12]


@pytest.mark.parametrize("batch_size", [2, 8])
def test_the_worst_moment_in_a_block_is_predicted_for_any_batch(batch_size: int) -> None:
    """With the page's own four sequences, an input counted twice and a gradient forgotten would agree."""
    config = GPTConfig(block_size=128, vocab_size=512, n_layer=4, n_head=4, n_embd=128, bias=False)
    moments = answers.worst_moments(config, batch_size, 1, activation_bytes)
    measured = measures.step_of(checkpoint_blocks(measures.new_model(config), 1), batch_size).peak
    predicted = sum(moments["in a block"].values())
    assert measured == pytest.approx(predicted, abs=0.05 * 4 * batch_size * 128 * 128)


def test_what_the_page_says_of_gpt2() -> None:
    assert 3 * 4 * 1024 * GPT2.vocab_size / 1e6 == pytest.approx(618, abs=1)
    one, two = (activation_bytes(GPTConfig(**{**vars(GPT2), "n_layer": n}), 1, 1024)["total"] for n in (1, 2))
    assert (two - one) / INPUT == pytest.approx(16, rel=0.01)
    assert training_flops(GPT2, 1, 1024, "full") / training_flops(GPT2, 1, 1024) == pytest.approx(
        1.25, abs=0.01
    )


def test_printed_moments_agree_to_an_input() -> None:
    lines = printed("activation_checkpointing", "pictures.draw_moments(")
    rows = [numbers(line.replace("none", "0")) for line in lines[2:10]]
    assert [row[0] for row in rows] == [0, 1, 2, 3, 4, 5, 6, 12]
    for _, kept, kept_measured, worst, worst_measured in rows:
        assert abs(kept - kept_measured) < 0.05
        assert abs(worst - worst_measured) <= 1.1


def test_printed_predictions_of_gpt2_are_measured() -> None:
    lines = printed("activation_checkpointing", "pictures.show_gpt2(")
    told = [re.findall(r"([\d,.]+) MB", line) for line in lines if "predicted" in line]
    assert len(told) == 2
    for predicted, measured in told:
        assert predicted == measured
    assert [line.split()[-3:] == ["do", "not", "fit"] for line in lines if "sequences:" in line] == [
        False,
        True,
    ] * 2


def test_printed_flops_are_the_counted_ones() -> None:
    rows = [numbers(line) for line in printed("activation_checkpointing", "pictures.show_costs(")[2:5]]
    assert len(rows) == 3
    assert all(predicted == counted for predicted, counted, *_ in rows)
