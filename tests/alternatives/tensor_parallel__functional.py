"""Functional collectives, one autograd.Function a layer, an uneven vocabulary, q|k|v by head in c_attn."""

import copy
import types

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn import functional as F


def summed(x, group):
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", group))


def joined(x, group):
    gathered = funcol.all_gather_tensor(x.movedim(-1, 0).contiguous(), 0, group)
    return funcol.wait_tensor(gathered).movedim(0, -1).contiguous()


def sliced(x, group, dim=-1):
    if x.size(dim) % group.size():
        raise ValueError(f"{x.size(dim)} features cannot be shared by {group.size()} ranks")
    return x.chunk(group.size(), dim)[group.rank()].clone()


class Pair(torch.autograd.Function):
    """Any two of the operations below, one forward and one backward."""

    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group, ctx.undo = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.undo(gradient, ctx.group), None, None, None


def same(x, group):
    return x.view_as(x)


def copy_to_group(x, group):
    return Pair.apply(x, group, same, summed)


def reduce_from_group(x, group):
    return Pair.apply(x, group, summed, same)


def gather_from_group(x, group):
    return Pair.apply(x, group, joined, sliced)


def scatter_to_group(x, group):
    return Pair.apply(x, group, sliced, joined)


class ColumnProduct(torch.autograd.Function):
    """x @ weight.T, whose input gradient is summed while the weight's is computed."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        for_x = (gradient @ weight).contiguous()
        work = dist.all_reduce(for_x, group=ctx.group, async_op=True)
        for_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        work.wait()
        return for_x, for_weight, None


class ColumnParallelLinear(nn.Module):
    def __init__(self, in_features, out_features, bias=True, *, group, gather_output=False):
        super().__init__()
        if out_features % group.size():
            raise ValueError(f"out_features: {out_features} over {group.size()} ranks leaves a rest")
        self.group, self.gather_output = group, gather_output
        own = torch.Generator().manual_seed(int(torch.randint(2**40, ())) + group.rank())
        shard = torch.empty(out_features // group.size(), in_features)
        self.weight = nn.Parameter(shard.normal_(std=0.02, generator=own))
        self.bias = nn.Parameter(torch.zeros(out_features // group.size())) if bias else None

    @classmethod
    def from_linear(cls, linear, *, group, **options):
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, group=group, **options)
        layer.weight.data = sliced(linear.weight.data, group, 0)
        if linear.bias is not None:
            layer.bias.data = sliced(linear.bias.data, group, 0)
        return layer

    def forward(self, x):
        y = ColumnProduct.apply(x, self.weight, self.group)
        y = y if self.bias is None else y + self.bias
        return gather_from_group(y, self.group) if self.gather_output else y


class RowParallelLinear(nn.Module):
    def __init__(self, in_features, out_features, bias=True, *, group, input_is_parallel=True):
        super().__init__()
        if in_features % group.size():
            raise ValueError(f"in_features: {in_features} over {group.size()} ranks leaves a rest")
        self.group, self.input_is_parallel = group, input_is_parallel
        own = torch.Generator().manual_seed(int(torch.randint(2**40, ())) + group.rank())
        shard = torch.empty(out_features, in_features // group.size())
        self.weight = nn.Parameter(shard.normal_(std=0.02, generator=own))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    @classmethod
    def from_linear(cls, linear, *, group, **options):
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, group=group, **options)
        layer.weight.data = sliced(linear.weight.data, group, 1)
        if linear.bias is not None:
            layer.bias.data = linear.bias.data.clone()
        return layer

    def forward(self, x):
        if not self.input_is_parallel:
            x = scatter_to_group(x, self.group)
        y = Pair.apply(x @ self.weight.T, self.group, in_two_steps, same)
        return y if self.bias is None else y + self.bias


def in_two_steps(x, group):
    """A sum as reduce-scatter and all-gather: the same bytes as an all-reduce."""
    flat = F.pad(x.flatten(), (0, -x.numel() % group.size()))
    part = funcol.wait_tensor(funcol.reduce_scatter_tensor(flat, "sum", 0, group))
    return funcol.wait_tensor(funcol.all_gather_tensor(part, 0, group))[: x.numel()].view(x.shape)


def share_dropout(dropout, group, device="cpu"):
    box = [torch.empty((), dtype=torch.int64).random_().item()]
    dist.broadcast_object_list(box, group_src=0, group=group)
    dropout.generator = torch.Generator(device=device)
    dropout.generator.manual_seed(box[0])
    return dropout


def tensor_parallel_mlp(mlp, group):
    if mlp.c_fc.out_features % group.size():
        raise ValueError(f"{mlp.c_fc.out_features} hidden features over {group.size()} ranks")
    mlp.c_fc = ColumnParallelLinear.from_linear(mlp.c_fc, group=group)
    mlp.c_proj = RowParallelLinear.from_linear(mlp.c_proj, group=group)
    share_dropout(mlp.dropout, group, mlp.c_fc.weight.device)
    return mlp


def tensor_parallel_attention(attention, group):
    """c_attn's rows: head by head, each with its q, its k and its v, so that a contiguous cut is by heads."""
    d = attention.head_size
    heads = attention.c_attn.weight.size(0) // (3 * d)
    if heads % group.size():
        raise ValueError(f"{heads} heads cannot be shared by {group.size()} ranks")
    fused = copy.deepcopy(attention.c_attn)
    fused.weight.data = fused.weight.data.view(3, heads, d, -1).transpose(0, 1).flatten(0, 2)
    if fused.bias is not None:
        fused.bias.data = fused.bias.data.view(3, heads, d).transpose(0, 1).flatten()
    attention.c_attn = ColumnParallelLinear.from_linear(fused, group=group)
    attention.c_proj = RowParallelLinear.from_linear(attention.c_proj, group=group)
    share_dropout(attention.resid_dropout, group, attention.c_attn.weight.device)

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (-1, 3, d)).transpose(1, 2).unbind(3)  # (b, a/n, s, d)
        y = self.core(q, k, v).transpose(1, 2).flatten(2)
        return self.resid_dropout(self.c_proj(y))

    attention.forward = types.MethodType(forward, attention)
    return attention


