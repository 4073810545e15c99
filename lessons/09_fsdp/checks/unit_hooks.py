"""Checks of `gather_in_forward` and `gather_in_backward`: when a block's weights come and go."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import Fault, Trial, check, exercise, is_close, settle

from .models import build
from .runs import IN_THE_SECOND, require_in_evaluation, run
from .units import (
    GATHERS,
    IDLE,
    NUM_BLOCKS,
    ORDER_OF_HOOKS,
    REDUCES,
    WIDTH,
    ask_when,
    bytes_of_block,
    chain,
    most_ahead,
    num_bytes,
    sent_by,
    still_whole,
    watch,
    whole_gradients,
)
from .wire import SMALL

STEPS = ("ShardedUnit", "reduce_gradients", "gather_in_forward", "gather_in_backward")

exercise(
    "gather_in_forward",
    world_sizes=(2, 1, 3),
    subgroup=True,
    uses=STEPS[:1],
    hints=(
        "block.register_forward_pre_hook(f) calls f(block, args) before each forward.",
        "block.register_forward_hook(f) calls f(block, args, output) after it. What f returns, unless it is "
        "None, replaces the output.",
    ),
)
exercise(
    "gather_in_backward",
    world_sizes=(2, 1, 3),
    subgroup=True,
    uses=STEPS[:3],
    hints=(
        "In a forward hook, x.register_hook(f) has f(gradient) called when the gradient of the block's "
        "output is complete: backward is about to enter the block. Under no_grad, x has no gradient to "
        "wait for.",
        "By then everything that the block after it has to do is done: reduce and free that one, then gather "
        "this one. Remember in a list which one is at work.",
        "Nothing enters the block before the first. "
        "torch.autograd.Variable._execution_engine.queue_callback(f), called from a hook, has f called when "
        "this backward is over.",
    ),
)


def step_on_ranks(
    rank: Any,
    depth: int,
    training: bool,
    frozen: int | None,
    seed: int,
    batches: list[tuple[Tensor, Tensor]],
) -> dict:
    """A forward of blocks under no_grad, then passes through them: what came out, and what happened when.

    One of them may be frozen.
    The mode is the caller's until all is recorded, and training mode in the second pass.
    """
    submission, whole = rank.submission, {}

    def pause(mark: str) -> None:
        settle()
        whole[mark] = still_whole(blocks, units, size)
        recording.mark(mark)

    with rank.record(memory=True) as recording:
        blocks = build(chain, seed, torch.float64).to(rank.device).train(training)
        size = bytes_of_block(blocks[0])
        if frozen is not None:
            blocks[frozen].requires_grad_(False)
        units = [submission.ShardedUnit(block.parameters(), rank.group) for block in blocks]
        asked = ask_when(units, recording) if depth >= 3 else []
        for block, unit in zip(blocks, units, strict=True):
            submission.gather_in_forward(block, unit)
        if depth >= 2:
            submission.gather_in_backward(list(blocks), units)
        if depth >= 3:
            submission.gather_ahead(list(blocks), units)
        pause("at rest")
        handles = watch(blocks, recording, "evaluation")
        with torch.no_grad():
            evaluated = blocks(batches[0][0]).clone()
        for handle in handles:
            handle.remove()
        pause("evaluated")
        for unit in units:
            with torch.no_grad():
                for shard in unit.shards:
                    shard.mul_(0.5)
        handles = watch(blocks, recording)
        output = blocks(batches[0][0])
        pause("between")
        if depth >= 2:
            (output * batches[0][1]).sum().backward()
        result = output.detach().clone()
        del output
        pause("after")
    for handle in handles:
        handle.remove()
    gradients: list[Tensor] = []
    blocks.train()
    if depth >= 2:
        pass_again(blocks, *batches[1])
        gradients = whole_gradients(units)
    return {
        "evaluated": evaluated,
        "output": result,
        "gradients": gradients,
        "recording": recording,
        "asked": asked,
        "whole": whole,
    }


def pass_again(blocks: nn.Sequential, x: Tensor, upstream: Tensor) -> None:
    """A second forward and backward; where it alone crashes, that is told."""
    try:
        (blocks(x) * upstream).sum().backward()
    except RuntimeError as error:
        error.add_note(IN_THE_SECOND)
        raise


def observe(trial: Trial, depth: int, training: bool = False, frozen: int | None = None) -> SimpleNamespace:
    n = trial.num_ranks
    numbers = [trial.seed() for _ in range(n)]
    batches = [[(trial.normal(2, WIDTH, dtype=torch.float64), trial.normal(2, WIDTH, dtype=torch.float64))
                for _ in range(2)] for _ in range(n)]  # fmt: skip
    per_rank = list(zip(numbers, batches, strict=True))
    results = run(trial, step_on_ranks, depth, training, frozen, per_rank=per_rank)
    before, model = (build(chain, numbers[0], torch.float64) for _ in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    outputs, gradients = [], []
    for own in batches:
        outputs.append(model(own[0][0]).detach())
        by_pass = []
        for x, upstream in own:
            model.zero_grad()
            (model(x) * upstream).sum().backward()
            by_pass.append(
                [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            )
        gradients.append(by_pass)
    with torch.no_grad():
        evaluated = [before(own[0][0]) for own in batches]
        stale = [before(own[0][0]) for own in batches]
        first_is_stale = [model[1:](before[0](own[0][0])) for own in batches]
    block = bytes_of_block(model[0])
    return SimpleNamespace(
        results=results,
        evaluated=evaluated,
        outputs=outputs,
        stale=stale,
        first_is_stale=first_is_stale,
        gradients=gradients,
        names=[name for name, _ in model.named_parameters()],
        block=block,
        share=NUM_BLOCKS * (block // n + 64 * n),
    )


def observe_forward(trial: Trial) -> SimpleNamespace:
    return observe(trial, 1)


def observe_forward_in_training(trial: Trial) -> SimpleNamespace:
    return observe(trial, 1, training=True)


def observe_backward(trial: Trial) -> SimpleNamespace:
    return observe(trial, 2)


def observe_backward_in_training(trial: Trial) -> SimpleNamespace:
    return observe(trial, 2, training=True)


STALE_KEPT = "it is that of the weights before: the forward under no_grad has not freed them"


def require_outputs(trial: Trial, seen: Any) -> None:
    help = "Every block needs its whole weights, as the shards are by then, before it computes."
    trial.close(
        "the output of the blocks under no_grad",
        [result["evaluated"] for result in seen.results],
        seen.evaluated,
        help=help,
    )
    kept = all(
        result["recording"].alive("evaluated") - seen.share > NUM_BLOCKS * seen.block / 2
        for result in seen.results
    )
    trial.close(
        "the output of the blocks, all shards having been multiplied by 0.5,",
        [result["output"] for result in seen.results],
        seen.outputs,
        alternatives={
            STALE_KEPT if kept else "it is that of the weights before": Fault(
                seen.stale,
                "unit.free() after each forward, also where no gradient is computed." if kept else "",
            ),
            "block 0 computes with its weights of before: the forward before has left them gathered": Fault(
                seen.first_is_stale, "Free all that is gathered, and gather nothing after the last block."
            ),
        },
        help=help,
    )


FIRST_ALONE = (
    "block 0 alone is not reduced: backward enters no block after it, and its input needs no gradient, so "
    "what waits for either never runs"
)


FIRST_ONCE = (
    "block 0 alone misses the last backward's: nothing has reduced it when that was over. A callback that is "
    "queued for the end of a backward is called once, and has to be queued in each"
)


IDLE_ALONE = (
    f"block {IDLE} alone is not reduced, and it alone has a weight that its forward does not use: no "
    "gradient of that comes, and what waits for all gradients of a block never runs"
)


def is_alone(seen: Any, block: int, passes: int) -> bool:
    """Whether this block's shards have the gradient of so many backward passes, and the others of all."""
    for i, name in enumerate(seen.names):
        own = torch.stack([torch.stack([by_pass[i] for by_pass in each]) for each in seen.gradients])
        expected = own[:, : passes if name.startswith(f"{block}.") else None].sum(1).mean(0)
        if not all(is_close(result["gradients"][i], expected) for result in seen.results):
            return False
    return True


