"""Checks of `checkpoint`: what it computes, how often it calls the function, what that costs."""

import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grader.checks import Fault, Trial, check, exercise

from .models import (
    ANOTHER_MASK,
    UPSTREAM_IGNORED,
    Given,
    Layers,
    build,
    checkpoint_of,
    close_by_name,
    describe_call,
    gradients,
    seeing,
)

exercise(
    "checkpoint",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "There are two ways. Write an autograd.Function: its forward runs the function under no_grad, its "
        "backward runs it once more with gradients. Or use saved_tensors_hooks: they hand autograd a "
        "stand-in for every tensor that it wants to keep.",
        "autograd.Function: detach the inputs before the second run, and call torch.autograd.backward on "
        "what it returns, if that requires a gradient. That gives the weights their gradients. Autograd "
        "calls your backward only if an input of Function.apply needs a gradient: hand it a tensor of your "
        "own that does.",
        "saved_tensors_hooks: the second run keeps the same tensors in the same order as the first. Start "
        "it when backward asks for the first stand-in, under hooks that fill in all stand-ins.",
        "Call torch.get_rng_state() before the first run. In backward, put the present state aside, set the "
        "old one, run the function, and set the present state again. torch.is_autocast_enabled('cpu') and "
        "torch.get_autocast_dtype('cpu') say what to wrap the second run in.",
    ),
)

HELP_MASK = (
    "Dropout must drop the same elements in both calls: keep the random state of before the first call, and "
    "set it for the second one."
)

OTHER_DRAWS = (
    "the first call found another random state than it finds without a checkpoint, and so its dropout drops "
    "other elements: a seed was set before it, or a number drawn"
)
HELP_DRAWS = "Before the first call only read the random state; set it, to what was read, for the second one."

HELP_INPUTS = "The second call gets what the first got: the inputs themselves, whole and unchanged."


# --- tensors that say which they are ---


class Memory:
    """Gives out at once what was given back, as allocators may: a tensor lies where another one was."""

    def __init__(self) -> None:
        self.free: list[bytearray] = []
        self.addresses: list[int] = []

    def full(self, number: int) -> Tensor:
        place = self.free.pop() if self.free else bytearray(12)
        array = np.frombuffer(place, dtype=np.float32)
        array[:] = number
        self.addresses.append(array.ctypes.data)
        weakref.finalize(array, self.free.append, place)
        return torch.from_numpy(array)


class Keep(torch.autograd.Function):
    """Keeps tensors full of a number each; backward notes what it was given in their place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, memory: Memory, numbers: list[int], asked: list[tuple[int, float]]
    ) -> Tensor:
        ctx.save_for_backward(*(memory.full(n).to(x.device) for n in numbers))
        ctx.numbers, ctx.asked = numbers, asked
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.asked += [(n, float(given[0])) for n, given in zip(ctx.numbers, ctx.saved_tensors, strict=True)]
        return gradient, None, None, None


class Numbered(torch.nn.Module):
    """Keeps four tensors for backward, in three operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []
        self.asked: list[tuple[int, float]] = []
        self.memory = Memory()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(describe_call(x))
        for numbers in ([1], [2, 3], [4]):
            x = Keep.apply(x, self.memory, numbers, self.asked)
        return x


def numbered(rank: Any, x: Tensor) -> dict:
    """What backward asked for and was given, and what it is given where an address stands for a tensor."""
    function = Numbered()
    y = checkpoint_of(rank, "mine")(function, x.requires_grad_())
    if y.requires_grad:
        with seeing(function.calls):
            y.sum().backward()
    addresses = function.memory.addresses[:4]  # of the first call
    by_address = list(dict.fromkeys(addresses))
    return {
        "asked": function.asked,
        "by address": [1 + by_address.index(addresses[number - 1]) for number, _ in function.asked],
    }


