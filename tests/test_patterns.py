"""Each pattern that a wrong tensor may show is named, and what only looks like one is not."""

import math
import platform

import pytest
import torch
from torch import Tensor

from grader.judging.explain import Fault, compare

torch.manual_seed(1)
E4 = [torch.randn(4, 6) for _ in range(4)]
E2 = E4[:2]
WHOLE = torch.randn(8, 6)


def cause(actual, expected, **options) -> str:
    difference = compare("the output", actual, expected, **options)
    assert difference is not None
    return difference.cause


def message(actual, expected, **options) -> str:
    difference = compare("the output", actual, expected, **options)
    assert difference is not None
    return difference.message


def spoiled(x: Tensor, *place: int) -> Tensor:
    """The same, with one element that fits no pattern."""
    y = x.clone()
    y[place] += 0.37
    return y


# --- factors ---


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1.5, "1.5 times what it should be (3/2)"),
        (-0.25, "-0.25 times what it should be (-1/4)"),
        (2 / 3, "0.66667 times what it should be (2/3)"),
        (1 / math.log(2), "a logarithm to base 2"),
        (math.pi, "every element is 3.1416 times what it should be"),
    ],
)
def test_factors_of_one_rank(factor: float, words: str) -> None:
    assert words in cause([factor * WHOLE], [WHOLE])
    assert "times" not in cause([spoiled(factor * WHOLE, 2, 3)], [WHOLE])


@pytest.mark.parametrize("factor", [1e-20, 1e-310])
def test_a_factor_whose_inverse_is_too_large_is_no_crash(factor: float) -> None:
    assert "times what it should be" in cause([factor * e.double() for e in E2], [e.double() for e in E2])


def test_factors_of_other_numbers_of_ranks() -> None:
    assert "1 / (n - 1) with n = 4 ranks" in cause([e / 3 for e in E4], E4)
    assert "n - 1 with n = 4 ranks" in cause([3 * e for e in E4], E4)
    assert "0.016667 times what it should be (1/60)" in cause([WHOLE / 60], [WHOLE])


def test_all_ranks_but_one_add_up() -> None:
    assert "(n - 1) / n with n = 4 ranks" in cause([0.75 * e for e in E4], E4)


def test_every_rank_with_a_factor_of_its_own() -> None:
    told = cause([e / (r + 2) for r, e in enumerate(E4)], E4)
    assert told.startswith("on rank 0 every element is 0.5 times") and "likewise on ranks 1, 2, 3" in told
    assert cause([*[e / 2 for e in E4[:3]], torch.randn(4, 6)], E4) == ""


@pytest.mark.parametrize("ratio", [2.0, 0.5, 3.0, -1.0])
def test_a_number_alone_shows_a_factor_only_if_it_is_a_simple_one(ratio: float) -> None:
    assert "times" in cause([torch.tensor(ratio * 1.37)], [torch.tensor(1.37)]) or ratio == -1.0


def test_a_number_alone_shows_no_other_factor() -> None:
    assert cause([torch.tensor(1.9)], [torch.tensor(1.37)]) == ""
    assert cause([torch.tensor([0.0, 1.9])], [torch.tensor([0.0, 1.37])]) == ""


def test_rows_and_columns_with_factors() -> None:
    rows = torch.tensor([1.0] * 4 + [0.0] * 4).unsqueeze(1)
    assert cause([rows * WHOLE], [WHOLE]) == "rows 0 to 3 are right, rows 4 to 7 are zero"
    columns = torch.tensor([1.0, 1, 1, 1, 1, 2])
    assert "column 5 is 2 times" in cause([columns * WHOLE], [WHOLE])
    each = torch.arange(1.0, 9).unsqueeze(1)
    assert "each of the rows has a factor of its own: 1, 2, 3, 4 and so on" in cause([each * WHOLE], [WHOLE])
    assert "factor" not in cause([spoiled(each * WHOLE, 3, 3)], [WHOLE])
    one_column = torch.randn(5, 1)
    assert "factor" not in cause(
        [torch.randn(5, 1)], [one_column]
    )  # any column has, where it is the only one


# --- order ---


