"""What the checks of the steps to `FullySharded` share: parameters, blocks, and looks at them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import Recording, Trial, storage_bytes

SHAPES = ((5, 3), (1,), (7,), (4, 6))
"""Sizes that are not divisible by 2, 3 or 4, one number alone."""
FROZEN = 2
"""Which of them is frozen."""
WIDTH = 12
NUM_BLOCKS = 6
IDLE = 2
"""Which of the blocks has a weight that its forward does not use."""


class Piece(nn.Module):
    """A block: two layers, and between them a place to look from."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.look, self.down = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Identity(),
            nn.Linear(3 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.look(self.up(x)).tanh())


def chain() -> nn.Sequential:
    """Blocks that compute one after the other."""
    blocks = nn.Sequential(*(Piece() for _ in range(NUM_BLOCKS)))
    blocks[IDLE].idle = nn.Parameter(torch.randn(WIDTH))
    return blocks


def bytes_of_block(block: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in block.parameters())


def still_whole(blocks: Sequence[nn.Module], units: Sequence[Any], block: int) -> dict[int, bool]:
    """On a rank: the blocks whose weights have memory for all of them → whether their shards have a .grad."""
    return {
        number: any(shard.grad is not None for shard in unit.shards)
        for number, (each, unit) in enumerate(zip(blocks, units, strict=True))
        if storage_bytes(each.parameters()) >= block
    }


def make_parameters(
    tensors: Sequence[Tensor], device: Any, frozen: int | None = FROZEN
) -> list[nn.Parameter]:
    return [nn.Parameter(t.clone().to(device), i != frozen) for i, t in enumerate(tensors)]


def draw_tensors(trial: Trial, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """By rank, a tensor for each shape: every rank's are its own."""
    return [[trial.normal(*shape, dtype=dtype) for shape in SHAPES] for _ in range(trial.num_ranks)]


def copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def whole_gradients(units: Sequence[Any], factor: float = 1.0) -> list[Tensor]:
    """What is in the shards' `.grad`, made whole by the unit itself: the shards are given these values."""
    for unit in units:
        for shard in unit.shards:
            shard.copy_(torch.zeros_like(shard) if shard.grad is None else factor * shard.grad)
        unit.free()
        unit.gather()
    found = [copy for unit in units for copy in copies(unit.parameters)]
    for unit in units:
        unit.free()
    return found


def watch(blocks: Sequence[nn.Module], recording: Any, way: str = "forward") -> list[Any]:
    """Mark the moments in which a block computes: "forward 3", and the same block's "backward 3".

    What it returns are the handles of its hooks.
    """

    def see(number: int, x: Tensor) -> None:
        recording.mark(f"{way} {number}")
        if x.requires_grad:
            x.register_hook(lambda gradient: recording.mark(f"backward {number}"))

    return [
        block.look.register_forward_hook(lambda look, args, x, number=number: see(number, x))
        for number, block in enumerate(blocks)
    ]


def ask_when(units: Sequence[Any], recording: Any) -> list[tuple[str, int]]:
    """A list that grows with each start_gather() of a unit: the last mark by then, and the unit's number."""
    asked: list[tuple[str, int]] = []

    def listen(number: int, unit: Any) -> None:
        start = unit.start_gather

        def told() -> Any:
            asked.append((recording.mark_name, number))
            return start()

        unit.start_gather = told

    for number, unit in enumerate(units):
        listen(number, unit)
    return asked


def sent_by(recording: Recording, mark: str, kinds: Sequence[str]) -> list[Any]:
    """The events of these kinds before a mark; all of them if there was no such mark."""
    marks = list(recording.totals)
    before = marks[: marks.index(mark)] if mark in marks else marks
    return [e for e in recording.events if e.after in before and e.kind in kinds]


def waited_by(recording: Recording, mark: str) -> int:
    """How many handles were waited for before a mark."""
    marks = list(recording.totals)
    return sum(recording.totals[name].waits for name in marks[: marks.index(mark)])


GATHERS = ("all_gather", "broadcast", "gather", "scatter", "all_to_all", "send")
"""What can gather; of these, exchanges and messages can reduce as well."""
GATHERS_ALONE = GATHERS[:4]
REDUCES = ("reduce_scatter", "reduce", "all_to_all", "send")


ORDER_OF_HOOKS = (
    "Hooks on one tensor are called in the order in which they were registered, and a module's "
    "full_backward_pre_hook before all that its forward hooks have hung on its output."
)


def most_ahead(events: Sequence[Any]) -> float:
    """Bytes: by how much gathers are at most ahead of reductions; 0 where a kind could be either."""
    gathered = reduced = 0
    most = 0.0
    for event in events:
        if event.kind in ("all_to_all", "send"):
            return 0.0
        if event.kind in GATHERS_ALONE:
            gathered += event.num_bytes
            most = max(most, gathered - reduced)
        elif event.kind in REDUCES or event.kind == "all_reduce":
            reduced += event.num_bytes
    return most


def num_bytes(events: Sequence[Any]) -> int:
    return sum(event.num_bytes for event in events)
