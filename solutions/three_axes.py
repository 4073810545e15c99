"""Tensor, context and data parallelism at once, each along a dimension of one mesh of ranks.

Ranks that differ in one coordinate alone form a group, in which one technique works as if it were on its
own. What is left to do by hand is who gets which rows, in which order the techniques are applied, and how
often a number counts that several ranks have.
Notation: b batch, s sequence length, h width, v vocabulary, L layers; d, c, t ranks along each dimension.
"""

import math
from collections.abc import Callable, Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from nanogpt.model import GPT, GPTConfig
from solutions.data_parallel import shard_batch


def group_along(rank: int, sizes: Mapping[str, int], dim: str) -> list[int]:
    """The ranks that work together with `rank` along one dimension of a mesh, in ascending order.

    They are `rank` itself and those that differ from it in this coordinate alone. `sizes` has the
    dimensions from the outermost to the innermost, such as {"data": 2, "context": 4, "tensor": 8}. Ranks
    lie in it as the numbers 0, 1, 2, ... lie in a tensor of this shape: along the last dimension neighbours
    differ by 1. No process group is needed.
    """
    # answer
    names = list(sizes)
    stride = math.prod(sizes[name] for name in names[names.index(dim) + 1 :])
    first = rank - rank // stride % sizes[dim] * stride
    return [first + i * stride for i in range(sizes[dim])]
    # end of answer


def rows_of(batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a global batch (b, ...), which every rank has: its share along "data".

    Ranks with the same place along "data" get the same rows, all of their columns. The shares of different
    places are disjoint, and together they are the batch; two of them differ by at most one row. The
    dimensions of the mesh stand in any order, and it may have some of the world's ranks only.
    Nothing is sent, and the batch stays as it is.
    """
    # answer
    return shard_batch(batch, mesh.get_group("data"))
    # end of answer


Technique = Callable[[nn.Module, ProcessGroup], nn.Module]
"""Cuts or wraps a model over a group, as `tensor_parallelize`, `DataParallel` and `FullySharded` do."""


def parallelize_on_mesh(model: GPT, mesh: DeviceMesh, techniques: Mapping[str, Technique]) -> nn.Module:
    """Cut and wrap a GPT along all dimensions of a mesh, so that it trains as on one rank.

    `techniques` has a function of a module and a group for each dimension that may be there, in any order:
    "tensor" cuts layers, "context" cuts tokens, "data" wraps what they made. Each dimension of the mesh
    gets its technique, with its own group, in the order in which gradients come out right; along one of a
    single rank nothing need be applied. The mesh may lack some of the three, and has them in any order. The
    technique of one that it lacks is left out. A dimension of one rank may lack its technique (a star).
    The mesh may have some of the world's ranks only. The given techniques stay as they are. Returns the
    module to call.

    Raises:
        ValueError: a dimension of the mesh with several ranks, whatever its name, has no technique; nothing
            has been applied by then.
    """
    # answer
    order = ("tensor", "context", "data")  # hooks on parameters come after what replaces these
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    names = [name for name, size in sizes.items() if size > 1 or name in techniques]
    missing = [name for name in names if name not in techniques or name not in order]
    if missing:
        raise ValueError(f"nothing works along {', '.join(missing)}: its ranks would all do the same")
    module: nn.Module = model
    for name in order:
        if name in names:
            module = techniques[name](module, mesh.get_group(name))
    return module
    # end of answer


def gradient_norm(
    gradients: Mapping[str, Tensor], cut_along: Mapping[str, Collection[str]], mesh: DeviceMesh
) -> Tensor:
    """The Euclidean norm of the whole gradient, of which the ranks of a mesh have parts and copies.

    It is a tensor without dimensions, the same on every rank. `gradients` are this rank's, by parameter; an
    empty shard of ZeRO-3 may be missing. `cut_along` has for every parameter the dimensions of the mesh
    along which it is cut. Ranks that differ there have different parts of its gradient. Ranks that differ
    elsewhere have copies, which count once. Squares are added up, and their root is returned, in float32 or
    wider: no norm is rounded to the gradients' dtype on the way. The mesh may have some of the world's ranks
    only. What travels is a few numbers, and no gradient. The gradients stay as they are.
    """
    # answer
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    square = torch.zeros((), device=mesh.device_type, dtype=torch.float64)
    for name, gradient in gradients.items():
        copies = math.prod(size for dim, size in sizes.items() if dim not in cut_along[name])
        square += gradient.double().square().sum() / copies
    for dim in sizes:
        dist.all_reduce(square, group=mesh.get_group(dim))
    return square.sqrt()
    # end of answer


def bytes_by_axis(
    config: GPTConfig, batch_size: int, sizes: Mapping[str, int], zero3: bool = False
) -> dict[str, float]:
    """Bytes that one rank sends in a step along "data", "context" and "tensor", in float32, round rings.

    `config` has no biases, and `batch_size` rows of `block_size` tokens are those of all ranks together.
    `sizes` has the ranks along each of the three dimensions, in any order. Small messages are left out:
    losses, counts, norms.

    - tensor (lesson 10): an all-reduce of a rank's (b/d, s/c, h) for each of the two sums of a layer's
      forward, the two of its backward, the embedding's output, and the head's input gradient.
    - context (lesson 12): 6(c-1) blocks a layer, each a rank's keys or values, of its rows, tokens and
      heads; and an all-reduce of all gradients of a rank, whole ones also with `zero3`.
    - data (lessons 08 and 09): an all-reduce of all gradients of a rank; with `zero3` two all-gathers of
      its weights and a reduce-scatter instead.

    Of the blocks' matrices and of the token table a rank has 1/t, of positions and norms all.
    """
    # answer
    d, c, t = sizes["data"], sizes["context"], sizes["tensor"]
    n_layer, h = config.n_layer, config.n_embd
    stream = 4 * (batch_size / d) * (config.block_size / c) * h
    cut = 12 * n_layer * h**2 + config.vocab_size * h
    gradients = 4 * (cut / t + (config.block_size + 2 * n_layer + 1) * h)

    def all_reduce(num_bytes: float, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks * num_bytes

    return {
        "data": (1.5 if zero3 else 1) * all_reduce(gradients, d),
        "context": n_layer * 6 * (c - 1) * stream / t + all_reduce(gradients, c),
        "tensor": (4 * n_layer + 2) * all_reduce(stream, t),
    }
    # end of answer


def weighed_loss(loss: Tensor, targets: Tensor, mesh: DeviceMesh) -> Tensor:
    """A rank's loss, weighed so that its plain mean along "data" is the mean over all counted targets.

    `loss` is the mean over the counted targets of this rank's rows, as a module on the mesh returns it: the
    same on ranks with the same rows. `targets` (b/d, s) are these rows, whole; -1 does not count, and every
    rank has some that do. The plain mean of its gradients along "data" is that of one rank on the whole
    batch. The mesh may have some of the world's ranks only. From each rank a number or two travel.

    An extra that earns a star: a float16 loss is weighed as well where more targets count than float16
    holds.
    """
    # answer
    data = mesh.get_group("data")
    counted = (targets != -1).sum()
    everywhere = counted.clone()
    dist.all_reduce(everywhere, group=data)  # other ranks of the mesh count the same targets once more
    return loss * (counted * data.size() / everywhere)
    # end of answer
