"""What mean gradients must be: computed in one process, and compared with what the ranks have."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grader.checks import CheckEnded, Trial, is_close

from .models import (
    VOCAB,
    Mixed,
    build,
    by_rank,
)

BOTH = ("left", "right")


TIED = ("embed.weight", "transformer.wte.weight")
"""What has two names in the models of the checks."""


def expected_gradients(
    seed: int | list[int], passes: list[list[tuple[Tensor, Tensor, tuple]]]
) -> tuple[dict, list[dict]]:
    """The mean over ranks and each rank's own; `passes` has a list of (tokens, targets, order) by rank."""
    own = []
    for rank in range(len(passes[0])):
        model = build(Mixed, seed[rank] if isinstance(seed, list) else seed).double()
        for batches in passes:
            tokens, targets, order = batches[rank]
            F.cross_entropy(model(tokens, order), targets).backward()
        own.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        )
    return {name: torch.stack([g[name] for g in own]).mean(0) for name in own[0]}, own


def draw_passes(trial: Trial, *orders: list[tuple[str, ...]]) -> list[list[tuple]]:
    """For each pass, and each rank, tokens, targets and the order in which the branches are used.

    Rank r has 4 + r tokens: the mean over ranks is a plain one all the same.
    """
    return [
        [
            (trial.tokens(VOCAB, 4 + r), trial.tokens(VOCAB, 4 + r), order[r % len(order)])
            for r in range(trial.num_ranks)
        ]
        for order in orders
    ]


def alternatives_to_the_mean(own: list[Tensor], mean: Tensor, sizes: list[int]) -> dict[str, Any]:
    """What other rules make of the ranks' own gradients; `sizes` are the ranks' numbers of targets."""
    n, total, having = len(own), torch.stack(own).sum(0), sum(bool(g.any()) for g in own)
    if n == 1:
        return {}
    some = {"the mean over those ranks that had a gradient": total / having} if 0 < having < n else {}
    weighed = sum(g * size for g, size in zip(own, sizes, strict=True)) / sum(sizes)
    return {
        **some,
        "the mean on rank 0, the sum on the others": [mean, *[total] * (n - 1)],
        "the mean on rank 0, and on each of the others its own gradient still": [mean, *own[1:]],
        "the sum over ranks: divide by the number of ranks": total,
        NOTHING_AVERAGED: own,
        "the mean, divided by the number of ranks once more": mean / n,
        "the mean was added to this rank's own gradient: empty .grad when its gradient is sent": [
            g + mean for g in own
        ],
        "the gradient of rank 0": own[0],
        "a mean in which a rank counts by its share: it should be plain, share_loss weighs the loss": weighed,
    }


FLOATS = ("float32", "float64")
"""What a rank sends of a float64 model if its zeros are float32: on every other rank a layer is not used."""
ZEROS_IN_ITS_DTYPE = "torch.zeros(shape) is float32. torch.zeros_like(parameter) has the parameter's dtype."


@contextmanager
def told_if_zeros_are_float32() -> Iterator[None]:
    """Inside, every other rank does not use a layer: has the ranks' parting to do with the zeros' dtype?"""
    try:
        yield
    except CheckEnded as end:
        sent = dict(re.findall(r"rank (\d+) called [\w ()]+ of \d+ (float\d+)", end.message))
        if len(sent) > 1 and all(dtype == FLOATS[int(r) % 2] for r, dtype in sent.items()):
            end.cause = "what a rank sends where it has no gradient is float32, and the gradients are float64"
            end.help = ZEROS_IN_ITS_DTYPE
        raise


NOTHING_AVERAGED = "each rank has only its own gradient: nothing was averaged"
TIE = "the mean, of the tied weight alone: it has two names, and was sent and put back under both"


def require_mean(trial: Trial, seen: SimpleNamespace, names: list[str] | None = None, help: str = "") -> None:
    """The gradients on every rank are the mean over ranks; a cause is one of all names that are wrong."""
    names = names or [n for n in seen.expected if n != "frozen.weight"]
    found = {name: by_rank(seen.results, "gradients", name) for name in names}
    missing = any(gradient is None for name in names for gradient in found[name])
    nowhere = tell_averaged_nowhere(seen, found) if missing else ""
    for name in names:
        if all(gradient is None for gradient in found[name]) and not any(own[name].any() for own in seen.own):
            del found[name]  # no rank used it: there is nothing to average
            continue
        for r, gradient in enumerate(found[name]):
            came = gradient is None and all_were_reduced(seen, r)
            trial.require(
                gradient is not None,
                f"{name} has no gradient: its .grad is None",
                help="parameter.grad = mean, also where no gradient was." if came else help,
                rank=r,
                cause="all gradients are reduced, and the mean of one that was None here is not put back"
                if came
                else nowhere,
            )
    wrong = {
        name: [r for r, gradient in enumerate(found[name]) if not is_close(gradient, seen.expected[name])]
        for name in found
    }
    wrong = {name: ranks for name, ranks in wrong.items() if ranks}
    if not wrong:
        return
    known = {
        name: alternatives_to_the_mean([own[name] for own in seen.own], seen.expected[name], seen.sizes)
        for name in wrong
    }
    tied = wrong.keys() <= set(TIED)
    if tied:
        known = {name: {f"{k} times {TIE}": k * seen.expected[name] for k in range(2, 9)} for name in wrong}
    common = set.intersection(*(set(known[name]) for name in wrong))
    first = next(iter(wrong))
    fitting = {
        cause: value
        for cause, value in known[first].items()
        if cause in common and all(_fits(found[name], known[name][cause], wrong[name]) for name in wrong)
    }
    if tied and fitting:
        help = "model.parameters() names a tied weight once; modules and state_dict() name it twice."
    what = f"the gradient of {first}"
    trial.close(
        what,
        found[first],
        seen.expected[first],
        alternatives=fitting,
        help=help,
        terms=[own[first] for own in seen.own],
    )


