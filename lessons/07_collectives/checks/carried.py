"""Whether what comes out came by messages: other ones would have brought something else."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from grader.checks import CheckEnded, Trial, is_close, tensors_in


def copied(value: Any) -> Any:
    """The same numbers in other memory."""
    if isinstance(value, list):
        return [copied(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value


def called_with_changed_messages(rank: Any, name: str, given: list[Any]) -> list[list[Tensor]]:
    """The probe: what a call returns and leaves in its arguments; then the same with changed messages."""
    function, layer = getattr(rank.submission, name), [torch.sigmoid] * (name == "relay_microbatches")
    found = []
    for how in (nullcontext, rank.changed_messages):
        arguments = [copied(each) for each in given]
        with how():
            returned = function(*layer, *arguments, rank.group)
        found.append([tensor.clone() for tensor in tensors_in([returned, arguments])])
    return found


def require_carried(trial: Trial, name: str, given: Callable[[int], Sequence[Any]]) -> None:
    """Messages that are changed on their way change what a rank has in the end.

    Args:
        given: the arguments of a rank, but for the group. Tensors are float32.
    """
    if trial.num_ranks == 1:
        return
    arguments = [(list(given(r)),) for r in range(trial.num_ranks)]
    try:
        results = trial.run(called_with_changed_messages, name, per_rank=arguments)
    except CheckEnded:
        return  # it looks at what came, and does not like it
    changed = any(
        len(plain) != len(other) or not all(map(is_close, plain, other)) for plain, other in results
    )
    trial.require(
        changed,
        "every byte of every message was made one larger on its way, and what all ranks have in the end is "
        "the same as without",
        cause="the messages are sent, and what comes out came another way",
        help="What a rank has from others is what irecv has brought: use it.",
    )
