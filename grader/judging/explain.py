"""Says how tensors differ: by which factor, in which order, on which rank, and the likely cause."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-8, torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest error that the order of a sum explains, as a fraction of the largest expected element."""

ByRank = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Difference:
    """What is wrong with a tensor, or with one tensor a rank."""

    message: str
    """One sentence: which rank, what was expected, what came."""
    cause: str
    """The likely cause, "" where nothing fits."""
    rank: int | None


def compare(
    what: str,
    actual: Sequence[object],
    expected: Sequence[Tensor],
    alternatives: Mapping[str, ByRank] | None = None,
    rtol: float | None = None,
    factors: Mapping[str, float] | None = None,
) -> Difference | None:
    """Compare one value a rank with what it should be; None when all agree.

    Args:
        what: what the value is, such as "the gradient of x".
        actual: by rank; whatever the submission returned.
        expected: by rank.
        alternatives: cause → what a submission with that fault would have returned.
        rtol: allowed error relative to the largest expected element; None is TOLERANCE of the dtype.
        factors: name → value of numbers that a result might be off by, next to the number of ranks.
    """
    num_ranks = len(expected)
    wrong = []
    for rank, (a, e) in enumerate(zip(actual, expected, strict=True)):
        fault = _unfit(a, e)
        if fault:
            return Difference(f"{what} {fault}{_on(rank, num_ranks)}", _shape_cause(a, e), rank)
        if not is_close(a, e, rtol):
            wrong.append(rank)
    if not wrong:
        return None
    rank = wrong[0]
    tensors = [a for a in actual if isinstance(a, Tensor)]
    cause = _known(tensors, alternatives or {}, wrong, rtol) or _generic(
        tensors, expected, wrong, rtol, factors or {}
    )
    where = "" if num_ranks == 1 else _ranks(wrong, num_ranks)
    share = "" if cause else _share(tensors[rank], expected[rank])
    return Difference(
        f"{what} is wrong{where}: {_numbers(tensors[rank], expected[rank])}{share}", cause, rank
    )


def is_close(actual: Tensor, expected: Tensor, rtol: float | None = None) -> bool:
    """Equal up to the order of sums. NaN equals nothing; integers must be equal."""
    if actual.shape != expected.shape:
        return False
    if not actual.is_floating_point():
        return torch.equal(actual.to(expected.dtype), expected)
    if not torch.isfinite(actual).all():
        same = torch.isinf(expected) & (actual.double() == expected.double())
        finite = torch.isfinite(actual)
        return bool((same | finite).all()) and is_close(actual[finite], expected[finite], rtol)
    if actual.numel() == 0:
        return True
    if not torch.isfinite(expected).all():
        return False
    if rtol is None:
        rtol = max(TOLERANCE.get(dtype, 3e-5) for dtype in (actual.dtype, expected.dtype))
    expected = expected.double()
    largest = expected.abs().max().item()
    scale = max(largest, 1e-3) if largest else 0.03
    return bool((actual.double() - expected).abs().max() <= rtol * scale)


def _unfit(actual: object, expected: Tensor) -> str:
    if actual is None:
        return "is None"
    if not isinstance(actual, Tensor):
        return f"is a {type(actual).__name__}, not a tensor"
    if actual.shape != expected.shape:
        return f"has shape {_shape(actual)} where {_shape(expected)} is expected"
    # What is expected in float64 is the judge's own precision, and says nothing of the learner's.
    exact = expected.is_floating_point() and expected.dtype != torch.float64
    if actual.is_floating_point() != expected.is_floating_point() or (
        exact and actual.dtype != expected.dtype
    ):
        return f"is {actual.dtype} where {expected.dtype} is expected"
    return ""


def _shape_cause(actual: object, expected: Tensor) -> str:
    if not isinstance(actual, Tensor) or actual.shape == expected.shape:
        return ""
    if actual.dim() == 2 and actual.T.shape == expected.shape:
        return "it is transposed"
    if actual.numel() == expected.numel():
        return "the number of elements is right: only the shape is not"
    if actual.dim() == expected.dim():
        ratios = [a / e for a, e in zip(actual.shape, expected.shape, strict=True) if a != e and e]
        if len(ratios) == 1 and ratios[0] > 1 and ratios[0].is_integer():
            return f"one dimension is {int(ratios[0])} times too large: the whole, not a part?"
        if len(ratios) == 1 and ratios[0] and (1 / ratios[0]).is_integer():
            return f"one dimension is {round(1 / ratios[0])} times too small: a part, not the whole?"
    return ""


