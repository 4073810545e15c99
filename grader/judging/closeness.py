"""When two tensors are the same: how much of an error the order of a sum explains, and no more."""

import math

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest error that the order of a sum explains, as a fraction of the largest expected element."""

LEAST = 0.03
"""What is smaller is compared as if it were this large: a thirtieth of it in float64, where nothing is zero.

Numbers of ordinary size may cancel. Rounding is then that of the terms, and not of what is left of them.
"""

FROM_PLAIN = 8
"""How many times as far off as the plainest computation in the same dtype another one may be."""


def tolerance(actual: Tensor, expected: Tensor, rtol: float | None = None) -> float:
    """The relative tolerance that two tensors are compared with: as asked for, or by the coarser dtype."""
    if rtol is not None:
        return rtol
    return max(TOLERANCE.get(dtype, 3e-5) for dtype in (actual.dtype, expected.dtype))


def is_close(
    actual: Tensor, expected: Tensor, rtol: float | None = None, plain: Tensor | None = None
) -> bool:
    """Equal up to the order of sums. NaN equals nothing; integers must be equal."""
    return error_used(actual, expected, rtol, plain) <= 1.0


def error_used(
    actual: Tensor, expected: Tensor, rtol: float | None = None, plain: Tensor | None = None
) -> float:
    """The largest error, as a fraction of what is allowed: above 1 is wrong.

    Args:
        rtol: allowed error relative to the largest expected element; None is TOLERANCE of the dtype.
        plain: what is expected once more, computed in the plainest way in the dtype that the submission
            computes in. How far it is off is the condition of the problem: nobody can be more exact, whatever
            the size of the result, and FROM_PLAIN times as much is allowed on top.
    """
    if actual.shape != expected.shape or actual.is_complex() != expected.is_complex():
        return math.inf
    if not actual.is_floating_point():
        return 0.0 if torch.equal(actual.to(expected.dtype), expected) else math.inf
    if actual.numel() == 0:
        return 0.0
    relative, exact = tolerance(actual, expected, rtol), actual.dtype == torch.float64
    right = expected.double()
    error = (actual.double() - right).abs_().max().item()
    if not math.isfinite(error):
        return _error_of_finite(actual, expected, rtol, plain)
    largest = right.abs().max().item()
    allowed = relative * max(largest, LEAST / 30 if exact and largest else LEAST)
    if plain is not None:
        allowed += FROM_PLAIN * (plain.double() - right).nan_to_num(0.0).abs().max().item()
    if allowed == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / allowed


def _error_of_finite(actual: Tensor, expected: Tensor, rtol: float | None, plain: Tensor | None) -> float:
    """The same where numbers are infinite: those must be equal, and the others are compared."""
    finite = torch.isfinite(actual)
    same = torch.isinf(expected) & (actual.double() == expected.double())
    if finite.all() or not (same | finite).all():
        return math.inf
    return error_used(actual[finite], expected[finite], rtol, None if plain is None else plain[finite])
