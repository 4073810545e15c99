"""Lesson 12 otherwise: keys and values apart, the other way round the ring, plain parts in the model.

Backward asks autograd for each block's gradient again; gradients make n hops, with send and recv in pairs.
The model sums all gradients in one flat all-reduce.
"""

import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.nn import functional as F

from nanogpt.model import GPT


def attention_with_lse(q, k, v, causal_offset=None):
    scores = torch.einsum("bhid,bhjd->bhij", q, k).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores * q.size(-1) ** -0.5
    if causal_offset is not None:
        i = torch.arange(q.size(2), device=q.device)[:, None]
        j = torch.arange(k.size(2), device=q.device)
        scores = torch.where(j <= i + causal_offset, scores, float("-inf"))
    lse = scores.logsumexp(-1)
    p = torch.where(lse[..., None] == float("-inf"), 0.0, (scores - lse[..., None]).exp())
    return p.to(v.dtype) @ v, lse


def merge_attention(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((x - lse).exp().nan_to_num(0.0).unsqueeze(-1) for x in (lse_a, lse_b))
    return share_a * out_a + share_b * out_b, lse


def start(tensors, group, shift=-1):
    """Send to one neighbour, receive from the other: what will be there, and what to wait for.

    A class that is made in a call is a cycle, and so what it holds lives until Python looks for cycles.
    """
    r, n = group.rank(), group.size()
    to, source = (r + shift) % n, (r - shift) % n
    sent = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in sent]
    works = [dist.irecv(x, group=group, group_src=source) for x in received]
    works += [dist.isend(x, group=group, group_dst=to) for x in sent]

    class Arrival:
        def wait(self, works=works, blocks=(received, sent)):
            for work in works:
                work.wait()

    return received, [Arrival()], sent


def swap(tensors, group, shift=-1):
    """The same, waiting: even ranks send first."""
    r, n = group.rank(), group.size()
    found = []
    for tensor in tensors:
        received = torch.empty_like(tensor)
        for sending in (r % 2 == 0, r % 2 == 1):
            if sending:
                dist.send(tensor, group=group, group_dst=(r + shift) % n)
            else:
                dist.recv(received, group=group, group_src=(r - shift) % n)
        found.append(received)
    return found


def for_each_query_head(q, k, v, offset):
    times = q.size(1) // k.size(1)
    return attention_with_lse(q, *(x.repeat_interleave(times, 1) if times > 1 else x for x in (k, v)), offset)


def whole_blocks(r, source, length):
    """(queries, keys, causal_offset) of the one pair that there is, or none."""
    everything = slice(0, length)
    if source <= r:
        yield everything, everything, 0 if source == r else None


def halves(r, source, length):
    """Zigzag: of an earlier rank the first half is seen; of a later one both, by the second half of ours."""
    everything, middle = slice(0, length), length // 2
    if source == r:
        yield everything, everything, 0
    elif source < r:
        yield everything, slice(0, middle), None
    else:
        yield slice(middle, length), everything, None


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group, pairs):
        r, n, m = group.rank(), group.size(), q.size(2)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=wide)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
        keys, values = k, v
        for step in range(n):
            if step < n - 1:
                received, works, _sent = start((keys, values), group)
            for mine, theirs, offset in pairs(r, (r + step) % n, m):
                block = for_each_query_head(q[:, :, mine], keys[:, :, theirs], values[:, :, theirs], offset)
                merged = merge_attention(out[:, :, mine], lse[:, :, mine], *block)
                out[:, :, mine], lse[:, :, mine] = merged
            if step < n - 1:
                for work in works:
                    work.wait()
                keys, values = received
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.pairs = group, pairs
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        group, pairs = ctx.group, ctx.pairs
        r, n, m = group.rank(), group.size(), q.size(2)
        d_q = torch.zeros_like(out)
        d_kv = [torch.zeros(k.shape, dtype=out.dtype, device=k.device) for _ in range(2)]
        keys, values = k, v
        for step in range(n):
            if step < n - 1:
                received, works, _sent = start((keys, values), group)
            for mine, theirs, offset in pairs(r, (r + step) % n, m):
                with torch.enable_grad():
                    parts = (q[:, :, mine], keys[:, :, theirs], values[:, :, theirs])
                    leaves = [x.detach().requires_grad_() for x in parts]
                    o, block_lse = for_each_query_head(*leaves, offset)
                share = (block_lse.detach() - lse[:, :, mine]).exp().unsqueeze(-1)
                d = d_out[:, :, mine].to(out.dtype)
                d_lse = (share * d * (o.detach() - out[:, :, mine])).sum(-1)
                found = torch.autograd.grad((o, block_lse), leaves, ((share * d).to(o.dtype), d_lse))
                d_q[:, :, mine] += found[0]
                d_kv[0][:, :, theirs] += found[1]
                d_kv[1][:, :, theirs] += found[2]
            if step < n - 1:
                for work in works:
                    work.wait()
                keys, values = received
            if n > 1:
                d_kv = swap(d_kv, group)
        return d_q.to(q.dtype), d_kv[0].to(k.dtype), d_kv[1].to(v.dtype), None, None


def ring_attention(q, k, v, group):
    return Ring.apply(q, k, v, group, whole_blocks)


def zigzag_ring_attention(q, k, v, group):
    return Ring.apply(q, k, v, group, halves)


def zigzag_indices(length, rank, n):
    chunks = torch.arange(length).view(2 * n, -1)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def zigzag_split(x, group, dim):
    if x.size(dim) % (2 * group.size()):
        raise ValueError(f"{x.size(dim)} is not divisible by {2 * group.size()}")
    return x.index_select(dim, zigzag_indices(x.size(dim), group.rank(), group.size()).to(x.device))


