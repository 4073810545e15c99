"""Ranks as machines, for the checks of `hybrid_shard`: their meshes, their groups, and runs on them."""

from typing import Any

from grader.checks import CheckEnded, Trial, Verdict

from . import runs

Machines = list[list[int]]
"""World ranks, a row for each machine."""

NAMES = ("replicate", "shard")


def arrangements(trial: Trial) -> list[Machines]:
    """Ranks as machines: neighbours in one, or every other rank; machines of one rank; one machine."""
    if trial.num_ranks == 4:
        return [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]]]
    return [[[0, 1]], [[0], [1]]]


def run(trial: Trial, function: Any, *args: Any, **kwargs: Any) -> list:
    """Runs a function on the ranks; a crash over a hook or over a rank of the world is told as that."""
    try:
        return runs.run(trial, function, *args, **kwargs)
    except CheckEnded as end:
        if end.verdict == Verdict.CRASHED and "is not part of group" in end.message:
            end.cause = "src and dst are ranks of the world; group_src and group_dst count in the group"
        raise


def groups_of(machines: Machines, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """World ranks of this rank's machine, and of those that hold the same shards."""
    row = next(row for row in machines if rank in row)
    return tuple(row), tuple(other[row.index(rank)] for other in machines)


def told(machines: Machines) -> str:
    rows = [f"({', '.join(map(str, row))})" for row in machines]
    return f"{'machines' if len(rows) > 1 else 'one machine'} of ranks {' and '.join(rows)}"


def hybrid(rank: Any, model: Any, machines: Machines) -> Any:
    """On a rank: a model in what the learner's function makes of it."""
    return rank.submission.hybrid_shard(model.to(rank.device), rank.mesh(machines, NAMES))
