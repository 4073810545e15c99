"""Checks of `attention_with_lse`: attention to one block of keys."""

import math
from functools import cache, partial
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import Fault, Trial, check, exercise

from .block_slips import of_nothing, other_blocks, seen_by
from .shared import attention

exercise(
    "attention_with_lse",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Scores, a mask, softmax, the product with v; and torch.logsumexp of the same scores.",
        "torch.ones(s_q, s_k).tril(causal_offset) is where j <= i + causal_offset.",
        "Where a query sees nothing, its scores are all -inf, and -inf - -inf is NaN. Take 0 as the largest "
        "score there, and 1 as the sum of exponentials; then put in 0 and -inf. An added mask and logsumexp "
        "are right in the forward, and NaN in the backward.",
    ),
)


def attend_probe(rank, cases: list) -> list:
    """Output, log-sum-exp and gradients of each case."""
    results = []
    for q, k, v, offset, d_out, d_lse in cases:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        found = rank.submission.attention_with_lse(*inputs, offset)
        result = {"pair": isinstance(found, tuple | list) and len(found) == 2}
        if result["pair"]:
            out, lse = found
            result |= {"out": out.detach(), "lse": lse.detach()}
            if out.shape == d_out.shape and lse.shape == d_lse.shape and out.requires_grad:
                loss = (out * d_out).sum()
                if lse.requires_grad:
                    counted = lse.detach() > -math.inf
                    loss = loss + (lse[counted] * d_lse[counted]).sum()
                loss.backward()
                result["through_lse"] = lse.requires_grad
                result["gradients"] = [x.grad for x in inputs]
        results.append(result)
    return results


NAMES = (
    "no mask",
    "offset 0",
    "an offset above 0",
    "an offset below 0",
    "nothing seen",
    "large scores",
    "large scores that are masked",
    "scores far below 0",
    "scores far below 0, some masked",
)


def far_below_zero(q: Tensor, *keys: Tensor) -> None:
    """Make all scores some 150 smaller, of which exp() is 0 in float32."""
    q[..., 0] = -150 * math.sqrt(q.size(-1))
    for k in keys:
        k[..., 0] = 1.0


def draw_cases(trial: Trial) -> list:
    """Blocks of uneven sizes, a case for each of NAMES."""
    b, a, d = trial.integer(1, 2), trial.integer(2, 3), trial.integer(3, 6)
    s_k = trial.integer(3, 5)
    s_q = s_k + trial.integer(4, 5)  # so that a mask aligned to the last key is like no other mistaken one
    offsets = (
        None,
        0,
        trial.integer(1, s_k - 2),
        -trial.integer(2, 3),
        -s_q - trial.integer(0, 3),
        None,
        0,
        None,
        0,
    )
    cases = []
    for name, offset in zip(NAMES, offsets, strict=True):
        q, k, v = (trial.normal(b, a, length, d) for length in (s_q, s_k, s_k))
        if name == "large scores":  # of which exp() is too large for float32, whatever was drawn
            q = q * 150 * math.sqrt(d) / (q @ k.transpose(-2, -1)).amax()
        if name == "large scores that are masked":  # the last key's, which most queries do not see
            q[..., 0], k[..., 0] = q[..., 0].abs() + 1, 0.0
            k[:, :, -1, 0] = 200 * math.sqrt(d)
        if "far below 0" in name:
            far_below_zero(q, k)
        cases.append((q, k, v, offset, trial.normal(b, a, s_q, d), trial.normal(b, a, s_q)))
    return cases


def differentiate(case: tuple, through_lse: bool) -> list[Tensor]:
    q, k, v, offset, d_out, d_lse = case
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*inputs, seen_by(offset, q.size(2), k.size(2)))
    loss = (out * d_out).sum()
    if through_lse:
        counted = lse > -math.inf
        loss = loss + (lse[counted] * d_lse[counted]).sum()
    loss.backward()
    return [x.grad for x in inputs]


def observe_blocks(trial: Trial) -> SimpleNamespace:
    cases = draw_cases(trial)
    results = trial.run(attend_probe, cases)[0]
    return SimpleNamespace(
        cases=dict(zip(NAMES, cases, strict=True)), results=dict(zip(NAMES, results, strict=True))
    )


