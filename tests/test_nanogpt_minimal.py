"""The file that people quote: a hundred lines at most, and two ranks learn what one does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEPS = 30
TRAIN = f"import nanogpt.minimal; nanogpt.minimal.NUM_STEPS = {STEPS}; nanogpt.minimal.main()"


def losses(*start: str) -> list[float]:
    """The loss of the whole batch at the first step and at the last."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*start, sys.executable, "-c", TRAIN]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    return [float(number) for number in re.findall(r"\d+\.\d+", last)]


def test_two_ranks_learn_what_one_does() -> None:
    alone = losses()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")
    together = losses(*torchrun, "--nproc-per-node=2")
    assert alone[1] < alone[0] - 1
    assert together == pytest.approx(alone, abs=2e-4)


def test_it_is_short() -> None:
    assert len((ROOT / "nanogpt" / "minimal.py").read_text().splitlines()) <= 100


ENDS = """
import pathlib, nanogpt.minimal
nanogpt.minimal.NUM_STEPS = 1
nanogpt.minimal.main()
print(sorted({path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the names of threads")
def test_its_group_ends_with_all_its_threads() -> None:
    """One that outlives it may hold a tensor when Python ends, which aborts the process (PyTorch 190489)."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "gloo" not in done.stdout.splitlines()[-1]