def require_gradients(trial: Trial, seen: Any) -> None:
    n = trial.num_ranks
    nothing = "nothing was reduced into the shards"
    for block, told in ((0, FIRST_ALONE), (IDLE, IDLE_ALONE)):
        nothing = told if is_alone(seen, block, 0) else nothing
    last_missing = FIRST_ONCE if is_alone(seen, 0, 1) else "the last backward's is missing"
    for i, name in enumerate(seen.names):
        own = torch.stack([torch.stack([by_pass[i] for by_pass in each]) for each in seen.gradients])
        alternatives = {  # (n, 2, ...)
            "the first backward's is lost": own[:, 1].mean(0),
            last_missing: own[:, 0].mean(0),
            "the first backward's counts twice": (2 * own[:, 0] + own[:, 1]).mean(0),
            nothing: torch.zeros_like(own[0, 0]),
        }
        if n > 1:
            alternatives["it is the sum of the ranks' gradients"] = own.sum(1).sum(0)
        trial.close(
            f"the gradient of {name} (of {NUM_BLOCKS} blocks) after two backward passes",
            [result["gradients"][i] for result in seen.results],
            own.sum(1).mean(0),
            alternatives=alternatives,
            help="Every block's gradients are reduced once in each backward, the first block's at its end.",
        )