def test_orders_of_rows() -> None:
    assert cause([WHOLE.flip(0)], [WHOLE]) == "the rows are in reverse order"
    assert "columns are rotated: first stands what belongs in 4" in cause([WHOLE.roll(2, 1)], [WHOLE])
    dealt = WHOLE.view(2, 4, 6).transpose(0, 1).reshape(8, 6)
    assert "rows are interleaved: next to each other stand 0, 4 and 1" in cause([dealt], [WHOLE])
    assert "next to each other stand 0, 2 and 4" in cause([WHOLE[[0, 2, 4, 6, 1, 3, 5, 7]]], [WHOLE])
    swapped = WHOLE[[0, 1, 4, 5, 2, 3, 6, 7]]
    assert "rows 2 to 3 hold what belongs in rows 4 to 5" in cause([swapped], [WHOLE])
    assert "hold" not in cause([spoiled(swapped, 7, 0)], [WHOLE])
    turned = WHOLE[[0, 1, 5, 4, 3, 2, 7, 6]]
    assert cause([turned], [WHOLE]) == "rows 2 to 5, rows 6 to 7 are in reverse order"


def test_one_row_everywhere_and_one_buffer_twice() -> None:
    assert cause([WHOLE[3].expand(8, 6)], [WHOLE]) == "all rows hold what belongs in 3"
    assert "one buffer" in cause([WHOLE[[0, 1, 6, 7, 6, 7, 6, 7]]], [WHOLE])


def test_shifts() -> None:
    later = torch.cat([torch.randn(1, 6), WHOLE[:-1]])
    assert cause([later], [WHOLE]) == "it is shifted by 1: row i holds what belongs in i - 1"
    assert "i + 2" in cause([torch.cat([WHOLE[2:], torch.zeros(2, 6)])], [WHOLE])
    assert "shifted" not in cause([spoiled(later, 5, 0)], [WHOLE])


def test_dimensions_that_changed_places() -> None:
    x = torch.randn(2, 3, 3, 5)
    assert cause([x.transpose(1, 2)], [x]) == "its dimensions 1 and 2 have changed places"
    y = torch.randn(2, 3, 4, 5)
    assert "read as if dimensions 1 and 2 had changed places" in cause(
        [y.transpose(1, 2).reshape(2, 3, 4, 5)], [y]
    )
    assert "changed places" not in cause([spoiled(x.transpose(1, 2), 0, 0, 0, 0)], [x])


# --- other patterns of one tensor ---


def test_the_same_number_or_vector_too_much() -> None:
    assert cause([WHOLE + 0.5], [WHOLE]) == "every element is 0.5 too large"
    assert "the same vector in every row" in cause([WHOLE + torch.randn(6)], [WHOLE])
    assert "vector" not in cause([spoiled(WHOLE + torch.randn(6), 2, 2)], [WHOLE])
    assert cause([torch.randn(1, 6)], [WHOLE[:1]]) == ""  # one row differs by some vector, whatever it is


def test_functions() -> None:
    positive = WHOLE.abs() + 0.5
    assert "the square of" in cause([positive**2], [positive])
    assert "the square root of" in cause([positive.sqrt()], [positive])
    assert "without the signs" in cause([WHOLE.abs()], [WHOLE])
    assert "logarithm" in cause([positive.log()], [positive])
    assert cause([spoiled(positive**2, 0, 0)], [positive]) == ""


@pytest.mark.parametrize(
    ("dtype", "lower", "name"),
    [
        (torch.float32, torch.bfloat16, "bfloat16"),
        (torch.float32, torch.float16, "float16"),
        (torch.float64, torch.float32, "float32"),
    ],
)
def test_lower_precision(dtype: torch.dtype, lower: torch.dtype, name: str) -> None:
    x = torch.randn(5, 5, dtype=dtype)
    assert f"went through {name}" in cause([x.to(lower).to(dtype)], [x])
    assert "went through" not in cause([(x.to(lower).to(dtype) * 1.0004)], [x])
    assert "went through" not in cause([(x * 3).to(lower).to(dtype)], [x])


def test_what_is_near_by_chance_is_no_matter_of_precision() -> None:
    assert cause([torch.tensor(4.1253)], [torch.tensor(4.1306)]) == ""
    stepped = WHOLE - 0.002 * torch.randn(8, 6)
    assert cause([stepped], [WHOLE]) == ""
    assert "three digits" in cause([WHOLE + 2e-4 * torch.randn(8, 6)], [WHOLE])


