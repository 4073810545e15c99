"""Checks of `recompute_attention`: the core of attention is computed again, and nothing else."""

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import Trial, check, exercise
from nanogpt.model import GPT, Dropout, FusedAttention, GPTConfig, PlainAttention

from .models import (
    AT_THE_CHANGE,
    NEXT_NUMBERS,
    REMEMBERED,
    STATE_BYTES,
    build,
    close_by_name,
    close_with_generators,
    forgetful,
    give_generators,
    gpt,
    gradients,
    never_replayed,
    next_numbers,
    replayed_as_of_now,
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


class KeepsItsInputs(nn.Module):
    """What a core that is computed again keeps: queries, keys, values, and a result of its own."""

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(q, k, v)
            return v.contiguous().clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return gradient, gradient, gradient

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.Kept.apply(q, k, v)


class Counted(PlainAttention):
    """Knows how often it was called."""

    calls = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(q, k, v)


class CountedFused(FusedAttention):
    """The same of a fused core."""

    calls = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(q, k, v)


CountedFused.__name__ = FusedAttention.__name__  # for who asks a core what it is


class ByHand(nn.Module):
    """A core whose backward is written by hand and has a slip, to tell what that looks like."""

    class Core(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, slip: tuple[str, str], dropout: nn.Module, q: Tensor, k: Tensor, v: Tensor
        ) -> Tensor:
            future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
            scores = (q @ k.transpose(-2, -1)) / q.size(-1) ** 0.5
            probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
            factors = dropout(torch.ones_like(probabilities))
            ctx.slip = slip
            ctx.save_for_backward(q, k, v, probabilities, factors)
            return (probabilities * factors) @ v

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, Tensor, Tensor]:
            q, k, v, probabilities, factors = ctx.saved_tensors
            ways = {FACTORS: factors, MASK: factors > 0, NOTHING: 1.0}
            passed, summed = (gradient @ v.transpose(-2, -1) * ways[way] for way in ctx.slip)
            row_sums = (probabilities * summed).sum(-1, keepdim=True)
            of_scores = probabilities * (passed - row_sums) / q.size(-1) ** 0.5
            of_v = (probabilities * factors).transpose(-2, -1) @ gradient
            return None, None, of_scores @ k, of_scores.transpose(-2, -1) @ q, of_v

    def __init__(self, slip: tuple[str, str], dropout: nn.Module) -> None:
        super().__init__()
        self.slip, self.dropout = slip, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.Core.apply(self.slip, self.dropout, q, k, v)


FACTORS, MASK, NOTHING = "factors", "mask", "nothing"
UNSCALED = (
    "in the core's backward, the gradient of the probabilities is masked by dropout, but not divided by 1 - p"
)
UNDROPPED = "in the core's backward, the gradient of the probabilities has not passed dropout"
SUMS_RIGHT = ", while the sums that softmax subtracts are right"
BY_HAND = {
    UNSCALED: (MASK, MASK),
    UNSCALED + SUMS_RIGHT: (MASK, FACTORS),
    UNDROPPED: (NOTHING, NOTHING),
    UNDROPPED + SUMS_RIGHT: (NOTHING, FACTORS),
    "in the core's backward, what softmax subtracts in each row is a sum without dropout": (FACTORS, NOTHING),
}
"""What it looks like → what dropout's backward multiplies by: for the gradient, and in softmax's sums."""

FACTORS_OF_THE_FORWARD = (
    "Dropout's backward multiplies by the very factors of the forward: 0 where it dropped, and 1/(1 - p) "
    "elsewhere. Softmax's backward subtracts, in each row, the sum of probability times that product."
)


def make(kind: str, config: GPTConfig) -> GPT:
    """A GPT with cores of a kind: "fused" or "plain"."""
    model = gpt(config, plain_attention=False)
    for block in model.transformer.h:
        block.attn.core = (Counted if kind == "plain" else CountedFused)(config.dropout)
    return model


