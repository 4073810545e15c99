"""Finds the Python that the course runs with, setting it up on first use; prints its path.

Three cases:
- the active environment (virtualenv, conda, a pod's image) has torch: it is used, what is there stays as it
  is, and the rest is installed there, in the versions of infra/constraints.txt where these go with it;
- the same, but nothing can be installed there: .venv is laid over it and sees its torch;
- no torch: .venv is made with exactly the versions of infra/constraints.txt.

The second time this takes a tenth of a second: a stamp inside the environment says what it was made
from. Progress goes to stderr. Any problem ends in one sentence and exit status 2.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - somebody's python3 may well be older
    sys.stderr.write(
        "Python {}.{} ({}) is too old: the course needs 3.11 or newer. If you have one, name it: "
        "make lab PYTHON=python3.12\n".format(*sys.version_info[:2], sys.executable)
    )
    sys.exit(2)

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

from infra import packages
from infra.obstacles import alone, refuse_clone, require_room, say, stop

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / ".venv"
STAMP = "scale-by-hand.stamp"
GIGABYTES = {"cpu": 2.0, "cuda": 8.0, "rest": 0.7}
"""Room that a set-up takes at most, downloads included: with torch for the CPU or CUDA, or without torch."""


def main() -> None:
    """Print the path of a Python that has everything. Ends the process where there is none."""
    try:
        python, make = choose()
        over_active = make is lay_over_active
        if not is_ready(python, over_active):
            with alone(lock_of(python)):
                if not is_ready(python, over_active):  # whom this one waited for may have made it
                    tell_other_clone(stamp_of(python))
                    make(python)
                    stamp_of(python).write_text(fingerprint())
    except PermissionError as error:
        refuse_clone(ROOT, f"use {error.filename}", packages.project()["urls"]["Repository"])
    print(python)


def choose() -> tuple[Path, Callable[[Path], None]]:
    """The Python that the course is to run with, and what makes it ready."""
    is_own = Path(sys.prefix).resolve() == OWN.resolve()
    own = OWN / "bin" / "python"
    if os.environ.get("SCALE_BY_HAND_FRESH") or is_own or not has("torch"):
        return own, make_own
    refuse_old_torch(importlib.metadata.version("torch"))
    return (Path(sys.executable), complete) if can_install_here() else (own, lay_over_active)


def make_own(python: Path) -> None:
    """Make .venv with exactly the versions that are tested together."""
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        stop(
            f"There is no torch {packages.oldest_torch()} or newer for Intel Macs, nor for an Intel Python "
            "on another Mac (take one for arm64). Use the course on Colab, or on a Linux machine."
        )
    has_torch = any(OWN.glob("lib/python*/site-packages/torch/version.py"))
    require_room(ROOT, GIGABYTES["rest" if has_torch else "cpu"])
    if not works(python, over_active=False):
        make_venv()
    settings = packages.settings_of_pip(python)
    packages.require_index(settings)
    options, kind = packages.torch_wheels(settings)
    require_room(ROOT, GIGABYTES["rest" if has_torch else kind])
    say("Installing the course into .venv: once, a few minutes")
    everything = f"{ROOT}[{','.join(packages.project()['optional-dependencies'])}]"
    packages.install_or_stop(python, OWN, *options, "-c", str(packages.CONSTRAINTS), "-e", everything)


def lay_over_active(python: Path) -> None:
    """Make .venv over the active environment, whose torch it sees, and complete it there."""
    if not works(python, over_active=True):
        if sys.prefix != sys.base_prefix:
            stop(
                f"Nothing can be installed into {sys.prefix}: it has no pip, or is not yours to write. Put "
                "pip into it (uv pip install pip), or deactivate it, or run `SCALE_BY_HAND_FRESH=1 make lab` "
                "for an environment of the course's own."
            )
        make_venv("--system-site-packages")
    complete(python)
    kernel = [str(python), "-m", "ipykernel", "install", "--sys-prefix"]  # else Jupyter takes the one below
    if subprocess.run(kernel, stdout=sys.stderr).returncode:
        stop("Jupyter's kernel could not be added; the lines above say why. Mend that, and run this again.")


def complete(python: Path) -> None:
    """Install what is missing beside torch; what is there is left as it is."""
    prefix = prefix_of(python)
    require_room(prefix, GIGABYTES["rest"])
    settings = packages.settings_of_pip(python)
    packages.require_index(settings)
    say(f"Using the torch of {sys.prefix}; installing the rest into {prefix}")
    wanted = packages.requirements(without={"torch"})
    complaints = packages.install(python, prefix, *packages.tested(wanted))
    if "ResolutionImpossible" in complaints:
        packages.require_network(packages.index(settings))  # without one, pip speaks of conflicts, too
        say("The versions that the course is tested with do not go with what is here: pip chooses others")
        complaints = packages.install(python, prefix, *wanted)
    if complaints:
        packages.give_up(prefix, settings, complaints)
    packages.install_or_stop(python, prefix, "--no-deps", "-e", str(ROOT))


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def refuse_old_torch(version: str) -> None:
    """End the process if the active environment's torch is too old."""
    minimum = packages.older_than(version)
    if minimum:
        stop(
            f"The active environment ({sys.prefix}) has torch {version}; the course needs {minimum} or "
            "newer. Update it, or deactivate that environment, or run `SCALE_BY_HAND_FRESH=1 make lab` for a "
            "torch of the course's own."
        )


