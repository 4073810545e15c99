"""The `grade` command.

    grade                       the whole course, as a table: the notebooks in lessons/
    grade PATH                  a notebook, a .py file, a lesson folder, or `solutions`
    grade list                  the lessons and their exercises
    grade hint NAME [NUMBER]    a hint for an exercise

Exit status: 0 everything asked for passed; 1 something did not; 2 could not grade.
"""

import difflib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from grader.judging.course import Lesson, find_exercise, lessons
from grader.judging.judge import Settings, grade_task, tasks
from grader.judging.side_by_side import sensible_jobs, side_by_side
from grader.judging.submission import Submission, read_submission
from grader.judging.verdicts import ExerciseReport, Verdict
from grader.ranks.isolation import Isolation
from grader.ranks.launcher import ROOT, CannotGradeError, Limits
from grader.report import print_exercise, print_table, summary, write_json

PASSED, FAILED, COULD_NOT = 0, 1, 2


class PathOrCommand(click.Group):
    """A group whose first word may also be a path: then it means `grade run PATH`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=PathOrCommand, context_settings={"help_option_names": ["-h", "--help"]})
def grade() -> None:
    """Grade the exercises of Scale by Hand.

    \b
    grade                      the whole course, as a table
    grade PATH                 a notebook, a .py file, a lesson folder, or `solutions`
    grade list                 the lessons and their exercises
    grade hint NAME [NUMBER]   a hint for an exercise
    grade run --help           all options of grading

    Exit status: 0 everything asked for passed, 1 something did not, 2 could not grade.
    """


@grade.command()
@click.argument("path", required=False)
@click.option("--only", multiple=True, metavar="NAME", help="Only this exercise (may be repeated).")
@click.option("--ranks", metavar="N[,N]", help="Only these numbers of ranks, such as 2 or 1,2,4.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="gloo on the CPU, or NCCL with a GPU a rank.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report to FILE."
)
@click.option("--watch", is_flag=True, help="Grade again at each save of PATH.")
@click.option(
    "--isolation",
    "isolate",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="Shut the ranks in: no network, no reference, nothing writable.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=Limits.timeout,
    show_default=True,
    help="Seconds that one run of ranks may take.",
)
@click.option(
    "--memory",
    type=click.FloatRange(min=0.1),
    default=Limits.memory_bytes / 2**30,
    show_default=True,
    help="GiB that the ranks of one run may take together.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Exercises to grade at a time; without it one more than cores, four at most.",
)
@click.option("--seed", type=int, help="Draw the same inputs again.")
def run(
    path: str | None,
    only: tuple[str, ...],
    ranks: str | None,
    device: str,
    json_file: Path | None,
    watch: bool,
    isolate: str,
    timeout: float,
    memory: float,
    jobs: int | None,
    seed: int | None,
) -> None:
    """Grade PATH, or without one the notebooks of the whole course."""
    limits = Limits(timeout=timeout, memory_bytes=int(memory * 2**30))
    settings = Settings(ranks=_numbers(ranks), device=device, limits=limits, seed=seed, keep_ranks=True)
    _known(only)
    while True:
        code = _grade(path, only, settings, json_file, isolate, jobs or sensible_jobs(device))
        if not watch:
            sys.exit(code)
        if path is None:
            _stop("--watch needs a PATH")
        click.echo(f"watching {path} (Ctrl-C ends)")
        _wait_for_save(Path(path))


@grade.command("list")
def list_command() -> None:
    """The lessons and their exercises."""
    console = _console()
    table = Table(box=None, pad_edge=False, show_header=console.is_terminal)
    for column in ("lesson", "exercise", "checks"):
        table.add_column(column)
    for lesson in lessons():
        for number, exercise in enumerate(lesson.exercises.values()):
            optional = ", optional" if exercise.optional else ""
            table.add_row(
                lesson.name if number == 0 else "", exercise.name, f"{len(exercise.checks)} checks{optional}"
            )
    console.print(table)


@grade.command()
@click.argument("name")
@click.argument("number", type=click.IntRange(min=1), default=1)
def hint(name: str, number: int) -> None:
    """A hint for exercise NAME; NUMBER 2, 3 … tell more."""
    _known((name,))
    found = find_exercise(name)
    assert found is not None
    hints = found[1].hints
    if number > len(hints):
        _stop(f"{name} has {len(hints)} hints")
    more = f"\n({len(hints) - number} more: grade hint {name} {number + 1})" if number < len(hints) else ""
    click.echo(f"{hints[number - 1]}{more}")


def _grade(
    path: str | None,
    only: tuple[str, ...],
    settings: Settings,
    json_file: Path | None,
    isolate: str,
    jobs: int,
) -> int:
    console = _console()
    try:
        work = _work(path, only)
    except ValueError as error:
        click.echo(f"grade: {error}", err=True)
        return COULD_NOT
    isolation = _isolation(isolate, settings.device, [submission for submission, _ in work])
    todo = [
        task
        for submission, lesson in work
        for task in tasks(submission, lesson, only or _defined_only(submission, lesson))
    ]
    reports: list[ExerciseReport] = []
    whole_course = path is None
    grade_one = partial(grade_task, settings=settings)
    try:
        with console.status(f"grading {len(todo)} exercises") as status:
            for report in side_by_side(grade_one, todo, jobs, isolation):
                reports.append(report)
                status.update(f"{len(reports)} of {len(todo)} exercises graded")
                if not whole_course:
                    print_exercise(console, report)
    except CannotGradeError as error:
        click.echo(f"grade: {error}", err=True)
        return COULD_NOT
    if whole_course:
        print_table(console, reports)
    console.print(summary(reports, isolation), highlight=False)
    if json_file is not None:
        write_json(json_file, reports, isolation, {"ranks": list(settings.ranks), "device": settings.device})
    if any(report.verdict == Verdict.GRADER_ERROR for report in reports):
        return COULD_NOT
    return PASSED if reports and all(report.verdict == Verdict.PASSED for report in reports) else FAILED


def _isolation(wish: str, device: str, submissions: list[Submission]) -> Isolation:
    visible = tuple(sorted({submission.path.parent.resolve() for submission in submissions}))
    reference = bool(submissions) and all(submission.trusted for submission in submissions)
    if wish == "auto" and device != "cpu":
        return Isolation("auto", why_open="on a GPU it has to be asked for, by --isolation on")
    return Isolation(wish, visible, reference)


def _work(path: str | None, only: tuple[str, ...]) -> list[tuple[Submission, Lesson]]:
    """What to grade: pairs of a submission and a lesson whose exercises it has."""
    if path is None:
        ready = [lesson for lesson in lessons() if lesson.notebook.exists() and _wanted(lesson, only)]
        return [(read_submission(lesson.notebook), lesson) for lesson in ready]
    given = Path(path)
    folder = given.resolve()
    if folder == ROOT / "solutions" or (path == "solutions" and not given.exists()):
        return [(_solution(lesson), lesson) for lesson in lessons() if _wanted(lesson, only)]
    for lesson in lessons():
        if folder == lesson.directory or (not given.exists() and path in (lesson.name, lesson.slug)):
            return [(read_submission(lesson.notebook), lesson)]
        if folder == lesson.solution:
            return [(_solution(lesson), lesson)]
    if not given.exists():
        raise ValueError(f"{path}: there is no such file or folder")
    trusted = folder.parent == ROOT / "solutions"
    submission = read_submission(given, trusted=trusted)
    work = [
        (submission, lesson)
        for lesson in lessons()
        if _wanted(lesson, only)
        and (submission.definitions.keys() & lesson.exercises.keys() or submission.open_ended)
    ]
    if not work:
        borrowed = submission.borrowed
        work = [(submission, x) for x in lessons() if _wanted(x, only) and borrowed & x.exercises.keys()]
    if not work:
        broken = submission.broken_cells()
        names = f" called {', '.join(only)}" if only else ""
        why = f"; {broken[0]}" if broken else ": `grade list` shows the names"
        raise ValueError(f"{path}: there is no exercise{names} in it{why}")
    return work


def _wanted(lesson: Lesson, only: tuple[str, ...]) -> bool:
    return not only or bool(lesson.exercises.keys() & set(only))


def _solution(lesson: Lesson) -> Submission:
    return read_submission(lesson.solution, module=f"solutions.{lesson.slug}", trusted=True)


def _defined_only(submission: Submission, lesson: Lesson) -> tuple[str, ...]:
    """A file that holds an optional exercise, such as an edited model.py, is asked for nothing else."""
    defined = submission.definitions.keys() & lesson.exercises.keys()
    if submission.module or not any(lesson.exercises[name].optional for name in defined):
        return ()
    return tuple(name for name in lesson.exercises if name in defined)


def _known(names: tuple[str, ...]) -> None:
    for name in names:
        if find_exercise(name) is None:
            every = [each for lesson in lessons() for each in lesson.exercises]
            close = difflib.get_close_matches(name, every, 1)
            _stop(
                f"there is no exercise {name!r}"
                + (f": did you mean {close[0]}?" if close else "; see `grade list`")
            )


def _numbers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        _stop(f"--ranks {text}: give numbers of ranks, such as 2 or 1,2,4")
    return numbers


def _wait_for_save(path: Path) -> None:
    from watchfiles import watch

    for _ in watch(path):
        return


def _console() -> Console:
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def _stop(message: str) -> Any:
    click.echo(f"grade: {message}", err=True)
    sys.exit(COULD_NOT)
