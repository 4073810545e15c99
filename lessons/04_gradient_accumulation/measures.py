"""What the page measures: bytes and seconds of a step, in one pass and in micro-batches."""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lessons.page.memory import Meter
from nanogpt.data import Tokens
from nanogpt.model import GPT, GPTConfig
from solutions.flops_and_memory import count_parameters, model_state_bytes


def new_model(config: GPTConfig) -> GPT:
    """A GPT, always with the same weights."""
    torch.manual_seed(0)
    return GPT(config)


def one_pass(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of a whole batch at once, into `.grad`; the loss."""
    loss = model(inputs, targets)[1]
    loss.backward()
    return loss.detach()


def metered(function: Callable, *arguments: Any) -> Meter:
    """The meter after `function(*arguments)`."""
    with Meter() as meter:
        function(*arguments)
    return meter


def step_seconds(accumulate: Callable, config: GPTConfig, tokens: Tokens, counts: list[int]) -> list[float]:
    """Seconds of a step of 32 sequences in so many micro-batches, the least of two."""
    model, batch = new_model(config), tokens.batch(32, config.block_size, seed=0, step=0)

    def one(k: int) -> float:
        began = time.perf_counter()
        accumulate(model, *batch, k)
        return time.perf_counter() - began

    one(4)  # warm up
    return [min(one(k) for _ in range(2)) for k in counts]


def step_bytes(accumulate: Callable, config: GPTConfig) -> Callable[[int], int]:
    """A function: bytes of weights and optimizer, and the most that a step on micro-batches of b needs more.

    The step is two micro-batches, so that there are gradients already, and AdamW's step after them.
    """
    model = new_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    states = model_state_bytes(count_parameters(config)["total"], "fp32")

    def step(rows: Tensor, goals: Tensor) -> None:
        for _ in range(2):
            accumulate(model, rows, goals, 1)
        optimizer.step()

    @cache  # searches ask for many batches twice
    def needed(b: int) -> int:
        model.zero_grad()
        rows, goals = torch.zeros(2, b, config.block_size, dtype=torch.int64).unbind()
        before = states["weights"] + states["optimizer"] + rows.nbytes + goals.nbytes
        return before + metered(step, rows, goals).peak

    step(
        *torch.zeros(2, 1, config.block_size, dtype=torch.int64).unbind()
    )  # AdamW's state is there from now on
    return needed


def search(needed: Callable[[int], int], memory_bytes: int, most: int = 64) -> int:
    """The largest batch with which a step fits, by halving."""
    fits, too_large = 0, most
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        fits, too_large = (middle, too_large) if needed(middle) <= memory_bytes else (fits, middle)
    return fits


def microbatches(config: GPTConfig, tokens: Tokens) -> list[tuple[Tensor, Tensor]]:
    """Five batches of different lengths."""
    found = []
    for i, length in enumerate((64, 9, 40, 12, 30)):
        inputs, targets = tokens.batch(4, config.block_size, seed=0, step=i)
        found.append((inputs[:, :length], targets[:, :length]))
    return found


def joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Micro-batches as one batch: padded to the longest, with targets that do not count."""
    longest = max(inputs.size(1) for inputs, _ in pairs)
    pad = lambda x, value: nn.functional.pad(x, (0, longest - x.size(1)), value=value)  # noqa: E731
    return torch.cat([pad(x, 0) for x, _ in pairs]), torch.cat([pad(y, -1) for _, y in pairs])


def in_whole_batches(
    model: nn.Module, optimizer: Any, scheduler: Any, pairs: list[tuple[Tensor, Tensor]], accumulate: int
) -> list[float]:
    """The epoch as it should be, on batches that are padded and joined."""
    losses = []
    for first in range(0, len(pairs), accumulate):
        optimizer.zero_grad()
        losses.append(one_pass(model, *joined(pairs[first : first + accumulate])).item())
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
    return losses


def two_epochs(
    train_epoch: Callable, config: GPTConfig, tokens: Tokens
) -> tuple[list[float], list[float], Tensor]:
    """The learning rate at each step of two epochs, the losses that came back, and how the weights moved."""
    model = new_model(config)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    losses: list[float] = []
    for _ in range(2):
        losses += train_epoch(model, optimizer, scheduler, microbatches(config, tokens), 2)
    return rates, losses, nn.utils.parameters_to_vector(model.parameters()).detach() - before
