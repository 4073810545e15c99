"""Training as the checks do it: the same steps on the ranks and, for what is expected, in one process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from grader.checks import Fault, Trial, is_close
from lessons_shared.evaluation import noted

from .models import build, weights

Batches = list[tuple[Tensor, Tensor]]
PASSES = (2, 1)
"""Backward passes of each step: in the first, gradients add up; in the second, none of them may be left."""

KINDS = ("SGD", "AdamW", "groups", "scheduled", "resumed", "closure")
TOLD = {
    "groups": "SGD in two groups",
    "scheduled": "AdamW with a scheduler",
    "resumed": "AdamW that was resumed",
    "closure": "SGD with a closure",
}
"""How a kind is called where its own name does not say it."""

LEARNING_RATE = 0.3
"""Of SGD."""
DECAY = {"lr": 0.02, "weight_decay": 0.1}
"""Of AdamW here: what it shrinks a weight by, lr times weight_decay in a step, if it has a gradient."""


def make_optimizer(kind: str, named: list[tuple[str, nn.Parameter]], make: Callable[..., Optimizer]) -> Any:
    """The optimizer of a kind of training; `make(params, optimizer_class, **settings)` builds it.

    SGD shows a sum that should be a mean, which AdamW hides.
    """
    everything = (p for _, p in named)  # which can be gone through once, as what module.parameters() returns
    if kind in ("SGD", "closure"):
        return make(everything, SGD, lr=LEARNING_RATE, momentum=0.9)
    if kind == "groups":
        even, odd = [p for _, p in named[::2]], [p for _, p in named[1::2]]
        return make(
            [{"params": even, "lr": 0.1, "weight_decay": 0.2}, {"params": odd}], SGD, lr=0.4, momentum=0.5
        )
    return make(everything, AdamW, eps=1e-3, **DECAY)


@dataclass
class Step:
    """What a step told about itself."""

    losses: list[Tensor]
    """One for each time that its gradients were computed."""
    returned: Any
    """By the optimizer's `step`."""
    weights: dict[str, Tensor] | None = None
    """After it, where they were asked for."""


def train(
    module: nn.Module,
    batches: Batches,
    kind: str,
    make: Callable[..., Optimizer],
    after_backward: Callable[[int], None] = lambda passes_left: None,
    num_steps: int = len(PASSES),
    look_at: nn.Module | None = None,
) -> list[Step]:
    """The steps of one rank. `after_backward(how many passes of this step are still to come)`.

    `look_at`: a model whose weights are kept after each step.
    """
    named = list(module.named_parameters())
    optimizer = make_optimizer(kind, named, make)
    scheduler = StepLR(optimizer, 1, gamma=0.3) if kind == "scheduled" else None
    steps = []
    for number, passes in enumerate(PASSES[:num_steps]):
        own = batches[sum(PASSES[:number]) :][:passes]
        step = Step([], None)
        compute = partial(compute_gradients, module, optimizer, own, after_backward, step.losses)
        if kind == "closure":
            step.returned = optimizer.step(compute)
        else:
            compute()
            step.returned = optimizer.step()
        if look_at is not None:
            step.weights = weights(look_at)
        steps.append(step)
        if scheduler is not None:
            scheduler.step()
        if kind == "resumed" and number == 0:
            optimizer.param_groups[0]["lr"] *= 0.5
            with noted("it was raised where state_dict() was called, after a step"):
                state = optimizer.state_dict()
            optimizer = make_optimizer(kind, named, make)
            with noted("it was raised where load_state_dict() was called, on a new optimizer"):
                optimizer.load_state_dict(state)
    return steps


def compute_gradients(
    module: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    after_backward: Callable[[int], None],
    losses: list[Tensor],
) -> Tensor:
    """A step's passes; returns the last one's loss, and notes it in `losses`."""
    optimizer.zero_grad()
    for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
        loss = module(*batch)[1]
        loss.backward()
        after_backward(left)
    losses.append(loss.detach().clone())
    return loss


def mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()


@dataclass(frozen=True)
class Rule:
    """What one process makes of all ranks' losses, and of what is there already."""

    combine: Callable[[list[Tensor]], Tensor] = mean
    first_counts: float = 1.0
    """How often, in the sum of the first step's backward passes."""
    averages_passes: bool = False
    """Whether a step's backward passes are averaged, where they add up."""
    forgets: bool = True
    """Whether zero_grad() does anything."""
    steps_each: int = 1
    """How often the optimizer steps where one step belongs."""
    common_settings: bool = False
    """Whether groups lose the settings of their own, and have the optimizer's."""
    keeps_rate: bool = False
    """Whether the learning rate stays what it was at first, whatever a scheduler does."""


