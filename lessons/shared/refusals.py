"""Numbers that do not divide, and the error that says so."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from grader.checks import CheckEnded, Trial, Verdict

USE_SHARD_SIZE = "Use shard_size: it raises the ValueError for you."
OF_HEADS = (
    "shard_size of the number of heads raises the ValueError for you. A width that divides is not enough: it "
    "may cut a head in two."
)


def undividable(trial: Trial, least: int = 5) -> int:
    """A number that is not divisible by the group's size (any number where one rank divides all)."""
    n = trial.num_ranks
    return trial.integer(least // n + 1, least // n + 4) * n + (trial.integer(1, n - 1) if n > 1 else 0)


def refusal_of(function: Callable, *arguments: Any, **options: Any) -> dict:
    """On a rank: type and text of what a call raises, and what it has changed in the modules it was given.

    A stub's NotImplementedError passes through.
    """
    modules = [argument for argument in arguments if isinstance(argument, nn.Module)]
    before = [_state(module) for module in modules]
    error = None
    try:
        function(*arguments, **options)
    except NotImplementedError:
        raise
    except Exception as raised:
        error = [type(raised).__name__, str(raised)]
    changed = [
        name for module, was in zip(modules, before, strict=True) for name in _different(was, _state(module))
    ]
    return {"error": error, "changed": changed}


def _state(module: nn.Module) -> dict[str, tuple]:
    """What can be replaced: modules with their attributes, parameters with their numbers."""
    state: dict[str, tuple] = {
        name or "the module itself": (id(each), {key: _identity(value) for key, value in vars(each).items()})
        for name, each in module.named_modules()
    }
    return state | {name: (id(p), p.detach().clone()) for name, p in module.named_parameters()}


def _identity(value: Any) -> tuple[int, int]:
    """Which object it is, and how much it holds."""
    return id(value), len(value) if isinstance(value, dict | list | set) else 0


def _different(was: dict[str, tuple], now: dict[str, tuple]) -> list[str]:
    def same(name: str) -> bool:
        (a, b), (c, d) = was[name], now.get(name, (None, None))
        return a == c and (torch.equal(b, d) if isinstance(b, torch.Tensor) else b == d)

    return [name for name in was if not same(name)] + [name for name in now if name not in was]


def refused(
    trial: Trial, size: int, probe: Callable, *arguments: Any, heads: bool = False, **options: Any
) -> None:
    """On every rank a ValueError comes, and nothing is changed before it.

    Args:
        size: what is not divisible by the ranks.
        heads: whether it is a number of heads.
        probe: what runs on each rank with the arguments and options of `Trial.run`, and returns what
            `refusal_of` does.
    """
    if trial.num_ranks == 1:
        return
    what = f"{size} heads are" if heads else f"{size} is"
    told = f"{what} not divisible by {trial.num_ranks} ranks, and no error was raised"
    step = OF_HEADS if heads else USE_SHARD_SIZE
    for rank, refusal in enumerate(_refusals(trial, told, step, probe, *arguments, **options)):
        if refusal["error"] is None:
            trial.wrong(told, help=step, rank=rank)
        kind, message = refusal["error"]
        if kind != "ValueError":
            trial.wrong(f"expected a ValueError, got {kind}: {message}", help="Use shard_size.", rank=rank)
        trial.require(
            not refusal["changed"],
            f"the ValueError came too late: already changed was {', '.join(refusal['changed'][:3])}",
            help="Ask shard_size before you replace anything.",
            rank=rank,
        )


def _refusals(
    trial: Trial, told: str, step: str, probe: Callable, *arguments: Any, **options: Any
) -> list[dict]:
    """The ranks' refusals; ranks that go on instead send parts of different sizes, and may never end."""
    try:
        return trial.run(probe, *arguments, **options)
    except CheckEnded as end:
        if end.verdict == Verdict.HUNG:
            end.cause = f"{told}: the ranks went on, with parts that do not fit together"
            end.help = step
        raise
