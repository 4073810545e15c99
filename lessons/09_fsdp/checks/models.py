"""The models that the checks train, built alike on the ranks and on the judge's side."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import Trial, drawn_with
from nanogpt.model import GPT, GPTConfig

VOCAB = 23
LAYER_BYTES = 1024  # of weights in one layer of `chain`
NUM_LAYERS = 12


class Odd(nn.Module):
    """Everything awkward in one model: a tie, frozen and unused weights, odd sizes, one single number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 7)
        self.left, self.right = nn.Linear(7, 12), nn.Linear(12, 7)
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(1))
        self.idle = nn.Parameter(torch.randn(5))  # no backward ever reaches it
        self.pair = nn.Parameter(torch.randn(2))
        self.head = nn.Linear(7, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.right(self.left(self.embed(tokens)).tanh()) * self.scale + self.pair.prod()
        logits = self.head(self.frozen(x).tanh())
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Roomy(Odd):
    """The same, and no parameter has fewer numbers than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.idle, self.pair = (nn.Parameter(torch.randn(7)) for _ in range(3))


class Chain(nn.Module):
    """Twelve equal layers, 1024 bytes of weights each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(NUM_LAYERS)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return x, x.square().mean()


def odd_gpt() -> GPT:
    """A GPT of sizes that are not divisible by 3 or 4, with frozen weights in a block and outside."""
    model = GPT(GPTConfig(block_size=8, vocab_size=VOCAB, n_layer=3, n_head=2, n_embd=10))
    model.transformer.wpe.weight.requires_grad_(False)
    model.transformer.h[1].mlp.c_fc.weight.requires_grad_(False)
    return model


def thawed_gpt() -> GPT:
    """The same, and nothing is frozen."""
    return odd_gpt().requires_grad_(True)


def narrow_gpt() -> GPT:
    """A GPT whose biases have three numbers, fewer than four ranks; its blocks alone are trained."""
    model = GPT(GPTConfig(block_size=8, vocab_size=VOCAB, n_layer=2, n_head=1, n_embd=3))
    for table in (model.transformer.wte, model.transformer.wpe):
        table.weight.requires_grad_(False)
    return model


def dropping_gpt() -> GPT:
    """A GPT with dropout."""
    return GPT(GPTConfig(block_size=8, vocab_size=VOCAB, n_layer=2, n_head=2, n_embd=8, dropout=0.3))


DEEP = GPTConfig(block_size=4, vocab_size=17, n_layer=10, n_head=2, n_embd=16)


SHORT = replace(DEEP, n_layer=5)


def deep_gpt() -> GPT:
    """A GPT of many blocks, beside which embeddings and activations are small."""
    return GPT(DEEP)


def short_gpt() -> GPT:
    """A GPT of fewer blocks, for bytes that travel: embeddings are small beside them too."""
    return GPT(SHORT)


def build(make: Any, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """The model with the weights that this seed gives; the global random state stays as it was.

    Biases, norms and the like are drawn too: what starts as zero or one on every rank would hide mistakes.
    Weights in float64 have all of its digits: what goes through float32 does not come back the same.
    """
    with drawn_with(seed):
        model = make().to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Clones of all parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def bytes_of(model: nn.Module) -> int:
    """Of all parameters, a tied one once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def seeds(trial: Trial) -> list[int]:
    """A different seed for every rank, so that the ranks start with different weights."""
    first = trial.seed()
    return [first + 1000 * r for r in range(trial.num_ranks)]


def draw(trial: Trial, num_steps: int = 3, sequence: int = 6) -> list[list[tuple[Tensor, Tensor]]]:
    """By rank: tokens and targets (2, s) for each step. The ranks' shares of one batch: all different."""
    return [
        [(trial.tokens(VOCAB, 2, sequence), trial.tokens(VOCAB, 2, sequence)) for _ in range(num_steps)]
        for _ in range(trial.num_ranks)
    ]
