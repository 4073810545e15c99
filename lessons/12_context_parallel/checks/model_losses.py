"""What the loss is of a GPT whose parts of the sequence, or sums over them, are put together otherwise."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import Fault, Trial
from nanogpt.model import GPT, GPTConfig

from .shared import attention, causal, plain_positions, zigzag_positions


def small_config(trial: Trial, **changed: Any) -> dict:
    """A small GPT, of which no size is that of the sequence."""
    length = 2 * trial.num_ranks * trial.choice((3, 5))
    sizes = {"block_size": length + 2 * trial.num_ranks, "vocab_size": 29, "n_layer": 2, "n_head": 5}
    return {**sizes, "n_embd": 20, "bias": trial.choice((True, False)), "length": length, **changed}


def drawn(trial: Trial, sizes: dict) -> dict[str, Tensor]:
    """Weights with which attention, positions and biases all matter.

    None sharpens the softmax: with c_attn twice as large, fp32 alone comes near the tolerance now and then.
    """
    weights = {}
    for name, parameter in GPT(config_of(sizes)).named_parameters():
        scale = 1 / math.sqrt(parameter.size(-1)) if parameter.dim() > 1 else 0.5
        gain = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
        weights[name] = gain + (2.0 if "wpe" in name else 1.0) * scale * trial.normal(*parameter.shape)
    return weights


def config_of(sizes: dict) -> GPTConfig:
    return GPTConfig(**{key: value for key, value in sizes.items() if key != "length"})


def built(sizes: dict, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> GPT:
    model = GPT(config_of(sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model.to(dtype)


class Masked(nn.Module):
    """An attention core with a mask of the judge's."""

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, self.seen)[0]


