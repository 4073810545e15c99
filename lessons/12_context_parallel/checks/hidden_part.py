"""Checks of `smallest_hidden_part`: a ratio of two speeds, and what of a block is sent and computed."""

import math
from fractions import Fraction

from grader.checks import Answers, Trial, check, compare_answers, exercise, require_refusal
from lessons_shared.thresholds import ROUNDS, require_equal_times

exercise(
    "smallest_hidden_part",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Write both times down for t tokens of a sequence on a rank: the bytes of a block of keys and one of "
        "values, over the wire's speed; the FLOPs of t queries with t keys, over the processor's. What is in "
        "both?",
        "2 · b · t · h_kv · element_bytes / bytes_per_second = 4 · b · t² · h / flops_per_second, with "
        "h_kv / h = num_kv_heads / num_heads. The zigzag computes half of it: 2 · b · t² · h.",
        "Solve for t on paper, and divide once: each division rounds. -(-a // b) is a / b rounded up.",
    ),
)


def exactly(
    heads: int, kv_heads: int, flops: float, speed: float, element_bytes: int = 2, zigzag: bool = False
) -> Fraction:
    """Tokens for which the two times are equal."""
    bytes_a_token = 2 * element_bytes * Fraction(kv_heads, heads)  # over b · h, like the FLOPs
    flops_a_pair = 2 if zigzag else 4
    return bytes_a_token * Fraction(flops) / (flops_a_pair * Fraction(speed))


def truth(*call: float) -> int:
    return math.ceil(exactly(*call))


# --- what is asked ---


