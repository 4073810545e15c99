"""The set-up: which Python it chooses, what it installs, and what it says when it can not."""

import ast
import http.server
import importlib
import os
import pwd
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import environment, floor, lab, obstacles, packages
from infra.colab import install as colab
from infra.lessons import notebooks

ROOT = Path(__file__).parents[1]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for .venv that is not the one that the tests run in."""
    monkeypatch.setattr(environment, "OWN", tmp_path / ".venv")
    return tmp_path / ".venv"


def stopped(capfd: pytest.CaptureFixture[str], call, *arguments, **options) -> str:
    """What a call says that ends the process as the machine's trouble: one line."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        call(*arguments, **options)
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line


def test_every_direct_dependency_is_pinned_and_nothing_else() -> None:
    pins = packages.pins(packages.CONSTRAINTS)
    assert sorted(pins) == sorted(map(packages.name_of, packages.requirements()))
    assert pins["torch"] == "torch==2.13.0"


def test_torch_is_left_out_where_it_is_already_there() -> None:
    rest = {packages.name_of(requirement) for requirement in packages.requirements(without={"torch"})}
    assert "torch" not in rest
    assert {"jupyterlab", "pytest", "nbval"} <= rest


def test_what_is_missing_beside_a_torch_comes_in_the_tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        name = "Click"

    monkeypatch.setattr(packages.importlib.metadata, "distributions", lambda: [Found])
    pins = packages.pins(packages.CONSTRAINTS)
    assert packages.tested(["click", "rich", "pyyaml"]) == ["click", pins["rich"], pins["pyyaml"]]


@pytest.mark.parametrize(
    ("version", "minimum"),
    [
        ("2.11.0", ""),
        ("2.13.0+cpu", ""),
        ("3.0", ""),
        ("2.11.0a0+nv25", ""),
        ("2.10.1", "2.11"),
        ("1.13", "2.11"),
    ],
)
def test_the_active_torch_must_be_new_enough(version: str, minimum: str) -> None:
    assert packages.older_than(version) == minimum


def test_an_old_torch_ends_in_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    said = stopped(capfd, environment.refuse_old_torch, "2.9.0")
    assert "has torch 2.9.0; the course needs 2.11 or newer" in said


def test_an_old_python_ends_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    said = stopped(capfd, importlib.reload, environment)
    assert "Python 3.9 " in said and "is too old: the course needs 3.11 or newer" in said


def test_an_old_python_can_read_as_far_as_that_sentence() -> None:
    ast.parse(Path(environment.__file__).read_text(), feature_version=(3, 6))


def test_a_python_without_venv_ends_in_one_sentence(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(SystemExit, match="2"):
        environment.make_venv()
    assert "its venv or ensurepip module is missing" in capfd.readouterr().err


def test_the_stamp_notices_another_pin_and_another_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text("torch==2.13.0\n")
    monkeypatch.setattr(packages, "CONSTRAINTS", pins)
    first = environment.fingerprint()
    pins.write_text("torch==2.14.0\n")
    second = environment.fingerprint()
    monkeypatch.setattr(environment, "ROOT", ROOT / "." / "infra" / "..")
    assert len({first, second, environment.fingerprint()}) == 3


def test_who_shares_an_environment_with_another_clone_is_told_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stamp = tmp_path / environment.STAMP
    environment.tell_other_clone(stamp)
    for former, told in ((ROOT, False), (tmp_path / "deleted since", False), (tmp_path, True)):
        stamp.write_text(f"0123abcd {former}\n")
        environment.tell_other_clone(stamp)
        said = " ".join(capfd.readouterr().err.split())
        assert (f"was set up for {former}. From now on" in said) == told


def test_a_second_set_up_waits_for_the_first_and_one_that_died_holds_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
import sys
from pathlib import Path
from infra.obstacles import alone
with alone(Path(sys.argv[1])):
    print("inside", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(tmp_path / ".venv.lock")]
    first = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with first:
        assert first.stdout is not None and first.stdout.readline() == "inside\n"
        second = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with second:
            assert second.stderr is not None and second.stdout is not None
            assert f"Another set-up is under way in {tmp_path}: waiting" in second.stderr.readline()
            assert second.poll() is None
            first.kill()
            assert second.stdout.readline() == "inside\n"


def test_whoever_waited_does_not_set_up_again(
    own: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = iter([False, True])
    monkeypatch.setattr(
        environment, "choose", lambda: (own / "bin" / "python", lambda python: pytest.fail("made twice"))
    )
    monkeypatch.setattr(environment, "is_ready", lambda *_: next(seen))
    environment.main()
    assert capfd.readouterr().out == f"{own}/bin/python\n"


@pytest.fixture
def server() -> Iterator[str]:
    """A server that has nothing."""

    class Nothing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Nothing) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}/"
        serving.shutdown()
        thread.join()


