"""Checks of `two_level_all_reduce`: the sum on every rank, and little of it across machines."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import COLLECTIVES, Event, Fault, Recording, Trial, check, exercise, is_close

from .cases import (
    Case,
    draw,
    dtypes,
    lay_out,
    layouts,
    require_between,
    require_in_place,
    sizes,
    through_float64,
)
from .traffic import (
    NO_FILLING,
    OWN_DTYPE,
    SMALL,
    TOO_MUCH_FILLING,
    events,
    require_waits,
    rounded_up,
    wider_events,
)

exercise(
    "two_level_all_reduce",
    world_sizes=(4, 1, 2, 6),
    hints=(
        "After a reduce-scatter inside each machine, which rank of the other machine has the same chunk?",
        "That rank is in `outer`. What do the ranks of `outer` do with their shards?",
        "ring_reduce_scatter in inner, ring_all_reduce of the shard in outer, ring_all_gather in inner; then "
        "cut off the padding, as in ring_all_reduce.",
    ),
)

Machines = list[list[int]]
"""World ranks, a row for each machine."""

SHARES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How often a rank of n sends (n-1)/n of the tensor in PyTorch's collectives."""


def arrangements(trial: Trial) -> list[Machines]:
    """Ranks as machines; neighbours in one, or every other rank; one machine; machines of one rank."""
    n = trial.num_ranks
    wanted = {4: [[[0, 1], [2, 3]], [[0, 2], [1, 3]]], 6: [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]]}
    ends = [] if n > 4 else [[list(range(n))], *([[[r] for r in range(n)]] if n > 1 else [])]
    return [*wanted.get(n, []), *ends]


def told(machines: Machines) -> str:
    return "machines of ranks " + " and ".join(f"({', '.join(map(str, row))})" for row in machines)


def call(
    rank: Any, arranged: list[Machines], values: list[Tensor], layouts: list[str]
) -> list[dict[str, Any]]:
    """The probe: every case on every arrangement of machines."""
    found = []
    for machines in arranged:
        mesh = rank.mesh(machines, ("across", "inside"))
        inner, outer = mesh.get_group("inside"), mesh.get_group("across")
        answers = []
        with rank.record() as recording:
            for i, (value, layout) in enumerate(zip(values, layouts, strict=True)):
                tensor, between = lay_out(value, layout, rank.rank)
                memory = tensor.detach()
                recording.mark(f"{i}")
                rank.submission.two_level_all_reduce(tensor, inner, outer)
                recording.mark("after")
                answers.append({"tensor": tensor, "memory": memory, "between": between})
        found.append({"answers": answers, "recording": recording, "device": rank.device.type})
    return found


def ask(trial: Trial, cases: Sequence[Case], delays: bool = False) -> list[SimpleNamespace]:
    """For each arrangement: `answers[i][r]` is what rank r made of case i."""
    arranged = arrangements(trial)
    arranged = arranged[:1] if delays else arranged
    results = trial.run(
        call,
        arranged,
        per_rank=[
            ([case.values[r] for case in cases], [case.layout for case in cases])
            for r in range(trial.num_ranks)
        ],
        delays=delays,
    )
    return [
        SimpleNamespace(
            machines=machines,
            cases=list(cases),
            answers=[[result[k]["answers"][i] for result in results] for i in range(len(cases))],
            recordings=[result[k]["recording"] for result in results],
            device=results[0][k]["device"],
        )
        for k, machines in enumerate(arranged)
    ]


def observe_even(trial: Trial) -> list[SimpleNamespace]:
    kinds = (torch.float64, torch.int64, torch.int32)
    even = draw(trial, 12 * trial.integer(200, 400))
    return ask(trial, [even, draw(trial, 1200, dtype=torch.bfloat16), *dtypes(trial, *kinds)])


def observe_odd(trial: Trial) -> list[SimpleNamespace]:
    odd = draw(trial, 12 * trial.integer(200, 400) + 5)
    others = [draw(trial, number) for number in (200, 12 * 300 + 7, 12 * 300 + 2)]
    return ask(trial, [*sizes(trial), odd, *others])


def observe_layouts(trial: Trial) -> list[SimpleNamespace]:
    return ask(trial, layouts(trial))


def observe_slow(trial: Trial) -> list[SimpleNamespace]:
    return ask(trial, [draw(trial, 20_000 * trial.num_ranks)], delays=True)


ANY_SIZE = (
    "Every element takes the same three steps: ring_reduce_scatter fills up a size that does not divide, "
    "and the gathered tensor is cut to the size that was given."
)


