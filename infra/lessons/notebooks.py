"""Makes the two notebooks of a lesson: the learner's, and the solved one before it is executed."""

import ast
import hashlib
import json
import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from infra.lessons.derived import Repository
from infra.lessons.source import Cell, Lesson

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_PAGE_MODULE = re.compile(r"^\s*from lessons\.page\.(\w+) import", re.MULTILINE)

SHOWING = ("cell_output.py", "guessing.py")
"""Of the grader, what gives a cell's output its form."""

METADATA = "scale_by_hand"
"""Key of what the builder writes down for itself in a notebook's metadata."""

FOLDED = "# @title "
"""How a cell begins that is folded: in JupyterLab by its metadata, on Colab as a form with this title."""

COLAB_CELL = """\
# @title On Google Colab this fetches the course and what it needs. Anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    import pathlib
    import shutil
    import subprocess

    address, course = "{url}", pathlib.Path("/content/{folder}")
    if not course.exists():
        part = course.with_suffix(".part")  # what was cut short last time is no course
        shutil.rmtree(part, ignore_errors=True)
        if subprocess.run(["git", "clone", "--quiet", "--depth=1", address, part]).returncode:
            raise RuntimeError(f"{{address}} could not be fetched: is it public, and is there a network?")
        part.rename(course)
    sys.path.insert(0, str(course))
    from infra.colab.install import install

    install()"""


def learner_notebook(lesson: Lesson, repository: Repository) -> NotebookNode:
    """Stubs in the exercise cells. What needs no exercise has its output from the solved notebook."""
    notebook = _notebook(lesson, repository, solved=False)
    if lesson.solved_notebook.exists():
        show_what_needs_no_exercise(notebook, nbformat.read(lesson.solved_notebook, as_version=4))
    notebook.metadata[METADATA] = {"lesson": lesson.slug, "cells": digest_of_cells(notebook)}
    return notebook


def solved_notebook(lesson: Lesson, repository: Repository) -> NotebookNode:
    """Answers in the exercise cells; not yet executed."""
    notebook = _notebook(lesson, repository, solved=True)
    notebook.metadata[METADATA] = {"lesson": lesson.slug, "executed_from": digest_of_sources(lesson)}
    return notebook


def digest_of_cells(notebook: NotebookNode) -> str:
    """Tells whether anyone has edited a built notebook. Outputs do not count."""
    return _digest(json.dumps([[cell.cell_type, cell.source] for cell in notebook.cells]).encode())


def digest_of_sources(lesson: Lesson) -> dict[str, str]:
    """What the outputs of the solved notebook come from, by name: of lesson.md its code, not its prose."""
    code = [[cell.source, cell.exercise] for cell in lesson.cells if cell.kind == "code"]
    beside = {p.relative_to(lesson.folder).as_posix(): p for p in sorted(lesson.folder.rglob("*.py"))}
    lessons, texts = lesson.folder.parent, [path.read_text() for path in beside.values()]
    texts += [cell.source for cell in lesson.cells]
    if any("lessons_shared" in text for text in texts):
        beside |= {p.relative_to(lessons).as_posix(): p for p in sorted((lessons / "shared").rglob("*.py"))}
    beside |= {p.relative_to(lessons).as_posix(): p for p in _page_modules(lessons / "page", texts)}
    shown = {f"grader/{name}": lessons.parent / "grader" / name for name in SHOWING}
    files = beside | shown | {lesson.solution_path.name: lesson.solution_path}
    digests = {name: _digest(path.read_bytes()) for name, path in files.items() if path.exists()}
    return {"code of lesson.md": _digest(json.dumps(code).encode()), **digests}


def _page_modules(folder: Path, texts: list[str]) -> list[Path]:
    """The files of lessons/page that the texts import, and those that these import."""
    found: set[Path] = set()
    while texts:
        names = {name for text in texts for name in _PAGE_MODULE.findall(text)}
        new = {folder / f"{name}.py" for name in names} - found
        found |= new
        texts = [path.read_text() for path in new if path.exists()]
    return sorted(found)


def show_what_needs_no_exercise(notebook: NotebookNode, solved: NotebookNode) -> None:
    """Give the cells that use no exercise, nor what another cell made with one, their outputs.

    What answers a question of the page (the tag "answer", or a use of `guess`) is not shown before.
    """
    outputs = {cell.source: cell.outputs for cell in solved.cells if cell.cell_type == "code"}
    unsolved = {cell.metadata["exercise"] for cell in notebook.cells if "exercise" in cell.metadata}
    unsolved.add("guess")
    for cell in notebook.cells:
        if cell.cell_type != "code" or "exercise" in cell.metadata or "check" in cell.metadata:
            continue
        nodes = list(ast.walk(ast.parse(cell.source)))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        if unsolved & {name.id for name in names} or "answer" in cell.metadata.get("tags", ()):
            unsolved |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
            unsolved |= {node.name for node in nodes if isinstance(node, _DEFINITIONS)}
        else:
            cell.outputs = outputs.get(cell.source, [])


