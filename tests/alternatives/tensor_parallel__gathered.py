"""Each rank in turn gathers what all have. Gradients of copies are gathered, and each adds its head's."""

import torch
import torch.distributed as dist
from torch import nn


class Joined(torch.autograd.Function):
    """One gather to each rank: every part leaves its own rank n-1 times, as in an all-gather."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous()
        parts = [torch.empty_like(x) for _ in range(group.size())]
        for root in range(group.size()):
            dist.gather(x, parts if root == group.rank() else None, group_dst=root, group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(ctx.group.size(), -1)[ctx.group.rank()].clone(), None


def gather_from_group(x, group):
    return Joined.apply(x, group)


class Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Copies(torch.autograd.Function):
    """Identity forward; backward adds what the ranks with the same head found."""

    @staticmethod
    def forward(ctx, rows, group, copies):
        ctx.group, ctx.copies = group, copies
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        found = [torch.empty_like(gradient) for _ in range(ctx.group.size())]
        dist.all_gather(found, gradient.contiguous(), group=ctx.group)
        first = ctx.group.rank() // ctx.copies * ctx.copies
        return sum(found[first : first + ctx.copies]), None, None


class Fused(nn.Module):
    """c_attn of a rank: its queries, and behind them keys and values that other ranks may have, too."""

    def __init__(self, weight, bias, num_queries, group, copies):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
        self.num_queries, self.group, self.copies = num_queries, group, copies

    def complete(self, rows):
        if rows is None or self.copies == 1:
            return rows
        own, shared = rows[: self.num_queries], rows[self.num_queries :]
        return torch.cat([own, Copies.apply(shared, self.group, self.copies)])

    def forward(self, x):
        x = Entered.apply(x, self.group)
        return nn.functional.linear(x, self.complete(self.weight), self.complete(self.bias))


class Project(nn.Module):
    def __init__(self, weight, bias, group):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
        self.group = group

    def forward(self, x):
        y = Summed.apply(x @ self.weight.T, self.group)
        return y if self.bias is None else y + self.bias


def tensor_parallel_grouped_attention(attention, group):
    n, rank, d = group.size(), group.rank(), attention.head_size
    a, a_kv = attention.num_heads, attention.num_kv_heads
    if a % n:
        raise ValueError(f"{a} query heads are not divisible by {n}")
    if a_kv % n and n % a_kv:
        raise ValueError(f"{a_kv} key heads can neither be cut nor copied for {n}")
    own_kv = sorted({head // (a // a_kv) for head in range(rank * a // n, (rank + 1) * a // n)})
    wanted = [
        *range(rank * a // n, (rank + 1) * a // n),
        *(a + i for i in own_kv),
        *(a + a_kv + i for i in own_kv),
    ]

    def cut(whole):
        return None if whole is None else whole.detach().unflatten(0, (-1, d))[wanted].flatten(0, 1)

    c_attn, c_proj = attention.c_attn, attention.c_proj
    copies = max(1, n // a_kv)
    attention.c_attn = Fused(cut(c_attn.weight), cut(c_attn.bias), a // n * d, group, copies)
    bias = None if c_proj.bias is None else c_proj.bias.detach().clone()
    columns = c_proj.weight.detach().unflatten(1, (n, -1))[:, rank].clone()
    attention.c_proj = Project(columns, bias, group)
    attention.num_heads, attention.num_kv_heads = a // n, len(own_kv)
    return attention
