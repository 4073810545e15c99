"""docs/when_it_pays.md: the inequalities of lessons 08 to 12 on machines, and published runs beside them.

    python -m infra.when_it_pays

writes the page and its picture. Every predicted number comes from the course's own functions.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from grader.ranks.isolation import ROOT
from lessons.fsdp import overlap
from lessons.page import hidden
from solutions.context_parallel import smallest_hidden_part
from solutions.data_parallel import smallest_hidden_share
from solutions.tensor_parallel import tensor_parallel_overhead

PAGE = ROOT / "docs" / "when_it_pays.md"
PICTURE = PAGE.with_suffix(".png")
TEMPLATE = Path(__file__).with_name("page.md")

MACHINES: dict[str, tuple[float, float, float, int]] = {
    "2 A40, NVLink bridge": (149.7e12, 56.25e9, 56.25e9, 2),
    "2 A40, PCIe 4": (149.7e12, 32e9, 32e9, 2),
    "8 A100, NVLink": (*hidden.MACHINES["A100, NVLink"], 300e9, 8),
    "8 H100, NVLink": (*hidden.MACHINES["H100, NVLink"], 450e9, 8),
    "16 H100, 50 GB/s each between machines": (*hidden.MACHINES["H100, between machines"], 50e9, 16),
    "8 B200, NVLink": (2250e12, 900e9, 900e9, 8),
}
"""Dense bf16 FLOP/s of a GPU; bytes a second in one direction: for collectives, and for a hop; ranks.

Between machines a collective uses the network of all eight GPUs, and a hop that of one. NVIDIA's data sheets,
as stas00/ml-engineering has collected them; tests/published_figures.yaml has those of the lessons.
"""
HEADS, KV_HEADS, WIDTH = 32, 8, 4096
"""Of Llama 3 8B."""

BENCHMARKS = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
TITAN = BENCHMARKS + "llama3_h100_202412_torchtitan.md"
ASYNC = BENCHMARKS + "asyncTP_llama3_h100_2025-06_torchtitan.md"
FSDP_TPS = {"FSDP": tuple(overlap.TOKENS_PER_SECOND.values()), "FSDP, compiled": (6667, 6514)}
"""Tokens a second of each GPU, Llama 3.1 8B on 8 and on 128 H100: tables 1 and 3."""
ASYNC_TPS = {"70B": (8192, 597.3, 652.4), "8B": (4096, 4378.0, 4809.4)}
"""Width, and tokens a second with plain and with asynchronous tensor parallelism on 8 ranks, in bf16."""
CONTEXT_TPS = {1: 3890, 2: 2540, 4: 1071, 8: 548}
"""Ranks of context parallelism with 32,768 tokens each → tokens a second of a GPU: table 2."""


def thresholds(flops: float, speed: float, speed_of_hop: float, num_ranks: int) -> tuple[int, int, float]:
    """Tokens for data parallelism, tokens of a sequence for a zigzag, overhead of tensor parallelism."""
    return (
        smallest_hidden_share(overlap.PARAMETERS, flops, speed),
        smallest_hidden_part(HEADS, KV_HEADS, flops, speed_of_hop, zigzag=True),
        tensor_parallel_overhead(WIDTH, num_ranks, flops, speed),
    )


def machines() -> Iterator[str]:
    """The table of machines."""
    yield "| | data parallelism: tokens | zigzag: tokens of a sequence | tensor parallelism costs |"
    yield "| --- | ---: | ---: | ---: |"
    for name, machine in MACHINES.items():
        share, part, overhead = thresholds(*machine)
        yield f"| {name} | {share:,} | {part:,} | {overhead:.0%} |"


def fully_sharded_runs() -> Iterator[str]:
    """torchtitan's FSDP from one machine to sixteen."""
    yield "| | 8 GPUs | 128 GPUs | lost |"
    yield "| --- | ---: | ---: | ---: |"
    for name, (few, many) in FSDP_TPS.items():
        yield f"| {name} | {few:,} | {many:,} | {1 - many / few:.1%} |"


