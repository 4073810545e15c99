"""Checks of `all_reduce_gradients`: mean gradients after backward."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from grader.checks import Trial, check, exercise

from .means import (
    BOTH,
    draw_passes,
    expected_gradients,
    require_bytes,
    require_mean,
)
from .models import (
    Mixed,
    build,
    by_rank,
    gradients,
    weights,
)

exercise(
    "all_reduce_gradients",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "model.parameters() names a tied weight once. The gradient stands in parameter.grad.",
        "An all-reduce needs every rank. If one rank leaves a parameter out because its gradient is None, "
        "who answers the "
        "ranks that have one?",
        "requires_grad is the same on every rank; grad being None is not. Decide by the first, and fill in "
        "zeros.",
    ),
)


def average(
    rank: Any, seed: int, double: bool, tokens: Tensor, targets: Tensor, order: tuple[str, ...]
) -> dict:
    model = build(Mixed, seed).to(rank.device)
    model = model.double() if double else model
    F.cross_entropy(model(tokens, order), targets).backward()
    with rank.record() as recording:
        rank.submission.all_reduce_gradients(model, rank.group)
    return {"gradients": gradients(model), "weights": weights(model), "recording": recording}


def observe_average(trial: Trial, order: list[tuple[str, ...]], double: bool = False) -> SimpleNamespace:
    seed, passes = trial.seed(), draw_passes(trial, order)
    results = trial.run(average, seed, double, per_rank=passes[0])
    expected, own = expected_gradients(seed, passes)
    return SimpleNamespace(results=results, expected=expected, own=own, start=weights(build(Mixed, seed)))


def observe_all_used(trial: Trial) -> SimpleNamespace:
    return observe_average(trial, [BOTH])


def observe_some_unused(trial: Trial) -> SimpleNamespace:
    return observe_average(trial, [("left",), BOTH])


def observe_double(trial: Trial) -> SimpleNamespace:
    return observe_average(trial, [("left",), BOTH], double=True)


@check("all_reduce_gradients")
def gradients_are_the_mean_over_ranks(trial: Trial) -> None:
    """After the call every rank has the mean of all ranks' gradients."""
    require_mean(
        trial, trial.once(observe_all_used), help="All-reduce the sum, divide by group.size(), once."
    )


@check("all_reduce_gradients")
def a_missing_gradient_counts_as_zero(trial: Trial) -> None:
    """A layer that only some ranks used: the others, whose gradient is None, count as zero."""
    seen = trial.once(observe_some_unused)
    require_mean(
        trial,
        seen,
        help="Every rank takes part, with zeros where it has no gradient, and n counts all ranks.",
    )


@check("all_reduce_gradients")
def frozen_parameters_keep_none(trial: Trial) -> None:
    """A frozen parameter gets no gradient."""
    for r, gradient in enumerate(by_rank(trial.once(observe_all_used).results, "gradients", "frozen.weight")):
        trial.require(
            gradient is None,
            "frozen.weight (requires_grad False) got a gradient",
            rank=r,
            help="Leave parameters out that are not trained: an optimizer would decay them.",
        )


@check("all_reduce_gradients")
def weights_are_left_alone(trial: Trial) -> None:
    """Gradients are averaged, weights are not touched."""
    seen = trial.once(observe_all_used)
    for name, start in seen.start.items():
        trial.close(
            f"the weight {name}",
            by_rank(seen.results, "weights", name),
            start,
            rtol=0.0,
            help="It is parameter.grad that travels, not the parameter.",
        )


@check("all_reduce_gradients")
def gradients_keep_the_models_dtype(trial: Trial) -> None:
    """A float64 model is averaged in float64, and its gradients stay float64."""
    require_mean(trial, trial.once(observe_double), help="Make buffers and zeros in the parameter's dtype.")


@check("all_reduce_gradients")
def every_gradient_is_sent_once(trial: Trial) -> None:
    """What is reduced is one copy of the gradients: a tied weight's once, and frozen weights' not at all."""
    seen = trial.once(observe_all_used)
    size = sum(weight.numel() * 4 for name, weight in seen.start.items() if name != "frozen.weight")
    for r, result in enumerate(seen.results):
        require_bytes(trial, r, result["recording"], size)
