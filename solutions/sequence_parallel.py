"""Sequence parallelism: between the cut matrices of tensor parallelism every rank keeps its own tokens only.

After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198). Rank r has the r-th contiguous part of the sequence, and the r-th slice of every matrix.
Notation: b batch, s sequence length, h width, a heads, d head size, v vocabulary, n ranks.
"""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from nanogpt.model import GPT, Block, CausalSelfAttention, Dropout, GPTConfig
from solutions.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    shard_size,
    tensor_parallel_attention,
    tensor_parallel_mlp,
    tensor_parallelize,
)


# answer
def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """(b, s/n, h) on each rank to (b, s, h) on all of them, in rank order."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """(b, s, h) on each rank, to this rank's tokens (b, s/n, h) of their sum."""
    size = shard_size(x.size(1), group, "sequence length")
    parts = [part.contiguous() for part in x.split(size, dim=1)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(gradient, ctx.group), None


# end of answer


def gather_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """All ranks' tokens, in rank order; backward is a reduce-scatter.

    x (b, s/n, h) to (b, s, h). What follows is cut work, of which each rank knows a part of the gradient of
    every token: this rank's tokens get the sum. Neither x nor the gradient that comes in is changed. Any
    dtype, the same on all ranks; any memory layout, which may differ between ranks.
    """
    # answer
    return _GatherSequence.apply(x, group)
    # end of answer


# answer
class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_gather(gradient, ctx.group), None


# end of answer


def reduce_scatter_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's tokens of the sum over the ranks; backward is an all-gather.

    x (b, s, h), a partial result, to (b, s/n, h), rank r the r-th tokens. Neither x nor the gradient that
    comes in is changed. Any dtype, the same on all ranks; any memory layout, which may differ between ranks.

    Raises:
        ValueError: s is not divisible by n.
    """
    # answer
    return _ReduceScatterSequence.apply(x, group)
    # end of answer


# answer
class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        size = shard_size(x.size(1), group, "sequence length")
        # A copy: a view would keep the whole x alive.
        return x.narrow(1, group.rank() * size, size).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_gather(gradient, ctx.group), None


# end of answer


def scatter_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's tokens of an x that is the same on every rank; backward gathers the ranks' gradients.

    x (b, s, h) to (b, s/n, h), rank r the r-th tokens. The gradient of x is whole, and the same everywhere.
    The forward sends nothing, the backward each part once to every other rank. Neither x nor the gradient
    that comes in is changed. Any dtype, the same on all ranks; any memory layout, which may differ between
    ranks.

    Raises:
        ValueError: s is not divisible by n.
    """
    # answer
    return _ScatterSequence.apply(x, group)
    # end of answer


# answer
class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(_all_gather(x, group), weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = _reduce_scatter(gradient @ weight.to(gradient.dtype), ctx.group)  # (b, s/n, in)
        if ctx.needs_input_grad[1]:
            whole = _all_gather(x.to(gradient.dtype), ctx.group)  # (b, s, in)
            for_weight = gradient.flatten(0, 1).T @ whole.flatten(0, 1)  # (out/n, in)
        if ctx.needs_input_grad[2]:
            for_bias = gradient.sum(dim=(0, 1))  # (out/n,)
        return for_x, for_weight, for_bias, None


# end of answer


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
    """`F.linear(gather_sequence(x, group), weight, bias)`, which keeps this rank's tokens only for backward.

    x (b, s/n, in) to (b, s, out/n), with this rank's rows of a column-parallel layer: weight (out/n, in),
    bias (out/n) or None. The gathered x is not kept, nor is a buffer for it that stays from call to call:
    backward gathers it again for the gradient of the weight. So one all-gather forward; one all-gather and
    one reduce-scatter backward. Neither the inputs nor the gradient that comes in are changed. Any memory
    layout, which may differ between ranks.
    """
    # answer
    return _GatheredLinear.apply(x, weight, bias, group)
    # end of answer


def block_activation_bytes(
    config: GPTConfig, batch_size: int, sequence_length: int, num_ranks: int, scheme: str
) -> int:
    """Bytes that one rank keeps of one block for backward: fp32, on the CPU, in training mode.

    Distinct storages without parameters, for 0 <= dropout < 1. The block's input counts (`ln_1` keeps it),
    its output does not (the next block's). Exact for b >= 2 and at least two heads on a rank.

    Args:
        scheme: `tensor_parallel` (lesson 10); `sequence_parallel`: the linear layers keep the gathered input;
            `gather_again`: they keep this rank's tokens of it, and gather again in backward.

    Raises:
        ValueError: `scheme` is another word.
    """
    # answer
    tokens, n = batch_size * sequence_length, num_ranks
    whole = 4 * tokens * config.n_embd  # (b, s, h)
    part = whole // n  # (b, s/n, h), or h/n features of every token
    per_head = batch_size * config.n_head * sequence_length // n  # a number a token and head of this rank
    kept = {  # of (b, s, h): what a norm reads and a dropout's mask; what c_attn and c_fc read
        "tensor_parallel": (whole, whole),
        "sequence_parallel": (part, whole),
        "gather_again": (part, part),
    }
    if scheme not in kept:
        raise ValueError(f"scheme={scheme!r}: expected one of {', '.join(kept)}")
    stream, gathered = kept[scheme]
    norms = 2 * (stream + stream // config.n_embd * 2)  # the input, a mean and a deviation a token
    masks = 2 * stream if config.dropout > 0 else 0
    if config.dropout > 0:
        core = 4 * part + 3 * 4 * per_head * sequence_length  # scaled q and k, v, out; three (s, s) a head
    else:
        core = 4 * part + 4 * per_head  # q, k, v, out; a log-sum-exp
    return norms + 2 * gathered + core + 8 * part + masks  # 8: what the GELU and mlp.c_proj read
    # end of answer


# answer
class _GatherLinear(nn.Module):
    """A column-parallel layer that takes this rank's tokens: (b, s/n, in) to (b, s, out/n)."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        super().__init__()
        self.weight, self.bias, self.group = layer.weight, layer.bias, layer.group

    def forward(self, x: Tensor) -> Tensor:
        return gathered_linear(x, self.weight, self.bias, self.group)


class _ScatterLinear(nn.Module):
    """A row-parallel layer that leaves this rank's tokens: (b, s, in/n) to (b, s/n, out)."""

    def __init__(self, layer: RowParallelLinear) -> None:
        super().__init__()
        self.weight, self.bias, self.group = layer.weight, layer.bias, layer.group

    def forward(self, x: Tensor) -> Tensor:
        y = reduce_scatter_sequence(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def _attend(attention: CausalSelfAttention, x: Tensor) -> Tensor:
    """CausalSelfAttention.forward for this rank's tokens: s is known after the gather, not before."""
    qkv = attention.c_attn(x)  # (b, s/n, h) to (b, s, 3h/n)
    heads = (part.unflatten(2, (-1, attention.head_size)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    y = attention.core(*heads).transpose(1, 2).flatten(2)  # (b, s, h/n)
    return attention.resid_dropout(attention.c_proj(y))  # (b, s/n, h)


def _sum_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Replicated parameters that each rank uses for its own tokens: each backward's gradient is summed."""

    def total(gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=group)
        return gradient

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(total)


def _separate_dropout(dropout: Dropout, group: ProcessGroup, device: torch.device) -> None:
    """Masks that differ between ranks, however they are seeded, and follow the seed of the group's rank 0."""
    if dropout.p == 0.0:
        return
    seed = torch.randint(2**62, (1,)).to(device)
    dist.broadcast(seed, group_src=0, group=group)
    dropout.generator = torch.Generator(device).manual_seed(int(seed) + group.rank())


# end of answer


def sequence_parallel_block(block: Block, group: ProcessGroup) -> Block:
    """Cut a block that is the same on every rank: from then on it maps a rank's tokens to a rank's tokens.

    Called with (b, s/n, h), rank r the r-th tokens, and returns the same. Norms, residual stream and the
    dropouts on it see s/n tokens; attention and MLP are tensor parallel between an all-gather and a
    reduce-scatter. For backward a rank keeps no more than two tensors whole, (b, s, h): what the two column
    parallel layers read. After backward every gradient is complete, over two passes as well, and the same on
    every rank where the parameter is replicated. The ranks' dropouts drop different elements, also if the
    ranks share a seed. So do the dropouts of a rank, those of two blocks as well, and two calls. Attention's
    probabilities are dropped as before, with any random numbers. Changes and returns the given block.

    Raises:
        ValueError: the number of heads is not divisible by the number of ranks; nothing was changed.
    """
    # answer
    attention, mlp = tensor_parallel_attention(block.attn, group), tensor_parallel_mlp(block.mlp, group)
    attention.c_attn, mlp.c_fc = _GatherLinear(attention.c_attn), _GatherLinear(mlp.c_fc)
    attention.c_proj, mlp.c_proj = _ScatterLinear(attention.c_proj), _ScatterLinear(mlp.c_proj)
    attention.forward = partial(_attend, attention)
    _sum_gradients([*block.ln_1.parameters(), *block.ln_2.parameters()], group)
    _sum_gradients([layer.bias for layer in (attention.c_proj, mlp.c_proj) if layer.bias is not None], group)
    for dropout in (attention.resid_dropout, mlp.dropout):
        _separate_dropout(dropout, group, block.ln_1.weight.device)
    return block
    # end of answer


# answer
def _look_up(table: VocabParallelEmbedding, idx: Tensor) -> Tensor:
    """VocabParallelEmbedding.forward, of which this rank's tokens stay: (b, s) to (b, s/n, h)."""
    idx = idx - table.group.rank() * table.weight.size(0)
    elsewhere = (idx < 0) | (idx >= table.weight.size(0))
    rows = F.embedding(idx.masked_fill(elsewhere, 0), table.weight)  # (b, s, h)
    return reduce_scatter_sequence(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), table.group)


def _embed(model: GPT, group: ProcessGroup, idx: Tensor, positions: Tensor) -> Tensor:
    """GPT.embed for this rank's tokens: (b, s) to (b, s/n, h)."""
    table = model.transformer.wpe(positions).unsqueeze(0)  # (1, s, h), the same on every rank
    return model.transformer.drop(model.transformer.wte(idx) + scatter_sequence(table, group))


def _head(model: GPT, group: ProcessGroup, x: Tensor) -> Tensor:
    """GPT.head: this rank's tokens (b, s/n, h) to its part of the vocabulary for all of them."""
    return F.linear(gather_sequence(model.transformer.ln_f(x), group), model.lm_head.weight)  # (b, s, rows)


def _forward(
    model: GPT, group: ProcessGroup, idx: Tensor, targets: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """GPT.forward; a sequence to sample from may have any length."""
    if targets is not None:
        shard_size(idx.size(1), group, "sequence length")
        return GPT.forward(model, idx, targets)
    s = idx.size(1)
    if s > model.config.block_size:
        raise ValueError(f"a sequence of {s} tokens does not fit block_size={model.config.block_size}")
    idx = F.pad(idx, (0, -s % group.size()))  # attention is causal: nobody looks at what comes after
    positions = torch.arange(idx.size(1), device=idx.device).clamp(max=s - 1)
    x = model.embed(idx, positions)
    for block in model.transformer.h:
        x = block(x)
    return model.head(x)[:, [s - 1 - idx.size(1)]], None  # from the end: a rank may have the last alone


# end of answer


def sequence_parallelize(model: GPT, group: ProcessGroup) -> GPT:
    """Tensor parallelism with norms, dropout and the residual stream on s/n tokens.

    Changes and returns a model that is the same on every rank. Same call and same return values as after
    `tensor_parallelize`: with the same whole batch on every rank; the loss is the dense one on every rank;
    with targets the logits are this rank's part of the vocabulary for all tokens, (b, s, rows); without
    targets they are whole, (b, 1, v), and equal on every rank. `generate` works; a length that is not
    divisible by n may be refused, with targets or without, or comes out right (by padding). After
    `loss.backward()` every gradient is complete, over two passes as well, and the same on every rank where
    the parameter is replicated. The forward sends at most half an all-reduce of (b, s, h) more than tensor
    parallelism's; the backward may gather tokens again. Parameter names stay GPT's; `lm_head` and `wte` stay
    tied. No two dropouts of the stream drop the same elements, of one rank or of two, however the ranks are
    seeded; nor do two calls.

    Raises:
        ValueError: n_head is not divisible by the number of ranks, and nothing was changed.
    """
    # answer
    if not hasattr(model, "transformer"):
        raise ValueError(f"expected a GPT, got a {type(model).__name__}: cut the GPT, and wrap it last")
    shard_size(model.config.n_head, group, "n_head")
    blocks, model.transformer.h = model.transformer.h, nn.ModuleList()
    try:
        tensor_parallelize(model, group)  # the table, the loss, whole logits without targets
    finally:
        model.transformer.h = blocks
    for block in blocks:
        sequence_parallel_block(block, group)
    table = model.transformer.wte
    table.forward = partial(_look_up, table)
    _sum_gradients(model.transformer.ln_f.parameters(), group)
    _separate_dropout(model.transformer.drop, group, table.weight.device)
    model.embed, model.head = partial(_embed, model, group), partial(_head, model, group)
    model.forward = partial(_forward, model, group)
    return model
    # end of answer


class AdaptedRowLinear(nn.Module):
    """A frozen row-parallel layer with a low-rank adapter beside it (LoRA, Hu et al. 2021).

    y = x W^T + (x A^T) B^T + bias, for an x cut by features, (b, s, in/n), to this rank's tokens
    (b, s/n, out). `weight` (out, in/n) and `bias` (out) are frozen. A, `down` (r, in/n), is cut as the weight
    is. B, `up` (out, r), is whole on every rank, and zero at the start. Beside y, r numbers a token travel,
    and no more than the adapter weighs.
    """

    def __init__(self, in_features: int, out_features: int, low_rank: int, *, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        share = shard_size(in_features, group, "in_features")
        own = slice(group.rank() * share, (group.rank() + 1) * share)  # of a matrix that every rank draws
        weight = torch.empty(out_features, in_features).normal_(std=0.02)[:, own].clone()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False)
        self.down = nn.Parameter(torch.empty(low_rank, in_features).normal_(std=0.02)[:, own].clone())
        self.up = nn.Parameter(torch.zeros(out_features, low_rank))
        self.up.register_hook(self.sum_over_group)

    def sum_over_group(self, gradient: Tensor) -> Tensor:
        """The gradient of what every rank has whole, from what each rank's tokens gave."""
        # answer
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=self.group)
        return gradient
        # end of answer

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, in/n) to (b, s/n, out)."""
        y = reduce_scatter_sequence(F.linear(x, self.weight), self.group)
        low = reduce_scatter_sequence(F.linear(x, self.down), self.group)  # (b, s/n, r)
        return y + F.linear(low, self.up) + self.bias
