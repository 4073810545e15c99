"""What the training loop asks of a way to train on many ranks, and how it finds one by its name.

The loop knows no technique. It holds one `Parallel`, and calls its methods at the moments where
ranks may have to do something. The base class is training on one rank: it does nothing. A
technique brings its own subclass, in a dictionary `PARALLEL` of its module:

    PARALLEL: dict[str, type[Parallel]] = {"data_parallel": DataParallelTraining}

`find_parallel("data_parallel")` looks for that dictionary at run time, so that this package
imports no technique.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanogpt.model import GPT, GPTConfig


class Group(Protocol):
    """The little that is asked of a process group here."""

    def rank(self) -> int:
        """This process's number in the group."""

    def size(self) -> int:
        """How many processes there are."""


Implementation = ModuleType | SimpleNamespace
"""The attributes are the exercises of a lesson: a module, or what a notebook defined."""


class Parallel:
    """Training on one rank, and the methods that a technique overrides.

    The order in which the loop calls them: `check` (model not yet built), `wrap` once, then for every
    step `share` for each micro-batch, `accumulating` around all of them but the last, `synchronize`
    after the last backward, `clip_gradients`, and now and then `mean_loss` and `whole_state_dict`.
    Every rank calls each of them at the same moment, so each may communicate.

    The model that `wrap` gets has the same weights on every rank. After `wrap`, rank r seeds torch with
    seed + r, so plain dropout differs between ranks; where masks must agree, set `Dropout.generator`
    (the state of every module's `generator` is kept in checkpoints).
    """

    exercise: str = ""
    """Name that a learner's file must define for this technique; empty if it needs none."""

    def __init__(self, implementation: Implementation | None = None, group: Group | None = None) -> None:
        """`implementation` None asks for PyTorch's own version of the technique."""
        self.implementation = implementation
        self.group = group

    def check(self, config: GPTConfig, num_ranks: int) -> None:
        """Raise a ValueError of one sentence if this model cannot be trained on so many ranks."""

    def wrap(self, model: GPT) -> nn.Module:
        """What the loop calls as module(idx, targets), for (logits, loss), on this rank's `share`.

        `module.parameters()` go to this rank's optimizer; `module.state_dict()` is what this rank keeps
        in a checkpoint and gets back through `load_state_dict`.
        """
        return model

    def share(self, tensor: Tensor) -> Tensor:
        """This rank's part of a global batch (b, s), which every rank has; b divides over the ranks."""
        return tensor

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Around forward and backward of every micro-batch of a step but the last."""
        return nullcontext()

    def synchronize(self, module: nn.Module) -> None:
        """After a step's last backward: when it returns, every gradient is complete."""

    def clip_gradients(self, module: nn.Module, max_norm: float) -> Tensor:
        """Scale gradients so that the norm of all of them, over all ranks, is at most max_norm.

        Returns the norm before. An infinite max_norm only measures.
        """
        return nn.utils.clip_grad_norm_(module.parameters(), max_norm)

    def mean_loss(self, loss: Tensor) -> Tensor:
        """The loss of the global batch, from the loss of this rank's share: a detached scalar."""
        return loss.detach()

    def whole_state_dict(self, module: nn.Module) -> Mapping[str, Tensor]:
        """The dense weights under GPT's names, the same on every rank."""
        return module.state_dict()

    def num_shares(self, num_ranks: int) -> int:
        """Into how many parts `share` cuts the batch."""
        rows = torch.zeros(num_ranks, 1)
        return num_ranks // max(1, self.share(rows).size(0))


def find_parallel(name: str, package: str = "solutions") -> tuple[type[Parallel], ModuleType]:
    """The training adapter called `name`, and the module of `package` that brings it.

    Modules are imported one by one, the one of that name first, and only until it is found.

    Raises:
        ValueError: nothing is called so; the sentence lists what there is.
    """
    known: list[str] = []
    broken: list[str] = []
    for module_name in _modules(package, first=name):
        try:
            module = importlib.import_module(f"{package}.{module_name}")
        except Exception as error:
            broken.append(f"{package}.{module_name} ({type(error).__name__}: {error})")
            continue
        adapters = getattr(module, "PARALLEL", {})
        if name in adapters:
            return adapters[name], module
        known += adapters
    listed = ", ".join(sorted(known)) or "none"
    failed = f"; these could not be imported: {', '.join(broken)}" if broken else ""
    raise ValueError(
        f"--parallel {name}: no such technique in the package {package!r}; known are: {listed}{failed}"
    )


def _modules(package: str, first: str) -> list[str]:
    """Names of the package's modules, sorted, `first` before the others."""
    try:
        found = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--parallel needs the package {package!r}, which Python does not find ({error}): "
            "run from the repository's root, or install it with pip install -e ."
        ) from None
    names = [module.name for module in pkgutil.iter_modules(found.__path__)]
    return sorted(names, key=lambda each: (each != first, each))
