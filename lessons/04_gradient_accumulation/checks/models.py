"""Models that the checks train, built alike on the rank and on the judge's side, and their true gradients."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grader.checks import Trial, drawn_with
from nanogpt.model import GPT, GPTConfig

Gradients = dict[str, Tensor]
Part = tuple[Tensor, Tensor, float]
"""Tokens, next tokens, and the weight with which their mean loss counts."""


def draw_config(trial: Trial, dropout: float = 0.0) -> GPTConfig:
    """A small GPT of odd sizes."""
    return GPTConfig(
        block_size=11,
        vocab_size=trial.integer(19, 37),
        n_layer=trial.integer(1, 2),
        n_head=3,
        n_embd=3 * trial.integer(3, 5),
        dropout=dropout,
        bias=trial.choice([True, False]),
    )


class Smoothed(GPT):
    """A GPT with a loss of its own: of what it wants, a share `smoothing` goes to all tokens alike.

    It counts how often its forward runs, called with its hooks or without.
    """

    def __init__(self, config: GPTConfig, smoothing: float) -> None:
        super().__init__(config)
        self.smoothing = smoothing
        self.num_forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.num_forwards += 1
        return super().forward(*args, **kwargs)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1, label_smoothing=self.smoothing
        )


def build(config: GPTConfig, seed: int, smoothing: float = 0.0) -> GPT:
    """The model with the weights that this seed gives; the global random state stays as it was."""
    with drawn_with(seed):
        return Smoothed(config, smoothing) if smoothing else GPT(config)


def gradients(model: GPT) -> dict[str, Tensor | None]:
    """Clones of all gradients by name; None where there is none."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def weighted(
    config: GPTConfig, seed: int, parts: Iterable[Part], smoothing: float = 0.0
) -> tuple[Tensor, Gradients]:
    """The weighted sum of the parts' mean losses, and its gradient, in float64 and without dropout."""
    model = build(config, seed, smoothing).double().eval()
    total = torch.zeros((), dtype=torch.float64)
    for rows, goals, weight in parts:
        loss = model(rows, goals)[1] * weight
        loss.backward()
        total += loss.detach()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return total, found


def counted(targets: Tensor) -> int:
    """How many targets are not -1."""
    return int((targets != -1).sum())
