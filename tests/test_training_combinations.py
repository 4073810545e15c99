"""Checkpointing and accumulation go together with every way to use many ranks, ours and PyTorch's."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grader.ranks.isolation import ROOT
from grader.ranks.launcher import Code, shared_launcher
from grader.ranks.limits import Limits
from infra.memory_table.measure import Plan, measure
from infra.memory_table.ways import Way
from nanogpt.loop import Place
from nanogpt.train import read_options, train
from tests.test_nanogpt_training import OPTIONS

NOTHING = Code(cells=(("empty.py", ""),), trusted=True)

IN_PYTORCH = ("data_parallel", "zero1", "zero2", "zero3", "tensor_parallel", "sequence_parallel")
TOGETHER = (
    *(Way(name, checkpoint, 2) for name in IN_PYTORCH for checkpoint in ("every", "attention")),
    Way("context_parallel", "every", 2, in_pytorch=False),
    Way("ulysses", "every", 2, in_pytorch=False),
)
SMALL = {"n_layer": 3, "n_embd": 64, "block_size": 64, "warmup_steps": 1}
"""The curve is looked at, and nothing is weighed; the full learning rate shows more of what is wrong."""
ON_TWO_AXES = (
    *(
        Way(f"{outer}=2+{inner}=2", in_pytorch=False)
        for outer, inner in (
            *(
                ("data_parallel", each)
                for each in ("tensor_parallel", "sequence_parallel", "context_parallel", "ulysses")
            ),
            *(("zero3", each) for each in ("tensor_parallel", "sequence_parallel", "context_parallel")),
            *(("context_parallel", each) for each in ("tensor_parallel", "sequence_parallel")),
            ("ulysses", "tensor_parallel"),
            ("zero1", "context_parallel"),
            ("zero2", "context_parallel"),
        )
    ),
    Way("tensor_parallel=2+data_parallel", "every", 2, in_pytorch=False),
    Way("tensor_parallel+zero3=2", "attention", 2, in_pytorch=False),
)


@pytest.mark.slow
def test_all_of_them_follow_the_curve_of_one_rank() -> None:
    found = measure(Plan(TOGETHER, rounds=1, sizes=SMALL), num_ranks=2).ways
    assert len(found) == 2 * len(TOGETHER) - 2
    off = {f"{way} by {by}": one.loss_difference for (way, by), one in found.items()}
    assert {name: difference for name, difference in off.items() if not difference < 2e-5} == {}


@pytest.mark.slow
def test_two_axes_of_four_ranks_follow_the_curve_of_one() -> None:
    found = measure(Plan(ON_TWO_AXES, rounds=1, sizes=SMALL), num_ranks=4).ways
    off = {str(way): one.loss_difference for (way, _), one in found.items()}
    assert len(off) == len(ON_TWO_AXES)
    assert {name: difference for name, difference in off.items() if not difference < 2e-5} == {}


NOT_TOGETHER = [
    (["--parallel", "data_parallel=2+tensor_parallel=2"], "needs 4 ranks"),
    (["--parallel", "context_parallel", "--checkpoint", "attention"], "does not go with"),
    (["--parallel", "context_parallel", "--implementation", "torch"], "context parallel"),
    (["--parallel", "context_parallel", "--block-size", "30"], "30"),
    (["--parallel", "tensor_parallel", "--n-head", "1"], "n_head=1"),
    (["--parallel", "ulysses", "--n-head", "1"], "n_head=1"),
    (["--model", str(ROOT / "nanogpt/model.py")], "takes no group"),
]


def refusals(rank: Any, arguments: list[list[str]]) -> list[str]:
    """On a rank: why it does not train with each of these."""
    place = Place(device=rank.device, rank=rank.rank, num_ranks=rank.num_ranks)
    found = []
    for each in arguments:
        try:
            train(read_options(each, quiet=True), place, None)
            found.append("it trains")
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_does_not_go_together_is_a_sentence_on_every_rank(cache: Path) -> None:
    arguments = [[*OPTIONS, "--cache", str(cache), *options] for options, _ in NOT_TOGETHER]
    report = shared_launcher().run(refusals, NOTHING, [(arguments,), (arguments,)], limits=Limits())
    for rank in report.ranks:
        assert rank.status == "done", rank
        for (options, says), sentence in zip(NOT_TOGETHER, rank.result, strict=True):
            assert says in sentence and "\n" not in sentence, (options, sentence)


def test_a_sentence_is_said_once_and_ends_the_program(cache: Path) -> None:
    options, says = NOT_TOGETHER[1]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command = [*start, "-m", "nanogpt.train", *OPTIONS, "--cache", str(cache), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.stderr
    assert says in said[0]
    assert done.returncode != 0
