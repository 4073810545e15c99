"""Submissions that end well and are wrong all the same, or right in an unusual way."""

import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from grader.judging.verdicts import Verdict
from grader.ranks.launcher import Code, Launcher, Limits
from tests.attempts import BACKWARD, CORRECT, FORWARD, MECHANISM, grade, look, twisted

LIMITS = Limits(timeout=20)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not import tests

GATHERED = CORRECT.replace(
    "        dist.all_reduce(gradient, group=ctx.group)\n",
    "        parts = [torch.empty_like(gradient) for _ in range(ctx.group.size())]\n"
    "        dist.all_gather(parts, gradient, group=ctx.group)\n"
    "        gradient = torch.stack(parts).sum(0)\n",
)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            "Op = dist.ReduceOp\n"
            "dist.all_reduce(torch.ones(4), op=(Op.SUM, Op.MAX)[group.rank()], group=group)",
            "rank 1 called all_reduce (MAX) of 4 float32",
        ),
        (
            "dist.all_reduce(torch.ones(4, dtype=(torch.int32, torch.float32)[group.rank()]), group=group)",
            "rank 0 called all_reduce (SUM) of 4 int32",
        ),
    ],
)
def test_what_nobody_in_torch_notices_is_told(
    call: str, words: str, tmp_path: Path, launcher: Launcher
) -> None:
    report = look(tmp_path, twisted(call), launcher)
    assert report.verdict == Verdict.WRONG
    assert "the ranks parted" in report.message
    assert words in report.message


@pytest.mark.parametrize(("tensor", "is_told"), [("torch.ones(4, 2).t()", True), ("torch.ones(2, 4)", False)])
def test_what_nccl_will_refuse_is_noted(
    tensor: str, is_told: bool, tmp_path: Path, launcher: Launcher
) -> None:
    """On two processor cores it is right, and the exercise passes."""
    report = grade(tmp_path, twisted(f"dist.all_reduce({tensor}, group=group)"), launcher, FORWARD)
    assert report.verdict == Verdict.PASSED
    words = "NCCL will refuse the all_reduce (SUM) of 8 float32 (submission.py, line "
    assert [words in note for note in report.notes] == [True] * is_told


def read_early(rank, message):
    """Rank 0 sends, rank 1 reads its buffer before wait(): right or wrong by luck of timing."""
    buffer = torch.zeros(3)
    if rank.rank == 0:
        dist.send(message, group=rank.group, group_dst=1)
        return message
    work = dist.irecv(buffer, group=rank.group, group_src=0)
    early = buffer.clone()
    work.wait()
    return early


def test_delays_bring_out_what_is_right_by_luck(launcher: Launcher) -> None:
    message = torch.ones(3)
    stale = 0
    for seed in range(4):
        report = launcher.run(read_early, Code(), [(message,), (message,)], limits=LIMITS, delay_seed=seed)
        assert report.ended == "complete"
        stale += not torch.equal(report.ranks[1].result, message)
    assert stale


def test_right_numbers_by_the_wrong_mechanism(tmp_path: Path, launcher: Launcher) -> None:
    values, mechanism = grade(tmp_path, GATHERED, launcher, BACKWARD, MECHANISM, ranks=(4,)).checks
    assert values.verdict == Verdict.PASSED
    assert mechanism.verdict == Verdict.WRONG
    assert "all_gather" in mechanism.message


def test_right_on_rank_0_alone(tmp_path: Path, launcher: Launcher) -> None:
    source = CORRECT.replace("return gradient, None", "return gradient * (ctx.group.rank() == 0), None")
    report = look(tmp_path, source, launcher, BACKWARD)
    assert report.verdict == Verdict.WRONG
    assert "wrong on rank 1" in report.message


def test_right_for_two_ranks_alone(tmp_path: Path, launcher: Launcher) -> None:
    source = CORRECT.replace("return gradient, None", "return gradient * 2 / ctx.group.size(), None")
    (report,) = grade(tmp_path, source, launcher, BACKWARD, ranks=(2, 4)).checks
    assert report.verdict == Verdict.WRONG
    assert report.where == "with 4 ranks"
    assert "0.5 times what it should be" in report.cause or "mean" in report.cause


def test_right_when_ranks_share_a_seed_alone(tmp_path: Path, launcher: Launcher) -> None:
    """Every rank draws numbers of its own: what is random is not alike by accident."""

    def probe(rank):
        return torch.rand(3)

    results = launcher.run(probe, Code(), [(), ()], limits=LIMITS).ranks
    assert not torch.equal(results[0].result, results[1].result)


@pytest.mark.parametrize("order", ["parts", "reversed(parts)", "[parts[-1], *parts[:-1]]"])
def test_another_order_of_the_sum_is_right(order: str, tmp_path: Path, launcher: Launcher) -> None:
    source = GATHERED.replace("torch.stack(parts)", f"torch.stack(list({order}))")
    (report,) = grade(tmp_path, source, launcher, BACKWARD, ranks=(4,)).checks
    assert report.verdict == Verdict.PASSED


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        ("None", "the output is None on rank 0"),
        ("'right'", "the output is a str, not a tensor"),
        ("Copy.apply(x, group) * float('nan')", "it contains NaN"),
        ("Copy.apply(x, group) / 0", "it contains infinities"),
        ("Copy.apply(x, group)[None]", "has shape"),
        ("Copy.apply(x, group).to_sparse()", "return a dense one"),
        ("[[[Copy.apply(x, group)]]]", "the output is a list, not a tensor"),
        ("object()", "something that is no tensor or number"),
        ("Copy.apply(x, group).expand(10**9, *x.shape)", "the output"),
    ],
)
def test_odd_results_are_wrong_in_a_sentence(
    returns: str, words: str, tmp_path: Path, launcher: Launcher
) -> None:
    report = look(tmp_path, twisted(returns=returns), launcher)
    assert report.verdict in (Verdict.WRONG, Verdict.OUT_OF_MEMORY)
    assert words in f"{report.message}\n{report.cause}" or report.verdict == Verdict.OUT_OF_MEMORY


def test_inputs_differ_from_grading_to_grading(tmp_path: Path, launcher: Launcher) -> None:
    """An answer that was recorded once is wrong the next time."""
    seen = set()
    for name in "ab":
        path = tmp_path / name
        grade(tmp_path, twisted(f"torch.save(x, '{path}') if group.rank() == 0 else None"), launcher, FORWARD)
        seen.add(str(torch.load(path)))
    assert len(seen) == 2
