"""Cuts solutions/<slug>.py into exercises: for each, the learner's stub and the answer.

Markers: `# answer` opens an answer block and `# end of answer` closes it. A block inside a function is what
the learner writes there. A block outside any function (helpers, `# answer: what they are`) belongs to the
exercise that follows it, and the learner does not see it. The stub says how long the answer is, helpers
included: the lines are counted.
"""

import ast
import io
import json
import re
import textwrap
import tokenize
from dataclasses import dataclass
from pathlib import Path

OPENS = re.compile(r"^(\s*)# answer(?::\s*(.*?))?\s*$")
CLOSES = re.compile(r"^(\s*)# end of answer\s*$")
RULE = re.compile(r"^# ?-{3,}")
TRAINING = re.compile(r"^# ?-{3,} training\b")

LINE = 110
"""The longest line of a notebook, in characters."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class LessonError(ValueError):
    """A lesson's source can not be built. The message starts with `file:line:`."""

    def __init__(self, path: Path, line: int, message: str) -> None:
        super().__init__(f"{path}:{line}: {message}")


@dataclass(frozen=True)
class Exercise:
    """One exercise, as the two notebooks show it."""

    name: str
    line: int
    """Where it is defined in the solution, counted from 1."""
    stub: str
    """Signature, docstring, and `raise NotImplementedError` where the learner writes."""
    answer: str
    """The same with the answer, after the helpers that it needs."""


@dataclass(frozen=True)
class Block:
    """An answer block: line numbers of its two markers, counted from 1."""

    start: int
    end: int
    indent: str
    note: str
    """What it holds, in words; "" goes without saying."""
    in_function: bool


def read_exercises(path: Path) -> dict[str, Exercise]:
    """The exercises of a solution by name, in the order of the file. Raises LessonError."""
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise LessonError(path, error.lineno or 1, f"Python can not read this: {error.msg}") from error
    lines = text.splitlines()
    blocks = find_blocks(path, lines, tree)
    training = next((n for n, line in enumerate(lines, 1) if TRAINING.match(line)), len(lines) + 1)
    exercises: dict[str, Exercise] = {}
    cursor = end_of_imports(tree)
    for node, end in find_exercises(path, tree, blocks):
        if node.lineno > training:
            raise LessonError(path, node.lineno, f"{node.name} is an exercise after the training line")
        span = (cursor + 1, end)
        stub = render(lines, span, blocks, solved=False)
        try:
            compile(stub, str(path), "exec")
        except SyntaxError as error:
            message = f"the learner's stub of {node.name} is not Python ({error.msg})"
            raise LessonError(path, node.lineno, message) from error
        exercises[node.name] = Exercise(
            node.name, node.lineno, stub, render(lines, span, blocks, solved=True)
        )
        cursor = end
    return exercises


def find_blocks(path: Path, lines: list[str], tree: ast.Module) -> list[Block]:
    """All answer blocks. Raises LessonError for markers that do not pair up."""
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    blocks: list[Block] = []
    opened: tuple[int, str, str] | None = None
    for number, line in enumerate(lines, 1):
        if match := OPENS.match(line):
            if opened:
                raise LessonError(path, opened[0], f"this answer block is not closed before line {number}")
            if re.search(r"\blines?\b", match[2] or ""):
                message = "how long the answer is, is counted: say what it is, or `# answer` alone"
                raise LessonError(path, number, message)
            opened = (number, match[1], match[2] or "")
        elif match := CLOSES.match(line):
            if not opened:
                raise LessonError(path, number, "`# end of answer` without `# answer` before it")
            start, indent, note = opened
            if match[1] != indent:
                raise LessonError(path, number, f"indent this as `# answer` in line {start} is")
            inside = any(
                f.lineno < start <= (f.end_lineno or 0) and f.col_offset < len(indent) for f in functions
            )
            blocks.append(Block(start, number, indent, note, inside))
            opened = None
    if opened:
        raise LessonError(path, opened[0], "this answer block is not closed: `# end of answer` is missing")
    return blocks


