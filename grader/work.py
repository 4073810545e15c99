"""What a path on the command line means: pairs of a submission and a lesson whose exercises it has."""

import os
from pathlib import Path

from grader.judging.course import Lesson, lessons
from grader.judging.reading import UnreadableError, as_spelled
from grader.judging.submission import Submission, read_submission
from grader.ranks.isolation import ROOT

SOLUTIONS = ROOT / "solutions"
Work = list[tuple[Submission, Lesson]]


def find_work(path: str | None, only: tuple[str, ...]) -> Work:
    """What to grade. The course's own solutions are known by their name, never by where a link leads.

    A lesson's notebook that can not be read is a submission with a `fault`: the others are graded still.

    Raises:
        UnreadableError: the file at `path` can not be graded, whoever asks.
        NothingToReadError: there is no such file, or it is a folder that is no lesson's.
    """
    if path is None:
        ready = [lesson for lesson in lessons() if os.path.lexists(lesson.notebook) and _wanted(lesson, only)]
        return [(_notebook(lesson), lesson) for lesson in ready]
    spelled = as_spelled(path)
    if spelled == SOLUTIONS or (path == "solutions" and not spelled.exists()):
        return [(_solution(lesson), lesson) for lesson in lessons() if _wanted(lesson, only)]
    for lesson in lessons():
        named = path in (lesson.name, lesson.slug) and not os.path.lexists(path)
        if named or spelled == lesson.directory or (spelled.is_dir() and spelled.samefile(lesson.directory)):
            return [(_notebook(lesson), lesson)]
        if spelled == lesson.solution:
            return [(_solution(lesson), lesson)]
    return _in_file(path, read_submission(Path(path), trusted=spelled.parent == SOLUTIONS), only)


def _in_file(path: str, submission: Submission, only: tuple[str, ...]) -> Work:
    wanted = [lesson for lesson in lessons() if _wanted(lesson, only)]
    defined, borrowed = submission.definitions.keys(), submission.borrowed
    work = [x for x in wanted if defined & x.exercises.keys() or submission.open_ended]
    work = work or [x for x in wanted if borrowed & x.exercises.keys()]
    if not work:
        broken = submission.broken_cells()
        names = f" called {', '.join(only)}" if only else ""
        why = f"; {broken[0]}" if broken else ": `grade list` shows the names"
        raise UnreadableError(f"{path}: there is no exercise{names} in it{why}", submission.sha256)
    return [(submission, lesson) for lesson in work]


def asked_for(submission: Submission, lesson: Lesson, only: tuple[str, ...]) -> tuple[str, ...]:
    """The exercises that are to be graded; () is all that are not optional.

    A file that holds an optional exercise, such as an edited model.py, is asked for nothing else.
    """
    defined = submission.definitions.keys() & lesson.exercises.keys()
    if only or submission.module or not any(lesson.exercises[name].optional for name in defined):
        return only
    return tuple(name for name in lesson.exercises if name in defined)


def _wanted(lesson: Lesson, only: tuple[str, ...]) -> bool:
    return not only or bool(lesson.exercises.keys() & set(only))


def _notebook(lesson: Lesson) -> Submission:
    try:
        return read_submission(lesson.notebook)
    except UnreadableError as error:
        return Submission(lesson.notebook, (), fault=str(error))


def _solution(lesson: Lesson) -> Submission:
    return read_submission(lesson.solution, module=f"solutions.{lesson.slug}", trusted=True)
