"""Checks of `checkpoint`: the second call runs under the circumstances of the first."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import Fault, Trial, check

from .models import (
    IN_CHECKPOINT,
    SEEDED,
    Layers,
    build,
    checkpoint_of,
    describe_call,
    gradients,
    next_numbers,
    seeing,
)

Autocasts = tuple[str, str]
"""Of a forward and of its backward: "off", or a dtype."""


def autocast(device: str, kind: str) -> torch.autocast:
    dtype = torch.bfloat16 if kind == "off" else getattr(torch, kind)
    return torch.autocast(device, dtype, enabled=kind != "off")


def under_autocast(rank: Any, how: str, seed: int, kinds: Autocasts, x: Tensor, upstream: Tensor) -> dict:
    """Forward and backward, each under an autocast of its own, or outside of any."""
    layers, device = build(lambda: Layers(x.size(-1), 0.2), seed, rank.device), rank.device.type
    x = x.requires_grad_()
    with autocast(device, kinds[0]):
        y = checkpoint_of(rank, how)(layers, x)
    with seeing(layers.calls), autocast(device, kinds[1]):
        y.backward(upstream.to(y.dtype))
    return {
        "output": y.detach().clone(),
        "gradients": {"the input": x.grad, **gradients(layers)},
        "autocast": [call["autocast"] for call in layers.calls],
    }


@check("checkpoint")
def works_inside_autocast(trial: Trial) -> None:
    """The function is computed again under the autocast of its first call: on or off, and with its dtype."""
    inputs = trial.normal(9, 8), trial.normal(9, 8)
    seed, seeds = trial.seed(), [trial.seed()]

    def run(how: str, *kinds: str) -> dict:
        return trial.run(under_autocast, how, seed, kinds, *inputs, seeds=seeds)[0]

    off = run("plain", "off", "off")
    help = (
        "Backward runs under the autocast of whoever calls it. Remember "
        "torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type), and put the "
        "second call into torch.autocast(...) with both, enabled or not."
    )
    for kinds in (("bfloat16", "off"), ("float16", "off"), ("off", "bfloat16")):
        mine, plain = run("mine", *kinds), run("plain", *kinds)
        where = f"forward under autocast {kinds[0]}, backward {kinds[1]}"
        expected = [plain["autocast"][0]] * len(mine["autocast"])
        told = f"the autocast of each call of the function ({where})"
        trial.equal(told, mine["autocast"], expected, help=help)
        trial.close(f"the output ({where})", mine["output"], plain["output"])
        if kinds[0] == "off":
            continue  # what backward itself computes in fewer bits is not the checkpoint's affair
        for name, expected in plain["gradients"].items():
            trial.close(
                f"the gradient of {name} ({where})",
                mine["gradients"][name],
                expected,
                alternatives={"the second call computed in float32": off["gradients"][name]},
                help=help,
            )


class Masked(nn.Module):
    """A dropout of torch's own random numbers, and those of two generators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.calls: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(describe_call(x))
        x = nn.functional.dropout(x, 0.3)
        for generator in self.generators:
            x = x * torch.empty_like(x).bernoulli_(0.5, generator=generator)
        return (x * self.weight).sin()


OTHER_STARTS = {
    "the second call drew those generators' next numbers": ("before", "late"),
    "the second call drew torch's next numbers, where generators are given": ("late", "before"),
    "the second call drew the next numbers of torch and of those generators": ("late", "late"),
    SEEDED: ("before", "seeded"),
}
"""What it looks like → when torch's own state was what the second call begins with, and the generators'."""


def torchs_own(device: torch.device) -> torch.Generator:
    return (
        torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    )


def states(generators: list[torch.Generator]) -> list[Tensor]:
    return [generator.get_state() for generator in generators]


def own_generators(rank: Any, how: str, seed: int, as_iterator: bool, x: Tensor) -> dict:
    """A checkpoint that is told of two generators; from all streams something is drawn before backward, too.

    "peek" are the numbers that follow the function's, "others" the gradients of known slips.
    """
    checkpoint = checkpoint_of(rank, how)
    if how == "mine" and "generators" not in inspect.signature(checkpoint).parameters:
        return {}
    module = build(Masked, seed, rank.device)
    module.generators = generators = [torch.Generator(rank.device).manual_seed(seed + i) for i in range(2)]
    seeded = [None, *states(generators)]
    for generator in generators:
        torch.rand(3, device=rank.device, generator=generator)
    told = {} if how == "plain" else {"generators": iter(generators) if as_iterator else generators}
    streams = [torchs_own(rank.device), *generators]
    starts = {"seeded": seeded, "before": states(streams)}
    y = checkpoint(module, x.requires_grad_(), **told)
    found = {"peek": [next_numbers(stream) for stream in streams]}
    for stream in streams:
        torch.rand(3, device=rank.device, generator=stream)
    starts["late"] = states(streams)
    y.sum().backward()
    found |= {"x": x.grad.clone(), "weight": module.weight.grad.clone()}
    found["after"] = [next_numbers(stream) for stream in streams]
    others = {}
    for cause, (of_torch, of_generators) in OTHER_STARTS.items():
        module.zero_grad()
        x.grad = None
        for i, stream in enumerate(streams):
            stream.set_state(starts[of_generators if i else of_torch][i])
        module(x).sum().backward()
        others[cause] = {"x": x.grad.clone(), "weight": module.weight.grad.clone()}
    return {**found, "others": others}


@check("checkpoint")
def given_generators_repeat(trial: Trial) -> None:
    """Generators that it is told of repeat their numbers as torch's own does, and all go on as without."""
    x, seed, seeds = trial.normal(9, 8), trial.seed(), [trial.seed()]
    help = (
        "generator.get_state() and generator.set_state(state) do for it what get_rng_state does for torch's: "
        "remember all states before the first call, and around the second one set them, and set them back."
    )
    for given, as_iterator in (("a list", False), ("an iterator", True)):
        mine, plain = (
            trial.run(own_generators, how, seed, as_iterator, x, seeds=seeds)[0] for how in ("mine", "plain")
        )
        if not mine:  # `checkpoint(function, *inputs)`, which nobody can tell of generators
            return
        where = f"where dropouts have generators of their own, given as {given},"
        for name in ("x", "weight"):
            trial.close(
                f"the gradient of {name}, {where}",
                mine[name],
                plain[name],
                alternatives={
                    cause: Fault(gradients[name], IN_CHECKPOINT if cause == SEEDED else "")
                    for cause, gradients in plain["others"].items()
                },
                help=f"{help} An iterator is used up after one pass: make a list of it."
                if as_iterator
                else help,
            )
        for i, expected in enumerate(plain["after"]):
            generator = f"generator {i - 1}" if i else "torch's own generator"
            trial.close(
                f"what {generator} draws after backward",
                mine["after"][i],
                expected,
                alternatives={"it stands where the second call left it": plain["peek"][i]},
                help=help,
            )
