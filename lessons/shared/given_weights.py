"""The judge's weights in a module that the learner builds."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from grader.checks import Trial


def give_weights(module: nn.Module, weights: dict[str, Tensor]) -> dict[str, list[int]]:
    """On a rank: write the weights into its parameters; or write none, and return what does not fit."""
    unfit = {
        name: list(parameter.shape)
        for name, parameter in module.named_parameters()
        if name not in weights or parameter.shape != weights[name].shape
    }
    with torch.no_grad():
        for name, parameter in () if unfit else module.named_parameters():
            parameter.copy_(weights[name])
    return unfit


def require_fit(trial: Trial, results: Sequence[dict], weights: Sequence[dict[str, Tensor]]) -> None:
    """The parameters of every rank have its weights' shapes; `unfit` is what `give_weights` returned."""
    for rank, (result, own) in enumerate(zip(results, weights, strict=True)):
        for name, shape in result.get("unfit", {}).items():
            if name not in own:
                trial.wrong(
                    f"{name} is one parameter more than there were: {', '.join(own)}",
                    help="The parameters were right: leave them as they are.",
                    rank=rank,
                )
            expected = tuple(own[name].shape)
            sizes = math.prod(shape), own[name].numel()
            trial.wrong(
                f"{name} is {tuple(shape)} on this rank, where {expected} is asked for",
                help="The parameters were right: leave them as they are.",
                rank=rank,
                cause="it is cut, and should be replicated: all of it on every rank"
                if sizes[1] == trial.num_ranks * sizes[0]
                else "it is whole, and should be cut: an n-th of it on every rank"
                if sizes[0] == trial.num_ranks * sizes[1]
                else "",
            )
