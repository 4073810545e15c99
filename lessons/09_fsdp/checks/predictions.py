"""Checks of `state_bytes_per_rank` and `communication_elements`: the ZeRO table before it is measured."""

import math
from types import SimpleNamespace
from typing import Any

from grader.checks import Trial, check, exercise

exercise(
    "state_bytes_per_rank",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Data parallelism alone keeps 2 + 2 + 12 bytes a parameter on every rank.",
        "Each stage divides one more of the three by the number of ranks: first the largest.",
    ),
)

exercise(
    "communication_elements",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "A ring reduce-scatter or all-gather of P elements has every rank send P (n-1)/n of them.",
        "An all-reduce is a reduce-scatter and then an all-gather. Stages 1 and 2 do something in between.",
        "In stage 3 nobody has the whole weights: they are gathered for forward, and again for backward.",
    ),
)


def call(rank: Any, name: str, cases: list[tuple[int, int, int]]) -> list:
    function = getattr(rank.submission, name)
    return [dict(function(*case)) for case in cases]


def draw_cases(trial: Trial) -> list[tuple[int, int, int]]:
    sizes = [
        (trial.integer(1, 9) * 10 ** trial.integer(3, 10) + trial.integer(1, 999), n)
        for n in (1, 2, 3, 4, 64, trial.integer(5, 2000))
    ]
    sizes.append((1009, 64))  # a small prime: whole-number division shows
    return [(num_parameters, n, stage) for num_parameters, n in sizes for stage in range(4)]


def observe(trial: Trial, name: str) -> SimpleNamespace:
    cases = draw_cases(trial)
    (results,) = trial.run(call, name, cases)
    return SimpleNamespace(cases=cases, results=results)


def observe_bytes(trial: Trial) -> SimpleNamespace:
    return observe(trial, "state_bytes_per_rank")


def observe_elements(trial: Trial) -> SimpleNamespace:
    return observe(trial, "communication_elements")


def close(value: float, expected: float) -> bool:
    """Up to rounding; a whole number of bytes or elements is as good as its fraction."""
    return math.isclose(value, expected, rel_tol=1e-6, abs_tol=0.5 if expected == 0 else 1.0)


def require_key(trial: Trial, result: dict, key: str, case: tuple[int, int, int]) -> None:
    trial.require(
        key in result,
        f'in stage {case[2]} the dictionary has no "{key}": it has {sorted(result)}',
        help="What a stage does not use is 0: put it in."
        if key in TIMES
        else f"Put it in: every stage has {', '.join(STATES)} and total.",
    )


DIVIDE = ": divide with /"
"""A cause that ends so is its own next step."""


def require_number(trial: Trial, seen: Any, key: str, right: Any, wrong: dict[str, Any], help: str) -> None:
    """One key of every case is right, or the cause is told: `wrong` has a sentence and its formula."""
    for case, result in zip(seen.cases, seen.results, strict=True):
        where = f"{key} of P = {case[0]:,}, n = {case[1]}, stage {case[2]}"
        require_key(trial, result, key, case)
        trial.require(
            isinstance(result[key], int | float) and not isinstance(result[key], bool),
            f"{where}: expected a number, got {result[key]!r}",
            help=help,
        )
    values = [result[key] for result in seen.results]
    causes = [
        told
        for told, formula in wrong.items()
        if all(close(value, formula(*case)) for value, case in zip(values, seen.cases, strict=True))
    ]
    for value, case in zip(values, seen.cases, strict=True):
        expected = float(right(*case))
        if not close(value, expected):
            where = f"{key} of P = {case[0]:,}, n = {case[1]}, stage {case[2]}"
            cause = (causes or [""])[0]
            step = "" if cause.endswith(DIVIDE) else help
            trial.wrong(f"{where}: expected {expected:,.1f}, got {value:,.1f}", step, cause=cause)


def bytes_formula(per_parameter: int, first_stage: int) -> Any:
    return lambda p, n, stage: per_parameter * p / (n if stage >= first_stage else 1)


STATES = {"weights": (2, 3), "gradients": (2, 2), "optimizer": (12, 1)}


