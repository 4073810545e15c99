"""Checks of `clipped_step`: the norm of a gradient of which every rank has a part."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from grader.checks import Trial, check, exercise

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


class Gather(torch.autograd.Function):
    """Shards to the whole vector; backward, the mean gradient of this rank's shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.own = group, shard.numel()
        per_rank = -(-size // group.size())
        padded = torch.cat([shard, shard.new_zeros(per_rank - shard.numel())])
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        return torch.cat(parts)[:size]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        gradient /= ctx.group.size()
        per_rank = -(-gradient.numel() // ctx.group.size())
        start = ctx.group.rank() * per_rank
        return gradient[start : start + ctx.own].clone(), None, None


class ShardedLine(nn.Module):
    """A line through points, its weights cut over the ranks; a rank whose shard is empty has no gradient."""

    def __init__(self, whole: Tensor, group: Any) -> None:
        super().__init__()
        self.group = group
        per_rank = -(-SIZE // group.size())
        shard = whole[group.rank() * per_rank :][:per_rank].clone()
        self.shard = nn.Parameter(shard, requires_grad=shard.numel() > 0)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.bystander = torch.zeros((), requires_grad=True)  # so that every rank's backward has a graph

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        shard = self.shard + self.bystander.to(self.shard.device)
        outputs = inputs @ Gather.apply(shard, self.group, SIZE)
        return outputs, (outputs - targets).square().mean()


class WholeLine(nn.Module):
    """The same in one process."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.double())

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = inputs.double() @ self.weight
        return outputs, (outputs - targets.double()).square().mean()


MAX_NORMS = (0.5, 1e6)
NUM_STEPS = 3


def step_on_ranks(rank: Any, whole: Tensor, steps: list[tuple[Tensor, Tensor]]) -> dict:
    result: dict[str, Any] = {}
    for max_norm in MAX_NORMS:
        module = ShardedLine(whole, rank.group).to(rank.device)
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.5)
        norms = []
        with rank.record() as recording:
            for inputs, targets in steps:
                norm = rank.submission.clipped_step(module, optimizer, inputs, targets, max_norm, rank.group)
                norms.append(torch.as_tensor(norm).detach().clone().reshape(()))
        result[str(max_norm)] = {
            "norms": torch.stack(norms).to(torch.float32),
            "shard": module.shard.detach().clone(),
            "recording": recording,
        }
    return result


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
    returned: Callable[[list[float], int], float] | None = None
    """The norm that is returned, where it is not the one that is clipped by."""


def in_one_process(
    whole: Tensor, by_rank: list[list[tuple[Tensor, Tensor]]], max_norm: float, way: Way
) -> SimpleNamespace:
    """By rank, the norm of each step, and the shard at the end."""
    n = len(by_rank)
    model = WholeLine(whole)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    per_rank = -(-SIZE // n)
    norms = []
    for step in range(NUM_STEPS):
        if way.forgets:
            optimizer.zero_grad()
        (sum(model(*batches[step])[1] for batches in by_rank) / n).backward()
        shards = [model.weight.grad[r * per_rank :][:per_rank] for r in range(n)]
        own = [shard.norm(way.order).item() if shard.numel() else 0.0 for shard in shards]
        norms.append([(way.returned or way.rule)(own, r) for r in range(n)])
        for r, shard in enumerate(shards):
            if shard.numel() and way.clips:
                shard.mul_(min(way.most, max_norm / way.rule(own, r)))
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
    "rank 0 clips by the whole norm, and the others by their own: the sum came to rank 0 alone": (
        lambda own, r: own[r] if r else whole_norm(own, r)
    ),
}
RIGHT = Way(whole_norm)
WRONG = {
    "a gradient shorter than max_norm was made longer: the factor has to stop at 1": replace(
        RIGHT, most=math.inf
    ),
    "the gradients of earlier steps are still there: nothing was zeroed": replace(RIGHT, forgets=False),
    "the optimizer stepped on gradients that were not clipped": replace(RIGHT, clips=False),
    "the norm that is returned is the whole one, and each rank clips by the norm of its own shard": Way(
        lambda own, r: own[r], returned=whole_norm
    ),
    "the absolute values were added, not their squares": Way(lambda own, r: sum(own), order=1.0),
    "this is the largest of all numbers, not the root of the sum of their squares": Way(
        lambda own, r: max(own), order=math.inf
    ),
}


def observe(trial: Trial) -> SimpleNamespace:
    whole = 3.0 * trial.normal(SIZE)
    by_rank = [
        [(trial.normal(4, SIZE), trial.normal(4)) for _ in range(NUM_STEPS)] for _ in range(trial.num_ranks)
    ]
    results = trial.run(step_on_ranks, whole, per_rank=[(steps,) for steps in by_rank])
    ways = {told: Way(rule) for told, rule in WRONG_NORMS.items() if trial.num_ranks > 1} | WRONG

    def ends(max_norm: float) -> SimpleNamespace:
        wrong = {told: in_one_process(whole, by_rank, max_norm, way) for told, way in ways.items()}
        return SimpleNamespace(right=in_one_process(whole, by_rank, max_norm, RIGHT), wrong=wrong)

    return SimpleNamespace(results=results, by_max_norm={m: ends(m) for m in MAX_NORMS})


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
                **{told: wrong.norms for told, wrong in expected.wrong.items()},
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
    """Three steps with clipping end, on every rank, at the shard of what one process comes to."""
    require_ends(trial, MAX_NORMS[0], HELP)


@check("clipped_step")
def small_gradients_are_left_alone(trial: Trial) -> None:
    """A gradient whose norm is below max_norm is not scaled."""
    require_ends(trial, MAX_NORMS[1], "The factor is max_norm / norm, and at most 1.")


@check("clipped_step", world_sizes=(2, 4, 3))
def one_number_travels(trial: Trial) -> None:
    """Besides what the module itself sends, a step sends a number or two: no gradient is gathered."""
    seen = trial.once(observe)
    for r, result in enumerate(seen.results):
        recording = result[str(MAX_NORMS[0])]["recording"]
        per_rank = -(-SIZE // trial.num_ranks)
        modules_own = NUM_STEPS * 4 * (per_rank * trial.num_ranks + SIZE)
        extra = recording.bytes() - modules_own
        trial.require(
            extra <= NUM_STEPS * 8 * max(2, trial.num_ranks),
            f"{extra} bytes were sent in {NUM_STEPS} steps besides the module's own",
            help="A norm needs the sum of all squares alone: one all-reduce of one number.",
            rank=r,
            cause="the gradients themselves were gathered",
        )
