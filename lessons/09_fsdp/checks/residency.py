"""Checks of `FullySharded`: which bytes are alive when, and what travels. Blocks are the unit of measure."""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from grader.checks import Trial, check, settle
from nanogpt.model import GPT

from .models import DEEP, SHORT, build, bytes_of, deep_gpt, short_gpt
from .runs import run
from .wire import SMALL, own_bytes, padded_bytes, require_travelled, share_bytes, travelled


def watch(model: nn.Module, recording: Any) -> list[str]:
    """Mark the moments at which a block's attention computes: "forward 3", and the same block's "backward 3".

    Who writes another word into the returned list has the next forwards called by it; with "" nothing is
    marked.
    """
    phase = ["forward"]

    def enter(number: int, args: tuple[Tensor, ...]) -> None:
        if not phase[0]:
            return
        recording.mark(f"{phase[0]} {number}")
        if args[0].requires_grad:
            args[0].register_hook(lambda gradient: recording.mark(f"backward {number}"))

    for number, block in enumerate(model.transformer.h):
        block.attn.core.register_forward_pre_hook(lambda core, args, number=number: enter(number, args))
    return phase


def observe_dense(rank: Any, tokens: Tensor, targets: Tensor) -> int:
    """Bytes that a dense GPT's forward keeps for backward, without its weights."""
    with rank.record(memory=True) as recording:
        model = build(deep_gpt, 0).to(rank.device)
        settle()
        recording.mark("before")
        _, loss = model(tokens, targets)
        settle()
        recording.mark("after")
        del loss
    alive = recording.to_plain()["__recording__"]["alive_at"]
    return alive["after"] - alive["before"]


def measure(rank: Any, seed: int, batch: tuple[Tensor, Tensor]) -> dict:
    activations = observe_dense(rank, *batch) if rank.rank == 0 else 0  # they are as many on every rank
    with rank.record(memory=True) as step:
        model = build(deep_gpt, seed).to(rank.device)
        phase = watch(model, step)
        phase[0] = "evaluation"
        sharded = rank.submission.FullySharded(model, rank.group)
        optimizer = SGD(sharded.parameters(), lr=0.1)
        del model
        settle()
        step.mark("at rest")
        sharded.eval()
        with torch.no_grad():
            sharded(*batch)
        settle()
        step.mark("evaluated")
        sharded.train()
        phase[0] = ""
        with torch.no_grad():
            sharded(*batch)
        settle()
        step.mark("validated")
        phase[0] = "forward"
        step.mark("forward")
        _, loss = sharded(*batch)
        settle()
        step.mark("between")
        phase[0] = "again"
        loss.backward()
        del loss
        settle()
        step.mark("after")
        phase[0] = ""
        optimizer.zero_grad()
        _, loss = sharded(*batch)
        settle()
        step.mark("later between")
        loss.backward()
        del loss
        settle()
        step.mark("later after")
    return {
        "activations": activations,
        "step": step,
        "own": own_bytes(sharded.parameters()),
        "gradients": own_bytes(p.grad for p in sharded.parameters()),
    }


def observe(trial: Trial) -> SimpleNamespace:
    batch = (trial.tokens(DEEP.vocab_size, 1, 2), trial.tokens(DEEP.vocab_size, 1, 2))
    model, n = build(deep_gpt, 0), trial.num_ranks
    block = bytes_of(model.transformer.h[0])
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    results = run(trial, measure, trial.seed(), batch)
    shares = share_bytes([result["own"] for result in results], padded_bytes(model, n))
    return SimpleNamespace(
        results=[
            {**result, "activations": results[0]["activations"], "share": share + largest}
            for result, share in zip(results, shares, strict=True)
        ],
        model=model,
        num_blocks=DEEP.n_layer,
        block=block,
        outside=bytes_of(model) - DEEP.n_layer * block,
    )


RANKS = (4, 2)
FREE_EVERY_BLOCK = "Free every block after its forward, the last one too, also where no backward follows."
FREE_THE_WEIGHTS = (
    "Autograd keeps the weights for backward, whoever else lets go: shrink their storage and fill it again, "
    "or compute the block again in backward."
)


def kept(seen: Any, result: dict) -> bool:
    """Whether most blocks' weights were still there between forward and backward."""
    alive = result["step"].alive("between") - result["share"] - result["activations"] - 2 * seen.outside
    return alive > 0.6 * seen.num_blocks * seen.block


def last_kept(seen: Any, result: dict) -> bool:
    """Whether backward came to the last block, and gathered no block before."""
    events = [event for event in result["step"].events if event.after == "between"]
    last = f"backward {seen.num_blocks - 1}"
    gathered = travelled(replace(result["step"], events=events), len(seen.results))
    return last in result["step"].alive_at and gathered.total < 0.5 * seen.block


