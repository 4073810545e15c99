"""Reads a file that somebody has handed in: bounded in size and time, and nothing that it only points to."""

import contextlib
import json
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grader.ranks.isolation import ROOT

MAX_BYTES = 64 << 20
"""A notebook may hold many pictures."""
MAX_SOURCE = 1 << 20
"""Characters of code, in all cells together."""
MAX_PARTS = 1_000_000
"""Lists and objects in a notebook: each takes half a kilobyte to read, however short it is."""
OURS = ("solutions", "tests")
KINDS = {
    stat.S_ISLNK: "a symbolic link: hand in the file itself",
    stat.S_ISFIFO: "a pipe: hand in a file",
    stat.S_ISCHR: "a device: hand in a file",
    stat.S_ISBLK: "a device: hand in a file",
    stat.S_ISSOCK: "a socket: hand in a file",
}


class UnreadableError(ValueError):
    """What was handed in can not be graded, whatever the machine: one sentence says why.

    Args:
        sha256: of the file, where it could be read.
    """

    def __init__(self, message: str, sha256: str = "") -> None:
        super().__init__(message)
        self.sha256 = sha256


class NothingToReadError(ValueError):
    """There is no file of this name, or none that this user may read: one sentence says which."""


class _TooLongError(BaseException):
    """No exception that whoever reads would take for one of its own."""


def read_regular_file(path: Path) -> bytes:
    """The bytes of a file that is one, and lies where its name says.

    Raises:
        UnreadableError: it is a link, a pipe or a device, a folder that is called like a file, larger than
            MAX_BYTES, or lies among the course's own answers under another name.
        NothingToReadError: there is no such file, it is a folder, or this user may not read it.
    """
    _refuse_what_is_no_file(path, _asked(path, lambda: path.lstat().st_mode))
    _refuse_a_way_into_the_reference(path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = _asked(path, lambda: os.open(path, flags))
    with os.fdopen(descriptor, "rb") as file:
        _refuse_what_is_no_file(path, os.fstat(descriptor).st_mode)  # it may have changed since
        data = _asked(path, lambda: file.read(MAX_BYTES + 1))
    if len(data) > MAX_BYTES:
        raise UnreadableError(f"{path} is larger than {MAX_BYTES >> 20} MiB: clear its outputs")
    return data


def as_spelled(path: str | Path) -> Path:
    """The absolute path that somebody has written, its links unfollowed.

    Raises:
        UnreadableError: it has a ".." behind a link, from where the system goes elsewhere than the words do.
    """
    spelled = os.path.abspath(path)
    if ".." in Path(path).parts and os.path.realpath(path) != os.path.realpath(spelled):
        raise UnreadableError(f"{path} goes back by .. from where a link has led: name the file without it")
    return Path(spelled)


@contextlib.contextmanager
def at_most(seconds: int, path: Path) -> Iterator[None]:
    """End what takes more of the processor to read, such as ten thousand lines that might be magics.

    Only in the main thread, which is the one that reads for `grade`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except _TooLongError:
        raise UnreadableError(f"{path} takes more than {seconds} seconds to read") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def refuse_endless_source(path: Path, text: str) -> None:
    """Raise UnreadableError for more code, or more of a notebook, than anybody has.

    Nothing stops the compiler, or what reads JSON, once it runs.
    """
    size = len(text)
    if path.suffix == ".ipynb" and text.count("{") + text.count("[") > MAX_PARTS:
        raise UnreadableError(f"{path} has more than {MAX_PARTS:,} lists and objects: clear its outputs")
    if path.suffix == ".ipynb" and size > MAX_SOURCE:
        try:
            cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
            size = sum(len("".join(cell["source"])) for cell in cells)
        except Exception as error:  # whatever json or a missing key raises
            raise UnreadableError(f"{path} is not a notebook: {error}") from None
    if size > MAX_SOURCE:
        raise UnreadableError(
            f"{path} has more than {MAX_SOURCE >> 10} KiB of code, which nobody writes by hand"
        )


def _asked(path: Path, question: Any) -> Any:
    """What the system answers about a path; its refusals as sentences."""
    try:
        return question()
    except FileNotFoundError:
        raise NothingToReadError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise NothingToReadError(f"{path} cannot be read: {reason}") from None


def _refuse_what_is_no_file(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        handed_in = path.suffix in (".ipynb", ".py")
        raise (UnreadableError if handed_in else NothingToReadError)(
            f"{path} is a folder: give the path of a notebook (.ipynb) or a Python file (.py)"
        )
    for is_such, what in KINDS.items():
        if is_such(mode):
            raise UnreadableError(f"{path} is {what}")


def _refuse_a_way_into_the_reference(path: Path) -> None:
    """A folder on the way may be a link, as homes and checkouts are; but not to where the answers lie."""
    spelled = as_spelled(path)
    real = Path(os.path.realpath(spelled.parent))
    for name in OURS:
        if real.is_relative_to(ROOT / name) and not spelled.is_relative_to(ROOT / name):
            raise UnreadableError(
                f"{path} leads by a link to the course's own {name}: hand in a file of yours"
            )