def require_pair(trial: Trial, result: dict, name: str) -> None:
    trial.require(
        result["pair"],
        f"attention_with_lse did not return two tensors ({name})",
        help="Return out and lse.",
    )


def of_rows(x: Tensor | None, rows: Tensor) -> Tensor | None:
    """Some queries of an output or a log-sum-exp; what has another shape is left as it is."""
    return x[:, :, rows] if isinstance(x, Tensor) and x.shape[2:3] == rows.shape else x


def require_nothing(trial: Trial, name: str) -> None:
    """Output and log-sum-exp of the queries of one case that see no key."""
    seen = trial.once(observe_blocks)
    q, k, v, offset, *_ = seen.cases[name]
    result = seen.results[name]
    require_pair(trial, result, name)
    mask = seen_by(offset, q.size(2), k.size(2))
    blind = ~mask.any(-1)
    out, lse = attention(q, k, v, mask)
    weighed = of_rows(v.double().mean(2, keepdim=True).expand(out.shape), blind)
    below = of_rows(result["lse"], blind)
    if isinstance(below, Tensor) and bool((below.isfinite() & (below < -1000)).all()):
        weighed = of_rows(result["out"], blind)  # by what is left of scores beside a large number
    sizes = f"s_q = {q.size(2)}, s_k = {k.size(2)}"
    told = f"of queries that see nothing ({name}: {sizes}, causal_offset = {offset})"
    help = "Mask with -inf, and replace what -inf - -inf makes: 0 for out, -inf for lse."
    trial.close(
        f"out {told}",
        of_rows(result["out"], blind),
        of_rows(out, blind),
        {"all keys are weighed: the mask is a finite number, and was to be -inf": weighed},
        help,
    )
    found, right = (of_rows(x, blind) for x in (result["lse"], lse))
    trial.close(f"lse {told}", found, right, of_nothing(found, right), help=help)


def require_block(trial: Trial, name: str, help: str = "", rtol: float | None = None) -> None:
    """Output, up to rtol, and log-sum-exp of the queries of one case that see a key."""
    seen = trial.once(observe_blocks)
    q, k, v, offset, *_ = seen.cases[name]
    result = seen.results[name]
    require_pair(trial, result, name)
    trial.require(
        result["out"].shape != q.shape[:3] or result["lse"].dim() != 4,
        "it returned lse first and out second",
        help="Return out, lse.",
    )
    s_q, s_k = q.size(2), k.size(2)
    mask = seen_by(offset, s_q, s_k)
    out, lse = attention(q, k, v, mask)
    slips = cache(partial(other_blocks, q, k, v, offset))  # only a wrong answer needs them
    rows = torch.ones(s_q, dtype=torch.bool) if mask is None else mask.any(-1)
    told = f"({name}: s_q = {s_q}, s_k = {s_k}, causal_offset = {offset})"
    trial.close(
        f"out {told}",
        of_rows(result["out"], rows),
        of_rows(out, rows),
        lambda: {cause: of_rows(value, rows) for cause, value in slips()[0].items()},
        help or "out is softmax(q k^T / sqrt(d) + mask) v.",
        rtol,
    )
    trial.close(
        f"lse {told}",
        of_rows(result["lse"], rows),
        of_rows(lse, rows),
        lambda: {cause: of_rows(value, rows) for cause, value in slips()[1].items()},
        help or "lse is the logsumexp of the masked scores.",
    )


@check("attention_with_lse")
def block_without_a_mask(trial: Trial) -> None:
    """With no mask, out and lse are those of all queries over all keys, s_q and s_k different."""
    require_block(trial, "no mask")


@check("attention_with_lse")
def offset_moves_the_mask(trial: Trial) -> None:
    """With causal_offset, query i sees key j where j <= i + causal_offset: at 0, above and below."""
    for name in ("offset 0", "an offset above 0", "an offset below 0"):
        require_block(trial, name, "torch.ones(s_q, s_k).tril(causal_offset) is 1 where a query may look.")


@check("attention_with_lse")
def nothing_seen_is_zero_and_minus_infinity(trial: Trial) -> None:
    """A query that sees no key has out 0 and lse -inf, be it one row or the whole block."""
    for name in ("an offset below 0", "nothing seen"):
        require_nothing(trial, name)


