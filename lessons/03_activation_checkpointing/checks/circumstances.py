"""Checks of `checkpoint`: the second call runs under the circumstances of the first."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import Trial, check

from .models import Layers, build, checkpoint_of, describe_call, gradients, seeing


def under_autocast(rank: Any, how: str, seed: int, inside: bool, x: Tensor, upstream: Tensor) -> dict:
    """Forward under autocast, backward after it; or, for comparison, no autocast at all."""
    layers, device = build(lambda: Layers(x.size(-1), 0.2), seed, rank.device), rank.device.type
    x = x.requires_grad_()
    with torch.autocast(device, torch.bfloat16, enabled=inside):
        y = checkpoint_of(rank, how)(layers, x)
    with seeing(layers.calls):
        y.backward(upstream.to(y.dtype))
    return {
        "output": y.detach().clone(),
        "gradients": {"the input": x.grad, **gradients(layers)},
        "autocast": [call["autocast"] for call in layers.calls],
    }


@check("checkpoint")
def works_inside_autocast(trial: Trial) -> None:
    """A function that ran under autocast is computed again under the same autocast."""
    inputs = trial.normal(9, 8), trial.normal(9, 8)
    seed, seeds = trial.seed(), [trial.seed()]
    mine, plain, off = (
        trial.run(under_autocast, how, seed, inside, *inputs, seeds=seeds)[0]
        for how, inside in (("mine", True), ("plain", True), ("plain", False))
    )
    help = (
        "Backward runs outside of autocast. Remember torch.is_autocast_enabled(device_type) and "
        "torch.get_autocast_dtype(device_type), and put the second call into torch.autocast(...) with them."
    )
    expected = [plain["autocast"][0]] * len(mine["autocast"])
    trial.equal("the autocast of each call of the function", mine["autocast"], expected, help=help)
    trial.close("the output under autocast", mine["output"], plain["output"])
    for name, expected in plain["gradients"].items():
        trial.close(
            f"the gradient of {name} under autocast",
            mine["gradients"][name],
            expected,
            alternatives={"the second call computed in float32": off["gradients"][name]},
            help=help,
        )


class Masked(nn.Module):
    """Dropout from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.calls: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(describe_call(x.device.type))
        mask = torch.empty_like(x).bernoulli_(0.5, generator=self.generator)
        return (x * self.weight * mask).sin()


def own_generator(rank: Any, how: str, seed: int, x: Tensor) -> dict | None:
    """A checkpoint that is told of a generator; None where `checkpoint` has no such parameter.

    "others" are the gradients of one more, plain call, which draws the generator's next numbers.
    """
    checkpoint = checkpoint_of(rank, how)
    if how == "mine" and "generators" not in inspect.signature(checkpoint).parameters:
        return None
    module = build(Masked, seed, rank.device)
    module.generator = torch.Generator(rank.device).manual_seed(seed)
    told = {"generators": [module.generator]} if how == "mine" else {}
    y = checkpoint(module, x.requires_grad_(), **told)
    y.sum().backward()
    found = {"x": x.grad.clone(), "weight": module.weight.grad.clone()}
    found["after"] = torch.rand(4, device=rank.device, generator=module.generator.clone_state())
    module.zero_grad()
    x.grad = None
    module(x).sum().backward()
    return {**found, "others": {"x": x.grad, "weight": module.weight.grad}}


@check("checkpoint")
def given_generators_repeat(trial: Trial) -> None:
    """Generators that it is told of repeat their numbers too, and go on afterwards as without."""
    x, seed, seeds = trial.normal(9, 8), trial.seed(), [trial.seed()]
    mine, plain = (trial.run(own_generator, how, seed, x, seeds=seeds)[0] for how in ("mine", "plain"))
    if mine is None:
        return
    help = (
        "generator.get_state() and generator.set_state(state) do for it what get_rng_state does for torch's."
    )
    for name in ("x", "weight"):
        trial.close(
            f"the gradient of {name}, where dropout has a generator of its own,",
            mine[name],
            plain[name],
            alternatives={"the second call drew that generator's next numbers": plain["others"][name]},
            help=help,
        )
    trial.close("the generator's next number after backward", mine["after"], plain["after"], help=help)
