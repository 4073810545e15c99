"""What the training loop can take from the lessons, and how it finds a technique by its name.

The loop knows no technique. A technique brings an adapter, a subclass of one of three classes, in a
dictionary of its module:

    PARALLEL = {"data_parallel": DataParallelTraining}      a Parallel (see parallel.py): --parallel
    CHECKPOINT = {"every": BlocksCheckpointing}             a Checkpointing: --checkpoint
    ACCUMULATE = {"accumulate": MicrobatchAccumulation}     an Accumulation: --accumulate

They stand in the module of the technique, or beside it: those of `fsdp` in `fsdp_training`. `find_technique`
looks for them at run time, so that this package imports no technique.
"""

import importlib
import pkgutil
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor, nn

from nanogpt.model import GPT

Implementation = ModuleType | SimpleNamespace
"""The attributes are the exercises of a lesson: a module, or what a notebook defined."""

OPTIONS = {"PARALLEL": "--parallel", "CHECKPOINT": "--checkpoint", "ACCUMULATE": "--accumulate"}
"""Name of a dictionary of techniques → the option that asks for one."""
BESIDE = "_training"
"""Ends the name of a module that holds the adapters of the one without it."""


class Technique:
    """Something that a learner builds and the loop can use."""

    exercises: tuple[str, ...] = ()
    """Names that a learner's file must define for this technique."""

    def __init__(self, implementation: Implementation | None = None) -> None:
        """`implementation` None asks for PyTorch's own version of the technique."""
        self.implementation = implementation


class Checkpointing(Technique):
    """Keeps fewer activations for backward. The base class keeps all."""

    recomputes: str = ""
    """What is computed again in backward: "" nothing, "blocks", or "attention"."""

    def apply(self, model: GPT) -> GPT:
        """Change a model so that it keeps less; its parameters and their names stay."""
        return model


def num_counted(targets: Tensor) -> Tensor:
    """How many targets count, which are those that are not -1: a scalar."""
    return (targets != -1).sum()


def weighed(mean: Tensor, weight: Tensor) -> Tensor:
    """A mean loss times what it counts for: nothing where no target counts, and the mean is 0/0."""
    return torch.where(weight > 0, mean * weight, 0.0)


class Accumulation(Technique):
    """Adds up the gradient of a batch in micro-batches. The base class is the loop that everyone writes."""

    def check(self) -> None:
        """Raise a ValueError of one sentence if this cannot train a model whose ranks share out the batch."""

    def accumulate(self, module: nn.Module, inputs: Tensor, targets: Tensor, num_microbatches: int) -> Tensor:
        """Add to `.grad` what one pass over all of (b, s) would add; the detached mean loss.

        `module(inputs, targets)` is (logits, loss), and is called `num_microbatches` times. A micro-batch
        counts by its targets that are not -1.
        """
        total, counted = torch.zeros((), device=inputs.device), num_counted(targets)
        parts = zip(
            inputs.tensor_split(num_microbatches), targets.tensor_split(num_microbatches), strict=True
        )
        for rows, goals in parts:
            loss = module(rows, goals)[1]  # the logits end here: backward needs them not
            loss = weighed(loss, num_counted(goals) / counted)
            loss.backward()
            total += loss.detach()
        return total


def find_technique(table: str, name: str, package: str = "solutions") -> tuple[type, ModuleType]:
    """The adapter called `name` in a dictionary `table` of one of the package's modules, and its technique's.

    Modules are imported one by one, the one of that name first, and only until it is found.

    Raises:
        ValueError: nothing is called so; the sentence lists what there is.
    """
    option = OPTIONS[table]
    known: list[str] = []
    broken: list[str] = []
    for module_name in _modules(package, name, option):
        try:
            module = importlib.import_module(f"{package}.{module_name}")
        except Exception as error:
            broken.append(f"{package}.{module_name} ({type(error).__name__}: {error})")
            continue
        adapters = getattr(module, table, {})
        if name in adapters:
            return adapters[name], importlib.import_module(module.__name__.removesuffix(BESIDE))
        known += adapters
    listed = ", ".join(sorted(set(known))) or "none"
    failed = f"; these could not be imported: {', '.join(broken)}" if broken else ""
    raise ValueError(
        f"{option} {name}: no such technique in the package {package!r}; known are: {listed}{failed}"
    )


def _modules(package: str, first: str, option: str) -> list[str]:
    """Names of the package's modules, sorted, `first` and the one beside it before the others."""
    try:
        found = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{option} needs the package {package!r}, which Python does not find ({error}): "
            "run from the repository's root, or install it with pip install -e ."
        ) from None
    names = [module.name for module in pkgutil.iter_modules(found.__path__)]
    return sorted(names, key=lambda each: (each.removesuffix(BESIDE) != first, each))
