"""Shuts the ranks in: no network but loopback, no sight of the judge, nothing writable, no reference to read.

It stands on Linux namespaces through `unshare`, `mount` and `setpriv` of util-linux, which nearly every
system has. Run as a script it is the step between: inside the new namespaces, before the fork server.
"""

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def isolated_command(command: list[str], hidden: list[Path], visible: list[Path]) -> list[str]:
    """The command that runs `command` shut in.

    Args:
        hidden: folders that must be empty inside.
        visible: folders that must stay readable, also where they lie below /tmp, which is fresh inside.
    """
    plan = {
        "command": command,
        "hidden": [str(path) for path in hidden],
        "visible": [str(path.resolve()) for path in visible],
    }
    return [
        *_UNSHARE, sys.executable, "-I", str(Path(__file__).resolve()), json.dumps(plan),
    ]  # fmt: skip


_UNSHARE = (
    "unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child",
    "--mount-proc", "--",
)  # fmt: skip


def why_not() -> str:
    """Why isolation is not to be had on this machine; "" where it is."""
    missing = [name for name in ("unshare", "setpriv", "mount") if shutil.which(name) is None]
    if missing:
        return f"this system has no {' and no '.join(missing)} (util-linux)"
    trial = subprocess.run(
        [*_UNSHARE, "mount", "-t", "tmpfs", "none", "/tmp"], capture_output=True, text=True
    )
    return "" if trial.returncode == 0 else f"this system does not allow it ({trial.stderr.strip()})"


def enter(plan: dict) -> None:
    """Inside the namespaces: raise loopback, lay the mounts, drop every capability, become the command."""
    _raise_loopback()
    _mount("--make-rprivate", "/")
    kept = [(path, os.open(path, os.O_PATH)) for path in plan["visible"] if path.startswith("/tmp/")]
    for fresh in ("/tmp", "/dev/shm"):
        _mount("-t", "tmpfs", "-o", "mode=1777,nosuid,nodev", "none", fresh)
    for path, descriptor in kept:
        os.makedirs(path, exist_ok=True)
        _mount("--bind", f"/proc/self/fd/{descriptor}", path)
    for folder in plan["hidden"]:
        if os.path.isdir(folder):
            _mount("-t", "tmpfs", "-o", "size=4k,nosuid,nodev", "none", folder)
    _make_read_only()
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--"]
    os.execvp(drop[0], [*drop, *plan["command"]])


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        (_, flags, _) = struct.unpack("16sH14s", fcntl.ioctl(probe, SIOCGIFFLAGS, request))
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | IFF_UP, b""))


def _make_read_only() -> None:
    """Remount all but the fresh folders read-only, keeping each mount's other flags (the kernel insists)."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        point, options = fields[4].replace("\\040", " "), fields[5].split(",")
        if point in ("/tmp", "/dev/shm") or point.startswith(("/proc", "/dev", "/sys")):
            continue
        flags = [flag for flag in options if flag in ("nosuid", "nodev", "noexec", "noatime", "relatime")]
        _mount("-o", ",".join(["remount", "bind", "ro", *flags]), point)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    enter(json.loads(sys.argv[1]))
