"""One call of `grade PATH`: finds the work, has it done, tells of it, and ends with the right status."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from grader.early import isolation_for
from grader.judging.course import find_exercise
from grader.judging.judge import Settings, Task, grade_task, tasks
from grader.judging.reading import NothingToReadError, UnreadableError
from grader.judging.side_by_side import Neighbours, sensible_jobs, side_by_side
from grader.judging.verdicts import ExerciseReport, Verdict, readable
from grader.ranks.faults import CannotGradeError, unforeseen
from grader.ranks.launcher import Launcher
from grader.ranks.server import Server
from grader.report import Console, print_exercise, print_table, summary
from grader.report_file import Record, make_sure_it_can_be_written, write_report
from grader.statuses import COULD_NOT, FAILED, PASSED
from grader.work import asked_for, find_work


def grade_once(
    path: str | None,
    only: tuple[str, ...],
    settings: Settings,
    *,
    wish: str,
    jobs: int | None,
    total_timeout: float,
    json_file: Path | None,
    begun: Server | None = None,
) -> int:
    """Grade what is at a path, print it, write the report, and return the exit status.

    Args:
        wish: whether to isolate the ranks: auto, on or off.
        total_timeout: seconds that the runs of one submission may take together.
        begun: a server of ranks that may be the one that is needed; the caller ends it.
    """
    asked = {"path": path, "only": list(only), "ranks": list(settings.ranks), "device": settings.device}
    limits = {"timeout": settings.limits.timeout, "total_timeout": total_timeout, "isolation": wish}
    record = Record({**asked, **limits}, settings.seed)
    try:
        if json_file is not None:
            make_sure_it_can_be_written(json_file)
    except OSError as error:
        return _say(f"the report can not be written to {json_file}: {error.strerror}")
    try:
        status = _grade(record, path, only, settings, wish, jobs, total_timeout, begun)
    except UnreadableError as error:
        status = _unreadable(record, path or "", only, error)
    except (NothingToReadError, CannotGradeError) as error:
        status, record.message = COULD_NOT, readable(str(error))
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        status, record.message = COULD_NOT, "it was interrupted"
    except Exception as error:
        status, record.message = COULD_NOT, readable(unforeseen(error))
    if record.message:
        _say(record.message)
    try:
        if json_file is not None:
            write_report(json_file, record)
    except OSError as error:
        return _say(f"the report could not be written to {json_file}: {error.strerror}")
    return status


def _grade(
    record: Record,
    path: str | None,
    only: tuple[str, ...],
    settings: Settings,
    wish: str,
    jobs: int | None,
    total_timeout: float,
    begun: Server | None,
) -> int:
    work = find_work(path, only)
    submissions = list({submission.path: submission for submission, _ in work}.values())
    record.submissions = {str(submission.path): submission.sha256 for submission in submissions}
    reference = bool(submissions) and all(submission.trusted for submission in submissions)
    record.isolation = isolation_for(wish, settings.device, [one.path for one in submissions], reference)
    fitting = begun if begun is not None and begun.isolation == record.isolation else None
    ends_at = time.monotonic() + total_timeout * len(submissions)
    settings = replace(settings, limits=replace(settings.limits, ends_at=ends_at))
    todo = [task for one, lesson in work for task in tasks(one, lesson, asked_for(one, lesson, only))]
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    jobs = jobs or sensible_jobs(settings.device)
    settings = replace(settings, layouts_at_a_time=max(1, jobs // max(1, len(todo))))
    grade_one = partial(grade_task, settings=settings)
    with (
        closing(Neighbours(record.isolation, fitting)) as launcher,
        closing(in_two_parts(grade_one, todo, jobs, launcher)) as reports,
        console.status(f"grading {len(todo)} exercises") as status,
    ):
        for report in reports:
            record.reports.append(report)
            status.update(f"{len(record.reports)} of {len(todo)} exercises graded")
            if path is not None:
                print_exercise(console, report)
    if path is None:
        print_table(console, record.reports)
    console.print(summary(record.reports, record.isolation), highlight=False)
    console.print(f"drawn with seed {record.seed}: --seed {record.seed} draws the same again", style="dim")
    return _end(record)


def in_two_parts(
    work: Callable[[Task, Launcher], ExerciseReport], todo: list[Task], jobs: int, launcher: Launcher
) -> Iterator[ExerciseReport]:
    """Those that are lent a part of the reference come last and alone: nobody is there to be told of it."""
    for lent in (False, True):
        part = [task for task in todo if bool(task.lesson.lent) == lent]
        with closing(side_by_side(work, part, jobs, launcher)) as reports:
            yield from reports
        launcher.dismiss()


def _end(record: Record) -> int:
    """The verdict on all exercises together, and the status that goes with it."""
    verdicts = {report.verdict for report in record.reports}
    if Verdict.GRADER_ERROR in verdicts:
        return COULD_NOT
    if verdicts == {Verdict.PASSED}:
        record.verdict = "passed"
        return PASSED
    record.verdict = "unreadable" if verdicts == {Verdict.UNREADABLE} else "not passed"
    return FAILED


def _unreadable(record: Record, path: str, only: tuple[str, ...], error: UnreadableError) -> int:
    """What was handed in is the learner's: it has a report, and a verdict on each exercise asked for."""
    record.verdict, record.message = "unreadable", readable(str(error))
    record.submissions = {path: error.sha256}
    for name in only:
        found = find_exercise(name)
        assert found is not None, name
        record.reports.append(ExerciseReport(found[0].name, name, Verdict.UNREADABLE, message=record.message))
    return FAILED


def _say(message: str) -> int:
    click.echo(f"grade: {message}", err=True)
    return COULD_NOT
