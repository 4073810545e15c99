"""Trains a GPT that is cut over ranks beside the dense one, on the same batches."""

import copy
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanogpt.model import GPT, GPTConfig
from nanogpt.parallel import Parallel
from nanogpt.technique import Checkpointing


def some_dense_model(config: GPTConfig) -> GPT:
    """The same on every rank, with biases and gains that are not zeros and ones."""
    torch.manual_seed(1)
    dense = GPT(config)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return dense


def train_beside_dense(
    adapter: type[Parallel], implementation: ModuleType | None, config: GPTConfig, length: int, steps: int = 3
) -> dict[str, Any]:
    """On a rank: the largest differences between the two, and the whole weights at the end."""
    dense = some_dense_model(config)
    training = adapter(implementation, dist.group.WORLD)
    torch.manual_seed(100 + dist.get_rank())
    module = training.build(copy.deepcopy(dense), Checkpointing())
    whole = training.whole_state_dict(module)
    same_at_the_start = all(torch.equal(whole[name], tensor) for name, tensor in dense.state_dict().items())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (dense, module)]
    losses, norms = [], []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        idx, targets = torch.randint(config.vocab_size, (2, 3, length), generator=generator)
        pair = [model(idx, targets)[1] for model in (dense, module)]
        for loss in pair:
            loss.backward()
        norms.append(
            [nn.utils.clip_grad_norm_(dense.parameters(), 0.5), training.clip_gradients(module, 0.5)]
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append([loss.item() for loss in pair])
    whole = training.whole_state_dict(module)
    return {
        "same_at_the_start": same_at_the_start,
        "losses": max(abs(a - b) for a, b in losses),
        "norms": max(abs(a - b).item() / a.item() for a, b in norms),
        "weights": max((whole[name] - t).abs().max().item() for name, t in dense.state_dict().items()),
        "names": sorted(whole) == sorted(dense.state_dict()),
        "whole": dict(whole),
    }


def require_the_same(result: dict[str, Any]) -> None:
    """Assert that the two were one in everything."""
    assert result["same_at_the_start"] and result["names"]
    assert result["losses"] < 1e-4
    assert result["norms"] < 1e-4
    assert result["weights"] < 1e-4
