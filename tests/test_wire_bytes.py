"""What is predicted and recorded of the network is what its loopback device counts, to two percent."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from grader.ranks.launcher import Code, Launcher, Limits
from lessons.shared.wire import wire_bytes
from nanogpt.model import GPT, GPTConfig
from solutions import collectives, data_parallel

for module in (sys.modules[__name__], collectives, data_parallel):
    cloudpickle.register_pickle_by_value(module)  # ranks that are shut in find neither tests nor solutions

ELEMENTS = 1_000_000
CONFIG = GPTConfig(block_size=64, vocab_size=4096, n_layer=4, n_head=4, n_embd=128, bias=False)


def all_reduce(group) -> None:
    collectives.ring_all_reduce(torch.ones(ELEMENTS), group)


def broadcast(group) -> None:
    collectives.broadcast(torch.ones(ELEMENTS), 0, group)


def step(group) -> None:
    """The gradients of one step; the weights that the constructor sends are counted as well."""
    wrapped = data_parallel.DataParallel(GPT(CONFIG), group)
    inputs = torch.zeros(1, CONFIG.block_size, dtype=torch.int64)
    wrapped(inputs, inputs)[1].backward()
    wrapped.finish_gradient_synchronization()


def scatters(group) -> None:
    """One from each rank."""
    pieces = [torch.ones(ELEMENTS)] * group.size()
    for root in range(group.size()):
        dist.scatter(
            torch.empty(ELEMENTS), pieces if root == group.rank() else None, group_src=root, group=group
        )


def gathers(group) -> None:
    """One to each rank."""
    for root in range(group.size()):
        pieces = [torch.empty(ELEMENTS) for _ in range(group.size())] if root == group.rank() else None
        dist.gather(torch.ones(ELEMENTS), pieces, group_dst=root, group=group)


def broadcasts(group) -> None:
    """One from each rank."""
    for root in range(group.size()):
        dist.broadcast(torch.ones(ELEMENTS), group_src=root, group=group)


def scatter(group) -> None:
    """From rank 0 alone."""
    pieces = [torch.ones(ELEMENTS)] * group.size() if group.rank() == 0 else None
    dist.scatter(torch.empty(ELEMENTS), pieces, group_src=0, group=group)


def gather(group) -> None:
    """To the last rank alone."""
    last = group.size() - 1
    pieces = [torch.empty(ELEMENTS) for _ in range(group.size())] if group.rank() == last else None
    dist.gather(torch.ones(ELEMENTS), pieces, group_dst=last, group=group)


PREDICTED = ("all_reduce", "broadcast", "step")
COUNTED = ("scatter", "scatters", "gather", "gathers", "broadcasts")
FUNCTIONS = {name: globals()[name] for name in PREDICTED + COUNTED}


def loopback_bytes() -> int:
    with open("/proc/net/dev") as file:
        return next(int(fields[9]) for fields in map(str.split, file) if fields[0] == "lo:")


def count(rank, name: str, repeat: int) -> int:
    """Bytes of all ranks together: the least of a few times."""
    counts = []
    for _ in range(repeat):
        dist.barrier(rank.group)
        before = loopback_bytes()
        dist.barrier(rank.group)
        FUNCTIONS[name](rank.group)
        dist.barrier(rank.group)
        counts.append(loopback_bytes() - before)
    return min(counts)


def record(rank, name: str) -> dict:
    """Bytes of all ranks together, and what this rank was recorded to send."""
    with rank.record() as recording:
        FUNCTIONS[name](rank.group)
    return {"counted": count(rank, name, 3), "recording": recording}


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", PREDICTED)
def test_bytes_are_as_predicted(name: str, n: int, isolated: Launcher) -> None:
    report = isolated.run(count, Code(trusted=True), [(name, 3)] * n, limits=Limits(timeout=60), world_size=n)
    assert report.ended == "complete", [rank.error for rank in report.ranks]
    gradients = 4 * sum(p.numel() for p in GPT(CONFIG).parameters())
    predicted = {
        "all_reduce": 2 * (n - 1) * 4 * ELEMENTS,
        "broadcast": (n - 1) * 4 * ELEMENTS,
        "step": 2 * (n - 1) * gradients + (n - 1) * gradients,
    }[name]
    measured = report.ranks[0].result
    assert predicted <= measured <= 1.02 * predicted, f"{measured / predicted:.4f} times what is predicted"


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", COUNTED)
def test_bytes_are_as_recorded(name: str, n: int, isolated: Launcher) -> None:
    report = isolated.run(record, Code(trusted=True), [(name,)] * n, limits=Limits(timeout=60), world_size=n)
    assert report.ended == "complete", [rank.error for rank in report.ranks]
    recorded = sum(wire_bytes(rank.result["recording"].select(), n) for rank in report.ranks)
    measured = report.ranks[0].result["counted"]
    assert recorded <= measured <= 1.02 * recorded, f"{measured / recorded:.4f} times what is recorded"
