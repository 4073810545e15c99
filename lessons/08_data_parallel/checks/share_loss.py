"""Checks of `share_loss`: ranks with other numbers of targets, and the gradient of the whole batch."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Trial, check, exercise
from lessons_shared.passes import of_the_loss_alone
from lessons_shared.rounded import WENT_THROUGH

exercise(
    "share_loss",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "Write down the mean over all targets of all ranks. Which part of it has this rank, and by what is a "
        "mean over n ranks divided?",
        "A rank knows its own number of targets alone. What must all ranks add up before anyone can divide?",
        "All-reduce a copy of the number: it is not yours to change. A rank that counts none takes part.",
    ),
)


@dataclass(frozen=True)
class Case:
    """One call on every rank: how many targets each of them counts."""

    counts: list[int]
    as_tensor: bool = False
    dtype: torch.dtype = torch.float32
    """Of loss_sum."""
    most_rows: int | None = None
    """Of which losses there are; None is as many as targets."""

    def __str__(self) -> str:
        kind = "a tensor" if self.as_tensor else "an int"
        half = "" if self.dtype == torch.float32 else f", loss_sum {str(self.dtype).removeprefix('torch.')}"
        return f"{', '.join(map(str, self.counts))} counted targets by rank, num_counted {kind}{half}"


MEAN_COUNT = 2**15
"""Of targets of a rank: those of two ranks are one more than the most that float16 rounds to."""
HALF_DIGITS = 5e-3
"""What a float16 sum of losses is off by, also where its quotient by a whole number is a float32."""
FEW_SUM = 4000.0
"""The sum of a rank's losses then: n times as much is in reach of float16, and the mean is no tiny number."""

FACTOR = 8.0
"""What a loss is multiplied by before it goes back, as a scaler does: float16 rounds nothing by it, and it is
no number of ranks, or its square."""


def weigh(rank: Any, start: Tensor, cases: list[dict]) -> list[dict]:
    """Losses of a line through numbers, summed here; what share_loss makes of the sum; its backward."""
    answers = []
    for case in cases:
        weight = start.to(case["rows"].dtype, copy=True).requires_grad_()
        loss_sum = (case["rows"] @ weight).square().sum()
        before, count = loss_sum.detach().clone(), case["count"]
        given = torch.tensor(count, device=rank.device) if case["as_tensor"] else count
        with rank.record() as recording:
            part = rank.submission.share_loss(loss_sum, given, rank.group)
            recording.mark("backward")
            watched = isinstance(part, Tensor) and part.requires_grad and part.numel() == 1
            if watched:
                (FACTOR * part).backward()
        answers.append(
            {
                "part": part.detach().clone() if isinstance(part, Tensor) else None,
                "kind": type(part).__name__,
                "watched": watched,
                "gradient": weight.grad,
                "count": int(given),
                "unchanged": bool(loss_sum.detach() == before),
                "recording": recording,
            }
        )
    return answers


def observe(trial: Trial, cases: list[Case]) -> SimpleNamespace:
    """`answers[i][r]` is what rank r made of case i; the truth is of one process that has all rows."""
    n, start = trial.num_ranks, trial.normal(3).half().float()
    rows = [[draw(trial, case, count, start) for count in case.counts] for case in cases]
    per_rank = [
        (
            [
                {
                    "rows": mine[r].to(case.dtype),
                    "count": case.counts[r],
                    "as_tensor": case.as_tensor,
                }
                for case, mine in zip(cases, rows, strict=True)
            ],
        )
        for r in range(n)
    ]
    results = trial.run(weigh, start, per_rank=per_rank)
    truths = [truth(start, mine, sum(case.counts)) for case, mine in zip(cases, rows, strict=True)]
    return SimpleNamespace(
        cases=cases, answers=[[result[i] for result in results] for i in range(len(cases))], truths=truths
    )