def in_blocks(seen: Any, size: float) -> str:
    return f"{size:,.0f} bytes, as much as {size / seen.block:.1f} of {NUM_BLOCKS} blocks,"


KEPT_FOR_BACKWARD = (
    "no block was freed, and under no_grad all were: a block is freed after every forward, also where its "
    "backward is still to come, which gathers it again"
)


def require_freed(trial: Trial, seen: Any, moments: dict[str, str], shares: int, help: str) -> None:
    """At these moments, no more is alive than shares, and what a few small activations take."""
    for r, result in enumerate(seen.results):
        for when, told in moments.items():
            alive = result["recording"].alive(when) - shares * seen.share
            whole = result["whole"][when]
            trial.require(
                alive <= (0.3 if whole else 0.7) * seen.block + SMALL,
                f"{told} {in_blocks(seen, alive)} are alive on it besides its share",
                help=help,
                rank=r,
                cause=(KEPT_FOR_BACKWARD if when == "between" else "no block was freed")
                if alive > (NUM_BLOCKS - 1) * seen.block / 2
                else tell_whole(result["whole"], when),
            )


def tell_whole(whole: dict[str, dict[int, bool]], when: str) -> str:
    """Which blocks are whole, and since when; of one that backward has gathered, whether it was reduced."""
    numbers = list(whole[when])
    if not numbers:
        return ""
    one = len(numbers) == 1
    told = f"block {numbers[0]} is" if one else f"blocks {', '.join(map(str, numbers))} are"
    if when != "after":
        return f"{told} still whole"
    if whole["between"].keys() & numbers:
        return f"{told} still whole, as after forward"
    told = f"{told} still whole, since backward has gathered {'it' if one else 'them'}"
    if not one:
        return told
    return f"{told}. Its gradients were {'' if whole[when][numbers[0]] else 'not '}reduced"


@check("gather_in_forward")
def outputs_are_the_dense_blocks(trial: Trial) -> None:
    """The blocks compute what they do with the whole weights, each time with those of the shards by then."""
    require_in_evaluation(
        lambda training: require_outputs(
            trial, trial.once(observe_forward_in_training if training else observe_forward)
        ),
        "a forward",
        "Free after each forward, whatever block.training is.",
    )


@check("gather_in_forward", world_sizes=(2, 3), subgroup=False)
def a_forward_leaves_nothing_whole(trial: Trial) -> None:
    """Before, between and after forwards, no block is whole: only shards and activations are alive."""
    moments = {
        "at rest": "before the first forward",
        "evaluated": "after a forward under no_grad",
        "between": "after a forward, before backward",
    }
    help = "unit.free() in a forward hook of the block."
    require_freed(trial, trial.once(observe_forward), moments, 1, help)


