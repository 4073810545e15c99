"""Checks of `checkpoint_blocks`: groups of a GPT's blocks that keep their input alone."""

from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Trial, check, exercise
from nanogpt.model import GPT, Dropout, GPTConfig

from .models import (
    AT_THE_CHANGE,
    NEXT_NUMBERS,
    REMEMBERED,
    SEEDED,
    STATE_BYTES,
    Log,
    build,
    close_by_name,
    close_with_generators,
    forgetful,
    give_generators,
    gpt,
    gradients,
    never_replayed,
    next_numbers,
    partly_frozen,
    replayed,
    replayed_as_of_now,
    require_frozen_too,
)

NUM_BLOCKS, UNEQUAL = 5, 4
"""By 4 the groups are of 4 blocks and 1, where groups as equal in length as can be are of 3 and 2."""

exercise(
    "checkpoint_blocks",
    world_sizes=(1,),
    distributed=False,
    uses=("checkpoint",),
    hints=(
        "GPT.forward does `for block in self.transformer.h: x = block(x)`. What may a group be, so that "
        "this line runs a whole group under `checkpoint`?",
        "Either give the first block of a group a new forward, which runs the whole group, and the others "
        "one that returns x; or put modules that hold a group each into a ModuleList in the old one's place "
        "(names in state_dict() change then, which is not graded; the Parameter objects must stay).",
        "range(0, num_blocks, every) are the first blocks of the groups; a slice may reach past the end.",
        "A function made in a loop looks its variables up when it is called. Hand it its own group as an "
        "argument (functools.partial), or all of them will run the last one.",
    ),
)


def step(
    rank: Any, how: str, every: int, sizes: dict, seed: int, batches: list[tuple[Tensor, Tensor]]
) -> dict:
    """Two passes of a GPT, whose gradients add up; the first one is recorded.

    With `every` 1 the model is changed in evaluation mode, and trains afterwards all the same.
    """
    model = build(lambda: GPT(GPTConfig(**sizes)), seed, rank.device)
    before, log = dict(model.named_parameters()), Log(model.transformer.h)
    changed = model
    if how == "mine":
        changed = rank.submission.checkpoint_blocks(model.train(every > 1), every)
        model.train()
    elif how == "another mask":
        for block in model.transformer.h:
            block.forward = partial(forgetful, False, block.forward)
    is_gpt = isinstance(changed, GPT)
    after = list(changed.parameters()) if is_gpt else []
    there = {id(p) for p in after}
    result = {
        "same model": changed is model,
        "same parameters": {id(p) for p in before.values()} == there and len(before) == len(after),
        "only lost": len(after) < len(before) and there < {id(p) for p in before.values()},
        "lost": [name for name, p in before.items() if id(p) not in there],
    }
    if not is_gpt:
        return result
    (idx, targets), *others = batches
    with rank.record(memory=True) as recording:
        logits, loss = changed(idx, targets)
        recording.mark("after the forward")
        forward = len(log.entries)
        loss.backward()
    result |= {"loss": loss.detach().clone(), "logits": logits.detach().clone(), "recording": recording}
    result |= {"forward": log.entries[:forward], "backward": log.entries[forward:]}
    for idx, targets in others:
        changed(idx, targets)[1].backward()
    result |= {"gradients": gradients(before), "drawn": torch.rand(4, device=rank.device)}
    begun = len(log.entries)
    with torch.no_grad():
        result["without gradients"] = changed.eval()(idx)[0]
    return result | {"evaluation": log.entries[begun:]}


