"""Checks of `weighed_loss`: each target counts once, however many ranks look at it."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grader.checks import Fault, Trial, check, exercise, is_close
from grader.checks import told as told_events
from lessons_shared.earlier import KEPT
from lessons_shared.rounded import WENT_THROUGH

from .meshes import APART, Sizes, meshes, meshes_on, parts, place, told, which_mesh

exercise(
    "weighed_loss",
    world_sizes=(4, 2, 1),
    hints=(
        "On four data-parallel ranks it is right. What do two ranks along tensor or context have in common?",
        "Print `everywhere` on each mesh, and count the targets by hand.",
        "Ranks that differ along tensor or context count the same targets. Sum the counts along data alone.",
    ),
)


LONG = 683
"""Tokens: three such rows have 2049, which float16 and bfloat16 round to 2048."""
HALF_DIGITS = 5e-3
"""What a float16 loss and its weight may be off by."""
FEW = 48
"""Numbers that may be sent: a few counts, also pickled. The losses of all tokens are 80."""


def probe(rank: Any, cases: list) -> list[dict]:
    found = []
    meshes_of = meshes_on(rank, [sizes for sizes, *_ in cases])
    for mesh, (_, logits, targets) in zip(meshes_of, cases, strict=True):
        logits = logits.requires_grad_()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        with rank.record() as recording:
            weighed = rank.submission.weighed_loss(loss, targets, mesh)
        if isinstance(weighed, Tensor) and weighed.requires_grad and weighed.numel() == 1:
            weighed.backward()
        value = weighed.detach() if isinstance(weighed, Tensor) else weighed
        found.append({"loss": value, "gradient": logits.grad, "recording": recording})
    return found


def observe(trial: Trial) -> SimpleNamespace:
    """Every mesh, with as many rows at each place along "data"."""
    return observed(trial, [*meshes(trial), *parts(trial)])


def probe_half(rank: Any, sizes: Sizes, loss: Tensor, targets: Tensor) -> Any:
    """A loss that is given, weighed."""
    weighed = rank.submission.weighed_loss(loss.requires_grad_(), targets, meshes_on(rank, [sizes])[0])
    return weighed.detach().double() if isinstance(weighed, Tensor) else weighed


def uneven(trial: Trial) -> SimpleNamespace:
    """All ranks along data, the first with a row more, every target of which counts."""
    return observed(trial, [{"data": trial.num_ranks, "context": 1, "tensor": 1}], more=1)


def observed(trial: Trial, plans: list[Sizes], more: int = 0) -> SimpleNamespace:
    """Places along "data" count different numbers of targets; ranks with the same rows have the same.

    The first place has so many rows more than the others, and counts all of its targets if it has any more:
    then the rows are long. The losses of different places differ.
    """
    drawn = []
    for sizes in plans:
        shares = []
        for slot in range(sizes["data"] * sizes.get(APART, 1)):  # one mesh's places, then the next one's
            rows, s = 2 + more * (slot == 0), LONG if more else 40
            targets = trial.tokens(20, rows, s)
            if rows == 2:
                targets[:, : 1 + 5 * slot] = -1
                targets[0, -trial.integer(1, 9) :] = -1
            shares.append(((1 + slot) * trial.normal(rows, s, 20, dtype=torch.float64), targets))
        drawn.append(shares)
    by_rank = [
        ([(sizes, *shares[slot_of(r, sizes)]) for sizes, shares in zip(plans, drawn, strict=True)],)
        for r in range(trial.num_ranks)
    ]
    return SimpleNamespace(plans=plans, drawn=drawn, results=trial.run(probe, per_rank=by_rank))


def slot_of(rank: int, sizes: Sizes) -> int:
    """Which of a mesh's drawn shares a rank has."""
    return which_mesh(rank, sizes) * sizes["data"] + place(rank, sizes)["data"]