@check("checkpoint")
def backward_gets_the_tensors_that_it_asks_for(trial: Trial) -> None:
    """Where backward asks for the k-th tensor that the function kept, it gets the k-th."""
    seen = trial.run(numbered, trial.normal(5))[0]
    asked, given = ([pair[i] for pair in seen["asked"]] for i in range(2))
    trial.require(
        asked == given,
        f"backward asked for the tensors {', '.join(map(str, asked))} of those that a function kept, in this "
        f"order, and got {', '.join(f'{number:g}' for number in given)}",
        cause="tensors are told apart by where they lie, as data_ptr() says it: one may lie where another "
        "was, which is gone"
        if given == seen["by address"]
        else "the tensors of the second run are handed out in another order than backward asks for them",
        help="Backward goes from the end to the start. Number the tensors when they are kept, hand the "
        "number to autograd instead, and find the tensor of the second run by it.",
    )


# --- three checkpoints in a row, with dropout ---


def chain(rank: Any, how: str, seed: int, a: Tensor, upstream: Tensor) -> dict:
    """Three checkpoints in a row, the last one of the first one's function."""
    checkpoint = checkpoint_of(rank, how)
    first, second = build(
        lambda: nn.ModuleList([Layers(a.size(-1), 0.3), Layers(a.size(-1), 0.3)]), seed, rank.device
    )
    x = a.requires_grad_() * 2  # not a leaf: its own graph must be gone through once
    with rank.record() as recording:
        y = checkpoint(first, x)
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            peek = torch.rand(4, device=rank.device)
        y = checkpoint(second, y)
        y = checkpoint(first, y)
        recording.mark("after the forward")
        called = [len(first.calls), len(second.calls)]
        between = torch.rand(4, device=rank.device)
        if y.requires_grad:
            with seeing(first.calls, second.calls):
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
        "given": [[call["given"] for call in layers.calls] for layers in (first, second)],
        "needs": [call["needs"] for call in first.calls[called[0] :] + second.calls[called[1] :]],
        "began in": [layers.calls[0]["random state"] for layers in (first, second) if layers.calls],
        "resumed": len(second.calls) == 2
        and second.calls[0]["random state"]
        != second.calls[1]["random state"]
        == second.calls[0]["after its first draw"],
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
        told: partial(lambda how: run(how, *inputs)[0]["gradients"], how)
        for how, told in ANOTHER_MASK.items()
    }
    others[UPSTREAM_IGNORED] = lambda: run(UPSTREAM_IGNORED, *inputs)[0]["gradients"]
    return SimpleNamespace(mine=mine, plain=plain, others=others)


@check("checkpoint")
def output_is_the_functions(trial: Trial) -> None:
    """The output is that of function(*inputs)."""
    seen = trial.once(observe_chain)
    slips = {}
    if seen.mine["began in"] != seen.plain["began in"]:
        slips[OTHER_DRAWS] = Fault(seen.mine["output"], HELP_DRAWS)
    help = "Call the function once with the inputs as they are, and return what it returns."
    trial.close("the output", seen.mine["output"], seen.plain["output"], alternatives=slips, help=help)


LAST_FIRST = (
    "the random states of all calls lie in one place, and a second call takes the latest: backward may come "
    "in another order, or never"
)


def unordered(rank: Any, how: str, seed: int, xs: list[Tensor]) -> dict:
    """Three checkpoints: no backward of the first, then one of the second, then one of the third."""
    layers = build(lambda: Layers(xs[0].size(-1), 0.3), seed, rank.device)
    xs = [x.requires_grad_() for x in xs]
    ys = [checkpoint_of(rank, how)(layers, x) for x in xs]
    with seeing(layers.calls):
        for y in ys[1:]:
            y.square().sum().backward()
    _, first, second, *again = [call["random state"] for call in layers.calls]
    found = {"the gradient of the input of the second": xs[1].grad, "that of the third's": xs[2].grad}
    return {"gradients": found | gradients(layers), "latest": again in ([second, first], [second, second])}


