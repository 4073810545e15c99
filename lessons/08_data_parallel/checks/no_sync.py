"""Checks of `DataParallel` where passes add up: inside `no_sync()`, after it, and without zero_grad."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Fault, Trial, check, is_close

from .means import BOTH, expected_gradients
from .models import by_rank
from .passes import (
    INSIDE,
    INSIDE_STILL,
    LEAVING,
    NOTHING_PENDING,
    comes_out_right,
    is_right,
    observe_passes,
    require_gradients,
    trained,
)

NOT_REDUCED = "each rank's own sum: it was not reduced"
DROPPED = "the passes before alone: what the last one added was dropped"
COUNTS_N_TIMES = "what was there before counts n times: it was averaged, and summed over the ranks once more"
DIVIDED_BY_HOOKS = (
    "the sum over the ranks, not the mean: the last pass did not use this layer, and those that it used are "
    "right. Is it the hooks that divide?"
)


def other_sums(seen: SimpleNamespace, name: str) -> dict[str, Any]:
    """A parameter's gradient where not all passes are in it, or not all of them are averaged."""
    own = [gradient[name] for gradient in seen.own]
    last = expected_gradients(seen.seed, seen.drawn[-1:])[0][name]
    before = expected_gradients(seen.seed, seen.drawn[:-1])
    known = {
        "the last pass alone: what accumulated was dropped": last,
        NOT_REDUCED: own,
        "the last pass alone was averaged: what was there before it is each rank's own": [
            gradient[name] + last for gradient in before[1]
        ],
        DROPPED: before[0][name],
        COUNTS_N_TIMES: len(own) * before[0][name] + last,
    }
    if len(seen.drawn) > 2:
        told = "the first pass is gone: what was there is cleared when the next no_sync() begins"
        known[told] = expected_gradients(seen.seed, seen.drawn[1:])[0][name]
    return known


def quiet_sums(trial: Trial, seen: SimpleNamespace, name: str) -> dict[str, Any]:
    """`other_sums`, and a bucket that leaves as if what came inside no_sync() had come now."""
    before, last = (expected_gradients(seen.seed, each) for each in (seen.drawn[:-1], seen.drawn[-1:]))
    early = [before[0][name] + own[name] for own in last[1]]
    known = other_sums(seen, name)
    if not last[0][name].any() and all(is_right(seen, each) for each in trained(seen) if last[0][each].any()):
        known[DIVIDED_BY_HOOKS] = Fault(
            known.pop(COUNTS_N_TIMES),
            "Divide what is sent: a bucket also holds gradients for which no hook fires in this pass.",
        )
    if comes_out_right(trial, observe_two_passes):
        known[f"{DROPPED}. Without no_sync(), two passes add up"] = Fault(
            known.pop(DROPPED),
            "Do the hooks count inside no_sync()? Then a bucket is full, and leaves, before this backward "
            "has come to it. Inside, return before anything is counted.",
        )
    return known | {
        "what no_sync() added up is averaged, and what the pass outside added is each rank's own: its bucket "
        "left before that was there": Fault(
            early,
            "A bucket is full when its gradients of this backward are there: those before do not count.",
        )
    }


def by_pass(seen: SimpleNamespace, name: str) -> dict[str, Tensor]:
    """What each pass adds to the mean."""
    return {
        f"pass {i + 1} of {len(seen.drawn)}": expected_gradients(seen.seed, [drawn])[0][name]
        for i, drawn in enumerate(seen.drawn)
    }


def observe_no_sync(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [True, True, False], [BOTH], [("left",), BOTH], [("right",)])


def observe_cleared(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [True, False], [BOTH], [BOTH], cleared=True)


def observe_exception(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [True, True, False], [BOTH], [BOTH], [BOTH], broken=True)


def observe_another(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [False], [BOTH], other=True)


