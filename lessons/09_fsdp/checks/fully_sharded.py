"""Checks of `FullySharded`: what it computes. What it keeps meanwhile is in residency.py."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from grader.checks import CheckEnded, Recording, Trial, Verdict, check, exercise
from lessons_shared.cut_gpt import local
from nanogpt.model import GPT

from .models import build, bytes_of, draw, dropping_gpt, narrow_gpt, odd_gpt, seeds, thawed_gpt, weights
from .parts import gradients_by_rank, means_by_pass, misses_last_pass, trained_on
from .runs import BY_BACKWARD, NOTHING_LEFT, require_in_evaluation, run
from .training import (
    LEARNING_RATE,
    PASSES,
    ROUNDED,
    Rule,
    expected_weights,
    mean,
    require_weights,
    rounding,
    train,
    whole_batch,
)
from .unit_hooks import FIRST_ONCE
from .wire import travelled

exercise(
    "FullySharded",
    world_sizes=(2, 1, 3, 4),
    subgroup=True,
    hints=(
        "Lay a block's weights end to end, pad to a multiple of n, and cut: one all-gather then makes the "
        "block "
        "whole, and one reduce-scatter takes its gradients back.",
        "Autograd keeps the weights that backward needs, so dropping your own reference frees nothing. "
        "Either "
        "shrink the storage (tensor.untyped_storage().resize_(0)) and fill it again before backward, or "
        "compute "
        "the block again in backward, as a checkpoint does.",
        "A hook on a block's output (output.register_hook) is called when backward is about to enter the "
        "block. "
        "By then everything behind it is done: its gradients can be reduced, and its weights freed.",
        "torch.autograd.Variable._execution_engine.queue_callback(f), called in a backward hook, has f "
        "called "
        "when this backward is over: for the token table, whose gradient comes first and last.",
        "parameters() goes through named_parameters(): yield the module's names, each with unit.shards[i] in "
        "the place of unit.parameters[i]. full_state_dict() gathers shards of unequal sizes: pad them, and "
        "cut the padding off again.",
    ),
)


TRAINED = (2, 1, 3)
"""Numbers of ranks that train the usual model. Four train one whose parameters are fewer than they are."""

RANKS_OF_ITS_OWN = (3, 2)
"""Of a check that has a run of its own: the first of these that there are."""

TWINS = ("transformer.wte.weight", "lm_head.weight")
"""The names of the tied table."""


def full(sharded: Any) -> dict[str, Tensor]:
    """The whole weights by name; a name of the tied table may be missing, if the other one is there."""
    state = {name: tensor.detach().clone() for name, tensor in sharded.full_state_dict().items()}
    for one, other in (TWINS, TWINS[::-1]):
        if one in state:
            state.setdefault(other, state[one])
    return state


def plain(params: Any, optimizer_class: Any, **settings: Any) -> Any:
    return optimizer_class(params, **settings)


def evaluate(sharded: Any, *batch: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits and loss in evaluation; then back to training."""
    sharded.eval()
    with torch.no_grad():
        outputs = sharded(*batch)
    sharded.train()
    return outputs


def train_on_ranks(rank: Any, seed: int, batches: list[tuple[Tensor, Tensor]]) -> dict:
    """Begins with this rank's own weights; rank 0's must win."""
    result = look(wrapped(rank, odd_gpt, seed), batches[0])
    sharded = wrapped(rank, odd_gpt, seed)
    train(sharded, batches, "SGD", plain)
    result["dtypes of gradients"] = dtypes_of(p.grad for p in sharded.parameters() if p.grad is not None)
    result["trained logits"] = evaluate(sharded, *batches[0])[0].clone()
    result["end"] = full(sharded)
    return result


def step_on_ranks(rank: Any, thawed: bool, seed: int, batches: list[tuple[Tensor, Tensor]]) -> dict:
    """One step of SGD: the weights after it, what it sent, and how many trained shards have no gradient."""
    sharded = wrapped(rank, thawed_gpt if thawed else odd_gpt, seed)
    with rank.record() as recording:
        train(sharded, batches, "SGD", plain, num_steps=1)
    without = sum(p.requires_grad and p.grad is None for p in sharded.parameters())
    return {"weights": full(sharded), "recording": recording, "without": without}


