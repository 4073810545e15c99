"""Checks of `watched_forward`, the program to repair: what runs twice must have effects once."""

from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grader.checks import Trial, check, exercise
from nanogpt.model import GPT, GPTConfig

from .models import STATE_BYTES, Log, build, close_by_name, forgetful, gradients

exercise(
    "watched_forward",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Print the number of the block each time `run` is called, in the forward and in backward.",
        "`run` looks `block` and `i` up when it is called. What are they when backward calls it?",
        "Which of the lines in `run` should happen once, and which twice? The first kind belongs outside.",
    ),
)


def plain_forward(blocks: Any, x: Tensor, sizes: Tensor, share: float = 0.1, absolute: bool = True) -> Tensor:
    for i, block in enumerate(blocks):
        size = x.detach().abs() if absolute else x.detach()
        sizes[i] += share * (size.mean() - sizes[i])
        x = block(x)
    return x


def of_outputs(blocks: Any, x: Tensor, sizes: Tensor) -> Tensor:
    for i, block in enumerate(blocks):
        x = block(x)
        sizes[i] += 0.1 * (x.detach().abs().mean() - sizes[i])
    return x


def other_masks(blocks: Any, x: Tensor, sizes: Tensor) -> Tensor:
    for block in blocks:
        x = forgetful(False, block, x)
    return x


def last_block_again(blocks: Any, x: Tensor, sizes: Tensor) -> Tensor:
    for block in blocks:
        again = partial(checkpoint, lambda x: block(x), use_reentrant=False)  # noqa: B023
        x = again(x) if block.training else block(x)
    return x


def without_some_graphs(blocks: Any, x: Tensor, sizes: Tensor) -> Tensor:
    with torch.set_grad_enabled(x.requires_grad and torch.is_grad_enabled()):
        return plain_forward(blocks, x, sizes)


def watch(rank: Any, how: str, config: dict, seed: int, batches: list[Tensor], sizes: Tensor) -> dict:
    """Two forwards, then backward of both, then a forward without gradients, and one in evaluation mode.

    At last a pass with block 0 in evaluation mode, as a frozen one may be, another where the list of blocks
    is, too, one with another `sizes`, and the blocks by themselves.
    """
    ways = {
        "plain": plain_forward,
        "of outputs": of_outputs,
        "nine tenths": partial(plain_forward, share=0.9),
        "with signs": partial(plain_forward, absolute=False),
        "half": partial(plain_forward, share=1 - 0.9**0.5),
        "another mask": other_masks,
        "a graph of x alone": without_some_graphs,
        "the last block": last_block_again,
    }
    forward = ways.get(how) or rank.submission.watched_forward
    blocks = build(lambda: GPT(GPTConfig(**config)).transformer.h, seed, rank.device)
    log, seen = Log(blocks), {}
    leaf, second, third = batches[0].requires_grad_(), *batches[1:]
    view = sizes.view(-1)
    with rank.record(memory=True) as recording:
        y = forward(blocks, leaf, sizes)
        recording.mark("after the forward")
    seen["after a forward"], graph = sizes.detach().clone(), sizes.requires_grad
    in_place = torch.equal(view.detach(), seen["after a forward"])
    called = [list(log.entries)]
    z = forward(blocks, second, sizes)
    seen["after two forwards"] = sizes.detach().clone()
    (y.square().mean() + z.sin().mean()).backward()
    called.append(list(log.entries))
    seen["after backward"] = sizes.detach().clone()
    with torch.no_grad():
        forward(blocks, third, sizes)
    seen["after a forward without gradients"] = sizes.detach().clone()
    forward(blocks.eval(), third, sizes)
    seen["after a forward in evaluation mode"] = sizes.detach().clone()
    found = {"x": None if leaf.grad is None else leaf.grad.clone(), **gradients(blocks)}
    before = len(log.entries)
    blocks.train()[0].eval()
    forward(blocks, third.clone().requires_grad_(), sizes).sum().backward()
    ran, before = log.entries[before:], len(log.entries)
    seen["after a forward with block 0 in evaluation mode"] = sizes.detach().clone()
    blocks.eval()
    for block in blocks[1:]:
        block.train()
    forward(blocks, third.clone().requires_grad_(), sizes).sum().backward()
    ran_in_list, before, other = log.entries[before:], sizes.detach().clone(), torch.zeros_like(sizes)
    forward(blocks.train(), third.clone().requires_grad_(), other)
    seen["another"] = other.detach().clone()
    left = {"a call with another `sizes`": torch.equal(sizes, before)}
    before = sizes.detach().clone()
    x = third.clone().requires_grad_()
    for block in blocks:
        x = block(x)
    left["the blocks by themselves"] = torch.equal(sizes, before) and torch.equal(other, seen["another"])
    return {
        "outputs": [y.detach().clone(), z.detach().clone()],
        "gradients": found,
        "called with block 0 in evaluation": [ran, ran_in_list],
        "sizes": seen,
        "left alone by": left,
        "changed in place": in_place,
        "sizes require a gradient": graph,
        "called": called,
        "recording": recording,
    }


