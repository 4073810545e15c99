"""Keeps what it gathers; sums through the graph in the place of hooks; masks from a stream per rank."""

import types

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn import functional as F

from solutions.tensor_parallel import (
    VocabParallelEmbedding,
    copy_to_group,
    gather_from_group,
    vocab_parallel_cross_entropy,
)


def joined(x, group):
    gathered = funcol.all_gather_tensor(x.movedim(1, 0).contiguous(), 0, group)
    return funcol.wait_tensor(gathered).movedim(0, 1).contiguous()


def summed_part(x, group):
    """A reduce-scatter made of an all-to-all and a sum on the spot."""
    n = group.size()
    if x.size(1) % n:
        raise ValueError
    parts = torch.stack([part.contiguous() for part in x.tensor_split(n, 1)])
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.double().sum(0).to(x.dtype)


def own_part(x, group):
    return x.tensor_split(group.size(), 1)[group.rank()].clone()


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group, ctx.undo = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.undo(gradient, ctx.group), None, None, None


def gather_sequence(x, group):
    return Pair.apply(x, group, joined, summed_part)


def reduce_scatter_sequence(x, group):
    return Pair.apply(x, group, summed_part, joined)


def scatter_sequence(x, group):
    if x.size(1) % group.size():
        raise ValueError(f"{x.size(1)} tokens over {group.size()} ranks")
    return Pair.apply(x, group, own_part, joined)


def block_activation_bytes(config, batch_size, sequence_length, num_ranks, scheme):
    """In tokens and features, each with what it is kept for."""
    try:
        in_stream, read = {
            "tensor_parallel": (1, 1),
            "sequence_parallel": (num_ranks, 1),
            "gather_again": (num_ranks, num_ranks),
        }[scheme]
    except KeyError:
        raise ValueError(f"{scheme} is none of the three") from None
    tokens, h, a = batch_size * sequence_length, config.n_embd, config.n_head // num_ranks
    total = tokens // in_stream * (2 * (h + 2) + (2 * h if config.dropout else 0))
    total += tokens // read * 2 * h + tokens * 12 * h // num_ranks
    return 4 * (total + tokens * a * (3 * sequence_length if config.dropout else 1))


class OwnStream(nn.Module):
    """Dropout whose random numbers come from a state kept aside on each rank, as Megatron's tracker does."""

    def __init__(self, p, group):
        super().__init__()
        self.p = p
        box = [torch.empty((), dtype=torch.int64).random_().item()]
        dist.broadcast_object_list(box, group_src=0, group=group)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(box[0] + 1000 * group.rank())
            self.state = torch.get_rng_state()

    def forward(self, x):
        if not self.training or not self.p:
            return x
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            y = F.dropout(x, self.p)
            self.state = torch.get_rng_state()
        return y


def slice_linear(linear, group, dim):
    """This rank's slice of a dense layer, in the layer itself."""
    n, r = group.size(), group.rank()
    linear.weight = nn.Parameter(linear.weight.detach().chunk(n, dim)[r].clone())
    if dim == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach().chunk(n)[r].clone())


def norm_forward(group, norm, x):
    """Sequence first, as Megatron has it: what the norm keeps is a copy in that order."""
    bias = None if norm.bias is None else copy_to_group(norm.bias, group)
    first = x.transpose(0, 1).contiguous()
    y = F.layer_norm(first, norm.weight.shape, copy_to_group(norm.weight, group), bias, 1e-5)
    return y.transpose(0, 1)


def row_forward(group, linear, x):
    y = reduce_scatter_sequence(F.linear(x, linear.weight), group)
    return y if linear.bias is None else y + copy_to_group(linear.bias, group)


def sequence_parallel_block(block, group):
    attention, mlp, n = block.attn, block.mlp, group.size()
    heads = attention.c_attn.out_features // 3 // attention.head_size
    if heads % n:
        raise ValueError(f"{heads} heads over {n} ranks")
    with torch.no_grad():
        for p in attention.c_attn.parameters():
            p.copy_(p.unflatten(0, (3, n, -1)).transpose(0, 1).flatten(0, 2))
    for linear, dim in ((attention.c_attn, 0), (attention.c_proj, 1), (mlp.c_fc, 0), (mlp.c_proj, 1)):
        slice_linear(linear, group, dim)
    for norm in (block.ln_1, block.ln_2):
        norm.forward = types.MethodType(lambda self, x: norm_forward(group, self, x), norm)
    for linear in (attention.c_proj, mlp.c_proj):
        linear.forward = types.MethodType(lambda self, x: row_forward(group, self, x), linear)
    for module in (attention, mlp):  # the whole sequence from here to the row-parallel layer
        module.register_forward_pre_hook(lambda _, inputs: (gather_sequence(inputs[0], group),))
    attention.resid_dropout = OwnStream(attention.resid_dropout.p, group)
    mlp.dropout = OwnStream(mlp.dropout.p, group)
    return block


def sequence_parallelize(model, group):
    for block in model.transformer.h:
        sequence_parallel_block(block, group)
    parts = model.transformer
    parts.wte = VocabParallelEmbedding.from_embedding(parts.wte, group=group)
    model.lm_head.weight = parts.wte.weight
    parts.drop = OwnStream(parts.drop.p, group)
    final, size = parts.ln_f, model.config.vocab_size
    final.forward = types.MethodType(lambda self, x: norm_forward(group, self, x), final)

    def forward(idx, targets=None):
        s = idx.size(1)
        if s % group.size():
            raise ValueError(f"{s} tokens cannot be shared by {group.size()} ranks")
        whole = parts.wte(idx) + parts.wpe(torch.arange(s))
        x = parts.drop(scatter_sequence(whole, group))
        for block in parts.h:
            x = block(x)
        x = gather_sequence(final(x), group)
        if targets is None:
            return gather_from_group(F.linear(x[:, -1:], model.lm_head.weight), group)[..., :size], None
        logits = F.linear(x, model.lm_head.weight)
        first = group.rank() * logits.size(-1)
        shown = logits.masked_fill(torch.arange(first, first + logits.size(-1)) >= size, float("-inf"))
        return logits, vocab_parallel_cross_entropy(shown.flatten(0, 1), targets.flatten(), group)

    def generate(idx, max_new_tokens, temperature=1.0, top_k=None):
        """The last tokens only, as many as divide."""
        for _ in range(max_new_tokens):
            seen = idx[:, -model.config.block_size :]
            logits = forward(seen[:, seen.size(1) % group.size() :])[0][:, -1] / temperature
            if top_k is not None:
                least = logits.topk(min(top_k, logits.size(-1))).values[:, [-1]]
                logits = logits.masked_fill(logits < least, float("-inf"))
            idx = torch.cat([idx, torch.multinomial(logits.softmax(-1), 1)], 1)
        return idx

    model.forward, model.generate = forward, generate
    return model


class AdaptedRowLinear(nn.Module):
    """up enters the graph through copy_to_group."""

    def __init__(self, in_features, out_features, low_rank, *, group):
        super().__init__()
        share = in_features // group.size()
        self.group = group
        self.weight = nn.Parameter(torch.randn(out_features, share) * 0.02, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False)
        self.down = nn.Parameter(torch.randn(low_rank, share) * 0.02)
        self.up = nn.Parameter(torch.zeros(out_features, low_rank))

    def forward(self, x):
        both = F.linear(x, torch.cat([self.weight, self.down]))
        y, low = reduce_scatter_sequence(both, self.group).split([len(self.weight), len(self.down)], -1)
        return y + F.linear(low, copy_to_group(self.up, self.group)) + self.bias
