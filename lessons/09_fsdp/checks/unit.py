"""Checks of `ShardedUnit`: weights that come and go."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import CheckEnded, Fault, Trial, Verdict, check, exercise, of_ranks, settle, storage_bytes

from .runs import NOTHING_LEFT
from .units import FROZEN, SHAPES, copies, draw_tensors, make_parameters
from .wire import SMALL, own_bytes, share_bytes

exercise(
    "ShardedUnit",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "Lay the parameters end to end (torch.cat of flat ones), pad to a multiple of n, broadcast from the "
        "group's rank 0, and cut into n pieces: piece r is this rank's. A shard is what of a parameter lies "
        "in it, a clone.",
        "Keep one buffer for the whole weights. Give each parameter its stretch of it, once and for all: "
        "parameter.data = buffer[start:end].view(parameter.shape).",
        "To free is buffer.untyped_storage().resize_(0). To gather is resize_(num_bytes) and an all-gather "
        "into buffer.chunk(n), with async_op=True: keep the handle, and wait for it in gather().",
        "torch.cat gives what it joins one dtype: parameters of several dtypes need a buffer each.",
    ),
)

TIMES = 0.5
"""What the shards are multiplied by between two gathers."""
TURNED = 3
"""The parameter that lies in memory transposed, on every rank but the first."""


def come_and_go(rank: Any, tensors: list[Tensor]) -> dict:
    """What the parameters are after a gather; the same after the shards have changed, with delays or not."""
    given = make_parameters(tensors, rank.device)
    if rank.rank:
        given[TURNED].data = given[TURNED].data.t().contiguous().t()
    unit = rank.submission.ShardedUnit(iter(given), rank.group)
    unit.free()
    unit.gather()
    first = copies(given)
    with torch.no_grad():
        for shard in unit.shards:
            shard.mul_(TIMES)
    unit.free()
    unit.start_gather()
    unit.gather()
    second = copies(given)
    unit.free()
    unit.free()
    return {
        "first": first,
        "second": second,
        "same": [a is b for a, b in zip(unit.parameters, given, strict=False)],
        "sizes": [tuple(shard.shape) for shard in unit.shards],
        "trained": [shard.requires_grad for shard in unit.shards],
        "memory": storage_bytes(unit.shards),
        "leaves": [isinstance(shard, nn.Parameter) for shard in unit.shards],
    }


def observe(trial: Trial) -> SimpleNamespace:
    tensors = draw_tensors(trial)
    results = trial.run(come_and_go, per_rank=[(own,) for own in tensors])
    return SimpleNamespace(results=results, tensors=tensors)


def observe_with_delays(trial: Trial) -> SimpleNamespace:
    tensors = draw_tensors(trial)
    results = trial.run(come_and_go, per_rank=[(own,) for own in tensors], delays=True)
    return SimpleNamespace(results=results, tensors=tensors)


READ_TURNED = (
    "a part of it is rank 0's memory, read in another order: this parameter lies in memory transposed on "
    "every rank but rank 0, and a collective sends memory as it lies"
)


def require_gathered(trial: Trial, seen: Any, when: str, times: float, help: str) -> None:
    for i, shape in enumerate(SHAPES):
        own = [tensors[i] for tensors in seen.tensors]
        found = [result[when][i] for result in seen.results]
        alternatives: dict[str, Any] = {}
        if trial.num_ranks > 1:
            alternatives["each rank has its own weights: nobody told the others rank 0's"] = [
                times * each for each in own
            ]
            joined = torch.stack(own)
            if all(t.shape == own[0].shape and bool((times * joined == t).any(0).all()) for t in found):
                told = "every rank's shard is cut out of its own weights: nobody told the others rank 0's"
                alternatives[told] = found
        if i == TURNED and all(t.shape == own[0].shape for t in found):
            turned = own[0].reshape(own[0].t().shape).t()
            if all(bool(((t == times * own[0]) | (t == times * turned)).all()) for t in found):
                alternatives[READ_TURNED] = Fault(found, "Send tensor.contiguous(), and cut what has come.")
        if times != 1.0:
            alternatives["it is what it was before the shards changed"] = own[0]
        trial.close(
            f"the parameter of shape {shape} after the {when} gather()",
            found,
            times * own[0],
            alternatives=alternatives,
            help=help,
        )


@check("ShardedUnit")
def shards_are_a_share(trial: Trial) -> None:
    """`parameters` are those given, and `shards` flat parameters beside them: P/n numbers on each rank."""
    seen, n = trial.once(observe), trial.num_ranks
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    counts = [sum(torch.Size(size).numel() for size in result["sizes"]) for result in seen.results]
    trained = [i != FROZEN for i in range(len(SHAPES))]
    for r, result in enumerate(seen.results):
        moved = sorted(result["trained"]) == sorted(trained)
        trial.require(
            result["same"] == [True] * len(SHAPES),
            "unit.parameters are not the given parameters, in their order",
            help="Keep the Parameter objects: modules have them. `iter(...)` can be gone through once.",
            rank=r,
        )
        trial.require(
            len(result["sizes"]) == len(SHAPES) and all(len(size) == 1 for size in result["sizes"]),
            f"unit.shards have the shapes {result['sizes']}, for {len(SHAPES)} parameters",
            help="One flat shard a parameter: torch.empty(0) where this rank has nothing of it.",
            rank=r,
        )
        trial.require(
            all(result["leaves"]) and result["trained"] == trained,
            f"the shards' requires_grad are {result['trained']}, and parameter {FROZEN} is frozen",
            help="unit.shards[i] belongs to unit.parameters[i]."
            if moved
            else "nn.Parameter(shard, parameter.requires_grad), for the optimizer.",
            rank=r,
            cause="the shards are in another order than the parameters" if moved else "",
        )
        trial.require(
            counts[r] <= sum(sizes) / n + max(sizes) and (n == 1 or counts[r] < sum(sizes)),
            f"its shards have {counts[r]} numbers, and the parameters {sum(sizes)}: a share is "
            f"{sum(sizes) / n:.1f}",
            help="Cut into n pieces; this rank keeps one, as a clone.",
            rank=r,
            cause="they are the whole parameters" if n > 1 and counts[r] >= sum(sizes) else "",
        )
        trial.require(
            counts[r] <= result["memory"] // 8 and (n == 1 or result["memory"] < 8 * sum(sizes)),
            f"its shards have {counts[r]} numbers, and the memory that they lie in has, after free(), "
            f"room for {result['memory'] // 8}: the parameters have {sum(sizes)}",
            help="Keep a clone() of the share: it must stay when the whole is freed.",
            rank=r,
            cause="they are views of the whole weights",
        )
    trial.require(sum(counts) >= sum(sizes), f"all ranks' shards have {sum(counts)} numbers, of {sum(sizes)}")


@check("ShardedUnit")
def gathered_weights_are_rank_0s(trial: Trial) -> None:
    """After gather() the given parameters have the weights of the group's rank 0."""
    seen = trial.once(observe)
    help = "Broadcast from the group's rank 0 before you cut. After gathering, leave the padding out."
    require_gathered(trial, seen, "first", 1.0, help)


