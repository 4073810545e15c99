"""Checks of `clipped_step`: the norm of a gradient of which every rank has a part."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from grader.checks import CheckEnded, Fault, Trial, Verdict, check, exercise

from .lines import ShardedLine, WholeLine

exercise(
    "clipped_step",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "Print the norm on both ranks. Which vector is it the norm of?",
        "The square of the whole norm is the sum of the squares of the shards' norms.",
        "One number has to be summed over the group. Every rank takes part, also one that has no gradient.",
    ),
)

SIZE = 9
"""Of the sharded vector: on four ranks the shards have 3, 3, 3 and 0 elements."""


MAX_NORMS = (0.5, 1e6)
NUM_STEPS = 3

Steps = list[tuple[Tensor, Tensor]]


def step_on_ranks(rank: Any, whole: Tensor, between: float, steps: Steps) -> dict:
    result: dict[str, Any] = {}
    for max_norm in (*MAX_NORMS, between):
        module = ShardedLine(whole, rank.group).to(rank.device)
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.5)
        norms = []
        with rank.record() as recording:
            for inputs, targets in steps[:1] if max_norm == between else steps:
                norm = rank.submission.clipped_step(module, optimizer, inputs, targets, max_norm, rank.group)
                norms.append(torch.as_tensor(norm).detach().clone().reshape(()))
        result[str(max_norm)] = {
            "norms": torch.stack(norms).to(torch.float32),
            "shard": module.shard().detach().clone(),
            "recording": recording,
        }
    return result | {
        "partly held": norm_of_a_step(rank, whole, steps, partly=True),
        "unclipped": unclipped(rank, whole, *steps[0]),
    }


def unclipped(rank: Any, whole: Tensor, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """This rank's shard after a step with max_norm=inf, and after one more, whose gradient is zero."""
    module = ShardedLine(whole, rank.group).to(rank.device)
    optimizer = SGD(module.parameters(), lr=0.1)
    shards = []
    for x, max_norm in ((inputs, math.inf), (torch.zeros_like(inputs), MAX_NORMS[0])):
        rank.submission.clipped_step(module, optimizer, x, targets, max_norm, rank.group)
        shards.append(module.shard().detach().clone())
    return shards


def norm_of_a_step(rank: Any, whole: Tensor, steps: Steps, partly: bool = False) -> Tensor:
    """What the first step returns, in float32; `partly`: the optimizer holds one of the two parameters."""
    module = ShardedLine(whole, rank.group).to(rank.device)
    optimizer = SGD([module.parts[0]] if partly else module.parameters(), lr=0.1)
    norm = rank.submission.clipped_step(module, optimizer, *steps[0], MAX_NORMS[0], rank.group)
    return torch.as_tensor(norm).detach().to(torch.float32).reshape(())


@dataclass(frozen=True)
class Way:
    """How a step may be done: right as it stands here, wrong in what is said otherwise."""

    rule: Callable[[list[float], int], float]
    """(the shards' norms, r) to the norm that shard r is clipped by."""
    most: float = 1.0
    """The largest factor that a gradient is multiplied by."""
    forgets: bool = True
    """Whether gradients of earlier steps are gone."""
    clips: bool = True
    """Whether the gradient that the optimizer sees is clipped."""
    order: float = 2.0
    """Of the shards' norms."""
    compares: str = ""
    """What has a norm of its own that max_norm is compared with: "parameter" or "rank"; "" for the whole."""
    returned: Callable[[list[float], int], float] | None = None
    """The norm that is returned, where it is not the one that is clipped by."""


