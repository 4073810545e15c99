"""Shuts the ranks in: no network but loopback, no sight of the judge, nothing writable, no reference.

It stands on Linux namespaces through `unshare` of util-linux, which nearly every system has. What the ranks
see is a root of their own with what is named here and nothing else: ranks.box lays it out, from inside.

What holds, and for whom:

- Always. The judge runs, imports and unpickles nothing of a submission; it compares what arrives as data
  with numbers that never were in a rank. The clock and the limits are kept outside the ranks, and what the
  ranks have started ends with their run. Inputs are drawn anew for every grading, and for a second try.
- Shut in. The kernel keeps out of reach: the reference, its history, the checks, other people's sockets and
  files (but those beside the submission: a class hands in a folder each), the judge's processes and
  variables, the network, and every place to write but two fresh folders, which exercises that are lent a
  part of the reference share with no others (with a GPU also what a process may change of itself in /proc:
  CUDA names its threads there). No process outlives its server, and none holds a lease on a file.
  Who grades as root has ranks that are root in name: no capability, no device, no setting of the kernel.
- Not shut in. grader.beside.tampering refuses what a person would try: opening, importing or printing the
  reference. Code that calls the C library, or what opens files in C++ such as torch.from_file, or a program
  of its own, gets past it, and can hurt the machine as any program of this user can. A process that gives up
  its parents and its environment, and kills the keepers of its run, outlives the grading.
- Never certain. The recorder shares a process with the submission. A submission that takes the grader's own
  frames apart can forge what was recorded, or talk past torch through files that the ranks share. It must
  still compute the right values; calls of torch.distributed that the recorder missed are noticed by their
  number, and replaced tools by their identity. Lesson 07 alone changes messages on their way, to see whether
  what comes out came by them. A copy of somebody's answer is an answer: nothing here tells who wrote it.
  Two gradings at one time on one machine can signal to each other, by locks or by load; one grading's
  exercises that are lent something run after the others. Whoever grades for a certificate reads the code.
- On the learner's own machine the learner owns everything, this file too: such a score is formative.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"),
    *(f"/etc/{name}" for name in ("alternatives", "fonts", "group", "hosts", "localtime", "nsswitch.conf")),
    *(f"/etc/{name}" for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "passwd", "ssl/certs")),
    *("/sys/devices/system/cpu", "/sys/devices/system/node"),
)
DEVICES = ("null", "zero", "full", "random", "urandom")
VARIABLES = ("PATH", "LANG", "LANGUAGE", "TZ", "TERM", "LD_LIBRARY_PATH")
FAMILIES = ("LC_", "GLOO_", "NCCL_", "CUDA_", "OMP_", "MKL_", "OPENBLAS_")
"""How variables begin that the libraries read. All others stay outside: a secret has no certain name."""
_UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--ipc"),
    *("--fork", "--kill-child", "--"),
)


@dataclass
class Isolation:
    """Whether the ranks of a grading are shut in, and what they see then; its launchers share it."""

    wish: str = "off"
    """off; auto: where the machine allows it; on: or not at all."""
    visible: tuple[Path, ...] = ()
    """Folders whose files may be imported, such as the submission's."""
    reference: bool = False
    """Whether the ranks see the course's own solutions, because these are what they run."""
    why_open: str = ""
    """Why "auto" did without, as a sentence; set by the first launcher that could not start shut in."""

    @property
    def closed(self) -> bool:
        """Whether the next ranks are to be shut in; after a grading, whether all of them were."""
        return self.wish != "off" and not self.why_open


def isolated_command(command: list[str], isolation: Isolation) -> list[str]:
    """The command that runs `command` shut in.

    Raises:
        OSError: this system has no `unshare`.
    """
    if shutil.which("unshare") is None:
        raise OSError("this system has no `unshare` (of util-linux)")
    shown, links = _through_links(_shown(isolation))
    # The course itself may lie in a folder that is called as what is hidden.
    hidden = [path for path in _hidden(isolation) if not ROOT.is_relative_to(path)]
    shown = [path for path in shown if not any(Path(path).is_relative_to(folder) for folder in hidden)]
    plan = {
        "command": command,
        "directory": str(ROOT),
        "shown": shown,
        "links": links,
        "devices": [*DEVICES, *_gpu_devices()],
        "hidden": [str(path) for path in hidden],
        "threads_have_names": bool(_gpu_devices()),  # CUDA does not start where it can not give them
    }
    return [
        *_UNSHARE,
        sys.executable,
        "-I",
        str(Path(__file__).resolve().with_name("box.py")),
        json.dumps(plan),
    ]


