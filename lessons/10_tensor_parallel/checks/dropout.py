"""Dropout after a sum: one mask on all ranks."""

import math
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch

from grader.checks import Trial, check, each_rank, exercise, told
from nanogpt.model import Dropout

from .shared import SIZES

exercise(
    "share_dropout",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Dropout.generator may hold a torch.Generator: a stream of random numbers of the dropout's own.",
        "Equal seeds give equal streams. Who picks the seed, and how do the others learn of it?",
        "dist.broadcast(tensor, group_src=0, group=group) sends what the group's rank 0 holds to everyone.",
    ),
)


ALIKE = 5
"""The seed of ranks that are seeded alike."""

ASLEEP = 3
"""Which mask is that of a dropout that was in eval mode when it was given."""

OWNED = 4
"""Which mask is that of a dropout that had a generator of its rank's own."""

MANY = 30
"""Dropouts of a model of some layers, of which no two may draw alike."""


def one_of_many(rank) -> torch.Tensor:
    """The first mask of one more dropout; two are alike by chance once in 2^64."""
    dropout = rank.submission.share_dropout(Dropout(0.5), rank.group, rank.device)
    return dropout(torch.ones(64, device=rank.device))


def dropout_probe(rank, seed: int, probability: float, shape: tuple) -> dict:
    rank.seed(seed)
    first, second = Dropout(probability), Dropout(probability)
    began = states(rank.device)
    first = rank.submission.share_dropout(first, rank.group, rank.device)
    stood_still = all(map(torch.equal, began, states(rank.device)))
    second = rank.submission.share_dropout(second, rank.group, rank.device)
    seeds = [seed_of(each) for each in (first, second)]
    asleep = rank.submission.share_dropout(Dropout(probability).eval(), rank.group, rank.device).train()
    owned = Dropout(probability)
    owned.generator = torch.Generator(rank.device).manual_seed(seed)
    owned = rank.submission.share_dropout(owned, rank.group, rank.device)
    ones = torch.ones(*shape, device=rank.device)
    with rank.record() as recording:
        masks = [first(ones), first(ones), second(ones), asleep(ones), owned(ones)]
    found = {
        "returned": [returns_what_it_is_given(rank, p) for p in (probability, 0.0)],
        "masks": masks,
        "recording": recording,
        "seeded alike": seeds[0] == seeds[1],
        "stood still": stood_still,
        "one generator": isinstance(first.generator, torch.Generator) and first.generator is second.generator,
        "seeded with initial_seed": seeds == 2 * [torch.initial_seed()],
        "streams": [one_of_many(rank) for _ in range(MANY)],
        "asleep": first.eval()(ones),
        "own": torch.rand(8),
        "alike": drawn_by_ranks_seeded_alike(rank, probability),
        "repeated": repeated(rank),
    }
    return {**found, "seeded by the stream": seeds[0] != found["alike"].pop("seed")}


def returns_what_it_is_given(rank, probability: float) -> bool:
    given = Dropout(probability)
    return rank.submission.share_dropout(given, rank.group, rank.device) is given


def seed_of(dropout: Dropout) -> Any:
    """What its generator was seeded with."""
    return getattr(dropout.generator, "initial_seed", object)()


