"""What may stand in the way of a set-up, looked for before it begins and told in one sentence.

Another set-up in the same place, no network, a disk without room, a folder of somebody else's. All of it is
the machine's affair: exit status 2.
"""

import contextlib
import fcntl
import os
import pwd
import shutil
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

MACHINE_TROUBLE = 2
"""Exit status of whatever is not the learner's doing; `grade` has the same."""
PATIENCE = 10
"""Seconds until a server that has not answered counts as out of reach."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def stop(sentence: str) -> NoReturn:
    """End the process with a sentence: what is wrong, and what to do next."""
    say(sentence)
    sys.exit(MACHINE_TROUBLE)


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Let one set-up at a time into a place. A second one says that it waits; a dead one holds nothing."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another set-up is under way in {lock.parent}: waiting until it has ended")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: nothing can be said of others
            pass
        yield


def answers(address: str) -> bool:
    """Whether a server can be reached: whatever it replies, it was there."""
    try:
        urllib.request.urlopen(address, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # pip may know a certificate that Python does not
    except (OSError, ValueError):
        return False
    return True


def require_network(address: str) -> None:
    """End the process if the index that pip would ask is out of reach."""
    if not answers(address):
        stop(
            f"There is no network: {address} does not answer, and the set-up has packages to fetch. Connect "
            "(behind a proxy: export https_proxy=...), and run the same command again. Afterwards the course "
            "needs no network."
        )


def require_room(folder: Path, gigabytes: float) -> None:
    """End the process if a folder's disk has less room than that."""
    free = shutil.disk_usage(folder).free / 1e9
    if free < gigabytes:
        stop(
            f"The disk is too full: the set-up needs {gigabytes:.1f} GB in {folder}, where {free:.1f} GB are "
            "free. Make room, or clone the course to a larger disk, and run the same command again."
        )


def refuse_clone(folder: Path, deed: str, address: str) -> NoReturn:
    """End the process: what is to be done may not be done in this clone, which is another's or read-only."""
    owner = folder.stat().st_uid
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = f"user {owner}"
    why = f"it belongs to {name}" if owner != os.getuid() else "it is read-only"
    stop(
        f"You may not {deed} of this clone ({folder}): {why}. Make a clone of your own, and run the same "
        f"command there: git clone {address}"
    )
