"""The explainer names the fault: every kind of difference that DESIGN promises to tell apart."""

import pytest
import torch

from grader.judging.closeness import is_close
from grader.judging.explain import compare

torch.manual_seed(0)
E4 = [torch.randn(4, 6) for _ in range(4)]


def cause(actual, expected, **options) -> str:
    difference = compare("the output", actual, expected, **options)
    assert difference is not None
    return difference.cause


def test_equal_up_to_the_order_of_a_sum_is_no_difference() -> None:
    x = torch.randn(1000, 8)
    assert compare("the sum", [x.sum(0)], [x.flip(0).double().sum(0)]) is None
    assert compare("the sum", [x.bfloat16().sum(0)], [x.double().sum(0)], coarse=True) is None


def test_who_is_measured_does_not_choose_the_measure() -> None:
    """Two percent off in 16 bits is no order of a sum, where nothing asks for 16 bits."""
    x = torch.randn(1000, 8)
    found = compare("the sum", [(1.02 * x.sum(0)).bfloat16()], [x.double().sum(0)])
    assert found is not None
    assert "is torch.bfloat16 where torch.float32 or finer is expected" in found.message


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (4.0, "4 times what it should be, and that is the number of ranks"),
        (0.25, "that is 1 / the number of ranks"),
        (16.0, "the square of the number of ranks"),
        (-1.0, "wrong sign"),
        (0.5, "0.5 times"),
    ],
)
def test_constant_factor(factor: float, words: str) -> None:
    assert words in cause([factor * e for e in E4], E4)


def test_factor_of_the_number_of_micro_batches() -> None:
    assert "the number of micro-batches" in cause(
        [3 * e for e in E4], E4, factors={"the number of micro-batches": 3}
    )


def test_permuted_ranks() -> None:
    assert "rank 0 has rank 1's" in cause([E4[1], E4[0], E4[2], E4[3]], E4)
    assert "every rank has what rank 2 should have" in cause([E4[2]] * 4, E4)


def test_joined_along_the_wrong_dimension() -> None:
    told = "dimension 1 is 2 times too large, and dimension 2 as many times too small"
    assert told in cause([torch.randn(3, 8, 5)], [torch.randn(3, 4, 10)])
    assert "number of elements is right" in cause([torch.randn(3, 40)], [torch.randn(3, 4, 10)])


def test_right_numbers_in_another_shape() -> None:
    expected = torch.randn(3, 4, 10)
    difference = compare("the output", [expected.flatten(1)], [expected])
    assert difference.cause == "the numbers are right, and their order: only the shape is not"
    assert "(3, 4, 10)" in difference.step
    assert "only the shape" not in cause([expected.transpose(0, 1).reshape(3, 40)], [expected])


def test_transposed() -> None:
    square = torch.randn(5, 5)
    assert "transposed" in cause([square.T], [square])
    assert "transposed" in cause([E4[0].T], [E4[0]])


def test_bias_missing_or_repeated() -> None:
    assert "bias" in cause([E4[0] + torch.randn(6)], [E4[0]])


def test_zero_nan_and_order() -> None:
    assert "zero everywhere" in cause([torch.zeros(4, 6)], [E4[0]])
    assert "NaN" in cause([E4[0] * float("nan")], [E4[0]])
    assert "infinities" in cause([E4[0] / 0], [E4[0]])
    assert "rows are in reverse order" in cause([E4[0].flip(0)], [E4[0]])
    anywhere = E4[0].flatten()[torch.randperm(24)].view(4, 6)
    assert "right numbers in another order" in cause([anywhere], [E4[0]])
    whole = torch.randint(2**59, 2**60, (7,))
    assert cause([whole.double().long()], [whole]) == ""  # right but for the last digits


def test_right_on_rank_0_alone() -> None:
    noise = [torch.randn(4, 6) for _ in range(3)]
    difference = compare("the output", [E4[0], *noise], E4)
    assert "the output is wrong on every rank but rank 0: " in difference.message
    assert difference.cause == ""


def test_logits_are_many() -> None:
    told = [compare("the logits of a token", [a], [E4[0]]).message for a in (E4[0] + 1, E4[0][:2], None)]
    assert [message.split(" of a token ")[1].split()[0] for message in told] == ["are", "have", "are"]


def test_alternatives_come_first() -> None:
    stale = [e * 0.5 for e in E4]
    assert cause(stale, E4, alternatives={"stale by one step": stale}) == "stale by one step"


def test_shapes_tell_the_whole_from_the_part() -> None:
    assert "2 times too large" in cause([torch.zeros(8, 6)], [E4[0]])
    assert "a part, not the whole" in cause([torch.zeros(2, 6)], [E4[0]])


@pytest.mark.parametrize("nothing", [None, 3.0, "text", [1.0]])
def test_no_tensor_is_a_difference(nothing: object) -> None:
    assert compare("the output", [nothing], [E4[0]]) is not None


def test_the_message_names_rank_place_and_numbers() -> None:
    actual = [e.clone() for e in E4]
    actual[2][1, 3] += 1
    difference = compare("the output", actual, E4)
    assert difference is not None
    assert difference.rank == 2
    assert (
        "on rank 2" in difference.message
        and "[1, 3]" in difference.message
        and "expected" in difference.message
    )


def test_infinite_elements_that_are_right_are_not_the_difference() -> None:
    right = torch.tensor([-torch.inf, -torch.inf, 1.0, 2.0])
    message = compare("lse", [torch.tensor([-torch.inf, -torch.inf, 1.4, 3.1])], [right]).message
    assert "expected 2 at [3], got 3.1" in message
    assert message.endswith("(50% of the elements are right; wrong: elements 2 to 3 of 4)")
    assert cause([torch.full((4,), torch.inf)], [right]).startswith("it contains infinities")


def test_nan_equals_nothing() -> None:
    nan = torch.tensor([float("nan")])
    assert not is_close(nan, nan)
    assert compare("x", [nan], [nan]) is not None
    assert not is_close(torch.tensor([float("inf")]), torch.tensor([1.0]))
    assert is_close(torch.tensor([float("-inf"), 1.0]), torch.tensor([float("-inf"), 1.0]))


def test_integers_are_exact_and_kinds_are_kept() -> None:
    assert not is_close(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert compare("x", [torch.tensor([1, 2])], [torch.tensor([1.0, 2.0])]) is not None


def test_nothing_where_something_small_is_expected() -> None:
    tiny = torch.full((3,), 1e-5)
    assert not is_close(torch.zeros(3), tiny)
    assert not is_close(tiny, torch.zeros(3))


def test_nearly_right_is_no_factor() -> None:
    assert "three digits" in cause([e * 1.0004 for e in E4], E4)


def test_another_dtype_is_told() -> None:
    difference = compare("x", [E4[0].double()], [E4[0]])
    assert difference is not None and "torch.float64 where torch.float32" in difference.message
    assert compare("x", [E4[0]], [E4[0].double()]) is None


def test_rounding_of_numbers_that_cancel_is_no_error() -> None:
    terms = torch.randn(6, 100_000, generator=torch.Generator().manual_seed(0))
    exact = terms.double().sum(0)
    for order in (range(6), range(5, -1, -1), (3, 0, 5, 1, 4, 2)):
        total = sum(terms[i] for i in order)
        assert all(is_close(total[i], exact[i]) for i in exact.abs().argsort()[:1000].tolist())
    assert not is_close(torch.tensor(1e-5), torch.tensor(2e-5))
