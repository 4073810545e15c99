"""A star for `accumulate_gradients`: hooks that take each gradient away, as those of ZeRO do."""

from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import Trial, check, is_close
from nanogpt.model import GPTConfig

from .accumulate import batch, ignoring
from .models import build, counted, weighted


def call_with_hooks(
    rank: Any, config: dict[str, Any], seed: int, inputs: Tensor, targets: Tensor, num_microbatches: int
) -> dict[str, Any]:
    """What the hooks have taken in all, and how often they were called."""
    model = build(GPTConfig(**config), seed).to(rank.device)
    taken = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    calls = []

    def take(parameter: nn.Parameter) -> None:
        calls.append(parameter)
        taken[parameter] += parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    try:
        rank.submission.accumulate_gradients(model, inputs, targets, num_microbatches)
    except Exception as error:
        error.add_note(
            "Hooks on the parameters had set .grad to None, as soon as backward() had added to it."
        )
        raise
    return {"taken": {name: taken[p] for name, p in model.named_parameters()}, "calls": len(calls)}


@check("accumulate_gradients", optional=True)
def gradients_may_be_taken_away(trial: Trial) -> None:
    """Hooks that take each gradient away as soon as it is in .grad have taken those of one pass in all."""
    case = ignoring(trial, batch(trial, 6, 3))
    k, every = case.num_microbatches, counted(case.targets)
    found = trial.run(call_with_hooks, vars(case.config), case.seed, case.inputs, case.targets, k)[0]
    _, expected = weighted(case.config, case.seed, [(case.inputs, case.targets, 1.0)])
    taken = found["taken"]

    def all_are(factor: float) -> bool:
        return all(is_close(taken[name], factor * truth) for name, truth in expected.items())

    factors = {f"{every} counted targets": every, f"{k} micro-batches": k}
    scaled = next((text for text, factor in factors.items() if all_are(factor)), "")
    cause = f"they are divided by the {scaled} after backward(): by then they are gone" if scaled else ""
    if not found["calls"]:
        cause = "no hook was called: backward() calls them, torch.autograd.grad() and torch.func do not"
    trial.require(
        all_are(1.0),
        f"{case.told}: hooks on the parameters take each gradient away as soon as it is in .grad, and what "
        "they have taken in all is not the gradient of one pass; without hooks .grad is",
        cause=cause,
        help="Scale each micro-batch's loss before its backward(), and let backward() add to .grad: data "
        "parallel models send a gradient away from such a hook, register_post_accumulate_grad_hook.",
    )
