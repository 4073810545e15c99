"""What travels between ranks of one machine: the loopback interface counts it.

In a network namespace of its own nothing else uses that interface. Linux gives one to any user, where the
administrator has not forbidden it. The interface counts whole packets, headers of IP and TCP included, and
how many there were; every header is as long as the others, so they can be taken off (`find_header_bytes`).
"""

import multiprocessing.synchronize
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from grader.ranks.box import raise_loopback
from grader.ranks.isolation import last_line

ROOT = Path(__file__).resolve().parents[2]
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--")
"""Runs a command in a network namespace of its own, whose loopback is down at first."""
QUIET_SECONDS = 0.1
"""TCP may hold an acknowledgement back for 40 ms."""


class Counted(NamedTuple):
    """What the interface has carried so far."""

    num_bytes: int
    packets: int

    def since(self, before: "Counted") -> "Counted":
        return Counted(self.num_bytes - before.num_bytes, self.packets - before.packets)


class Look(NamedTuple):
    """What has travelled in a step."""

    num_bytes: int
    """Without the frames."""
    framing: int
    """Bytes of the frames: one header for each packet."""


def carried() -> Counted:
    """What loopback has carried, as soon as nothing travels any more."""
    before = _read()
    while True:
        time.sleep(QUIET_SECONDS)
        now = _read()
        if now == before:
            return now
        before = now


def _read() -> Counted:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            sent = numbers.split()[8:]
            return Counted(int(sent[0]), int(sent[1]))
    raise OSError("this system has no loopback interface")


def find_header_bytes() -> tuple[int | None, str]:
    """Length of a packet's header in a namespace of its own; or None, and why there is no such namespace."""
    if shutil.which("unshare") is None:
        return None, "this system has no `unshare` (of util-linux)"
    trial = [*UNSHARE, sys.executable, "-m", "infra.memory_table.witness"]
    done = subprocess.run(trial, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None, last_line(done.stderr)
    return int(done.stdout), ""


def measure_header_bytes() -> int:
    """Send a known number of bytes to and fro; what the interface counted more are the headers.

    Raises:
        OSError: the headers are not all of one length.
    """
    size, repeat = 1000, 50
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as one:
        one.connect(server.getsockname())
        other, _ = server.accept()
        with other:
            before = carried()
            for _ in range(repeat):
                for sender, receiver in ((one, other), (other, one)):
                    sender.sendall(bytes(size))
                    receiver.recv(size, socket.MSG_WAITALL)
            num_bytes, packets = carried().since(before)
    length, rest = divmod(num_bytes - 2 * repeat * size, packets)
    if rest:
        raise OSError("packets of this system have headers of several lengths")
    return length


class Witness:
    """Has all ranks do something at a time at which nothing else travels, and rank 0 count what does.

    The ranks meet at a barrier of this machine's memory: one of torch's would be counted.
    """

    def __init__(
        self, barrier: multiprocessing.synchronize.Barrier | threading.Barrier, rank: int, header_bytes: int
    ) -> None:
        self.barrier, self.rank, self.header_bytes = barrier, rank, header_bytes

    def look(self, step: Callable[[], None]) -> Look | None:
        """What all ranks together send in a step; None but on rank 0."""
        before = self._carried()
        step()
        after = self._carried()
        if before is None or after is None:
            return None
        num_bytes, packets = after.since(before)
        framing = packets * self.header_bytes
        return Look(num_bytes - framing, framing)

    def _carried(self) -> Counted | None:
        """Nobody goes on before rank 0 has read."""
        self.barrier.wait()
        counted = carried() if self.rank == 0 else None
        self.barrier.wait()
        return counted


if __name__ == "__main__":
    raise_loopback()
    print(measure_header_bytes())
