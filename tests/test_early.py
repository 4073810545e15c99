"""The ranks' server, which `grade PATH` begins before the judge imports torch, and a notebook as early."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from grader import early
from grader.ranks import server as server_module
from grader.ranks.faults import CannotGradeError
from grader.ranks.isolation import Isolation
from grader.ranks.launcher import ROOT, Launcher
from grader.ranks.server import Server
from grader.work import find_work
from nanogpt import loopback

OURS = "scale-by-hand-*"
LESSON = "08_data_parallel"
PATHS = [
    "solutions",
    "solutions/data_parallel.py",
    LESSON,
    "data_parallel",
    f"lessons/{LESSON}",
    f"lessons/{LESSON}/data_parallel.ipynb",
    "tests/alternatives/data_parallel__views.py",
]


@pytest.mark.parametrize("path", PATHS)
def test_what_a_path_means_is_guessed_right(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    monkeypatch.setattr(early, "Server", lambda isolation, shut_in: begun.append((isolation, shut_in)))
    monkeypatch.chdir(ROOT)
    early.begin_server(path, "auto", "cpu")
    submissions = [submission for submission, _ in find_work(path, ())]
    trusted = all(submission.trusted for submission in submissions)
    needed = early.isolation_for("auto", "cpu", [submission.path for submission in submissions], trusted)
    assert begun == [(needed, True)]


@pytest.mark.parametrize("path", [None, "no/such/file.py", "tests"])
def test_what_nobody_can_guess_begins_nothing(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert early.begin_server(path, "auto", "cpu") is None


def test_the_command_has_begun_it_before_torch_is_there() -> None:
    program = (
        "import sys, grader.cli, grader.early\n"
        "def server(*arguments): sys.exit(3 if 'torch' in sys.modules else 4)\n"
        "grader.early.Server = server\n"
        "grader.cli.grade(['solutions'])"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 4


def test_one_that_serves_nobody_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for seconds in (0.0, 1.0):
        server = Server(Isolation(), shut_in=False)
        assert psutil.pid_exists(server._process.pid)
        time.sleep(seconds)
        server.end()
        server.end()
        assert not psutil.pid_exists(server._process.pid)
    late = Server(Isolation(), shut_in=False)
    late.wait_until_ready()
    assert list(tmp_path.glob(OURS)) == [Path(late.directory)]
    late.end()
    assert not list(tmp_path.glob(OURS))


def test_a_launcher_takes_it_once_and_ends_it() -> None:
    begun = Server(Isolation(), shut_in=False)
    launcher = Launcher(Isolation(), begun)
    launcher.warm_up()
    assert launcher._servers[False] is begun
    launcher.close()
    assert not psutil.pid_exists(begun._process.pid)
    launcher.warm_up()
    assert launcher._servers[False] is not begun
    launcher.close()


def test_a_launcher_begins_one_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher()
    launcher.begin()
    begun = launcher._begun
    launcher.begin()
    assert begun is not None
    assert launcher._begun is begun
    assert not begun._is_ready
    launcher.warm_up()
    assert launcher._servers[False] is begun
    launcher.begin()
    assert launcher._begun is None
    launcher.close()
    assert not psutil.pid_exists(begun._process.pid)

    monkeypatch.setattr(loopback, "is_up", lambda: False)
    launcher.begin()
    assert launcher._begun is None
    with pytest.raises(CannotGradeError, match="loopback"):
        launcher.warm_up()


@pytest.mark.parametrize("what", ["killed", "edited"])
def test_one_that_serves_no_more_when_it_is_needed_is_replaced(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun with a notebook's first import, it may wait for long."""
    launcher = Launcher()
    launcher.begin()
    begun = launcher._begun
    assert begun is not None
    if what == "killed":
        begun._process.kill()
        begun._process.wait()
    else:
        monkeypatch.setattr(server_module, "_preloaded", lambda: [("model.py", 1)])
    launcher.warm_up()
    assert launcher._servers[False] is not begun
    assert not psutil.pid_exists(begun._process.pid)
    launcher.close()


@pytest.mark.slow
def test_a_notebook_begins_one_with_its_first_import() -> None:
    source = "from grader import run_ranks\nfrom grader.ranks.launcher import shared_launcher"
    cell = new_code_cell(source + "\nprint(shared_launcher()._begun.serves)")
    nbclient.execute(new_notebook(cells=[cell]), cwd=str(ROOT), timeout=120)
    assert cell.outputs[0].text == "True\n"
