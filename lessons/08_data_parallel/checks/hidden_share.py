"""Checks of `smallest_hidden_share`: a ratio of two speeds, rounded up."""

import math
from fractions import Fraction

from grader.checks import Answers, Trial, check, compare_answers, exercise, require_refusal
from lessons_shared.thresholds import ROUNDS, require_equal_times

exercise(
    "smallest_hidden_share",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Write both times down: the bytes that a rank sends, over its speed; the FLOPs of t tokens, over its "
        "speed. For which t are they equal? What cancels?",
        "2 · element_bytes · P / bytes_per_second = 4 · P · t / flops_per_second. Solve for t on paper, so "
        "that P is in no line of code, and divide once: each division rounds.",
        "-(-a // b) is a / b rounded up, exactly. math.ceil(a / b) will do where a and b are not huge.",
    ),
)

Call = tuple[int, float, float, int]


def exactly(_parameters: int, flops: float, speed: float, element_bytes: int = 2) -> Fraction:
    """Tokens for which the two times are equal."""
    return element_bytes * Fraction(flops) / (2 * Fraction(speed))


def truth(*call: float) -> int:
    return math.ceil(exactly(*call))


# --- what is asked ---


def draw(trial: Trial) -> tuple[int, int, int]:
    """A model, a processor and a wire; the quotient of the speeds is not whole, and far from it."""
    speed = trial.integer(10**8, 10**12)
    tokens = trial.integer(9, 10**5)
    return trial.integer(10**6, 10**12), tokens * speed + trial.integer(speed // 3, speed // 2), speed


def ask_speeds(trial: Trial) -> Answers:
    """Two bytes a number, said or not, and other widths; floats and whole numbers."""
    calls: list[tuple] = [(124_337_664, 312e12, 300e9), (8_030_261_248, 989e12, 450e9, 4)]
    one = draw(trial)
    calls += [(*one, width) for width in (1, 2, 4, 8)]
    for width in (1, 2, 4, 8) * 2:
        parameters, flops, speed = draw(trial)
        calls += [(parameters, float(flops), float(speed)), (parameters, flops, speed, width)]
    speed = 10**12
    calls.append((one[0], trial.integer(3, 9) * speed + 1, speed, 2))  # just above a whole number
    return Answers(trial, "smallest_hidden_share", calls, truth)


def ask_equal_times(trial: Trial) -> Answers:
    """The quotient is whole, for speeds of all sizes that a float holds; each machine with three models."""
    calls = []
    for _ in range(40):
        speed = 64 * trial.integer(10**7, 3 * 10**10)
        tokens, width = trial.integer(9, 10**5), trial.choice([2, 4])
        flops = 2 * tokens * speed // width
        calls += [(trial.integer(10**6, 10**12), flops, speed, width) for _ in range(3)]
    return Answers(trial, "smallest_hidden_share", calls, truth)


def ask_published(trial: Trial) -> Answers:
    """An H100 inside its machine, and across machines: 2,200 and 2,475 tokens (How to Scale Your Model)."""
    models = [trial.integer(10**6, 10**12) for _ in range(3)]
    calls = [(p, 990e12, speed) for p in models for speed in (450e9, 400e9)]
    return Answers(trial, "smallest_hidden_share", calls, truth)


def ask_nonsense(trial: Trial) -> Answers:
    parameters, flops, speed = draw(trial)
    wrong: list[Call] = [
        (parameters, flops, 0, 2),
        (parameters, flops, -speed, 2),
        (parameters, 0, speed, 2),
        (parameters, -flops, speed, 2),
        (parameters, -flops, -speed, 2),
        (parameters, float(flops), 0.0, 4),
        (parameters, 0.0, 0.0, 4),
    ]
    return Answers(trial, "smallest_hidden_share", wrong, lambda *_: math.nan)


# --- what known slips lead to ---


def slips(parameters: int, flops: float, speed: float, element_bytes: int = 2) -> dict[str, float]:
    t = exactly(parameters, flops, speed, element_bytes)
    known = {
        "half: a ring sends 2·S, for a reduce-scatter and an all-gather, and backward takes 4·P FLOPs a "
        "token": t / 2,
        "forward is counted in, 6·P FLOPs a token: the gradients are made in backward": t * 2 / 3,
        "2·P FLOPs a token are forward's: backward takes 4·P": t * 2,
        "element_bytes is not used: gradients of 2 bytes": t * 2 / element_bytes,
        "element_bytes is not used: gradients of 4 bytes": t * 4 / element_bytes,
        "the elements are counted, not their bytes": t / element_bytes,
        "bytes_per_second is taken for bits": t * 8,
        "bytes_per_second is turned into bits, and S stays in bytes": t / 8,
        "element_bytes // 2 of one byte is 0": t * (element_bytes // 2 * 2) / element_bytes,
        "the two speeds have changed places": 1 / t * element_bytes**2 / 4,
        "P is left in: it is on both sides of the inequality": t * parameters,
    }
    rounded = {told: math.ceil(number) for told, number in known.items()}
    return rounded | {
        "one token too few, just above a whole number: a little is taken off before it is rounded up, or the "
        "quotient has few digits, as in float32": math.ceil(t - Fraction(1, 10**6)),
        "rounded down: with so few tokens backward ends before the all-reduce": math.floor(t),
        "rounded to the nearest whole number: where that is below, backward ends first": round(t),
        "always one more: where the times are equal, the all-reduce is hidden": math.floor(t) + 1,
        "`/ 2 * x` divides by 2, then multiplies by x: 2 * x needs brackets": math.ceil(
            element_bytes * flops / 2 * speed
        ),
        "`// 2 * x` divides by 2, then multiplies by x: 2 * x needs brackets": (
            -(-element_bytes * flops // 2 * speed)
        ),
    }


# --- the checks ---


@check("smallest_hidden_share")
def backward_takes_as_long(trial: Trial) -> None:
    """With that many tokens backward takes as long as the all-reduce or longer, and with one fewer less."""
    help = "Least whole t with 2 · element_bytes · P / bytes_per_second <= 4 · P · t / flops_per_second."
    compare_answers(trial, trial.once(ask_speeds), slips=slips, help=help)


@check("smallest_hidden_share")
def equal_times_are_hidden(trial: Trial) -> None:
    """Where both times are equal for a whole number of tokens, that is the answer, for every model."""
    answers = trial.once(ask_equal_times)
    cause = ROUNDS
    of_machines = {
        (tuple(machine), given) for (_, *machine), given in zip(answers.calls, answers.given, strict=True)
    }
    if len(of_machines) > len({machine for machine, _ in of_machines}):
        cause += ", for some P and not for others"
    require_equal_times(trial, answers, truth, slips, "the all-reduce", cause)


@check("smallest_hidden_share")
def published_thresholds_come_out(trial: Trial) -> None:
    """H100s at 990 TFLOP/s need 2,200 tokens at 450 GB/s, and 2,475 at 400 GB/s, as a published book says."""
    compare_answers(
        trial,
        trial.once(ask_published),
        slips=slips,
        help="For bf16, t is flops_per_second / bytes_per_second.",
    )


@check("smallest_hidden_share")
def speeds_are_positive(trial: Trial) -> None:
    """A speed that is 0 or negative is a ValueError."""
    require_refusal(trial, trial.once(ask_nonsense), help="Look at both speeds before anything is divided.")
