"""Tensor parallelism: the matrices of a GPT cut over the ranks of a group, every rank computing on its slice.

After Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053). Rank r owns the r-th contiguous slice.
Notation: b batch, s sequence length, h width, a heads, d head size, v vocabulary, n ranks, N tokens.
"""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from nanogpt.grouped import GroupedQueryAttention
from nanogpt.model import GPT, MLP, CausalSelfAttention, Dropout


def shard_size(size: int, group: ProcessGroup, what: str) -> int:
    """One rank's share of `size`, or a ValueError that says what is not divisible by how many ranks."""
    if size % group.size():
        raise ValueError(f"{what}={size} is not divisible by the {group.size()} ranks of the group")
    return size // group.size()


def own_slice(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """A copy of this rank's slice of x along `dim`."""
    size = shard_size(x.size(dim), group, f"size({dim})")
    return x.narrow(dim, group.rank() * size, size).clone(memory_format=torch.contiguous_format)


# answer
def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the group, in a new tensor: `dist.all_reduce` writes into the one it is given."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient, ctx.group), None


# end of answer


def copy_to_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Identity forward, all-reduce backward: Megatron's f, where a replicated x enters sharded computation.

    Every rank uses the whole x for its own share of the work, so the gradient of x is the sum of what the
    ranks found. What else x is used for is not summed. Neither x nor the gradient that comes in is changed.
    Any shape, dtype and layout in memory, even one that differs between ranks.
    """
    # answer
    return _CopyToGroup.apply(x, group)
    # end of answer


# answer
class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


# end of answer


def reduce_from_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce forward, identity backward: Megatron's g, where partial results become one replicated sum.

    Neither x nor the gradient that comes in is changed. Any shape, dtype and layout in memory, even one that
    differs between ranks.
    """
    # answer
    return _ReduceFromGroup.apply(x, group)
    # end of answer


# answer
def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """(..., k) on each rank to (..., n·k) on all of them, in rank order."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return own_slice(gradient, -1, ctx.group), None


class _ScatterToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return own_slice(x, -1, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather(gradient, ctx.group), None


# end of answer


def gather_from_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """All ranks' x joined along the last dimension, in rank order; backward keeps this rank's slice.

    x (..., k) to (..., n·k). Nothing is summed in backward: what follows a gather is replicated, so every
    rank already has the whole gradient. The forward sends each part once to every other rank, the backward
    nothing. Neither x nor the gradient that comes in is changed. Any dtype and layout in memory, even one
    that differs between ranks.
    """
    # answer
    return _GatherFromGroup.apply(x, group)
    # end of answer


def scatter_to_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's slice of the last dimension of a replicated x; backward joins the ranks' gradients.

    x (..., k) to (..., k/n), rank r the r-th slice. It is a copy: a view would keep the whole x alive, and so
    would an autograd function that saves x for backward. The forward sends nothing, the backward each part
    once to every other rank. Neither x nor the gradient that comes in is changed. Any dtype and layout in
    memory, even one that differs between ranks.

    Raises:
        ValueError: k is not divisible by n.
    """
    # answer
    return _ScatterToGroup.apply(x, group)
    # end of answer


class ColumnParallelLinear(nn.Module):
    """A linear layer of which rank r computes the r-th slice of the output features.

    `weight` (out/n, in), `bias` (out/n) or None. Built directly, the ranks' weights are the slices of one
    dense layer that starts as GPT-2's do: random, with a standard deviation of 0.02, by torch's global seed.
    No two ranks have the same slice, even when they are seeded alike, and ranks seeded alike still draw
    alike afterwards. The bias is zero. Built directly, too, a rank keeps no more than its slice alive.

    Each rank computes 1/n of the product. The forward sends nothing (to gather the output, one all-gather),
    the backward one all-reduce of x's size.

    Raises:
        ValueError: out_features is not divisible by the number of ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: ProcessGroup,
        gather_output: bool = False,
    ) -> None:
        # answer
        super().__init__()
        self.group, self.gather_output = group, gather_output
        size = shard_size(out_features, group, "out_features")
        # Drawn whole and cut: ranks that are seeded alike get the slices of one dense layer.
        whole = torch.empty(out_features, in_features).normal_(std=0.02)
        self.weight = nn.Parameter(own_slice(whole, 0, group))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        # end of answer

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: ProcessGroup, gather_output: bool = False
    ) -> "ColumnParallelLinear":
        """This rank's part of a dense layer that is the same on every rank, in copies of its own.

        Dtype and device are the dense layer's, and a bias is there if it has one.
        """
        # answer
        out_features, in_features = linear.weight.shape
        bias = linear.bias is not None
        layer = cls(in_features, out_features, bias, group=group, gather_output=gather_output)
        layer.weight = nn.Parameter(own_slice(linear.weight.detach(), 0, group))
        if bias:
            layer.bias = nn.Parameter(own_slice(linear.bias.detach(), 0, group))
        return layer
        # end of answer

    def forward(self, x: Tensor) -> Tensor:
        """The whole x (..., in), the same on every rank, to (..., out/n), or (..., out) if gathered.

        The gradient of x is whole on every rank. What else x is used for is not summed.
        """
        # answer
        y = F.linear(copy_to_group(x, self.group), self.weight, self.bias)  # (..., out/n)
        return gather_from_group(y, self.group) if self.gather_output else y
        # end of answer


class RowParallelLinear(nn.Module):
    """A linear layer of which rank r multiplies the r-th slice of the input features.

    `weight` (out, in/n); `bias` (out) is the same on every rank, and is added once, after the sum. Built
    directly, the ranks' weights are the slices of one dense layer that starts as GPT-2's do: random, with a
    standard deviation of 0.02, by torch's global seed. No two ranks have the same slice, even when they are
    seeded alike, and ranks seeded alike still draw alike afterwards. The bias is zero. Built directly, too, a
    rank keeps no more than its slice alive.

    Each rank computes 1/n of the product. The forward sends one all-reduce of the output's size, the
    backward nothing (for a whole x, one all-gather).

    Raises:
        ValueError: in_features is not divisible by the number of ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: ProcessGroup,
        input_is_parallel: bool = True,
    ) -> None:
        # answer
        super().__init__()
        self.group, self.input_is_parallel = group, input_is_parallel
        shard_size(in_features, group, "in_features")
        whole = torch.empty(out_features, in_features).normal_(std=0.02)
        self.weight = nn.Parameter(own_slice(whole, 1, group))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        # end of answer

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: ProcessGroup, input_is_parallel: bool = True
    ) -> "RowParallelLinear":
        """This rank's part of a dense layer that is the same on every rank, in copies of its own.

        Dtype and device are the dense layer's, and a bias is there if it has one.
        """
        # answer
        out_features, in_features = linear.weight.shape
        bias = linear.bias is not None
        layer = cls(in_features, out_features, bias, group=group, input_is_parallel=input_is_parallel)
        layer.weight = nn.Parameter(own_slice(linear.weight.detach(), 1, group))
        if bias:
            layer.bias = nn.Parameter(linear.bias.detach().clone())
        return layer
        # end of answer

    def forward(self, x: Tensor) -> Tensor:
        """This rank's slice (..., in/n) of x to the whole (..., out), the same on every rank.

        With input_is_parallel False, x is the whole (..., in), and each rank takes its slice: then the
        gradient of x is whole, too.
        """
        # answer
        x = x if self.input_is_parallel else scatter_to_group(x, self.group)
        y = reduce_from_group(F.linear(x, self.weight), self.group)  # (..., out)
        return y if self.bias is None else y + self.bias
        # end of answer


