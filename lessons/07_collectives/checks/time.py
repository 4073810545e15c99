"""Checks of `collective_time`: steps, latency and bytes of five collectives."""

import math
from collections.abc import Callable
from typing import Any

from grader.checks import Answers, Trial, apart, check, exercise, explain_answers, require_refusal, show

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")

exercise(
    "collective_time",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "How many steps are there, and how many bytes does a rank send in one step, and receive? A step of m "
        "bytes takes latency + m / bandwidth + m · seconds_per_byte.",
        "A ring of n ranks: n - 1 steps of S/n bytes; an all-reduce is two of them. An exchange of n - 1 "
        "messages of S/n is the same. A tree: ceil(log2 n) steps of S bytes.",
        "(n - 1).bit_length() is ceil(log2 n), exactly, and 0 for n = 1.",
    ),
)

NEAR = 1e-6
"""How far off an answer may be, as a part of itself."""

Slips = Callable[..., dict[str, float]]
Call = tuple[str, int, int, float, float]


def seconds(kind: str, size: float, n: int, latency: float, bandwidth: float, per_byte: float = 0.0) -> float:
    """What is true."""
    if kind == "broadcast":
        return (n - 1).bit_length() * (latency + size * (1 / bandwidth + per_byte))
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * ((n - 1) * latency + (n - 1) / n * size * (1 / bandwidth + per_byte))


def slips(kind: str, size: float, n: int, latency: float, bandwidth: float) -> dict[str, float]:
    """What known slips give instead."""
    right = seconds(kind, size, n, latency, bandwidth)
    rounds = 2 if kind == "all_reduce" else 1
    ring = rounds * (n - 1)
    wire = size / bandwidth
    if n == 1:
        return {
            "one rank sends nothing, and here the bytes count": rounds * wire,
            "one rank has no step, and here the latency counts": latency,
            "one rank has no step, and here one counts": latency + wire,
        }
    floor, steps = math.floor(math.log2(n)), (n - 1).bit_length()
    known = {
        "0 bytes take no time here: their steps take their latency": right if size else 0.0,
        "latency counts once a step, and here it counts once a call": latency
        + seconds(kind, size, n, 0.0, bandwidth),
        "latency is missing": seconds(kind, size, n, 0.0, bandwidth),
        "only latency is there: the bytes are missing, or `//` made whole seconds of them": seconds(
            kind, 0.0, n, latency, bandwidth
        ),
        "bandwidth is in bytes a second, and here it counts bits": seconds(
            kind, size * 8, n, latency, bandwidth
        ),
        "n steps where n - 1 are enough": rounds * n * (latency + wire / n),
        "whole-number division: S // n drops what is left over": seconds(
            kind, size // n * n, n, latency, bandwidth
        ),
        **{
            f"it is rounded to {digits} decimals of a second, which leaves short times few digits": round(
                right, digits
            )
            for digits in (3, 6, 9)
        },
    }
    if kind == "broadcast":
        return known | {
            "log2 n rounded down: the ranks beyond the last power of two get nothing": floor
            * (latency + wire),
            "log2 n not rounded: there is no part of a step": math.log2(n) * (latency + wire),
            "a star or a chain, n - 1 steps: a tree takes ceil(log2 n)": (n - 1) * (latency + wire),
            "S/n in a step: down a tree the whole tensor goes in each step": steps * (latency + wire / n),
            "a ring's (n-1)/n: in a tree the whole tensor goes in each step": (n - 1) * (latency + wire / n),
            "the bytes count once: a tree sends the whole tensor again in each step": steps * latency + wire,
        }
    return known | {
        "whole tensors in every step: a step of a ring sends S/n bytes": ring * (latency + wire),
        "n/(n-1) instead of (n-1)/n": ring * latency + rounds * n / (n - 1) * wire,
        "S counts once: of the whole, (n-1)/n travels": ring * latency + rounds * wire,
        "one round of n - 1 steps: an all-reduce is two, a reduce-scatter and an all-gather": ring
        / rounds
        * (latency + wire / n),
        "two rounds: only an all-reduce needs both": 2 * (n - 1) * (latency + wire / n),
        "n times too many bytes: num_bytes is the whole tensor, not one rank's n-th of it": (n - 1)
        * rounds
        * (latency + wire),
        "the bytes are counted twice, the steps once": (n - 1) * latency + 2 * (n - 1) / n * wire,
        "S / n is rounded up to a whole number of bytes": seconds(
            kind, math.ceil(size / n) * n, n, latency, bandwidth
        ),
        "the steps of a tree: a ring has n - 1": rounds * (steps * latency + (n - 1) / n * wire),
    }


