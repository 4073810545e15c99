"""docs/when_it_pays.md says what the course's functions say, and what its sentences claim is so."""

import math

from infra.when_it_pays import __main__ as page
from lessons.fsdp import overlap
from solutions.context_parallel import smallest_hidden_part
from solutions.data_parallel import smallest_hidden_share
from solutions.tensor_parallel import tensor_parallel_overhead


def test_the_page_is_what_its_program_writes() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.text(), "run `python -m infra.when_it_pays`"


def test_where_the_wire_hides_many_times_over_more_machines_cost_little() -> None:
    for few, many in page.FSDP_TPS.values():
        least = smallest_hidden_share(1, few * 6 * overlap.PARAMETERS, 400e9)
        assert 10 * least < overlap.LOCAL_TOKENS
        assert 1 - many / few < 0.03


def test_asynchronous_tensor_parallelism_wins_less_than_there_is_to_win() -> None:
    for width, plain, hidden in page.ASYNC_TPS.values():
        assert 0 < hidden / plain - 1 < tensor_parallel_overhead(width, 8, 400e12, 450e9)


def test_the_wire_of_the_context_runs_hides_and_flops_explain_most_of_the_fall() -> None:
    assert 50 * smallest_hidden_part(page.HEADS, page.KV_HEADS, 400e12, 450e9, zigzag=True) < 32_768
    for n, speed in page.CONTEXT_TPS.items():
        left, measured = page.flops_left(n), speed / page.CONTEXT_TPS[1]
        assert measured <= left
        assert n > 2 or left - measured < 0.01
        assert math.log(left) <= math.log(measured) / 2
