"""Lesson 09 on PyTorch's own: ZeroRedundancyOptimizer that reduces to owners, fully_shard in a wrapper."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer


class ShardedOptimizer(ZeroRedundancyOptimizer):
    def __init__(self, params, optimizer_class, group, **kwargs):
        params = list(params)
        super().__init__(params, optimizer_class, process_group=group, **kwargs)
        self.owners = group

    @torch.no_grad()
    def step(self, closure=None, **kwargs):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for rank, groups in enumerate(self._partition_parameters()):
            for p in [p for g in groups for p in g["params"] if p.grad is not None]:
                p.grad = p.grad / self.owners.size()
                dist.reduce(p.grad, group=self.owners, group_dst=rank)
        super().step(**kwargs)
        return loss

    def state_dict(self):
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        return self.optim.state_dict()

    def load_state_dict(self, state):
        self.optim.load_state_dict(state)
        self._sync_param_groups(self.optim.param_groups, self.param_groups)


def fully_shard_gpt(model, mesh):
    for block in reversed(model.transformer.h):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def clipped_step(module, optimizer, inputs, targets, max_norm, group):
    """PyTorch's norm of nothing is float32: it is brought to the dtype of the first parameter."""
    optimizer.zero_grad()
    module(inputs, targets)[1].backward()
    shards = list(module.parameters())
    own = nn.utils.get_total_norm([p.grad for p in shards if p.grad is not None])
    total = own.to(shards[0].dtype).square()
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    nn.utils.clip_grads_with_norm_(shards, max_norm, norm)
    optimizer.step()
    return norm


class FullySharded(nn.Module):
    def __init__(self, module, group, *, param_dtype=None, reduce_dtype=None, prefetch=False):
        super().__init__()
        for p in module.parameters():
            dist.broadcast(p.detach(), group=group, group_src=0)
        self.hooks = {n: list((p._backward_hooks or {}).values()) for n, p in module.named_parameters()}
        settings = {
            "mesh": DeviceMesh.from_group(group, module.lm_head.weight.device.type),
            "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        }
        blocks = [
            fully_shard(block, reshard_after_forward=True, **settings) for block in module.transformer.h
        ]
        self.gpt = fully_shard(module, reshard_after_forward=False, **settings)
        for one, next_one in pairwise(blocks) if prefetch else ():
            one.set_modules_to_forward_prefetch([next_one])
            next_one.set_modules_to_backward_prefetch([one])
        for unit in (*module.transformer.h, module):
            unit.register_forward_pre_hook(self.bring_hooks)

    def bring_hooks(self, module, args):
        """PyTorch has just put whole parameters into the module; they are the same ones in every step."""
        for name, p in self.gpt.named_parameters():
            if p.requires_grad and not hasattr(p, "to_local"):
                for hook in self.hooks.pop(name, []):
                    p.register_hook(hook)

    def forward(self, idx, targets=None):
        return self.gpt(idx, targets)

    def full_state_dict(self):
        return {n: p.full_tensor() for n, p in self.gpt.state_dict().items()}


def hybrid_shard(model, mesh):
    """PyTorch's own, on the mesh as it is: it starts with each rank's own weights."""
    if mesh.ndim != 2:
        raise ValueError("machines x ranks")
    for p in model.parameters():
        for dim in (0, 1):
            dist.broadcast(p.detach(), group=mesh.get_group(dim), group_src=0)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.full_state_dict = lambda: {n: p.full_tensor() for n, p in model.state_dict().items()}
    return model
