"""Judges functions that compute numbers, such as counts, bytes or seconds.

A lesson gives the calls, the true answers as it measures them, and the wrong numbers that known slips lead
to. All calls go in one run; nothing here knows what is counted.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from importlib import import_module
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from grader.judging.formulas import Off, off_by_a_term, tell_where
from grader.judging.trial import Trial

Slips = Callable[..., Mapping[str, float]]
"""For the arguments of a call: sentence → the wrong number that this slip leads to."""

EXACTLY = 1e-12
"""How close numbers are that differ by rounding alone."""

LEAST_GAP = 10
"""Whole numbers that lie closer together, on average, are hit by chance."""

Alterations = Mapping[str, Callable[..., tuple]]
"""Sentence → other arguments, for which the answer would have been right."""


@dataclass
class Answer:
    """One call, its answer, and the true one."""

    call: tuple
    given: Any
    true: float
    earlier: tuple[float, ...]
    """What was true for the calls before this one."""
    right: bool


class Answers:
    """What a submission's function gives for some calls, beside what is true.

    Args:
        name: the function, an exercise.
        calls: lists of arguments: plain data and dataclasses of the course.
        truth: computes the true answer for the arguments of a call, on the judge's side.
    """

    def __init__(self, trial: Trial, name: str, calls: Sequence[tuple], truth: Callable[..., Any]) -> None:
        self.name, self.calls, self.truth = name, list(calls), truth
        self.true = [truth(*call) for call in calls]  # the first time, the ranks' server starts meanwhile
        self.given = trial.run(ask, name, [[_pack(argument) for argument in call] for call in calls])[0]

    def asked(self, call: tuple, key: str | None = None) -> str:
        """The call as the learner would type it."""
        place = "" if key is None else f"[{key!r}]"
        return f"{self.name}({', '.join(map(repr, call))}){place}"

    def select(self, key: str, where: Callable[..., bool], tolerance: float) -> list[Answer]:
        """The answers to the calls that `where` selects; `key` picks from dictionaries."""
        found, earlier = [], []
        for call, given, true in zip(self.calls, self.given, self.true, strict=True):
            expected = true[key] if isinstance(true, dict) else true
            value = given.get(key) if isinstance(given, dict) else given
            if where(*call):
                right = same(value, expected, tolerance)
                found.append(Answer(call, value, expected, tuple(earlier), right))
            earlier.append(expected)
        return found


def ask(rank: Any, name: str, calls: list[list[Any]]) -> list[Any]:
    """The probe: call a function once for each list of arguments. A ValueError is an answer too."""
    function = getattr(rank.submission, name)
    answers = []
    for call in calls:
        arguments = [_unpack(argument) for argument in call]
        told = repr(arguments)
        try:
            answers.append(function(*arguments))
        except ValueError as error:
            answers.append(f"ValueError: {error}")
        if repr(arguments) != told:
            answers[-1] = f"an answer, and changed its arguments to {arguments}"
    return answers


def compare_answers(
    trial: Trial,
    answers: Answers,
    key: str = "",
    *,
    slips: Slips = lambda *_: {},
    alterations: Alterations | None = None,
    help: str = "",
    where: Callable[..., bool] = lambda *_: True,
    tolerance: float = 0.0,
) -> None:
    """Require the answers (their `key`, when they are dictionaries) to be the true ones.

    Args:
        where: looks at the arguments and selects the calls to compare.
        tolerance: relative; 0 asks for exact whole numbers.
    """
    asked = answers.select(key, where, tolerance)
    wrong = [answer for answer in asked if not answer.right]
    if not wrong:
        return
    first = wrong[0]
    index = answers.calls.index(first.call)
    call = answers.asked(first.call, key if isinstance(answers.given[index], dict) else None)
    message = f"{call} is {show(first.given)}; expected: {show(first.true)}"
    if tolerance == 0.0 and (value := whole(first.given)) is not None:
        message += f", so {abs(value - first.true):,} too {'many' if value > first.true else 'few'}"
    message += f". Wrong for {len(wrong)} of {len(asked)} calls." if len(asked) > 1 else "."
    named = named_cause(answers, asked, key, slips, alterations or {}, tolerance)
    trial.wrong(message, asked="" if named else help, cause=named or _by_formula(answers, asked, tolerance))


def explain_answers(
    answers: Answers,
    asked: Sequence[Answer],
    key: str = "",
    slips: Slips = lambda *_: {},
    alterations: Alterations | None = None,
    tolerance: float = 0.0,
) -> str:
    """The first known way to be wrong that gives every answer, or else by what all of them are off."""
    named = named_cause(answers, asked, key, slips, alterations, tolerance)
    return named or _by_formula(answers, asked, tolerance)


def named_cause(
    answers: Answers,
    asked: Sequence[Answer],
    key: str = "",
    slips: Slips = lambda *_: {},
    alterations: Alterations | None = None,
    tolerance: float = 0.0,
) -> str:
    """The first known way to be wrong that gives every answer, the right ones too, or nothing.

    One that gives them exactly comes before those that give them within the tolerance.
    """
    how = answers, asked, key, slips, alterations or {}
    exactly = _known_slip(*how, min(tolerance, EXACTLY))
    return exactly or _known_slip(*how, tolerance) or _in_float32(asked, tolerance)


def _known_slip(
    answers: Answers,
    asked: Sequence[Answer],
    key: str,
    slips: Slips,
    alterations: Alterations,
    tolerance: float,
) -> str:
    wrong = [answer for answer in asked if not answer.right]

    def gives(numbers: Iterable[float | None]) -> bool:
        """A slip that says nothing of a call leaves it as it is."""
        return all(
            answer.right if number is None else same(answer.given, number, tolerance)
            for answer, number in zip(asked, numbers, strict=True)
        )

    def altered(change: Callable[..., tuple]) -> Iterable[float]:
        answer = (answers.truth(*change(*each.call)) for each in asked)
        return (value[key] if isinstance(value, dict) else value for value in answer)

    known = [slips(*answer.call) for answer in asked]
    texts = list(dict.fromkeys(text for numbers in known for text in numbers))
    for text in texts:
        if gives(numbers.get(text) for numbers in known):
            return text
    if tolerance <= EXACTLY and (told := _two_slips(known, texts, asked, tolerance)):
        return told
    where = tell_where(answers.truth, _off(asked))
    for text in texts if where else ():
        numbers = (slip.get(text) for slip, answer in zip(known, asked, strict=True) if not answer.right)
        if all(n is not None and same(a.given, n, tolerance) for a, n in zip(wrong, numbers, strict=True)):
            return f"{where}: {text}"
    for text, change in alterations.items():
        if gives(altered(change)):
            return text
    first = wrong[0].given
    if len(wrong) > 2 and _is_number(first) and first and gives([first] * len(asked)):
        return "the same number for different arguments: compute it from them"
    if _of_earlier_calls(wrong, tolerance):
        return "these are answers to earlier calls: something is remembered between calls"
    return ""


def _of_earlier_calls(wrong: Sequence[Answer], tolerance: float) -> bool:
    """Whether all wrong answers are true ones of earlier calls, and these are no chance."""
    by_chance = (0, 1)  # which are answers to many calls
    earlier = set(wrong[-1].earlier)
    whole_numbers = bool(earlier) and all(isinstance(true, int) for true in earlier)
    if whole_numbers and max(earlier) - min(earlier) < LEAST_GAP * (len(earlier) - 1):
        return False
    return all(
        any(same(answer.given, true, tolerance) for true in answer.earlier)
        and whole(answer.given) not in by_chance
        for answer in wrong
    )


def _by_formula(answers: Answers, asked: Sequence[Answer], tolerance: float) -> str:
    """By which factor or term all answers are off, if it is one."""
    return _factor(asked, tolerance) or _term(answers, asked, tolerance)


def _two_slips(
    known: Sequence[Mapping[str, float]], texts: Sequence[str], asked: Sequence[Answer], tolerance: float
) -> str:
    """Two slips of which each gives some of the wrong answers, at least two, and together they give all.

    To be called with exact answers: of what is near, two of many slips give nearly anything.
    """
    given = {}
    for text in texts:
        slip = [numbers.get(text) for numbers in known]
        wrong = [
            i
            for i, (each, n) in enumerate(zip(asked, slip, strict=True))
            if not each.right and n is not None and same(each.given, n, tolerance)
        ]
        if len(wrong) > 1:
            given[text] = set(wrong)
    every = {i for i, each in enumerate(asked) if not each.right}
    for first, second in combinations(given, 2):
        if given[first] | given[second] == every and every not in (given[first], given[second]):
            return f"for some calls: {first}; for others: {second}"
    return ""


WORDS = {2: "twice", 3: "three times", 4: "four times", 8: "eight times", 100: "100 times"}


def _factor(asked: Sequence[Answer], tolerance: float) -> str:
    """The same factor for every call."""
    if len(asked) < 2 or not all(answer.true and _is_number(answer.given) for answer in asked):
        return ""
    if len({answer.true for answer in asked}) == 1:
        return ""
    factor = Fraction(float(asked[0].given / asked[0].true)).limit_denominator(16)
    if not 0 < factor <= 1024 or not all(
        math.isclose(answer.given, factor * answer.true, rel_tol=tolerance or 1e-12) for answer in asked
    ):
        return ""
    if factor == 1 and not all(isinstance(answer.true, int) for answer in asked):
        return ""
    if factor == 1:
        return "right but for its last digits: fractions are rounded. Count in whole numbers: // and not /"
    if factor in WORDS:
        return f"always exactly {WORDS[int(factor)]} what it should be"
    if 1 / factor in WORDS:
        return f"it should always be exactly {WORDS[int(1 / factor)]} that"
    if factor.denominator == 1:
        return f"always exactly {int(factor):,} times what it should be"
    return f"always exactly {factor} of what it should be"


def _in_float32(asked: Sequence[Answer], tolerance: float) -> str:
    """Whole numbers with a float32's digits: one of this size has them by chance once in 512 times."""
    wrong = [(whole(answer.given), answer.true) for answer in asked if not answer.right]
    if tolerance or max((true for _, true in wrong), default=0) < 2**32:
        return ""
    if not all(
        given is not None
        and abs(given - true) <= true / 2**22
        and torch.tensor(float(given), dtype=torch.float32).item() == given
        for given, true in wrong
    ):
        return ""
    return (
        "right to 7 digits, which are a float32's: it has no room for each whole number above 2^24. Count in "
        "Python's int"
    )


