"""The embedding over a cut vocabulary."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import (
    BACKWARD,
    CheckEnded,
    Fault,
    Trial,
    backward,
    check,
    each_rank,
    exercise,
    stand_alone,
)
from lessons_shared.alone import tell_cases
from lessons_shared.cut_gpt import describe, own_part, row_ranges
from lessons_shared.evaluation import evaluates_alike, in_evaluation
from lessons_shared.refusals import undividable
from lessons_shared.results import overwritten, results_stay
from lessons_shared.wire import nothing_travels

from .linears import fill
from .shared import SIZES, one_all_reduce
from .starts import starts_as_slices

exercise(
    "VocabParallelEmbedding",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "A token's row is on one rank. What can the others add to a sum so that it comes out right?",
        "Shift the tokens by this rank's first row; what lies outside 0..rows-1 belongs to someone else.",
        "Look up any row for someone else's token (it must exist), and put zeros in its place.",
    ),
)


def embedding_probe(rank, cases: list) -> list[dict]:
    return [one_embedding(rank, *case) for case in cases]


KEPT = "it was a later call, of other tokens in the same shape: is something kept from the first one?"


def one_embedding(rank, table: Tensor, idx: Tensor, upstream: Tensor, other: Tensor, is_direct: bool) -> dict:
    kind = rank.submission.VocabParallelEmbedding
    if is_direct:
        layer = kind(*table.shape, group=rank.group).to(rank.device)
        fill(layer, {"weight": own_part(table, 0, rank.group.rank(), rank.group.size())})
    else:
        embedding = nn.Embedding(*table.shape, device=rank.device)
        fill(embedding, {"weight": table})
        layer = kind.from_embedding(embedding, group=rank.group)
    held = describe(layer)
    before = idx.clone()
    with rank.record() as recording:
        y = layer(idx)
        recording.mark(BACKWARD)
        backward(y, upstream)
    backward(layer(idx), upstream)
    try:
        later = layer(other)
    except Exception as error:
        error.add_note(KEPT)
        raise
    return {
        "later": later,
        "output": y,
        "recording": recording,
        "idx_changed": not torch.equal(before, idx),
        "twice": None if layer.weight.grad is None else layer.weight.grad.clone(),
        "weight": layer.weight.detach(),
        "held": held["held"],
        "weights": held["weights"],
        "evaluation": in_evaluation(layer, idx),
        "overwritten": overwritten(layer, idx),
    }


def with_borders(idx: Tensor, size: int, n: int) -> Tensor:
    """Tokens (b, s), of which the first ones are the first and the last row of each of n ranks."""
    firsts = torch.arange(0, size, size // n)
    idx.view(-1)[: 2 * n] = torch.cat([firsts, firsts + size // n - 1])
    return idx


def observe_embedding(trial: Trial) -> dict[str, SimpleNamespace]:
    n = trial.num_ranks
    even = n * trial.integer(20, 30)
    plans = {
        "v divides": (even, lambda v: with_borders(trial.tokens(v, 2, 7), v, n)),
        "v does not divide": (undividable(trial, 9), lambda v: trial.tokens(v, 3, 4)),
        "all tokens on the last rank": (even, lambda v: trial.tokens(v // n, 9) + v - v // n),
        "v is small": (5, lambda v: torch.arange(5).repeat(2)),
        BUILT: (even, lambda v: with_borders(trial.tokens(v, 2, 7), v, n)),
    }
    seen = {name: embedding_case(trial, size, draw(size)) for name, (size, draw) in plans.items()}
    cases = [(c.table, c.idx, c.upstream, c.other, name == BUILT) for name, c in seen.items()]
    try:
        results = trial.run(embedding_probe, cases)
    except CheckEnded as end:
        kinds = [kinds_of(name, len(case.table), n) for name, case in seen.items()]
        tell_cases(end, lambda i: trial.run(embedding_probe, [cases[i]]), kinds, STEPS)
        raise
    for number, case in enumerate(seen.values()):
        case.results = [result[number] for result in results]
    return seen


BUILT = "v divides, built directly"
DIRECT = "the table was built directly, not by from_embedding"
NO_ROWS = "the table has so few rows that a rank has none of them"
UNEVEN = "the ranks do not divide the table's rows"
STEPS = {
    NO_ROWS: "A rank without rows has nothing to look up, not even for another's token: give it a row of "
    "zeros, as a table that is filled up has, or let it add zeros to the sum.",
    DIRECT: "What forward and backward need, the constructor sets, whoever calls it.",
    UNEVEN: "Any number of rows is cut: fill the table up at its end, or let it end early on the last ranks.",
}


def kinds_of(name: str, size: int, n: int) -> list[str]:
    """What is special about a case's table, of so many rows over n ranks."""
    there = {NO_ROWS: (n - 1) * -(-size // n) >= size, UNEVEN: size % n, DIRECT: name == BUILT}
    return [kind for kind, holds in there.items() if holds]


def embedding_case(trial: Trial, size: int, idx: Tensor) -> SimpleNamespace:
    width = trial.integer(3, 6)
    table, upstream = trial.normal(size, width), trial.normal(*idx.shape, width)
    weight = table.double().requires_grad_()
    y = F.embedding(idx, weight)
    y.backward(upstream.double())
    other = size - 1 - idx
    return SimpleNamespace(
        table=table, idx=idx, upstream=upstream, other=other, output=y.detach(), gradient=weight.grad
    )


@check("VocabParallelEmbedding")
def rows_are_cut_by_rank(trial: Trial) -> None:
    """Rank r holds the r-th contiguous rows of the table, as many as its share, in a tensor of its own."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_embedding).items():
        size, width = seen.table.shape
        share = -(-size // n)
        numbers = [len(weight) for weight in each_rank(seen, "weight")]
        the_rest = size % n and numbers == [size // n] * (n - 1) + [size - (n - 1) * (size // n)]
        filled = numbers == [max(share, (rank + 1) * share - size) for rank in range(n)]
        for rank, weight in enumerate(each_rank(seen, "weight")):
            trial.require(
                weight.dim() == 2 and weight.size(1) == width and weight.size(0) <= share,
                f"weight is {tuple(weight.shape)} on this rank ({name}: {size} rows over {n} ranks), where "
                f"at most ({share}, {width}) is its share",
                help="Cut the rows; a padded vocabulary has ceil(v/n) of them on every rank.",
                rank=rank,
                cause="v // n rows for each rank, and the last one takes what is left over"
                if the_rest
                else f"with nothing of the table, it fills up from row {size}, where that ends, and not from "
                f"its own first one, {rank * share}"
                if filled
                else "",
            )
        held = each_rank(seen, "weight")
        every_nth = [seen.table[r::n] for r in range(n)]
        rounded_down = numbers == [size // n] * n and torch.equal(
            torch.cat(held), seen.table[: size // n * n]
        )
        trial.require(
            row_ranges(seen.table, held) is not None,
            f"the ranks' rows, joined in rank order, are not the table's ({name}: {size} rows)",
            help="Rank 0 has the first rows, rank 1 the next: contiguous, and none missing at the end.",
            cause=f"v // n rows for each rank ({size // n} of {size}): what is left over is on no rank"
            if rounded_down
            else "every n-th row, where contiguous ones belong"
            if all(torch.equal(own[: len(rows)], rows) for own, rows in zip(held, every_nth, strict=True))
            else "the first rank's rows on every rank"
            if all(torch.equal(own, held[0]) for own in held)
            else "",
        )
        stand_alone(trial, seen.results, "built directly, " * (name == BUILT))


def table_dtype_probe(rank, size: int) -> dict:
    """What `from_embedding` makes of a table in bfloat16, and what that looks up."""
    dense = nn.Embedding(size, 4, dtype=torch.bfloat16, device=rank.device)
    layer = rank.submission.VocabParallelEmbedding.from_embedding(dense, group=rank.group)
    return {"weight": layer.weight.detach(), "its output": layer(torch.arange(3, device=rank.device))}


@check("VocabParallelEmbedding", world_sizes=(2,), subgroup=False)
def embedding_keeps_the_dtype(trial: Trial) -> None:
    """`from_embedding` keeps the dense table's dtype."""
    for rank, made in enumerate(trial.run(table_dtype_probe, 4 * trial.num_ranks)):
        for name, tensor in made.items():
            if not isinstance(tensor, Tensor):
                continue  # the output is looked at elsewhere
            trial.require(
                tensor.dtype == torch.bfloat16,
                f"{name} is {tensor.dtype}, where the dense table's is torch.bfloat16",
                help="Cut the dense table itself: its rows have its dtype and device, and so has a look-up.",
                rank=rank,
            )


@check("VocabParallelEmbedding")
def embedding_output_is_the_dense_one(trial: Trial) -> None:
    """Every rank gets every token's row."""
    for name, seen in trial.once(observe_embedding).items():
        ranges = row_ranges(seen.table, each_rank(seen, "weight"))
        trial.close(
            f"the output ({name})",
            each_rank(seen, "output"),
            seen.output,
            alternatives=partial(other_outputs, seen, ranges or [], trial.num_ranks),
        )
        for rank, result in enumerate(seen.results):
            trial.require(
                not result["idx_changed"],
                "the tokens were changed in place",
                help="Make new tensors: idx - first is one, and idx -= first writes into the caller's.",
                rank=rank,
            )
        trial.close(
            f"the output of a later call, with other tokens in the same shape ({name})",
            each_rank(seen, "later"),
            seen.table[seen.other],
            alternatives=partial(as_the_first_call_had_them, seen, ranges or []),
            help="Which tokens are this rank's is asked anew in each call: batches come and go.",
        )


def as_the_first_call_had_them(seen: SimpleNamespace, ranges: list[tuple[int, int]]) -> dict[str, Fault]:
    """What a later call gives, if whose a token is was found out in the first call, and kept."""
    total = torch.zeros(*seen.idx.shape, seen.table.size(1), dtype=torch.float64)
    for first, size in ranges:
        mine = (seen.idx >= first) & (seen.idx < first + size)
        if size:
            total += seen.table[first + (seen.other - first).clamp(0, size - 1)] * mine.unsqueeze(-1)
    told = "which tokens are this rank's is what it was in the first call: that was kept"
    return {told: Fault(total, "Compute the mask from the tokens of this call.")}


def other_outputs(seen: SimpleNamespace, ranges: list[tuple[int, int]], n: int) -> dict[str, Any]:
    """What known slips look up, given each rank's first row and number of rows."""
    having = [each for each in ranges if each[1]]
    if not having:
        return {}
    own = [own_rows(seen, *each) for each in ranges]
    first_rows = [table_row(seen, *each) for each in having]

    def without(rows: list[int]) -> Tensor:
        return seen.output * ~torch.isin(seen.idx, torch.tensor(rows)).unsqueeze(-1)

    taken = "of each rank is zero: its tokens were taken for another rank's"
    return {
        "zero where another rank has the row: nothing was summed over the ranks": own,
        "a stray row was added by each rank that does not have the token": sum(
            o.double() + s for o, s in zip(own, first_rows, strict=False)
        ),
        f"the first row {taken}": without([first for first, _ in having]),
        f"the last row {taken}": without([first + size - 1 for first, size in having]),
        f"the last row {taken} (the last of ceil(v/n))": without(
            [(r + 1) * -(-len(seen.table) // n) - 1 for r in range(n if len(seen.table) % n else 0)]
        ),
        "a rank's first row has the last one of the rank before added: own rows are < first + size, "
        "and <= takes in the next rank's first": seen.output + sum(next_ones(seen, *each) for each in having),
        "the token before each one was looked up: an index is one too small": shifted(seen, ranges, -1),
        "the token after each one was looked up: an index is one too large": shifted(seen, ranges, 1),
    } | (rows_not_zeroed(seen, n) | as_if_all_had_as_many(seen, ranges))


def as_if_all_had_as_many(seen: SimpleNamespace, ranges: list[tuple[int, int]]) -> dict[str, Fault]:
    """Where ranks have different numbers of rows: the sum, if each counts all before it as its own number."""
    if len({size for _, size in ranges}) == 1:
        return {}
    total = torch.zeros_like(seen.output, dtype=torch.float64)
    for rank, (first, size) in enumerate(ranges):
        own = seen.idx - rank * size
        there = (own >= 0) & (own < size)
        if size:  # the last ranks may have rows that fill up, and no other
            total += seen.table[first + own.clamp(0, size - 1)] * there.unsqueeze(-1)
    cause = (
        "a rank's first row is taken for r times its own number of rows, and the ranks have different numbers"
    )
    return {cause: Fault(total, "Its first row is the sum of what the ranks before it have.")}


def shifted(seen: SimpleNamespace, ranges: list[tuple[int, int]], by: int) -> Tensor:
    """The rows beside those that belong to the tokens; none where that is another rank's."""
    idx = seen.idx + by
    there = torch.zeros_like(idx, dtype=torch.bool)
    for first, size in ranges:
        there |= (idx >= first) & (idx < first + size) & (seen.idx >= first) & (seen.idx < first + size)
    return seen.table[idx.clamp(0, len(seen.table) - 1)] * there.unsqueeze(-1)


def own_rows(seen: SimpleNamespace, first: int, size: int) -> Tensor:
    """What a rank with these rows can contribute: the others' tokens are zero."""
    mine = (seen.idx >= first) & (seen.idx < first + size)
    return seen.table[seen.idx] * mine.unsqueeze(-1)


def table_row(seen: SimpleNamespace, first: int, size: int) -> Tensor:
    """What a rank adds by mistake if it looks up its first row for the others' tokens."""
    other = (seen.idx < first) | (seen.idx >= first + size)
    return seen.table[first].double() * other.unsqueeze(-1)


def next_ones(seen: SimpleNamespace, first: int, size: int) -> Tensor:
    """What a rank adds by mistake if it takes the row behind its last one for its own."""
    return seen.table[first + size - 1].double() * (seen.idx == first + size).unsqueeze(-1)


def rows_not_zeroed(seen: SimpleNamespace, n: int) -> dict[str, Tensor]:
    """The sum over the ranks if each looks up some row of its own for the others' tokens, and keeps it."""
    share = -(-len(seen.table) // n)
    table = F.pad(seen.table.double(), (0, 0, 0, n * share - len(seen.table)))
    shifted = [seen.idx - rank * share for rank in range(n)]
    found = {
        "by the remainder": sum(table[rank * share + i % share] for rank, i in enumerate(shifted)),
        "by clamp": sum(table[rank * share + i.clamp(0, share - 1)] for rank, i in enumerate(shifted)),
    }
    return {
        f"rows of tokens that other ranks own were not zeroed (their index was made to fit {how})": total
        for how, total in found.items()
    }


def rows_have_gradients(
    trial: Trial, seen: SimpleNamespace, name: str, ranges: list[tuple[int, int]]
) -> None:
    """Where a rank has rows, these have a gradient, if only of zeros."""
    for rank, ((first, size), found) in enumerate(zip(ranges, each_rank(seen, "twice"), strict=True)):
        mine = (seen.idx >= first) & (seen.idx < first + size)
        trial.require(
            found is not None or size == 0,
            f"weight has no gradient on this rank ({name})",
            help="Look rows up on every rank, and put zeros in the place of others': the gradient is 0 then. "
            "An optimizer leaves out what has none, and the dense table decays in every row.",
            rank=rank,
            cause="" if mine.any() else "no token has its row here, and nothing leads back to weight then",
        )


@check("VocabParallelEmbedding")
def row_gradients_are_the_dense_tables(trial: Trial) -> None:
    """The gradient of the rows is the dense table's, repeated tokens added up, over two passes as well."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_embedding).items():
        ranges = row_ranges(seen.table, each_rank(seen, "weight"))
        if ranges is None:
            trial.wrong("the rows are not the table's, so their gradients cannot be compared")
        own = [seen.gradient[first : first + size] for first, size in ranges]
        rows_have_gradients(trial, seen, name, ranges)
        actual = [
            torch.zeros_like(g) if t is None else t[: len(g)]
            for t, g in zip(each_rank(seen, "twice"), own, strict=True)
        ]
        trial.close(
            f"the gradient of weight after two passes ({name})",
            actual,
            [2 * g for g in own],
            alternatives={
                "n times too large: backward summed over the ranks": [2 * n * g for g in own],
                "the first row of each rank has no gradient": Fault(
                    [2 * g.clone().index_fill(0, torch.arange(min(1, len(g))), 0.0) for g in own],
                    "It is a word like every other: is it taken for padding?",
                ),
            },
            help="Other ranks' tokens must leave no gradient in this rank's rows.",
        )


@check("VocabParallelEmbedding")
def embedding_sends_one_all_reduce_forward(trial: Trial) -> None:
    """The forward sends one all-reduce of the output's size, the backward nothing."""
    for seen in trial.once(observe_embedding).values():
        one_all_reduce(trial, seen, "", seen.output.numel() * 4, "Sum the rows found; never send the table.")
        nothing_travels(trial, seen, BACKWARD, "The gradient of the output is on every rank already.")


@check("VocabParallelEmbedding", world_sizes=(2, 1, 4), subgroup=False)
def embedding_starts_as_rows(trial: Trial) -> None:
    """Built directly, the ranks' rows are those of one random table: no two ranks have the same."""
    n = trial.num_ranks
    size = 24 * n - 1
    results = starts_as_slices(trial, "VocabParallelEmbedding", (24 * n, 48), (24, 48), (size, 48))
    last = results[-1]["uneven"].get("weight")
    if isinstance(last, Tensor) and last.dim() == 2:
        trial.require(
            not last[size - 24 * (n - 1) :].any(),
            f"built directly for {size} tokens, the last row of this rank is not zero: it is no token's",
            help="Draw as many rows as there are tokens, and fill up with zeros.",
            rank=n - 1,
            cause="rows that fill up were drawn, too",
        )


@check("VocabParallelEmbedding")
def embedding_is_the_same_in_evaluation(trial: Trial) -> None:
    """In eval mode and under torch.no_grad() the output is that of training."""
    for name, seen in trial.once(observe_embedding).items():
        evaluates_alike(trial, seen.results, name)


@check("VocabParallelEmbedding", world_sizes=(2,), subgroup=False)
def embedding_keeps_its_results(trial: Trial) -> None:
    """What a call returned stays when another one of these shapes is made."""
    for seen in trial.once(observe_embedding).values():
        results_stay(trial, each_rank(seen, "overwritten"))
