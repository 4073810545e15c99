"""Lesson 09 otherwise: one flat buffer for each group, and weights that saved-tensor hooks bring back."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class ShardedOptimizer(torch.optim.Optimizer):
    """The weights of a group become views into one buffer; a rank owns one of its n equal pieces."""

    def __init__(self, params, optimizer_class, group, **kwargs):
        super().__init__(params, kwargs)
        self.group, self.buffers, shards = group, [], []
        n, r = group.size(), group.rank()
        for g in self.param_groups:
            trained = [p for p in g["params"] if p.requires_grad]
            flat = torch.cat([p.detach().reshape(-1) for p in trained])
            flat = F.pad(flat, (0, -flat.numel() % n))
            k, start, parts = flat.numel() // n, 0, []
            for p in trained:
                end = start + p.numel()
                p.data = flat[start:end].view_as(p)
                p.home = (start, k)
                first = max(start, r * k)
                parts.append(flat[first : max(first, min(end, r * k + k))])
                start = end
            self.buffers.append((flat, trained, parts))
            shards.append({**g, "params": parts})
        self.on_shards = optimizer_class(shards, **kwargs)

    def copy(self, source, target):
        for mine, other in zip(source.param_groups, target.param_groups, strict=True):
            other.update({k: v for k, v in mine.items() if k != "params"})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        self.copy(self, self.on_shards)
        n, r = self.group.size(), self.group.rank()
        for flat, trained, parts in self.buffers:
            if any(p.grad is not None for p in trained):
                gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
                gradients = torch.cat([gradient.reshape(-1) for gradient in gradients])
                gradients = F.pad(gradients, (0, flat.numel() - gradients.numel()))
                rows = torch.empty_like(gradients)
                dist.all_to_all_single(rows, gradients, group=self.group)
                mean = rows.view(n, -1).sum(0) / n
                for p, part in zip(trained, parts, strict=True):
                    start, k = p.home
                    first = max(0, start - r * k)
                    part.grad = None if p.grad is None else mean[first : first + part.numel()]
            else:
                for p, part in zip(trained, parts, strict=True):
                    part.grad = getattr(p, "piece", None)
        self.on_shards.step()
        for flat, _, parts in self.buffers:
            k = flat.numel() // n
            for part in parts:
                part.grad = None
            pieces = [torch.empty_like(flat[:k]) for _ in range(n)]
            dist.all_gather(pieces, flat[r * k : r * k + k].clone(), group=self.group)
            flat.copy_(torch.cat(pieces))
        return loss

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for _, trained, _ in self.buffers:
            for p in trained:
                p.piece = None

    def state_dict(self):
        self.copy(self, self.on_shards)
        return {"mine": self.on_shards.state_dict()}

    def load_state_dict(self, state):
        self.on_shards.load_state_dict(state["mine"])
        self.copy(self.on_shards, self)


class ShardedGradients(nn.Module):
    """Each stretch of a gradient is passed down a chain of ranks that ends at its owner: messages alone."""

    def __init__(self, module, group):
        super().__init__()
        self.module, self.group = module, group
        for p in module.parameters():
            if p.requires_grad:
                p.piece = None
                p.register_post_accumulate_grad_hook(self.hook)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def hook(self, p):
        n, r = self.group.size(), self.group.rank()
        (start, k), flat = p.home, p.grad.reshape(-1).clone()
        p.grad = None
        for owner in range(n):
            a, b = max(start, owner * k), min(start + flat.numel(), (owner + 1) * k)
            if a >= b:
                continue
            stretch = flat[a - start : b - start]
            place = (r - owner) % n  # the chain is owner + 1, owner + 2, ..., owner
            if place != 1 and n > 1:
                got = torch.empty_like(stretch)
                dist.recv(got, group=self.group, group_src=(r - 1) % n)
                stretch += got
            if place != 0:
                dist.send(stretch.contiguous(), group=self.group, group_dst=(r + 1) % n)
            else:
                mean = stretch / n
                p.piece = mean if p.piece is None else p.piece + mean

    def finish_gradient_synchronization(self):
        pass


def collect(shards, shapes, dtype, group):
    """Start to gather weights, as one message; what is returned waits for it."""
    n, own = group.size(), []
    for shard, shape in zip(shards, shapes, strict=True):
        missing = shard.new_zeros(-(-shape[0] // n) - shard.size(0), *shape[1:])
        own.append(torch.cat([shard.detach(), missing]).to(dtype).flatten())
    mine = torch.cat(own)
    parts = [torch.empty_like(mine) for _ in range(n)]
    work = dist.all_gather(parts, mine, group=group, async_op=True)

    def finish():
        work.wait()
        columns = zip(*(part.split([rows.numel() for rows in own]) for part in parts), strict=True)
        return [
            torch.cat([rows.view(-1, *shape[1:]) for rows in column])[: shape[0]]
            for column, shape in zip(columns, shapes, strict=True)
        ]

    return finish


class Whole:
    """One block's weights: shards by rows, and whole tensors that come and go."""

    def __init__(self, owners, group, param_dtype, reduce_dtype):
        self.group, self.reduce_dtype = group, reduce_dtype
        self.entries = []
        for p, places in owners.items():
            dist.broadcast(p.detach(), group=group, group_src=0)
            rows = -(-p.size(0) // group.size())
            mine = p.detach()[group.rank() * rows :][:rows].clone()
            shard = nn.Parameter(mine, p.requires_grad)
            leaf = p.detach().to(param_dtype, copy=True).requires_grad_(p.requires_grad)
            self.entries.append((shard, leaf, leaf.shape, places))
            if p.requires_grad:
                for hook in (p._backward_hooks or {}).values():
                    leaf.register_hook(hook)
                leaf.register_post_accumulate_grad_hook(self.arrived)
            for module, name in places:
                setattr(module, name, shard)
        self.trained = sum(1 for entry in self.entries if entry[1].requires_grad)
        self.there, self.count, self.flying = True, 0, []
        self.before = self.after = None  # whole ones to be sent for ahead, in backward and in forward
        self.is_passed = False  # by backward, on its way to the block before
        self.free()

    @torch.no_grad()
    def start(self):
        if not self.there and not self.flying:
            for dtype in {leaf.dtype: None for _, leaf, _, _ in self.entries}:
                entries = [entry for entry in self.entries if entry[1].dtype == dtype]
                shards, _, shapes, _ = zip(*entries, strict=True)
                self.flying.append((entries, collect(shards, shapes, dtype, self.group)))

    @torch.no_grad()
    def gather(self):
        if self.there:
            return
        self.start()
        for entries, finish in self.flying:
            for (_, leaf, _, places), whole in zip(entries, finish(), strict=True):
                leaf.data = whole
                for module, name in places:
                    module.__dict__[name] = leaf
        self.there, self.flying = True, []

    def free(self):
        for _, finish in self.flying:
            finish()
        for _, leaf, _, places in self.entries:
            leaf.data = leaf.data.new_empty(0)
            for module, name in places:
                module.__dict__.pop(name, None)
        self.there, self.flying = False, []

    def arrived(self, leaf):
        self.count += 1
        if self.count == self.trained:
            self.count = 0
            trained = [entry for entry in self.entries if entry[1].requires_grad]
            for dtype in {leaf.dtype: None for _, leaf, _, _ in trained}:
                self.reduce([entry for entry in trained if entry[1].dtype == dtype])
            self.free()

    def reduce(self, entries):
        n, columns = self.group.size(), []
        for _, leaf, shape, _ in entries:
            rows = -(-shape[0] // n)
            gradient = torch.cat([leaf.grad, leaf.new_zeros(n * rows - shape[0], *shape[1:])])
            columns.append(gradient.to(self.reduce_dtype or gradient.dtype).split(rows))
            leaf.grad = None
        parts = [torch.cat([rows.flatten() for rows in row]) for row in zip(*columns, strict=True)]
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, parts, op=dist.ReduceOp.SUM, group=self.group)
        sums = total.split([column[0].numel() for column in columns])
        for (shard, _, shape, _), each in zip(entries, sums, strict=True):
            mean = (each.view(-1, *shape[1:])[: shard.size(0)] / n).to(shard.dtype)
            shard.grad = mean if shard.grad is None else shard.grad + mean

    def pack(self, tensor):
        for i, (_, leaf, _, _) in enumerate(self.entries):
            if leaf.numel() and tensor.untyped_storage()._cdata == leaf.untyped_storage()._cdata:
                return i, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        self.gather()
        if self.before and self.is_passed:
            self.before.start()
        i, *layout = packed
        return self.entries[i][1].detach().as_strided(*layout)


class FullySharded(nn.Module):
    def __init__(self, module, group, *, param_dtype=None, reduce_dtype=None, prefetch=False):
        super().__init__()
        self.gpt, self.group, places = module, group, {}
        for part in module.modules():
            for name, p in list(part.named_parameters(recurse=False)):
                places.setdefault(p, []).append((part, name))
        self.names = {place: n for n, place in self.named_places()}
        self.wholes = []
        for block in module.transformer.h:
            own = {p: places.pop(p) for p in list(block.parameters())}
            unit = Whole(own, group, param_dtype, reduce_dtype)
            block.forward = self.wrapped(block.forward, unit)
            self.wholes.append(unit)
        for one, next_one in zip(self.wholes, self.wholes[1:], strict=False) if prefetch else ():
            one.after, next_one.before = next_one, one
        self.outside = Whole(places, group, param_dtype, reduce_dtype)

    def named_places(self):
        for n, _ in self.gpt.named_parameters(remove_duplicate=False):
            yield n, (self.gpt.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2])

    @staticmethod
    def wrapped(forward, unit):
        def run(x):
            unit.gather()
            unit.is_passed = x.requires_grad
            if unit.after:
                unit.after.start()
            with torch.autograd.graph.saved_tensors_hooks(unit.pack, unit.unpack):
                y = forward(x)
            unit.free()
            if (
                not unit.trained and x.requires_grad
            ):  # no gradient of a weight will tell that backward is over
                x.register_hook(lambda gradient: unit.free())
            return y

        return run

    def forward(self, idx, targets=None):
        for unit in (*self.wholes, self.outside):
            unit.free()
        self.outside.gather()
        with torch.autograd.graph.saved_tensors_hooks(self.outside.pack, self.outside.unpack):
            outputs = self.gpt(idx, targets)
        if not outputs[0].requires_grad:
            self.outside.free()
        return outputs

    def full_state_dict(self):
        state = {}
        for unit in (*self.wholes, self.outside):
            for shard, _, shape, places in unit.entries:
                (whole,) = collect([shard], [shape], shard.dtype, self.group)()
                state |= {self.names[place]: whole for place in places}
        return state


