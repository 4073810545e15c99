"""Checks of `document_attention`: several documents in one sequence, and keys and values gathered."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Fault, Trial, check, each_rank, exercise, is_close
from lessons_shared.evaluation import evaluates_alike, in_silence
from lessons_shared.results import overwritten, results_stay
from lessons_shared.wire import wire_bytes

from .frozen import NEEDING, gradients_of_some, require_where_needed
from .grouped import ADD_UP, FOLDED_LATE, PER_GROUP
from .ring_slips import by_parts
from .shared import (
    BACKWARD,
    SIZES,
    as_returned,
    attention,
    blocks_on_the_wire,
    causal,
    output_stays,
    plain_positions,
    went,
)

exercise(
    "document_attention",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "No ring is needed here. Gather k and v, and a rank's queries can look at the whole sequence through "
        "any mask: which rows of the (s, s) mask are this rank's?",
        "The gather needs a backward: what the queries of every rank want of a key must be added up, and "
        "brought to the rank that owns the key. Lesson 11 has such a pair, gather_sequence: an all-gather "
        "whose backward is a reduce-scatter. Here the tokens are dimension 2.",
        "seen = (documents[:, mine, None] == documents[:, None, :]) & (places[mine, None] >= places), with "
        "places = torch.arange(s) and mine = this rank's slice of it; then "
        "F.scaled_dot_product_attention(q, k, v, attn_mask=seen.unsqueeze(1)).",
    ),
)

ONE_IN_FLOAT32, ONE_IN_INT32 = (2**24, 2**24 + 1), (9, 9 + 2**32)


def drawn_documents(trial: Trial, b: int, length: int) -> Tensor:
    """By row: documents of one token and of many, which begin anywhere; their numbers are in no order.

    Two of a row are one number where int64 is cast to float32, or to int32, and of three one is negative.

    There are four at most. With five tokens or more one of them has two: where every token is alone with
    itself no gradient reaches q and k, and rounding would be all that is left to compare.
    """
    rows = []
    for row in range(b):
        starts = {0, trial.integer(1, length - 1), *trial.rng.sample(range(1, length), 2)}
        lengths = torch.tensor([*sorted(starts), length]).diff()
        alike = (ONE_IN_FLOAT32, ONE_IN_INT32)[row % 2]
        numbers = [*alike, -1, trial.integer(0, 8)][: len(lengths)]
        numbers = torch.tensor(trial.rng.sample(numbers, len(numbers)))
        rows.append(numbers.repeat_interleave(lengths))
    return torch.stack(rows)


def attend(rank: Any, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, documents: Tensor) -> dict:
    """One forward and backward of a rank's part. Tensors come as (b, s/n, a, d), and go in as a GPT's do."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    inputs = (q, k, v, upstream, documents)
    before = [x.detach().clone() for x in inputs]
    parts = [x.transpose(1, 2) for x in leaves]  # (b, a, s/n, d)
    with rank.record() as recording:
        out = rank.submission.document_attention(*parts, documents, rank.group)
        returned = as_returned(out)
        recording.mark(BACKWARD)
        fits = isinstance(out, Tensor) and out.shape == parts[0].shape and out.requires_grad
        if fits:
            out.backward(upstream.transpose(1, 2))
    return {**went(out, returned, fits, leaves, inputs, before, "the documents"), "recording": recording}


def same_document(documents: Tensor) -> Tensor:
    """(b, 1, s, s): whether two tokens are of one document."""
    return (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)


def draw(trial: Trial, more: int = 0) -> SimpleNamespace:
    """Parts of five to seven tokens, and so many more."""
    n = trial.num_ranks
    b, a_kv, d, part = 2, trial.integer(2, 3), trial.choice((4, 6)), more + trial.integer(5, 7)
    length = n * part
    q, upstream = (trial.normal(b, length, PER_GROUP * a_kv, d) for _ in range(2))
    k, v = (trial.normal(b, length, a_kv, d) for _ in range(2))
    return SimpleNamespace(
        q=2 * q,
        k=k,
        v=v,
        upstream=upstream,
        documents=drawn_documents(trial, b, length),
        where=[plain_positions(length, r, n) for r in range(n)],
        part=part,
    )


def given(seen: SimpleNamespace) -> list[list[Tensor]]:
    """What each rank gets, as `attend` takes it."""
    whole = (seen.q, seen.k, seen.v, seen.upstream)
    return [[*(x[:, w] for x in whole), seen.documents] for w in seen.where]


