"""Lesson 12 otherwise: PyTorch's fused kernel for the blocks, one flat message a hop, zigzag by index.

Gradients of keys and values ride in one message with the keys and values, and make one more hop alone. The
model is changed by forward hooks, and gradients are summed when a backward ends, in a flat bucket.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention_with_lse(q, k, v, causal_offset=None):
    """By SDPA, once for the output and once, with the score's own sum, for lse: a bias of q and k."""
    d, s_q, s_k = q.size(-1), q.size(2), k.size(2)
    bias = q.new_zeros(s_q, s_k)
    if causal_offset is not None:
        rows = torch.arange(s_q, device=q.device).view(-1, 1)
        bias = bias.masked_fill(torch.arange(s_k, device=q.device) > rows + causal_offset, float("-inf"))
    blind = (bias == float("-inf")).all(-1)
    scores = torch.baddbmm(
        bias.masked_fill(blind.unsqueeze(-1), 0.0).expand(q.shape[0] * q.shape[1], s_q, s_k),
        q.flatten(0, 1),
        k.flatten(0, 1).transpose(1, 2),
        alpha=d**-0.5,
    ).unflatten(0, q.shape[:2])
    out = torch.where(blind.view(-1, 1), 0.0, scores.softmax(-1) @ v)
    return out, scores.logsumexp(-1).masked_fill(blind, float("-inf"))


def merge_attention(out_a, lse_a, out_b, lse_b):
    """Without a gradient: it is used inside of an autograd.Function alone."""
    with torch.no_grad():
        both = torch.stack([lse_a, lse_b])
        largest = both.amax(0).nan_to_num(neginf=0.0)
        weights = (both - largest).exp()
        total = weights.sum(0)
        shares = (weights / total.clamp(min=1e-30)).unsqueeze(-1)
        return shares[0] * out_a + shares[1] * out_b, total.log() + largest


def hop(tensor, group):
    r, n = group.rank(), group.size()
    received = torch.empty_like(tensor)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(r - 1) % n)
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=(r + 1) % n)
    works = dist.batch_isend_irecv([receive, send])

    def wait():
        for work in works:
            work.wait()
        return received

    return wait


def seen(r, source, m, zigzag):
    """Rows of ours, rows of theirs, whether causal."""
    every, early, late = slice(0, m), slice(0, m // 2), slice(m // 2, m)
    if not zigzag:
        return [(every, every, source == r)] if source <= r else []
    if source == r:
        return [(early, early, True), (late, early, False), (late, late, True)]
    return [(every, early, False)] if source < r else [(late, every, False)]


def copies(kv, q):
    return kv.repeat_interleave(q.size(1) // kv.size(2), dim=2)


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group, zigzag):
        r, n, m = group.rank(), group.size(), q.size(2)
        kv = torch.cat([k.reshape(-1), v.reshape(-1)])
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
        for step in range(n):
            arrived = hop(kv, group) if step < n - 1 else None
            keys, values = copies(kv.view(2, *k.shape), q)
            for mine, theirs, causal in seen(r, (r - step) % n, m, zigzag):
                found = FUSED(q[:, :, mine], keys[:, :, theirs], values[:, :, theirs], 0.0, causal)
                merged = merge_attention(out[:, :, mine], lse[:, :, mine], found[0].to(wide), found[1])
                out[:, :, mine], lse[:, :, mine] = merged
            kv = arrived() if arrived else None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.zigzag = group, zigzag
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        group, r, n, m = ctx.group, ctx.group.rank(), ctx.group.size(), q.size(2)
        d_q = torch.zeros_like(q, dtype=lse.dtype)
        kv = torch.stack([k, v])
        d_kv = torch.zeros_like(kv, dtype=lse.dtype)
        for step in range(n):
            keys, values = copies(kv, q)
            for mine, theirs, causal in seen(r, (r - step) % n, m, ctx.zigzag):
                parts = [d_out[:, :, mine], q[:, :, mine], keys[:, :, theirs], values[:, :, theirs]]
                parts = [x.contiguous() for x in (*parts, out[:, :, mine], lse[:, :, mine])]
                found = FUSED_BACKWARD(*parts, 0.0, causal)
                d_q[:, :, mine] += found[0]
                for i in (0, 1):
                    d_kv[i][:, :, theirs] += found[i + 1].unflatten(1, (k.size(1), -1)).sum(2)
            if step < n - 1:
                both = torch.cat([kv.to(d_kv.dtype), d_kv])
                both = hop(both, group)()
                kv, d_kv = both[:2].to(k.dtype), both[2:].clone()
        if n > 1:
            d_kv = hop(d_kv.contiguous(), group)()
        return d_q.to(q.dtype), d_kv[0].to(k.dtype), d_kv[1].to(v.dtype), None, None


def ring_attention(q, k, v, group):
    return Ring.apply(q, k, v, group, False)


def zigzag_ring_attention(q, k, v, group):
    return Ring.apply(q, k, v, group, True)


def zigzag_split(x, group, dim):
    n, r, dim = group.size(), group.rank(), dim % x.dim()
    if x.size(dim) % (2 * n):
        raise ValueError(f"{x.size(dim)} is not divisible by {2 * n}")
    size = x.size(dim) // (2 * n)
    return torch.cat([x.narrow(dim, r * size, size), x.narrow(dim, (2 * n - 1 - r) * size, size)], dim)


def zigzag_merge(x, group, dim):
    parts = [None] * group.size()
    dist.all_gather_object(parts, x.detach().cpu(), group=group)
    parts = [part.to(x.device).chunk(2, dim) for part in parts]
    return torch.cat([early for early, _ in parts] + [late for _, late in reversed(parts)], dim)


class Core(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, q, k, v):
        return zigzag_ring_attention(q, k, v, self.group)


class Bucket:
    """Takes the gradients of one backward out of its way, and adds their sums to .grad when it ends."""

    def __init__(self, parameters, group):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.group, self.found = group, {}
        for p in self.parameters:
            p.register_hook(lambda gradient, p=p: self.take(p, gradient))

    def take(self, p, gradient):
        if not self.found:
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        self.found[p] = gradient
        return torch.zeros_like(gradient)

    def end(self):
        found, self.found = [self.found.get(p) for p in self.parameters], {}
        pieces = [
            torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, found, strict=True)
        ]
        flat = torch.cat([g.reshape(-1) for g in pieces])
        dist.all_reduce(flat, group=self.group)
        with torch.no_grad():
            for p, g in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
                p.grad.add_(g.view_as(p))


