"""Guesses: the learner writes numbers down, and sees them beside what is true."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeGuard

NEAR = 1.1
"""Up to this factor a guess is right."""
FAR = 2.0
"""From this factor on, something was thought of otherwise."""


@dataclass(frozen=True)
class Truth:
    """What is true of one question."""

    name: str
    """Of the guess."""
    question: str
    value: float
    unit: str
    because: str
    """Where the number comes from, in a few words."""


class Guesses:
    """Numbers that somebody wrote down; `...` is none."""

    def __init__(self, numbers: dict[str, object]) -> None:
        self.numbers = {name: n for name, n in numbers.items() if _is_number(n)}
        self.no_numbers = {n: v for n, v in numbers.items() if n not in self.numbers and v not in (..., None)}

    def compare(self, truths: Sequence[Truth]) -> None:
        """Show each guess, the truth, and the factor between them."""
        from IPython.display import display

        rows = [(truth, self.numbers.get(truth.name)) for truth in truths]
        plain = [_plain_row(truth, guess) for truth, guess in rows]
        display({"text/plain": "\n".join(plain), "text/html": _table(rows)}, raw=True)


def guess(**numbers: object) -> Guesses:
    """Write down what you expect, a number for each name, or `...` if you have no idea. It is not graded."""
    guesses = Guesses(numbers)
    for name, value in guesses.no_numbers.items():
        print(f"{name}={value!r} is no number: it counts as no guess")
    if not guesses.numbers:
        print("No guess yet. The next cell runs all the same, but a wrong guess teaches more than none.")
    return guesses


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _rounded_like(guess: float, truth: float) -> float:
    """The truth with as many decimals as the guess was written with: 4 has none, 4.0 has one."""
    exponent = Decimal(str(guess)).as_tuple().exponent
    return round(truth, -exponent if isinstance(exponent, int) else 0)


def factor(guess: float | None, truth: float) -> str:
    """How far a guess is from the truth, in words. It is right if it is the truth rounded to its digits."""
    if guess is None:
        return "no guess"
    if guess == truth:
        return "exactly"
    if guess * truth <= 0:
        return "another sign" if guess * truth < 0 else "not zero" if guess == 0 else "zero"
    ratio = guess / truth
    if 1 / NEAR <= ratio <= NEAR or guess == _rounded_like(guess, truth):
        return "right"
    times = max(ratio, 1 / ratio)
    rounded = float(f"{times:.2g}")
    told = f"{times:.1f}" if times < 10 else f"{rounded:,.0f}" if rounded < 1e6 else f"{times:.0e}"
    return f"{told} times too {'high' if ratio > 1 else 'low'}"


def number(value: float) -> str:
    """With as many digits as a guess deserves."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def said(truth: Truth) -> str:
    """The number and its unit, if it has one."""
    return f"{number(truth.value)} {truth.unit}".rstrip()


def _plain_row(truth: Truth, guess: float | None) -> str:
    yours = "-" if guess is None else number(guess)
    told = f"{truth.question}: you {yours}, true {said(truth)}"
    return f"{told} ({factor(guess, truth.value)}). {truth.because}"


def _table(rows: Sequence[tuple[Truth, float | None]]) -> str:
    cells = ["".join(f"<th style='text-align:left'>{h}</th>" for h in ("", "you", "true", "", "because"))]
    for truth, guess in rows:
        told = factor(guess, truth.value)
        color = {"right": "#1a7f37", "exactly": "#1a7f37", "no guess": "#808080"}.get(told, "#cf222e")
        near = guess is not None and guess * truth.value > 0 and 1 / FAR < guess / truth.value < FAR
        if near and color == "#cf222e":
            color = "#9a6700"
        values = (
            ("", truth.question),
            ("font-weight:bold", "-" if guess is None else number(guess)),
            ("font-weight:bold", said(truth)),
            (f"color:{color}", told),
            ("", truth.because),
        )
        cells.append("".join(f"<td style='text-align:left;{css}'>{html.escape(v)}</td>" for css, v in values))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"