def share_dropout(dropout: Dropout, group: ProcessGroup, device: torch.device | str = "cpu") -> Dropout:
    """Make this dropout drop the same elements on every rank, however the ranks are seeded; returns it.

    It gets a `generator` of its own on `device`, with one seed for all ranks, out of torch's global stream;
    with p = 0 it needs none. Two dropouts that are shared one after the other get different seeds. Ranks
    seeded differently still draw differently afterwards, and ranks seeded alike still draw alike. At a call
    of the dropout nothing is sent.
    """
    # answer
    if dropout.p == 0.0:
        return dropout  # drops nothing: nothing to agree on
    seed = torch.randint(2**62, (1,)).to(device)
    dist.broadcast(seed, group_src=0, group=group)
    dropout.generator = torch.Generator(device).manual_seed(int(seed))
    return dropout
    # end of answer


def tensor_parallel_mlp(mlp: MLP, group: ProcessGroup) -> MLP:
    """Cut an MLP that is the same on every rank: column, GELU, row. Changes and returns the given one.

    Each rank computes 4h/n of the hidden features, the r-th slice. One all-reduce forward, one backward, and
    no other. The dropout after the sum drops the same elements on every rank.

    Raises:
        ValueError: 4h is not divisible by the number of ranks; nothing was changed.
    """
    # answer
    mlp.c_fc = ColumnParallelLinear.from_linear(mlp.c_fc, group=group)
    mlp.c_proj = RowParallelLinear.from_linear(mlp.c_proj, group=group)
    share_dropout(mlp.dropout, group, mlp.c_fc.weight.device)
    return mlp
    # end of answer


