"""Checks of `next_token_loss`: the next token may be on the next rank."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grader.checks import NOT_OF_TORCHS_GROUP, CheckEnded, Fault, Trial, check, exercise
from lessons_shared.earlier import by_earlier_counts
from lessons_shared.evaluation import HELP, without_gradients
from lessons_shared.passes import of_the_loss_alone

from .shared import BACKWARD, SIZES, THROUGH_OWN_TERM, summed_back

exercise(
    "next_token_loss",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "How many predictions has a sequence of s tokens? How many does the broken program count on n ranks?",
        "The last position of a rank predicts the first token of the next rank: one token a row must travel.",
        "dist.all_gather of the ranks' first tokens, or a message to the rank before; the last rank has -1.",
    ),
)

CASES = ("padding", "no padding", "padding where a part begins", "one position a rank")


FACTOR = 2.7
"""What a loss is multiplied by before it goes back: no number of ranks, or one less."""


def loss_of(rank, logits: Tensor, tokens: Tensor) -> Any:
    """On a rank: what the submission returns; a target that is no word is told where it comes from."""
    try:
        return rank.submission.next_token_loss(logits, tokens, rank.group)
    except IndexError as error:
        if "Target" in str(error):
            error.add_note(
                "the tokens that were given are words or -1: give what is not predicted the number that "
                "cross_entropy ignores, ignore_index"
            )
        raise


def losses_probe(rank, cases: list) -> dict:
    results = []
    with rank.record() as recording:
        for logits, tokens in cases:
            logits = logits.requires_grad_()
            before = tokens.clone()
            recording.mark("")
            loss = loss_of(rank, logits, tokens)
            recording.mark(BACKWARD)
            if isinstance(loss, Tensor) and loss.requires_grad and loss.dim() == 0:
                (FACTOR * loss).backward()
            results.append(
                {
                    "loss": loss.detach() if isinstance(loss, Tensor) else None,
                    "gradient": logits.grad,
                    "unchanged": torch.equal(before, tokens),
                }
            )
    call = rank.submission.next_token_loss
    for result, (logits, tokens) in zip(results, cases, strict=True):
        result["silent"] = without_gradients(call, logits.detach(), tokens, rank.group)
    return {"results": results, "recording": recording}


def observe(trial: Trial) -> SimpleNamespace:
    n, words = trial.num_ranks, trial.integer(60, 80)
    cases = []
    b, usual = trial.integer(2, 3), trial.integer(3, 5)  # what is kept by shape is found by the next case
    for name in CASES:
        part = 1 if name == "one position a rank" else usual
        tokens = trial.tokens(words, b, n * part)
        if name == "padding":
            tokens[0, -part:] = -1
            tokens[1, 1:2] = -1
        if name == "padding where a part begins":
            tokens[0, ::part] = -1
        if name == "one position a rank" and n == 1:
            tokens = trial.tokens(words, b, 2)
        cases.append((2 * trial.normal(*tokens.shape, words), tokens))
    parts = [([(x.chunk(n, 1)[r], t.chunk(n, 1)[r]) for x, t in cases],) for r in range(n)]
    try:
        results = trial.run(losses_probe, per_rank=parts)
    except CheckEnded as end:
        if end.cause == NOT_OF_TORCHS_GROUP:  # in every group that backward would sum up the loss's gradient
            end.help = THROUGH_OWN_TERM
        raise
    return SimpleNamespace(cases=dict(zip(CASES, cases, strict=True)), results=results, words=words)


def labels_of(tokens: Tensor) -> Tensor:
    """What each position predicts, -1 after the last."""
    return F.pad(tokens[:, 1:], (0, 1), value=-1)


def each_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.double().transpose(1, 2), labels, ignore_index=-1, reduction="none")


OVER_ALL = "Add up the losses' sums and their counts over the ranks, and divide once."


def other_losses(logits: Tensor, tokens: Tensor, n: int, calls: Sequence[Tensor]) -> dict:
    """Cause → the loss; `calls` are the tokens of earlier calls."""
    labels = labels_of(tokens)
    losses, counted = each_loss(logits, labels), labels != -1
    inside = torch.cat([labels_of(t) for t in tokens.chunk(n, 1)], 1)
    lost, kept = each_loss(logits, inside), inside != -1
    around = tokens.roll(-1, 1)
    by_rank = [(x.sum(), c.sum()) for x, c in zip(losses.chunk(n, 1), counted.chunk(n, 1), strict=True)]
    before = torch.cat([F.pad(t[:, 1:], (0, 1), value=-1) for t in tokens.chunk(n, 1)], 1)
    part = tokens.size(1) // n
    before[:, part - 1 :: part] = tokens[:, ::part]
    before[:, -1] = -1
    of_row_0 = labels.clone()
    of_row_0[:, part - 1 : -1 : part] = labels[:1, part - 1 : -1 : part]
    ends, nothing = tokens[:, part - 1 :: part], torch.full_like(tokens[:, :1], -1)
    previous, following = inside.clone(), inside.clone()
    previous[:, part - 1 :: part] = torch.cat([nothing, ends[:, :-1]], 1)
    following[:, part - 1 :: part] = torch.cat([ends[:, 1:], nothing], 1)
    empty = {}
    if not all(count for _, count in by_rank):
        empty["the mean of a rank that predicts nothing is 0 / 0, NaN, and so is all that it is added to"] = (
            Fault(torch.full_like(losses.sum(), math.nan), OVER_ALL)
        )
    return empty | {
        "no position at the end of a rank's part predicts anything": lost.sum() / kept.sum(),
        "the last position of each part predicts nothing, and is counted": lost.sum() / counted.sum(),
        "the sum is right, and what the last position of each part predicts is not counted": Fault(
            losses.sum() / kept.sum(), "Count where the labels are not -1, and cut nothing off."
        ),
        "the last position of the sequence predicts the first token": each_loss(logits, around).sum()
        / (around != -1).sum(),
        "the last position of a part predicts the first of the same part": each_loss(logits, before).sum()
        / (before != -1).sum(),
        "the last position of a part predicts the last token of the part before": each_loss(
            logits, previous
        ).sum()
        / (previous != -1).sum(),
        "the last position of a part predicts the last token of the next part": each_loss(
            logits, following
        ).sum()
        / (following != -1).sum(),
        "the last position of a part predicts, in every row, the token that follows in row 0": each_loss(
            logits, of_row_0
        ).sum()
        / (of_row_0 != -1).sum(),
        "the ranks' own means are averaged, and they count different numbers": torch.stack(
            [x / c for x, c in by_rank]
        ).mean(),
        "it is this rank's own mean": [x / c for x, c in by_rank],
        "it is this rank's own sum, over the count of all": [x / counted.sum() for x, _ in by_rank],
        "what has no target is counted: padding, or the last position of all": losses.sum() / counted.numel(),
        "it is the sum, not the mean": losses.sum(),
        "it is divided by all positions but the last one: what predicts padding is counted": Fault(
            losses.sum() / tokens[:, 1:].numel(), "Count the predictions whose target is not -1."
        ),
        "the sum is divided by all tokens but one a sequence: where padding begins it, all are predicted": (
            losses.sum() / ((tokens != -1).sum() - len(tokens))
        ),
        **by_earlier_counts(losses.sum(), labels, [labels_of(earlier) for earlier in calls]),
        "what follows a padded position is not predicted": Fault(
            losses.masked_fill(tokens == -1, 0.0).sum() / (counted & (tokens != -1)).sum(),
            "Leave out a position whose next token is -1, and no other.",
        ),
    }


def right_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """One process's."""
    labels = labels_of(tokens)
    return each_loss(logits, labels).sum() / (labels != -1).sum()


