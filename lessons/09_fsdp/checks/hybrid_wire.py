"""Checks of `hybrid_shard`: what travels inside a machine and across, and what a rank keeps."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.optim import SGD

from grader.checks import Recording, Trial, check, settle
from lessons_shared.wire import wire_bytes
from nanogpt.model import GPT

from .meshes import Machines, arrangements, groups_of, hybrid, told
from .models import SHORT, build, bytes_of, short_gpt
from .runs import run
from .wire import SMALL, own_bytes, padded_bytes, share_bytes


def measure(rank: Any, seed: int, arranged: list[Machines], batch: tuple[Tensor, Tensor]) -> list[dict]:
    """A step on each arrangement of machines, the second since it was built, and one more backward."""
    found = []
    for machines in arranged:
        with rank.record(memory=True) as recording:
            sharded = hybrid(rank, build(short_gpt, seed), machines)
            optimizer = SGD(sharded.parameters(), lr=0.1)
            sharded(*batch)[1].backward()
            optimizer.zero_grad()
            settle()
            recording.mark("step")
            sharded(*batch)[1].backward()
            settle()
            recording.mark("over")
            sharded(*batch)[1].backward()
            settle()
            recording.mark("added")
        found.append(
            {
                "recording": recording,
                "own": own_bytes(sharded.parameters()),
                "gradients": own_bytes(p.grad for p in sharded.parameters()),
            }
        )
    return found


def observe(trial: Trial) -> SimpleNamespace:
    batch = (trial.tokens(SHORT.vocab_size, 1, 2), trial.tokens(SHORT.vocab_size, 1, 2))
    arranged = arrangements(trial)[-2:]  # of four ranks not the neighbours: others show as much, and more
    results = run(trial, measure, trial.seed(), arranged, batch)
    model = build(short_gpt, 0)
    block = bytes_of(model.transformer.h[0])
    on_machines = []
    for k, machines in enumerate(arranged):
        of_each = [result[k] for result in results]
        shares = shares_of(machines, of_each, model)
        on_machines.append(SimpleNamespace(machines=machines, results=of_each, shares=shares))
    return SimpleNamespace(
        on_machines=on_machines,
        model=model,
        size=bytes_of(model),
        block=block,
        outside=bytes_of(model) - SHORT.n_layer * block,
        largest=max(p.numel() * p.element_size() for p in model.parameters()),
    )


def shares_of(machines: Machines, results: list[dict], model: GPT) -> dict[int, int]:
    """By rank, the bytes of its share of the weights of its machine."""
    shares = {}
    for row in machines:
        own = share_bytes([results[r]["own"] for r in row], padded_bytes(model, len(row)))
        shares |= dict(zip(row, own, strict=True))
    return shares


def sent(recording: Recording, group: tuple[int, ...], kinds: tuple[str, ...] = ()) -> float:
    """Bytes that a rank sends in a step in one group; of some kinds, or of all."""
    events = [event for event in recording.select(after="step") if event.group == group]
    return wire_bytes([event for event in events if not kinds or event.kind in kinds], len(group))


@check("hybrid_shard")
def only_the_shards_gradients_cross(trial: Trial) -> None:
    """Across m machines a step sends 2(m-1)/m · S/n bytes: one all-reduce of the shards' gradients."""
    seen = trial.once(observe)
    for each in seen.on_machines:
        m, n = len(each.machines), len(each.machines[0])
        for r, result in enumerate(each.results):
            inside, across = groups_of(each.machines, r)
            if inside == across or m == 1:
                continue
            recording, share = result["recording"], each.shares[r]
            allowed, due = (2 * (m - 1) / m * size for size in (share, min(share, result["own"])))
            crossing = sent(recording, across)
            gathered = sent(recording, across, ("all_gather",))
            told_anew = sent(recording, across, ("broadcast",))
            told_anew -= sent(recording, across, ("reduce",))  # both together are an all-reduce
            times = how_often(recording, across, crossing / allowed)
            cause, step = (
                "",
                "Reduce-scatter inside the machine first, and all-reduce what is left on a rank: S/n.",
            )
            if times > 1:
                cause = f"the shards' gradients cross, {times} times in one backward"
                step = "All-reduce each shard once a backward, though several outputs may have a hook."
            elif told_anew > SMALL and crossing - told_anew > 0.9 * due:
                cause = "weights are broadcast across machines in every step: once, at the start, is enough"
            elif n > 1 and gathered > 0.9 * (m - 1) / m * seen.size and in_other_groups(seen, each, r):
                cause = (
                    "weights are gathered across machines where these are not of consecutive ranks, and not "
                    "where each is one rank: the groups are not those of the mesh"
                )
                step = "Take both groups from the mesh: mesh.get_group(0) and mesh.get_group(1)."
            elif gathered > 0.9 * (m - 1) / m * seen.size and n > 1:
                cause = "weights are gathered across machines: the mesh's second dimension is the machine"
            elif crossing > 1.5 * allowed and n > 1:
                cause = "whole gradients cross, not this rank's shards of them"
            elif gathered > allowed:
                cause = f"every rank gathers the gradients of all {m} machines"
            trial.require(
                crossing <= allowed + SMALL,
                f"it sends {crossing:,.0f} bytes across machines in a step ({told(each.machines)}), where "
                f"an all-reduce of its shards' gradients sends {due:,.0f}",
                help=step,
                rank=r,
                cause=cause,
            )


