"""The set-up: which Python it chooses, what it installs, and what it says when it can not."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infra import environment
from infra.colab import install as colab
from infra.lessons import notebooks

ROOT = Path(__file__).parents[1]


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


def test_every_direct_dependency_is_pinned_and_nothing_else() -> None:
    text = (ROOT / "infra" / "constraints.txt").read_text()
    pins = dict(line.split("==") for line in text.splitlines() if line and not line.startswith("#"))
    assert sorted(pins) == sorted(name_of(r) for r in environment.requirements(without=set()))
    assert pins["torch"] == "2.13.0"


def test_torch_is_left_out_where_it_is_already_there() -> None:
    rest = {name_of(requirement) for requirement in environment.requirements(without={"torch"})}
    assert "torch" not in rest
    assert {"jupyterlab", "pytest", "nbval"} <= rest


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
    assert environment.older_than(version) == minimum


def test_an_old_torch_ends_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"has torch 2\.9\.0; the course needs 2\.11 or newer"):
        environment.refuse_old_torch("2.9.0")


def test_an_old_python_ends_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(SystemExit, match=r"Python 3\.9 .* is too old: the course needs 3\.11"):
        importlib.reload(environment)


def test_an_old_python_can_read_as_far_as_that_sentence() -> None:
    ast.parse(Path(environment.__file__).read_text(), feature_version=(3, 6))


def test_a_python_without_venv_ends_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(environment, "OWN", tmp_path / ".venv")
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(SystemExit, match="its venv or ensurepip module is missing"):
        environment.own_environment(over_active=False)


def test_the_stamp_notices_another_pin_and_another_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text("torch==2.13.0\n")
    monkeypatch.setattr(environment, "CONSTRAINTS", pins)
    first = environment.fingerprint()
    pins.write_text("torch==2.14.0\n")
    second = environment.fingerprint()
    monkeypatch.setattr(environment, "ROOT", ROOT / "." / "infra" / "..")
    assert len({first, second, environment.fingerprint()}) == 3


@pytest.mark.parametrize(
    ("pips_settings", "nvidia", "expected"),
    [
        ("", None, ["--extra-index-url", environment.CPU_WHEELS]),
        ("global.index-url='https://mirror'", None, []),
        (":env:.find-links='/wheels'", None, []),
        ("", "/usr/bin/nvidia-smi", []),
    ],
)
def test_cuda_is_not_fetched_for_a_machine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, pips_settings: str, nvidia: str | None, expected: list[str]
) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=pips_settings)
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(environment.shutil, "which", lambda _: nvidia)
    monkeypatch.setattr(environment.Path, "exists", lambda _: False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert environment.cpu_only(Path("python")) == expected


def test_colab_keeps_its_torch_and_its_jupyter(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(colab, "_pip", lambda *arguments: commands.append(arguments))
    colab.install()
    dependencies, course = commands
    names = {name_of(requirement) for requirement in dependencies}
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
