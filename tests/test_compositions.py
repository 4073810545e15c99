"""Two techniques at once, on a mesh of 2 × 2 ranks: the gradients of one process, or a sentence."""

import copy
import itertools
from typing import Any

import pytest
import torch

from grader import run_ranks
from nanogpt.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=53, block_size=16, n_layer=2, n_head=4, n_embd=16, dropout=0.0, bias=True)
ORDER = ("tensor", "sequence", "context", "zero3", "data")
"""From the inside to the outside: what cuts layers, what cuts tokens, what wraps the module."""
TOGETHER = [pair for pair in itertools.combinations(ORDER, 2) if pair != ("tensor", "sequence")]
REFUSED = [
    *((name, name) for name in ("tensor", "sequence", "context", "zero3")),
    ("tensor", "sequence"),
    *((second, first) for first, second in itertools.combinations(ORDER, 2) if second != "data"),
    *(("data", name) for name in ORDER[:-1]),
]


def techniques() -> dict[str, Any]:
    """Name → what makes of a model and a group the cut or wrapped model."""
    from solutions.context_parallel import context_parallelize
    from solutions.data_parallel import DataParallel
    from solutions.fsdp import FullySharded
    from solutions.sequence_parallel import sequence_parallelize
    from solutions.tensor_parallel import tensor_parallelize

    return {
        "tensor": tensor_parallelize,
        "sequence": sequence_parallelize,
        "context": context_parallelize,
        "zero3": FullySharded,
        "data": lambda module, group: DataParallel(module, group, bucket_bytes=2000),
    }


def gradients(names: tuple[str, ...], config: GPTConfig) -> dict[str, float]:
    """Largest relative difference from one process's gradient, by parameter, after two passes."""
    from torch.distributed.device_mesh import init_device_mesh

    from solutions.data_parallel import shard_batch

    apply = techniques()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    torch.manual_seed(3)
    dense = GPT(config).double()
    module: Any = copy.deepcopy(dense)
    for name in names:
        module = apply[name](module, mesh[name].get_group())
    for number in range(2):
        idx, targets = torch.randint(config.vocab_size, (2, 4, config.block_size))
        targets[:, 3 : 5 + number] = -1  # as many in every row: shares of a batch are equal
        _, loss = dense(idx, targets)
        loss.backward()
        for name in names:
            if name in ("zero3", "data"):
                group = mesh[name].get_group()
                idx, targets = shard_batch(idx, group), shard_batch(targets, group)
        _, loss = module(idx, targets)
        loss.backward()
        if names[-1] == "data":
            module.finish_gradient_synchronization()

    expected = copy.deepcopy(dense)
    with torch.no_grad():
        for parameter, its in zip(expected.parameters(), dense.parameters(), strict=True):
            parameter.copy_(its.grad)
        if names[0] in ("tensor", "sequence"):
            apply[names[0]](expected, mesh[names[0]].get_group())
        module = module.module if names[-1] == "data" else module
        for parameter in module.parameters():
            parameter.copy_(parameter.grad)
        found = module.full_state_dict() if "zero3" in names else dict(module.named_parameters())
        return {
            name: float((found[name] - its).abs().max() / its.abs().max())
            for name, its in expected.named_parameters()
        }


@pytest.mark.parametrize("pair", TOGETHER, ids=" x ".join)
def test_two_techniques_have_the_gradients_of_one_process(pair: tuple[str, str]) -> None:
    for rank, differences in enumerate(run_ranks(gradients, pair, CONFIG, ranks=4)):
        wrong = {name: difference for name, difference in differences.items() if not difference < 1e-9}
        assert len(differences) > 20 and not wrong, f"rank {rank}: {wrong}"


def sample_and_refusals(pairs: list[tuple[str, str]], refused: list[tuple[str, str]]) -> dict[str, Any]:
    """Differences of logits to sample from, by pair; what is said of pairs that do not go together."""
    from torch.distributed.device_mesh import init_device_mesh

    apply = techniques()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inner", "outer"))
    groups = [mesh[name].get_group() for name in mesh.mesh_dim_names]
    torch.manual_seed(3)
    dense = GPT(CONFIG).double().eval()
    idx = torch.randint(CONFIG.vocab_size, (2, 12))
    found: dict[str, Any] = {}
    for pair in pairs:
        module: Any = copy.deepcopy(dense)
        for name, group in zip(pair, groups, strict=True):
            module = apply[name](module, group)
        with torch.no_grad():
            found[" x ".join(pair)] = float((module(idx)[0] - dense(idx)[0]).abs().max())
    for first, second in refused:
        module = apply[first](copy.deepcopy(dense), groups[0])
        before = list(module.state_dict())
        try:
            apply[second](module, groups[1])
        except ValueError as error:
            found[f"{second} on {first}"] = str(error)
        assert list(module.state_dict()) == before
    return found


def test_two_techniques_can_be_sampled_from_or_say_that_they_do_not_go_together() -> None:
    for found in run_ranks(sample_and_refusals, TOGETHER, REFUSED, ranks=4):
        assert all(found[" x ".join(pair)] < 1e-9 for pair in TOGETHER), found
        assert all("GPT" in found[f"{second} on {first}"] for first, second in REFUSED), found
