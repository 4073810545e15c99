"""Sequence parallelism in the training loop: by hand and with DTensor it is the dense model, step by step."""

import copy
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

from grader import run_ranks
from nanogpt.model import GPT, GPTConfig
from nanogpt.technique import Checkpointing, find_technique
from solutions import sequence_parallel
from solutions.sequence_parallel_training import SequenceParallelTraining

CONFIG = {"block_size": 24, "n_layer": 2, "n_head": 12, "n_embd": 24, "bias": True}


def some_dense_model(vocab_size: int, dropout: float) -> GPT:
    torch.manual_seed(1)
    dense = GPT(GPTConfig(vocab_size=vocab_size, dropout=dropout, **CONFIG))
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return dense


def train_beside_dense(
    implementation: ModuleType | None, vocab_size: int, dropout: float = 0.0, steps: int = 3
) -> dict:
    """Trains a dense GPT and a cut one on the same batches; the largest differences."""
    dense = some_dense_model(vocab_size, dropout)
    training = SequenceParallelTraining(implementation, dist.group.WORLD)
    torch.manual_seed(100 + dist.get_rank())
    module = training.build(copy.deepcopy(dense), Checkpointing())
    whole = training.whole_state_dict(module)
    same_at_the_start = all(torch.equal(whole[name], tensor) for name, tensor in dense.state_dict().items())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (dense, module)]
    losses, norms = [], []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        idx, targets = torch.randint(vocab_size, (2, 3, 12), generator=generator)
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
        "replicated": {name: whole[name] for name in whole if whole[name].dim() == 1},
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("vocab_size", [48, 37])
@pytest.mark.parametrize("implementation", [sequence_parallel, None], ids=["by hand", "DTensor"])
def test_trains_as_the_dense_model(implementation: ModuleType | None, vocab_size: int, ranks: int) -> None:
    for result in run_ranks(train_beside_dense, implementation, vocab_size, ranks=ranks):
        assert result["same_at_the_start"] and result["names"]
        assert result["losses"] < 1e-4
        assert result["norms"] < 1e-4
        assert result["weights"] < 1e-4


@pytest.mark.parametrize("implementation", [sequence_parallel, None], ids=["by hand", "DTensor"])
def test_copies_agree_with_dropout(implementation: ModuleType | None) -> None:
    first, second = run_ranks(train_beside_dense, implementation, 48, 0.2, ranks=2)
    for name, tensor in first["replicated"].items():
        assert torch.allclose(tensor, second["replicated"][name], atol=1e-6), name


def sample_beside_dense(length: int) -> bool:
    dense = some_dense_model(37, 0.0).eval()
    module = sequence_parallel.sequence_parallelize(copy.deepcopy(dense), dist.group.WORLD)
    idx = torch.randint(37, (2, length), generator=torch.Generator().manual_seed(2))
    return torch.equal(module.generate(idx, 6, top_k=1), dense.generate(idx, 6, top_k=1))


@pytest.mark.parametrize("length", [1, 22])
def test_samples_at_any_length(length: int) -> None:
    assert all(run_ranks(sample_beside_dense, length, ranks=4))


def refusal() -> str:
    module = sequence_parallel.sequence_parallelize(some_dense_model(48, 0.0), dist.group.WORLD)
    idx = torch.zeros(1, 7, dtype=torch.int64)
    try:
        module(idx, idx)
    except ValueError as error:
        return str(error)
    return ""


def test_training_needs_a_length_that_divides() -> None:
    assert set(run_ranks(refusal, ranks=2)) == {
        "sequence length=7 does not divide by the 2 ranks of the group"
    }


def test_what_does_not_divide_is_refused() -> None:
    config = GPTConfig(vocab_size=48, **CONFIG)
    SequenceParallelTraining().check(config, 4)
    with pytest.raises(ValueError, match="n_head=12 does not divide by 5 ranks"):
        SequenceParallelTraining().check(config, 5)
    config = GPTConfig(vocab_size=48, **(CONFIG | {"block_size": 26}))
    with pytest.raises(ValueError, match="block_size=26 does not divide by 4 ranks"):
        SequenceParallelTraining().check(config, 4)


def kept_bytes(dropout: float, scheme: str) -> tuple[int, int]:
    """What autograd keeps of one block on this rank, measured and predicted."""
    group, config = dist.group.WORLD, GPTConfig(vocab_size=48, dropout=dropout, **CONFIG)
    block = sequence_parallel.sequence_parallel_block(some_dense_model(48, dropout).transformer.h[0], group)
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
