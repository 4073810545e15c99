"""Plain data on the wire: numbers, strings, lists, tuples, dicts and tensors, and nothing that can run code.

A value becomes JSON with the tensors taken out, and the tensors become one safetensors blob, in which those
of one dtype lie end to end. Reading either never executes anything, so the judge may read what a submission's
process has sent.
"""

import math
import struct
import sys
from collections.abc import Callable
from json import JSONDecoder, dumps
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from grader.ranks.recording import Recording

MAX_TEXT = 8 << 20
"""Bytes of an answer without its tensors. No right one of the course has a fiftieth of it; reading it may
take forty times as much memory."""
MAX_DEPTH = 50
MAX_DIGITS = 300
"""Of a whole number: what is larger has no place among floats, and no quantity of this course comes near."""
DTYPES = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64, torch.complex128}
)
"""Of the tensors that travel: what an exercise returns has one of these, and torch compares them all."""
IS_KEY = object()
"""Stands in a place for "a key of"."""
SMALL = (bool, str, float, type(None))
"""What JSON has as well, whatever its value."""


class NotPlainError(TypeError):
    """The value holds something that is neither a number, text, a tensor nor a container of these."""


def encode(value: Any, recordings: tuple[type, ...] = (), most_text: int = sys.maxsize) -> bytes:
    """Turn plain data into bytes.

    Tensors travel detached, contiguous and on the CPU; a tensor subclass travels as the tensor it holds.

    Args:
        recordings: the types that have a to_plain() which tells a Recording.
        most_text: bytes that all but the tensors may take.

    Raises:
        NotPlainError: names the offending part, such as `result["layer"]: a Linear`.
    """
    tensors: list[Tensor] = []
    tree = _strip(value, tensors, "result", 0, recordings)
    sizes = [[str(tensor.dtype).removeprefix("torch."), *tensor.shape] for tensor in tensors]
    try:
        text = dumps({"tree": tree, "sizes": sizes}).encode()
    except (TypeError, ValueError) as error:  # all but what says by itself how it is told has been looked at
        raise NotPlainError(f"a part of result is not plain: {error}") from error
    if len(text) > most_text:
        raise NotPlainError(
            f"result is more than {most_text >> 20} MiB of text, or of numbers outside of tensors"
        )
    return struct.pack("<Q", len(text)) + text + save_tensors(_end_to_end(sizes, tensors))