def require_losses(trial: Trial, key: str, what: str, help: str) -> None:
    """In every case the loss that results have under `key` is one process's."""
    seen, n = trial.once(observe), trial.num_ranks
    before = [tokens for _, tokens in seen.cases.values()] if key == "silent" else []  # those come last
    for i, (name, (logits, tokens)) in enumerate(seen.cases.items()):
        trial.close(
            f"{what} ({name})",
            [r["results"][i][key] for r in seen.results],
            right_loss(logits, tokens),
            other_losses(logits, tokens, n, before) if n > 1 else {},
            help=help,
        )
        before = [*before, tokens]


@check("next_token_loss")
def every_next_token_is_predicted(trial: Trial) -> None:
    """The loss is one process's: every token but the first is predicted, those that begin a part, too."""
    help = "Position i predicts token i + 1, wherever it is. What follows a part is on the next rank."
    require_losses(trial, "loss", "the loss", help)


@check("next_token_loss")
def the_loss_is_the_same_in_validation(trial: Trial) -> None:
    """Under torch.no_grad(), where no backward is to come, the loss is the same, on every rank."""
    require_losses(trial, "silent", "the loss under torch.no_grad()", HELP)


@check("next_token_loss")
def gradient_reaches_every_position(trial: Trial) -> None:
    """The gradient of each rank's logits is its part of one process's, at the borders, too."""
    seen, n = trial.once(observe), trial.num_ranks
    for i, (name, (logits, tokens)) in enumerate(seen.cases.items()):
        whole = logits.double().requires_grad_()
        labels = labels_of(tokens)
        (FACTOR * each_loss(whole, labels).sum() / (labels != -1).sum()).backward()
        right = list(whole.grad.chunk(n, 1))
        inside = torch.cat([labels_of(t) for t in tokens.chunk(n, 1)], 1)
        lost = logits.double().requires_grad_()
        (FACTOR * each_loss(lost, inside).sum() / (inside != -1).sum()).backward()
        others = of_the_loss_alone(right, FACTOR) | summed_back(seen.results, [n * g for g in right])
        if n > 1 and name != "one position a rank":
            others["the last position of each part has no gradient"] = Fault(list(lost.grad.chunk(n, 1)))
        trial.close(
            f"the gradient of the logits ({name})",
            [r["results"][i]["gradient"] for r in seen.results],
            right,
            others,
            help="The value is the mean of all; the gradient is that of your own sum over the count of all.",
        )


@check("next_token_loss")
def no_logits_travel(trial: Trial) -> None:
    """What travels is tokens and a few numbers, not logits; tokens are not written to."""
    seen = trial.once(observe)
    numbers = sum(tokens.numel() for _, tokens in seen.cases.values())
    for r, result in enumerate(seen.results):
        events = [e for e in result["recording"].select() if e.kind != "recv"]
        total = sum(e.num_bytes for e in events)
        allowed = 3 * 8 * numbers + 64 * len(seen.cases)
        largest = max(events, key=lambda e: e.num_bytes, default=None)
        trial.require(
            total <= allowed,
            f"{total:,} bytes travelled for {numbers} tokens; the largest: "
            f"{largest.describe() if largest else ''}",
            help="Logits are the largest tensor of a step. Only the first token of the next part is missing.",
            rank=r,
        )
        trial.require(
            all(x["unchanged"] for x in result["results"]),
            "the given tokens were changed",
            help="Make labels of your own.",
            rank=r,
        )
