"""Builds the notebooks, or says which are stale, without ever overwriting a learner's work."""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbclient
import nbformat
from nbformat import NotebookNode

from infra.lessons import derived, notebooks
from infra.lessons.derived import Repository
from infra.lessons.exercises import LessonError
from infra.lessons.source import Lesson

CELL_SECONDS = 300
"""A cell of a solved notebook that takes longer is taken for hung."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stale:
    """A derived file that is not what its sources say."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class EditedError(ValueError):
    """The learner's notebook holds somebody's work."""


def build_lesson(lesson: Lesson, *, execute: bool = True, force: bool = False, say: Say = print) -> None:
    """Write both notebooks of a lesson; execute the solved one if its sources changed, or if forced.

    Raises LessonError where a source is wrong or a solved cell fails, EditedError rather than
    overwrite a notebook that somebody works in.
    """
    repository = derived.read_repository(lesson.root)
    label = f"{lesson.number} {lesson.slug}"
    if is_edited(lesson.learner_notebook) and not force:
        path = lesson.learner_notebook
        raise EditedError(
            f"{path}: edited since it was built, so it is left alone. Keep a copy of it elsewhere, "
            "then build with FORCE=1"
        )
    if execute:
        build_solved(lesson, repository, force=force, say=say)
    learner = notebooks.learner_notebook(lesson, repository)
    changed = notebooks.write(learner, lesson.learner_notebook)
    say(f"{label}: learner's notebook {'written' if changed else 'up to date'}")


def build_solved(lesson: Lesson, repository: Repository, *, force: bool, say: Say) -> None:
    """Write the solved notebook. Where only prose changed, it keeps its outputs."""
    label = f"{lesson.number} {lesson.slug}"
    solved = notebooks.solved_notebook(lesson, repository)
    why = "forced" if force else why_outputs_are_stale(lesson, solved)
    if not why:
        notebooks.keep_outputs(nbformat.read(lesson.solved_notebook, as_version=4), solved)
        changed = notebooks.write(solved, lesson.solved_notebook)
        say(f"{label}: solved notebook {'has new text, the same code' if changed else 'up to date'}")
        return
    say(f"{label}: executing the solved notebook ({why})")
    begin = time.monotonic()
    notebooks.write(execute_notebook(lesson, solved, say), lesson.solved_notebook)
    say(f"{label}: solved notebook written in {time.monotonic() - begin:.0f} s")


def build_shared(root: Path, lessons: list[Lesson], say: Say = print) -> None:
    """Write the README's table and environment.yml."""
    wanted = {
        "README.md": derived.readme_text(root, lessons),
        "environment.yml": derived.environment_text(root),
    }
    for name, text in wanted.items():
        path = root / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            say(f"{name} written")


def find_stale(root: Path, lessons: list[Lesson]) -> Iterator[Stale]:
    """Every derived file that `make lessons` would change; executes nothing."""
    repository = derived.read_repository(root)
    for lesson in lessons:
        path = lesson.learner_notebook
        wanted = notebooks.as_text(notebooks.learner_notebook(lesson, repository))
        if not path.exists():
            yield Stale(path, "missing")
        elif path.read_text(encoding="utf-8") != wanted:
            yield Stale(path, "edited by hand" if is_edited(path) else "its sources changed")
        if why := why_solved_is_stale(lesson, repository):
            yield Stale(lesson.solved_notebook, why)
    if (root / "README.md").read_text(encoding="utf-8") != derived.readme_text(root, lessons):
        yield Stale(root / "README.md", "its table of lessons is not today's")
    environment = root / "environment.yml"
    if not environment.exists() or environment.read_text(encoding="utf-8") != derived.environment_text(root):
        yield Stale(environment, "not what pyproject.toml says")


def is_edited(path: Path) -> bool:
    """Whether somebody changed the cells of a learner's notebook since it was built."""
    if not path.exists():
        return False
    notebook = nbformat.read(path, as_version=4)
    built = notebook.metadata.get(notebooks.METADATA, {}).get("cells")
    return built != notebooks.digest_of_cells(notebook)


def why_solved_is_stale(lesson: Lesson, repository: Repository) -> str:
    """Why `make lessons` would change the solved notebook, or nothing."""
    wanted = notebooks.solved_notebook(lesson, repository)
    if why := why_outputs_are_stale(lesson, wanted):
        return why
    stored = nbformat.read(lesson.solved_notebook, as_version=4)
    same = [_identity(cell) for cell in stored.cells] == [_identity(cell) for cell in wanted.cells]
    return "" if same else "its cells are not what its sources say"