def draw(trial: Trial, case: Case, count: int, start: Tensor) -> Tensor:
    """A rank's rows; where few stand for many, their losses add up to what so many would have.

    Rows of zeros where none counts: what a mask has made of them, and where a NaN arrives in backward.
    """
    if count == 0:
        return torch.zeros(2, 3)
    if case.most_rows is None:
        return trial.normal(count, 3)
    rows = trial.normal(case.most_rows, 3)
    return (rows * (FEW_SUM / (rows @ start).square().sum()).sqrt()).to(case.dtype).float()


def truth(start: Tensor, rows: list[Tensor], total: int) -> SimpleNamespace:
    """Each rank's summed loss and its gradient, and the gradient of the mean over all rows."""
    sums, gradients = [], []
    for mine in rows:
        weight = start.double().requires_grad_()
        loss = (mine.double() @ weight).square().sum()
        loss.backward()
        sums.append(loss.detach())
        gradients.append(weight.grad)
    return SimpleNamespace(sums=sums, gradients=gradients, mean=sum(gradients) / total, total=total)


def unequal(trial: Trial) -> list[int]:
    """Other numbers on every rank."""
    first = trial.integer(3, 9)
    return [first + r * trial.integer(2, 7) for r in range(trial.num_ranks)]


def observe_unequal(trial: Trial) -> SimpleNamespace:
    many = [1025 + 2 * trial.integer(0, 900) for _ in range(trial.num_ranks)]  # odd: no 16 bits hold them all
    return observe(trial, [Case(unequal(trial)), Case(unequal(trial), as_tensor=True), Case(many)])


def observe_equal(trial: Trial) -> SimpleNamespace:
    return observe(trial, [Case([trial.integer(3, 9)] * trial.num_ranks)])


def observe_nothing_on_the_last(trial: Trial) -> SimpleNamespace:
    return observe(trial, [Case([*(trial.integer(3, 9) for _ in range(trial.num_ranks - 1)), 0])])


def observe_nothing_on_the_first(trial: Trial) -> SimpleNamespace:
    return observe(
        trial, [Case([0, *(trial.integer(3, 9) for _ in range(trial.num_ranks - 1))], as_tensor=True)]
    )


def observe_double(trial: Trial) -> SimpleNamespace:
    """Some targets, and as many on each rank as float32 can not hold, nor int32 those of two."""
    many = [2**30 + 2**20 + 64] * trial.num_ranks
    return observe(
        trial,
        [
            *(Case(unequal(trial), as_tensor, torch.float64) for as_tensor in (False, True)),
            *(Case(many, as_tensor, torch.float64, most_rows=8) for as_tensor in (False, True)),
        ],
    )


def observe_half(trial: Trial) -> SimpleNamespace:
    """More targets than float16 can hold, and no rank more than it can.

    Their mean over ranks is a power of two, so that n over their sum has all its digits in float16, too.
    """
    more = 32 * trial.integer(1, 300)
    counts = [MEAN_COUNT + more, MEAN_COUNT - more]
    return observe(
        trial, [Case(counts, as_tensor, torch.float16, most_rows=8) for as_tensor in (False, True)]
    )


def parts(seen: SimpleNamespace, i: int) -> dict[str, list[float]]:
    """By what a rank's sum is multiplied where a known slip was made."""
    counts, n, total = seen.cases[i].counts, len(seen.answers[i]), seen.truths[i].total
    having = sum(count > 0 for count in counts)
    known = {
        "the plain mean over ranks divides by all of them, and here only those that count something do": [
            having / total
        ]
        * n,
        "this rank's own mean: the mean of the ranks' means, in which a rank with few targets counts as much "
        "as one with many": [1 / count if count else float("nan") for count in counts],
        "the factor n is missing: the mean over ranks divides by n once more": [1 / total] * n,
        "the sum, not the mean: nothing is divided by the number of targets": [float(n)] * n,
        "this rank's own sum": [1.0] * n,
        "the counts are not added up over ranks: n over this rank's own count": [
            n / count if count else float("nan") for count in counts
        ],
        "n over the largest of the ranks' counts, and it is over the sum of all": [n / max(counts)] * n,
        "n times the last rank's count stands for the sum of all: is a list of one tensor, n times, gathered "
        "into?": [1 / counts[-1] if counts[-1] else float("nan")] * n,
        "a rank that counts nothing is counted as one": [n / (total + n - having)] * n,
    }
    for dtype, told in WENT_THROUGH.items():
        rounded = torch.tensor(counts, dtype=dtype)
        known[told] = [n / torch.stack([*rounded]).sum().item()] * n
    wrapped = torch.tensor(counts).sum().to(torch.int32).item()
    known["the number of targets went through int32, which holds no whole number above 2^31"] = [
        n / wrapped if wrapped else math.inf
    ] * n
    factor = (torch.tensor(n) / torch.tensor(total)).item()
    known[
        "n over the sum of all is a number of float32: what two whole numbers give where they are divided"
    ] = [factor] * n
    two = {"as if there were 2 ranks: n is the group's size": [2 / total] * n}
    return {**known, **two} if n > 1 else two


