"""Small collectives of gloo on more ranks than cores: as usual, in whole turns, each rank on one core.

What does it is nanogpt/turns.py. The kinds take turns; the medians and their ratios are printed.
"""

import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nanogpt.turns import keep_to_one_core, take_whole_turns

ROUNDS = 3
REPEAT = 50
NUM_RANKS = max(4, 2 * (os.cpu_count() or 1))
NUMEL = 64
KINDS = ("usual", "whole turns", "one core each")


def milliseconds(rank: int, folder: str, kind: str) -> None:
    """One rank: what each collective takes, into a file."""
    if kind != "usual":
        take_whole_turns()
    if kind == "one core each":
        keep_to_one_core(rank, NUM_RANKS)
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


def measure(kind: str) -> dict[str, float]:
    """Milliseconds by collective, on the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(milliseconds, (folder, kind), nprocs=NUM_RANKS)
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(NUM_RANKS)]
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def main() -> None:
    """Take turns, print medians and ratios."""
    rounds = [{kind: measure(kind) for kind in KINDS} for _ in range(ROUNDS)]
    print(f"{NUM_RANKS} ranks on {os.cpu_count()} cores, {NUMEL} numbers a rank")
    for name in rounds[0]["usual"]:
        found = {kind: statistics.median(each[kind][name] for each in rounds) for kind in KINDS}
        told = (f"{kind} {found[kind]:6.2f} ms ({found['usual'] / found[kind]:.1f} times)" for kind in KINDS)
        print(f"{name:<15} {'; '.join(told)}")


if __name__ == "__main__":
    main()
