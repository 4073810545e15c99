"""Checks of `ring_all_reduce`: the sum on every rank, in place, 2(n-1)/n of the bytes."""

from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import Trial, check, exercise

from .carried import require_carried
from .cases import (
    Case,
    ask,
    draw,
    dtypes,
    layouts,
    require_between,
    require_in_place,
    require_tensors,
    sizes,
    through_float64,
)
from .traffic import require_messages_alone, require_neighbours, require_ring_bytes, require_waits

exercise(
    "ring_all_reduce",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "You have both halves: after the reduce-scatter every rank has one chunk of the sum.",
        "All shards of an all-gather have one shape: what does your reduce-scatter return where the size "
        "is not divisible by n?",
        "The sum must stand in the tensor that was given, whatever its shape and layout: tensor.copy_(...).",
    ),
)


def observe_even(trial: Trial) -> SimpleNamespace:
    kinds = (torch.float64, torch.int64, torch.int32)
    even = draw(trial, trial.num_ranks * trial.integer(200, 400))
    half = draw(trial, 200 * trial.num_ranks, dtype=torch.bfloat16)
    return ask(trial, "ring_all_reduce", [even, half, *dtypes(trial, *kinds)])


def observe_odd(trial: Trial) -> SimpleNamespace:
    odd = draw(trial, trial.num_ranks * trial.integer(200, 400) + 1)
    return ask(trial, "ring_all_reduce", [*sizes(trial), odd])


def observe_layouts(trial: Trial) -> SimpleNamespace:
    return ask(trial, "ring_all_reduce", layouts(trial))


def observe_slow(trial: Trial) -> SimpleNamespace:
    return ask(trial, "ring_all_reduce", [draw(trial, 20_000 * trial.num_ranks)], delays=True)


def slips(case: Case) -> dict[str, Tensor | list[Tensor]]:
    """What known slips would have left in the tensor."""
    n, values, total, chunk = len(case.values), case.values, case.total, case.chunk_size
    even = case.num_elements // n * n
    padded = total.new_zeros(n * chunk)
    padded[: case.num_elements] = total.flatten()
    chunks = padded.view(n, chunk)
    return {
        "what it held before: the sum was not written into the tensor that was given": values,
        "this rank's own part counts twice": [total + value for value in values],
        "this rank's own part is missing": [total - value for value in values],
        "only this rank's own chunk of the sum is there: nobody gathered the others": [
            _with_sums(value, total, r * chunk, (r + 1) * chunk) for r, value in enumerate(values)
        ],
        "the elements that are left over, where the size is not divisible by n, were not summed": [
            _with_sums(value, total, 0, even) for value in values
        ],
        "the chunks of the sum in the wrong order, each one place too far": _cut(chunks.roll(1, 0), total),
        "the chunks of the sum in the wrong order, each one place too early": _cut(chunks.roll(-1, 0), total),
        "these are the largest numbers, not the sums": torch.stack(values).amax(0),
        "what comes first in the all-gather is added to what is there, as in the reduce-scatter, and does "
        "not take its place": _added_once_more(case, 0),
        "the first chunk that comes in the all-gather is added to the rank's own, and does not take its "
        "place": _added_once_more(case, 1),
    }


def _added_once_more(case: Case, ahead: int) -> list[Tensor]:
    """By rank, the tensor where chunk c is complete before rank c + ahead, which adds its own to it."""
    n, padded = len(case.values), []
    for value in (case.total, *case.values):
        filled = value.new_zeros(n * case.chunk_size)
        filled[: case.num_elements] = value.flatten()
        padded.append(filled.view(n, -1))
    total, own = padded[0], torch.stack(padded[1:])
    starts = [(c + ahead) % n for c in range(n)]
    added = torch.stack([total[c] + own[start, c] for c, start in enumerate(starts)])
    held = [
        torch.stack([total[c] if (r + 1) % n == start else added[c] for c, start in enumerate(starts)])
        for r in range(n)
    ]
    return [_cut(chunks, case.total) for chunks in held]


def _with_sums(value: Tensor, total: Tensor, start: int, end: int) -> Tensor:
    """One rank's own tensor, with the sums in the elements from start to end."""
    mixed = value.flatten().clone()
    mixed[start:end] = total.flatten()[start:end]
    return mixed.view_as(total)


def _cut(chunks: Tensor, like: Tensor) -> Tensor:
    return chunks.flatten()[: like.numel()].view_as(like)


