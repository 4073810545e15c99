"""Checks of `fully_shard_gpt`: PyTorch's own, a unit for each block."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD

from grader.checks import CheckEnded, Trial, Verdict, check, exercise, settle
from lessons_shared.cut_gpt import local

from .models import DEEP, build, bytes_of, deep_gpt, draw, odd_gpt
from .training import PASSES, expected_weights, require_weights, train
from .wire import SMALL, padded_bytes

exercise(
    "fully_shard_gpt",
    world_sizes=(2, 3),
    subgroup=True,
    hints=(
        "from torch.distributed.fsdp import fully_shard: it changes the module that it is given, in place.",
        "What a call on a module finds in no unit yet becomes one unit. So first every block, then the "
        "model.",
    ),
)


def mesh_of(rank: Any) -> DeviceMesh:
    return DeviceMesh.from_group(rank.group, rank.device.type)


def run(trial: Trial, function: Any, *args: Any, **kwargs: Any) -> list[dict]:
    """Runs a function on the ranks; a crash over how units were made is told as that."""
    try:
        return trial.run(function, *args, **kwargs)
    except CheckEnded as end:
        if end.verdict == Verdict.CRASHED and "Invariant encountered" in end.message:
            end.cause = "the model was sharded before its blocks: blocks first, the model last"
        elif end.verdict == Verdict.CRASHED and "managed by another FSDP group" in end.message:
            end.cause = (
                "a tied parameter has two places, in two calls' units: the token table is the embedding and "
                "the head"
            )
            end.help = (
                "Call fully_shard on the blocks, and then on the model: all that lies outside the blocks is "
                "one unit, with both places in it."
            )
        raise


def train_on_ranks(rank: Any, seed: int, batches: list[tuple[Tensor, Tensor]]) -> dict:
    model = build(odd_gpt, seed, torch.float64).to(rank.device)
    sharded = rank.submission.fully_shard_gpt(model, mesh_of(rank))
    train(sharded, batches, "SGD", lambda params, optimizer_class, **k: optimizer_class(params, **k))
    named = dict(sharded.named_parameters())
    gathered = {n: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for n, p in named.items()}
    return {
        "end": {name: tensor.clone() for name, tensor in gathered.items()},
        "same": sharded is model,
        "whole": [name for name, parameter in named.items() if not hasattr(parameter, "to_local")],
        "sharded": any(hasattr(parameter, "to_local") for parameter in model.parameters()),
    }


def observe_training(trial: Trial) -> SimpleNamespace:
    seed, by_rank = trial.seed(), draw(trial, sum(PASSES))
    results = run(trial, train_on_ranks, seed, per_rank=[(batches,) for batches in by_rank])
    return SimpleNamespace(results=results, seed=seed, by_rank=by_rank)


@check("fully_shard_gpt")
def the_given_model_is_returned(trial: Trial) -> None:
    """What is returned is the given model itself, changed in place, with GPT's parameters and no other."""
    names = [name for name, _ in build(odd_gpt, 0).named_parameters()]
    for r, result in enumerate(trial.once(observe_training).results):
        trial.require(
            result["same"],
            "what it returns is not the model that it was given",
            help="fully_shard changes a module in place: return the same one.",
            rank=r,
            cause="" if result["sharded"] else "a copy was sharded, and the caller's model is as it was",
        )
        strange = sorted(set(result["end"]) - set(names))
        trial.require(
            not strange,
            f"there is a parameter {', '.join(strange)}, which the given GPT does not have",
            help="Leave the parameters as they are: fully_shard keeps a tied one tied.",
            rank=r,
            cause="the tied table was made two parameters" if "lm_head.weight" in strange else "",
        )


@check("fully_shard_gpt")
def trains_as_one_process_does(trial: Trial) -> None:
    """Two steps of SGD end at the weights of one process with the whole batch, under GPT's names."""
    seen = trial.once(observe_training)
    expected = expected_weights(trial, odd_gpt, seen.seed, seen.by_rank, "SGD")
    ends = [result["end"] for result in seen.results]
    whole = seen.results[0]["whole"]

    def explain() -> str:
        if not whole or not all(result["sharded"] for result in seen.results):
            return ""
        return (
            f"{whole[0]} is in no unit, and so whole on every rank, with a gradient that nobody averages "
            f"({len(whole)} such parameters)"
        )

    help = "fully_shard averages the gradients of what is in a unit: the blocks first, then the model."
    require_weights(trial, ends, expected, "SGD", help, explain)


def measure(rank: Any, seed: int, batch: tuple[Tensor, Tensor]) -> dict:
    from torch.distributed.fsdp import FSDPModule  # a second's work, which the judge does not need

    with rank.record(memory=True) as recording:
        model = build(deep_gpt, seed).to(rank.device)
        sharded = rank.submission.fully_shard_gpt(model, mesh_of(rank))
        optimizer = SGD(sharded.parameters(), lr=0.1)
        optimizer.zero_grad()
        recording.mark("forward")
        _, loss = sharded(*batch)
        settle()
        recording.mark("backward")
        loss.backward()
        recording.mark("after")
    shards = {name: local(p).numel() for name, p in sharded.named_parameters()}
    units = [number for number, block in enumerate(sharded.transformer.h) if isinstance(block, FSDPModule)]
    whole = len(units) == len(sharded.transformer.h) and isinstance(sharded, FSDPModule)
    return {"recording": recording, "shards": shards, "units": units, "all are units": whole}


