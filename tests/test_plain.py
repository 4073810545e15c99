"""Plain data: everything that a probe may return survives the wire, and nothing else is let through."""

import json
import pickle
import struct

import pytest
import torch
from safetensors.torch import save

from grader.ranks import plain
from grader.ranks.recording import Event, Recording


def test_round_trip() -> None:
    value = {
        "t": torch.randn(3, 4).T, 1: [True, None, "ä", 2**70, -1.5], (1, 2): (torch.ones(()), b"\x00bytes"),
        "empty": [torch.zeros(0, 3), {}, [], (), b""],
    }  # fmt: skip
    back = plain.decode(plain.encode(value))
    assert back[1] == value[1]
    assert torch.equal(back["t"], value["t"])
    assert back[(1, 2)][1] == b"\x00bytes" and back[(1, 2)][0].shape == ()
    assert back["empty"][0].shape == (0, 3) and back["empty"][1:] == [{}, [], (), b""]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.complex64]
)
def test_dtypes(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 2).to(dtype)
    back = plain.decode(plain.encode(tensor))
    assert back.dtype == dtype and torch.equal(back, tensor)


def test_a_view_travels_as_itself_not_as_its_storage() -> None:
    assert len(plain.encode(torch.zeros(1_000_000)[:2])) < 1000


class Liar(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return True


def test_a_tensor_subclass_travels_as_the_tensor_it_holds() -> None:
    back = plain.decode(plain.encode(torch.ones(2).as_subclass(Liar)))
    assert type(back) is torch.Tensor and torch.equal(back, torch.ones(2))


@pytest.mark.parametrize(
    "thing", [object(), torch.nn.Linear(1, 1), {1, 2}, lambda: 0, torch.ones(2, 2).to_sparse()]
)
def test_what_is_not_plain_is_named(thing: object) -> None:
    with pytest.raises(plain.NotPlainError, match=r"result\['layer'\]"):
        plain.encode({"layer": thing})


def test_a_number_that_is_no_quantity_is_named_and_comes_in_no_record() -> None:
    assert plain.decode(plain.encode([10**299, -(10**299)])) == [10**299, -(10**299)]
    with pytest.raises(plain.NotPlainError, match=r"result\[0\] is a whole number of more than 300 digits"):
        plain.encode([10**400])
    text = json.dumps({"tree": {"int": "9" * 400}, "sizes": []}).encode()
    with pytest.raises(ValueError, match="too large"):
        plain.decode(struct.pack("<Q", len(text)) + text + plain.encode(None)[12:])


class Told:
    def __init__(self, told: object) -> None:
        self._told = told

    def to_plain(self) -> object:
        return self._told


@pytest.mark.parametrize("told", [1, [[]] * 100, 10**400, {"__recording__": {}}])
def test_an_object_does_not_say_itself_what_it_is(told: object) -> None:
    with pytest.raises(plain.NotPlainError, match="result is a Told"):
        plain.encode(Told(told), (Recording,))


def test_a_recording_travels_as_itself() -> None:
    event = Event("send", 8, 2, "float32", (2,), (0, 1), 1, "", False, "mine.py", 3, "a mark", 7)
    recording = Recording(events=[event], waited_after=[1], alive_at={"end": 4}, peak_bytes=9)
    assert plain.decode(plain.encode([recording], (Recording,))) == [recording]


@pytest.mark.parametrize(
    "forged",
    [
        {"peak_bytes": "many"}, {"peak_bytes": 10**250}, {"alive_at": {"end": None}}, {"alive_at": 3},
        {"waited_after": [[]]}, {"totals": {"": {"flops": 1.5}}}, {"totals": []}, {"more": 1},
        {"events": [{}]},
    ],
)  # fmt: skip
def test_what_is_no_recording_is_refused(forged: dict) -> None:
    told = Recording().to_plain()["__recording__"] | forged
    with pytest.raises(ValueError, match="not a complete record"):
        plain.decode(plain.encode(Told({"__recording__": told}), (Told,)))


def test_an_answer_has_an_end() -> None:
    long = "x" * plain.MAX_TEXT
    with pytest.raises(plain.NotPlainError, match="result is more than 8 MiB of text"):
        plain.encode([long], most_text=plain.MAX_TEXT)
    with pytest.raises(ValueError, match="too long"):
        plain.decode(plain.encode([long]), plain.MAX_TEXT)
    assert plain.decode(plain.encode([long])) == [long]  # an order may be as long as a submission is


def test_what_comes_in_a_record_is_bounded_as_what_goes() -> None:
    deep: object = "deep"
    for _ in range(plain.MAX_DEPTH):
        deep = [deep]
    assert plain.decode(plain.encode(deep)) == deep
    for _ in range(2):
        deep = {"tuple": [deep]}
    with pytest.raises(ValueError, match="too deep"):
        plain.decode(record(deep, [["float32", 2]]))
    with pytest.raises(ValueError, match="too large"):
        plain.decode(record([10**400], [["float32", 2]]))


def test_a_list_that_holds_itself() -> None:
    loop: list = []
    loop.append(loop)
    with pytest.raises(plain.NotPlainError, match="deeper"):
        plain.encode(loop)


def record(tree: object, sizes: object) -> bytes:
    """A record of two numbers that says something else of them."""
    text = json.dumps({"tree": tree, "sizes": sizes}).encode()
    return struct.pack("<Q", len(text)) + text + save({"float32": torch.ones(2)})


def test_a_record_is_what_it_says() -> None:
    assert torch.equal(plain.decode(record({"tensor": 0}, [["float32", 2]])), torch.ones(2))


def test_each_tensor_comes_in_memory_of_its_own() -> None:
    for tensor in plain.decode(plain.encode([torch.ones(4), torch.ones(2, 2), torch.ones(())])):
        assert tensor.untyped_storage().nbytes() == 4 * tensor.numel()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"short", pickle.dumps({"a": 1}), struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 2) + b"[}", struct.pack("<Q", 14) + json.dumps({"tensor": "9"}).encode(),
        record({"tensor": 1}, [["float32", 2]]), record({"tensor": 0}, [["float32", 3]]),
        record({"tensor": 0}, [["float32", -1]]), record({"tensor": 0}, [["int64", 2]]), record([], {}),
        plain.encode({"a": torch.ones(4)})[:-3],
    ],
)  # fmt: skip
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a complete record"):
        plain.decode(data)
