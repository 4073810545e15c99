"""What known slips make of attention to one block: other masks, other scales, a sum that is left out."""

import math
from typing import Any

import torch
from torch import Tensor

from grader.checks import Fault

from .shared import attention

VANISHING = -110.0
"""Below it exp() is 0 in float32."""
VANISHED = "it is what a query gets that saw nothing: exp() of scores far below 0 vanishes"

MASKED_ALONE = (
    "where a key is masked, the masked keys alone are weighed: the mask is a finite number, above the scores "
    "of the keys that are seen"
)
MASK_STEP = "Mask with -inf: no finite number is below every score."


def seen_by(offset: int | None, s_q: int, s_k: int) -> Tensor | None:
    return None if offset is None else torch.ones(s_q, s_k, dtype=torch.bool).tril(offset)


def of_nothing(found: object, lse: Tensor) -> dict[str, Fault]:
    """Cause → a log-sum-exp that has one finite number wherever -inf belongs, and is right elsewhere."""
    empty = lse == -math.inf
    if not isinstance(found, Tensor) or found.shape != lse.shape or not empty.any():
        return {}
    number = found[empty][0].item()
    if not (found[empty] == number).all() or not (number == 0 or -math.inf < number < -5):
        return {}
    told = f"log({math.exp(number):.3g}): the number that stands for a sum of 0 became the lse"
    if math.exp(number) == 0:
        told = f"{number:.3g}: a number that stands for -inf became the lse"
    step = "Keep that number for what it helps, the division or exp; then put -inf into the lse."
    return {f"where nothing is seen it is {told}": Fault(lse.masked_fill(empty, number), step)}


def other_blocks(
    q: Tensor, k: Tensor, v: Tensor, offset: int | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Cause → the output, and cause → the log-sum-exp."""
    s_q, s_k, d = q.size(2), k.size(2), q.size(3)
    mask = seen_by(offset, s_q, s_k)
    out, lse = attention(q, k, v, mask)
    shift = 0 if offset is None else offset
    both = {
        "scores are not divided by sqrt(d)": attention(q, k, v, mask, math.sqrt(d)),
        "scores are divided by d, not by its root": attention(q, k, v, mask, 1 / math.sqrt(d)),
        f"scores are divided by {s_q**0.5:.3g}, the root of s_q: it is that of d": attention(
            q, k, v, mask, math.sqrt(d / s_q)
        ),
        f"scores are divided by {s_k**0.5:.3g}, the root of s_k: it is that of d": attention(
            q, k, v, mask, math.sqrt(d / s_k)
        ),
        "nothing is masked" + (": an offset of 0 is falsy, ask for `is None`" if offset == 0 else ""): (
            attention(q, k, v, None)
        ),
        "the offset is not used": attention(q, k, v, seen_by(0, s_q, s_k)),
        "the offset goes the wrong way": attention(q, k, v, seen_by(-shift, s_q, s_k)),
        "the mask is one off: j < i + causal_offset": attention(q, k, v, seen_by(shift - 1, s_q, s_k)),
        "the mask is aligned to the last query and key": attention(q, k, v, seen_by(s_k - s_q, s_q, s_k)),
        "the past is masked, not the future": attention(
            q, k, v, torch.ones(s_q, s_k, dtype=torch.bool).triu(shift)
        ),
    }
    scores = (q.double() @ k.double().transpose(-2, -1)) / math.sqrt(d)
    largest = (scores if mask is None else scores.masked_fill(~mask, -math.inf)).amax(-1)
    outs = {cause: value[0] for cause, value in both.items()} | {
        "it is not divided by the sum of exponentials": out * (lse - largest).exp().unsqueeze(-1),
        "it is not divided by the sum of exponentials, from which no largest score was taken off": (
            out * lse.exp().unsqueeze(-1)
        ),
    }
    lses = {cause: value[1] for cause, value in both.items()} | {
        "it is the logarithm to base 2": lse / math.log(2),
        "the largest score, and to it the logarithm to base 2 of the sum that is left": (
            largest + (lse - largest) / math.log(2)
        ),
        "it is the largest score, not the log-sum-exp": largest,
        "it is the sum of exponentials, without the logarithm": lse.exp(),
        "the largest score was taken off before exp, and is not added again": lse - largest,
        "the largest score was taken off a second time, where it has to be added again": lse - 2 * largest,
    }
    if (largest < VANISHING).all():
        outs[VANISHED], lses[VANISHED] = torch.zeros_like(out), torch.full_like(lse, -math.inf)
        if mask is not None:
            hidden = (~mask).double()
            masked = hidden @ v.double() / hidden.sum(-1, keepdim=True).clamp(min=1.0)
            outs[MASKED_ALONE] = Fault(torch.where(mask.all(-1, keepdim=True), out, masked), MASK_STEP)
    return outs, lses
