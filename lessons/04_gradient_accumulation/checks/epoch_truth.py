"""An epoch in one process: what is right, and what comes of known slips."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from grader.checks import Trial
from nanogpt.model import GPT, GPTConfig

from .models import build, counted

Batches = list[tuple[Tensor, Tensor]]
NORM, RATE, DECAY = 1.0, 0.05, 0.7


def make(config: GPTConfig, seed: int, sharpness: float) -> GPT:
    """A GPT whose gradients are small, or with a large `sharpness` so large that they are clipped."""
    model = build(config, seed)
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(sharpness)
        model.lm_head.weight.mul_(max(1.0, sharpness))
    return model


def leave_gradients(model: nn.Module) -> None:
    """Something in every `.grad`, as a step before the epoch may have left it: large, even if divided."""
    for parameter in model.parameters():
        parameter.grad = 1000 * parameter.detach()


def freeze(model: GPT) -> None:
    """Freeze the positions: in an epoch, no backward reaches them."""
    model.transformer.wpe.requires_grad_(False)


def tools(model: GPT, part: bool = False) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Plain SGD, so that no factor is hidden, and a rate that falls with each step of the scheduler.

    As where layers have rates of their own, it holds parameters in two groups, each with weights and norms.
    `part`: it holds the parameters of the blocks alone.
    """
    trained = list((model.transformer.h if part else model).parameters())
    half = len(trained) // 2
    optimizer = torch.optim.SGD([{"params": trained[:half]}, {"params": trained[half:]}], lr=RATE)
    return optimizer, LambdaLR(optimizer, lambda step: DECAY**step)


def gradient_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """All gradients of what it holds, end to end."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in held]).clone()


@dataclass
class Slip:
    """One way of running the epoch; without arguments, the right one."""

    weigh: str = "targets"
    from_here_on: bool = False
    """A micro-batch is a share of `accumulate` micro-batches that begin with it, and not of its group."""
    first_count: bool = False
    """Every group's losses are divided by how many targets the first group counts."""
    first_epoch: bool = False
    """How many targets a group counts is kept from the first epoch."""
    no_zeros: bool = False
    """Targets of token 0 are not counted either."""
    clip_each: bool = False
    clip: bool = True
    clip_rest: bool = True
    """Whether the gradient of a shorter group at the end is clipped as well."""
    zero: bool = True
    zero_trained: bool = False
    """A frozen parameter keeps its gradient, and the norm counts it."""
    zero_held: bool = False
    """What the optimizer does not hold keeps its gradients, and the norm counts them."""
    divides: bool = False
    """Sums of losses are accumulated, and whatever stands in any `.grad` is divided by the step's targets."""
    zero_once: bool = False
    """The same after an epoch's first step: before it, all gradients are cleared."""
    divides_held: bool = False
    """Sums of losses are accumulated, and divided in what the optimizer holds; the norm counts all."""
    divides_first: bool = False
    """The same, and divided in the first of the optimizer's groups of parameters alone."""
    by_value: bool = False
    by_group: bool = False
    """Each of the optimizer's groups of parameters is clipped by itself."""
    first_group: bool = False
    """The first of the optimizer's groups of parameters alone is clipped."""
    matrices: bool = False
    """Parameters of one dimension are not clipped, and the norm leaves them out."""
    always: bool = False
    """A gradient of a smaller norm is scaled to norm 1, too."""
    leaves_one: bool = False
    """A micro-batch with one counted target is left out, as if it had none."""
    early: bool = False
    """The scheduler comes before the optimizer."""
    last_loss: bool = False
    """A step's loss is the last micro-batch's part of it."""
    mean_of_means: bool = False
    """A step's loss, and not its gradient, is the mean of the micro-batches' means."""
    loss_by_size: bool = False
    """A step's loss, and not its gradient, is divided by all of its targets."""
    stops: bool = False
    """A group ends at a micro-batch without counted targets."""
    zero_times_nan: bool = False
    """The mean of a micro-batch without counted targets enters with weight 0."""
    clip_sum: bool = False
    """The gradient of the summed loss is clipped, and then divided."""


