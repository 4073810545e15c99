"""Moves a process's memory into large pages, a piece at a time, so that forking it costs less (Linux).

A fork copies the page table of everything that was imported, 250 MB in 60,000 entries, and every rank that
ends gives as many back. One large page takes the place of 512.
"""

import contextlib
import ctypes
import sys
from collections.abc import Iterator

SIZE = 2**21
MADV_COLLAPSE = 25


class LargePages:
    """The pieces of this process's memory that are still in small pages."""

    def __init__(self) -> None:
        self._pieces = list(_pieces()) if sys.platform == "linux" else []
        self._libc = ctypes.CDLL(None)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def move_a_piece(self) -> None:
        """Three milliseconds. A system that can not (before Linux 6.1) is left as it is."""
        if self._pieces:
            self._libc.madvise(self._pieces.pop(), SIZE, MADV_COLLAPSE)


def _pieces() -> Iterator[int]:
    """Addresses of all whole pieces that nothing but this process's own data lies in."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
            if permissions == "rw-p" and (not name or name[0].startswith("[heap]")):
                first, end = (int(address, 16) for address in addresses.split("-"))
                yield from range(-(-first // SIZE) * SIZE, end - SIZE + 1, SIZE)
