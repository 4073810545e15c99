"""The memory table: ours holds and sends what the lessons' formulas say, or the difference is named."""

import subprocess
import sys
from pathlib import Path

import pytest

from infra.memory_table.__main__ import COLUMNS, Options, rows
from infra.memory_table.ways import WAYS


@pytest.mark.slow
def test_every_byte_of_ours_is_explained() -> None:
    table = rows(Options(rounds=1), num_ranks=2)
    ours = [row for row in table if row.by == "solutions"]
    assert [row.way for row in ours] == list(WAYS)
    assert {str(row.way): row.unexplained for row in ours if row.unexplained} == {}
    assert max(row.measured.loss_difference for row in table) < 1e-4
    assert all(getattr(row.measured, column) > 0 for row in table for column in COLUMNS)


def test_a_wrong_name_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infra.memory_table", "--only", "zero4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("--only zero4: choose from context_parallel, data_parallel")
