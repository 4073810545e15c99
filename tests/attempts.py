"""Submissions that go wrong, or cheat, in one real exercise: text in, what the learner reads out."""

import textwrap
from pathlib import Path

from grader.judging.course import find_exercise
from grader.judging.judge import Settings, grade_exercise
from grader.judging.submission import read_submission
from grader.judging.verdicts import CheckReport, ExerciseReport
from grader.ranks.launcher import Launcher, Limits

LESSON, EXERCISE = find_exercise("copy_to_group")  # type: ignore[misc]
FORWARD = "output_is_the_input"
BACKWARD = "gradient_is_summed_over_ranks"
MECHANISM = "sends_one_all_reduce_and_only_in_backward"

CORRECT = """
import os
import sys
import time

import torch
import torch.distributed as dist


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def copy_to_group(x, group):
    return Copy.apply(x, group)
"""


def twisted(before: str = "", *, returns: str = "Copy.apply(x, group)") -> str:
    """The correct submission with more lines at the start of its function, or another result."""
    body = textwrap.indent(textwrap.dedent(before).strip() or "pass", "    ")
    return CORRECT.replace("    return Copy.apply(x, group)\n", f"{body}\n    return {returns}\n")


def grade(
    folder: Path,
    source: str | bytes,
    launcher: Launcher,
    *checks: str,
    ranks: tuple[int, ...] = (2,),
    name: str = "submission.py",
    **limits: float,
) -> ExerciseReport:
    """Grade a file with `source` in it as a learner's."""
    path = folder / name
    path.write_bytes(source.encode() if isinstance(source, str) else source)
    submission = read_submission(path)
    settings = Settings(ranks=ranks, limits=Limits(**{"timeout": 20.0, **limits}))  # type: ignore[arg-type]
    return grade_exercise(
        EXERCISE, LESSON.name, submission.code(), launcher, settings, submission.locate, checks
    )


def look(folder: Path, source: str, launcher: Launcher, check: str = FORWARD, **limits: float) -> CheckReport:
    """What one check says of a submission."""
    (report,) = grade(folder, source, launcher, check, **limits).checks
    return report