def slips_per_byte(
    kind: str, size: float, n: int, latency: float, bandwidth: float, per_byte: float
) -> dict[str, float]:
    """What known slips give where a received byte costs something."""
    without = seconds(kind, size, n, latency, bandwidth)
    received = (seconds(kind, size, n, 0.0, 1.0)) * per_byte
    added = kind in ("all_reduce", "reduce_scatter")
    known = {
        "only the reductions pay seconds_per_byte: the others copy what they receive": without
        + (received if added else 0.0),
        **{
            f"{name} pays nothing here: it copies what it receives, as the other kinds do": without
            + (0.0 if name.endswith(f" {kind}") else received)
            for name in ("a broadcast", "an all_gather", "an all_to_all")
        },
        "half of an all-reduce is free: its all-gather copies what it receives": without
        + (received / 2 if kind == "all_reduce" else received),
        "bytes are divided by seconds_per_byte, and it is a price: seconds for each byte": without
        + seconds(kind, size, n, 0.0, per_byte),
    }
    known["seconds_per_byte counts once a call for all of S, also where one rank receives nothing"] = (
        without + size * per_byte
    )
    if n > 1:
        known |= {
            "seconds_per_byte counts once a call for all of S, not for what is received in each step": without
            + size * per_byte,
            "seconds_per_byte counts once a step, whatever its bytes": without
            + seconds(kind, 0.0, n, per_byte, 1.0),
            "a step receives as many bytes as it sends: here it pays seconds_per_byte for S": without
            + seconds(kind, 0.0, n, size * per_byte, 1.0),
        }
    return known | {"seconds_per_byte is missing": without}


def draw(trial: Trial, kind: str, n: int) -> Call:
    latency = trial.rng.uniform(1e-6, 1e-3)
    return kind, trial.integer(1_000, 10**9), n, latency, trial.rng.uniform(1e8, 1e12)


def observe_times(trial: Trial) -> Answers:
    """Two, three, a power of two, and many; no latency, few bytes, and none."""
    calls = []
    for kind in KINDS:
        sizes = [1, 2, 3, 4, 8, trial.integer(5, 7), trial.integer(9, 1000), 1024]
        calls += [draw(trial, kind, n) for n in sizes]
        one = draw(trial, kind, 6)
        calls += [(kind, one[1], 6, 0.0, one[4]), (kind, 8, 6, 0.0, one[4]), (kind, 0, 6, *one[3:])]
    return Answers(trial, "collective_time", calls, seconds)


def observe_bytes_that_cost(trial: Trial) -> Answers:
    """Adding and copying cost about as much as the wire, or much less, or more."""
    calls = []
    for kind in KINDS:
        for n in (1, 2, 4, 8, trial.integer(9, 100)):
            *call, bandwidth = draw(trial, kind, n)
            calls.append((*call, bandwidth, trial.rng.uniform(0.2, 3.0) / bandwidth))
    return Answers(trial, "collective_time", calls, seconds)


def observe_published(trial: Trial) -> Answers:
    """8 H100 on NVLink: 450 GB/s each way, of which rings reached 370 (jax-ml/scaling-book, gpus.md)."""
    calls = [
        (kind, trial.integer(10**8, 10**10), n, 0.0, bandwidth)
        for kind in KINDS
        if kind != "broadcast"
        for n in (8, 16)
        for bandwidth in (370e9, 450e9)
    ]
    return Answers(trial, "collective_time", calls, seconds)


def observe_wrong_kinds(trial: Trial) -> Answers:
    words = ["allreduce", "ALL_REDUCE", "gather", "reduce", "", "all_reduce "]
    calls = [draw(trial, word, 4) for word in words] + [draw(trial, "scan", 1)]  # one rank takes no time
    return Answers(trial, "collective_time", calls, lambda *_: math.nan)


def require_times(
    trial: Trial, answers: Answers, where: Callable[..., bool], help: str, known: Slips = slips
) -> None:
    """The selected answers are right to a millionth."""
    asked = answers.select("", where, NEAR)
    wrong = [answer for answer in asked if not answer.right]
    if wrong:
        first = wrong[0]
        trial.wrong(
            f"{answers.asked(first.call)} is {_apart(first.given, first.true)} is right. "
            f"Wrong for {len(wrong)} of {len(asked)} calls.",
            asked=help,
            cause=explain_answers(answers, asked, slips=known, tolerance=NEAR),
        )


