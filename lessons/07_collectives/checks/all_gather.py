"""Checks of `ring_all_gather`: every rank gets all shards, in the order of ranks."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Fault, Trial, check, exercise

from .carried import require_carried
from .cases import (
    IN_FLOAT32,
    IN_FLOAT64,
    Case,
    ask,
    draw,
    dtypes,
    fits_any,
    layouts,
    require_own_memory,
    require_tensors,
    require_untouched,
)
from .ring_rules import other_rules
from .traffic import direction, require_messages_alone, require_neighbours, require_ring_bytes, require_waits

exercise(
    "ring_all_gather",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "A shard is only copied: what you received in one step you send on in the next.",
        "In step s = 0 ... n - 2 rank r sends the shard of rank (r - s) % n. Whose shard does it receive?",
        "Write each shard to its owner's place in new_empty(n, *shard.shape), then flatten(0, 1).",
    ),
)


def observe_plain(trial: Trial) -> SimpleNamespace:
    few = dtypes(trial, torch.float64, torch.int64, torch.uint8)
    many = [draw(trial, 200, dtype=kind) for kind in (torch.bfloat16, torch.bool)]
    return ask(trial, "ring_all_gather", [draw(trial, trial.integer(200, 400)), *few, *many])


def observe_shapes(trial: Trial) -> SimpleNamespace:
    cases = [draw(trial, 1), draw(trial, 3, 5), draw(trial, 1, 7), draw(trial, 2, 3, 4)]
    return ask(trial, "ring_all_gather", cases)


def observe_layouts(trial: Trial) -> SimpleNamespace:
    return ask(trial, "ring_all_gather", layouts(trial))


def observe_slow(trial: Trial) -> SimpleNamespace:
    return ask(trial, "ring_all_gather", [draw(trial, 20_000)], delays=True)


TWO_BUFFERS = (
    "the place that was filled in step s shows what came in step s + 2, or later: two buffers are received "
    "into by turns, and the result still refers to them"
)
COPY_WHAT_CAME = "Copy what came to its place, or receive into new memory in each step."


def slips(case: Case, actual: list[Tensor], way: int) -> dict[str, Any]:
    """What known slips would have gathered, or a ring with another rule."""
    n = len(case.values)

    def joined(order: list[int]) -> Tensor:
        return torch.cat([case.values[i % n] for i in order])

    def two_buffers(own: bool) -> Fault:
        """What came in step t is gone after step t + 2; the `own` shard, as if it came in step 0."""

        def seen(t: int) -> int:
            return t if t == 0 and not own else n - 1 - (n - 1 - t) % 2

        steps = [[seen(way * (r - s) % n) for s in range(n)] for r in range(n)]
        return Fault([joined([r - way * t for t in steps[r]]) for r in range(n)], COPY_WHAT_CAME)

    known = {
        "this rank's own shard, n times": [joined([r] * n) for r in range(n)],
        "every other place holds the shard that came last: one buffer for all rounds stands in all of them": [
            joined([r + way if s != r else r for s in range(n)]) for r in range(n)
        ],
        TWO_BUFFERS: two_buffers(own=False),
        f"{TWO_BUFFERS}. Rank r's own shard lay in one of them": two_buffers(own=True),
        "every other place holds the neighbour's shard: in each step a rank sends its own shard again, "
        "not the one that has just come": [
            joined([r - way if s != r else r for s in range(n)]) for r in range(n)
        ],
        "the shards in the order in which they came, own shard first: rank 0's belongs first": [
            joined([r - s for s in range(n)]) for r in range(n)
        ],
        "the shards in the order of the ring, own shard first: rank 0's belongs first": [
            joined([r + s for s in range(n)]) for r in range(n)
        ],
        "the shards from the last rank to the first": joined(list(range(n))[::-1]),
        "each shard stands one place too far": joined([s - 1 for s in range(n)]),
        "each shard stands one place too early": joined([s + 1 for s in range(n)]),
    }
    if case.values[0].dtype in (torch.int64, torch.float64):
        shards = torch.cat(case.values)
        rounded = {IN_FLOAT32: shards.float().to(shards.dtype)}
        if shards.dtype == torch.int64:
            rounded[IN_FLOAT64] = shards.double().long()
        if fits_any(actual, rounded):
            return rounded
    whole = all(a.shape[:1] == (n * len(value),) for a, value in zip(actual, case.values, strict=True))
    if whole and (sure := without_own(case, actual)):
        return sure
    return known if fits_any(actual, known) else other_rules(case, actual, way, reduces=False)


def without_own(case: Case, actual: list[Tensor]) -> dict[str, list[Tensor]]:
    """What was gathered, if it is right but for this rank's own shard, or nobody sent his own."""
    n = len(case.values)
    places = [a.chunk(n) for a in actual]
    others = (torch.equal(places[r][s], case.values[s]) for r in range(n) for s in range(n) if s != r)
    if n > 1 and all(others):
        return {"this rank's own shard is missing: its place holds what was in memory before": actual}
    bits = [a.flatten().view(torch.uint8) for a in actual]
    alike = all(torch.equal(each, bits[0]) for each in bits)
    if alike and not any(torch.equal(place, value) for place in places[0] for value in case.values):
        told = "all ranks have the same, with no shard in it: what a rank sends first is not its shard"
        return {told: actual}
    return {}


