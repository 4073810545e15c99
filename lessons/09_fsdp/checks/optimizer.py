"""Checks of `ShardedOptimizer`: the steps of one process, with a share of the state on each rank."""

import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from grader.checks import (
    CheckEnded,
    Fault,
    Trial,
    Verdict,
    check,
    exercise,
    settle,
    storage_bytes,
    tensors_in,
)
from lessons_shared.infinite import require_shown

from .models import LAYER_BYTES, NUM_LAYERS, Chain, Odd, Roomy, build, bytes_of, draw
from .parts import counted_passes, gradients_by_rank, means_by_pass, trained_on
from .training import DECAYED, KINDS, PASSES, STEPS, expected_weights, require_weights, train
from .wire import SMALL, require_travelled

exercise(
    "ShardedOptimizer",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "Inside it is an ordinary optimizer of `optimizer_class`, whose parameters are this rank's share: "
        "whole "
        "parameters that the rank owns, or flat pieces of each.",
        "One reduce-scatter for many parameters: cut each gradient into n pieces, pad them to one length, "
        "and lay the pieces for rank r into row r. The rows are the inputs, and what comes back are your "
        "shares.",
        "A view of a weight (parameter.detach().view(-1)[start:end]) is updated where the weight lies. "
        "Give it a "
        ".grad, step, and gather.",
        "A parameter with fewer elements than ranks leaves some ranks with an empty share: they take part in "
        "every collective all the same.",
    ),
)


def train_on_ranks(
    rank: Any, roomy: bool, seed: int, kinds: list[str], batches: list[tuple[Tensor, Tensor]]
) -> dict:
    """By kind: the weights at the end and after the first step, and what each step told."""
    result: dict[str, Any] = {}

    def sharded(params: Any, optimizer_class: Any, **settings: Any) -> Any:
        return rank.submission.ShardedOptimizer(params, optimizer_class, rank.group, **settings)

    for kind in kinds:
        model = build(Roomy if roomy else Odd, seed, torch.float64).to(rank.device)
        steps = train(model, batches, kind, sharded, look_at=model)
        result[kind] = {
            "weights": steps[-1].weights,
            "first": steps[0].weights,
            "losses": [step.losses for step in steps],
            "returned": [step.returned for step in steps],
        }
    return result


EMPTY_SHARE = (
    "a parameter has fewer numbers than there are ranks, and the share of some rank is empty. Where each "
    "rank has a number of every parameter, all of this runs to its end"
)
SAME_CALLS = "A rank whose share is empty makes the same calls as the others: pad it, and leave none out."


def observe_training(trial: Trial) -> SimpleNamespace:
    seed, by_rank = trial.seed(), draw(trial, sum(PASSES))
    kinds = KINDS if trial.layout.world_size == 2 else KINDS[:2]
    per_rank = [(batches,) for batches in by_rank]
    try:
        results = trial.run(train_on_ranks, False, seed, list(kinds), per_rank=per_rank)
    except CheckEnded as end:
        if end.verdict == Verdict.CRASHED and trial.num_ranks > 1:
            with suppress(CheckEnded):
                trial.run(train_on_ranks, True, seed, list(kinds), per_rank=per_rank)
                end.cause, end.help = EMPTY_SHARE, SAME_CALLS
        raise
    return SimpleNamespace(results=results, seed=seed, by_rank=by_rank)


def require_kind(trial: Trial, kind: str, help: str) -> None:
    seen = trial.once(observe_training)
    expected = expected_weights(trial, Odd, seen.seed, seen.by_rank, kind)

    def explain() -> str:
        firsts = [result["SGD"]["first"] for result in seen.results]
        told = trained_on(expected.start, firsts, gradients_by_rank(Odd, seen.seed, seen.by_rank))
        return told or counted_passes(expected.start, firsts, means_by_pass(Odd, seen.seed, seen.by_rank))

    ends = [result[kind]["weights"] for result in seen.results]
    require_weights(trial, ends, expected, kind, help, explain)


@check("ShardedOptimizer")
def sgd_trains_as_one_process_does(trial: Trial) -> None:
    """Two steps of SGD with momentum end, on every rank, at one process's weights on the whole batch."""
    require_kind(
        trial, "SGD", "Step on the mean of the ranks' gradients, then hand every share to every rank."
    )


