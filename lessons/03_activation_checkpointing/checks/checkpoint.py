"""Checks of `checkpoint`: what it computes, what it keeps, how often it calls the function."""

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import Trial, check, exercise

from .models import (
    ANOTHER_MASK,
    STATE_BYTES,
    STATE_KEPT,
    Layers,
    build,
    checkpoint_of,
    close_by_name,
    describe_call,
    gradients,
)

exercise(
    "checkpoint",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "There are two ways. An autograd.Function, whose forward runs the function under no_grad and whose "
        "backward runs it once more with gradients; or saved_tensors_hooks, which hand autograd a stand-in "
        "for every tensor that it wants to keep.",
        "autograd.Function: detach the inputs before the second run, and call torch.autograd.backward on "
        "what it returns: weights get their gradients by that. Backward is called at all only if an input "
        "of Function.apply needs a gradient: hand it a tensor of your own that does.",
        "saved_tensors_hooks: the second run keeps the same tensors in the same order as the first. The "
        "first stand-in that backward asks for starts that run, under hooks that fill in all stand-ins.",
        "torch.get_rng_state() before the first run; in backward the state of now is put aside, the old "
        "one set, the function run, and the state of now set again. torch.is_autocast_enabled('cpu') and "
        "torch.get_autocast_dtype('cpu') tell what to wrap the second run in.",
    ),
)

HELP_MASK = (
    "Dropout must drop the same elements in both calls: keep the random state of before the first call, and "
    "set it for the second one."
)


# --- three checkpoints in a row, with dropout ---


def chain(rank: Any, how: str, seed: int, a: Tensor, upstream: Tensor) -> dict:
    """Three checkpoints in a row, the last one of the first one's function."""
    checkpoint = checkpoint_of(rank, how)
    first, second = build(
        lambda: nn.ModuleList([Layers(a.size(-1), 0.3), Layers(a.size(-1), 0.3)]), seed, rank.device
    )
    x = a.requires_grad_() * 2  # not a leaf: its own graph must be gone through once
    with rank.record(memory=True) as recording:
        y = checkpoint(first, x)
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            peek = torch.rand(4, device=rank.device)
        y = checkpoint(second, y)
        y = checkpoint(first, y)
        recording.mark("after the forward")
        called = [len(first.calls), len(second.calls)]
        between = torch.rand(4, device=rank.device)
        if y.requires_grad:
            y.backward(upstream)
    drawn = {
        "between forward and backward": between,
        "after backward": torch.rand(4, device=rank.device),
    }
    return {
        "output": y.detach().clone(),
        "gradients": {"the gradient of the input": a.grad}
        | {f"the gradient of first.{name}": g for name, g in gradients(first).items()}
        | {f"the gradient of second.{name}": g for name, g in gradients(second).items()},
        "called": [called, [len(first.calls), len(second.calls)]],
        "by_torch": any(call["by_torch"] for call in first.calls + second.calls),
        "drawn": drawn,
        "peek": peek,
        "recording": recording,
    }


def observe_chain(trial: Trial) -> SimpleNamespace:
    shape = trial.integer(12, 18), trial.integer(20, 30), trial.integer(33, 41)
    inputs = trial.seed(), trial.normal(*shape), trial.normal(*shape)
    seeds = [trial.seed()]
    run = partial(trial.run, chain, seeds=seeds)
    mine, plain = (run(how, *inputs)[0] for how in ("mine", "plain"))
    others = {
        f"the second call drew another dropout mask{', each time the same' * (how == STATE_KEPT)}": partial(
            lambda how: run(how, *inputs)[0]["gradients"], how
        )
        for how in ANOTHER_MASK
    }
    num_bytes = 4 * shape[0] * shape[1] * shape[2]
    return SimpleNamespace(mine=mine, plain=plain, others=others, num_bytes=num_bytes)


@check("checkpoint")
def output_is_the_functions(trial: Trial) -> None:
    """The output is that of function(*inputs)."""
    seen = trial.once(observe_chain)
    help = "Call the function once with the inputs as they are, and return what it returns."
    trial.close("the output", seen.mine["output"], seen.plain["output"], help=help)


