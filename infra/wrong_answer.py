"""The README's first picture: a wrong answer from the bank of mistakes, and what the grader says of it.

    python -m infra.wrong_answer

writes docs/wrong_answer.svg. The report is a real one, of ring attention whose gradients stop one rank short.
"""

import textwrap
import tomllib
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.terminal_theme import MONOKAI
from rich.text import Text

from grader.judging.course import find_exercise
from grader.judging.judge import Settings, grade_exercise
from grader.judging.submission import from_cells
from grader.ranks.isolation import ROOT
from grader.ranks.launcher import shared_launcher
from grader.report import exercise_lines
from nanogpt.implementation import Cell

PICTURE = ROOT / "docs" / "wrong_answer.svg"
EXERCISE, MISTAKE, SEED = "ring_attention", "gradients_left_on_the_wrong_rank", 7
WIDTH = 104


def report_lines() -> list[tuple[str, str]]:
    """What the grader says, as it says it, of the reference with the mistake in it."""
    found = find_exercise(EXERCISE)
    assert found is not None
    lesson, exercise = found
    text = lesson.solution.read_text()
    for old, new in edits(lesson.solution.with_suffix(".mistakes.toml")):
        text = text.replace(old, new)
    submission = from_cells(lesson.solution, (Cell("my_ring.py", text),), trusted=True)
    arguments = exercise, lesson.name, submission.code(), shared_launcher(), Settings(seed=SEED)
    return exercise_lines(grade_exercise(*arguments, submission.locate))


def edits(bank: Path) -> list[tuple[str, str]]:
    """What the mistake replaces, and by what."""
    entries = tomllib.loads(bank.read_text())["mistake"]
    entry = next(each for each in entries if (each["exercise"], each["name"]) == (EXERCISE, MISTAKE))
    return [(pair["old"], pair["new"]) for pair in entry.get("edits", [entry])]


def draw(lines: list[tuple[str, str]]) -> str:
    """An SVG of the changed lines and the report."""
    console = Console(
        record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text("# my_ring.py, in backward", style="dim"))
    for _, new in edits(ROOT / "solutions" / "context_parallel.mistakes.toml"):
        if code := textwrap.dedent(new).strip():
            console.print(Syntax(code, "python", theme="monokai", background_color="default"))
    console.print(Text("\n$ grade my_ring.py", style="bold"))
    for line, style in lines:
        console.print(Text(line, style=style), soft_wrap=True)
    console.print()
    return console.export_svg(title="a wrong answer", theme=MONOKAI, unique_id="wrong-answer")


def main() -> None:
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(report_lines()), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
