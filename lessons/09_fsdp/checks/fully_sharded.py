"""Checks of `FullySharded`: what it computes. What it keeps meanwhile is in check_residency."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from grader.checks import Trial, check, exercise

from .models import (
    build,
    draw,
    dropping_gpt,
    local,
    narrow_gpt,
    odd_gpt,
    seeds,
    weights,
)
from .training import PASSES, expected_weights, mean, require_weights, train

exercise(
    "FullySharded",
    world_sizes=(2, 1, 4, 3),
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
        "parameters() finds what is in module._parameters; module.weight finds module.__dict__['weight'] "
        "before "
        "that. So shards can stay registered under GPT's names while a block computes with whole weights.",
    ),
)


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

    def wrap(make: Any) -> Any:
        return rank.submission.FullySharded(build(make, seed).double().to(rank.device), rank.group)

    result = look(wrap(odd_gpt), batches[0])
    sharded = wrap(odd_gpt)
    train(sharded, batches, "SGD", plain)
    result["trained logits"] = evaluate(sharded, *batches[0])[0].clone()
    result["ends"] = {"odd_gpt SGD": full(sharded)}
    for make, kind in ((odd_gpt, "AdamW"), (narrow_gpt, "SGD")):
        sharded = wrap(make)
        train(sharded, batches, kind, plain)
        result["ends"][f"{make.__name__} {kind}"] = full(sharded)
    return result


def look(sharded: Any, batch: tuple[Tensor, Tensor]) -> dict:
    """What it returns before any step: outputs in evaluation and training, weights, sizes of shards."""
    tokens, targets = batch
    start, shards = full(sharded), [local(p).numel() for p in sharded.parameters()]
    logits, loss = evaluate(sharded, tokens, targets)
    last, nothing = evaluate(sharded, tokens)
    return {
        "start": start,
        "logits": logits.clone(),
        "loss": loss.clone(),
        "last": last.clone(),
        "nothing": nothing,
        "shards": shards,
    }


def observe_training(trial: Trial) -> SimpleNamespace:
    numbers, by_rank = seeds(trial), draw(trial, sum(PASSES))
    results = trial.run(train_on_ranks, per_rank=list(zip(numbers, by_rank, strict=True)))
    starts = [build(odd_gpt, number).double() for number in numbers]
    return SimpleNamespace(results=results, seed=numbers[0], by_rank=by_rank, starts=starts)


@check("FullySharded")
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
        alternatives = {"each rank still has what it started with": [start[name] for start in starts]}
        trial.close(
            f"{name} in full_state_dict()",
            [result["start"][name] for result in seen.results],
            expected,
            alternatives=alternatives if trial.num_ranks > 1 else {},
            help="Broadcast from the group's rank 0 before you cut. After gathering, cut off the padding.",
        )


@check("FullySharded")
def outputs_are_the_dense_models(trial: Trial) -> None:
    """In evaluation, under no_grad, logits and loss are the dense GPT's, with and without targets."""
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


def require_end(trial: Trial, make: Any, kind: str, help: str) -> None:
    seen = trial.once(observe_training)
    expected = expected_weights(trial, make, seen.seed, seen.by_rank, kind)
    ends = [result["ends"][f"{make.__name__} {kind}"] for result in seen.results]
    for r, end in enumerate(ends):
        table, head = (end.get(name) for name in TWINS)
        trial.require(
            table is None or head is None or torch.equal(table, head),
            f"after {len(PASSES)} steps of {kind} {' and '.join(TWINS)} are not the same table",
            "A tied parameter has two places and one shard: both get it, and one gradient goes back.",
            rank=r,
            cause=f"the tied table, which is {' and '.join(TWINS)}, is cut twice",
        )
    require_weights(trial, ends, expected, kind, help)


@check("FullySharded")
def sgd_trains_as_one_process_does(trial: Trial) -> None:
    """Two steps of SGD on the shards, the first of two backward passes, end at one process's weights."""
    require_end(
        trial,
        odd_gpt,
        "SGD",
        "After loss.backward() the shards' .grad hold the mean over ranks, added to what was there.",
    )


@check("FullySharded")
def evaluation_after_training_is_the_dense_models(trial: Trial) -> None:
    """In evaluation after training, the logits are those of the trained GPT."""
    seen = trial.once(observe_training)
    expected = expected_weights(trial, odd_gpt, seen.seed, seen.by_rank, "SGD")
    model = build(odd_gpt, seen.seed).double()
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


@check("FullySharded")
def adamw_trains_as_one_process_does(trial: Trial) -> None:
    """Two steps of AdamW do too: a tied table, frozen weights, sizes that do not divide."""
    require_end(trial, odd_gpt, "AdamW", "Frozen weights have no gradient, and shards that do not decay.")


@check("FullySharded")
def parameters_smaller_than_the_group(trial: Trial) -> None:
    """A GPT with biases of two numbers trains the same on more ranks than that: some have no share."""
    require_end(
        trial, narrow_gpt, "SGD", "A rank's share of a small parameter may be empty: pad what you send."
    )


@check("FullySharded", world_sizes=(2, 4, 3))
def parameters_are_this_ranks_shards(trial: Trial) -> None:
    """parameters() are this rank's shards: P/n numbers, give or take the largest parameter."""
    seen, n = trial.once(observe_training), trial.num_ranks
    sizes = [p.numel() for p in seen.starts[0].parameters()]
    total, largest = sum(sizes), max(sizes)
    counts = [sum(result["shards"]) for result in seen.results]
    for r, count in enumerate(counts):
        trial.require(
            count <= total / n + largest + n * len(sizes),
            f"parameters() have {count} numbers on it, and the model has {total}: a share is {total / n:.0f}",
            help="The optimizer must see the shards alone: replace the GPT's parameters.",
            rank=r,
            cause="they are the whole parameters" if count >= total else "",
        )
    trial.require(
        sum(counts) >= total,
        f"all ranks' shards together have {sum(counts)} numbers, and the model has {total}",
        help="Frozen parameters are cut as well, and stay in parameters().",
    )


def drop(rank: Any, model_seed: int, seed: int, tokens: Tensor, targets: Tensor) -> dict:
    model = build(dropping_gpt, model_seed).double().to(rank.device)
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
    results = trial.run(drop, model_seed, per_rank=[(s, *d) for s, d in zip(numbers, data, strict=True)])
    model = build(dropping_gpt, model_seed).double()
    losses = []
    with torch.random.fork_rng(devices=[]):
        for number, batch in zip(numbers, data, strict=True):
            torch.manual_seed(number)
            losses.append(model(*batch)[1])
    mean(losses).backward()
    SGD(model.parameters(), lr=1.0).step()
    return SimpleNamespace(results=results, expected=weights(model))


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