def weighed(logits: Tensor, targets: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """The weighed loss, and its gradient."""
    leaf = logits.detach().clone().requires_grad_()
    loss = weight * F.cross_entropy(leaf.flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss.backward()
    return loss.detach(), leaf.grad


def counted(targets: Tensor) -> int:
    return int((targets != -1).sum())


def counted_but_0(targets: Tensor) -> int:
    """Where 0 is taken for padding."""
    return int((targets > 0).sum())


def up_to_the_last(targets: Tensor) -> int:
    """Where a row is taken to have -1 at its end alone."""
    return sum(int((row != -1).nonzero().max()) + 1 for row in targets)


def by_weight(
    seen: SimpleNamespace, i: int, weigh: Any, n: int, count: Callable[[Tensor], int] = counted
) -> list[tuple[Tensor, Tensor]]:
    """Loss and gradient of every rank, weighed by a function of counts along data and this rank's place."""
    sizes, shares = seen.plans[i], seen.drawn[i]
    counts = [count(targets) for _, targets in shares]
    d = sizes["data"]
    own = [
        (counts[first : first + d], slot_of(r, sizes))
        for r in range(n)
        for first in [which_mesh(r, sizes) * d]
    ]
    return [weighed(*shares[slot], weigh(mine, slot % d, sizes)) for mine, slot in own]


def by_own_tokens(seen: SimpleNamespace, i: int, n: int) -> list[tuple[Tensor, Tensor]]:
    """The same where each rank counts its own part of the tokens along context alone."""
    c = seen.plans[i]["context"]
    by_place = [
        by_weight(seen, i, by_share, n, lambda targets, part=part: counted(targets.chunk(c, 1)[part]))
        for part in range(c)
    ]
    return [by_place[place(r, seen.plans[i])["context"]][r] for r in range(n)]


def by_share(counts: list[int], p: int, sizes: dict[str, int]) -> float:
    """The weight that is right."""
    return counts[p] * sizes["data"] / sum(counts)


def by_another_count(total: int, counts: list[int], p: int, sizes: dict[str, int]) -> float:
    """The weight if the sum of all counts is taken for another."""
    return counts[p] * sizes["data"] / total


UNWEIGHED = (
    "it is not weighed at all, or by counts of all targets, those of -1 too, or along a dimension of one rank"
)

DETACHED = "the loss is weighed, and the gradient is not: it is that of the loss as it was given"
WEIGH_ITSELF = "Multiply the loss itself: no gradient comes through detach(), nor through torch.no_grad()."

PART_OF_THE_MEAN = "it is this rank's part of the mean: the mean along data divides once more"
"""Seen where all ranks lie along data, before there is another mesh."""

SUMMED = "the loss itself was summed over the ranks along data, as one that has every rank's loss in it"
OWN_LOSS = "Let the count of targets alone travel: each rank's own loss is weighed by its share of it."

OWN_TOKENS = (
    "each rank counts the targets of its own part of the tokens: those of the whole rows count, for a loss "
    "that is the mean of whole rows"
)
SHARE = (
    "A loss weighs as its share of the counted targets along data; the ranks that the sum counts, and those "
    "that the mean goes over, are the same."
)
LOSS = "the plain mean along data of the weighed loss"


def others(n: int) -> dict[str, Any]:
    """Sentence → the weight that a slip leads to."""
    return {
        "every target is counted once for each rank that has it: the loss is too small by as many": (
            lambda counts, p, sizes: counts[p] * sizes["data"] ** 2 / (sum(counts) * n)
        ),
        "weighed by the ranks of the whole mesh, or the world, where the mean is along data alone": (
            lambda counts, p, sizes: counts[p] * n / sum(counts)
        ),
        UNWEIGHED: lambda counts, p, sizes: 1.0,
        "it is multiplied by the number of ranks along data alone: is the rank's own count what was summed? "
        "all_reduce works in place, so sum a clone": lambda counts, p, sizes: sizes["data"],
        PART_OF_THE_MEAN: lambda counts, p, sizes: counts[p] / sum(counts),
        "the mean count along data is rounded down: divide with / where // stands": (
            lambda counts, p, sizes: counts[p] / max(1, sum(counts) // sizes["data"])
        ),
        "the weight is rounded down to a whole number: divide with / where // stands": (
            lambda counts, p, sizes: counts[p] * sizes["data"] // sum(counts)
        ),
    }


def times_the_mean(values: list[Any], right: list[Tensor], sizes: Sizes) -> int:
    """How many times the mean over all counted targets every rank has: 1, d, or 0 for another loss."""
    d = sizes["data"]
    if d == 1 or not all(isinstance(value, Tensor) and value.dim() == 0 for value in values):
        return 0
    means = along_data(right, sizes)
    for times in (1, d):
        if all(is_close(value, times * mean, 1e-5) for value, mean in zip(values, means, strict=True)):
            return times
    return 0


def summed(times: int) -> tuple[str, Any]:
    """Sentence and weight where every rank has the mean of all, as it is or so many times as large."""
    if times == 1:
        words = (
            f"{SUMMED}. No gradient comes through all_reduce: each is this rank's part of the mean, which "
            "the mean along data divides once more"
        )
        return words, lambda counts, p, sizes: counts[p] / sum(counts)
    return (
        f"{SUMMED}, and is multiplied by the number of ranks",
        lambda counts, p, sizes: times * by_share(counts, p, sizes),
    )


def all_close(values: list[Any], right: list[Tensor]) -> bool:
    return all(
        isinstance(value, Tensor) and is_close(value, each, 1e-5)
        for value, each in zip(values, right, strict=True)
    )


def along_data(values: list[Any], sizes: Sizes) -> list[Any]:
    """For each rank the plain mean along "data" of what the ranks there have: that is what is promised."""
    if not all(isinstance(value, Tensor) and value.dim() == 0 for value in values):
        return values
    means = []
    for r in range(len(values)):
        there = [
            value
            for other, value in enumerate(values)
            if which_mesh(other, sizes) == which_mesh(r, sizes)
            and {**place(other, sizes), "data": 0} == {**place(r, sizes), "data": 0}
        ]
        means.append(torch.stack(there).mean(0))
    return means


def require(trial: Trial, part: int, what: str, alone: bool) -> None:
    seen = trial.once(observe)
    for i, sizes in enumerate(seen.plans):
        if APART in sizes or alone != (sizes["data"] == trial.num_ranks):
            continue
        n = trial.num_ranks
        right = by_weight(seen, i, by_share, n)
        by_slip = {words: by_weight(seen, i, weigh, n) for words, weigh in others(n).items()}
        values = [result[i]["loss"] for result in seen.results]
        times = times_the_mean(values, [loss for loss, _ in right], sizes) if alone else 0
        if times or not alone:
            del by_slip[PART_OF_THE_MEAN]
        detached = part and all_close(along_data(values, sizes), along_data([own for own, _ in right], sizes))
        if detached:
            by_slip[DETACHED] = by_slip.pop(UNWEIGHED)
        for words, count in (
            ("targets of 0 are not counted: -1 alone does not count", counted_but_0),
            ("every -1 before the last counted target of its row is counted, too", up_to_the_last),
        ):
            by_slip[words] = by_weight(seen, i, by_share, n, count)
        if sizes["context"] > 1:
            by_slip[OWN_TOKENS] = by_own_tokens(seen, i, n)
        if i:
            first = sum(counted(targets) for _, targets in seen.drawn[0])
            by_slip[KEPT] = by_weight(seen, i, partial(by_another_count, first), n)
        words = ""
        if times:
            words, weigh = summed(times)
            by_slip[words] = by_weight(seen, i, weigh, n)
        slips = {words: [each[part] for each in found] for words, found in by_slip.items()}
        actual = [result[i]["gradient" if part else "loss"] for result in seen.results]
        expected = [each[part] for each in right]
        if not part:
            actual, expected = along_data(actual, sizes), along_data(expected, sizes)
            slips = {words: along_data(found, sizes) for words, found in slips.items()}
        if words:
            slips[words] = Fault(slips[words], OWN_LOSS)
        if detached:
            slips[DETACHED] = Fault(slips[DETACHED], WEIGH_ITSELF)
        trial.close(
            f"{what} on a mesh of {told(sizes)}",
            actual,
            expected,
            slips if n > 1 else {},
            help=SHARE,
            rtol=1e-5,  # counts may be divided in float32
        )


@check("weighed_loss")
def on_data_alone_it_is_weighed_by_targets(trial: Trial) -> None:
    """Where all ranks lie along data, each counts as much as it has targets that count."""
    require(trial, 0, LOSS, alone=True)
    require(trial, 1, "the gradient", alone=True)


ROUNDED = {
    f"{WENT_THROUGH[dtype]}{told}": (dtype, bool(told))
    for dtype in (torch.bfloat16, torch.float16)
    for told in ("", "; so did their quotient")
}
KEEP_COUNTS = "Count in whole numbers, or in float32 or wider: the sum of a mask is a whole number already."


@check("weighed_loss", world_sizes=(2, 3))
def ranks_may_have_different_numbers_of_rows(trial: Trial) -> None:
    """Where the first rank has a row more, and no -1, each counts as much as it has targets that count."""
    seen, n = trial.once(uneven), trial.num_ranks
    rows = [targets.size(0) for _, targets in seen.drawn[0]]

    def by_rows(counts: list[int], p: int, sizes: dict[str, int]) -> float:
        return rows[p] * n / sum(rows)

    def by_fraction(counts: list[int], p: int, sizes: dict[str, int]) -> float:
        fractions = [count / many for count, many in zip(counts, rows, strict=True)]
        return fractions[p] * n / sum(fractions)

    def without_the_smallest(counts: list[int], p: int, sizes: dict[str, int]) -> float:
        firsts = [targets.min() for _, targets in seen.drawn[0]]
        fewer = [
            count - int((targets == first).sum()) * int(first >= 0)
            for count, first, (_, targets) in zip(counts, firsts, seen.drawn[0], strict=True)
        ]
        return fewer[p] * n / sum(fewer)

    def by_rounded(
        dtype: torch.dtype, quotient: bool, counts: list[int], p: int, sizes: dict[str, int]
    ) -> float:
        own = torch.tensor(counts).to(dtype)
        return (own[p] * n / own.sum()).item() if quotient else own[p].item() * n / own.sum().item()

    slips = {
        **{words: partial(by_rounded, *way) for words, way in ROUNDED.items()},
        "it is weighed by the number of rows, or of all targets, those of -1 too": by_rows,
        "it is weighed by what fraction of its targets counts, and one rank has a row more: how many count "
        "is what matters": by_fraction,
        "the smallest target is left out, as if it were -1; on a rank without -1 it is a word": (
            without_the_smallest
        ),
    }
    found: dict[str, Any] = {
        words: along_data([loss for loss, _ in by_weight(seen, 0, weigh, n)], seen.plans[0])
        for words, weigh in slips.items()
    }
    found |= {words: Fault(found[words], KEEP_COUNTS) for words in ROUNDED}
    trial.close(
        f"{LOSS}, where the ranks have {' and '.join(map(str, rows))} rows,",
        along_data([result[0]["loss"] for result in seen.results], seen.plans[0]),
        along_data([loss for loss, _ in by_weight(seen, 0, by_share, n)], seen.plans[0]),
        found,
        help=SHARE,
        rtol=1e-5,
    )


@check("weighed_loss", world_sizes=(4, 2))
def on_a_mesh_every_target_counts_once(trial: Trial) -> None:
    """Where ranks along tensor or context have the same rows, the loss is weighed as if they were one."""
    require(trial, 0, LOSS, alone=False)


@check("weighed_loss", world_sizes=(4, 2))
def gradients_are_weighed_alike(trial: Trial) -> None:
    """So is the gradient that flows back from it."""
    require(trial, 1, "the gradient", alone=False)


PLACES_OF_THE_WORLD = (
    "the counts are those of the mesh, and what they are multiplied by is made of the number of all ranks of "
    "the world"
)
BY_PLACES = 'Multiply by the ranks along data, mesh.get_group("data").size().'


@check("weighed_loss", world_sizes=(4, 2))
def the_world_may_be_larger(trial: Trial) -> None:
    """A mesh may have some of the world's ranks only: what the others have does not count."""
    seen, n = trial.once(observe), trial.num_ranks
    for i, sizes in enumerate(seen.plans):
        if APART not in sizes:
            continue
        everywhere = sum(counted(targets) for _, targets in seen.drawn[i])
        copies = n // len(seen.drawn[i])  # of each place's targets in the world
        slips = {
            "targets of ranks outside the mesh are counted: the default group has all ranks": (
                lambda counts, p, sizes, total=everywhere * copies: counts[p] * sizes["data"] / total
            ),
            "it is weighed by the counts and the number of all ranks of the world": (
                lambda counts, p, sizes, total=everywhere * copies: counts[p] * n / total
            ),
            PLACES_OF_THE_WORLD: lambda counts, p, sizes: sizes[APART] * by_share(counts, p, sizes),
        }
        found = {
            words: along_data([loss for loss, _ in by_weight(seen, i, weigh, n)], sizes)
            for words, weigh in slips.items()
        }
        found[PLACES_OF_THE_WORLD] = Fault(found[PLACES_OF_THE_WORLD], BY_PLACES)
        trial.close(
            f"{LOSS} in a world of {n} ranks, on a mesh of {told(sizes)}",
            along_data([result[i]["loss"] for result in seen.results], sizes),
            along_data([loss for loss, _ in by_weight(seen, i, by_share, n)], sizes),
            found,
            help='Count along data: mesh.get_group("data").',
            rtol=1e-5,
        )


@check("weighed_loss")
def only_a_count_travels(trial: Trial) -> None:
    """What is sent is a number or two, and no loss of every token."""
    seen = trial.once(observe)
    for rank, result in enumerate(seen.results):
        for sizes, each in zip(seen.plans, result, strict=True):
            events = [event for event in each["recording"].select() if len(event.group) > 1]
            numbers = sum(event.num_elements for event in events)
            trial.require(
                numbers <= FEW,
                f"{numbers} numbers were sent on a mesh of {told(sizes)}: {told_events(events)}",
                help="Only how many targets count must be known elsewhere.",
                rank=rank,
            )


MEAN_COUNT = 2**15
"""Of targets of a rank: those of two ranks are more than float16 holds, and no rank's are."""


@check("weighed_loss", world_sizes=(2,), optional=True)
def half_precision_holds_no_count(trial: Trial) -> None:
    """A float16 loss is weighed as well where all targets together are more than float16 can hold."""
    sizes, more = {"data": 2, "context": 1, "tensor": 1}, 32 * trial.integer(1, 300)
    counts = [MEAN_COUNT + more, MEAN_COUNT - more]
    losses = [torch.tensor(trial.integer(32, 64) / 32, dtype=torch.float16) for _ in counts]
    targets = [trial.tokens(20, 1, count) for count in counts]
    weighed = trial.run(probe_half, sizes, per_rank=list(zip(losses, targets, strict=True)))
    values = [float(each) for each in weighed]
    given, made = (" and ".join(f"{x:g}" for x in each) for each in (losses, values))
    trial.require(
        all(math.isfinite(value) and value for value in values),
        f"float16 losses of {given} became {made}, where {counts[0]:,} and {counts[1]:,} targets count",
        cause=f"{WENT_THROUGH[torch.float16]}; or a loss times such a number did",
        help="Divide the counts first, in whole numbers or float32: the weight is a small number.",
    )
    mean = sum(loss.double() * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    trial.close(f"{LOSS}, in float16,", along_data(weighed, sizes), mean, help=SHARE, rtol=HALF_DIGITS)