def zigzag_merge(x, group, dim):
    """Every rank puts its part into zeros, and all are added."""
    length = x.size(dim) * group.size()
    shape = list(x.shape)
    shape[dim] = length
    where = zigzag_indices(length, group.rank(), group.size()).to(x.device)
    whole = x.new_zeros(shape).index_copy_(dim, where, x.detach())
    dist.all_reduce(whole, group=group)
    return whole


class Core(torch.nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, q, k, v):
        return ring_attention(q, k, v, self.group)


class SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *parameters):
        ctx.group = group
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx, *gradients):
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=ctx.group)
        pieces = flat.split([g.numel() for g in gradients])
        return None, *(piece.view_as(g) for piece, g in zip(pieces, gradients, strict=True))


class PlainParts(GPT):
    """GPT's forward on the r-th part of the sequence."""

    def forward(self, idx, targets=None):
        if not self.running:
            named = dict(self.named_parameters())
            summed = dict(zip(named, SumGradients.apply(self.group, *named.values()), strict=True))
            self.running = True
            try:
                return functional_call(self, summed, (idx, targets))
            finally:
                self.running = False
        n, r, s = self.group.size(), self.group.rank(), idx.size(1)
        if s % n:
            raise ValueError(f"{s} tokens are not divisible by {n} ranks")
        x = self.embed(idx.chunk(n, 1)[r], torch.arange(s, device=idx.device).chunk(n)[r])
        for block in self.transformer.h:
            x = block(x)
        logits = self.head(x)
        if targets is None:
            return logits, None
        own = targets.chunk(n, 1)[r]
        losses = F.cross_entropy(logits.transpose(1, 2), own, ignore_index=-1, reduction="none")
        part = losses.sum() / (targets != -1).sum()
        whole = part.detach().clone()
        dist.all_reduce(whole, group=self.group)
        return logits, part + (whole - part.detach())


def context_parallelize(model, group):
    model.__class__ = PlainParts
    model.group, model.running = group, False
    for block in model.transformer.h:
        block.attn.core = Core(group)
    return model


def ulysses_attention(q, k, v, group):
    """q, k and v of a rank's heads side by side, in one all-to-all; PyTorch's differentiable collectives."""
    n = group.size()
    if q.size(1) % n or k.size(1) % n:
        raise ValueError(f"{q.size(1)} and {k.size(1)} heads do not both divide by {n}")
    b, _, m, d = q.shape
    rows = torch.cat([x.unflatten(1, (n, -1)) for x in (q, k, v)], 2)  # (b, n, heads, s/n, d)
    rows = rows.transpose(0, 1).contiguous()
    swap_rows = torch.distributed._functional_collectives.all_to_all_single_autograd
    arrived = swap_rows(rows, [1] * n, [1] * n, group)
    whole = arrived.permute(1, 2, 0, 3, 4).reshape(b, -1, n * m, d)
    mine = q.size(1) // n
    keys, values = whole[:, mine:].chunk(2, 1)
    out = F.scaled_dot_product_attention(whole[:, :mine], keys, values, is_causal=True, enable_gqa=True)
    out = out.unflatten(2, (n, m)).permute(2, 0, 1, 3, 4).contiguous()  # (n, b, a/n, s/n, d)
    return swap_rows(out, [1] * n, [1] * n, group).transpose(0, 1).flatten(1, 2)


class RoundTheRing(torch.autograd.Function):
    """A gather by hops from neighbour to neighbour; backward sends each rank its piece, and adds up there."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        n, r = group.size(), group.rank()
        parts = {r: x.contiguous()}
        for step in range(n - 1):
            received = torch.empty_like(parts[r])
            works = [
                dist.irecv(received, group=group, group_src=(r - 1) % n),
                dist.isend(parts[(r - step) % n], group=group, group_dst=(r + 1) % n),
            ]
            for work in works:
                work.wait()
            parts[(r - step - 1) % n] = received
        return torch.cat([parts[source] for source in range(n)], dim=2)

    @staticmethod
    def backward(ctx, gradient):
        pieces = torch.stack(gradient.chunk(ctx.group.size(), dim=2))
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=ctx.group)
        return received.sum(0), None


def document_attention(q, k, v, documents, group):
    """Row by row of the batch, document by document, and no mask but the causal one."""
    k, v = (RoundTheRing.apply(x, group) for x in (k, v))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    part = q.size(2)
    first, rows = group.rank() * part, []
    for row, numbers in enumerate(documents):
        outputs = []
        for place in range(first, first + part):
            begin = int((numbers == numbers[place]).nonzero()[0])
            keys, values = k[row, :, begin : place + 1], v[row, :, begin : place + 1]
            query = q[row, :, place - first].unsqueeze(1)
            weights = (query @ keys.transpose(1, 2) * q.size(-1) ** -0.5).softmax(-1)
            outputs.append(weights @ values)
        rows.append(torch.cat(outputs, dim=1))
    return torch.stack(rows)


def next_token_loss(logits, tokens, group):
    """The first token goes to the rank before."""
    r, n = group.rank(), group.size()
    after = torch.full_like(tokens[:, :1], -1).contiguous()
    works = []
    if r > 0:
        first = tokens[:, :1].contiguous()
        works.append(dist.isend(first, group=group, group_dst=r - 1))
    if r < n - 1:
        works.append(dist.irecv(after, group=group, group_src=r + 1))
    for work in works:
        work.wait()
    labels = torch.cat([tokens, after], 1)[:, 1:]
    count = (labels != -1).sum()
    dist.all_reduce(count, group=group)
    own = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-1, reduction="none").sum() / count
    whole = own.detach().clone()
    dist.all_reduce(whole, group=group)
    return own + (whole - own.detach())
