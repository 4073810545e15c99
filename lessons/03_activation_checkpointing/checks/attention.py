"""Checks of `recompute_attention`: the core of attention is computed again, and nothing else."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import Fault, Trial, check, exercise, is_close
from nanogpt.model import GPT, Dropout, GPTConfig

from .cores import BY_HAND, FACTORS_OF_THE_FORWARD, ByHand, KeepsItsInputs, make
from .models import (
    AT_THE_CHANGE,
    NEXT_NUMBERS,
    REMEMBERED,
    SEEDED,
    STATE_BYTES,
    build,
    close_by_name,
    close_with_generators,
    forgetful,
    give_generators,
    gradients,
    never_replayed,
    next_numbers,
    partly_frozen,
    replayed,
    replayed_as_of_now,
    require_frozen_too,
)

exercise(
    "recompute_attention",
    world_sizes=(1,),
    distributed=False,
    uses=("checkpoint",),
    hints=(
        "In CausalSelfAttention.forward, which line is scores, softmax, dropout and the product with the "
        "values, and nothing else?",
        "block.attn.core is a module of its own, called with q, k and v. Give it a forward that runs its old "
        "one under `checkpoint`.",
    ),
)


NO_DROPOUT = "nothing is dropped in the cores"
LAST_ATTENTION = (
    "every block runs the last block's attention: a function made in a loop looks its variables up when it "
    "is called"
)
TOO_LATE = (
    f"{NO_DROPOUT}: the model was in evaluation mode when it was given, and the train() that came after {{}}."
    " Given in training mode, it is right"
)
NOT_REACHED = TOO_LATE.format("does not reach them")
REMEMBERED_MODE = TOO_LATE.format("changes nothing of what they do")
A_SUBMODULE = (
    "train() and eval() reach submodules. In a list, or inside a function, a core is none: write "
    "self.core = core in the module that takes its place, or replace core.forward alone."
)
LOOK_EACH_TIME = (
    "Look at core.training each time the core is called: train() and eval() may come after this function."
)
OWN_CORE = "Give each function its own core when it is made: functools.partial(function, core.forward)."


def step(rank: Any, how: str, kind: str, sizes: dict, seed: int, idx: Tensor, targets: Tensor) -> dict:
    """One pass of a GPT with attention cores of this kind."""
    model = build(lambda: make(kind, GPTConfig(**sizes)), seed, rank.device)
    before, changed = dict(model.named_parameters()), model
    cores = [block.attn.core for block in model.transformer.h]
    around = called_around_cores(model)
    if how in ("mine", "mine, given in training mode"):
        given = model.train(kind == "fused" or how != "mine")  # it may be in eval mode when it is changed
        changed = rank.submission.recompute_attention(given)
        model.train()
    elif how == NO_DROPOUT:
        for core in cores:
            core.eval()
    elif how == LAST_ATTENTION:
        for block in model.transformer.h:
            block.attn = model.transformer.h[-1].attn
    elif how == "another mask":
        for block in model.transformer.h:
            block.attn.core.forward = partial(forgetful, False, block.attn.core.forward)
    elif how in BY_HAND:
        for block in model.transformer.h:
            block.attn.core = ByHand(BY_HAND[how], block.attn.core.dropout)
    elif how == "ideal":
        for block in model.transformer.h:
            block.attn.core = KeepsItsInputs()
    is_gpt = isinstance(changed, GPT)
    after = list(changed.parameters()) if is_gpt else []
    same = {id(p) for p in before.values()} == {id(p) for p in after} and len(before) == len(after)
    result = {"same model": changed is model, "same parameters": same}
    if not is_gpt:
        return result
    with rank.record(memory=True) as recording:
        logits, loss = changed(idx, targets)
        recording.mark("after the forward")
        loss.backward()
    result["twice"] = [name for name, times in around.items() if times > 1]
    result |= {"loss": loss.detach().clone(), "logits": logits.detach().clone(), "recording": recording}
    result |= {"gradients": gradients(before), "drawn": torch.rand(4, device=rank.device)}
    result["all in training mode"] = all(part.training for core in cores for part in core.modules())
    calls = [getattr(core, "calls", 0) for core in cores]
    result |= {"called again": all(n == 2 for n in calls), "called once": [n == 1 for n in calls]}
    return result | {"evaluation": evaluation(changed.eval(), before, idx, targets)}


def called_around_cores(model: GPT) -> Counter[str]:
    """How often each layer of the blocks that is no core, and no product, will have been called."""
    calls: Counter[str] = Counter()
    for name, layer in model.transformer.h.named_modules():
        is_part = not list(layer.children()) and not isinstance(layer, nn.Linear)
        if is_part and ".attn.core" not in name:
            layer.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    return calls


def evaluation(model: GPT, parameters: dict[str, nn.Parameter], idx: Tensor, targets: Tensor) -> dict:
    """A pass in evaluation mode, and whether another one is the same."""
    for parameter in parameters.values():
        parameter.grad = None
    logits, loss = model(idx, targets)
    loss.backward()
    with torch.no_grad():
        same = torch.equal(model(idx, targets)[0], logits)
    return {"logits": logits.detach().clone(), "gradients": gradients(parameters), "same twice": same}


def observe(trial: Trial) -> SimpleNamespace:
    heads, b, s = 4, 2, trial.integer(60, 72)
    config = GPTConfig(
        block_size=s,
        vocab_size=trial.integer(50, 70),
        n_layer=3,
        n_head=heads,
        n_embd=heads * trial.integer(14, 18),
        dropout=0.2,
        bias=trial.choice([True, False]),
    )
    batch = trial.tokens(config.vocab_size, b, s), trial.tokens(config.vocab_size, b, s)
    seed, seeds = trial.seed(), [trial.seed()]

    def run(how: str, kind: str, dropout: float) -> dict:
        sizes = asdict(config) | {"dropout": dropout}
        return trial.run(step, how, kind, sizes, seed, *batch, seeds=seeds)[0]

    kinds = {
        "plain attention with dropout": ("plain", 0.2),
        "the fused kernel without dropout": ("fused", 0.0),
    }
    return SimpleNamespace(
        runs={kind: (run("mine", *how), run("plain", *how)) for kind, how in kinds.items()},
        other=lambda how, kind: run(how, *kinds[kind]),
        in_training=lambda kind: run("mine, given in training mode", *kinds[kind]),
        ideal={kind: run("ideal", *how) for kind, how in kinds.items() if how[0] != "fused"},
        config=config,
        stream=4 * b * s * config.n_embd,
        matrix=4 * b * heads * s * s,
        product=2 * b * s * s * config.n_embd,
        linear=2 * b * s * config.n_embd**2,
    )


@check("recompute_attention")
def given_model_comes_back_with_its_parameters(trial: Trial) -> None:
    """It returns the given model, with the same Parameter objects."""
    for mine, _ in trial.once(observe).runs.values():
        help = "Change the model in place, and return it."
        trial.require(mine["same model"], "it does not return the given model", help=help)
        trial.require(
            mine["same parameters"], "the model's parameters are other objects afterwards", help=help
        )


def ready(trial: Trial) -> SimpleNamespace:
    """The runs, if they are there."""
    seen = trial.once(observe)
    for mine, _ in seen.runs.values():
        trial.require("loss" in mine, "it does not return a GPT", help="Return the model that was given.")
    return seen


@check("recompute_attention")
def loss_and_gradients_are_as_without(trial: Trial) -> None:
    """Loss and gradients, with dropout, are those of the model as it was."""
    seen = ready(trial)
    for kind, (mine, plain) in seen.runs.items():
        for name in ("loss", "logits"):
            trial.close(
                f"the {name} of {kind}",
                mine[name],
                plain[name],
                alternatives=partial(other_forwards, seen, kind, name),
                help="The core computes what it did: causal, scaled by the root of d, with dropout.",
            )
        expected = plain["gradients"]

        def slip(how: str, kind: str) -> dict[str, Tensor]:
            return seen.other(how, kind)["gradients"]

        slips = {"the second run drew another dropout mask": partial(slip, "another mask", kind)}
        if kind in seen.ideal:
            slips |= {told: partial(slip, told, kind) for told in BY_HAND}
        close_by_name(
            trial,
            {name: f"the gradient of {name}, {kind}," for name in nearest_to_a_core_first(expected)},
            mine["gradients"],
            expected,
            slips,
            "The second run of the core needs the q, k, v and the dropout mask of the first.",
            dict.fromkeys(BY_HAND, FACTORS_OF_THE_FORWARD),
        )
        help = "The second run must leave the random state as it finds it."
        trial.close(f"a random number drawn after {kind}", mine["drawn"], plain["drawn"], help=help)


def other_forwards(seen: SimpleNamespace, kind: str, name: str) -> dict[str, Fault]:
    """The loss or the logits of known faults in the forward."""
    mine, plain = seen.runs[kind]
    told, step = NO_DROPOUT, "The core drops probabilities, as core.dropout does."
    if is_close(seen.in_training(kind)[name], plain[name]):
        reached = mine["all in training mode"]
        told, step = (REMEMBERED_MODE, LOOK_EACH_TIME) if reached else (NOT_REACHED, A_SUBMODULE)
    return {
        told: Fault(seen.other(NO_DROPOUT, kind)[name], step),
        LAST_ATTENTION: Fault(seen.other(LAST_ATTENTION, kind)[name], OWN_CORE),
    }


def nearest_to_a_core_first(names: Iterable[str]) -> list[str]:
    """The last layer's c_attn, which a single core lies behind, and then the others as they are."""
    last = [name for name in names if name.endswith("attn.c_attn.weight")][-1:]
    return [*last, *(name for name in names if name not in last)]


