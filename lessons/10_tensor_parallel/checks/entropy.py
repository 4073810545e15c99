"""The loss over a cut vocabulary."""

import math
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

from grader.checks import (
    BACKWARD,
    Fault,
    Trial,
    check,
    each_rank,
    exercise,
    is_close,
    parts,
    told,
)
from lessons_shared.cut_gpt import (
    own_part,
)
from lessons_shared.earlier import by_earlier_counts
from lessons_shared.evaluation import evaluates_alike, in_silence
from lessons_shared.passes import of_the_loss_alone

from .shared import SIZES

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


CERTAIN = "with two targets that are certain: loss 0"
DENSE = ("plain", "with ignored targets", "all targets on the last rank", CERTAIN)
"""The cases that are no more than a loss."""


def entropy_probe(rank, cases: list[dict]) -> dict:
    return {"cases": [one_entropy(rank, case) for case in cases]}


def one_entropy(rank, case: dict) -> dict:
    leaf = case["logits"].clone().requires_grad_()
    logits = leaf * 1.0
    before = logits.detach().clone()
    targets = case["targets"].clone()
    with rank.record(memory=True) as recording:
        loss = rank.submission.vocab_parallel_cross_entropy(logits, targets, rank.group)
        recording.mark(BACKWARD)
        (loss * case["factor"]).backward(retain_graph=True)
    unchanged = torch.equal(before, logits.detach()) and torch.equal(targets, case["targets"])
    try:
        (again,) = torch.autograd.grad(loss * case["factor"], leaf)
    except RuntimeError:  # a backward that writes into what it saved may refuse the second time
        again = None
    call = rank.submission.vocab_parallel_cross_entropy
    return {
        "output": loss,
        "evaluation": in_silence(call, leaf.detach(), targets, rank.group),
        "loss": loss,
        "gradient": leaf.grad,
        "again": again,
        "unchanged": unchanged,
        "recording": recording,
    }


def entropy_cases(trial: Trial) -> dict[str, tuple[Tensor, Tensor]]:
    """Whole logits (N, v) and targets (N,); the last holds words that do not exist, as padding does.

    In every case some target is counted, and no target is a word that does not exist: the loss is finite.
    """
    n = trial.num_ranks
    share = trial.integer(20, 30)
    v = n * share

    def logits() -> Tensor:
        return 2 * trial.normal(trial.integer(6, 12), v)

    plain, last, large, padded, certain = (logits() for _ in range(5))
    some = 2 * trial.normal(*plain.shape)  # what is kept by shape is found by the next case
    ignored = trial.tokens(v, len(some))
    ignored[: trial.integer(2, len(some) - 2)] = -1
    ignored[-1] = 0  # a word like any other
    # exp(100) is too much for fp32 and exp(-100) too little; 500 would be rounded by more than the tolerance
    offset = 100.0 * torch.tensor([1.0, -1.0]).repeat(len(large))[: len(large)].unsqueeze(1)
    missing = trial.integer(2, share // 2)
    if n > 2:  # all of the last rank's, and some of the one before
        missing += share
    padded[:, v - missing :] = float("-inf")
    targets = trial.tokens(v, len(plain))
    # Among them are the last word of each rank and the first one of the next.
    edges = [share * r + i for r in range(1, n) for i in (-1, 0)]
    targets[: len(edges)] = torch.tensor(edges)
    foreseen = trial.tokens(v, len(certain))
    certain[[1, 3], foreseen[[1, 3]]] = 120.0  # in fp32 their losses are 0, and they count
    return {
        "with ignored targets": (some, ignored),  # first: a count that is kept is not that of all targets
        "plain": (plain, targets),
        "all targets on the last rank": (last, trial.tokens(share, len(last)) + v - share),
        "large logits": (large + offset, trial.tokens(v, len(large))),
        "padded vocabulary": (
            padded,
            trial.tokens(v - missing, len(padded)),
        ),
        CERTAIN: (certain, foreseen),
    }


def observe_entropy(trial: Trial) -> dict[str, SimpleNamespace]:
    n = trial.num_ranks
    cases = entropy_cases(trial)
    factors = {name: trial.choice([2.7, 3.7, 4.3]) for name in cases}  # no number of ranks, or one less
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
            factor=factors[name],
            logits=logits,
            targets=targets,
            before=[earlier for _, earlier in list(cases.values())[:number]],
        )
    return seen


