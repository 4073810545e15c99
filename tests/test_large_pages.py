"""What is moved into large pages stays what it was, and lies in large pages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

MOVED = """
from grader.ranks.large_pages import LargePages

data = [bytearray(bytes([number]) * 100_000) for number in range(200)]
memory = LargePages()
pieces = len(memory._pieces)
for _ in range(pieces + 1):
    memory.move_a_piece()
assert all(one == bytes([number]) * 100_000 for number, one in enumerate(data))
huge = sum(int(line.split()[1]) for line in open("/proc/self/smaps") if line.startswith("AnonHugePages"))
print(pieces, huge)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are moved to on Linux alone")
def test_nothing_is_lost() -> None:
    done = subprocess.run([sys.executable, "-c", MOVED], capture_output=True, text=True, check=True)
    pieces, kilobytes = map(int, done.stdout.split())
    assert pieces
    version = tuple(map(int, re.findall(r"\d+", Path("/proc/sys/kernel/osrelease").read_text())[:2]))
    if version >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert kilobytes >= 2048
