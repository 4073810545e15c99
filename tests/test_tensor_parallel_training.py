"""Tensor parallelism in the training loop: by hand and with DTensor it is the dense model, step for step."""

import copy
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

from grader import run_ranks
from nanogpt.model import GPT, GPTConfig
from nanogpt.technique import find_technique
from solutions import tensor_parallel
from solutions.tensor_parallel_training import TensorParallelTraining

CONFIG = {"block_size": 16, "n_layer": 2, "n_head": 12, "n_embd": 24, "bias": True}


def train_beside_dense(
    implementation: ModuleType | None, vocab_size: int, dropout: float = 0.0, steps: int = 3
) -> dict:
    """Trains a dense GPT and a cut one on the same batches; the largest differences."""
    torch.manual_seed(1)
    dense = GPT(GPTConfig(vocab_size=vocab_size, dropout=dropout, **CONFIG))
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    training = TensorParallelTraining(implementation, dist.group.WORLD)
    torch.manual_seed(100 + dist.get_rank())
    module = training.wrap(copy.deepcopy(dense))
    whole = training.whole_state_dict(module)
    same_at_the_start = all(torch.equal(whole[name], tensor) for name, tensor in dense.state_dict().items())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (dense, module)]
    losses, norms = [], []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        idx, targets = torch.randint(vocab_size, (2, 3, 9), generator=generator)
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
        "table": whole["transformer.wte.weight"],
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("vocab_size", [48, 37])
@pytest.mark.parametrize("implementation", [tensor_parallel, None], ids=["by hand", "DTensor"])
def test_trains_as_the_dense_model(implementation: ModuleType | None, vocab_size: int, ranks: int) -> None:
    for result in run_ranks(train_beside_dense, implementation, vocab_size, ranks=ranks):
        assert result["same_at_the_start"] and result["names"]
        assert result["losses"] < 1e-4
        assert result["norms"] < 1e-4
        assert result["weights"] < 1e-4


@pytest.mark.parametrize("implementation", [tensor_parallel, None], ids=["by hand", "DTensor"])
def test_ranks_agree_with_dropout(implementation: ModuleType | None) -> None:
    first, second = run_ranks(train_beside_dense, implementation, 48, 0.2, ranks=2)
    assert torch.equal(first["table"], second["table"])


def test_heads_that_do_not_divide_are_refused() -> None:
    config = GPTConfig(vocab_size=48, **CONFIG)
    TensorParallelTraining().check(config, 4)
    with pytest.raises(ValueError, match="n_head=12 does not divide by 5 ranks"):
        TensorParallelTraining().check(config, 5)


def test_the_loop_finds_it() -> None:
    assert find_technique("PARALLEL", "tensor_parallel") == (TensorParallelTraining, tensor_parallel)
