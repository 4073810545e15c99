"""Every derived file is what its sources say; every solved notebook runs and prints what it stores."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from infra.lessons import build, derived, notebooks
from infra.lessons.source import Lesson, discover

ROOT = Path(__file__).parents[1]
LESSONS = discover(ROOT)
CELL_SECONDS = 300

each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=[lesson.slug for lesson in LESSONS])


def test_nothing_derived_is_stale() -> None:
    stale = [one for one in build.find_stale(ROOT, LESSONS) if not is_learners_work(one)]
    assert not stale, "run `make lessons`:\n" + "\n".join(map(str, stale))


@each_lesson
def test_every_check_of_the_solved_notebook_passed(lesson: Lesson) -> None:
    checks = [c for c in nbformat.read(lesson.solved_notebook, as_version=4).cells if "check" in c.metadata]
    assert [cell.metadata["check"] for cell in checks] == list(lesson.exercises)
    for cell in checks:
        assert "passed" in build.report_of(cell).splitlines()[0], cell.outputs


@each_lesson
@pytest.mark.slow
def test_the_solved_notebook_prints_what_it_stores(lesson: Lesson) -> None:
    """nbval runs it in a fresh kernel and compares the outputs, but for cells tagged nbval-ignore-output."""
    command = [sys.executable, "-m", "pytest", "--nbval", str(lesson.solved_notebook), "-q", "--tb=short"]
    command += ["--rootdir", str(ROOT), "-c", os.devnull, "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "nanogpt.implementation"]  # first: nbval imports nbformat, which then takes no seconds
    command += ["--nbval-cell-timeout", str(CELL_SECONDS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@each_lesson
@pytest.mark.slow
def test_the_learners_notebook_runs_before_anything_is_solved(lesson: Lesson) -> None:
    """A demonstration that needs an exercise says so, or misses a name that another would have assigned.

    No other cell fails, and every check is "not attempted". A demonstration that uses no exercise has run in
    the solved notebook, from which it has its output: it is left out, unless it assigns a name.
    """
    notebook = notebooks.learner_notebook(lesson, derived.read_repository(ROOT))
    notebook.cells = [cell for cell in notebook.cells if not is_shown_alone(cell)]
    nbclient.execute(
        notebook,
        cwd=str(lesson.folder),
        timeout=CELL_SECONDS,
        allow_errors=True,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
    )
    never_assigned: set[str] = set()
    for cell in notebook.cells:
        for error in (output for output in cell.get("outputs", []) if output.output_type == "error"):
            unsolved = "NotImplementedError" in error.ename + error.evalue
            missing = re.findall(r"name '(\w+)' is not defined", error.evalue)
            forgiven = "demo" in cell.metadata.get("tags", [])
            forgiven &= unsolved or bool(never_assigned.intersection(missing))
            assert forgiven, f"{cell.source}\n{error.evalue}"
            never_assigned |= assigned_names(cell.source)
        if "check" in cell.metadata:
            assert "not attempted" in build.report_of(cell).splitlines()[0], cell.outputs


def is_shown_alone(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell shows what no exercise changes, and no other cell needs it."""
    shown = "demo" in cell.metadata.get("tags", []) and bool(cell.get("outputs"))
    return shown and not assigned_names(cell.source)


def assigned_names(source: str) -> set[str]:
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def is_learners_work(stale: build.Stale) -> bool:
    """Whether this is a learner's notebook that is being filled in, and was right when it was committed."""
    lesson = next((lesson for lesson in LESSONS if lesson.learner_notebook == stale.path), None)
    if lesson is None or not build.is_edited(stale.path):
        return False
    committed = subprocess.run(
        ["git", "show", f"HEAD:./{stale.path.name}"], cwd=stale.path.parent, capture_output=True, text=True
    )
    wanted = notebooks.as_text(notebooks.learner_notebook(lesson, derived.read_repository(ROOT)))
    return committed.stdout == wanted
