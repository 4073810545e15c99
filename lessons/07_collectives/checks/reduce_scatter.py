"""Checks of `ring_reduce_scatter`: rank r gets chunk r of the sum."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Fault, Trial, check, exercise, is_close

from .carried import require_carried
from .cases import (
    Case,
    ask,
    draw,
    dtypes,
    fits_any,
    layouts,
    require_own_memory,
    require_tensors,
    require_untouched,
    sizes,
    through_float64,
)
from .ring_rules import other_rules, partial_sums
from .traffic import (
    direction,
    require_messages_alone,
    require_neighbours,
    require_ring_bytes,
    require_waits,
    sends,
)

exercise(
    "ring_reduce_scatter",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "Follow one chunk: where must it start so that it has visited every rank when it reaches rank r, "
        "its owner, after n - 1 steps?",
        "In step s = 1 ... n - 1 rank r sends chunk (r - s) % n to rank r + 1. Which chunk does it receive "
        "from rank r - 1, and what does it do with it?",
        "Copy the tensor into new_zeros(n * chunk_size) first: then all chunks have one size, and the input "
        "stays as it was. Start send and receive, then wait for both.",
    ),
)


def observe_even(trial: Trial) -> SimpleNamespace:
    kinds = (torch.float64, torch.int64, torch.int32)
    even = draw(trial, trial.num_ranks * trial.integer(200, 400))
    half = draw(trial, 200 * trial.num_ranks, dtype=torch.bfloat16)
    return ask(trial, "ring_reduce_scatter", [even, half, *dtypes(trial, *kinds)])


def observe_odd(trial: Trial) -> SimpleNamespace:
    n = trial.num_ranks
    odd, few, two_more = (draw(trial, size) for size in (n * trial.integer(200, 400) + 1, n + 1, 2 * n + 2))
    return ask(trial, "ring_reduce_scatter", [*sizes(trial), odd, few, two_more])


def observe_layouts(trial: Trial) -> SimpleNamespace:
    return ask(trial, "ring_reduce_scatter", layouts(trial))


def observe_slow(trial: Trial) -> SimpleNamespace:
    return ask(trial, "ring_reduce_scatter", [draw(trial, 20_000 * trial.num_ranks)], delays=True)


def pieces(case: Case, whole: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """Chunk r of each rank's flattened tensor, as long as rank r's shard, without padding."""
    starts = [sum(lengths[:r]) for r in range(len(lengths))]
    return [
        tensor.flatten()[start : start + length]
        for tensor, start, length in zip(whole, starts, lengths, strict=True)
    ]


def slips(
    seen: SimpleNamespace, i: int, lengths: list[int], actual: list[Tensor]
) -> dict[str, list[Tensor] | Fault]:
    """What known slips would have returned, or a ring with another rule."""
    case, way = seen.cases[i], direction(seen.recordings, i)
    n, values = len(case.values), case.values
    before = [values[r] + values[r - 1] for r in range(n)]
    after = [values[r] + values[(r + 1) % n] for r in range(n)]
    twice = [case.total + value for value in values]
    once_less = [case.total - value for value in values]
    first = [torch.stack(values).amax(0)] * n
    told = {
        "this rank's own chunk: nothing was added to it": values,
        "this rank's own part counts twice: one step too many?": twice,
        "this rank's own part is missing": once_less,
        "only this rank's and the part of the rank before are in it": before,
        "only this rank's and the next rank's parts are in it": after,
        "these are the largest numbers, not the sums": first,
    }
    known = {cause: pieces(case, whole, lengths) for cause, whole in told.items()}
    early = sent_too_early(seen, i, lengths, actual, way)
    return early or (known if fits_any(actual, known) else other_rules(case, actual, way, reduces=True))


def sent_too_early(
    seen: SimpleNamespace, i: int, lengths: list[int], actual: list[Tensor], way: int
) -> dict[str, list[Tensor] | Fault]:
    """What ranks have where a chunk is sent on before what arrived has been added: parts next to their own.

    All chunks were sent, so no step is missing.
    """
    case, n = seen.cases[i], len(actual)
    chunk_bytes = case.chunk_size * case.values[0].element_size()
    sent = [sum(event.num_bytes for event in sends(each, i)) for each in seen.recordings]
    if min(sent) < (n - 1) * chunk_bytes:
        return {}
    runs = [
        pieces(case, [sum(case.values[(r - way * j) % n] for j in range(k + 1)) for r in range(n)], lengths)
        for k in range(1, n)
    ]
    found = [
        next((run[r] for run in runs if is_close(shard, run[r])), None) for r, shard in enumerate(actual)
    ]
    if any(each is None for each in found):
        return {}
    told = (
        f"only the parts of this rank and of some right {'before' if way == 1 else 'after'} it are in it: of "
        "these, the farthest sent its own part on without what had arrived"
    )
    return {
        told: Fault(
            found, "Add what has arrived to a chunk first, and then send that chunk on.", before_writes=True
        )
    }


RANKS_OWN = (
    "Rank r returns chunk r: the one that is complete on it after n - 1 steps, if it has sent the right one "
    "first. In a ring to the next rank that is chunk r - 1, in one to the rank before chunk r + 1."
)


def require_shards(
    trial: Trial, seen: SimpleNamespace, help: str = "", of: torch.dtype | None = None
) -> None:
    """The shards, joined and cut to size, are the flattened sum: padded or with a short last chunk."""
    for i, (case, answers) in enumerate(zip(seen.cases, seen.answers, strict=True)):
        if of not in (None, case.values[0].dtype):
            continue
        require_tensors(trial, case, answers)
        require_chunks(trial, case, answers)
        lengths = [answer["returned"].numel() for answer in answers]
        expected = pieces(case, [case.total] * trial.num_ranks, lengths)
        actual = [answer["returned"][: len(e)] for answer, e in zip(answers, expected, strict=True)]
        trial.close(
            f"the shard of {case}",
            actual,
            expected,
            alternatives=through_float64(case, actual, expected) or partial(slips, seen, i, lengths, actual),
            help=help or RANKS_OWN,
            terms={
                f"rank {r}'s part": pieces(case, [value] * trial.num_ranks, lengths)
                for r, value in enumerate(case.values)
            },
        )
        for r, (answer, e) in enumerate(zip(answers, expected, strict=True)):
            filling = answer["returned"][len(e) :]
            trial.require(
                not filling.any(),
                f"given {case} its chunk is filled up with {filling.tolist()[:3]}, not with zeros",
                help="Fill up with zeros (new_zeros), or let the chunk be shorter.",
                rank=r,
            )


def require_chunks(trial: Trial, case: Case, answers: list[dict[str, Any]]) -> None:
    """Every shard is one-dimensional and no longer than an n-th; each holds what is there for its chunk."""
    for r, answer in enumerate(answers):
        shape = tuple(answer["returned"].shape)
        trial.require(
            len(shape) == 1,
            f"given {case} it returned the shape {shape}, not a 1-D shard",
            help="Flatten the tensor, then cut it.",
            rank=r,
        )
        trial.require(
            shape[0] <= case.chunk_size,
            f"given {case} it returned {shape[0]} elements, and a chunk has "
            f"ceil({case.num_elements}/{trial.num_ranks}) = {case.chunk_size}",
            cause="the whole, not this rank's chunk?"
            if trial.num_ranks > 1 and shape[0] >= case.num_elements
            else "",
            rank=r,
        )
    together = sum(answer["returned"].numel() for answer in answers)
    trial.require(
        together >= case.num_elements,
        f"given {case}: all shards together have {together} elements, so "
        f"{case.num_elements - together} were lost",
        help="Round the size of a chunk up, and fill the last one with zeros.",
    )
    n, size = trial.num_ranks, case.chunk_size
    lengths = [answer["returned"].numel() for answer in answers]
    needed = [min(size, max(0, case.num_elements - r * size)) for r in range(n)]
    alike = [len(chunk) for chunk in torch.arange(case.num_elements).tensor_split(n)]
    trial.require(
        all(length >= least for length, least in zip(lengths, needed, strict=True)),
        f"given {case}: by rank the shards have {lengths} elements, and the chunks of "
        f"ceil({case.num_elements}/{n}) = {size} have {needed}, without filling",
        cause="the chunks are as equal in length as can be, as tensor_split makes them"
        if lengths == alike
        else "",
        help=f"Chunk r begins at element r · {size}: what is short, or empty, stands at the tensor's end.",
    )


@check("ring_reduce_scatter")
def shards_are_chunks_of_the_sum(trial: Trial) -> None:
    """Rank r returns chunk r of the sum over all ranks."""
    require_shards(trial, trial.once(observe_even), of=torch.float32)
    require_own_memory(trial, "ring_reduce_scatter", lambda: trial.normal(3 * trial.num_ranks))


@check("ring_reduce_scatter", subgroup=False)
def any_size_is_reduced(trial: Trial) -> None:
    """Sizes that are not divisible by n, smaller than n, 0-dim, many dimensions: no element is lost."""
    require_shards(trial, trial.once(observe_odd), "Pad to n chunks of equal size, or make the last shorter.")


@check("ring_reduce_scatter")
def any_dtype_is_reduced(trial: Trial) -> None:
    """Whole numbers are summed exactly, float64 in float64; a shard has the tensor's dtype."""
    require_shards(trial, trial.once(observe_even), "Keep the tensor's dtype, on the wire and in the sum.")