def dtypes_of(tensors: Iterable[Tensor]) -> list[str]:
    return sorted({str(local(tensor).dtype) for tensor in tensors})


def wrapped(rank: Any, make: Any, seed: int) -> Any:
    """On a rank: a model in the learner's class."""
    return rank.submission.FullySharded(build(make, seed, torch.float64).to(rank.device), rank.group)


def look(sharded: Any, batch: tuple[Tensor, Tensor]) -> dict:
    """What it returns before any step: outputs in evaluation and training, weights, sizes of shards."""
    tokens, targets = batch
    parameters = list(sharded.parameters())
    start, shards = full(sharded), [local(p) for p in parameters]
    logits, loss = evaluate(sharded, tokens, targets)
    last, nothing = evaluate(sharded, tokens)
    return {
        "start": start,
        "logits": logits.clone(),
        "loss": loss.clone(),
        "last": last.clone(),
        "nothing": nothing,
        "shards": [shard.numel() for shard in shards],
        "twice": len(parameters) - len(set(parameters)),
        "dtypes of parameters()": dtypes_of(shards),
        "dtypes of full_state_dict()": dtypes_of(start.values()),
    }


def observe_training(trial: Trial) -> SimpleNamespace:
    numbers, by_rank = seeds(trial), draw(trial, sum(PASSES))
    results = run(trial, train_on_ranks, per_rank=list(zip(numbers, by_rank, strict=True)))
    starts = [build(odd_gpt, number, torch.float64) for number in numbers]
    return SimpleNamespace(results=results, numbers=numbers, seed=numbers[0], by_rank=by_rank, starts=starts)


def observe_a_step(trial: Trial, thawed: bool = False) -> list[dict]:
    seen = trial.once(observe_training)
    return run(trial, step_on_ranks, thawed, per_rank=list(zip(seen.numbers, seen.by_rank, strict=True)))


def observe_a_thawed_step(trial: Trial) -> list[dict]:
    return observe_a_step(trial, thawed=True)


@check("FullySharded", world_sizes=TRAINED)
def everything_keeps_its_dtype(trial: Trial) -> None:
    """A float64 model has float64 shards, whole weights and gradients: nothing is rounded on the way."""
    seen = trial.once(observe_training)
    end = whole_batch(odd_gpt, seen.seed, seen.by_rank, "SGD", Rule())
    with torch.no_grad():
        logits = [seen.starts[0](*batches[0])[0] for batches in seen.by_rank]
    for r, result in enumerate(seen.results):
        trial.require(
            bool(result["dtypes of gradients"]),
            "after backward no parameter of parameters() has a .grad",
            help="parameters() asks named_parameters(): answer with the shards, and add to their .grad.",
            rank=r,
        )
        for what in ("parameters()", "full_state_dict()", "gradients"):
            trial.require(
                result[f"dtypes of {what}"] == ["torch.float64"],
                f"the model is in float64, and {what} in {', '.join(result[f'dtypes of {what}'])}",
                help="Take the dtype from the parameters, as tensor.new_empty(...) does.",
                rank=r,
            )
        for what, actual, expected in (
            ("the weights in full_state_dict()", result["start"], weights(seen.starts[0])),
            ("the logits", {"": result["logits"]}, {"": logits[r]}),
            (f"the weights after {len(PASSES)} steps of SGD", result["end"], end),
        ):
            error = rounding(actual, expected)
            trial.require(
                not error,
                f"the model is in float64, and {what} are off by {error:.0e} of their size: float32 rounds "
                "by 6e-08",
                help="Give every buffer the dtype of what goes into it: torch.zeros(n) is float32.",
                rank=r,
                cause=ROUNDED,
            )


def joined_from(starts: list[dict[str, Tensor]], name: str, actual: list[Any]) -> bool:
    """Whether every element is that of some rank's own weights, the same on all ranks."""
    own = torch.stack([start[name] for start in starts])
    alike = all(
        isinstance(a, Tensor) and a.shape == own.shape[1:] and torch.equal(a, actual[0]) for a in actual
    )
    return alike and bool((own == actual[0]).any(0).all())