def tensor_runs() -> Iterator[str]:
    """torchtitan's plain and asynchronous tensor parallelism."""
    yield "| Llama 3.1 | width | overhead, predicted | plain | asynchronous | gained |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for name, (width, plain, overlapped) in ASYNC_TPS.items():
        overhead = tensor_parallel_overhead(width, 8, 400e12, 450e9)
        speeds = f"{plain:,.0f} | {overlapped:,.0f} | {overlapped / plain - 1:.0%}"
        yield f"| {name} | {width:,} | {overhead:.0%} | {speeds} |"


def flops_a_token(sequence_length: int) -> float:
    """Of Llama 3 8B with full recomputation and half of attention's squares, in FLOPs of bf16.

    In float8 the linear layers of the blocks cost half of that, at best; attention and the head do not.
    """
    table = 128_256 * WIDTH
    linear = 8 * (overlap.PARAMETERS - 2 * table) / 2
    return linear + 6 * table + 4 * 4 * sequence_length / 2 * WIDTH * 32


def flops_left(num_ranks: int) -> float:
    """The share of one rank's speed that is left where a sequence is so many times as long."""
    return flops_a_token(32_768) / flops_a_token(32_768 * num_ranks)


def context_runs() -> Iterator[str]:
    """torchtitan's context parallelism, beside what the longer sequences cost anyway."""
    yield "| ranks | sequence | tokens/s of a GPU | of one rank's | FLOPs alone would leave |"
    yield "| ---: | ---: | ---: | ---: | ---: |"
    for n, speed in CONTEXT_TPS.items():
        share = f"{speed / CONTEXT_TPS[1]:.0%} | {flops_left(n):.0%}"
        yield f"| {n} | {32_768 * n:,} | {speed:,} | {share} |"


def text() -> str:
    """The whole page."""
    flops = FSDP_TPS["FSDP, compiled"][0] * 6 * overlap.PARAMETERS
    share = smallest_hidden_share(overlap.PARAMETERS, flops, 400e9)
    part = smallest_hidden_part(HEADS, KV_HEADS, 400e12, 450e9, zigzag=True)
    return TEMPLATE.read_text(encoding="utf-8").format(
        machines=_lines(machines),
        sharded=_lines(fully_sharded_runs),
        tensor=_lines(tensor_runs),
        context=_lines(context_runs),
        titan=TITAN,
        asynchronous=ASYNC,
        flops=flops / 1e12,
        share=share,
        tokens=overlap.LOCAL_TOKENS,
        times=overlap.LOCAL_TOKENS / share,
        part=part,
        part_times=32_768 / part,
    )


def _lines(table: Callable[[], Iterator[str]]) -> str:
    return "\n".join(table())


def draw() -> None:
    """The table of machines as a picture."""
    import matplotlib.pyplot as plt

    from lessons.page.look import BLUE, GREEN, ORANGE, figure

    _, (left, right) = figure(1, 2, figsize=(10, 3.2), gridspec_kw={"width_ratios": (3, 2)}, sharey=True)
    rows = [thresholds(*machine) for machine in MACHINES.values()]
    columns: list[Sequence[float]] = list(zip(*rows, strict=True))
    places = range(len(rows))
    left.plot(columns[0], places, "o", color=BLUE, label="data parallelism, ZeRO-3: tokens of a GPU")
    left.plot(columns[1], places, "s", color=GREEN, label="zigzag ring: tokens of a sequence on a GPU")
    left.set(xscale="log", yticks=places, yticklabels=MACHINES, xlabel="tokens from which the wire is hidden")
    left.set_xticks([500, 1000, 2000, 5000, 10_000], ["500", "1,000", "2,000", "5,000", "10,000"])
    left.set_xticks([], minor=True)
    left.invert_yaxis()
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
    right.barh(places, [100 * each for each in columns[2]], color=ORANGE)
    right.set(xlabel="tensor parallelism on all ranks:\n% of computing, width 4,096")
    plt.savefig(PICTURE, dpi=110, bbox_inches="tight")
    plt.close()


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
    draw()
