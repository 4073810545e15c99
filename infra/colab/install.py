"""Sets the course up on Google Colab, keeping Colab's own torch, Jupyter and kernel."""

import importlib.metadata
import subprocess
import sys

from infra import packages

COLABS_OWN = {"torch", "ipykernel"}
"""Colab runs on its own versions of these; to replace them breaks the session."""


def install() -> None:
    """Install what pyproject.toml lists and Colab lacks. Raises RuntimeError if torch is too old."""
    version = importlib.metadata.version("torch")
    if minimum := packages.older_than(version):
        raise RuntimeError(
            f"this Colab has torch {version}; the course needs {minimum} or newer: choose the latest version "
            "under Runtime > Change runtime type > Runtime version"
        )
    print(f"Setting up the course beside Colab's torch {version}: about a minute, once a session", flush=True)
    _pip(*packages.tested(packages.requirements(without=COLABS_OWN, extras=False)))
    _pip("--no-deps", "-e", str(packages.ROOT))


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install the course:\n{done.stderr}")
