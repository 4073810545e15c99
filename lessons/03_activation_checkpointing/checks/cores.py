"""Cores of attention that say how often they are called, or have a known slip."""

from typing import Any

import torch
from torch import Tensor, nn

from nanogpt.model import GPT, FusedAttention, GPTConfig, PlainAttention

from .models import gpt


class KeepsItsInputs(nn.Module):
    """What a core that is computed again keeps: queries, keys, values, and a result of its own."""

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(q, k, v)
            return v.contiguous().clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return gradient, gradient, gradient

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.Kept.apply(q, k, v)


class Counted(PlainAttention):
    """Knows how often it was called."""

    calls = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(q, k, v)


class CountedFused(FusedAttention):
    """The same of a fused core."""

    calls = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(q, k, v)


CountedFused.__name__ = FusedAttention.__name__  # for who asks a core what it is


class ByHand(nn.Module):
    """A core whose backward is written by hand and has a slip, to tell what that looks like."""

    class Core(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, slip: tuple[str, str], dropout: nn.Module, q: Tensor, k: Tensor, v: Tensor
        ) -> Tensor:
            future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
            scores = (q @ k.transpose(-2, -1)) / q.size(-1) ** 0.5
            probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
            factors = dropout(torch.ones_like(probabilities))
            ctx.slip = slip
            ctx.save_for_backward(q, k, v, probabilities, factors)
            return (probabilities * factors) @ v

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, Tensor, Tensor]:
            q, k, v, probabilities, factors = ctx.saved_tensors
            ways = {FACTORS: factors, MASK: factors > 0, NOTHING: 1.0}
            passed, summed = (gradient @ v.transpose(-2, -1) * ways[way] for way in ctx.slip)
            row_sums = (probabilities * summed).sum(-1, keepdim=True)
            of_scores = probabilities * (passed - row_sums) / q.size(-1) ** 0.5
            of_v = (probabilities * factors).transpose(-2, -1) @ gradient
            return None, None, of_scores @ k, of_scores.transpose(-2, -1) @ q, of_v

    def __init__(self, slip: tuple[str, str], dropout: nn.Module) -> None:
        super().__init__()
        self.slip, self.dropout = slip, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.Core.apply(self.slip, self.dropout, q, k, v)


FACTORS, MASK, NOTHING = "factors", "mask", "nothing"
UNSCALED = (
    "in the core's backward, the gradient of the probabilities is masked by dropout, but not divided by 1 - p"
)
UNDROPPED = "in the core's backward, the gradient of the probabilities has not passed dropout"
SUMS_RIGHT = ", while the sums that softmax subtracts are right"
BY_HAND = {
    UNSCALED: (MASK, MASK),
    UNSCALED + SUMS_RIGHT: (MASK, FACTORS),
    UNDROPPED: (NOTHING, NOTHING),
    UNDROPPED + SUMS_RIGHT: (NOTHING, FACTORS),
    "in the core's backward, what softmax subtracts in each row is a sum without dropout": (FACTORS, NOTHING),
}
"""What it looks like → what dropout's backward multiplies by: for the gradient, and in softmax's sums."""

FACTORS_OF_THE_FORWARD = (
    "Dropout's backward multiplies by the very factors of the forward: 0 where it dropped, and 1/(1 - p) "
    "elsewhere. Softmax's backward subtracts, in each row, the sum of probability times that product."
)


def make(kind: str, config: GPTConfig) -> GPT:
    """A GPT with cores of a kind: "fused" or "plain"."""
    model = gpt(config, plain_attention=False)
    for block in model.transformer.h:
        block.attn.core = (Counted if kind == "plain" else CountedFused)(config.dropout)
    return model
