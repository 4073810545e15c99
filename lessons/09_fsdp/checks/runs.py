"""Runs of units and of whole models on the ranks: what crashes in this lesson has causes of its own."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from grader.checks import CheckEnded, Trial, Verdict

NOTHING_LEFT = "out of bounds for storage of size 0"
"""What torch says where a tensor is used whose storage was shrunk to nothing."""
IN_THE_SECOND = "the first forward and backward came through, and this is in the second"


def run(trial: Trial, function: Any, *args: Any, **kwargs: Any) -> list[dict]:
    """Runs a function on the ranks; a crash over memory that was given back is told as that."""
    try:
        return trial.run(function, *args, **kwargs)
    except CheckEnded as end:
        if end.verdict == Verdict.CRASHED and NOTHING_LEFT in end.message:
            in_the_second = end.cause == IN_THE_SECOND
            end.cause = (
                "a weight was used whose storage was shrunk to nothing: it was not gathered again, or freed "
                "before its backward was over"
            )
            if in_the_second:
                end.cause += f". {IN_THE_SECOND.capitalize()}"
            end.help = (
                "What you hang on a block stays there: do not remove a hook, nor count what it has done."
                if in_the_second
                else "Gather a block's weights before every forward, and once more before every backward. "
                "Free them when backward comes to the block before, or ends: a full backward hook comes too "
                "early where the block's input needs no gradient."
            )
        elif end.verdict == Verdict.CRASHED and "cannot register a hook" in end.message:
            end.cause = "what needs no gradient takes no hook: what is frozen, and outputs under no_grad"
            end.help = "Ask for requires_grad before you hook on."
        elif end.verdict == Verdict.CRASHED and "signal 11" in end.message:
            end.cause = "memory was used that had been given back: is there a weight that nobody gathers?"
            end.help = "Every place that uses a weight needs the whole one: a tied weight has two places."
        raise


IN_BOTH_MODES = (
    "Gather ahead in every forward and in every backward, whatever self.training is: a backward may follow "
    "in evaluation mode, too."
)
BY_BACKWARD = "Ask whether there is a backward to come (requires_grad), and not for self.training."


def require_in_evaluation(
    require: Callable[[bool], None], what: str = "a backward", help: str = BY_BACKWARD
) -> None:
    """What `require(training)` asks holds in evaluation mode; where in training mode alone, that is told."""
    try:
        require(False)
    except CheckEnded as end:
        with suppress(CheckEnded):
            require(True)
            end.cause = f"it is right in training mode alone, and this is {what} in evaluation mode"
            end.help = help
        raise