def blocks(seen: Any, num_bytes: float) -> str:
    """Bytes told in blocks, which is how the learner thinks of them."""
    count = num_bytes / seen.block
    return f"{num_bytes:,.0f} bytes, as much as {count:.1f} blocks (it has {seen.num_blocks})"


@check("FullySharded", first_of=RANKS)
def only_shards_at_rest(trial: Trial) -> None:
    """After the constructor, and after evaluation, a rank has its shards, P/n numbers, and no whole block."""
    seen = trial.once(observe)
    for r, result in enumerate(seen.results):
        for when, told, help in (
            (
                "at rest",
                "after the constructor",
                "Nothing may hold on to whole weights: not the given model, not a list, not a view.",
            ),
            (
                "evaluated",
                "after a forward under no_grad",
                FREE_EVERY_BLOCK,
            ),
            ("validated", "after a forward under no_grad in training mode", FREE_EVERY_BLOCK),
        ):
            alive, share = result["step"].alive(when), result["share"]
            trial.require(
                alive <= share + 2 * seen.outside + SMALL,
                f"{told} {blocks(seen, alive - share)} are alive on it beside its share of the weights, "
                f"{share:,}",
                help=help,
                rank=r,
                cause="whole weights are still there" if alive >= bytes_of(seen.model) else "",
            )


def require_as_in_the_first_step(trial: Trial, r: int, way: str, moment: str, help: str) -> None:
    """On rank r, no more is alive at this moment of the second step than at the first one's."""
    seen = trial.once(observe)
    step = seen.results[r]["step"]
    more = step.alive(f"later {moment}") - step.alive(moment)
    trial.require(
        more <= seen.block + seen.outside + SMALL,
        f"after the {way} of the second step, {blocks(seen, more)} more are alive on it than after that of "
        "the first",
        help=help,
        rank=r,
        cause="blocks are freed in the first step alone",
    )


@check("FullySharded", first_of=RANKS)
def blocks_are_freed_after_forward(trial: Trial) -> None:
    """Between forward and backward no block is whole: what autograd keeps are activations."""
    seen = trial.once(observe)
    for r, result in enumerate(seen.results):
        alive = result["step"].alive("between") - result["share"] - result["activations"] - 2 * seen.outside
        last = last_kept(seen, result) and not kept(seen, result)
        trial.require(
            alive <= 0.2 * seen.block + SMALL,
            f"after forward, besides its shards and the activations, at least {blocks(seen, alive)} are "
            "alive on it",
            help=FREE_EVERY_BLOCK if last else FREE_THE_WEIGHTS,
            rank=r,
            cause="the last block stays whole: backward comes to it, and does not gather it"
            if last
            else "the weights were not freed"
            if kept(seen, result)
            else "",
        )
        require_as_in_the_first_step(
            trial,
            r,
            "forward",
            "between",
            "Each forward frees its blocks: a hook that stays, and nothing that is used up or counted.",
        )


@check("FullySharded", first_of=RANKS)
def never_more_than_two_blocks_forward(trial: Trial) -> None:
    """While a block computes its forward, it is whole, and perhaps the next one: never more than two."""
    seen = trial.once(observe)
    for r, result in enumerate(seen.results):
        alive_at = result["step"].alive_at
        at = {name: size for name, size in alive_at.items() if name.startswith("evaluation ")}
        most = max([*at.values(), 0]) - result["share"] - 2 * seen.outside
        trial.require(
            most <= 3.2 * seen.block + SMALL,  # one that is gathered may stand in a buffer and in its tensors
            f"while a block computes, besides the shards {blocks(seen, most)} are alive on it",
            help="Gather a block right before it computes, and free it right after.",
            rank=r,
            cause="everything is gathered at once" if most > 0.6 * seen.num_blocks * seen.block else "",
        )


@check("FullySharded", first_of=RANKS)
def never_more_than_two_blocks_backward(trial: Trial) -> None:
    """While a block computes its backward, no more than two are whole, nor the gradients of more."""
    seen = trial.once(observe)
    for r, result in enumerate(seen.results):
        at = result["step"].alive_at
        cause = "the weights are still there from forward" if kept(seen, result) else ""
        for number in reversed(range(seen.num_blocks)):
            if f"backward {number}" not in at:
                continue
            activations = result["activations"] * (number + 2) / seen.num_blocks
            alive = at[f"backward {number}"] - 2 * result["share"] - activations - 4 * seen.outside
            if number == seen.num_blocks - 1 and not cause and alive > 0.6 * seen.num_blocks * seen.block:
                cause = "everything is gathered again at once"
            trial.require(
                alive <= 5.5 * seen.block + SMALL,
                f"in the backward of block {number}, besides shards and activations {blocks(seen, alive)} "
                "are "
                "alive on it: weights and gradients of two are four",
                help="When backward enters a block, reduce and free the one that it comes from.",
                rank=r,
                cause=cause,
            )


