"""Lesson 11's numbers: what its notebook has recorded of the wire is what counting gives."""

import pytest

from tests.printed import numbers, printed

B, S, H, LAYERS = 4, 64, 128, 4
STREAM = 4 * B * S * H
"""Bytes of the residual stream; the lesson's unit is (n-1)/n of it."""

LOSS = 3 * 2 * 4 * B * S / STREAM
"""Three numbers a token, in all-reduces."""
SUMS = 2 * 4 * (LAYERS * 6 * H + 2 * H) / STREAM + 1 / B
"""Norms and biases in all-reduces, and a gather of the positions' gradient."""


@pytest.mark.parametrize("n", [2, 4])
def test_the_wire_is_what_counting_gives(n: int) -> None:
    lines = printed("sequence_parallel", "pictures.show_wire(")
    found = {line.split()[0]: numbers(line)[1:] for line in lines if numbers(line)[:1] == [float(n)]}
    both = 2 * LAYERS + 1  # all-reduces, or pairs of a gather and a reduce-scatter
    whole = [2 * both + LOSS, 2 * both]
    cut = [2 * both + LOSS, 2 * both + 2 * LAYERS + SUMS]
    assert found["tensor_parallelize"] == pytest.approx([*whole, 1.0], abs=0.006)
    assert found["sequence_parallelize"] == pytest.approx([*cut, sum(cut) / sum(whole)], abs=0.006)


def test_the_text_says_what_is_printed() -> None:
    whole = 4 * (2 * LAYERS + 1) + LOSS
    again, head, kept = (whole + SUMS + gathers for gathers in (2 * LAYERS, 2 * LAYERS + 1, 0))
    assert [round(each / whole, 2) for each in (again, head, kept)] == [1.23, 1.26, 1.01]
    reduce_scatters = 2 * (2 * LAYERS + 1)  # of which gloo sends each twice, as the interface counts
    assert round((36 + 2 * LAYERS + reduce_scatters) / 36, 1) == 1.7
