"""What the checks of several lessons share: drawn weights, one part of every rank's result, what was sent.

Functions marked "on a rank" are for probes, the others for checks.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grader.judging.trial import Trial
from grader.ranks.recording import Event

BACKWARD = "backward begins"
"""The mark between forward and backward."""


def drawn_alike(module: nn.Module, trial: Trial) -> nn.Module:
    """Give every parameter numbers of the judge's, biases and norms too: zeros and ones hide mistakes."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = trial.normal(*parameter.shape)
            scale = 1 / math.sqrt(parameter.size(-1)) if parameter.dim() > 1 else 0.5
            is_gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(drawn * scale + (1.0 if is_gain else 0.0))
    return module


@contextmanager
def drawn_with(seed: int) -> Iterator[None]:
    """Inside, torch's numbers on the CPU are those of a seed; then its random state is what it was.

    `torch.manual_seed` would leave a note, with a stack of calls, for every kind of GPU that is not there.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of a module's parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def parts(tensor: Tensor, dim: int, num_ranks: int) -> list[Tensor]:
    """Equal contiguous slices of a tensor, one a rank."""
    return list(tensor.chunk(num_ranks, dim))


def backward(y: Tensor, upstream: Tensor) -> None:
    """On a rank: backward, unless the output is no good already; the checks of output and gradient tell."""
    if isinstance(y, Tensor) and y.requires_grad and y.shape == upstream.shape:
        y.backward(upstream)


def each_rank(seen: SimpleNamespace, *path: str) -> list[Any]:
    """One part of every rank's result, from `seen.results`; None where a rank does not have it."""
    values = list(seen.results)
    for key in path:
        values = [None if value is None else value.get(key) for value in values]
    return values


FEW_EVENTS = 6


def told(events: list[Event]) -> str:
    """The first few events, in words, and how many more there are."""
    first = ", ".join(event.describe() for event in events[:FEW_EVENTS]) or "nothing"
    return f"{first} and {len(events) - FEW_EVENTS} more" if len(events) > FEW_EVENTS else first


def stand_alone(trial: Trial, results: Iterable[dict[str, Any]], what: str = "") -> None:
    """Require that no shard under "weights" keeps more alive than itself, by the bytes under "held"."""
    for rank, result in enumerate(results):
        for name, held in result["held"].items():
            own = result["weights"][name].numel() * result["weights"][name].element_size()
            trial.require(
                held <= own,
                f"{what}{name} is a view: its {own:,} bytes keep {held:,} bytes alive",
                help="A slice shares the whole tensor's memory. Clone it, so that the whole can be freed.",
                rank=rank,
            )


def row_order(actual: Tensor | None, expected: Tensor) -> list[int] | None:
    """Which row of `expected` each row of `actual` is, if they are the same rows in some order."""
    if actual is None or actual.shape != expected.shape:
        return None
    order = torch.cdist(actual.double(), expected.double()).argmin(dim=1)
    same = torch.allclose(actual.double(), expected.double()[order], atol=1e-6)
    return order.tolist() if same and len(set(order.tolist())) == len(order) else None
