"""The capstone's numbers: bytes by axis are those recorded, and the axes of a published run multiply."""

import pytest

from lessons.three_axes import answers
from tests.printed import numbers, printed


def test_bytes_by_axis_are_those_recorded() -> None:
    """To 1%, but for ZeRO-3, which gathers the token table once and not twice."""
    rows = [line for line in printed("three_axes", "pictures.draw_axes(") if "%" in line]
    assert len(rows) == 10
    for line in rows:
        predicted, recorded = numbers(line.replace("ZeRO-3", "").rpartition(" ")[0])
        if "ZeRO-3" in line and " data " in line:
            assert 0.7 < recorded / predicted < 0.8, line
        else:
            assert recorded == pytest.approx(predicted, rel=0.01), line


def test_all_three_axes_at_once() -> None:
    first, _, _, *rows = printed("three_axes", "pictures.show_all_three(")
    assert first.endswith("True")
    for line in rows:
        predicted, recorded = numbers(line)
        assert predicted > 0
        assert recorded == pytest.approx(predicted, rel=0.01), line


def test_the_norm_is_one_ranks_on_every_mesh() -> None:
    lines = printed("three_axes", "pictures.show_norms(")
    (alone,) = numbers(lines[0])
    rows = [line for line in lines if "×" in line or "4 along" in line]
    found = [numbers(line.replace("ZeRO-3", "").replace("4 along", ""))[-3:] for line in rows]
    assert [yours for _, _, yours in found] == [alone] * 4
    assert found[0][1] == pytest.approx(2 * alone, abs=2e-4)
    assert all(abs(every - alone) > 0.05 for _, every, _ in found)


def test_the_bug_is_in_the_norm_and_not_in_the_loss() -> None:
    lines = printed("three_axes", "pictures.show_weighed(measures.weighed_as_found")
    alone, data, *meshes = [numbers(line.replace("4 along", ""))[-4:] for line in lines[1:]]
    assert data == alone
    assert len(meshes) == 2
    for first, last, before, after in meshes:
        assert [first, last] == alone[:2]
        assert [before, after] == pytest.approx([alone[2] / 2, alone[3] / 2], abs=1e-3)
    repaired = printed("three_axes", "pictures.show_weighed(weighed_loss")
    found = [numbers(line.replace("4 along", ""))[-4:] for line in repaired[1:]]
    assert found == [alone] * 4


def test_llama_3s_axes_multiply_to_its_gpus() -> None:
    """Table 4 of the paper prints 64, 128 and 8 ranks along data."""
    assert [answers.replicas(run) for run in answers.LLAMA_3_405B] == [64, 128, 8]
    for run in answers.LLAMA_3_405B:
        ranks = run["tensor"] * run["context"] * run["pipeline"] * answers.replicas(run)
        assert ranks == run["gpus"]


def test_tensor_belongs_inside() -> None:
    """Both orders with tensor innermost are best, and every other takes more than twice as long."""
    (first, best), (second, same), *others = answers.orders()
    assert first[-1] == second[-1] == "tensor"
    assert best == same
    assert all(seconds > 2 * best for _, seconds in others)