@check("FullySharded", first_of=RANKS)
def only_shards_after_backward(trial: Trial) -> None:
    """After backward a rank has its shards and their gradients, 2P/n numbers, and nothing else."""
    seen = trial.once(observe)
    for r, result in enumerate(seen.results):
        alive = result["step"].alive("after") - 2 * result["share"] - 2 * seen.outside
        trial.require(
            alive <= seen.block + SMALL,
            f"after backward, besides shards and their gradients {blocks(seen, alive)} are alive on it",
            help="Free the last block's weights and all whole gradients when backward is over.",
            rank=r,
        )
        help = "Each backward frees what it has gathered, and all whole gradients."
        require_as_in_the_first_step(trial, r, "backward", "after", help)
        trial.require(
            result["gradients"] <= result["share"],
            f"the .grad of parameters() are {blocks(seen, result['gradients'])}: the share is "
            f"{result['share']:,} bytes",
            help="A shard's .grad has the shard's size.",
            rank=r,
        )


@check("FullySharded", first_of=(2, 3))
def only_shards_after_backward_of_some(trial: Trial) -> None:
    """After backward no block is whole where some are frozen, with prefetch too, nor a large token table."""
    for frozen in FROZEN:
        require_frozen_blocks_freed(trial, frozen)
    require_the_rest_freed(trial)


WORDS = 2000
"""In a table that is ten times as large as a block."""


def wordy_gpt() -> GPT:
    return GPT(replace(DEEP, n_layer=1, vocab_size=WORDS))


def measure_wordy(rank: Any, seed: int, batch: tuple[Tensor, Tensor]) -> dict:
    """The bytes that are alive before a step, when a forward without backward is over, and after a step."""
    model = build(wordy_gpt, seed).to(rank.device)
    with rank.record(memory=True) as step:
        sharded = rank.submission.FullySharded(model, rank.group)
        del model
        settle()
        step.mark("before")
        for training, mark in ((False, "evaluated"), (True, "validated")):
            sharded.train(training)
            with torch.no_grad():
                sharded(*batch)
            settle()
            step.mark(mark)
        gradients = measure_backward(sharded, step, batch)
    return {"step": step, "own": own_bytes(sharded.parameters()), "gradients": gradients}


def observe_wordy(trial: Trial) -> SimpleNamespace:
    batch = (trial.tokens(WORDS, 1, 2), trial.tokens(WORDS, 1, 2))
    model = build(wordy_gpt, 0)
    results = run(trial, measure_wordy, trial.seed(), batch)
    shares = share_bytes([result["own"] for result in results], padded_bytes(model, trial.num_ranks))
    return SimpleNamespace(results=results, shares=shares, table=bytes_of(model.transformer.wte))


def require_the_rest_freed(trial: Trial) -> None:
    """What lies outside the blocks is whole neither before a step nor after its backward."""
    seen = trial.once(observe_wordy)
    for r, (result, share) in enumerate(zip(seen.results, seen.shares, strict=True)):
        before, after = (result["step"].alive(when) for when in ("before", "after"))
        for told, what, alive, allowed, help in (
            ("after the constructor", "", before, share, "Cut and empty it as you do the blocks."),
            (
                "after backward",
                " or its gradient",
                after,
                share + result["gradients"],
                "When backward is over, reduce its gradients and free it, as you do with a block.",
            ),
        ):
            trial.require(
                alive <= allowed + seen.table / 3,
                f"of a GPT with a large token table {alive:,} bytes are alive on it {told}; its shards, and "
                f"their gradients where there are some, have {allowed:,}",
                cause=f"the token table, which lies outside the blocks,{what} is still there whole",
                help=help,
                rank=r,
            )


def frozen_gpt(blocks: tuple[int, ...]) -> GPT:
    """Some of its five blocks are frozen; the tables, too, if the first is among them."""
    model = short_gpt()
    tables = [model.transformer.wte, model.transformer.wpe] if 0 in blocks else []
    for part in (*tables, *(model.transformer.h[number] for number in blocks)):
        part.requires_grad_(False)
    return model


