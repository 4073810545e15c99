"""What a person reads of a grading, in a terminal or a notebook."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import NoReturn

import rich.console
from rich.table import Table
from rich.text import Text

from grader.judging.verdicts import CheckReport, ExerciseReport, Verdict
from grader.ranks.isolation import Isolation

MARKS = {
    Verdict.PASSED: ("✓", "green"),
    Verdict.WRONG: ("✗", "red"),
    Verdict.NOT_ATTEMPTED: ("·", "dim"),
    Verdict.CRASHED: ("✗", "red"),
    Verdict.HUNG: ("✗", "red"),
    Verdict.OUT_OF_MEMORY: ("✗", "red"),
    Verdict.REFUSED: ("✗", "magenta"),
    Verdict.UNREADABLE: ("✗", "magenta"),
    Verdict.GRADER_ERROR: ("!", "yellow"),
    Verdict.SKIPPED: ("-", "dim"),
}
STARS = {Verdict.PASSED: ("★", "yellow"), Verdict.GRADER_ERROR: MARKS[Verdict.GRADER_ERROR]}
"""Marks of optional checks; of any other verdict, an empty star."""
FAILURES = (Verdict.WRONG, Verdict.CRASHED, Verdict.HUNG, Verdict.OUT_OF_MEMORY)
WIDTH = 100


class Console(rich.console.Console):
    """Rich's own ends the program with status 1 where nobody reads on, which would speak of the learner."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


Lines = list[tuple[str, str]]
"""Each line with its style, as rich names styles."""


def exercise_lines(report: ExerciseReport, **how: str) -> Lines:
    """An exercise's report: no time in it, so that equal runs read alike. `how` is for closing_lines."""
    whole = told_whole(report.failed or report.missed)
    checks = [line for check in report.checks for line in check_lines(check, whole)]
    return [headline(report), *checks, *closing_lines(report, **how)]


def headline(report: ExerciseReport) -> tuple[str, str]:
    """The exercise and its verdict."""
    mark, style = MARKS[report.verdict]
    summary = f"{report.verdict}" + (f" ({report.message})" if report.message else "")
    return f"{mark} {report.name}: {summary}{stars(report)}", f"bold {style}"


def mark_of(check: CheckReport) -> tuple[str, str]:
    """The mark of a check, and its style."""
    return STARS.get(check.verdict, ("☆", "dim")) if check.optional else MARKS[check.verdict]


def stars(report: ExerciseReport) -> str:
    """What follows the verdict of an exercise that has passed: a star for each optional check."""
    marks = [mark_of(check)[0] for check in report.checks if check.optional]
    return f" {''.join(marks)}" if marks and report.verdict == Verdict.PASSED else ""


def closing_lines(report: ExerciseReport, hint: str = "grade hint {} (in a terminal)") -> Lines:
    """What follows the checks: what was not told, what was left out, how to ask for a hint."""
    lines = []
    required = [check for check in report.checks if not check.optional]
    if any(check.verdict == Verdict.SKIPPED for check in required) and report.failed:
        lines.append(("  (- means: not looked at, as too much ended early or needs another machine)", "dim"))
    if len(report.failed) > len(told_whole(report.failed)):
        lines.append(("  the other ✗ show only their titles: what is told above may have caused them", "dim"))
    if any(mark_of(check)[0] == "☆" for check in report.checks):
        lines.append(
            ("  ☆ is an extra: looked at once all else holds, and the exercise passes without", "dim")
        )
    for note in report.notes:
        lines += _wrap("  note: ", note, "dim")
    if report.verdict in FAILURES:
        lines.append((f"  for a hint: {hint.format(report.name)}", "dim"))
    return lines


def told_whole(failed: Sequence[CheckReport]) -> list[CheckReport]:
    """The first failing check; where it only says that numbers differ, the first that says more as well."""
    first = failed[:1]
    if first and not first[0].explains:
        first += [check for check in failed[1:] if check.explains][:1]
    return first


def check_lines(check: CheckReport, whole: Sequence[CheckReport]) -> Lines:
    """A check that failed and is not told whole is its title: its causes and steps are those of another."""
    mark, style = mark_of(check)
    lines = _wrap(f"  {mark} ", check.sentence, style if check.verdict != Verdict.SKIPPED else "dim")
    if check not in whole:
        return lines
    kind = "" if check.verdict == Verdict.WRONG else str(check.verdict)
    lines += _wrap("      ", ": ".join(filter(None, (kind, check.where, check.message))), "")
    if check.cause:
        lines += _wrap("      likely cause: ", check.cause, "bold")
    if check.help:
        lines += _wrap("      next step: ", check.help, "")
    elif check.asked:
        lines += _wrap("      what is asked: ", check.asked, "")
    for detail in check.details:
        lines += _wrap("      ", detail, "dim")
    return lines


def _wrap(head: str, text: str, style: str) -> Lines:
    indent = " " * (4 if len(head.strip()) == 1 else 8)
    wrapped = textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )
    return [(line, style) for line in wrapped or [head]]


def print_exercise(console: Console, report: ExerciseReport) -> None:
    """Print one exercise, with colours where the console has them."""
    for line, style in exercise_lines(report):
        text = Text(line, style=style)
        if line.startswith("✓") and console.is_terminal:
            text.append(f"  {report.seconds:.1f} s", style="dim")
        console.print(text, soft_wrap=True)


def print_table(console: Console, reports: Iterable[ExerciseReport]) -> None:
    """Print the course, a line an exercise."""
    table = Table(box=None, pad_edge=False, show_header=console.is_terminal)
    for column in ("lesson", "exercise", "verdict"):
        table.add_column(column)
    previous = ""
    for report in reports:
        mark, style = MARKS[report.verdict]
        lesson = report.lesson if report.lesson != previous else ""
        required = [check for check in report.checks if not check.optional]
        passed = sum(check.verdict == Verdict.PASSED for check in required)
        of = f" ({passed} of {len(required)} checks){stars(report)}" if required else ""
        table.add_row(lesson, report.name, Text(f"{mark} {report.verdict}{of}", style=style))
        previous = report.lesson
    console.print(table)


def summary(reports: Sequence[ExerciseReport], isolation: Isolation) -> str:
    """The last line: how many passed, what the score is worth, and why it is worth no more."""
    passed = sum(report.verdict == Verdict.PASSED for report in reports)
    why = f": {isolation.why_open}" if isolation.why_open else ""
    worth = "isolated run" if isolation.closed else f"formative: the ranks were not isolated{why}"
    return f"{passed} of {len(reports)} exercises passed ({worth})"