@check("checkpoint")
def gradients_are_the_functions_with_dropout(trial: Trial) -> None:
    """Gradients of inputs and weights are those of function(*inputs), with dropout in it."""
    seen = trial.once(observe_chain)
    expected = seen.plain["gradients"]
    twice = "it counts twice: is backward run through the same part of the graph twice?"
    slips = {**seen.others, twice: lambda: {name: 2 * gradient for name, gradient in expected.items()}}
    help = HELP_MASK + " Gradients end at the inputs: in an autograd.Function, detach them first."
    close_by_name(trial, {name: name for name in expected}, seen.mine["gradients"], expected, slips, help)


@check("checkpoint")
def random_state_is_as_without(trial: Trial) -> None:
    """Random numbers drawn after the forward, and after backward, are those of a run without checkpoints."""
    seen = trial.once(observe_chain)
    for when, expected in seen.plain["drawn"].items():
        trial.close(
            f"a random number drawn {when}",
            seen.mine["drawn"][when],
            expected,
            alternatives={"backward ended in the random state of its second call": seen.plain["peek"]},
            help="Put the state of now aside before the second call, and set it again after it: "
            "torch.random.fork_rng() does both.",
        )


@check("checkpoint")
def function_is_called_once_more(trial: Trial) -> None:
    """The function is called once in the forward and once in backward."""
    seen = trial.once(observe_chain)
    forward, both = seen.mine["called"]
    for name, times, now, later in zip(("first", "second"), (2, 1), forward, both, strict=True):
        of = f"{times} checkpoint{'s' * (times > 1)} of `{name}`"
        trial.require(
            now == times,
            f"{of} called it {now} times in the forward",
            help="The forward calls the function once.",
        )
        again = later - now
        trial.require(
            again == times,
            f"{of} called it {again} times in backward",
            help="A backward without a second call has kept what it should not, or never ran."
            if again < times
            else "Compute again once for all tensors that backward asks for: keep what the second call made "
            "until it is used.",
        )


@check("checkpoint")
def costs_one_forward_more(trial: Trial) -> None:
    """Matrix products cost at most one forward of the function more than without checkpointing."""
    seen = trial.once(observe_chain)
    mine, plain = seen.mine["recording"], seen.plain["recording"]
    budget = plain.flops() + plain.flops(after="")
    trial.require(
        mine.flops() <= budget,
        f"forward and backward take {mine.flops():,} FLOPs; without checkpointing they take "
        f"{plain.flops():,}, and one forward more makes {budget:,}",
        help="Is backward run twice, once for the inputs and once for the weights? One call of "
        "torch.autograd.backward serves both.",
    )


@check("checkpoint")
def nothing_inside_stays_alive(trial: Trial) -> None:
    """After the forward, inputs and outputs exist, and nothing that was computed in between."""
    seen = trial.once(observe_chain)
    alive, without = (run["recording"].alive("after the forward") for run in (seen.mine, seen.plain))
    # Three outputs, and three copies of inputs for those who make them.
    budget = 6 * seen.num_bytes + 3 * STATE_BYTES
    hidden = 3 * 4 * seen.num_bytes
    cause = ""
    if alive >= without - budget:
        cause = "nothing is saved: all is there that autograd keeps without checkpointing"
    elif alive >= hidden:
        cause = "as many bytes as a tensor of the wide layer in each call: who holds it?"
    trial.require(
        alive <= budget,
        f"after three checkpoints {alive:,} bytes are alive; inputs and outputs are "
        f"{4 * seen.num_bytes:,}, and without checkpointing it would be {without:,}",
        help="Every storage counts that still exists, whoever holds it: the graph, a list, an attribute. "
        "Hold the inputs and nothing else.",
        cause=cause,
    )


@check("checkpoint")
def torchs_own_is_not_used(trial: Trial) -> None:
    """It is made by hand: torch.utils.checkpoint does not run the function."""
    help = (
        "Use torch.autograd.Function or torch.autograd.graph.saved_tensors_hooks. Section 6 uses PyTorch's."
    )
    used = trial.once(observe_chain).mine["by_torch"]
    trial.require(not used, "the function was called by torch.utils.checkpoint", help=help)


# --- inputs ---