def why_not() -> str:
    """Why isolation is not to be had on this machine; "" where it is: a small program has run shut in."""
    try:
        trial = isolated_command([sys.executable, "-I", "-c", "pass"], Isolation("on"))
    except OSError as error:
        return str(error)
    done = subprocess.run(trial, capture_output=True, text=True)
    return "" if done.returncode == 0 else last_line(done.stderr)


def last_line(text: str) -> str:
    """The line of a program's complaint that says what it is about: of a traceback, the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"


def inner_environment() -> dict[str, str]:
    """The environment variables that ranks which are shut in are given; a network card's name is none."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in VARIABLES or (name.startswith(FAMILIES) and not name.endswith("_SOCKET_IFNAME"))
    }
    return {**passed, "HOME": "/tmp"}


def _shown(isolation: Isolation) -> Iterator[Path]:
    """What is there to see, but for what is hidden in it."""
    yield from (Path(path) for path in SYSTEM)
    yield from (Path(path) for path in (sys.executable, sys.prefix, sys.base_prefix, sys.base_exec_prefix))
    torch = find_spec("torch")
    yield from (Path(folder) for folder in (torch.submodule_search_locations or [] if torch else []))
    for entry in map(Path, sys.path):
        if any(entry.glob("*.dist-info")):  # where packages are installed, not where somebody stands
            yield entry
    yield from map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)))
    if _gpu_devices():
        yield Path("/sys")
    yield from (
        ROOT / name for name in ("grader", "nanogpt", *(["solutions"] if isolation.reference else []))
    )
    for folder in isolation.visible:
        yield from _importable(folder)


def _importable(folder: Path) -> Iterator[Path]:
    """A submission's folder; of one that holds much else, such as a home, its Python files alone."""
    folder = folder.resolve()
    wide = {Path("/"), Path("/tmp"), Path("/var/tmp"), Path.home().resolve(), *ROOT.parents, ROOT}
    yield from folder.glob("*.py") if folder in wide else [folder]


def _hidden(isolation: Isolation) -> Iterator[Path]:
    """Truth that lies within what is shown: the reference, its copies, the checks, and their history."""
    yield from (ROOT / name for name in (".git", "build", "tests", "grader/judging"))
    yield from (lesson / "checks" for lesson in (ROOT / "lessons").glob("*"))
    if not isolation.reference:
        yield from (Path(entry) / "solutions" for entry in (ROOT, *filter(None, sys.path)))
        for folder in isolation.visible:
            yield from (folder.resolve() / name for name in (".git", "solutions", "build/lib/solutions"))


def _gpu_devices() -> list[str]:
    return sorted(path.name for path in Path("/dev").glob("nvidia*") if path.is_char_device())


def _through_links(paths: Iterable[Path]) -> tuple[list[str], dict[str, str]]:
    """The real places of paths, none inside another, and the links that lead there: link → target."""
    links: dict[str, str] = {}
    real = set()
    for path in paths:
        if os.path.exists(path):
            real.add(str(path.resolve()))
            links |= _links_on(path)
    shown = [path for path in sorted(real) if not any(str(above) in real for above in Path(path).parents)]
    return shown, links


def _links_on(path: Path) -> dict[str, str]:
    """Every symbolic link on the way to an existing path, also those that links lead to."""
    found: dict[str, str] = {}
    waiting = [path.absolute()]
    while waiting:
        here = Path("/")
        for part in waiting.pop().parts[1:]:
            here = Path(os.path.normpath(here / part))
            if str(here) not in found and here.is_symlink():
                target = os.readlink(here)
                found[str(here)] = target
                waiting.append(here.parent.resolve() / target)
    return found