def test_no_network_is_said_before_pip_speaks_of_conflicts(
    server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    obstacles.require_network(server)  # it answers, if only that there is nothing
    port = server.rstrip("/").rpartition(":")[2]
    nowhere = f"http://127.0.0.2:{port}/"
    said = stopped(capfd, packages.require_index, f"global.index-url='{nowhere}'")
    assert said.startswith(f"There is no network: {nowhere} does not answer")
    assert "run the same command again" in said


def test_a_machine_with_wheels_of_its_own_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "require_network", lambda address: pytest.fail(f"asked {address}"))
    packages.require_index(":env:.find-links='/wheels'")
    packages.require_index("global.no-index='true'")


def test_a_disk_without_room_is_said_before_anything_is_made(
    own: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(ROOT)._replace(free=149_000_000)
    monkeypatch.setattr(obstacles.shutil, "disk_usage", lambda _: usage)
    said = stopped(capfd, environment.make_own, own / "bin" / "python")
    assert f"the set-up needs 2.0 GB in {ROOT}, where 0.1 GB are free" in said
    assert not own.exists()


def test_a_disk_that_fills_up_meanwhile_is_said(
    own: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failing = own / "python"
    own.mkdir()
    failing.write_text("#!/bin/sh\necho 'OSError: [Errno 28] No space left on device' >&2\nexit 1\n")
    failing.chmod(0o755)
    with pytest.raises(SystemExit, match="2"):
        packages.install_or_stop(failing, own, "click")
    assert f"The disk of {own} is full. Make room" in capfd.readouterr().err
    assert not (own / ".downloads").exists()


def test_another_users_clone_ends_in_one_sentence(
    own: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their Python lies where only they may go: it can be seen, and not run."""
    python = own / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    python.chmod(0o644)
    (own / environment.STAMP).write_text(environment.fingerprint())
    monkeypatch.setattr(environment, "choose", lambda: (python, environment.make_own))
    monkeypatch.setattr(os, "getuid", lambda: ROOT.stat().st_uid + 1)
    said = stopped(capfd, environment.main)
    assert said.startswith(f"You may not use {python} of this clone ({ROOT}): it belongs to ")
    assert said.endswith("git clone https://github.com/scale-by-hand/scale-by-hand")


def test_an_intel_mac_is_told_that_there_is_no_torch_for_it(
    own: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(environment.platform, "machine", lambda: "x86_64")
    said = stopped(capfd, environment.make_own, own / "bin" / "python")
    assert said.startswith("There is no torch 2.11 or newer for Intel Macs") and "Colab" in said


@pytest.mark.parametrize(
    ("settings", "nvidia", "answering", "expected"),
    [
        ("", None, True, (["--extra-index-url", packages.CPU_WHEELS], "cpu")),
        (":env:.find-links='/wheels'", None, True, (["--extra-index-url", packages.CPU_WHEELS], "cpu")),
        ("", None, False, ([], "cuda")),
        (":env:.find-links='/wheels'", None, False, ([], "cpu")),
        ("global.index-url='https://mirror'", None, True, ([], "cpu")),
        ("global.no-index='true'", None, True, ([], "cpu")),
        ("", "/usr/bin/nvidia-smi", True, ([], "cuda")),
    ],
)
def test_cuda_is_not_fetched_for_a_machine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    settings: str,
    nvidia: str | None,
    answering: bool,
    expected: tuple[list[str], str],
) -> None:
    monkeypatch.setattr(packages, "answers", lambda _: answering)
    monkeypatch.setattr(packages.shutil, "which", lambda _: nvidia)
    monkeypatch.setattr(packages.Path, "exists", lambda _: False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert packages.torch_wheels(settings) == expected


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ("", packages.PACKAGES),
        ("global.extra-index-url='https://more'\n", packages.PACKAGES),
        ("global.extra-index-url='https://more'\nglobal.index-url='https://mirror'\n", "https://mirror"),
    ],
)
def test_the_index_that_somebody_has_told_pip_of_is_asked(settings: str, address: str) -> None:
    assert packages.index(settings) == address


@pytest.mark.parametrize(("status", "ends"), [(0, 0), (1, 0), (2, 2)])
def test_make_grade_ends_in_an_error_only_for_the_machines_trouble(
    tmp_path: Path, status: int, ends: int
) -> None:
    """A Python that is its own environment, and whose grader ends as it is told."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = grader ] && exit {status}\necho "$0"\n')
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "grade", f"PYTHON={python}"], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == ends, done.stderr
    assert ("Error 2" in done.stderr) == (ends == 2)


@pytest.fixture
def became(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What `make lab` becomes, where nothing but a folder for temporary files is to be had."""
    commands: list[list[str]] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    for name in (*lab.FOLDERS, "HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, "to be taken back")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append(command))
    monkeypatch.setattr(sys, "argv", ["lab", "--no-browser"])
    return commands


def test_jupyter_keeps_its_things_elsewhere_where_home_can_not_be_written(
    tmp_path: Path,
    became: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "home").write_text("a file, below which nobody can make a folder")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    lab.main()
    assert became[0][1:3] == ["-m", "jupyterlab"] and became[0][-1] == "--no-browser"
    assert os.environ["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert "home can not be written: Jupyter keeps its settings in" in capfd.readouterr().err
    for name in lab.FOLDERS:
        folder = Path(os.environ[name])
        assert folder.is_relative_to(tmp_path) and lab.can_write(folder)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no file system in which nothing can be made")
def test_what_no_folder_can_be_made_in_can_not_be_written() -> None:
    """To root, everything there says that it may be written."""
    assert not lab.can_write(Path("/proc/nowhere/.jupyter"))


def test_jupyter_opens_for_a_user_whom_the_system_does_not_know(
    tmp_path: Path,
    became: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    lab.main()
    assert became and "This user has no home" in capfd.readouterr().err
    for folder in lab.FOLDERS.values():
        assert Path(folder()).expanduser().is_relative_to(tmp_path)


def test_the_floor_is_the_oldest_torch_that_the_course_allows_and_what_colab_has() -> None:
    pins = packages.pins(floor.PINS)
    assert pins["torch"] == f"torch=={packages.oldest_torch()}.0"
    wanted = {packages.name_of(requirement) for requirement in packages.requirements(extras=False)}
    assert wanted - pins.keys() == {"tyro"}
    assert "jupyterlab" not in wanted, "Colab has none, and pip check would say so"


def test_a_python_that_does_not_run_is_not_taken_for_the_floor(tmp_path: Path) -> None:
    shim = tmp_path / "python3.13"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    assert floor.version_of(str(shim)) == ""
    assert floor.version_of(sys.executable) == "{}.{}".format(*sys.version_info)


def test_the_floor_takes_colabs_python_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "COLABS_PYTHON", "{}.{}".format(*sys.version_info))
    assert next(floor.pythons()) == sys.executable
    monkeypatch.setattr(floor, "COLABS_PYTHON", "3.99")
    assert list(floor.pythons()) == []


def test_colab_keeps_its_torch_and_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(colab, "_pip", lambda *arguments: commands.append(arguments))
    colab.install()
    dependencies, course = commands
    names = {packages.name_of(requirement) for requirement in dependencies}
    assert {"cloudpickle", "tiktoken", "rich"} <= names
    assert not names & {"torch", "jupyterlab", "ipykernel", "pytest"}
    assert course == ("--no-deps", "-e", str(ROOT))


def test_colab_says_that_its_torch_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colab.importlib.metadata, "version", lambda _: "2.9.0+cu126")
    with pytest.raises(RuntimeError, match="choose the latest version"):
        colab.install()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what Colab clones is a git repository")
def test_the_colab_cell_clones_and_installs(tmp_path: Path) -> None:
    """Run as Colab would, with this clone as the address and a pip that only writes down its arguments."""
    cell = notebooks.COLAB_CELL.format(url=ROOT.as_uri(), folder="course")
    program = f"""
import subprocess, sys, types
real = subprocess.run
def run(command, **options):
    if "pip" not in command:
        return real(command, **options)
    print("pip", *command[4:])
    return subprocess.CompletedProcess(command, 0, stderr="")
subprocess.run = run
sys.modules["google.colab"] = types.ModuleType("google.colab")
for _ in range(2):  # a learner runs the cell again
    exec({cell.replace("/content", str(tmp_path))!r}, {{}})
import infra
print(infra.__path__[0])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"pip --quiet --no-deps -e {tmp_path}/course" in lines
    assert lines[-1] == f"{tmp_path}/course/infra"


def test_a_clone_that_fails_or_was_cut_short_is_no_course(tmp_path: Path) -> None:
    cell = notebooks.COLAB_CELL.format(url=(tmp_path / "nothing").as_uri(), folder="course")
    (tmp_path / "course.part" / "infra").mkdir(parents=True)
    program = f"""
import sys, types
sys.modules["google.colab"] = types.ModuleType("google.colab")
exec({cell.replace("/content", str(tmp_path))!r}, {{}})
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert "nothing could not be fetched: is it public, and is there a network?" in done.stderr
    assert not list(tmp_path.iterdir())