def require_parts(trial: Trial, seen: SimpleNamespace, help: str = "") -> None:
    """What is returned, by value and by gradient."""
    for i, (case, answers, truth) in enumerate(zip(seen.cases, seen.answers, seen.truths, strict=True)):
        n = trial.num_ranks
        for r, answer in enumerate(answers):
            trial.require(
                answer["part"] is not None,
                f"with {case} it returned {answer['kind']}, not a tensor",
                help="Return loss_sum, weighed: a scalar.",
                rank=r,
            )
        trial.close(
            f"what it returned, with {case}",
            [answer["part"] for answer in answers],
            [loss * n / truth.total for loss in truth.sums],
            alternatives={
                **{
                    told: [loss * factor for loss, factor in zip(truth.sums, factors, strict=True)]
                    for told, factors in parts(seen, i).items()
                },
                "the mean over all targets, the same on every rank: the losses were summed, too": (
                    sum(truth.sums) / truth.total
                ),
            },
            help=help or "loss_sum · n / (the number of counted targets of all ranks).",
            rtol=HALF_DIGITS if case.dtype == torch.float16 else None,
        )
        require_gradients(trial, case, answers, truth)


def require_gradients(trial: Trial, case: Case, answers: list[dict], truth: SimpleNamespace) -> None:
    """The mean over ranks of the gradients is the gradient of the mean over all targets."""
    for r, answer in enumerate(answers):
        trial.require(
            answer["watched"],
            f"with {case} what it returned has no graph: backward() would reach no weight",
            help="Multiply loss_sum itself. detach(), item() and torch.tensor() leave its graph behind.",
            rank=r,
        )
        trial.require(
            answer["gradient"] is not None,
            f"with {case} what it returned asks for a gradient and is not made of loss_sum: backward() "
            "reaches no weight, no .grad is written there and no hook runs",
            help="Multiply loss_sum itself, also where it is 0: a new tensor has no graph that leads to it.",
            rank=r,
        )
    broken = [r for r, answer in enumerate(answers) if answer["gradient"].isnan().any()]
    hidden = all(case.counts[r] == 0 and answers[r]["part"].isfinite() for r in broken)
    trial.require(
        not broken or not hidden,
        f"with {case} what it returned is a number, and its gradient is NaN",
        help="Divide by the number of targets of all ranks, which is never 0, and by no rank's own.",
        cause="a division by 0 is hidden in forward, as torch.where and nan_to_num do: backward goes through "
        "it, and 0 times infinity is NaN",
        rank=(broken or [0])[0],
    )
    trial.close(
        f"the mean over ranks of the gradients, with {case}",
        torch.stack([answer["gradient"] for answer in answers]).mean(0),
        FACTOR * truth.mean,
        alternatives=of_the_loss_alone([FACTOR * truth.mean], FACTOR),
        help="Its gradient is that of loss_sum, times the same number.",
        coarse=case.dtype == torch.float16,
    )


