"""Meshes of ranks: how they are drawn, made on a rank, and where each rank lies in them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

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

APART = "apart"
"""Along it stand meshes side by side: each has some of the world's ranks only, and not the first ones."""

PARTS: dict[int, list[Sizes]] = {
    4: [{"data": 2, "context": 1, "tensor": 1, APART: 2}],
    2: [{"data": 1, "context": 1, "tensor": 1, APART: 2}],
    1: [],
}
"""Number of ranks → meshes that have some of them only."""


def meshes_on(rank: Any, all_sizes: Sequence[Sizes]) -> list[DeviceMesh]:
    """On a rank: the meshes, all of them before one is used.

    A rank that waits for others to make a mesh looks busy for as long as they hang in the mesh before. Of
    meshes that stand side by side, it gets its own.
    """
    return [mesh_on(rank, sizes) for sizes in all_sizes]


def mesh_on(rank: Any, sizes: Sizes) -> DeviceMesh:
    names, shape = zip(*sizes.items(), strict=True)
    mesh = rank.mesh(torch.arange(math.prod(shape)).view(shape).tolist(), names)
    return mesh[tuple(name for name in names if name != APART)] if APART in names else mesh


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
    dims = " × ".join(f"{dim} {size}" for dim, size in sizes.items() if dim != APART)
    return f"{dims} (one of {sizes[APART]} side by side)" if APART in sizes else dims


def meshes(trial: Trial) -> list[Sizes]:
    """Those of this number of ranks."""
    return THREE[trial.num_ranks]


def parts(trial: Trial) -> list[Sizes]:
    """Those that have some of the world's ranks only."""
    return PARTS[trial.num_ranks]


def which_mesh(rank: int, sizes: Sizes) -> int:
    """Of meshes that stand side by side, the one that this rank is in."""
    return place(rank, sizes).get(APART, 0)
