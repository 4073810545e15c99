"""What is true of the questions that the page asks."""

from grader.guessing import Truth
from solutions.collectives import collective_time

LATENCY, BANDWIDTH = 20e-6, 25e9
"""Of the network of section 2: seconds of a message, bytes a second."""


def predictions(num_ranks: int = 64) -> list[Truth]:
    """Section 2: what a ring and a tree cost, and rank 0 in the middle."""
    n = num_ranks

    def ring(num_bytes: float) -> float:
        return collective_time("all_reduce", num_bytes, n, LATENCY, BANDWIDTH)

    def rank_0(num_bytes: float) -> float:
        return 2 * (n - 1) * (LATENCY + num_bytes / BANDWIDTH)

    return [
        Truth(
            "sent",
            "tensors S that a rank sends round the ring",
            2 * (n - 1) / n,
            "S",
            "2 · 63 steps of S/64: never more than 2 S, for any number of ranks",
        ),
        Truth(
            "large",
            "times that the ring is faster, 1 GB",
            rank_0(1e9) / ring(1e9),
            "times",
            "126 steps for both, and the ring's are 64 times smaller: 81.3 ms, not 5 s",
        ),
        Truth(
            "small",
            "times that the ring is faster, 1 KB",
            rank_0(1e3) / ring(1e3),
            "times",
            "126 steps of 20 µs for both: 2.52 ms, and the bytes hardly count",
        ),
        Truth(
            "even",
            "MB for which latency is half of the ring's time",
            n * LATENCY * BANDWIDTH / 1e6,
            "MB",
            "a step's S/64 then takes 20 µs: 500 KB at 25 GB/s, times 64",
        ),
        Truth(
            "tree",
            "times as long, broadcast down the tree, 1 GB",
            collective_time("broadcast", 1e9, n, LATENCY, BANDWIDTH) / ring(1e9),
            "times",
            "6 steps of the whole gigabyte, 40 ms each: 240 ms",
        ),
    ]


def two_wires(machines: int = 8, ranks: int = 8, inside: float = 450e9, across: float = 50e9) -> list[Truth]:
    """Section 3.7: one ring over machines of H100s, and two levels."""
    ring = collective_time("all_reduce", 1e9, machines * ranks, 0.0, across)
    halves = sum(collective_time(kind, 1e9, ranks, 0.0, inside) for kind in ("reduce_scatter", "all_gather"))
    middle = collective_time("all_reduce", 1e9 / ranks, machines, 0.0, across)
    return [
        Truth(
            "across",
            "tensors S that a rank sends across machines",
            2 * (machines - 1) / machines / ranks,
            "S",
            "2 · 7/8 of an eighth of S; in one ring it was 2 · 63/64 of all of it",
        ),
        Truth(
            "faster",
            "times that two levels are faster than one ring",
            ring / (halves + middle),
            "times",
            f"{1e3 * ring:.1f} ms for the ring; {1e3 * halves:.1f} ms inside, {1e3 * middle:.1f} ms across",
        ),
    ]