def require_sums(trial: Trial, seen: SimpleNamespace, help: str = "", of: torch.dtype | None = None) -> None:
    """Every rank's tensor holds the sum."""
    for case, answers in zip(seen.cases, seen.answers, strict=True):
        if of not in (None, case.values[0].dtype):
            continue
        require_tensors(trial, case, answers, "tensor")
        tensors = [answer["tensor"] for answer in answers]
        trial.close(
            f"the tensor ({case}) after the call",
            tensors,
            case.total,
            alternatives=through_float64(case, tensors, [case.total] * trial.num_ranks) or slips(case),
            help=help or "A reduce-scatter, then an all-gather of its shards, written into the tensor.",
            terms={f"rank {r}'s part": value for r, value in enumerate(case.values)},
        )
        require_in_place(trial, case, answers, case.total)


@check("ring_all_reduce")
def every_rank_has_the_sum(trial: Trial) -> None:
    """After the call the tensor of every rank holds the sum over all ranks."""
    require_sums(trial, trial.once(observe_even), of=torch.float32)


@check("ring_all_reduce", subgroup=False)
def any_size_is_reduced(trial: Trial) -> None:
    """Sizes that are not divisible by n, smaller than n, 0-dim, many dimensions."""
    require_sums(
        trial, trial.once(observe_odd), "Pad to n equal chunks, and cut what is too long at the end."
    )


@check("ring_all_reduce")
def any_dtype_is_reduced(trial: Trial) -> None:
    """Whole numbers are summed exactly, float64 in float64, and bfloat16 stays bfloat16."""
    require_sums(trial, trial.once(observe_even), "Keep the tensor's dtype, on the wire and in the sum.")


@check("ring_all_reduce", world_sizes=(2, 3), subgroup=False)
def tensors_need_not_be_contiguous(trial: Trial) -> None:
    """A tensor that does not lie in one piece of memory is summed in place as well, and nothing else is."""
    seen = trial.once(observe_layouts)
    require_sums(
        trial,
        seen,
        "flatten(), reshape() and contiguous() may return a copy: write the sum back with tensor.copy_().",
    )
    require_between(trial, seen)


@check("ring_all_reduce", world_sizes=(2, 4), subgroup=False)
def nothing_is_used_before_it_arrived(trial: Trial) -> None:
    """When messages are slow, the sums are still right."""
    require_sums(
        trial,
        trial.once(observe_slow),
        "Wait for the receive before you use what came, and for the send before you change what is sent.",
    )


@check("ring_all_reduce", subgroup=False)
def only_messages_are_used(trial: Trial) -> None:
    """It is made of isend and irecv, which bring what comes out: no collective is called."""
    for observe in (observe_even, observe_odd):
        require_messages_alone(trial, trial.once(observe))
    require_carried(trial, "ring_all_reduce", lambda _: [trial.normal(12)])


@check("ring_all_reduce")
def only_neighbours_talk(trial: Trial) -> None:
    """A rank sends to its neighbours in the ring alone."""
    require_neighbours(trial, trial.once(observe_even))


@check("ring_all_reduce", subgroup=False)
def small_tensors_go_round_too(trial: Trial) -> None:
    """Whatever the size, neighbours alone talk, and the sum is the same on all ranks, to the last bit."""
    for seen in (trial.once(observe_even), trial.once(observe_odd)):
        require_neighbours(trial, seen)
        for case, answers in zip(seen.cases, seen.answers, strict=True):
            first = answers[0]["tensor"]
            for r, answer in enumerate(answers):
                trial.require(
                    torch.equal(answer["tensor"], first),
                    f"given {case} the sums on ranks 0 and {r} differ in their last digits",
                    cause="each rank adds in an order of its own",
                    help="A chunk is added up once, on its way round; what the all-gather brings is copied.",
                    rank=r,
                )


@check("ring_all_reduce", subgroup=False)
def each_rank_sends_its_share_of_the_bytes(trial: Trial) -> None:
    """A rank sends 2(n-1)/n of the tensor's bytes, chunks rounded up."""
    for observe in (observe_even, observe_odd):
        require_ring_bytes(trial, trial.once(observe), rounds=2)


@check("ring_all_reduce")
def every_message_is_waited_for(trial: Trial) -> None:
    """Every isend and irecv is over when the call returns."""
    require_waits(trial, trial.once(observe_even))
