"""The ways to train that the table compares, and how one is set up from the options that name it."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from nanogpt.combined import AXES, on_axes, read_sizes
from nanogpt.config import TrainConfig
from nanogpt.parallel import Parallel
from nanogpt.technique import Accumulation, Checkpointing, find_technique


@dataclass(frozen=True)
class Axis:
    """What works along an axis of the mesh of ranks, and on how many of them."""

    technique: str | None = None
    size: int = 1


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    parallel: str | None = None
    checkpoint: str | None = None
    accumulate: int = 1
    in_pytorch: bool = True
    """Whether PyTorch has it, and runs it on the CPU."""

    def __str__(self) -> str:
        words = [self.parallel or "one rank"]
        words += [f"checkpoint {self.checkpoint}"] if self.checkpoint else []
        words += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        return ", ".join(words)

    @property
    def num_ranks(self) -> int | None:
        """How many ranks it takes; None: any number."""
        sizes = [part.partition("=")[2] for part in (self.parallel or "").split("+")]
        return prod(map(int, sizes)) if all(sizes) else None

    def axes(self, num_ranks: int) -> dict[str, Axis]:
        """ "data", "context" and "tensor" → what cuts there; of size 1 where nothing does."""
        axes = dict.fromkeys(AXES, Axis())
        if self.parallel is not None:
            for name, size in read_sizes(self.parallel, num_ranks).items():
                axes[find_technique("PARALLEL", name)[0].axis] = Axis(name, size)
        return axes

    def groups(self, num_ranks: int) -> dict[tuple[int, ...], str]:
        """The ranks that talk along an axis → the axis."""
        axes = self.axes(num_ranks)
        grid = torch.arange(prod(axis.size for axis in axes.values())).view([a.size for a in axes.values()])
        return {
            tuple(group): name
            for number, (name, axis) in enumerate(axes.items())
            for group in grid.movedim(number, -1).reshape(-1, axis.size).tolist()
            if axis.size > 1
        }

    def find(self, by: str) -> tuple[Parallel, Checkpointing, Accumulation]:
        """The techniques, by "solutions" or "torch"."""
        technique = {
            "CHECKPOINT": self.checkpoint,
            "ACCUMULATE": "accumulate" if self.accumulate > 1 else None,
        }
        found = [
            find_technique(table, name) if name else (plain, None)
            for (table, name), plain in zip(technique.items(), (Checkpointing, Accumulation), strict=True)
        ]
        others = [adapter(solution if by == "solutions" else None) for adapter, solution in found]
        return self._parallel(by), *others

    def _parallel(self, by: str) -> Parallel:
        if self.parallel is None:
            return Parallel()
        sizes = read_sizes(self.parallel, dist.get_world_size())
        ways = {name: find_technique("PARALLEL", name) for name in sizes}
        chosen = {
            name: (way, solution if by == "solutions" else None) for name, (way, solution) in ways.items()
        }
        return on_axes(sizes, chosen, "cpu")


def makers(way: Way) -> tuple[str, ...]:
    """By whom there is an implementation."""
    return ("solutions", "torch") if way.in_pytorch else ("solutions",)


ONE_RANK = Way()
WAYS = (
    Way("data_parallel"),
    Way("data_parallel", checkpoint="every"),
    Way("data_parallel", checkpoint="attention"),
    Way("data_parallel", accumulate=2),
    Way("zero1"),
    Way("zero2"),
    Way("zero3"),
    Way("tensor_parallel"),
    Way("sequence_parallel"),
    Way("context_parallel", in_pytorch=False),
    Way("ulysses", in_pytorch=False),
    Way("data_parallel=2+tensor_parallel=2", in_pytorch=False),
    Way("zero3=2+tensor_parallel=2", in_pytorch=False),
    Way("data_parallel=2+context_parallel=2", in_pytorch=False),
    Way("zero3=2+context_parallel=2", in_pytorch=False),
    Way("context_parallel=2+tensor_parallel=2", in_pytorch=False),
    Way("context_parallel=2+sequence_parallel=2", in_pytorch=False),
)
"""Those on two axes are of four ranks."""


def train_config(way: Way, folder: Path) -> TrainConfig:
    """The model and the batch of the table: small enough for two cores, in fp32, without dropout."""
    return TrainConfig(
        n_layer=4,
        n_head=4,
        n_embd=128,
        block_size=128,
        batch_size=8,
        accumulate=way.accumulate,
        checkpoint=way.checkpoint,
        parallel=way.parallel,
        device="cpu",
        out_dir=folder,
    )