@check("ShardedOptimizer")
def adamw_trains_as_one_process_does(trial: Trial) -> None:
    """Two steps of AdamW do too: a tied table, frozen and unused weights, odd sizes, a single number."""
    require_kind(
        trial,
        "AdamW",
        "What is frozen, or has no gradient, neither moves nor decays. A share may be shorter, or empty.",
    )


@check("ShardedOptimizer", world_sizes=(2,), subgroup=False)
def parameter_groups_keep_their_settings(trial: Trial) -> None:
    """Two parameter groups with settings of their own train as they do in one process."""
    require_kind(
        trial, "groups", "Build the inner optimizer from groups: each has its settings, and your share."
    )


@check("ShardedOptimizer", world_sizes=(2,), subgroup=False)
def schedulers_change_the_learning_rate(trial: Trial) -> None:
    """A scheduler on the sharded optimizer changes the learning rate of the next step."""
    require_kind(
        trial,
        "scheduled",
        "A scheduler writes into self.param_groups: copy it to the inner optimizer's in step().",
    )


@check("ShardedOptimizer", world_sizes=(2,), subgroup=False)
def state_dict_resumes(trial: Trial) -> None:
    """A new optimizer that loads the state_dict of the old one goes on as if nothing had happened."""
    require_kind(
        trial,
        "resumed",
        "state_dict() has the state of this rank's share, and load_state_dict() puts it back, with the "
        "learning rate of then: hand both on to the inner optimizer, and copy its settings to your groups.",
    )


@check("ShardedOptimizer", world_sizes=(2,), subgroup=False)
def closure_is_called_first(trial: Trial) -> None:
    """step(closure) calls it once, before all else, and returns its loss; step() returns None."""
    seen = trial.once(observe_training)
    for r, result in enumerate(seen.results):
        for number, (losses, returned) in enumerate(
            zip(result["closure"]["losses"], result["closure"]["returned"], strict=True)
        ):
            trial.require(
                len(losses) == 1,
                f"step {number} called its closure {len(losses)} times",
                help="Call it once, at the beginning of step, and keep its loss.",
                rank=r,
            )
            trial.require(
                returned is not None,
                f"step {number} with a closure returned None",
                help="Return what the closure returned.",
                rank=r,
            )
    for number in range(len(PASSES)):
        own = [result["closure"]["losses"][number][0] for result in seen.results]
        trial.close(
            f"what step {number} with a closure returned",
            [result["closure"]["returned"][number] for result in seen.results],
            own,
            alternatives={"it is the mean of all ranks' losses": torch.stack(own).mean()},
            help="Return what the closure returned: this rank's own loss.",
        )
    for r, result in enumerate(seen.results):
        without = result["SGD"]["returned"]
        trial.require(without == [None, None], f"step() without a closure returned {without}", rank=r)
    require_kind(
        trial, "closure", "The closure makes the gradients: call it before anything else looks at .grad."
    )


DECAYING = {"lr": 0.1, "weight_decay": 0.5, "eps": 1e-3}
"""Of AdamW: a step on a gradient of zeros shrinks a weight, and moves it on as the steps before did."""


def reach_others(rank: Any, start: list[Tensor], x: Tensor) -> list[Tensor]:
    """Three parameters after two steps, of which backward reaches two in each: the first one in both."""
    parameters = [nn.Parameter(each.clone()) for each in start]
    optimizer = rank.submission.ShardedOptimizer(parameters, AdamW, rank.group, **DECAYING)
    for reached in (parameters[:2], parameters[::2]):
        optimizer.zero_grad()
        torch.stack([(parameter * x).sum() for parameter in reached]).sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def after_steps(start: Tensor, *gradients: Tensor | None) -> Tensor:
    """A parameter after a step of one process's AdamW on each of these gradients."""
    parameter = nn.Parameter(start.clone())
    optimizer = AdamW([parameter], **DECAYING)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


def own_share_alone(before: Tensor, after: Tensor, found: Sequence[Tensor]) -> dict[str, Fault]:
    """What the ranks have, if every number has moved on one of them, and on the others is what it was."""
    joined = torch.stack(list(found))
    moved, stayed = (torch.isclose(joined, each, atol=1e-5) for each in (after, before))
    alone = (moved | stayed).all() and (moved.sum(0) == 1).all()
    return {OWN_SHARE_ALONE: Fault(list(found), HAND_ROUND)} if alone else {}


