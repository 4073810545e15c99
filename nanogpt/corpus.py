"""Texts to learn from: one that every machine with Python already has, and two that need a network."""

import hashlib
import io
import os
import re
import sys
import sysconfig
import tarfile
import tokenize
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from tqdm import tqdm

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
OPENWEBTEXT_URL = (
    "https://huggingface.co/datasets/Skylion007/openwebtext/resolve/main/subsets/urlsf_subset{:02d}.tar"
)
OPENWEBTEXT_PARTS = 21
# Folders of the standard library that are not source of its own, or tables rather than code.
_SKIPPED = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test", "lib2to3", "turtledemo", "encodings"),
}
_SMALLEST_STDLIB = 1_000_000  # bytes; an installation with less has its source elsewhere, or none


class Document(NamedTuple):
    """One text, and whether it is kept for validation."""

    name: str
    text: str
    held_out: bool


def _held_out(name: str, one_in: int) -> bool:
    """A fixed choice that depends on the name alone: a new file moves no other."""
    return zlib.crc32(name.encode()) % one_in == 0


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The standard library's own source files, in a fixed order, without its tests.

    Raises:
        ValueError: this Python came without (most of) its source.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in _SKIPPED and not name.startswith("config-")
        ]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    # _sysconfigdata is written by the machine that built Python; this one differs from machine to machine.
    files = [file for file in files if not file.name.startswith("_sysconfigdata")]
    if sum(file.stat().st_size for file in files) < _SMALLEST_STDLIB:
        raise ValueError(
            f"the standard library's source is not in {root}: use a Python that has it (python.org, "
            "conda, uv, a Linux distribution's), or --dataset shakespeare with a network"
        )
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def stdlib_documents(root: Path | None = None) -> Iterator[Document]:
    """The files of the standard library, about one in twelve for validation."""
    root = root or Path(sysconfig.get_path("stdlib"))
    for file in stdlib_files(root):
        try:
            with tokenize.open(file) as source:  # minds a file's own `coding:` line
                text = source.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        name = file.relative_to(root).as_posix()
        yield Document(name, text, _held_out(name, 12))


def stdlib_fingerprint() -> str:
    """Changes when a file of the standard library comes, goes or changes its size."""
    sizes = [(file.name, file.stat().st_size) for file in stdlib_files()]
    return hashlib.sha256(repr((sys.version_info[:3], sizes)).encode()).hexdigest()


def shakespeare_documents() -> Iterator[Document]:
    """Tiny Shakespeare, 1.1 MB; its last tenth is for validation, as in nanoGPT."""
    with _download(SHAKESPEARE_URL, "shakespeare") as stream:
        text = stream.read().decode()
    cut = int(len(text) * 0.9)
    yield Document("train", text[:cut], False)
    yield Document("validation", text[cut:], True)


def openwebtext_documents(parts: int = 1) -> Iterator[Document]:
    """The first parts of OpenWebText's 21, about 0.6 GB to download each; one page in 2000 is held out."""
    for part in range(parts):
        with (
            _download(OPENWEBTEXT_URL.format(part), "openwebtext") as stream,
            tarfile.open(fileobj=stream, mode="r|") as outer,
        ):
            for packed in outer:
                if packed.name.endswith(".xz") and (file := outer.extractfile(packed)) is not None:
                    yield from _pages(io.BytesIO(file.read()))


def _pages(packed: IO[bytes]) -> Iterator[Document]:
    with tarfile.open(fileobj=packed, mode="r:xz") as inner:
        for page in inner:
            if page.name.endswith(".txt") and (file := inner.extractfile(page)) is not None:
                text = re.sub("\n\n\n+", "\n\n", file.read().decode("utf-8")).strip()
                yield Document(page.name, text, _held_out(page.name, 2000))


class _Counted(io.RawIOBase):
    """A stream that moves a progress bar as it is read."""

    def __init__(self, stream: IO[bytes], bar: tqdm) -> None:
        self.stream = stream
        self.bar = bar

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        piece = self.stream.read(len(buffer))
        buffer[: len(piece)] = piece
        self.bar.update(len(piece))
        return len(piece)


@contextmanager
def _download(url: str, dataset: str) -> Iterator[IO[bytes]]:
    """The bytes at a URL, with a progress bar.

    Raises:
        ValueError: the network fails; the sentence names what works without one.
    """
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            size = int(answer.headers.get("Content-Length") or 0) or None
            with tqdm(total=size, desc=dataset, unit="B", unit_scale=True, disable=None) as bar:
                yield io.BufferedReader(_Counted(answer, bar), 1 << 20)
    except (urllib.error.URLError, tarfile.ReadError, EOFError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise ValueError(
            f"--dataset {dataset} has to be downloaded and that failed ({reason}); "
            "--dataset stdlib works offline: the source of Python's standard library"
        ) from None