class Table(nn.Module):
    """Functions of inputs that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, 6)
        self.layers = Layers(6)

    def of_tokens(self, tokens: Tensor) -> Tensor:
        return self.layers(self.rows(tokens))

    def of_no_tensor(self, nothing: None, factor: int) -> Tensor:
        return self.layers(self.rows.weight) * factor


WITHOUT = {
    "of a tensor that needs no gradient": lambda table, x, tokens: (table.layers, x),
    "of tokens": lambda table, x, tokens: (table.of_tokens, tokens),
    "of None and a number": lambda table, x, tokens: (table.of_no_tensor, None, 3),
}


def without_gradient(rank: Any, how: str, seed: int, x: Tensor, tokens: Tensor) -> dict:
    """By case, a checkpoint of which no input needs a gradient."""
    seen = {}
    for case, call in WITHOUT.items():
        table = build(Table, seed, rank.device)
        y = checkpoint_of(rank, how)(*call(table, x, tokens))
        seen[case] = {"connected": y.requires_grad, "output": y.detach().clone(), "gradients": {}}
        if not y.requires_grad:
            break  # the check ends here
        y.square().sum().backward()
        seen[case]["gradients"] = gradients(table)
    return seen


@check("checkpoint")
def weights_learn_where_no_input_needs_a_gradient(trial: Trial) -> None:
    """Weights used inside get their gradients also when no input needs one, or none is a tensor."""
    inputs = trial.normal(5, 6), trial.tokens(11, 5)
    seed, seeds = trial.seed(), [trial.seed()]
    all_mine, all_plain = (
        trial.run(without_gradient, how, seed, *inputs, seeds=seeds)[0] for how in ("mine", "plain")
    )
    for case, mine in all_mine.items():
        plain = all_plain[case]
        trial.require(
            mine["connected"],
            f"a checkpoint {case}: its output does not require a gradient, so the weights inside never learn",
            help="autograd calls the backward of a Function only if an input of apply() needs a gradient: "
            "hand it one more tensor that does. (The first block of a model whose embedding is frozen is "
            "such a place.)",
        )
        trial.close(f"the output of a checkpoint {case}", mine["output"], plain["output"])
        for name, expected in plain["gradients"].items():
            if expected is not None:
                trial.close(
                    f"the gradient of {name}, a weight inside a checkpoint {case},",
                    mine["gradients"][name],
                    expected,
                    help="torch.autograd.backward reaches all weights that the second call used; "
                    "torch.autograd.grad reaches what it is asked for.",
                )


class Mixed(nn.Module):
    """A function of inputs of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7))
        self.seen: list[list[str]] = []

    def forward(self, *inputs: Any) -> Tensor:
        self.seen.append([type(each).__name__ for each in inputs])
        x, power, nothing, word, rows, fixed, z, mask, options, same = inputs
        x = x[rows].tanh() ** power * self.weight + fixed
        if word == "double" and nothing is None and options["shift"]:
            x = 2 * x + options["shift"][0]
        return torch.where(mask, x, z) * same.mean()


def all_kinds(rank: Any, how: str, seed: int, tensors: dict[str, Tensor]) -> dict:
    """A checkpoint of numbers, words, None, tensors of all dtypes, and the same tensor twice."""
    module = build(Mixed, seed, rank.device)
    a, z, fixed = tensors["x"].requires_grad_(), tensors["z"].requires_grad_(), tensors["fixed"]
    other = a.detach().clone().requires_grad_()  # to tell what each of the two places passes back
    x, same = a * 1.5, (other if how == "plain" else a) * 1.5
    inputs = (x, 2, None, "double", tensors["rows"], fixed, z, tensors["mask"], {"shift": [0.5]}, same)
    if how != "plain":
        inputs = (*inputs[:-1], x)
    y = checkpoint_of(rank, how)(module, *inputs)
    y.backward(tensors["upstream"])
    gradient = {"x": a.grad, "z": z.grad, "the weight": module.weight.grad, "a tensor without": fixed.grad}
    gradient["the last input"] = other.grad
    return {"output": y.detach().clone(), "gradients": gradient, "seen": module.seen}


@check("checkpoint")
def inputs_are_of_any_kind(trial: Trial) -> None:
    """Inputs may be numbers, words, None, a dictionary, and tensors of which some need no gradient."""
    rows = trial.integer(4, 9)
    tensors = {
        "x": trial.normal(6, 7),
        "z": trial.normal(rows, 7),
        "fixed": trial.normal(rows, 7),
        "rows": trial.tokens(6, rows),
        "mask": trial.normal(rows, 7) > 0,
        "upstream": trial.normal(rows, 7),
    }
    seed, seeds = trial.seed(), [trial.seed()]
    mine, plain = (trial.run(all_kinds, how, seed, tensors, seeds=seeds)[0] for how in ("mine", "plain"))
    trial.close("the output", mine["output"], plain["output"])
    for call in mine["seen"]:
        expected = ["Tensor" if name == "Parameter" else name for name in plain["seen"][0]]
        help = "Hand the function what you were handed, in the same places, in both calls."
        trial.equal("the kinds of inputs that the function is called with", call, expected, help=help)
    trial.require(
        mine["gradients"]["a tensor without"] is None, "a tensor that needs no gradient has one afterwards"
    )
    first, last = (plain["gradients"][name] for name in ("x", "the last input"))
    places = {"that of its first place alone": first, "that of its last place alone": last}
    help = "x comes in twice: what both places pass back adds up. Return a gradient for every input."
    trial.close("the gradient of x", mine["gradients"]["x"], first + last, alternatives=places, help=help)
    for name in ("z", "the weight"):
        trial.close(f"the gradient of {name}", mine["gradients"][name], plain["gradients"][name], help=help)