def each_loss(model: GPT, idx: Tensor, targets: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
    """Cross entropy of every target (b, s), 0 where it is -1, in one process, with any positions and mask.

    The model's attention has that mask afterwards.
    """
    for block in model.transformer.h:
        block.attn.core = Masked(seen)
    x = model.embed(idx, positions)
    for block in model.transformer.h:
        x = block(x)
    return F.cross_entropy(model.head(x).transpose(1, 2), targets, ignore_index=-1, reduction="none")


def dense(sizes: dict, weights: dict, idx: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    model = built(sizes, weights, torch.float64).eval()
    loss = model(idx, targets)[1]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def other_losses(seen: SimpleNamespace, targets: Tensor) -> dict[str, Any]:
    """Cause → the loss that it leads to, one or one a rank."""
    s = targets.size(1)
    model = built(seen.sizes, seen.weights, torch.float64)
    losses = each_loss(model, seen.idx, targets, torch.arange(s), causal(s)).detach()
    found: dict[str, Any] = {
        "it is the sum over the tokens, not the mean": losses.sum(),
        "ignored targets (-1) are counted in the mean": losses.mean(),
    }
    if seen.num_ranks > 1:
        for way in CUTS:
            found |= _of_parts(losses, targets, way, seen.num_ranks)
            found |= _cut_otherwise(model, seen.idx, targets, way, seen.num_ranks)
    return found


CUTS = {"plain": plain_positions, "zigzag": zigzag_positions}


def _of_parts(losses: Tensor, targets: Tensor, way: str, n: int) -> dict[str, Any]:
    """What comes of the right losses of the tokens, if the ranks put them together in another way."""
    s, count = targets.size(1), (targets != -1).sum()
    parts = [CUTS[way](s, r, n) for r in range(n)]
    sums = torch.stack([losses[:, p].sum() for p in parts])
    counts = torch.stack([(targets[:, p] != -1).sum() for p in parts])
    if not counts.all():
        nothing = torch.where(counts > 0, 0.0, math.nan)  # 0 / 0
        return {
            "a rank divides by its own count, and where that counts no target 0 / 0 is NaN": list(
                losses.sum() / count + nothing
            ),
            "the mean of a rank that counts no target is NaN, and so is all that it is added to": (
                losses.sum() / count + nothing.sum()
            ),
        }
    return {
        f"the ranks' own means are averaged, and they count different numbers ({way} parts)": (
            sums / counts
        ).mean(),
        f"the ranks' own means are added up ({way} parts)": (sums / counts).sum(),
        f"it is this rank's own mean ({way} parts)": Fault(list(sums / counts), on_some_ranks=True),
        f"it is this rank's own sum, over the count of all ({way} parts)": Fault(
            list(sums / count), on_some_ranks=True
        ),
    }


def _cut_otherwise(model: GPT, idx: Tensor, targets: Tensor, way: str, n: int) -> dict[str, Tensor]:
    """The loss if tokens are cut in one way, and their positions, targets or the causal mask in another."""
    s = targets.size(1)
    (other,) = CUTS.keys() - {way}
    local, owner, taken, full, mirrored = (torch.empty(s, dtype=torch.int64) for _ in range(5))
    for r in range(n):
        mine = CUTS[way](s, r, n)
        mirrored[mine] = CUTS[way](s, n - 1 - r, n)
        full[mine] = CUTS[way](model.config.block_size, r, n)[: len(mine)]
        local[mine], owner[mine], taken[mine] = torch.arange(len(mine)), r, CUTS[other](s, r, n)
    places = torch.arange(s)
    alike = owner.unsqueeze(1) == owner.unsqueeze(0)
    as_other = taken.unsqueeze(1) >= taken.unsqueeze(0)

    def mean(positions: Tensor, mask: Tensor, targets: Tensor = targets) -> Tensor:
        return each_loss(model, idx, targets, positions, mask).detach().sum() / (targets != -1).sum()

    return {
        f"positions count from 0 on every rank ({way} parts)": mean(local, causal(s)),
        f"positions are {way} parts of block_size, and not of the sequence that is given": mean(
            full, causal(s)
        ),
        f"a rank has the positions of the opposite one, rank 0 those of the last ({way} parts)": mean(
            mirrored, causal(s)
        ),
        f"tokens see those of their own rank only ({way} parts)": mean(places, causal(s) & alike),
        f"that, and positions from 0 on every rank ({way} parts)": mean(local, causal(s) & alike),
        f"tokens are cut into {way} parts, and their positions into {other} ones": mean(taken, causal(s)),
        f"tokens are cut into {way} parts, and attention takes them for {other} ones": mean(places, as_other),
        f"tokens are cut into {way} parts, and positions and attention take them for {other} ones": mean(
            taken, as_other
        ),
        f"every rank takes the first s/n targets ({way} parts)": mean(places, causal(s), targets[:, local]),
        f"tokens are cut into {way} parts, and targets into {other} ones": mean(
            places, causal(s), targets[:, taken]
        ),
    }


def of_own_means(seen: SimpleNamespace, targets: Tensor) -> dict[str, dict[str, Fault]]:
    """Cause → by parameter's name, the sum of the gradients of ranks' own means; all count some targets."""
    step = (
        "Divide this rank's sum by the count of all. An all-reduce writes into what it is given, and torch "
        "does not see that autograd has kept that for backward: give it a clone()."
    )
    found = {}
    for way, positions in CUTS.items():
        by_rank = []
        for r in range(seen.num_ranks):
            own = torch.full_like(targets, -1)
            mine = positions(targets.size(1), r, seen.num_ranks)
            own[:, mine] = targets[:, mine]
            by_rank.append(dense(seen.sizes, seen.weights, seen.idx, own)[1])
        cause = (
            f"the loss is divided by the count of all ranks, and its gradient by each rank's own ({way} "
            "parts): was the count all-reduced in place, when autograd had kept it?"
        )
        found[cause] = {name: Fault(sum(g[name] for g in by_rank), step) for name in by_rank[0]}
    return found


def uneven(trial: Trial, sizes: dict, b: int) -> Tensor:
    """Targets of which the ranks count different numbers, with plain and with zigzag parts."""
    length, n = sizes["length"], trial.num_ranks
    share = torch.full((2 * n,), 0.9)
    share[0], share[-1] = 0.15, 0.4
    keep = torch.rand(b, length, generator=torch.Generator().manual_seed(trial.seed()))
    keep = keep < share.repeat_interleave(length // (2 * n))
    keep[0, 1] = keep[0, length // 2] = True
    return trial.tokens(sizes["vocab_size"], b, length).masked_fill(~keep, -1)