def all_were_reduced(seen: SimpleNamespace, rank: int) -> bool:
    """Whether as many bytes went through a rank's reductions as all gradients have."""
    recording = seen.results[rank].get("recording")
    size = sum(4 * mean.numel() for name, mean in seen.expected.items() if name != "frozen.weight")
    return recording is not None and recording.bytes("all_reduce") + recording.bytes("reduce_scatter") >= size


def tell_averaged_nowhere(seen: SimpleNamespace, found: dict[str, list[Tensor | None]]) -> str:
    """The cause where what all ranks have a gradient of is averaged, and the rest left as it was; else ""."""
    lacking = {name: [not own[name].any() for own in seen.own] for name in found}
    lacking = {name: without for name, without in lacking.items() if not all(without)}
    for name, without in lacking.items():
        for gradient, own, none in zip(found[name], seen.own, without, strict=True):
            right = own[name] if any(without) else seen.expected[name]
            if (gradient is None) != none or (gradient is not None and not is_close(gradient, right)):
                return ""
    if all(map(any, lacking.values())):
        return ""  # nothing shows that anything is averaged
    asked = [result["recording"].select("broadcast") for result in seen.results if "recording" in result]
    if all(events and all(event.peer == 0 for event in events) for events in asked or [[]]):
        return (
            "rank 0 decides for all: what it has no gradient of is averaged nowhere, though another has one"
        )
    return "what some rank has no gradient of is averaged nowhere, though another rank has one"


def require_waits(trial: Trial, results: list[dict], message: str) -> None:
    """Every communication that a rank starts it waits for: with gloo alone that is needed, and seen."""
    for r, result in enumerate(results):
        if result["device"] != "cpu":
            return  # NCCL's collectives wait for each other, and what computes next waits for the last
        started, waits = result["recording"].count(), result["recording"].waits()
        trial.require(
            waits >= started,
            message,
            cause=f"it starts {started} communications and waits for {waits} of them: that one is over says "
            "nothing of those that were started before it",
            help="Keep every handle that async_op=True returns, and call wait() on each.",
            rank=r,
        )


def _fits(actual: list[Tensor], value: Tensor | list[Tensor], ranks: list[int]) -> bool:
    """Whether this is what these ranks have."""
    values = [value] * len(actual) if isinstance(value, Tensor) else value
    return all(is_close(actual[r], values[r]) for r in ranks)


def sizes_of(passes: list[list[tuple]]) -> list[int]:
    """The number of tokens of each rank, over all passes."""
    return [sum(len(batches[r][0]) for batches in passes) for r in range(len(passes[0]))]


REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce", "all_to_all")


def require_bytes(trial: Trial, rank: int, recording: Any, size: int, what: str = "the gradients") -> None:
    """Reductions see each gradient once; a reduce-scatter and an all-gather are as good.

    An all-to-all whose parts are summed is a reduce-scatter.
    """
    slack = 128 + size // 8  # flags, lengths, padding
    reduced = sum(recording.bytes(kind) for kind in REDUCTIONS)
    gathered = recording.bytes("all_gather") + recording.bytes("gather")
    trial.require(
        gathered <= size + slack,
        f"{gathered} bytes were gathered: {what} of all ranks on every rank. One rank's are {size} bytes",
        help="An all-reduce sends 2(n-1)/n of that size, whatever n is; gathering grows with n.",
        rank=rank,
    )
    trial.require(
        reduced <= size + slack,
        f"{reduced} bytes were reduced, and {what} have {size}: some went twice, or something else "
        "went along",
        help="model.parameters() names a tied weight once. Leave out what has requires_grad False, and what "
        "is no gradient.",
        rank=rank,
    )
    trial.require(
        trial.num_ranks == 1 or reduced + recording.bytes("send") >= size - slack,
        f"only {reduced} bytes were reduced, and {what} have {size}",
        help="All gradients travel.",
        rank=rank,
    )
