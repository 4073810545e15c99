"""Texts, tokens, and the cache they are kept in."""

import io
import multiprocessing
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex

from nanogpt import corpus, data, tokenizer
from nanogpt.data import TokenFile, load_tokens, read_token_file


@pytest.fixture
def small_stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A "standard library" of three small files, and a cache folder."""
    root = tmp_path / "lib"
    (root / "test").mkdir(parents=True)
    for name in ("abc.py", "zip.py", "base64.py"):
        (root / name).write_text(f"def {name[:3]}():\n    return 1\n" * 30)
    (root / "test" / "test_abc.py").write_text("assert True")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setattr(corpus, "_SMALLEST_STDLIB", 10)
    monkeypatch.setattr(corpus, "_held_out", lambda name, one_in: name == "zip.py")
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def f(x):\n\treturn x ** 2\n",
        "naïve 日本語 😀 \u0301",
        "   \n\n  \r\n x",
        "\x00\x7f",
        "<|endoftext|>",
    ],
)
def test_tokens_decode_to_the_text(text: str) -> None:
    encoding = tokenizer.load_encoding("stdlib")
    tokens = encoding.encode_ordinary(text)
    assert encoding.decode(tokens) == text
    assert all(0 <= token < 4095 for token in tokens)


def test_vocabulary() -> None:
    encoding = tokenizer.load_encoding("stdlib")
    assert encoding.n_vocab == tokenizer.VOCAB_SIZE == 4096
    assert encoding.eot_token == 4095
    assert encoding.decode_bytes(list(range(256))) == bytes(range(256))
    source = Path(tokenizer.__file__).read_text()
    assert len(source) / len(encoding.encode_ordinary(source)) > 2.5


def naive_ranks(text: str, num_tokens: int) -> dict[bytes, int]:
    """Byte-pair training as the paper writes it: count every pair again for every merge."""
    words = [[bytes([byte]) for byte in chunk.encode()] for chunk in regex.findall(tokenizer.PATTERN, text)]
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < num_tokens:
        counts = Counter(pair for word in words for pair in pairwise(word))
        if not counts:
            break
        left, right = min(counts, key=lambda pair: (-counts[pair], pair))
        tokens.append(left + right)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == (left, right):
                    word[i : i + 2] = [left + right]
                i += 1
    return {token: rank for rank, token in enumerate(tokens)}


def test_training_merges_what_plain_counting_merges() -> None:
    text = "aaaa aaa banana bandana banal  \n  self.self = selfish\n" * 3 + "ééé zzzzzzz"
    ranks = tokenizer.train_ranks([text], 300)
    assert ranks == naive_ranks(text, 300)
    assert len(tokenizer.train_ranks(["ab"], 300)) == 257


def test_ranks_file_round_trip(tmp_path: Path) -> None:
    ranks = tokenizer.train_ranks(["hello hello"], 260)
    tokenizer.write_ranks(ranks, tmp_path / "a.tiktoken")
    assert tokenizer.read_ranks(tmp_path / "a.tiktoken") == ranks
    assert [path.name for path in tmp_path.iterdir()] == ["a.tiktoken"]


def test_this_pythons_library_is_a_corpus() -> None:
    files = corpus.stdlib_files()
    names = [file.relative_to(Path(corpus.sysconfig.get_path("stdlib"))).as_posix() for file in files]
    assert names == sorted(names)
    assert "dataclasses.py" in names
    assert not any("site-packages" in name or "test" in name.split("/") for name in names)


def test_python_without_its_source_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="source is not in"):
        corpus.stdlib_files(tmp_path)


def test_cache_is_used_and_damage_is_noticed(small_stdlib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = load_tokens(cache=small_stdlib)
    assert tokenizer.load_encoding("stdlib").decode(tokens.validation[:4].tolist()).startswith("def zip")
    assert tokens.train.dtype == np.uint16
    before = tokens.train.tolist()
    built = []
    real = data._build
    monkeypatch.setattr(data, "_build", lambda *arguments: (built.append(1), real(*arguments)))
    load_tokens(cache=small_stdlib)
    assert not built
    path = next(small_stdlib.glob("*/train.bin"))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    for damaged in (b"", whole[:20], whole[:-2], bytes(flipped), whole + b"\0\0", b"x" * len(whole)):
        path.write_bytes(damaged)
        assert read_token_file(path) is None
        assert load_tokens(cache=small_stdlib).train.tolist() == before
    path.unlink()
    assert load_tokens(cache=small_stdlib).train.tolist() == before
    assert len(built) == 7


def test_a_build_that_fails_leaves_nothing(small_stdlib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TokenFile) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TokenFile, "finish", broken)
    with pytest.raises(ValueError, match=r"cannot be kept in .* \(No space left on device\).*--cache"):
        load_tokens(cache=small_stdlib)
    assert not [path for path in small_stdlib.rglob("*") if path.is_file()]


def _write_many(path: Path, number: int) -> None:
    for _ in range(20):
        file = TokenFile(path)
        file.write([number] * 5000)
        file.finish()


def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    _write_many(path, 0)
    other = multiprocessing.get_context("spawn").Process(target=_write_many, args=(path, 1))
    other.start()
    while other.is_alive():
        file = TokenFile(path)
        file.write([2] * 5000)
        file.finish()
        tokens = read_token_file(path)
        assert tokens is not None
        assert len(set(tokens.tolist())) == 1
    assert other.exitcode == 0
    assert [file.name for file in tmp_path.iterdir()] == ["train.bin"]


def test_batches_depend_on_seed_and_step_alone(small_stdlib: Path) -> None:
    tokens = load_tokens(cache=small_stdlib)
    idx, targets = tokens.batch(4, 8, seed=1, step=5)
    assert idx.shape == targets.shape == (4, 8)
    assert idx[:, 1:].equal(targets[:, :-1])
    assert idx.equal(tokens.batch(4, 8, seed=1, step=5)[0])
    for other in ({"seed": 2, "step": 5}, {"seed": 1, "step": 6}):
        assert not idx.equal(tokens.batch(4, 8, **other)[0])
    with pytest.raises(ValueError, match="block_size=100000 is too long"):
        tokens.batch(1, 100_000, seed=1, step=1)


def test_without_a_network_the_sentence_names_what_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*arguments: object, **options: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(corpus.urllib.request, "urlopen", offline)
    monkeypatch.setattr(tokenizer.tiktoken, "get_encoding", offline)
    tokenizer.load_encoding.cache_clear()
    for dataset in ("shakespeare", "openwebtext"):
        with pytest.raises(ValueError, match="stdlib") as caught:
            load_tokens(dataset, cache=tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"Network is unreachable.*--dataset stdlib works offline"):
        list(corpus.shakespeare_documents())
    with pytest.raises(ValueError, match="no dataset 'nope': choose one of stdlib"):
        load_tokens("nope", cache=tmp_path)  # type: ignore[arg-type]


def _tar(files: dict[str, bytes], mode: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def test_downloads_are_read_as_they_are_laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = _tar({"0.txt": b"one\n\n\n\npage\n", "1.txt": "zwei Bücher".encode()}, "w:xz")
    (tmp_path / "00.tar").write_bytes(_tar({"a/urlsf-0_data.xz": pages}, "w"))
    monkeypatch.setattr(corpus, "OPENWEBTEXT_URL", tmp_path.as_uri() + "/{:02d}.tar")
    assert [document.text for document in corpus.openwebtext_documents(1)] == ["one\n\npage", "zwei Bücher"]
    (tmp_path / "s.txt").write_text("To be, " * 10)
    monkeypatch.setattr(corpus, "SHAKESPEARE_URL", (tmp_path / "s.txt").as_uri())
    train, validation = corpus.shakespeare_documents()
    assert (len(train.text), len(validation.text), validation.held_out) == (63, 7, True)