def find_exercises(
    path: Path, tree: ast.Module, blocks: list[Block]
) -> list[tuple[Function | ast.ClassDef, int]]:
    """Each top-level definition that has an answer block in it, with its last line."""
    found: list[tuple[Function | ast.ClassDef, int]] = []
    helpers = [block for block in blocks if not block.indent]
    for node in tree.body:
        if not isinstance(node, Function | ast.ClassDef):
            continue
        if any(block.start < node.lineno < block.end for block in helpers):
            continue
        inside = [b for b in blocks if b.indent and node.lineno < b.start <= (node.end_lineno or 0)]
        if not inside:
            continue
        if node.name.startswith("_"):
            raise LessonError(path, node.lineno, f"{node.name} is an exercise: give it a public name")
        found.append((node, max(node.end_lineno or 0, inside[-1].end)))
    return found


def end_of_imports(tree: ast.Module) -> int:
    """The last line of the file's head (docstring, imports, `__all__`): the lesson has its own imports."""
    end = 0
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if not (is_docstring or is_all or isinstance(node, ast.Import | ast.ImportFrom)):
            break
        end = node.end_lineno or end
    return end


def render(lines: list[str], span: tuple[int, int], blocks: list[Block], *, solved: bool) -> str:
    """The lines of a span (both ends included) as a notebook cell."""
    starts = {block.start: block for block in blocks}
    helpers = [b for b in blocks if not b.in_function and span[0] <= b.start <= span[1]]
    markers = {n for block in blocks for n in (block.start, block.end)}
    shown: list[str] = []
    number = span[0]
    while number <= span[1]:
        line = lines[number - 1]
        block = starts.get(number)
        if block and not solved:
            if block.in_function:
                shown += _unwritten(announcement(lines, block, helpers), block.indent)
                helpers = []  # told once, where the learner begins
            number = block.end
            while not block.in_function and number < span[1] and not lines[number].strip():
                number += 1  # helpers go without a trace: the blank lines before them are enough
        elif number not in markers and not RULE.match(line):
            shown.append(line.rstrip())
        number += 1
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(shown).strip("\n"))


def _unwritten(text: str, indent: str) -> list[str]:
    """What stands where the learner writes: an exception with a text, on several lines if it is long."""
    whole = f"{indent}raise NotImplementedError({json.dumps(text, ensure_ascii=False)})"
    if len(whole) <= LINE:
        return [whole]
    pieces = textwrap.wrap(text, LINE - len(indent) - 8, drop_whitespace=False)
    strings = [f"{indent}    {json.dumps(piece, ensure_ascii=False)}" for piece in pieces]
    return [f"{indent}raise NotImplementedError(", *strings, f"{indent})"]


def announcement(lines: list[str], block: Block, helpers: list[Block]) -> str:
    """How long the answer in a function is, and the helpers that the learner writes besides."""
    own = f"about {_counted(count_lines(lines, block))}" + (f": {block.note}" if block.note else "")
    if not helpers:
        return own
    notes = ", ".join(helper.note for helper in helpers if helper.note)
    number = sum(count_lines(lines, helper) for helper in helpers)
    return f"{own}, plus about {_counted(number)} in helpers" + (f": {notes}" if notes else "")


def count_lines(lines: list[str], block: Block) -> int:
    """Lines of code of an answer: comments, docstrings and empty lines do not count."""
    source = textwrap.dedent("\n".join(lines[block.start : block.end - 1]))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    counted = {
        line
        for token in tokens
        if token.type not in silent | {tokenize.ENDMARKER}
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(f"def f():\n{textwrap.indent(source, ' ')}")):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            counted -= set(range(node.lineno - 1, (node.end_lineno or node.lineno)))
    return len(counted)


def _counted(number: int) -> str:
    """A count of lines in words: of more than twenty, to the nearest five."""
    number = 5 * round(number / 5) if number > 20 else number
    return f"{number} line{'' if number == 1 else 's'}"