OWN_SHARE_ALONE = (
    "each number has moved on its owner alone, and was not handed round: is what is handed round a list from "
    "an earlier step?"
)
HAND_ROUND = "In every step, gather all the parameters that have a gradient in this step."


@check("ShardedOptimizer", world_sizes=(2,), subgroup=False)
def each_step_moves_what_its_backward_reached(trial: Trial) -> None:
    """A parameter that backward reaches no more stays as it is, and one that it reaches first now moves."""
    start, x = [trial.normal(7) for _ in range(3)], [trial.normal(7) for _ in range(trial.num_ranks)]
    mean = torch.stack(x).mean(0)
    ends = list(zip(*trial.run(reach_others, start, per_rank=[(each,) for each in x]), strict=True))
    reached = {
        "both steps": (mean, mean),
        "the first of two steps": (mean, None),
        "the second of two steps": (None, mean),
    }
    for before, found, (when, gradients) in zip(start, ends, reached.items(), strict=True):
        known: dict[str, Any] = {}
        if gradients[1] is None:
            known = {
                "it moved with the gradient of the step before": after_steps(before, mean, mean),
                DECAYED: Fault(after_steps(before, mean, torch.zeros_like(mean)), STEPS[DECAYED]),
            }
        elif gradients[0] is None:
            known = {
                "it stays as it was: only what the first step has reached is trained": before,
            } | own_share_alone(before, after_steps(before, *gradients), found)
        trial.close(
            f"a parameter that backward reached in {when}",
            list(found),
            after_steps(before, *gradients),
            alternatives=known,
            help="Ask in every step which parameters have a gradient, and forget it when the step is over.",
        )


def add_later(rank: Any, start: list[Tensor], x: Tensor) -> list[Tensor] | None:
    """Two parameters after two steps; the second one's group is added between. None if that is refused."""
    parameters = [nn.Parameter(each.clone()) for each in start]
    optimizer = rank.submission.ShardedOptimizer(parameters[:1], SGD, rank.group, lr=1.0)
    for number in range(2):
        try:
            if number:
                optimizer.add_param_group({"params": parameters[1:], "lr": 0.5})
            optimizer.zero_grad()
            torch.stack([(parameter * x).sum() for parameter in parameters]).sum().backward()
            optimizer.step()
        except (ValueError, NotImplementedError):  # an optimizer that is not made of the shell may
            if not number:
                raise
            return None
    return [parameter.detach() for parameter in parameters]


@check("ShardedOptimizer", world_sizes=(2,), subgroup=False)
def a_group_may_come_later(trial: Trial) -> None:
    """A group that `add_param_group` adds after a step moves in the next one, at its own learning rate."""
    start, x = [trial.normal(7) for _ in range(2)], [trial.normal(7) for _ in range(trial.num_ranks)]
    mean = torch.stack(x).mean(0)
    results = trial.run(add_later, start, per_rank=[(each,) for each in x])
    if any(result is None for result in results):
        return
    for number, (before, found) in enumerate(zip(start, zip(*results, strict=True), strict=True)):
        trial.close(
            f"a parameter {('that was there from the start', 'of a group that was added later')[number]}",
            list(found),
            before - (2, 0.5)[number] * mean,
            alternatives={
                "it stays as it was: no step knows of a group that was added after the first one": before,
                "it moved at the first group's learning rate": before - mean,
            }
            | own_share_alone(before, before - 0.5 * mean, found)
            if number
            else {},
            help="Ask self.shares() in every step: what it was in the first is not all that is trained.",
        )


def load_between(rank: Any, start: list[Tensor], loaded: list[Tensor], x: list[Tensor]) -> dict:
    """Parameters after a step of SGD, other weights that are loaded into them, and one more step.

    And whether the first step gave them other memory.
    """
    parameters = nn.ParameterList(each.clone() for each in start)
    optimizer = rank.submission.ShardedOptimizer(parameters, SGD, rank.group, lr=1.0)
    places = [parameter.data_ptr() for parameter in parameters]
    for number, each in enumerate(x):
        if number:
            elsewhere = [parameter.data_ptr() for parameter in parameters] != places
            parameters.load_state_dict({str(i): tensor for i, tensor in enumerate(loaded)})
        optimizer.zero_grad()
        torch.stack([(parameter * each).sum() for parameter in parameters]).sum().backward()
        optimizer.step()
    return {"weights": [parameter.detach() for parameter in parameters], "elsewhere": elsewhere}


