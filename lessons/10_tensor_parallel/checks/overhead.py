"""Checks of `tensor_parallel_overhead`: seconds of all-reduces over seconds of products, of one block."""

import math

from grader.checks import Answers, Trial, check, compare_answers, exercise, require_refusal

exercise(
    "tensor_parallel_overhead",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "For one token: the bytes that a rank sends in a block's all-reduces, forward and backward, and the "
        "FLOPs that it computes there. How many all-reduces did section 2 count?",
        "An all-reduce of h numbers sends 2 · (n-1)/n · h · element_bytes. A block has 12 · h² weights, a "
        "rank the n-th part of them; forward takes 2 FLOPs a weight, backward 4.",
    ),
)
TOLERANCE = 1e-6


def truth(width: int, n: int, flops: float, speed: float, element_bytes: int = 2) -> float:
    sent = 4 * 2 * (n - 1) / n * width * element_bytes
    return (sent / speed) / (6 * 12 * width**2 / n / flops)


# --- what is asked ---


def draw(trial: Trial, num_ranks: int) -> tuple[int, int, float, float]:
    return 64 * trial.integer(4, 300), num_ranks, trial.integer(10, 2000) * 1e12, trial.integer(1, 900) * 1e9


def ask_groups(trial: Trial) -> Answers:
    """Groups of 2 and more, models of all widths, two bytes a number, said or not, and other widths."""
    calls: list[tuple] = [(12288, 8, 400e12, 450e9), (8192, 8, 989e12, 450e9, 2), (4096, 2, 312e12, 300e9, 4)]
    for n in (2, 3, 4, 8, 16, 72):
        calls += [draw(trial, n), (*draw(trial, n), 1), (*draw(trial, n), 4)]
    # weights that do not divide, and so few of them that a rounded share shows
    calls += [(trial.integer(3, 12), *draw(trial, n)[1:]) for n in (7, 11, 13)]
    return Answers(trial, "tensor_parallel_overhead", calls, truth)


def ask_one_rank(trial: Trial) -> Answers:
    calls: list[tuple] = [draw(trial, 1), (*draw(trial, 1), 4)]
    return Answers(trial, "tensor_parallel_overhead", calls, lambda *_: 0.0)


def ask_nonsense(trial: Trial) -> Answers:
    width, n, flops, speed = draw(trial, 4)
    wrong: list[tuple] = [
        (width, n, flops, 0.0),
        (width, n, flops, -speed),
        (width, n, 0.0, speed),
        (width, n, -flops, speed),
        (width, n, -flops, -speed),
        (width, 1, flops, 0.0),
        (width, 1, -flops, speed),
    ]
    return Answers(trial, "tensor_parallel_overhead", wrong, lambda *_: math.nan)


# --- what known slips lead to ---


def slips(width: int, n: int, flops: float, speed: float, element_bytes: int = 2) -> dict[str, float]:
    right = truth(width, n, flops, speed, element_bytes)
    rounded = 72 * width**2 // n
    return {
        "a rank's share of the FLOPs is rounded down to a whole number: divide by n with /": (
            right * 72 * width**2 / n / rounded
        ),
        "half as much again: forward alone is counted (backward sends as much and computes twice as much) "
        "or the MLP without attention's four matrices": right * 3 / 2,
        "half: attention and MLP have an all-reduce each, in forward and in backward, and a ring sends "
        "2 · (n-1)/n of the tensor for each": right / 2,
        "three times: forward's FLOPs alone, and backward takes twice as many again": right * 3,
        "an all-reduce sends one tensor: a ring sends 2 · (n-1)/n of it": right * n / (2 * (n - 1)),
        "n in place of n-1: what is on a rank already need not be sent": right * n / (n - 1),
        "each rank computes the whole block: its products are cut, too": right / n,
        "n times too much: a ring sends 1/n of it in a step, or the products are cut over the ranks twice": (
            right * n
        ),
        "all numbers are 2 bytes wide: element_bytes is not used": right * 2 / element_bytes,
        "the elements are counted, not their bytes": right / element_bytes,
        "bytes_per_second is taken for bits": right * 8,
        "computing over sending: it is upside down": 1 / right,
        "a block of h² weights: it has 12 of them": right * 12,
        "as a part of the whole step: over the computing alone": right / (1 + right),
        "in percent": 100 * right,
        **{f"it is rounded to {digits} decimals": round(right, digits) for digits in (2, 3, 4, 6)},
    }


# --- the checks ---


@check("tensor_parallel_overhead")
def sending_over_computing(trial: Trial) -> None:
    """It is the time of a block's all-reduces over the time of its products, forward and backward."""
    help = "(4 · 2(n-1)/n · h · element_bytes / bytes_per_second) / (72 · h² / n / flops_per_second)."
    compare_answers(trial, trial.once(ask_groups), slips=slips, help=help, tolerance=TOLERANCE)


@check("tensor_parallel_overhead")
def one_rank_sends_nothing(trial: Trial) -> None:
    """On one rank it is 0."""
    help = "Nothing is sent where n - 1 is 0."
    compare_answers(trial, trial.once(ask_one_rank), help=help, tolerance=TOLERANCE)


@check("tensor_parallel_overhead")
def speeds_are_positive(trial: Trial) -> None:
    """A speed that is 0 or negative is a ValueError."""
    require_refusal(
        trial, trial.once(ask_nonsense), help="Look at both speeds before anything else, on one rank too."
    )