def can_install_here() -> bool:
    """Whether pip may write into the active environment."""
    managed = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"  # PEP 668: a distribution's Python
    is_virtual = sys.prefix != sys.base_prefix
    writable = os.access(sysconfig.get_path("purelib"), os.W_OK) and os.access(sys.prefix, os.W_OK)
    return writable and has("pip") and (is_virtual or not managed.exists())


def works(python: Path, *, over_active: bool) -> bool:
    """Whether .venv has a Python that runs, and is of the kind that is wanted.

    Raises:
        PermissionError: it is there, and not for this user.
    """
    try:
        runs = subprocess.run([str(python), "-c", "pass"], stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        return False
    settings = (OWN / "pyvenv.cfg").read_text() if runs else ""
    sees_below = "include-system-site-packages = true" in settings
    is_over_this = f"home = {Path(sys.executable).parent}\n" in settings
    return runs and sees_below == over_active and (is_over_this or not over_active)


def make_venv(*options: str) -> None:
    """Make .venv anew with this Python."""
    say(f"Making .venv with Python {'.'.join(map(str, sys.version_info[:3]))}")
    command = [sys.executable, "-m", "venv", "--clear", *options, str(OWN)]
    if subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE).returncode:
        stop(
            f"{sys.executable} can not make a virtual environment: its venv or ensurepip module is missing. "
            "On Debian and Ubuntu: sudo apt install python3-venv"
        )


def prefix_of(python: Path) -> Path:
    return OWN if python.is_relative_to(OWN) else Path(sys.prefix)


def stamp_of(python: Path) -> Path:
    return prefix_of(python) / STAMP


def lock_of(python: Path) -> Path:
    """Not inside .venv, which may be made anew."""
    prefix = prefix_of(python)
    return OWN.with_name(".venv.lock") if prefix == OWN else prefix / "scale-by-hand.lock"


def fingerprint() -> str:
    """What an environment is made from; it also differs between two clones that share one."""
    sources = f"{packages.project()} {packages.CONSTRAINTS.read_text()} {Path(__file__).read_text()}"
    return f"{hashlib.sha256(sources.encode()).hexdigest()} {ROOT}\n"


def tell_other_clone(stamp: Path) -> None:
    """Say that another clone shares this environment: it runs the grader of one of them at a time."""
    former = stamp.read_text().partition(" ")[2].strip() if stamp.exists() else ""
    if former not in ("", str(ROOT)) and Path(former).is_dir():
        say(
            f"{stamp.parent} was set up for {former}. From now on its grader and lessons are those of "
            f"{ROOT}; `make lab` in {former} takes it back"
        )


def is_ready(python: Path, over_active: bool) -> bool:
    """Whether the environment is the one that a set-up would make now, and its Python runs."""
    stamp = stamp_of(python)
    is_made = stamp.exists() and stamp.read_text() == fingerprint()
    return is_made and (prefix_of(python) != OWN or works(python, over_active=over_active))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("Stopped. The same command goes on where this ended.")
        sys.exit(130)
