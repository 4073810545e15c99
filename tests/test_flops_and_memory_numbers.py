"""Lesson 01's numbers: what its text says of GPT-2, and what its notebook has printed."""

import re

import pytest

from nanogpt.model import GPTConfig
from solutions.flops_and_memory import activation_bytes, count_parameters, forward_flops, training_flops
from tests.printed import numbers, printed

GPT2 = GPTConfig(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, bias=False)
COURSE = GPTConfig(block_size=128, vocab_size=4096, n_layer=4, n_head=4, n_embd=128, bias=False)


def test_what_the_text_says() -> None:
    total = count_parameters(GPT2)["total"]
    token_table = GPT2.vocab_size * GPT2.n_embd
    assert token_table / total == pytest.approx(0.31, abs=0.005)
    assert 1 - 6 * total * 1024 / training_flops(GPT2, 1, 1024) == pytest.approx(0.13, abs=0.005)
    assert total / count_parameters(COURSE)["total"] == pytest.approx(90, rel=0.06)
    weights = 4 * count_parameters(COURSE)["total"]
    assert weights / 1e6 == pytest.approx(5, rel=0.1)
    assert activation_bytes(COURSE, 32, 128)["total"] / weights == pytest.approx(40, rel=0.05)
    products = forward_flops(GPT2, 1, 1024)
    assert (products["attention"] + products["mlp"]) / 12 / 1024 == pytest.approx(17e6, rel=0.03)
    for h, layers, v, share in ((12288, 96, 51200, 0.003), (768, 12, 50257, 1 / 3)):
        assert v / (16 * h * layers) == pytest.approx(share, rel=0.1)


def test_printed_counts_are_the_measured_ones() -> None:
    lines = printed("flops_and_memory", "'FLOPs of forward and backward'")
    rows = [numbers(line) for line in lines[1:4]]
    assert rows == [[124_337_664] * 2, [291_648_307_200] * 2, [874_944_921_600] * 2]


def test_printed_activations_are_the_measured_ones() -> None:
    rows = [numbers(line) for line in printed("flops_and_memory", "dropout    s     predicted")[1:]]
    assert len(rows) == 10
    assert all(predicted == measured for _, _, predicted, measured in rows)


def test_printed_memory_of_torchs_tracker_differs_by_what_the_text_says() -> None:
    """The optimizer by 4 bytes a tensor; activations by tokens and targets, less the loss itself."""
    lines = printed("flops_and_memory", "MemTracker()")
    told = {line.split()[0]: numbers(line) for line in lines[1:5]}
    weights, optimizer = told["weights"], told["optimizer"]
    assert weights[0] == weights[1]
    num_tensors = 2 + 6 * GPT2.n_layer + 1
    assert optimizer[0] - optimizer[1] == 4 * num_tensors
    assert told["activations"][1] - told["activations"][0] == 2 * 8 * 4 * 1024 - 4
    assert told["temporary"][0] == pytest.approx(2 * 4 * 4 * 1024 * GPT2.vocab_size, rel=0.01)


def test_printed_report_of_the_h100() -> None:
    """330,000 tokens a second, every block recomputed: the model's fraction is less than the hardware's."""
    told = dict(re.findall(r"(\w+) +([\d,.]+)", "\n".join(printed("flops_and_memory", "h100 = {"))))
    used, busy = float(told["model_flops_utilization"]), float(told["hardware_flops_utilization"])
    flops = [
        training_flops(GPT2, 1, 1024, word) * 330_000 / 1024 / (1979e12 / 2) for word in ("none", "full")
    ]
    assert [used, busy] == pytest.approx(flops, abs=0.001)
