"""Checks of `best_segment_length`: the length of a group for which the fewest bytes are alive at once."""

import math
import operator
from collections.abc import Callable
from functools import partial

import torch

from grader.checks import Answers, Trial, check, compare_answers, exercise

exercise(
    "best_segment_length",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Write the bytes as a function of k, and try k = 1, 2, ..., num_blocks.",
        "ceil(a / b) of whole numbers is -(-a // b). min(candidates, key=...) returns the first of equals.",
    ),
)


def most_bytes(num_blocks: int, block_bytes: int, boundary_bytes: int, k: int) -> int:
    return -(-num_blocks // k) * boundary_bytes + k * block_bytes


def truth(num_blocks: int, block_bytes: int, boundary_bytes: int) -> int:
    sizes = (most_bytes(num_blocks, block_bytes, boundary_bytes, k) for k in range(1, num_blocks + 1))
    best, at = math.inf, 0
    for k, size in enumerate(sizes, start=1):
        if size < best:
            best, at = size, k
    return at


def ask(trial: Trial) -> Answers:
    calls = [
        (1, 100, 1),
        (1, 1, 100),
        (12, 1, 0),
        (12, 0, 1),
        (9, 7, 7),
        (16, 5, 5),
        (12, 100, 1),
        (12, 1, 100),
    ]
    calls += [(trial.integer(2, 60), trial.integer(1, 40), trial.integer(1, 400)) for _ in range(60)]
    calls += [
        (k * (k + 1), c, c) for k in range(1, 7) for c in (trial.integer(1, 90),)
    ]  # k and k+1 are equal
    calls += [(trial.integer(2, 30), 0, 0)]
    calls += [(n, 2**20 * trial.integer(20, 70), 2**20 * trial.integer(1, 9)) for n in (12, 24, 48, 96)]
    calls += [(2, c, c + 1) for c in (trial.integer(2**26, 2**29), trial.integer(2**26, 2**29))]
    return Answers(trial, "best_segment_length", calls, truth)


def ties(num_blocks: int, block_bytes: int, boundary_bytes: int) -> list[int]:
    """All lengths that are equally good."""
    arguments = (num_blocks, block_bytes, boundary_bytes)
    least = most_bytes(*arguments, truth(*arguments))
    return [k for k in range(1, num_blocks + 1) if most_bytes(*arguments, k) == least]


def rounded_bytes(n: int, block: int, boundary: int, k: int) -> float:
    """The same in float32."""
    block_bytes, boundary_bytes = torch.tensor([block, boundary], dtype=torch.float32)
    return (-(-n // k) * boundary_bytes + k * block_bytes).item()


def first_of(num_blocks: int, candidates: object, key: object) -> int:
    return min((k for k in candidates if 1 <= k <= num_blocks), key=key)


STAIRCASE = (
    "that is where L/k is right, and with ceil(L/k) the bytes are a staircase, whose lowest step may lie "
    "further off: try every k"
)
LATER = "the bytes are a staircase, and a later step may lie lower. Try every k"


def downhill(num_blocks: int, bytes_of: Callable[[int], int], uphill: Callable[[int, int], bool]) -> int:
    """The best of the lengths before the first step that goes uphill."""
    last = next((k for k in range(1, num_blocks) if uphill(bytes_of(k + 1), bytes_of(k))), num_blocks)
    return min(range(1, last + 1), key=bytes_of)


def slips(n: int, block: int, boundary: int) -> dict[str, float]:
    every = range(1, n + 1)
    root = math.sqrt(n * boundary / block) if block else n
    bytes_of = partial(most_bytes, n, block, boundary)
    return {
        "the last group, where it is shorter, has no input: L/k is rounded down": first_of(
            n, every, lambda k: n // k * boundary + k * block
        ),
        "L/k is not rounded up: the group that is shorter has an input too": first_of(
            n, every, lambda k: n / k * boundary + k * block
        ),
        "bytes are rounded, as float32 rounds large numbers: compute with Python's whole numbers": first_of(
            n, every, partial(rounded_bytes, n, block, boundary)
        ),
        "a group counts as k·(block_bytes - boundary_bytes): all that its blocks keep is alive": first_of(
            n, every, lambda k: bytes_of(k) - k * boundary
        ),
        "only lengths that divide num_blocks were tried": first_of(
            n, [k for k in every if n % k == 0], bytes_of
        ),
        "this is the number of groups, or block and boundary have changed places": first_of(
            n, every, lambda k: -(-n // k) * block + k * boundary
        ),
        "this is the square root of num_blocks: right where a block keeps as much as a boundary": round(
            math.sqrt(n)
        ),
        "the best real number, rounded: the bytes are a staircase, so try the whole numbers": min(
            max(round(root), 1), n
        ),
        f"the better of the two whole numbers beside a square root: {STAIRCASE}": first_of(
            n, {max(1, min(k, n)) for k in (int(root), int(root) + 1)}, lambda k: (bytes_of(k), k)
        ),
        f"the best of 1, num_blocks and the two whole numbers beside a square root: {STAIRCASE}": first_of(
            n, {1, n, math.floor(root), math.ceil(root)}, lambda k: (bytes_of(k), k)
        ),
        f"it stops at the first length that is no better than the one before: {LATER}": downhill(
            n, bytes_of, operator.ge
        ),
        f"it stops at the first length that is worse than the one before: {LATER}": downhill(
            n, bytes_of, operator.gt
        ),
        "a group of all blocks has an input, too: at k = num_blocks one boundary is missing": first_of(
            n, every, lambda k: bytes_of(k) - boundary * (k == n)
        ),
    }


@check("best_segment_length")
def length_needs_the_fewest_bytes(trial: Trial) -> None:
    """It is the length k for which ceil(L/k)·boundary_bytes + k·block_bytes is smallest."""
    answers = trial.once(ask)
    help = "Compute the bytes for every k from 1 to num_blocks, and take the best."
    compare_answers(trial, answers, slips=slips, help=help, where=lambda *call: len(ties(*call)) == 1)


@check("best_segment_length")
def smallest_of_equals(trial: Trial) -> None:
    """Of lengths that need equally many bytes, it is the smallest."""
    answers = trial.once(ask)
    others_are_right = all(a.right for a in answers.select("", lambda *call: len(ties(*call)) == 1, 0.0))

    def known(*call: int) -> dict[str, float]:
        largest = {"this is the largest of the equally good lengths": ties(*call)[-1]}
        return largest if others_are_right else largest | slips(*call)

    compare_answers(
        trial,
        answers,
        slips=known,
        help="A shorter group is computed again in smaller pieces: prefer it. min() returns the first.",
        where=lambda *call: len(ties(*call)) > 1,
    )
