"""What the page measures: bytes, operations and seconds of a step."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lessons.activation_checkpointing.answers import GPT2
from lessons.page.memory import Meter
from nanogpt.model import GPT, GPTConfig, PlainAttention

BATCH_SIZE = 4
Change = Callable[[GPT], GPT]
"""Checkpoints something in a model."""


def new_model(config: GPTConfig, *, plain: bool = False) -> GPT:
    """A GPT, always with the same weights; `plain` has cores of attention made of four operations."""
    torch.manual_seed(0)
    model = GPT(config)
    if plain:
        for block in model.transformer.h:
            block.attn.core = PlainAttention(config.dropout)
    return model


def one_step(model: nn.Module, *inputs: Tensor) -> Meter:
    """The bytes of a forward and a backward; of the gradients, those that are there already do not count."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with Meter() as meter:
        result = model(*inputs)
        loss = result[1] if isinstance(result, tuple) else result.square().sum()
        del result
        meter.mark("backward")
        loss.backward()
    return meter


def step_of(model: GPT, batch_size: int = BATCH_SIZE) -> Meter:
    """The bytes of one step on a batch of random tokens."""
    torch.manual_seed(1)
    shape = 2, batch_size, model.config.block_size
    return one_step(model, *torch.randint(model.config.vocab_size, shape).unbind())


def step_of_gpt2(change: Change | None, batch_size: int) -> Meter:
    """The same of GPT-2, on tensors that have sizes and no numbers."""
    with FakeTensorMode():
        model = GPT(GPT2)
        tokens = torch.zeros(batch_size, GPT2.block_size, dtype=torch.long)
        return one_step(change(model) if change else model, tokens, tokens.clone())


class LossInChunks(nn.Module):
    """A GPT that gives the loss alone, by a function of x (N, h), the head's weight, targets and a length."""

    def __init__(self, model: GPT, loss_of: Callable[..., Tensor], chunk_size: int) -> None:
        super().__init__()
        self.model, self.loss_of, self.chunk_size = model, loss_of, chunk_size

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        x = self.model.embed(idx, torch.arange(idx.size(1)))
        for block in self.model.transformer.h:
            x = block(x)
        x = self.model.transformer.ln_f(x).flatten(0, 1)
        return None, self.loss_of(x, self.model.lm_head.weight, targets.flatten(), self.chunk_size)


def step_of_gpt2_in_chunks(
    change: Change, batch_size: int, loss_of: Callable[..., Tensor], chunk_size: int
) -> Meter:
    """The same, with a head that goes through the tokens in chunks."""
    with FakeTensorMode():
        tokens = torch.zeros(batch_size, GPT2.block_size, dtype=torch.long)
        return one_step(LossInChunks(change(GPT(GPT2)), loss_of, chunk_size), tokens, tokens.clone())


def counted_flops(model: GPT) -> int:
    """FLOPs of one step, by PyTorch's counter."""
    tokens = torch.zeros(BATCH_SIZE, model.config.block_size, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens)[1].backward()
    return counter.get_total_flops()


def seconds_in_turns(models: dict[str, GPT], repeat: int = 9) -> dict[str, tuple[float, float]]:
    """For each model the fastest forward and the fastest step, in seconds of the processor.

    They take turns, so that what else runs on the machine hits all of them.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(repeat):
        for name, model in models.items():
            tokens = torch.zeros(BATCH_SIZE, model.config.block_size, dtype=torch.long)
            began = time.process_time()
            loss = model(tokens, tokens)[1]
            middle = time.process_time()
            loss.backward()
            times[name].append((middle - began, time.process_time() - began))
    return {name: tuple(map(min, zip(*rows, strict=True))) for name, rows in times.items()}


def pytorchs(policy: Any = None, **options: Any) -> Change:
    """What puts PyTorch's checkpoint around every block of a model, with a policy and other options."""
    if policy is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)

    def change(model: GPT) -> GPT:
        for block in model.transformer.h:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
        return model

    return change


class Wide(nn.Sequential):
    """A layer that is eight times as wide inside as outside, with dropout."""

    def __init__(self, width: int) -> None:
        parts = nn.Linear(width, 8 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(8 * width, width)
        super().__init__(*parts)


def step_of_wide_layers(function: Callable | None, num_layers: int = 6, width: int = 256) -> Meter:
    """The bytes of a step through wide layers, each called by `function(layer, x)`; None is a plain call."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Wide(width) for _ in range(num_layers)))
    if function is not None:
        for layer in layers:
            layer.forward = partial(function, layer.forward)
    return one_step(layers, torch.randn(256, width))


def watch(forward: Any, config: GPTConfig) -> tuple[list[Tensor | None], Tensor, Tensor]:
    """The gradient of each block's first weight, and the sizes after forward and after backward."""
    quiet = replace(config, dropout=0.0)
    blocks = new_model(quiet).transformer.h
    x, sizes = torch.randn(2, 16, quiet.n_embd), torch.zeros(quiet.n_layer)
    y = forward(blocks, x, sizes)
    after_forward = sizes.clone()
    y.square().mean().backward()
    return [block.attn.c_attn.weight.grad for block in blocks], after_forward, sizes


def show_watched(watched_forward: Callable, config: GPTConfig) -> None:
    """Whether gradients are right, and what the dashboard shows after forward and after backward."""
    plain = lambda blocks, x, sizes: nn.Sequential(*blocks)(x)  # noqa: E731
    expected = watch(plain, config)[0]
    gradients, after_forward, after_backward = watch(watched_forward, config)
    for i, (gradient, right) in enumerate(zip(gradients, expected, strict=True)):
        same = gradient is not None and torch.allclose(gradient, right, atol=1e-6)
        print(
            f"block {i}: its gradient is right: {same!s:5}  sizes after "
            f"forward {after_forward[i]:.3f}, after backward {after_backward[i]:.3f}"
        )
