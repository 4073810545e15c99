"""Checks of `FullySharded`: weights as they are by then, each in its own dtype."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Trial, check
from lessons_shared.cut_gpt import local

from .fully_sharded import full, wrapped
from .models import build, draw, odd_gpt, seeds
from .runs import run

FACTOR = 0.5
"""What the shards are multiplied by between two forwards."""


def forward_twice(rank: Any, seed: int, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss of a forward after which the shards were changed, without a backward between the two."""
    sharded = wrapped(rank, odd_gpt, seed)
    sharded(tokens, targets)
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.mul_(FACTOR)
    return sharded(tokens, targets)[1].detach().clone()


def observe_forwards(trial: Trial) -> SimpleNamespace:
    numbers, data = seeds(trial), [batches[0] for batches in draw(trial, 1)]
    given = [(number, *batch) for number, batch in zip(numbers, data, strict=True)]
    model = build(odd_gpt, numbers[0], torch.float64)
    blocks = set(model.transformer.h.parameters())
    with torch.no_grad():
        before = [model(*batch)[1] for batch in data]
        for parameter in blocks:
            parameter.mul_(FACTOR)
        stale = [model(*batch)[1] for batch in data]
        for parameter in set(model.parameters()) - blocks:
            parameter.mul_(FACTOR)
        after = [model(*batch)[1] for batch in data]
    results = run(trial, forward_twice, per_rank=given)
    return SimpleNamespace(results=results, before=before, stale=stale, after=after)


@check("FullySharded", world_sizes=(2, 3), subgroup=False)
def a_forward_takes_the_shards_as_they_are(trial: Trial) -> None:
    """Where the shards have changed since a forward that no backward has followed, the next one knows."""
    seen = trial.once(observe_forwards)
    trial.close(
        f"the loss after a forward without a backward, and shards multiplied by {FACTOR}",
        seen.results,
        seen.after,
        alternatives={
            "all weights are still those of the first forward": seen.before,
            "the weights outside the blocks are still those of the first forward, and the blocks' are new: "
            "only a backward frees what lies outside them, and none has come": seen.stale,
        },
        help="A forward without a backward may leave weights gathered, which have changed since: gather anew "
        "when the next one begins.",
    )


def gather_twice(rank: Any, seed: int) -> dict:
    """The whole weights, once more after the shards were changed."""
    sharded = wrapped(rank, odd_gpt, seed)
    full(sharded)
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.mul_(FACTOR)
    return full(sharded)


@check("FullySharded", world_sizes=(2,), subgroup=False)
def whole_weights_are_those_of_the_shards_by_then(trial: Trial) -> None:
    """full_state_dict() gathers anew each time: it leaves nothing gathered behind."""
    numbers = seeds(trial)
    ends = run(trial, gather_twice, per_rank=[(number,) for number in numbers])
    for name, start in build(odd_gpt, numbers[0], torch.float64).state_dict().items():
        trial.close(
            f"{name} in a second full_state_dict(), all shards having been multiplied by {FACTOR},",
            [end.get(name) for end in ends],
            FACTOR * start,
            alternatives={"it is what the first one gave: the weights were left gathered": start},
            help="Give the whole weights back once they are copied: no more than two blocks may be whole.",
        )


def mixed_gpt() -> Any:
    """A GPT whose norms have another dtype than its matrices."""
    model = odd_gpt().to(torch.bfloat16)
    for block in model.transformer.h:
        block.ln_1.float()
        block.ln_2.double()
    return model


def look_at_dtypes(rank: Any) -> dict:
    """Of the shards, and of the whole weights by name."""
    sharded = rank.submission.FullySharded(mixed_gpt().to(rank.device), rank.group)
    return {
        "shards": sorted({str(local(parameter).dtype) for parameter in sharded.parameters()}),
        "whole": {name: str(tensor.dtype) for name, tensor in full(sharded).items()},
    }


def observe_dtypes(trial: Trial) -> list[dict]:
    return run(trial, look_at_dtypes)


@check("FullySharded", world_sizes=(2,), subgroup=False)
def dtypes_stay_apart(trial: Trial) -> None:
    """Norms in another dtype than the matrices keep theirs: shards and whole weights are in no common one."""
    expected = {name: str(parameter.dtype) for name, parameter in mixed_gpt().named_parameters()}
    help = "torch.cat gives what it joins one dtype: lay parameters end to end by dtype, a buffer for each."
    for r, result in enumerate(trial.once(observe_dtypes)):
        shards = sorted(set(expected.values()))
        trial.require(
            result["shards"] == shards,
            f"the shards of a model in {', '.join(shards)} are in {', '.join(result['shards'])}",
            help=help,
            rank=r,
        )
        for name, dtype in expected.items():
            trial.require(
                result["whole"].get(name) == dtype,
                f"{name} is {dtype}, and {result['whole'].get(name)} in full_state_dict()",
                help=help,
                rank=r,
            )