@check("gather_in_forward", world_sizes=(2, 3), subgroup=False)
def a_block_is_gathered_when_it_computes(trial: Trial) -> None:
    """Each forward gathers every block once, right before it computes: not all of them first."""
    seen = trial.once(observe_forward)
    for r, result in enumerate(seen.results):
        recording = result["recording"]
        early = num_bytes(e for e in recording.select() if e.after == "" and e.kind == "all_gather")
        trial.require(
            early <= SMALL,
            f"{early:,} bytes of weights were gathered before any forward",
            help="The hooks gather, each time: there is nothing to gather when they are registered.",
            rank=r,
        )
        before = num_bytes(sent_by(recording, "evaluated", GATHERS)) - num_bytes(
            sent_by(recording, "at rest", GATHERS)
        )
        for number in range(NUM_BLOCKS):
            mark = f"forward {number}"
            moved = num_bytes(sent_by(recording, mark, GATHERS)) - num_bytes(
                sent_by(recording, "evaluated", GATHERS)
            )
            trial.require(
                0.9 * (number + 1) <= moved / seen.block <= 1.3 * (number + 1) + 0.5,
                f"when block {number} computes, {moved / seen.block:.2g} blocks have been gathered in this "
                f"forward, and {number + 1} are due",
                help="A forward pre-hook on each block gathers the unit of that block.",
                rank=r,
            )
        trial.require(
            0.9 <= before / (NUM_BLOCKS * seen.block) <= 1.3,
            f"a forward gathered {before / seen.block:.2g} blocks, and there are {NUM_BLOCKS}",
            rank=r,
        )


@check("gather_in_backward")
def shards_have_the_mean_gradients(trial: Trial) -> None:
    """After backward the shards' `.grad` are the means over the ranks; two backward passes add up."""

    def require(training: bool) -> None:
        seen = trial.once(observe_backward_in_training if training else observe_backward)
        require_outputs(trial, seen)
        require_gradients(trial, seen)

    require_in_evaluation(require)
    for r, result in enumerate(fine_tune(trial, 2)):
        missing = [i for i in range(NUM_FROZEN, NUM_BLOCKS) if not result["reduced"][i]]
        trial.require(
            not missing,
            f"the first {NUM_FROZEN} of {NUM_BLOCKS} blocks are frozen: after backward the shards of block "
            f"{', '.join(map(str, missing))} have no .grad",
            help="Have what is left reduced and freed when backward is over, whichever block it ended in.",
            rank=r,
            cause=f"backward ends in block {NUM_FROZEN}, and what reduces the last block waits for block 0"
            if missing == [NUM_FROZEN]
            else "",
        )


HALF = NUM_BLOCKS // 2


