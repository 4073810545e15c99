"""Checks of `group_along`: which ranks differ in one coordinate alone."""

import math
from functools import reduce
from types import SimpleNamespace
from typing import Any

from grader.checks import CheckEnded, Trial, check, exercise

from .meshes import Sizes, ranks_along

exercise(
    "group_along",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Write down torch.arange(12).view(2, 3, 2), and look along each of its dimensions. By how much "
        "do neighbours differ there?",
        "That step is the product of the sizes of all dimensions further in. A coordinate is "
        "rank // step % size.",
        "Go back by coordinate · step to the first rank of the group, and from there on by steps. Or lay "
        "torch.arange out, and pick the line that has the rank in it.",
    ),
)

MESHES: list[Sizes] = [
    {"data": 2, "tensor": 2},
    {"data": 2, "context": 3, "tensor": 4},
    {"tensor": 4, "data": 3},
    {"data": 1, "context": 2, "tensor": 2},
    {"replicas": 2, "data": 2, "context": 2, "tensor": 2},
    {"data": 5},
    {"data": 3, "context": 1, "tensor": 2},
]


def probe(rank: Any, calls: list) -> list[dict]:
    found = []
    for number, sizes, dim in calls:
        given = dict(sizes)
        answer = rank.submission.group_along(number, given, dim)
        kind = "None" if answer is None else f"a {type(answer).__name__}"
        answer = answer if isinstance(answer, list) else None
        found.append({"answer": answer, "kind": kind, "changed": given != sizes})
    return found


def observe(trial: Trial) -> SimpleNamespace:
    drawn = {"data": trial.integer(2, 4), "context": trial.integer(2, 4), "tensor": trial.integer(5, 7)}
    calls = [
        (rank, sizes, dim)
        for sizes in [*MESHES, drawn]
        for rank in range(math.prod(sizes.values()))
        for dim in sizes
    ]
    try:
        results = trial.run(probe, calls)[0]
    except CheckEnded as end:
        if "torch.distributed" in end.message or "process group" in end.message:
            end.cause = "it asks torch.distributed, and there is no process group here: none is needed"
            end.help = "`rank` and `sizes` say all: compute it from them."
        raise
    return SimpleNamespace(calls=calls, results=results)


def seen_lists(trial: Trial, wanted: Any = lambda *call: True) -> SimpleNamespace:
    """What was seen, if the answers to the calls that are wanted are lists."""
    seen = trial.once(observe)
    for (rank, sizes, dim), result in zip(seen.calls, seen.results, strict=True):
        trial.require(
            result["answer"] is not None or not wanted(rank, sizes, dim),
            f"group_along({rank}, {sizes}, {dim!r}) gave {result['kind']}, where a list belongs",
            help="Return a list of ranks.",
        )
    return seen


