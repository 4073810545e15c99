"""Recognises how one tensor differs from what it should be: by a factor, in its order, in its precision.

Every recogniser looks at one rank's tensor and says a cause, or "". It says one only if the pattern gives
every element, those that are right as well; what two numbers show by chance is no pattern.
"""

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations

import torch
from torch import Tensor

from grader.judging.closeness import is_close
from grader.judging.order import find_order, tell_order
from grader.judging.wording import short, slices, span, tell_where

LOWER = {torch.float64: (torch.float32, torch.bfloat16), torch.float32: (torch.bfloat16, torch.float16)}
"""What a number of a dtype may have gone through on its way."""

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "the square of what it should be: was a root not taken?": torch.square,
    "the square root of what it should be": lambda x: x.clamp(min=0).sqrt(),
    "the logarithm of what it should be": lambda x: x.clamp(min=1e-300).log(),
    "the exponential of what it should be": lambda x: x.clamp(max=700).exp(),
    "one divided by what it should be": lambda x: 1 / x,
    "what it should be, without the signs": torch.abs,
    "what it should be, with zero for everything negative": lambda x: x.clamp(min=0),
}


@dataclass(frozen=True)
class Pair:
    """One rank's tensor beside what it should be, in double precision."""

    actual: Tensor
    expected: Tensor
    rtol: float
    dtype: torch.dtype
    """In which the submission returned it."""
    num_ranks: int = 1
    factors: Mapping[str, float] = field(default_factory=dict)
    """Name → value of numbers that a result might be off by."""

    def fits(self, guess: Tensor) -> bool:
        """Whether the tensor is this guess, everywhere."""
        return is_close(self.actual, guess, self.rtol)


def zero(pair: Pair) -> str:
    """Nothing was written, or everything was cleared."""
    return "" if pair.actual.any() else "it is zero everywhere: was it ever written?"


def factor(pair: Pair) -> str:
    """Every element is a number times what it should be. Of a single number only a named factor is told."""
    a, e = pair.actual, pair.expected
    norm = (e * e).sum().item()
    if norm == 0:
        return ""
    ratio = (a * e).sum().item() / norm
    if math.isclose(ratio, 1, rel_tol=1e-3) or not pair.fits(ratio * e):
        return ""
    several = int((e.abs() > 1e-3 * e.abs().max()).sum()) > 1
    return _name_factor(pair, ratio, alone=not several)


def _name_factor(pair: Pair, ratio: float, alone: bool) -> str:
    near = 2 * pair.rtol if alone else 2e-3
    told = f"every element is {short(ratio)} times what it should be"
    if math.isclose(ratio, -1, rel_tol=near):
        return "every element has the wrong sign"
    n = float(pair.num_ranks)
    powers = ((1, ""), (-1, "1 / "), (2, "the square of "), (-2, "1 / the square of "))
    if math.isclose(ratio, 1 / math.log(2), rel_tol=near):
        return f"{told}, and that is 1 / ln 2: a logarithm to base 2"
    for name, value in (("the number of ranks", n), *pair.factors.items()):
        for power, text in powers:
            if value > 1 and math.isclose(ratio, value**power, rel_tol=near):
                return f"{told}, and that is {text}{name}"
    simple = Fraction(ratio).limit_denominator(12)
    is_simple = simple.numerator and math.isclose(ratio, simple, rel_tol=near)
    others = {"(n - 1) / n": (n - 1) / n, "n - 1": n - 1, "1 / (n - 1)": 1 / (n - 1)} if n > 2 else {}
    for text, value in others.items():
        if math.isclose(abs(ratio), value, rel_tol=near):
            return f"{told}, and that is {text} with n = {n:.0f} ranks"
    if is_simple and simple.denominator > 1 and abs(simple.numerator) <= 12:
        return f"{told} ({simple.numerator}/{simple.denominator})"
    whole = round(1 / ratio) if abs(ratio) > 1e-6 else 0  # of memory that nothing has arrived in, perhaps
    if not alone and 12 < abs(whole) <= 4096 and math.isclose(1 / ratio, whole, rel_tol=1e-4):
        return f"{told} (1/{whole})"
    return told if not alone or (is_simple and abs(simple.numerator) <= 4) else ""