def in_other_groups(seen: SimpleNamespace, each: SimpleNamespace, rank: int) -> bool:
    """Whether weights are gathered across these machines alone, and never across machines of one rank."""

    def gathered(by: SimpleNamespace, place: int) -> float:
        group = groups_of(by.machines, rank)[place]
        return sent(by.results[rank]["recording"], group, ("all_gather",))

    alone = [other for other in seen.on_machines if len(other.machines[0]) == 1]
    return gathered(each, 0) <= SMALL < gathered(each, 1) and all(gathered(by, 1) <= SMALL for by in alone)


def how_often(recording: Recording, group: tuple[int, ...], ratio: float) -> int:
    """How many times the same crosses, where it is `ratio` times what is due; 1 if it is not the same."""
    sizes = Counter((e.kind, e.num_elements) for e in recording.select(after="step") if e.group == group)
    times = round(ratio)
    return times if sizes and all(count % max(times, 1) == 0 for count in sizes.values()) else 1


@check("hybrid_shard")
def weights_are_gathered_inside(trial: Trial) -> None:
    """Inside a machine of n ranks a step sends what ZeRO-3 does: 3(n-1)/n · S bytes, and no more."""
    seen = trial.once(observe)
    for each in seen.on_machines:
        n = len(each.machines[0])
        if n == 1:
            continue
        for r, result in enumerate(each.results):
            inside, _ = groups_of(each.machines, r)
            home, whole = sent(result["recording"], inside), (n - 1) / n * seen.size
            even, largest = padded_bytes(seen.model, n) // n, max(each.shares[rank] for rank in inside)
            uneven = 3 * (n - 1) * (largest - even)  # who has more may send more, or all are padded to it
            least = 2.9 * (n - 1) / n * SHORT.n_layer * seen.block - uneven
            most = 3 * (n - 1) * largest + (n - 1) / n * (2 * seen.outside + seen.block)
            trial.require(
                least - SMALL <= home <= most + SMALL,
                f"it sends {home:,.0f} bytes inside its machine in a step ({told(each.machines)}), and to "
                f"gather all weights twice and reduce-scatter their gradients takes {3 * whole:,.0f}",
                help="Your FullySharded does it, in the group of the machine.",
                rank=r,
                cause="nothing is gathered inside the machine" if home < SMALL else "",
            )


@check("hybrid_shard")
def a_rank_keeps_its_shards(trial: Trial) -> None:
    """After backward a rank of a machine of n has 1/n of the weights, and 1/n of the gradients."""
    seen = trial.once(observe)
    for each in seen.on_machines:
        for r, result in enumerate(each.results):
            share, own = each.shares[r] + seen.largest, min(each.shares[r], result["own"])
            trial.require(
                result["gradients"] <= share,
                f"the .grad of parameters() are {result['gradients']:,} bytes ({told(each.machines)}), and "
                f"its share of the gradients is {own:,}",
                help="A shard's .grad has the shard's size.",
                rank=r,
            )
            alive = result["recording"].alive("over")
            trial.require(
                alive <= 2 * share + 2 * seen.outside + seen.block + SMALL,
                f"after backward {alive:,} bytes are alive on it ({told(each.machines)}); its shards and "
                f"their gradients are {2 * own:,}",
                help="Let go of the given model, of copies of it, and of buffers for what was sent.",
                rank=r,
                cause="all the weights are kept besides"
                if alive >= 1.9 * own + seen.size
                else "as much as its shards' gradients is kept besides"
                if abs(alive - 3 * result["gradients"]) <= seen.outside
                else "",
            )


@check("hybrid_shard", optional=True)
def what_was_there_is_let_go(trial: Trial) -> None:
    """After a second backward, whose gradients add to the first's, a rank keeps no more than after one."""
    seen = trial.once(observe)
    for each in seen.on_machines:
        for r, result in enumerate(each.results):
            more = result["recording"].alive("added") - result["recording"].alive("over")
            trial.require(
                more <= seen.block + SMALL,
                f"after a second backward {more:,} bytes more are alive on it than after the first "
                f"({told(each.machines)}); the gradients of its shards are {result['gradients']:,}",
                help="Let go of what .grad held before, once the new gradients are added to it.",
                rank=r,
                cause="what .grad held before is still there"
                if abs(more - result["gradients"]) <= SMALL
                else "",
            )
