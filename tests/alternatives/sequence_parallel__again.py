"""Gathers everything again, the head's input too; each rank scatters what others sum; one sum a block."""

import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from nanogpt.model import GPT
from solutions.tensor_parallel import tensor_parallel_attention, tensor_parallel_mlp, tensor_parallelize


def joined(x, group):
    first = x.transpose(0, 1).contiguous()  # (s/n, b, h)
    whole = first.new_empty(group.size() * first.size(0), *first.shape[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_into_tensor(whole, first, group=group)
    return whole.transpose(0, 1).contiguous()


def part_size(x, group):
    if x.size(1) % group.size():
        raise ValueError(f"{x.size(1)} tokens can not be shared by {group.size()} ranks")
    return x.size(1) // group.size()


def summed_part(x, group):
    """Each rank in turn scatters its parts: n-1 of them leave it, as in a reduce-scatter."""
    parts = [part.contiguous() for part in x.split(part_size(x, group), 1)]
    found = [torch.empty_like(parts[0]) for _ in parts]
    for root, received in enumerate(found):
        dist.scatter(received, parts if root == group.rank() else None, group_src=root, group=group)
    return sum(found)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return joined(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return summed_part(gradient, ctx.group), None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed_part(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return joined(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        size = part_size(x, group)
        return x[:, group.rank() * size :][:, :size].clone()

    @staticmethod
    def backward(ctx, gradient):
        return joined(gradient, ctx.group), None


def gather_sequence(x, group):
    return Gather.apply(x, group)


def reduce_scatter_sequence(x, group):
    return ReduceScatter.apply(x, group)


def scatter_sequence(x, group):
    return Scatter.apply(x, group)


def gathered_linear(x, weight, bias, group):
    """By saved-tensor hooks: in the place of the gathered x a copy of this rank's tokens, (s/n, b, in)."""
    whole = gather_sequence(x, group)
    place = whole.untyped_storage().data_ptr()
    own = x.detach().transpose(0, 1).contiguous()

    def pack(tensor):
        return tensor.shape if tensor.untyped_storage().data_ptr() == place else tensor

    def unpack(kept):
        return kept if isinstance(kept, torch.Tensor) else joined(own.transpose(0, 1), group).view(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return F.linear(whole, weight, bias)


class SumTogether(torch.autograd.Function):
    """Identity forward; backward one all-reduce for the gradients of all tensors."""

    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        ctx.set_materialize_grads(True)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=ctx.group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return None, *(part.view_as(g) for part, g in zip(parts, gradients, strict=True))


class SequenceDropout(nn.Module):
    def __init__(self, p, group):
        super().__init__()
        self.p = p
        seed = torch.empty(1, dtype=torch.int64).random_(2**60)
        dist.broadcast(seed, group_src=0, group=group)
        self.generator = torch.Generator().manual_seed(int(seed) ^ (group.rank() * 7919 + 1))

    def forward(self, x):
        if not self.training or not self.p:
            return x
        keep = torch.rand(x.shape, generator=self.generator) >= self.p
        return x * keep / (1 - self.p)


def run_block(block, group, x):
    """The block's forward, written out."""
    attention, mlp = block.attn, block.mlp
    names = ["ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias", "attn.c_proj.bias", "mlp.c_proj.bias"]
    known = dict(block.named_parameters())
    names = [name for name in names if name in known]
    small = dict(zip(names, SumTogether.apply(group, *(known[name] for name in names)), strict=True))

    def norm(which, y):
        weight = small[f"{which}.weight"]
        return F.layer_norm(y, weight.shape, weight, small.get(f"{which}.bias"), 1e-5)

    def after(linear, y, name):
        y = reduce_scatter_sequence(F.linear(y, linear.weight), group)
        return y + small[name] if name in small else y

    qkv = gathered_linear(norm("ln_1", x), attention.c_attn.weight, attention.c_attn.bias, group)
    q, k, v = (p.unflatten(2, (-1, attention.head_size)).transpose(1, 2) for p in qkv.chunk(3, 2))
    y = attention.core(q, k, v).transpose(1, 2).flatten(2)
    x = x + attention.resid_dropout(after(attention.c_proj, y, "attn.c_proj.bias"))
    y = mlp.gelu(gathered_linear(norm("ln_2", x), mlp.c_fc.weight, mlp.c_fc.bias, group))
    return x + mlp.dropout(after(mlp.c_proj, y, "mlp.c_proj.bias"))


def sequence_parallel_block(block, group):
    tensor_parallel_attention(block.attn, group)
    tensor_parallel_mlp(block.mlp, group)
    block.attn.resid_dropout = SequenceDropout(block.attn.resid_dropout.p, group)
    block.mlp.dropout = SequenceDropout(block.mlp.dropout.p, group)
    block.forward = partial(run_block, block, group)
    return block


def sequence_parallelize(model, group):
    if model.config.n_head % group.size():
        raise ValueError(f"{model.config.n_head} heads can not be shared by {group.size()} ranks")
    blocks, model.transformer.h = model.transformer.h, nn.ModuleList()
    tensor_parallelize(model, group)
    model.transformer.h = blocks
    for block in blocks:
        sequence_parallel_block(block, group)
    drop = SequenceDropout(model.transformer.drop.p, group)
    final, head = model.transformer.ln_f, model.lm_head

    def embed(idx, positions):
        whole = model.transformer.wte(idx) + model.transformer.wpe(positions)
        return drop(scatter_sequence(whole, group))

    def forward(idx, targets=None):
        """Any length: what is missing is padded with words that are ignored."""
        s, more = idx.size(1), -idx.size(1) % group.size()
        positions = torch.arange(s + more).clamp(max=s - 1)
        x = embed(F.pad(idx, (0, more)), positions)
        for block in blocks:
            x = block(x)
        norm = [p for p in (final.weight, final.bias) if p is not None]
        weight, *bias = SumTogether.apply(group, *norm)
        x = F.layer_norm(x, weight.shape, weight, bias[0] if bias else None, 1e-5)
        logits = gathered_linear(x, head.weight, None, group)[:, :s]
        return (logits[:, -1:], None) if targets is None else (logits, model.loss(logits, targets))

    model.transformer.drop = drop
    model.forward = forward
    model.generate = partial(GPT.generate, model)
    return model
