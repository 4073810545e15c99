"""The README's first picture: a wrong answer from the bank of mistakes, and what the grader says of it.

    python -m infra.wrong_answer

writes docs/wrong_answer.svg. The report is a real one, of a loop that hangs where ranks use different layers.
"""

import tomllib
from io import StringIO

from rich.console import Console
from rich.syntax import Syntax
from rich.terminal_theme import MONOKAI
from rich.text import Text

from grader.judging.course import Lesson, find_exercise
from grader.judging.judge import Settings, grade_exercise
from grader.judging.submission import from_cells
from grader.judging.trial import Exercise
from grader.ranks.isolation import ROOT
from grader.ranks.launcher import shared_launcher
from grader.report import exercise_lines
from nanogpt.implementation import Cell

PICTURE = ROOT / "docs" / "wrong_answer.svg"
EXERCISE, MISTAKE, SEED = "all_reduce_gradients", "leaves_none_out", 7
FILE = "my_answers.py"
WIDTH = 104


def wrong_answer() -> str:
    """The reference with the mistake in it."""
    text = _lesson_and_exercise()[0].solution.read_text()
    for old, new in edits():
        text = text.replace(old, new)
    return text


def report_lines() -> list[tuple[str, str]]:
    """What the grader says of it, as it says it."""
    lesson, exercise = _lesson_and_exercise()
    submission = from_cells(lesson.solution, (Cell(FILE, wrong_answer()),), trusted=True)
    arguments = exercise, lesson.name, submission.code(), shared_launcher(), Settings(seed=SEED)
    return exercise_lines(grade_exercise(*arguments, submission.locate))


def edits() -> list[tuple[str, str]]:
    """What the mistake replaces, and by what."""
    bank = _lesson_and_exercise()[0].solution.with_suffix(".mistakes.toml")
    entries = tomllib.loads(bank.read_text())["mistake"]
    entry = next(each for each in entries if (each["exercise"], each["name"]) == (EXERCISE, MISTAKE))
    return [(pair["old"], pair["new"]) for pair in entry.get("edits", [entry])]


def shown_lines() -> tuple[int, int]:
    """The answer's first and last line, after the docstring and up to its end, counted from 1."""
    lines = wrong_answer().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"def {EXERCISE}("))
    first = next(i for i in range(begin, len(lines)) if lines[i].strip() == "# answer") + 2
    return first, next(i for i in range(first, len(lines)) if lines[i].strip() == "# end of answer")


def draw(lines: list[tuple[str, str]]) -> str:
    """An SVG of the answer and the report."""
    console = Console(
        record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text(f"# {FILE}", style="dim"))
    console.print(
        Syntax(
            wrong_answer(),
            "python",
            theme="monokai",
            background_color="default",
            line_numbers=True,
            line_range=shown_lines(),
        )
    )
    console.print(Text(f"\n$ grade {FILE}", style="bold"))
    for line, style in lines:
        console.print(Text(line, style=style), soft_wrap=True)
    console.print()
    return console.export_svg(title="a wrong answer", theme=MONOKAI, unique_id="wrong-answer")


def _lesson_and_exercise() -> tuple[Lesson, Exercise]:
    found = find_exercise(EXERCISE)
    assert found is not None
    return found


def main() -> None:
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(report_lines()), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