def observe_units(trial: Trial) -> SimpleNamespace:
    batch = (trial.tokens(DEEP.vocab_size, 1, 2), trial.tokens(DEEP.vocab_size, 1, 2))
    return SimpleNamespace(results=run(trial, measure, trial.seed(), batch), model=build(deep_gpt, 0))


@check("fully_shard_gpt", world_sizes=(2,), subgroup=False)
def every_parameter_is_sharded(trial: Trial) -> None:
    """Every parameter is cut over the ranks of the mesh: those of the blocks and those outside."""
    seen, n = trial.once(observe_units), trial.num_ranks
    for r, result in enumerate(seen.results):
        for name, parameter in seen.model.named_parameters():
            trial.require(name in result["shards"], f"there is no parameter {name}", rank=r)
            rows = -(-parameter.size(0) // n)
            most = rows * (parameter.numel() // parameter.size(0))
            trial.require(
                result["shards"][name] <= most,
                f"{name} has {result['shards'][name]} of its {parameter.numel()} numbers on this rank, "
                "and a share "
                f"over {n} ranks is {most}",
                help="Shard the blocks first, then the model: what is left is its own unit. Hand mesh= on.",
                rank=r,
                cause="it is whole" if result["shards"][name] == parameter.numel() else "",
            )


@check("fully_shard_gpt", world_sizes=(2,), subgroup=False)
def a_block_is_a_unit(trial: Trial) -> None:
    """Forward gathers block by block: one all-gather for each block, and one for what lies outside them."""
    seen, n = trial.once(observe_units), trial.num_ranks
    block = seen.model.transformer.h[0]
    size, padded = bytes_of(block), padded_bytes(block, n)
    outside = padded_bytes(seen.model, n) - DEEP.n_layer * padded
    for r, result in enumerate(seen.results):
        sizes = [e.num_bytes for e in result["recording"].select("all_gather", after="forward")]
        missing = [f"transformer.h.{i}" for i in range(DEEP.n_layer) if i not in result["units"]]
        joined = [k for each in sizes for k in range(2, DEEP.n_layer + 1) if k * size <= each <= k * padded]
        in_lists = f"a list of {joined[0]} blocks was given to fully_shard" if joined else ""
        trial.require(
            sum(size <= each <= padded for each in sizes) == DEEP.n_layer,
            f"forward gathers {told(sizes)} bytes, and {DEEP.n_layer} blocks have {size:,} each",
            help="Call fully_shard once on each block of model.transformer.h, not on its parts, and then on "
            "the model.",
            rank=r,
            cause="the model is one unit: all of it is gathered at once"
            if max(sizes, default=0) >= bytes_of(seen.model)
            else f"{', '.join(missing)} has no call of its own"
            if missing
            else f"{in_lists}, which makes one unit of it: they are gathered together"
            if sum(joined) == DEEP.n_layer
            else "",
        )
        trial.require(
            len(sizes) == DEEP.n_layer + 1 and min(sizes) <= outside,
            f"forward gathers {told(sizes)} bytes: {DEEP.n_layer} blocks, and what lies outside them is one "
            "unit more",
            help="One fully_shard call for each block, and one for the model.",
            rank=r,
        )


def told(sizes: list[int]) -> str:
    """Such as "10 times 13,120 and once 1,472"."""
    counts = {size: sizes.count(size) for size in sorted(set(sizes), reverse=True)}
    words = [f"{'once' if count == 1 else f'{count} times'} {size:,}" for size, count in counts.items()]
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1] if words else "no"


@check("fully_shard_gpt", world_sizes=(2,), subgroup=False)
def blocks_are_freed_after_forward(trial: Trial) -> None:
    """Blocks are freed after forward and gathered again for backward."""
    seen = trial.once(observe_units)
    for r, result in enumerate(seen.results):
        gathered = result["recording"].bytes("all_gather", after="backward")
        blocks = DEEP.n_layer * bytes_of(seen.model.transformer.h[0])
        trial.require(
            gathered >= 0.97 * blocks,
            f"backward gathers {gathered:,} bytes, and all blocks are {blocks:,}",
            help="Leave reshard_after_forward out: by default fully_shard frees every unit after forward but "
            "the outermost."
            if result["all are units"]
            else "By default fully_shard frees every unit after forward but the outermost, which stays "
            "gathered: call it on the blocks, and then on the model as well.",
            rank=r,
            cause="the weights stay from forward to backward, as in ZeRO-2"
            if gathered < blocks / 2
            else "a block stays gathered from forward to backward",
        )


@check("fully_shard_gpt", world_sizes=(2,), subgroup=False)
def gradients_are_reduce_scattered(trial: Trial) -> None:
    """Gradients are reduce-scattered, P elements in all; there is no all-reduce."""
    seen, n = trial.once(observe_units), trial.num_ranks
    size = bytes_of(seen.model)
    for r, result in enumerate(seen.results):
        reduced = result["recording"].bytes("reduce_scatter", after="backward")
        all_reduced = result["recording"].bytes("all_reduce")
        trial.require(
            all_reduced <= SMALL,
            f"{all_reduced:,} bytes were all-reduced",
            help="This is fully_shard's work: no DistributedDataParallel, and no all-reduce by hand.",
            rank=r,
        )
        trial.require(
            0.95 * size <= reduced <= padded_bytes(seen.model, n) + n * 1024,
            f"{reduced:,} bytes of gradients were reduce-scattered, and there are {size:,}",
            help="Every parameter belongs to exactly one unit.",
            rank=r,
        )
