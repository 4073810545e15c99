"""Finds the lessons on disk: their exercises, checks, and the text that the learner was given."""

import ast
import importlib.util
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import cloudpickle

from grader.judging.catalogue import lesson_folders
from grader.judging.submission import from_cells
from grader.judging.trial import REGISTRY, Exercise
from grader.ranks.faults import CannotGradeError
from grader.ranks.isolation import ROOT
from nanogpt.implementation import Cell, without_magics

TRAINING = "\n# --- training"
"""Begins the line in a reference after which comes what no learner writes."""

SHARED = "lessons_shared"
"""What `lessons/shared` is called where a lesson's checks import it: what several of them need."""


@dataclass(frozen=True)
class Lesson:
    """One folder of lessons/."""

    directory: Path

    @property
    def name(self) -> str:
        """Such as "08_data_parallel"."""
        return self.directory.name

    @property
    def slug(self) -> str:
        """Such as "data_parallel"."""
        return self.name.partition("_")[2]

    @property
    def notebook(self) -> Path:
        """The learner's notebook."""
        return self.directory / f"{self.slug}.ipynb"

    @property
    def solution(self) -> Path:
        """The reference."""
        return ROOT / "solutions" / f"{self.slug}.py"

    @cached_property
    def exercises(self) -> dict[str, Exercise]:
        """The lesson's exercises by name, in order, with their checks.

        They stand in files by exercise; `checks/__init__.py` imports them in the lesson's order.

        Raises:
            CannotGradeError: one of these files is broken.
        """
        module_name = f"checks_of_{self.slug}"
        if module_name not in REGISTRY:
            try:
                if SHARED not in sys.modules:
                    _load_package(SHARED, ROOT / "lessons" / "shared")
                _load_package(module_name, self.directory / "checks")
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise CannotGradeError(f"the checks of {self.name} can not be loaded: {what}") from error
        return REGISTRY.get(module_name, {})

    @cached_property
    def given(self) -> dict[str, ast.AST]:
        """Name → the broken program that the lesson gives as a start, for the exercises that have one."""
        cells = tuple(
            Cell("lesson.md", cell.source) for cell in self._text_cells if "exercise" in cell.metadata
        )
        return from_cells(self.directory / "lesson.md", cells).definitions

    @cached_property
    def demonstrations(self) -> frozenset[str]:
        """Sources of the cells that only show something: skipped when a submission has them unchanged."""
        return frozenset(
            without_magics(cell.source)
            for cell in self._text_cells
            if "demo" in cell.metadata.get("tags", [])
        )

    @cached_property
    def lent(self) -> tuple[tuple[str, str], ...]:
        """Modules of the reference that the lesson's text imports, so submissions may too: name and source.

        A module ends where its training adapter begins. What one imports of the others comes before it.
        """
        found: dict[str, str] = {}
        for cell in self._text_cells:
            _lend(without_magics(cell.source), found)
        return tuple(found.items())

    @cached_property
    def _text_cells(self) -> list[Any]:
        """Code cells of the lesson's text: the learner may have changed the notebook, never this."""
        text = self.directory / "lesson.md"
        if not text.exists():
            return []
        import jupytext  # a fifth of a second, and `check` of most exercises needs no text

        return [cell for cell in jupytext.read(text).cells if cell.cell_type == "code"]


def _load_package(name: str, folder: Path) -> None:
    """Import a folder as the package `name`. What a probe uses of it travels to the rank by value."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)


def _lend(source: str, found: dict[str, str]) -> None:
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("solutions.")):
            continue
        assert node.module is not None
        if node.module not in found:
            path = ROOT.joinpath(*node.module.split(".")).with_suffix(".py")
            text = path.read_text().partition(TRAINING)[0]
            _lend(text, found)
            found[node.module] = text


@cache
def lessons() -> tuple[Lesson, ...]:
    """All lessons, in order."""
    return tuple(Lesson(folder) for folder in lesson_folders())


def find_exercise(name: str) -> tuple[Lesson, Exercise] | None:
    """The lesson that has an exercise of this name."""
    for lesson in lessons():
        if name in lesson.exercises:
            return lesson, lesson.exercises[name]
    return None