def why_outputs_are_stale(lesson: Lesson, wanted: NotebookNode) -> str:
    """Why the solved notebook must be executed again, or nothing."""
    path = lesson.solved_notebook
    if not path.exists():
        return "missing"
    stored = nbformat.read(path, as_version=4)
    before = stored.metadata.get(notebooks.METADATA, {}).get("executed_from", {})
    after = wanted.metadata[notebooks.METADATA]["executed_from"]
    if changed := sorted(name for name in {*before, *after} if before.get(name) != after.get(name)):
        return f"{', '.join(changed)} changed since it was executed"
    if notebooks.executed_code(stored) != notebooks.executed_code(wanted):
        return "its cells are not what its sources say"
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    return "a cell of it was not executed" if any(cell.execution_count is None for cell in code) else ""


def execute_notebook(lesson: Lesson, notebook: NotebookNode, say: Say) -> NotebookNode:
    """Run every cell in a fresh kernel, in the folder of the notebook. Raises LessonError if one fails."""
    if not lesson.checks_path.exists():
        raise LessonError(lesson.checks_path, 1, "missing: the solved notebook checks its exercises")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the tests run it, so that sums round alike
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    metadata = notebook.metadata.copy()
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns that its local sockets are plain text
        resources={"metadata": {"path": str(lesson.solved_notebook.parent)}},
    )
    slow = _SlowCells(say)
    client.on_cell_execute = lambda cell, cell_index: slow.begin()
    client.on_cell_executed = lambda cell, cell_index, execute_reply: slow.end(cell)
    try:
        client.execute()
    except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.CellTimeoutError) as error:
        message = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        raise LessonError(lesson.text_path, _line_of_failure(lesson, notebook), message) from error
    notebook.metadata = metadata  # nbclient adds the version of Python
    for cell in notebook.cells:
        _refuse_local_paths(lesson, cell)
        _refuse_what_did_not_pass(lesson, cell)
    return notebook


def report_of(cell: NotebookNode) -> str:
    """What `check` showed as text; a picture may follow it."""
    shown = [
        output.data.get("text/plain", "") for output in cell.outputs if output.output_type == "display_data"
    ]
    return next((text for text in shown if text), "")


class _SlowCells:
    """Shows that something goes on: one line for each cell that took more than a few seconds."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.began = 0.0

    def begin(self) -> None:
        self.began = time.monotonic()

    def end(self, cell: NotebookNode) -> None:
        seconds = time.monotonic() - self.began
        if seconds > 3:
            self.say(f"    {seconds:3.0f} s  {cell.source.strip().splitlines()[0][:90]}")


def _identity(cell: NotebookNode) -> tuple:
    return cell.id, cell.cell_type, cell.source, dict(cell.metadata)


def _line_of_failure(lesson: Lesson, notebook: NotebookNode) -> int:
    """The line of lesson.md where the cell that failed stands: the last one that was executed."""
    executed = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.execution_count]
    if not executed:
        return 1
    name = executed[-1].metadata.get("exercise") or executed[-1].metadata.get("check")
    if name:
        return lesson.line_of(name)
    before = lesson.text.partition(executed[-1].source)
    return before[0].count("\n") + 1 if before[1] else 1


def _refuse_local_paths(lesson: Lesson, cell: NotebookNode) -> None:
    """An output that names a folder of this machine would differ on every other one."""
    if cell.cell_type == "code" and str(lesson.root.resolve()) in str(cell.outputs):
        first = cell.source.strip().splitlines()[0]
        line = lesson.text[: lesson.text.find(first)].count("\n") + 1
        raise LessonError(lesson.text_path, line, f"the output of this cell names a local folder: {first}")


def _refuse_what_did_not_pass(lesson: Lesson, cell: NotebookNode) -> None:
    """A solved notebook shows no exercise that failed, nor one that could not be graded."""
    if "check" in cell.metadata and "passed" not in report_of(cell).partition("\n")[0]:
        name = cell.metadata["check"]
        message = f"{name} did not pass: {report_of(cell) or 'check showed nothing'}"
        raise LessonError(lesson.text_path, lesson.line_of(name), message)
