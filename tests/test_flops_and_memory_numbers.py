"""Lesson 01's numbers: what its text says of GPT-2, and what its notebook has printed."""

import importlib
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from grader.judging.course import find_exercise
from grader.ranks.launcher import ROOT
from lessons.flops_and_memory.answers import LLAMAS, MACHINES
from lessons.flops_and_memory.measures import alive_through_a_step
from nanogpt.model import GPT, GPTConfig
from solutions.flops_and_memory import (
    activation_bytes,
    attainable_flops_per_second,
    count_parameters,
    forward_flops,
    model_state_bytes,
    training_flops,
    training_plan,
)
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
    states = model_state_bytes(total, "fp32")["total"]
    assert states / 1e9 == pytest.approx(2, rel=0.01)
    for dropout, times in ((0.0, 3), (0.1, 11)):
        kept = activation_bytes(replace(GPT2, dropout=dropout), 8, 1024)["total"]
        assert kept / states == pytest.approx(times, rel=0.1)
    products = forward_flops(GPT2, 1, 1024)
    assert (products["attention"] + products["mlp"]) / 12 / 1024 == pytest.approx(17e6, rel=0.03)
    for h, layers, v, share in ((12288, 96, 51200, 0.003), (768, 12, 50257, 1 / 3)):
        assert v / (16 * h * layers) == pytest.approx(share, rel=0.1)


class Recomputed(nn.Module):
    """A module whose forward runs again in backward, all of it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        return checkpoint(self.module, *inputs, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
@pytest.mark.parametrize("config", [replace(COURSE, n_layer=3), replace(COURSE, n_layer=1, bias=True)])
def test_the_judge_counts_what_a_whole_model_counts(config: GPTConfig, recompute: str) -> None:
    """It counts one block, and never recomputes."""
    find_exercise("training_flops")
    judged = importlib.import_module("checks_of_flops_and_memory.models").flops
    model, tokens = GPT(config), torch.zeros(2, 37, dtype=torch.long)
    blocks = model.transformer.h
    for i, block in enumerate(blocks):
        if recompute == "attention":
            block.attn.core = Recomputed(block.attn.core)
        elif recompute == "full":
            blocks[i] = Recomputed(block)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH), set_checkpoint_early_stop(False):
        loss = model(tokens, tokens)[1]
        forward = counter.get_total_flops()
        loss.backward()
    assert judged(config, 2, 37)["total"] == forward
    assert judged(config, 2, 37, recompute)["total"] == counter.get_total_flops()


def test_sizes_are_asked_without_torchs_compiler() -> None:
    program = (
        "import sys; from grader.judging.course import find_exercise; find_exercise('count_parameters'); "
        "from lessons_shared.sizes import sized_gpt; from nanogpt.model import GPT, GPTConfig; "
        "config = GPTConfig(block_size=5, vocab_size=7, n_layer=2, n_head=2, n_embd=8); "
        "sizes = [(n, p.shape, p.device.type) for n, p in sized_gpt(config).named_parameters()]; "
        "assert 'torch._dynamo' not in sys.modules; "
        "assert sizes == [(n, p.shape, 'meta') for n, p in GPT(config).named_parameters()]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_printed_counts_are_the_measured_ones() -> None:
    lines = printed("flops_and_memory", "pictures.show_counts(")
    rows = [numbers(line) for line in lines[1:4]]
    assert rows == [[124_337_664] * 2, [291_648_307_200] * 2, [874_944_921_600] * 2]


def test_printed_activations_are_the_measured_ones() -> None:
    rows = [numbers(line) for line in printed("flops_and_memory", "pictures.draw_kept(")[1:]]
    assert len(rows) == 10
    assert all(predicted == measured for _, _, predicted, measured in rows)


def test_a_layer_is_what_the_text_makes_of_the_textbooks() -> None:
    """34 + 5as/h: two masks are bytes, 32 and 4as/h are 16-bit numbers; statistics are 1/4 each."""
    told = [numbers(line)[-1] for line in printed("flops_and_memory", "pictures.draw_a_layer(")]
    assert told == [34 + 5 * 8, 64 + 8 + 12 * 8 + 16 / 64, 64 + 16 / 64 + 4 * 4 / 64]


def test_a_broken_tie_is_one_token_table_more() -> None:
    lines = printed("flops_and_memory", 'models["tie broken"]')
    whole, plain, broken = (numbers(line)[0] for line in lines)
    assert whole == plain == count_parameters(COURSE)["total"]
    assert broken - whole == COURSE.vocab_size * COURSE.n_embd == 524_288


def test_the_peak_of_a_step_is_two_tensors_of_logits_above_what_is_kept() -> None:
    meter = alive_through_a_step(GPT2, 8)
    kept = activation_bytes(GPT2, 8, 1024)["total"]
    begins = meter.history[meter.marks["forward"] + 1] - 4  # backward begins with a gradient of the loss
    assert kept - begins == 2 * 8 * 8 * 1024 - 4  # tokens and targets came from outside; the loss is alive
    assert meter.peak - kept == pytest.approx(2 * 4 * 8 * 1024 * GPT2.vocab_size, rel=0.01)


def test_what_the_text_says_of_rooflines() -> None:
    peak, bandwidth, _ = MACHINES["H100"]
    assert peak / bandwidth == pytest.approx(295, abs=0.5)
    one = attainable_flops_per_second(1, 768, 3072, 2, peak, bandwidth)
    assert one / peak == pytest.approx(1 / 300, rel=0.03)
    told = {
        line.split("  ")[0]: numbers(line) for line in printed("flops_and_memory", "rooflines.draw_gpus(")
    }
    assert told["a head's scores"] == [56.9, 19.3]
    scores = attainable_flops_per_second(1024, 64, 1024, 2, peak, bandwidth)
    assert scores / peak == pytest.approx(0.193, abs=0.0005)


def test_what_the_text_says_of_llamas() -> None:
    """Parameters from the shapes in Meta's params.json; the core's share; the plan beside the bill."""
    h, layers, mlp, keys, v = 4096, 32, 14336, 1024, 128256
    parameters, tokens, hours = LLAMAS["Llama 3 8B"]
    assert layers * (2 * h * h + 2 * h * keys + 3 * h * mlp) + 2 * v * h == pytest.approx(
        parameters, rel=1e-3
    )
    assert 12 * layers * h * 8192 / (6 * parameters) == pytest.approx(0.27, abs=0.005)
    plan = training_plan(int(parameters), int(tokens), 1000, 989e12, 0.4, 80e9)
    assert hours / plan["gpu_hours"] == pytest.approx(2.5, abs=0.1)
    *_, largest = printed("flops_and_memory", "machine.show_llamas(")
    fewest, planned, published, utilization = numbers(largest.removeprefix("Llama 3.1 405B"))
    assert (fewest, published, utilization) == (81, 30.84, 35)
    assert published / planned == pytest.approx(1.16, abs=0.005)


def test_printed_report_of_the_h100() -> None:
    """330,000 tokens a second, every block recomputed: the model's fraction is less than the hardware's."""
    told = dict(re.findall(r"(\w+) +([\d,.]+)", "\n".join(printed("flops_and_memory", "h100 = {"))))
    used, busy = float(told["model_flops_utilization"]), float(told["hardware_flops_utilization"])
    flops = [
        training_flops(GPT2, 1, 1024, word) * 330_000 / 1024 / (1979e12 / 2) for word in ("none", "full")
    ]
    assert [used, busy] == pytest.approx(flops, abs=0.001)
