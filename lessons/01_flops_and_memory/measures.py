"""What the page measures: bytes and FLOPs of real models, and the speed of this machine."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lessons.page.memory import Kept, Meter, kept_for_backward
from nanogpt.model import GPT, GPTConfig


def random_batch(config: GPTConfig, batch_size: int, sequence_length: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, in a storage each."""
    tokens, targets = torch.randint(config.vocab_size, (2, batch_size, sequence_length))
    return tokens.clone(), targets.clone()


def kept(config: GPTConfig, batch_size: int, sequence_length: int) -> list[Kept]:
    """What a new model of this shape keeps for the backward of such a batch."""
    return kept_for_backward(GPT(config).train(), *random_batch(config, batch_size, sequence_length))


def kept_in_all(config: GPTConfig, batch_size: int, sequence_length: int) -> int:
    """The bytes of it."""
    return sum(each.num_bytes for each in kept(config, batch_size, sequence_length))


def step_seconds(model: GPT, batch_size: int, sequence_length: int, repeat: int = 2) -> float:
    """Seconds of one forward and backward, the least of some, after one that does not count."""
    times = []
    for _ in range(repeat + 1):
        batch = random_batch(model.config, batch_size, sequence_length)
        begin = time.perf_counter()
        model(*batch)[1].backward()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def counted_flops(
    config: GPTConfig,
    batch_size: int,
    sequence_length: int,
    backend: SDPBackend = SDPBackend.MATH,
    device: str = "meta",
) -> tuple[int, int]:
    """Forward, and forward and backward, as FlopCounterMode counts them."""
    with torch.device(device):
        model, tokens = GPT(config), torch.zeros(batch_size, sequence_length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(backend):
        loss = model(tokens, tokens)[1]
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops()


def units_of_a_layer(dropout: float, b: int = 4, s: int = 128, a: int = 4, h: int = 64) -> dict[str, float]:
    """Bytes of one layer in units of s·b·h: what a model of two layers keeps more than one of one layer."""

    def parts(num_layers: int) -> dict[str, int]:
        config = GPTConfig(
            block_size=s, vocab_size=65, n_layer=num_layers, n_head=a, n_embd=h, dropout=dropout
        )
        sums = dict.fromkeys(("norms", "attention", "MLP", "s × s matrices"), 0)
        for each in kept(config, b, s):
            if each.tensor.numel() == b * a * s * s:
                sums["s × s matrices"] += each.num_bytes
            for part, mark in (("norms", ".ln_"), ("attention", ".attn"), ("MLP", ".mlp")):
                if mark in each.module and each.tensor.numel() != b * a * s * s:
                    sums[part] += each.num_bytes
        return sums

    one, two = parts(1), parts(2)
    return {name: (two[name] - one[name]) / (s * b * h) for name in one}


def alive_through_a_step(config: GPTConfig, batch_size: int) -> Meter:
    """Forward and backward of a model without numbers; the marks: "forward" and "backward" are over."""
    with FakeTensorMode():
        model, tokens = GPT(config), torch.zeros(batch_size, config.block_size, dtype=torch.long)
        with Meter() as meter:
            loss = model(tokens, tokens)[1]
            meter.mark("forward")
            loss.backward()
            meter.mark("backward")
    return meter


def least_seconds(work: Callable[[], object]) -> float:
    """Of the quickest of many runs."""
    times: list[float] = []
    end = time.perf_counter() + 0.3
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def matmul_flops_per_second(m: int, k: int, n: int) -> float:
    """What a product of matrices (m, k) and (k, n) reaches."""
    x, y = torch.randn(m, k), torch.randn(k, n)
    return 2 * m * k * n / least_seconds(lambda: x @ y)


def bytes_read_per_second(rows: int, columns: int) -> float:
    """The most that memory gives to one look at a matrix, which should be larger than the caches."""
    matrix, left, right = torch.ones(rows, columns), torch.ones(1, rows), torch.ones(columns)
    looks = matrix.sum, lambda: left @ matrix, lambda: matrix @ right
    return matrix.nbytes / min(map(least_seconds, looks))


def utilization_by_width(mfu: Any, widths: list[int], peak: float) -> list[float]:
    """The MFU of GPTs of two layers, as the learner's function has it."""
    found = []
    for h in widths:
        config = GPTConfig(block_size=128, vocab_size=1024, n_layer=2, n_head=h // 32, n_embd=h, bias=False)
        tokens_per_second = 4 * 128 / step_seconds(GPT(config), 4, 128, repeat=3)
        found.append(mfu(config, tokens_per_second, peak, 128))
    return found


def by_part(config: GPTConfig, batch_size: int, sequence_length: int) -> dict[str, int]:
    """What autograd keeps, by the part of the model whose module keeps it first."""
    sums = dict.fromkeys(("embedding", "attention", "mlp", "norm", "head"), 0)
    marks = {"attn": "attention", "mlp": "mlp", "ln_1": "norm", "ln_2": "norm", "ln_f": "norm"}
    marks |= dict.fromkeys(("wte", "wpe", "drop"), "embedding")
    for each in kept(config, batch_size, sequence_length):
        parts = [marks[piece] for piece in each.module.split(".") if piece in marks]
        sums[parts[0] if parts else "head"] += each.num_bytes
    return sums
