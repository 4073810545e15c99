"""The ways to train that the table compares, and how one is set up from the options that name it."""

from dataclasses import dataclass
from pathlib import Path

from nanogpt.config import TrainConfig
from nanogpt.parallel import Group, Parallel
from nanogpt.technique import Accumulation, Checkpointing, find_technique


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

    def find(self, by: str, group: Group) -> tuple[Parallel, Checkpointing, Accumulation]:
        """The techniques, by "solutions" or "torch"."""
        found: list = []
        tables = (
            ("PARALLEL", self.parallel, Parallel, (group,)),
            ("CHECKPOINT", self.checkpoint, Checkpointing, ()),
            ("ACCUMULATE", "accumulate" if self.accumulate > 1 else None, Accumulation, ()),
        )
        for table, name, plain, arguments in tables:
            if name is None:
                found.append(plain())
            else:
                adapter, solution = find_technique(table, name)
                found.append(adapter(solution if by == "solutions" else None, *arguments))
        return tuple(found)


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
)


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
