"""Finds the Python that the course runs with, setting it up on first use; prints its path.

Three cases:
- the active environment (virtualenv, conda, a pod's image) has torch: it is used, torch is left as it
  is, and the rest is installed there;
- the same, but nothing can be installed there: .venv is laid over it and sees its torch;
- no torch: .venv is made with exactly the versions of infra/constraints.txt.

The second time this takes a tenth of a second: a stamp inside the environment says what it was made
from. Progress goes to stderr. Any problem ends in one sentence and exit status 1.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - somebody's python3 may well be older
    sys.exit(
        "Python {}.{} ({}) is too old: the course needs 3.11 or newer. If you have one, name it: "
        "make lab PYTHON=python3.12".format(*sys.version_info[:2], sys.executable)
    )

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / ".venv"
CONSTRAINTS = ROOT / "infra" / "constraints.txt"
STAMP = "scale-by-hand.stamp"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    """Print the path of a Python that has everything. Ends the process where there is none."""
    is_own = Path(sys.prefix).resolve() == OWN.resolve()
    if os.environ.get("SCALE_BY_HAND_FRESH") or is_own or not has("torch"):
        python = own_environment(over_active=False)
        if not is_ready(python):
            say("Installing the course into .venv: once, a few minutes")
            pip(python, *cpu_only(python), "-c", str(CONSTRAINTS), "-e", f"{ROOT}[test]")
    else:
        refuse_old_torch(importlib.metadata.version("torch"))
        python = Path(sys.executable) if can_install_here() else own_environment(over_active=True)
        if not is_ready(python):
            say(f"Using the torch of {sys.prefix}; installing the rest into {prefix_of(python)}")
            pip(python, *requirements(without={"torch"}))
            pip(python, "--no-deps", "-e", str(ROOT))
            if python.is_relative_to(OWN):  # else Jupyter would find the kernel of the environment below
                run([str(python), "-m", "ipykernel", "install", "--sys-prefix"], "Adding Jupyter's kernel")
    stamp_of(python).write_text(fingerprint())
    print(python)


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(command: list[str], what: str) -> None:
    """Run a command with its output on stderr; end the process with a sentence if it fails."""
    if subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(f"{what} failed; the lines above say why. Mend that, and run the same command again.")


def pip(python: Path, *arguments: str) -> None:
    """Install into the environment of a Python."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    run(command, "Installing with pip")


def project() -> dict:
    """pyproject.toml's `project` table: the one list of dependencies."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(*, without: set[str], extras: bool = True) -> list[str]:
    """What pyproject.toml asks for, except the packages of these names."""
    wanted = list(project()["dependencies"])
    if extras:
        wanted += [w for extra in project()["optional-dependencies"].values() for w in extra]
    return [w for w in wanted if re.split(r"[^\w.-]", w)[0] not in without]


def older_than(version: str) -> str:
    """The oldest torch that pyproject.toml allows, if this one is older; else nothing."""
    minimum = next(r.partition(">=")[2] for r in project()["dependencies"] if r.startswith("torch>="))
    numbers = [int(n) for n in re.findall(r"\d+", version)[:2]]
    return minimum if numbers < [int(n) for n in minimum.split(".")] else ""


def refuse_old_torch(version: str) -> None:
    """End the process if the active environment's torch is too old."""
    minimum = older_than(version)
    if minimum:
        sys.exit(
            f"The active environment ({sys.prefix}) has torch {version}; the course needs {minimum} or "
            "newer. Update it, or deactivate that environment, or run `SCALE_BY_HAND_FRESH=1 make lab` for a "
            "torch of the course's own."
        )


def can_install_here() -> bool:
    """Whether pip may write into the active environment."""
    managed = (
        Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    )  # PEP 668: a distribution's own Python
    is_virtual = sys.prefix != sys.base_prefix
    writable = os.access(sysconfig.get_path("purelib"), os.W_OK) and os.access(sys.prefix, os.W_OK)
    return writable and has("pip") and (is_virtual or not managed.exists())


def own_environment(*, over_active: bool) -> Path:
    """The Python of .venv, which is made if it is missing, broken, or of the other kind."""
    python = OWN / "bin" / "python"
    works = subprocess.run([str(python), "-c", "pass"]).returncode == 0 if python.exists() else False
    settings = (OWN / "pyvenv.cfg").read_text() if works else ""
    sees_below = "include-system-site-packages = true" in settings
    is_over_this = f"home = {Path(sys.executable).parent}\n" in settings
    if works and sees_below == over_active and (is_over_this or not over_active):
        return python
    if over_active and sys.prefix != sys.base_prefix:
        sys.exit(f"Nothing can be installed into {sys.prefix}: it has no pip, or is not yours to write.")
    say(f"Making .venv with Python {'.'.join(map(str, sys.version_info[:3]))}")
    kind = ["--system-site-packages"] if over_active else []
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", *kind, str(OWN)], stdout=sys.stderr, stderr=subprocess.PIPE
    )
    if made.returncode:
        sys.exit(
            f"{sys.executable} can not make a virtual environment: its venv or ensurepip module is missing. "
            "On Debian and Ubuntu: sudo apt install python3-venv"
        )
    return python


def cpu_only(python: Path) -> list[str]:
    """pip's options for torch without CUDA, gigabytes smaller, on a Linux machine without an NVIDIA GPU.

    Nothing where somebody has told pip which index to use.
    """
    settings = subprocess.run(
        [str(python), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    told = re.search(r"index|find-links", settings)
    has_gpu = shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists()
    if sys.platform != "linux" or has_gpu or told:
        return []
    return ["--extra-index-url", CPU_WHEELS]


def prefix_of(python: Path) -> Path:
    return OWN if python.is_relative_to(OWN) else Path(sys.prefix)


def stamp_of(python: Path) -> Path:
    return prefix_of(python) / STAMP


def fingerprint() -> str:
    """What an environment is made from; it also differs between two clones that share one."""
    sources = f"{project()} {CONSTRAINTS.read_text()} {Path(__file__).read_text()}"
    return f"{hashlib.sha256(sources.encode()).hexdigest()} {ROOT}\n"


def is_ready(python: Path) -> bool:
    stamp = stamp_of(python)
    return stamp.exists() and stamp.read_text() == fingerprint()


if __name__ == "__main__":
    main()
