"""What the checks compute with: functions and models that write down how they are run."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from nanogpt.model import GPT, GPTConfig, PlainAttention

STATE_BYTES = 12_000
"""What one checkpoint may keep besides tensors of the model: random states, of about 5,000 bytes each."""


class Layers(nn.Module):
    """Two linear layers, wide in between, with dropout. Writes down every call."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.calls: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(describe_call(x.device.type))
        return self.down(self.dropout(nn.functional.gelu(self.up(x))))


def describe_call(device: str) -> dict[str, Any]:
    """Under which circumstances the code that calls this runs."""
    frame, by_torch = sys._getframe(1), False
    while frame is not None:
        by_torch = by_torch or frame.f_code.co_filename.endswith("torch/utils/checkpoint.py")
        frame = frame.f_back
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"
    return {"by_torch": by_torch, "autocast": autocast}


def checkpoint_of(rank: Any, how: str) -> Callable[..., Tensor]:
    """The submission's `checkpoint`, or what a probe compares it with."""
    ways = {
        "plain": lambda function, *inputs: function(*inputs),
        "another mask": lambda function, *inputs: torch_checkpoint(
            function, *inputs, use_reentrant=False, preserve_rng_state=False
        ),
    }
    return ways.get(how) or rank.submission.checkpoint


def build(make: Callable[[], Any], seed: int, device: torch.device) -> Any:
    """What `make` makes with the weights that this seed gives."""
    torch.manual_seed(seed)
    return make().to(device)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Clones of all gradients by name; None where there is none."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def gpt(config: GPTConfig, plain_attention: bool) -> GPT:
    """A GPT, on request with the core of attention as four plain operations."""
    model = GPT(config)
    if plain_attention:
        for block in model.transformer.h:
            block.attn.core = PlainAttention(config.dropout)
    return model


class Log:
    """Which block began to compute, in order; the first norm of a block is the first thing it runs."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.entries: list[int] = []
        for i, block in enumerate(blocks):
            block.ln_1.register_forward_pre_hook(lambda *_, i=i: self.entries.append(i))
