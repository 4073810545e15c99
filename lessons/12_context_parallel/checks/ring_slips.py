"""What known slips make of ring attention: the ranks' outputs, and the gradients of the whole q, k and v."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Fault

from .shared import attention, causal


def by_parts(seen: SimpleNamespace, whole: Tensor) -> list[Tensor]:
    return [whole.detach()[:, :, w] for w in seen.where]


def wrong_outputs(seen: SimpleNamespace) -> dict[str, list[Tensor]]:
    """Cause → what each rank would have."""
    q, k, v = (x.detach() for x in seen.inputs)
    n, length = len(seen.where), seen.length
    owner = torch.empty(length, dtype=torch.int64)
    place = torch.empty(length, dtype=torch.int64)
    for r, where in enumerate(seen.where):
        owner[where], place[where] = r, torch.arange(len(where))
    mine, theirs = owner.unsqueeze(1), owner.unsqueeze(0)
    locally = place.unsqueeze(1) >= place.unsqueeze(0)
    mirrored = (
        2 * mine - theirs
    ) % n  # whose block it is taken for, when the ring is thought to go the other way
    first = torch.tensor([int(w[0]) for w in seen.where])
    masks = {
        "the causal mask is by local positions, in every block that is not of a later rank": locally
        & (theirs <= mine),
        "the causal mask is by local positions, in every block": locally,
        "nothing is masked": torch.ones(length, length, dtype=torch.bool),
        "each rank attended to its own block alone": (mine == theirs) & causal(length),
        "blocks of earlier ranks are seen, the own one is not masked": theirs <= mine,
        "parts are taken for whole r-th parts of the sequence": (theirs < mine)
        | ((theirs == mine) & locally),
        "the blocks that come by are taken for those of the other direction of the ring": torch.where(
            mine == theirs, locally, first[mirrored] <= first[mine]
        ),
    }
    for step in range(n if n > 1 else 0):
        told = "a rank's own block" if step == 0 else f"the block of the rank {step} before"
        masks[f"{told} is missing: is every block that comes by used, the first and the last?"] = causal(
            length
        ) & ((mine - theirs) % n != step)
    if int(seen.where[0][-1]) == length - 1 and n > 1:  # zigzag parts
        taken = torch.arange(length)
        for r, where in enumerate(seen.where):
            half = len(where) // 2
            taken[where[half:]] = (n + r) * half + torch.arange(half)
        told = "the second half of rank r's part is taken for chunk n + r, and it is chunk 2n - 1 - r"
        masks[told] = taken.unsqueeze(1) >= taken.unsqueeze(0)
    wrong = {cause: attention(q, k, v, mask)[0] for cause, mask in masks.items()}
    wrong["scores are not divided by sqrt(d)"] = attention(q, k, v, causal(length), q.size(-1) ** 0.5)[0]
    for told, blocks in (("blocks", seen.where), ("chunks", torch.arange(length).split(seen.chunk))):
        found = [attention(q, k[:, :, w], v[:, :, w], causal(length)[:, w])[0] for w in blocks]
        visible = sum((w[0] <= torch.arange(length)).long() for w in blocks)
        wrong[f"the {told}' outputs are added, without rescaling"] = sum(found)
        wrong[f"the {told}' outputs are averaged, without rescaling"] = sum(found) / visible.view(-1, 1)
    found = {cause: by_parts(seen, whole) for cause, whole in wrong.items()}
    found |= with_stale_weights(seen)
    found["the keys travel, and the values that they meet are this rank's own: both must travel"] = [
        attention(q, k, v[:, :, w][:, :, place], causal(length))[0][:, :, w] for w in seen.where
    ]
    return found


def with_stale_weights(seen: SimpleNamespace) -> dict[str, list[Tensor]]:
    """Cause → what each rank has, if merges do not keep the lse that they return."""
    told = "the lse that a merge returns is not kept: the next block is weighed against an older one"
    found = {told: merged(seen, 1, lambda r, step: False)}
    if int(seen.where[0][-1]) == seen.length - 1 and len(seen.where) > 1:  # zigzag parts, of two chunks
        later = told.replace("a merge", "a merge of a later rank's keys")
        found[f"{told}, chunk by chunk"] = merged(seen, 2, lambda r, step: False)
        found[later] = merged(seen, 1, lambda r, step: step <= r)
        found[f"{later}, chunk by chunk"] = merged(seen, 2, lambda r, step: step <= r)
    return found


def merged(seen: SimpleNamespace, pieces: int, keeps: Callable[[int, int], bool]) -> list[Tensor]:
    """Each rank's output, of parts in so many pieces; `keeps(rank, step)`: whether a merge's lse stays."""
    q, k, v = (x.detach() for x in seen.inputs)
    n, mask, outputs = len(seen.where), causal(seen.length), []
    for r, own in enumerate(seen.where):
        out, lse = torch.zeros_like(q[:, :, own], dtype=torch.float64), torch.full((), -math.inf)
        for step in range(n):
            for theirs in seen.where[(r - step) % n].chunk(pieces):
                block, its = attention(q[:, :, own], k[:, :, theirs], v[:, :, theirs], mask[own][:, theirs])
                both = lse.logaddexp(its)
                new, old = ((x - both).exp().nan_to_num(0.0).unsqueeze(-1) for x in (its, lse))
                out = torch.where(new > 0, new * block + old * out, out)
                lse = both if keeps(r, step) else torch.where(lse == -math.inf, its, lse)
        outputs.append(out)
    return outputs


def gradients_from(
    seen: SimpleNamespace, weights: Tensor, delta: Tensor, values: Tensor | None = None
) -> list[Tensor]:
    """Gradients of the whole q, k and v, from attention's weights and what the softmax takes off."""
    q, k, v = (x.detach() for x in seen.inputs)
    d_weights = seen.d_out @ (v if values is None else values).transpose(-2, -1)
    d_scores = weights * (d_weights - delta) / math.sqrt(q.size(-1))
    return [d_scores @ k, d_scores.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ seen.d_out]


