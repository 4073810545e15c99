"""What all tests share."""

import os

# Several ranks and two test workers share two cores. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from grader.ranks.isolation import Isolation, why_not
from grader.ranks.launcher import Launcher, shared_launcher
from nanogpt import implementation  # noqa: F401 (before nbformat, which it imports without what is slow)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first: the last worker to end then ends with something small."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tokens are kept, for all test workers together: making them takes seconds."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tokens"


@pytest.fixture(scope="session")
def launcher() -> Launcher:
    """Ranks that are not shut in, as in a notebook."""
    return shared_launcher()


@pytest.fixture(scope="session")
def isolated() -> Iterator[Launcher]:
    """Ranks that are shut in, as `grade` has them where the system allows it."""
    if why_not():
        pytest.skip(f"isolation is not to be had here: {why_not()}")
    inside = Launcher(Isolation("on"))
    yield inside
    inside.close()


@pytest.fixture
def without_network() -> list[str]:
    """What a command begins with that runs where no interface is up, loopback neither."""
    alone = ["unshare", "--user", "--map-root-user", "--net", "--"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this system allows no network namespace")
    return alone
