"""One linter and one formatter, for code, notebooks and the fences of Markdown."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_has_nothing_to_say(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "ruff", *arguments, "--output-format", "concise", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"ruff {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