@check("recompute_attention")
def evaluation_is_as_without(trial: Trial) -> None:
    """In evaluation mode, logits and gradients are those of the model as it was: nothing is dropped."""
    for kind, (mine, plain) in ready(trial).runs.items():
        given, expected = mine["evaluation"], plain["evaluation"]
        help = LOOK_EACH_TIME
        trial.require(
            given["same twice"],
            f"{kind}: two passes in evaluation mode have other logits",
            help=help,
            cause="dropout drops in evaluation mode too",
        )
        what = f"the logits of {kind}, in evaluation mode,"
        trial.close(what, given["logits"], expected["logits"], help=help)
        wanted = expected["gradients"]
        names = {name: f"the gradient of {name}, {kind}, in evaluation mode," for name in wanted}
        close_by_name(trial, names, given["gradients"], wanted, {}, help)


@check("recompute_attention")
def core_is_computed_again_and_nothing_else(trial: Trial) -> None:
    """With plain attention, a step costs 4·b·s²·h FLOPs a layer more, no more; a fused core runs again."""
    seen = ready(trial)
    layers, product, linear = seen.config.n_layer, seen.product, seen.linear
    core = 2 * product
    told = {
        layers * (core + 4 * linear): "the projections around the core are computed again too",
        layers * (core + 3 * linear): "c_attn is computed again too",
        layers * (core + linear): "c_proj is computed again too",
        layers * (core + 12 * linear): "the whole block is computed again",
        (layers - 1) * core: "one layer is left out",
        core: "that is one layer alone",
        2 * layers * core: "the core is computed again twice",
    }
    for kind, (mine, plain) in seen.runs.items():
        extra = mine["recording"].flops() - plain["recording"].flops()
        if kind not in seen.ideal:  # whose FLOPs are not counted, but a core that is written anew has some
            once = [i for i, alone in enumerate(mine["called once"]) if alone and not extra]
            trial.require(
                not once,
                f"{kind}: the core is called once in the layers {once}, in the forward alone",
                cause="a fused core is left out" if len(once) == layers else "",
                help="Checkpoint block.attn.core of every layer, whatever core it is.",
            )
            continue
        # Stopping before the last product, whose result nobody needs, is as good: PyTorch does so.
        trial.require(
            extra in (layers * core, layers * product),
            f"{kind}: a step takes {extra:,} FLOPs more than without; 4·b·s²·h in {layers} layers are "
            f"{layers * core:,}",
            help="Checkpoint block.attn.core, of every layer and of any class, and no more.",
            cause=told.get(extra, "") if extra else why_not_again(seen, kind),
        )
        blocks, names = (sorted({name.split(".", 1)[i] for name in mine["twice"]}) for i in range(2))
        trial.require(
            not mine["twice"],
            f"{kind}: of block {', '.join(blocks)}, {', '.join(names)} are called twice",
            help="Checkpoint block.attn.core alone: what lies around it is kept.",
            cause="a whole block is computed again, but for its products, whose results are kept",
        )