def whole_batch(
    make_model: Any,
    seed: int,
    by_rank: list[Batches],
    kind: str,
    rule: Rule,
    num_steps: int = len(PASSES),
) -> dict:
    """The weights at the end of one process, which combines the gradients of all shares by a rule."""
    model = build(make_model, seed, torch.float64)
    turn = 0

    class Combined(nn.Module):
        """Called for each pass: its loss has the gradient that the rule makes of the shares' gradients."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return model.named_parameters(*args, **kwargs)

        def forward(self, *ignored: Any) -> tuple[None, Tensor]:
            nonlocal turn
            losses = [model(*batches[turn])[1] for batches in by_rank]
            times = rule.first_counts if turn == 0 else 1.0
            if rule.averages_passes and turn < PASSES[0]:
                times /= PASSES[0]
            turn += 1
            return None, times * rule.combine(losses)

    def make_one(params: Any, optimizer_class: Any, **settings: Any) -> Optimizer:
        if rule.common_settings:
            params = [{"params": group["params"]} for group in params]
        optimizer = optimizer_class(params, **settings)
        if not rule.forgets:
            optimizer.zero_grad = lambda: None
        if rule.steps_each > 1:
            optimizer.step = partial(repeated, rule.steps_each, optimizer.step)
        if rule.keeps_rate:
            rates = [group["lr"] for group in optimizer.param_groups]
            optimizer.register_step_pre_hook(partial(set_rates, rates))
        return optimizer

    train(Combined(), by_rank[0], kind, make_one, num_steps=num_steps)
    return weights(model)


def repeated(times: int, step: Callable[..., Any], *args: Any) -> Any:
    for _ in range(times):
        returned = step(*args)
    return returned


def set_rates(rates: list[float], optimizer: Optimizer, *_: Any) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


TWICE = (
    "the first backward pass counts twice: its whole gradient still stood in .grad when the second's was "
    "sent. It is dropped as soon as it is handed over, and means are added to means"
)


LOST = "the first backward pass is lost: the second one's gradient replaced its own"
FORGOTTEN = "the first backward pass is lost: the second one's forward forgets it"
AVERAGED = "a step's two backward passes are averaged, where their gradients add up"
DECAYED = "it has no gradient, and decayed: AdamW was given one of zeros"
STEPS = {
    LOST: "Add to what the pass before has left, where = stands.",
    FORGOTTEN: "Leave in forward what is there: zero_grad() forgets it, where a step begins.",
    AVERAGED: "Add the new mean over the ranks to the old one, and divide their sum by nothing.",
    DECAYED: "Give the optimizer None where there is no gradient: for a parameter that this pass has not "
    "used, whatever else is in its bucket, and for one that zero_grad() has cleared.",
}
"""The next step for who has a fault, where it says more than what is asked."""


def rules_of_passes(n: int) -> dict[str, list[Rule]]:
    """Wrong rules for what an earlier backward has left, by the sentence that tells them."""
    rules = {
        LOST: Rule(first_counts=0),
        TWICE: Rule(first_counts=2),
        AVERAGED: Rule(averages_passes=True),
        "the last step's gradient is still there: zero_grad() did not forget it": Rule(forgets=False),
        "the optimizer stepped twice where one step belongs": Rule(steps_each=2),
    }
    if n > 1:
        told = "the first backward pass's mean was reduced again with the second's, and so divided by n twice"
        rules[told] = Rule(first_counts=1 / n)
    return {told: [rule] for told, rule in rules.items()}


def rules_of_ranks(n: int) -> dict[str, list[Rule]]:
    """Wrong rules for the ranks' gradients, one for each rank or one for all."""
    rules = {
        "it was trained on the sum of the ranks' gradients: divide by the number of ranks": lambda losses: (
            torch.stack(losses).sum()
        ),
        "it was trained on the mean divided by the number of ranks once more": lambda losses: (
            torch.stack(losses).mean() / n
        ),
        "every rank was trained on rank 0's gradient": lambda losses: losses[0],
    }
    own = [Rule(lambda losses, r=r: losses[r]) for r in range(n)]
    return {
        **{told: [Rule(combine)] for told, combine in rules.items()},
        "each rank was trained on its own gradient: nothing was reduced": own,
    }