@check("ShardedOptimizer", world_sizes=(2,), subgroup=False)
def a_step_starts_from_the_weights_that_are_there(trial: Trial) -> None:
    """Where weights are loaded between two steps, the next step starts from those."""
    start, loaded = [[trial.normal(7) for _ in range(2)] for _ in range(2)]
    x = [[trial.normal(7) for _ in range(2)] for _ in range(trial.num_ranks)]
    first, second = (torch.stack(each).mean(0) for each in zip(*x, strict=True))
    results = trial.run(load_between, start, loaded, per_rank=[(each,) for each in x])
    if all(result["elsewhere"] for result in results):
        cause = "a step gives weights other memory (parameter.data = ...), and the next writes into the old"
        help = "Write what arrives into the weight itself: parameter.copy_(...), or gather into views of it."
    else:
        cause = (
            "the step started from the weights of the step before: each share is a copy, written back over "
            "what was loaded"
        )
        help = "A share lies in the weight itself: parameter.detach(), and views of it, are no copies."
    ends = zip(*(result["weights"] for result in results), strict=True)
    for before, after, found in zip(start, loaded, ends, strict=True):
        trial.close(
            "a parameter into which other weights were loaded after the first step, after the second",
            list(found),
            after - second,
            alternatives={cause: before - first - second, f"{cause}: nothing moves": after},
            help=help,
        )


LARGE_BYTES = 10 * 2**20
"""Of a parameter: two of them are in one bucket of PyTorch's 25 MiB, and the third is in the next."""


