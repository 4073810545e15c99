"""What is true of the questions that the page asks."""

from collections.abc import Callable

from grader.guessing import Truth
from solutions.tensor_parallel import tensor_parallel_overhead

FLOPS = 400e12
"""FLOPs a second of an H100 in a good run."""
NVLINK, NETWORK = 450e9, 50e9
"""Bytes a second in one direction: an H100's NVLink, and a network of 400 Gbit/s."""
RANKS, TOKENS, GPT_3, GPT_2 = 8, 2048, 12288, 768
"""Ranks, tokens in a sequence, and two widths."""

PLAYBOOK_WIDTH = 3072
"""Of a model of 3 billion parameters, such as Llama 3.2 3B."""
PLAYBOOK_DROPS = {4: 5.0, 8: 19.1, 16: 43.4, 32: 41.4}
"""Ranks → percent of each GPU's throughput that is lost since half as many (The Ultra-Scale Playbook)."""
MACHINES_WIRE = 400e9
"""Bytes a second that a machine of 8 H100 has for a ring through several of them."""


def drop(overhead: Callable[..., float], num_ranks: int) -> float:
    """Percent of a GPU's throughput that is lost when the group grows to that many, from half of them."""
    before, after = (
        1 + overhead(PLAYBOOK_WIDTH, n, FLOPS, NVLINK if n <= RANKS else MACHINES_WIRE)
        for n in (num_ranks // 2, num_ranks)
    )
    return 100 * (1 - before / after)


def show_published_run(overhead: Callable[..., float]) -> None:
    """The Playbook's drops beside those that the learner's function predicts."""
    print("ranks      predicted   published")
    for n, published in PLAYBOOK_DROPS.items():
        print(f"{n // 2:2} to {n:2} {-drop(overhead, n):11.0f}% {-published:10.0f}%")


def predictions() -> list[Truth]:
    """Section 2: what a block sends, and how long that takes beside its compute."""
    sent = 96 * 4 * 2 * (RANKS - 1) / RANKS * TOKENS * GPT_3 * 2 / 1e9
    return [
        Truth(
            "all_reduces",
            "all-reduces of a block, forward and backward",
            4,
            "all-reduces",
            "attention and MLP: one forward and one backward each",
        ),
        Truth(
            "gigabytes",
            "GB that each of 8 ranks sends, GPT-3",
            sent,
            "GB",
            "96 blocks · 4 all-reduces of 50.3 MB · 2 · 7/8",
        ),
        Truth(
            "nvlink",
            "% of the computing time, GPT-3 on NVLink",
            100 * tax(GPT_3, RANKS, NVLINK),
            "%",
            "75 ms beside 668 ms",
        ),
        Truth(
            "network",
            "% of the computing time, GPT-3 on a network",
            100 * tax(GPT_3, RANKS, NETWORK),
            "%",
            "a ninth of NVLink's speed",
        ),
        Truth(
            "narrow",
            "% of the computing time, h = 768 on NVLink",
            100 * tax(GPT_2, RANKS, NVLINK),
            "%",
            "bytes grow with h, FLOPs with h squared",
        ),
    ]


def tax(width: int, num_ranks: int, bytes_per_second: float) -> float:
    """Seconds of communication over seconds of compute in a block of this width, at FLOPS."""
    return tensor_parallel_overhead(width, num_ranks, FLOPS, bytes_per_second)
