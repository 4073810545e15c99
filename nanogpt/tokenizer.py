"""The course's own tokens: a byte-pair vocabulary trained on Python source, used through tiktoken.

`python -m nanogpt.tokenizer` trains it again, on the standard library of the Python that runs it. The
result, `stdlib.tiktoken`, is kept beside this file, so that nobody has to, and nothing is downloaded.
"""

import base64
import hashlib
import heapq
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path

import regex
import tiktoken
from tqdm import tqdm

RANKS_FILE = Path(__file__).with_name("stdlib.tiktoken")
VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
# Merges never cross these chunks: words with what precedes them, numbers, punctuation, indentation.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

Pair = tuple[int, int]


def stdlib_encoding(ranks_file: Path = RANKS_FILE) -> tiktoken.Encoding:
    """The encoding of a ranks file, with `<|endoftext|>` as its last token."""
    ranks = read_ranks(ranks_file)
    return tiktoken.Encoding(
        ranks_file.stem, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)}
    )


@cache
def load_encoding(name: str) -> tiktoken.Encoding:
    """The encoding "stdlib", which is here, or one that tiktoken knows ("gpt2"), which it downloads once.

    Raises:
        ValueError: it cannot be had: no such name, or no network.
    """
    if name == "stdlib":
        return stdlib_encoding()
    try:
        return tiktoken.get_encoding(name)
    except ValueError as error:
        raise ValueError(f"tokens {name!r}: {' '.join(str(error).split())}") from None
    except Exception as error:  # whatever requests raises without a network, or on a damaged answer
        raise ValueError(
            f"the tokens {name!r} have to be downloaded once and that failed ({type(error).__name__}); "
            "offline, train on --dataset stdlib, whose tokens come with the course"
        ) from None


def fingerprint(name: str) -> str:
    """Changes when the tokens of the encoding do."""
    return hashlib.sha256(RANKS_FILE.read_bytes()).hexdigest() if name == "stdlib" else name


def read_ranks(path: Path) -> dict[bytes, int]:
    """tiktoken's file format: a line for each token, its bytes in base64 and its rank.

    tiktoken's own reader is not used: it keeps a copy under the path's name and would miss a change.
    """
    lines = path.read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def write_ranks(ranks: dict[bytes, int], path: Path) -> None:
    """Writes tiktoken's file format, whole or not at all."""
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(b"".join(lines))
    os.replace(temporary, path)


def train_ranks(texts: Iterable[str], num_tokens: int) -> dict[bytes, int]:
    """Byte-pair ranks for `num_tokens` tokens: the 256 bytes, then the merges in the order made.

    Each merge joins the pair that is most frequent; equal counts go to the smaller pair of bytes, so
    the result depends on nothing but the texts.

    Source: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units".
    """
    chunks: Counter[str] = Counter()
    for text in texts:
        chunks.update(regex.findall(PATTERN, text))
    words = [list(chunk.encode()) for chunk in chunks]
    counts = list(chunks.values())
    tokens = [bytes([byte]) for byte in range(256)]
    pairs = _Pairs(words, counts, tokens)
    for _ in tqdm(range(num_tokens - 256), desc="merges", unit="", disable=None):
        pair = pairs.most_frequent()
        if pair is None:
            break
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
        pairs.merge(pair, len(tokens) - 1)
    return {token: rank for rank, token in enumerate(tokens)}


class _Pairs:
    """How often each pair of neighbours occurs, kept up to date while words are merged."""

    def __init__(self, words: list[list[int]], counts: list[int], tokens: list[bytes]) -> None:
        self.words = words
        self.counts = counts
        self.tokens = tokens
        self.frequency: Counter[Pair] = Counter()
        self.where: defaultdict[Pair, set[int]] = defaultdict(set)  # words that have, or once had, the pair
        for number, word in enumerate(words):
            for pair in pairwise(word):
                self.frequency[pair] += counts[number]
                self.where[pair].add(number)
        self.heap = [self._entry(pair) for pair in self.frequency]
        heapq.heapify(self.heap)

    def _entry(self, pair: Pair) -> tuple[int, bytes, bytes, Pair]:
        return (-self.frequency[pair], self.tokens[pair[0]], self.tokens[pair[1]], pair)

    def most_frequent(self) -> Pair | None:
        while self.heap:
            entry = heapq.heappop(self.heap)
            pair = entry[-1]
            if self.frequency[pair] == 0:
                continue
            if -entry[0] == self.frequency[pair]:
                return pair
            heapq.heappush(self.heap, self._entry(pair))  # the count has fallen since it was pushed
        return None

    def merge(self, pair: Pair, token: int) -> None:
        """Joins every occurrence of the pair into the token."""
        changed: set[Pair] = set()
        for number in self.where.pop(pair):
            word, count = self.words[number], self.counts[number]
            merged = _merged(word, pair, token)
            if len(merged) == len(word):
                continue
            for old in pairwise(word):
                self.frequency[old] -= count
            for new in pairwise(merged):
                self.frequency[new] += count
                if token in new:
                    self.where[new].add(number)
                    changed.add(new)
            self.words[number] = merged
        for new in changed:
            heapq.heappush(self.heap, self._entry(new))


def _merged(word: list[int], pair: Pair, token: int) -> list[int]:
    merged: list[int] = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            merged.append(token)
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return merged


def main() -> None:
    """Trains the vocabulary on this Python's standard library and writes it beside this file."""
    from nanogpt.corpus import stdlib_documents

    texts = [document.text for document in stdlib_documents()]
    ranks = train_ranks(texts, VOCAB_SIZE - 1)  # the last one is <|endoftext|>
    write_ranks(ranks, RANKS_FILE)
    num_bytes = sum(len(text.encode()) for text in texts)
    num_tokens = sum(map(len, stdlib_encoding().encode_ordinary_batch(texts)))
    print(f"{RANKS_FILE}: {len(ranks) + 1} tokens, {num_bytes / num_tokens:.2f} bytes of source a token")


if __name__ == "__main__":
    main()
