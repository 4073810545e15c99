"""Floating-point operations, by torch's own formulas: a multiplication and an addition are two."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from grader.beside.measure import ask

_SECOND_FACTOR = {"mm": 1, "bmm": 1, "addmm": 2, "baddbmm": 2}
"""Products of matrices, and which argument is the second one."""


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Those of a product, a convolution or attention that has run; None for any other operation.

    torch's formulas look through all arguments, which takes longer than a small product: what there is most
    of goes first.
    """
    formula, second = _formula(func)
    if formula is None:
        return None
    if second is not None and len(args) > second and type(result) is Tensor:
        factor = args[second]
        rows = factor.shape[-2] if type(factor) is Tensor else ask(Tensor.size, factor)[-2]
        return 2 * result.numel() * rows
    return formula(*args, **kwargs, out_val=result)


@cache
def _formula(func: Any) -> tuple[Callable[..., int] | None, int | None]:
    second = _SECOND_FACTOR.get(func._opname) if func.namespace == "aten" else None
    return flop_registry.get(func._overloadpacket), second
