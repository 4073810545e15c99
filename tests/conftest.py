"""What all tests share."""

import os

# Several ranks and two test workers share two cores. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest

from grader.isolation import why_not
from grader.launcher import ROOT, Launcher, shared_launcher


@pytest.fixture(scope="session")
def launcher() -> Launcher:
    """Ranks that are not shut in, as in a notebook."""
    return shared_launcher()


@pytest.fixture(scope="session")
def isolated() -> Iterator[Launcher]:
    """Ranks that are shut in, as `grade` has them where the system allows it."""
    if why_not():
        pytest.skip(f"isolation is not to be had here: {why_not()}")
    inside = Launcher(True, [ROOT / "solutions", ROOT / "tests", ROOT / ".git"])
    yield inside
    inside.close()