def tensor_parallel_attention(attention: CausalSelfAttention, group: ProcessGroup) -> CausalSelfAttention:
    """Cut an attention by heads: rank r has the r-th heads of the queries, of the keys and of the values.

    Changes and returns the given one. `c_attn.weight` (3h/n, h), `c_proj.weight` (h, h/n). One all-reduce
    forward, one backward, and no other. The dropout after the sum drops the same elements on every rank.
    Attention probabilities are dropped as before: of each head on its own rank.

    Raises:
        ValueError: the number of heads is not divisible by the number of ranks; nothing was changed.
    """
    # answer
    num_heads = attention.c_attn.out_features // (3 * attention.head_size)
    shard_size(num_heads, group, "n_head")
    by_rank = copy.deepcopy(attention.c_attn)  # rows q|k|v of all heads, to q|k|v of rank 0, of rank 1, ...
    with torch.no_grad():
        for parameter in by_rank.parameters():
            parameter.copy_(parameter.unflatten(0, (3, group.size(), -1)).transpose(0, 1).flatten(0, 2))
    attention.c_attn = ColumnParallelLinear.from_linear(by_rank, group=group)
    attention.c_proj = RowParallelLinear.from_linear(attention.c_proj, group=group)
    share_dropout(attention.resid_dropout, group, attention.c_attn.weight.device)
    return attention
    # end of answer


# answer
def _sum_of_copies(group: ProcessGroup, num_kv_heads: int, size: int, gradient: Tensor) -> Tensor:
    """The gradient of c_attn, in which the last `size` rows, a key and a value head, are summed over copies.

    Every rank fills the slot of its own head, so one all-reduce of the whole group adds up each of them.
    """
    head = group.rank() * num_kv_heads // group.size()
    slots = gradient.new_zeros(num_kv_heads, size, *gradient.shape[1:])
    slots[head] = gradient[-size:]
    dist.all_reduce(slots, group=group)
    return torch.cat([gradient[:-size], slots[head]])


# end of answer


