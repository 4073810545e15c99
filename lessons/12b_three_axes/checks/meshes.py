"""Meshes of ranks: how they are drawn, made on a rank, and where each rank lies in them."""

import math
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grader.checks import Trial

Sizes = dict[str, int]
"""Name of a dimension → number of ranks, the outermost first."""

THREE = {
    4: [
        {"data": 2, "context": 1, "tensor": 2},
        {"data": 2, "context": 2, "tensor": 1},
        {"data": 1, "context": 2, "tensor": 2},
        {"tensor": 2, "data": 2, "context": 1},
        {"data": 4, "context": 1, "tensor": 1},
    ],
    2: [{"tensor": 1, "data": 2, "context": 1}, {"data": 1, "context": 1, "tensor": 2}],
    1: [{"data": 1, "context": 1, "tensor": 1}],
}
"""Number of ranks → meshes with all three dimensions."""


def mesh_on(rank: Any, sizes: Sizes) -> DeviceMesh:
    """On a rank: the mesh."""
    return init_device_mesh(rank.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def place(rank: int, sizes: Sizes) -> Sizes:
    """The coordinates of a rank."""
    found = {}
    for dim in reversed(sizes):
        rank, found[dim] = divmod(rank, sizes[dim])
    return found


def ranks_along(rank: int, sizes: Sizes, dim: str) -> tuple[int, ...]:
    """The ranks that differ from this one in one coordinate alone."""
    own = place(rank, sizes)
    return tuple(
        other
        for other in range(math.prod(sizes.values()))
        if {**place(other, sizes), dim: 0} == {**own, dim: 0}
    )


def told(sizes: Sizes) -> str:
    """Such as "data 2 × context 1 × tensor 2"."""
    return " × ".join(f"{dim} {size}" for dim, size in sizes.items())


def meshes(trial: Trial) -> list[Sizes]:
    """Those of this number of ranks."""
    return THREE[trial.num_ranks]