def observe(trial: Trial) -> SimpleNamespace:
    heads = trial.integer(2, 4)
    config = GPTConfig(
        block_size=64,
        vocab_size=trial.integer(50, 70),
        n_layer=NUM_BLOCKS,
        n_head=heads,
        n_embd=heads * (trial.integer(96, 108) // heads),
        dropout=0.2,
        bias=trial.choice([True, False]),
    )
    sizes = asdict(config)
    batches = [
        (trial.tokens(config.vocab_size, b, s), trial.tokens(config.vocab_size, b, s))
        for b, s in ((4, 64), (1, trial.integer(20, 40)))
    ]
    seed, seeds = trial.seed(), [trial.seed()]

    def run(how: str, every: int = 1, **other: int) -> dict:
        return trial.run(step, how, every, sizes | other, seed, batches, seeds=seeds)[0]

    lengths = [1, trial.choice([2, 3]), UNEQUAL, trial.choice([NUM_BLOCKS, NUM_BLOCKS + 2])]
    return SimpleNamespace(
        plain=run("plain"),
        other=lambda: run("another mask")["gradients"],
        empty=run("plain", n_layer=0),
        mine={every: run("mine", every) for every in lengths},
        stream=4 * 4 * 64 * config.n_embd,
        last_product=2 * 4 * 64 * 4 * config.n_embd**2,
    )


NOT_HELD = (
    "the forward still runs these blocks, and no module of the model holds them: parameters(), train() and "
    "to() go through modules alone, and pass by what stands in a plain list, a tuple or a closure"
)


@check("checkpoint_blocks")
def given_model_comes_back_with_its_parameters(trial: Trial) -> None:
    """It returns the given model, with the same Parameter objects."""
    for every, mine in trial.once(observe).mine.items():
        trial.require(
            mine["same model"],
            f"checkpoint_blocks(model, {every}) does not return the given model",
            help="Change the model in place, and return it: an optimizer or a wrapper may hold it already.",
        )
        blocks = blocks_of(mine["lost"])
        still_run = blocks and set(blocks) <= set(mine["forward"])
        told = f"all of block {', '.join(map(str, blocks))}" if blocks else ", ".join(mine["lost"])
        trial.require(
            not mine["only lost"],
            f"after checkpoint_blocks(model, {every}) the model has {len(mine['lost'])} parameters less than "
            f"before: {told}",
            cause=NOT_HELD if still_run else "",
            help="Hold a group's blocks in an nn.ModuleList or nn.Sequential, as an attribute of the group."
            if still_run
            else "Every block belongs to a group, the last ones too: where the number of blocks does not "
            "divide by `every`, one group is shorter.",
        )
        trial.require(
            mine["same parameters"],
            f"after checkpoint_blocks(model, {every}) the model's parameters are other objects, or other in "
            "number",
            help="Keep the block modules, and put them into the groups without copying.",
        )


def blocks_of(names: list[str]) -> list[int]:
    """The blocks whose parameters these are; none where some are of no block."""
    found = [int(name.split(".")[2]) for name in names if name.startswith("transformer.h.")]
    return list(dict.fromkeys(found)) if len(found) == len(names) else []


def ready(trial: Trial) -> SimpleNamespace:
    """The runs, if they are there."""
    seen = trial.once(observe)
    for mine in seen.mine.values():
        trial.require("loss" in mine, "it does not return a GPT", help="Return the model that was given.")
    return seen


@check("checkpoint_blocks")
def loss_and_gradients_are_as_without(trial: Trial) -> None:
    """Loss and gradients, with dropout and over two passes, are those of the model as it was."""
    seen = ready(trial)
    for every, mine in seen.mine.items():
        told = f", with every={every},"
        for name in ("loss", "logits"):
            help = "Each block runs once in the forward, in its order."
            cause = other_blocks(mine["forward"], every)
            others = {cause: mine[name]} if cause else {}
            trial.close(f"the {name}{told}", mine[name], seen.plain[name], alternatives=others, help=help)
        expected = seen.plain["gradients"]
        close_by_name(
            trial,
            {name: f"the gradient of {name}{told}" for name in expected},
            mine["gradients"],
            expected,
            {"the second run drew other dropout masks": seen.other},
            "Use `checkpoint`, whose second call must run the same blocks as the first. If its own check "
            "passes: does a function made in a loop run the group of its own?",
        )
        help = "The second run must leave the random state as it finds it."
        trial.close(f"a random number drawn afterwards{told}", mine["drawn"], seen.plain["drawn"], help=help)
        cause = other_blocks(mine["evaluation"], every)
        trial.close(
            f"what the model gives in eval mode, without gradients{told}",
            mine["without gradients"],
            seen.plain["without gradients"],
            alternatives={cause: mine["without gradients"]} if cause else {},
            help="In evaluation, as in sampling, a group that is not checkpointed still runs all its blocks.",
        )


def other_blocks(ran: list[int], every: int) -> str:
    """What a forward has run in place of the blocks one after the other, in words; "" if it has run these."""
    if ran == list(range(NUM_BLOCKS)):
        return ""
    told = f"the forward runs the blocks {', '.join(map(str, ran))}" if ran else "the forward runs no block"
    starts = range(0, NUM_BLOCKS, every)
    if ran == list(range(starts[-1], NUM_BLOCKS)) * len(starts):
        told += (
            ", each group the last one's: a function made in a loop looks its variables up when it is called"
        )
    return told


NOTHING = "nothing is checkpointed: the groups run as they are, whatever `every` is"


@check("checkpoint_blocks")
def each_group_runs_once_more_as_a_whole(trial: Trial) -> None:
    """Backward runs every block once more, in groups of `every` blocks; one group may be shorter."""
    seen = ready(trial)
    groups_of_blocks = "Blocks 0 to every-1 are one group, computed again together; then comes the next."
    strides = taken_for_a_stride({every: mine["backward"] for every, mine in seen.mine.items()})
    modes = asked_once({every: mine["backward"] for every, mine in seen.mine.items()})
    nothing = "" if any(mine["backward"] for mine in seen.mine.values()) else NOTHING
    for every, mine in seen.mine.items():
        where = f"every={every}, {NUM_BLOCKS} blocks: "
        trial.equal(
            f"{where}the blocks that the forward runs",
            mine["forward"],
            list(range(NUM_BLOCKS)),
            help="GPT.forward must still take x through each block once.",
        )
        order = mine["backward"]
        missing = sorted(set(range(NUM_BLOCKS)) - set(order))
        trial.require(
            not missing,
            f"{where}backward does not compute block {', '.join(map(str, missing))} again",
            help="Run each group inside your checkpoint."
            if nothing
            else "Look at the mode when a group runs: train() and eval() may come later."
            if modes
            else groups_of_blocks
            if strides or missing[-1:] != [NUM_BLOCKS - 1]
            else "Every block belongs to a group, the last ones too.",
            cause=nothing or strides or modes,
        )
        trial.require(
            sorted(order) == list(range(NUM_BLOCKS)),
            f"{where}backward runs the blocks {order}, some of them more than once",
            help="A group is computed again once, as a whole: is a checkpoint inside a checkpoint?",
        )
        groups = consecutive(order)
        sizes = [len(group) for group in groups]
        needed = -(-NUM_BLOCKS // every)
        trial.require(
            len(groups) == needed and max(sizes) <= every,
            f"{where}backward computes groups of {', '.join(map(str, sizes))} blocks; they should be "
            f"{needed}, none longer than {every}",
            help=groups_of_blocks,
        )
        shorter = sum(size < every for size in sizes)
        trial.require(
            shorter <= 1,
            f"{where}backward computes groups of {', '.join(map(str, sizes))} blocks; one of them may be "
            f"shorter than {every}, and {shorter} are",
            help="Every group has `every` blocks, but for one, which has those that are left.",
            cause="the groups are as equal in length as can be" if max(sizes) - min(sizes) <= 1 else "",
        )


def asked_once(again: dict[int, list[int]]) -> str:
    """Whether the model that was changed in evaluation mode alone computes nothing again, in words."""
    nothing = [every for every, order in again.items() if not order]
    if nothing != [1]:
        return ""
    return "the model was in evaluation mode when it was changed, and then trained: nothing is checkpointed"


def taken_for_a_stride(again: dict[int, list[int]]) -> str:
    """In words, that backward runs one block of each group and no more, for every length; else ""."""
    for first in (lambda every: 0, lambda every: every - 1):
        if all(sorted(ran) == [*range(first(every), NUM_BLOCKS, every)] for every, ran in again.items()):
            return (
                "one block in `every` is checkpointed, by itself, and those between keep all that they have: "
                "`every` is the length of a group, not a stride"
            )
    return ""


def consecutive(order: list[int]) -> list[list[int]]:
    """[4, 2, 3, 0, 1] to [[4], [2, 3], [0, 1]]."""
    groups: list[list[int]] = []
    for block in order:
        if groups and groups[-1][-1] + 1 == block:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


@check("checkpoint_blocks")
def costs_one_forward_of_the_blocks_more(trial: Trial) -> None:
    """A step costs one forward of the blocks more than without checkpointing."""
    seen = ready(trial)
    blocks, plain = (
        seen.plain["recording"].flops(after="") - seen.empty["recording"].flops(after=""),
        seen.plain["recording"].flops(),
    )
    for every, mine in seen.mine.items():
        total = mine["recording"].flops()
        trial.require(
            total <= plain + blocks,
            f"every={every}: a step takes {total:,} FLOPs; {plain:,} without checkpointing, and one forward "
            f"of the blocks is {blocks:,}",
            help="Nothing outside of the blocks is computed again, and each block once.",
        )
        # A group's output, which its last product makes, is needed by nobody: PyTorch's own stops before it.
        least = plain + blocks - -(-NUM_BLOCKS // every) * seen.last_product
        trial.require(
            total >= least,
            f"every={every}: a step takes {total:,} FLOPs; {plain:,} without checkpointing, and computing "
            f"the blocks again, even without the last product of each group, makes {least:,}",
            help="Backward computes from a group's input what it needs: what is there without that was kept.",
        )


@check("checkpoint_blocks")
def inputs_of_groups_alone_stay_alive(trial: Trial) -> None:
    """After the forward, what the blocks keep is one tensor (b, s, h) a group."""
    seen = ready(trial)
    outside, plain = (
        run["recording"].alive("after the forward") for run in (seen.empty, seen.plain)
    )  # with embedding, head, logits and loss
    for every, mine in seen.mine.items():
        groups = -(-NUM_BLOCKS // every)
        expected = outside + groups * seen.stream
        alive, slack = mine["recording"].alive("after the forward"), groups * STATE_BYTES + 8000
        more = (alive - outside) / seen.stream
        cause = ""
        if alive >= plain - slack:
            cause = "that is what a GPT without checkpoints keeps"
        elif abs(more - NUM_BLOCKS) < 0.7:
            cause = "as much as if the input of every block were kept"
        trial.require(
            alive <= expected + slack,
            f"every={every}: {alive:,} bytes are alive after the forward. Embedding, head and loss are "
            f"{outside:,}, and {groups} inputs of groups {groups * seen.stream:,}, together {expected:,}; "
            f"without checkpoints it is {plain:,}",
            help="Run a group as one function inside one checkpoint. Lists, attributes and closures that "
            "hold activations count too.",
            cause=cause,
        )


def own_generators(rank: Any, how: str, every: int, sizes: dict, seed: int, idx: Tensor) -> dict:
    """A step, then two passes and backward of both, before which all dropouts get other generators.

    For the first step, half of them get theirs after the change.
    """
    model = build(lambda: gpt(GPTConfig(**sizes), plain_attention=True), seed, rank.device)
    before, blocks = dict(model.named_parameters()), list(model.transformer.h)
    cores = [block.attn.core for block in blocks]
    for core in cores:
        core.dropout = Dropout(core.dropout.p)
    soon = [block.mlp.dropout for block in blocks] + [core.dropout for core in cores]
    late = [block.attn.resid_dropout for block in blocks]
    give_generators(soon, seed, rank.device)
    if how == "mine":
        model = rank.submission.checkpoint_blocks(model, every)
    elif how == "unaware":
        never_replayed(blocks)
    elif how == "first of its group":
        never_replayed([block for i, block in enumerate(blocks) if i % every])
    elif how == "but the cores":
        replayed(blocks, skip=[core.dropout for core in cores])
    elif how == "seeded":
        replayed(blocks, seeded=True)
    elif how == "at the change":
        replayed_as_of_now(blocks)
    give_generators(late, seed + len(soon), rank.device)
    model(idx)[0].square().mean().backward()
    if how == "remembered":
        never_replayed(blocks)
    generators = give_generators(soon + late, seed + 2 * len(soon), rank.device)
    first, second = model(idx)[0], model(idx.flip(1))[0]
    (first.square().mean() + second.sin().mean()).backward()
    return {"gradients": gradients(before), "drawn": [next_numbers(each) for each in generators]}


FIRST_BLOCKS = (
    "the dropouts in the first block of each group drew the same numbers again, and those in the other "
    "blocks drew their generators' next ones"
)
ALL_OF_THE_GROUP = "Look for generators in every block of the group: hand `checkpoint` those of all of them."
BUT_THE_CORES = (
    "the dropouts in the cores of attention drew their generators' next numbers, and all others the same "
    "again"
)
ALL_PARTS = "Look through block.modules(): the Dropout of a core, deeper inside, is among them."


@check("checkpoint_blocks")
def generators_of_dropouts_repeat(trial: Trial) -> None:
    """A generator that a Dropout has of its own repeats its numbers too, and goes on as without."""
    config = GPTConfig(
        block_size=16, vocab_size=20, n_layer=3, n_head=2, n_embd=2 * trial.integer(8, 12), dropout=0.3
    )
    inputs, seeds = (asdict(config), trial.seed(), trial.tokens(20, 2, 16)), [trial.seed()]

    def run(how: str, every: int = 1) -> dict:
        return trial.run(own_generators, how, every, *inputs, seeds=seeds)[0]

    plain = run("plain")
    slips = {NEXT_NUMBERS: lambda: run("unaware")["gradients"]}
    slips[REMEMBERED] = lambda: run("remembered")["gradients"]
    slips[AT_THE_CHANGE] = lambda: run("at the change")["gradients"]
    slips[BUT_THE_CORES] = lambda: run("but the cores")["gradients"]
    slips[SEEDED] = lambda: run("seeded")["gradients"]
    steps = {FIRST_BLOCKS: ALL_OF_THE_GROUP, BUT_THE_CORES: ALL_PARTS}
    for every in (1, 2):
        slips[FIRST_BLOCKS] = lambda every=every: run("first of its group", every)["gradients"]
        close_with_generators(trial, run("mine", every), plain, slips, steps)


def behind_frozen_tables(rank: Any, how: str, sizes: dict, seed: int, idx: Tensor) -> dict:
    """A step of a GPT whose tables are frozen: what enters its first group needs no gradient.

    Then another in which blocks alone are in training mode.
    """
    model = build(lambda: GPT(GPTConfig(**sizes)), seed, rank.device)
    before, log = dict(model.named_parameters()), Log(model.transformer.h)
    model.transformer.wte.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)
    if how == "mine":
        model = rank.submission.checkpoint_blocks(model, 2)
    loss = model(idx)[0].square().mean()
    begun = len(log.entries)
    loss.backward()
    found = {"gradients": gradients(before), "again": log.entries[begun:]}
    model.eval().transformer.h.train()
    loss = model(idx)[0].square().mean()
    begun = len(log.entries)
    loss.backward()
    return found | {"again in training mode": log.entries[begun:]}


@check("checkpoint_blocks")
def the_first_group_may_follow_frozen_tables(trial: Trial) -> None:
    """Where the tables are frozen, the first group is computed again too, and its weights get gradients."""
    config = GPTConfig(
        block_size=16, vocab_size=20, n_layer=3, n_head=2, n_embd=2 * trial.integer(8, 12), dropout=0.3
    )
    inputs, seeds = (asdict(config), trial.seed(), trial.tokens(20, 2, 16)), [trial.seed()]
    mine, plain = (trial.run(behind_frozen_tables, how, *inputs, seeds=seeds)[0] for how in ("mine", "plain"))
    missing = sorted(set(range(config.n_layer)) - set(mine["again"]))
    reached = [g is not None for name, g in mine["gradients"].items() if name.startswith("transformer.h.")]
    trial.require(
        not missing,
        "with frozen token and position tables and every=2, backward does not compute the blocks "
        f"{', '.join(map(str, missing))} again",
        cause="a group whose input needs no gradient is not checkpointed: its weights need theirs, and so it "
        "keeps all that a block keeps"
        if missing == [0, 1] and all(reached)
        else "the graph does not lead to the blocks: an autograd.Function of which no input needs a "
        "gradient, as in the older version, has an output that needs none"
        if not any(reached)
        else "",
        help="Do not ask whether the input needs a gradient: gradients may be wanted inside. If it is "
        "`checkpoint` that asks, mend it there.",
    )
    trained = {name: gradient for name, gradient in plain["gradients"].items() if gradient is not None}
    names = {name: f"the gradient of {name}, with frozen tables," for name in trained}
    help = "The weights of the first group get their gradients, though its input needs none."
    close_by_name(trial, names, mine["gradients"], trained, {}, help)
    missing = sorted(set(range(config.n_layer)) - set(mine["again in training mode"]))
    trial.require(
        not missing,
        "where the model is in evaluation mode, and its blocks train, backward does not compute the blocks "
        f"{', '.join(map(str, missing))} again",
        cause="the model's mode, model.training, is taken for that of each group"
        if len(missing) == config.n_layer
        else "",
        help="Ask a group for its own mode: eval() on the model may be followed by train() on its blocks.",
    )


def some_frozen(rank: Any, sizes: dict, seed: int, idx: Tensor) -> tuple[str, list[int]]:
    """What it made of a GPT that was partly frozen, and how often each block ran in a pass of that."""
    model = build(lambda: GPT(GPTConfig(**sizes)), seed, rank.device)
    log = Log(model.transformer.h)
    changed = partly_frozen(rank.submission.checkpoint_blocks, model, idx)
    return changed, [log.entries.count(i) for i in range(len(model.transformer.h))]


@check("checkpoint_blocks")
def frozen_blocks_are_checkpointed_too(trial: Trial) -> None:
    """Groups with frozen weights are computed again too; modes, and what is frozen, stay as they are."""
    require_frozen_too(
        trial,
        "checkpoint_blocks",
        some_frozen,
        lambda blocks: f"and every=1, backward does not compute block {blocks} again",
        help="Checkpoint every group, whether its weights are trained or not.",
    )


def bystander(rank: Any, sizes: dict, seed: int, idx: Tensor) -> list[int]:
    """The blocks that backward runs in a GPT that was there when another one was checkpointed."""
    other, model = (build(lambda: GPT(GPTConfig(**sizes)), seed, rank.device) for _ in range(2))
    rank.submission.checkpoint_blocks(model)
    log = Log(other.transformer.h)
    y = other(idx)[0]
    forward = len(log.entries)
    y.sum().backward()
    return log.entries[forward:]


@check("checkpoint_blocks")
def other_models_stay_as_they_are(trial: Trial) -> None:
    """It changes the given model, and no other one."""
    sizes = asdict(GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=16))
    again = trial.run(bystander, sizes, trial.seed(), trial.tokens(20, 2, 8))[0]
    trial.require(
        not again,
        "another GPT, which was there before, now computes its blocks again in backward as well",
        help="Give the blocks of this model another forward, `block.forward = ...`, and not their class.",
    )