# --- autocast, and generators ---


def under_autocast(rank: Any, how: str, seed: int, inside: bool, x: Tensor, upstream: Tensor) -> dict:
    """Forward under autocast, backward after it; or, for comparison, no autocast at all."""
    layers, device = build(lambda: Layers(x.size(-1), 0.2), seed, rank.device), rank.device.type
    x = x.requires_grad_()
    with torch.autocast(device, torch.bfloat16, enabled=inside):
        y = checkpoint_of(rank, how)(layers, x)
    y.backward(upstream.to(y.dtype))
    return {
        "output": y.detach().clone(),
        "gradients": {"the input": x.grad, **gradients(layers)},
        "autocast": [call["autocast"] for call in layers.calls],
    }


@check("checkpoint")
def works_inside_autocast(trial: Trial) -> None:
    """A function that ran under autocast is computed again under the same autocast."""
    inputs = trial.normal(9, 8), trial.normal(9, 8)
    seed, seeds = trial.seed(), [trial.seed()]
    mine, plain, off = (
        trial.run(under_autocast, how, seed, inside, *inputs, seeds=seeds)[0]
        for how, inside in (("mine", True), ("plain", True), ("plain", False))
    )
    help = (
        "Backward runs outside of autocast. Remember torch.is_autocast_enabled(device_type) and "
        "torch.get_autocast_dtype(device_type), and put the second call into torch.autocast(...) with them."
    )
    expected = [plain["autocast"][0]] * len(mine["autocast"])
    trial.equal("the autocast of each call of the function", mine["autocast"], expected, help=help)
    trial.close("the output under autocast", mine["output"], plain["output"])
    for name, expected in plain["gradients"].items():
        trial.close(
            f"the gradient of {name} under autocast",
            mine["gradients"][name],
            expected,
            alternatives={"the second call computed in float32": off["gradients"][name]},
            help=help,
        )


class Masked(nn.Module):
    """Dropout from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.calls: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(describe_call(x.device.type))
        mask = torch.empty_like(x).bernoulli_(0.5, generator=self.generator)
        return (x * self.weight * mask).sin()


def own_generator(rank: Any, how: str, seed: int, x: Tensor) -> dict | None:
    """A checkpoint that is told of a generator; None where `checkpoint` has no such parameter."""
    checkpoint = checkpoint_of(rank, how)
    if how == "mine" and "generators" not in inspect.signature(checkpoint).parameters:
        return None
    module = build(Masked, seed, rank.device)
    module.generator = torch.Generator(rank.device).manual_seed(seed)
    told = {"generators": [module.generator]} if how == "mine" else {}
    y = checkpoint(module, x.requires_grad_(), **told)
    y.sum().backward()
    after = torch.rand(4, device=rank.device, generator=module.generator)
    return {"x": x.grad, "weight": module.weight.grad, "after": after}


@check("checkpoint")
def given_generators_repeat(trial: Trial) -> None:
    """Generators that it is told of repeat their numbers too, and go on afterwards as without."""
    x, seed, seeds = trial.normal(9, 8), trial.seed(), [trial.seed()]
    mine, plain = (trial.run(own_generator, how, seed, x, seeds=seeds)[0] for how in ("mine", "plain"))
    if mine is None:
        return
    help = (
        "generator.get_state() and generator.set_state(state) do for it what get_rng_state does for torch's."
    )
    for name in ("x", "weight"):
        trial.close(
            f"the gradient of {name}, where dropout has a generator of its own,",
            mine[name],
            plain[name],
            help=help,
        )
    trial.close("the generator's next number after backward", mine["after"], plain["after"], help=help)
