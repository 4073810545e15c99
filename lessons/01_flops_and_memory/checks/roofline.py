"""Checks of `attainable_flops_per_second`."""

from functools import lru_cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from grader.checks import Answers, Trial, check, compare_answers, exercise

exercise(
    "attainable_flops_per_second",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "How many seconds would the FLOPs take alone, and how many seconds the bytes?",
        "Three matrices have m·k, k·n and m·n numbers. Divide the FLOPs by the longer of the two times.",
    ),
)

DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
ROUNDING = 1e-6


@lru_cache
def seconds(m: int, k: int, n: int, size: int, peak: float, bandwidth: float) -> tuple[float, float]:
    """Of the FLOPs that a counter counts, and of the bytes that three tensors have."""
    x, y = torch.empty(m, k, device="meta"), torch.empty(k, n, device="meta")
    with FlopCounterMode(display=False) as counter:
        product = x @ y
    num_bytes = sum(matrix.to(DTYPES[size]).nbytes for matrix in (x, y, product))
    return counter.get_total_flops() / peak, num_bytes / bandwidth


def attainable(m: int, k: int, n: int, size: int, peak: float, bandwidth: float) -> float:
    computing, moving = seconds(m, k, n, size, peak, bandwidth)
    return peak * computing / max(computing, moving)


def ask_products(trial: Trial) -> Answers:
    """Products of few tokens and of many, on machines with a ridge from 10 to 300 FLOPs a byte."""
    calls = []
    for _ in range(4):
        h, size = 64 * trial.integer(8, 64), trial.choice([1, 2, 4])
        bandwidth = 1e9 * trial.integer(20, 4000)
        peak = bandwidth * trial.integer(10, 300)
        few, many = trial.integer(1, 4), 64 * trial.integer(100, 400)
        calls += [(few, h, 4 * h, size, peak, bandwidth), (4 * h, few, h, size, peak, bandwidth)]
        calls += [(many, 40 * h, 37 * h, size, peak, bandwidth)]
    calls += [(4096, 64, 4096, 2, 989e12, 3.35e12), (512, 512, 512, 8, 1e12, 1e10)]
    return Answers(trial, "attainable_flops_per_second", calls, attainable)


def roofline_slips(m: int, k: int, n: int, size: int, peak: float, bandwidth: float) -> dict[str, float]:
    computing, moving = seconds(m, k, n, size, peak, bandwidth)
    flops, right = computing * peak, attainable(m, k, n, size, peak, bandwidth)

    def of(numbers: float, width: int = size, flops: float = flops) -> float:
        return min(peak, flops * bandwidth / (numbers * width))

    every = m * k + k * n + m * n
    return {
        "the higher of the two roofs: the lower one is the limit": peak * computing / min(computing, moving),
        "no machine is faster than its peak, however many FLOPs a byte there are": flops / moving,
        "the peak alone: a product of few tokens waits for its bytes": peak,
        "the two times are added up: the machine computes while it moves bytes": flops / (computing + moving),
        "a multiply-add is two FLOPs: 2·m·k·n": of(every, flops=flops / 2),
        "the product is written, too: m·n numbers": of(m * k + k * n),
        "the product is counted with 4 bytes a number, as if sums in fp32 were written: bytes_per_number "
        "holds for it too": of(m * k + k * n + m * n * 4 / size),
        "the weights alone, k·n numbers: the other factor is read and the product is written": of(k * n),
        "the factor (m, k) is missing": of(k * n + m * n),
        "bytes_per_number is missing: these are numbers a second, not bytes": of(every, 1),
        "bytes_per_number is an argument: it is not always 2": of(every, 2),
        "bytes_per_number is an argument: it is not always 4": of(every, 4),
        "the product is read as well: it is written once, and that is all": of(every + m * n),
        "what is read and what is written share bytes_per_second: their bytes add up, and here they go side "
        "by side": of(max(m * k + k * n, m * n)),
        "the three matrices share bytes_per_second: their bytes add up, and here they go side by side": of(
            max(m * k, k * n, m * n)
        ),
        "right for three matrices of one size alone: each has its own": of(3 * m * k),
        "FLOPs a byte are rounded down to a whole number: divide with / where // stands": min(
            peak, flops // (every * size) * bandwidth
        ),
        "these are FLOPs a byte: times bytes a second, they are FLOP/s": flops / (moving * bandwidth),
        "a fraction of the peak: FLOP/s are asked for": right / peak,
    }


@check("attainable_flops_per_second")
def the_lower_roof_is_the_limit(trial: Trial) -> None:
    """Bytes a second times FLOPs a byte, where that is less than the peak; else the peak."""
    help = "The FLOPs, over the longer of two times: that of the FLOPs, and that of the bytes."
    answers = trial.once(ask_products)
    compare_answers(trial, answers, slips=roofline_slips, help=help, tolerance=ROUNDING)