def observe_two_passes(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [False, False], [BOTH], [BOTH])


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def nothing_is_pending_after_no_sync(trial: Trial) -> None:
    """finish_gradient_synchronization() after a pass inside no_sync() does nothing."""
    for r, result in enumerate(trial.once(observe_no_sync).results):
        kinds = result["recording"].kinds(after=NOTHING_PENDING)
        trial.require(
            not kinds,
            f"called after a pass inside no_sync(), finish_… communicates: {kinds[:3]}",
            rank=r,
            cause="a forward inside no_sync() made a pass pending",
            help="A pass is pending since its forward, outside no_sync() alone.",
        )


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def nothing_is_sent_inside_no_sync(trial: Trial) -> None:
    """Forward and backward inside no_sync() communicate nothing, and neither does its end."""
    for r, result in enumerate(trial.once(observe_no_sync).results):
        kinds, ending, still = (
            result["recording"].kinds(after=mark) for mark in (INSIDE, LEAVING, INSIDE_STILL)
        )
        copied = set(kinds) == {"broadcast"}
        trial.require(
            not kinds,
            f"inside no_sync() it communicates: {kinds[:3]}",
            rank=r,
            cause="broadcasts add nothing up: weights or buffers are copied in a forward" if copied else "",
            help="The constructor copies weights and buffers, once."
            if copied
            else "The hooks fire during backward: it is they who must know that no_sync() is on.",
        )
        trial.require(
            not ending,
            f"as no_sync() ends it communicates: {ending[:3]}",
            cause="what has added up is sent where no_sync() ends, not by the next backward outside",
            help="Its end switches sending on, and nothing more: the next micro-batch may be quiet too.",
            rank=r,
        )
        trial.require(
            not still,
            f"inside no_sync(), after an inner no_sync() has ended, there were {len(still)} communications "
            f"({', '.join(sorted(set(still)))})",
            cause="the end of the inner no_sync() has ended the outer one",
            help="Remember what was on before it, and put that back at its end.",
            rank=r,
        )


@check("DataParallel", world_sizes=(2, 4), subgroup=False)
def what_accumulated_is_reduced(trial: Trial) -> None:
    """The backward after no_sync() reduces the sum of all passes, also of layers that it did not use."""
    seen = trial.once(observe_no_sync)
    for name in trained(seen):
        for r, gradient in enumerate(by_rank(seen.results, "gradients", name)):
            trial.require(
                gradient is not None, f"{name} has no gradient: what accumulated was dropped", rank=r
            )
    help = "Send parameter.grad as it is then, with all that no_sync() added up."
    require_gradients(
        trial,
        seen,
        "after two passes in no_sync() and one outside",
        partial(quiet_sums, trial),
        help,
        terms=by_pass,
    )


def kept_elsewhere(seen: SimpleNamespace, name: str) -> dict[str, Any]:
    """What is there if zero_grad() has not cleared what no_sync() added up."""
    both = expected_gradients(seen.seed, [seen.first, *seen.drawn])[0][name]
    return {"what no_sync() added up is still in it: it is kept elsewhere than in .grad": both}


@check("DataParallel", world_sizes=(2,), subgroup=False)
def what_was_cleared_is_gone(trial: Trial) -> None:
    """What no_sync() has added up and zero_grad() has cleared is in no later gradient."""
    help = "Let it add up in .grad, as it does by itself: zero_grad() knows nothing else."
    seen = trial.once(observe_cleared)
    when = "after a pass in no_sync(), zero_grad() and a pass outside"
    require_gradients(trial, seen, when, kept_elsewhere, help)


def switched_off_too(seen: SimpleNamespace, name: str) -> dict[str, Any]:
    """What is there if a module has not reduced inside another one's no_sync()."""
    told = "each rank's own: no_sync() of one module has switched off the other one too"
    return {told: [own[name] for own in seen.own]}


@check("DataParallel", world_sizes=(2,), subgroup=False)
def no_sync_is_of_one_module(trial: Trial) -> None:
    """Inside no_sync() of one module, the gradients of another one are reduced as ever."""
    help = "Whether it is on belongs to self: what is set on the class, or is global, is everybody's."
    seen = trial.once(observe_another)
    require_gradients(trial, seen, "after a pass inside another module's no_sync()", switched_off_too, help)


