"""Compares tensors with what they should be, and names the likely cause of a difference.

A cause is said only if it explains every rank and every element: those that are wrong, and those that are
right. NaN alone explains nothing, unless the cause speaks of it. A next step is said only where it belongs to
the cause.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from grader.judging.between import between_ranks, tell_agreement, tell_ranks
from grader.judging.closeness import is_close, tolerance
from grader.judging.patterns import Pair, not_finite, recognise
from grader.judging.wording import apart, of_ranks, tell_where

ByRank = Tensor | Sequence[Tensor]

NEXT_TO_0 = 1e-6
"""Of the largest expected number: less is what rounding has left of 0, and shown if nothing else is wrong."""
MOST_FAULTS = 2
"""That are told where several give the same numbers."""


@dataclass(frozen=True)
class Fault:
    """What a submission with a known fault would have returned, and what to do about that fault.

    Without a step, and found on all ranks or on none, the values alone say as much.
    """

    values: ByRank
    """For every rank; a tensor is the same on all."""
    step: str = ""
    """The next step for somebody who has this fault."""
    on_some_ranks: bool = False
    """A rank may have it while another is right, or has another such fault: it is told with the ranks."""
    of_no_message: bool = False
    """No buffer that was used too early gives these numbers: they alone are told, whatever was seen."""
    before_writes: bool = False
    """What was sent was what the buffer held then: that it was written into too early changed no number."""


@dataclass(frozen=True)
class Difference:
    """What is wrong with a tensor, or with one tensor a rank."""

    message: str
    """One sentence: which rank, what was expected, what came."""
    cause: str
    """The likely cause, "" where nothing explains it all."""
    rank: int | None
    step: str = ""
    """The next step, if the cause has one."""
    wrong: tuple[int, ...] = ()
    """The ranks whose numbers are wrong; none where already the form is."""
    known: bool = False
    """Whether the cause is a fault that the check knows, and not a pattern of the numbers alone."""
    sure: bool = True
    """Whether more ranks would tell nothing more: of two, the other one is the next and the last as well."""
    of_no_message: bool = False
    """Whether the cause is a fault that no message has a part in."""
    before_writes: bool = False
    """Whether it is one in which no write into a buffer that is sent has a part."""


Alternatives = Mapping[str, ByRank | Fault]
Terms = Mapping[str, ByRank] | Sequence[Tensor]


def compare(
    what: str,
    actual: Sequence[object],
    expected: Sequence[Tensor],
    alternatives: Alternatives | Callable[[], Alternatives] | None = None,
    rtol: float | None = None,
    factors: Mapping[str, float] | None = None,
    terms: Terms | Callable[[], Terms] | None = None,
    plain: Sequence[Tensor] | None = None,
    coarse: bool = False,
) -> Difference | None:
    """Compare one value a rank with what it should be; None when all agree.

    Args:
        what: what the value is, such as "the gradient of x".
        actual: by rank; whatever the submission returned.
        expected: by rank.
        alternatives: cause → what a submission with that fault would have returned, on every rank. What
            takes time to compute is a function, which is called if something is wrong.
        rtol: allowed error relative to the largest expected element; None is TOLERANCE of the dtype.
        factors: name → value of numbers that a result might be off by, next to the number of ranks.
        terms: what the expected value adds up, in whatever proportion: name → value, or the ranks' own
            parts in a list. A missing one, or one that counts twice, is then named. Or a function, as above.
        plain: see `closeness.error_used`.
        coarse: whether it may be in 16 bits where what is expected is the judge's float64. Else who returns
            something coarser than float32 would have chosen the tolerance that he is measured with.
    """
    num_ranks = len(expected)
    wrong = []
    for rank, (a, e) in enumerate(zip(actual, expected, strict=True)):
        fault = _unfit(a, e, coarse or rtol is not None)
        if fault:
            on = f" on rank {rank}" if num_ranks > 1 else ""
            cause = _no_gradient(what, actual) if a is None else _shape_cause(a, e)
            step = ""
            if _is_reshaped(a, e, rtol):
                cause = "the numbers are right, and their order: only the shape is not"
                step = f"Give it the shape {_shape(e)}, by flatten or view: nothing has to move."
            return Difference(f"{_predicated(what, fault)}{on}", cause, rank, step)
        if not is_close(a, e, rtol, plain[rank] if plain else None):
            wrong.append(rank)
    if not wrong:
        return None
    tensors = [a for a in actual if isinstance(a, Tensor)]
    alternatives = alternatives() if callable(alternatives) else alternatives or {}
    cause, step = _known(tensors, expected, alternatives, wrong, rtol)
    known = bool(cause)
    if not cause:
        pairs = _pairs(tensors, expected, rtol, factors or {})
        cause = _recognised(pairs, wrong, _by_rank(terms() if callable(terms) else terms, num_ranks))
    sure = bool(cause) and num_ranks != 2
    rank = wrong[0]
    numbers = _numbers(tensors[rank], expected[rank])
    if not cause:
        numbers += _share(tensors[rank], expected[rank]) + tell_agreement(pairs, wrong)
    message = f"{_predicated(what, 'is wrong')}{tell_ranks(wrong, num_ranks)}: {numbers}"
    fault = alternatives.get(cause)
    apart = (fault.of_no_message, fault.before_writes) if isinstance(fault, Fault) else (False, False)
    return Difference(message, cause, rank, step, tuple(wrong), known, sure, *apart)


PLURAL = re.compile(r"(the|this rank's) (logits|losses)\b")


def _predicated(what: str, predicate: str) -> str:
    """A sentence of what is compared: the predicate is that of one thing, such as "is wrong"."""
    verb, _, rest = predicate.partition(" ")
    verb = {"is": "are", "has": "have"}[verb] if PLURAL.match(what) else verb
    return f"{what} {verb} {rest}"


def _unfit(actual: object, expected: Tensor, coarse: bool) -> str:
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
    if not coarse and not exact and actual.is_floating_point() and actual.element_size() < 4:
        return f"is {actual.dtype} where torch.float32 or finer is expected"
    return ""


def _no_gradient(what: str, actual: Sequence[object]) -> str:
    if "gradient" not in what:
        return ""
    having = [rank for rank, a in enumerate(actual) if a is not None]
    if having:
        return f"it is there on {of_ranks(having)} alone: on the others nothing connects it with the loss"
    return "no backward has reached it: nothing connects it with the loss, or its gradient was not asked for"


def _is_reshaped(actual: object, expected: Tensor, rtol: float | None) -> bool:
    """Whether a tensor is right but for its shape."""
    if not isinstance(actual, Tensor) or actual.shape == expected.shape:
        return False
    return actual.numel() == expected.numel() > 1 and is_close(actual.reshape(expected.shape), expected, rtol)


def _shape_cause(actual: object, expected: Tensor) -> str:
    if not isinstance(actual, Tensor) or actual.shape == expected.shape:
        return ""
    if actual.dim() == 2 and actual.T.shape == expected.shape:
        return "it is transposed"
    if sorted(actual.shape) == sorted(expected.shape):
        return "the dimensions are in another order"
    ratios = {}
    if actual.dim() == expected.dim():
        sizes = enumerate(zip(actual.shape, expected.shape, strict=True))
        ratios = {d: Fraction(a, e) for d, (a, e) in sizes if a != e and e}
    small, large = (pick(ratios, key=ratios.get, default=0) for pick in (min, max))
    if actual.numel() == expected.numel():
        if len(ratios) == 2 and ratios[large].denominator == 1:
            return (
                f"dimension {large} is {ratios[large]} times too large, and dimension {small} as many times "
                f"too small: are parts joined, or cut, along {large} where {small} belongs?"
            )
        return "the number of elements is right, and the shape is not"
    if len(ratios) == 1 and ratios[large] > 1 and ratios[large].denominator == 1:
        return f"one dimension is {ratios[large]} times too large: the whole, not a part?"
    if len(ratios) == 1 and ratios[small] and ratios[small].numerator == 1:
        return f"one dimension is {ratios[small].denominator} times too small: a part, not the whole?"
    return ""


def _known(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    alternatives: Alternatives,
    wrong: Sequence[int],
    rtol: float | None,
) -> tuple[str, str]:
    """The fault that gives every rank's tensor, and its next step; or, of those that may, one a rank."""
    faults = {cause: _fault(value, len(actual)) for cause, value in alternatives.items()}
    fitting = [
        cause
        for cause, fault in faults.items()
        if _tells(cause, fault.values)
        and all(_is_fault(*each, rtol) for each in zip(actual, fault.values, expected, strict=True))
    ]
    fitting = [cause for cause in fitting if not faults[cause].on_some_ranks] or fitting
    if fitting:
        return "; or: ".join(fitting[:MOST_FAULTS]), faults[fitting[0]].step if len(fitting) == 1 else ""
    found: dict[str, list[int]] = {}
    for rank in wrong:
        fits = (
            cause
            for cause, fault in faults.items()
            if fault.on_some_ranks
            and _tells(cause, [fault.values[rank]])
            and _is_fault(actual[rank], fault.values[rank], expected[rank], rtol)
        )
        found.setdefault(next(fits, ""), []).append(rank)
    if "" in found:
        return "", ""
    if len(found) == 1:
        cause = next(iter(found))
        return cause if len(wrong) == len(actual) else f"on {of_ranks(wrong)}: {cause}", faults[cause].step
    return "; ".join(f"on {of_ranks(ranks)}: {cause}" for cause, ranks in found.items()), ""


