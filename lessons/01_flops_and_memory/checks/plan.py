"""Checks of `training_plan`."""

import math
from functools import partial

from grader.checks import Answers, Trial, check, compare_answers, exercise, whole

exercise(
    "training_plan",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "FLOPs of the whole run, over the FLOPs that one GPU really does in a second: seconds of one GPU.",
        "The GPUs share the work, so that days fall with their number. The hours of all of them do not.",
        "`math.ceil` rounds up: the GPU that holds the last byte is needed, too.",
    ),
)

KEYS = ("gpu_hours", "days", "fewest_gpus")
NEAR, EXACT = 0.01, 0.0


def plan(
    parameters: int, tokens: int, gpus: int, peak: float, utilization: float, memory: float
) -> dict[str, float]:
    seconds = 6.0 * parameters * tokens / peak / utilization
    full, rest = divmod(16 * parameters, int(memory))
    return {"gpu_hours": seconds / 3600, "days": seconds / 86400 / gpus, "fewest_gpus": full + (rest > 0)}


def ask_plans(trial: Trial) -> Answers:
    """Runs of every size. Two fill their GPUs to the last byte; one needs more than there are."""
    calls = [
        (
            trial.integer(10**9, 4 * 10**11),
            trial.integer(10**10, 2 * 10**13),
            trial.integer(8, 16384),
            trial.choice([149.7e12, 312e12, 989e12]),
            trial.integer(15, 58) / 100,
            trial.choice([40e9, 48e9, 80e9, float(80 * 2**30)]),
        )
        for _ in range(6)
    ]
    calls += [
        (5 * 10**9 * (2 * trial.integer(1, 4) + odd), 10**12, 256, 312e12, 0.43, 80e9) for odd in (0, 1)
    ]
    calls += [(10**9 * trial.integer(70, 180), 10**12, trial.integer(2, 8), 312e12, 0.43, 80e9)]
    return Answers(trial, "training_plan", [*calls, (124_337_664, 3 * 10**11, 8, 312e12, 0.3, 40e9)], plan)


def plan_slips(
    key: str, parameters: int, tokens: int, gpus: int, peak: float, utilization: float, memory: float
) -> dict[str, float]:
    right = plan(parameters, tokens, gpus, peak, utilization, memory)
    time, states = right[key], 16 * parameters / memory
    of_time = {
        "2 FLOPs a parameter and token are the forward alone: with backward they are 6": time / 3,
        "6·P·D is forward and backward already": 3 * time,
        "no GPU reaches its peak: divide by the utilization": time * utilization,
        "the utilization is in it twice: the GPUs' hours are longer by it once": time / utilization,
        "multiplied by the utilization: a GPU that does less takes longer": time * utilization**2,
    }
    slips = {
        "gpu_hours": of_time
        | {
            "these are seconds: an hour has 3,600": 3600 * time,
            "each GPU's own hours: those of all GPUs are added up": time / gpus,
            "these are days: gpu_hours are hours": time / 24,
        },
        "days": of_time
        | {
            "as if one GPU did all the work: num_gpus share it": time * gpus,
            "these are hours: a day has 24": 24 * time,
            "these are seconds: a day has 86,400": 86400 * time,
            "rounded up to whole days: a run may end in the middle of one": math.ceil(time),
            "rounded down to whole days: a run may end in the middle of one": int(time),
            "rounded to whole days: a run may end in the middle of one": round(time),
        },
        "fewest_gpus": {
            "rounded down: the last GPU is needed, too": 16 * parameters // memory,
            "one more than a full number of GPUs holds": 16 * parameters // memory + 1,
            "round(x + 0.5) gives the even one of two numbers that are as near": round(states + 0.5),
            "rounded to the nearest: what is left over needs a GPU, too": round(states),
            "the weights alone, 2 bytes a parameter: gradients and optimizer are there, too": ceil(
                states / 8
            ),
            "the optimizer alone, 12 bytes a parameter": ceil(states * 12 / 16),
            "18 bytes a parameter: here it is 16": ceil(states * 18 / 16),
            "4 bytes a parameter: here it is 16": ceil(states / 4),
            "num_gpus is how many there are: fewest_gpus is how many the states need": gpus,
            "no fewer than num_gpus: how many there are says nothing of how many the states need": max(
                gpus, right[key]
            ),
            "no more than num_gpus: the states may need more GPUs than there are": min(gpus, right[key]),
        },
    }
    return slips[key]


def ceil(number: float) -> int:
    return int(-(-number // 1))


@check("training_plan")
def hours_of_all_gpus_are_added_up(trial: Trial) -> None:
    """`gpu_hours` are 6·P·D FLOPs over what one GPU really does in an hour, within 1 %."""
    compare_plan(trial, "gpu_hours", NEAR, "How many FLOPs does one GPU do in an hour?")


@check("training_plan")
def gpus_share_the_days(trial: Trial) -> None:
    """`days` pass while all GPUs work at the same time, within 1 %."""
    compare_plan(trial, "days", NEAR, "gpu_hours, over the GPUs, over 24.")


@check("training_plan")
def states_fit_into_the_fewest_gpus(trial: Trial) -> None:
    """`fewest_gpus` hold 16 bytes a parameter, and one GPU less does not."""
    compare_plan(trial, "fewest_gpus", EXACT, "Bytes of the states over bytes of a GPU, rounded up.")


def compare_plan(trial: Trial, key: str, tolerance: float, help: str) -> None:
    answers = trial.once(ask_plans)
    for call, given in zip(answers.calls, answers.given, strict=True):
        has = isinstance(given, dict) and key in given
        trial.require(has, f"{answers.asked(call)} gave {given!r}", help=f"A dictionary: {', '.join(KEYS)}.")
        if tolerance == EXACT and whole(given[key]) is None:
            trial.wrong(
                f"{answers.asked(call, key)} is {given[key]!r}: GPUs come in whole numbers", "Round up."
            )
    compare_answers(trial, answers, key, slips=partial(plan_slips, key), help=help, tolerance=tolerance)