@check("attention_with_lse")
def large_scores_do_not_overflow(trial: Trial) -> None:
    """Scores of a hundred give what the softmax gives: nothing overflows."""
    require_block(trial, "large scores", "Subtract the largest score of each row before exp.")
    require_block(
        trial,
        "large scores that are masked",
        "Subtract the largest score that a query sees: mask first, then look for the largest. Beside one "
        "that is masked and larger by a hundred, the exponentials of what is seen vanish.",
    )


@check("attention_with_lse")
def scores_far_below_zero_do_not_vanish(trial: Trial) -> None:
    """A query whose scores are all near -150 sees its keys as any other does."""
    require_block(
        trial,
        "scores far below 0",
        "Subtract the largest score of each row before exp, also where that is below 0. Only -inf needs "
        "another number in its place.",
        rtol=1e-3,  # a score of -150 is rounded by 1e-5, and its exponential by that part
    )
    require_block(
        trial,
        "scores far below 0, some masked",
        "Mask with -inf: beside scores of -150 a finite number may be large.",
        rtol=1e-3,
    )


NAN_WEIGHTS = (
    "the weights of a query that sees nothing are NaN when they meet v. Its output is masked afterwards, "
    "which helps in the forward alone: on the way back 0 times NaN is NaN, for every key"
)
FINITE_WEIGHTS = "Mask the weights, before the product with v, and not the output behind it."


def require_gradients(trial: Trial, names: tuple[str, ...]) -> None:
    seen = trial.once(observe_blocks)
    for name in names:
        result = seen.results[name]
        require_pair(trial, result, name)
        q = seen.cases[name][0]
        shapes = [tuple(result[key].shape) for key in ("out", "lse")]
        trial.require(
            shapes == [q.shape, q.shape[:3]],
            f"out and lse have the shapes {shapes[0]} and {shapes[1]}, q has {tuple(q.shape)} ({name})",
            help="out is (b, a, s_q, d) as q is, and lse is (b, a, s_q).",
        )
        others = all("gradients" in seen.results[other] for other in NAMES if other != name)
        at_once = name == "nothing seen" and others
        trial.require(
            "gradients" in result,
            f"out has no gradient ({name}): it does not require one",
            help="Let such a block go the way of all others: what is masked everywhere comes out as 0."
            if at_once
            else "Use operations that autograd knows, outside no_grad().",
            cause="new tensors are returned where no query sees a key: nothing leads from them to q, k and "
            "v, and a backward that begins there ends in an error"
            if at_once
            else "",
        )
        trial.require(
            result["through_lse"],
            f"lse has no gradient ({name}): it does not require one",
            help="out and lse are both functions of the scores: detach nothing but the largest score.",
            cause="lse was detached, or computed outside autograd; merging two blocks needs its gradient",
        )
        expected = differentiate(seen.cases[name], True)
        without = differentiate(seen.cases[name], False)
        gradients = [
            torch.zeros_like(x) if g is None else g
            for g, x in zip(result["gradients"], expected, strict=True)
        ]
        poisoned = any(g.isnan().any() for g in gradients)
        of_v_alone = poisoned and not any(g.isnan().any() for g in gradients[:2])
        for label, found, right, less in zip("qkv", gradients, expected, without, strict=True):
            slips = {"what comes back through lse is missing": less}
            if of_v_alone:
                slips[NAN_WEIGHTS] = Fault(torch.full_like(right, math.nan), FINITE_WEIGHTS)
            trial.close(
                f"the gradient of {label} ({name})",
                found,
                right,
                slips,
                help="Where a query sees nothing no NaN may come back, and 0 · NaN is NaN. Make the numbers "
                "finite before the exp and the log (masked_fill), not after them."
                if poisoned
                else "out and lse are both functions of the scores, and both send a gradient back: detach "
                "nothing but the largest score.",
            )


@check("attention_with_lse")
def gradients_are_those_of_attention(trial: Trial) -> None:
    """The gradients of q, k and v are those of plain attention."""
    require_gradients(trial, ("no mask", "offset 0", "an offset above 0"))


@check("attention_with_lse")
def gradients_have_no_nan_where_nothing_is_seen(trial: Trial) -> None:
    """Queries that see nothing send back 0, not NaN, and leave the others' gradients right."""
    require_gradients(trial, ("an offset below 0", "nothing seen"))
