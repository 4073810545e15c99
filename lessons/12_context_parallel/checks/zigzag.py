"""Checks of `zigzag_split`, `zigzag_merge` and `zigzag_ring_attention`."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Fault, Trial, check, each_rank, exercise
from lessons_shared.results import results_stay

from . import calls, frozen, grouped, large_scores, rings
from .shared import SIZES, zigzag_positions

exercise(
    "zigzag_split",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "x.chunk(2 * n, dim) cuts; rank r keeps number r and number 2n - 1 - r.",
        "torch.cat puts the two together along dim.",
    ),
)

exercise(
    "zigzag_merge",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "dist.all_gather into a list of n tensors like x gives every rank all parts.",
        "The first half of rank r's part is chunk r, the second half chunk 2n - 1 - r.",
    ),
)

exercise(
    "zigzag_ring_attention",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "The ring is the one you have: only who sees what changes. Name chunks by their number, 0 to 2n-1.",
        "A chunk of queries sees a chunk of keys whole if its number is higher, with causal_offset 0 if it "
        "is the same one, and not at all if it is lower.",
        "Each of a rank's two chunks has its own out and lse: merge each with its own, join them at the end.",
    ),
)


def along(call: Callable, x: Tensor, group, dim: int) -> Any:
    """On a rank: what comes of a call; an error is told which dim it was."""
    try:
        return call(x, group, dim)
    except Exception as error:
        if dim < 0:
            error.add_note(
                f"dim was {dim}, which counts from the end: those from 0 on came before, and went through"
            )
        elif re.search("shape|[Ss]izes? of|Dimension out of range", str(error)):
            error.add_note(
                f"x had shape {tuple(x.shape)} here, and dim was {dim}: is a size that of another dimension?"
            )
        raise


FROM_THE_END = "with a dim from 0 on it is right, and not with one below 0, which counts from the end"


def require_along(
    trial: Trial, what: str, dim: int, found: list, right: list[Tensor], others: dict, help: str
) -> None:
    """Require what a call made along a dim; of those below 0 when the ones from 0 on have been looked at."""
    if dim < 0:
        step = "x.narrow, x.chunk and x.size take such a dim; for an index of your own take dim % x.dim()."
        for rank, (x, expected) in enumerate(zip(found, right, strict=True)):
            trial.require(
                not isinstance(x, Tensor) or x.shape == expected.shape,
                f"{what} has shape {tuple(getattr(x, 'shape', ()))}, not {tuple(expected.shape)}",
                help=step,
                rank=rank,
                cause=FROM_THE_END,
            )
        others = others | {FROM_THE_END: Fault(found, step)}
    trial.close(what, found, right, others, help=help, rtol=0.0)


def splits_probe(rank, tensors: list[Tensor], dims: list[int]) -> dict:
    before = [x.clone() for x in tensors]
    with rank.record() as recording:
        call = rank.submission.zigzag_split
        parts = [along(call, x, rank.group, d) for x, d in zip(tensors, dims, strict=True)]
    return {
        "parts": [p.detach() if isinstance(p, Tensor) else None for p in parts],
        "unchanged": all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True)),
        "recording": recording,
    }


def draw_wholes(trial: Trial) -> tuple[list[Tensor], list[int]]:
    """Tensors of several shapes and dtypes, and the dimension along which each is cut, also from the end."""
    cuts = 2 * trial.num_ranks
    lengths = [cuts * trial.integer(1, 3) for _ in range(4)]
    b, a, d = trial.integer(2, 3), trial.integer(2, 3), trial.integer(3, 5)
    tensors = [
        trial.normal(b, a, lengths[0], d),
        torch.arange(lengths[2]),
        trial.tokens(1000, b, lengths[1]),
        trial.normal(b, lengths[3], d, dtype=torch.float64).transpose(0, 1),
    ]
    return tensors, [2, 0, -1, -3]


def observe_splits(trial: Trial) -> SimpleNamespace:
    tensors, dims = draw_wholes(trial)
    return SimpleNamespace(tensors=tensors, dims=dims, results=trial.run(splits_probe, tensors, dims))


def cut(x: Tensor, dim: int, rank: int, num_ranks: int) -> Tensor:
    return x.index_select(dim, zigzag_positions(x.size(dim), rank, num_ranks))


def other_parts(x: Tensor, dim: int, n: int) -> dict[str, list[Tensor]]:
    """Cause → the part of each rank."""
    halves = x.chunk(2 * n, dim)

    def joined(a: int, b: int) -> Tensor:
        return torch.cat([halves[a], halves[b]], dim)

    return {
        "the r-th part, as in the plain ring": list(x.chunk(n, dim)),
        "chunks r and n + r": [joined(r, n + r) for r in range(n)],
        "the two chunks are the wrong way round": [joined(2 * n - 1 - r, r) for r in range(n)],
        "chunks r and 2n - 2 - r: one off": [joined(r, max(0, 2 * n - 2 - r)) for r in range(n)],
        "single elements in turn, not chunks": [
            x.index_select(dim, torch.arange(r, x.size(dim), n)) for r in range(n)
        ],
        "the second chunk is reversed": [
            torch.cat([halves[r], halves[2 * n - 1 - r].flip(dim)], dim) for r in range(n)
        ],
    }


@check("zigzag_split")
def parts_are_chunks_r_and_its_mirror_image(trial: Trial) -> None:
    """Of 2n chunks rank r keeps r and 2n-1-r, in this order, whole and unchanged, along any dimension."""
    seen, n = trial.once(observe_splits), trial.num_ranks
    for i, (x, dim) in enumerate(zip(seen.tensors, seen.dims, strict=True)):
        require_along(
            trial,
            f"the part of a tensor {tuple(x.shape)} cut along dim {dim}",
            dim,
            [r["parts"][i] for r in seen.results],
            [cut(x, dim, r, n) for r in range(n)],
            other_parts(x, dim, n) if n > 1 else {},
            "With n = 4, rank 0 has chunks 0 and 7, rank 1 has 1 and 6, rank 2 has 2 and 5, rank 3 has "
            "3 and 4.",
        )


def uneven_probe(rank, x: Tensor) -> str:
    try:
        rank.submission.zigzag_split(x, rank.group, 1)
    except Exception as error:
        return type(error).__name__
    return "no error"


@check("zigzag_split", world_sizes=(2, 3, 4))
def what_does_not_divide_is_refused(trial: Trial) -> None:
    """A dimension that is not divisible by 2n is a ValueError, also where it is divisible by n."""
    n = trial.num_ranks
    for length in (3 * n, 4 * n - 1, 4 * n + 1):  # torch cuts the second into 2n chunks, the last one shorter
        for r, told in enumerate(trial.run(uneven_probe, trial.normal(2, length))):
            trial.require(
                told == "ValueError",
                f"a dimension of {length} over {n} ranks gave {told} where a ValueError belongs",
                help="Raise a ValueError that names both numbers, before you cut. Is your condition true of "
                f"{length} and 2n = {2 * n}?",
                rank=r,
            )


@check("zigzag_split")
def nothing_is_sent(trial: Trial) -> None:
    """Every rank has the whole x: cutting it needs no communication, and leaves it as it was."""
    for r, result in enumerate(trial.once(observe_splits).results):
        events = result["recording"].select()
        trial.require(
            not events,
            f"zigzag_split communicates: {', '.join(e.describe() for e in events[:3])}",
            help="Index the tensor you have.",
            rank=r,
        )
        trial.require(
            result["unchanged"], "the given tensor was changed", help="Leave the argument alone.", rank=r
        )


def merge_probe(rank, parts: list[Tensor], dims: list[int]) -> list:
    before = [x.clone() for x in parts]
    call = rank.submission.zigzag_merge
    wholes = [along(call, x, rank.group, d) for x, d in zip(parts, dims, strict=True)]
    return {
        "wholes": [w.detach() if isinstance(w, Tensor) else None for w in wholes],
        "unchanged": all(torch.equal(x, y) for x, y in zip(parts, before, strict=True)),
    }


def observe_merges(trial: Trial) -> SimpleNamespace:
    """The parts come from the judge, so that nothing can remember the whole."""
    tensors, dims = draw_wholes(trial)
    n = trial.num_ranks
    parts = [([cut(x, d, r, n) for x, d in zip(tensors, dims, strict=True)], dims) for r in range(n)]
    return SimpleNamespace(tensors=tensors, dims=dims, results=trial.run(merge_probe, per_rank=parts))


def other_wholes(x: Tensor, dim: int, n: int) -> dict[str, Any]:
    parts = [cut(x, dim, r, n) for r in range(n)]
    halves = [p.chunk(2, dim) for p in parts]
    firsts, seconds = [h[0] for h in halves], [h[1] for h in halves]
    held = [c for r in range(n) for c in (r, 2 * n - 1 - r)]
    lying = [half for pair in halves for half in pair]  # chunk held[i] lies at place i
    once_more = Fault(
        torch.cat([lying[c] for c in held], dim),
        "If held[i] is the number of the i-th chunk, chunks[held] puts them into that order once more. The "
        "other way: place held[i] gets the i-th, as chunks[torch.argsort(held)] does.",
    )
    return {
        "the order in which the ranks hold the chunks was applied to them, and not undone": once_more,
        "the parts are joined in the order of the ranks": torch.cat(parts, dim),
        "the second halves are joined in the order of the ranks": torch.cat([*firsts, *seconds], dim),
        "the halves are swapped": torch.cat([*seconds, *firsts[::-1]], dim),
        "the order of the chunks is reversed": torch.cat([*seconds, *firsts[::-1]][::-1], dim),
    }


@check("zigzag_merge")
def whole_comes_back_everywhere(trial: Trial) -> None:
    """The ranks' parts are put back in order: the whole tensor, on every rank, along any dimension."""
    seen, n = trial.once(observe_merges), trial.num_ranks
    for i, (x, dim) in enumerate(zip(seen.tensors, seen.dims, strict=True)):
        others: dict = other_wholes(x, dim, n) if n > 1 else {}
        if n > 1:
            others["it is this rank's part alone"] = [cut(x, dim, r, n) for r in range(n)]
        require_along(
            trial,
            f"the whole of {tuple(x.shape)}, merged along dim {dim},",
            dim,
            [r["wholes"][i] for r in seen.results],
            [x] * n,
            others,
            "Sort the 2n chunks by their number: the first half of rank r's part is number r, the "
            "second 2n-1-r."
            if all(getattr(result["wholes"][i], "dtype", x.dtype) == x.dtype for result in seen.results)
            else "The whole has the dtype of the parts: torch.zeros and torch.empty make float32, unless "
            "they are told dtype=x.dtype.",
        )