@check("FullySharded", world_sizes=TRAINED)
def weights_are_rank_0s(trial: Trial) -> None:
    """full_state_dict() gives every rank the whole weights, under GPT's names: those rank 0 started with."""
    seen = trial.once(observe_training)
    starts = [model.state_dict() for model in seen.starts]
    for name, expected in starts[0].items():
        for r, result in enumerate(seen.results):
            trial.require(
                name in result["start"],
                f"full_state_dict() has no {name}: it has {sorted(result['start'])[:4]} and so on",
                help="Give back what GPT's own state_dict() has, gathered.",
                rank=r,
            )
        alternatives = {
            "each rank still has what it started with": [start[name] for start in starts],
            "every rank's shards are cut out of its own weights: nobody told the others rank 0's": (
                [result["start"][name] for result in seen.results]
                if joined_from(starts, name, [result["start"][name] for result in seen.results])
                else expected
            ),
        }
        trial.close(
            f"{name} in full_state_dict()",
            [result["start"][name] for result in seen.results],
            expected,
            alternatives=alternatives if trial.num_ranks > 1 else {},
            help="Broadcast from the group's rank 0 before you cut. After gathering, cut off the padding.",
        )


@check("FullySharded", world_sizes=TRAINED)
def outputs_are_the_dense_models(trial: Trial) -> None:
    """Under no_grad, in both modes, logits and loss are the dense GPT's, with and without targets."""
    seen = trial.once(observe_training)
    outputs = []
    with torch.no_grad():
        for batches in seen.by_rank:
            logits, loss = seen.starts[0](*batches[0])
            outputs.append({"logits": logits, "loss": loss, "last": seen.starts[0](batches[0][0])[0]})
    told = {"logits": "the logits", "loss": "the loss", "last": "the logits without targets"}
    for key, what in told.items():
        trial.close(
            what,
            [result[key] for result in seen.results],
            [output[key] for output in outputs],
            help="Every block needs all of its weights, from all ranks, before it computes.",
        )
    for r, result in enumerate(seen.results):
        trial.require(result["nothing"] is None, "without targets there is a loss", rank=r)
    if trial.layout.world_size == 2:
        require_in_training_mode(trial, outputs)


@torch.no_grad()
def validate(rank: Any, seed: int, tokens: Tensor, targets: Tensor) -> Tensor:
    """The logits of a forward under no_grad before which nobody has called eval()."""
    return wrapped(rank, odd_gpt, seed)(tokens, targets)[0].clone()


def require_in_training_mode(trial: Trial, outputs: list[dict[str, Tensor]]) -> None:
    """Under no_grad logits are right in training mode, where they are in evaluation mode."""
    seen = trial.once(observe_training)
    given = [(number, *batches[0]) for number, batches in zip(seen.numbers, seen.by_rank, strict=True)]
    try:
        found = run(trial, validate, per_rank=given)
        trial.close("the logits in training mode", found, [output["logits"] for output in outputs])
    except CheckEnded as end:
        end.cause = (
            "it is right in evaluation mode alone, and this is a forward under no_grad in training mode"
        )
        end.help = BY_BACKWARD
        raise


def require_another_end(trial: Trial, make: Any, kind: str, help: str, training: bool = True) -> None:
    """Another model or optimizer, in a run of its own, begins and ends as one process does."""

    def train_to_the_end(rank: Any, seed: int, batches: list) -> dict[str, Tensor]:
        sharded = wrapped(rank, make, seed).train(training)
        train(sharded, batches, kind, plain)
        return full(sharded)

    numbers, by_rank = seeds(trial), draw(trial, sum(PASSES))
    ends = run(trial, train_to_the_end, per_rank=list(zip(numbers, by_rank, strict=True)))
    seen = SimpleNamespace(seed=numbers[0], by_rank=by_rank)
    require_end(trial, ends, make, kind, help, seen)


