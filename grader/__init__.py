"""Runs a learner's code on real ranks, compares it with what it should do, and says what is wrong and where.

In a notebook: `check(MyLinear)` grades one exercise, `run_ranks(function, *args, ranks=4)` runs any function
on ranks, `guess(megabytes=...)` keeps a guess until the truth is shown. In a terminal: `grade` (see
grader.cli). Those who write lessons import `grader.checks`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grader.guessing import guess
    from grader.notebook import check, run_ranks

__all__ = ["check", "guess", "run_ranks"]


def __getattr__(name: str) -> Any:
    """Import what a notebook uses when it is asked for: the rest of the package does without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grader import guessing, notebook

    return getattr(guessing if name == "guess" else notebook, name)
