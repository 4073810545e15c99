"""Shuts the ranks in: no network but loopback, no sight of the judge, nothing writable, no reference.

It stands on Linux namespaces through `unshare` and `setpriv` of util-linux, which nearly every system has.
Run as a script it is the step between: inside the new namespaces, before the fork server.

What holds, and for whom:

- Always. The judge runs, imports and unpickles nothing of a submission; it compares what arrives as data
  with numbers that never were in a rank. The clock and the limits are kept outside the ranks, and what the
  ranks have started ends with their run. Inputs are drawn anew for every grading.
- Shut in. The kernel keeps the reference, its history, the judge's processes, the network, and every place
  to write but two fresh folders out of reach.
- Not shut in. grader.tampering refuses what a person would try: opening, importing or printing the
  reference. Code that calls the C library, or a program of its own, gets past it, and can hurt the machine
  as any program of this user can.
- Never certain. The recorder shares a process with the submission. A submission that takes the grader's own
  frames apart can forge what was recorded, or talk past torch through files that the ranks share. It must
  still compute the right values; calls of torch.distributed that the recorder missed are noticed by their
  number, and replaced tools by their identity. Whoever grades for a certificate reads the code as well.
- On the learner's own machine the learner owns everything, this file too: such a score is formative.
"""

import ctypes
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
KEPT_FLAGS = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": 8, "noatime": 1 << 10, "relatime": 1 << 21}
FRESH_BYTES = 1 << 30
"""Room in each of the two folders that can be written: /tmp and /dev/shm."""


def isolated_command(command: list[str], hidden: list[Path], visible: list[Path]) -> list[str]:
    """The command that runs `command` shut in.

    Args:
        hidden: folders that must be empty inside.
        visible: folders that must stay readable, also where they lie below /tmp, which is fresh inside.
    """
    # Of /tmp itself only Python files are kept: the fresh one takes its place.
    kept = [one for path in visible for one in (path.glob("*.py") if path == Path("/tmp") else [path])]
    plan = {
        "command": command,
        "hidden": [str(path) for path in hidden],
        "visible": [str(path.resolve()) for path in kept],
    }
    return [
        *_UNSHARE,
        sys.executable,
        "-I",
        str(Path(__file__).resolve()),
        json.dumps(plan),
    ]


_UNSHARE = (
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "--net",
    "--pid",
    "--ipc",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--",
)


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
    _mount("/", flags=MS_REC | MS_PRIVATE)
    below = [path for path in plan["visible"] if path.startswith("/tmp/")]
    kept = [(path, os.open(path, os.O_PATH), os.path.isdir(path)) for path in below]
    for fresh in ("/tmp", "/dev/shm"):
        _mount(fresh, "tmpfs", flags=MS_NOSUID | MS_NODEV, options=f"mode=1777,size={FRESH_BYTES}")
    for path, descriptor, is_folder in kept:
        os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
        if not is_folder:
            Path(path).touch()
        _mount(path, f"/proc/self/fd/{descriptor}", MS_BIND)
    for folder in plan["hidden"]:
        if os.path.isdir(folder):
            _mount(folder, "tmpfs", flags=MS_NOSUID | MS_NODEV, options="size=4k")
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
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        if point in ("/tmp", "/dev/shm") or point.startswith(("/proc", "/dev", "/sys")):
            continue
        kept = sum(KEPT_FLAGS.get(option, 0) for option in fields[5].split(","))
        _mount(point, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def _mount(target: str, source: str = "none", flags: int = 0, options: str = "") -> None:
    """The system call itself: `mount` the program would look up what a descriptor's path is called now."""
    kind = source if source == "tmpfs" else "none"
    arguments = (source.encode(), target.encode(), kind.encode(), flags, options.encode())
    if ctypes.CDLL(None, use_errno=True).mount(*arguments) != 0:
        sys.exit(f"the mount on {target} failed: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    enter(json.loads(sys.argv[1]))
