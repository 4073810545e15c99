"""Sequence parallelism in the training loop: by hand and with DTensor it is the dense model, step by step."""

import copy
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from grader import run_ranks
from nanogpt.model import GPTConfig
from nanogpt.technique import find_technique
from solutions import sequence_parallel
from solutions.sequence_parallel_training import SequenceParallelTraining
from tests.alternatives import sequence_parallel__torch
from tests.beside_dense import require_the_same, some_dense_model, train_beside_dense

CONFIG = {"block_size": 24, "n_layer": 2, "n_head": 12, "n_embd": 24, "bias": True}


def gpt_config(vocab_size: int, dropout: float = 0.0) -> GPTConfig:
    return GPTConfig(vocab_size=vocab_size, dropout=dropout, **CONFIG)


def train(implementation: ModuleType | None, vocab_size: int, dropout: float = 0.0) -> dict:
    config = gpt_config(vocab_size, dropout)
    return train_beside_dense(SequenceParallelTraining, implementation, config, length=12)


IMPLEMENTATIONS = {
    "by hand": sequence_parallel,
    "DTensor": None,
    "a learner's plan": sequence_parallel__torch,
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("vocab_size", [48, 37])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_trains_as_the_dense_model(implementation: ModuleType | None, vocab_size: int, ranks: int) -> None:
    for result in run_ranks(train, implementation, vocab_size, ranks=ranks):
        require_the_same(result)


@pytest.mark.parametrize("implementation", [sequence_parallel, None], ids=["by hand", "DTensor"])
def test_copies_agree_with_dropout(implementation: ModuleType | None) -> None:
    first, second = run_ranks(train, implementation, 48, 0.2, ranks=2)
    for name, tensor in first["whole"].items():
        assert tensor.dim() > 1 or torch.allclose(tensor, second["whole"][name], atol=1e-6), name


def sample_beside_dense(length: int) -> bool:
    dense = some_dense_model(gpt_config(37)).eval()
    module = sequence_parallel.sequence_parallelize(copy.deepcopy(dense), dist.group.WORLD)
    idx = torch.randint(37, (2, length), generator=torch.Generator().manual_seed(2))
    return torch.equal(module.generate(idx, 6, top_k=1), dense.generate(idx, 6, top_k=1))


@pytest.mark.parametrize("length", [1, 22])
def test_samples_at_any_length(length: int) -> None:
    assert all(run_ranks(sample_beside_dense, length, ranks=4))


def refusal() -> str:
    module = sequence_parallel.sequence_parallelize(some_dense_model(gpt_config(48)), dist.group.WORLD)
    idx = torch.zeros(1, 7, dtype=torch.int64)
    try:
        module(idx, idx)
    except ValueError as error:
        return str(error)
    return ""


def test_training_needs_a_length_that_divides() -> None:
    assert set(run_ranks(refusal, ranks=2)) == {
        "sequence length=7 is not divisible by the 2 ranks of the group"
    }


def test_what_does_not_divide_is_refused() -> None:
    config = GPTConfig(vocab_size=48, **CONFIG)
    SequenceParallelTraining().check(config, 4)
    with pytest.raises(ValueError, match="n_head=12 is not divisible by 5 ranks"):
        SequenceParallelTraining().check(config, 5)
    config = GPTConfig(vocab_size=48, **(CONFIG | {"block_size": 26}))
    with pytest.raises(ValueError, match="block_size=26 is not divisible by 4 ranks"):
        SequenceParallelTraining().check(config, 4)


def kept_bytes(dropout: float, scheme: str) -> tuple[int, int]:
    """What autograd keeps of one block on this rank, measured and predicted."""
    group, config = dist.group.WORLD, GPTConfig(vocab_size=48, dropout=dropout, **CONFIG)
    block = sequence_parallel.sequence_parallel_block(
        some_dense_model(gpt_config(48, dropout)).transformer.h[0], group
    )
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(torch.randn(2, 12 // group.size(), 24, requires_grad=True))
    predicted = sequence_parallel.block_activation_bytes(config, 2, 12, group.size(), scheme)
    return sum(kept.values()), predicted


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_predicted_bytes_are_kept(dropout: float, ranks: int) -> None:
    for measured, predicted in run_ranks(kept_bytes, dropout, "gather_again", ranks=ranks):
        assert measured == predicted


def test_the_loop_finds_it() -> None:
    assert find_technique("PARALLEL", "sequence_parallel") == (SequenceParallelTraining, sequence_parallel)
