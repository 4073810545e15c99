"""A line through points: the small model of `clipped_step`, cut over the ranks and in one process."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Gather(torch.autograd.Function):
    """Shards to the whole vector; backward, the mean gradient of this rank's shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.own = group, shard.numel()
        per_rank = -(-size // group.size())
        padded = torch.cat([shard, shard.new_zeros(per_rank - shard.numel())])
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        return torch.cat(parts)[:size]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        gradient /= ctx.group.size()
        per_rank = -(-gradient.numel() // ctx.group.size())
        start = ctx.group.rank() * per_rank
        return gradient[start : start + ctx.own].clone(), None, None


class ShardedLine(nn.Module):
    """A line through points, its weights cut over the ranks; a rank whose shard is empty has no gradient.

    A rank's shard is two parameters.
    """

    def __init__(self, whole: Tensor, group: Any) -> None:
        super().__init__()
        self.group, self.size = group, whole.numel()
        per_rank = -(-self.size // group.size())
        shard = whole[group.rank() * per_rank :][:per_rank]
        self.parts = nn.ParameterList(nn.Parameter(p.clone(), p.numel() > 0) for p in shard.chunk(2))
        self.frozen = nn.Parameter(whole.new_ones(3), requires_grad=False)
        self.bystander = torch.zeros((), requires_grad=True)  # so that every rank's backward has a graph

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        shard = self.shard()
        outputs = inputs @ Gather.apply(shard + self.bystander.to(shard.device), self.group, self.size)
        return outputs, (outputs - targets).square().mean()

    def shard(self) -> Tensor:
        return torch.cat(list(self.parts))


class WholeLine(nn.Module):
    """The same in one process."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.double())

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = inputs.double() @ self.weight
        return outputs, (outputs - targets.double()).square().mean()