@check("zigzag_merge")
def parts_stay_as_they_were(trial: Trial) -> None:
    """The given part is not written to."""
    for r, result in enumerate(trial.once(observe_merges).results):
        trial.require(
            result["unchanged"], "the given part was changed", help="Gather into new tensors.", rank=r
        )


def observe(trial: Trial) -> SimpleNamespace:
    return rings.observe(trial, rings.ZIGZAG)


def observe_exact(trial: Trial) -> SimpleNamespace:
    """In float64, alone and between two others."""
    return calls.observe_in(trial, rings.ZIGZAG, torch.float64, large=True)


@check("zigzag_ring_attention")
def zigzag_output_is_that_of_causal_attention(trial: Trial) -> None:
    """Each rank's output is plain causal attention at its positions: chunks r and 2n-1-r."""
    rings.require_outputs(trial, trial.once(observe))


@check("zigzag_ring_attention")
def zigzag_gradients_are_those_of_causal_attention(trial: Trial) -> None:
    """The gradients of q, k and v are plain attention's at this rank's positions, complete and at home."""
    rings.require_gradients(trial, trial.once(observe))


@check("zigzag_ring_attention")
def zigzag_messages_go_to_neighbours(trial: Trial) -> None:
    """The messages are those of the plain ring: neighbours only, n-1 hops, in backward with gradients."""
    rings.require_ring(trial, trial.once(observe))