def draw(trial: Trial, shared: int) -> tuple[int, int, int, int]:
    """Heads, heads of keys and values, a processor and a wire; the quotient is not whole, and far from it."""
    kv_heads = trial.integer(1, 16)
    speed = 8 * shared * trial.integer(10**7, 10**10)
    tokens = trial.integer(40, 10**5)
    return (
        shared * kv_heads,
        kv_heads,
        shared * (tokens * speed + trial.integer(speed // 3, speed // 2)),
        speed,
    )


def ask_speeds(trial: Trial) -> Answers:
    """Heads shared or not, two bytes a number, said or not, and other widths, zigzag or not."""
    calls: list[tuple] = [(128, 8, 400e12, 50e9), (32, 8, 989e12, 450e9, 4), (16, 16, 312e12, 300e9, 2, True)]
    for shared in (1, 2, 4, 8):
        calls.append(draw(trial, shared))
        for width in (1, 2, 4):
            calls += [(*draw(trial, shared), width, zigzag) for zigzag in (False, True)]
    return Answers(trial, "smallest_hidden_part", calls, truth)


def ask_equal_times(trial: Trial) -> Answers:
    """The quotient is whole, for speeds of all sizes that a float holds."""
    calls = []
    for _ in range(60):
        shared, kv_heads, width = trial.choice([1, 2, 4]), trial.integer(1, 16), trial.choice([2, 4])
        speed, tokens = 64 * trial.integer(10**7, 3 * 10**10), 2 * trial.integer(9, 10**5)
        zigzag = trial.choice([False, True])
        flops = 2 * tokens * speed * shared // (width * (2 if zigzag else 1))
        calls.append((shared * kv_heads, kv_heads, flops, speed, width, zigzag))
    return Answers(trial, "smallest_hidden_part", calls, truth)


def ask_impossible_speeds(trial: Trial) -> Answers:
    heads, kv_heads, flops, speed = draw(trial, 2)
    wrong: list[tuple] = [
        (heads, kv_heads, flops, 0),
        (heads, kv_heads, flops, -speed),
        (heads, kv_heads, 0.0, speed),
        (heads, kv_heads, -flops, speed),
        (heads, kv_heads, -flops, -speed),
    ]
    return Answers(trial, "smallest_hidden_part", wrong, lambda *_: math.nan)


def ask_undivided_heads(trial: Trial) -> Answers:
    _, _, flops, speed = draw(trial, 2)
    wrong: list[tuple] = [(12, 8, flops, speed), (8, 16, flops, speed)]
    return Answers(trial, "smallest_hidden_part", wrong, lambda *_: math.nan)


# --- what known slips lead to ---


def slips(
    heads: int, kv_heads: int, flops: float, speed: float, element_bytes: int = 2, zigzag: bool = False
) -> dict[str, float]:
    t = exactly(heads, kv_heads, flops, speed, element_bytes, zigzag)
    shared = Fraction(heads, kv_heads)
    known = {
        "a hop of keys alone: values travel, too": t / 2,
        "2·t²·h FLOPs are the scores alone: the product with the values takes as many": t * 2,
        "all heads of q are sent: keys and values have num_kv_heads": t * shared,
        "shared heads make a computed block smaller, too: every head of q computes": t / shared,
        "num_heads and num_kv_heads have changed places": t * shared**2,
        "zigzag is not used: it computes half of a block at each step": t / 2 if zigzag else t,
        "zigzag halves the tokens: with half of the work to hide behind it takes twice as many": t / 4
        if zigzag
        else t,
        "half a block for the plain ring, too: some rank computes a whole one at each step": t
        if zigzag
        else 2 * t,
        "element_bytes is not used: numbers of 2 bytes": t * 2 / element_bytes,
        "the elements are counted, not their bytes": t / element_bytes,
        "element_bytes // 2 of one byte is 0": t * (element_bytes // 2 * 2) / element_bytes,
        "bytes_per_second is taken for bits": t * 8,
        "bytes_per_second is turned into bits, and the block stays in bytes": t / 8,
        "the two speeds have changed places": 1 / t * (t * Fraction(speed) / Fraction(flops)) ** 2,
    }
    rounded = {told: math.ceil(number) for told, number in known.items()}
    return (
        rounded
        | {
            "rounded down: with so few tokens the block is computed before the hop has ended": math.floor(t),
            "rounded to the nearest whole number: where that is below, the hop takes longer": round(t),
            "always one more: where the times are equal, the hop is hidden": math.floor(t) + 1,
        }
        | (
            {"it is rounded up before it is doubled: round once, last": 2 * math.ceil(t / 2)}
            if zigzag
            else {}
        )
    )


# --- the checks ---


@check("smallest_hidden_part")
def computing_takes_as_long(trial: Trial) -> None:
    """With that many tokens computing takes as long as the hop or longer, and with one fewer less."""
    help = (
        "Least t with 2 · t · h_kv · element_bytes / bytes_per_second <= 4 · t² · h / flops_per_second, "
        "and with zigzag 2 · t² · h."
    )
    compare_answers(trial, trial.once(ask_speeds), slips=slips, help=help)


@check("smallest_hidden_part")
def equal_times_are_hidden(trial: Trial) -> None:
    """Where both times are equal for a whole number of tokens, that is the answer."""
    require_equal_times(trial, trial.once(ask_equal_times), truth, slips, "the hop", ROUNDS)


@check("smallest_hidden_part")
def published_parts_come_out(trial: Trial) -> None:
    """An A100 needs 1,040 tokens at 300 GB/s, and 24,960 at 12.5: the ring's paper prints 1.0k and 24.5k."""
    calls = [(32, 32, 312e12, speed) for speed in (300e9, 12.5e9)]
    answers = Answers(trial, "smallest_hidden_part", calls, truth)
    compare_answers(trial, answers, slips=slips, help="All heads alike, bf16, no zigzag: F / B.")


@check("smallest_hidden_part")
def arguments_make_sense(trial: Trial) -> None:
    """A speed that is 0 or negative, or heads that do not divide, is a ValueError."""
    require_refusal(trial, trial.once(ask_impossible_speeds), help="Look at both speeds first.")
    require_refusal(
        trial,
        trial.once(ask_undivided_heads),
        help="Each head of keys serves as many of q's: 12 are not divisible by 8, nor 8 by 16.",
    )
