"""Checks of `document_attention`: several documents in one sequence, and keys and values gathered."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Recording, Trial, check, exercise

from .ring_slips import by_parts
from .shared import BACKWARD, SIZES, attention, blocks_on_the_wire, causal, plain_positions, went

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

PER_GROUP = 3
"""Heads of q that share one of k and v."""


def drawn_documents(trial: Trial, b: int, length: int) -> Tensor:
    """By row: documents of one token and of many, which begin anywhere; their numbers are in no order.

    There are four at most. With five tokens or more one of them has two: where every token is alone with
    itself no gradient reaches q and k, and rounding would be all that is left to compare.
    """
    rows = []
    for _ in range(b):
        starts = {0, trial.integer(1, length - 1), *trial.rng.sample(range(1, length), 2)}
        lengths = torch.tensor([*sorted(starts), length]).diff()
        numbers = torch.tensor(trial.rng.sample(range(9), len(lengths)))
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
        recording.mark(BACKWARD)
        fits = isinstance(out, Tensor) and out.shape == parts[0].shape and out.requires_grad
        if fits:
            out.backward(upstream.transpose(1, 2))
    return {**went(out, fits, leaves, zip(inputs, before, strict=True)), "recording": recording}


def same_document(documents: Tensor) -> Tensor:
    """(b, 1, s, s): whether two tokens are of one document."""
    return (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)


def observe(trial: Trial) -> SimpleNamespace:
    n = trial.num_ranks
    b, a_kv, d, part = 2, trial.integer(2, 3), trial.choice((4, 6)), trial.integer(5, 7)
    length = n * part
    q, upstream = (trial.normal(b, length, PER_GROUP * a_kv, d) for _ in range(2))
    k, v = (trial.normal(b, length, a_kv, d) for _ in range(2))
    documents = drawn_documents(trial, b, length)
    where = [plain_positions(length, r, n) for r in range(n)]
    parts = [[x[:, w] for x in (2 * q, k, v, upstream)] for w in where]
    inputs = [x.double().transpose(1, 2).requires_grad_() for x in (2 * q, k, v)]
    seen = SimpleNamespace(
        results=trial.run(attend, per_rank=[[*each, documents] for each in parts], delays=True),
        where=where,
        inputs=inputs,
        d_out=upstream.double().transpose(1, 2),
        documents=documents,
        part=part,
        block=k[:, where[0]].numel() * k.element_size(),
    )
    seen.mask = same_document(documents) & causal(length)
    seen.out = grouped(seen, seen.mask)
    return seen


def grouped(seen: SimpleNamespace, mask: Tensor, turns: bool = False) -> Tensor:
    """Attention of all heads of q; with `turns` head i meets head i % a_kv of k and v."""
    q, k, v = seen.inputs
    if turns:
        k, v = (x.repeat(1, PER_GROUP, 1, 1) for x in (k, v))
    else:
        k, v = (x.repeat_interleave(PER_GROUP, dim=1) for x in (k, v))
    return attention(q, k, v, mask)[0]


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
        "every row of the batch has the documents of row 0": same[:1].expand_as(same) & before,
        "a document whose number is smaller than that of the one before was joined to it: a number says "
        "which document it is, and in no order": same_document(rises) & before,
        "a token does not see itself": same & before & (places.unsqueeze(1) > places),
    }
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


@check("document_attention")
def documents_do_not_see_each_other(trial: Trial) -> None:
    """Each rank's output is its part of causal attention inside each document, which may span ranks."""
    seen = trial.once(observe)
    trial.close(
        "the output",
        [r["out"] for r in seen.results],
        by_parts(seen, seen.out.detach()),
        lambda: wrong_outputs(seen),
        help="With all keys there, a rank's mask is its s/n rows of the whole (s, s) mask, another one for "
        "each sequence of the batch.",
    )


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
            "the output has no gradient, or is not (b, a, s/n, d)",
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


def sent(recording: Recording, after: str, n: int) -> float:
    """Bytes that leave a rank, as a ring would send them."""
    shares = {"all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_to_all": (n - 1) / n}
    shares |= {"all_reduce": 2 * (n - 1) / n, "broadcast": (n - 1) / n}
    events = blocks_on_the_wire(recording.select(None, after))
    return sum(event.num_bytes * shares.get(event.kind, 1) for event in events)


@check("document_attention", world_sizes=(2, 4, 3))
def keys_travel_once_and_queries_never(trial: Trial) -> None:
    """In forward k and v reach the other ranks, once, with a_kv heads; in backward so do their gradients."""
    seen, n = trial.once(observe), trial.num_ranks
    most = 2 * (n - 1) * seen.block
    for r, result in enumerate(seen.results):
        for after, where in (("", "forward"), (BACKWARD, "backward")):
            found = sent(result["recording"], after, n)
            events = blocks_on_the_wire(result["recording"].select(None, after))
            cause = ""
            if any(event.kind == "all_reduce" for event in events):
                cause = (
                    "an all-reduce brings every rank the sum for all keys, of which it needs its own alone"
                )
            elif abs(found - PER_GROUP * most) < 0.01 * most:
                cause = "k and v are repeated for the heads of q before they are sent, not after"
            elif abs(found - (2 + PER_GROUP) / 2 * most) < 0.01 * most:
                cause = "what has the heads of q travels, too"
            trial.require(
                found <= 1.01 * most,
                f"the {where} sends {found:,.0f} bytes from this rank, and k and v to the other {n - 1} are "
                f"{most:,}",
                help="Gather k and v as they are, each once; reduce-scatter their gradients. Queries and "
                "outputs stay.",
                rank=r,
                cause=cause,
            )


@check("document_attention")
def document_inputs_stay_as_they_were(trial: Trial) -> None:
    """q, k, v, the documents and the gradient that comes in are not written to."""
    for r, result in enumerate(trial.once(observe).results):
        trial.require(
            result["unchanged"],
            "q, k, v, the documents or the gradient that came in was changed",
            help="Make new tensors: x = x - 1 does, and x -= 1 writes into what was given.",
            rank=r,
        )


def attend_in_bfloat16(rank: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> str:
    return str(rank.submission.document_attention(q, k, v, documents, rank.group).dtype)


@check("document_attention", first_of=(2, 3))
def documents_keep_the_dtype_of_q(trial: Trial) -> None:
    """bfloat16 comes out as bfloat16."""
    q, k, v = (trial.normal(1, a, 3, 4, dtype=torch.bfloat16) for a in (4, 2, 2))
    documents = torch.zeros(1, 3 * trial.num_ranks, dtype=torch.int64)
    for r, dtype in enumerate(trial.run(attend_in_bfloat16, q, k, v, documents)):
        trial.require(
            dtype == "torch.bfloat16",
            f"q, k and v are bfloat16, and the output is {dtype.removeprefix('torch.')}",
            help="A mask of True and False leaves dtypes alone; one of 0 and -inf in float32 does not.",
            rank=r,
        )
