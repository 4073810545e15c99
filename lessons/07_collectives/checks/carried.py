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


def called(rank: Any, name: str, changes: list[bool], given: list[Any]) -> list[list[Tensor]]:
    """The probe: what each call returns and leaves in its arguments; messages of some are changed."""
    function, layer = getattr(rank.submission, name), [torch.sigmoid] * (name == "relay_microbatches")
    found = []
    for changed in changes:
        arguments = [copied(each) for each in given]
        with rank.changed_messages() if changed else nullcontext():
            returned = function(*layer, *arguments, rank.group)
        found.append([tensor.clone() for tensor in tensors_in([returned, arguments])])
    return found


def require_carried(
    trial: Trial, name: str, given: Callable[[int], Sequence[Any]], receivers: Sequence[int] | None = None
) -> None:
    """Messages that are changed on their way change what each of the receivers has in the end.

    Args:
        given: the arguments of a rank, but for the group. Tensors are float32.
        receivers: the ranks that have something from others in the end; all, if they are left out.
    """
    if trial.num_ranks == 1:
        return
    arguments = [(list(given(r)),) for r in range(trial.num_ranks)]
    try:
        results = trial.run(called, name, [False, True], per_rank=arguments)
    except CheckEnded:
        trial.run(called, name, [False], per_rank=arguments)
        return  # it looks at what came, and does not like it
    for r in range(trial.num_ranks) if receivers is None else receivers:
        plain, other = results[r]
        trial.require(
            len(plain) != len(other) or not all(map(is_close, plain, other)),
            "every byte of every message was made one larger on its way, and what it has in the end is the "
            "same as without",
            cause="what it has from others came another way than by their messages",
            help="What a rank has from others is what irecv has brought: use it.",
            rank=r,
        )