def executed_code(notebook: NotebookNode) -> list[str]:
    """The code that the outputs come from. Colab's cell has none."""
    return [cell.source for cell in notebook.cells if cell.cell_type == "code" and cell.id != "colab"]


def keep_outputs(stored: NotebookNode, wanted: NotebookNode) -> None:
    """Give a notebook the outputs of an earlier one whose code is the same."""
    before, after = ([cell for cell in nb.cells if cell.cell_type == "code"] for nb in (stored, wanted))
    for old, new in zip(before, after, strict=True):
        new.outputs, new.execution_count = old.outputs, old.execution_count


def write(notebook: NotebookNode, path: Path) -> bool:
    """Write if anything changed; say whether it did."""
    text = as_text(notebook)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def as_text(notebook: NotebookNode) -> str:
    """The file's text: sorted keys, the same bytes for the same notebook."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


LOOK_FIRST = "look-first"
"""The tag of an exercise whose check stands after the next code cell."""


def _notebook(lesson: Lesson, repository: Repository, *, solved: bool) -> NotebookNode:
    path = lesson.solved_notebook if solved else lesson.learner_notebook
    badge = repository.colab_badge(path.relative_to(lesson.root))
    nodes: list[NotebookNode] = []
    later: list[NotebookNode] = []  # the check of a program that is to be looked at first
    for cell in lesson.cells:
        if cell.kind == "code" and not any(node.cell_type == "code" for node in nodes):
            nodes.append(_code("colab", COLAB_CELL.format(url=repository.url, folder=repository.name)))
        if cell.exercise:
            nodes += later + _exercise_cells(lesson, cell, solved=solved)
            later = [nodes.pop()] if LOOK_FIRST in cell.tags else []
        elif cell.kind == "code":
            nodes += [_code(_id_of(cell), cell.source, tags=list(cell.tags)), *later]
            later = []
        else:
            title = f"# {lesson.title}\n"
            below = f"{title}\n{badge}\n{_what_it_takes(lesson)}"
            source = f"{cell.source}\n".replace(title, below, not nodes).rstrip("\n")
            nodes.append(_with_id(new_markdown_cell(source), _id_of(cell)))
    nodes += later
    _make_ids_unique(nodes)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook: NotebookNode = new_notebook(cells=nodes)
    notebook.nbformat_minor = 5
    notebook.metadata = NotebookNode({"kernelspec": kernel, "language_info": {"name": "python"}})
    return notebook


def _exercise_cells(lesson: Lesson, cell: Cell, *, solved: bool) -> list[NotebookNode]:
    """The exercise (a stub, a broken program to repair, or the answer) and the cell that checks it."""
    exercise = lesson.exercises[cell.exercise]
    source = exercise.answer if solved else cell.source or exercise.stub
    tags = list(cell.tags)
    return [
        *_heading(lesson, exercise.name),
        _code(f"exercise-{exercise.name}"[:60], source, tags=tags, exercise=exercise.name),
        _code(f"check-{exercise.name}"[:60], f"check({exercise.name})", check=exercise.name),
    ]


def _what_it_takes(lesson: Lesson) -> str:
    """A line below the title: minutes, and the lessons that come before."""
    if lesson.front is None:
        return ""
    told = f"About {lesson.front.reading} minutes to read and {lesson.front.building} to build."
    if lesson.front.more:
        told += f" Another {lesson.front.more} minutes of exercises may be left out."
    folders = sorted(folder.name for folder in lesson.folder.parent.glob("[0-9][0-9]*_*"))
    parted = [name.partition("_") for name in folders]
    before = [number for number, _, slug in parted if slug in lesson.front.needs]
    if before:
        many = len(before) > 1
        told += (
            f" {'Lessons' if many else 'Lesson'} {' and '.join(before)} {'come' if many else 'comes'} before."
        )
    return f"\n*{told}*\n"


def _heading(lesson: Lesson, exercise: str) -> list[NotebookNode]:
    """A line above an exercise: its name, stars and minutes."""
    if lesson.front is None:
        return []
    told = f"**Exercise: `{exercise}`** · {lesson.front.exercises[exercise]}"
    return [_with_id(new_markdown_cell(told), f"effort-{exercise}"[:60])]


def _code(identity: str, source: str, tags: list[str] | None = None, **metadata: str) -> NotebookNode:
    node = new_code_cell(source)
    node.metadata = NotebookNode({**metadata, **({"tags": tags} if tags else {})})
    if source.startswith(FOLDED):
        node.metadata |= {"jupyter": {"source_hidden": True}, "cellView": "form"}
    return _with_id(node, identity)


def _with_id(node: NotebookNode, identity: str) -> NotebookNode:
    node.id = identity
    return node


def _id_of(cell: Cell) -> str:
    return _digest(f"{cell.kind}\n{cell.source}".encode())


def _make_ids_unique(nodes: list[NotebookNode]) -> None:
    seen: dict[str, int] = {}
    for node in nodes:
        seen[node.id] = seen.get(node.id, 0) + 1
        if seen[node.id] > 1:
            node.id = f"{node.id}-{seen[node.id]}"
