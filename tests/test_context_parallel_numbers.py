"""Lesson 12's numbers: what its notebook has printed is what counting gives; how it tells blocks apart."""

import pytest

from grader import run_ranks
from lessons.context_parallel import answers, rings
from lessons.context_parallel.measures import kept, kept_on_this_rank, small_gpt
from solutions.context_parallel import context_parallelize, ring_attention
from tests.printed import numbers, printed


@pytest.mark.parametrize("n", [2, 4])
def test_printed_blocks_are_the_predicted_ones(n: int) -> None:
    lines = printed("context_parallel", "pictures.show_blocks_sent(")
    rows = [numbers(line) for line in lines if " to " in line]
    assert len(rows) == 4
    of_n = [row[1:4] for row in rows if row[0] == n]
    assert of_n == [[2 * (n - 1), 2 * (n - 1), 4 * (n - 1)]] * 2
    assert of_n[0][0] + of_n[0][2] == answers.blocks_sent(n)


def test_three_ways_send_what_is_predicted() -> None:
    lines = printed("context_parallel", "pictures.show_three_ways(")
    rows = [numbers(line) for line in lines if line.startswith(("sequence", "ring", "Ulysses"))]
    assert len(rows) == 12
    assert all(sent == predicted for *_, sent, predicted in rows)


def test_printed_work_is_that_of_the_text() -> None:
    """The busiest of four ranks has 4 blocks where the mean is 2.5; in the zigzag all have the same."""
    lines = printed("context_parallel", "pictures.draw_measured_work(")
    assert [numbers(line)[1] for line in lines if "busiest" in line] == [4 / 2.5, 1.0]
    assert answers.efficiency(4) == pytest.approx(0.57, abs=0.005)


def test_a_rank_keeps_8_bytes_a_token_more_than_its_share() -> None:
    there = run_ranks(kept_on_this_rank, context_parallelize, 256, ranks=2)[0]
    assert there - kept(small_gpt(256), 256) / 2 == pytest.approx(8 * 256 / 2, abs=50)  # and a few scalars


def test_the_log_of_a_ring_says_which_blocks_come_by() -> None:
    for r, log in enumerate(rings.logs(ring_attention, 3)):
        assert log.sent == [r, (r - 1) % 3]
        assert log.to == (r + 1) % 3
        assert sorted(set(log.computed)) == list(range(r + 1))
        assert all(block in log.under_way for block in log.sent if block in log.computed)


def test_the_program_to_repair_loses_what_it_loses() -> None:
    lines = printed("context_parallel", "pictures.show_losses(next_token_loss")
    assert (
        len({numbers(line)[1] for line in (each.replace(":", "").replace(",", " ") for each in lines)}) == 1
    )
    found = printed("context_parallel", "pictures.show_losses(measures.loss_as_found)")
    assert len({line.split()[-1] for line in found}) == 3