READ_SO = "a view() where a transpose() belongs, or memory that lies in another order than it is taken for?"


def exchanged(pair: Pair) -> str:
    """Two dimensions have changed places, or the elements were read in the order of an exchanged tensor."""
    a, e = pair.actual, pair.expected
    for i, j in combinations(range(a.dim()), 2):
        if min(a.size(i), a.size(j)) < 2:
            continue
        if a.size(i) == a.size(j) and pair.fits(e.transpose(i, j)):
            return "it is transposed" if a.dim() == 2 else f"its dimensions {i} and {j} have changed places"
        sizes = list(a.shape)
        sizes[i], sizes[j] = sizes[j], sizes[i]
        for guess in (e.transpose(i, j).reshape(a.shape), e.reshape(sizes).transpose(i, j)):
            if pair.fits(guess):
                return f"the right numbers, read as if dimensions {i} and {j} had changed places: {READ_SO}"
    return ""


def in_another_order(pair: Pair) -> str:
    """Rows, columns or slices that are the right ones in the wrong places."""
    for dim in range(pair.actual.dim()):
        order = find_order(pair.actual, pair.expected, dim, pair.rtol)
        if order is not None:
            return tell_order(order, dim, pair.actual.dim())
    return ""


def sorted_alike(pair: Pair) -> str:
    """The same numbers, wherever they stand."""
    if pair.actual.numel() < 3:
        return ""
    a, e = (tensor.flatten().sort().values for tensor in (pair.actual, pair.expected))
    return "these are the right numbers in another order" if is_close(a, e, pair.rtol) else ""


def shifted_by_a_vector(pair: Pair) -> str:
    """The same difference in every row, as a bias makes it, or one number for all elements."""
    difference = pair.actual - pair.expected
    if difference.numel() < 3:
        return ""
    mean = difference.mean()
    if pair.fits(pair.expected + mean):
        many = "large" if mean > 0 else "small"
        return f"every element is {short(abs(mean.item()))} too {many}"
    rows = difference.numel() // difference.size(-1)
    if difference.dim() >= 2 and rows > 1 and difference.size(-1) > 1:
        vector = difference.reshape(rows, -1).mean(0)
        if pair.fits(pair.expected + vector):
            return (
                "it differs by the same vector in every row: a bias that is missing, or added more than once?"
            )
    return ""


def function_of(pair: Pair) -> str:
    """A root, a square or the like too many or too few."""
    for told, function in FUNCTIONS.items():
        guess = function(pair.expected)
        if torch.isfinite(guess).all() and guess.any() and pair.fits(guess):
            return f"it is {told}"
    return ""


def factor_of_each_slice(pair: Pair) -> str:
    """Rows or columns that have each a factor of their own, such as zero in one half."""
    for dim in range(pair.actual.dim()):
        a, e = (
            tensor.movedim(dim, 0).reshape(tensor.size(dim), -1) for tensor in (pair.actual, pair.expected)
        )
        if not 2 <= len(a) <= 4096 or a.size(1) < 2:
            continue
        if ((e.abs() > 1e-3 * e.abs().max()).sum(1) < 2).any():
            continue
        ratios = (a * e).sum(1) / (e * e).sum(1)
        if (ratios - 1).abs().max() < 2e-3:
            return ""  # a matter of precision
        if is_close(a, ratios.unsqueeze(1) * e, pair.rtol):
            return _tell_factors([round(ratio, 3) for ratio in ratios.tolist()], dim, pair.actual.dim())
    return ""


