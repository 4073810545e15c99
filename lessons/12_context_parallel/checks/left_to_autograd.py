"""Hops round the ring that are left to autograd: an autograd.Function for each."""

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from grader.checks import CheckEnded, Trial, Verdict, each_rank, graph_of, tensors_in

ONE = "Let one autograd.Function make the whole ring, and write its backward: "
"""Begins the next step."""


class Hops(TorchDispatchMode):
    """On a rank: what comes out of each autograd.Function of which the forward sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0
        self.brought: list[list[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sent += func.namespace == "c10d" and func._opname == "send"
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> "Hops":
        apply = vars(Function)["apply"]

        def noted(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
            before = self.sent
            result = apply.__get__(None, cls)(*args, **kwargs)
            if self.sent > before:
                self.brought.append([x for x in tensors_in(result) if x.requires_grad])
            return result

        self._noting = patch.object(Function, "apply", classmethod(noted))
        self._noting.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._noting.stop()


def through_every_hop(rank, name: str, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> dict[str, int]:
    """How many hops are an autograd.Function each, and how many of them the output depends on.

    Then a backward in which it depends on all of them.
    """
    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
    with Hops() as hops:
        out = getattr(rank.submission, name)(*leaves, rank.group)
    below = graph_of(out)
    needed = sum(any(x.grad_fn in below for x in brought) for brought in hops.brought)
    all_of_them = [out, *(0.0 * x.sum() for brought in hops.brought for x in brought)]
    sum(all_of_them).backward(upstream.transpose(1, 2))
    return {"hops": len(hops.brought), "needed": needed}


def counted(trial: Trial, name: str, parts: list[list[Tensor]]) -> tuple[list[int], list[int]] | None:
    """Hops that are an autograd.Function each, and those that the output depends on, by rank.

    None where not all ranks come through a backward in which it depends on all of them.
    """
    with contextlib.suppress(CheckEnded):
        seen = SimpleNamespace(results=trial.run(through_every_hop, name, per_rank=parts))
        return each_rank(seen, "hops"), each_rank(seen, "needed")
    return None


def tell_those_without_use(trial: Trial, end: CheckEnded, name: str, parts: list[list[Tensor]]) -> None:
    """Where ranks hang, say that autograd calls fewer hops on some, if all come through with all of them."""
    found = counted(trial, name, parts) if end.verdict == Verdict.HUNG else None
    if not found or len(set(found[1])) == 1:
        return
    hops, needed = found
    least, most = needed.index(min(needed)), needed.index(max(needed))
    end.cause = (
        "each hop is an autograd.Function of its own, and autograd calls the backward of those alone that "
        f"the output depends on: {needed[least]} of {hops[least]} on rank {least}, {needed[most]} of "
        f"{hops[most]} on rank {most}. Where the output is made to depend on all, every rank comes through"
    )
    end.help = ONE + "it makes the same hops on every rank."


def kept_by_autograd(trial: Trial, name: str, parts: list[list[Tensor]]) -> bool:
    """Whether all hops, of which there are some, are an autograd.Function each, and the output needs them."""
    n = trial.num_ranks
    found = counted(trial, name, parts) if n > 2 else None  # two ranks: one hop, be it the whole ring's
    return found is not None and found == ([n - 1] * n, [n - 1] * n)
