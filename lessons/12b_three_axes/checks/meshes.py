"""Meshes of ranks: how they are drawn, made on a rank, and where each rank lies in them."""

import math
from collections.abc import Sequence
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


def meshes_on(rank: Any, all_sizes: Sequence[Sizes]) -> list[DeviceMesh]:
    """On a rank: the meshes, all of them before one is used, equal ones once.

    A rank that waits for others to make a mesh looks busy for as long as they hang in the mesh before.
    """
    made: dict[tuple, DeviceMesh] = {}
    for sizes in all_sizes:
        dims = tuple(sizes.items())
        if dims not in made:
            names, shape = zip(*dims, strict=True)
            made[dims] = init_device_mesh(rank.device.type, shape, mesh_dim_names=names)
    return [made[tuple(sizes.items())] for sizes in all_sizes]


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
