"""Whether what one call returned stays as it is when another call is made, as of a model's next layer."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grader.checks import Trial


def overwritten(call: Callable, *given: Tensor, upstream: Tensor | None = None) -> dict[str, bool]:
    """On a rank, when all else is looked at: what of a call's results a second one of these shapes changes.

    To each name belongs whether the second call's result lies in the same memory. With an upstream gradient,
    the gradients of what is given are results as well.
    """
    changed = _changed(call, given, upstream)
    with torch.no_grad():
        quiet = _changed(call, given, None)
    return changed or {f"{name} (under torch.no_grad())": shared for name, shared in quiet.items()}


def _changed(call: Callable, given: Sequence[Tensor], upstream: Tensor | None) -> dict[str, bool]:
    first = _results(call, given, upstream)
    before = {name: result.clone() for name, result in first.items()}
    second = _results(call, [x.flip(-1) for x in given], None if upstream is None else upstream.flip(-1))
    lie_in = {memory_of(result) for result in second.values()}
    return {
        name: memory_of(first[name]) in lie_in
        for name, was in before.items()
        if not torch.allclose(first[name], was, 0, 0, equal_nan=True)
    }


def memory_of(result: Tensor) -> int:
    """Where its numbers lie; -1 for what is no plain tensor."""
    try:
        return result.untyped_storage().data_ptr()
    except RuntimeError:
        return -1


def _results(call: Callable, given: Sequence[Tensor], upstream: Tensor | None) -> dict[str, Tensor]:
    """Name to tensor; what is no good already is left out, and other checks say so."""
    wanted = upstream is not None
    leaves = [x.detach().clone().requires_grad_(wanted) for x in given]
    y = call(*leaves)
    found = {"the output": y.detach()} if isinstance(y, Tensor) else {}
    if wanted and isinstance(y, Tensor) and y.requires_grad and y.shape == upstream.shape:
        gradients = torch.autograd.grad(y, leaves, upstream, allow_unused=True)
        found |= {
            f"the gradient of argument {i}": gradient
            for i, gradient in enumerate(gradients, start=1)
            if gradient is not None
        }
    return found


def results_stay(trial: Trial, by_rank: list[dict[str, bool]]) -> None:
    """Require that on every rank `overwritten` found nothing."""
    for rank, changed in enumerate(by_rank):
        shared = all(changed.values())
        trial.require(
            not changed,
            f"{', '.join(changed)} of the first of two calls with tensors of the same shapes changed when "
            "the second was made",
            cause="a buffer that is kept between calls is handed out" if shared else "",
            help="Return a new tensor from each call: the results of several are in use at the same time, as "
            "those of a model's layers are."
            if shared
            else "The second's lies elsewhere in memory. Was the first's still being filled, by a collective "
            "that nobody waited for? Or does the call write into a tensor that it has returned before?",
            rank=rank,
        )
