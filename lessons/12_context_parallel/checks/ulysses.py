"""Checks of `ulysses_attention`: rank r has the r-th part of the sequence, and computes a/n heads."""

import math
import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grader.checks import CheckEnded, Event, Fault, Recording, Trial, check, each_rank, exercise, tensors_in
from lessons_shared.results import results_stay

from . import calls, frozen, grouped, rings
from .ring_slips import by_parts
from .shared import (
    BACKWARD,
    FEW,
    SIZES,
    as_returned,
    attention,
    causal,
    output_stays,
    plain_positions,
    went,
)

exercise(
    "ulysses_attention",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Which tokens and which heads does a rank have before, inside, and after attention? Two all-to-alls "
        "that are each other's opposite turn the one into the other.",
        "To heads: x.chunk(n, dim=1) are the heads for each rank. Stack them, all_to_all_single, and join "
        "what came along the tokens: its first dimension is the rank that it came from.",
        "One torch.autograd.Function with two dimensions, the one to cut and the one to join: its backward "
        "is itself with the two exchanged. With q, k and v of whole sequences F.scaled_dot_product_attention "
        "does the rest.",
    ),
)

ULYSSES = rings.Kind(
    "ulysses_attention", plain_positions, 1, heads=lambda n: 2 * max(n, 3), grouped=lambda n: 2 * n
)


class Whole(TorchDispatchMode):
    """On a rank: the first tensor with all tokens of all heads."""

    def __init__(self, length: int, heads: int) -> None:
        super().__init__()
        self.length, self.heads = length, heads
        self.found = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            whole = self.length in tensor.shape and self.heads in tensor.shape
            if whole and tensor.is_floating_point() and not self.found:
                self.found = f"{func._opname} made a tensor of shape {tuple(tensor.shape)}"
        return result