def watch_frozen(rank: Any, config: dict, seed: int, x: Tensor, sizes: Tensor) -> list[int]:
    """The blocks that run in a pass in which block 1 is frozen."""
    blocks = build(lambda: GPT(GPTConfig(**config)).transformer.h, seed, rank.device)
    log = Log(blocks)
    blocks[1].requires_grad_(False)
    rank.submission.watched_forward(blocks, x.requires_grad_(), sizes).sum().backward()
    return log.entries


def watch_float64(rank: Any, how: str, config: dict, seed: int, x: Tensor) -> Tensor:
    """What a forward in float64 makes of sizes that are 0."""
    blocks = build(lambda: GPT(GPTConfig(**config)).transformer.h, seed, rank.device)
    sizes = torch.zeros(len(blocks), dtype=torch.float64, device=rank.device)
    forward = plain_forward if how == "plain" else rank.submission.watched_forward
    forward(blocks.double(), x.double(), sizes)
    return sizes.detach()


def observe(trial: Trial) -> SimpleNamespace:
    heads = trial.integer(2, 4)
    config = GPTConfig(
        block_size=64,
        vocab_size=8,
        n_layer=trial.integer(3, 4),
        n_head=heads,
        n_embd=heads * (trial.integer(60, 70) // heads),
        dropout=0.1,
        bias=False,
    )
    shapes = [(4, 64, config.n_embd), (1, 20, config.n_embd), (1, 10, config.n_embd)]
    batches = [scale * trial.normal(*shape) for scale, shape in zip((1, 2, 4), shapes, strict=True)]
    inputs = asdict(config), trial.seed(), batches, trial.normal(config.n_layer).abs()
    seeds = [trial.seed()]
    mine, plain = (trial.run(watch, how, *inputs, seeds=seeds)[0] for how in ("mine", "plain"))

    def other(how: str, part: str = "sizes") -> dict:
        return trial.run(watch, how, *inputs, seeds=seeds)[0][part]

    return SimpleNamespace(
        mine=mine,
        plain=plain,
        other=other,
        before=inputs[3],
        exact=lambda: [
            trial.run(watch_float64, how, *inputs[:2], batches[2], seeds=seeds)[0]
            for how in ("mine", "plain")
        ],
        frozen=lambda: trial.run(watch_frozen, *inputs[:2], batches[2], inputs[3])[0],
        num_blocks=config.n_layer,
        stream=batches[0].nbytes,
    )


@check("watched_forward")
def every_block_learns_from_its_own_input(trial: Trial) -> None:
    """Outputs and gradients are those of the blocks without checkpointing."""
    seen = trial.once(observe)
    for expected, given in zip(seen.plain["outputs"], seen.mine["outputs"], strict=True):
        trial.close("the output", given, expected, help="x goes through the blocks in their order.")
    expected = seen.plain["gradients"]
    masks = "the second run drew other dropout masks"
    older = "blocks learned nothing from the x that needs no gradient itself"
    late = (
        "backward runs the last block in place of each: a function made in a loop looks its variables up "
        "when it is called"
    )
    close_by_name(
        trial,
        {
            name: "the gradient of x"
            if name == "x"
            else "the gradient of {1} in block {0}".format(*name.split(".", 1))
            for name in expected
        },
        seen.mine["gradients"],
        expected,
        {
            masks: partial(seen.other, "another mask", "gradients"),
            older: partial(seen.other, "a graph of x alone", "gradients"),
            late: partial(seen.other, "the last block", "gradients"),
        },
        "The function is called again in backward, when the loop is long over. It has to know then "
        "which block was its own: hand the block over as an input or with functools.partial, or "
        "checkpoint the block itself.",
        {
            masks: "Leave preserve_rng_state as it is: the second run must start from the same random state.",
            older: "That is the older version's way: use_reentrant=False (section 6).",
        },
    )


SECOND_FORWARD = (
    "a second forward, before any backward, has not moved it, as where a flag on the block takes every other "
    "call for backward's: such state outlives the call"
)
UNMOVED = "the tensor that was handed over has not moved: nothing is written, or into a copy of it"
BLOCK_0_UNMOVED = "that forward has not moved block 0's: every block has an input, in either mode"
NO_BACKWARD = (
    "A forward under torch.no_grad() counts too, though no backward follows: it moves all means once."
)
EVALUATION = "Evaluation is a forward too: it moves the means of all blocks once."
OUTSIDE = "What happens once a forward belongs outside of what is checkpointed: it needs no flag there."


def require_nothing_is_left(trial: Trial, seen: SimpleNamespace) -> None:
    """What a call did to the blocks moves no `sizes` after it."""
    left = seen.mine["left alone by"]
    trial.require(
        left["the blocks by themselves"],
        "after the calls, blocks that run by themselves, without watched_forward, move a `sizes`",
        cause="a hook of an earlier call is still on the block, or a forward that it put in place",
        help="Measure x in the loop; or take off what a call puts on a block before it returns.",
    )
    trial.require(
        left["a call with another `sizes`"],
        "a call with another `sizes`, as for validation, moves the one of the calls before",
        cause="an earlier call's `sizes` is kept, and later calls move it",
        help="Each call moves the tensor that it is given, and no other.",
    )


@check("watched_forward")
def a_forward_moves_the_mean_once(trial: Trial) -> None:
    """A forward, with gradients or without, moves each running mean once, a tenth of the way."""
    seen = trial.once(observe)
    require_nothing_is_left(trial, seen)
    unmoved = {"after a forward": seen.before, "after two forwards": seen.before}
    one_alone = seen.plain["sizes"] | {"after two forwards": seen.plain["sizes"]["after a forward"]}
    for when in ("after a forward", "after two forwards"):
        close_by_name(
            trial,
            {when: f"sizes {when}"},
            seen.mine["sizes"],
            seen.plain["sizes"],
            {
                "that is the mean of the outputs of the blocks": partial(seen.other, "of outputs"),
                "it moves nine tenths of the way: what was there counts nine tenths": partial(
                    seen.other, "nine tenths"
                ),
                "that is the mean of the inputs with their signs, not of |input|": partial(
                    seen.other, "with signs"
                ),
                UNMOVED: lambda: unmoved,
                SECOND_FORWARD: lambda: one_alone,
                "it moves by 1 - sqrt(0.9), so that two runs make a tenth of the way: not every forward has "
                "a backward": partial(seen.other, "half"),
            },
            "sizes[i] moves a tenth of the way to the mean of |input of block i|.",
            {
                SECOND_FORWARD: OUTSIDE,
                UNMOVED: "Write into the tensor that is handed over: sizes[i].lerp_(...), or sizes[i] = ....",
            },
        )
    trial.require(
        seen.mine["changed in place"],
        "a view of `sizes`, which a dashboard holds, does not have its new numbers after a forward",
        cause="`sizes` got other memory, as sizes.data = ... gives it",
        help="Write into the tensor that is handed over: sizes[i].lerp_(...), or sizes[i] = ....",
    )
    if not torch.equal(seen.mine["sizes"]["after backward"], seen.mine["sizes"]["after two forwards"]):
        return  # told by the next check
    for when, before, help in (
        ("after a forward without gradients", "after backward", NO_BACKWARD),
        ("after a forward in evaluation mode", "after a forward without gradients", EVALUATION),
        ("after a forward with block 0 in evaluation mode", "after a forward in evaluation mode", EVALUATION),
    ):
        right, unmoved = (seen.plain["sizes"][name] for name in (when, before))
        trial.close(
            f"sizes {when}",
            seen.mine["sizes"][when],
            right,
            alternatives={
                "that forward has not moved it": unmoved,
                BLOCK_0_UNMOVED: torch.cat([unmoved[:1], right[1:]]),
            },
            help=help,
        )
    trial.close(
        "another `sizes`, handed over in a later call,",
        seen.mine["sizes"]["another"],
        seen.plain["sizes"]["another"],
        alternatives={"that call has not moved it": torch.zeros_like(seen.plain["sizes"]["another"])},
        help="Each call moves the tensor that it is given.",
    )
    mine, right = seen.exact()
    trial.close(
        "sizes after a forward in float64",
        mine,
        right,
        rtol=1e-5,
        alternatives={"that forward has not moved it": torch.zeros_like(right)},
        help="`sizes` has x's dtype, whichever it is.",
    )


@check("watched_forward")
def backward_leaves_the_mean_alone(trial: Trial) -> None:
    """Backward, which runs the blocks again, does not touch the running means."""
    sizes = trial.once(observe).mine["sizes"]
    before, after = sizes["after two forwards"], sizes["after backward"]
    changed = [i for i in range(len(before)) if before[i] != after[i]]
    last = changed == [len(before) - 1]
    trial.require(
        not changed,
        f"backward changed sizes[{', '.join(map(str, changed))}]: from {before.tolist()} to {after.tolist()}",
        help="What has an effect outside belongs outside of the function that is called twice.",
        cause="the last entry alone: i is the last one when backward calls the function" if last else "",
    )


@check("watched_forward")
def the_mean_holds_no_graph(trial: Trial) -> None:
    """The running means are numbers to look at: they do not require a gradient."""
    trial.require(
        not trial.once(observe).mine["sizes require a gradient"],
        "after a forward, `sizes` requires a gradient: it holds the graph of this step and, as it is changed "
        "in place, of every step before",
        help="Detach x before it goes into the mean, as the broken program does.",
    )


@check("watched_forward")
def blocks_are_still_checkpointed(trial: Trial) -> None:
    """Each block is computed once more in backward, and no more than its input is kept for that."""
    seen = trial.once(observe)
    forward, both = seen.mine["called"]
    trial.equal(
        "the blocks that the forward runs",
        forward,
        list(range(seen.num_blocks)),
        help="Once each, in their order.",
    )
    again = sorted(both[2 * seen.num_blocks :])
    trial.equal(
        "the blocks that backward of two passes computes again, sorted",
        again,
        sorted(2 * list(range(seen.num_blocks))),
        help="Repair it without giving checkpointing up: each block runs once more for each pass.",
    )
    ran, in_list = seen.mine["called with block 0 in evaluation"]
    once = [i for i in range(1, seen.num_blocks) if ran.count(i) == 1]
    trial.require(
        not once,
        f"where block 0 alone is in evaluation mode, backward does not compute the blocks {once} again",
        cause="block 0's mode is taken for that of all" if len(once) == seen.num_blocks - 1 else "",
        help="Each block has a mode of its own: a frozen one may be in evaluation mode, while others train.",
    )
    once = [i for i in range(1, seen.num_blocks) if in_list.count(i) == 1]
    trial.require(
        not once,
        "where the ModuleList and block 0 are in evaluation mode, and all other blocks train, backward does "
        f"not compute the blocks {once} again",
        cause="the mode of the list, blocks.training, is taken for that of each block"
        if len(once) == seen.num_blocks - 1
        else "",
        help="Ask each block for its own mode, block.training: the list's may be another.",
    )
    alive, without = (run["recording"].alive("after the forward") for run in (seen.mine, seen.plain))
    budget = seen.num_blocks * (seen.stream + STATE_BYTES) + 8000
    trial.require(
        alive <= budget,
        f"{alive:,} bytes are alive after a forward; the outputs of {seen.num_blocks} blocks are "
        f"{seen.num_blocks * seen.stream:,}, and without checkpointing it would be {without:,}",
        help="Each block has a checkpoint of its own, and nothing else holds activations.",
    )
    times = seen.frozen().count(1)
    trial.require(
        times == 2,
        f"where the weights of block 1 are frozen, block 1 is computed {times} times in a forward and its "
        "backward, and should be 2 times",
        cause="a frozen block is not checkpointed: for the gradient of its input it keeps as much as others"
        if times == 1
        else "",
        help="Ask a block's mode, and not whether its weights are trained.",
    )
