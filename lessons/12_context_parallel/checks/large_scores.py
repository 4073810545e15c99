"""Rings where scores are 150 and -150: exp() of the one is too large for float32, of the other it is 0."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Fault, Trial

from .ring_slips import by_parts
from .shared import attention, causal

LARGE = 150.0

Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def make_large(seen: SimpleNamespace) -> SimpleNamespace:
    """In float32: every other token's score with the first one is 150; the first, alone, has -150.

    The first token's block comes to other ranks after their own, in which all scores are ordinary.
    """
    q, k, v, upstream = (x.float() for x in (seen.q, seen.k, seen.v, seen.upstream))
    q, k = q.clone(), k.clone()  # (b, s, a, d)
    k[..., 0] = 0.0
    k[:, 0] = 0.0
    k[:, 0, :, 0] = math.sqrt(q.size(-1))  # a score with it is the query's first number
    q[:, 1::2, :, 0], q[:, 0, :, 0] = LARGE, -LARGE
    parts = [[x[:, w] for x in (q, k, v, upstream)] for w in seen.where]
    inputs = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, causal(seen.length))[0]
    out.backward(upstream.double().transpose(1, 2))
    return SimpleNamespace(parts=parts, inputs=inputs, out=out, where=seen.where, length=seen.length)


def attend_largely(attention_of: Callable, group, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> dict:
    """On a rank: output and gradients."""
    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
    out = attention_of(*leaves, group)
    if isinstance(out, Tensor) and out.requires_grad and out.shape == leaves[0].shape:
        out.backward(upstream.transpose(1, 2))
    returned = out.detach() if isinstance(out, Tensor) else None
    return {"out": returned, "gradients": [x.grad for x in leaves]}


def by_the_difference(out: Tensor, lse: Tensor, block: Tensor, its: Tensor) -> tuple[Tensor, Tensor]:
    both = lse + (1 + (its - lse).exp()).log()
    return (lse - both).exp() * out + (its - both).exp() * block, both


def by_exponentials(out: Tensor, lse: Tensor, block: Tensor, its: Tensor) -> tuple[Tensor, Tensor]:
    total = lse.exp() + its.exp()
    return (lse.exp() * out + its.exp() * block) / total, total.log()


def merged_by(merge: Merge, pieces: int, seen: SimpleNamespace) -> list[Tensor]:
    """Each rank's output, where blocks of so many pieces are merged in float32, in the order they come."""
    q, k, v = (x.detach() for x in seen.inputs)
    n, mask, outputs = len(seen.where), causal(seen.length), []
    for r, own in enumerate(seen.where):
        found: Any = None
        for step in range(n):
            for theirs in seen.where[(r - step) % n].chunk(pieces):
                block, its = attention(q[:, :, own], k[:, :, theirs], v[:, :, theirs], mask[own][:, theirs])
                block, its = block.float(), its.float().unsqueeze(-1)
                before = found or (torch.zeros_like(block), torch.full_like(its, -math.inf))
                first, none = before[1] == -math.inf, its == -math.inf
                pairs = zip(before, (block, its), merge(*before, block, its), strict=True)
                found = tuple(torch.where(none, old, torch.where(first, x, new)) for old, x, new in pairs)
        outputs.append(found[0])
    return outputs


LARGER_FIRST = (
    "Take the larger of the two lse off both before exp. As good, and one call each: "
    "torch.logaddexp(lse, block_lse) is the new lse, and torch.sigmoid(block_lse - lse) the block's share."
)


def of_merges(seen: SimpleNamespace) -> dict[str, Any]:
    """Cause → each rank's output."""
    q, k, v = (x.detach().float() for x in seen.inputs)
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(~causal(seen.length), -math.inf)
    weights = scores.exp()
    told = "no largest score is taken off before exp, which is infinite or 0 then: inf/inf and 0/0 are NaN"
    whole = by_parts(seen, weights / weights.sum(-1, keepdim=True) @ v)
    found: dict[str, Any] = {told: Fault(whole, "Take each row's largest score off before exp.")}
    for told, merge in (
        (
            "a merge takes exp(block_lse - lse), which is infinite where the block's lse is larger by 89 or "
            "more: the new lse is infinite then, and no block has a share",
            by_the_difference,
        ),
        (
            "a merge takes exp(lse), which is infinite for an lse of 89 or more: inf/inf is NaN",
            by_exponentials,
        ),
    ):
        blocks, chunks = (merged_by(merge, pieces, seen) for pieces in (1, 2))
        found[told] = Fault(blocks, LARGER_FIRST)
        if not all(
            torch.allclose(x, y, 0, 1e-3, equal_nan=True) for x, y in zip(blocks, chunks, strict=True)
        ):
            found[f"{told}, chunk by chunk"] = Fault(chunks, LARGER_FIRST)
    return found


def require_large(trial: Trial, exact: SimpleNamespace) -> None:
    """Output and gradients are plain attention's."""
    seen = exact.large
    told = "where a score is 150, and -150 where a token sees itself alone,"
    results = [r.get("large", {"out": None, "gradients": [None] * 3}) for r in exact.results]
    outs = [r["out"] for r in results]
    trial.close(
        f"the output {told}",
        outs,
        by_parts(seen, seen.out),
        partial(of_merges, seen),
        LARGER_FIRST,
        rtol=1e-3,
    )
    for i, label in enumerate("qkv"):
        trial.close(
            f"the gradient of {label} {told}",
            [r["gradients"][i] for r in results],
            by_parts(seen, seen.inputs[i].grad),
            help="In backward the weights are exp(scores - lse), with the lse of all blocks: none exceeds 1.",
            rtol=1e-3,
        )