def require_any_order(trial: Trial) -> None:
    """Checkpoints of which none needs another have a backward in the order of their forwards."""
    inputs, seeds = (trial.seed(), [trial.normal(5, 6) for _ in range(3)]), [trial.seed()]
    mine, plain = (trial.run(unordered, how, *inputs, seeds=seeds)[0] for how in ("mine", "plain"))
    for name, expected in plain["gradients"].items():
        trial.close(
            f"three checkpoints in a row, with backward of the second before that of the third: {name}",
            mine["gradients"][name],
            expected,
            alternatives={LAST_FIRST: Fault(mine["gradients"][name], HELP_OWN)} if mine["latest"] else {},
            help=HELP_MASK,
        )


HELP_OWN = "Each call keeps the random state that it found itself: in a local variable, or on ctx."


def quiet(rank: Any, x: Tensor) -> dict:
    """The output under no_grad, the function's own, and whether there is a graph behind it."""
    layer = torch.nn.Linear(len(x), 3, device=rank.device)
    with torch.no_grad():
        y = checkpoint_of(rank, "mine")(layer, x)
        return {"output": y, "function's": layer(x), "graph": y.requires_grad}


@check("checkpoint")
def without_gradients_it_is_a_call(trial: Trial) -> None:
    """Under torch.no_grad() it returns what the function does, and no graph that would keep the inputs."""
    seen = trial.run(quiet, trial.normal(5))[0]
    trial.require(
        isinstance(seen["output"], Tensor) and torch.equal(seen["output"], seen["function's"]),
        "under no_grad the output is not that of function(*inputs)",
    )
    trial.require(
        not seen["graph"],
        "under no_grad the output requires a gradient, and keeps the inputs for it",
        help="Where torch.is_grad_enabled() is False there will be no backward: return function(*inputs).",
    )


TAKEN_AT_A_DRAW = (
    "the second call began with the random state of after the function's first draw: it was taken too late"
)
BEFORE_THE_CALL = (
    "Take the random state before you call the function: its first draw may come before anything is kept."
)


@check("checkpoint")
def gradients_are_the_functions_with_dropout(trial: Trial) -> None:
    """Gradients of inputs and weights are those of function(*inputs), with dropout in it."""
    seen = trial.once(observe_chain)
    expected = seen.plain["gradients"]
    if seen.mine["gradients"]["the gradient of the input"] is None and not all(seen.mine["needs"]):
        trial.wrong(
            "the gradient of the input is None",
            cause="the second call got an input that needs no gradient, and so found none for it",
            help="detach() also takes requires_grad off: x.detach().requires_grad_(x.requires_grad).",
        )
    twice = "it counts twice: is backward run through the same part of the graph twice?"
    slips = {**seen.others, twice: lambda: {name: 2 * gradient for name, gradient in expected.items()}}
    steps = {told: HELP_MASK for told in ANOTHER_MASK.values()}
    steps[UPSTREAM_IGNORED] = "torch.autograd.backward(output, gradient): hand it what backward was given."
    if seen.mine["resumed"]:
        slips[TAKEN_AT_A_DRAW], steps[TAKEN_AT_A_DRAW] = (lambda: seen.mine["gradients"]), BEFORE_THE_CALL
    if other := other_inputs(seen.mine):
        slips[other], steps[other] = (lambda: seen.mine["gradients"]), HELP_INPUTS
    help = (
        "The second call is the first one over again, random numbers too; backward of it begins with the "
        "gradient that comes in, and ends at the inputs: in an autograd.Function, detach them first."
    )
    names = {name: name for name in expected}
    close_by_name(trial, names, seen.mine["gradients"], expected, slips, help, steps)
    require_any_order(trial)


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
    """The function is called once in the forward and once in backward, with the same inputs."""
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
        calls = seen.mine["given"][name == "second"]
        trial.require(
            sorted(calls[:times]) == sorted(calls[times:]),
            f"`{name}` was called with {in_words(calls[:times])} in the forward, and with "
            f"{in_words(calls[times:])} in backward",
            help=HELP_INPUTS,
        )
    require_two_calls_of_a_small_module(trial)


