"""Checks of `FullySharded`: hooks that others have put on the parameters, as lessons 11 and 12 do."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from grader.checks import CheckEnded, Trial, check
from nanogpt.model import GPT

from .fully_sharded import full, observe_training, require_end
from .models import build, draw, odd_gpt, weights
from .runs import NOTHING_LEFT, run


def factor(name: str, r: int) -> float:
    """What the hook on a parameter multiplies its gradient by on rank r: another number everywhere."""
    return 1.0 + len(name) % 5 / 4 + r


def multiplied(times: float, gradient: Tensor) -> Tensor:
    return times * gradient


def own_loss(model: Any, *given: Tensor) -> Tensor:
    """Of the logits; the loss that the model returns has no part in it."""
    return model(*given)[0].square().mean()


def usual_loss(model: Any, *given: Tensor) -> Tensor:
    return model(*given)[1]


def ends_of_steps(rank: Any, model: GPT, steps: list[tuple[Callable, tuple[Tensor, ...]]]) -> list[dict]:
    """The whole weights after each step of SGD: the loss that it is made on, and what the model is given."""
    sharded = rank.submission.FullySharded(model.to(rank.device), rank.group)
    optimizer = SGD(sharded.parameters(), lr=1.0)
    ends = []
    for loss, given in steps:
        optimizer.zero_grad()
        loss(sharded, *given).backward()
        optimizer.step()
        ends.append(full(sharded))
    return ends


def steps_of_two(rank: Any, seed: int, num_own: int, r: int, tokens: Tensor, targets: Tensor) -> dict:
    """Two steps with hooks; and without one, and two of a loss of one's own: with targets, and not."""
    hooked, plain = (build(odd_gpt, seed, torch.float64) for _ in range(2))
    for name, parameter in hooked.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(partial(multiplied, factor(name, r)))
    usual, own = (usual_loss, (tokens, targets)), [(own_loss, (tokens, targets)), (own_loss, (tokens,))]
    return {
        "hooked": ends_of_steps(rank, hooked, [usual, usual]),
        "ends": ends_of_steps(rank, plain, [usual, *own[:num_own]]),
    }


def observe_hooks(trial: Trial) -> SimpleNamespace:
    """Both steps of a loss of one's own; where they crash, as many as are made, and how the next one ends."""
    seed, crash = trial.seed(), None
    data = [batches[0] for batches in draw(trial, 1)]
    for num_own in (2, 1, 0):
        try:
            per_rank = [(num_own, r, *batch) for r, batch in enumerate(data)]
            results = run(trial, steps_of_two, seed, per_rank=per_rank)
            break
        except CheckEnded as end:
            if num_own == 0:
                raise
            crash = end
    model = build(odd_gpt, seed, torch.float64)
    hooked, lost = [], []
    for _ in range(2):
        losses = [partial(usual_loss, model, *batch) for batch in data]
        lost.append(after_a_step(model, losses))
        hooked.append(after_a_step(model, losses, factor))
        load(model, hooked[-1])
    model = build(odd_gpt, seed, torch.float64)
    ends = [weights(model)]
    for loss, num_given in ((usual_loss, 2), (own_loss, 2), (own_loss, 1)):
        ends.append(after_a_step(model, [partial(loss, model, *batch[:num_given]) for batch in data]))
        load(model, ends[-1])
    return SimpleNamespace(results=results, num_own=num_own, crash=crash, ends=ends, hooked=hooked, lost=lost)


def once(name: str, r: int) -> float:
    return 1.0


def after_a_step(model: GPT, losses: list[Any], times: Any = once) -> dict[str, Tensor]:
    """The weights that a step would end at; the model stays as it is."""
    means = mean_gradients(model, losses, times)
    return {name: weight - means[name] for name, weight in weights(model).items()}


def load(model: GPT, ends: dict[str, Tensor]) -> None:
    model.load_state_dict(ends, strict=False)  # a tied table has one name here


def mean_gradients(model: Any, losses: list[Any], times: Any) -> dict[str, Tensor]:
    """Of each weight the mean over the ranks of times(name, rank) its gradient; 0 where it has none."""
    means = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for r, loss in enumerate(losses):
        model.zero_grad()
        loss().backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                means[name] += times(name, r) * p.grad / len(losses)
    return means


@check("FullySharded", first_of=(3, 2))
def hooks_on_parameters_go_on_working(trial: Trial) -> None:
    """A hook on a parameter of the GPT still changes its gradient: the rank's own, before the mean."""
    seen = trial.once(observe_hooks)
    for number, hooked in enumerate(seen.hooked):
        for name, expected in hooked.items():
            trial.close(
                f"{name} after {number + 1} of two steps, with a hook on it that multiplies its gradient",
                [result["hooked"][number][name] for result in seen.results],
                expected,
                alternatives={
                    "the hook on the parameter was lost: nothing called it": seen.lost[number][name]
                },
                help="Backward must reach the GPT's own Parameter, which has the hooks: give it new memory "
                "through `.data`, or put its hooks on the tensor that takes its place.",
            )


FREE_AT_THE_END = (
    "Hook on to the logits, and free what lies outside the blocks when that backward is over: every loss is "
    "made of them."
)
OF_THE_LOSS = (
    "what ends backward waits for the loss that forward returns, and this one was made of the logits"
)


def waits_for_the_loss(trial: Trial, before: Tensor) -> dict[str, Tensor]:
    """What a weight is where it waits for the loss; of who fails with that loss, too, this is not known."""
    try:
        ends = [result["end"] for result in trial.once(observe_training).results]
        require_end(trial, ends, odd_gpt, "SGD", "")
    except CheckEnded:
        return {}
    return {OF_THE_LOSS: before}


@check("FullySharded", first_of=(3, 2))
def a_loss_of_ones_own_is_trained_on(trial: Trial) -> None:
    """Backward from the logits trains all weights, with targets and without: no loss was returned to use."""
    seen = trial.once(observe_hooks)
    for number, given in ((1, "with targets"), (2, "without targets")):
        if number > seen.num_own:
            if NOTHING_LEFT in seen.crash.message:
                seen.crash.help = FREE_AT_THE_END
            raise seen.crash
        before, after = seen.ends[number : number + 2]
        for name, expected in after.items():
            trial.close(
                f"{name} after a step of logits.square().mean() ({given})",
                [result["ends"][number][name] for result in seen.results],
                expected,
                alternatives=partial(waits_for_the_loss, trial, before[name]),
                help="Hook on to the logits: every loss is made of them.",
            )
