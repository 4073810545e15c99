"""What a ring does with each block, rank by rank: values tell the blocks apart."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grader import run_ranks
from lessons.context_parallel.measures import Attention, attend, plain_split


@dataclass
class RingLog:
    """What a rank did in the forward of a ring: blocks by the rank that owns them, in order."""

    sent: list[int] = field(default_factory=list)
    to: int = -1
    """The rank that it sent to."""
    computed: list[int] = field(default_factory=list)
    under_way: list[int] = field(default_factory=list)
    """Blocks whose message had started when they were first computed with."""
    cost: dict[str, Any] = field(default_factory=dict)
    """What `attend` found."""


class Seen(TorchDispatchMode):
    """Inside `with`, writes down which blocks this rank multiplies, and which it sends.

    Values of block j lie in [10 (j + 1), 10 (j + 1) + 1), and nothing else is as large.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log = RingLog()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        log, name = self.log, func._opname
        if func.namespace == "c10d" and name == "send":
            blocks = [int(x.max()) // 10 - 1 for x in args[0] if x.max() >= 10]
            log.sent += [block for block in blocks if block not in log.sent]
            log.to = args[2] if blocks else log.to
        if name in ("mm", "bmm", "baddbmm") or name.startswith("_scaled_dot_product"):
            operands = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
            blocks = [int(x.max()) // 10 - 1 for x in operands if x.min() >= 10]
            log.under_way += [block for block in blocks if block in log.sent and block not in log.computed]
            log.computed += blocks
        return func(*args, **(kwargs or {}))


def logs(attention: Attention, n: int) -> list[RingLog]:
    """What each of n ranks did."""
    return [RingLog(**found) for found in run_ranks(log_a_ring, attention, ranks=n)]


def log_a_ring(attention: Attention) -> dict[str, Any]:
    """On a rank: the log of a forward, and what forward and backward cost."""
    group = dist.group.WORLD
    torch.manual_seed(group.rank())
    q, k = torch.randn(2, 1, 2, 8, 16)
    v = 10 * (group.rank() + 1) + 0.9 * torch.rand(1, 2, 8, 16)
    with Seen() as seen:
        attention(q, k, v, group)
    seen.log.cost = attend(attention, plain_split)
    return vars(seen.log)
