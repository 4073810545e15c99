"""What is true of the questions that the page asks."""

from grader.guessing import Truth


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