@check("share_loss")
def unequal_shares_are_one_mean(trial: Trial) -> None:
    """Ranks with other numbers of targets: the mean over ranks is that over all targets, gradients too."""
    require_parts(trial, trial.once(observe_unequal))


@check("share_loss")
def equal_shares_keep_their_means(trial: Trial) -> None:
    """Where all ranks count as many targets, it is this rank's own mean."""
    require_parts(trial, trial.once(observe_equal))


@check("share_loss", world_sizes=(2, 4, 3))
def a_rank_may_count_nothing(trial: Trial) -> None:
    """A rank without counted targets takes part, and its loss is 0."""
    for seen in (observe_nothing_on_the_last, observe_nothing_on_the_first):
        require_parts(
            trial,
            trial.once(seen),
            "Its sum is 0, and so is its part: nobody may leave before the all-reduce, or divide by 0.",
        )


@check("share_loss")
def losses_keep_their_dtype(trial: Trial) -> None:
    """A float64 loss is weighed in float64, also by more targets than float32 can count."""
    seen = trial.once(observe_double)
    for answers in seen.answers:
        for r, answer in enumerate(answers):
            dtype = getattr(answer["part"], "dtype", torch.float64)
            told = f"a float64 loss became {dtype}"
            trial.require(dtype == torch.float64, told, help="Weigh loss_sum itself.", rank=r)
    require_parts(trial, seen)


@check("share_loss", world_sizes=(2,), subgroup=False)
def half_precision_holds_no_count(trial: Trial) -> None:
    """A float16 loss is weighed as well where all targets together are more than float16 can hold."""
    require_parts(
        trial,
        trial.once(observe_half),
        "Add the counts up as whole numbers, and leave the sum one: an int64 holds them all.",
    )


@check("share_loss")
def what_is_given_is_unchanged(trial: Trial) -> None:
    """loss_sum and num_counted are this rank's numbers afterwards as well."""
    seen = trial.once(observe_unequal)
    for case, answers in zip(seen.cases, seen.answers, strict=True):
        for r, answer in enumerate(answers):
            trial.require(
                answer["count"] == case.counts[r],
                f"num_counted was {case.counts[r]}, and is {answer['count']} after the call",
                cause="the sum over ranks was written into it" if answer["count"] == sum(case.counts) else "",
                help="all_reduce works in place: give it a copy. torch.as_tensor makes none of a tensor.",
                rank=r,
            )
            trial.require(
                answer["unchanged"],
                "loss_sum holds another number after the call: whoever logs it next reads the weighed one",
                help="Return a new tensor: loss_sum * ..., where *= writes into the one that was given.",
                rank=r,
            )


@check("share_loss")
def one_number_travels(trial: Trial) -> None:
    """What travels is the number of targets, once, and nothing in backward."""
    seen = trial.once(observe_unequal)
    for answers in seen.answers:
        for r, answer in enumerate(answers):
            recording = answer["recording"]
            moved, later = recording.bytes(), recording.kinds(after="backward")
            trial.require(
                not later,
                f"backward communicates: {later[:3]}",
                help="The loss stays here: only the number of targets travels.",
                rank=r,
            )
            most = 16 * trial.num_ranks  # a gather of all ranks' numbers is as good
            kinds = recording.kinds()
            once = len(kinds) <= 1 or kinds == ["reduce", "broadcast"]  # as an all-reduce in two halves
            reduced = [e for e in recording.select() if e.kind in ("all_reduce", "reduce", "broadcast")]
            many = next((e for e in reduced if e.num_elements > 1), None)
            trial.require(
                many is None,
                f"it calls {many.describe() if many else ''}, where one number is the number of targets",
                cause="does the loss travel beside it?" if many and many.dtype.startswith("float") else "",
                help="One all-reduce of the number of targets.",
                rank=r,
            )
            trial.require(
                moved <= most and once,
                f"{moved} bytes in {len(kinds)} communications, where one number is 8 bytes",
                cause="the losses travel, too" if kinds == ["all_reduce", "all_reduce"] else "",
                help="One all-reduce of the number of targets.",
                rank=r,
            )
