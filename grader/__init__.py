"""Runs a learner's code on real ranks, compares it with what it should do, and says what is wrong and where.

In a notebook: `check(MyLinear)` grades one exercise, `run_ranks(function, *args, ranks=4)` runs any function
on ranks, `guess(megabytes=...)` keeps a guess until the truth is shown, `own("ring_all_reduce")` is what the
learner built in an earlier lesson. In a terminal: `grade` (see grader.cli). Those who write lessons import
`grader.checks`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grader.guessing import guess
    from grader.notebook import check, run_ranks
    from grader.own_work import own

__all__ = ["check", "guess", "own", "run_ranks"]

_HOMES = {"check": "notebook", "guess": "guessing", "own": "own_work", "run_ranks": "notebook"}


def __getattr__(name: str) -> Any:
    """Import what a notebook uses when it is asked for: the rest of the package does without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"grader.{_HOMES[name]}"), name)
