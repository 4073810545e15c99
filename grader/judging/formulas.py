"""Recognises by which term counts are off: a product of the arguments, the same one for every call.

A count that lacks a term is off by that term. Where the differences of many calls are one number times one
product of what the function was given, the product names the term.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Any

MOST_FACTORS = 5
FEWEST_CALLS = 4
"""Whose differences must not be zero: of fewer calls too many products fit by chance."""


@dataclass(frozen=True)
class Off:
    """One call, and by how much its answer is off: 0 where it is right."""

    call: tuple
    by: float


def off_by_a_term(function: Callable[..., Any], calls: Sequence[Off]) -> str:
    """Such as "always 2 · n_layer · n_embd² too few", or "" where no product fits every call."""
    wrong = [off for off in calls if off.by]
    if len(wrong) < FEWEST_CALLS or len({off.by for off in wrong}) == 1:
        return ""
    rows = [named_numbers(function, off.call) for off in calls]
    places = [i for i, off in enumerate(calls) if off.by]
    for names in _products(rows, places):
        times = [calls[i].by / math.prod(rows[i][name] for name in names) for i in places]
        if not all(math.isclose(value, times[0], rel_tol=1e-9) for value in times):
            continue
        number = Fraction(times[0]).limit_denominator(8)
        if abs(number) > 64 or not math.isclose(number, times[0], rel_tol=1e-9):
            continue
        where = tell_where(function, calls)
        vanishes = all(
            math.prod(rows[i][n] for n in names) == 0 for i in range(len(calls)) if i not in places
        )
        if where or vanishes:
            many = "many" if number > 0 else "few"
            return f"{where}{': ' if where else ''}always {_told(names, abs(number))} too {many}"
    return ""


def named_numbers(function: Callable[..., Any], call: tuple) -> dict[str, float]:
    """The numbers of a call's arguments by name, those of dataclasses too, and each one less one."""
    found: dict[str, float] = {}
    for name, value in inspect.signature(function).bind(*call).arguments.items():
        of = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else {name: value}
        found |= {n: v for n, v in of.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    less = {f"({name} - 1)": value - 1 for name, value in found.items() if isinstance(value, int)}
    return found | less


def _products(rows: Sequence[dict[str, float]], places: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Products that are never zero where an answer is wrong, the simplest first."""
    names = [name for name in rows[0] if all(rows[i].get(name) for i in places)]
    plain = [name for name in names if " " not in name]
    for size in range(1, MOST_FACTORS + 1):
        yield from combinations_with_replacement(plain, size)
        for product in combinations_with_replacement(names, size):
            if sum(" " in name for name in product) == 1:
                yield product


def tell_where(function: Callable[..., Any], calls: Sequence[Off]) -> str:
    """The one argument that tells the calls that are off from the others, such as "where bias=True"."""
    settings: list[dict[str, Any]] = []
    if all(off.by for off in calls):
        return ""
    for off in calls:
        found: dict[str, Any] = {}
        for name, value in inspect.signature(function).bind(*off.call).arguments.items():
            of = (
                {f.name: getattr(value, f.name) for f in fields(value)}
                if is_dataclass(value)
                else {name: value}
            )
            found |= {n: v for n, v in of.items() if isinstance(v, str | bool)}
            found |= {f"{n} > 0": v > 0 for n, v in of.items() if isinstance(v, float)}
        settings.append(found)
    for name in settings[0]:
        there = {found.get(name) for found, off in zip(settings, calls, strict=True) if off.by}
        others = {found.get(name) for found, off in zip(settings, calls, strict=True) if not off.by}
        if len(there) == 1 and not there & others:
            value = there.pop()
            return f"where {name if name.endswith('> 0') else f'{name}={value!r}'}"
    return ""


def _told(names: Sequence[str], number: Fraction) -> str:
    powers = {1: "", 2: "²", 3: "³", 4: "⁴", 5: "⁵"}
    words = [f"{name}{powers[names.count(name)]}" for name in dict.fromkeys(names)]
    return " · ".join(([] if number == 1 else [str(number)]) + words)
