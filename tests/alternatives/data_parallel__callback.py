"""Lesson 08 otherwise: hooks on autograd's accumulators, and a callback that waits at backward's end.

Only a rank whose backward met none of the parameters has anything left to do in finish.
"""

import contextlib
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import nn


def shard_batch(tensor, group):
    return tensor[group.rank() :: group.size()]


def broadcast_parameters(model, group):
    sent = [[*model.parameters(), *model.buffers()]]
    sent = [[t.detach().cpu() for t in sent[0]]]
    dist.broadcast_object_list(sent, group_src=0, group=group)
    with torch.no_grad():
        for tensor, new in zip([*model.parameters(), *model.buffers()], sent[0], strict=True):
            tensor.copy_(new)


def all_reduce_gradients(model, group):
    """A reduce-scatter and an all-gather, padded to a multiple of the number of ranks."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    n, total = group.size(), sum(p.numel() for p in parameters)
    flat = parameters[0].new_zeros(-(-total // n) * n)
    at = 0
    for p in parameters:
        if p.grad is not None:
            flat[at : at + p.numel()] = p.grad.flatten() / n
        at += p.numel()
    shard = torch.empty_like(flat[: flat.numel() // n])
    dist.reduce_scatter(shard, list(flat.chunk(n)), group=group)
    dist.all_gather(list(flat.chunk(n)), shard, group=group)
    at = 0
    for p in parameters:
        p.grad = flat[at : at + p.numel()].view_as(p).clone()
        at += p.numel()


def share_loss(loss_sum, num_counted, group):
    """Everybody's number, gathered."""
    mine = torch.tensor([float(num_counted)], dtype=torch.float64, device=loss_sum.device)
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyones, mine, group=group)
    return loss_sum / torch.cat(everyones).mean().to(loss_sum.dtype)


class DataParallel(nn.Module):
    def __init__(self, module, group, bucket_bytes=25 * 2**20):
        super().__init__()
        self.module, self.group, self.on = module, group, True
        broadcast_parameters(module, group)
        self.bucket_of, self.buckets, self.keep = {}, [[]], []
        filled = 0
        for p in reversed(list(module.parameters())):
            if not p.requires_grad:
                continue
            size = p.numel() * p.element_size()
            if self.buckets[-1] and filled + size > bucket_bytes:
                self.buckets.append([])
                filled = 0
            filled += size
            self.bucket_of[p] = len(self.buckets) - 1
            self.buckets[-1].append(p)
            accumulator = p.expand_as(p).grad_fn.next_functions[0][0]
            accumulator.register_hook(lambda *_, p=p: self.arrived(p))
            self.keep.append(accumulator)
        self.begin()

    def begin(self):
        self.waits = [set(bucket) for bucket in self.buckets]
        self.sent, self.armed, self.pending = [], False, False

    def forward(self, *args, **kwargs):
        self.pending = self.on and torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    def arrived(self, p):
        if not self.on:
            return
        if not self.armed:
            self.armed = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        self.waits[self.bucket_of[p]].discard(p)
        while len(self.sent) < len(self.buckets) and not self.waits[len(self.sent)]:
            self.launch()

    def launch(self):
        bucket = self.buckets[len(self.sent)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        flat.mul_(1 / self.group.size())
        self.sent.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))

    def end(self):
        while len(self.sent) < len(self.buckets):
            self.launch()
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            at = 0
            for p in bucket:
                p.grad = flat[at : at + p.numel()].view(p.shape)
                at += p.numel()
        self.begin()

    def finish_gradient_synchronization(self):
        if self.pending:
            self.end()

    @contextlib.contextmanager
    def no_sync(self):
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


def guarded_step(model, optimizer, inputs, targets, group):
    optimizer.zero_grad()
    loss = model(inputs, targets)[1]
    flags = [None] * group.size()
    dist.all_gather_object(flags, bool(loss.isfinite()), group=group)
    if not all(flags):
        return False
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, group=group)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return True


def smallest_hidden_share(num_parameters, flops_per_second, bytes_per_second, element_bytes=2):
    for speed in (flops_per_second, bytes_per_second):
        if not speed > 0:
            raise ValueError(f"{speed} is no speed")
    all_reduce = Fraction(2 * num_parameters * element_bytes) / Fraction(bytes_per_second)
    tokens = int(all_reduce / (Fraction(4 * num_parameters) / Fraction(flops_per_second)))
    while 4 * num_parameters * tokens / Fraction(flops_per_second) < all_reduce:
        tokens += 1
    return tokens