def decode(data: bytes, most_text: int = sys.maxsize) -> Any:
    """Read what `encode` wrote, with these bytes of text at most. Raises ValueError for anything else."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > len(data) - 8:
            raise ValueError("the text is cut short")
        if length > most_text:
            raise ValueError("the text is too long")
        told = _DECODER.decode(data[8 : 8 + length].decode())
        tensors = _apart(told["sizes"], load_tensors(data[8 + length :]))
        return _restore(told["tree"], tensors, 0)
    except Exception as error:
        raise ValueError(f"not a complete record: {error}") from error


def _end_to_end(sizes: list[list[Any]], tensors: list[Tensor]) -> dict[str, Tensor]:
    """The numbers of all tensors of each dtype: a name for each of many small ones takes longer."""
    by_dtype: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for (dtype, *_), tensor in zip(sizes, tensors, strict=True):
            by_dtype.setdefault(dtype, []).append(tensor.reshape(-1))
        return {dtype: torch.cat(pieces) for dtype, pieces in by_dtype.items()}


def _apart(sizes: list[list[Any]], whole: dict[str, Tensor]) -> list[Tensor]:
    """Each tensor, in memory of its own."""
    counts: dict[str, list[int]] = {dtype: [] for dtype in whole}
    for dtype, *shape in sizes:
        counts[dtype].append(math.prod(shape))
    pieces = {dtype: iter(torch.split_with_sizes_copy(whole[dtype], counts[dtype])) for dtype in whole}
    return [next(pieces[dtype]).view(shape) for dtype, *shape in sizes]


def _strip(value: Any, tensors: list[Tensor], where: Any, depth: int, recordings: tuple[type, ...]) -> Any:
    """`where` is "result", or a pair of what a value lies in and its key or number there."""
    if type(value) in SMALL or (type(value) is int and abs(value) < 2**63):
        return value
    if depth > MAX_DEPTH:
        raise NotPlainError(f"{_name(where)} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Tensor):
        return {"tensor": _store(value, tensors, where)}
    if type(value) in recordings:
        return {"recording": value.to_plain()}
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        if abs(value) >= 10**MAX_DIGITS:
            raise NotPlainError(f"{_name(where)} is a whole number of more than {MAX_DIGITS} digits")
        return int(value) if abs(value) < 2**63 else {"int": str(int(value))}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes):
        return {
            "bytes": _store(
                torch.frombuffer(bytearray(value) or bytearray(1), dtype=torch.uint8), tensors, where
            ),
            "length": len(value),
        }
    if isinstance(value, list | tuple):
        items = [_strip(item, tensors, (where, i), depth + 1, recordings) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {
                "named": {
                    key: _strip(item, tensors, (where, key), depth + 1, recordings)
                    for key, item in value.items()
                }
            }
        return {
            "dict": [
                [
                    _strip(k, tensors, (where, IS_KEY), depth + 1, recordings),
                    _strip(v, tensors, (where, k), depth + 1, recordings),
                ]
                for k, v in value.items()
            ]
        }
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _strip(value.item(), tensors, where, depth + 1, recordings)
    raise NotPlainError(
        f"{_name(where)} is a {type(value).__name__}: "
        "return tensors, numbers, strings, or lists, tuples and dicts of these"
    )


def _name(where: Any) -> str:
    """A place as one would write it; put together only for who is told of it."""
    if isinstance(where, str):
        return where
    around, key = where
    return f"a key of {_name(around)}" if key is IS_KEY else f"{_name(around)}[{key!r}]"


def _store(tensor: Tensor, tensors: list[Tensor], where: Any) -> int:
    held = tensor.detach() if _is_plain(tensor) else _made_plain(tensor, where)
    if held.dtype not in DTYPES:
        raise NotPlainError(f"{_name(where)} is a tensor of {held.dtype}")
    tensors.append(held)
    return len(tensors) - 1


def _is_plain(tensor: Tensor) -> bool:
    """As nearly all are, and no subclass's code then runs."""
    kinds = Tensor, torch.nn.Parameter
    here = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return type(tensor) in kinds and here and not tensor.is_quantized


def _made_plain(tensor: Tensor, where: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise NotPlainError(
                f"{_name(where)} is a {tensor.layout} tensor on {tensor.device}: return a dense one"
            )
        try:
            return torch.Tensor.as_subclass(tensor.detach(), Tensor).cpu().contiguous().clone()
        except RuntimeError as error:
            if type(tensor) is Tensor:
                raise  # there is no memory for it
            raise NotPlainError(
                f"{_name(where)} is a {type(tensor).__name__}: return a plain tensor"
            ) from error


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS + 1:
        raise ValueError("a whole number that is too large")
    return int(digits)


_DECODER = JSONDecoder(parse_int=_whole)
_RESTORE: dict[str, Callable[[dict, list[Tensor], int], Any]] = {
    "recording": lambda node, tensors, depth: Recording.from_plain(node["recording"]),
    "tensor": lambda node, tensors, depth: tensors[node["tensor"]],
    "int": lambda node, tensors, depth: _whole(node["int"]),
    "bytes": lambda node, tensors, depth: tensors[node["bytes"]].numpy().tobytes()[: node["length"]],
    "tuple": lambda node, tensors, depth: tuple(_restore(item, tensors, depth) for item in node["tuple"]),
    "named": lambda node, tensors, depth: {
        key: _restore(item, tensors, depth) for key, item in node["named"].items()
    },
    "dict": lambda node, tensors, depth: {
        _restore(k, tensors, depth): _restore(v, tensors, depth) for k, v in node["dict"]
    },
}


def _restore(node: Any, tensors: list[Tensor], depth: int) -> Any:
    if type(node) not in (list, dict):
        return node
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deep")
    if type(node) is list:
        return [_restore(item, tensors, depth + 1) if type(item) in (list, dict) else item for item in node]
    return _RESTORE[next(iter(node))](node, tensors, depth + 1)