def test_a_gradient_that_is_not_there() -> None:
    assert "no backward has reached it" in compare("the gradient of x", [None], [WHOLE]).cause
    some = compare("the gradient of x", [None, WHOLE, None], [WHOLE] * 3)
    assert "it is there on rank 1 alone" in some.cause
    assert compare("the output", [None], [WHOLE]).cause == ""


def test_numbers_that_are_not_finite_have_a_place() -> None:
    nan = WHOLE.clone()
    nan[2] = math.nan
    told = cause([nan], [WHOLE])
    assert told.startswith("it contains NaN: 6 of 48 elements, in row 2 of 8, and the others are right")
    assert "the others are right" not in cause([spoiled(nan, 5, 5)], [WHOLE])
    assert cause([torch.tensor(-math.nan)], [torch.tensor(2.0)]).startswith("it is NaN")
    assert cause([torch.tensor(math.inf)], [torch.tensor(2.0)]).startswith("it is infinite")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors' own NaN has no sign either")
def test_memory_that_nothing_was_written_to_is_told_from_a_division() -> None:
    fresh, divided = WHOLE.clone(), WHOLE.clone()
    fresh[2], divided[2] = math.nan, torch.zeros(6) / torch.zeros(6)
    assert "torch.empty gives NaN" in cause([fresh], [WHOLE])
    assert cause([divided], [WHOLE]).endswith("and the others are right")
    divided[3] = math.nan
    assert "torch.empty" not in cause([divided], [WHOLE])


def test_where_it_is_wrong_without_a_cause() -> None:
    half = WHOLE.clone()
    half[4:, :3] = torch.randn(4, 3)
    assert message([half], [WHOLE]).endswith("right; wrong: rows 4 to 7 of 8 and columns 0 to 2 of 6)")
    every = torch.randn(9, 6)
    third = every.clone()
    third[::3] = torch.randn(3, 6)
    assert "wrong: every third of the rows, from 0 on)" in message([third], [every])
    scattered = WHOLE.clone()
    for i in range(6):
        scattered[i, (i * 5) % 6] = 9.0 + i
    assert "; wrong:" not in message([scattered], [WHOLE])


# --- between the ranks ---


def test_parts_that_nobody_reduced() -> None:
    total = sum(E4)
    assert "nothing was summed over the ranks" in cause(E4, [total] * 4)
    assert "mean over the ranks is right" in cause(E4, [total / 4] * 4)
    assert "largest of the ranks' values" in cause(E4, [torch.stack(E4).amax(0)] * 4)
    norms = [e.norm().view(1) for e in E4]
    assert "root of the sum of the ranks' squares" in cause(norms, [torch.stack(norms).norm().view(1)] * 4)
    assert cause([*E4[:3], spoiled(E4[3], 0, 0)], [total] * 4) == ""
    assert "zero everywhere" in cause([total, *[torch.zeros(4, 6)] * 3], [total] * 4)  # rank 0 has it all


def test_a_reduction_too_many() -> None:
    assert "the sum over the ranks of what each of them should have" in cause([sum(E4)] * 4, E4)
    assert "the mean over the ranks" in cause([sum(E4) / 4] * 4, E4)
    assert cause([spoiled(sum(E4), 1, 1)] * 4, E4) == ""


def test_ranks_that_have_what_belongs_to_others() -> None:
    assert cause([E4[0]] * 4, E4) == "every rank has what rank 0 should have"
    assert "rank 1 has rank 0's" in cause([E4[0], E4[0], E4[2], E4[3]], E4)
    assert "has rank" not in cause([E4[1], spoiled(E4[0], 0, 0), *E4[2:]], E4)


