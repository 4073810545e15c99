"""The loss of a GPT that was cut with a slip: the dense one, in which the slip was made on purpose."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import parts
from nanogpt.model import GPT

BIASES = "the bias n times: every rank added it before the sum"


class OwnTokens(nn.Module):
    """An attention core in which tokens see those of their own rank, up to themselves."""

    def __init__(self, owner: Tensor) -> None:
        super().__init__()
        self.seen = (owner.unsqueeze(1) == owner.unsqueeze(0)).tril()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen)


def losses_of_slips(dense: GPT, idx: Tensor, targets: Tensor, num_ranks: int) -> dict[str, Tensor]:
    """Cause → the loss that it leads to, on all ranks. The dense model is left as it is."""
    if num_ranks == 1:
        return {}
    n, s = num_ranks, idx.size(1)
    places = torch.arange(s)
    found = {
        "the positions' embedding counts n times: it was added before the sum": _loss(
            dense, idx, targets, places, lambda model: model.transformer.wpe.weight.mul_(n)
        ),
        BIASES: _loss(dense, idx, targets, places, lambda model: _scale_biases(model, n)),
        "the biases after a sum are missing": _loss(
            dense, idx, targets, places, lambda model: _scale_biases(model, 0)
        ),
        "targets that do not count (-1) are counted in the mean": _mean_over_all(dense, idx, targets),
    }
    if s % n == 0:
        owner = places // (s // n)
        local = torch.cat([torch.arange(len(own)) for own in parts(places, 0, n)])
        found |= {
            "positions count from 0 on every rank": _loss(dense, idx, targets, local),
            "tokens see those of their own rank alone": _loss(
                dense, idx, targets, places, lambda model: _cut_attention(model, owner)
            ),
            "tokens see those of their own rank alone, and positions count from 0 on every rank": _loss(
                dense, idx, targets, local, lambda model: _cut_attention(model, owner)
            ),
        }
    return found


@torch.no_grad()
def _loss(
    dense: GPT, idx: Tensor, targets: Tensor, positions: Tensor, change: Callable[[GPT], object] = bool
) -> Tensor:
    model = copy.deepcopy(dense)
    change(model)
    x = model.embed(idx, positions)
    for block in model.transformer.h:
        x = block(x)
    return model.loss(model.head(x), targets)


@torch.no_grad()
def _mean_over_all(dense: GPT, idx: Tensor, targets: Tensor) -> Tensor:
    return dense(idx, targets)[1] * (targets != -1).sum() / targets.numel()


def _scale_biases(model: GPT, factor: float) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("c_proj.bias"):
            parameter.mul_(factor)


def _cut_attention(model: GPT, owner: Tensor) -> None:
    for block in model.transformer.h:
        block.attn.core = OwnTokens(owner)
