"""Checks of `rows_of`: who gets which rows of the batch."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grader.checks import Trial, check, exercise
from grader.checks import told as told_events

from .meshes import APART, Sizes, meshes, meshes_on, parts, place, ranks_along, told

exercise(
    "rows_of",
    world_sizes=(4, 2, 1),
    hints=(
        "Which of the three techniques wants the same rows on all its ranks, and which wants others?",
        'mesh.get_group("data") is the group of the ranks that differ from this one along "data" alone.',
        "Lesson 08's shard_batch cuts a batch over a group.",
    ),
)


def probe(rank: Any, all_sizes: list[Sizes], batches: list[Tensor]) -> list[dict]:
    found = []
    for mesh in meshes_on(rank, all_sizes):
        before = [batch.clone() for batch in batches]
        with rank.record() as recording:
            shares = [share_of(rank, batch, mesh) for batch in batches]
        again = [share_of(rank, batch, mesh) for batch in batches]
        found.append(
            {
                "shares": [share.clone() if isinstance(share, Tensor) else None for share in shares],
                "unchanged": all(torch.equal(a, b) for a, b in zip(before, batches, strict=True)),
                "recording": recording,
                "anew": [not torch.equal(*pair) for pair in zip(shares, again, strict=True)]
                if all(isinstance(share, Tensor) for share in (*shares, *again))
                else [],
            }
        )
    return found


def share_of(rank: Any, batch: Tensor, mesh: Any) -> Tensor:
    """On a rank: its rows; where too few pieces were cut, the error says so."""
    try:
        return rank.submission.rows_of(batch, mesh)
    except IndexError as error:
        n = mesh.get_group("data").size()
        if len(batch) % n:
            error.add_note(
                f"b = {len(batch)} is not divisible by {n}: chunk and split may make fewer pieces than there "
                "are ranks, where tensor_split makes one for each"
            )
        elif mesh.size() < dist.get_world_size():
            error.add_note(
                f"the mesh has ranks {mesh.mesh.flatten().tolist()} of the world alone, and this rank is "
                f'number {mesh.get_local_rank("data")} of the {n} along its "data": a number among all ranks '
                "of the world is no place in it"
            )
        else:
            sizes = ", ".join(f'"{name}": {mesh.size(i)}' for i, name in enumerate(mesh.mesh_dim_names))
            error.add_note(
                f"in a mesh of {sizes}, where this rank is number {mesh.get_local_rank('data')} of the {n} "
                f'along "data": was the batch cut into {n} pieces, or into as many as another dimension has '
                "ranks?"
            )
        raise


def observe(trial: Trial) -> SimpleNamespace:
    """Row i has numbers that begin with i. The first batch divides; the last is not enough for four."""
    rows = [8, 4 * trial.integer(1, 2) + 3, 13, 1]
    batches = [10 * torch.arange(b).unsqueeze(1) + torch.arange(3) for b in rows]
    batches[2] = torch.stack([batches[2], batches[2] + 3], dim=-1)  # (b, 3, 2)
    plans = [*meshes(trial), *parts(trial)]
    results = trial.run(probe, plans, batches)
    return SimpleNamespace(plans=plans, batches=batches, rows=rows, results=results)


def rows_in(share: Tensor | None, batch: Tensor) -> list[int] | None:
    """Which rows of the batch these are; None where they are none."""
    if share is None or share.shape[1:] != batch.shape[1:] or is_cast(share, batch):
        return None
    numbers = (share.flatten(1)[:, 0] // 10).tolist()
    whole = all(0 <= i < len(batch) for i in numbers) and torch.equal(share, batch[numbers])
    return numbers if whole else None


def is_cast(share: Tensor, batch: Tensor) -> bool:
    """Whether there are rows, in another dtype than the batch's."""
    return len(share) > 0 and share.dtype != batch.dtype


def no_rows(share: Tensor | None, batch: Tensor) -> tuple[str, str]:
    """What is no rows of a batch, in words, and the next step."""
    if share is None:
        return "what is no tensor", "Return this rank's rows of the batch."
    rest = batch.shape[1:]
    if share.shape[1:] == rest and is_cast(share, batch):
        return (
            f"{share.dtype}, where the batch is {batch.dtype}",
            "Cut the batch, and cast nothing: who looks tokens up or compares them needs them as they are.",
        )
    if share.shape[1:] == rest:
        return (
            "numbers that are not rows of it",
            "Cut the batch, and leave the numbers in its rows as they are.",
        )
    cut = share.dim() == batch.dim() and any(a < b for a, b in zip(share.shape[1:], rest, strict=True))
    return f"{tuple(share.shape)}, where rows of it are {(*share.shape[:1], *rest)}", (
        "Rows are cut, and columns stay: context parallelism cuts tokens by itself."
        if cut
        else "Cut the first dimension. All dimensions behind it stay as they are."
    )


def found(trial: Trial, apart: bool = False) -> list[tuple[Sizes, int, list[list[int] | None]]]:
    """Mesh, number of the batch, and the rows by rank; with `apart`, of meshes that are not the world."""
    seen = trial.once(observe)
    return [
        (sizes, i, [rows_in(result[m]["shares"][i], batch) for result in seen.results])
        for m, sizes in enumerate(seen.plans)
        if apart == (APART in sizes)
        for i, batch in enumerate(seen.batches)
    ]


