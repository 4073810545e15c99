"""Tokens on disk: made once from a corpus, kept in a cache, and read without loading them.

A file of tokens is a header of 48 bytes and then the tokens as uint16. The header holds how many there
are and their SHA-256, so that a file which was cut short or changed is noticed, and made again.
"""

import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import numpy as np
import torch
from platformdirs import user_cache_path
from torch import Tensor
from tqdm import tqdm

from nanogpt import corpus, tokenizer

Dataset = Literal["stdlib", "shakespeare", "openwebtext"]
_HEADER = struct.Struct("<8sQ32s")
_MAGIC = b"tokens01"
_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Tokens:
    """A dataset as two long rows of tokens, without text between them but `<|endoftext|>`."""

    train: np.ndarray
    """uint16, (number of tokens,), memory-mapped."""
    validation: np.ndarray
    """uint16, (number of tokens,), memory-mapped."""
    encoding: str
    """Name of the encoding, for `tokenizer.load_encoding`."""

    def batch(
        self, batch_size: int, block_size: int, *, seed: int, step: int, validation: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Tokens and the token after each: two int64 tensors (batch_size, block_size).

        The rows start at random places that depend on seed and step alone: every rank draws the same
        batch, and a resumed run needs no state to go on with the data it would have seen.

        Raises:
            ValueError: the split is shorter than one row.
        """
        tokens = self.validation if validation else self.train
        if len(tokens) <= block_size:
            raise ValueError(
                f"block_size={block_size} is too long: {'validation' if validation else 'training'} "
                f"has {len(tokens)} tokens"
            )
        random = np.random.default_rng([seed, step, int(validation)])
        starts = random.integers(0, len(tokens) - block_size, size=(batch_size, 1))
        rows = torch.from_numpy(tokens[starts + np.arange(block_size + 1)].astype(np.int64))  # (b, s + 1)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def load_tokens(
    dataset: Dataset = "stdlib", cache: Path | None = None, *, openwebtext_parts: int = 1
) -> Tokens:
    """The tokens of a dataset, from the cache, or made and put there.

    Args:
        cache: folder to keep them in; by default the user's cache folder.
        openwebtext_parts: how many of OpenWebText's 21 parts.

    Raises:
        ValueError: one sentence: no such dataset, no network, a folder that cannot be written.
    """
    if dataset not in get_args(Dataset):
        raise ValueError(f"no dataset {dataset!r}: choose one of {', '.join(get_args(Dataset))}")
    name = "stdlib" if dataset == "stdlib" else "gpt2"
    parts = openwebtext_parts if dataset == "openwebtext" else ""
    texts = corpus.stdlib_fingerprint() if dataset == "stdlib" else ""
    key = hashlib.sha256(f"{texts} {tokenizer.fingerprint(name)}".encode()).hexdigest()[:12]
    folder = (cache or user_cache_path("scale-by-hand")) / f"{dataset}{parts}-{key}"
    paths = [folder / f"{split}.bin" for split in _SPLITS]
    arrays = [read_token_file(path) for path in paths]
    if any(array is None for array in arrays):
        try:
            _build(_documents(dataset, openwebtext_parts), name, folder)
        except OSError as error:
            raise ValueError(
                f"the tokens cannot be kept in {folder} ({error.strerror or error}): "
                "name another folder with --cache"
            ) from None
        arrays = [read_token_file(path) for path in paths]
    train, validation = arrays
    assert train is not None and validation is not None, f"{folder} was damaged while it was being read"
    return Tokens(train=train, validation=validation, encoding=name)


def _documents(dataset: Dataset, openwebtext_parts: int) -> Iterator[corpus.Document]:
    if dataset == "stdlib":
        return corpus.stdlib_documents()
    if dataset == "shakespeare":
        return corpus.shakespeare_documents()
    if not 1 <= openwebtext_parts <= corpus.OPENWEBTEXT_PARTS:
        raise ValueError(f"OpenWebText has parts 1 to {corpus.OPENWEBTEXT_PARTS}, not {openwebtext_parts}")
    return corpus.openwebtext_documents(openwebtext_parts)


def read_token_file(path: Path) -> np.ndarray | None:
    """The tokens of a file, memory-mapped; None when it is missing, cut short, changed or another format."""
    try:
        with path.open("rb") as file:  # one open file throughout: another process may replace it meanwhile
            magic, count, digest = _HEADER.unpack(file.read(_HEADER.size))
            if magic != _MAGIC or count == 0 or os.fstat(file.fileno()).st_size != _HEADER.size + 2 * count:
                return None
            tokens = np.memmap(file, dtype="<u2", mode="r", offset=_HEADER.size, shape=(count,))
    except (OSError, ValueError, struct.error):
        return None
    return tokens if hashlib.sha256(tokens).digest() == digest else None


class TokenFile:
    """Writes a file of tokens under a temporary name; it gets its own name when it is whole.

    Two processes that build the same cache write two temporary files, and the last one stays.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        self.temporary = Path(name)
        self.file: BinaryIO = os.fdopen(handle, "wb")
        self.file.write(bytes(_HEADER.size))
        self.hash = hashlib.sha256()
        self.count = 0

    def write(self, tokens: list[int]) -> None:
        data = np.array(tokens, dtype="<u2").tobytes()
        self.file.write(data)
        self.hash.update(data)
        self.count += len(tokens)

    def finish(self) -> None:
        self.file.seek(0)
        self.file.write(_HEADER.pack(_MAGIC, self.count, self.hash.digest()))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.temporary, self.path)

    def abandon(self) -> None:
        self.file.close()
        self.temporary.unlink(missing_ok=True)


def _build(documents: Iterator[corpus.Document], name: str, folder: Path) -> None:
    encoding = tokenizer.load_encoding(name)
    files = [TokenFile(folder / f"{split}.bin") for split in _SPLITS]
    progress = tqdm(desc=f"tokens in {folder.parent}", unit=" tokens", unit_scale=True, disable=None)
    try:
        while group := list(islice(documents, 64)):
            rows = encoding.encode_ordinary_batch([document.text for document in group])
            for document, row in zip(group, rows, strict=True):
                files[document.held_out].write([*row, encoding.eot_token])
                progress.update(len(row) + 1)
        for file in files:
            file.finish()
    except BaseException:
        for file in files:
            file.abandon()
        raise
    finally:
        progress.close()
