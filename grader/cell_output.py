"""What `check` shows below a notebook's cell: a line as each check ends, then the report in colours."""

import html
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from grader.judging.verdicts import CheckReport, ExerciseReport, Verdict
from grader.report import Lines, check_lines, closing_lines, exercise_lines, headline, told_whole

COLORS = {"green": "#1a7f37", "red": "#cf222e", "magenta": "#a626a4", "yellow": "#9a6700", "dim": "#808080"}
"""Styles of a terminal as colours that are read on white and on black."""
HINT = "%run -m grader hint {} (in a cell)"
EMPTY = {"text/plain": "", "text/html": ""}


class Progress:
    """Inside `with`, a line for each check that has ended; what it showed is gone afterwards.

    Outside a notebook it shows nothing.
    """

    def __init__(self) -> None:
        self._lines: list[Lines] = []
        self._display: Any = None

    def __enter__(self) -> "Progress":
        if in_notebook():
            from IPython.display import display

            self._display = display(EMPTY, raw=True, display_id=True)
        return self

    def tell(self, report: CheckReport) -> None:
        """A check has ended."""
        self._lines.append(check_lines(report, ()))
        if self._display is not None:
            shown = as_html([*(line for lines in self._lines for line in lines), ("  …", "dim")])
            self._display.update({"text/plain": "", "text/html": shown}, raw=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.update(EMPTY, raw=True)


def show(report: ExerciseReport, more: Sequence[str] = ()) -> None:
    """Show a report and what more there is to say; in a notebook, passed checks are folded if one failed."""
    last = [(f"  {line}", "dim") for line in more]
    plain = "\n".join(line for line, _ in [*exercise_lines(report, hint=HINT), *last])
    if not in_notebook():
        print(plain)
        return
    from IPython.display import display

    display({"text/plain": plain, "text/html": _folded(report) + as_html(last)}, raw=True)


def _folded(report: ExerciseReport) -> str:
    passed = [check for check in report.checks if check.verdict == Verdict.PASSED]
    folded = passed if report.failed else []
    whole = told_whole(report.failed or report.missed)
    told = [line for check in report.checks if check not in folded for line in check_lines(check, whole)]
    fold = ""
    if folded:
        lines = as_html([line for check in folded for line in check_lines(check, ())])
        summary = as_html([(f"✓ {len(folded)} passed", "green")], "span")
        fold = (
            f"<details><summary style='margin-left:2ch;cursor:pointer'>{summary}</summary>{lines}</details>"
        )
    return as_html([headline(report), *told]) + fold + as_html(closing_lines(report, HINT))


def as_html(lines: Lines, tag: str = "div") -> str:
    """Lines in the notebook's own fixed-width letters."""
    return "".join(
        f"<{tag} style='{_css(style)}'>{html.escape(line)}</{tag}>" for line, style in lines if line.strip()
    )


def _css(style: str) -> str:
    words = style.split()
    color = "".join(f";color:{COLORS[word]}" for word in words if word in COLORS)
    weight = ";font-weight:bold" if "bold" in words else ""
    return f"font-family:monospace;white-space:pre-wrap;line-height:1.35{color}{weight}"


def reward(folder: Path, exercise: str, definition: Any) -> None:
    """What a lesson shows of the learner's own run after a green check: a function of its rewards.py."""
    path = folder / "rewards.py"
    if not path.exists():
        return
    spec = importlib.util.spec_from_file_location(f"rewards_of_{folder.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if picture := getattr(module, exercise, None):
        picture(definition)


def in_notebook() -> bool:
    """Whether output goes to a kernel's front end, which shows more than text."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None
