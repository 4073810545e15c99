"""Lesson 09 otherwise: a unit's parameters stay whole, each on the rank with the fewest numbers so far."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn


class ShardedUnit:
    """A parameter's shard is all of it on its owner, and empty on every other rank."""

    def __init__(self, parameters, group, *, param_dtype=None, reduce_dtype=None):
        self.parameters, self.group, self.reduce_dtype = list(parameters), group, reduce_dtype
        self.across, self.owners, self.shards, self.works = None, [], [], None
        load = [0] * group.size()
        for p in self.parameters:
            owner = load.index(min(load))
            load[owner] += p.numel()
            whole = p.detach().reshape(-1).clone()
            dist.broadcast(whole, group=group, group_src=0)
            share = whole if owner == group.rank() else whole[:0].clone()
            self.owners.append(owner)
            self.shards.append(nn.Parameter(share, p.requires_grad))
            p.data = torch.empty(p.shape, dtype=param_dtype or p.dtype, device=p.device)
        self.free()

    def start_gather(self):
        if self.works is not None:
            return
        self.works = []
        for p, shard, owner in zip(self.parameters, self.shards, self.owners, strict=True):
            p.untyped_storage().resize_(p.nbytes)
            if owner == self.group.rank():
                p.data.view(-1).copy_(shard.detach())
            self.works.append(dist.broadcast(p.data, group=self.group, group_src=owner, async_op=True))

    def gather(self):
        self.start_gather()
        while self.works:
            self.works.pop().wait()

    def free(self):
        while self.works:
            self.works.pop().wait()
        self.works = None
        for p in self.parameters:
            p.untyped_storage().resize_(0)


@torch.no_grad()
def reduce_gradients(unit):
    if all(p.grad is None for p in unit.parameters):
        return
    for p, shard, owner in zip(unit.parameters, unit.shards, unit.owners, strict=True):
        if p.requires_grad:
            whole = p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1)
            whole = whole.to(unit.reduce_dtype or whole.dtype)
            p.grad = None
            dist.reduce(whole, group=unit.group, group_dst=owner)
            mean = (whole[: shard.numel()] / unit.group.size()).to(shard.dtype)
            if unit.across and len(mean):
                mean /= unit.across.size()
                dist.all_reduce(mean, group=unit.across)
            shard.grad = mean if shard.grad is None else shard.grad + mean


class FullySharded(nn.Module):
    def __init__(self, module, group, *, param_dtype=None, reduce_dtype=None, prefetch=False):
        super().__init__()
        self.hidden, self.group, self.prefetch = [module], group, prefetch
        blocks = list(module.transformer.h)
        inside = {p for block in blocks for p in block.parameters()}
        outside = [p for p in module.parameters() if p not in inside]
        dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
        self.units = [ShardedUnit(block.parameters(), group, **dtypes) for block in blocks]
        self.rest = ShardedUnit(outside, group, **dtypes)
        self.shards = nn.ParameterList(s for unit in (*self.units, self.rest) for s in unit.shards)
        self.entered = None  # whose backward is not over
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self.before, i))
            block.register_forward_hook(partial(self.after, i))

    def train(self, mode=True):
        self.hidden[0].train(mode)
        return super().train(mode)

    def before(self, i, block, args):
        self.units[i].gather()
        if self.prefetch and i + 1 < len(self.units):
            self.units[i + 1].start_gather()

    def after(self, i, block, args, x):
        self.units[i].free()
        if x.requires_grad:
            x.register_hook(partial(self.enter, i, args[0].requires_grad))

    def enter(self, i, goes_on, gradient):
        self.leave()
        self.entered = self.units[i]
        self.entered.gather()
        if self.prefetch and i and goes_on:
            self.units[i - 1].start_gather()
        torch.autograd.Variable._execution_engine.queue_callback(self.leave)

    def leave(self):
        if self.entered:
            reduce_gradients(self.entered)
            self.entered.free()
        self.entered = None

    def begin(self, gradient):
        self.rest.gather()
        torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self):
        reduce_gradients(self.rest)
        self.rest.free()

    def forward(self, idx, targets=None):
        for unit in self.units:
            unit.free()
        self.rest.free()
        self.rest.gather()
        logits, loss = self.hidden[0](idx, targets)
        if logits.requires_grad:
            logits.register_hook(self.begin)
        else:
            self.rest.free()
        return logits, loss

    @torch.no_grad()
    def full_state_dict(self):
        whole = {}
        for unit in (*self.units, self.rest):
            for p, shard, owner in zip(unit.parameters, unit.shards, unit.owners, strict=True):
                own = shard.clone() if owner == self.group.rank() else shard.new_empty(p.numel())
                dist.broadcast(own, group=self.group, group_src=owner)
                whole[p] = own.view(p.shape)
        return {name: whole[p] for name, p in self.hidden[0].named_parameters(remove_duplicate=False)}


def hybrid_shard(model, mesh):
    """Each unit's owners average across machines, as soon as they have the mean of their own machine."""
    if mesh.ndim != 2:
        raise ValueError(f"{mesh.ndim} dimensions")
    across = mesh.get_group(0)
    for p in model.parameters():
        dist.broadcast(p.detach(), group=across, group_src=0)
    sharded = FullySharded(model, mesh.get_group(1))
    for unit in (*sharded.units, sharded.rest):
        unit.across = across
    return sharded