def attend_in_one_process(seen: SimpleNamespace) -> None:
    """Sets `inputs` (b, a, s, d) in float64, `d_out`, `mask` and `out`."""
    seen.inputs = [x.double().transpose(1, 2).requires_grad_() for x in (seen.q, seen.k, seen.v)]
    seen.d_out = seen.upstream.double().transpose(1, 2)
    seen.mask = same_document(seen.documents) & causal(seen.documents.size(1))
    seen.out = grouped(seen, seen.mask)


def observe(trial: Trial) -> SimpleNamespace:
    seen = draw(trial)
    seen.block = seen.k[:, seen.where[0]].numel() * seen.k.element_size()
    seen.results = trial.run(attend, per_rank=given(seen), delays=True)
    attend_in_one_process(seen)
    return seen


def grouped(seen: SimpleNamespace, mask: Tensor, turns: bool = False) -> Tensor:
    """Attention of all heads of q; with `turns` head i meets head i % a_kv of k and v."""
    q, k, v = seen.inputs
    if turns:
        k, v = (x.repeat(1, PER_GROUP, 1, 1) for x in (k, v))
    else:
        k, v = (x.repeat_interleave(PER_GROUP, dim=1) for x in (k, v))
    return attention(q, k, v, mask)[0]


ROW_0, CAST = "every row of the batch has the documents of row 0", "the documents' numbers are cast"
STEPS = {
    ROW_0: "Compare in each row of the batch the numbers of that row: documents[:, mine, None] has them all.",
    CAST: "Compare the numbers as they come, in int64.",
}


def with_steps(outputs: dict[str, list[Tensor]]) -> dict[str, list[Tensor] | Fault]:
    """With the next step, where a cause has one of its own."""
    steps = {cause: [step for start, step in STEPS.items() if cause.startswith(start)] for cause in outputs}
    return {cause: Fault(out, *steps[cause]) if steps[cause] else out for cause, out in outputs.items()}


def wrong_masks(seen: SimpleNamespace) -> dict[str, Tensor]:
    """Cause → the mask that it leads to."""
    documents, length, n = seen.documents, seen.documents.size(1), len(seen.where)
    same, before = same_document(documents), causal(length)
    places = torch.arange(length)
    owner = places // seen.part
    rises = documents.diff(dim=1, prepend=documents[:, :1]).clamp(min=0).cumsum(1)
    at_home = owner.unsqueeze(1) == owner
    local = (places % seen.part).unsqueeze(1) >= places
    found = {
        "documents are ignored: every earlier token is seen": before.expand_as(same),
        "nothing is masked inside a document: later tokens are seen": same,
        ROW_0: same[:1].expand_as(same) & before,
        "a document whose number is smaller than that of the one before was joined to it: a number says "
        "which document it is, and in no order": same_document(rises) & before,
        "a token does not see itself": same & before & (places.unsqueeze(1) > places),
    }
    for dtype, (one, two) in ((torch.float32, ONE_IN_FLOAT32), (torch.int32, ONE_IN_INT32)):
        found[f"{CAST} to {dtype}, in which {one:,} and {two:,} are one number"] = (
            same_document(documents.to(dtype)) & before
        )
    if n > 1:
        first = documents[:, : seen.part].repeat(1, n)
        found |= {
            "each rank attended to its own tokens alone": same & before & at_home,
            "a query's place is counted from the beginning of its rank's part, and keys' places from the "
            "beginning of the sequence": same & local,
            "every rank took its queries to be of the documents of rank 0's tokens": (
                first.unsqueeze(2) == documents.unsqueeze(1)
            ).unsqueeze(1)
            & before,
        }
    return found


def wrong_outputs(seen: SimpleNamespace) -> dict[str, list[Tensor]]:
    """Cause → what each rank would have."""
    with torch.no_grad():
        found = {cause: grouped(seen, mask) for cause, mask in wrong_masks(seen).items()}
        told = "head i of q meets head i % a_kv of k and v; heads that share one follow one another"
        found[told] = grouped(seen, seen.mask, turns=True)
    return {cause: by_parts(seen, whole) for cause, whole in found.items()}


