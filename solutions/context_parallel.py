"""Context parallelism by hand: every rank has a part of the sequence, and keys and values travel a ring.

Attention over a sequence is put together from attention over its blocks, as long as each block also tells
the logarithm of its sum of exponentials. So a rank keeps its queries, sees one block of keys and values after
the other come by. Or the ranks exchange tokens for heads, and each attends to whole sequences (Ulysses); or
they gather all keys, and any mask can be laid over them.
Sources: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers" (arXiv:2310.01889);
Brandon et al. 2023, "Striped Attention" (arXiv:2311.09431), on the work of each rank; Grattafiori et al.
2024, "The Llama 3 Herd of Models" (arXiv:2407.21783), section 3.3.2, on the 2n chunks and on documents;
Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from nanogpt.model import GPT


# answer: scores of a block, for the forward and your backward
def _scores(q: Tensor, k: Tensor, causal_offset: int | None) -> Tensor:
    """Scaled scores (b, a, s_q, s_k), -inf where a query must not look; at least float32."""
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if causal_offset is None:
        return scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(causal_offset)
    return scores.masked_fill(~seen, float("-inf"))


# end of answer


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, causal_offset: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of queries to one block of keys: the output, and how much weight the block had.

    q (b, a, s_q, d); k and v (b, a, s_k, d). Scores are scaled by 1/sqrt(d). With `causal_offset` None every
    query sees every key; else query i sees key j where j <= i + causal_offset.
    Returns out (b, a, s_q, d) and lse (b, a, s_q), the natural logarithm of the sum of exp(score) over the
    keys that a query sees. Scores of a hundred overflow nothing. Gradients flow through both results. A query
    that sees no key has out 0 and lse -inf, and sends no NaN back in the backward pass.
    """
    # answer
    scores = _scores(q, k, causal_offset)  # (b, a, s_q, s_k)
    largest = scores.detach().amax(dim=-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0.0)  # -inf - -inf would be NaN
    weights = (scores - largest).exp()
    total = weights.sum(dim=-1, keepdim=True)
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    out = (weights.to(v.dtype) @ v / total).to(v.dtype)  # (b, a, s_q, d)
    lse = (total.log() + largest).masked_fill(nothing, -math.inf)
    return out, lse.squeeze(-1)
    # end of answer


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of the same queries to two blocks of keys, from their attention to each.

    out_a, out_b (b, a, s, d) and lse_a, lse_b (b, a, s), as `attention_with_lse` returns them; they stay as
    they are. Returns out and lse of both blocks together. An lse of a hundred overflows nothing. A block of
    which a query saw nothing (lse -inf) changes nothing for it; where both are -inf, out is 0 and lse -inf.
    Gradients flow to all four, through out and through lse. A merge that you call only inside an
    autograd.Function may give none. Where a query saw nothing in either block they may be NaN: a causal query
    sees at least itself.
    """
    # answer
    largest = torch.maximum(lse_a, lse_b).detach()
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    weight_a, weight_b = (lse_a - largest).exp(), (lse_b - largest).exp()  # at most 1
    total = weight_a + weight_b
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    lse = (total.log() + largest).masked_fill(nothing, -math.inf)
    share_a, share_b = (weight_a / total).unsqueeze(-1), (weight_b / total).unsqueeze(-1)
    return (share_a * out_a + share_b * out_b).to(out_a.dtype), lse
    # end of answer


# answer: a hop of the ring, a block's backward, and the ring as an autograd function
class _Hop:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        after, before = ((group.rank() + step) % group.size() for step in (1, -1))
        self.sent = tensor.contiguous()  # must stay as it is until it has left
        self.received = torch.empty_like(self.sent)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, group=group, group_peer=after),
                dist.P2POp(dist.irecv, self.received, group=group, group_peer=before),
            ]
        )

    def wait(self) -> Tensor:
        """What the previous rank sent."""
        for work in self.works:
            work.wait()
        return self.received


def _pairs(own: Sequence[int], theirs: Sequence[int]) -> Iterator[tuple[int, int, int | None]]:
    """Which chunk of ours looks at which of theirs, as places in the two lists, and the causal offset.

    Chunks are named by their place in the sequence. What lies in the future is left out.
    """
    for i, mine in enumerate(own):
        for j, other in enumerate(theirs):
            if other <= mine:
                yield i, j, 0 if other == mine else None


def _for_heads(q: Tensor, kv: Tensor) -> Tensor:
    """Keys and values (2, b, a_kv, s, d) as each head of q (b, a, ·, d) meets them: (2, b, a, s, d)."""
    times = q.size(1) // kv.size(2)
    return kv.unsqueeze(3).expand(-1, -1, -1, times, -1, -1).flatten(2, 3)


def _of_groups(k: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Gradients of keys and of values, each (b, a, s, d), summed over the heads of q that share them."""
    return torch.stack(list(gradients)).unflatten(2, (k.size(1), -1)).sum(3)