@check("ShardedUnit")
def a_gather_takes_the_shards_as_they_are(trial: Trial) -> None:
    """When the shards have changed, the next gather() brings the new values."""
    help = "The optimizer writes into the shards: lay out what you send when you send it."
    require_gathered(trial, trial.once(observe), "second", TIMES, help)


@check("ShardedUnit", world_sizes=(2, 3), subgroup=False)
def gather_waits_for_the_network(trial: Trial) -> None:
    """On a network that takes its time the weights are as right as on a fast one."""
    help = "start_gather() keeps the handle of its all-gather, and gather() calls its wait()."
    require_gathered(trial, trial.once(observe_with_delays), "second", TIMES, help)


ROWS = 64


def look_at_memory(rank: Any, tensor: Tensor, x: Tensor) -> dict:
    """Bytes alive when a unit is at rest, whole, and freed while autograd keeps its weights for backward."""
    x = x.requires_grad_()
    with rank.record(memory=True) as recording:
        weight = nn.Parameter(tensor.clone().to(rank.device))
        unit = rank.submission.ShardedUnit([weight], rank.group)
        settle()
        recording.mark("at rest")
        unit.gather()
        settle()
        recording.mark("whole")
        y = (x @ weight.T).sum()  # autograd keeps the view
        storage = weight.untyped_storage()  # which it keeps alive by this
        unit.free()
        settle()
        recording.mark("freed")
        left = storage.nbytes()
        del storage
        unit.gather()
        y.backward()
        unit.free()
        weight.grad = None
        settle()
        recording.mark("in the end")
    return {
        "recording": recording,
        "gradient": x.grad.clone(),
        "left": left,
        "own": own_bytes(unit.shards),
        "uneven": shards_of_uneven(rank),
    }


NUM_LARGE, LARGE = 6, 65
"""How many of a unit's parameters are large, one in n, and the numbers of each: odd, n does not divide it."""


def uneven_sizes(n: int) -> list[int]:
    return [LARGE, *[1] * (n - 1)] * NUM_LARGE


def shards_of_uneven(rank: Any) -> int:
    """How many numbers the shards have of parameters of which one in n is large."""
    given = [nn.Parameter(torch.ones(size, device=rank.device)) for size in uneven_sizes(rank.num_ranks)]
    return sum(shard.numel() for shard in rank.submission.ShardedUnit(given, rank.group).shards)