@pytest.mark.parametrize("dim", [0, 1])
def test_interleaved_and_contiguous_parts(dim: int) -> None:
    whole = torch.randn(8, 8)
    pieces, dealt = (
        list(whole.chunk(4, dim)),
        [whole.narrow(dim, 0, 8).index_select(dim, torch.arange(r, 8, 4)) for r in range(4)],
    )
    name = ("rows", "columns")[dim]
    assert f"every 4th of the {name} of the whole, where one piece of it belongs" in cause(dealt, pieces)
    assert f"one piece of the whole, where every 4th of its {name} belongs" in cause(pieces, dealt)
    mirrored = list(whole.flip(dim).chunk(4, dim))
    assert cause(mirrored, pieces) == f"the {name} of the whole are in reverse order"
    near = [dealt[0], dealt[1], dealt[2], spoiled(dealt[3], 0, 0)]
    assert cause(near, pieces) == ""


def test_a_border_that_is_off_by_one() -> None:
    whole = torch.randn(8, 6)
    told = cause([whole[0:4], whole[3:7]], [whole[0:4], whole[4:8]])
    assert told == "rows 0 to 3 of rank 1 hold rows 3 to 6 of rank 0"


TERMS = [torch.randn(5, 7) for _ in range(4)]


def test_terms_of_a_sum() -> None:
    total, mean = sum(TERMS), sum(TERMS) / 4
    without = [total - term for term in TERMS]
    assert cause(without, [total] * 4, terms=TERMS) == "this rank's own part is missing"
    assert (
        cause([total + t for t in TERMS], [total] * 4, terms=TERMS) == "this rank's own part counts 2 times"
    )
    assert cause([total - TERMS[2]] * 4, [total] * 4, terms=TERMS) == "rank 2's part is missing"
    assert cause([TERMS[1] / 4] * 4, [mean] * 4, terms=TERMS) == "only rank 1's part is in it"
    assert cause([TERMS[1]] * 4, [mean] * 4, terms=TERMS) == "only rank 1's part is in it, 4 times"
    named = {"the head's": TERMS[0], "the embedding's": TERMS[1]}
    both = TERMS[0] + TERMS[1]
    assert cause([both + TERMS[1]], [both], terms=named) == "the embedding's counts 2 times"
    assert cause([spoiled(total - TERMS[2], 0, 0)] * 4, [total] * 4, terms=TERMS) == ""
    less = [2 * term - total for term in TERMS]  # what arrives is taken off
    assert "rank 1's part, rank 2's part and rank 3's part count -1 times" in cause(
        less, [total] * 4, terms=TERMS
    )
    by_name = {f"rank {r}'s part": term for r, term in enumerate(TERMS)}
    assert cause(without, [total] * 4, terms=by_name) == "this rank's own part is missing"
    largest = torch.stack(TERMS).amax(0)
    assert "the largest of the ranks' parts" in cause([largest] * 4, [mean] * 4, terms=TERMS)
    assert cause([spoiled(largest, 0, 0)] * 4, [mean] * 4, terms=TERMS) == ""


def test_no_terms_are_seen_in_few_numbers() -> None:
    few = [torch.randn(3) for _ in range(4)]
    assert cause([torch.randn(3)] * 4, [sum(few)] * 4, terms=few) == ""


def test_ranks_that_agree_or_do_not() -> None:
    assert message([WHOLE] * 2, [torch.randn(8, 6), torch.randn(8, 6)]).endswith(
        "; all ranks have the same, where each should have its own"
    )
    noise = [torch.randn(8, 6), torch.randn(8, 6)]
    assert message(noise, [WHOLE] * 2).endswith(
        "; the ranks differ from each other, where all should have the same"
    )


# --- known faults ---


def test_a_cause_explains_the_ranks_that_are_right_as_well() -> None:
    """Every rank has rank 0's tokens: of two, rank 1 has those of the rank opposite, and rank 0 has not."""
    opposite = {"the tokens of the rank opposite": E2[::-1]}
    assert cause([E2[0], E2[0]], E2, alternatives=opposite) == "every rank has what rank 0 should have"
    assert cause(E2[::-1], E2, alternatives=opposite) == "the tokens of the rank opposite"


def test_a_fault_that_a_rank_may_have_alone_is_told_with_the_rank() -> None:
    own, last = Fault(E4[::-1], on_some_ranks=True), Fault([WHOLE[:4]] * 4, on_some_ranks=True)
    faults = {"the one opposite": own, "the first rows": last}
    assert cause([*E4[:3], E4[0]], E4, alternatives=faults) == "on rank 3: the one opposite"
    mixed = [E4[0], WHOLE[:4], E4[2], E4[0]]
    assert cause(mixed, E4, alternatives=faults) == "on rank 1: the first rows; on rank 3: the one opposite"
    assert cause([E4[0], torch.randn(4, 6), E4[2], E4[0]], E4, alternatives=faults) == ""