def _is_fault(actual: Tensor, value: Tensor, expected: Tensor, rtol: float | None) -> bool:
    """Whether a tensor is what a fault gives.

    What must be right bit for bit may have a fault in another order of summation, if the fault is no such.
    A fault that makes NaN of some numbers makes it of these.
    """
    odd = value.isnan() if value.is_floating_point() else torch.zeros_like(value, dtype=torch.bool)
    if odd.any() and actual.shape == value.shape == expected.shape:
        if not torch.equal(actual.isnan(), odd):
            return False
        actual, value, expected = actual[~odd], value[~odd], expected[~odd]
    return is_close(actual, value, rtol) or (is_close(actual, value) and not is_close(expected, value))


def _fault(value: ByRank | Fault, num_ranks: int) -> Fault:
    fault = value if isinstance(value, Fault) else Fault(value)
    values = [fault.values] * num_ranks if isinstance(fault.values, Tensor) else list(fault.values)
    return replace(fault, values=values)


def _tells(cause: str, values: Sequence[Tensor]) -> bool:
    """Whether what a fault gives can be told from what others give: all NaN look alike.

    Numbers that are NaN throughout are enough for a cause that speaks of NaN: its check has no other.
    """
    return "NaN" in cause or not all(bool(value.isnan().all()) for value in values)