def why_not_again(seen: SimpleNamespace, kind: str) -> str:
    """Why no core of this kind is computed again."""
    if seen.in_training(kind)["called again"]:
        return "nothing is computed again, where the model was given in evaluation mode: train() came after"
    if all(mine["called again"] for other, (mine, _) in seen.runs.items() if other not in seen.ideal):
        return "plain cores are left out, and fused ones are computed again: is a core told by its class?"
    return "nothing is computed again"


@check("recompute_attention")
def scores_do_not_stay_alive(trial: Trial) -> None:
    """After the forward, no s×s matrix is alive: queries, keys and values are, and all outside the core."""
    seen = ready(trial)
    for kind, ideal in seen.ideal.items():
        mine, plain = seen.runs[kind]
        alive, expected, without = (
            run["recording"].alive("after the forward") for run in (mine, ideal, plain)
        )
        slack = seen.config.n_layer * STATE_BYTES + 8000
        # A backward written by hand may keep the core's result; one that calls the core again need not.
        results = 0 if mine["called again"] else seen.config.n_layer * seen.stream
        more = (alive - expected) / (seen.config.n_layer * seen.stream)
        copies = round(more)
        trial.require(
            alive <= expected + results + slack,
            f"{kind}: {alive:,} bytes are alive after the forward, {alive - expected:,} too many; "
            f"without recomputation it is {without:,}",
            help="Of the core, keep q, k and v, which are views of c_attn's output, and no copies "
            "beside it. Scores, probabilities and masks go.",
            cause="nothing is saved"
            if alive >= without - slack
            else told
            if (told := ends_before(seen, mine, plain, alive - expected, slack))
            else f"each layer keeps {['one tensor', 'two tensors', 'three tensors'][copies - 1]} more of the "
            "size of q: a copy, or the core's result"
            if copies in (1, 2, 3) and abs(more - copies) < 0.2
            else "",
        )


