"""The memory table: ours holds and sends what the lessons' formulas say, or the difference is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from grader.ranks.recording import Event
from infra.memory_table.__main__ import Options, plan, print_witness
from infra.memory_table.gloo import asked_for, beyond
from infra.memory_table.measure import Found, Plan, measure
from infra.memory_table.rows import HELD, Row, rows
from infra.memory_table.single import predicted_bytes
from infra.memory_table.ways import WAYS
from infra.memory_table.witness import find_header_bytes

RESENT = 0.02
"""TCP may send a packet twice on a busy machine: the share of what travels that nobody here can explain."""


@pytest.mark.slow
def test_every_byte_of_ours_is_explained() -> None:
    found = measure(plan(Options(rounds=1), 2), num_ranks=2)
    table = rows(found, num_ranks=2)
    ours = [row for row in table if row.by == "solutions"]
    assert [row.way for row in ours] == [way for way in WAYS if way.num_ranks is None]
    assert {str(row.way): left for row in ours if (left := not_explained(row))} == {}
    assert max(row.measured.loss_difference for row in table) < 1e-4
    assert all(getattr(row.measured, column) > 0 for row in table for column in HELD)
    if found.why_not_witnessed:
        assert {row.measured.wire.witnessed for row in table} == {None}
        return
    for row in table:
        assert abs(row.unexplained.get("witnessed", 0.0)) <= RESENT * row.measured.wire.recorded, row
    for (name, by), sent in found.collectives.items():
        times = sent.witnessed / predicted_bytes(name, 2)
        in_vain = 2 if (name, by) == ("reduce_scatter", "torch") else 1
        assert times == pytest.approx(in_vain, rel=RESENT), (name, by)


@pytest.mark.slow
def test_every_byte_on_two_axes_is_explained_and_stays_on_its_axis() -> None:
    both = [way for way in WAYS if way.num_ranks == 4]
    table = rows(measure(Plan(tuple(both), rounds=1), num_ranks=4), num_ranks=4)
    assert {str(row.way): left for row in table if (left := not_explained(row))} == {}
    for row in table:
        sent = row.measured.wire.by_axis
        assert sent.keys() == {name for name, axis in row.way.axes(4).items() if axis.size > 1}
        assert all(size > 0 for size in sent.values())
    assert max(row.measured.loss_difference for row in table) < 1e-4


def not_explained(row: Row) -> dict[str, float]:
    """Of what is held and recorded, which no busy machine changes."""
    return {column: size for column, size in row.unexplained.items() if column != "witnessed"}


def event(kind: str, num_elements: int, shape: tuple[int, ...], n: int) -> Event:
    """A collective of fp32 numbers on n ranks."""
    return Event(
        **dict(kind=kind, num_bytes=4 * num_elements, num_elements=num_elements, shape=shape),
        **dict(dtype="float32", group=tuple(range(n)), peer=None, op="SUM", asynchronous=False),
        **dict(file="", line=0, after="", index=0),
    )


@pytest.mark.parametrize(
    ("kind", "num_elements", "shape", "n", "witnessed"),
    [  # as the interface counted them with gloo of torch 2.13, bytes of a rank
        ("all_reduce", 4, (4,), 4, 888),
        ("all_reduce", 1024, (1024,), 2, 4_672),
        ("all_reduce", 1_320_000, (1_320_000,), 2, 5_280_864),
        ("all_reduce", 1_320_000, (1_320_000,), 4, 7_921_728),
        ("reduce_scatter", 1024, (512,), 2, 5_248),
        ("reduce_scatter", 1_320_000, (1_320_000,), 4, 7_921_728),
        ("all_gather", 1_320_000, (1_320_000,), 4, 3_960_864),
        ("broadcast", 262_144, (262_144,), 4, 786_540),
        ("all_to_all", 262_144, (262_144,), 4, 786_864),
        ("barrier", 0, (), 2, 0),
    ],
)
def test_what_gloo_sends(
    kind: str, num_elements: int, shape: tuple[int, ...], n: int, witnessed: int
) -> None:
    events = [event(kind, num_elements, shape, n)]
    assert asked_for(events) + sum(beyond(events).values()) == witnessed


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (None, "this system has no `unshare`"),
        ("echo unshare failed: Operation not permitted >&2; exit 1", "Operation not permitted"),
    ],
)
def test_without_a_network_of_its_own_nothing_is_witnessed(
    program: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program is not None:
        (tmp_path / "unshare").write_text(f"#!/bin/sh\n{program}\n")
        os.chmod(tmp_path / "unshare", 0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    header, why = find_header_bytes()
    assert header is None
    console = Console(record=True, width=300)
    print_witness(console, Found(ways={}, collectives={}, header_bytes=header, why_not_witnessed=why))
    said = console.export_text()
    assert said.startswith("Witnessed: nothing, because this machine gives us no network of our own")
    assert says in said


def test_a_wrong_name_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infra.memory_table", "--only", "zero4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("--only zero4: choose from context_parallel, context_parallel=2+")
