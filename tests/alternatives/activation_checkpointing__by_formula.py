"""Lesson 03 otherwise: attention whose backward is written by hand, and a search over numbers of groups.

And PyTorch's older checkpoint around the blocks, whose function remembers the states of their generators.
"""

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint


class _Attention(torch.autograd.Function):
    """Keeps q, k, v and the result. Backward computes the probabilities again, and not the result."""

    @staticmethod
    def probabilities(q, k):
        s = q.size(-2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / q.size(-1) ** 0.5)
        future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(future, float("-inf")).softmax(dim=-1)

    @staticmethod
    def forward(ctx, q, k, v, dropout):
        ctx.generator = getattr(dropout, "generator", None) or torch.default_generator
        ctx.state, ctx.dropout = ctx.generator.get_state(), dropout
        out = dropout(_Attention.probabilities(q, k)) @ v
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, upstream):
        q, k, v, out = ctx.saved_tensors
        p = _Attention.probabilities(q, k)
        now = ctx.generator.get_state()
        ctx.generator.set_state(ctx.state)
        mask = ctx.dropout(torch.ones_like(p))
        ctx.generator.set_state(now)
        grad_p = upstream @ v.transpose(-2, -1) * mask
        grad_v = (p * mask).transpose(-2, -1) @ upstream
        row = (upstream * out).sum(dim=-1, keepdim=True)  # of grad_p times p, without the matrix
        grad_scores = p * (grad_p - row) * (1.0 / q.size(-1) ** 0.5)
        return grad_scores @ k, grad_scores.transpose(-2, -1) @ q, grad_v, None


def recompute_attention(model):
    for block in model.transformer.h:
        core = block.attn.core
        drops = core.dropout if isinstance(core.dropout, torch.nn.Module) else torch.nn.Identity()

        def forward(q, k, v, drops=drops):
            return _Attention.apply(q, k, v, drops)

        core.forward = forward
    return model


class Again:
    """A function of these blocks; each call of it after the first begins with the first one's generators."""

    def __init__(self, blocks, forwards):
        self.blocks, self.forwards, self.states = blocks, forwards, None

    def __call__(self, x):
        parts = [part for block in self.blocks for part in block.modules()]
        generators = [part.generator for part in parts if getattr(part, "generator", None) is not None]
        now = [generator.get_state() for generator in generators]
        if self.states is None:
            self.states = now
            return self.run(x)
        self.set(generators, self.states)
        try:
            return self.run(x)
        finally:
            self.set(generators, now)

    def run(self, x):
        for forward in self.forwards:
            x = forward(x)
        return x

    def set(self, generators, states):
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def checkpoint_blocks(model, every=1):
    blocks = list(model.transformer.h)
    while blocks:
        group, blocks = blocks[:every], blocks[every:]
        forwards = [block.forward for block in group]

        def forward(x, group=group, forwards=forwards):
            again = Again(group, forwards)
            anchor = torch.empty(0, requires_grad=True)  # x may need no gradient
            if not torch.is_grad_enabled():
                return again(x)
            return torch_checkpoint(lambda x, _: again(x), x, anchor, use_reentrant=True)

        group[0].forward = forward
        for block in group[1:]:
            block.forward = lambda x: x
    return model


def best_segment_length(num_blocks, block_bytes, boundary_bytes):
    """Of all lengths with as many groups the shortest is the best: so go through the numbers of groups."""
    shortest = {-(-num_blocks // groups) for groups in range(1, num_blocks + 1)}

    def total(k):
        return -(-num_blocks // k) * boundary_bytes + k * block_bytes

    return sorted(shortest, key=lambda k: (total(k), k))[0]