def softmax_part(logits: Tensor, targets: Tensor, factor: float) -> Tensor:
    """The gradient of the mean without what comes through the target's logit."""
    counted = targets != -1
    return factor * logits.softmax(-1) * counted.unsqueeze(1) / counted.sum()


def through_the_largest(logits: Tensor, gradient: Tensor) -> Tensor:
    """A rank's gradient if its largest logit of each row gets what subtracting it from all of them gives."""
    largest = logits.argmax(dim=1, keepdim=True)
    return gradient.scatter_add(1, largest, -gradient.sum(dim=1, keepdim=True))


def entropy_alternatives(seen: SimpleNamespace, n: int) -> dict:
    """Cause → the loss, or one a rank."""
    logits, targets = seen.logits.double(), seen.targets
    counted, shifted = targets != -1, logits - logits.amax(-1, keepdim=True)
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
        "targets that are token 0 were ignored as if they were -1": each[targets > 0].mean(),
        "losses that are not 0 are counted: a target that is certain has a loss of 0, and counts": (
            each.sum() / (each > 1e-6).sum()
        ),
        "the sum over the targets, where the mean belongs": each.sum(),
        "in bits: the logarithm to the base 2, where the natural one belongs": each.sum()
        / (math.log(2) * counted.sum()),
        "the sum of exponentials of this rank's part alone": mine,
        "one largest logit is taken off all tokens, where each has its own: in float32 exp() of all logits "
        "of a token can be 0, and log(0) is -inf": with_one_largest(seen),
        "the target's logit is that of this rank's words alone: it was not reduced": [
            shifted.logsumexp(-1)[counted].mean() - own[counted].mean()
            for own in own_targets(shifted, targets, n)
        ],
        "a target's number is looked up as it is: on each rank words are counted from its first": (
            logits.logsumexp(-1)[counted].mean() - own_numbers(logits, targets, n)[counted].mean()
        ),
        "a target's number is looked up as it is, in logits less the largest: on each rank words are counted "
        "from its first": shifted.logsumexp(-1)[counted].mean()
        - own_numbers(shifted, targets, n)[counted].mean(),
        "a target that is the word before a rank's first is looked up there too: -1 is the last word": (
            each.sum() - last_words(shifted, targets, n, -1).sum()
        )
        / counted.sum(),
        "a target that is the word after a rank's last is looked up there too, as its last: own words are "
        "< rows, and <= takes in the next rank's first": (
            each.sum() - last_words(shifted, targets, n, shifted.size(-1) // n).sum()
        )
        / counted.sum(),
    } | (
        own_largest(seen, n) | own_means(each, seen, n) | by_earlier_counts(each.sum(), targets, seen.before)
    )


def with_one_largest(seen: SimpleNamespace) -> Tensor:
    """The loss if the largest logit of all tokens is taken off each, in float32."""
    shifted, targets = seen.logits - seen.logits.max(), seen.targets
    right = shifted.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    return (shifted.exp().sum(-1).log() - right)[targets != -1].mean().double()


def own_numbers(logits: Tensor, targets: Tensor, n: int) -> Tensor:
    """The sum over the ranks of what stands at a target's number in their parts, where they go so far."""
    found = []
    for shard in parts(logits, -1, n):
        there = (targets >= 0) & (targets < shard.size(-1))
        words = shard.gather(1, targets.masked_fill(~there, 0).unsqueeze(1)).squeeze(1)
        found.append(words.masked_fill(~there, 0.0))
    return torch.stack(found).sum(0)


def last_words(logits: Tensor, targets: Tensor, n: int, number: int) -> Tensor:
    """What the ranks' last words add for targets that have this number if a rank's own begin with 0."""
    found, first = torch.zeros(len(targets), dtype=logits.dtype), 0
    for shard in parts(logits, -1, n):
        found += torch.where((targets == first + number) & (targets >= 0), shard[:, -1], 0.0)
        first += shard.size(-1)
    return found