def step(rank: Any, how: str, kind: str, sizes: dict, seed: int, idx: Tensor, targets: Tensor) -> dict:
    """One pass of a GPT with attention cores of this kind."""
    model = build(lambda: make(kind, GPTConfig(**sizes)), seed, rank.device)
    before, changed = dict(model.named_parameters()), model
    cores = [block.attn.core for block in model.transformer.h]
    if how in ("mine", "mine, given in training mode"):
        given = model.train(kind == "fused" or how != "mine")  # it may be in eval mode when it is changed
        changed = rank.submission.recompute_attention(given)
        model.train()
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
    result |= {"loss": loss.detach().clone(), "logits": logits.detach().clone(), "recording": recording}
    result |= {"gradients": gradients(before), "drawn": torch.rand(4, device=rank.device)}
    calls = [getattr(core, "calls", 0) for core in cores]
    result |= {"called again": all(n == 2 for n in calls), "called once": [n == 1 for n in calls]}
    return result | {"evaluation": evaluation(changed.eval(), before, idx, targets)}


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
        other=lambda how, kind: run(how, *kinds[kind])["gradients"],
        in_training=lambda kind: run("mine, given in training mode", *kinds[kind]),
        ideal={kind: run("ideal", *how) for kind, how in kinds.items() if how[0] != "fused"},
        config=config,
        stream=4 * b * s * config.n_embd,
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
                help="The core computes what it did: causal, scaled by the root of d, with dropout. Each "
                "layer has its own core: a function made in a loop looks its variables up when it is called.",
            )
        expected = plain["gradients"]
        slips = {"the second run drew another dropout mask": partial(seen.other, "another mask", kind)}
        if kind in seen.ideal:
            slips |= {told: partial(seen.other, told, kind) for told in BY_HAND}
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


def nearest_to_a_core_first(names: Iterable[str]) -> list[str]:
    """The last layer's c_attn, which a single core lies behind, and then the others as they are."""
    last = [name for name in names if name.endswith("attn.c_attn.weight")][-1:]
    return [*last, *(name for name in names if name not in last)]


@check("recompute_attention")
def evaluation_is_as_without(trial: Trial) -> None:
    """In evaluation mode, logits and gradients are those of the model as it was: nothing is dropped."""
    for kind, (mine, plain) in ready(trial).runs.items():
        given, expected = mine["evaluation"], plain["evaluation"]
        help = (
            "Look at core.training each time the core is called: model.eval() may come after this function."
        )
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
            else f"each layer keeps {['one tensor', 'two tensors', 'three tensors'][copies - 1]} more of the "
            "size of q: a copy, or the core's result"
            if copies in (1, 2, 3) and abs(more - copies) < 0.2
            else "",
        )


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
    elif how == "at the change":
        replayed_as_of_now(cores)
    give_generators(others, seed + 1, rank.device)
    model(idx)[0].square().mean().backward()
    if how == "remembered":
        never_replayed(cores)
    give_generators(dropouts, seed + len(cores), rank.device)
    one, two = model(idx)[0], model(idx.flip(1))[0]
    (one.square().mean() + two.sin().mean()).backward()
    return {
        "gradients": gradients(before),
        "drawn": [next_numbers(each.generator) for each in dropouts],
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

    mine = run("mine")
    *others, last = mine["calls"]
    trial.require(
        any(others) or not last,
        f"the core of the last block ran {last} times, and those of the blocks before it never did",
        cause="every block runs the last block's core: a function made in a loop looks its variables up when "
        "it is called",
        help="Give each function its own core when it is made: functools.partial(function, core.forward).",
    )
    slips = {NEXT_NUMBERS: lambda: run("unaware")["gradients"]}
    slips[REMEMBERED] = lambda: run("remembered")["gradients"]
    slips[AT_THE_CHANGE] = lambda: run("at the change")["gradients"]
    slips[LAST_CORES] = lambda: run("last alone")["gradients"]
    close_with_generators(trial, mine, run("plain"), slips)


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
