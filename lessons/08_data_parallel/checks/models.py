"""The models that the checks train, built alike on the ranks and on the judge's side."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import Trial, drawn_with
from nanogpt.model import GPT, GPTConfig

GRADIENT_BYTES = 1024  # of one layer of `chain`
VOCAB = 512


def chain() -> nn.Sequential:
    """Six equal layers: 1024 bytes of gradient each."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh()) for _ in range(6)])


def tapering() -> nn.Sequential:
    """Layers whose gradients all differ in size: what travels tells whose it is."""
    widths = (16, 24, 20, 12, 18)
    return nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in pairwise(widths)])


SHARED = 11
"""Numbers of a buffer that two modules share; no other tensor of `Mixed` has so many."""


class Drawing(nn.Module):
    """A module inside a module: how often it has drawn, which no float32 counts, two masks, and a float64."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("drawn", torch.randint(2**60, ()))
        self.register_buffer("kept", torch.rand(9) > 0.5)
        self.register_buffer("noise", torch.randn(4), persistent=False)
        self.register_buffer("exact", torch.randn(2, dtype=torch.float64))


class Mixed(nn.Module):
    """Everything awkward in one model: a tie, frozen weights, odd sizes, all kinds of buffers, branches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 7)
        self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.head = nn.Linear(7, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("count", torch.randint(1000, ()))
        self.register_buffer("mask", torch.randn(5), persistent=False)
        self.register_buffer("table", torch.randn(4, 3))
        self.register_buffer("image", torch.randn(2, 3, 2, 2))
        self.inside = nn.Sequential(Drawing())
        self.register_buffer("shared", torch.randn(SHARED))
        self.inside.register_buffer("shared", self.shared)

    def forward(self, tokens: Tensor, order: tuple[str, ...]) -> Tensor:
        x = self.embed(tokens)
        for name in order:
            x = getattr(self, name)(x).tanh()
        return self.head(self.frozen(x))


class Skipping(nn.Module):
    """A layer that a pass may leave out, and then no parameter is used at all.

    With `named`, what it returns stands in a dictionary.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 3)

    def forward(self, x: Tensor, used: bool, named: bool = False) -> Tensor | dict[str, Tensor]:
        y = self.layer(x) if used else x
        return {"y": y} if named else y


class Regression(nn.Module):
    """A small model that is called as GPT is: model(inputs, targets) -> (outputs, loss).

    A target of inf makes the loss inf, and no gradient, as a logit of -inf does where its token comes next. A
    target of -inf makes the loss -inf.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.layers(inputs)
        known = ~targets.isinf()
        return outputs, F.mse_loss(outputs[known], targets[known]) + targets[~known].sum()


def tiny_gpt() -> GPT:
    """A GPT of odd sizes."""
    return GPT(GPTConfig(block_size=8, vocab_size=23, n_layer=2, n_head=2, n_embd=12))


def turn(model: Mixed) -> None:
    """Have two weights and a buffer lie in memory transposed, another buffer in channels_last.

    Their values and shapes stay.
    """
    for layer in (model.left, model.right):
        layer.weight.data = layer.weight.data.t().contiguous().t()
    model.table = model.table.t().contiguous().t()
    model.image = model.image.contiguous(memory_format=torch.channels_last)


def build(make: Any, seed: int) -> Any:
    """The model with the weights that this seed gives; the global random state stays as it was."""
    with drawn_with(seed):
        return make()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Clones of all gradients by name; None where there is none."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Clones of all parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def seeds(trial: Trial) -> list[int]:
    """A different seed for every rank, so that the ranks start with different weights."""
    first = trial.seed()
    return [first + 1000 * r for r in range(trial.num_ranks)]


def by_rank(results: list[dict], key: str, name: str) -> list[Tensor | None]:
    """One named tensor of all ranks."""
    return [result[key][name] for result in results]
