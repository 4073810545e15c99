"""Checks of `checkpoint`: what exists between forward and backward, and after both."""

import gc
import tracemalloc
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Trial, check

from .models import STATE_BYTES, Layers, build, checkpoint_of, seeing

NUM_CALLS = 3
SLACK = NUM_CALLS * STATE_BYTES
MASKS = "that is a mask of the wide layer in each call: what is no floating-point tensor is kept, too"
OUTPUTS = "that is the output of every call: backward does not need it"


def keep(
    rank: Any, how: str, differentiable: bool, seed: int, inside: int, out: int, xs: list[Tensor]
) -> dict:
    """Checkpoints of inputs that the probe holds. Of the outputs nobody needs more than the sum."""
    layers = build(lambda: Layers(xs[0].size(-1), 0.3, inside, out), seed, rank.device)
    checkpoint = checkpoint_of(rank, how)
    xs = [x.requires_grad_(differentiable) for x in xs]
    if (first := checkpoint(layers, xs[0][:1]).sum()).requires_grad:
        with seeing(layers.calls):
            first.backward()  # what is made once is there from now on
    with rank.record(memory=True) as recording:
        tracemalloc.start()
        total = torch.stack([checkpoint(layers, x).sum() for x in xs]).sum()
        outside_torch = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        recording.mark("after the forward")
        if total.requires_grad:
            total.backward()
        layers.zero_grad()  # whether they are the tensors of before or new ones
        recording.mark("with the loss")
        del total
        gc.collect()
        recording.mark("after backward")
        loss = checkpoint(lambda x: layers(x).sum(), xs[0])
        if loss.requires_grad:
            loss.backward()
        layers.zero_grad()
        gc.collect()
        recording.mark("with an output that is the loss")
    return {"recording": recording, "outside torch": outside_torch}


def observe_kept(trial: Trial) -> SimpleNamespace:
    rows, width = trial.integer(260, 300), trial.integer(60, 70)
    inside, out = 10 * width, 2 * width - trial.integer(8, 12)
    arguments = trial.seed(), inside, out, [trial.normal(rows, width) for _ in range(NUM_CALLS)]
    seeds = [trial.seed()]
    mine, plain, fixed, plain_fixed = (
        trial.run(keep, how, differentiable, *arguments, seeds=seeds)[0]
        for differentiable in (True, False)
        for how in ("mine", "plain")
    )
    sizes = {name: NUM_CALLS * 4 * rows * n for name, n in (("in", width), ("inside", inside), ("out", out))}
    return SimpleNamespace(mine=mine, plain=plain, fixed=fixed, plain_fixed=plain_fixed, sizes=sizes)


@check("checkpoint")
def nothing_but_the_inputs_is_kept(trial: Trial) -> None:
    """After the forward a checkpoint keeps its inputs: no copies, not its output, nothing in between."""
    seen = trial.once(observe_kept)
    alive, without = (run["recording"].alive("after the forward") for run in (seen.mine, seen.plain))
    cause = why_kept(alive, without, seen.sizes)
    trial.require(
        alive <= SLACK,
        f"after {NUM_CALLS} checkpoints {alive:,} bytes are alive besides their inputs, which are "
        f"{seen.sizes['in']:,}; without checkpointing it would be {without:,}",
        help="Who holds it: ctx, a list, an attribute, or a function inside that names it, as a hook that "
        "compares the second call's output with it? Shape and dtype are enough for that."
        if cause == OUTPUTS
        else "Every storage counts that still exists, whoever holds it: the graph, a list, an attribute. "
        "Hold the inputs themselves and nothing else.",
        cause=cause,
    )
    alive, without = (run["recording"].alive("after the forward") for run in (seen.fixed, seen.plain_fixed))
    trial.require(
        alive <= SLACK,
        f"after {NUM_CALLS} checkpoints of inputs that need no gradient {alive:,} bytes are alive besides "
        f"these; without checkpointing it would be {without:,}",
        help="The function's own weights need gradients: what they need is computed again as well.",
        cause="a call is checkpointed only where one of its inputs needs a gradient"
        if alive >= without - SLACK
        else "",
    )
    hidden, usual = (run["outside torch"] for run in (seen.mine, seen.plain))
    trial.require(
        hidden <= usual + SLACK,
        f"after {NUM_CALLS} checkpoints {hidden:,} bytes are alive outside of tensors; without checkpointing "
        f"it would be {usual:,}",
        help="What lies in NumPy arrays, lists of numbers or bytes is kept as well.",
    )


def why_kept(alive: int, without: int, sizes: dict[str, int]) -> str:
    """What so many bytes are."""
    known = {
        "that is a copy of every input: keep the inputs themselves": sizes["in"],
        OUTPUTS: sizes["out"],
        "that is a copy of every input, and every output": sizes["in"] + sizes["out"],
        "that is one tensor of the wide layer in each call: who holds it?": sizes["inside"],
        MASKS: sizes["inside"] // 4,
        "that is two tensors of the wide layer in each call: who holds them?": 2 * sizes["inside"],
        "nothing is saved: all is there that autograd keeps without checkpointing": without,
    }
    return next((cause for cause, size in known.items() if 0 <= alive - size <= SLACK), "")


@check("checkpoint")
def nothing_of_the_second_call_is_left(trial: Trial) -> None:
    """After backward nothing is left of what the second call computed."""
    seen = trial.once(observe_kept)
    for mark, when, cause, help in (
        (
            "after backward",
            "after backward",
            "",
            "What the second call made goes when backward has used it: hold it where the graph does, and "
            "not in a list that stays.",
        ),
        (
            "with the loss",
            "after backward, while somebody holds the loss,",
            "",
            "Backward frees what save_for_backward and the hooks were given, and nothing else: a tensor that "
            "you put on ctx lives as long as the loss does. Use local variables.",
        ),
        (
            "with an output that is the loss",
            "after backward, where the function returns the loss, and somebody holds it,",
            "it hangs on the output itself: where a loss is made of the output, and the output is let go, "
            "nothing is left",
            "The output lives as long as somebody looks at it. Put nothing on it, neither tensors nor what "
            "holds them.",
        ),
    ):
        alive, without = (run["recording"].alive(mark) for run in (seen.mine, seen.plain))
        trial.require(
            alive <= without + SLACK,
            f"{when} {alive:,} bytes are alive; without checkpointing it would be the {without:,} "
            "of the inputs' gradients",
            help=help,
            cause=cause,
        )