def draw(
    trial: Trial,
    num_microbatches: int,
    accumulate: int,
    sharpness: float,
    even: bool = False,
    empty: int | None = None,
    left: bool = False,
    part: bool = False,
    frozen: bool = False,
) -> Any:
    """Micro-batches of other shapes with other counts, the second with one; `even`: alike, and all count.

    The `empty`-th counts none; `left`: something stands in `.grad` before the epoch; `part`: the optimizer
    holds some of the parameters alone; `frozen`: one parameter is.
    """
    config = GPTConfig(
        block_size=12, vocab_size=trial.integer(19, 29), n_layer=1, n_head=2, n_embd=8, bias=False
    )
    batches = []
    for i in range(num_microbatches):
        rows, length = (3, 9) if even else ((1, 3, 2)[i % 3], trial.integer(8, 11) + i % 2)
        inputs, targets = (trial.tokens(config.vocab_size, rows, length) for _ in range(2))
        if not even:
            share = 0.0 if i == 1 else 0.1 if i % 2 else 0.8  # few count in every other one
            ignored = [j for j in range(1, targets.numel()) if trial.rng.random() > share]
            targets.view(-1)[ignored] = -1
            targets.view(-1)[0] *= i > 0  # a token 0 that counts
        if i == empty:
            targets[:] = -1
        batches.append((inputs, targets))
    return SimpleNamespace(
        config=config,
        seed=trial.seed(),
        sharpness=sharpness,
        batches=batches,
        accumulate=accumulate,
        left=left,
        part=part,
        frozen=frozen,
    )


def groups(batches: Batches, accumulate: int) -> Iterator[Batches]:
    for first in range(0, len(batches), accumulate):
        yield batches[first : first + accumulate]


def in_order(batches: Batches, epoch: int) -> Batches:
    """Every other epoch takes them from the last to the first."""
    return batches[::-1] if epoch % 2 else batches


def counting(group: Batches, slip: Slip) -> list[int]:
    """Where micro-batches with targets that count are; where it stops, those before the first without."""
    full = [slip.zero_times_nan or counted(goals) > slip.leaves_one for _, goals in group]
    end = full.index(False) if slip.stops and not all(full) else len(group)
    return [place for place in range(end) if full[place]]


def share_of(slip: Slip, goals: Tensor, group: Batches, accumulate: int) -> float:
    """The weight of a micro-batch's mean."""
    every = sum(counted(each) for _, each in group)
    if slip.no_zeros:
        every = sum(int((each > 0).sum()) for _, each in group)
    size = sum(each.numel() for _, each in group)
    return {
        "targets": counted(goals) / every,
        "means": 1 / len(group),
        "accumulate": 1 / accumulate,
        "size": goals.numel() / size,
        "not at all": 1.0,
    }[slip.weigh]


def clip_sum(model: nn.Module, num_counted: int) -> None:
    """Clip the gradient that a sum over so many targets has, and make it that of a mean."""
    reached = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for parameter in reached:
        parameter.grad *= num_counted
    nn.utils.clip_grad_norm_(reached, NORM)
    for parameter in reached:
        parameter.grad /= num_counted


def normalize(model: nn.Module) -> None:
    """Scale the gradient to norm 1, whatever it is."""
    reached = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in reached]).norm()
    for gradient in reached:
        gradient *= NORM / norm


def epochs(case: Any, num_epochs: int = 1, slip: Slip | None = None) -> SimpleNamespace:
    """Gradients, losses and rates of the steps, in float64; what a slip would make of them."""
    slip = slip or Slip()
    model = make(case.config, case.seed, case.sharpness).double()
    if case.left:
        leave_gradients(model)
    if case.frozen:
        freeze(model)
    optimizer, scheduler = tools(model, case.part)
    seen = SimpleNamespace(gradients=[], losses=[], rates=[], weights=None)
    for epoch in range(num_epochs):
        seen.losses.append([])
        batches = in_order(case.batches, epoch)
        for i, group in enumerate(groups(batches, case.accumulate)):
            if slip.zero_held or (slip.zero_once and i):
                optimizer.zero_grad()
            elif slip.zero_trained:
                for parameter in model.parameters():
                    parameter.grad = None if parameter.requires_grad else parameter.grad
            elif slip.zero:
                model.zero_grad()
            total = 0.0
            every = sum(counted(goals) for _, goals in group)
            if slip.divides:  # before the sum instead of after it
                for parameter in model.parameters():
                    parameter.grad = None if parameter.grad is None else parameter.grad / every
            for place in counting(group, slip):
                inputs, goals = group[place]
                here = i * case.accumulate + place
                whole = batches[here : here + case.accumulate] if slip.from_here_on else group
                whole = batches[: case.accumulate] if slip.first_count else whole
                first = i * case.accumulate
                whole = case.batches[first : first + case.accumulate] if slip.first_epoch else whole
                loss = model(inputs, goals)[1] * share_of(slip, goals, whole, case.accumulate)
                loss.backward()
                total = loss.item() + (0.0 if slip.last_loss else total)
                if slip.clip_each:
                    nn.utils.clip_grad_norm_(model.parameters(), NORM)
            if slip.clip_sum:
                clip_sum(model, every)
            if slip.divides_held or slip.divides_first:
                parts = optimizer.param_groups[: 1 if slip.divides_first else None]
                held = {p for part in parts for p in part["params"]}
                for parameter in set(model.parameters()) - held:
                    if parameter.grad is not None:
                        parameter.grad *= every
            if slip.mean_of_means:
                means = [model(*group[place])[1].item() for place in counting(group, slip)]
                total = sum(means) / len(means)
            if slip.loss_by_size:
                total *= every / sum(goals.numel() for _, goals in group)
            if slip.by_value:
                nn.utils.clip_grad_value_(model.parameters(), NORM)
            elif slip.by_group or slip.first_group:
                for part in optimizer.param_groups[: 1 if slip.first_group else None]:
                    nn.utils.clip_grad_norm_(part["params"], NORM)
            elif slip.matrices:
                nn.utils.clip_grad_norm_([p for p in model.parameters() if p.dim() > 1], NORM)
            elif slip.always:
                normalize(model)
            elif slip.clip and (slip.clip_rest or len(group) == case.accumulate):
                nn.utils.clip_grad_norm_(model.parameters(), NORM)
            if slip.early:
                with warnings.catch_warnings(action="ignore"):  # torch tells of it, too
                    scheduler.step()
            seen.gradients.append(gradient_of(optimizer))
            seen.rates.append(optimizer.param_groups[0]["lr"])
            seen.losses[-1].append(total)
            optimizer.step()
            if not slip.early:
                scheduler.step()
    seen.weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return seen


