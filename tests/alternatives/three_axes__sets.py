"""The capstone by sets of ranks: squares are sorted by what cuts them, and summed along that alone."""

from collections import defaultdict
from itertools import product

import torch
import torch.distributed as dist


def group_along(rank, sizes, dim):
    places = list(product(*(range(size) for size in sizes.values())))
    others = [i for i, name in enumerate(sizes) if name != dim]
    return [r for r, place in enumerate(places) if all(place[i] == places[rank][i] for i in others)]


def rows_of(batch, mesh):
    group = mesh.get_group("data")
    members = dist.get_process_group_ranks(group)
    n, r = len(members), members.index(dist.get_rank())
    share, more = divmod(len(batch), n)
    first = r * share + min(r, more)
    return batch[first : first + share + (r < more)]


def parallelize_on_mesh(model, mesh, techniques):
    stages = sorted(mesh.mesh_dim_names, key=["tensor", "context", "data"].index)
    if not set(stages) <= set(techniques):
        raise ValueError(f"no technique for {set(stages) - set(techniques)}")
    groups = dict(zip(mesh.mesh_dim_names, mesh.get_all_groups(), strict=True))
    for stage in stages:
        if groups[stage].size() > 1:
            model = techniques[stage](model, groups[stage])
    return model


def gradient_norm(gradients, cut_along, mesh):
    kinds = sorted({tuple(sorted(dims)) for dims in cut_along.values()})
    squares = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=mesh.device_type))
    for name, gradient in gradients.items():
        squares[tuple(sorted(cut_along[name]))] += torch.linalg.vector_norm(gradient.double()) ** 2
    whole = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    for kind in kinds:
        part = squares[kind]
        for dim in kind:
            dist.all_reduce(part, group=mesh.get_group(dim))
        whole += part
    return whole.sqrt().float()


def weighed_loss(loss, targets, mesh):
    """The value is everybody's mean already; what flows back is weighed."""
    counted = (targets != -1).sum()
    numbers = torch.stack([loss.detach() * counted, counted])
    dist.all_reduce(numbers, group=mesh.get_group("data"))
    total, everywhere = numbers
    own = loss * counted * mesh["data"].size() / everywhere
    return total / everywhere + own - own.detach()