def step_large(rank: Any, gradient: float) -> dict:
    """Both ends of three parameters, after a step of SGD on gradients that are the same number everywhere.

    But for one number on rank 0, which is infinite, and whether what comes of it is finite.
    """
    parameters = [nn.Parameter(torch.zeros(LARGE_BYTES // 4, device=rank.device)) for _ in range(3)]
    optimizer = rank.submission.ShardedOptimizer(parameters, SGD, rank.group, lr=1.0)
    optimizer.zero_grad()
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, gradient)
    if rank.rank == 0:
        parameters[0].grad[1] = torch.inf
    optimizer.step()
    after = [parameter.detach() for parameter in parameters]
    ends = [torch.stack([each[0], each[-1]]) for each in after]
    return {"ends": ends, "finite": bool(after[0][1].isfinite())}


def observe_large(trial: Trial) -> list[dict]:
    return trial.run(step_large, per_rank=[(float(r + 1),) for r in range(trial.num_ranks)])


@check("ShardedOptimizer", world_sizes=(2,), subgroup=False)
def all_buckets_are_trained(trial: Trial) -> None:
    """Three parameters of 10 MiB, more than a bucket holds: a step moves every one of them, at both ends."""
    right, stayed = torch.full((2,), -(trial.num_ranks + 1) / 2), torch.zeros(2)
    ends = [[result["ends"][i] for result in trial.once(observe_large)] for i in range(3)]
    some = any(bool(end.all()) for each in ends for end in each)
    for i, each in enumerate(ends):
        trial.close(
            f"the first and the last number of parameter {i} of three of 10 MiB, after a step of SGD",
            each,
            right,
            alternatives={LEFT_OUT: stayed} if some else {},
            help="A function that is made in a loop finds the loop's variables as they are by then: "
            "hand the bucket over to it, or use what it brings in the same round.",
        )


@check("ShardedOptimizer", world_sizes=(2,), subgroup=False)
def what_is_infinite_is_not_hidden(trial: Trial) -> None:
    """A number whose gradient is infinite on one rank ends as no finite number: nothing is replaced."""
    require_shown(
        trial,
        [result["finite"] for result in trial.once(observe_large)],
        "the gradient of a number is infinite on rank 0, and a step of SGD leaves it finite",
    )


LEFT_OUT = "it did not move, and another parameter did: is it in a bucket that is left out?"


def measure(rank: Any, seed: int, steps: list[Tensor]) -> dict:
    """Two steps of AdamW and one more backward; bytes alive then, with the model and everything in it."""
    with rank.record(memory=True) as recording:
        model = build(Chain, seed).to(rank.device)
        optimizer = rank.submission.ShardedOptimizer(model.parameters(), AdamW, rank.group, lr=0.01)
        recording.mark("first step")
        for x in steps[:2]:
            optimizer.zero_grad()
            model(x)[1].backward()
            old = [weakref.ref(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None]
            optimizer.step()
            recording.mark("second step" if x is steps[0] else "over")
        optimizer.zero_grad()
        model(steps[2])[1].backward()
        settle()
        recording.mark("gradients there")
        now = {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
        held = [storage for each in old if (storage := each()) is not None and storage.data_ptr() not in now]
        state = optimizer.state_dict()
    uneven = [step_uneven(rank, sizes) for sizes in uneven_sizes(rank.num_ranks).values()]
    return {
        "recording": recording,
        "state": bytes_of_state(state),
        "old gradients": sum(storage.nbytes() for storage in held),
        "uneven": uneven,
    }


def bytes_of_state(state: dict) -> int:
    return storage_bytes(tensor for tensor in tensors_in(state) if tensor.dim() > 0)


NUM_LARGE, LARGE = 12, 512
"""Parameters of which a share by the number of parameters is no share by size, and the elements of each."""
NUM_SMALL, SMALL_ONE = 60, 63
"""Parameters that are small and many, and the elements of each: neither 2 nor 4 divides them."""
MANY_SMALL = f"{NUM_SMALL} parameters have {SMALL_ONE} numbers each"
EACH_OTHER = f"{NUM_LARGE} parameters have each another size"


def uneven_sizes(n: int) -> dict[str, list[int]]:
    """The sizes of parameters that are not dealt out evenly by their number, by shape, or if they divide."""
    num = n * NUM_LARGE
    return {
        f"of {num} parameters {NUM_LARGE} are large, the first of every {n}": (
            [LARGE, *[1] * (n - 1)] * NUM_LARGE
        ),
        f"of {num} parameters {NUM_LARGE} are large, the first {NUM_LARGE}": (
            [LARGE] * NUM_LARGE + [1] * (num - NUM_LARGE)
        ),
        MANY_SMALL: [SMALL_ONE] * NUM_SMALL,
        EACH_OTHER: [LARGE - i for i in range(NUM_LARGE)],
    }


def of_sizes(sizes: list[int]) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])


def step_uneven(rank: Any, sizes: list[int]) -> dict:
    """Bytes of AdamW's state after a step, and what the step sent."""
    parameters = of_sizes(sizes).to(rank.device)
    optimizer = rank.submission.ShardedOptimizer(parameters, AdamW, rank.group, lr=0.01)
    optimizer.zero_grad()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with rank.record() as recording:
        optimizer.step()
    return {"state": bytes_of_state(optimizer.state_dict()), "recording": recording}


def observe_memory(trial: Trial) -> SimpleNamespace:
    batches = [([trial.normal(2, 16) for _ in range(3)],) for _ in range(trial.num_ranks)]
    return SimpleNamespace(results=trial.run(measure, trial.seed(), per_rank=batches), model=build(Chain, 0))


@check("ShardedOptimizer", world_sizes=(2, 4), subgroup=False)
def state_is_that_of_a_share(trial: Trial) -> None:
    """Each rank keeps the state of its share of the weights alone: 2P/n numbers of AdamW, not 2P."""
    seen, n = trial.once(observe_memory), trial.num_ranks
    size = NUM_LAYERS * LAYER_BYTES
    share = size // n + LAYER_BYTES  # shares may differ by the largest parameter
    states = [result["state"] for result in seen.results]
    cause = ""
    if min(states) >= 2 * size:
        cause = "every rank keeps the state of every parameter"
    elif min(states) < size // n:
        cause = f"the shares are uneven: the ranks' states have {', '.join(map(str, states))} bytes"
    most = 3 * share + SMALL  # two moments, and perhaps a copy of the weights
    alive = [result["recording"].alive("gradients there") - 2 * size for result in seen.results]
    old = [result["old gradients"] for result in seen.results]
    held = all(a - o <= most for a, o in zip(alive, old, strict=True))
    for r, result in enumerate(seen.results):
        trial.require(
            result["state"] <= most,
            f"its state_dict() holds {result['state']:,} bytes. The state of all {size:,} bytes of "
            "weights is "
            f"{2 * size:,}, that of a share 1/{n} of it",
            help="Give the inner optimizer this rank's share, and return its state_dict().",
            rank=r,
            cause=cause,
        )
        trial.require(
            alive[r] <= most,
            f"after two steps, zero_grad() and one more backward, besides {size:,} bytes of weights and as "
            f"many of gradients, {alive[r]:,} bytes are alive on it, and a share of the state is "
            f"{2 * size // n:,}",
            help=WHO_HOLDS
            if held
            else "Nothing of the size of the model may stay: drop what step() made when it is over.",
            rank=r,
            cause=f"of these {old[r]:,} are gradients of the last step, which something still holds"
            if held
            else cause,
        )


WHO_HOLDS = (
    "Who does? A view of a gradient, even of none of its numbers (g[:0]), keeps all of it. Where it is a "
    "share's .grad, set that to None when step() is over."
)


@check("ShardedOptimizer", world_sizes=(2, 4), subgroup=False)
def shares_are_even_where_sizes_are_not(trial: Trial) -> None:
    """Where sizes differ, or are small or odd, no rank has more than its share and the largest parameter."""
    seen, n = trial.once(observe_memory), trial.num_ranks
    for i, (told, sizes) in enumerate(uneven_sizes(n).items()):
        size = 4 * sum(sizes)
        states = [result["uneven"][i]["state"] for result in seen.results]
        cause, help = why_uneven(told, states, 2 * size)
        for r, state in enumerate(states):
            trial.require(
                state <= 3 * (size // n + 4 * max(sizes)) + SMALL,
                f"{told}: its state_dict() holds {state:,} bytes, and the state of all {size:,} bytes of "
                f"weights is {2 * size:,}",
                help=help,
                rank=r,
                cause=cause,
            )


def why_uneven(told: str, states: list[int], whole: int) -> tuple[str, str]:
    """The cause where a rank has more than a share of these parameters' state, and what to do."""
    deal = "Deal out elements, or whole parameters to the rank that has the fewest so far."
    if min(states) >= whole:
        return (
            "every rank keeps the state of all of them",
            "Cut every parameter, whatever its size and shape: pad what n does not divide.",
        )
    if told == EACH_OTHER and states == [whole, *[0] * (len(states) - 1)]:
        return (
            "rank 0 has them all: are parameters of one shape dealt out in turns? Of each shape the first is "
            "rank 0's, and here each is the first",
            deal,
        )
    if told in (MANY_SMALL, EACH_OTHER) or min(states) == max(states):
        return "", deal
    return (
        "parameters are dealt out by their number, not by their size: the ranks' states have "
        f"{', '.join(map(str, states))} bytes",
        deal,
    )


@check("ShardedOptimizer", world_sizes=(2, 4), subgroup=False)
def two_p_elements_travel(trial: Trial) -> None:
    """A step sends as much as one reduce-scatter of the gradients and one all-gather of the weights: 2P."""
    seen = trial.once(observe_memory)
    for r, result in enumerate(seen.results):
        require_travelled(
            trial, r, result["recording"], seen.model, 2, what="backward and step", after="second step"
        )
        for uneven, (told, sizes) in zip(
            result["uneven"], uneven_sizes(trial.num_ranks).items(), strict=True
        ):
            require_travelled(trial, r, uneven["recording"], of_sizes(sizes), 2, what=f"a step, where {told}")


@check("ShardedOptimizer", world_sizes=(2, 4), subgroup=False)
def gradients_are_not_all_reduced(trial: Trial) -> None:
    """No rank gets the means of gradients that others need: they are reduced to their owners."""
    for r, result in enumerate(trial.once(observe_memory).results):
        recording, size = result["recording"], bytes_of(build(Chain, 0))
        moved = recording.bytes("all_reduce")
        reduced = sum(recording.bytes(kind) for kind in ("reduce_scatter", "reduce", "all_to_all"))
        trial.require(
            moved <= size // 4,
            f"{moved:,} bytes were all-reduced",
            help="Reduce each share to its owner alone: dist.reduce_scatter, or dist.reduce to one rank."
            if reduced < size
            else "New weights are no sum: an all-gather, or broadcasts, send half of what all-reduces do.",
            rank=r,
            cause="this is plain data parallelism's all-reduce, after which every rank has every mean"
            if reduced < size
            else "gradients are reduced to their owners already: is it new weights that are all-reduced?",
        )