def known_or_sorted(trial: Trial, seen: SimpleNamespace, outs: list) -> dict[str, list[Tensor] | Fault]:
    """Causes of a wrong output; where none fits, whether the same documents are right in rising numbers."""
    found = wrong_outputs(seen)
    if any(all(map(is_close, outs, slip)) for slip in found.values()):
        return with_steps(found)
    rising = SimpleNamespace(**vars(seen))
    rising.documents = seen.documents.diff(dim=1, prepend=seen.documents[:, :1]).ne(0).cumsum(1)
    sorted_outs = [result["out"] for result in trial.run(attend, per_rank=given(rising))]
    if all(map(is_close, sorted_outs, by_parts(seen, seen.out.detach()))):
        told = "where the same documents have rising numbers it is right, and where not, a query sees others"
        step = "Compare the numbers for equality, each with each: they need not be sorted."
        found[f"{told}: the numbers are in no order"] = Fault(outs, step)
    return found


@check("document_attention")
def documents_do_not_see_each_other(trial: Trial) -> None:
    """Each rank's output is its part of causal attention inside each document, which may span ranks."""
    seen = trial.once(observe)
    outs = [r["out"] for r in seen.results]
    trial.close(
        "the output",
        outs,
        by_parts(seen, seen.out.detach()),
        lambda: known_or_sorted(trial, seen, outs),
        help="With all keys there, a rank's mask is its s/n rows of the whole (s, s) mask, another one for "
        "each sequence of the batch.",
    )
    output_stays(trial, seen.results)


def shares(seen: SimpleNamespace) -> list[list[Tensor]]:
    """By rank: what its queries alone add to the gradients of q, k and v."""
    found = []
    for w in seen.where:
        d_out = torch.zeros_like(seen.d_out)
        d_out[:, :, w] = seen.d_out[:, :, w]
        found.append(list(torch.autograd.grad(seen.out, seen.inputs, d_out, retain_graph=True)))
    return found


@check("document_attention")
def document_gradients_are_summed_over_ranks(trial: Trial) -> None:
    """The gradients of q, k and v are those of one process: what the queries of all ranks add to a key."""
    seen, n = trial.once(observe), trial.num_ranks
    for r, result in enumerate(seen.results):
        trial.require(
            result["differentiable"],
            "no gradient comes back from the output",
            help="dist.all_gather is no operation of autograd's: put it into a torch.autograd.Function whose "
            "backward is a reduce-scatter.",
            rank=r,
        )
    parts = shares(seen)
    for i, label in enumerate("qkv"):
        whole = sum(share[i] for share in parts)
        alone = [parts[r][i][:, :, w] for r, w in enumerate(seen.where)]
        causes = {
            "it is only what this rank's own queries add": alone,
            "nothing came back": [torch.zeros_like(x) for x in alone],
        }
        trial.close(
            f"the gradient of {label}",
            [r["gradients"][i] for r in seen.results],
            by_parts(seen, whole),
            causes if n > 1 else {},
            help="Where keys and values were gathered, backward has gradients for all of them on every rank: "
            "sum over the ranks, and keep what belongs to this rank's tokens.",
        )


AS_THEY_ARE = (
    "Gather k and v as they are, each once; reduce-scatter their gradients. Queries and outputs stay."
)


@check("document_attention", world_sizes=(2, 4, 3))
def keys_travel_once_and_queries_never(trial: Trial) -> None:
    """In forward k and v reach the other ranks, once, with a_kv heads; in backward so do their gradients."""
    seen, n = trial.once(observe), trial.num_ranks
    most = 2 * (n - 1) * seen.block
    for r, result in enumerate(seen.results):
        for after, where in (("", "forward"), (BACKWARD, "backward")):
            events = blocks_on_the_wire(result["recording"].select(None, after))
            found = wire_bytes(events, n)
            if after == BACKWARD:  # k and v may be gathered once more, where they were not kept
                gathers = [event for event in events if event.kind in ("all_gather", "broadcast")]
                found -= min(most, wire_bytes(gathers, n))
            cause, help = "", AS_THEY_ARE
            if any(event.kind == "all_reduce" for event in events):
                cause = (
                    "an all-reduce brings every rank the sum for all keys, of which it needs its own alone"
                )
            elif abs(found - PER_GROUP * most) < 0.01 * most:
                reduced = wire_bytes([e for e in events if e.kind in ("reduce_scatter", "all_to_all")], n)
                late = after == BACKWARD and abs(reduced - found) < 0.01 * most
                cause = "k and v are repeated for the heads of q before they are sent, not after"
                if late:
                    cause, help = FOLDED_LATE, ADD_UP
            elif abs(found - (2 + PER_GROUP) / 2 * most) < 0.01 * most:
                cause = "what has the heads of q travels, too"
            trial.require(
                found <= 1.01 * most,
                f"the {where} sends {found:,.0f} bytes from this rank, and k and v to the "
                f"{'one other rank' if n == 2 else f'other {n - 1} ranks'} are {most:,}",
                help=help,
                rank=r,
                cause=cause,
            )