def _term(answers: Answers, asked: Sequence[Answer], tolerance: float) -> str:
    """A term too many or too few."""
    if not all(_is_number(answer.given) for answer in asked) or tolerance > 1e-6:
        return ""
    return off_by_a_term(answers.truth, _off(asked))


def _off(asked: Sequence[Answer]) -> list[Off]:
    """By how much each answer is off; an answer that is no number is off, too."""
    return [
        Off(each.call, 0 if each.right else each.given - each.true if _is_number(each.given) else math.nan)
        for each in asked
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_whole_numbers(trial: Trial, answers: Answers, keys: Sequence[str]) -> None:
    """Every answer is a dictionary that has these keys, with whole numbers."""
    for call, given in zip(answers.calls, answers.given, strict=True):
        listed = ", ".join(keys)
        is_dict = isinstance(given, dict)
        trial.require(
            is_dict, f"{answers.asked(call)} gave {given!r}", help=f"Return a dictionary: {listed}."
        )
        for key in keys:
            has = ", ".join(map(str, given)) or "none"
            trial.require(key in given, f"{answers.asked(call)} has no key {key!r}", help=f"Its keys: {has}.")
            message = f"{answers.asked(call, key)} is {given[key]!r}, not a whole number"
            trial.require(whole(given[key]) is not None, message, help="Count exactly: // where you divide.")


def require_refusal(trial: Trial, answers: Answers, words: Iterable[str] = (), *, help: str = "") -> None:
    """Every call ended in a ValueError: the next step names the words that are possible, or is `help`."""
    help = help or f"Raise a ValueError that names what is possible: {', '.join(words)}."
    for call, given in zip(answers.calls, answers.given, strict=True):
        refused = isinstance(given, str) and given.startswith("ValueError")
        message = f"{answers.asked(call)} gave {given!r} where a ValueError belongs"
        trial.require(refused, message, help=help)


def whole(value: Any) -> int | None:
    """The whole number that a value is, None if it is none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def same(value: Any, expected: float, tolerance: float) -> bool:
    """Whether an answer is the expected number: exactly and whole, or within a relative tolerance."""
    if tolerance == 0.0:
        return whole(value) == expected
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isclose(value, expected, rel_tol=tolerance)


def show(value: Any) -> str:
    """A number as the learner reads it."""
    number = whole(value)
    if number is not None:
        return f"{number:,}"
    if isinstance(value, float) and 1e6 <= abs(value) < 1e18:
        return f"{value:,.0f}"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _pack(argument: Any) -> Any:
    """A dataclass as plain data, to be built again on the rank."""
    if is_dataclass(argument) and not isinstance(argument, type):
        kind = type(argument)
        values = {field.name: getattr(argument, field.name) for field in fields(argument)}
        return {"dataclass": [kind.__module__, kind.__qualname__], "fields": values}
    return argument


def _unpack(argument: Any) -> Any:
    if isinstance(argument, dict) and "dataclass" in argument:
        module, name = argument["dataclass"]
        return getattr(import_module(module), name)(**argument["fields"])
    return argument
