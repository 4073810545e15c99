"""The capstone with coordinates in hand: a copy counts on the first rank that has it."""

import torch
import torch.distributed as dist


def group_along(rank, sizes, dim):
    grid = torch.arange(torch.Size(sizes.values()).numel()).view(*sizes.values())
    lines = grid.movedim(list(sizes).index(dim), -1).reshape(-1, sizes[dim])
    return lines[(lines == rank).any(1)][0].tolist()


def rows_of(batch, mesh):
    """Every d-th row."""
    return batch[mesh.get_local_rank("data") :: mesh["data"].size()].clone()


def parallelize_on_mesh(model, mesh, techniques):
    names = mesh.mesh_dim_names
    for name in names:
        if name not in techniques:
            raise ValueError(name)
    if "tensor" in names:
        model = techniques["tensor"](model, mesh["tensor"].get_group())
    if "context" in names:
        model = techniques["context"](model, mesh["context"].get_group())
    if "data" in names:
        model = techniques["data"](model, mesh["data"].get_group())
    return model


def gradient_norm(gradients, cut_along, mesh):
    """The first rank along all dimensions that do not cut a parameter owns its copy."""
    names = mesh.mesh_dim_names
    owned = [
        g.float().norm()
        for name, g in gradients.items()
        if all(mesh.get_local_rank(dim) == 0 for dim in names if dim not in cut_along[name])
    ]
    square = torch.stack([torch.zeros((), device=mesh.device_type), *owned]).square().sum()
    for dim in names:
        dist.all_reduce(square, group=mesh.get_group(dim))
    return square**0.5


def bytes_by_axis(config, batch_size, sizes, zero3=False):
    d, c, t = sizes["data"], sizes["context"], sizes["tensor"]
    h, rows, length = config.n_embd, batch_size / d, config.block_size / c
    layer = 4 * h * h + 8 * h * h
    mine = (config.n_layer * layer + config.vocab_size * h) / t
    mine += h * (config.block_size + 2 * config.n_layer + 1)
    tensor = 0.0
    for _ in range(4 * config.n_layer + 2):
        tensor += 8 * (t - 1) / t * rows * length * h
    block = 4 * rows * length * h / t
    context = config.n_layer * 6 * (c - 1) * block + 8 * (c - 1) / c * mine
    return {"tensor": tensor, "context": context, "data": (12 if zero3 else 8) * (d - 1) / d * mine}


def weighed_loss(loss, targets, mesh):
    """All ranks of the mesh count, and all of them multiply."""
    counted = (targets >= 0).sum().float()
    total = counted.clone()
    for group in mesh.get_all_groups():
        dist.all_reduce(total, group=group)
    return loss * (counted * mesh.size() / total)
