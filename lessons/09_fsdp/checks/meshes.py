"""Ranks as machines, for the checks of `hybrid_shard`: their meshes, and their groups."""

from typing import Any

from grader.checks import Trial

Machines = list[list[int]]
"""World ranks, a row for each machine."""

NAMES = ("replicate", "shard")


def arrangements(trial: Trial) -> list[Machines]:
    """Ranks as machines: neighbours in one, or every other rank; machines of one rank; one machine."""
    if trial.num_ranks == 4:
        return [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]]]
    return [[[0, 1]], [[0], [1]]]


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
