"""Which small changes of a reference does no check notice?

    python -m tests.bench.mutants OUT.jsonl --only ring_attention     every change of these exercises
    python -m tests.bench.mutants OUT.jsonl --sample 500              some of all, the same ones each time
    python -m tests.bench.mutants OUT.jsonl --sample 0                only what OUT.jsonl holds

In each exercise's answer, and in the helpers that it calls, one place at a time is changed: a statement, an
argument or a `wait()` left out, a condition turned, a number one off, a loop from its other end. Each is
graded with all checks. What is in the file is not run again, so this can be stopped and gone on with. Printed
are those that pass: most are right answers (another order of a sum, another size of a buffer), and each of
the others is a check that is missing, or a sentence.
"""

import argparse
import ast
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from grader.judging.course import Lesson, lessons
from grader.judging.trial import Exercise
from infra.lessons.exercises import find_blocks
from tests.bank import BankLauncher, Mistake, judge

TURNED: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "//",
}
NOT_VALUES = ("torch", "dist", "math", "F", "nn")
"""Names before a dot that are no tensor or number to be left as it is."""


@dataclass(frozen=True)
class Mutant:
    """The reference of an exercise, changed in one place."""

    lesson: Lesson
    exercise: Exercise
    source: str
    start: int
    end: int
    new: str
    """What stands in place of source[start:end]."""

    @property
    def name(self) -> str:
        """Where and what."""
        line = self.source.count("\n", 0, self.start) + 1
        return f"line {line}: {self.source[self.start : self.end]} → {self.new}"

    def is_python(self) -> bool:
        """Whether it can be read at all."""
        try:
            ast.parse(self.source[: self.start] + self.new + self.source[self.end :])
        except SyntaxError:
            return False
        return True

    def rejected_by(self, launcher: BankLauncher) -> list[str]:
        """The checks that it does not pass."""
        edits = ((self.source, self.source[: self.start] + self.new + self.source[self.end :]),)
        mistake = Mistake(self.lesson, self.name, self.exercise.name, "", "", "", edits)
        report = judge(mistake.submission(), self.lesson, self.exercise, launcher=launcher)
        return [check.name for check in report.checks if not check.holds]


def mutants(lesson: Lesson, exercise: Exercise) -> Iterator[Mutant]:
    """All changes of an exercise's answer, and of its helpers."""
    source = lesson.solution.read_text()
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    blocks = find_blocks(lesson.solution, source.splitlines(), tree)
    definitions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    seen: set[tuple[int, int, str]] = set()
    for definition in used_by(exercise.name, definitions, set(lesson.exercises)):
        for node in ast.walk(definitions[definition]):
            for place, new in changes(node, source):
                if not any(block.start < place.lineno < block.end for block in blocks):
                    continue
                start = offset(place.lineno, place.col_offset)
                end = offset(place.end_lineno, place.end_col_offset)
                mutant = Mutant(lesson, exercise, source, start, end, new)
                if (start, end, new) not in seen and source[start:end] != new and mutant.is_python():
                    seen.add((start, end, new))
                    yield mutant


def used_by(name: str, definitions: dict[str, ast.AST], exercises: set[str]) -> list[str]:
    """An exercise's definition and those that it calls, but for other exercises, which have checks."""
    found, waiting = [], [name]
    while waiting:
        name = waiting.pop()
        if name in found or name not in definitions:
            continue
        found.append(name)
        names = [node.id for node in ast.walk(definitions[name]) if isinstance(node, ast.Name)]
        waiting += [each for each in names if each not in exercises]
    return found


def changes(node: ast.AST, source: str) -> Iterator[tuple[ast.AST, str]]:
    """Places in or at a node, each with the text that may stand there instead."""

    def text(part: ast.AST) -> str:
        return f"({ast.get_source_segment(source, part)})"

    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield node, f"({text(left)} {TURNED[type(operator)]} {text(right)})"
        case ast.BinOp(left=left, op=operator, right=right):
            yield node, text(left)
            if type(operator) in TURNED:
                yield node, f"({text(left)} {TURNED[type(operator)]} {text(right)})"
        case ast.UnaryOp(operand=operand):
            yield node, text(operand)
        case ast.BoolOp(op=operator, values=values):
            word = " and " if isinstance(operator, ast.And) else " or "
            for left_out in values:
                yield node, f"({word.join(text(value) for value in values if value is not left_out)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
            yield node, f"({value - 1})"
        case ast.If(test=test) | ast.While(test=test):
            yield test, "True"
            yield test, "False"
        case ast.IfExp(body=body, orelse=orelse):
            yield node, text(body)
            yield node, text(orelse)
        case ast.comprehension(ifs=tests):
            for test in tests:
                yield test, "True"
        case ast.For(iter=each):
            for part in ("[1:]", "[:-1]", "[::-1]"):
                yield each, f"list({text(each)}){part}"
        case ast.With(items=[ast.withitem(context_expr=context, optional_vars=None)]):
            yield context, "__import__('contextlib').nullcontext()"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            yield node, "pass"
        case ast.Call():
            yield from changes_of_call(node, text)


def changes_of_call(call: ast.Call, text: Callable[[ast.AST], str]) -> Iterator[tuple[ast.Call, str]]:
    """Without one of its options, with its arguments swapped, not in place, or not called at all."""
    function, arguments = call.func, call.args
    head = text(function)[1:-1]
    given = [text(argument) for argument in arguments]
    options = [f"{k.arg}={text(k.value)}" if k.arg else f"**{text(k.value)}" for k in call.keywords]
    for left_out in options:
        yield call, f"{head}({', '.join([*given, *(each for each in options if each is not left_out)])})"
    if len(given) == 2 and not any(isinstance(each, ast.Starred) for each in arguments):
        yield call, f"{head}({', '.join([*given[::-1], *options])})"
    if isinstance(function, ast.Attribute):
        if function.attr.endswith("_") and not function.attr.endswith("__"):
            yield call, f"{head.rstrip('_')}({', '.join([*given, *options])})"
        of_a_value = not (isinstance(function.value, ast.Name) and function.value.id in NOT_VALUES)
        if of_a_value and (not arguments or function.attr == "to"):
            yield call, text(function.value)
    elif isinstance(function, ast.Name) and len(given) == 1 and not options:
        yield call, given[0]


def main() -> None:
    """Grade what is missing, and print what passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="a part of a lesson's or an exercise's name")
    parser.add_argument("--sample", type=int, help="how many, drawn from all; without it, all")
    options = parser.parse_args()
    found = [
        mutant
        for lesson in lessons()
        for exercise in lesson.exercises.values()
        if options.only in f"{lesson.name} {exercise.name}"
        for mutant in mutants(lesson, exercise)
    ]
    if options.sample is not None:
        found = random.Random(0).sample(found, min(options.sample, len(found)))
    lines = (
        [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    )
    done = {(line["exercise"], line["mutant"]) for line in lines}
    launcher = BankLauncher()
    with options.out.open("a") as file:
        for mutant in found:
            if (mutant.exercise.name, mutant.name) in done:
                continue
            checks = mutant.rejected_by(launcher)
            lines.append({"exercise": mutant.exercise.name, "mutant": mutant.name, "rejected_by": checks})
            file.write(json.dumps(lines[-1]) + "\n")
            file.flush()
    launcher.close()
    passed = [line for line in lines if not line["rejected_by"]]
    print("\n".join(f"{line['exercise']}, {line['mutant']}" for line in passed))
    print(f"{len(lines)} changes, {len(passed)} of them pass")


if __name__ == "__main__":
    main()