def attention_weights(seen: SimpleNamespace) -> Tensor:
    """The softmax of the whole causal scores."""
    q, k = (x.detach() for x in seen.inputs[:2])
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return scores.masked_fill(~causal(seen.length), -math.inf).softmax(-1)


def wrong_formulas(seen: SimpleNamespace) -> dict[str, list[Tensor]]:
    """Cause → gradients of the whole q, k and v."""
    q, k = (x.detach() for x in seen.inputs[:2])
    root = math.sqrt(q.size(-1))
    scores = (q @ k.transpose(-2, -1) / root).masked_fill(~causal(seen.length), -math.inf)
    weights = scores.softmax(-1)
    delta = (seen.d_out * seen.out.detach()).sum(-1, keepdim=True)
    d_q, d_k, d_v = gradients_from(seen, weights, delta)
    wrong = {
        "δ is not taken off: dX is P ∘ dP alone": gradients_from(seen, weights, torch.zeros_like(delta)),
        "1/sqrt(d) is left out: it is sqrt(d) times too large": [root * d_q, root * d_k, d_v],
        "dP is made of dO and K: it is dO Vᵀ": gradients_from(seen, weights, delta, values=k),
        "the gradients of k and v have changed places": [d_q, d_v, d_k],
        "the gradients of k and v are added up in one tensor, such as [x] * 2 has twice": [
            d_q,
            d_k + d_v,
            d_k + d_v,
        ],
    }
    place = torch.empty(seen.length, dtype=torch.int64)
    for where in seen.where:
        place[where] = torch.arange(len(where))
    locally = place.unsqueeze(1) >= place.unsqueeze(0)
    wrong["in backward the causal mask is by local positions, in every block: it has to be forward's"] = (
        gradients_from(seen, weights.masked_fill(~locally, 0.0), delta)
    )
    for told, blocks in (("block", seen.where), ("chunk", torch.arange(seen.length).split(seen.chunk))):
        alone = torch.zeros_like(weights)
        for w in blocks:
            alone[..., w] = scores[..., w].softmax(-1).nan_to_num(0.0)
        cause = f"the weights are each {told}'s own softmax: they need the final lse, of all blocks"
        wrong[cause] = gradients_from(seen, alone, delta)
    for told, steps in (("last", -1), ("first", 1)):
        cause = f"the weights are made with the lse of the {told} block alone: backward needs the final one"
        wrong[cause] = gradients_from(seen, with_lse_of_one_block(seen, scores, steps), delta)
    wrong[
        "backward takes the block that forward's last hop brought, the next rank's, for this rank's own: "
        "keep the k and v that were given"
    ] = from_the_next_block(seen, delta)
    return wrong