def _tell_factors(ratios: list[float], dim: int, num_dims: int) -> str:
    runs: list[list[float]] = []  # first, last, ratio
    for i, ratio in enumerate(ratios):
        if runs and math.isclose(runs[-1][2], ratio, abs_tol=2e-3):
            runs[-1][1] = i
        else:
            runs.append([i, i, ratio])
    name = slices(dim, num_dims)
    if len(runs) > 4:
        shown = ", ".join(short(ratio) for ratio in ratios[:4])
        return f"each of the {name} has a factor of its own: {shown} and so on"
    words = {0.0: "zero", 1.0: "right", -1.0: "of the wrong sign"}
    told = (
        f"{span(name, int(first), int(last))} "
        f"{'is' if first == last else 'are'} {words.get(ratio, f'{short(ratio)} times what they should be')}"
        for first, last, ratio in runs
    )
    return ", ".join(told)


def precision(pair: Pair) -> str:
    """Nearly right: rounded to another dtype, computed in it, or without a small term.

    One number is near another by chance, and so are weights after a few small steps: what is off by more than
    a thousandth is nearly right only if a dtype gives it away.
    """
    a, e = pair.actual, pair.expected
    size = e.abs().max()
    error = ((a - e).abs().max() / size).item() if size else math.inf
    nonzero = a != 0
    for dtype in LOWER.get(pair.dtype, ()):
        name = str(dtype).removeprefix("torch.")
        rounded = (a.to(dtype).to(torch.float64) == a)[nonzero]
        if int(nonzero.sum()) >= 4 and rounded.all() and error < 3 * torch.finfo(dtype).eps:
            told = f"every number is one that {name} can hold: it went through {name} on the way"
            return f"{told}. Where does it leave {str(pair.dtype).removeprefix('torch.')}?"
    if a.numel() < 4 or not 0 < error < 1e-3:
        return ""
    digits = math.floor(-math.log10(error))
    words = {3: "three digits", 4: "four digits", 5: "five digits"}
    told = words.get(digits, f"{digits} digits")
    return f"it is right to {told} only: a lower precision somewhere, or a small term left out?"


RECOGNISERS: Sequence[Callable[[Pair], str]] = (
    zero,
    factor,
    exchanged,
    in_another_order,
    shifted_by_a_vector,
    function_of,
    factor_of_each_slice,
    sorted_alike,
    precision,
)
"""From what says most to what says least."""


def recognise(pair: Pair) -> tuple[str, str]:
    """The first pattern that gives the whole tensor: its name, and in words.

    What must be right bit for bit, and is but for its last digits, has no other pattern than its precision.
    """
    looks = (zero, precision) if pair.fits(pair.expected) else RECOGNISERS
    if pair.actual.numel() and torch.isfinite(pair.actual).all() and torch.isfinite(pair.expected).all():
        for look in looks:
            if told := look(pair):
                return look.__name__, told
    return "", ""


def not_finite(pair: Pair) -> str:
    """NaN, or an infinity where none belongs: how many, and whether the rest is right."""
    actual, expected = pair.actual, pair.expected
    for name, where in (("NaN", actual.isnan()), ("infinities", actual.isinf() & expected.isfinite())):
        count = int(where.sum())
        if not count:
            continue
        asked = NEVER_WRITTEN if name == "NaN" and _as_filled(pair) else ""
        if actual.numel() == 1:
            return f"it is {'NaN' if name == 'NaN' else 'infinite'}{asked}"
        if count == actual.numel():
            return f"it contains {name}: all of its elements{asked}"
        rest = is_close(actual[~where], expected[~where], 1e-4)
        return (
            f"it contains {name}: {count} of {actual.numel()} elements"
            + (f", in {place}" if (place := tell_where(where)) else "")
            + (", and the others are right" if rest else "")
            + asked
        )
    return ""


NEVER_WRITTEN = (
    ". Is it memory that nothing was written to? While grading, torch.empty gives NaN, not zeros by chance"
)


def _as_filled(pair: Pair) -> bool:
    """Whether all NaN may be torch's filling of fresh memory: it has no sign; x86's own (of 0/0) has."""
    nan = pair.actual[pair.actual.isnan()]
    exact = pair.dtype in (torch.float32, torch.float64)
    return exact and platform.machine().lower() in ("x86_64", "amd64") and not nan.signbit().any()