def _apart(given: Any, true: float) -> str:
    """Both numbers, with as many digits as it takes to tell them apart."""
    if isinstance(given, float) and show(given) == show(true):
        digits = next(d for d in range(7, 18) if f"{given:.{d}g}" != f"{true:.{d}g}")
        return f"{given:.{digits}g} where {true:.{digits}g}"
    return f"{show(given)} where {show(true)}"


def of(*kinds: str) -> Callable[..., bool]:
    """Selects the calls of some kinds with more than one rank."""
    return lambda kind, _size, n, *_: kind in kinds and n > 1


@check("collective_time")
def rings_take_n_minus_1_steps(trial: Trial) -> None:
    """all_gather and reduce_scatter: n - 1 steps, each latency + S/n bytes."""
    require_times(
        trial,
        trial.once(observe_times),
        of("all_gather", "reduce_scatter"),
        "(n - 1) · (latency + S / n / bandwidth).",
    )


@check("collective_time")
def an_all_reduce_is_two_rings(trial: Trial) -> None:
    """all_reduce: 2(n - 1) steps, each latency + S/n bytes."""
    require_times(
        trial, trial.once(observe_times), of("all_reduce"), "2(n - 1) · (latency + S / n / bandwidth)."
    )


@check("collective_time")
def a_broadcast_is_a_tree(trial: Trial) -> None:
    """broadcast: ceil(log2 n) steps, each latency + S bytes, for any n."""
    require_times(
        trial, trial.once(observe_times), of("broadcast"), "ceil(log2 n) · (latency + S / bandwidth)."
    )


@check("collective_time")
def an_all_to_all_is_n_minus_1_exchanges(trial: Trial) -> None:
    """all_to_all: n - 1 exchanges, each latency + S/n bytes, S being one rank's whole buffer."""
    require_times(
        trial, trial.once(observe_times), of("all_to_all"), "(n - 1) · (latency + S / n / bandwidth)."
    )


@check("collective_time")
def a_received_byte_costs_seconds_per_byte(trial: Trial) -> None:
    """In every step of every kind, each byte that is received costs seconds_per_byte more."""
    require_times(
        trial,
        trial.once(observe_bytes_that_cost),
        lambda *_: True,
        "A step of m bytes takes latency + m / bandwidth + m · seconds_per_byte.",
        slips_per_byte,
    )


@check("collective_time")
def one_rank_takes_no_time(trial: Trial) -> None:
    """With one rank there is nobody to send to: 0 seconds."""
    require_times(
        trial,
        trial.once(observe_times),
        lambda _kind, _size, n, *_: n == 1,
        "n - 1 steps, or ceil(log2 1) of them, are none.",
    )


@check("collective_time")
def nccls_bus_bandwidth_comes_out(trial: Trial) -> None:
    """S over the time, times the factor of NVIDIA's nccl-tests, is the bandwidth that was put in."""
    answers = trial.once(observe_published)
    for call, given in zip(answers.calls, answers.given, strict=True):
        kind, size, n, _, bandwidth = call
        factor = (2 if kind == "all_reduce" else 1) * (n - 1) / n
        is_number = isinstance(given, int | float) and not isinstance(given, bool) and given > 0
        bus = size / given * factor if is_number else math.nan
        came, put_in = apart(bus / 1e9, bandwidth / 1e9)
        trial.require(
            math.isclose(bus, bandwidth, rel_tol=NEAR),
            f"{answers.asked(call)} is {show(given)}: by the factor of nccl-tests, {factor:g}, that is a bus "
            f"bandwidth of {came} GB/s, not {put_in}",
            help="Without latency, (n-1)/n · S bytes leave a rank, twice that in an all-reduce.",
        )


@check("collective_time")
def another_kind_is_refused(trial: Trial) -> None:
    """A word that is none of the five kinds is a ValueError."""
    answers = trial.once(observe_wrong_kinds)
    among_many = [given for call, given in zip(answers.calls, answers.given, strict=True) if call[2] > 1]
    is_refused = all(str(given).startswith("ValueError") for given in among_many)
    help = "Look at the kind before the number of ranks: one rank alone knows no more kinds."
    require_refusal(trial, answers, KINDS, help=help if is_refused else "")