def expected_weights(trial: Trial, make_model: Any, seed: int, by_rank: list[Batches], kind: str) -> Any:
    """What one process comes to, where it began, and a function for what wrong rules come to."""
    n = trial.num_ranks
    rules: dict[str, list[Rule]] = {}
    if kind in ("SGD", "groups"):
        rules = (rules_of_ranks(n) if n > 1 else {}) | rules_of_passes(n)
    if kind == "groups":
        rules["the settings of the groups are lost: every group has the optimizer's"] = [
            Rule(common_settings=True)
        ]
    if kind in ("scheduled", "resumed"):
        rules = {"the learning rate stayed what it was at first": [Rule(keeps_rate=True)]}

    def others() -> dict[str, list[dict]]:
        wrong = {
            told: [whole_batch(make_model, seed, by_rank, kind, rule) for rule in by_rule]
            for told, by_rule in rules.items()
        }
        if kind == "closure":
            behind = whole_batch(make_model, seed, by_rank, kind, Rule(), num_steps=1)
            wrong["it is one step behind: the closure was called after the update"] = [behind]
        return wrong

    return SimpleNamespace(
        right=whole_batch(make_model, seed, by_rank, kind, Rule()),
        others=cache(others),  # only a wrong answer needs them
        start=weights(build(make_model, seed, torch.float64)),
    )


def rounding(actual: dict[str, Any], expected: dict[str, Tensor]) -> float:
    """The largest relative error of float64 numbers, if it is one of a lower precision; else 0."""
    errors = [
        ((actual[name].double() - e).abs().max() / e.abs().max()).item()
        for name, e in expected.items()
        if isinstance(actual.get(name), Tensor) and actual[name].shape == e.shape and e.any()
    ]
    return max(errors) if errors and 1e-11 < max(errors) < 1e-5 else 0.0


ROUNDED = "it was rounded on the way, in a buffer of lower precision"


def same_everywhere(tensors: list[Any]) -> bool:
    """Whether ranks have equal tensors, up to the order of sums."""
    if not all(isinstance(t, Tensor) and t.shape == tensors[0].shape for t in tensors):
        return True  # told otherwise
    return all(torch.allclose(t, tensors[0], rtol=1e-8, atol=1e-10) for t in tensors)


def require_weights(
    trial: Trial, ends: list[dict], expected: Any, kind: str, help: str, explain: Callable[[], str] = str
) -> None:
    """The weights of every rank at the end are those of one process.

    `explain` may know what explains all that is wrong, where none of the usual rules does; "" if it does not.
    """
    n, right, start = trial.num_ranks, expected.right, expected.start
    frozen_first = sorted(right, key=lambda name: not torch.equal(start[name], right[name]))
    for name in frozen_first:
        for r, end in enumerate(ends):
            trial.require(name in end, f"there is no weight {name}", rank=r, help=help)
        actual = [end[name] for end in ends]
        if all(isinstance(t, Tensor) and is_close(t, right[name]) for t in actual):
            continue
        alternatives: dict[str, Any] = {ROUNDED: actual} if all(rounding(e, right) for e in ends) else {}
        cause = explain()
        frozen = torch.equal(start[name], right[name])
        if not frozen and not cause:  # a symptom, which a cause explains
            alternatives["it is still what it was before training"] = start[name]
        if frozen and kind == "AdamW":
            decayed = start[name] * (1 - DECAY["lr"] * DECAY["weight_decay"]) ** len(PASSES)
            alternatives[DECAYED] = Fault(decayed, STEPS[DECAYED])
        for told, by_rule in expected.others().items():
            ends_so = [each[name] for each in (by_rule if len(by_rule) > 1 else by_rule * n)]
            alternatives[told] = Fault(ends_so, STEPS.get(told, ""))
        if cause:
            alternatives[cause] = Fault(actual, STEPS.get(cause, ""))
        elif not same_everywhere(actual):
            told = "the ranks do not have the same weights: the updated shares did not reach every rank"
            alternatives[told] = actual
        trial.close(
            f"{name} after {len(PASSES)} steps of {TOLD.get(kind, kind)}",
            actual,
            right[name],
            alternatives=alternatives,
            help=help,
        )