def require_gathered(
    trial: Trial, seen: SimpleNamespace, help: str = "", of: torch.dtype | None = None
) -> None:
    """Every rank has the shards joined along dim 0."""
    for i, (case, answers) in enumerate(zip(seen.cases, seen.answers, strict=True)):
        if of not in (None, case.values[0].dtype):
            continue
        require_tensors(trial, case, answers)
        actual = [answer["returned"] for answer in answers]
        trial.close(
            f"what was gathered of {case}",
            actual,
            torch.cat(case.values),
            alternatives=partial(slips, case, actual, direction(seen.recordings, i)),
            rtol=0.0,
            help=help or "Which rank made the shard that arrives in step s? It belongs in that rank's place.",
        )


@check("ring_all_gather")
def shards_stand_in_the_order_of_ranks(trial: Trial) -> None:
    """Every rank returns all shards, rank 0's first."""
    require_gathered(trial, trial.once(observe_plain), of=torch.float32)
    require_own_memory(trial, "ring_all_gather", lambda: trial.normal(5, 3))


@check("ring_all_gather", subgroup=False)
def shards_are_joined_along_dim_0(trial: Trial) -> None:
    """(m, ...) becomes (n·m, ...): one element, two and three dimensions."""
    require_gathered(trial, trial.once(observe_shapes), "As torch.cat(shards) would: dim 0 grows by n.")


@check("ring_all_gather")
def any_dtype_is_gathered(trial: Trial) -> None:
    """Whole numbers, truth values, float64 and bfloat16 arrive bit for bit."""
    require_gathered(trial, trial.once(observe_plain), "Send the tensor's own dtype.")


@check("ring_all_gather")
def input_is_unchanged(trial: Trial) -> None:
    """The shard that was handed over is the same afterwards."""
    require_untouched(trial, trial.once(observe_plain))


@check("ring_all_gather", world_sizes=(2, 3), subgroup=False)
def shards_need_not_be_contiguous(trial: Trial) -> None:
    """A shard that does not lie in one piece of memory is gathered as well."""
    seen = trial.once(observe_layouts)
    require_gathered(trial, seen, "Only contiguous tensors travel: copy it first.")
    require_untouched(trial, seen)


@check("ring_all_gather", world_sizes=(2, 4), subgroup=False)
def nothing_is_used_before_it_arrived(trial: Trial) -> None:
    """When messages are slow, the shards are still right."""
    require_gathered(
        trial,
        trial.once(observe_slow),
        "Wait for the receive before you send on what came, or copy it to its place.",
    )


@check("ring_all_gather", subgroup=False)
def only_messages_are_used(trial: Trial) -> None:
    """It is made of isend and irecv, which bring what comes out: no collective is called."""
    for observe in (observe_plain, observe_shapes):
        require_messages_alone(trial, trial.once(observe))
    require_carried(trial, "ring_all_gather", lambda _: [trial.normal(12)])


@check("ring_all_gather")
def only_neighbours_talk(trial: Trial) -> None:
    """A rank sends to its neighbours in the ring alone."""
    require_neighbours(trial, trial.once(observe_plain))


@check("ring_all_gather", subgroup=False)
def each_rank_sends_its_share_of_the_bytes(trial: Trial) -> None:
    """A rank sends n - 1 shards: (n-1)/n of the gathered tensor's bytes."""
    require_ring_bytes(trial, trial.once(observe_plain), rounds=1, gathered=True)


@check("ring_all_gather")
def every_message_is_waited_for(trial: Trial) -> None:
    """Every isend and irecv is over when the call returns."""
    require_waits(trial, trial.once(observe_plain))
