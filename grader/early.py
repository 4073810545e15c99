"""The ranks' server of `grade PATH`, begun while the judge still imports its own modules, torch among them.

Which ranks will be needed is known later, when the submission has been read: what PATH means is guessed here,
by its name alone. A guess that was wrong costs a process that is ended again.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from grader.judging.catalogue import lesson_folders
from grader.ranks.faults import CannotGradeError
from grader.ranks.isolation import ROOT, Isolation
from grader.ranks.server import Server


def isolation_for(wish: str, device: str, files: Iterable[Path], reference: bool) -> Isolation:
    """How the ranks of some submissions are shut in.

    Args:
        wish: auto, on or off.
        reference: whether all of them are the course's own.
    """
    if wish == "auto" and device != "cpu":
        return Isolation("auto", why_open="on a GPU it has to be asked for, by --isolation on")
    return Isolation(wish, tuple(sorted({file.parent.resolve() for file in files})), reference)


def begin_server(path: str | None, wish: str, device: str) -> Server | None:
    """A server for what PATH most likely means; None where that is not clear, or where none starts."""
    file = _probable_file(path)
    if file is None:
        return None
    reference = file.parent == ROOT / "solutions"
    isolation = isolation_for(wish, device, [file], reference)
    with suppress(CannotGradeError, OSError):  # who needs it will hear why
        return Server(isolation, isolation.closed)
    return None


def _probable_file(path: str | None) -> Path | None:
    if path is None:
        return None
    spelled = Path(os.path.abspath(path))
    if spelled == ROOT / "solutions" or (path == "solutions" and not spelled.exists()):
        return ROOT / "solutions" / "any"
    for folder in lesson_folders():
        is_named = path in (folder.name, folder.name.partition("_")[2]) and not spelled.exists()
        if is_named or spelled == folder:
            return folder / "any"
    return spelled if spelled.is_file() else None
