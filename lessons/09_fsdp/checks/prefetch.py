"""Checks of `FullySharded` with `prefetch`: the next block's gather is under way while one computes."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Trial, check, settle

from .fully_sharded import full, plain, require_end
from .models import DEEP, build, bytes_of, deep_gpt, draw, odd_gpt, seeds
from .residency import watch
from .runs import IN_BOTH_MODES, require_in_evaluation, run
from .training import train
from .units import GATHERS, GATHERS_ALONE, ORDER_OF_HOOKS, most_ahead, num_bytes, sent_by
from .wire import SMALL, padded_bytes


def train_ahead(rank: Any, seed: int, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The weights at the end of training with prefetch."""
    model = build(odd_gpt, seed, torch.float64).to(rank.device)
    sharded = rank.submission.FullySharded(model, rank.group, prefetch=True)
    train(sharded, batches, "SGD", plain)
    return full(sharded)


@check("FullySharded", first_of=(3, 2))
def prefetch_changes_no_number(trial: Trial) -> None:
    """With prefetch, two steps of SGD end at one process's weights, also on a network that takes its time."""
    numbers, by_rank = seeds(trial), draw(trial, 3)
    per_rank = list(zip(numbers, by_rank, strict=True))
    ends = run(trial, train_ahead, per_rank=per_rank, delays=True)
    seen = SimpleNamespace(seed=numbers[0], by_rank=by_rank)
    require_end(trial, ends, odd_gpt, "SGD", "A block waits for its own gather before it computes.", seen)


def step_ahead(rank: Any, training: bool, seed: int, batch: tuple[Tensor, Tensor]) -> dict:
    """The second step with prefetch: what was gathered by when, and what was alive."""
    with rank.record(memory=True) as recording:
        model = build(deep_gpt, seed).to(rank.device)
        phase = watch(model, recording)
        phase[0] = ""
        sharded = rank.submission.FullySharded(model, rank.group, prefetch=True).train(training)
        del model
        sharded(*batch)[1].backward()
        for shard in sharded.parameters():
            shard.grad = None
        settle()
        phase[0] = "forward"
        recording.mark("step")
        sharded(*batch)[1].backward()
    return {"recording": recording}


def observe(trial: Trial, training: bool = False) -> SimpleNamespace:
    batch = (trial.tokens(DEEP.vocab_size, 1, 2), trial.tokens(DEEP.vocab_size, 1, 2))
    model = build(deep_gpt, 0)
    block = bytes_of(model.transformer.h[0])
    return SimpleNamespace(
        results=run(trial, step_ahead, training, trial.seed(), batch),
        block=block,
        outside=bytes_of(model) - DEEP.n_layer * block,
        share=padded_bytes(model, trial.num_ranks) // trial.num_ranks,
    )


@check("FullySharded", first_of=(2, 3))
def prefetch_gathers_one_block_ahead(trial: Trial) -> None:
    """With prefetch, when a block computes, the gather of the next one has started, and no further one."""
    require_in_evaluation(
        lambda training: require_one_ahead(trial, observe(trial, training)), "a step", IN_BOTH_MODES
    )


def require_one_ahead(trial: Trial, seen: Any) -> None:
    for r, result in enumerate(seen.results):
        recording = result["recording"]
        came, was_due = 0.0, 0
        for way, first in (("forward", 0), ("backward", DEEP.n_layer)):
            for turn in range(DEEP.n_layer):
                number = turn if way == "forward" else DEEP.n_layer - 1 - turn
                due = first + min(turn + 2, DEEP.n_layer)
                sent = sent_by(recording, f"{way} {number}", GATHERS)
                before = sent_by(recording, "step", GATHERS)
                blocks = (num_bytes(sent) - num_bytes(before)) / seen.block
                trial.require(
                    blocks >= 0.9 * due,
                    f"in the {way} of block {number}, {blocks:.2g} blocks were gathered or on their way in "
                    f"this step, and {due} are due",
                    help="Start the next block's gather right after this one's.",
                    rank=r,
                    cause="the next gather starts when its own block is due"
                    if blocks >= 0.9 * due - 1
                    else "",
                )
                alone = [e for e in sent if e.kind in GATHERS_ALONE]
                blocks = num_bytes(alone) / seen.block - num_bytes(before) / seen.block
                ends = seen.outside / seen.block if turn == 0 else 0.0  # backward may gather them again
                trial.require(
                    blocks - came <= 1.15 * (due - was_due) + 0.5 + ends,
                    f"in the {way} of block {number}, {blocks - came:.2g} blocks have been sent for since "
                    f"the block before computed, and {due - was_due} should have been",
                    help="One block ahead, and no more: each takes memory.",
                    rank=r,
                    cause=f"a block is sent for that this {way} has no use for: there is none to come"
                    if due == was_due
                    else "",
                )
                came, was_due = blocks, due
        last = f"forward {DEEP.n_layer - 1}"
        events = [e for e in recording.events if e.after == last or e.after.startswith("backward")]
        most = (most_ahead(events) - 2 * seen.outside) / seen.block
        trial.require(
            most <= 2.5,
            f"in backward there is a moment at which {most:.3g} blocks are gathered and not reduced yet: two "
            "should be, the one that computes and the next",
            help=f"Reduce and free the block behind before you send for one more. {ORDER_OF_HOOKS}",
            rank=r,
            cause="a block is sent for before the one behind is reduced and freed",
        )
        for number in range(DEEP.n_layer):
            alive = recording.alive(f"forward {number}") - seen.share - 2 * seen.outside
            trial.require(
                alive <= 0.65 * DEEP.n_layer * seen.block + SMALL,  # two in buffers, in tensors, in gloo's
                f"in the forward of block {number} {alive / seen.block:.1f} blocks are alive on it",
                help="Free a block after its forward: two at most are whole, or on their way.",
                rank=r,
            )
