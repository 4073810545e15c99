"""Small collectives of gloo on more ranks than cores, with and without whole turns (nanogpt/turns.py).

Both kinds take turns; the medians and their ratio are printed.
"""

import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nanogpt.turns import take_whole_turns

ROUNDS = 3
REPEAT = 50
NUM_RANKS = max(4, 2 * (os.cpu_count() or 1))
NUMEL = 64


def milliseconds(rank: int, folder: str, whole_turns: bool) -> None:
    """One rank: what each collective takes, into a file."""
    if whole_turns:
        take_whole_turns()
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    part, whole = torch.randn(NUMEL), torch.randn(NUMEL * NUM_RANKS)
    parts = list(whole.chunk(NUM_RANKS))
    collectives = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather(parts, part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
    }
    found = {}
    for name, collective in collectives.items():
        collective()
        began = time.perf_counter()
        for _ in range(REPEAT):
            collective()
        found[name] = (time.perf_counter() - began) / REPEAT * 1e3
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def measure(whole_turns: bool) -> dict[str, float]:
    """Milliseconds by collective, on the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(milliseconds, (folder, whole_turns), nprocs=NUM_RANKS)
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(NUM_RANKS)]
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def main() -> None:
    """Take turns, print medians and ratios."""
    rounds = [(measure(False), measure(True)) for _ in range(ROUNDS)]
    print(f"{NUM_RANKS} ranks on {os.cpu_count()} cores, {NUMEL} numbers a rank")
    for name in rounds[0][0]:
        usual, whole = (statistics.median(r[kind][name] for r in rounds) for kind in (0, 1))
        print(f"{name:<15} {usual:6.2f} ms; in whole turns {whole:6.2f} ms: {usual / whole:.1f} times")


if __name__ == "__main__":
    main()
