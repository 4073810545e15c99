"""Finds the lessons and reads lesson.md: the cells of a lesson before they become notebooks."""

import ast
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jupytext

from infra.lessons import front
from infra.lessons.exercises import Exercise, LessonError, read_exercises

FOLDER = re.compile(r"^(\d\d[a-z]?)_(\w+)$")
# jupytext turns a fence in another language that it can run into a cell magic; here it stays text.
OTHER_LANGUAGE = re.compile(r"^%%(\w+)\n(.*)", re.DOTALL)


@dataclass(frozen=True)
class Cell:
    """A cell of lesson.md."""

    kind: str
    """`markdown` or `code`."""
    source: str
    tags: tuple[str, ...] = ()
    exercise: str = ""
    """The exercise that this cell is, or nothing."""


@dataclass(frozen=True)
class Lesson:
    """One lesson: lessons/NN_slug and its solution."""

    root: Path
    number: str
    slug: str

    @property
    def folder(self) -> Path:
        return self.root / "lessons" / f"{self.number}_{self.slug}"

    @property
    def text_path(self) -> Path:
        return self.folder / "lesson.md"

    @property
    def checks_path(self) -> Path:
        return self.folder / "checks" / "__init__.py"

    @property
    def solution_path(self) -> Path:
        return self.root / "solutions" / f"{self.slug}.py"

    @property
    def learner_notebook(self) -> Path:
        return self.folder / f"{self.slug}.ipynb"

    @property
    def solved_notebook(self) -> Path:
        return self.root / "solutions" / f"{self.slug}.ipynb"

    @cached_property
    def text(self) -> str:
        return self.text_path.read_text(encoding="utf-8")

    @cached_property
    def cells(self) -> list[Cell]:
        """The cells of lesson.md, each exercise of the solution once. Raises LessonError."""
        cells = read_cells(front.without(self.text))
        first = next((cell for cell in cells if cell.kind == "code"), None)
        if first is None or first.exercise or first.tags:
            message = "the first ```python fence must be the setup cell: imports, no tag"
            raise LessonError(self.text_path, 1, message)
        self._compare_exercises(cells)
        for cell in cells:
            if cell.exercise and cell.source:
                self._examine_broken_program(cell)
        return cells

    @cached_property
    def front(self) -> front.Front | None:
        """What the lesson takes; None where it does not tell. Raises LessonError."""
        return front.read(self.text_path, self.text, list(self.exercises))

    @cached_property
    def exercises(self) -> dict[str, Exercise]:
        if not self.solution_path.exists():
            raise LessonError(self.solution_path, 1, f"missing: it answers {self.text_path}")
        return read_exercises(self.solution_path)

    @property
    def title(self) -> str:
        """The first heading. Raises LessonError."""
        if not (match := re.search(r"^# (.+)$", self.text, re.MULTILINE)):
            raise LessonError(self.text_path, 1, "the lesson has no title: begin with `# The title`")
        return match[1].strip()

    @property
    def summary(self) -> str:
        """The first sentence of the first paragraph under the title, for the README's table."""
        paragraphs = re.split(r"\n\s*\n", self.text.split(f"# {self.title}", 1)[1])
        first = next((" ".join(p.split()) for p in paragraphs if re.match(r"\s*[^\s#`|<!-]", p)), "")
        if not first:
            raise LessonError(self.text_path, 1, "no paragraph follows the title: the README shows its start")
        return re.split(r"(?<=[.!?])\s+(?=[A-Z`*])", first)[0]

    def line_of(self, exercise: str) -> int:
        """The line of lesson.md with the fence of an exercise, or 1."""
        found = re.search(rf'^```python.*\bexercise="{exercise}"', self.text, re.MULTILINE)
        return self.text[: found.start()].count("\n") + 1 if found else 1

    def _compare_exercises(self, cells: list[Cell]) -> None:
        counts = Counter(cell.exercise for cell in cells if cell.exercise)
        for name, count in counts.items():
            if name not in self.exercises:
                message = f'exercise="{name}" has no answer: define it in {self.solution_path}'
                raise LessonError(self.text_path, self.line_of(name), message)
            if count > 1:
                raise LessonError(self.text_path, self.line_of(name), f'exercise="{name}" stands here twice')
        for name, exercise in self.exercises.items():
            if name not in counts:
                message = f'{name} has no cell: add ```python exercise="{name}" to {self.text_path}'
                raise LessonError(self.solution_path, exercise.line, message)

    def _examine_broken_program(self, cell: Cell) -> None:
        """A find-the-bug cell stands alone: it defines its exercise, and nothing else is shown with it."""
        line = self.line_of(cell.exercise)
        try:
            body = ast.parse(cell.source).body
        except SyntaxError as error:
            message = f"Python can not read the program of {cell.exercise}: {error.msg}"
            raise LessonError(self.text_path, line + (error.lineno or 1), message) from error
        if cell.exercise not in [getattr(node, "name", "") for node in body]:
            raise LessonError(self.text_path, line, f"the program does not define {cell.exercise}")
        exercise = self.exercises[cell.exercise]
        if len(ast.parse(exercise.stub).body) > 1:
            message = (
                f"{cell.exercise} is a broken program: the learner would not see the code right above it"
            )
            raise LessonError(self.solution_path, exercise.line, message)


def discover(root: Path) -> list[Lesson]:
    """Every folder lessons/NN_slug that has a lesson.md, in order; 12b stands between 12 and 13."""
    folders = sorted((root / "lessons").glob("[0-9][0-9]*_*/lesson.md"))
    names = [FOLDER.match(path.parent.name) for path in folders]
    return [Lesson(root, match[1], match[2]) for match in names if match]


def read_cells(text: str) -> list[Cell]:
    """lesson.md as jupytext reads it; only ```python fences become code cells."""
    cells: list[Cell] = []
    for node in jupytext.reads(text, fmt="md").cells:
        tags = tuple(node.metadata.get("tags", ()))
        exercise = str(node.metadata.get("exercise", ""))
        other = OTHER_LANGUAGE.match(node.source) if node.cell_type == "code" else None
        if other and not tags and not exercise:
            cells.append(Cell("markdown", f"```{other[1]}\n{other[2]}\n```"))
        else:
            cells.append(Cell(node.cell_type, node.source, tags, exercise))
    return cells