def own_targets(logits: Tensor, targets: Tensor, n: int) -> list[Tensor]:
    """By rank: the target's logit where it is one of the rank's words, and 0."""
    size = logits.size(-1) // n
    picked = logits.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    return [picked.masked_fill(targets.clamp(min=0) // size != r, 0.0) for r in range(n)]


def own_means(each: Tensor, seen: SimpleNamespace, n: int) -> dict[str, Tensor | list[Tensor]]:
    """Losses by target, if a rank's mean has to do with the targets that are its own words."""
    owner = seen.targets.div(seen.logits.size(-1) // n, rounding_mode="floor")
    counts = torch.stack([(owner == r).sum().clamp(min=1) for r in range(n)])
    means = torch.stack([each[owner == r].sum() for r in range(n)]) / counts
    told = "a rank's mean is over the targets that are its own words"
    return {
        f"{told}: those of other ranks are left out": list(means),
        f"{told}, and the ranks' means are averaged: they have not as many targets": means.mean(),
        f"{told}, and the ranks' means are added up": means.sum(),
        "the sum of all losses is divided by how many targets are this rank's words": list(
            each.sum() / counts
        ),
    }


def own_largest(seen: SimpleNamespace, n: int) -> dict[str, Tensor | list[Tensor]]:
    """The loss if each rank takes its own largest logit off, and not that of the whole row."""
    counted = seen.targets != -1
    shards = parts(seen.logits.double(), -1, n)
    size = shards[0].size(-1)
    most = torch.stack([shard.amax(-1) for shard in shards])  # (n, N)
    totals = torch.stack(
        [(shard - m.unsqueeze(-1)).exp().sum(-1) for shard, m in zip(shards, most, strict=True)]
    )
    right = seen.logits.double().gather(1, seen.targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    owner = most.gather(0, (seen.targets.clamp(min=0) // size).unsqueeze(0)).squeeze(0)

    def mean(losses: Tensor) -> Tensor:
        return losses[counted].mean()

    told = "each rank takes off the largest logit of its own part, not of the whole row: it was not reduced"
    return {
        told: mean(totals.sum(0).log() - right + owner),
        f"{told}, and it is added again after the logarithm": [
            mean(totals.sum(0).log() + m - right) for m in most
        ],
        f"{told}, while the whole row's is taken off the target's logit, or added again": mean(
            totals.sum(0).log() + most.amax(0) - right
        ),
        f"{told}, and it is not added again": mean(totals.sum(0).log() - right),
        "the largest logit was taken off before exp, and is not added again": mean(
            seen.logits.double().logsumexp(-1) - most.amax(0) - right
        ),
    }


@check("vocab_parallel_cross_entropy")
def loss_is_the_dense_one(trial: Trial) -> None:
    """The loss is the mean over the counted targets, the same on every rank."""
    for name in DENSE:
        seen = trial.once(observe_entropy)[name]
        alternatives = partial(entropy_alternatives, seen, trial.num_ranks)
        trial.close(f"the loss ({name})", each_rank(seen, "loss"), seen.loss, alternatives=alternatives)


@check("vocab_parallel_cross_entropy")
def loss_is_stable(trial: Trial) -> None:
    """Logits of 100 and -100, and columns of -inf, give the right loss and gradient: no inf, no NaN."""
    largest = "Subtract the largest logit of the whole row, over all ranks, before exp."
    for name, help in (
        ("large logits", largest),
        (
            "padded vocabulary",
            f"exp(-inf) is 0, but 0 · -inf is NaN: pick the target's logit by its index. {largest}",
        ),
    ):
        seen = trial.once(observe_entropy)[name]
        alternatives = partial(entropy_alternatives, seen, trial.num_ranks)
        if name == "padded vocabulary":  # large logits were right
            require_no_nan_of_padding(trial, seen)
        require_a_maximum(trial, seen, name)
        trial.close(f"the loss ({name})", each_rank(seen, "loss"), seen.loss, alternatives, help=help)
        entropy_gradient(trial, seen, name)


def require_a_maximum(trial: Trial, seen: SimpleNamespace, name: str) -> None:
    """Where the loss is no number, whether what the ranks told each other was only ever added up."""
    for rank, result in enumerate(seen.results):
        loss, events = result["loss"], result["recording"].select(None, "")
        trial.require(
            trial.num_ranks == 1
            or not isinstance(loss, Tensor)
            or bool(loss.isfinite().all())
            or not events
            or any(event.kind != "all_reduce" or event.op != "SUM" for event in events),
            f"the loss ({name}) is {loss}: what goes into exp, or comes out of it, is too large or too small",
            help="dist.all_reduce adds unless it is told op=dist.ReduceOp.MAX.",
            rank=rank,
            cause="no largest logit of the whole row is subtracted before exp: nothing is reduced by MAX",
        )


def losses_probe(rank, cases: list[Tensor], targets: Tensor) -> list[Tensor]:
    return [rank.submission.vocab_parallel_cross_entropy(x, targets, rank.group).detach() for x in cases]


def require_no_nan_of_padding(trial: Trial, seen: SimpleNamespace) -> None:
    """Where the loss is NaN, whether -inf makes it, and of which words: -10000 has the same loss."""
    if not all(isinstance(x, Tensor) and x.isnan().all() for x in each_rank(seen, "loss")):
        return
    n = trial.num_ranks
    finite = seen.logits.clamp(min=-1e4)
    last = finite.clone()
    last[:, -1] = float("-inf")
    cases = (finite, last, one_word_a_rank(finite, seen.targets, n))
    shards = [[own_part(x, -1, r, n).contiguous() for x in cases] for r in range(n)]
    results = trial.run(losses_probe, per_rank=[(shard, seen.targets) for shard in shards])
    with_finite, with_last = (
        all(is_close(result[i], seen.loss.float()) for result in results) for i in range(2)
    )
    with_one_word = not any(bool(result[2].isnan().any()) for result in results)
    told = "the loss (padded vocabulary) is nan, and right where -10000 stands in the place of -inf"
    trial.require(
        not with_finite or with_last,
        f"{told}; one column of -inf makes it nan again",
        cause="0 · -inf, which is NaN: what is not the target's logit is multiplied by 0, as a one-hot row "
        "does",
        help="Pick the target's logit by its index, or set the others to 0 with masked_fill or torch.where.",
    )
    trial.require(
        not with_finite or with_one_word,
        f"{told}; it is nan, too, where each rank has words that exist, and the others are -inf",
        cause="0 · -inf, which is NaN: what a rank picks for a target of another rank is multiplied by 0",
        help="Set it to 0 with masked_fill or torch.where.",
    )
    trial.require(
        not with_finite,
        f"{told}; it is no nan where each rank has a word that exists beside those of -inf",
        cause="all of a rank's words are -inf, its largest logit as well: -inf - -inf is NaN",
        help="Subtract the largest logit of all ranks, which is finite.",
    )


def one_word_a_rank(logits: Tensor, targets: Tensor, n: int) -> Tensor:
    """Logits of which no more than a rank's largest and the target's are not -inf."""
    largest = torch.cat([shard == shard.amax(-1, keepdim=True) for shard in parts(logits, -1, n)], -1)
    kept = largest.scatter(1, targets.unsqueeze(1), True)
    return logits.masked_fill(~kept, float("-inf"))


def entropy_gradient(trial: Trial, seen: SimpleNamespace, name: str) -> None:
    n = trial.num_ranks
    own = parts(seen.gradient, -1, n)

    def alternatives() -> dict[str, list[Tensor] | Fault]:
        logits, softmax = parts(seen.logits, -1, n), parts(seen.softmax, -1, n)
        alone = parts(seen.logits.double(), -1, n)
        sums = (seen.logits.double().logsumexp(-1) - seen.logits.double().amax(-1)).exp().unsqueeze(-1)
        return {
            "the softmax is missing: no gradient comes through the sum of exponentials": [
                g - s for g, s in zip(own, softmax, strict=True)
            ],
            "n times too large: backward summed over the ranks": [n * g for g in own],
            "the target's part is missing: only the softmax is there": softmax,
            "exp() of the logits, where the softmax belongs: in backward it is not divided by its sum": [
                g + (sums - 1) * s for g, s in zip(own, softmax, strict=True)
            ],
            "the softmax over this rank's words alone: its sum of exponentials is not that of all ranks": [
                g - s + shard.softmax(-1) * seen.softmax.sum(-1, keepdim=True)
                for g, s, shard in zip(own, softmax, alone, strict=True)
            ],
            "backward goes through the largest logit as well, which is a constant: detach it": [
                through_the_largest(shard, g) for shard, g in zip(logits, own, strict=True)
            ],
            **of_the_loss_alone(own, seen.factor),
        }

    actual = each_rank(seen, "gradient")
    require_numbers_of_no_words(trial, seen, actual, name)
    counted = seen.targets != -1
    rest_is_right = all(
        isinstance(x, Tensor) and x.shape == g.shape and is_close(x[counted], g[counted])
        for x, g in zip(actual, own, strict=True)
    )
    trial.close(
        f"the gradient of the logits ({name})",
        actual,
        own,
        alternatives={"rows whose target is -1 have a gradient, and the others are right": actual}
        if rest_is_right
        else alternatives,
        terms=lambda: {
            "the softmax": parts(seen.softmax, -1, n),
            "the target's part": [g - s for g, s in zip(own, parts(seen.softmax, -1, n), strict=True)],
        },
        help="softmax minus one at the target, divided by the number of counted targets.",
    )


def require_numbers_of_no_words(trial: Trial, seen: SimpleNamespace, actual: list, name: str) -> None:
    """A rank of which all words are -inf has a gradient of zeros; others' NaN is told elsewhere."""
    nowhere = [bool((x == float("-inf")).all()) for x in parts(seen.logits, -1, trial.num_ranks)]
    nan = [isinstance(x, Tensor) and bool(x.isnan().any()) for x in actual]
    for rank, is_nan in enumerate(nan):
        trial.require(
            not is_nan or any(there and not no_words for there, no_words in zip(nan, nowhere, strict=True)),
            f"the gradient of the logits ({name}) is NaN where this rank's words are all -inf",
            cause="a softmax, or a logsumexp, of this rank's words alone: its backward has -inf - -inf",
            help="Subtract the largest logit of all ranks, which is finite, and add up exp() of that.",
            rank=rank,
        )


@check("vocab_parallel_cross_entropy")
def logits_gradient_is_the_dense_one(trial: Trial) -> None:
    """The gradient of this rank's logits is that slice of the dense gradient, zero for ignored targets."""
    for name in DENSE:
        entropy_gradient(trial, trial.once(observe_entropy)[name], name)


def from_what_was_overwritten(seen: SimpleNamespace) -> dict[str, Tensor]:
    """Cause → the gradient of all logits where the first backward has changed what the second one reads."""
    counted = (seen.targets != -1).unsqueeze(-1)
    chosen = F.one_hot(seen.targets.clamp(min=0), seen.logits.size(-1))
    weight = counted * seen.factor / counted.sum()
    return {
        "the first backward has written its gradient into the softmax that forward kept": (
            (seen.gradient - chosen) * weight
        ),
        "the first backward has taken the ones at the targets off the softmax that forward kept": (
            seen.gradient - chosen * weight
        ),
    }


@check("vocab_parallel_cross_entropy")
def a_second_backward_finds_the_same(trial: Trial) -> None:
    """A second backward through the same graph finds the same gradient, if it is not refused."""
    seen = trial.once(observe_entropy)["with ignored targets"]
    second = each_rank(seen, "again")
    if all(gradient is not None for gradient in second):
        trial.close(
            "the gradient of the logits, of a second backward through the same graph",
            second,
            each_rank(seen, "gradient"),
            {
                cause: parts(whole, -1, trial.num_ranks)
                for cause, whole in from_what_was_overwritten(seen).items()
            },
            help="retain_graph=True lets backward come again: write into nothing that forward keeps for it.",
        )


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
                "logits or targets were changed in place, in forward or in backward",
                help="Work on copies: of the targets, which become places in this rank's shard, and of the "
                "logits, whose softmax backward needs.",
                rank=rank,
            )


@check("vocab_parallel_cross_entropy")
def loss_is_the_same_without_gradients(trial: Trial) -> None:
    """Under torch.no_grad() the loss is the same."""
    for name, seen in trial.once(observe_entropy).items():
        evaluates_alike(trial, seen.results, name)