def _block_backward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, d_out: Tensor, causal_offset: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from one block. `lse` is that of all blocks, so the weights are the final ones.

    delta (b, a, s_q) is the sum of d_out · out over d: what the softmax's backward takes off.
    """
    weights = (_scores(q, k, causal_offset) - lse.unsqueeze(-1)).exp()  # (b, a, s_q, s_k)
    d_weights = d_out @ v.transpose(-2, -1)
    d_scores = weights * (d_weights - delta.unsqueeze(-1)) / math.sqrt(q.size(-1))
    weights, d_scores = weights.to(q.dtype), d_scores.to(q.dtype)
    return d_scores @ k, d_scores.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ d_out


class _RingAttention(torch.autograd.Function):
    """Causal attention of this rank's chunks to those of all ranks; `chunks_of(rank)` tells which those are.

    At step t a rank has the keys and values of the rank t places before it. The gradient of a block follows
    one step behind it, and gathers what each rank adds.
    """

    @staticmethod
    def forward(ctx, q, k, v, group, chunks_of):
        rank, n = group.rank(), group.size()
        own = chunks_of(rank)
        kv = torch.stack([k, v])  # (2, b, a_kv, s/n, d)
        found: list[tuple[Tensor, Tensor] | None] = [None] * len(own)
        for step in range(n):
            hop = _Hop(kv, group) if step < n - 1 else None
            theirs = chunks_of((rank - step) % n)
            for i, j, offset in _pairs(own, theirs):
                keys, values = _for_heads(q, kv.chunk(len(theirs), dim=3)[j])
                out, lse = attention_with_lse(q.chunk(len(own), dim=2)[i], keys, values, offset)
                before = found[i]
                found[i] = merge_attention(*before, out, lse) if before else (out.to(lse.dtype), lse)
            if hop:
                kv = hop.wait()
        out, lse = (torch.cat(parts, dim=2) for parts in zip(*found, strict=True))
        out = torch.empty_like(q).copy_(out)  # in the order of q's dimensions, as the next matrix wants it
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.chunks_of = group, chunks_of
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        group, chunks_of = ctx.group, ctx.chunks_of
        rank, n = group.rank(), group.size()
        own = chunks_of(rank)
        cut = partial(torch.chunk, chunks=len(own), dim=2)
        delta = (d_out * out).sum(dim=-1, dtype=lse.dtype)  # (b, a, s/n)
        ours = list(zip(*map(cut, (q, lse, delta, d_out)), strict=True))
        kv = torch.stack([k, v])
        d_q = torch.zeros_like(q, dtype=lse.dtype)
        home = travelling = None
        for step in range(n):
            hop = _Hop(kv, group) if step < n - 1 else None
            theirs = chunks_of((rank - step) % n)
            d_kv = torch.zeros_like(kv, dtype=lse.dtype)
            for i, j, offset in _pairs(own, theirs):
                q_i, lse_i, delta_i, d_out_i = ours[i]
                keys, values = _for_heads(q, kv.chunk(len(theirs), dim=3)[j])
                found = _block_backward(q_i, keys, values, lse_i, delta_i, d_out_i, offset)
                cut(d_q)[i].add_(found[0])
                d_kv.chunk(len(theirs), dim=3)[j].add_(_of_groups(k, found[1:]))
            if step == 0:
                home = d_kv  # what this rank adds to its own block waits for the rest of it
            else:
                d_kv = d_kv + travelling.wait() if travelling else d_kv
                travelling = _Hop(d_kv, group)
            if hop:
                kv = hop.wait()
        if travelling:
            home = home + travelling.wait()
        d_k, d_v = home.to(k.dtype)
        return d_q.to(q.dtype), d_k, d_v, None, None


# end of answer


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
    """Causal attention over a sequence that is cut over the ranks: (b, a, s/n, d) to (b, a, s/n, d).

    Rank r holds the r-th s/n tokens of q, k and v, which need not be contiguous. Keys and values travel
    round the ring of ranks, from each to its neighbour, while the block that is there is computed; blocks
    of the future are passed on and not computed. In backward they travel again in the same way, and their
    gradients behind them, home to the rank that they belong to. One rank alone sends nothing. No rank ever
    holds all keys, nor any tensor as long as the sequence, but for positions. Keys and values may be
    grouped: of a_kv heads, which divide a, each serves a/a_kv heads of q that follow one another. What
    travels then is a_kv heads, and no copies of them. In forward it has the dtype of the inputs. The output
    has the dtype of q, and in float64 float64's digits. Scores of a hundred overflow nothing. Inputs and the
    gradient that comes in stay as they are. A model has many layers: each call keeps what its own backward
    needs, while its output is there. Any of q, k and v may be frozen: the others get their gradients.

    Source: arXiv:2310.01889.
    """
    # answer
    return _RingAttention.apply(q, k, v, group, lambda rank: (rank,))
    # end of answer


# answer: which two chunks of 2n a rank has
def _zigzag_chunks(num_ranks: int, rank: int) -> tuple[int, int]:
    """One from the front of the sequence, and its mirror image from the back."""
    return rank, 2 * num_ranks - 1 - rank


# end of answer


def zigzag_split(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's part of a tensor that every rank has: of 2n equal chunks along `dim`, r and 2n-1-r, joined.

    `dim` may count from the end. Nothing is sent for it.

    Raises:
        ValueError: the dimension is not divisible by 2n.
    """
    # answer
    num_chunks = 2 * group.size()
    if x.size(dim) % num_chunks:
        raise ValueError(
            f"a sequence of {x.size(dim)} is not divisible by {num_chunks}: each of {group.size()} ranks "
            "takes two chunks of it"
        )
    chunks = x.chunk(num_chunks, dim)
    return torch.cat([chunks[c] for c in _zigzag_chunks(group.size(), group.rank())], dim)
    # end of answer