def cause(seen: SimpleNamespace) -> str:
    """A slip that gives every answer."""
    slips = {
        "the first dimension is taken for the innermost": lambda r, s, d: ranks_along(
            r, dict(reversed(s.items())), d
        ),
        "neighbours along every dimension: this is so for the innermost alone": lambda r, s, d: tuple(
            range(r // s[d] * s[d], r // s[d] * s[d] + s[d])
        ),
        "these are the ranks that have the same coordinate, and not those that differ in it alone": (
            lambda r, s, d: tuple(
                o for o in range(math.prod(s.values())) if coordinate(o, s, d) == coordinate(r, s, d)
            )
        ),
        "a line of the mesh, but not the one that the rank is in: rank // size finds it along the last "
        "dimension alone": lambda r, s, d: line(r // s[d], s, d),
        "the group of rank 0": lambda r, s, d: ranks_along(0, s, d),
        "the dimension is looked for by its size, and another one is as large: look for its name": (
            lambda r, s, d: ranks_along(r, s, list(s)[list(s.values()).index(s[d])])
        ),
        "the coordinates along the dimensions further out are lost: the group lies where they are 0, and the "
        "rank itself is not in it": lambda r, s, d: ranks_along(r % within(s, d), s, d),
        "the coordinates along the dimensions further in are lost: the group lies where they are 0": (
            lambda r, s, d: ranks_along(r // within(s, d) * within(s, d), s, d)
        ),
        "a rank's number is put together of its coordinates with the size of the dimension that was asked "
        "for, where the size of each belongs": joined_by_one_size,
    }
    answers = [tuple(result["answer"] or ()) for result in seen.results]
    if all(sorted(given) == [*ranks_along(*call)] for given, call in zip(answers, seen.calls, strict=True)):
        return "these are the right ranks, and not in ascending order"
    for words, slip in slips.items():
        if all(given == slip(*call) for given, call in zip(answers, seen.calls, strict=True)):
            return words
    return ""


def joined_by_one_size(rank: int, sizes: Sizes, dim: str) -> tuple[int, ...]:
    """A group whose ranks' numbers are made of coordinates as if all dimensions had this one's size."""
    own = {name: coordinate(rank, sizes, name) for name in sizes}
    digits = [[own[name] if name != dim else i for name in sizes] for i in range(sizes[dim])]
    return tuple(reduce(lambda number, digit: number * sizes[dim] + digit, each, 0) for each in digits)


def line(number: int, sizes: Sizes, dim: str) -> tuple[int, ...]:
    """The group that stands in this place if all groups along a dimension are listed by their first ranks."""
    ranks = range(math.prod(sizes.values()))
    return sorted({ranks_along(rank, sizes, dim) for rank in ranks})[number]


def within(sizes: Sizes, dim: str) -> int:
    """How many ranks there are along a dimension and all that are further in."""
    names = list(sizes)
    return math.prod(sizes[name] for name in names[names.index(dim) :])


def coordinate(rank: int, sizes: Sizes, dim: str) -> int:
    """A rank's place along one dimension."""
    return ranks_along(rank, sizes, dim).index(rank)


def require(trial: Trial, wanted: Any, help: str) -> None:
    seen = seen_lists(trial, wanted)
    for call, result in zip(seen.calls, seen.results, strict=True):
        rank, sizes, dim = call
        right = list(ranks_along(*call))
        if wanted(*call) and result["answer"] != right:
            trial.wrong(
                f"group_along({rank}, {sizes}, {dim!r}) is {result['answer']!r}; expected: {right}",
                cause=cause(seen),
                asked=help,
            )


@check("group_along")
def innermost_ranks_are_neighbours(trial: Trial) -> None:
    """Along the last dimension, the ranks of a group follow one another."""
    require(
        trial,
        lambda rank, sizes, dim: dim == list(sizes)[-1],
        "Ranks 0 to t-1 are the first group along an innermost dimension of t ranks. A list, in order.",
    )


@check("group_along")
def outer_ranks_are_strides_apart(trial: Trial) -> None:
    """Along any other dimension they are as far apart as all dimensions further in have ranks together."""
    require(
        trial,
        lambda rank, sizes, dim: dim != list(sizes)[-1],
        "Every coordinate but one stays. Neighbours along a dimension are a product of sizes apart.",
    )


@check("group_along")
def every_rank_is_in_its_own_group(trial: Trial) -> None:
    """The group has `rank` itself in it, and as many ranks as the dimension; the sizes stay as given."""
    seen = seen_lists(trial)
    for (rank, sizes, dim), result in zip(seen.calls, seen.results, strict=True):
        told = f"group_along({rank}, {sizes}, {dim!r}) is {result['answer']!r}"
        answer = result["answer"]
        whole = all(type(each) is int for each in answer)
        trial.require(whole, f"{told}, not a list of whole numbers", help="Return a list of ranks.")
        trial.require(rank in answer, f"{told}, where rank {rank} itself is missing")
        trial.require(len(set(answer)) == sizes[dim], f"{told}: expected {sizes[dim]} ranks")
        trial.require(not result["changed"], "the given sizes were changed", help="Work on a copy.")