def test_faults_that_give_the_same_numbers_are_both_told() -> None:
    twins = {"one": E2[::-1], "two": [E2[1], E2[0]], "three": [E2[0], E2[0]], "four": E2[::-1]}
    found = compare("x", E2[::-1], E2, alternatives=twins)
    assert found.cause == "one; or: two" and not found.sure


def test_a_step_belongs_to_its_fault() -> None:
    faults = {"stale": Fault([e + 1 for e in E2], "Read it again."), "zeroed": [torch.zeros(4, 6)] * 2}
    stale = compare("x", [e + 1 for e in E2], E2, alternatives=faults)
    zeroed = compare("x", [torch.zeros(4, 6)] * 2, E2, alternatives=faults)
    other = compare("x", [2 * e for e in E2], E2, alternatives=faults)
    assert (stale.cause, stale.step) == ("stale", "Read it again.")
    assert (zeroed.cause, zeroed.step) == ("zeroed", "")
    assert "2 times" in other.cause and other.step == ""


def test_two_ranks_are_not_sure_what_twice_means() -> None:
    assert not compare("x", [2 * e for e in E2], E2).sure
    assert compare("x", [4 * e for e in E4], E4).sure
    assert not compare("x", [torch.randn(4, 6) for _ in E4], E4).sure
    assert not compare("x", E2[::-1], E2, alternatives={"the other's": E2[::-1]}).sure
    assert compare("x", E4[::-1], E4, alternatives={"the one opposite": E4[::-1]}).sure


def test_what_takes_time_is_computed_only_where_something_is_wrong() -> None:
    asked = []

    def alternatives():
        asked.append(True)
        return {"stale": [e + 1 for e in E2]}

    assert compare("x", E2, E2, alternatives=alternatives) is None and not asked
    assert compare("x", [e + 1 for e in E2], E2, alternatives=alternatives).cause == "stale"


def test_a_fault_that_makes_nan_of_some_numbers_is_known_by_the_others() -> None:
    empty = [E2[0], torch.full((4, 6), math.nan)]
    half = [E2[0] + 1, torch.full((4, 6), math.nan)]
    faults = {"0 / 0 on rank 1": empty}
    assert cause(empty, E2, alternatives=faults) == "0 / 0 on rank 1"
    assert "contains NaN" in cause(half, E2, alternatives=faults)
    assert "contains NaN" in cause([torch.full((4, 6), math.nan)] * 2, E2, alternatives=faults)


def test_nan_alone_tells_no_fault() -> None:
    nan = [torch.full((4, 6), math.nan)] * 2
    assert cause(nan, E2, alternatives={"not reduced": nan}) != "not reduced"
    some = [e.index_fill(0, torch.tensor([0]), math.nan) for e in E2]
    assert cause(some, E2, alternatives={"not reduced": some}) == "not reduced"
    assert cause(nan, E2, alternatives={"0 times NaN": nan}) == "0 times NaN"


def test_a_rank_that_has_its_own_part_in_another_order_is_told_so() -> None:
    assert (
        cause([e.flip(0) for e in E4], E4) == "each rank has its own rows, but the rows are in reverse order"
    )
    assert "each rank" not in cause([E4[0], *(e.flip(0) for e in E4[1:])], E4)


# --- tolerance ---


def test_what_the_plainest_computation_gets_wrong_is_allowed() -> None:
    """Cross entropy of logits near 5000: float32 itself is off by more than 3e-5 of the loss."""
    logits = torch.randn(64, 50) + 5000
    exact = (logits.double().logsumexp(-1) - logits.double()[:, 0]).mean().view(1)
    plain = (logits.logsumexp(-1) - logits[:, 0]).mean().view(1)
    other = exact.float() + 3 * (plain - exact).float()
    assert compare("the loss", [other], [exact], plain=[plain]) is None
    assert compare("the loss", [exact.float() * 1.01], [exact], plain=[plain]) is not None