def half_way(rank: Any, seed: int, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """The gradients of the first blocks after backward from what comes out of them, and not of the last."""
    submission = rank.submission
    blocks = build(chain, seed, torch.float64).to(rank.device)
    units = [submission.ShardedUnit(block.parameters(), rank.group) for block in blocks]
    for block, unit in zip(blocks, units, strict=True):
        submission.gather_in_forward(block, unit)
    submission.gather_in_backward(list(blocks), units)
    output = blocks[:HALF](x)
    blocks[HALF:](output.detach())
    (output * upstream).sum().backward()
    return whole_gradients(units[:HALF])


@check("gather_in_backward", world_sizes=(2,), subgroup=False)
def backward_may_begin_half_way(trial: Trial) -> None:
    """Backward from the output of an earlier block, as of a loss of its own, reduces all that it reaches."""
    seed = trial.seed()
    batches = [[trial.normal(2, WIDTH, dtype=torch.float64) for _ in range(2)] for _ in range(2)]
    found = trial.run(half_way, seed, per_rank=batches)
    model = build(chain, seed, torch.float64)[:HALF]
    for x, upstream in batches:
        (model(x) * upstream).sum().backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad / 2 for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    first_alone = all(
        is_close(result[i], 0 * each if name.startswith("0.") else each)
        for result in found
        for i, (name, each) in enumerate(zip(names, expected, strict=True))
    )
    cause = (
        "that block, the last that this backward enters, was not reduced: what comes when it is over was "
        "asked for by the last block of all, which it does not enter"
    )
    for i, name in enumerate(names):
        trial.close(
            f"the gradient of {name}, whose block is first in its name, after backward from the output of "
            f"block {HALF - 1} of {NUM_BLOCKS}",
            [result[i] for result in found],
            expected[i],
            alternatives={cause: torch.zeros_like(expected[i])} if first_alone else {},
            help="Ask for it in whichever block backward enters: queue_callback from each does no harm.",
        )


@check("gather_in_backward", world_sizes=(2, 3), subgroup=False)
def backward_holds_one_block_at_a_time(trial: Trial) -> None:
    """Where backward computes, one block is whole, with its gradients: those behind are reduced and freed."""
    require_backward(trial, trial.once(observe_backward), ahead=0)


@check("gather_in_backward", world_sizes=(2, 3), subgroup=False)
def backward_leaves_shards_and_gradients(trial: Trial) -> None:
    """When backward is over, shards and their gradients are alive, and nothing else: no block is left."""
    help = (
        "The last block that backward is in has no next one: queue_callback has its turn when all is over. "
        "Reduce it there, and free it."
    )
    require_freed(trial, trial.once(observe_backward), {"after": "after backward"}, 2, help)


NUM_FROZEN = 4
"""Of the blocks, where only the last are trained."""


def fine_tune_on_ranks(rank: Any, depth: int, seed: int, x: Tensor) -> dict:
    """A forward and a backward through blocks of which only the last are trained."""
    submission = rank.submission
    with rank.record(memory=True) as recording:
        blocks = build(chain, seed, torch.float64).to(rank.device)
        blocks[:NUM_FROZEN].requires_grad_(False)
        units = [submission.ShardedUnit(block.parameters(), rank.group) for block in blocks]
        for block, unit in zip(blocks, units, strict=True):
            submission.gather_in_forward(block, unit)
        submission.gather_in_backward(list(blocks), units)
        if depth >= 3:
            submission.gather_ahead(list(blocks), units)
        settle()
        recording.mark("before")
        blocks(x).square().sum().backward()
        settle()
        recording.mark("after")
    reduced = [any(shard.grad is not None for shard in unit.shards) for unit in units]
    return {"recording": recording, "reduced": reduced}


def fine_tune(trial: Trial, depth: int) -> list[dict]:
    return run(trial, fine_tune_on_ranks, depth, trial.seed(), trial.normal(2, WIDTH, dtype=torch.float64))


def require_backward(trial: Trial, seen: Any, ahead: int) -> None:
    """What is whole at each block's backward, what was gathered, and what was reduced by then."""
    for r, result in enumerate(seen.results):
        recording = result["recording"]
        for number in reversed(range(NUM_BLOCKS)):
            mark, behind = f"backward {number}", NUM_BLOCKS - 1 - number
            trial.require(mark in recording.alive_at, f"backward never came to block {number}", rank=r)
            alive = recording.alive(mark) - (1 + behind / NUM_BLOCKS) * seen.share
            trial.require(
                alive <= (2.9 + 1.4 * ahead) * seen.block + SMALL,  # with what is on its way
                f"in the backward of block {number} {in_blocks(seen, alive)} are alive on it besides its "
                "shares: one block and its gradients are two",
                help="When backward enters a block, reduce and free the one that it comes from, then gather.",
                rank=r,
                cause="blocks stay whole, or their gradients stay" if behind else "",
            )
            reduced = num_bytes(sent_by(recording, mark, REDUCES))
            trial.require(
                reduced >= 0.9 * behind * seen.block,
                f"when backward computes block {number}, the gradients of {reduced / seen.block:.2g} blocks "
                f"have been reduced, and {behind} are complete",
                help="Reduce a block's gradients when backward enters the block before it.",
                rank=r,
            )
        events = [e for e in recording.events if e.after == "between" or e.after.startswith("backward")]
        most = most_ahead(events) / seen.block
        trial.require(
            most <= 1 + ahead + 0.3,
            f"in backward there is a moment at which {most:.3g} units are gathered and not reduced yet, and "
            f"{1 + ahead} should be",
            help=f"Reduce and free the unit behind first, and then gather. {ORDER_OF_HOOKS}",
            rank=r,
            cause="a unit is gathered, or sent for, before the one behind is reduced and freed",
        )
