"""The `grade` command.

    grade                       the whole course, as a table: the notebooks in lessons/
    grade PATH                  a notebook, a .py file, a lesson folder, or `solutions`
    grade list                  the lessons and their exercises
    grade hint NAME [NUMBER]    a hint for an exercise

Exit status: 0 everything asked for passed; 1 something did not; 2 could not grade.
"""

import difflib
import gc
import os
import secrets
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from grader.early import begin_server
from grader.judging.catalogue import catalogue
from grader.ranks.faults import CannotGradeError, unforeseen
from grader.ranks.limits import Limits
from grader.statuses import COULD_NOT

SEED_BITS = 31


class PathOrCommand(click.Group):
    """A group whose first word may also be a path: then it means `grade run PATH`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Whatever happens that is not the learner's ends with status 2, in one sentence."""
        try:
            return super().invoke(ctx)
        except CannotGradeError as error:
            _stop(str(error))
        except KeyboardInterrupt:
            _stop("it was interrupted")
        except BrokenPipeError:  # nobody reads on, as with `grade | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(COULD_NOT)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            _stop(unforeseen(error))


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
    help="Seconds that one run of ranks may take; more on a machine that is busy with something else.",
)
@click.option(
    "--total-timeout",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    help="Seconds that all runs of one submission may take together.",
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
    help="Runs at a time: exercises, and layouts where these are fewer; without it one a core, four at most.",
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
    total_timeout: float,
    memory: float,
    jobs: int | None,
    seed: int | None,
) -> None:
    """Grade PATH, or without one the notebooks of the whole course."""
    _known(only)
    begun = begin_server(path, isolate, device)
    if begun is not None:
        click.get_current_context().call_on_close(begun.end)
    gc.disable()  # imports make much and free little: collecting meanwhile takes most of a second
    from grader.grading import grade_once
    from grader.judging.judge import Settings

    gc.freeze()  # nor is it looked at again, or taken apart at the end
    gc.enable()
    if watch and path is None:
        _stop("--watch needs a PATH")
    limits = Limits(timeout=timeout, memory_bytes=int(memory * 2**30))
    while True:
        drawn = secrets.randbits(SEED_BITS) if seed is None else seed
        code = grade_once(
            path,
            only,
            Settings(_numbers(ranks), device, limits, drawn, keep_ranks=True),
            wish=isolate,
            jobs=jobs,
            total_timeout=total_timeout,
            json_file=json_file,
            begun=begun,
        )
        if begun is not None:
            begun.end()  # it may not have been the one; a save needs a new one
            begun = None
        if path is None or not watch:
            sys.exit(code)
        click.echo(f"watching {path} (Ctrl-C ends)")
        _wait_for_save(Path(path))


@grade.command("list")
def list_command() -> None:
    """The lessons and their exercises."""
    from rich.table import Table

    from grader.report import Console

    whole = {} if sys.stdout.isatty() else {"soft_wrap": True, "width": 120}
    console = Console(highlight=False, **whole)
    table = Table(box=None, pad_edge=False, show_header=console.is_terminal)
    for column in ("lesson", "exercise", "checks"):
        table.add_column(column, overflow="fold")
    previous = ""
    for entry in catalogue().values():
        optional = ", optional" if entry.optional else ""
        lesson = entry.lesson if entry.lesson != previous else ""
        table.add_row(lesson, entry.name, f"{entry.num_checks} checks{optional}")
        previous = entry.lesson
    console.print(table)


@grade.command()
@click.argument("name")
@click.argument("number", type=click.IntRange(min=1), default=1)
def hint(name: str, number: int) -> None:
    """A hint for exercise NAME; NUMBER 2, 3 … tell more."""
    _known((name,))
    hints = catalogue()[name].hints
    if number > len(hints):
        _stop(f"{name} has {len(hints)} hints")
    more = f"\n({len(hints) - number} more: grade hint {name} {number + 1})" if number < len(hints) else ""
    click.echo(f"{hints[number - 1]}{more}")


def _known(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in catalogue():
            close = difflib.get_close_matches(name, catalogue(), 1)
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


def _stop(message: str) -> NoReturn:
    click.echo(f"grade: {message}", err=True)
    sys.exit(COULD_NOT)
