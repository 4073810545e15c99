"""The judge of functions that compute numbers: what counts as the same number, and which slip is named."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grader.judging.numbers import (
    Answers,
    ask,
    compare_answers,
    require_refusal,
    require_whole_numbers,
    same,
    whole,
)
from grader.judging.verdicts import CheckEnded
from nanogpt.model import GPTConfig


class FakeTrial:
    """A trial whose one rank is this process."""

    def __init__(self, function: Any) -> None:
        self.submission = SimpleNamespace(square=function)

    def run(self, probe: Any, *arguments: Any) -> list[Any]:
        return [probe(SimpleNamespace(submission=self.submission), *arguments)]

    def wrong(self, message: str, help: str = "", cause: str = "", asked: str = "") -> None:
        raise CheckEnded("wrong", message, cause, help, asked=asked)

    def require(self, condition: bool, message: str, help: str = "") -> None:
        if not condition:
            self.wrong(message, help)


def answers(function: Any, *calls: tuple) -> Answers:
    return Answers(FakeTrial(function), "square", calls or ((3,), (5,), (8,)), lambda x: x * x)


def cause_for(function: Any, **options: Any) -> str:
    with pytest.raises(CheckEnded) as end:
        compare_answers(FakeTrial(function), answers(function), **options)
    return end.value.cause


@pytest.mark.parametrize("value", [4, 4.0, torch.tensor(4), torch.tensor([4.0])])
def test_whole_numbers(value: Any) -> None:
    assert whole(value) == 4 and same(value, 4, 0.0)


@pytest.mark.parametrize("value", [4.5, True, None, "4", float("nan"), float("inf"), [4]])
def test_what_is_no_whole_number(value: Any) -> None:
    assert whole(value) is None and not same(value, 4, 0.0)


@pytest.mark.parametrize(
    ("value", "is_same"), [(1.009, True), (1.02, False), (True, False), (float("nan"), False)]
)
def test_tolerance(value: Any, is_same: bool) -> None:
    assert same(value, 1.0, 0.01) == is_same


def test_right_answers_pass() -> None:
    compare_answers(FakeTrial(None), answers(lambda x: x * x))


def test_slip_is_named_before_a_factor() -> None:
    slips = {"a sum for a product": lambda x: x + x}
    assert (
        cause_for(lambda x: x + x, slips=lambda x: {text: f(x) for text, f in slips.items()})
        == "a sum for a product"
    )
    assert cause_for(lambda x: 2 * x * x) == "always exactly twice what it should be"


def test_constant_and_remembered_answers_are_named() -> None:
    assert "the same number" in cause_for(lambda x: 7)
    assert cause_for(lambda x: 0 * x) == ""  # a factor of 0 is no constant
    seen: list[int] = []
    assert "remembered" in cause_for(lambda x: seen.append(x) or (seen[-2] if len(seen) > 1 else x) ** 2)


def test_small_numbers_that_were_answers_before_are_no_evidence_of_a_memory() -> None:
    def too_small(x: int) -> int:
        return (x - (x > 2)) ** 2

    with pytest.raises(CheckEnded) as end:
        compare_answers(FakeTrial(too_small), answers(too_small, (2,), (3,), (4,), (5,)))
    assert end.value.cause == ""


def test_a_whole_number_that_was_rounded_is_told_as_that() -> None:
    assert "right but for its last digits" in cause_for(lambda x: x * x * (1 + 1e-14))


def test_other_arguments_are_named() -> None:
    assert cause_for(lambda x: (x + 1) ** 2, alterations={"one too far": lambda x: (x + 1,)}) == "one too far"


def test_value_error_is_an_answer() -> None:
    def refuse(x: int) -> int:
        raise ValueError(f"not {x}")

    require_refusal(FakeTrial(None), answers(refuse), ["even", "odd"])
    with pytest.raises(CheckEnded, match="ValueError belongs"):
        require_refusal(FakeTrial(None), answers(lambda x: x), ["even", "odd"])


def test_keys_and_whole_numbers_are_required() -> None:
    with pytest.raises(CheckEnded, match="no key 'b'"):
        require_whole_numbers(FakeTrial(None), answers(lambda x: {"a": 1}), ["a", "b"])
    with pytest.raises(CheckEnded, match="not a whole number"):
        require_whole_numbers(FakeTrial(None), answers(lambda x: {"a": 1 / 3}), ["a"])


def test_dataclasses_travel_and_must_not_change() -> None:
    def spoil(config: GPTConfig) -> int:
        object.__setattr__(config, "n_layer", 99)
        return 1

    packed = {"dataclass": ["nanogpt.model", "GPTConfig"], "fields": {"n_layer": 3}}
    rank = SimpleNamespace(submission=SimpleNamespace(square=lambda config: config.n_layer))
    assert ask(rank, "square", [[packed]]) == [3]
    assert (
        "changed its arguments"
        in ask(SimpleNamespace(submission=SimpleNamespace(square=spoil)), "square", [[packed]])[0]
    )


# --- which term is missing ---


def bytes_kept(config: GPTConfig, b: int, s: int, recipe: str = "plain") -> int:
    """Something like what lesson 01 counts."""
    stream = b * s * config.n_embd
    masks = stream if config.dropout > 0 else 0
    return config.n_layer * (10 * stream + b * config.n_head * s * s + masks) + (
        7 * s if recipe == "odd" else 0
    )


SIZES = [(2, 2, 12, 3, 5), (3, 4, 24, 2, 7), (1, 3, 15, 5, 6), (4, 2, 10, 4, 9), (2, 5, 35, 1, 4)]
CALLS = [
    (GPTConfig(n_layer=layers, n_head=heads, n_embd=width, dropout=rate), b, s, recipe)
    for (layers, heads, width, b, s), rate, recipe in zip(
        SIZES * 2, [0.0, 0.1] * 5, ["plain"] * 5 + ["odd"] * 5, strict=True
    )
]


def term_for(function: Any) -> str:
    trial = FakeTrial(function)
    kept = Answers(trial, "square", CALLS, bytes_kept)
    with pytest.raises(CheckEnded) as end:
        compare_answers(trial, kept)
    return end.value.cause


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda c, b, s, r: bytes_kept(c, b, s, r) - 4 * c.n_layer * b * s * c.n_embd,
            "4 · n_layer · n_embd · b · s too few",
        ),
        (lambda c, b, s, r: bytes_kept(c, b, s, r) + c.n_layer * b * s * s, "n_layer · b · s² too many"),
        (
            lambda c, b, s, r: bytes_kept(c, b, s, r) - c.n_layer * b * (c.n_head - 1) * s * s,
            "n_layer · b · s² · (n_head - 1) too few",
        ),
        (
            lambda c, b, s, r: bytes_kept(c, b, s, r) - (c.n_layer * b * s * c.n_embd if c.dropout else 0),
            "where dropout > 0: always n_layer · n_embd · b · s too few",
        ),
        (lambda c, b, s, r: bytes_kept(c, b, s), "where recipe='odd': always 7 · s too few"),
        (lambda c, b, s, r: 3 * bytes_kept(c, b, s, r), "always exactly three times"),
    ],
)
def test_a_term_is_named_by_what_it_is_made_of(function: Any, words: str) -> None:
    assert words in term_for(function)


def test_no_term_is_named_that_does_not_fit_every_call() -> None:
    def nearly(config: GPTConfig, b: int, s: int, recipe: str) -> int:
        return bytes_kept(config, b, s, recipe) - config.n_layer * b * s + (b == 3)

    def here_and_there(config: GPTConfig, b: int, s: int, recipe: str) -> int:
        return bytes_kept(config, b, s, recipe) - (config.n_layer * b * s if b in (3, 5) else 0)

    assert term_for(nearly) == ""
    assert term_for(here_and_there) == ""


def test_a_slip_explains_the_answers_that_are_right_as_well() -> None:
    """One too many where it is wrong at all: that is no slip that makes every answer one too many."""
    one_more = {"one too many": lambda x: x * x + 1}
    cause = cause_for(lambda x: x * x + (x > 3), slips=lambda x: {t: f(x) for t, f in one_more.items()})
    assert cause == ""
    assert (
        cause_for(lambda x: x * x + 1, slips=lambda x: {t: f(x) for t, f in one_more.items()})
        == "one too many"
    )


def test_two_slips_are_told_where_each_gives_some_answers() -> None:
    def slips(x: int) -> dict[str, float]:
        return {"it is doubled": 2 * x, "it is cubed": x**3, "it is halved": x // 2}

    calls = ((3,), (5,), (8,), (9,))
    both = answers(lambda x: 2 * x if x < 6 else x**3, *calls)
    with pytest.raises(CheckEnded) as end:
        compare_answers(FakeTrial(None), both, slips=slips)
    assert end.value.cause == "for some calls: it is doubled; for others: it is cubed"
    once = answers(lambda x: 2 * x if x < 9 else x**3, *calls)  # one call is no evidence
    with pytest.raises(CheckEnded) as end:
        compare_answers(FakeTrial(None), once, slips=slips)
    assert "for others" not in end.value.cause


def test_two_slips_are_not_told_of_answers_that_are_only_near() -> None:
    """Two of many slips would give nearly anything."""

    def slips(x: int) -> dict[str, float]:
        return {"it is doubled": 2 * x, "it is cubed": x**3}

    calls = ((30,), (50,), (80,), (90,))
    near = answers(lambda x: 1.005 * (2 * x if x < 60 else x**3), *calls)
    with pytest.raises(CheckEnded) as end:
        compare_answers(FakeTrial(None), near, slips=slips, tolerance=0.01)
    assert end.value.cause == ""


def test_whole_numbers_of_a_float32_are_told() -> None:
    calls = ((3,), (70_001,), (654_321,))
    rounded = answers(lambda x: int(torch.tensor(float(x)) * x), *calls)
    one_more = answers(lambda x: x * x + (x > 3), *calls)
    for given, told in ((rounded, "a float32's"), (one_more, "")):
        with pytest.raises(CheckEnded) as end:
            compare_answers(FakeTrial(None), given)
        assert told in end.value.cause and bool(told) == bool(end.value.cause)
