"""Checks of `gather_ahead`: the next gather is under way while a block computes."""

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from grader.checks import CheckEnded, Trial, check, exercise

from .runs import IN_BOTH_MODES, require_in_evaluation
from .unit_hooks import (
    NUM_FROZEN,
    STEPS,
    fine_tune,
    in_blocks,
    observe,
    require_backward,
    require_freed,
    require_gradients,
    require_outputs,
)
from .units import GATHERS, GATHERS_ALONE, NUM_BLOCKS, num_bytes, sent_by, waited_by
from .wire import SMALL

exercise(
    "gather_ahead",
    world_sizes=(2, 1, 3),
    subgroup=True,
    uses=STEPS,
    hints=(
        "A pre-hook on block i, registered after the one that gathers unit i, can start the gather of unit "
        "i + 1.",
        "A hook on the output of block i, registered after the one that gathers unit i, can start the gather "
        "of unit i - 1. start_gather() does not wait: that is what it is for.",
    ),
)


Look = Callable[[Trial], SimpleNamespace]
BEHIND_BLOCK_0 = "units[-1] is the last block's"


def observe_ahead(trial: Trial) -> SimpleNamespace:
    return observe(trial, 3)


def observe_ahead_in_training(trial: Trial) -> SimpleNamespace:
    return observe(trial, 3, training=True)


FROZEN_INSIDE = 3
"""A block that is frozen, and those before it and after it are trained."""


def observe_ahead_frozen(trial: Trial) -> SimpleNamespace:
    return observe(trial, 3, frozen=FROZEN_INSIDE)


def in_mode(training: bool) -> Look:
    return observe_ahead_in_training if training else observe_ahead


def started_by(recording: Any, mark: str) -> list[Any]:
    """All that was started before a mark."""
    marks = list(recording.totals)
    before = marks[: marks.index(mark)]
    return [e for e in recording.events if e.after in before]


def gathered_since(recording: Any, mark: str, start: str) -> list[Any]:
    return sent_by(recording, mark, GATHERS)[len(sent_by(recording, start, GATHERS)) :]


@check("gather_ahead")
def numbers_are_the_same_ahead(trial: Trial) -> None:
    """Outputs and gradients are those of gathers that start late."""
    seen = trial.once(observe_ahead)
    require_outputs(trial, seen)
    require_gradients(trial, seen)


def require_ahead(
    trial: Trial,
    way: str,
    start: str,
    late: str = "each gather starts when its own block is due, or when the block before it is over",
    look: Look = observe_ahead,
) -> None:
    """At each block's computation in `way`, the gather of the next was started, and nobody waited for it."""
    seen = trial.once(look)
    order = list(reversed(range(NUM_BLOCKS))) if way == "backward" else list(range(NUM_BLOCKS))
    told = "forward under no_grad" if way == "evaluation" else way
    for r, result in enumerate(seen.results):
        recording = result["recording"]
        behind = blocks_without_the_next(result, way, start, order, seen.block)
        for turn, number in enumerate(order):
            mark, due = f"{way} {number}", min(turn + 2, NUM_BLOCKS)
            sent = gathered_since(recording, mark, start)
            blocks = num_bytes(sent) / seen.block
            gathers = "1 gather was" if f"{blocks:.2g}" == "1" else f"{blocks:.2g} gathers were"
            surely = num_bytes(e for e in sent if e.kind in GATHERS_ALONE) / seen.block
            trial.require(
                blocks >= 0.9 * due,
                f"while block {number} computes its {told}, {gathers} started: {due} are due"
                + ", that of the next block among them" * (turn + 1 < NUM_BLOCKS),
                help="start_gather() of the unit that comes next, right after this one's gather().",
                rank=r,
                cause=why_late(behind, order, late) if blocks >= 0.9 * (turn + 1) else "",
            )
            trial.require(
                surely <= 1.3 * due + 0.3,
                f"while block {number} computes its {told}, {surely:.2g} gathers were started: {due} are due",
                help="One block ahead: what is gathered earlier is memory for nothing.",
                rank=r,
                cause="everything is gathered at once" if surely > NUM_BLOCKS - 1 > due else "",
            )
            if turn + 1 < NUM_BLOCKS:
                trial.require(
                    waited_by(recording, mark) < len(started_by(recording, mark)),
                    f"while block {number} computes its {told}, nothing is on its way: all that was started "
                    "has been waited for",
                    help="start_gather() and no gather(): its own block waits for it.",
                    rank=r,
                    cause="the next block's gather was waited for at once",
                )
        require_next(trial, r, result["asked"], way, told, order)


def blocks_without_the_next(result: dict, way: str, start: str, order: list[int], block: int) -> list[int]:
    """The blocks that compute when the next one's unit was not sent for, or fewer gathers than are due."""
    recording, marks, found = result["recording"], list(result["recording"].totals), []
    for turn, (number, next_one) in enumerate(pairwise(order)):
        mark = f"{way} {number}"
        before = marks[marks.index(start) : marks.index(mark) if mark in marks else None]
        sent = num_bytes(gathered_since(recording, mark, start)) / block
        asked = any(unit == next_one and when in before for when, unit in result["asked"])
        if not asked or sent < 0.9 * (turn + 2):
            found.append(number)
    return found


def why_late(behind: list[int], order: list[int], late: str) -> str:
    """`late`, if it is true of all blocks; else, which are those of which it is true."""
    ahead = [number for number in order[:-1] if number not in behind]
    if not ahead:
        return late
    return (
        f"the next block's gather has been started when these compute: {', '.join(map(str, ahead))}; and not "
        f"when these do: {', '.join(map(str, behind))}"
    )