def _known(
    actual: Sequence[Tensor], alternatives: Mapping[str, ByRank], wrong: Sequence[int], rtol: float | None
) -> str:
    for cause, value in alternatives.items():
        values = [value] * len(actual) if isinstance(value, Tensor) else list(value)
        if all(is_close(actual[r], values[r], rtol) for r in wrong):
            return cause
    return ""


def _generic(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    wrong: Sequence[int],
    rtol: float | None,
    factors: Mapping[str, float],
) -> str:
    rank, n = wrong[0], len(expected)
    a, e = actual[rank].double(), expected[rank].double()
    if a.isnan().any():
        return "it contains NaN"
    if (a.isinf() & e.isfinite()).any():
        return "it contains infinities"
    if not a.any():
        return "it is zero everywhere: was it ever written?"
    ratio = _constant_ratio(a, e)
    if ratio is not None:
        return _name_factor(ratio, n, factors)
    if a.dim() == 2 and is_close(a.T, e, rtol):
        return "it is transposed"
    order = _permutation(actual, expected, rtol)
    if order:
        return order
    difference = a - e
    if a.dim() >= 2 and a.numel() > a.size(-1):
        rows = difference.reshape(-1, a.size(-1))
        if (rows - rows[0]).abs().max() <= 1e-4 * rows.abs().max():
            return (
                "it differs by the same vector in every row: a bias that is missing, or added more than once?"
            )
    if is_close(a.flatten().sort().values, e.flatten().sort().values, rtol):
        return "these are the right numbers in another order"
    if len(wrong) < n and n > 1:
        return (
            "it is right on rank 0 alone: is something done there only, or is there less to do?"
            if 0 not in wrong and len(wrong) == n - 1
            else ""
        )
    return ""


def _constant_ratio(a: Tensor, e: Tensor) -> float | None:
    norm = (e * e).sum().item()
    if norm == 0:
        return None
    ratio = ((a * e).sum() / norm).item()
    error = (a - ratio * e).norm().item()
    return ratio if e.numel() > 1 and error <= 1e-3 * a.norm().item() else None


def _name_factor(ratio: float, n: int, factors: Mapping[str, float]) -> str:
    if math.isclose(ratio, 1, rel_tol=1e-3):
        return "it is right to three digits only: a lower precision somewhere, or a small term left out?"
    names = [("the number of ranks", float(n)), *factors.items()]
    for name, value in names:
        for power, text in (
            (1, name),
            (-1, f"1 / {name}"),
            (2, f"the square of {name}"),
            (-2, f"1 / the square of {name}"),
        ):
            if value > 1 and math.isclose(ratio, value**power, rel_tol=2e-3):
                return f"every element is {_short(ratio)} times what it should be, and that is {text}"
    if math.isclose(ratio, -1, rel_tol=1e-3):
        return "every element has the wrong sign"
    return f"every element is {_short(ratio)} times what it should be"


def _permutation(actual: Sequence[Tensor], expected: Sequence[Tensor], rtol: float | None) -> str:
    n = len(expected)
    if n < 2 or any(a.shape != expected[0].shape for a in (*actual, *expected)):
        return ""
    found = [next((s for s in range(n) if is_close(actual[r], expected[s], rtol)), None) for r in range(n)]
    if None in found or found == list(range(n)):
        return ""
    if len(set(found)) == 1:
        return f"every rank has what rank {found[0]} should have"
    pairs = ", ".join(f"rank {r} has rank {s}'s" for r, s in enumerate(found) if r != s)
    return f"the right values on the wrong ranks: {pairs}"


def _numbers(a: Tensor, e: Tensor) -> str:
    if a.numel() == 0:
        return "empty"
    error = (a.double() - e.double()).abs().nan_to_num(nan=math.inf).masked_fill(a == e, 0.0)  # inf - inf
    flat = int(error.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape)) if a.dim() else ()
    place = f" at {list(index)}" if index else ""
    return f"expected {_short(e.flatten()[flat].item())}{place}, got {_short(a.flatten()[flat].item())}"


def _share(a: Tensor, e: Tensor) -> str:
    scale = e.double()[torch.isfinite(e)].abs().max() if torch.isfinite(e).any() else 0.0
    right = ((a.double() - e.double()).abs() <= 1e-4 * scale) | (a == e)  # inf - inf is NaN
    share = right.double().mean().item()
    return f" ({share:.0%} of the elements are right)" if 0.1 < share < 1 else ""


def _short(value: float) -> str:
    return f"{value:.5g}"


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _on(rank: int, num_ranks: int) -> str:
    return f" on rank {rank}" if num_ranks > 1 else ""


def _ranks(wrong: Sequence[int], num_ranks: int) -> str:
    if len(wrong) == num_ranks:
        return " on every rank"
    return f" on rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