def ends_before(seen: SimpleNamespace, mine: dict, plain: dict, more: int, slack: int) -> str:
    """Of a core that is computed again in part, with one of its two products: what of it is not, in words."""
    layers = seen.config.n_layer
    extra = mine["recording"].flops() - plain["recording"].flops()
    if mine["called again"] or extra != layers * seen.product:
        return ""
    for matrices, again in {1: "scores, softmax and dropout", 2: "scores and softmax"}.items():
        if abs(more - layers * (matrices * seen.matrix + seen.stream)) <= slack:  # and v in one piece
            kept = "the product with the values keeps what dropout has left of the probabilities"
            mask = "dropout keeps its mask, and " * (matrices == 2)
            return f"only {again} are computed again: {mask}{kept}"
    return ""


LAST_CORES = (
    "every core but the last drew its generator's next numbers, as where each of them is computed again with "
    "the last one's generators: a function made in a loop looks its variables up when it is called"
)


def own_generators(rank: Any, how: str, sizes: dict, seed: int, idx: Tensor) -> dict:
    """A step, then two passes and backward of both, before which all cores get other generators.

    For the first step, all cores but the first get theirs after the change.
    """
    model = build(lambda: make("plain", GPTConfig(**sizes)), seed, rank.device)
    before, cores = dict(model.named_parameters()), [block.attn.core for block in model.transformer.h]
    for core in cores:
        core.dropout = Dropout(core.dropout.p)
    first, *others = dropouts = [core.dropout for core in cores]
    give_generators([first], seed, rank.device)
    if how == "mine":
        model = rank.submission.recompute_attention(model)
    elif how == "unaware":
        never_replayed(cores)
    elif how == "last alone":
        never_replayed(cores[:-1])
    elif how == "seeded":
        replayed(cores, seeded=True)
    elif how == "at the change":
        replayed_as_of_now(cores)
    give_generators(others, seed + 1, rank.device)
    model(idx)[0].square().mean().backward()
    if how == "remembered":
        never_replayed(cores)
    give_generators(dropouts, seed + len(cores), rank.device)
    undrawn = [next_numbers(each.generator) for each in dropouts]
    one, two = model(idx)[0], model(idx.flip(1))[0]
    (one.square().mean() + two.sin().mean()).backward()
    return {
        "gradients": gradients(before),
        "drawn": [next_numbers(each.generator) for each in dropouts],
        "undrawn": undrawn,
        "calls": [core.calls for core in cores],
    }


