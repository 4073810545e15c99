"""Gradients where not all arguments of a function need one."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from grader.checks import Trial

IN_ORDER = (
    "ctx.needs_input_grad has a place for each argument of forward, in their order. A gradient that nobody "
    "needs may be computed all the same: autograd drops it."
)


def none_is_missing(trial: Trial, gradients: Mapping[str, Sequence[Tensor | None]], where: str) -> None:
    """Whatever needs a gradient has one; `gradients`, by rank, are those that need one `where` others do not.

    They are there where all arguments need one.
    """
    for rank in range(trial.num_ranks):
        missing = [name for name, by_rank in gradients.items() if by_rank[rank] is None]
        names = " and ".join(missing)
        cause = f"whether {names} gets a gradient hangs on what the others need"
        if 1 < len(missing) == len(gradients):
            cause = "backward returns no gradient at all there, and not only none for what needs none"
        trial.require(
            not missing,
            f"the gradient of {' and of '.join(missing)} is None where {where}",
            help=IN_ORDER,
            rank=rank,
            cause=cause,
        )
