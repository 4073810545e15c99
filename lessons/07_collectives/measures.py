"""What the page measures, on ranks: bytes and messages, seconds, and a pipeline with a slow rank."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from grader import run_ranks
from lessons.page.loopback import loopback_bytes
from lessons.page.messages import Messages
from lessons.page.tap import Tap
from lessons.page.watch import Watch

Collective = Callable[[Tensor, ProcessGroup], Any]
"""Works on the whole tensor's S bytes: an all-gather takes its n-th of them."""


def torchs_all_reduce(tensor: Tensor, group: ProcessGroup) -> None:
    """PyTorch's own."""
    dist.all_reduce(tensor, group=group)


def torchs_broadcast(tensor: Tensor, group: ProcessGroup) -> None:
    """PyTorch's own."""
    dist.broadcast(tensor, group=group, group_src=0)


def nothing(tensor: Tensor, group: ProcessGroup) -> None:
    """What two barriers alone take."""


def on_whole(kind: str, function: Any, tensor: Tensor, group: ProcessGroup) -> None:
    """The learner's collective of a kind, as a `Collective`."""
    if kind == "broadcast":
        function(tensor, 0, group)
    elif kind == "all_gather":
        function(tensor[: tensor.numel() // group.size()], group)
    elif kind == "all_to_all":
        function(list(tensor.chunk(group.size())), group)
    else:
        function(tensor, group)


def alike(mine: dict[str, Any]) -> dict[str, Collective]:
    """The learner's collectives, all of which take a tensor and a group."""
    return {kind: partial(on_whole, kind, function) for kind, function in mine.items()}


def messages_of(function: Collective, num_elements: int) -> list[int]:
    """On a rank: the bytes of each message that it sends."""
    tensor = torch.ones(num_elements)
    with Watch() as watch:
        function(tensor, dist.group.WORLD)
    return [event.num_bytes for event in watch.recording.select("send")]


def travels(all_reduce: Collective) -> list[list[tuple[int, tuple[int, ...]]]]:
    """On a rank: for each message that it sends, the chunks in it, and whose parts are in each sum.

    A number says both: rank r has 2^r in every place, times 16^c in chunk c.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    tensor = torch.cat([torch.full((100,), 16.0**c * 2**rank) for c in range(n)])
    with Messages() as messages:
        all_reduce(tensor, dist.group.WORLD)
    return [[_read(int(value), n) for value in sent.unique()] for _, sent in messages.sent]


def _read(value: int, n: int) -> tuple[int, tuple[int, ...]]:
    chunk = max(c for c in range(n) if value >= 16**c or c == 0)
    return chunk, tuple(r for r in range(n) if value // 16**chunk >> r & 1)


def seconds_of(functions: Sequence[Collective], num_elements: int, repeat: int) -> list[float]:
    """On a rank: the least seconds of each function, which take turns. All ranks start together."""
    group, best = dist.group.WORLD, [float("inf")] * len(functions)
    tensor = torch.ones(num_elements)
    for _ in range(repeat):
        for i, function in enumerate(functions):
            tensor.fill_(1.0)
            dist.barrier(group)
            begin = time.perf_counter()
            function(tensor, group)
            dist.barrier(group)
            best[i] = min(best[i], time.perf_counter() - begin)
    return best


def seconds_on_two_wires(
    flat: Any, two_levels: Any, num_elements: int, inside: float, across: Sequence[float]
) -> list[list[float]]:
    """On a rank of 2 machines of 2: seconds of both, by the speed of the wire between machines."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
    groups = mesh.get_group("inside"), mesh.get_group("across")
    ways = (lambda x: flat(x, dist.group.WORLD), lambda x: two_levels(x, *groups))
    for way in ways:  # the groups' connections are made
        way(torch.ones(num_elements))
    rows = []
    for speed in across:
        rows.append([])
        for way in ways:
            best = float("inf")
            for _ in range(3):
                tensor = torch.ones(num_elements)
                dist.barrier()
                begin = time.perf_counter()
                with Tap(inside, across=speed, machine_size=2):
                    way(tensor)
                dist.barrier()
                best = min(best, time.perf_counter() - begin)
            rows[-1].append(best)
    return rows


def counted_bytes(functions: Sequence[Collective], num_elements: int, repeat: int = 5) -> list[int | None]:
    """On a rank: what the loopback interface carries, the least of a few runs: others use it too."""
    group, counts = dist.group.WORLD, [[] for _ in functions]
    for _ in range(repeat):
        for function, count in zip(functions, counts, strict=True):
            tensor = torch.ones(num_elements)
            dist.barrier(group)
            before = loopback_bytes()
            dist.barrier(group)
            function(tensor, group)
            dist.barrier(group)
            count.append(None if before is None else loopback_bytes() - before)
    return [None if None in count else min(count) for count in counts]


def sum_of_random_numbers(all_reduce: Collective, num_elements: int) -> Tensor:
    """On a rank: the sum of numbers that each rank has drawn with its own seed."""
    torch.manual_seed(dist.get_rank())
    tensor = torch.randn(num_elements)
    all_reduce(tensor, dist.group.WORLD)
    return tensor


def add_1_and_10(relay: Any, slow_rank: int) -> list[int]:
    """On a rank of two: five micro-batches go through a layer that adds 1, and one that adds 10."""
    group = dist.group.WORLD

    def layer(x: Tensor) -> Tensor:
        time.sleep(0.02 if group.rank() == slow_rank else 0.0)
        return x + 10 ** group.rank()

    inputs = [torch.full((1000,), float(i)) for i in range(5)]
    return [round(output[0].item()) for output in relay(layer, inputs, group)]


def show_pipeline(relay: Any) -> None:
    """What the last of two ranks returns, where the sender is slow and where the receiver is."""
    for slow, told in enumerate(("sender", "receiver")):
        returned = run_ranks(add_1_and_10, relay, slow, ranks=2)[1]
        print(f"slow {told + ':':10} the last rank returned {returned}")
