"""What the machine, or the grader itself, gets wrong: a sentence, and a file for whoever mends it."""

import contextlib
import errno
import os
import tempfile
import traceback
from pathlib import Path

WHAT_TO_DO = {
    errno.ENOSPC: "there is no space left on a disk, here or in the folder for temporary files: free some",
    errno.EDQUOT: "your quota on a disk is used up: free some space",
    errno.EMFILE: "this process may open no more files: raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has no more files to open: end some programs",
    errno.EAGAIN: "this machine lets you start no more processes: end some programs",
    errno.ENOMEM: "this machine has no memory left: end some programs",
    errno.EROFS: "what has to be written lies on a read-only disk",
}


class CannotGradeError(RuntimeError):
    """The machine, or the grader itself, failed: never the learner's fault."""


def unforeseen(error: BaseException) -> str:
    """A sentence on an error that nobody expected, and where its traceback lies."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    if number in WHAT_TO_DO:
        return f"{WHAT_TO_DO[number]}, and grade again ({_one_line(error)})"
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        return (
            f"this Python has no {error.name}: `make grade` sets up what the course needs, "
            "in an environment of its own"
        )
    file = keep_traceback(error)
    where = f"its traceback is in {file}" if file else "its traceback could not be written to a file"
    return (
        f"this is a fault of the grader, not of the submission: {_one_line(error)}; please report it, {where}"
    )


def keep_traceback(error: BaseException) -> str:
    """The file that an error's traceback was written to; "" where no folder takes one."""
    text = "".join(traceback.format_exception(error))
    for folder in (tempfile.gettempdir, os.getcwd):
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(".txt", "scale-by-hand-fault-", folder())
            os.close(descriptor)
            Path(name).write_text(text, encoding="utf-8", errors="backslashreplace")
            return name
    return ""


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
