"""The course on NCCL: on a machine with GPUs every reference passes there, on as many ranks as fit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grader.judging.course import find_exercise
from grader.judging.judge import Settings, layouts_of
from grader.ranks.launcher import ROOT

COUNTS_DEVICES = """
import torch

def told(*_):
    raise SystemExit("CUDA was asked for its devices")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = told
from grader.ranks.forkserver import warm_up
warm_up()
"""


def test_the_rank_server_does_not_ask_cuda_for_its_devices() -> None:
    """Who has asked can fork no rank that uses one: 'Cannot re-initialize CUDA in forked subprocess'."""
    done = subprocess.run([sys.executable, "-c", COUNTS_DEVICES], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("gpus", "worlds", "left_out"), [(3, [2, 1, 3], "4, 5"), (4, [2, 1, 4, 3, 4], "")])
def test_layouts_are_those_that_have_a_gpu_a_rank(
    gpus: int, worlds: list[int], left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On four GPUs the group of two is of a world of four, not of five."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    _, exercise = find_exercise("ring_all_reduce")
    layouts, notes = layouts_of(exercise, Settings(device="cuda"))
    assert [layout.world_size for layout in layouts] == worlds
    assert notes == (
        (f"NCCL needs a GPU a rank, and this machine has {gpus}: left out world size {left_out}",)
        if left_out
        else ()
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that torch can use")
@pytest.mark.parametrize("isolation", ["off", "on"])
def test_every_reference_passes_on_nccl(isolation: str, tmp_path: Path) -> None:
    grade = [sys.executable, "-m", "grader", "solutions", "--device", "cuda", "--isolation", isolation]
    environment = os.environ | {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}  # else ranks that share a GPU, too
    report = tmp_path / "report.json"
    done = subprocess.run(
        [*grade, "--json", report], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    exercises = json.loads(report.read_text())["exercises"]
    failed = [each["name"] for each in exercises if each["verdict"] not in ("passed", "skipped")]
    assert not failed, done.stdout
    assert sum(each["verdict"] == "passed" for each in exercises) >= 80