def _by_rank(terms: Terms | None, num_ranks: int) -> dict[str, Sequence[Tensor]]:
    if terms is None:
        return {}
    named = terms if isinstance(terms, Mapping) else {"": terms}
    return {
        name: [value] * num_ranks if isinstance(value, Tensor) else list(value)
        for name, value in named.items()
    }


def _pairs(
    actual: Sequence[Tensor], expected: Sequence[Tensor], rtol: float | None, factors: Mapping[str, float]
) -> list[Pair]:
    """In double precision, with zeros for infinities that are right.

    What must be equal bit for bit is recognised as it would be otherwise.
    """
    pairs = []
    for a, e in zip(actual, expected, strict=True):
        near = max(tolerance(a, e), rtol or 0.0) if a.is_floating_point() else 1e-9
        right = torch.isinf(e) & (a == e)
        a64, e64 = a.double().masked_fill(right, 0.0), e.double().masked_fill(right, 0.0)
        pairs.append(Pair(a64, e64, near, a.dtype, len(expected), factors))
    return pairs


def _recognised(pairs: Sequence[Pair], wrong: Sequence[int], terms: Mapping[str, Sequence[Tensor]]) -> str:
    """A pattern over all ranks, or one on each rank that is wrong."""
    odd = [not_finite(pairs[r]) for r in wrong]
    if any(odd):
        return next(told for told in odd if told)
    if any(not torch.isfinite(pair.expected).all() for pair in pairs):
        return ""
    found = between_ranks(pairs, terms)
    if found:
        return found
    return _on_each(pairs, wrong)


def _on_each(pairs: Sequence[Pair], wrong: Sequence[int]) -> str:
    """A pattern on each rank that is wrong: the same one, the same with other numbers, or several."""
    kinds: dict[str, list[int]] = {}
    causes: dict[str, list[int]] = {}
    for r in wrong:
        kind, cause = recognise(pairs[r])
        kinds.setdefault(kind, []).append(r)
        causes.setdefault(cause, []).append(r)
    if "" in causes:
        return ""
    first = next(iter(causes))
    if len(causes) == 1:
        return first
    if len(kinds) == 1 and len(wrong) > 2:
        return f"on rank {wrong[0]} {first}; likewise on {of_ranks(wrong[1:])}"
    return "; ".join(f"on {of_ranks(ranks)} {cause}" for cause, ranks in causes.items())


def _numbers(a: Tensor, e: Tensor) -> str:
    if a.numel() == 0:
        return "empty"
    error = (a.double() - e.double()).abs().nan_to_num(nan=math.inf).masked_fill(a == e, 0.0)  # inf - inf
    scale = e.double()[torch.isfinite(e)].abs().max() if torch.isfinite(e).any() else 0.0
    elsewhere = error.masked_fill((e != 0) & (e.double().abs() < NEXT_TO_0 * scale), 0.0)
    error = elsewhere if elsewhere.max() > error.max() / 10 else error
    index = tuple((error == error.max()).nonzero()[0].tolist())
    place = f" at {list(index)}" if index else ""
    expected, got = apart(e[index].item(), a[index].item())
    return f"expected {expected}{place}, got {got}"


def _share(a: Tensor, e: Tensor) -> str:
    """How much is right, and where the rest is."""
    scale = e.double()[torch.isfinite(e)].abs().max() if torch.isfinite(e).any() else 0.0
    right = ((a.double() - e.double()).abs() <= 1e-4 * scale) | (a == e)  # inf - inf is NaN
    share = right.double().mean().item()
    if not 0.1 < share < 1:
        return ""
    place = tell_where(~right)
    return f" ({share:.0%} of the elements are right" + (f"; wrong: {place})" if place else ")")


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
