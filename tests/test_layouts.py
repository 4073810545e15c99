"""The references take what lies in memory as it likes, and ranks that have nothing."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grader import run_ranks
from solutions.collectives import relay_microbatches
from solutions.fsdp import clipped_step


def relay_of_transposed() -> list[Tensor]:
    group = dist.group.WORLD
    inputs = [torch.arange(6.0).view(2, 3).t() + i for i in range(3)]  # (3, 2)
    return relay_microbatches(lambda x: 2 * x, inputs, group)


def test_a_relays_inputs_may_lie_transposed() -> None:
    outputs = run_ranks(relay_of_transposed, ranks=2)[-1]
    for i, output in enumerate(outputs):
        assert torch.equal(output, 4 * (torch.arange(6.0).view(2, 3).t() + i))


class OneShard(nn.Module):
    """Rank 0 has the weight, and rank 1 none of it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3 if rank == 0 else 0, dtype=torch.float64))

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.weight.sum() * inputs
        return outputs, outputs.sum() if len(self.weight) else inputs.clone().requires_grad_().sum()


def norm_of_one_shard() -> Tensor:
    module = OneShard(dist.get_rank())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.ones(1, dtype=torch.float64)
    return clipped_step(module, optimizer, x, x, 1.0, dist.group.WORLD)


def test_a_norm_in_float64_reaches_a_rank_without_gradients() -> None:
    norms = run_ranks(norm_of_one_shard, ranks=2)
    assert all(torch.isclose(norm, torch.tensor(3.0, dtype=torch.float64).sqrt()) for norm in norms)