def tensor_parallel_grouped_attention(attention, group):
    """Values before keys before queries in c_attn, and a group of its own for the copies of a head."""
    n, rank, d = group.size(), group.rank(), attention.head_size
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    if heads % n or (kv_heads % n and n % kv_heads):
        raise ValueError(f"{heads} heads and {kv_heads} key heads over {n} ranks leave a rest")
    copies = max(1, n // kv_heads)
    together = dist.get_process_group_ranks(group)[rank // copies * copies :][:copies]
    twins = dist.new_group(together, use_local_synchronization=True) if copies > 1 else None

    def own(whole):
        q, k, v = whole.detach().split([heads * d, kv_heads * d, kv_heads * d])
        return torch.cat([part.chunk(n // copies)[rank // copies] for part in (v, k)] + [q.chunk(n)[rank]])

    kv_rows = 2 * max(1, kv_heads // n) * d

    def complete(gradient):
        shared = summed(gradient[:kv_rows], twins)
        return torch.cat([shared, gradient[kv_rows:]])

    dense, attention.c_attn = attention.c_attn, nn.Module()
    for name, parameter in dense.named_parameters():
        setattr(attention.c_attn, name, nn.Parameter(own(parameter)))
        if twins is not None:
            getattr(attention.c_attn, name).register_hook(complete)
    attention.c_proj = RowParallelLinear.from_linear(attention.c_proj, group=group)

    def forward(self, x):
        y = F.linear(copy_to_group(x, group), self.c_attn.weight, getattr(self.c_attn, "bias", None))
        v, k, q = y.split([kv_rows // 2, kv_rows // 2, heads // n * d], -1)
        q, k, v = (part.unflatten(-1, (-1, d)).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(q.size(1) // part.size(1), 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))

    attention.forward = types.MethodType(forward, attention)
    return attention


def own_rows(size, group):
    """First row and number of rows of this rank; the first ranks have one more."""
    rows = torch.arange(size).tensor_split(group.size())[group.rank()]
    first = sum(len(part) for part in torch.arange(size).tensor_split(group.size())[: group.rank()])
    return first, len(rows)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, num_embeddings, embedding_dim, *, group):
        super().__init__()
        self.group = group
        self.first, size = own_rows(num_embeddings, group)
        own = torch.Generator().manual_seed(int(torch.randint(2**40, ())) + group.rank())
        self.weight = nn.Parameter(torch.empty(size, embedding_dim).normal_(std=0.02, generator=own))

    @classmethod
    def from_embedding(cls, embedding, *, group):
        table = cls(*embedding.weight.shape, group=group)
        table.weight.data = embedding.weight.data[table.first : table.first + len(table.weight)].clone()
        return table

    def forward(self, idx):
        local = idx - self.first
        mine = (local >= 0) & (local < len(self.weight))
        found = self.weight.new_zeros(*idx.shape, self.weight.size(1))
        found = found.index_put((mine.nonzero(as_tuple=True)), self.weight[local[mine]])
        return reduce_from_group(found, self.group)


class Entropy(torch.autograd.Function):
    """The loss and its gradient by hand: softmax minus one at the target."""

    @staticmethod
    def forward(ctx, logits, targets, first, group):
        top = logits.new_full((len(targets),), -float("inf"))
        if logits.size(1):
            top = logits.max(1).values
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        exponentials = (logits - top[:, None]).exp()
        local = targets - first
        mine = (local >= 0) & (local < logits.size(1))
        at_target = torch.zeros_like(top)
        at_target[mine] = logits[mine, local[mine]] - top[mine]
        both = summed(torch.stack([exponentials.sum(1), at_target]), group)
        counted = targets != -1
        gradient = exponentials / both[0, :, None]
        gradient[mine, local[mine]] -= 1
        ctx.save_for_backward(gradient * counted[:, None] / counted.sum())
        return (both[0].log() - both[1])[counted].mean()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient, None, None, None


def vocab_parallel_cross_entropy(logits_shard, targets, group, first=None):
    first = group.rank() * logits_shard.size(1) if first is None else first
    return Entropy.apply(logits_shard, targets, first, group)


def tensor_parallelize(model, group):
    for block in model.transformer.h:
        tensor_parallel_attention(block.attn, group)
        tensor_parallel_mlp(block.mlp, group)
    share_dropout(model.transformer.drop, group, model.lm_head.weight.device)
    table = VocabParallelEmbedding.from_embedding(model.transformer.wte, group=group)
    model.transformer.wte = table
    model.lm_head.weight = table.weight
    model.head = lambda x: model.lm_head(copy_to_group(model.transformer.ln_f(x), group))
    model.loss = lambda logits, targets: vocab_parallel_cross_entropy(
        logits.flatten(0, 1), targets.flatten(), group, table.first
    )
    cut = model.forward
    size, width = model.config.vocab_size, -(-model.config.vocab_size // group.size())

    def forward(idx, targets=None):
        logits, loss = cut(idx, targets)
        if targets is None:
            wide = joined(F.pad(logits, (0, width - logits.size(-1))), group)
            lengths = [len(part) for part in torch.arange(size).tensor_split(group.size())]
            columns = [wide[..., r * width : r * width + k] for r, k in enumerate(lengths)]
            logits = torch.cat(columns, -1)
        return logits, loss

    model.forward = forward
    return model


class MultiQueryAttention(nn.Module):
    """The other repair: the hook stays, and x is completed on its way to key_value."""

    def __init__(self, width, num_heads, *, group):
        super().__init__()
        self.group, self.head_size = group, width // num_heads
        self.query = ColumnParallelLinear(width, width, group=group)
        self.key_value = nn.Linear(width, 2 * self.head_size)
        self.project = RowParallelLinear(width, width, group=group)
        for parameter in self.key_value.parameters():
            parameter.register_hook(lambda gradient: summed(gradient, group))

    def forward(self, x):
        b, s, _ = x.shape
        q = self.query(x).view(b, s, -1, self.head_size).transpose(1, 2)
        k, v = self.key_value(copy_to_group(x, self.group)).chunk(2, dim=-1)
        k, v = (part.unsqueeze(1).expand_as(q) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))
