"""The steps of lesson 09 otherwise: each parameter in a storage of its own, forwards that are replaced."""

import torch
import torch.distributed as dist


class ShardedUnit:
    """One all-gather a parameter, cut like rows of a padded matrix."""

    def __init__(self, parameters, group, *, param_dtype=None, reduce_dtype=None):
        self.parameters, self.shards, self.buffers = list(parameters), [], []
        self.group, self.reduce_dtype, self.works = group, reduce_dtype, None
        n, r = group.size(), group.rank()
        for p in self.parameters:
            flat = p.detach().reshape(-1).clone()
            dist.broadcast(flat, group=group, group_src=0)
            k = -(-flat.numel() // n)
            self.shards.append(torch.nn.Parameter(flat[r * k : r * k + k].clone(), p.requires_grad))
            buffer = torch.empty(n * k, dtype=param_dtype or p.dtype, device=p.device)
            p.data = buffer[: flat.numel()].view(p.shape)
            self.buffers.append((buffer, n * k * buffer.element_size()))
        self.free()

    @torch.no_grad()
    def start_gather(self):
        if self.works is not None:
            return
        self.works = []
        for shard, (buffer, num_bytes) in zip(self.shards, self.buffers, strict=True):
            buffer.untyped_storage().resize_(num_bytes)
            k = buffer.numel() // self.group.size()
            mine = torch.cat([shard.detach(), shard.new_zeros(k - shard.numel())]).to(buffer.dtype)
            rows = list(buffer.split(k))
            self.works.append(dist.all_gather(rows, mine, group=self.group, async_op=True))

    def gather(self):
        self.start_gather()
        while self.works:
            self.works.pop().wait()

    def free(self):
        while self.works:
            self.works.pop().wait()
        self.works = None
        for buffer, _ in self.buffers:
            buffer.untyped_storage().resize_(0)


@torch.no_grad()
def reduce_gradients(unit):
    n, r = unit.group.size(), unit.group.rank()
    if all(p.grad is None for p in unit.parameters):
        return
    for p, shard in zip(unit.parameters, unit.shards, strict=True):
        if not p.requires_grad:
            continue
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        gradient = gradient.reshape(-1).to(unit.reduce_dtype or gradient.dtype)
        k = -(-gradient.numel() // n)
        rows = torch.cat([gradient, gradient.new_zeros(n * k - gradient.numel())])
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=unit.group)
        mean = (received.view(n, k).sum(0) / n)[: max(0, min(k, gradient.numel() - r * k))].to(shard.dtype)
        p.grad = None
        shard.grad = mean if shard.grad is None else mean + shard.grad


def gather_in_forward(block, unit):
    original = block.forward

    def forward(*args):
        unit.gather()
        try:
            return original(*args)
        finally:
            unit.free()

    block.forward = forward


def gather_in_backward(blocks, units):
    engine = torch.autograd.Variable._execution_engine
    entered = []  # whose backward is not over, one at most

    def leave():
        for unit in entered:
            reduce_gradients(unit)
            unit.free()
        entered.clear()

    class Door(torch.autograd.Function):
        """At the end of a block in forward: what backward meets first."""

        @staticmethod
        def forward(ctx, x, number):
            ctx.number = number
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            leave()
            units[ctx.number].gather()
            entered.append(units[ctx.number])
            engine.queue_callback(leave)
            return gradient, None

    for number, block in enumerate(blocks):
        block.register_forward_hook(lambda block, args, x, number=number: Door.apply(x, number))


def gather_ahead(blocks, units):
    for number in range(1, len(blocks)):
        earlier = units[number - 1]

        def before(block, args, unit=units[number]):
            unit.start_gather()

        def after(block, args, x, unit=earlier):
            args[0].requires_grad and x.register_hook(lambda gradient: unit.start_gather())

        blocks[number - 1].register_forward_pre_hook(before)
        blocks[number].register_forward_hook(after)