@check("document_attention")
def document_inputs_stay_as_they_were(trial: Trial) -> None:
    """q, k, v, the documents and the gradient that comes in are not written to."""
    for r, result in enumerate(trial.once(observe).results):
        trial.require(
            not result["changed"],
            f"changed in place: {', '.join(result['changed'])}",
            help="Make new tensors: x = x - 1 does, and x -= 1 writes into what was given.",
            rank=r,
        )


def attend_in_bfloat16(rank: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    return rank.submission.document_attention(q, k, v, documents, rank.group).detach()


@check("document_attention", first_of=(2, 3))
def documents_keep_the_dtype_of_q(trial: Trial) -> None:
    """bfloat16 comes out as bfloat16."""
    n = trial.num_ranks
    lengths = torch.tensor([256, 4, 4])  # of 257, as a document's number and as a place, bfloat16 makes 256
    length = int(lengths.sum())
    whole = [trial.normal(1, a, length, 4, dtype=torch.bfloat16) for a in (4, 2, 2)]
    documents = torch.tensor([256, 257, 258]).repeat_interleave(lengths).unsqueeze(0)
    by_rank = zip(*(x.chunk(n, dim=2) for x in whole), strict=True)
    results = trial.run(attend_in_bfloat16, per_rank=[[*own, documents] for own in by_rank])
    for r, out in enumerate(results):
        trial.require(
            out.dtype == torch.bfloat16,
            f"q, k and v are bfloat16, and the output is {str(out.dtype).removeprefix('torch.')}",
            help="Return it in q's dtype. What is computed in float32 stays so until it is cast, and a mask "
            "of 0 and -inf in float32 makes float32 of all.",
            rank=r,
        )
    q, k, v = (x.repeat_interleave(times, dim=1) for x, times in zip(whole, (1, 2, 2), strict=True))

    def by_numbers(numbers: Tensor, places: Tensor) -> list[Tensor]:
        mask = same_document(numbers) & (places.unsqueeze(1) >= places)
        return list(attention(q, k, v, mask)[0].chunk(n, dim=2))

    places = torch.arange(length)
    rounded = "rounded to q's dtype, in which 256 and 257 are one number"
    step = "Compare the numbers as they come, and cast to q's dtype what meets q alone."
    slips = {
        f"the documents' numbers are {rounded}": by_numbers(documents.bfloat16(), places),
        f"places in the sequence are {rounded}": by_numbers(documents, places.bfloat16()),
    }
    trial.close(
        "the output in bfloat16, of documents 256, 257 and 258,",
        results,
        by_numbers(documents, places),
        {told: Fault(outs, step) for told, outs in slips.items()},
        help="In bfloat16, too, a query sees its own document alone.",
        rtol=0.1,
    )


def attend_often(rank: Any, before: list[Tensor], after: list[Tensor], longer: list[Tensor]) -> list[dict]:
    """Three calls; the second has its documents in the tensor of the first, as a loader refills a buffer."""
    q, k, v, upstream, documents = after

    def again(*parts: Any) -> Tensor:
        return rank.submission.document_attention(*parts[:3], documents, rank.group)

    buffer = before[-1].clone()
    results = [attend(rank, *before[:-1], buffer)]
    results.append(attend(rank, q, k, v, upstream, buffer.copy_(documents)))
    heads = [x.detach().transpose(1, 2) for x in (q, k, v)]  # (b, a, s/n, d)
    d_out = upstream.transpose(1, 2)
    results[1]["evaluation"] = in_silence(rank.submission.document_attention, *heads, documents, rank.group)
    results[1]["overwritten"] = overwritten(again, *heads, upstream=d_out)
    results[1]["needing"] = {told: gradients_of_some(again, None, heads, d_out, told) for told in NEEDING}
    try:
        return [*results, attend(rank, *longer)]
    except Exception as error:
        error.add_note("it was a later call, of longer parts: is something kept from the calls before?")
        raise


LARGE = 150.0
"""exp() of it is too large for float32, and exp() of its negative is 0."""


def observe_calls(trial: Trial) -> SimpleNamespace:
    """One with scores up to 150, one of the same shapes with other documents, and one of longer parts."""
    large = draw(trial)
    make_large(large)
    other = SimpleNamespace(**vars(large))
    for name in ("q", "k", "v", "upstream"):
        setattr(other, name, trial.normal(*getattr(large, name).shape))
    other.documents = drawn_documents(trial, *large.documents.shape)
    longer = draw(trial, more=3)
    calls = (large, other, longer)
    results = trial.run(attend_often, per_rank=list(zip(*map(given, calls), strict=True)))
    for i, seen in enumerate(calls):
        attend_in_one_process(seen)
        seen.results = [result[i] for result in results]
    return SimpleNamespace(large=large, other=other, longer=longer)


def make_large(seen: SimpleNamespace) -> None:
    """Of every other query the largest score is 150; that of the first token, with itself alone, is -150.

    The others stay as they are: from a softmax that is all on one key no gradient comes to q and k.
    """
    root = math.sqrt(seen.q.size(-1))
    seen.k[:, 0] *= root / seen.k[:, 0].norm(dim=-1, keepdim=True)
    keys = seen.k.repeat_interleave(PER_GROUP, dim=2)  # (b, s, a, d)
    scores = torch.einsum("biad,bjad->baij", seen.q, keys) / root
    mask = same_document(seen.documents) & causal(seen.documents.size(1))
    seen.q[:, ::2] *= LARGE / scores.masked_fill(~mask, -math.inf)[:, :, ::2].amax()
    seen.q[:, 0] = -LARGE / root * keys[:, 0]


def require_values(trial: Trial, seen: SimpleNamespace, told: str, others: Callable, help: str) -> None:
    """Output and gradients of a call; `others` has causes for the output."""
    outs = [r["out"] for r in seen.results]
    trial.close(f"the output {told}", outs, by_parts(seen, seen.out), others, help, rtol=1e-3)
    whole = torch.autograd.grad(seen.out, seen.inputs, seen.d_out, retain_graph=True)
    for i, label in enumerate("qkv"):
        found = [r["gradients"][i] for r in seen.results]
        trial.close(f"the gradient of {label} {told}", found, by_parts(seen, whole[i]), help=help, rtol=1e-3)


def with_a_finite_mask(seen: SimpleNamespace) -> dict[str, list[Tensor]]:
    """Cause → what each rank would have, where a number is added to the scores of what is not seen."""
    q, k, v = seen.inputs
    k, v = (x.repeat_interleave(PER_GROUP, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))
    return {
        f"what a token does not see has {low} added to its score, not -inf: other scores are lower still": (
            by_parts(seen, (scores + low * ~seen.mask).softmax(-1) @ v)
        )
        for low in (-50, -100)
    }


@check("document_attention", first_of=(3, 2))
def document_scores_do_not_overflow(trial: Trial) -> None:
    """Scores of 150 and of -150 give what the softmax gives, forward and backward: no inf, no NaN."""
    require_values(
        trial,
        trial.once(observe_calls).large,
        "where scores reach 150, and -150 where a token sees itself alone,",
        lambda: with_a_finite_mask(trial.once(observe_calls).large),
        "Subtract the largest score of a row before exp, or leave the softmax to PyTorch; what is not seen "
        "scores -inf, which no score outweighs.",
    )


@check("document_attention", first_of=(3, 2))
def each_call_has_its_own_documents(trial: Trial) -> None:
    """Another call, with other documents, goes by its own, whatever its length or the tensor they are in."""
    seen = trial.once(observe_calls)

    def others() -> dict[str, list[Tensor]]:
        before = by_parts(seen.other, grouped(seen.other, seen.large.mask))
        return {
            "it is what the documents of the call before would give. These came in the same tensor, "
            "refilled: neither its shape nor its address tells them apart": before
        }

    help = "Make the mask out of the documents that this call was given."
    require_values(trial, seen.other, "of a second call, with other documents,", others, help)
    require_values(trial, seen.longer, "of a third call, of longer parts,", dict, help)


@check("document_attention", first_of=(3, 2))
def documents_are_the_same_in_validation(trial: Trial) -> None:
    """Under torch.no_grad(), where no backward is to come, the output is the same."""
    results = trial.once(observe_calls).other.results
    evaluates_alike(trial, [{"output": r["out"], "evaluation": r["evaluation"]} for r in results])


@check("document_attention", first_of=(3, 2))
def document_gradients_come_where_they_are_needed(trial: Trial) -> None:
    """Of q, k and v some may be frozen: those that need a gradient get it all the same."""
    require_where_needed(trial, trial.once(observe_calls).other, travels=False)


@check("document_attention", first_of=(3, 2))
def documents_keep_their_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    results_stay(trial, each_rank(trial.once(observe_calls).other, "overwritten"))