def require_end(trial: Trial, ends: list[dict], make: Any, kind: str, help: str, seen: Any = None) -> None:
    """The ends are one process's, of what `seen` has drawn: that of the first checks if not given."""
    usual = seen is None
    seen = seen or trial.once(observe_training)
    expected = expected_weights(trial, make, seen.seed, seen.by_rank, kind)
    for r, end in enumerate(ends):
        table, head = (end.get(name) for name in TWINS)
        trial.require(
            table is None or head is None or torch.equal(table, head),
            f"after {len(PASSES)} steps of {kind} {' and '.join(TWINS)} are not the same table",
            "A tied parameter has two places and one shard: both get it, and one gradient goes back.",
            rank=r,
            cause=f"the tied table, which is {' and '.join(TWINS)}, is cut twice",
        )

    def explain() -> str:
        if make is not odd_gpt or not usual:
            return ""
        if all(result["twice"] for result in seen.results):
            return STEPPED_TWICE
        try:
            steps = trial.once(observe_a_step)
        except CheckEnded:
            return ""
        firsts = [step["weights"] for step in steps]
        if alone_stay(expected.start, firsts, inside=True):
            return STILL_WHOLE
        if all(step["without"] for step in steps) and alone_stay(expected.start, firsts, inside=False):
            return without_gradient(trial, seen.numbers[0], [step["without"] for step in steps])
        if misses_last_pass(".h.0.", expected.start, firsts, means_by_pass(odd_gpt, seen.seed, seen.by_rank)):
            return f"in the first step, of {PASSES[0]} backward passes, {FIRST_ONCE}"
        told = trained_on(expected.start, firsts, gradients_by_rank(odd_gpt, seen.seed, seen.by_rank))
        return told or ungathered(trial, seen.starts[0], [step["recording"] for step in steps])

    require_weights(trial, ends, expected, kind, help, explain)


STEPPED_TWICE = (
    "parameters() gives a shard twice, and so the optimizer steps it twice: a tied parameter has two names, "
    "of which named_parameters() leaves one out unless remove_duplicate is False"
)
STILL_WHOLE = (
    "the blocks' weights are those from before the step, and the rest moved: their shards were not updated, "
    "or the blocks were still whole from backward, and so nothing gathered them again"
)


def alone_stay(start: dict[str, Tensor], firsts: list[dict[str, Tensor]], inside: bool) -> bool:
    """Whether on all ranks a step has moved no weight inside the blocks, or outside, and others it has."""
    those, others = (
        [name for name in start if (".h." in name) == in_a_block and all(name in each for each in firsts)]
        for in_a_block in (inside, not inside)
    )
    stay, move = (
        [all(torch.equal(each[name], start[name]) for each in firsts) for name in names]
        for names in (those, others)
    )
    return all(stay) and not all(move)


def without_gradient(trial: Trial, seed: int, counts: list[int]) -> str:
    """Why weights outside the blocks did not move, where shards have no gradient: do frozen ones count?"""
    told = (
        f"the weights outside the blocks did not move: after backward {max(counts)} trained shards have no "
        ".grad"
    )
    start = build(thawed_gpt, seed, torch.float64).state_dict()
    try:
        steps = trial.once(observe_a_thawed_step)
    except CheckEnded:
        return told
    stay = alone_stay(start, [step["weights"] for step in steps], inside=False)
    if stay or any(step["without"] for step in steps):
        return told
    return (
        f"{told}. Where nothing is frozen all of them have: something waits for the gradients of frozen "
        "weights, which never come"
    )


def ungathered(trial: Trial, model: GPT, recordings: list[Recording]) -> str:
    """Whether the first step's passes gathered the blocks once, for forward, in words; else ""."""
    blocks = PASSES[0] * sum(bytes_of(block) for block in model.transformer.h)
    sent = [travelled(recording, trial.num_ranks) for recording in recordings]
    if trial.num_ranks > 1 and all(each.gathered + each.others < 1.6 * blocks for each in sent):
        return "the blocks were not gathered again for backward, which computed with what lay in their place"
    return ""


