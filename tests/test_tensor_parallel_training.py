"""Tensor parallelism in the training loop: by hand and with DTensor it is the dense model, step for step."""

from types import ModuleType

import pytest
import torch

from grader import run_ranks
from nanogpt.model import GPTConfig
from nanogpt.technique import find_technique
from solutions import tensor_parallel
from solutions.tensor_parallel_training import TensorParallelTraining
from tests.beside_dense import require_the_same, train_beside_dense

CONFIG = {"block_size": 16, "n_layer": 2, "n_head": 12, "n_embd": 24, "bias": True}


def train(implementation: ModuleType | None, vocab_size: int, dropout: float = 0.0) -> dict:
    config = GPTConfig(vocab_size=vocab_size, dropout=dropout, **CONFIG)
    return train_beside_dense(TensorParallelTraining, implementation, config, length=9)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("vocab_size", [48, 37])
@pytest.mark.parametrize("implementation", [tensor_parallel, None], ids=["by hand", "DTensor"])
def test_trains_as_the_dense_model(implementation: ModuleType | None, vocab_size: int, ranks: int) -> None:
    for result in run_ranks(train, implementation, vocab_size, ranks=ranks):
        require_the_same(result)


@pytest.mark.parametrize("implementation", [tensor_parallel, None], ids=["by hand", "DTensor"])
def test_ranks_agree_with_dropout(implementation: ModuleType | None) -> None:
    first, second = run_ranks(train, implementation, 48, 0.2, ranks=2)
    table = "transformer.wte.weight"
    assert torch.equal(first["whole"][table], second["whole"][table])


def test_heads_that_do_not_divide_are_refused() -> None:
    config = GPTConfig(vocab_size=48, **CONFIG)
    TensorParallelTraining().check(config, 4)
    with pytest.raises(ValueError, match="n_head=12 is not divisible by 5 ranks"):
        TensorParallelTraining().check(config, 5)


def test_the_loop_finds_it() -> None:
    assert find_technique("PARALLEL", "tensor_parallel") == (TensorParallelTraining, tensor_parallel)
