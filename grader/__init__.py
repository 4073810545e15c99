"""Runs a learner's code on real ranks, compares it with what it should do, and says what is wrong and where.

In a notebook: `check(MyLinear)` grades one exercise, `run_ranks(function, *args, ranks=4)` runs any function
on ranks. In a terminal: `grade` (see grader.cli). Those who write lessons import `grader.checks`.
"""

from grader.notebook import check, run_ranks

__all__ = ["check", "run_ranks"]
