"""What the learner has built in an earlier lesson, for a later one to go on with."""

import contextlib
import importlib
from typing import Any

import cloudpickle

from grader.judging.course import Lesson, find_exercise
from grader.judging.judge import Settings, Task, grade_task
from grader.judging.reading import NothingToReadError, UnreadableError
from grader.judging.submission import read_submission
from grader.judging.trial import Exercise
from grader.judging.verdicts import Verdict
from grader.ranks.launcher import shared_launcher
from nanogpt.implementation import load_implementation


def own(name: str) -> Any:
    """The learner's exercise `name` from its lesson's notebook if it passes there, else the course's.

    A line says which. Raises ValueError where the course has no such exercise.
    """
    found = find_exercise(name)
    if found is None:
        raise ValueError(f"the course has no exercise {name!r}")
    lesson, exercise = found
    why = why_not(lesson, exercise)
    if why:
        print(f"{name}: the course's own, from its solutions ({why} in {lesson.notebook.name})")
        return getattr(importlib.import_module(f"solutions.{lesson.slug}"), name)
    print(f"{name}: yours, from {lesson.notebook.name}")
    theirs = getattr(load_implementation(lesson.notebook), name)
    cloudpickle.register_pickle_by_value(importlib.import_module(theirs.__module__))
    return theirs


def why_not(lesson: Lesson, exercise: Exercise) -> str:
    """Why the learner's exercise can not be used, in a few words; "" where it passes."""
    with contextlib.suppress(NothingToReadError, UnreadableError):
        submission = read_submission(lesson.notebook)
        report = grade_task(Task(submission, lesson, exercise), shared_launcher(), Settings())
        return "" if report.verdict == Verdict.PASSED else f"yours is {report.verdict}"
    return "yours can not be read"
