"""Lesson 07's collectives beside torch's, on one tensor: what each sends."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from infra.memory_table.gloo import TRAVELS
from solutions.collectives import broadcast, ring_all_gather, ring_all_reduce, ring_reduce_scatter

NUM_ELEMENTS = 1 << 20
FP32 = 4


def collectives() -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Name in `gloo.TRAVELS`, whose, and a call of it, on the default group."""
    group = dist.group.WORLD
    whole = torch.ones(NUM_ELEMENTS)
    part = torch.ones(NUM_ELEMENTS // group.size())
    parts = [torch.empty_like(part) for _ in range(group.size())]
    yield "all_reduce", "lesson 07", lambda: ring_all_reduce(whole, group)
    yield "all_reduce", "torch", lambda: dist.all_reduce(whole, group=group)
    yield "reduce_scatter", "lesson 07", lambda: ring_reduce_scatter(whole, group)
    yield "reduce_scatter", "torch", lambda: dist.reduce_scatter(part, parts, group=group)
    yield "all_gather", "lesson 07", lambda: ring_all_gather(part, group)
    yield "all_gather", "torch", lambda: dist.all_gather(parts, part, group=group)
    yield "broadcast", "lesson 07", lambda: broadcast(whole, 0, group)
    yield "broadcast", "torch", lambda: dist.broadcast(whole, 0, group=group)


def predicted_bytes(name: str, num_ranks: int) -> float:
    """What a rank sends on a ring, by lesson 07."""
    return TRAVELS[name] * (num_ranks - 1) / num_ranks * FP32 * NUM_ELEMENTS