@check("zigzag_ring_attention")
def zigzag_blocks_travel_while_one_is_computed(trial: Trial) -> None:
    """In both passes each block is computed while the next one is on its way, not after it has arrived."""
    rings.require_travel_while_computing(trial, trial.once(observe))


@check("zigzag_ring_attention", world_sizes=(4, 3), subgroup=False)
def zigzag_holds_no_sequence(trial: Trial) -> None:
    """No tensor is as long as the sequence, and keys that came by are not kept, for backward either."""
    rings.require_nothing_long(trial, trial.once(observe))


@check("zigzag_ring_attention")
def every_rank_does_the_same_work(trial: Trial) -> None:
    """Every rank computes as much as any other, and no more than 2n + 2 pairs of chunks."""
    seen = trial.once(observe)
    rings.require_work(trial, seen, rings.ZIGZAG)
    for after, told in (("", "forward"), (rings.BACKWARD, "backward")):
        flops = [r["recording"].flops(after) for r in seen.results]
        trial.require(
            max(flops) - min(flops) <= rings.slack_flops(seen),
            f"the ranks do different amounts of work in the {told}: {flops} FLOPs",
            help="At every step after the first, a rank computes two pairs, whoever's keys are there.",
        )


def observe_grouped(trial: Trial) -> SimpleNamespace:
    return grouped.observe(trial, rings.ZIGZAG)