def states(device: torch.device) -> list[torch.Tensor]:
    """Where torch's global streams are, on the CPU and on the device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def repeated(rank) -> list[torch.Tensor]:
    """The masks of three dropouts, each shared after the same torch.manual_seed; the third after a draw."""
    masks = []
    for draws in (0, 0, 1):
        rank.seed(ALIKE)
        torch.rand(draws), torch.rand(draws, device=rank.device)
        masks.append(one_of_many(rank))
    return masks


def drawn_by_ranks_seeded_alike(rank, probability: float) -> dict[str, Any]:
    """What a rank draws without a dropout, and after one, with the same seed on every rank."""

    def drawn() -> torch.Tensor:
        return torch.cat([torch.rand(8), torch.rand(8, device=rank.device).cpu()])

    rank.seed(ALIKE)
    without = drawn()
    rank.seed(ALIKE)
    shared = rank.submission.share_dropout(Dropout(probability), rank.group, rank.device)
    return {"without": without, "after": drawn(), "seed": seed_of(shared)}


def observe_dropout(trial: Trial) -> SimpleNamespace:
    """Each rank has a seed of its own."""
    probability = trial.choice([0.2, 0.3, 0.4])
    shape = (trial.integer(30, 40), trial.integer(40, 50))
    base = trial.integer(1, 10**6)
    runs = [(base + rank, probability, shape) for rank in range(trial.num_ranks)]
    results = trial.run(dropout_probe, per_rank=runs)
    return SimpleNamespace(results=results, probability=probability, shape=shape)


SPECIAL = {
    ASLEEP: "this one was in eval mode when it was given to share_dropout; the others are right",
    OWNED: "this one had a generator of its rank's own before; the others are right",
}
"""Of some masks, why they alone differ."""


@check("share_dropout")
def mask_is_the_same_on_every_rank(trial: Trial) -> None:
    """Every rank drops the same elements, though the ranks are seeded differently."""
    seen = trial.once(observe_dropout)
    for number in range(OWNED + 1):
        masks = [masks[number] for masks in each_rank(seen, "masks")]
        for rank, mask in enumerate(masks):
            trial.require(
                torch.equal(mask, masks[0]),
                f"ranks 0 and {rank} dropped different elements of the same tensor",
                help="p alone says whether a generator is needed: a dropout in eval mode may train later."
                if number == ASLEEP
                else "Give it another generator, whatever it has."
                if number == OWNED
                else "Seed the generator with a number that every rank received from the group's rank 0.",
                rank=rank,
                cause=SPECIAL.get(number, ""),
            )


def why_alike(result: dict) -> str:
    if result["seeded with initial_seed"] and result["stood still"]:
        return (
            "nothing was drawn from torch's global stream between the two: a state that is only read, or "
            "torch.initial_seed(), is the same the second time"
        )
    if result["seeded alike"] and result["stood still"] and result["seeded by the stream"]:
        return (
            "the global stream stands after the call where it stood before, as fork_rng() and a state that "
            "is set back leave it: the next dropout draws the same seed"
        )
    return "both generators are seeded with the same number" if result["seeded alike"] else ""


@check("share_dropout")
def mask_is_random(trial: Trial) -> None:
    """The mask changes from call to call, and from one dropout to the next: each has its own generator."""
    first, later, other, *_ = trial.once(observe_dropout).results[0]["masks"]
    trial.require(
        not torch.equal(first, later),
        "two calls of one dropout dropped the same elements",
        help="Seed a generator once, when the dropout is shared: seeded at each call it begins anew.",
    )
    trial.require(
        not trial.once(observe_dropout).results[0]["one generator"],
        "two dropouts have the same generator object: what one draws, the other does not draw any more",
        help="Each needs one of its own: make a new torch.Generator(device) for each dropout.",
    )
    masks = [tuple(mask.tolist()) for mask in trial.once(observe_dropout).results[0]["streams"]]
    streams = set(masks)
    few_seeds = len(streams) < len(list(groupby(masks)))  # one comes again after another: it was drawn again
    trial.require(
        few_seeds or not torch.equal(first, other),
        "two dropouts have the same stream of masks: every layer would drop the same elements",
        help="Draw a new seed for each dropout with torch.randint, and let that move the stream on.",
        cause=why_alike(trial.once(observe_dropout).results[0]),
    )
    trial.require(
        len(streams) == MANY,
        f"of {MANY} dropouts {MANY - len(streams)} drop what another one drops",
        help="Draw the seed out of many numbers: dropout.generator.manual_seed takes 64 bits.",
        cause="there are few different seeds to draw" if few_seeds else "",
    )


@check("share_dropout")
def the_given_dropout_is_shared(trial: Trial) -> None:
    """It returns the dropout that it was given, also one that drops nothing."""
    for rank, result in enumerate(trial.once(observe_dropout).results):
        for which, is_given in zip(("", " with p = 0"), result["returned"], strict=True):
            trial.require(
                is_given,
                f"what it returns is not the dropout{which} that it was given",
                help="Set its `generator`, and return it: who calls may keep the one or the other.",
                rank=rank,
            )


@check("share_dropout", world_sizes=(2,), subgroup=False)
def mask_follows_the_seed_of_the_run(trial: Trial) -> None:
    """Runs with another torch.manual_seed drop other elements, and with the same one the same.

    Within one run, too: what is seeded again draws the same again, and otherwise after another draw.
    """
    runs = [
        [(base + rank, 0.3, (30, 40)) for rank in range(trial.num_ranks)]
        for base in (trial.integer(1, 1000), trial.integer(2000, 3000))
    ]
    results = [trial.run(dropout_probe, per_rank=each)[0] for each in (*runs, runs[1])]
    first, again, same = (result["masks"][0] for result in results)
    trial.require(
        torch.equal(again, same),
        "two runs that begin with the same torch.manual_seed dropped different elements",
        help="Let rank 0 draw the seed from torch's global stream, so that it follows torch.manual_seed.",
        cause="the seed comes from elsewhere than torch's global stream",
    )
    trial.require(
        not torch.equal(first, again),
        "two runs with different seeds dropped the same elements: the seed is a constant",
        help="Let rank 0 draw the seed from torch's global stream, so that it follows torch.manual_seed.",
    )
    once, twice, later = results[0]["repeated"]
    drawn = results[0]["alike"]
    no_draw = "nothing was drawn from torch's global stream: it goes on as if no dropout had been shared"
    cause = no_draw if torch.equal(drawn["after"], drawn["without"]) else ""
    help = (
        "Draw it on every rank, torch.randint(2**62, (1,)), and broadcast rank 0's. torch.initial_seed() is "
        "no draw, and a count of the dropouts does not begin anew with torch.manual_seed."
    )
    trial.require(
        torch.equal(once, twice),
        "in one run, two dropouts that were each shared after the same torch.manual_seed drop other elements",
        help=help,
        cause=cause or "the seed is not made of torch's global stream alone",
    )
    trial.require(
        not torch.equal(once, later),
        "after the same torch.manual_seed, a dropout drops the same elements with a torch.rand before it was "
        "shared and without one",
        help=help,
        cause=cause,
    )


@check("share_dropout")
def rate_and_scale_are_right(trial: Trial) -> None:
    """It drops with probability p and scales what stays by 1/(1-p); in eval mode it does nothing."""
    seen = trial.once(observe_dropout)
    for rank, result in enumerate(seen.results):
        mask = result["masks"][0]
        kept = (mask != 0).double().mean().item()
        spread = math.sqrt(seen.probability * (1 - seen.probability) / mask.numel())
        trial.require(
            abs(kept - (1 - seen.probability)) < 6 * spread,
            f"{kept:.3f} of the elements stayed; p = {seen.probability} keeps {1 - seen.probability:.3f}",
            rank=rank,
        )
        values = mask[mask != 0]
        trial.close(
            "what stays of ones",
            values,
            torch.full_like(values, 1 / (1 - seen.probability)),
            alternatives={
                "what stays was not scaled: the sum over the elements shrinks": torch.ones_like(values),
                "scaled by 1/p, where 1/(1-p) belongs": torch.full_like(values, 1 / seen.probability),
                "scaled by 1-p, where 1/(1-p) belongs": torch.full_like(values, 1 - seen.probability),
            },
        )
        trial.close("the output in eval mode", result["asleep"], torch.ones(*seen.shape))


@check("share_dropout")
def other_random_numbers_stay_the_ranks_own(trial: Trial) -> None:
    """Afterwards ranks seeded differently still draw differently, and ranks seeded alike draw alike."""
    own = each_rank(trial.once(observe_dropout), "own")
    for rank in range(1, trial.num_ranks):
        trial.require(
            not torch.equal(own[rank], own[0]),
            f"ranks 0 and {rank} draw the same numbers from torch's global stream afterwards",
            help="Seed a generator of the dropout's own; torch.manual_seed changes everyone's numbers.",
            rank=rank,
        )
    alike = each_rank(trial.once(observe_dropout), "alike")
    alone = [rank for rank, drawn in enumerate(alike) if not torch.equal(drawn["after"], drawn["without"])]
    for rank in range(1, trial.num_ranks):
        trial.require(
            torch.equal(alike[rank]["after"], alike[0]["after"]),
            f"ranks 0 and {rank} were seeded alike, and afterwards draw different numbers",
            help="Let every rank draw a number. Rank 0's is used, and nobody is ahead of the others.",
            cause="rank 0 alone has drawn from torch's global stream" if alone == [0] else "",
            rank=rank,
        )


@check("share_dropout")
def masks_cost_nothing(trial: Trial) -> None:
    """Once shared, a dropout communicates no more: agreeing on a seed is enough."""
    seen = trial.once(observe_dropout)
    for rank, recording in enumerate(each_rank(seen, "recording")):
        trial.require(
            trial.num_ranks == 1 or not recording.select(),
            f"during three calls there travelled: {told(recording.select())}",
            help="Equal generators give equal masks, for ever: nothing has to be sent at a call.",
            rank=rank,
        )
