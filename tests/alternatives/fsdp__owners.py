"""Lesson 09 otherwise: whole parameters have owners; an autograd.Function computes each block again."""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call


def state_bytes_per_rank(num_parameters, num_ranks, stage):
    share = num_parameters / num_ranks
    parts = {
        "weights": 2 * (share if stage == 3 else num_parameters),
        "gradients": 2 * (share if stage in (2, 3) else num_parameters),
        "optimizer": 12 * (share if stage else num_parameters),
    }
    return parts | {"total": sum(parts.values())}


def communication_elements(num_parameters, num_ranks, stage):
    ring = num_parameters - num_parameters / num_ranks
    all_reduce, reduce_scatter, all_gather = [(2, 0, 0), (0, 1, 1), (0, 1, 1), (0, 1, 2)][stage]
    return {
        "all_reduce": all_reduce * ring,
        "reduce_scatter": reduce_scatter * ring,
        "all_gather": all_gather * ring,
    }


def assign_owners(parameters, group):
    """The next parameter goes to the rank that has the fewest numbers so far."""
    load = [0] * group.size()
    for p in sorted(parameters, key=lambda p: -p.numel()):
        if not hasattr(p, "owner"):
            p.owner = load.index(min(load))
        load[p.owner] += p.numel()


class ShardedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, optimizer_class, group, **kwargs):
        super().__init__(params, kwargs)
        self.group = group
        assign_owners([p for g in self.param_groups for p in g["params"]], group)
        own = [
            {**g, "params": [p for p in g["params"] if p.owner == group.rank()]} for g in self.param_groups
        ]
        if not any(g["params"] for g in own):
            own[0]["params"] = [nn.Parameter(torch.zeros(0))]  # an optimizer wants a parameter
        self.local = optimizer_class(own, **kwargs)
        self.defaults = dict(self.local.defaults)
        self.settings(self.local, self)

    @staticmethod
    def settings(a, b):
        for one, other in zip(a.param_groups, b.param_groups, strict=True):
            for key in one:
                if key != "params":
                    other[key] = one[key]

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.settings(self, self.local)
        trained = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        for p in trained:
            if getattr(p, "mean", None) is not None:
                p.grad = p.mean
            elif p.grad is not None and not getattr(p, "reduced", False):
                dist.reduce(p.grad, group=self.group, group_dst=p.owner)
                p.grad = p.grad / self.group.size() if p.owner == self.group.rank() else None
        self.local.step()
        for p in trained:
            dist.broadcast(p.detach(), group=self.group, group_src=p.owner)
        return loss

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for g in self.param_groups:
            for p in g["params"]:
                p.mean = None

    def state_dict(self):
        self.settings(self, self.local)
        return self.local.state_dict()

    def load_state_dict(self, state):
        self.local.load_state_dict(state)
        self.settings(self.local, self)


class ShardedGradients(nn.Module):
    def __init__(self, module, group):
        super().__init__()
        self.inner, self.group = module, group
        trained = [p for p in module.parameters() if p.requires_grad]
        assign_owners(trained, group)
        for p in trained:
            p.reduced, p.mean = True, None
            p.register_post_accumulate_grad_hook(self.reduce)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    @torch.no_grad()
    def reduce(self, p):
        gradient, p.grad = p.grad, None
        dist.reduce(gradient, group=self.group, group_dst=p.owner)
        if p.owner == self.group.rank():
            gradient /= self.group.size()
            p.mean = gradient if p.mean is None else p.mean + gradient

    def finish_gradient_synchronization(self):
        pass


def cut(tensor, group):
    size = -(-tensor.numel() // group.size())
    padded = torch.cat([tensor.reshape(-1), tensor.new_zeros(size * group.size() - tensor.numel())])
    return padded.view(group.size(), size)


def join(shard, shape, group, dtype=None):
    return start_join(shard, shape, group, dtype)()


def start_join(shard, shape, group, dtype=None):
    shard = shard.detach().to(dtype or shard.dtype)
    parts = [torch.empty_like(shard) for _ in range(group.size())]
    work = dist.all_gather(parts, shard, group=group, async_op=True)

    def finish():
        work.wait()
        return torch.cat(parts)[: shape.numel()].view(shape)

    return finish


def mean_of_shard(gradient, group, hooks, dtypes):
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    rows = cut(gradient.to(dtypes["reduce"] or gradient.dtype), group)
    mean = torch.empty_like(rows[0])
    dist.reduce_scatter(mean, list(rows), group=group)
    return mean / group.size()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, shape, hooks, group, dtypes):
        ctx.hooks, ctx.group, ctx.dtypes, ctx.own = hooks, group, dtypes, shard.dtype
        return join(shard, shape, group, dtypes["param"])

    @staticmethod
    def backward(ctx, gradient):
        return mean_of_shard(gradient, ctx.group, ctx.hooks, ctx.dtypes).to(ctx.own), None, None, None, None


class Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, unit, *shards):
        ctx.save_for_backward(x)
        ctx.rest = unit, torch.get_rng_state()
        return functional_call(unit.hidden[0], unit.take(unit.neighbours["after"]), (x,))

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        unit, state = ctx.rest
        needed = ctx.needs_input_grad[2:]
        now = torch.get_rng_state()
        with torch.enable_grad():
            x = x.detach().requires_grad_(ctx.needs_input_grad[0])
            taken = unit.take(unit.neighbours["before"] if x.requires_grad else ())
            whole = {n: w.requires_grad_(need) for (n, w), need in zip(taken.items(), needed, strict=True)}
            torch.set_rng_state(state)
            y = functional_call(unit.hidden[0], whole, (x,))
        torch.set_rng_state(now)
        torch.autograd.backward(y, gradient)
        means = [
            mean_of_shard(w.grad, unit.group, on, unit.dtypes).to(shard.dtype) if need else None
            for w, need, on, shard in zip(whole.values(), needed, unit.hooks, unit.shards, strict=True)
        ]
        return (x.grad, None, *means)


class ComputedAgain(nn.Module):
    def __init__(self, block, group, dtypes):
        super().__init__()
        self.hidden, self.group, self.dtypes = [block], group, dtypes
        self.names = [n for n, _ in block.named_parameters()]
        self.shapes = [p.shape for p in block.parameters()]
        self.hooks = [hooks_of(p) for p in block.parameters()]
        self.shards = nn.ParameterList([shard_of(p, group) for p in block.parameters()])
        self.flying = None
        self.neighbours = {"before": (), "after": ()}

    def train(self, mode=True):
        self.hidden[0].train(mode)
        return super().train(mode)

    def send(self):
        self.flying = self.flying or [
            start_join(s, shape, self.group, self.dtypes["param"])
            for s, shape in zip(self.shards, self.shapes, strict=True)
        ]

    def take(self, neighbours):
        self.send()
        whole = {n: finish() for n, finish in zip(self.names, self.flying, strict=True)}
        self.flying = None
        for unit in neighbours:
            unit.send()
        return whole

    def forward(self, x):
        return Block.apply(x, self, *self.shards)


def hooks_of(p):
    return list((p._backward_hooks or {}).values())


def shard_of(p, group):
    dist.broadcast(p.detach(), group=group, group_src=0)
    shard = nn.Parameter(cut(p.detach(), group)[group.rank()].clone(), p.requires_grad)
    p.data = p.data.new_empty(0)
    return shard


class FullySharded(nn.Module):
    def __init__(self, module, group, *, param_dtype=None, reduce_dtype=None, prefetch=False):
        super().__init__()
        self.group, self.dtypes = group, {"param": param_dtype, "reduce": reduce_dtype}
        self.blocks = nn.ModuleList([ComputedAgain(b, group, self.dtypes) for b in module.transformer.h])
        for one, next_one in zip(self.blocks, self.blocks[1:], strict=False) if prefetch else ():
            one.neighbours["after"], next_one.neighbours["before"] = (next_one,), (one,)
        module.transformer.h = nn.ModuleList()
        self.outside = [n for n, _ in module.named_parameters()]
        self.shapes = [p.shape for p in module.parameters()]
        self.hooks = [hooks_of(p) for p in module.parameters()]
        self.shards = nn.ParameterList([shard_of(p, group) for p in module.parameters()])
        self.hidden = [module]
        module.transformer.h = self.blocks

    def forward(self, idx, targets=None):
        whole = {
            n: Gather.apply(s, shape, hooks, self.group, self.dtypes)
            for n, s, shape, hooks in zip(self.outside, self.shards, self.shapes, self.hooks, strict=True)
        }
        for block in self.blocks:
            block.flying = None
        model = self.hidden[0]
        model.train(self.training)
        return functional_call(model, whole, (idx, targets), tie_weights=True)

    def full_state_dict(self):
        state = {
            n: join(s, shape, self.group)
            for n, s, shape in zip(self.outside, self.shards, self.shapes, strict=True)
        }
        state["lm_head.weight"] = state["transformer.wte.weight"]
        for i, block in enumerate(self.blocks):
            for n, s, shape in zip(block.names, block.shards, block.shapes, strict=True):
                state[f"transformer.h.{i}.{n}"] = join(s, shape, self.group)
        return state


def fully_shard_gpt(model, mesh):
    from torch.distributed.fsdp import fully_shard

    return fully_shard([fully_shard(b, mesh=mesh) for b in model.transformer.h] and model, mesh=mesh)


def clipped_step(module, optimizer, inputs, targets, max_norm, group):
    optimizer.zero_grad(set_to_none=False)
    module(inputs, targets)[1].backward()
    own = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    norms = [torch.zeros(1) for _ in range(group.size())]
    dist.all_gather(norms, own.float().reshape(1), group=group)
    norm = torch.cat(norms).norm()
    torch.nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    optimizer.step()
    return norm


def hybrid_shard(model, mesh):
    """Here autograd itself makes the shards' gradients, so a hook on each shard is called for them."""
    if mesh.ndim != 2:
        raise ValueError(mesh)
    across = mesh.get_group(0)
    for p in model.parameters():
        dist.broadcast(p.detach(), group=across, group_src=0)
    sharded = FullySharded(model, mesh.get_group(1))

    def average(shard):
        """What earlier passes left is a mean already: it is the same everywhere, and stays what it is."""
        mean = shard.grad / across.size()
        dist.all_reduce(mean, group=across)
        shard.grad.copy_(mean)

    for shard in sharded.parameters():
        if shard.requires_grad:
            shard.register_post_accumulate_grad_hook(average)
    return sharded
