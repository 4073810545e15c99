"""Makes the book's pages: lessons from the solved notebooks, with each answer behind a fold."""

import re
import shutil
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from infra.lessons.derived import read_repository
from infra.lessons.notebooks import FOLDED, as_text
from infra.lessons.source import Lesson

PACKAGES = {"nanogpt": "nanoGPT", "grader": "The grader"}
"""Whose reference the book has, with its title."""

BADGE = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]\(([^)]*)\)")
"""A picture from the network."""

DOCUMENTS = {
    "using.md": "docs/using.md",
    "when_it_pays.md": "docs/when_it_pays.md",
    "instructors.md": "docs/instructors.md",
    "contributing.md": "CONTRIBUTING.md",
}
"""Pages that the repository has as well."""

PICTURES = ("docs/wrong_answer.svg", "docs/when_it_pays.png", "infra/memory_table/memory_table.png")

INTERNAL = {"__main__", "implementation"}
"""Modules that nobody imports by hand."""


def write_all(root: Path, lessons: list[Lesson], folder: Path) -> int:
    """Write every page of the book; how many there are."""
    for path in (folder / "lessons", folder / "reference", folder / "docs"):
        path.mkdir(parents=True)
    for lesson in lessons:
        page = page_of(lesson)
        (folder / "lessons" / f"{lesson.slug}.ipynb").write_text(as_text(page), encoding="utf-8")
    for name, source in {**DOCUMENTS, "index.md": "README.md"}.items():
        text = in_the_book((root / source).read_text(encoding="utf-8"), root, lessons)
        text += contents(lessons) if name == "index.md" else ""
        (folder / name).write_text(text, encoding="utf-8")
    for source in PICTURES:
        shutil.copy(root / source, folder / "docs")
    for package, title in PACKAGES.items():
        (folder / "reference" / f"{package}.rst").write_text(reference(root, package, title))
    return len(lessons) + len(DOCUMENTS) + len(PACKAGES) + 1


def page_of(lesson: Lesson) -> NotebookNode:
    """The solved notebook as a page: the stub is shown, the answer folded, and so is what sets things up."""
    page = nbformat.read(lesson.solved_notebook, as_version=4)
    cells = []
    for cell in page.cells:
        if cell.id == "colab":
            continue
        tags = [tag for tag in cell.metadata.get("tags", ()) if tag != "answer"]
        if "exercise" in cell.metadata:
            name = cell.metadata["exercise"]
            given = next(each.source for each in lesson.cells if each.exercise == name)
            stub = new_code_cell(given or lesson.exercises[name].stub)
            stub.id = f"stub-{name}"[:60]
            cells.append(stub)
            tags.append("hide-input")
        elif cell.source.startswith(FOLDED):
            tags.append("hide-input")
        cell.metadata["tags"] = tags
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if not is_empty(each)]
        else:
            cell.source = BADGE.sub(r"[Open in Colab](\1)", cell.source)
        cells.append(cell)
    page.cells = cells
    return page


def is_empty(output: NotebookNode) -> bool:
    """Whether it is what a progress display leaves behind."""
    return output.output_type == "display_data" and not any(output.data.values())


def in_the_book(text: str, root: Path, lessons: list[Lesson]) -> str:
    """Markdown of the repository with its links leading to the book's pages, or to the repository."""
    repository = read_repository(root).url
    notebooks = [(path, each) for each in lessons for path in (each.learner_notebook, each.solved_notebook)]
    places = {path.relative_to(root).as_posix(): f"lessons/{each.slug}.ipynb" for path, each in notebooks}
    places |= {source: name for name, source in DOCUMENTS.items()}
    places |= {source: f"docs/{Path(source).name}" for source in PICTURES}
    places["README.md"] = "index.md"

    def link(found: re.Match[str]) -> str:
        target, *heading = found[1].removeprefix("../").split("#")
        if "://" in target:
            return found[0]
        place = places.get(target, f"{repository}/blob/main/{target}")
        return f"]({'#'.join([place, *heading])})"

    return re.sub(r"\]\(([^)]+)\)", link, re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL))


def reference(root: Path, package: str, title: str) -> str:
    """A page with the docstrings of a package's public modules."""
    modules = sorted(path.stem for path in (root / package).glob("*.py"))
    parts = [title, "=" * len(title), "", f".. automodule:: {package}", "   :no-members:", ""]
    for module in modules:
        if not module.startswith("_") and module not in INTERNAL:
            name = f"{package}.{module}"
            parts += [name, "-" * len(name), "", f".. automodule:: {name}", ""]
    return "\n".join(parts)


def contents(lessons: list[Lesson]) -> str:
    """The tables of contents, which the sidebar shows."""
    pages = "\n".join(f"lessons/{lesson.slug}" for lesson in lessons)
    reference = "\n".join(f"reference/{package}" for package in PACKAGES)
    blocks = (
        ("Lessons", pages),
        ("Using it", "using\nwhen_it_pays\ninstructors\ncontributing"),
        ("Reference", reference),
    )
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n" for caption, entries in blocks
    )