def attend(rank, length: int, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> dict:
    """One forward and backward of a rank's part. Tensors come as (b, s/n, a, d), and go in as a GPT's do."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before = [x.detach().clone() for x in (q, k, v, upstream)]
    parts = [x.transpose(1, 2) for x in leaves]  # (b, a, s/n, d)
    with rank.record() as recording, Whole(length, q.size(2)) as watch:
        out = rank.submission.ulysses_attention(*parts, rank.group)
        returned = as_returned(out)
        recording.mark(BACKWARD)
        fits = isinstance(out, Tensor) and out.shape == parts[0].shape and out.requires_grad
        if fits:
            go_back(out, upstream.transpose(1, 2))
    return {
        **went(out, returned, fits, leaves, (q, k, v, upstream), before),
        "whole": watch.found,
        "recording": recording,
    }


ON_THE_WAY_BACK = "the forward had worked: it is on the way back that sizes do not fit"


def go_back(out: Tensor, gradient: Tensor) -> None:
    """Backward; where sizes do not fit there, the learner reads that the forward's did."""
    try:
        out.backward(gradient)
    except Exception as error:
        if "size" in str(error) or "shape" in str(error):
            error.add_note(ON_THE_WAY_BACK)
        raise


CUTS_THE_SAME = "backward cuts what the forward cut, and joins what it joined"
OF_THE_FIRST_ALONE = (
    "the way back from attention to q, k and v cuts what its forward cut, and joins what it joined; that of "
    "the exchange after attention does not"
)


def cuts_the_same_again(trial: Trial) -> str:
    """In which exchange backward cuts what forward cut, and joins what it joined, by sizes that fit.

    A gradient then comes out n·n times too long in one dimension, and as many times too short in another.
    """
    n = trial.num_ranks
    if n == 1:
        return ""
    parts = [[trial.normal(2, n, n * n, 5) for _ in range(4)] for _ in range(n)]  # (b, s/n, a, d)
    try:
        trial.run(attend, n * n, per_rank=parts)
    except CheckEnded as end:
        shapes = re.search(r"got \[([\d, ]+)\] but expected shape compatible with \[([\d, ]+)\]", end.message)
        if shapes is None:
            return ""
        got, right = ([int(size) for size in shape.split(", ")] for shape in shapes.groups())
        ratios = sorted(g / r for g, r in zip(got, right, strict=False) if g != r)
        if len(got) == len(right) and ratios == [1 / n**2, n**2]:
            return OF_THE_FIRST_ALONE if right == [2, n * n, n, 5] else CUTS_THE_SAME
    return ""


def observe(trial: Trial) -> SimpleNamespace:
    seen = rings.draw(trial, ULYSSES)
    parts = [[x[:, w] for x in (seen.q, seen.k, seen.v, seen.upstream)] for w in seen.where]
    try:
        seen.results = trial.run(attend, seen.length, per_rank=parts, delays=True)
    except CheckEnded as end:
        slip = cuts_the_same_again(trial) if end.cause == ON_THE_WAY_BACK else ""
        if slip:
            end.cause = slip
            end.help = "On the way back, what was cut is joined, and what was joined is cut."
        if slip == OF_THE_FIRST_ALONE:
            end.help += (
                " If you wrote that for all: does backward read what a later call has written? Keep what it "
                "needs in ctx."
            )
        raise
    heads = [x.double().transpose(1, 2) for x in (seen.q, seen.k, seen.v, seen.upstream)]
    seen.inputs = [x.requires_grad_() for x in heads[:3]]
    seen.d_out = heads[3]
    seen.out = attention(*seen.inputs, causal(seen.length))[0]
    seen.shares = rings.shares(seen)
    return seen


def observe_exact(trial: Trial) -> SimpleNamespace:
    """In float64, alone and between two others."""
    return calls.observe_in(trial, ULYSSES, torch.float64)


def observe_grouped(trial: Trial) -> SimpleNamespace:
    return grouped.observe(trial, ULYSSES)


def wrong_outputs(seen: SimpleNamespace) -> dict[str, Any]:
    """Cause → what each rank would have."""
    q, k, v = (x.detach() for x in seen.inputs)
    n, length, a = len(seen.where), seen.length, q.size(1)
    out, mask = seen.out.detach(), causal(length)
    places = torch.arange(length)
    owner = places // (length // n)
    heads = torch.arange(a)
    per_rank = a // n
    found = {
        "nothing is masked": attention(q, k, v, torch.ones_like(mask))[0],
        "each rank attended to its own tokens alone": attention(
            q, k, v, mask & (owner.unsqueeze(1) == owner.unsqueeze(0))
        )[0],
        "scores are not divided by sqrt(d)": attention(q, k, v, mask, math.sqrt(q.size(-1)))[0],
        "the heads come back in another order: first the first of each rank, then the second": out[
            :, heads.view(n, per_rank).T.flatten()
        ],
        "the heads come back in another order: those of a rank are n apart": out[
            :, heads.view(per_rank, n).T.flatten()
        ],
    }
    causes: dict[str, Any] = {cause: by_parts(seen, whole) for cause, whole in found.items()}
    told = "it is the attention of v in the place of q and k: what arrived for v lies where q and k were"
    step = "Receive each into a tensor of its own, a new one in every call: torch.empty_like(...)."
    causes[told] = Fault(by_parts(seen, attention(v, v, v, mask)[0]), step)
    if n > 1:
        woven = places.view(n, -1).T.flatten()  # one token of each rank in turn
        interleaved = attention(*(x[:, :, woven] for x in (q, k, v)), mask)[0]
        told = "tokens are interleaved, one of each rank in turn: what comes is (n, s/n), and not (s/n, n)"
        causes[told] = by_parts(seen, interleaved)
        causes[f"{told}; on the way back, too"] = by_parts(seen, interleaved[:, :, woven.argsort()])
        causes[f"{told}; heads are, on the way back"] = by_parts(
            seen, interleaved[:, heads.view(n, per_rank).T.flatten()]
        )
        causes |= joined_before_they_are_cut(seen)
        causes["it is the output of the next rank's tokens"] = [
            out[:, :, seen.where[(r + 1) % n]] for r in range(n)
        ]
        causes["only the heads that this rank computed have numbers"] = [
            out[:, :, w] * (heads // per_rank == r).view(-1, 1, 1) for r, w in enumerate(seen.where)
        ]
    return causes


def joined_before_they_are_cut(seen: SimpleNamespace) -> dict[str, Fault]:
    """Cause → what comes if several of q, k and v are joined along the heads, and that is cut in n."""
    n, inputs = len(seen.where), [x.detach() for x in seen.inputs]
    found = {}
    for which in ("qkv", "kv", "qk"):
        joined = torch.cat([inputs["qkv".index(name)] for name in which], 1)
        dealt = joined.unflatten(1, (n, len(which), -1)).unbind(2)  # (b, n, a/n, s, d), rank by rank
        taken = dict(zip("qkv", inputs, strict=True)) | {
            name: heads.flatten(1, 2) for name, heads in zip(which, dealt, strict=True)
        }
        names = " and ".join([", ".join(which[:-1]), which[-1]])
        cause = (
            f"{names} were joined along the heads, and that was cut in n: a rank takes heads of one for "
            "heads of another"
        )
        found[cause] = Fault(
            by_parts(seen, attention(*taken.values(), causal(seen.length))[0]),
            f"Cut each of {names} in n, and join a rank's parts, (b, {len(which)}·a/n, s/n, d): rank j gets "
            "the j-th a/n heads of each.",
        )
    return found


NAN_OF = (
    "No NaN: 0 · -inf is one, and so are 0/0, -inf - -inf, and what nothing was written to. masked_fill "
    "makes scores -inf, and leaves the rest."
)


@check("ulysses_attention")
def ulysses_output_is_that_of_causal_attention(trial: Trial) -> None:
    """Each rank's output is its part of plain causal attention over the whole sequence, all heads."""
    seen = trial.once(observe)
    outs = [r["out"] for r in seen.results]
    trial.close(
        "the output",
        outs,
        by_parts(seen, seen.out),
        lambda: wrong_outputs(seen),
        help=NAN_OF
        if any(isinstance(out, Tensor) and bool(out.isnan().any()) for out in outs)
        else "After the first all-to-all rank r has tokens 0 to s-1 of heads r·a/n to (r+1)·a/n - 1, "
        "in order: check that with torch.arange in the place of q. After the second, its "
        "tokens of heads 0 to a-1.",
    )
    output_stays(trial, seen.results)


@check("ulysses_attention")
def ulysses_gradients_are_those_of_causal_attention(trial: Trial) -> None:
    """The gradients of q, k and v are this rank's parts of plain attention's, all heads."""
    seen, n = trial.once(observe), trial.num_ranks
    for r, result in enumerate(seen.results):
        trial.require(
            result["differentiable"],
            "no gradient comes back from the output",
            help="dist.all_to_all_single is no operation of autograd's: put it into a "
            "torch.autograd.Function, whose backward is the all-to-all the other way.",
            rank=r,
        )
    a = seen.q.size(2)
    for i, label in enumerate("qkv"):
        whole = sum(share[i] for share in seen.shares)
        own = [seen.shares[r][i][:, :, w] for r, w in enumerate(seen.where)]
        mine = [
            whole[:, :, w] * (torch.arange(a) // (a // n) == r).view(-1, 1, 1)
            for r, w in enumerate(seen.where)
        ]
        zeros = [torch.zeros_like(x) for x in own]
        trial.close(
            f"the gradient of {label}",
            [r["gradients"][i] for r in seen.results],
            by_parts(seen, whole),
            {
                "only what this rank's own queries add": own,
                "only the heads that this rank computed have one": mine,
                "nothing came back": zeros,
            }
            if n > 1
            else {},
            help="The backward of an all-to-all is the all-to-all the other way: what cut "
            "the heads joins them.",
        )


def wire(recording: Recording, after: str) -> float:
    """Bytes that left a rank: an all-to-all's own piece does not."""
    events = recording.select(None, after)
    return sum(
        e.num_bytes * (1 - 1 / len(e.group)) if e.kind == "all_to_all" else e.num_bytes
        for e in events
        if e.kind != "recv"
    )


def blocks(events: list[Event]) -> list[Event]:
    return [event for event in events if event.num_bytes > FEW and event.kind != "recv"]


@check("ulysses_attention")
def all_to_alls_carry_each_part_once(trial: Trial) -> None:
    """q, k, v and the output travel once, in at most four all-to-alls, and so do their gradients."""
    seen, n = trial.once(observe), trial.num_ranks
    part = seen.q[:, seen.where[0]].numel() * seen.q.element_size()
    for r, result in enumerate(seen.results):
        for after, where in (("", "forward"), (BACKWARD, "backward")):
            events = blocks(result["recording"].select(None, after))
            for event in events:
                trial.require(
                    event.kind in ("all_to_all", "send"),
                    f"the {where} has a collective that is no all-to-all: {event.describe()}",
                    help="Each rank needs all tokens of its own heads, and no more: an all-to-all sends to "
                    "rank j what rank j needs. Backward is an all-to-all, too.",
                    cause="an all-gather in the place of an all-to-all?"
                    if event.kind == "all_gather"
                    else "",
                    rank=r,
                )
            swaps = sum(event.kind == "all_to_all" for event in events)
            sends = sum(event.kind == "send" for event in events)
            parts = wire(result["recording"], after) / part
            trial.require(
                parts <= 4 * (n - 1) / n + 0.01 and (n == 1 or swaps + sends / (n - 1) <= 4),
                f"the {where} took {swaps} all-to-alls and {sends} messages, which sent {parts:.3g} parts "
                f"from this rank, where four all-to-alls and {4 * (n - 1) / n:.3g} parts are enough (a part: "
                f"{part:,} bytes of q, k, v or the output)",
                help="Of each of q, k, v and the output, a rank keeps 1/n and sends the rest, once.",
                rank=r,
            )


@check("ulysses_attention", world_sizes=(4,), subgroup=False)
def no_rank_holds_all_heads_of_all_tokens(trial: Trial) -> None:
    """No tensor has all tokens and all heads: only a rank's own heads get long."""
    for r, result in enumerate(trial.once(observe).results):
        trial.require(
            not result["whole"],
            f"{result['whole']}: all tokens and all heads",
            help="To rank j go the heads that rank j computes, and no others: a/n of them.",
            rank=r,
        )


@check("ulysses_attention")
def ulysses_takes_grouped_keys(trial: Trial) -> None:
    """k and v may have fewer heads than q: each serves a/a_kv heads of q, and no copies of it travel."""
    seen, n = trial.once(observe_grouped), trial.num_ranks
    grouped.require_values(trial, seen)
    most = (2 + 2 * grouped.PER_GROUP) * (n - 1) / n
    grouped.require_bytes(trial, seen, wire, lambda after: most)


def refused(rank, q: Tensor, k: Tensor) -> tuple[str, str]:
    try:
        rank.submission.ulysses_attention(q, k, k, rank.group)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


@check("ulysses_attention", world_sizes=(2, 3, 4))
def heads_that_do_not_divide_are_refused(trial: Trial) -> None:
    """Heads of q, or of k and v, that are not divisible by n are a ValueError that names both."""
    n = trial.num_ranks
    few = n - 1 if n > 2 else 1
    for told, a, a_kv in (("a", 2 * n + 1, 2 * n + 1), ("a_kv", few * n * 5, few * 5)):
        q, k = trial.normal(2, a, 4, 6), trial.normal(2, a_kv, 4, 6)
        heads = a if told == "a" else a_kv
        for r, (kind, message) in enumerate(trial.run(refused, q, k)):
            trial.require(
                kind == "ValueError",
                f"{a} heads of q and {a_kv} of k and v over {n} ranks gave {kind} where a ValueError belongs",
                help=f"Look at both before anything is sent: {heads} heads are not divisible by {n}.",
                rank=r,
            )
            trial.require(
                {str(heads), str(n)} <= set(re.findall(r"\d+", message)),
                f'the error for {heads} heads over {n} ranks says "{message}": which number is not divisible '
                "by which?",
                help=f"Name both, {heads} and {n}: who reads it has to change one of them.",
                rank=r,
            )


def observe_large(trial: Trial) -> SimpleNamespace:
    """Scores up to 150, of which exp() is too large for float32; that of the first token, alone, is -150."""
    seen = rings.draw(trial, ULYSSES)
    q, k = (x.transpose(1, 2) for x in (seen.q, seen.k))
    root = math.sqrt(q.size(-1))
    seen.q = seen.q * 150 * root / (q @ k.transpose(-2, -1)).amax()
    seen.q[:, 0] = -150 * root * seen.k[:, 0] / seen.k[:, 0].square().sum(-1, keepdim=True)
    seen.inputs = [x.double().transpose(1, 2).requires_grad_() for x in (seen.q, seen.k, seen.v)]
    parts = [[x[:, w] for x in (seen.q, seen.k, seen.v, seen.upstream)] for w in seen.where]
    seen.results = trial.run(calls.attend_in, ULYSSES.name, None, per_rank=parts)
    seen.out = attention(*seen.inputs, causal(seen.length))[0]
    seen.out.backward(seen.upstream.double().transpose(1, 2))
    return seen


def with_another_largest(seen: SimpleNamespace) -> dict[str, Fault]:
    """Cause → the output where what is taken off before exp, in float32, is not the largest seen score."""
    q, k, v = (x.detach().float() for x in seen.inputs)
    n, mask = len(seen.where), causal(seen.length)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    of_heads = scores.unflatten(1, (n, -1))  # (b, n, a/n, s, s)
    every, own = (x.amax((0, 2, 3, 4)) for x in (of_heads, of_heads.masked_fill(~mask, -math.inf)))
    per_rank = scores.size(1) // n

    def out(largest: Tensor | float, product: bool = False) -> Fault:
        weights = (scores - largest).exp()
        weights = weights * mask if product else weights.masked_fill(~mask, 0.0)
        return Fault(
            by_parts(seen, weights / weights.sum(-1, keepdim=True) @ v),
            "Mask first, and then take off each row its own largest score.",
        )

    none = "no largest score is taken off before exp, which is infinite or 0 then: inf/inf and 0/0 are NaN"
    one = "one largest score is taken off all rows: exp() is 0 in a row far below it, and 0/0 is NaN"
    found = {
        none: out(0.0),
        f"{none}, and 0 · inf of what is masked": out(0.0, product=True),
        "a row's largest score is looked for among masked ones, too: exp() of all that is seen is 0, and 0/0 "
        "is NaN": out(scores.amax(-1, keepdim=True)),
        one: out(own.repeat_interleave(per_rank).view(-1, 1, 1)),
    }
    if not torch.equal(every, own):
        found[f"{one}. It is a masked one"] = out(every.repeat_interleave(per_rank).view(-1, 1, 1))
    return found


@check("ulysses_attention", world_sizes=(3,), subgroup=False)
def ulysses_scores_do_not_overflow(trial: Trial) -> None:
    """Scores of 150 and of -150 give what the softmax gives, forward and backward: no inf, no NaN."""
    seen = trial.once(observe_large)
    for what, found, whole in (
        ("the output", [r["out"] for r in seen.results], seen.out),
        *(
            (f"the gradient of {x}", [r["gradients"][i] for r in seen.results], seen.inputs[i].grad)
            for i, x in enumerate("qkv")
        ),
    ):
        trial.close(
            f"{what} where scores reach 150, and -150 where a token sees itself alone,",
            found,
            by_parts(seen, whole),
            alternatives=(lambda: with_another_largest(seen)) if what == "the output" else {},
            help="Subtract the largest score of a row before exp, or leave the softmax to PyTorch.",
            rtol=1e-3,
        )


@check("ulysses_attention")
def ulysses_inputs_stay_as_they_were(trial: Trial) -> None:
    """q, k, v and the gradient that comes in are not written to."""
    rings.require_unchanged(trial, trial.once(observe))


@check("ulysses_attention", world_sizes=(3,), subgroup=False)
def ulysses_works_in_the_dtype_of_its_inputs(trial: Trial) -> None:
    """float64 comes out as exact as it went in, and bfloat16 as bfloat16."""
    calls.require_dtype(trial, ULYSSES, trial.once(observe), trial.once(observe_exact))


@check("ulysses_attention", world_sizes=(3,), subgroup=False)
def ulysses_calls_do_not_disturb_each_other(trial: Trial) -> None:
    """The backward of one of three attentions, as of a model's layers, is that of its own forward, and then
    nothing of it is kept."""
    calls.require_calls_apart(trial, trial.once(observe_exact))


@check("ulysses_attention", world_sizes=(3,), subgroup=False)
def ulysses_output_is_the_same_in_validation(trial: Trial) -> None:
    """Under torch.no_grad(), where no backward is to come, the output is the same."""
    frozen.require_silent(trial, trial.once(observe_exact), wrong_outputs)


@check("ulysses_attention", world_sizes=(3,), subgroup=False)
def ulysses_gradients_come_where_they_are_needed(trial: Trial) -> None:
    """Of q, k and v some may be frozen: those that need a gradient get it all the same."""
    frozen.require_where_needed(trial, trial.once(observe_exact), travels=False)


@check("ulysses_attention", world_sizes=(3,), subgroup=False)
def ulysses_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    results_stay(trial, each_rank(trial.once(observe_exact), "overwritten"))
