"""What is true of the questions that the page asks."""

from torch import nn

from grader.guessing import Truth

GIGABIT = 1e9 / 8
"""Bytes a second of an office network."""


def predictions(model: nn.Module) -> list[Truth]:
    """Section 2: what an all-reduce of the model's gradients costs."""
    size = 4 * sum(p.numel() for p in model.parameters()) / 1e6

    def ring(n: int) -> float:
        return 2 * (n - 1) / n * size

    return [
        Truth(
            "ring_of_2", "MB sent by a rank, ring of 2", ring(2), "MB", f"2 · 1/2 · S, and S is {size:.2f} MB"
        ),
        Truth(
            "ring_of_64",
            "MB sent by a rank, ring of 64",
            ring(64),
            "MB",
            "2 · 63/64 · S: never more than 2 S",
        ),
        Truth("everyone_to_all_64", "MB to all 63 others", 63 * size, "MB", "63 · S"),
        Truth(
            "milliseconds",
            "milliseconds for 2 ranks on 1 Gbit/s",
            1000 * ring(2) * 1e6 / GIGABIT,
            "ms",
            "the bytes of the first line, 125 MB a second",
        ),
    ]
