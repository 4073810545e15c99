"""Cut models can be rehearsed: tensors without numbers, on a rank of a group that is not there.

Nothing in a step may depend on a number that is computed on the way: else a plan for a thousand GPUs could
not be tried on one machine.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from nanogpt.model import GPT, GPTConfig
from solutions.sequence_parallel import sequence_parallelize
from solutions.tensor_parallel import tensor_parallelize

fake = pytest.importorskip(
    "torch.testing._internal.distributed.fake_pg",
    reason="this torch has no ranks that are not there",
)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """The last of 64 ranks, alone."""
    dist.init_process_group("fake", rank=63, world_size=64, store=fake.FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("parallelize", [tensor_parallelize, sequence_parallelize], ids=lambda f: f.__name__)
@pytest.mark.parametrize("vocab_size", [128, 101], ids=["even vocabulary", "padded vocabulary"])
def test_a_step_needs_no_numbers(parallelize: Callable, vocab_size: int, group: dist.ProcessGroup) -> None:
    config = GPTConfig(block_size=64, vocab_size=vocab_size, n_layer=2, n_head=64, n_embd=128)
    with torch.device("meta"):
        model = parallelize(GPT(config), group)
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        _, loss = model(tokens, tokens)
        loss.backward()
    assert loss.is_meta
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(gradient is not None and gradient.is_meta for gradient in gradients.values())
    assert gradients["transformer.h.0.mlp.c_fc.weight"].shape == (4 * 128 // 64, 128)