def silent_where_alone(case: Case, seen: list[SimpleNamespace]) -> dict[str, Fault]:
    """That no rank sends anything where a group has one rank, if the sums are right everywhere else."""
    silent = [each.machines for each in seen if is_silent(each)]
    alone = ["`inner`" if len(m[0]) == 1 else "`outer`" for m in silent if 1 in (len(m), len(m[0]))]
    others_are_right = all(
        is_close(answer["tensor"], given.total)
        for each in seen
        if each.machines not in silent
        for given, answers in zip(each.cases, each.answers, strict=True)
        for answer in answers
    )
    if not others_are_right or not len(seen) > len(silent) == len(alone) > 0:
        return {}
    told = (
        f"what it held before: where {' or '.join(alone)} has one rank, no rank sends anything; elsewhere "
        "the sum is right"
    )
    step = (
        "A group of one rank has nothing to add: leave its part out, and do the other group's all the same."
    )
    return {told: Fault(case.values, step)}


def is_silent(each: SimpleNamespace) -> bool:
    """Whether no rank sends anything, whatever the case."""
    return not any(sent_bytes(event) for recording in each.recordings for event in recording.events)


def slips(case: Case, each: SimpleNamespace, seen: list[SimpleNamespace]) -> dict[str, list[Tensor] | Fault]:
    """What known slips would have left in the tensors on one arrangement of those that were seen."""
    if alone := silent_where_alone(case, seen):
        return alone
    n, total, machines = len(case.values), case.total, each.machines
    machine = {r: row for row in machines for r in row}
    across = {r: [row[machine[r].index(r)] for row in machines] for r in range(n)}

    def of(ranks: Sequence[int]) -> Tensor:
        return Case([case.values[r] for r in ranks]).total

    inside, outside = [of(machine[r]) for r in range(n)], [of(across[r]) for r in range(n)]
    size = len(machines[0])
    chunk = -(-case.num_elements // size)

    def mixed(sums: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
        """Only the rank's own chunk is of the sums."""
        rows = []
        for r in range(n):
            row, start = others[r].flatten().clone(), machine[r].index(r) * chunk
            row[start : start + chunk] = sums[r].flatten()[start : start + chunk]
            rows.append(row.view_as(total))
        return rows

    even = case.num_elements // size * size
    rest = "the left-over elements, where the size is not divisible by a machine's ranks, were "
    rounded = {
        rest + what: Fault(
            [torch.cat([total.flatten()[:even], row.flatten()[even:]]).view_as(total) for row in rows],
            ANY_SIZE,
        )
        for what, rows in {
            "not summed": case.values,
            "summed inside the machine alone, not across": inside,
            "summed across machines alone, not inside": outside,
        }.items()
    }
    known = rounded if 0 < even < case.num_elements else {}
    if 1 not in (size, len(machines)) or is_silent(each):  # else the sum over one rank is what it held before
        known |= {
            "the sum over this rank's machine alone: nothing was added across machines": inside,
            "the sum over `outer` alone: nothing was added inside the machine": outside,
        }
    return known | {
        "what it held before: the sum was not written into the tensor that was given": case.values,
        "every part counts as often as a machine has ranks: it was added up inside twice": [total * size] * n,
        "every part counts as often as there are machines: it was added up across twice": [
            total * len(machines)
        ]
        * n,
        "only this rank's own chunk holds the sum: nobody gathered the others": mixed(
            [total] * n, case.values
        ),
        "only this rank's own chunk holds the sum over all, and the rest the sum inside": mixed(
            [total] * n, inside
        ),
    }


def require_sums(trial: Trial, seen: list[SimpleNamespace], help: str, of: torch.dtype | None = None) -> None:
    """Every rank's tensor holds the sum, in place."""
    for each in seen:
        for case, answers in zip(each.cases, each.answers, strict=True):
            if of not in (None, case.values[0].dtype):
                continue
            for r, answer in enumerate(answers):
                dtype = answer["tensor"].dtype
                trial.require(
                    dtype == case.values[0].dtype,
                    f"given {case}, the tensor is {str(dtype).removeprefix('torch.')} after the call",
                    help="Keep the tensor's dtype.",
                    rank=r,
                )
            tensors = [answer["tensor"] for answer in answers]
            trial.close(
                f"the tensor ({case}; {told(each.machines)}) after the call",
                tensors,
                case.total,
                alternatives=through_float64(case, tensors, [case.total] * len(tensors))
                or partial(slips, case, each, seen),
                help=help,
                terms={f"rank {r}'s part": value for r, value in enumerate(case.values)},
            )
            require_in_place(trial, case, answers, case.total)


@check("two_level_all_reduce")
def every_rank_has_the_sum(trial: Trial) -> None:
    """After the call the tensor of every rank holds the sum over all ranks of all machines."""
    require_sums(
        trial,
        trial.once(observe_even),
        "Reduce-scatter in inner, all-reduce the shard in outer, all-gather in inner, copy into the tensor.",
        of=torch.float32,
    )


@check("two_level_all_reduce")
def any_size_is_reduced(trial: Trial) -> None:
    """Sizes that are not divisible by n or by m, smaller than n, 0-dim, many dimensions."""
    require_sums(
        trial,
        trial.once(observe_odd),
        "Every element is summed over all ranks, also where a size leaves a rest.",
    )


@check("two_level_all_reduce")
def any_dtype_is_reduced(trial: Trial) -> None:
    """Whole numbers are summed exactly, float64 in float64, and bfloat16 stays bfloat16."""
    require_sums(trial, trial.once(observe_even), "Keep the tensor's dtype, on the wire and in the sum.")


@check("two_level_all_reduce", world_sizes=(2, 4))
def tensors_need_not_be_contiguous(trial: Trial) -> None:
    """A tensor that does not lie in one piece of memory is summed in place as well, and nothing else is."""
    seen = trial.once(observe_layouts)
    require_sums(
        trial,
        seen,
        "flatten(), reshape() and contiguous() may return a copy: write the sum back with copy_().",
    )
    for each in seen:
        require_between(trial, each)


@check("two_level_all_reduce", world_sizes=(4,))
def nothing_is_used_before_it_arrived(trial: Trial) -> None:
    """When messages are slow, the sums are still right."""
    require_sums(trial, trial.once(observe_slow), "Wait for each step before the next one uses what came.")


@check("two_level_all_reduce")
def only_the_two_groups_talk(trial: Trial) -> None:
    """Every message and collective is in `inner` or in `outer`."""
    for each in trial.once(observe_even):
        for r, recording in enumerate(each.recordings):
            inner, outer = groups_of(each.machines, r)
            for event in recording.events:
                trial.require(
                    event.group in (inner, outer),
                    f"it calls {event.describe()} in a group of ranks {_listed(event.group)}, where inner is "
                    f"{_listed(inner)} and outer {_listed(outer)}",
                    help="Hand `inner` or `outer` on: a call without group= is in the group of all.",
                    rank=r,
                )


@check("two_level_all_reduce")
def little_goes_across_machines(trial: Trial) -> None:
    """Across machines a rank sends 2(m-1)/m · S/n, and inside 2(n-1)/n · S, chunks rounded up."""
    for seen in (trial.once(observe_even), trial.once(observe_odd)):
        for each in seen:
            for i, case in enumerate(each.cases):
                for r, recording in enumerate(each.recordings):
                    require_bytes(trial, each, case, i, r, recording)
            for r in range(trial.num_ranks):
                require_no_filling(trial, each, r)


def require_no_filling(trial: Trial, each: SimpleNamespace, r: int) -> None:
    """Not an element more for every shard, in all of the sizes that the number of ranks divides."""
    inner, outer = groups_of(each.machines, r)
    n = len(inner)
    filled = []
    for i, case in enumerate(each.cases):
        done = [event for event in events(each.recordings[r], i) if event.group in (inner, outer)]
        if case.num_elements % trial.num_ranks == 0 and len({event.dtype for event in done}) == 1:
            home = sum(sent_bytes(event) for event in done if event.group == inner)
            more = round(home - 2 * (n - 1) * case.num_bytes / n)
            filled.append((case, more, more == 2 * (n - 1) * case.values[0].element_size() > 0))
    if filled and all(an_element for *_, an_element in filled):
        case, more, _ = filled[0]
        trial.wrong(
            f"given {case} ({told(each.machines)}) it sends {more} bytes more inside its machine than "
            f"2(n-1)/n of S = {case.num_bytes:,}",
            cause=TOO_MUCH_FILLING,
            help=NO_FILLING,
            rank=r,
        )


def require_bytes(
    trial: Trial, each: SimpleNamespace, case: Case, i: int, r: int, recording: Recording
) -> None:
    """What one rank sends in each group in one case; where the groups are one, in both together."""
    m, n = len(each.machines), len(each.machines[0])
    inner, _ = groups_of(each.machines, r)
    size = case.values[0].element_size()
    slice_bytes = -(-case.num_elements // (n * m)) * size
    within = [event for event in events(recording, i) if event.group == inner]
    beyond = across_machines(each, i, r)
    allowed = 2 * (m - 1) * slice_bytes
    sent = sum(sent_bytes(event) for event in beyond)
    home = sum(sent_bytes(event) for event in within)
    calls = [event.describe() for event in beyond if event.kind in COLLECTIVES]
    cause = step = ""
    if wide := too_wide(case, beyond, allowed + SMALL * n * m):
        cause, step = wide
    elif n > 1 and sent > allowed and 2 * m * home <= 2.2 * (n - 1) * case.num_bytes / n * 2:
        cause = "inner and outer are swapped: the small part travels inside"
    elif m > 2 and abs(sent - (m - 1) * -(-case.num_elements // n) * size) <= SMALL * m:
        gather = f"{calls[0]}: " if calls else ""
        cause = f"{gather}every rank is sent all m shards whole, (m-1)·S/n, and adds them up by itself"
        step = "Across the machines all-reduce the shard: for m = 2 alone that sends as much."
    elif sent > allowed + SMALL * n * m and carries_the_whole(each, i, r):
        cause, step = whole_for_which_sizes(trial, each)
    elif len(calls) > 1:
        cause = f"the shard goes across more than once: {', '.join(calls[:3])}"
    trial.require(
        sent <= allowed + SMALL * n * m,
        f"given {case} ({told(each.machines)}) it sends {sent:,.0f} bytes across machines, where "
        f"2(m-1)/m · S/n of S = {case.num_bytes:,} is {allowed:,}{rounded_up(case, n * m)}",
        cause=cause,
        help=step
        or "Reduce-scatter inside first: then each rank of a machine carries only its n-th across, by an "
        "all-reduce.",
        rank=r,
    )
    allowed = 2 * (n - 1) * m * slice_bytes
    whole = "a whole all-reduce inside, and something more" if home >= 1.4 * allowed else ""
    cause, step = too_wide(case, within, allowed + SMALL * n * m) or (whole, "")
    trial.require(
        home <= allowed + SMALL * n * m,
        f"given {case} ({told(each.machines)}) it sends {home:,.0f} bytes inside its machine, where "
        f"2(n-1)/n of S = {case.num_bytes:,} is {allowed:,}{rounded_up(case, n * m)}",
        cause=cause,
        help=step or "Inside there is one reduce-scatter and one all-gather.",
        rank=r,
    )


def too_wide(case: Case, done: Sequence[Event], most: float) -> tuple[str, str] | None:
    """The dtype that travels, and the next step, if in the tensor's own there would be so few bytes."""
    size = case.values[0].element_size()
    wider = wider_events(done, size)
    in_its_own = sum(
        sent_bytes(event) * size * event.num_elements / max(event.num_bytes, 1) for event in done
    )
    if not wider or in_its_own > most:
        return None
    return f"what travels is {wider[0].dtype}, and the tensor is {case}", OWN_DTYPE


def across_machines(each: SimpleNamespace, i: int, r: int) -> list[Event]:
    """What one rank does in outer, unless that is inner."""
    inner, outer = groups_of(each.machines, r)
    return [event for event in events(each.recordings[r], i) if event.group == outer != inner]


def carries_the_whole(each: SimpleNamespace, i: int, r: int) -> bool:
    """Whether one rank sends the whole tensor across machines, in a call or in messages, and not an n-th."""
    m, n, case = len(each.machines), len(each.machines[0]), each.cases[i]
    beyond = across_machines(each, i, r)
    shard_bytes = -(-case.num_elements // (n * m)) * m * case.values[0].element_size()
    in_messages = all(event.kind not in COLLECTIVES for event in beyond)
    sent = sum(sent_bytes(event) for event in beyond)
    return n > 1 and (
        (in_messages and sent >= 2 * (m - 1) * case.num_bytes / m)
        or any(event.num_bytes > 1.5 * shard_bytes for event in beyond)
    )


def whole_for_which_sizes(trial: Trial, each: SimpleNamespace) -> tuple[str, str]:
    """Which tensors go across whole on these machines: all, or those of some sizes, with the next step."""
    m, n = len(each.machines), len(each.machines[0])
    alike = [one for observe in (observe_even, observe_odd) for one in trial.once(observe)]
    whole = [
        (case.num_elements, any(carries_the_whole(one, i, r) for r in range(n * m)))
        for one in alike
        if one.machines == each.machines
        for i, case in enumerate(one.cases)
        if case.num_bytes > SMALL * n * m
    ]
    for divisor, ranks in ((n, "a machine's"), (n * m, "all machines'")):
        if all(is_whole == (size % divisor > 0) for size, is_whole in whole):
            told = f"where the number of {ranks} ranks, {divisor}, does not divide its size, and only there"
            return f"the whole tensor goes across {told}: elsewhere it is a shard", ANY_SIZE
    return "the whole tensor goes across, not the shard of a reduce-scatter", ""


def sent_bytes(event: Event) -> float:
    """What a rank sends in one event."""
    if event.kind in ("recv", "barrier"):
        return 0
    n = len(event.group)
    return event.num_bytes * (SHARES[event.kind] * (n - 1) / n if event.kind in SHARES else 1 if n > 1 else 0)


def groups_of(machines: Machines, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """World ranks of inner and of outer."""
    row = next(row for row in machines if rank in row)
    return tuple(row), tuple(other[row.index(rank)] for other in machines)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


@check("two_level_all_reduce")
def everything_is_waited_for(trial: Trial) -> None:
    """Every message is over when the call returns."""
    for each in trial.once(observe_even):
        require_waits(trial, each)