def require_state(trial: Trial, key: str) -> None:
    per_parameter, first = STATES[key]
    wrong = {f"every rank has the whole {key} before stage {first}": bytes_formula(per_parameter, 0)}
    wrong |= {
        f"{key}: to be cut from stage {first} on, not from stage {s} on": bytes_formula(per_parameter, s)
        for s in (1, 2, 3, 4)
        if s != first
    }
    wrong |= {
        f"this counts {b} bytes a parameter, not {per_parameter}": bytes_formula(b, first)
        for b in (2, 4, 8, 12, 16)
        if b != per_parameter
    }
    if key == "optimizer":
        told = "the fp32 copy of the weights is whole: it is 4 of the optimizer's 12 bytes, and cut like them"
        wrong[told] = lambda p, n, s: 4 * p + 8 * p / (n if s >= first else 1)
    wrong[f"P // n is a whole number, rounded before it is multiplied{DIVIDE}"] = lambda p, n, s: (
        per_parameter * (p // n if s >= first else p)
    )
    wrong[f"P/n is rounded up before it is multiplied{DIVIDE}"] = lambda p, n, s: (
        per_parameter * (-(-p // n) if s >= first else p)
    )
    wrong[f"only one rank's neighbours were counted: a share is 1/n of the {key}"] = lambda p, n, s: (
        per_parameter * p * ((n - 1) / n if s >= first else 1)
    )
    require_number(
        trial,
        trial.once(observe_bytes),
        key,
        bytes_formula(per_parameter, first),
        wrong,
        f"{per_parameter} bytes a parameter, divided by n in stage {first} and above.",
    )


@check("state_bytes_per_rank")
def optimizer_state_is_cut_first(trial: Trial) -> None:
    """The optimizer's 12 bytes a parameter are divided by n in stages 1, 2 and 3."""
    require_state(trial, "optimizer")


@check("state_bytes_per_rank")
def gradients_are_cut_second(trial: Trial) -> None:
    """The gradients' 2 bytes a parameter are divided by n in stages 2 and 3."""
    require_state(trial, "gradients")


@check("state_bytes_per_rank")
def weights_are_cut_last(trial: Trial) -> None:
    """The weights' 2 bytes a parameter are divided by n in stage 3 alone."""
    require_state(trial, "weights")


@check("state_bytes_per_rank")
def total_is_the_sum(trial: Trial) -> None:
    """The total is that of all three."""
    seen = trial.once(observe_bytes)
    formulas = [bytes_formula(*state) for state in STATES.values()]
    require_number(
        trial,
        seen,
        "total",
        lambda p, n, stage: sum(formula(p, n, stage) for formula in formulas),
        {
            "everything is divided by n": lambda p, n, stage: 16 * p / n,
            "nothing is": lambda p, n, s: 16 * p,
            f"whole-number division (//) rounds each of the three down{DIVIDE}": lambda p, n, s: sum(
                b * p // n if s >= first else b * p for b, first in STATES.values()
            ),
            f"P // n is a whole number, rounded before it is multiplied{DIVIDE}": lambda p, n, s: sum(
                b * (p // n if s >= first else p) for b, first in STATES.values()
            ),
        },
        "Add weights, gradients and optimizer.",
    )


# Table 1 of arXiv:1910.02054: GB (1e9 bytes) on a GPU for a model of 7.5 billion parameters.
PUBLISHED = {1: (120, 120, 120), 4: (52.5, 41.3, 30), 64: (31.4, 16.6, 1.88), 1024: (30.1, 15.1, 0.12)}


@check("state_bytes_per_rank")
def the_papers_table(trial: Trial) -> None:
    """A model of 7.5 billion parameters takes what the ZeRO paper's table 1 says."""
    cases = [(7_500_000_000, n, stage) for n in PUBLISHED for stage in (1, 2, 3)]
    (results,) = trial.run(call, "state_bytes_per_rank", cases)
    published = [gigabytes for row in PUBLISHED.values() for gigabytes in row]
    for (_, n, stage), result, gigabytes in zip(cases, results, published, strict=True):
        case = (7_500_000_000, n, stage)
        require_key(trial, result, "total", case)
        value = result["total"] / 1e9
        trial.require(
            math.isclose(value, gigabytes, rel_tol=0.03),
            f"stage {stage} on {n} ranks: the paper says {gigabytes} GB, you say {value:.2f} GB",
            help="Count in bytes: 2 + 2 + 12 a parameter.",
        )


def once_round(p: int, n: int, stage: int) -> float:
    return p * (n - 1) / n


TIMES = {"all_reduce": (2, 0, 0, 0), "reduce_scatter": (0, 1, 1, 1), "all_gather": (0, 1, 1, 2)}


def require_elements(trial: Trial, key: str, help: str) -> None:
    times = TIMES[key]
    wrong = {
        "the whole tensor was counted: each rank has its own part already, and sends (n-1)/n": (
            lambda p, n, s: times[s] * p
        ),
        "n-1 whole tensors were counted: a ring sends chunks of P/n": lambda p, n, s: times[s] * p * (n - 1),
        "these are bytes or the like: elements are asked for": lambda p, n, s: (
            2 * times[s] * once_round(p, n, s)
        ),
        "these are bytes of fp32: elements are asked for": lambda p, n, s: 4 * times[s] * once_round(p, n, s),
        "what the other stages do was counted too": lambda p, n, s: max(times) * once_round(p, n, s),
        "one pass was left out": lambda p, n, s: max(0, times[s] - 1) * once_round(p, n, s),
        "only the last share was counted: every rank sends n-1 shares of P/n": lambda p, n, s: (
            times[s] * p / n
        ),
        f"P // n is a whole number, rounded before it is multiplied{DIVIDE}": lambda p, n, s: (
            times[s] * (p // n) * (n - 1)
        ),
        "stage 3 gathers the weights twice: forward and backward": lambda p, n, s: (
            min(1, times[s]) * once_round(p, n, s)
        ),
        f"P/n is rounded up before it is multiplied{DIVIDE}": lambda p, n, s: times[s] * -(-p // n) * (n - 1),
        "stage 2 counts once more than it should": lambda p, n, s: (
            (times[s] + (s == 2)) * once_round(p, n, s)
        ),
        "stage 3 counts once more than it should": lambda p, n, s: (
            (times[s] + (s == 3)) * once_round(p, n, s)
        ),
    }
    for last in (1, 2, 3):
        told = f"nothing is all-reduced from stage 1 on, and this counts an all-reduce up to stage {last}"
        wrong |= {told: lambda p, n, s, last=last: 2 * once_round(p, n, s) if s <= last else 0.0}
    require_number(
        trial,
        trial.once(observe_elements),
        key,
        lambda p, n, stage: times[stage] * once_round(p, n, stage),
        wrong,
        help,
    )


@check("communication_elements")
def stage_0_all_reduces(trial: Trial) -> None:
    """Plain data parallelism all-reduces the gradients, 2P (n-1)/n elements; the other stages do not."""
    require_elements(trial, "all_reduce", "An all-reduce goes round the ring twice; stage 0 alone has one.")


@check("communication_elements")
def gradients_are_reduce_scattered(trial: Trial) -> None:
    """Stages 1, 2 and 3 reduce-scatter the gradients, P (n-1)/n elements."""
    require_elements(trial, "reduce_scatter", "One reduce-scatter of P elements in every stage from 1 on.")


@check("communication_elements")
def weights_are_gathered(trial: Trial) -> None:
    """Stages 1 and 2 gather the new weights once, stage 3 gathers all weights twice."""
    require_elements(
        trial, "all_gather", "Once after the step in stages 1 and 2; for forward and for backward in stage 3."
    )


@check("communication_elements")
def one_rank_sends_nothing(trial: Trial) -> None:
    """A single rank sends nothing, in any stage."""
    cases = [(trial.integer(10, 10**9), 1, stage) for stage in range(4)]
    (results,) = trial.run(call, "communication_elements", cases)
    for case, result in zip(cases, results, strict=True):
        for key in TIMES:
            require_key(trial, result, key, case)
            value = result[key]
            trial.require(
                isinstance(value, int | float) and abs(value) < 0.5,
                f"{key} of one rank in stage {case[2]}: expected 0, got {value!r}",
                help="(n-1)/n is 0 there.",
            )