@check("zigzag_ring_attention", world_sizes=(4, 3, 1), subgroup=False)
def zigzag_grouped_heads_travel_as_they_are(trial: Trial) -> None:
    """k and v may have fewer heads than q: each serves a/a_kv heads of q, and no copies of it travel."""
    grouped.require_ring(trial, trial.once(observe_grouped))


@check("zigzag_ring_attention")
def zigzag_inputs_stay_as_they_were(trial: Trial) -> None:
    """q, k, v and the gradient that comes in are not written to."""
    rings.require_unchanged(trial, trial.once(observe))


@check("zigzag_ring_attention", world_sizes=(3,), subgroup=False)
def zigzag_works_in_the_dtype_of_its_inputs(trial: Trial) -> None:
    """float64 comes out as exact as it went in, and bfloat16 as bfloat16."""
    calls.require_dtype(trial, rings.ZIGZAG, trial.once(observe), trial.once(observe_exact))


@check("zigzag_ring_attention", world_sizes=(3,), subgroup=False)
def zigzag_scores_do_not_overflow(trial: Trial) -> None:
    """Scores of 150 and of -150 give what the softmax gives, forward and backward: no inf, no NaN."""
    large_scores.require_large(trial, trial.once(observe_exact))


@check("zigzag_ring_attention", world_sizes=(3,), subgroup=False)
def zigzag_calls_do_not_disturb_each_other(trial: Trial) -> None:
    """The backward of one of three attentions, as of a model's layers, is that of its own forward, and then
    nothing of it is kept."""
    calls.require_calls_apart(trial, trial.once(observe_exact))


@check("zigzag_ring_attention", world_sizes=(3,), subgroup=False)
def zigzag_output_is_the_same_in_validation(trial: Trial) -> None:
    """Under torch.no_grad(), where no backward is to come, the output is the same."""
    frozen.require_silent(trial, trial.once(observe_exact))


@check("zigzag_ring_attention", world_sizes=(3,), subgroup=False)
def zigzag_gradients_come_where_they_are_needed(trial: Trial) -> None:
    """Of q, k and v some may be frozen: those that need a gradient get it all the same."""
    frozen.require_where_needed(trial, trial.once(observe_exact))


@check("zigzag_ring_attention", world_sizes=(3,), subgroup=False)
def zigzag_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    results_stay(trial, each_rank(trial.once(observe_exact), "overwritten"))


@check("zigzag_ring_attention", world_sizes=(3,), subgroup=False)
def zigzag_goes_back_twice(trial: Trial) -> None:
    """A second backward over the same graph gives the same gradients, and leaves the first ones alone."""
    calls.require_twice_over(trial, rings.ZIGZAG)
