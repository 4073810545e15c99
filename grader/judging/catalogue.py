"""The exercises of the course as their checks declare them, read as text: a list and a hint need no torch."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from grader.ranks.faults import CannotGradeError
from grader.ranks.isolation import ROOT

_FILE = re.compile(r"^from \. import (\w+)", re.MULTILINE)
_EXERCISE = re.compile(r"^exercise\((?:.*\)|(?:.|\n)*?^\))$", re.MULTILINE)
_CHECK = re.compile(r"^@check\(\s*\"(\w+)\"", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """One exercise."""

    lesson: str
    """Such as "08_data_parallel"."""
    name: str
    hints: tuple[str, ...]
    optional: bool
    num_checks: int


@cache
def lesson_folders() -> tuple[Path, ...]:
    """The folders of all lessons, in order."""
    return tuple(sorted(path.parents[1] for path in (ROOT / "lessons").glob("*/checks/__init__.py")))


@cache
def catalogue() -> dict[str, Entry]:
    """Name → exercise, in the course's order."""
    return {entry.name: entry for folder in lesson_folders() for entry in _declared(folder)}


def _declared(lesson: Path) -> list[Entry]:
    first = (lesson / "checks" / "__init__.py").read_text(encoding="utf-8")
    files = [lesson / "checks" / f"{name}.py" for name in _FILE.findall(first)]
    text = "\n".join([first, *(file.read_text(encoding="utf-8") for file in files)])
    checks = _CHECK.findall(text)
    found = []
    for match in _EXERCISE.finditer(text):
        name, hints, optional = _literal(lesson, match[0])
        found.append(Entry(lesson.name, name, hints, optional, checks.count(name)))
    return found


def _literal(lesson: Path, declaration: str) -> tuple[str, tuple[str, ...], bool]:
    """Name, hints, and whether it is optional: written out in every declaration, so that they can be read."""
    try:
        call = ast.parse(declaration, mode="eval").body
        assert isinstance(call, ast.Call)
        options = {word.arg: word.value for word in call.keywords}
        values = [
            call.args[0],
            options.get("hints", ast.Tuple([])),
            options.get("optional", ast.Constant(False)),
        ]
        name, hints, optional = map(ast.literal_eval, values)
        return name, hints, optional
    except (SyntaxError, ValueError, IndexError, AssertionError):
        line = " ".join(declaration.split())[:80]
        raise CannotGradeError(f"{lesson.name} declares an exercise that can not be read: {line}") from None