def in_one_process(
    whole: Tensor, by_rank: list[Steps], max_norm: float, way: Way, num_steps: int = NUM_STEPS
) -> SimpleNamespace:
    """By rank, the norm of each step, and the shard at the end."""
    n = len(by_rank)
    model = WholeLine(whole)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    per_rank = -(-SIZE // n)
    norms = []
    for step in range(num_steps):
        if way.forgets:
            optimizer.zero_grad()
        (sum(model(*batches[step])[1] for batches in by_rank) / n).backward()
        shards = [model.weight.grad[r * per_rank :][:per_rank] for r in range(n)]
        own = [shard.norm(way.order).item() if shard.numel() else 0.0 for shard in shards]
        norms.append([(way.returned or way.rule)(own, r) for r in range(n)])
        for r, shard in enumerate(shards):
            for part in shard.chunk(2) if way.compares == "parameter" else (shard,):
                if part.numel() and way.clips and not (way.compares and part.norm() <= max_norm):
                    part.mul_(min(way.most, max_norm / way.rule(own, r)))
        optimizer.step()
    end = [model.weight.detach()[r * per_rank :][:per_rank].float() for r in range(n)]
    return SimpleNamespace(end=end, norms=list(torch.tensor(norms).T))


def whole_norm(own: list[float], r: int) -> float:
    return sum(norm**2 for norm in own) ** 0.5


WRONG_NORMS = {
    "each rank clips by the norm of its own shard": lambda own, r: own[r],
    "the shards' norms were added: add their squares, then take the root": lambda own, r: sum(own),
    "the squares were added, and no root was taken": lambda own, r: sum(x**2 for x in own),
    "this is the mean of the shards' norms": lambda own, r: sum(own) / len(own),
    "the norm was divided by the number of ranks: the squares' sum is that of the mean gradient already": (
        lambda own, r: whole_norm(own, r) / len(own)
    ),
    "this is the largest of the shards' norms": lambda own, r: max(own),
    "this is the norm of rank 0's shard": lambda own, r: own[0],
    "the squares were averaged over the ranks: their sum is the square of the norm": lambda own, r: (
        (sum(x**2 for x in own) / len(own)) ** 0.5
    ),
    "rank 0 clips by the whole norm, and the others by a part of it: the sum came to rank 0 alone": (
        lambda own, r: whole_norm(own[r:], r)  # what gloo has added up on the way to rank 0
    ),
}
RIGHT = Way(whole_norm)
BY_PARTS = (
    "max_norm was compared with the norm of a part of the gradient, a parameter's or this rank's: whether "
    "to clip is asked of the whole norm"
)
WRONG = {
    "a gradient shorter than max_norm was made longer: the factor has to stop at 1": replace(
        RIGHT, most=math.inf
    ),
    "the gradients of earlier steps are still there: nothing was zeroed": replace(RIGHT, forgets=False),
    "the optimizer stepped on gradients that were not clipped": replace(RIGHT, clips=False),
    "the norm that is returned is the whole one, and each rank clips by the norm of its own shard": Way(
        lambda own, r: own[r], returned=whole_norm
    ),
    BY_PARTS: replace(RIGHT, compares="parameter"),
    "max_norm was compared with the norm of this rank's part of the gradient, and not with the whole norm": (
        replace(RIGHT, compares="rank")
    ),
    "the absolute values were added, not their squares": Way(lambda own, r: sum(own), order=1.0),
    "this is the largest of all numbers, not the root of the sum of their squares": Way(
        lambda own, r: max(own), order=math.inf
    ),
}


def between_parts_and_whole(whole: Tensor, by_rank: list[Steps]) -> float:
    """A norm that the first gradient has as a whole, and no rank's part of it has; 0.0 if there is none.

    On one rank the parts are its parameters.
    """
    model, n = WholeLine(whole), len(by_rank)
    (sum(model(*steps[0])[1] for steps in by_rank) / n).backward()
    gradient = model.weight.grad
    largest = max(part.norm().item() for part in gradient.split(-(-SIZE // max(n, 2))))
    return 1.05 * largest if 1.05 * largest < 0.9 * gradient.norm().item() else 0.0


def norm_of_first_parts(whole: Tensor, by_rank: list[Steps]) -> Tensor:
    """Of the first step's gradient: that of the first of each rank's two parameters."""
    model, n = WholeLine(whole), len(by_rank)
    (sum(model(*steps[0])[1] for steps in by_rank) / n).backward()
    shards = model.weight.grad.split(-(-SIZE // n))
    return torch.cat([shard.chunk(2)[0] for shard in shards]).norm().float()


def draw(trial: Trial) -> tuple[Tensor, list[Steps], float]:
    """Weights, every rank's steps, and a norm between the parts' and the whole gradient's."""
    between = 0.0
    while not between:
        whole = 3.0 * trial.normal(SIZE)
        by_rank = [
            [(trial.normal(4, SIZE), trial.normal(4)) for _ in range(NUM_STEPS)]
            for _ in range(trial.num_ranks)
        ]
        between = between_parts_and_whole(whole, by_rank)
    return whole, by_rank, between


def observe(trial: Trial) -> SimpleNamespace:
    whole, by_rank, between = draw(trial)
    try:
        results = trial.run(step_on_ranks, whole, between, per_rank=[(steps,) for steps in by_rank])
    except CheckEnded as end:
        empty = empty_shards(trial)
        if (
            end.verdict in (Verdict.HUNG, Verdict.CRASHED)
            and empty
            and returns_where_no_shard_is_empty(trial, step_on_ranks, whole, between, by_rank=by_rank)
        ):
            told = ""
            if end.verdict == Verdict.HUNG:
                told = ", and makes other calls than its peers"
            elif end.message.startswith(f"rank {empty[0]} raised"):
                told = ", and raises where it computes with none"
            end.cause = (
                f"rank {empty[0]} has no gradient, as its shard is empty{told}. Where every rank has one, "
                "all steps return"
            )
            end.help = "Who has no gradient takes part in every collective, with a sum of squares of 0."
        raise
    ways = {told: Way(rule) for told, rule in WRONG_NORMS.items() if trial.num_ranks > 1} | WRONG

    def ends(max_norm: float) -> SimpleNamespace:
        wrong = {told: in_one_process(whole, by_rank, max_norm, way) for told, way in ways.items()}
        return SimpleNamespace(right=in_one_process(whole, by_rank, max_norm, RIGHT), wrong=wrong)

    once = [
        in_one_process(whole, by_rank, between, way, 1).end for way in (RIGHT, replace(RIGHT, clips=False))
    ]
    return SimpleNamespace(
        results=results,
        by_max_norm={m: ends(m) for m in MAX_NORMS},
        between=between,
        once=once,
        first_parts=norm_of_first_parts(whole, by_rank),
    )


def empty_shards(trial: Trial) -> list[int]:
    """The ranks that own nothing."""
    return [r for r in range(trial.num_ranks) if r * -(-SIZE // trial.num_ranks) >= SIZE]


def returns_where_no_shard_is_empty(
    trial: Trial, probe: Callable, whole: Tensor, *args: Any, by_rank: list[Steps]
) -> bool:
    """Whether the same returns where shards have three numbers each: the first ones stand at the end, too."""

    def longer(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[..., : 3 * trial.num_ranks - SIZE]], dim=-1)

    per_rank = [([(longer(inputs), targets) for inputs, targets in steps],) for steps in by_rank]
    try:
        trial.run(probe, longer(whole), *args, per_rank=per_rank)
    except CheckEnded:
        return False
    return True


HELP = "Sum the squares over the group, take the root, and have every rank scale by the same number."


@check("clipped_step")
def norm_is_that_of_the_whole_gradient(trial: Trial) -> None:
    """What is returned is the norm of the whole gradient before clipping, the same on every rank."""
    seen = trial.once(observe)
    for max_norm, expected in seen.by_max_norm.items():
        clipped = [norms.clamp(max=max_norm) for norms in expected.right.norms]
        trial.close(
            f"the norm in each of {NUM_STEPS} steps (max_norm={max_norm:g})",
            [result[str(max_norm)]["norms"] for result in seen.results],
            expected.right.norms,
            alternatives={
                "this is the norm after clipping": clipped,
                "where the norm is below max_norm, max_norm itself is returned: the norm was clamped": Fault(
                    [norms.clamp(min=max_norm) for norms in expected.right.norms],
                    "Clamp the factor, not what you return: (max_norm / norm).clamp(max=1). An in-place "
                    "clamp_ changes the norm that goes back, too.",
                    on_some_ranks=True,
                ),
                **{told: wrong.norms for told, wrong in expected.wrong.items()},
            },
            help=HELP,
            rtol=1e-3,
        )
    trial.close(
        "the norm of a step whose optimizer holds one of the module's two parameters",
        [result["partly held"] for result in seen.results],
        [norms[0] for norms in seen.by_max_norm[MAX_NORMS[0]].right.norms],
        alternatives={"it is the norm of what the optimizer holds": seen.first_parts},
        help="Ask module.parameters(): their gradients together are the whole one.",
        rtol=1e-3,
    )
    if empty_shards(trial):
        require_norm_in_double(trial)


LARGE = 1e25
"""Of weights, and so of their gradients: float32 has no such squares."""


def require_norm_in_double(trial: Trial) -> None:
    """A step of a float64 model, too, is one for all ranks, of which one owns nothing."""
    whole = LARGE * trial.normal(SIZE, dtype=torch.float64)
    by_rank: list[Steps] = [
        [(trial.normal(4, SIZE, dtype=torch.float64), trial.normal(4, dtype=torch.float64))]
        for _ in range(trial.num_ranks)
    ]
    try:
        norms = trial.run(norm_of_a_step, whole, per_rank=[(steps,) for steps in by_rank])
    except CheckEnded as end:
        if returns_where_no_shard_is_empty(trial, norm_of_a_step, whole, by_rank=by_rank):
            end.cause = (
                f"the model is in float64, and rank {empty_shards(trial)[0]} has no gradient, as its shard "
                "is empty. In float32 all of it returns, and in float64 where every rank has a gradient"
            )
            end.help = (
                "In which dtype is a sum of no squares? torch.zeros(()) is float32 until something in "
                "float64 is added: start with loss.new_zeros(()), or in float64 on all ranks."
            )
        raise
    trial.close(
        "the norm of a step in float64",
        norms,
        in_one_process(whole, by_rank, MAX_NORMS[0], RIGHT, 1).norms[0][0],
        alternatives={
            f"it went through float32, where the squares of gradients of {LARGE:.0e} are infinite": Fault(
                torch.tensor(math.inf, dtype=torch.float64),
                "Square and sum in float64, or in the gradients' dtype: without .float().",
            )
        },
        help=HELP,
        rtol=1e-3,
    )


def require_ends(trial: Trial, max_norm: float, help: str) -> None:
    seen = trial.once(observe)
    expected = seen.by_max_norm[max_norm]
    trial.close(
        f"this rank's shard after {NUM_STEPS} steps (max_norm={max_norm:g})",
        [result[str(max_norm)]["shard"] for result in seen.results],
        expected.right.end,
        alternatives={told: wrong.end for told, wrong in expected.wrong.items()},
        help=help,
        rtol=1e-3,
    )


@check("clipped_step")
def clipped_steps_are_those_of_one_process(trial: Trial) -> None:
    """Three steps with clipping end, on every rank, at the shard of what one process comes to.

    So does a step in which every part of the gradient is shorter than max_norm, and the whole longer.
    """
    require_ends(trial, MAX_NORMS[0], HELP)
    seen = trial.once(observe)
    right, not_clipped = seen.once
    parts = "rank's shard" if trial.num_ranks > 1 else "parameter"
    trial.close(
        f"this rank's shard after a step (max_norm={seen.between:g}, which every {parts} of the gradient is "
        "below, and the whole above)",
        [result[str(seen.between)]["shard"] for result in seen.results],
        right,
        alternatives={BY_PARTS: not_clipped},
        help="Whether to scale is one question for all: is the whole gradient's norm above max_norm?",
        rtol=1e-3,
    )


@check("clipped_step")
def small_gradients_are_left_alone(trial: Trial) -> None:
    """A gradient whose norm is below max_norm is not scaled."""
    require_ends(trial, MAX_NORMS[1], "The factor is max_norm / norm, and at most 1.")
    seen = trial.once(observe)
    _, not_clipped = seen.once
    for i, (when, cause) in enumerate(UNCLIPPED.items()):
        found = [result["unclipped"][i] for result in seen.results]
        trial.close(
            f"this rank's shard after a step {when}",
            found,
            not_clipped,
            alternatives={cause: found} if all(shard.isnan().all() for shard in found) else {},
            help="Where the norm is not above max_norm, the factor is 1: (max_norm / norm).clamp(max=1) is 1 "
            "there, also for infinity, and for a norm of 0.",
            rtol=1e-3,
        )


UNCLIPPED = {
    "with max_norm=inf": "infinity over infinity is NaN: max_norm is divided by what is as large as itself",
    "with a gradient of zero": "0 over 0 is NaN: the gradient is divided by its norm, and the norm is 0",
}
"""Where nothing is to be scaled, and what NaN comes of there."""


@check("clipped_step", world_sizes=(2, 4, 3))
def one_number_travels(trial: Trial) -> None:
    """Besides what the module itself sends, a step sends a number or two: no gradient is gathered."""
    seen = trial.once(observe)
    for r, result in enumerate(seen.results):
        recording = result[str(MAX_NORMS[0])]["recording"]
        per_rank = -(-SIZE // trial.num_ranks)
        modules_own = NUM_STEPS * 4 * (per_rank * trial.num_ranks + SIZE)
        extra = recording.bytes() - modules_own
        gathers = recording.select("all_gather") + recording.select("gather")
        gathered = sum(event.num_elements for event in gathers) - NUM_STEPS * per_rank * trial.num_ranks
        trial.require(
            extra <= NUM_STEPS * 8 * max(2, trial.num_ranks),
            f"{extra} bytes were sent in {NUM_STEPS} steps besides the module's own",
            help="A norm needs the sum of all squares alone: one all-reduce of one number.",
            rank=r,
            cause="the gradients themselves were gathered" if gathered >= NUM_STEPS * SIZE else "",
        )