@check("FullySharded", world_sizes=TRAINED)
def sgd_trains_as_one_process_does(trial: Trial) -> None:
    """Two steps of SGD on the shards, the first of two backward passes, end at one process's weights."""
    require_end(
        trial,
        [result["end"] for result in trial.once(observe_training).results],
        odd_gpt,
        "SGD",
        "After loss.backward() the shards' .grad hold the mean over ranks, added to what was there.",
    )


@check("FullySharded", world_sizes=TRAINED)
def evaluation_after_training_is_the_dense_models(trial: Trial) -> None:
    """In evaluation after training, the logits are those of the trained GPT."""
    seen = trial.once(observe_training)
    expected = expected_weights(trial, odd_gpt, seen.seed, seen.by_rank, "SGD")
    model = build(odd_gpt, seen.seed, torch.float64)
    model.load_state_dict(expected.right, strict=False)  # the tied table has one name there
    with torch.no_grad():
        trained = [model(*batches[0])[0] for batches in seen.by_rank]
        before = [seen.starts[0](*batches[0])[0] for batches in seen.by_rank]
    trial.close(
        "the logits after training",
        [result["trained logits"] for result in seen.results],
        trained,
        alternatives={"they are those from before training": before},
        help="A step changes the shards: gather everything anew for each forward, what is outside the blocks "
        "too.",
    )


