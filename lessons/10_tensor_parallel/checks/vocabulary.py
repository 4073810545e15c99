"""The embedding and the loss over a cut vocabulary."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import BACKWARD, Trial, backward, check, each_rank, exercise, parts, stand_alone, told

from .shared import SIZES, describe, nothing_travels, one_all_reduce, own_part, undividable

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
exercise(
    "vocab_parallel_cross_entropy",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Cross entropy of one token: log(sum of exp(logits)) - logit of the target. Which of the two needs "
        "all ranks, and how many numbers a token does each rank have to tell?",
        "Subtract the largest logit of all ranks before exp: an all-reduce with op=dist.ReduceOp.MAX. It is "
        "a constant to autograd: detach it.",
        "The target's logit is on one rank; the others add zero, as in the embedding.",
    ),
)


def embedding_probe(rank, cases: list) -> list[dict]:
    return [one_embedding(rank, *case) for case in cases]


def one_embedding(rank, table: Tensor, idx: Tensor, upstream: Tensor) -> dict:
    embedding = nn.Embedding(*table.shape, device=rank.device)
    with torch.no_grad():
        embedding.weight.copy_(table)
    layer = rank.submission.VocabParallelEmbedding.from_embedding(embedding, group=rank.group)
    held = describe(layer)
    before = idx.clone()
    with rank.record() as recording:
        y = layer(idx)
        recording.mark(BACKWARD)
        backward(y, upstream)
    backward(layer(idx), upstream)
    return {
        "output": y,
        "recording": recording,
        "idx_changed": not torch.equal(before, idx),
        "twice": layer.weight.grad,
        "weight": layer.weight.detach(),
        "held": held["held"],
        "weights": held["weights"],
    }


def observe_embedding(trial: Trial) -> dict[str, SimpleNamespace]:
    n = trial.num_ranks
    even = n * trial.integer(20, 30)
    plans = {
        "v divides": (even, lambda v: trial.tokens(v, 2, 7)),
        "v does not divide": (undividable(trial, 9), lambda v: trial.tokens(v, 3, 4)),
        "all tokens on the last rank": (even, lambda v: trial.tokens(v // n, 9) + v - v // n),
        "v is small": (5, lambda v: torch.arange(5).repeat(2)),
    }
    seen = {name: embedding_case(trial, size, draw(size)) for name, (size, draw) in plans.items()}
    results = trial.run(embedding_probe, [(case.table, case.idx, case.upstream) for case in seen.values()])
    for number, case in enumerate(seen.values()):
        case.results = [result[number] for result in results]
    return seen


def embedding_case(trial: Trial, size: int, idx: Tensor) -> SimpleNamespace:
    width = trial.integer(3, 6)
    table, upstream = trial.normal(size, width), trial.normal(*idx.shape, width)
    weight = table.double().requires_grad_()
    y = F.embedding(idx, weight)
    y.backward(upstream.double())
    return SimpleNamespace(table=table, idx=idx, upstream=upstream, output=y.detach(), gradient=weight.grad)


def row_ranges(table: Tensor, shards: list[Tensor]) -> list[tuple[int, int]] | None:
    """(first row, number of rows) of the table on each rank, padding left out; None if rows are missing."""
    if any(shard is None or shard.dim() != 2 or shard.size(1) != table.size(1) for shard in shards):
        return None
    first, ranges = 0, []
    for shard in shards:
        size = min(len(shard), len(table) - first)
        while size and not torch.equal(shard[:size], table[first : first + size]):
            size -= 1
        ranges.append((first, size))
        first += size
    return ranges if first == len(table) else None


@check("VocabParallelEmbedding")
def rows_are_cut_by_rank(trial: Trial) -> None:
    """Rank r holds the r-th contiguous rows of the table, as many as its share, in a tensor of its own."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_embedding).items():
        size, width = seen.table.shape
        share = -(-size // n)
        for rank, weight in enumerate(each_rank(seen, "weight")):
            trial.require(
                weight.dim() == 2 and weight.size(1) == width and weight.size(0) <= share,
                f"weight is {tuple(weight.shape)} on this rank ({name}: {size} rows over {n} ranks), where "
                f"at most ({share}, {width}) is its share",
                help="Cut the rows; a padded vocabulary has ceil(v/n) of them on every rank.",
                rank=rank,
            )
        trial.require(
            row_ranges(seen.table, each_rank(seen, "weight")) is not None,
            f"the ranks' rows, joined in rank order, are not the table's ({name}: {size} rows)",
            help="Rank 0 has the first rows, rank 1 the next: contiguous, and none missing at the end.",
        )
        stand_alone(trial, seen.results)


@check("VocabParallelEmbedding")
def embedding_output_is_the_dense_one(trial: Trial) -> None:
    """Every rank gets every token's row."""
    for name, seen in trial.once(observe_embedding).items():
        ranges = row_ranges(seen.table, each_rank(seen, "weight"))
        alternatives = {}
        if ranges is not None:
            first_rows = [table_row(seen, *each) for each in ranges if each[1]]
            own = [own_rows(seen, *each) for each in ranges]
            alternatives = {
                "zero where another rank has the row: nothing was summed over the ranks": own,
                "a stray row was added by each rank that does not have the token": sum(
                    o.double() + s for o, s in zip(own, first_rows, strict=False)
                ),
            } | rows_not_zeroed(seen, trial.num_ranks)
        trial.close(f"the output ({name})", each_rank(seen, "output"), seen.output, alternatives=alternatives)
        for rank, result in enumerate(seen.results):
            trial.require(not result["idx_changed"], "the tokens were changed in place", rank=rank)


def own_rows(seen: SimpleNamespace, first: int, size: int) -> Tensor:
    """What a rank with these rows can contribute: the others' tokens are zero."""
    mine = (seen.idx >= first) & (seen.idx < first + size)
    return seen.table[seen.idx] * mine.unsqueeze(-1)


def table_row(seen: SimpleNamespace, first: int, size: int) -> Tensor:
    """What a rank adds by mistake if it looks up its first row for the others' tokens."""
    other = (seen.idx < first) | (seen.idx >= first + size)
    return seen.table[first].double() * other.unsqueeze(-1)


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


@check("VocabParallelEmbedding")
def row_gradients_are_the_dense_tables(trial: Trial) -> None:
    """The gradient of the rows is the dense table's, repeated tokens added up, over two passes as well."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_embedding).items():
        ranges = row_ranges(seen.table, each_rank(seen, "weight"))
        if ranges is None:
            trial.wrong("the rows are not the table's, so their gradients cannot be compared")
        own = [seen.gradient[first : first + size] for first, size in ranges]
        actual = [t[:size] for t, (_, size) in zip(each_rank(seen, "twice"), ranges, strict=True)]
        trial.close(
            f"the gradient of weight after two passes ({name})",
            actual,
            [2 * g for g in own],
            alternatives={"n times too large: backward summed over the ranks": [2 * n * g for g in own]},
            help="Other ranks' tokens must leave no gradient in this rank's rows.",
        )


@check("VocabParallelEmbedding")
def embedding_sends_one_all_reduce_forward(trial: Trial) -> None:
    """The forward sends one all-reduce of the output's size, the backward nothing."""
    for seen in trial.once(observe_embedding).values():
        one_all_reduce(trial, seen, "", seen.output.numel() * 4, "Sum the rows found; never send the table.")
        nothing_travels(trial, seen, BACKWARD, "The gradient of the output is on every rank already.")


def direct_embedding_probe(rank, size: int, width: int) -> dict:
    """A table built directly."""
    layer = rank.submission.VocabParallelEmbedding(size, width, group=rank.group)
    return {"weight": layer.weight.detach(), "output": layer(torch.arange(size, device=rank.device))}


@check("VocabParallelEmbedding", world_sizes=(2, 1, 4), subgroup=False)
def embedding_starts_sensibly(trial: Trial) -> None:
    """Built directly it has its rows of a random table."""
    n = trial.num_ranks
    size = 8 * n
    results = trial.run(direct_embedding_probe, size, 16)
    whole = torch.cat([result["weight"] for result in results])
    trial.equal("the shape of all rows joined", tuple(whole.shape), (size, 16))
    trial.close("the rows of all tokens", [result["output"] for result in results], whole)
    spread = whole.double().std().item()
    trial.require(
        0.005 < spread < 3.0,
        f"the standard deviation of the initial rows is {spread:.3g}; 1 (as nn.Embedding) or 0.02 (as GPT-2) "
        "is expected",
    )


def entropy_probe(rank, cases: list[dict]) -> dict:
    return {"cases": [one_entropy(rank, case) for case in cases]}


def one_entropy(rank, case: dict) -> dict:
    leaf = case["logits"].clone().requires_grad_()
    logits = leaf * 1.0
    before = logits.detach().clone()
    targets = case["targets"].clone()
    with rank.record(memory=True) as recording:
        loss = rank.submission.vocab_parallel_cross_entropy(logits, targets, rank.group)
        unchanged = torch.equal(before, logits.detach()) and torch.equal(targets, case["targets"])
        recording.mark(BACKWARD)
        (loss * case["factor"]).backward()
    return {"loss": loss, "gradient": leaf.grad, "unchanged": unchanged, "recording": recording}


def entropy_cases(trial: Trial) -> dict[str, tuple[Tensor, Tensor]]:
    """Whole logits (N, v) and targets (N,); the last holds words that do not exist, as padding does.

    In every case some target is counted, and no target is a word that does not exist: the loss is finite.
    """
    n = trial.num_ranks
    share = trial.integer(20, 30)
    v = n * share

    def logits() -> Tensor:
        return 2 * trial.normal(trial.integer(6, 12), v)

    plain, some, last, large, padded = (logits() for _ in range(5))
    ignored = trial.tokens(v, len(some))
    ignored[: trial.integer(2, len(some) - 2)] = -1
    offset = 500.0 * torch.arange(len(large)).unsqueeze(1)
    missing = trial.integer(2, share if n > 1 else share // 2)  # at most the last rank's; some words are left
    padded[:, v - missing :] = float("-inf")
    return {
        "plain": (plain, trial.tokens(v, len(plain))),
        "with ignored targets": (some, ignored),
        "all targets on the last rank": (last, trial.tokens(share, len(last)) + v - share),
        "large logits": (large + offset, trial.tokens(v, len(large))),
        "padded vocabulary": (
            padded,
            trial.tokens(v - share if n > 1 else share - share // 2, len(padded)),
        ),
    }


def observe_entropy(trial: Trial) -> dict[str, SimpleNamespace]:
    n = trial.num_ranks
    cases = entropy_cases(trial)
    factors = {name: trial.integer(2, 5) for name in cases}
    runs = [
        (
            [
                {
                    "logits": own_part(logits, -1, rank, n).contiguous(),
                    "targets": targets,
                    "factor": factors[name],
                }
                for name, (logits, targets) in cases.items()
            ],
        )
        for rank in range(n)
    ]
    results = trial.run(entropy_probe, per_rank=runs)
    seen = {}
    for number, (name, (logits, targets)) in enumerate(cases.items()):
        whole = logits.double().requires_grad_()
        loss = F.cross_entropy(whole, targets, ignore_index=-1)
        (loss * factors[name]).backward()
        seen[name] = SimpleNamespace(
            results=[result["cases"][number] for result in results],
            loss=loss.detach(),
            gradient=whole.grad,
            softmax=softmax_part(whole.detach(), targets, factors[name]),
            logits=logits,
            targets=targets,
        )
    return seen


def softmax_part(logits: Tensor, targets: Tensor, factor: float) -> Tensor:
    """The gradient of the mean without what comes through the target's logit."""
    counted = targets != -1
    return factor * logits.softmax(-1) * counted.unsqueeze(1) / counted.sum()


def entropy_alternatives(seen: SimpleNamespace, n: int) -> dict:
    logits, targets = seen.logits.double(), seen.targets
    counted = targets != -1
    each = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    zeroed = F.cross_entropy(logits, targets.clamp(min=0), reduction="none")
    mine = [
        shard.logsumexp(-1)[counted].mean()
        - logits.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)[counted].mean()
        for shard in parts(logits, -1, n)
    ]
    return {
        "divided by all targets, ignored ones too": each.sum() / len(targets),
        "ignored targets (-1) were counted as if they were token 0": zeroed.mean(),
        "the sum over the targets, where the mean belongs": each.sum(),
        "the sum of exponentials of this rank's part alone": mine,
    }


@check("vocab_parallel_cross_entropy")
def loss_is_the_dense_one(trial: Trial) -> None:
    """The loss is the mean over the counted targets, the same on every rank."""
    for name in ("plain", "with ignored targets", "all targets on the last rank"):
        seen = trial.once(observe_entropy)[name]
        alternatives = entropy_alternatives(seen, trial.num_ranks)
        trial.close(f"the loss ({name})", each_rank(seen, "loss"), seen.loss, alternatives=alternatives)


@check("vocab_parallel_cross_entropy")
def loss_is_stable(trial: Trial) -> None:
    """Logits in the thousands, and columns of -inf, give the right loss and gradient: no inf, no NaN."""
    for name in ("large logits", "padded vocabulary"):
        seen = trial.once(observe_entropy)[name]
        help = "Subtract the largest logit of the whole row, over all ranks, before exp."
        trial.close(f"the loss ({name})", each_rank(seen, "loss"), seen.loss, help=help)
        entropy_gradient(trial, seen, name)


def entropy_gradient(trial: Trial, seen: SimpleNamespace, name: str) -> None:
    n = trial.num_ranks
    own = parts(seen.gradient, -1, n)
    trial.close(
        f"the gradient of the logits ({name})",
        each_rank(seen, "gradient"),
        own,
        alternatives={
            "n times too large: backward summed over the ranks": [n * g for g in own],
            "the target's part is missing: only the softmax is there": parts(seen.softmax, -1, n),
        },
        help="softmax minus one at the target, divided by the number of counted targets.",
    )


@check("vocab_parallel_cross_entropy")
def logits_gradient_is_the_dense_one(trial: Trial) -> None:
    """The gradient of this rank's logits is that slice of the dense gradient, zero for ignored targets."""
    for name in ("plain", "with ignored targets", "all targets on the last rank"):
        entropy_gradient(trial, trial.once(observe_entropy)[name], name)


@check("vocab_parallel_cross_entropy")
def only_a_few_numbers_a_token_travel(trial: Trial) -> None:
    """Only (N,) vectors and scalars travel, a handful in all, forward and backward."""
    n = trial.num_ranks
    for seen in trial.once(observe_entropy).values():
        num_targets = len(seen.targets)
        for rank, recording in enumerate(each_rank(seen, "recording")):
            sizes = [
                event.num_elements / (n if event.kind == "all_gather" else 1) for event in recording.select()
            ]
            trial.require(
                max(sizes, default=0) <= 4 * num_targets and sum(sizes) <= 6 * num_targets + 16,
                f"for {num_targets} targets there travelled: {told(recording.select())}",
                help="Three numbers a token are enough: the largest logit, the sum of exponentials, the "
                "target's logit.",
                rank=rank,
            )


@check("vocab_parallel_cross_entropy")
def full_logits_never_exist(trial: Trial) -> None:
    """No rank ever makes a tensor as large as the full logits, and the inputs are left alone."""
    for seen in trial.once(observe_entropy).values():
        for rank, result in enumerate(seen.results):
            largest = result["recording"].largest_elements
            trial.require(
                trial.num_ranks == 1 or largest <= 0.8 * seen.logits.numel(),
                f"a tensor of {largest:,} numbers was made, where this rank's logits are "
                f"{seen.logits.numel() // trial.num_ranks:,} of {seen.logits.numel():,}",
                help="Reduce your part of each row to one number before anything is sent.",
                rank=rank,
            )
            trial.require(
                result["unchanged"],
                "logits or targets were changed in place",
                help="Work on copies.",
                rank=rank,
            )
