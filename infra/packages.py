"""What the course needs of other people's packages, and pip, which fetches them."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from infra.obstacles import answers, require_network, say, stop

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "infra" / "constraints.txt"
PACKAGES = "https://pypi.org/simple/"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


def project() -> dict:
    """pyproject.toml's `project` table: the one list of dependencies."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(*, without: Iterable[str] = (), extras: bool = True) -> list[str]:
    """What pyproject.toml asks for, except the packages of these names."""
    wanted = list(project()["dependencies"])
    if extras:
        wanted += [w for extra in project()["optional-dependencies"].values() for w in extra]
    return [w for w in wanted if name_of(w) not in without]


def name_of(requirement: str) -> str:
    """The package that a line of requirements is about, spelled in the one way that pip compares."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def oldest_torch() -> str:
    """The oldest version of torch that pyproject.toml allows."""
    return next(r.partition(">=")[2] for r in project()["dependencies"] if r.startswith("torch>="))


def older_than(version: str) -> str:
    """The oldest torch that pyproject.toml allows, if this one is older; else nothing."""
    minimum = oldest_torch()
    numbers = [int(n) for n in re.findall(r"\d+", version)[:2]]
    return minimum if numbers < [int(n) for n in minimum.split(".")] else ""


def tested(wanted: list[str]) -> list[str]:
    """The same, with the version of constraints.txt for each that this Python lacks: no other is touched."""
    here = {name_of(found.name) for found in importlib.metadata.distributions()}
    pinned = pins(CONSTRAINTS)
    return [each if name_of(each) in here else pinned[name_of(each)] for each in wanted]


def pins(file: Path) -> dict[str, str]:
    """The lines of a file of constraints, by the name of their package."""
    lines = file.read_text().splitlines()
    return {name_of(line): line for line in lines if line and not line.startswith("#")}


def install(python: Path, prefix: Path, *arguments: str) -> str:
    """Install into the environment `prefix` of a Python; nothing, or what pip complained of.

    Downloads are kept beside it meanwhile: /tmp is small on many machines, and on some it is memory.
    """
    downloads = prefix / ".downloads"
    downloads.mkdir(exist_ok=True)
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "TMPDIR": str(downloads)}
    complaints = []
    try:
        with subprocess.Popen(
            command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, env=environment
        ) as pip:
            for line in pip.stderr or ():
                say(line.rstrip("\n"))
                complaints.append(line)
    finally:
        shutil.rmtree(downloads, ignore_errors=True)
    return ("".join(complaints) or "no reason given") if pip.returncode else ""


def install_or_stop(python: Path, prefix: Path, *arguments: str) -> None:
    """Install; end the process with the likely reason if that fails."""
    if complaints := install(python, prefix, *arguments):
        give_up(prefix, settings_of_pip(python), complaints)


def give_up(prefix: Path, settings: str, complaints: str) -> NoReturn:
    """End the process with the likely reason why pip has failed."""
    if "No space left on device" in complaints or "Disk quota exceeded" in complaints:
        stop(f"The disk of {prefix} is full. Make room, and run the same command again.")
    require_network(index(settings))
    stop("Installing with pip failed; the lines above say why. Mend that, and run the same command again.")


def settings_of_pip(python: Path) -> str:
    """What somebody has told pip, in its files or in variables: `pip config list`."""
    command = [str(python), "-m", "pip", "config", "list"]
    return subprocess.run(command, capture_output=True, text=True).stdout


def index(settings: str) -> str:
    """The address where pip looks for packages."""
    told = re.search(r"\bindex-url='([^']*)'", settings.replace("extra-index-url", ""))
    return told[1] if told else PACKAGES


def require_index(settings: str) -> None:
    """End the process if pip could fetch nothing. Where it may have wheels on this machine, it tries."""
    if not re.search(r"find-links|no-index", settings):
        require_network(index(settings))


def torch_wheels(settings: str) -> tuple[list[str], str]:
    """pip's options for torch, and which it gets: on Linux without an NVIDIA GPU the one for the CPU.

    That is gigabytes smaller, and comes from an index of its own; not where somebody has told pip to ask
    another in the place of PyPI.
    """
    if sys.platform != "linux":
        return [], "cpu"
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        return [], "cuda"
    if index(settings) == PACKAGES and "no-index" not in settings and answers(CPU_WHEELS):
        return ["--extra-index-url", CPU_WHEELS], "cpu"
    if re.search("find-links|index", settings):
        return [], "cpu"  # may be there, as somebody has said where to look
    say(f"{CPU_WHEELS} does not answer: torch comes with CUDA, which takes 5 GB instead of one")
    return [], "cuda"
