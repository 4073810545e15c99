"""What a solved notebook has printed, as it is stored."""

import nbformat

from grader.judging.course import lessons


def printed(slug: str, mark: str) -> list[str]:
    """The lines that the one code cell with `mark` in it has printed, in the stored solved notebook."""
    (lesson,) = [lesson for lesson in lessons() if lesson.slug == slug]
    notebook = nbformat.read(lesson.solution.with_suffix(".ipynb"), as_version=4)
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and mark in cell.source]
    return "".join(output.get("text", "") for output in cell.outputs).splitlines()


def numbers(line: str) -> list[float]:
    """The numbers of a line, in order; thousands may be separated by commas."""
    words = (word.replace(",", "").rstrip("%") for word in line.split())
    return [float(word) for word in words if word.removeprefix("-").replace(".", "", 1).isdigit()]
