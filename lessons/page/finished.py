"""A page that goes on where an exercise was left out."""

import importlib
from typing import Any

from grader.own_work import find_exercise
from nanogpt.unfinished import unfinished


def finished(exercise: Any) -> Any:
    """The learner's function or class, as this notebook has it; the course's while it is still to be written.

    A line says so where it is the course's.
    """
    if not unfinished(exercise):
        return exercise
    lesson, found = find_exercise(exercise.__name__)
    print(f"{found.name}: the course's own, as yours is still to be written")
    return getattr(importlib.import_module(f"solutions.{lesson.slug}"), found.name)