FILLED_ELSEWHERE = (
    "backward reads a view of the weight that it has kept, and its memory was still shrunk to nothing: does "
    "the second gather() fill other memory?"
)
FILL_THE_SAME = "Fill the same storage again (resize_(num_bytes)): new memory is not where autograd looks."


def observe_memory(trial: Trial) -> SimpleNamespace:
    tensor, x = trial.normal(ROWS, ROWS), trial.normal(3, ROWS)
    try:
        results = trial.run(look_at_memory, tensor, x)
    except CheckEnded as end:
        if end.verdict == Verdict.CRASHED and NOTHING_LEFT in end.message:
            end.cause, end.help = FILLED_ELSEWHERE, FILL_THE_SAME
        raise
    return SimpleNamespace(results=results, expected=tensor.sum(0).expand(3, ROWS), size=4 * ROWS * ROWS)


@check("ShardedUnit", world_sizes=(2, 4), subgroup=False)
def freed_memory_is_gone(trial: Trial) -> None:
    """After the constructor, and after free(), a rank has its share in memory, and the whole is gone."""
    seen = trial.once(observe_memory)
    shares = share_bytes([result["own"] for result in seen.results], seen.size)
    for r, (result, share) in enumerate(zip(seen.results, shares, strict=True)):
        recording = result["recording"]
        for when, told in (
            ("at rest", "after the constructor"),
            ("freed", "after free(), while autograd keeps a view of the weight,"),
            ("in the end", "after the last free()"),
        ):
            alive = recording.alive(when)
            elsewhere = when == "freed" and result["left"] <= SMALL
            trial.require(
                alive <= 1.1 * share + SMALL,
                f"{told} {alive:,} bytes are alive on it: the weight is {seen.size:,}, a share {share:,}",
                help="Let go of what a gather was made of: the piece that was sent, and those that came."
                if elsewhere
                else "Views of a storage share its memory: `tensor.untyped_storage().resize_(0)` gives it "
                "back for all of them.",
                rank=r,
                cause=beside(alive - share, share, seen.size)
                if elsewhere
                else "the whole weight is still there"
                if share < seen.size <= alive
                else "",
            )


@check("ShardedUnit", world_sizes=(2, 4), subgroup=False)
def shards_are_even_where_sizes_are_not(trial: Trial) -> None:
    """Of parameters of which one in n is large, no rank's shards have more than an n-th and one large one."""
    n = trial.num_ranks
    sizes = uneven_sizes(n)
    counts = [result["uneven"] for result in trial.once(observe_memory).results]
    cause, help = "", "Cut what they have together, or give each to the rank with the fewest numbers."
    if counts == [sum(sizes[r::n]) for r in range(n)]:
        told = ", ".join(map(str, counts))
        cause = f"they are dealt out in turns, whatever their size: the ranks' shards have {told}"
    elif min(counts) >= sum(sizes):
        cause = "every rank keeps all of them whole"
        help = "Cut every parameter, whatever its size: pad what n does not divide."
    for r, count in enumerate(counts):
        trial.require(
            count <= sum(sizes) / n + LARGE,
            f"of {len(sizes)} parameters the first of every {n} has {LARGE} numbers, and the others one: its "
            f"shards have {count}, and an n-th of all {sum(sizes)} is {sum(sizes) / n:.0f}",
            help=help,
            rank=r,
            cause=cause,
        )


def beside(kept: int, share: int, size: int) -> str:
    """What is alive besides the share where the weight's own memory was given back."""
    sizes = {share: "one more share: a copy of it", size: "all pieces together: those that were received"}
    near = [words for bytes, words in sizes.items() if abs(kept - bytes) <= SMALL]
    told = f", as much as {near[0]}, say" if near else ""
    return f"the weight's own memory was given back; {kept:,} bytes are kept beside it{told}"


@check("ShardedUnit", world_sizes=(2, 4), subgroup=False)
def kept_views_are_filled_again(trial: Trial) -> None:
    """What autograd kept of a weight before free() is right again after the next gather()."""
    seen = trial.once(observe_memory)
    trial.close(
        "the gradient of x through x @ weight.T, freed and gathered before backward",
        [result["gradient"] for result in seen.results],
        seen.expected,
        help=FILL_THE_SAME,
    )


def send_for(rank: Any, frees_early: bool, tensors: list[Tensor]) -> dict:
    """What is sent and waited for; the weights when the shards have changed since a gather was dropped."""
    given = make_parameters(tensors, rank.device)
    unit = rank.submission.ShardedUnit(given, rank.group)
    with rank.record() as recording:
        recording.mark("start")
        unit.start_gather()
        recording.mark("start again")
        unit.start_gather()
        recording.mark("gather")
        unit.gather()
        recording.mark("gather again")
        unit.gather()
        unit.start_gather()
        recording.mark("free")
        unit.free()
        if frees_early:
            recording.mark("start to free")
            unit.start_gather()
            recording.mark("free on its way")
            unit.free()
    with torch.no_grad():
        for shard in unit.shards:
            shard.mul_(TIMES)
    unit.gather()
    return {"recording": recording, "anew": copies(given)}


