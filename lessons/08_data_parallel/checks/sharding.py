"""Checks of `shard_batch`: whose rows are whose."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import CheckEnded, Trial, Verdict, check, exercise

exercise(
    "shard_batch",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "Every rank has the whole batch already: nothing travels. What does a rank need to know to choose "
        "its rows?",
        "group.rank() and group.size() are this rank's number in the group and the number of ranks. Some b "
        "do not divide: "
        "give the first b % n ranks one row more.",
        "torch.chunk makes fewer pieces than you asked for when b is small; look at its neighbours in the "
        "documentation.",
    ),
)


@contextmanager
def told_of_numbers(batch: Tensor, shares: list[Any]) -> Iterator[None]:
    """A cut that fails inside is told that the tensor has no second dimension, if others were cut before."""
    try:
        yield
    except Exception as error:
        if shares and batch.dim() == 1:
            error.add_note("the tensor has one dimension, (b,): a row of it is a number, without columns")
        raise


def cut(rank: Any, batches: list[Tensor]) -> dict:
    before = [batch.clone() for batch in batches]
    shares = []
    with rank.record() as recording:
        for batch in batches:
            with told_of_numbers(batch, shares):
                shares.append(rank.submission.shard_batch(batch, rank.group))
    same = all(torch.equal(a, b) for a, b in zip(before, batches, strict=True))
    again = [rank.submission.shard_batch(before[0].clone(), rank.group) for _ in range(2)]
    changes = isinstance(shares[0], Tensor) and any(
        isinstance(share, Tensor) and not torch.equal(share, shares[0]) for share in again
    )
    copies = [s.clone() if isinstance(s, Tensor) else None for s in shares]
    kinds = sorted({type(s).__name__ for s in shares})
    return {"shares": copies, "kinds": kinds, "unchanged": same, "changes": changes, "recording": recording}


def observe_even(trial: Trial) -> SimpleNamespace:
    """A batch of 4n rows, each of which has its own number, and targets of the same rows."""
    b = 4 * trial.num_ranks
    rows = numbered(b)
    targets = torch.stack([rows, -rows], dim=2).double()  # (b, 3, 2)
    return SimpleNamespace(sizes=[b], targets=targets, results=run_cut(trial, [rows, targets]))


def cut_view(rank: Any, batch: Tensor) -> Tensor | None:
    """The share of a batch that lies in a larger tensor, without its first and last column."""
    larger = torch.nn.functional.pad(batch, (1, 1), value=-1)
    share = rank.submission.shard_batch(larger[:, 1:-1], rank.group)
    return share.clone() if isinstance(share, Tensor) else None


def observe_numbers(trial: Trial) -> list[dict]:
    """A batch of 2n rows, and a number for each of them."""
    rows = numbered(2 * trial.num_ranks)
    return run_cut(trial, [rows, rows[:, 0].clone()])


def observe_uneven(trial: Trial) -> SimpleNamespace:
    """Batches that are not divisible by n; then the targets of each."""
    n = trial.num_ranks
    sizes = [n + 1, 2 * n - 1, 3 * n - 1, 2 * n + 1, n - 1]
    batches = [numbered(b) for b in sizes]
    try:
        results = trial.run(cut, [tensor for batch in batches for tensor in (batch, -batch)])
    except CheckEnded as end:
        if end.verdict == Verdict.CRASHED:
            for batch in batches:  # which of them was it?
                run_cut(trial, [batch])
        raise
    for result in results:
        result["targets"], result["shares"] = result["shares"][1::2], result["shares"][::2]
    return SimpleNamespace(sizes=sizes, results=results)


def numbered(b: int) -> Tensor:
    """(b, 3): row i is 10 i, 10 i + 1, 10 i + 2."""
    return torch.arange(b).unsqueeze(1) * 10 + torch.arange(3)


def run_cut(trial: Trial, batches: list[Tensor]) -> list[dict]:
    """Runs `cut` on tensors of one batch; a crash is told with its size."""
    try:
        return trial.run(cut, batches)
    except CheckEnded as end:
        if end.verdict != Verdict.CRASHED:
            raise
        b, n = len(batches[0]), trial.num_ranks
        end.message = f"with b = {b} on n = {n} ranks: {end.message}"
        if b and -(-b // -(-b // n)) < n:
            end.help = f"Make {n} shares of any b: torch.chunk may make fewer, torch.tensor_split makes {n}."
        if not b:
            end.help = "A batch without rows has shares without rows: a slice of it is one, and x[0] is none."
        raise


CHANGES = "which rows a rank gets changes from call to call"
OF_THE_TENSOR = (
    "which rows a rank gets depends on the tensor: handed over again, the first one gives the same rows"
)
DEPENDS_ON = "Which rows a rank takes may depend on its rank, on n and on b, and on nothing else."
"""The next step for who makes them depend on more."""


def begins_early(shares: list[list[int]]) -> str:
    """Of shares in one piece each, and of unequal sizes, which rank begins too early; "" for none."""
    pieces = all(share == list(range(share[0], share[0] + len(share))) for share in shares if share)
    if not pieces or len({len(share) for share in shares}) == 1:
        return ""
    for r, (before, share) in enumerate(pairwise(shares), 1):
        if before and share and before[0] < share[0] <= before[-1]:
            return f"rank {r} begins at row {share[0]}, where rank {r - 1} has not ended"
    return ""


def require_partition(trial: Trial, seen: SimpleNamespace, i: int) -> None:
    """The i-th batch is the ranks' shares together, and no row is in two of them."""
    b, n = seen.sizes[i], trial.num_ranks
    shares = [(result["shares"][i][:, 0] // 10).tolist() for result in seen.results]
    found = sorted(row for share in shares for row in share)
    told = ", ".join(f"rank {r}: {share}" for r, share in enumerate(shares))
    told = f"Of a batch of {b} rows, these are the rows on each of {n} ranks: {told}."
    everything = n > 1 and all(len(share) == b for share in shares) and b > 0
    trial.require(
        not everything, f"every rank got all the data. {told}", help="Each rank works on about b/n rows."
    )
    twice = sorted({row for row in found if found.count(row) > 1})
    missing = sorted(set(range(b)) - set(found))
    trial.require(
        not (twice or missing) or not any(result["changes"] for result in seen.results),
        f"rows {twice} are in more than one share, and rows {missing} on no rank. {told}",
        cause=CHANGES,
        help=DEPENDS_ON,
    )
    early = begins_early(shares)
    trial.require(
        not twice,
        f"rows {twice} are in more than one share. {told}",
        cause=early,
        help="A share begins where those of all ranks before it end: at rank · (b // n) + min(rank, b % n), "
        "if the first b % n ranks have a row more."
        if early
        else "Shares are disjoint: their sizes may differ by a row; nothing is repeated to fill up the last.",
    )
    rest = list(range(b - b % n, b))
    trial.require(
        not missing,
        f"rows {missing} are on no rank: they were dropped. {told}",
        help="Give the first b % n ranks one row more, as torch.tensor_split does."
        if missing == rest
        else "Cut the whole batch into as many pieces as the group has ranks: rank r gets piece r.",
    )
    lengths = [len(share) for share in shares]
    trial.require(
        max(lengths) - min(lengths) <= 1,
        f"the shares have {lengths} rows: two of them differ by more than one row. {told}",
        help="Spread the remainder: the first b % n ranks take one row more.",
    )


def require_rows(trial: Trial, seen: SimpleNamespace) -> None:
    """Shares are whole rows."""
    for r, result in enumerate(seen.results):
        for share, size in zip(result["shares"], seen.sizes, strict=False):
            trial.require(
                share is not None,
                f"shard_batch did not return a tensor, but {', '.join(result['kinds'])}",
                help="Is the `return` missing?"
                if result["kinds"] == ["NoneType"]
                else "Return this rank's rows alone, as a tensor.",
                rank=r,
            )
            trial.require(
                not share.is_complex(),
                f"it got numbers of {share.dtype}, which the batch has not",
                help="Cut the batch, and cast nothing.",
                rank=r,
            )
            trial.require(
                share.dim() == 2 and share.shape[1] == 3,
                f"of a batch of shape ({size}, 3) rank {r} got {tuple(share.shape)}: dimension 0 is the one "
                "to cut",
                help="Keep rows whole: cut along dim 0 and leave the other dimensions alone.",
                rank=r,
            )


@check("shard_batch")
def shares_are_disjoint_and_complete(trial: Trial) -> None:
    """A batch that is divisible by n: every row is on exactly one rank, and every rank has b/n rows."""
    seen = trial.once(observe_even)
    require_rows(trial, seen)
    require_partition(trial, seen, 0)


@check("shard_batch")
def batches_that_do_not_divide_lose_no_row(trial: Trial) -> None:
    """A batch that does not divide: every row is on exactly one rank, shares differ by at most one row."""
    seen = trial.once(observe_uneven)
    require_rows(trial, seen)
    for i in range(len(seen.sizes)):
        require_partition(trial, seen, i)


def require_same_rows(
    trial: Trial, rank: int, b: int, rows: list[int], theirs: list[int], changes: bool
) -> None:
    """A call for the inputs and the next one, for the targets, gave this rank the same rows."""
    trial.require(
        rows == theirs,
        f"of a batch of {b} rows it got {rows}, and in the next call, of the targets, {theirs}",
        cause=CHANGES if changes else OF_THE_TENSOR,
        help=f"Inputs and targets are cut in two calls, and must get the same rows. {DEPENDS_ON}",
        rank=rank,
    )


@check("shard_batch")
def inputs_and_targets_are_cut_alike(trial: Trial) -> None:
    """Two tensors of the same batch are cut at the same rows, and keep their dtype and other dimensions."""
    seen = trial.once(observe_even)
    require_rows(trial, seen)
    for r, result in enumerate(seen.results):
        rows, share = (result["shares"][0][:, 0] // 10).long().tolist(), result["shares"][-1]
        if share is not None and share.shape[1:] == seen.targets.shape[1:]:
            theirs = (share[:, 0, 0] // 10).long().tolist()
            require_same_rows(trial, r, len(seen.targets), rows, theirs, result["changes"])
    first = [(result["shares"][0][:, 0] // 10) for result in seen.results]
    expected = [seen.targets[rows.long() % len(seen.targets)] for rows in first]
    trial.close(
        "the share of a (b, 3, 2) tensor of the same batch",
        [r["shares"][-1] for r in seen.results],
        expected,
        rtol=0.0,
        help=DEPENDS_ON,
    )
    uneven = trial.once(observe_uneven)
    require_rows(trial, uneven)
    for i, b in enumerate(uneven.sizes):
        for r, result in enumerate(uneven.results):
            rows, theirs = ((x[:, 0] // 10).tolist() for x in (result["shares"][i], -result["targets"][i]))
            require_same_rows(trial, r, b, rows, theirs, result["changes"])
    results = trial.once(observe_numbers)
    trial.close(
        "the share of a (b,) tensor of the same batch",
        [r["shares"][1] for r in results],
        [r["shares"][0][:, 0] for r in results],
        rtol=0.0,
        help="Rows are dimension 0, whichever dimensions come after it, or none.",
    )


@check("shard_batch", world_sizes=(2,), subgroup=False)
def a_batch_may_be_a_view(trial: Trial) -> None:
    """A batch that is a part of a larger tensor, as tokens[:, :-1] is, is cut at the same rows."""
    seen = trial.once(observe_even)
    require_rows(trial, seen)
    trial.close(
        "the share of a batch that is a part of a larger tensor",
        trial.run(cut_view, numbered(seen.sizes[0])),
        [result["shares"][0] for result in seen.results],
        rtol=0.0,
        help="Index the tensor: a slice knows where its rows lie in memory, and here they do not lie end to "
        "end.",
    )


@check("shard_batch")
def nothing_is_sent(trial: Trial) -> None:
    """Every rank has the batch already: cutting it needs no communication, and leaves it as it was."""
    for r, result in enumerate(trial.once(observe_even).results):
        kinds = result["recording"].kinds()
        trial.require(
            not kinds, f"shard_batch communicates: {kinds[:4]}", help="Index the tensor you have.", rank=r
        )
        trial.require(
            result["unchanged"], "the given batch was changed", help="Leave the argument alone.", rank=r
        )