def tensor_parallel_grouped_attention(
    attention: GroupedQueryAttention, group: ProcessGroup
) -> GroupedQueryAttention:
    """Cut by heads: rank r has the r-th of n parts of the query heads, and the key and value heads they read.

    Changes and returns the given attention, which is the same on every rank. Of a_kv key and value heads a
    rank has max(1, a_kv/n): with more ranks than heads, n/a_kv neighbouring ranks have copies of one.
    `c_attn.weight` ((a/n + 2·max(1, a_kv/n))·d, h), `c_proj.weight` (h, h/n). After backward every gradient
    is the dense one's part, also in each copy. The forward sends one all-reduce of x's size. The backward
    sends one, too, and for the copies no more than an all-gather of all their gradients would send.

    Raises:
        ValueError: a is not divisible by n, or neither a_kv by n nor n by a_kv; nothing was changed.
    """
    # answer
    n, num_kv_heads = group.size(), attention.num_kv_heads
    own_heads = shard_size(attention.num_heads, group, "num_heads")
    if num_kv_heads % n and n % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} and {n} ranks: neither divides the other")
    own_kv_heads = max(1, num_kv_heads // n)
    queries, keys, values = torch.arange(attention.num_heads + 2 * num_kv_heads).split(
        [attention.num_heads, num_kv_heads, num_kv_heads]
    )
    order = []  # heads of rank 0, of rank 1, ...: a copied head is there more than once
    for rank in range(n):
        first = rank * num_kv_heads // n
        order += [queries[rank * own_heads : (rank + 1) * own_heads]]
        order += [heads[first : first + own_kv_heads] for heads in (keys, values)]
    dealt = copy.deepcopy(attention.c_attn)
    for name, parameter in attention.c_attn.named_parameters():
        heads = parameter.detach().unflatten(0, (-1, attention.head_size))  # (a + 2·a_kv, d, ...)
        setattr(dealt, name, nn.Parameter(heads[torch.cat(order)].flatten(0, 1)))
    project = RowParallelLinear.from_linear(attention.c_proj, group=group)
    attention.c_attn, attention.c_proj = ColumnParallelLinear.from_linear(dealt, group=group), project
    attention.num_heads, attention.num_kv_heads = own_heads, own_kv_heads
    for parameter in attention.c_attn.parameters() if n > num_kv_heads else ():
        parameter.register_hook(partial(_sum_of_copies, group, num_kv_heads, 2 * attention.head_size))
    return attention
    # end of answer


class VocabParallelEmbedding(nn.Module):
    """A token table of which rank r holds the r-th slice of the rows.

    `weight` (rows, h), rows at most ceil(v/n): where v is not divisible by n, rows of zeros fill up, or some
    ranks have fewer. Built directly, the ranks' rows are one table that starts as GPT-2's does: random, with
    a standard deviation of 0.02, by torch's global seed. No two ranks have the same rows, even when they are
    seeded alike, and ranks seeded alike still draw alike afterwards. Built directly, too, a rank keeps no
    more than its rows alive.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, group: ProcessGroup) -> None:
        # answer
        super().__init__()
        self.group = group
        whole = torch.empty(num_embeddings, embedding_dim).normal_(std=0.02)
        self.weight = nn.Parameter(self._own_rows(whole, group))
        # end of answer

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, group: ProcessGroup) -> "VocabParallelEmbedding":
        """This rank's rows of a dense table that is the same on every rank, in a copy of their own.

        Dtype and device are the dense table's.
        """
        # answer
        table = cls(*embedding.weight.shape, group=group)
        table.weight = nn.Parameter(cls._own_rows(embedding.weight.detach(), group))
        return table
        # end of answer

    @staticmethod
    def _own_rows(whole: Tensor, group: ProcessGroup) -> Tensor:
        """This rank's rows of a table (v, h): where it ends early, filled up with zeros, or shorter."""
        # answer
        padding = -whole.size(0) % group.size()
        return own_slice(F.pad(whole, (0, 0, 0, padding)), 0, group)
        # end of answer

    def forward(self, idx: Tensor) -> Tensor:
        """Tokens of any shape, the same on every rank, to (..., h): their rows, whole on every rank.

        One all-reduce forward, nothing backward. The tokens are not changed.
        """
        # answer
        idx = idx - self.group.rank() * self.weight.size(0)
        elsewhere = (idx < 0) | (idx >= self.weight.size(0))
        rows = F.embedding(idx.masked_fill(elsewhere, 0), self.weight)  # (..., h)
        return reduce_from_group(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)
        # end of answer


def vocab_parallel_cross_entropy(logits_shard: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
    """Mean cross entropy in nats over the targets that are not -1, from logits cut along the vocabulary.

    logits_shard (N, v/n): rank r has the r-th slice of the vocabulary; targets (N,) are the same on every
    rank. The result is the same scalar on every rank, and its gradient reaches each rank's shard. A second
    backward through the same graph finds the same gradient, or is refused. No more than a few numbers a
    token travel (three: the largest logit, the sum of exponentials, the target's logit), and the full logits
    never exist. Logits of 100 overflow nothing. A column of -inf is a word that does not exist. Logits and
    targets are not changed.
    """
    # answer
    vocabulary = logits_shard.size(-1)
    largest = logits_shard.detach().max(dim=-1).values  # (N,)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits_shard - largest.unsqueeze(-1)  # (N, v/n)
    sum_exp = reduce_from_group(shifted.exp().sum(dim=-1), group)  # (N,)
    own = targets - group.rank() * vocabulary
    elsewhere = (own < 0) | (own >= vocabulary)
    rows = torch.arange(len(own), device=own.device)
    picked = shifted[rows, own.masked_fill(elsewhere, 0)]  # gather would keep all of shifted for backward
    target_logit = reduce_from_group(picked.masked_fill(elsewhere, 0.0), group)  # (N,)
    losses = (sum_exp.log() - target_logit).masked_fill(targets == -1, 0.0)  # (N,)
    return losses.sum() / (targets != -1).sum()
    # end of answer


# answer
def _loss(group: ProcessGroup, vocab_size: int, logits: Tensor, targets: Tensor) -> Tensor:
    """GPT.loss for this rank's part of the logits, (b, s, rows): padding is no word."""
    rows = logits.size(-1)
    words = min(max(vocab_size - group.rank() * rows, 0), rows)  # of this rank's rows; the others pad
    if words < rows:
        padding = torch.arange(rows, device=logits.device) >= words
        logits = logits.masked_fill(padding, float("-inf"))
    return vocab_parallel_cross_entropy(logits.flatten(0, -2), targets.flatten(), group)


def _whole_without_targets(model: GPT, inputs: tuple, outputs: tuple[Tensor, Tensor | None]) -> tuple:
    """A forward hook: logits that are there to sample from, (b, 1, v), are needed whole on every rank."""
    logits, loss = outputs
    if loss is None:
        logits = gather_from_group(logits, model.lm_head.group)[..., : model.config.vocab_size]
    return logits, loss


def _generate(model: GPT, group: ProcessGroup, *arguments, **options) -> Tensor:
    """GPT.generate with the random numbers of the group's rank 0, so that every rank draws the same token."""
    device = model.lm_head.weight.device
    random = torch.cuda if device.type == "cuda" else torch
    state = random.get_rng_state().to(device)
    dist.broadcast(state, group_src=0, group=group)
    random.set_rng_state(state.cpu())
    return GPT.generate(model, *arguments, **options)


# end of answer


def tensor_parallelize(model: GPT, group: ProcessGroup) -> GPT:
    """Cut a GPT that is the same on every rank over the group. Changes and returns the given one.

    Called as before, with the same whole batch on every rank. The loss is the dense one on every rank.
    With targets the logits are this rank's part of the vocabulary, (b, s, rows); without targets they
    are whole, (b, 1, v), and equal on every rank, so that `generate` works (on ranks that are seeded
    alike, if it samples). Those are there to sample from: no gradient need flow through them. After
    `loss.backward()` every gradient is complete, and the same on every rank
    where the parameter is replicated. Every matrix of attention and MLP and the token table are cut.
    The vocabulary need not be divisible by n, and may leave a rank no rows. Parameter names stay GPT's;
    `lm_head` and `wte` stay tied. Two all-reduces of (b, s, h) a block each way, one more for the
    vocabulary, and no logits. A dropout after a sum drops the same elements on every rank, however the
    ranks are seeded.

    Raises:
        ValueError: n_head is not divisible by the number of ranks; nothing was changed.
    """
    # answer
    whole = hasattr(model, "transformer") and isinstance(model.transformer.wte, nn.Embedding)
    if not whole or "loss" in vars(model):
        raise ValueError("expected a whole GPT: cut its layers first, then its tokens, and wrap it last")
    for block in model.transformer.h:
        tensor_parallel_attention(block.attn, group)
        tensor_parallel_mlp(block.mlp, group)
    table = VocabParallelEmbedding.from_embedding(model.transformer.wte, group=group)
    num_rows, width = table.weight.shape
    model.transformer.wte = table
    model.lm_head = ColumnParallelLinear(width, num_rows * group.size(), bias=False, group=group)
    model.lm_head.weight = table.weight
    share_dropout(model.transformer.drop, group, table.weight.device)
    model.loss = partial(_loss, group, model.config.vocab_size)
    model.generate = partial(_generate, model, group)
    model.register_forward_hook(_whole_without_targets)
    return model
    # end of answer


def tensor_parallel_overhead(
    n_embd: int, num_ranks: int, flops_per_second: float, bytes_per_second: float, element_bytes: int = 2
) -> float:
    """Seconds that a rank sends in a block's all-reduces, over the seconds that it computes there.

    A block has 12 · h² weights, cut over the ranks; a token takes 2 FLOPs a weight in forward and 4 in
    backward. Products of attention's scores are not counted. The all-reduces of forward and backward, of h
    numbers a token and `element_bytes` a number, go round a ring, and none of them hides. Batch and length
    cancel. It is 0 on one rank.

    Args:
        n_embd: h.
        flops_per_second: how fast a rank computes.
        bytes_per_second: how fast a rank sends. Bytes, not bits.

    Raises:
        ValueError: a speed is 0 or negative.

    Source: arXiv:1909.08053, section 3, for what is sent; arXiv:2104.04473, section 3.2.
    """
    # answer
    if flops_per_second <= 0 or bytes_per_second <= 0:
        raise ValueError(f"speeds are above 0, not {flops_per_second} and {bytes_per_second}")
    sent = 4 * 2 * (num_ranks - 1) / num_ranks * n_embd * element_bytes  # by a rank, for a token
    computed = (2 + 4) * 12 * n_embd**2 / num_ranks
    return (sent / bytes_per_second) / (computed / flops_per_second)
    # end of answer


class MultiQueryAttention(nn.Module):
    """Causal attention in which all heads share one key head and one value head (Shazeer 2019).

    Rank r computes the r-th query heads. The one key and value head is needed by all of them, so
    `key_value` is replicated: the same weights on every rank, computed by every rank. After backward the
    gradients of all weights and of x are those of the dense attention. The forward sends one all-reduce of
    the output's size, the backward at most two of x's size and something much smaller.
    """

    def __init__(self, width: int, num_heads: int, *, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.head_size = width // num_heads
        self.query = ColumnParallelLinear(width, width, group=group)
        self.key_value = nn.Linear(width, 2 * self.head_size)
        self.project = RowParallelLinear(width, width, group=group)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h), the same on every rank, to (b, s, h), the same on every rank."""
        # answer
        b, s, _ = x.shape
        q = self.query(x).view(b, s, -1, self.head_size).transpose(1, 2)  # (b, a/n, s, d)
        # Here replicated keys and values enter sharded computation: every rank's heads pull at them.
        key_value = copy_to_group(self.key_value(x), self.group)  # (b, s, 2d)
        k, v = (part.unsqueeze(1).expand_as(q) for part in key_value.chunk(2, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))
        # end of answer