SLIPS = {
    "the mean of the micro-batches' means, where their counted targets differ": Slip(weigh="means"),
    "each loss divided by accumulate: that is not what a micro-batch is of its group": Slip(
        weigh="accumulate"
    ),
    "each micro-batch weighs by its b·s targets, not by those that count": Slip(weigh="size"),
    "the sum of the micro-batches' means": Slip(weigh="not at all"),
    "each micro-batch weighs by its share of microbatches[i : i + accumulate], which begin with itself: its "
    "group begins at i - i % accumulate": Slip(from_here_on=True),
    "every step is divided by the first step's counted targets: count anew for each": Slip(first_count=True),
    "how many targets a step counts is kept from an epoch before, which had others there: count anew": Slip(
        first_epoch=True
    ),
    "targets of token 0 are not counted: only -1 does not count": Slip(no_zeros=True),
    "clipped after every micro-batch: what came first is clipped again and again": Slip(clip_each=True),
    "the mean of means, clipped after every micro-batch": Slip(weigh="means", clip_each=True),
    "each loss divided by accumulate, and clipped after every micro-batch": Slip(
        weigh="accumulate", clip_each=True
    ),
    "not clipped": Slip(clip=False),
    "what is left over makes a step that is not clipped": Slip(clip_rest=False),
    "each element was clipped to 1 by itself, where the norm of all together belongs": Slip(by_value=True),
    "each entry of optimizer.param_groups was clipped by itself: the norm is that of all together": Slip(
        by_group=True
    ),
    "the first entry of optimizer.param_groups alone was clipped: there may be others": Slip(
        first_group=True
    ),
    "parameters of one dimension, such as those of a norm, were not clipped: the norm is that of all "
    "together": Slip(matrices=True),
    "it is scaled to norm 1 where its norm is less, too: clipping leaves a small gradient as it is": Slip(
        always=True
    ),
    "a micro-batch with one counted target is left out: only one without any adds nothing": Slip(
        leaves_one=True
    ),
    "the scheduler moved on before the optimizer had made its step": Slip(early=True),
    "what stood in .grad before is still there: zero_grad belongs before each group's first backward": Slip(
        zero=False
    ),
    "what stood in .grad of a frozen parameter is still there, and the norm counts it": Slip(
        zero_trained=True
    ),
    "what stood in .grad of parameters that the optimizer does not hold is still there, and the norm counts "
    "it": Slip(zero_held=True),
    "what stood in .grad of parameters that the optimizer does not hold is still there, divided with what is "
    "new, and the norm counts it": Slip(zero_held=True, divides=True),
    "gradients of parameters that the optimizer does not hold pile up from step to step, and the norm counts "
    "them: optimizer.zero_grad() leaves them": Slip(zero_once=True),
    "gradients of a sum of losses are divided where the optimizer holds the parameter, and the norm counts "
    "the others undivided": Slip(divides_held=True),
    "gradients of a sum of losses are divided in the first entry of optimizer.param_groups alone: there may "
    "be others": Slip(divides_first=True),
    "a group ends at a micro-batch without counted targets: what comes after it is not run": Slip(stops=True),
    "0 times NaN: the mean of a micro-batch without counted targets is 0/0": Slip(zero_times_nan=True),
    "clipped before it is divided: the norm of a sum of losses is larger than that of their mean": Slip(
        clip_sum=True, clip=False
    ),
    "the mean of the micro-batches' means is returned: weigh each by its counted targets": Slip(
        mean_of_means=True
    ),
    "the returned loss is divided by all targets of the step, also by those of -1, which do not count": Slip(
        loss_by_size=True
    ),
    "the last micro-batch's part of the loss alone: the parts are not added up": Slip(last_loss=True),
}