@check("DataParallel", world_sizes=(2,), subgroup=False)
def a_pass_is_of_one_module(trial: Trial) -> None:
    """One backward through two wrapped modules: finish_… of each of them puts its own means into .grad."""
    seen, n = trial.once(observe_another), trial.num_ranks
    help = "What is pending, ready or sent belongs to self: keep nothing of it on the class, or in a global."
    right = all(
        found is not None and is_close(found, seen.expected[name])
        for name in trained(seen)
        for found in by_rank(seen.results, "together", name)
    )
    for r, result in enumerate(seen.results):
        for name, gradient in [*result["together"].items(), *result["beside"].items()]:
            trial.require(
                gradient is not None or name == "frozen.weight",
                f"after a backward through two wrapped modules, and finish_… of both, {name} has no .grad",
                cause="it is of the module whose finish_… came second; what the first one's put back is right"
                if right
                else "",
                help=help,
                rank=r,
            )
    for name in trained(seen):
        trial.close(
            f"the gradient of {name} after a backward through another module, too",
            by_rank(seen.results, "together", name),
            seen.expected[name],
            help=help,
        )
    for name, mean in (("layer.weight", 2.0 * (n + 1)), ("layer.bias", 4.0)):
        found = by_rank(seen.results, "beside", name)
        trial.close(
            f"the gradient of the second module's {name} after a backward through both",
            found,
            torch.full_like(found[0], mean),
            help=help,
        )


def still_on(seen: SimpleNamespace, name: str) -> dict[str, Any]:
    """`other_sums` where an exception has left no_sync()."""
    still = "no_sync() is still on: it is each rank's own sum"
    return {still if told == NOT_REDUCED else told: value for told, value in other_sums(seen, name).items()}


@check("DataParallel", world_sizes=(2,), subgroup=False)
def an_exception_ends_no_sync(trial: Trial) -> None:
    """After an exception has left no_sync(), the next backward reduces, with all that had added up."""
    help = "try: yield, finally: what switches sending on again."
    seen = trial.once(observe_exception)
    for r, result in enumerate(seen.results):
        kinds = result["recording"].kinds(after=INSIDE_STILL)
        trial.require(
            not kinds,
            f"inside no_sync(), after an exception has left an inner no_sync(), it communicates: {kinds[:3]}",
            cause="the exception that has ended the inner no_sync() has ended the outer one too",
            help="However it ends, put back what was on before it: in `finally`.",
            rank=r,
        )
    when = "after two passes in no_sync(), each left by an exception, and one outside"
    require_gradients(trial, seen, when, still_on, help, terms=by_pass)


@check("DataParallel", world_sizes=(2,), subgroup=False)
def two_passes_add_up(trial: Trial) -> None:
    """Two synchronised passes without zero_grad add up, as they do on one process."""
    help = "Nothing of the first pass may be lost, or be counted twice."
    seen = trial.once(observe_two_passes)
    require_gradients(trial, seen, "after two passes", other_sums, help, terms=by_pass)


def observe_cleared_between(trial: Trial) -> SimpleNamespace:
    return observe_passes(trial, [False, False], [BOTH], [BOTH], cleared=True, between=True)


def put_back(seen: SimpleNamespace, name: str) -> dict[str, Any]:
    """What is there if what stood in .grad before the forward comes back."""
    both = expected_gradients(seen.seed, [each for step in seen.steps for each in step])[0][name]
    return {"what stood in .grad before the forward is put back into it after backward": both}


@check("DataParallel", world_sizes=(2,), subgroup=False)
def cleared_between_forward_and_backward(trial: Trial) -> None:
    """zero_grad() between a forward and its backward clears what was there, as it does on one process."""
    help = "Leave in .grad what stands there: what is cleared before backward is gone."
    when = "after two steps, in which zero_grad() comes between forward and backward"
    require_gradients(trial, trial.once(observe_cleared_between), when, put_back, help)
