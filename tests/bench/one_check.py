"""One check on two ranks: the grader's warm fork server beside `torch.multiprocessing.spawn`.

Both run the same function on two gloo ranks and bring the tensors back; they take turns, and the ratio of the
medians is printed.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from grader.ranks.launcher import Code, Launcher, Limits
from solutions.tensor_parallel import copy_to_group

ROUNDS = 5


def work(x: torch.Tensor, upstream: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor | None:
    """What a check of copy_to_group has a rank do."""
    x = x.clone().requires_grad_()
    copy_to_group(x, group).backward(upstream)
    return x.grad


def probe(rank, x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor | None:
    """The same, as the grader runs it."""
    return work(x, upstream, rank.group)


def spawned(rank: int, folder: str, x: torch.Tensor, upstreams: list[torch.Tensor]) -> None:
    """The same, as a spawned process runs it; the result goes through a file."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.save(work(x, upstreams[rank], dist.group.WORLD), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def through_the_grader(
    launcher: Launcher, x: torch.Tensor, upstreams: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients by rank."""
    code = Code(cells=(("empty.py", ""),), trusted=True)
    report = launcher.run(probe, code, [(x, upstream) for upstream in upstreams], limits=Limits())
    return [rank.result for rank in report.ranks]


def through_spawn(x: torch.Tensor, upstreams: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(spawned, (folder, x, upstreams), nprocs=2)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


def seconds(run: Callable[[], list[torch.Tensor]], expected: torch.Tensor) -> float:
    """Seconds of one round, its result verified."""
    began = time.perf_counter()
    gradients = run()
    took = time.perf_counter() - began
    assert all(torch.allclose(gradient, expected) for gradient in gradients)
    return took


def main() -> None:
    """Measure and print."""
    x, upstreams = torch.randn(3, 8), [torch.randn(3, 8) for _ in range(2)]
    expected = upstreams[0] + upstreams[1]
    launcher = Launcher()
    launcher.warm_up()
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(seconds(lambda: through_the_grader(launcher, x, upstreams), expected))
        theirs.append(seconds(lambda: through_spawn(x, upstreams), expected))
    launcher.close()
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"one check on 2 ranks, median of {ROUNDS}: grader {a:.3f} s, spawn {b:.3f} s: {b / a:.0f} times")


if __name__ == "__main__":
    main()