@check("recompute_attention")
def generators_of_dropouts_repeat(trial: Trial) -> None:
    """A generator that a core's Dropout has of its own repeats its numbers too, and goes on as without."""
    config = GPTConfig(
        block_size=16, vocab_size=20, n_layer=3, n_head=2, n_embd=2 * trial.integer(8, 12), dropout=0.3
    )
    inputs, seeds = (asdict(config), trial.seed(), trial.tokens(20, 2, 16)), [trial.seed()]

    def run(how: str) -> dict:
        return trial.run(own_generators, how, *inputs, seeds=seeds)[0]

    mine, plain = run("mine"), run("plain")
    *others, last = calls = mine["calls"]
    trial.require(
        any(others) or not last,
        f"the core of the last block ran {last} times, and those of the blocks before it never did",
        cause="every block runs the last block's core: a function made in a loop looks its variables up when "
        "it is called",
        help=OWN_CORE,
    )
    alone = [i for i, times in enumerate(calls) if times == sum(calls) > 0]
    trial.require(
        not alone,
        f"the core of block {alone[0] if alone else 0} ran {sum(calls)} times, and those of the other blocks "
        "never did",
        cause="every block runs that one's core: each may have a dropout, and a generator, of its own"
        if sum(calls) >= sum(plain["calls"])
        else "",
        help=OWN_CORE,
    )
    trial.require(
        not all(map(torch.equal, mine["drawn"], mine["undrawn"])),
        "nothing was drawn from the generators that the cores' dropouts have",
        cause="" if any(mine["calls"]) else "the model's cores never ran: others have taken their place",
        help="Run the core that a block has, with the dropout that is in it, which may have a generator.",
    )
    slips = {NEXT_NUMBERS: lambda: run("unaware")["gradients"]}
    slips[REMEMBERED] = lambda: run("remembered")["gradients"]
    slips[AT_THE_CHANGE] = lambda: run("at the change")["gradients"]
    slips[SEEDED] = lambda: run("seeded")["gradients"]
    slips[LAST_CORES] = lambda: run("last alone")["gradients"]
    close_with_generators(trial, mine, plain, slips)


def some_frozen(rank: Any, sizes: dict, seed: int, idx: Tensor) -> tuple[str, list[int]]:
    """What it made of a GPT that was partly frozen, and how often each core was called in a pass of that."""
    model = build(lambda: make("plain", GPTConfig(**sizes)), seed, rank.device)
    cores = [block.attn.core for block in model.transformer.h]
    changed = partly_frozen(rank.submission.recompute_attention, model, idx)
    return changed, [core.calls for core in cores]


@check("recompute_attention")
def cores_of_frozen_blocks_are_computed_again_too(trial: Trial) -> None:
    """Cores of blocks with frozen weights are computed again too; modes, and what is frozen, stay."""
    require_frozen_too(
        trial,
        "recompute_attention",
        some_frozen,
        lambda blocks: f"the core of block {blocks} is called once, in the forward alone",
        help="A core has no weights: checkpoint it, whether those around it are trained or not.",
    )


def bystander(rank: Any, sizes: dict, seed: int, idx: Tensor) -> int:
    """How often backward calls a core of a GPT that was there when another one was changed."""
    other, model = (build(lambda: make("plain", GPTConfig(**sizes)), seed, rank.device) for _ in range(2))
    rank.submission.recompute_attention(model)
    y, cores = other(idx)[0], [block.attn.core for block in other.transformer.h]
    forward = sum(core.calls for core in cores)
    y.sum().backward()
    return sum(core.calls for core in cores) - forward


@check("recompute_attention")
def other_models_stay_as_they_are(trial: Trial) -> None:
    """It changes the given model, and no other one."""
    sizes = asdict(GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=16))
    trial.require(
        not trial.run(bystander, sizes, trial.seed(), trial.tokens(20, 2, 8))[0],
        "another GPT, which was there before, now computes its cores again in backward as well",
        help="Give the cores of this model another forward, `core.forward = ...`, and not their class.",
    )
