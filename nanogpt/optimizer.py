"""The optimizer and its learning rate."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from nanogpt.config import TrainConfig


def adamw(module: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW in nanoGPT's two groups: matrices and tables decay, biases and norms do not."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    # One fused kernel, except for sharded parameter types (DTensor), which have no such kernel.
    fused = all(type(parameter) is nn.Parameter for parameter in parameters)
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused or None
    )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their norm is at most max_norm; returns the norm before."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if not trained:
        return torch.tensor(0.0)
    squares = [_sum_of_squares(parameter.grad.detach().float()) for parameter in trained]
    norm = torch.stack(squares).sum().sqrt()
    nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
    return norm


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """Of all elements, read once.

    torch's `vector_norm` adds up a long tensor carelessly on the CPU: a relative 1e-4 for two million fp32
    numbers, which is enough to part the curves of one rank and of many. So it is asked for the norm of each
    row, and then for the norm of these.
    """
    if type(gradient) is not Tensor:  # the rows of a DTensor may be cut, and every norm would be sent round
        return gradient.square().sum()
    return vector_norm(vector_norm(gradient, dim=-1)).square()


def learning_rate(step: int, config: TrainConfig) -> float:
    """Of the given step, counted from 0: a linear warm-up, then half a cosine, then constant."""
    end = config.decay_steps or config.max_steps
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if step >= end:
        return config.min_learning_rate
    progress = (step - config.warmup_steps) / max(1, end - config.warmup_steps)
    wave = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_learning_rate + wave * (config.learning_rate - config.min_learning_rate)
