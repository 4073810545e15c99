"""What an exercise promises: the sentences of its docstrings, and of the lesson's numbered rules."""

import ast
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import jupytext

from grader.judging.course import Lesson
from infra.lessons.exercises import Function, find_blocks, find_exercises

HEADING = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Sources?|Example):$")
ITEM = re.compile(r"^\*{0,2}\w+(, \*{0,2}\w+)*:")
"""Begins an item below a heading: `name: what it is`."""
NUMBER = re.compile(r"^(- |\d+\. )")
"""Begins an item of a list."""
SHORT = re.compile(r"\b(al|e\.g|i\.e|cf|eq|sec|fig|vs|no|resp|p)\.$", re.IGNORECASE)
RULES = re.compile(r"<!-- rules: (\w+) -->\s*\n((?:\d+\. .*\n(?:(?!\d+\. ).+\n|\n(?= ))*\n?)+)")
"""A numbered list of lesson.md that binds an exercise: the line above it says which."""


@dataclass(frozen=True)
class Description:
    """A sentence that promises nothing that a mistake could break, and why."""

    exercise: str
    sentence: str
    reason: str


def promises(lesson: Lesson) -> dict[str, list[str]]:
    """Exercise → its sentences: docstrings of the function or class and its methods; then the rules."""
    path = lesson.solution
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    found: dict[str, list[str]] = {}
    blocks = find_blocks(path, text.splitlines(), tree)
    for node, _ in find_exercises(path, tree, blocks):
        inside = node.body if isinstance(node, ast.ClassDef) else []
        methods = [item for item in inside if isinstance(item, Function)]
        unseen = [m for m in methods if any(b.start < m.lineno < b.end for b in blocks)]  # of the answer
        documented = [node, *(method for method in methods if method not in unseen)]
        found[node.name] = [s for each in documented for s in sentences(ast.get_docstring(each) or "")]
    for name, rules in RULES.findall(prose(lesson.directory / "lesson.md")):
        if name not in found and name not in lesson.exercises:
            raise ValueError(f"{lesson.name}: rules of {name}, which is no exercise")
        found.setdefault(name, []).extend(sentences(rules))  # an optional one may have no reference
    return found


def prose(path: Path) -> str:
    """The Markdown cells of a lesson's text."""
    cells = jupytext.read(path).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown") + "\n"


def sentences(text: str) -> list[str]:
    """Sentences of a docstring or a list, on one line; headings such as `Args:` and sources are none."""
    pieces: list[str] = []
    fresh = True
    for line in text.splitlines():
        words = line.strip()
        if not words or HEADING.match(words):
            fresh = True
            continue
        if fresh or NUMBER.match(words) or (line[0] == " " and ITEM.match(words)):
            pieces.append("")
            words = re.sub(r"^(- |\d+\. )", "", words)
        pieces[-1] = f"{pieces[-1]} {words}".strip()
        fresh = False
    told = [piece for piece in pieces if not piece.startswith(("Source:", "Sources:"))]
    return [sentence for piece in told for sentence in _split(normal(piece))]


def normal(text: str) -> str:
    """Text as it is compared: on one line, without bold type."""
    return " ".join(text.replace("**", "").split()) if "**kwargs" not in text else " ".join(text.split())


def _split(piece: str) -> list[str]:
    found: list[str] = []
    begin = 0
    for stop in re.finditer(r"[.!?][)\"”]*\s+(?=[A-Z`(\"“])", piece):
        before = piece[begin : stop.end()].strip()
        inside_code = before.count("`") % 2 == 1
        inside_brackets = before.count("(") > before.count(")")
        if SHORT.search(before) or inside_code or inside_brackets:
            continue
        found.append(before)
        begin = stop.end()
    return [*found, piece[begin:].strip()] if piece[begin:].strip() else found


def descriptions(lesson: Lesson) -> list[Description]:
    """The `[[description]]` tables of a bank of mistakes."""
    entries = tomllib.loads(lesson.solution.with_suffix(".mistakes.toml").read_text()).get("description", [])
    return [Description(**{**entry, "sentence": normal(entry["sentence"])}) for entry in entries]
