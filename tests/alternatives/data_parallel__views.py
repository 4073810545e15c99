"""Lesson 08 otherwise: gradients are views into flat buckets, dealt out in forward order."""

import math
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


def shard_batch(tensor, group):
    rows, rest = divmod(tensor.size(0), group.size())
    start = group.rank() * rows + min(group.rank(), rest)
    return tensor[start : start + rows + (group.rank() < rest)].clone()


def broadcast_parameters(model, group):
    tensors = [t.data for t in (*model.parameters(), *model.buffers())]
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        same = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in same])
        dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
        for t, piece in zip(same, flat.split([t.numel() for t in same]), strict=True):
            t.copy_(piece.view_as(t))


def all_reduce_gradients(model, group):
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group)
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = piece.view_as(p)


def share_loss(loss_sum, num_counted, group):
    average = loss_sum.new_tensor(float(num_counted), dtype=torch.float64)
    dist.all_reduce(average, op=dist.ReduceOp.AVG, group=group)
    return loss_sum.div(average.to(loss_sum.dtype))


class DataParallel(nn.Module):
    def __init__(self, module, group, bucket_bytes=25 * 2**20):
        super().__init__()
        self.inner = module
        self.group = group
        self.quiet = 0
        broadcast_parameters(module, group)
        self.buckets, room = [], 0
        for p in module.parameters():
            if not p.requires_grad:
                continue
            size = p.numel() * p.element_size()
            if size > room:
                self.buckets.append([])
                room = bucket_bytes
            self.buckets[-1].append(p)
            room -= size
        self.buckets.reverse()
        self.flats = [
            torch.zeros(sum(p.numel() for p in b), dtype=b[0].dtype, device=b[0].device) for b in self.buckets
        ]
        self.views, self.place = {}, {}
        for i, (bucket, flat) in enumerate(zip(self.buckets, self.flats, strict=True)):
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                self.views[p], self.place[p] = piece.view_as(p), i
                p.register_post_accumulate_grad_hook(self.hook)
        self.works, self.missing, self.pending = [], [len(b) for b in self.buckets], False

    def forward(self, *args, **kwargs):
        if not self.quiet:
            self.finish_gradient_synchronization()
            self.pending = torch.is_grad_enabled()
        return self.inner(*args, **kwargs)

    def hook(self, p):
        if self.quiet:
            return
        self.missing[self.place[p]] -= 1
        while len(self.works) < len(self.buckets) and self.missing[len(self.works)] == 0:
            self.send()

    def send(self):
        i = len(self.works)
        for p in self.buckets[i]:
            view = self.views[p]
            if p.grad is None:
                view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():
                view.copy_(p.grad)
            p.grad = view
        self.works.append(dist.all_reduce(self.flats[i], group=self.group, async_op=True))

    def finish_gradient_synchronization(self):
        if not self.pending:
            return
        while len(self.works) < len(self.buckets):
            self.send()
        for work, flat in zip(self.works, self.flats, strict=True):
            work.wait()
            flat.div_(self.group.size())
        self.works, self.missing, self.pending = [], [len(b) for b in self.buckets], False

    @contextmanager
    def no_sync(self):
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1


def guarded_step(model, optimizer, inputs, targets, group):
    optimizer.zero_grad()
    loss = model(inputs, targets)[1]
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    if not torch.isfinite(total):
        return False
    loss.backward()
    all_reduce_gradients(model, group)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return True


def smallest_hidden_share(num_parameters, flops_per_second, bytes_per_second, element_bytes=2):
    if min(flops_per_second, bytes_per_second) <= 0:
        raise ValueError("no speed")
    return math.ceil(element_bytes * flops_per_second / (2 * bytes_per_second))