def small(rank: Any, training: bool, seed: int, x: Tensor) -> list[int]:
    """How often a checkpoint calls a small module, in either mode: in the forward, and in all."""
    layers = build(lambda: Layers(x.size(-1), 0.3), seed, rank.device).train(training)
    y = checkpoint_of(rank, "mine")(layers, x.requires_grad_())
    called = len(layers.calls)
    if y.requires_grad:
        with seeing(layers.calls):
            y.sum().backward()
    return [called, len(layers.calls)]


def require_two_calls_of_a_small_module(trial: Trial) -> None:
    given = trial.seed(), trial.normal(5, 6)
    forward, both = trial.run(small, False, *given)[0]
    if (forward, both) == (1, 2):
        return
    whatever_the_mode = trial.run(small, True, *given)[0] == [forward, both]
    all_kept = "all is kept, and nothing computed again"
    what = "of a few numbers" if whatever_the_mode else "in evaluation mode"
    trial.wrong(
        f"the function is a module {what}: in the forward it was called {in_times(forward)}, and in backward "
        f"{in_times(both - forward)}",
        help="Keep the inputs alone here, too: no tensor is too small to be computed again."
        if whatever_the_mode
        else "Keep the inputs alone here, too: eval() changes what dropout does, and a backward may come.",
        cause=(f"of a small function {all_kept}" if whatever_the_mode else f"in evaluation mode {all_kept}")
        if both == forward == 1
        else "",
    )


def in_times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def other_inputs(mine: dict) -> str:
    """In words, that all calls are there, and of some function backward's were given other numbers."""
    for name, times, calls in zip(("first", "second"), (2, 1), mine["given"], strict=True):
        forward, backward = sorted(calls[:times]), sorted(calls[times:])
        if len(forward) == len(backward) and forward != backward:
            told = f"{in_words(forward)} in the forward, and {in_words(backward)} in backward"
            return f"the second call got other numbers than the first: `{name}` was called with {told}"
    return ""


def in_words(calls: list[Given]) -> str:
    """Inputs of calls, by shape and sum."""
    return " and ".join(f"{tuple(shape)}, sum {total:.6g}" for shape, total in calls)


@check("checkpoint")
def costs_one_forward_more(trial: Trial) -> None:
    """Matrix products cost one forward of the function more than without checkpointing."""
    seen = trial.once(observe_chain)
    mine, plain = seen.mine["recording"], seen.plain["recording"]
    forward = plain.flops(after="")
    most = plain.flops() + forward
    taken = (
        f"forward and backward take {mine.flops():,} FLOPs; without checkpointing they take {plain.flops():,}"
    )
    trial.require(
        mine.flops() <= most,
        f"{taken}, and one forward more makes {most:,}",
        help="Is backward run twice, once for the inputs and once for the weights? One call of "
        "torch.autograd.backward serves both.",
    )
    # The result of the last product, one of two, is needed by nobody: PyTorch's own stops before it.
    least = plain.flops() + forward // 2
    trial.require(
        mine.flops() >= least,
        f"{taken}, and a second forward, even without its last product, makes {least:,}",
        help="What backward needs is computed from the inputs, all of it: what is there already was kept.",
    )


@check("checkpoint")
def torchs_own_is_not_used(trial: Trial) -> None:
    """It is made by hand: torch.utils.checkpoint does not run the function."""
    help = (
        "Use torch.autograd.Function or torch.autograd.graph.saved_tensors_hooks. Section 6 uses PyTorch's."
    )
    used = trial.once(observe_chain).mine["by_torch"]
    trial.require(not used, "the function was called by torch.utils.checkpoint", help=help)
