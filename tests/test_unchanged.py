"""The second `make test` runs what has changed, what failed, and nothing else."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
from pathlib import Path
from types import SimpleNamespace
import pytest

ROOT = Path(__file__).parents[1]

LESSONS = [SimpleNamespace(slug="one"), SimpleNamespace(slug="two")]

@pytest.mark.parametrize("lesson", LESSONS, ids=["one", "two"])
def test_lesson(lesson):
    pass

def test_of_all():
    assert (ROOT / "right").exists()
"""


@pytest.fixture
def course(tmp_path: Path) -> Path:
    files = {
        "lessons/01_one/lesson.md": "One.",
        "lessons/02_two/lesson.md": "Two.",
        "tests/__init__.py": "",
        "tests/test_all.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\ntestpaths = ["tests"]\n',
        ".gitignore": ".pytest_cache/\n__pycache__/\n",
        "right": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(ROOT / "tests" / "unchanged.py", tmp_path / "tests")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def run(course: Path, *more: str) -> tuple[int, set[str]]:
    """The status of pytest, and the tests that it ran."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "xdist", "-p", "tests.unchanged", *more]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # importing others takes seconds
    done = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if " PASSED " in line or " FAILED " in line]
    return done.returncode, set(re.findall(r"::(\S+)", "\n".join(lines)))


EVERYTHING = {"test_lesson[one]", "test_lesson[two]", "test_of_all"}


def test_nothing_is_run_twice_where_nothing_has_changed(course: Path) -> None:
    assert run(course, "-n", "2") == (0, EVERYTHING)
    assert run(course, "-n", "2") == (0, set())
    assert run(course) == (0, set())
    assert run(course, "-k", "one") == (0, {"test_lesson[one]"})
    assert run(course, "tests/test_all.py") == (0, EVERYTHING)
    assert run(course, "--cache-clear") == (0, EVERYTHING)


def test_a_lesson_that_has_changed_leaves_the_other_alone(course: Path) -> None:
    run(course)
    (course / "lessons" / "02_two" / "new.py").write_text("")
    assert run(course) == (0, {"test_lesson[two]", "test_of_all"})
    (course / "tests" / "test_all.py").write_text(TESTS + "\n")
    assert run(course) == (0, EVERYTHING)


def test_what_failed_is_run_again(course: Path) -> None:
    (course / "right").unlink()
    assert run(course) == (1, EVERYTHING)
    assert run(course) == (1, {"test_of_all"})
    assert run(course) == (1, {"test_of_all"})


def test_what_was_edited_while_it_ran_has_not_passed(course: Path) -> None:
    edits = TESTS.replace("assert (ROOT", '(ROOT / "made").touch()\n    assert (ROOT')
    (course / "tests" / "test_all.py").write_text(edits)
    assert run(course) == (0, EVERYTHING)
    assert run(course) == (0, EVERYTHING)
    assert run(course) == (0, set())


def test_without_git_all_are_run(course: Path) -> None:
    shutil.rmtree(course / ".git")
    assert run(course) == (0, EVERYTHING)
    assert run(course) == (0, EVERYTHING)