@check("rows_of")
def every_share_is_rows(trial: Trial) -> None:
    """A rank gets whole rows of the batch."""
    seen = trial.once(observe)
    for m, sizes in enumerate(seen.plans):
        for i, batch in enumerate(seen.batches if APART not in sizes else ()):
            for rank, result in enumerate(seen.results):
                share = result[m]["shares"][i]
                what, step = no_rows(share, batch)
                trial.require(
                    rows_in(share, batch) is not None,
                    f"a batch {tuple(batch.shape)} on a mesh of {told(sizes)} gave {what}",
                    help=step,
                    rank=rank,
                )


OTHERS_AT_EACH_CALL = (
    "a second call with the same batch gives other rows: are they drawn, or shuffled, by each rank's own "
    "random numbers?"
)


def why_they_differ(by_rank: list[list[int] | None], sizes: Sizes) -> str:
    """Why ranks with the same place along data have other rows; "" where that is unknown."""
    for dim in sizes:
        by_place = {place(rank, sizes)[dim]: rows for rank, rows in enumerate(by_rank)}
        same = all(rows == by_place[place(rank, sizes)[dim]] for rank, rows in enumerate(by_rank))
        if same and len(set(map(str, by_place.values()))) == sizes[dim] > 1:
            return (
                f'rows go by the place along "{dim}": is a dimension asked for by its number, or the place '
                "worked out from the rank's?"
            )
    if sum(len(each or ()) for each in by_rank) <= max(max(each or [0]) for each in by_rank) + 1:
        return "ranks along context and tensor have rows of their own, where they read the same ones"
    return ""


@check("rows_of")
def a_replica_has_one_set_of_rows(trial: Trial) -> None:
    """Ranks with the same place along "data" get the same rows, wherever "data" stands in the mesh."""
    seen = trial.once(observe)
    anew = any(each for result in seen.results for mesh in result for each in mesh["anew"])
    for sizes, _, by_rank in found(trial):
        first: dict[int, int] = {}
        for rank, rows in enumerate(by_rank):
            other = first.setdefault(place(rank, sizes)["data"], rank)
            trial.require(
                rows == by_rank[other],
                f'ranks {other} and {rank} have the same place along "data" in a mesh of {told(sizes)}, '
                f"and rows {by_rank[other]} and {rows}",
                cause=OTHERS_AT_EACH_CALL if anew else why_they_differ(by_rank, sizes),
                help="Cut the batch as it comes: whoever loads it has shuffled it."
                if anew
                else "Ask the mesh for the place along data. Rank numbers alone do not tell it.",
            )


def read_twice(shares: list[list[int]], b: int) -> str:
    """Which rows of a batch were added to shares that are as long as each other; "" if that is not so."""
    taken = sorted(row for share in shares for row in share)
    twice = sorted((Counter(taken) - Counter(range(b))).elements())
    if not twice or sorted([*range(b), *set(twice)]) != taken or len(set(map(len, shares))) > 1:
        return ""
    rows = f"row {twice[0]} is" if len(twice) == 1 else f"rows {', '.join(map(str, twice))} are"
    as_torch = ", as DistributedSampler does" if twice == list(range(len(twice))) else ""
    return f"{rows} read twice, to make the shares equal{as_torch}"


@check("rows_of")
def together_they_are_the_batch(trial: Trial) -> None:
    """The shares along "data" are disjoint, and together the batch; two of them differ by at most one row."""
    seen = trial.once(observe)
    for sizes, i, by_rank in found(trial):
        for rank in range(trial.num_ranks):
            shares = [by_rank[other] or [] for other in ranks_along(rank, sizes, "data")]
            taken = sorted(row for share in shares for row in share)
            trial.require(
                taken == list(range(seen.rows[i])),
                f'the ranks along "data" from rank {rank} in a mesh of {told(sizes)} have rows {shares} '
                f"of {seen.rows[i]}",
                help='Cut over the ranks along "data", also where they do not divide b.',
                cause=read_twice(shares, seen.rows[i]),
            )
            lengths = [len(share) for share in shares]
            trial.require(
                max(lengths) - min(lengths) <= 1,
                f"shares of {lengths} rows differ by more than one ({told(sizes)})",
                help="tensor_split deals out what does not divide a row at a time.",
            )


@check("rows_of", world_sizes=(4, 2))
def the_world_may_be_larger(trial: Trial) -> None:
    """A mesh may have some of the world's ranks only: these alone share the batch."""
    seen = trial.once(observe)
    cases = found(trial, apart=True)
    n = trial.num_ranks
    by_all = all(
        by_rank == [share.tolist() for share in torch.arange(seen.rows[i]).tensor_split(n)]
        for _, i, by_rank in cases
    )
    for sizes, i, by_rank in cases:
        for rank in range(n):
            members = ranks_along(rank, sizes, "data")
            shares = [by_rank[other] for other in members]
            trial.require(
                sorted(row for share in shares for row in share or ()) == list(range(seen.rows[i])),
                f"in a world of {n} ranks, a mesh of {told(sizes)} has the ranks {list(members)}, and these "
                f"have rows {shares} of {seen.rows[i]}",
                cause="the batch is cut over all ranks of the world" if by_all else "",
                help="Ask the mesh for the place along data: ranks of the world lie elsewhere in it.",
            )


@check("rows_of")
def nothing_is_sent(trial: Trial) -> None:
    """Every rank has the whole batch already: nothing is sent, and the batch stays as it is."""
    seen = trial.once(observe)
    for r, result in enumerate(seen.results):
        for each in result:
            events = each["recording"].select()
            trial.require(
                not events, f"this was sent: {told_events(events)}", help="Cut what is there.", rank=r
            )
            trial.require(each["unchanged"], "the given batch was changed", rank=r)