def zigzag_merge(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """The whole tensor on every rank, from parts as `zigzag_split` cuts them. It is for looking at results.

    No gradient has to flow through it.
    """
    # answer
    own = x.detach().contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    chunks = {}
    for rank, part in enumerate(parts):
        chunks.update(zip(_zigzag_chunks(group.size(), rank), part.chunk(2, dim), strict=True))
    return torch.cat([chunks[c] for c in sorted(chunks)], dim)
    # end of answer


def zigzag_ring_attention(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
    """`ring_attention` on parts as `zigzag_split` cuts them along dim 2: (b, a, s/n, d) to (b, a, s/n, d).

    The same messages, under way while chunks are computed; k and v may be grouped as there. At every step
    every rank has the same work to do, and at most one chunk of the future is computed, beside the
    diagonal: (2n + 2) products of one chunk with another at most, where 2n + 1 are needed. Scores of a
    hundred overflow nothing. Each call keeps what its own backward needs, while its output is there, and
    nothing as long as the sequence.
    """
    # answer
    return _RingAttention.apply(q, k, v, group, partial(_zigzag_chunks, group.size()))
    # end of answer


# answer: what changes in a GPT
Embed = Loss = Callable[[Tensor, Tensor], Tensor]
"""`GPT.embed` and `GPT.loss`, or what another technique has put in their places."""


Attention = Callable[[Tensor, Tensor, Tensor, ProcessGroup], Tensor]
"""Attention on parts, such as `zigzag_ring_attention`."""
Split = Callable[[Tensor, ProcessGroup, int], Tensor]
"""Cuts a dimension into such parts, as `zigzag_split`."""


class _Core(nn.Module):
    """An attention core whose queries, keys and values are this rank's part of the sequence."""

    def __init__(self, attention: Attention, group: ProcessGroup) -> None:
        super().__init__()
        self.attention, self.group = attention, group

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, self.group)


def _embed(whole: Embed, split: Split, group: ProcessGroup, idx: Tensor, positions: Tensor) -> Tensor:
    """What the model made of tokens (b, s), of this rank's tokens: (b, s/n, h), at their places."""
    return whole(split(idx, group, 1), split(positions, group, 0))


def _loss(mean_loss: Loss, split: Split, group: ProcessGroup, logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the counted targets (b, s) of all ranks, from the logits of this rank's tokens.

    Its value is the whole mean; its gradient is this rank's part of it.
    """
    own = split(targets, group, 1)
    count = (own != -1).sum()
    own = own.masked_fill(count == 0, 0)  # a mean of nothing is NaN; of anything, it counts 0 times here
    total = mean_loss(logits, own) * count
    sums = torch.stack([total.detach(), count.to(total.dtype)])
    dist.all_reduce(sums, group=group)
    part = total / sums[1]
    return sums[0] / sums[1] + (part - part.detach())


def _summed(group: ProcessGroup, gradient: Tensor) -> Tensor:
    """A hook on a parameter: the sum over the ranks, each of which saw a part of the tokens."""
    gradient = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(gradient, group=group)
    return gradient


def _last_logits(last: int, group: ProcessGroup, model: GPT, inputs: tuple, outputs: tuple) -> tuple:
    """A forward hook: without targets, the logits of the sequence's last token, which rank `last` has."""
    logits, loss = outputs
    if loss is None:
        logits = logits.detach().contiguous()
        dist.broadcast(logits, group_src=last, group=group)
    return logits, loss


def cut_sequence(model: GPT, group: ProcessGroup, attention: Attention, split: Split, last: int) -> GPT:
    """`context_parallelize` with any attention on any parts; rank `last` has the last token."""
    if not hasattr(model, "transformer"):
        raise ValueError(f"expected a GPT, got a {type(model).__name__}: cut the GPT, and wrap it last")
    if any(isinstance(block.attn.core, _Core) for block in model.transformer.h):
        raise ValueError("the sequence of this GPT is cut already")
    for block in model.transformer.h:
        block.attn.core = _Core(attention, group)
    model.embed = partial(_embed, model.embed, split, group)
    model.loss = partial(_loss, model.loss, split, group)
    model.register_forward_hook(partial(_last_logits, last, group))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(partial(_summed, group))
    return model


# end of answer


def context_parallelize(model: GPT, group: ProcessGroup) -> GPT:
    """Give each rank a part of the sequence. Changes and returns the given GPT, which is the same everywhere.

    Call it as before, with the same whole batch on every rank: each rank takes its own tokens out of it, and
    their positions in the sequence. Keys and values travel as in `ring_attention`, and no state of the model
    is as long as the sequence. The loss is the mean over all targets that are not -1, the same on every
    rank, even if a rank has none of them. After `loss.backward()` every gradient is complete, and the same on
    every rank; a second backward adds to it as usual. The sums of the gradients send no more than one
    all-reduce of each. Attention probabilities are not dropped. The other dropouts stay on. Parameter names
    stay GPT's. Without targets (a star) every rank gets the logits of the sequence's last token, (b, 1, v),
    and no loss.

    Raises:
        ValueError: (when called) the sequence does not divide: by 2n for zigzag parts, by n for plain ones.
    """
    # answer
    return cut_sequence(model, group, zigzag_ring_attention, zigzag_split, last=0)
    # end of answer


# answer: an all-to-all that autograd follows
class _Deal(torch.autograd.Function):
    """Cut one dimension over the ranks, and join what they send along another: an all-to-all."""

    @staticmethod
    def forward(ctx, x, group, cut, join):
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return _deal(x, group, cut, join)

    @staticmethod
    def backward(ctx, gradient):
        return _deal(gradient, ctx.group, ctx.join, ctx.cut), None, None, None


def _deal(x: Tensor, group: ProcessGroup, cut: int, join: int) -> Tensor:
    """The j-th piece of dimension `cut` goes to rank j; what comes is joined along `join` by rank."""
    sent = torch.stack(x.chunk(group.size(), cut))  # (n, ...)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join)


# end of answer


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
    """Causal attention by whole heads, on parts as `ring_attention` has them.

    Rank r holds the r-th s/n tokens of q, k and v, which need not be contiguous. An all-to-all gives it
    all tokens of the r-th a/n heads; with those it computes whole attention, and an all-to-all brings
    each token's output back: (b, a, s/n, d) to (b, a, s/n, d). Keys and values may be grouped: of a_kv
    heads, which divide a, each serves a/a_kv heads of q that follow one another. Four all-to-alls or
    fewer carry q, k, v and the output, each once, and k and v with a_kv heads. In backward their
    gradients travel so, too. In forward each has the dtype of the inputs. No rank ever holds all tokens of
    all heads. The output has the dtype of q. Scores of a hundred overflow nothing. Inputs and the gradient
    that comes in stay as they are. A model has many layers: each call keeps what its own backward needs,
    while its output is there.

    Source: arXiv:2309.14509, section 3.

    Raises:
        ValueError: a or a_kv is not divisible by n; it says which number by which.
    """
    # answer
    n = group.size()
    for what, heads in (("q", q.size(1)), ("k and v", k.size(1))):
        if heads % n:
            raise ValueError(f"{heads} heads of {what} are not divisible by {n} ranks: each takes whole ones")
    q, k, v = (_Deal.apply(x, group, 1, 2) for x in (q, k, v))  # (b, a/n, s, d), (b, a_kv/n, s, d)
    k, v = _for_heads(q, torch.stack([k, v]))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return _Deal.apply(out, group, 2, 1)
    # end of answer


# answer
class _GatherKeys(torch.autograd.Function):
    """(b, ·, s/n, d) of every rank, in rank order: (b, ·, s, d). Backward sums, and hands each its own."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        parts = [part.contiguous() for part in gradient.chunk(ctx.group.size(), dim=2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None


# end of answer


def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, group: ProcessGroup) -> Tensor:
    """Causal attention inside each document of a packed sequence, with keys and values gathered.

    Rank r holds the r-th s/n tokens of q (b, a, s/n, d) and of k and v (b, a_kv, s/n, d). `documents` (b, s),
    the same on every rank, has the number of the document that each token of the whole sequence is in. Its
    dtype is int64, and the tokens of a document follow one another. A query sees the keys of its own document
    up to its own place in the sequence. Keys and values may be grouped: each of a_kv heads serves a/a_kv
    heads of q that follow one another. Returns (b, a, s/n, d) in the dtype of q. Scores of a hundred overflow
    nothing.

    In forward, keys and values reach every rank once, with a_kv heads. In backward, each rank gets the sum
    of their gradients for its own tokens, and no more is sent for it than a reduce-scatter sends. Queries
    stay where they are. Inputs and the gradient that comes in are not written to.

    Source: arXiv:2407.21783, section 3.3.2, "Context parallelism for long sequences".
    """
    # answer
    kv = torch.cat([k, v], dim=1).contiguous()
    k, v = _for_heads(q, torch.stack(_GatherKeys.apply(kv, group).chunk(2, dim=1)))  # (b, a, s, d) each
    places = torch.arange(documents.size(1), device=q.device)
    mine = slice(group.rank() * q.size(2), (group.rank() + 1) * q.size(2))
    same = documents[:, mine, None] == documents[:, None, :]  # (b, s/n, s)
    seen = same & (places[mine, None] >= places)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.unsqueeze(1))
    # end of answer


def smallest_hidden_part(
    num_heads: int,
    num_kv_heads: int,
    flops_per_second: float,
    bytes_per_second: float,
    element_bytes: int = 2,
    zigzag: bool = False,
) -> int:
    """The fewest tokens t of each sequence on a rank for which a hop of the forward is hidden by computing.

    A hop carries a block of keys and one of values: 2 · b · t · h_kv numbers of `element_bytes` bytes. A head
    has the same width everywhere, so h_kv is h · num_kv_heads / num_heads. Meanwhile a rank computes all its
    queries with a block of keys: 4 · b · t² · h FLOPs, or half of them with `zigzag`. It is a whole number of
    tokens, rounded up. Where the two times are equal, the hop is hidden. Batch and width cancel.

    Args:
        num_heads: heads of q.
        num_kv_heads: heads of k and of v; it divides num_heads.
        flops_per_second: how fast a rank computes.
        bytes_per_second: how fast a rank sends. Bytes, not bits.

    Raises:
        ValueError: a speed is 0 or negative, or num_heads is not divisible by num_kv_heads.

    Source: arXiv:2310.01889, section 3, "Arithmetic Intensity Between Hosts": F / B for bf16.
    """
    # answer
    if flops_per_second <= 0 or bytes_per_second <= 0:
        raise ValueError(f"speeds are above 0, not {flops_per_second} and {bytes_per_second}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads of q are not divisible by {num_kv_heads} of k and v")
    flops_a_pair = 2 if zigzag else 4  # of a query and a key, over h
    sent = 2 * element_bytes * num_kv_heads * flops_per_second
    return int(-(-sent // (flops_a_pair * num_heads * bytes_per_second)))
    # end of answer


def next_token_loss(logits: Tensor, tokens: Tensor, group: ProcessGroup) -> Tensor:
    """Mean cross entropy in nats of predicting the next token, on a sequence that is cut over the ranks.

    logits (b, s/n, v) and tokens (b, s/n): rank r has the r-th s/n positions. Position i predicts the token
    at position i + 1 of the sequence; after the last one there is nothing to predict. A token of -1 is
    padding, and is not predicted. The mean is over all predictions of all ranks, the same on every rank, and
    its gradient reaches each rank's logits. No logits travel.
    """
    # answer
    first = [torch.empty_like(tokens[:, :1].contiguous()) for _ in range(group.size())]
    dist.all_gather(first, tokens[:, :1].contiguous(), group=group)
    first.append(torch.full_like(first[0], -1))  # nothing follows the last position of all
    labels = torch.cat([tokens[:, 1:], first[group.rank() + 1]], dim=1)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
    sums = torch.stack([total.detach(), (labels != -1).sum().to(total.dtype)])
    dist.all_reduce(sums, group=group)
    part = total / sums[1]
    return sums[0] / sums[1] + (part - part.detach())  # the whole mean; this rank's part of the gradient
    # end of answer