@check("ring_reduce_scatter", world_sizes=(2, 3), subgroup=False)
def tensors_need_not_be_contiguous(trial: Trial) -> None:
    """A tensor that does not lie in one piece of memory is summed as well."""
    seen = trial.once(observe_layouts)
    require_shards(
        trial,
        seen,
        "flatten() and reshape() give the elements in the order of their indices, wherever they lie.",
    )
    require_untouched(trial, seen, partial_sums)


@check("ring_reduce_scatter", world_sizes=(2, 4), subgroup=False)
def nothing_is_used_before_it_arrived(trial: Trial) -> None:
    """When messages are slow, the sums are still right."""
    require_shards(
        trial,
        trial.once(observe_slow),
        "Wait for the receive before you add what came, and for the send before you change what is sent.",
    )


@check("ring_reduce_scatter")
def input_is_unchanged(trial: Trial) -> None:
    """The tensor that was handed over is the same afterwards."""
    require_untouched(trial, trial.once(observe_even), partial_sums)


@check("ring_reduce_scatter", subgroup=False)
def only_messages_are_used(trial: Trial) -> None:
    """It is made of isend and irecv, which bring what comes out: no collective is called."""
    for observe in (observe_even, observe_odd):
        require_messages_alone(trial, trial.once(observe))
    require_carried(trial, "ring_reduce_scatter", lambda _: [trial.normal(12)])


@check("ring_reduce_scatter")
def only_neighbours_talk(trial: Trial) -> None:
    """A rank sends to its neighbours in the ring alone."""
    require_neighbours(trial, trial.once(observe_even))


@check("ring_reduce_scatter", subgroup=False)
def each_rank_sends_its_share_of_the_bytes(trial: Trial) -> None:
    """A rank sends (n-1)/n of the tensor's bytes, chunks rounded up."""
    for observe in (observe_even, observe_odd):
        require_ring_bytes(trial, trial.once(observe), rounds=1)


@check("ring_reduce_scatter")
def every_message_is_waited_for(trial: Trial) -> None:
    """Every isend and irecv is over when the call returns."""
    require_waits(trial, trial.once(observe_even))
