"""What was dropped, read off the residual stream; and the dense model with the same elements dropped.

Whatever a block is made of: its branches add numbers by which they are known (`marked`).
"""

import math
from collections import defaultdict
from itertools import combinations, product
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from grader.checks import Trial, each_rank
from lessons_shared.cut_gpt import local

PLACES = ("in", "middle", "out")
"""Of a block: what enters it, what its second norm reads, what leaves it."""
MARKS = {"attn.c_proj": 1.0, "mlp.c_proj": 3.0}
"""What each branch adds, nearly, where it is not dropped: what leaves a block tells what both dropped."""
FAINT = 0.02
"""Of a marked branch, what part of its numbers depends on its input and its weights."""


def marked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a block or a model, of which every branch adds its mark, and a little of its own."""
    faint = dict(weights)
    for layer, mark in MARKS.items():
        for name in weights:
            if name.endswith(f"{layer}.weight"):
                faint[name] = FAINT * weights[name]
            elif name.endswith(f"{layer}.bias"):
                faint[name] = mark + FAINT * weights[name]
    return faint


def read(stream: dict[str, Tensor], rate: float) -> tuple[Tensor, Tensor] | None:
    """Which elements attention and MLP kept; None where they added neither nothing nor their marks."""
    attention, mlp = MARKS.values()
    levels = torch.tensor([0.0, attention, mlp, attention + mlp])
    for kept in (1 - rate, 1.0):  # as dropout scales what it keeps, or not
        added = kept * (stream["out"] - stream["in"]).float().cpu()
        if (added.unsqueeze(-1) - levels).abs().amin(-1).max() < 0.3:
            by_mlp = added > mlp - attention
            return added - mlp * by_mlp > attention / 2, by_mlp
    return None


def watch(blocks) -> tuple[list[dict], list]:
    """On a rank: dictionaries that fill up with the stream in each block, and hooks to remove."""
    seen: list[dict] = [{} for _ in blocks]
    hooks = []

    def keep(place: dict, key: str, value: object) -> None:
        if isinstance(value, Tensor):
            place[key] = local(value.detach()).clone()

    for place, block in zip(seen, blocks, strict=True):
        hooks += [
            block.register_forward_pre_hook(lambda _, given, place=place: keep(place, "in", *given[:1])),
            block.ln_2.register_forward_pre_hook(
                lambda _, given, place=place: keep(place, "middle", *given[:1])
            ),
            block.register_forward_hook(lambda _, given, out, place=place: keep(place, "out", out)),
        ]
    return seen, hooks


def patterns(
    results: list[dict], which: str, rate: float, embedded: bool
) -> list[tuple[str, list[Tensor] | None]]:
    """(what was dropped, which elements stayed, by rank), as far as every rank's stream could be seen.

    None in place of the elements where what was added tells nothing of what was dropped.
    """
    found: list[tuple[str, list[Tensor] | None]] = []
    for number in range(len(results[0][which])):
        streams = [result[which][number] for result in results]
        if not all({"in", "out"} <= set(stream) for stream in streams):
            continue
        if len({tuple(stream[place].shape) for stream in streams for place in ("in", "out")}) != 1:
            continue
        if number == 0 and embedded:
            found.append(("the embedding", [stream["in"] != 0 for stream in streams]))
        kept = [read(stream, rate) for stream in streams]
        for index, branch in enumerate(("attention", "MLP")):
            ranks = None if None in kept else [both[index] for both in kept if both]
            found.append((f"block {number}, {branch}", ranks))
    return found


def masks_differ(trial: Trial, results: list[dict], rate: float, embedded: bool, seeds: str) -> None:
    """Between ranks, from call to call, and between the dropouts of all ranks."""
    asleep = "in eval mode" in seeds
    seen = [patterns(results, which, rate, embedded) for which in ("first", "second")]
    for what, kept in (each for call in seen for each in call):
        trial.require(
            kept is not None,
            f"{what.partition(',')[0]} adds what is neither dropped nor scaled by 1/(1 - p), p = {rate} "
            f"({seeds})",
            help="A branch is complete before it is dropped: first the reduce-scatter and the bias, then the "
            "dropout, of this rank's tokens, once.",
        )
    first, second = ([(what, kept) for what, kept in call if kept] for call in seen)
    for (what, kept), (_, later) in zip(first, second, strict=True):
        for rank, mask in enumerate(kept):
            dropped = 1 - mask.double().mean().item()
            trial.require(
                abs(dropped - rate) < 6 * math.sqrt(rate * (1 - rate) / mask.numel()),
                f"{dropped:.0%} of the elements were dropped after {what}, where p = {rate}",
                rank=rank,
            )
            trial.require(
                not torch.equal(mask, later[rank]),
                f"two calls dropped the same elements after {what}",
                help="Seed a generator once, when the dropout is cut: each call draws on from there.",
                rank=rank,
            )
            for other in range(rank):
                trial.require(
                    not alike(mask, kept[other], rate),
                    f"ranks {other} and {rank}, which hold different tokens, dropped the same elements after "
                    f"{what} ({seeds})",
                    help="Draw a seed for each dropout, send rank 0's to all ranks, add group.rank(), and "
                    "seed the dropout's generator with that. (With group.rank() alone every dropout of a "
                    "rank would draw the same masks. A CPU's generator reads the lower 32 bits of a seed.)",
                    cause="one mask for different tokens: share_dropout of lesson 10, or the ranks' "
                    f"common seed{', which a dropout in eval mode must part with, too' * asleep}",
                    rank=rank,
                )
    places_differ(trial, first, rate, seeds)


Place = tuple[str, list[Tensor]]
"""Where a dropout stands, and what it kept, by rank."""


def places_differ(trial: Trial, places: list[Place], rate: float, seeds: str) -> None:
    """Between any two dropouts: of one rank first, and then of two."""
    ranks = range(trial.num_ranks)
    met = {
        (one, two, rank, other): alike(places[two][1][rank], places[one][1][other], rate)
        for one, two in sorted(combinations(range(len(places)), 2), key=lambda pair: pair[::-1])
        for rank, other in sorted(product(ranks, ranks), key=lambda pair: pair[0] != pair[1])
    }
    for (one, two, rank, other), same in met.items():
        before, what = places[one][0], places[two][0]
        cause, help = why_dropouts_meet(places, met, one, two, trial.num_ranks) if same else ("", "")
        trial.require(
            not same,
            f"this rank dropped the same elements after {before} and after {what} ({seeds})"
            if rank == other
            else f"rank {other} dropped after {before} what rank {rank} dropped after {what} ({seeds})",
            help=help,
            cause=cause,
            rank=rank,
        )


def why_dropouts_meet(places: list[Place], met: dict, one: int, two: int, n: int) -> tuple[str, str]:
    """The cause, "" where it is not known, and the next step."""
    by_rank = [[same for (_, _, r, o), same in met.items() if r == o == rank] for rank in range(n)]
    if n > 1 and all(by_rank[0]) and not any(map(any, by_rank[1:])):
        return (
            "only rank 0's dropouts have one seed: what is multiplied by group.rank() is 0 there",
            "Add group.rank() to the seed that was drawn, and multiply by nothing that may be 0.",
        )
    stand_alike = defaultdict(set)
    for (first, second, rank, other), same in met.items():
        branches = [places[place][0].partition(", ")[2] for place in (first, second)]
        stand_alike[(*branches, second - first, rank, other)].add(same)
    if any(len(outcomes) == 2 for outcomes in stand_alike.values()):
        return (
            "some dropouts have one seed, and others that stand to each other as these do have not: "
            "seeds of which there are few meet by chance",
            "Draw the seed of each dropout from a large range, such as torch.randint(2**62, (1,)).",
        )
    step = (
        "Draw a seed anew for each dropout, send rank 0's to all ranks, and add group.rank(). "
        "(Seeds that are counted up meet: the second of rank 0 is the first of rank 1.)"
    )
    if all(torch.equal(a, b) for a, b in zip(places[one][1], places[two][1], strict=True)):
        return "two dropouts of a rank draw the same random numbers: their generators have one seed", step
    return "", step


def alike(a: Tensor, b: Tensor, rate: float) -> bool:
    """Whether two masks agree more often than chance."""
    chance = rate**2 + (1 - rate) ** 2
    agreement = (a == b).double().mean().item()
    return agreement > chance + 6 * math.sqrt(chance * (1 - chance) / a.numel())


class Masked(nn.Module):
    """A dropout that keeps what it is told to keep."""

    def __init__(self, keep: Tensor, rate: float) -> None:
        super().__init__()
        self.scale = keep.double() / (1 - rate)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def drop_as_seen(model: nn.Module, blocks, seen: SimpleNamespace, rate: float, embedded: bool) -> bool:
    """Have a dense model drop what the ranks dropped in their first run; False where that is not known."""
    number = 2 * len(blocks) + embedded
    all_kept = patterns(seen.results, "first", rate, embedded)[:number]
    found = [torch.cat(kept, 1) for _, kept in all_kept if kept]
    if len(found) != number:
        return False
    if embedded:
        model.transformer.drop = Masked(found.pop(0), rate)
    for block in blocks:
        block.attn.resid_dropout = Masked(found.pop(0), rate)
        block.mlp.dropout = Masked(found.pop(0), rate)
        block.attn.core.dropout = 0.0
    return True


def stream_is_cut(trial: Trial, seen: SimpleNamespace, num_elements: int) -> None:
    """Whatever part of the stream was seen has this rank's tokens, in any layout."""
    for rank, streams in enumerate(each_rank(seen, "first")):
        for number, stream in enumerate(streams):
            for place, told in zip(PLACES, ("enters", "is normed inside", "leaves"), strict=True):
                tensor = stream.get(place)
                trial.require(
                    tensor is None or tensor.numel() == num_elements,
                    f"what {told} block {number} is {tuple(getattr(tensor, 'shape', ()))}: "
                    f"{num_elements:,} elements, "
                    f"1/{trial.num_ranks} of the tokens, are this rank's part",
                    help="Between a reduce-scatter and the next gather every rank holds its own tokens "
                    "alone.",
                    rank=rank,
                )