def overlap_on_ranks(rank: Any, seed: int, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The weights after a step whose two losses, and an evaluation, are computed before any backward."""
    sharded = wrapped(rank, odd_gpt, seed)
    optimizer = SGD(sharded.parameters(), lr=LEARNING_RATE)
    first = sharded(*batches[0])[1]
    evaluate(sharded, *batches[1])
    second = sharded(*batches[1])[1]
    first.backward()
    second.backward()
    optimizer.step()
    return full(sharded)


@check("FullySharded", first_of=RANKS_OF_ITS_OWN)
def another_forward_may_come_between(trial: Trial) -> None:
    """Another forward may come before a loss's backward: an evaluation, or that of a second loss."""
    numbers, by_rank = seeds(trial), draw(trial, PASSES[0])
    help = "Backward gathers whatever it uses and does not find: what lies outside the blocks, too."
    try:
        ends = run(trial, overlap_on_ranks, per_rank=list(zip(numbers, by_rank, strict=True)))
    except CheckEnded as end:
        if end.verdict == Verdict.CRASHED and NOTHING_LEFT in end.message:
            end.cause = (
                "the other forward frees what this backward uses, and the backward does not gather it again"
            )
            end.help = help
        raise
    right = whole_batch(odd_gpt, numbers[0], by_rank, "SGD", Rule(), num_steps=1)
    for name, expected in right.items():
        trial.close(
            f"{name} after a step of SGD on two losses, whose forwards, and one in evaluation, came first",
            [end.get(name) for end in ends],
            expected,
            help=help,
        )


@check("FullySharded", first_of=RANKS_OF_ITS_OWN)
def adamw_trains_as_one_process_does(trial: Trial) -> None:
    """So do two of AdamW, in evaluation mode: a tied table, frozen weights, sizes that do not divide."""
    help = "Frozen weights have no gradient, and shards that do not decay."
    require_in_evaluation(partial(require_another_end, trial, odd_gpt, "AdamW", help))


@check("FullySharded", world_sizes=(4,), subgroup=False)
def parameters_smaller_than_the_group(trial: Trial) -> None:
    """A GPT of frozen tables, whose biases have three numbers, trains the same on four ranks."""
    require_another_end(
        trial,
        narrow_gpt,
        "SGD",
        "A rank's share of a small parameter may be empty: pad what you send. Where the tables are frozen, "
        "the first block's input needs no gradient.",
    )


WHOLE_FROZEN = "the frozen parameters are whole on every rank"


def largest_of_each_unit(model: GPT) -> int:
    """The numbers of the largest parameter of each block, and of what lies outside, together."""
    outside = max(p.numel() for name, p in model.named_parameters() if ".h." not in name)
    return outside + sum(max(p.numel() for p in block.parameters()) for block in model.transformer.h)


@check("FullySharded", world_sizes=(2, 3))
def parameters_are_this_ranks_shards(trial: Trial) -> None:
    """parameters() are this rank's shards: P/n numbers, give or take the largest parameter of each unit."""
    seen, n = trial.once(observe_training), trial.num_ranks
    sizes = [p.numel() for p in seen.starts[0].parameters()]
    total = sum(sizes)
    counts = [sum(result["shards"]) for result in seen.results]
    most = total / n + largest_of_each_unit(seen.starts[0]) + n * len(sizes)
    for r, result in enumerate(seen.results):
        trial.require(
            not result["twice"],
            f"parameters() gives {result['twice']} of its shards twice",
            help="A tied parameter has two names and one shard: give it once, unless both are asked for.",
            rank=r,
        )
    for r, count in enumerate(counts):
        cause, help = "", "The optimizer must see the shards alone: replace the GPT's parameters."
        if count >= total:
            cause = "they are the whole parameters"
        if Counter(sizes) <= Counter(seen.results[r]["shards"]) and 0 < count - total <= most:
            cause += f", and besides them {count - total} numbers, as many as a share has"
            help = (
                "A GPT that is an attribute is a submodule, and parameters() goes through it, too. It asks "
                "named_parameters(): override that, to give the shards alone."
            )
        trial.require(
            count <= most,
            f"parameters() have {count} numbers on it, and the model has {total}: a share is {total / n:.0f}",
            help=help,
            rank=r,
            cause=cause,
        )
    rows = [(p.size(0), p.numel() // p.size(0)) for p in seen.starts[0].parameters()]
    padded = sum(-(-length // n) * n * width for length, width in rows) + n * len(sizes)
    frozen = sum(p.numel() for p in seen.starts[0].parameters() if not p.requires_grad)
    cause = {total - frozen: "the frozen parameters are missing", total + (n - 1) * frozen: WHOLE_FROZEN}
    trial.require(
        total <= sum(counts) <= padded,
        f"all ranks' shards together have {sum(counts)} numbers, and the model has {total}",
        help="Frozen parameters are cut as well, and stay in parameters()."
        if sum(counts) in cause
        else "Every number of the model lies in the shard of one rank, and of padding there is little.",
        cause=cause.get(sum(counts), ""),
    )


def drop(rank: Any, model_seed: int, seed: int, tokens: Tensor, targets: Tensor) -> dict:
    model = build(dropping_gpt, model_seed, torch.float64).to(rank.device)
    sharded = rank.submission.FullySharded(model, rank.group)
    optimizer = SGD(sharded.parameters(), lr=1.0)
    rank.seed(seed)
    loss = sharded(tokens, targets)[1]
    loss.backward()
    optimizer.step()
    return {"end": full(sharded)}


def observe_dropout(trial: Trial) -> SimpleNamespace:
    model_seed = trial.seed()
    numbers = seeds(trial)
    data = [batches[0] for batches in draw(trial, 1)]
    results = run(trial, drop, model_seed, per_rank=[(s, *d) for s, d in zip(numbers, data, strict=True)])
    model = build(dropping_gpt, model_seed, torch.float64).to(trial.device)
    losses = []
    gpus = range(torch.cuda.device_count()) if trial.device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        for number, batch in zip(numbers, data, strict=True):
            torch.manual_seed(number)
            losses.append(model(*(each.to(trial.device) for each in batch))[1])
    mean(losses).backward()
    SGD(model.parameters(), lr=1.0).step()
    return SimpleNamespace(results=results, expected=weights(model.cpu()))


@check("FullySharded", world_sizes=(2,), subgroup=False)
def dropout_is_the_same_in_backward(trial: Trial) -> None:
    """With dropout, gradients are those of the masks that forward drew, also if blocks are computed twice."""
    seen = trial.once(observe_dropout)
    for name, expected in seen.expected.items():
        trial.close(
            f"{name} after a step with dropout",
            [result["end"][name] for result in seen.results],
            expected,
            help="Whoever computes a block again in backward must put the random state back first.",
        )
