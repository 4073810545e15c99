"""Several techniques at once, each along an axis of a mesh of ranks.

    --parallel data_parallel=2+tensor_parallel=2

Ranks that differ in one coordinate of the mesh alone are a group, in which one technique works as if it were
on its own. The innermost axis changes neighbouring ranks: it is the one that sends most.
"""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from nanogpt.config import TrainConfig
from nanogpt.model import GPT, GPTConfig
from nanogpt.parallel import Parallel, clip_parts
from nanogpt.technique import Checkpointing, Implementation

AXES = ("data", "context", "tensor")
"""From the outermost to the innermost."""


def read_sizes(parallel: str, num_ranks: int) -> dict[str, int]:
    """The techniques that `--parallel` names, and over how many ranks each works; one size may be left out.

    Raises:
        ValueError: the sizes are no whole numbers, or their product is not the number of ranks.
    """
    sizes: dict[str, int | None] = {}
    for part in parallel.split("+"):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not name or (equals and not (size.isdecimal() and int(size) > 0)):
            raise ValueError(
                f"--parallel {parallel}: {part!r} is not a technique and its number of ranks, "
                "such as tensor_parallel=2"
            )
        if name in sizes:
            raise ValueError(f"--parallel {parallel}: {name} is there twice")
        sizes[name] = int(size) if equals else None
    known = prod(size for size in sizes.values() if size is not None)
    left_out = [name for name, size in sizes.items() if size is None]
    if len(left_out) > 1:
        raise ValueError(f"--parallel {parallel}: give {' or '.join(left_out)} its number of ranks, with =")
    if num_ranks % known or (not left_out and known != num_ranks):
        needs = f"{known} ranks" if not left_out else f"a multiple of {known} ranks"
        raise ValueError(
            f"--parallel {parallel} needs {needs}, and torchrun started {num_ranks}: "
            f"--nproc-per-node {known if not left_out else 2 * known}"
        )
    return {name: size or num_ranks // known for name, size in sizes.items()}


def on_axes(
    sizes: Mapping[str, int], chosen: Mapping[str, tuple[type[Parallel], Implementation | None]], device: str
) -> Parallel:
    """The techniques that `sizes` names, on a mesh of all ranks; a single one has them all.

    Args:
        sizes: name → number of ranks, as `read_sizes` gives them.
        chosen: name → adapter, and the implementation that it is of.
        device: the kind of device that the ranks have: "cpu" or "cuda".

    Raises:
        ValueError: two of them share out the same, or they are PyTorch's own.
    """
    if len(sizes) == 1:
        ((adapter, implementation),) = chosen.values()
        return adapter(implementation, dist.group.WORLD)
    asked = "+".join(sizes)
    if any(implementation is None for _, implementation in chosen.values()):
        raise ValueError(f"--implementation torch trains one technique at a time, not {asked}")
    for axis in AXES:
        same = [name for name in sizes if chosen[name][0].axis == axis]
        if len(same) > 1:
            raise ValueError(f"--parallel {asked}: {' and '.join(same)} both cut the {axis} axis")
    names = sorted(sizes, key=lambda name: AXES.index(chosen[name][0].axis))
    mesh = init_device_mesh(device, tuple(sizes[name] for name in names), mesh_dim_names=tuple(names))
    return Combined({name: chosen[name][0](chosen[name][1], mesh[name].get_group()) for name in names})


class Combined(Parallel):
    """Techniques on the axes of one mesh.

    Args:
        techniques: by name, the outermost first; each has its group of the mesh.

    Raises:
        ValueError: they can not be trained together.
    """

    def __init__(self, techniques: Mapping[str, Parallel]) -> None:
        super().__init__()
        self.techniques = dict(techniques)
        self.inner = [each for each in reversed(techniques.values()) if each.axis != "data"]
        self.data = next((each for each in techniques.values() if each.axis == "data"), Parallel())
        self.cutting = [each for each in techniques.values() if each.axis == "tensor"]

    def check(self, config: GPTConfig, num_ranks: int) -> None:
        """Each for its own ranks, on the tokens or the heads that the others have left it."""
        size = {technique.axis: technique.group.size() for technique in self.techniques.values()}
        for name, technique in self.techniques.items():
            seen, left = config, ""
            if technique.axis == "tensor" and "context" in size:
                seen = dataclasses.replace(config, block_size=config.block_size // size["context"])
                left = f", of which each rank of the context axis has {seen.block_size}"
            if technique.axis == "context" and "tensor" in size:
                seen = dataclasses.replace(config, n_head=config.n_head // size["tensor"])
                left = f", where each rank of the tensor axis has {seen.n_head} of {config.n_head} heads"
            try:
                technique.check(seen, technique.group.size())
            except ValueError as error:
                raise ValueError(f"{name}={technique.group.size()}: {error}{left}") from None

    def build(self, model: GPT, checkpointing: Checkpointing) -> nn.Module:
        """The layers first, then the tokens, then around it all what shares out the batch.

        Each replica of the data axis draws dropout of its own, also where the ranks of another axis agree.
        """
        if self.data.group is not None:
            torch.manual_seed(torch.initial_seed() + self.data.group.rank())
        *first, last = self.inner
        for technique in first:
            model = technique.wrap(model)
        return self.data.wrap(last.build(model, checkpointing))

    def optimizer(self, module: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
        """Of the data axis: ZeRO shards it.

        Raises:
            ValueError: it clips where nobody knows which gradients are parts.
        """
        if self.cutting and not self.data.clips_by_name:
            raise ValueError(
                f"{' and '.join(self.techniques)} do not go together: this optimizer clips flat pieces of "
                "gradients, and can not tell which of them are parts; zero3 and data_parallel can"
            )
        return self.data.optimizer(module, config)

    def share(self, tensor: Tensor) -> Tensor:
        """The sequences of this rank's replica."""
        return self.data.share(tensor)

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Layers and tokens talk in every micro-batch; gradients need not."""
        return self.data.accumulating(module)

    def synchronize(self, module: nn.Module) -> None:
        """The other axes have completed their gradients when backward ends."""
        self.data.synchronize(module)

    def update(self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """As the data axis does it; where layers are cut, the norm is that of all parts."""
        if self.cutting:
            return super().update(module, optimizer, max_norm)
        return self.data.update(module, optimizer, max_norm)

    def clip_gradients(self, module: nn.Module, max_norm: float) -> Tensor:
        """Parts are added up along every axis that cuts."""
        return clip_parts(module, max_norm, list(self.techniques.values()))

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Inside a replica the loss is the same on every rank."""
        return self.data.mean_loss(loss)

    def whole_state_dict(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Gathered along the data axis, then along those inside."""
        weights = self.data.whole_state_dict(module)
        for technique in reversed(self.inner):
            weights = technique.whole(weights)
        return weights
