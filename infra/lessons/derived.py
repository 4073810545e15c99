"""Derives the README's table of lessons and environment.yml."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from infra.lessons.source import Lesson

OPENS_TABLE = "<!-- lessons: made by `make lessons` -->"
CLOSES_TABLE = "<!-- end of lessons -->"

ENVIRONMENT = """\
# Made by `make lessons` from pyproject.toml, which has the one list of dependencies.
# conda env create -f environment.yml && conda activate {name}
name: {name}
channels:
  - conda-forge
dependencies:
  - python{python}
  - pip
  - pip:
      - -c infra/constraints.txt
      - -e .[{extras}]
"""


@dataclass(frozen=True)
class Repository:
    """Where the course is published, as pyproject.toml says."""

    url: str

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rsplit("/", 1)[-1]

    def colab_link(self, path: Path) -> str:
        """The address that opens a notebook of the repository in Colab; path is relative to the root."""
        github = self.url.rstrip("/").replace("https://github.com/", "github/")
        return f"https://colab.research.google.com/{github}/blob/main/{path.as_posix()}"

    def colab_badge(self, path: Path) -> str:
        image = "https://colab.research.google.com/assets/colab-badge.svg"
        return f"[![Open in Colab]({image})]({self.colab_link(path)})"


def read_project(root: Path) -> dict:
    """pyproject.toml's `project` table."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read_repository(root: Path) -> Repository:
    return Repository(read_project(root)["urls"]["Repository"])


def environment_text(root: Path) -> str:
    """What environment.yml must say."""
    project = read_project(root)
    extras = ",".join(project["optional-dependencies"])
    return ENVIRONMENT.format(name=project["name"], python=project["requires-python"], extras=extras)


def readme_text(root: Path, lessons: list[Lesson]) -> str:
    """What README.md must say: as it is, with today's table. Raises ValueError if the markers are gone."""
    text = (root / "README.md").read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(OPENS_TABLE)}.*{re.escape(CLOSES_TABLE)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"README.md needs the lines {OPENS_TABLE} and {CLOSES_TABLE}, once each")
    table = f"{OPENS_TABLE}\n{table_of_lessons(root, lessons)}\n{CLOSES_TABLE}"
    return pattern.sub(lambda _: table, text)


def table_of_lessons(root: Path, lessons: list[Lesson]) -> str:
    """A row a lesson: number, title with its summary, how long and how hard it is, where it opens.

    What is planned stands between them, without links.
    """
    repository = read_repository(root)
    rows = dict(planned_rows(root))
    for lesson in lessons:
        notebook = lesson.learner_notebook.relative_to(root)
        solved = lesson.solved_notebook.relative_to(root)
        links = f"[Colab]({repository.colab_link(notebook)}) · [solved]({solved.as_posix()})"
        title = f"**[{lesson.title}]({notebook.as_posix()})**<br>{lesson.summary}".replace("|", "\\|")
        takes = f"{lesson.front.hours}<br>{lesson.front.hardest}" if lesson.front else ""
        rows[lesson.number] = f"| {lesson.number} | {title} | {len(lesson.exercises)} | {takes} | {links} |"
    head = ["| | lesson | exercises | takes | |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *(rows[number] for number in sorted(rows))])


def planned_rows(root: Path) -> Iterator[tuple[str, str]]:
    """Number and row of each lesson of lessons/planned.yaml."""
    path = root / "lessons" / "planned.yaml"
    for number, (title, summary) in (
        yaml.safe_load(path.read_text(encoding="utf-8")).items() if path.exists() else ()
    ):
        yield number, f"| {number} | *{title}*<br>*{summary}* | | *planned* | |"
