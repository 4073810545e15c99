"""What is true of the questions that the page asks."""

from collections.abc import Callable
from itertools import permutations

from grader.guessing import Truth
from nanogpt.model import GPTConfig
from solutions.three_axes import bytes_by_axis, group_along

LLAMA_3_405B = (
    {"gpus": 8192, "tensor": 8, "context": 1, "pipeline": 16, "length": 8192, "tflops": 430},
    {"gpus": 16384, "tensor": 8, "context": 1, "pipeline": 16, "length": 8192, "tflops": 400},
    {"gpus": 16384, "tensor": 8, "context": 16, "pipeline": 16, "length": 131072, "tflops": 380},
)
"""arXiv:2407.21783, table 4: ranks along each axis, tokens of a sequence, TFLOP/s of a GPU."""
BATCH_TOKENS = 16 * 2**20

MACHINE = 8
"""GPUs with fast wires between them."""
SIZES = {"data": 8, "context": 2, "tensor": 8}
MODEL = GPTConfig(
    vocab_size=50304, block_size=8192, n_layer=40, n_head=40, n_embd=5120, dropout=0.0, bias=False
)
BATCH = 32
"""Sequences: 262,144 tokens, 2,048 on each of the 128 GPUs."""
INSIDE, ACROSS = 450e9, 50e9
"""Bytes a second of one H100 in one direction, over NVLink and over 400 Gbit/s to another machine."""


def replicas(run: dict[str, int]) -> int:
    """Ranks along data: what the other axes leave."""
    return run["gpus"] // (run["tensor"] * run["context"] * run["pipeline"])


def seconds_by_axis(
    order: tuple[str, ...], predict: Callable = bytes_by_axis, along: Callable = group_along
) -> dict[str, tuple[float, bool]]:
    """For a mesh in this order: axis → seconds that its bytes take, and whether they leave the machine.

    `predict` and `along` are the exercises `bytes_by_axis` and `group_along`.
    """
    sizes = {axis: SIZES[axis] for axis in order}
    found = {}
    for axis, num_bytes in predict(MODEL, BATCH, SIZES).items():
        leaves = len({rank // MACHINE for rank in along(0, sizes, axis)}) > 1
        found[axis] = (num_bytes / (ACROSS if leaves else INSIDE), leaves)
    return found


def orders(*exercises: Callable) -> list[tuple[tuple[str, ...], float]]:
    """All orders of the three axes, outermost first, with the seconds on the wire; the best comes first."""
    total = {
        order: sum(s for s, _ in seconds_by_axis(order, *exercises).values()) for order in permutations(SIZES)
    }
    return sorted(total.items(), key=lambda item: item[1])


def predictions() -> list[Truth]:
    """Section 2."""
    long = LLAMA_3_405B[2]
    found = orders()
    return [
        Truth(
            "partner",
            "the other rank of rank 5's data group, on a mesh of 2 × 2 × 2",
            group_along(5, {"data": 2, "context": 2, "tensor": 2}, "data")[0],
            "",
            "data is outermost: its neighbours are 2 · 2 = 4 apart",
        ),
        Truth(
            "replicas",
            "data-parallel replicas of Llama 3 405B with long sequences",
            replicas(long),
            "replicas",
            "16,384 / (8 · 16 · 16)",
        ),
        Truth(
            "sequences",
            "sequences of 131,072 tokens for each of them, in a batch of 16 · 2²⁰",
            BATCH_TOKENS / long["length"] / replicas(long),
            "sequences",
            "128 sequences in all: more replicas than that would have nothing to do",
        ),
        Truth(
            "norm",
            "times too large is the norm of a copied gradient, if four ranks add up squares",
            2,
            "times",
            "four times the square, so twice the root",
        ),
        Truth(
            "order",
            "times as long on the wire in the worst order of axes as in the best",
            found[-1][1] / found[0][1],
            "times",
            f"best: {' × '.join(found[0][0])}; worst: {' × '.join(found[-1][0])}",
        ),
    ]