def with_lse_of_one_block(seen: SimpleNamespace, scores: Tensor, direction: int) -> Tensor:
    """Attention's weights by the lse of one block: the first that a rank computes, or with -1 the last."""
    n, weights = len(seen.where), torch.zeros_like(scores)
    for r, own in enumerate(seen.where):
        blocks = [scores[:, :, own][..., seen.where[(r - step) % n]] for step in range(n)]
        computed = [block for block in blocks if (block > -math.inf).any()]
        lse = computed[::direction][0].logsumexp(-1, keepdim=True)
        weights[:, :, own] = (scores[:, :, own] - lse).exp()
    return weights


def from_the_next_block(seen: SimpleNamespace, delta: Tensor) -> list[Tensor]:
    """Gradients of the whole q, k and v, if in backward every block of k and v is the next rank's."""
    q, k, v = (x.detach() for x in seen.inputs)
    mask, after = causal(seen.length), torch.empty(seen.length, dtype=torch.int64)
    for where, following in zip(seen.where, [*seen.where[1:], seen.where[0]], strict=True):
        after[where] = following
    lse = attention(q, k, v, mask)[1]
    taken = SimpleNamespace(inputs=[q, k[:, :, after], v[:, :, after]], d_out=seen.d_out)
    scores = (q @ taken.inputs[1].transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(~mask, -math.inf)
    return gradients_from(taken, (scores - lse.unsqueeze(-1)).exp(), delta)


def blocks_seen(seen: SimpleNamespace) -> list[list[int]]:
    """By rank: whose blocks its queries see, in the order in which they come by."""
    n, mask = len(seen.where), causal(seen.length)
    return [
        [(r - step) % n for step in range(n) if mask[own][:, seen.where[(r - step) % n]].any()]
        for r, own in enumerate(seen.where)
    ]


def last_terms(seen: SimpleNamespace) -> list[Tensor]:
    """Each rank's gradient of q, if it holds only what the block adds that was computed last."""
    q, k = (x.detach() for x in seen.inputs[:2])
    mask = causal(seen.length)
    weights = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(~mask, -math.inf).softmax(-1)
    delta = (seen.d_out * seen.out.detach()).sum(-1, keepdim=True)
    found = []
    for own, visible in zip(seen.where, blocks_seen(seen), strict=True):
        last = torch.zeros(seen.length, dtype=torch.bool)
        last[seen.where[visible[-1]]] = True
        found.append(gradients_from(seen, weights * last, delta)[0][:, :, own])
    return found


def of_the_last_block(seen: SimpleNamespace) -> dict[str, Any]:
    """Cause → each rank's gradient of q, where the last block's term has taken the place of the others."""
    last = last_terms(seen)
    visible = [len(blocks) for blocks in blocks_seen(seen)]
    shared = (
        "the gradient of q is twice its last block's term: the sum lies in the tensor that the next block is "
        "written into. .to(dtype) copies nothing where the dtype is the same already"
    )
    return {
        "only what the block adds that is computed last: = in the place of +=?": last,
        shared: Fault(
            [min(count, 2) * term for count, term in zip(visible, last, strict=True)],
            "Add up in a tensor of its own: begin with torch.zeros_like(q), or with .to(dtype, copy=True).",
            of_no_message=True,
        ),
    }


def wrong_journeys(seen: SimpleNamespace, i: int) -> dict[str, list[Tensor]]:
    """Cause → each rank's gradient of k (i is 1) or v (2), if a term does not come home."""
    n = len(seen.where)
    whole = sum(share[i] for share in seen.shares)
    found = {
        "only what this rank's own queries add": [
            seen.shares[r][i][:, :, w] for r, w in enumerate(seen.where)
        ],
        "all but what this rank's own queries add": [
            (whole - seen.shares[r][i])[:, :, w] for r, w in enumerate(seen.where)
        ],
    }
    lost = "what later ranks added is lost where a rank does not see the block: it has to send on what came"
    found[lost] = [(whole if r == 0 else seen.shares[r][i])[:, :, w] for r, w in enumerate(seen.where)]
    for step, told in ((-1, "previous rank"), (1, "next rank")):
        found[f"what the {told} adds is missing: the last hop?"] = [
            (whole - seen.shares[(r + step) % n][i])[:, :, w] for r, w in enumerate(seen.where)
        ]
        found[f"it is the gradient of the {told}'s block: it never came home"] = [
            whole[:, :, seen.where[(r + step) % n]] for r in range(n)
        ]
    found["nothing was added"] = by_parts(seen, torch.zeros_like(whole))
    found["what a rank computes stays there: each sums its terms of all blocks as its own"] = [
        sum(share[i][:, :, w] for w in seen.where) for share in seen.shares
    ]
    return found
