"""Grades the solutions on the oldest torch that the course allows: `make floor`.

An environment of its own, .floor, gets that torch and, for all else that Google Colab has, Colab's versions
(infra/colab/pins.txt). Its Python is Colab's 3.13, or the one that runs this where there is no other.
Arguments go on to `grade solutions`. Exit status: that of `grade`.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from infra import packages
from infra.environment import GIGABYTES, ROOT
from infra.obstacles import alone, require_room, say, stop

FLOOR = ROOT / ".floor"
PINS = ROOT / "infra" / "colab" / "pins.txt"
COLABS_PYTHON = "3.13"


def main() -> None:
    """Make the environment where it is not there yet, grade, and say in one line what it came to."""
    python = FLOOR / "bin" / "python"
    with alone(FLOOR.with_name(".floor.lock")):
        stamp = FLOOR / "scale-by-hand.stamp"
        if not stamp.exists() or stamp.read_text() != fingerprint():
            build(python)
            stamp.write_text(fingerprint())
    report = FLOOR / "report.json"
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "grader", "solutions", "--json", str(report), *sys.argv[1:]]
    status = subprocess.run(command, cwd=ROOT).returncode
    if not report.exists():
        stop("Nothing was graded on the oldest torch; the lines above say why.")
    result = json.loads(report.read_text())
    machine = "torch {torch}, Python {python}".format(**result["machine"])
    print("{}: {passed} of {total} exercises passed".format(machine, **result))
    sys.exit(status)


def build(python: Path) -> None:
    """Make .floor. Ends the process with a sentence if that fails."""
    require_room(ROOT, GIGABYTES["cpu"])
    base = next(pythons(), sys.executable)
    if version_of(base) != COLABS_PYTHON:
        say(f"There is no Python {COLABS_PYTHON} here, which Colab has: taking {base}, {version_of(base)}")
    say(f"Making .floor with {base}")
    if subprocess.run([base, "-m", "venv", "--clear", str(FLOOR)], stdout=sys.stderr).returncode:
        stop(f"{base} can not make a virtual environment; the lines above say why.")
    settings = packages.settings_of_pip(python)
    packages.require_index(settings)
    options, kind = packages.torch_wheels(settings)
    require_room(ROOT, GIGABYTES[kind])
    say("Installing the oldest torch that the course allows, and Colab's versions of the rest")
    both = FLOOR / "pins.txt"  # the course's own pin where Colab has none
    both.write_text("\n".join((packages.pins(packages.CONSTRAINTS) | packages.pins(PINS)).values()))
    packages.install_or_stop(python, FLOOR, *options, "-c", str(both), "-e", str(ROOT))
    if subprocess.run([str(python), "-m", "pip", "check"], stdout=sys.stderr).returncode:
        stop("The course's packages do not go with Colab's; the lines above say which.")


def pythons() -> Iterator[str]:
    """Pythons of Colab's version that run here, wherever people keep them."""
    found = [sys.executable, shutil.which(f"python{COLABS_PYTHON}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found += sorted(map(str, pyenv.glob(f"versions/{COLABS_PYTHON}.*/bin/python")), reverse=True)
    if uv := shutil.which("uv"):
        command = [uv, "python", "find", COLABS_PYTHON]
        found.append(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    yield from (python for python in found if python and version_of(python) == COLABS_PYTHON)


def version_of(python: str) -> str:
    """Such as "3.13"; "" of one that does not run, as pyenv's stand-ins for what is not chosen."""
    command = [python, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def fingerprint() -> str:
    """What .floor is made from."""
    sources = [packages.project(), PINS.read_text(), packages.CONSTRAINTS.read_text(), ROOT]
    return hashlib.sha256(repr(sources).encode()).hexdigest()


if __name__ == "__main__":
    main()