def measure_frozen(
    rank: Any, seed: int, blocks: tuple[int, ...], prefetch: bool, batch: tuple[Tensor, Tensor]
) -> dict:
    """The bytes that are alive before a step and after its backward, and those of the gradients."""
    model = build(partial(frozen_gpt, blocks), seed).to(rank.device)
    with rank.record(memory=True) as step:
        sharded = rank.submission.FullySharded(model, rank.group, prefetch=prefetch)
        del model
        settle()
        step.mark("before")
        gradients = measure_backward(sharded, step, batch)
    return {"step": step, "gradients": gradients}


def measure_backward(sharded: nn.Module, step: Any, batch: tuple[Tensor, Tensor]) -> int:
    """The bytes of the shards' gradients after a step, when "after" is marked."""
    _, loss = sharded(*batch)
    loss.backward()
    del loss
    settle()
    step.mark("after")
    return own_bytes(p.grad for p in sharded.parameters())


@dataclass(frozen=True)
class Frozen:
    """A GPT of five blocks, some of them frozen, and what a block that stays whole then comes from.

    Where those before it leave none.
    """

    blocks: tuple[int, ...]
    told: str
    prefetch: bool
    cause: str
    help: str


FROZEN = (
    Frozen(
        (1, 2, 3),
        "three of five blocks are frozen",
        False,
        "a block without any gradient is gathered for its backward, and never freed",
        "Where nothing in a block is trained, no gradient of a weight tells that its backward is over: free "
        "it when backward comes to the block before.",
    ),
    Frozen(
        (0, 1, 2),
        "the tables and the first three of five blocks are frozen",
        False,
        "backward ends in block 3 here, and what frees the last block waits for block 0",
        "Free what is left when backward is over, whichever block it ended in.",
    ),
    Frozen(
        (0, 1, 2),
        "with prefetch, and the tables and the first three of five blocks frozen",
        True,
        "a block is sent for that backward never comes to, and what came for it stays",
        "Backward ends in the block whose input needs no gradient: send for nothing below it, or free it "
        "when backward is over, with all that was received for it.",
    ),
)


def require_frozen_blocks_freed(trial: Trial, frozen: Frozen) -> None:
    """After backward a block that gets no gradient is as little there as any."""
    batch = (trial.tokens(SHORT.vocab_size, 1, 2), trial.tokens(SHORT.vocab_size, 1, 2))
    model = build(short_gpt, 0)
    block = bytes_of(model.transformer.h[0])
    seen = SimpleNamespace(block=block, num_blocks=SHORT.n_layer)
    outside = bytes_of(model) - SHORT.n_layer * block
    results = run(trial, measure_frozen, trial.seed(), frozen.blocks, frozen.prefetch, batch)
    for r, result in enumerate(results):
        more = result["step"].alive("after") - result["step"].alive("before") - result["gradients"]
        trial.require(
            more <= 0.5 * block + outside + SMALL,
            f"{frozen.told}: after backward, besides the shards' gradients {blocks(seen, more)} more are "
            "alive on it than before forward",
            help=frozen.help,
            rank=r,
            cause=frozen.cause,
        )


def ungathered(seen: Any, result: dict, gathered: int) -> str:
    """Why too little was gathered."""
    if not gathered:
        return "nothing was gathered"
    if kept(seen, result):
        return "weights were kept from forward to backward"
    return "the blocks were not gathered again for backward"


@check("FullySharded", first_of=RANKS)
def three_p_elements_travel(trial: Trial) -> None:
    """A step gathers all blocks twice and reduce-scatters all gradients once: 3P elements."""
    seen, n = trial.once(observe), trial.num_ranks
    all_blocks = seen.num_blocks * seen.block
    for r, result in enumerate(seen.results):
        recorded = result["step"]
        moments = ("forward", "between", "backward", "again")  # the constructor and "after" are no step
        step = replace(recorded, events=[e for e in recorded.events if e.after.split(" ")[0] in moments])
        sent = travelled(step, n)
        trial.require(
            sent.all_reduced <= 2 * seen.outside + SMALL,
            f"{sent.all_reduced // 2:,} bytes of gradients were all-reduced",
            help="A rank needs the mean of its share alone: reduce-scatter.",
            rank=r,
            cause="this is plain data parallelism's all-reduce, after which every rank has every mean",
        )
        trial.require(
            sent.gathered + sent.others >= 1.9 * all_blocks - SMALL,
            f"{sent.gathered + sent.others:,} bytes of weights were gathered in a step, and to gather "
            "every block "
            f"for forward and for backward takes {2 * all_blocks:,}",
            help="Who frees a block after forward has to gather it again.",
            rank=r,
            cause=ungathered(seen, result, sent.gathered + sent.others),
        )
        require_travelled(trial, r, step, seen.model, 3, extra=2 * seen.outside + seen.block // 2)
