"""What is true of the questions that the page asks."""

from typing import Any

from grader.guessing import Truth

RINGS: dict[str, tuple[int, int, float, float]] = {
    "A100, NVLink": (128, 128, 312e12, 300e9),
    "A100, InfiniBand": (128, 128, 312e12, 12.5e9),
    "H100, 400 Gbit/s": (128, 128, 989e12, 50e9),
    "the same, 16 heads share one": (128, 8, 989e12, 50e9),
}
"""Heads of q, of k and v, dense bf16 FLOP/s, and bytes a second of a GPU in one direction.

The A100s are those of table 2 of arXiv:2310.01889. The others are in tests/published_figures.yaml.
"""

LLAMA_PART, LLAMA_FLOPS = 131_072 // 16, 380e12
"""Tokens of a sequence on a rank, and FLOP/s of a GPU: arXiv:2407.21783, table 4."""


def show_published_run(smallest_hidden_part: Any) -> None:
    """What the learner's function says of Llama 3 405B's longest sequences, on 400 Gbit/s a GPU."""
    print(f"each of 16 ranks has {LLAMA_PART:,} tokens of a sequence, and computes 380 TFLOP/s")
    for told, heads in (("8 heads of k, v", 8), ("128 heads", 128)):
        least = smallest_hidden_part(128, heads, LLAMA_FLOPS, 50e9, zigzag=True)
        times = LLAMA_PART / least
        print(f"a zigzag with {told:15} needs {least:6,} tokens: {times:.2g} times as many are there")


def predictions() -> list[Truth]:
    """Section 2: one layer of Llama 3 405B, one sequence of 131,072 tokens in bf16."""
    s, h, h_kv, n = 131_072, 16_384, 16_384 * 8 // 128, 16
    block = s // n * h_kv * 2 / 1e6
    flops_a_second, bytes_a_second = 400e12, 50e9
    return [
        Truth(
            "blocks",
            "blocks that a rank of 4 sends in a layer",
            blocks_sent(4),
            "blocks",
            "2 · 3 in the forward; in the backward 2 · 3 again, and 2 · 3 gradients, or 2 · 4 if a "
            "block's own term travels, too: 20 in all",
        ),
        Truth(
            "megabytes",
            "MB that a rank of 16 sends in a layer",
            blocks_sent(n) * block,
            "MB",
            f"6 · 15 blocks of {block:.1f} MB",
        ),
        Truth(
            "held",
            "MB of other ranks' keys and values on a rank of 16",
            4 * block,
            "MB",
            f"4 blocks: two here and two arriving. All-gathered it would be {2 * (n - 1) * block:.0f}",
        ),
        Truth(
            "working",
            "% of the time that an average rank of 16 is busy",
            100 * efficiency(n),
            "%",
            "n/(2n - 1): all wait for the rank that has most to do",
        ),
        Truth(
            "tokens",
            "tokens on a rank, to hide a hop",
            flops_a_second / bytes_a_second * h_kv / h,
            "tokens",
            "F/B · h_kv/h: 8,000 FLOPs while a byte travels, a sixteenth of it for shared heads",
        ),
    ]


def blocks_sent(n: int) -> int:
    """By a rank in forward and backward of a layer, where a rank's own gradient waits at home."""
    return 2 * (n - 1) + 4 * (n - 1)


def efficiency(n: int) -> float:
    """The share of the time that the ranks of a plain ring work, with half a block on the diagonal."""
    return n / (2 * n - 1)