LEFT_ON_ITS_WAY = "free() left a gather on its way: it would arrive in memory that was given back"
WAIT_TO_FREE = "In free(), wait for what start_gather() has started, then shrink."
STALE_PIECES = (
    "it is what it was before the shards changed: free() kept the pieces of the gather that it waited for"
)


def observe_sending(trial: Trial) -> SimpleNamespace:
    """Where ranks crash, and do not if no gather is on its way when free() is called, that is why."""
    tensors = draw_tensors(trial)

    def run(frees_early: bool) -> SimpleNamespace:
        results = trial.run(send_for, per_rank=[(frees_early, own) for own in tensors])
        return SimpleNamespace(results=results, tensors=tensors)

    try:
        return run(frees_early=True)
    except CheckEnded as end:
        if end.verdict == Verdict.CRASHED and "was killed by signal" in end.message:
            run(frees_early=False)
            end.cause, end.help = LEFT_ON_ITS_WAY, WAIT_TO_FREE
        raise


@check("ShardedUnit", world_sizes=(2, 3), subgroup=False)
def start_gather_does_not_wait(trial: Trial) -> None:
    """start_gather() sends for the shards and does not wait; what is whole, or on its way, is not resent."""
    seen = trial.once(observe_sending)
    for r, result in enumerate(seen.results):
        recording = result["recording"]
        started = recording.select(after="start")
        trial.require(bool(started), "start_gather() sent nothing", help="It starts the all-gather.", rank=r)
        trial.require(
            all(event.asynchronous for event in started) and not recording.waits("start"),
            "start_gather() waited until the shards had arrived",
            help="dist.all_gather(..., async_op=True) returns a handle at once: keep it for gather().",
            rank=r,
        )
        for when, told in (
            ("start again", "start_gather()"),
            ("gather", "gather()"),
            ("gather again", "gather()"),
        ):
            more = recording.bytes(after=when)
            trial.require(
                not more,
                f"{told} sent {more} bytes for weights that were whole or on their way already",
                help="Remember that a gather was started, until free().",
                rank=r,
            )
        started = recording.select(after="start to free")
        trial.require(
            bool(started),
            "after two gather() and a free(), start_gather() sent nothing: the weights count as whole still",
            help="One free() ends what any number of gather() began: it is no count of users.",
            rank=r,
        )
        trial.require(
            recording.waits("free on its way") >= len(started), LEFT_ON_ITS_WAY, help=WAIT_TO_FREE, rank=r
        )
    for i, shape in enumerate(SHAPES):
        trial.close(
            f"the parameter of shape {shape} after start_gather(), free(), shards that were multiplied by "
            f"{TIMES}, and gather(),",
            [result["anew"][i] for result in seen.results],
            TIMES * seen.tensors[0][i],
            alternatives={STALE_PIECES: seen.tensors[0][i]},
            help="free() waits for a gather that is on its way, and forgets it: the next one sends anew.",
        )


def gather_one_number(rank: Any, tensor: Tensor) -> dict:
    """A unit of a single number: fewer than there are ranks."""
    given = nn.Parameter(tensor.to(rank.device))
    unit = rank.submission.ShardedUnit([given], rank.group)
    unit.gather()
    there = given.untyped_storage().nbytes() > 0
    return {"there": there, "value": given.detach().clone() if there else None}


@check("ShardedUnit", world_sizes=(2, 3), subgroup=False)
def ranks_without_a_number_gather_too(trial: Trial) -> None:
    """A unit of one number is whole on every rank after gather(), also where all shards are empty."""
    tensor = trial.normal(1, dtype=torch.float64)
    help = "A gather is of all ranks: who has nothing sends padding, and receives as the others do."
    try:
        results = trial.run(gather_one_number, tensor)
    except CheckEnded as end:
        gone = [r for r in range(trial.num_ranks) if f"rank {r} had finished" in end.details]
        if gone and "never did" in end.message:
            end.cause = (
                f"the unit has one number alone, and {of_ranks(gone)} took no part in its gather: do ranks "
                "whose shards are empty leave it out?"
            )
            end.help = help
        raise
    for r, result in enumerate(results):
        trial.require(
            result["there"],
            "a unit of one number was gathered, and the parameter has no memory",
            help=help,
            rank=r,
        )
    trial.close("the one number of a unit", [result["value"] for result in results], tensor, help=help)
