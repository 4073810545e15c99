"""Counts communication a second time, below Python: what the recorder did not see went past it.

A group's sequence number grows by one with every collective and message, whoever calls it. Collectives that
are called in another thread, or with the dispatch modes switched off, reach it without the recorder.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

Ranks = tuple[int, ...]


def most_calls(operation: str, num_tensors: int, num_ranks: int) -> int:
    """As how many calls gloo may count one operation: it makes some of others, one a tensor or a rank."""
    if operation in ("reduce_scatter_", "monitored_barrier_"):
        return 2 * num_ranks
    return max(num_tensors, 1) if "coalesced" in operation else 1


def calls_made() -> Counter[Ranks]:
    """World ranks of a group → calls that its backend has counted. Only gloo counts them one by one."""
    made: Counter[Ranks] = Counter()
    if dist.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            if dist.get_backend(group) == "gloo":
                made[tuple(dist.get_process_group_ranks(group))] += group._get_sequence_number_for_group()
    return made


def unseen(before: Counter[Ranks], seen: Counter[Ranks]) -> int:
    """How many calls were made since `before` that are not in `seen`."""
    made = calls_made()
    return sum(max(made[ranks] - before[ranks] - seen[ranks], 0) for ranks in made)


def world_ranks(backend: Any) -> Ranks:
    """The world ranks of the group that a backend, `group._get_backend(device)`, belongs to."""
    for group in list(distributed_c10d._world.pg_map):
        for device in group._device_types:
            if group._get_backend(torch.device(device)) is backend:
                return tuple(dist.get_process_group_ranks(group))
    return tuple(range(backend.size()))