def context_parallelize(model, group):
    for block in model.transformer.h:
        block.attn.core = Core(group)
    embed = model.embed

    def own_tokens(idx, positions):
        return embed(zigzag_split(idx, group, 1), zigzag_split(positions, group, 0))

    def loss_of_all(logits, targets):
        own = zigzag_split(targets, group, 1).reshape(-1)
        counted = own != -1
        log_p = logits.reshape(-1, logits.size(-1))[counted].log_softmax(-1)
        part = -log_p.gather(1, own[counted].unsqueeze(1)).sum() / (targets != -1).sum()
        return Total.apply(part, group)

    model.embed, model.loss = own_tokens, loss_of_all
    model.bucket = Bucket(model.parameters(), group)
    return model


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class ToHeads(torch.autograd.Function):
    """Tokens to heads by pairs of messages; backward is heads to tokens, and that is its own backward's."""

    @staticmethod
    def forward(ctx, x, group, back):
        ctx.group, ctx.back = group, back
        r, n = group.rank(), group.size()
        pieces = [piece.contiguous() for piece in x.chunk(n, 2 if back else 1)]
        arrived = [piece if i == r else torch.empty_like(piece) for i, piece in enumerate(pieces)]
        works = []
        for step in range(1, n):
            to, source = (r + step) % n, (r - step) % n
            works.append(dist.isend(pieces[to], group=group, group_dst=to))
            works.append(dist.irecv(arrived[source], group=group, group_src=source))
        for work in works:
            work.wait()
        return torch.cat(arrived, 1 if back else 2)

    @staticmethod
    def backward(ctx, gradient):
        return ToHeads.apply(gradient, ctx.group, not ctx.back), None, None


def ulysses_attention(q, k, v, group):
    """Messages between each two ranks, and the lesson's own attention."""
    for heads in (q.size(1), k.size(1)):
        if heads % group.size():
            raise ValueError(f"{heads} heads cannot be dealt out to {group.size()} ranks")
    q, k, v = (ToHeads.apply(x, group, False) for x in (q, k, v))
    k, v = copies(torch.stack([k, v]), q)
    return ToHeads.apply(attention_with_lse(q, k, v, 0)[0], group, True)


def document_attention(q, k, v, documents, group):
    """Keys and values gathered apart, and once more in backward; the mask is added to the scores."""
    return checkpoint(_among_documents, q, k, v, documents, group, use_reentrant=False)


def _among_documents(q, k, v, documents, group):
    k, v = (all_gather_tensor_autograd(x.contiguous(), 2, group) for x in (k, v))
    part, length = q.size(2), documents.size(1)
    mine = torch.arange(length, device=q.device).unflatten(0, (-1, part))[group.rank()]
    hidden = documents[:, mine].unsqueeze(2) != documents.unsqueeze(1)
    hidden = hidden | (torch.arange(length, device=q.device) > mine.unsqueeze(1))
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(1), enable_gqa=True)


def next_token_loss(logits, tokens, group):
    """With all tokens on every rank: they are small."""
    rows = [torch.empty_like(tokens) for _ in range(group.size())]
    dist.all_gather(rows, tokens.contiguous(), group=group)
    whole = F.pad(torch.cat(rows, 1)[:, 1:], (0, 1), value=-1)
    labels = whole.chunk(group.size(), 1)[group.rank()]
    part = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
    return Total.apply(part / (whole != -1).sum(), group)
