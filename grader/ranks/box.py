"""The step between: run inside fresh namespaces, it lays out what is to be seen and becomes the fork server.

Nothing is taken over from the machine but what the plan names. What is mounted where outside, below /tmp or
anywhere else, and whether there is a /dev/shm, is all the same. Started by ranks.isolation; imports nothing
of ours, so that it can run before anything is there.
"""

import ctypes
import errno
import fcntl
import json
import os
import platform
import re
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_STRICTATIME = 32, 4096, 16384, 1 << 18, 1 << 24
KEPT_FLAGS = {
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": 1 << 10,
    "nodiratime": 1 << 11,
    "relatime": 1 << 21,
}
MNT_DETACH = 2
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 24, 38, 22
SECCOMP_MODE_FILTER = 2
F_SETLEASE = 1024
X32_BIT = 0x40000000
FCNTL = {"x86_64": (0xC000003E, 72), "aarch64": (0xC00000B7, 25)}
"""What the kernel calls a machine, and the number that fcntl has there."""
LAST_CAPABILITY = 63
FRESH = ("/tmp", "/dev/shm")
"""The folders that can be written: each is on a file system of its own, in memory."""
FRESH_BYTES = 1 << 30
"""Room in each of them."""
OUTSIDE = "/outside"
"""Where the machine's own root stands until everything is laid out."""


def enter(plan: dict) -> None:
    """Raise loopback, lay out the new root, drop every capability, become the command."""
    os.umask(0o022)
    raise_loopback()
    _turn_to_a_new_root()
    for folder in ("/dev", *FRESH):
        mode = "1777" if folder in FRESH else "755"
        _mount(folder, "tmpfs", MS_NOSUID, f"mode={mode},size={FRESH_BYTES}")
    for path in plan["shown"]:
        _show(path)
    for device in plan["devices"]:
        _show(f"/dev/{device}")
    links = {**plan["links"], "/dev/fd": "/proc/self/fd", "/dev/stdout": "/proc/self/fd/1"}
    for link, target in links.items():
        os.makedirs(os.path.dirname(link), exist_ok=True)
        with suppress(FileExistsError):  # it lies in what is shown
            os.symlink(target, link)
    for path in plan["hidden"]:
        _hide(path)
    _mount("/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for limit in ("user/max_user_namespaces", "kernel/shmall"):
        with suppress(OSError):  # nobody in here makes namespaces of their own, or memory without a maker
            Path("/proc/sys", limit).write_text("0")
    _call("umount2", OUTSIDE, MNT_DETACH)
    os.rmdir(OUTSIDE)
    if plan["threads_have_names"]:
        _keep_the_kernels_files_apart()
    _make_read_only(but=["/proc"] if plan["threads_have_names"] else [])
    _drop_privileges()
    _refuse_leases()
    os.chdir(plan["directory"])
    os.execv(plan["command"][0], plan["command"])


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        (_, flags, _) = struct.unpack("16sH14s", fcntl.ioctl(probe, SIOCGIFFLAGS, request))
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | IFF_UP, b""))


def _turn_to_a_new_root() -> None:
    """An empty folder becomes the root, and what was the root stands in it as OUTSIDE."""
    _call("mount", "none", "/", "none", MS_REC | MS_PRIVATE, "")
    base = next(folder for folder in ("/tmp", "/mnt", "/var", "/usr") if os.path.isdir(folder))
    _call("mount", "tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=16m")
    os.mkdir(base + OUTSIDE)
    _call("pivot_root", base, base + OUTSIDE)
    os.chdir("/")


def _mount(target: str, kind: str, flags: int, options: str = "") -> None:
    os.makedirs(target, exist_ok=True)
    _call("mount", kind, target, kind, flags, options)


def _show(path: str) -> None:
    """Bind a folder or a file of outside, with what is mounted in it, to the same place."""
    if os.path.isdir(OUTSIDE + path):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).touch()
    _call("mount", OUTSIDE + path, path, "none", MS_BIND | MS_REC, "")


def _hide(path: str) -> None:
    """An empty folder, or nothing, over what is there."""
    if os.path.isdir(path):
        _call("mount", "tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=4k")
    elif os.path.exists(path):
        _call("mount", "/dev/null", path, "none", MS_BIND, "")


def _keep_the_kernels_files_apart() -> None:
    """Whatever is in /proc and no process's becomes a mount of its own, to be made read-only alone."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() and not entry.is_symlink():
            _call("mount", str(entry), str(entry), "none", MS_BIND, "")


def _make_read_only(but: list[str]) -> None:
    """All but the fresh folders and these, keeping each mount's other flags (the kernel insists)."""
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).split("\n")[:-1]:
        fields = line.split(" ")  # a folder's name may hold any other space or line's end
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        if point in ("/tmp", *but) or point.startswith("/dev/"):
            continue
        options = set(fields[5].split(","))
        kept = sum(KEPT_FLAGS.get(option, 0) for option in options)
        if not options & {"noatime", "relatime"}:
            kept |= MS_STRICTATIME
        _call("mount", "none", point, "none", MS_REMOUNT | MS_BIND | MS_RDONLY | kept, "")


def _drop_privileges() -> None:
    """Neither this process nor what it starts can have a capability again."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(LAST_CAPABILITY + 1):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0 and ctypes.get_errno() != errno.EINVAL:
            sys.exit(f"capability {capability} can not be dropped: {os.strerror(ctypes.get_errno())}")
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        sys.exit("new privileges can not be ruled out")


def _refuse_leases() -> None:
    """Nobody in here makes who opens one of the course's files wait: another grading, say.

    A filter of system calls, where the kernel has such: fcntl(descriptor, F_SETLEASE, ...) is not permitted,
    and calls of another machine's numbers are not there.
    """
    if platform.machine() not in FCNTL:
        return
    architecture, fcntl_number = FCNTL[platform.machine()]
    allow, refuse, unknown = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06  # BPF's: LD|W|ABS, JMP|JEQ|K, JMP|JGE|K, RET|K
    number_at, architecture_at, second_argument_at = 0, 4, 24
    program = [
        (load, 0, 0, architecture_at),
        (equal, 0, 6, architecture),
        (load, 0, 0, number_at),
        (at_least, 4, 0, X32_BIT),
        (equal, 0, 4, fcntl_number),
        (load, 0, 0, second_argument_at),
        (equal, 0, 2, F_SETLEASE),
        (end, 0, 0, refuse),
        (end, 0, 0, unknown),
        (end, 0, 0, allow),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    filled = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer)))
    ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filled, 0, 0)


def _call(name: str, *arguments: str | int) -> None:
    """A call of the system itself: programs like `mount` would look up what is not there any more."""
    plain = [os.fsencode(argument) if isinstance(argument, str) else argument for argument in arguments]
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*plain) != 0:
        what = " ".join(str(argument) for argument in arguments[:2])
        sys.exit(f"{name} {what} failed: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    enter(json.loads(sys.argv[1]))