def require_next(
    trial: Trial, rank: int, asked: list[tuple[str, int]], way: str, told: str, order: list[int]
) -> None:
    """Before a block computes, start_gather() is called of no unit but its own and those beside it."""
    by_block = {n: {u for mark, u in asked if mark == f"{way} {before}"} for before, n in pairwise(order)}
    for number in order[1:]:
        others = {unit for unit in by_block[number] if abs(unit - number) > 1}
        wraps = number == order[-1] and others == {order[0]}
        same = all(others <= by_block[n] for n in order[1:-1])  # the last block may send for none
        trial.require(
            not others,
            f"before block {number} computes its {told}, unit {min(others, default=0)} is sent for",
            help=f"For block {number} start none: it is the last one in {told}."
            if wraps
            else f"In {told} the unit that comes next is that of the block next to this one.",
            rank=rank,
            cause="it is the same unit before each block: a function that is made in a loop looks a variable "
            "of the loop up when it is called, and finds that of the last round"
            if len(others) == 1 and same
            else f"nothing comes after block {number} in {told}, and the count begins anew"
            + (f": {BEHIND_BLOCK_0}" if number == 0 else "")
            if wraps
            else "",
        )


@check("gather_ahead", world_sizes=(2, 3), subgroup=False)
def forward_gathers_ahead(trial: Trial) -> None:
    """While a block computes its forward, the gather of the next one is under way, also under no_grad."""

    def require(training: bool) -> None:
        look, only = in_mode(training), "only a forward with gradients gathers ahead"
        try:
            require_ahead(trial, "forward", "evaluated", look=look)
        except CheckEnded as end:
            with suppress(CheckEnded):
                require_ahead(trial, "evaluation", "at rest", look=look)
                end.cause, end.help = NOT_THE_FIRST, "Keep nothing of a forward: each one starts them anew."
            raise
        require_ahead(trial, "evaluation", "at rest", only, look=look)

    require_in_evaluation(require, "a forward", IN_BOTH_MODES)


NOT_THE_FIRST = (
    "the forward before this one, the first of all and under no_grad, gathers ahead, and this one does not"
)
FROZEN_TOO = f"block {FROZEN_INSIDE} is frozen here, and nobody sends for it; of trained ones it is right"


@check("gather_ahead", world_sizes=(2, 3), subgroup=False)
def backward_gathers_ahead(trial: Trial) -> None:
    """While a block computes its backward, the gather of the one before is under way, though it be frozen."""
    require_in_evaluation(
        lambda training: require_ahead(trial, "backward", "between", look=in_mode(training))
    )
    try:
        require_ahead(trial, "backward", "between", look=observe_ahead_frozen)
    except CheckEnded as end:
        if f"while block {FROZEN_INSIDE + 1} computes" in end.message:
            end.cause = FROZEN_TOO
            end.help = "A gradient goes through a frozen block too, and it takes the weights to compute it."
        raise


@check("gather_ahead", world_sizes=(2, 3), subgroup=False)
def two_units_at_most(trial: Trial) -> None:
    """No more than two units are whole at a time, and none is when backward is over."""
    seen = trial.once(observe_ahead)
    for r, result in enumerate(seen.results):
        for number in range(NUM_BLOCKS):
            alive = result["recording"].alive(f"forward {number}") - seen.share
            trial.require(
                alive <= (3.3 + 0.12 * number) * seen.block + SMALL,  # with activations, and pieces sent
                f"in the forward of block {number} {in_blocks(seen, alive)} are alive on it besides its "
                "share",
                help="Start one gather ahead, no more.",
                rank=r,
            )
        behind = [num_bytes(gathered_since(result["recording"], f"backward {i}", "between")) for i in (1, 0)]
        before, by_then = (each / seen.block for each in behind)
        trial.require(
            by_then <= NUM_BLOCKS + 0.7 or before > NUM_BLOCKS + 0.3,
            f"when backward has come to block 0, {by_then:.2g} gathers were started, for {NUM_BLOCKS} blocks",
            help="For block 0, start none.",
            rank=r,
            cause=f"one was started behind block 0, where nothing comes: {BEHIND_BLOCK_0}",
        )
    require_backward(trial, seen, ahead=1)
    require_freed(trial, seen, {"after": "after backward"}, 2, "Free what was gathered and not used.")
    require_none_below(trial, seen.block)


def require_none_below(trial: Trial, block: int) -> None:
    """Nothing stays that was sent for below the last block that backward comes to."""
    gradients = (NUM_BLOCKS - NUM_FROZEN) * (block // trial.num_ranks + 64 * trial.num_ranks)
    most = 0.3 * block + SMALL

    def left(depth: int) -> list[int]:
        """By rank, what is alive after backward and was not before forward, besides gradients."""
        recordings = [result["recording"] for result in fine_tune(trial, depth)]
        return [each.alive("after") - each.alive("before") - gradients for each in recordings]

    for r, more in enumerate(left(3)):
        trial.require(
            more <= most,
            f"the first {NUM_FROZEN} of {NUM_BLOCKS} blocks are frozen: after backward, besides gradients, "
            f"{more:,} bytes more are alive on it than before forward, where a block has {block:,}",
            help="Backward ends in the block whose input needs no gradient: send for nothing below it, and "
            "when it is over free what is left, with all that was received for it.",
            rank=r,
            cause="a unit is sent for that backward never comes to, and what came for it stays"
            if more > most and max(left(2)) <= most
            else "",
        )