def fully_shard_gpt(model, mesh):
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def clipped_step(module, optimizer, inputs, targets, max_norm, group):
    optimizer.zero_grad()
    _, loss = module(inputs, targets)
    loss.backward()
    squares = torch.zeros(1, dtype=torch.float64)
    for p in module.parameters():
        if p.grad is not None:
            squares += p.grad.double().pow(2).sum()
    dist.reduce(squares, group=group, group_dst=0)
    dist.broadcast(squares, group=group, group_src=0)
    norm = squares.sqrt()
    if norm > max_norm:
        for p in module.parameters():
            if p.grad is not None:
                p.grad = p.grad * (max_norm / norm.item())
    optimizer.step()
    return norm


class Replicated(nn.Module):
    """Around FullySharded: remembers what earlier passes left, and averages what this one has added."""

    def __init__(self, model, mesh):
        super().__init__()
        if mesh.ndim != 2:
            raise ValueError("a mesh of two dimensions")
        self.across = mesh.get_group("replicate")
        self.sharded = FullySharded(model, mesh.get_group("shard"))
        with torch.no_grad():
            for p in self.sharded.parameters():
                dist.broadcast(p, group=self.across, group_src=0)
        self.full_state_dict = self.sharded.full_state_dict

    def forward(self, idx, targets=None):
        logits, loss = self.sharded(idx, targets)
        (logits if loss is None else loss).requires_grad and logits.register_hook(self.begin)
        return logits, loss

    def begin(self, gradient):
        self.before = {p: p.grad for p in self.parameters()}
        for p in self.parameters():
            p.grad = None
        torch.autograd.Variable._execution_engine.queue_callback(self.end)

    @torch.no_grad()
    def end(self):
        n = self.across.size()
        for p, before in self.before.items():
            if p.grad is not None:
                own = F.pad(p.grad.flatten(), (0, -p.grad.numel() % n))
                mean = torch.empty_like(own[: own.numel() // n])
                dist.reduce_scatter(mean, list(own.chunk(n)) if n > 1 else [own], group=self.across)
                rows = [torch.empty_like(mean) for _ in range(n)]
                dist.all_gather(rows, mean / n, group=self.across)
                p.grad = torch.cat(rows)[: p.numel()].view_as(p)
                p.grad += 0 if before is None else before


def hybrid_shard(model, mesh):
    return Replicated(model, mesh)
