"""What the checks of this lesson share: runs on a rank's tokens, what is alive after a forward, and sent."""

import contextlib
import gc
import time
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grader.checks import (
    BACKWARD,
    CheckEnded,
    Trial,
    Verdict,
    each_rank,
    graph_of,
    of_ranks,
    storage_bytes,
    tensors_in,
)
from lessons_shared.cut_gpt import local
from lessons_shared.results import memory_of
from lessons_shared.wire import sends_at_most, where, wire_bytes

SIZES = (2, 1, 4, 3)
FEWER = (2, 1, 3)
"""For what takes long, and of which four ranks would show nothing that three do not."""
SEVERAL = tuple(n for n in SIZES if n > 1)
"""For what a rank keeps: where there is one, everything is whole, and nothing says how much that may be."""
WAITS = 8


class Norms(TorchDispatchMode):
    """On a rank: how many numbers each layer norm was given, wherever it is called from."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_layer_norm.default:
            self.sizes.append(local(args[0]).numel())
        return func(*args, **(kwargs or {}))


def norms_are_cut(trial: Trial, rank: int, sizes: list[int], share: int) -> None:
    """The layer norms of a forward, as `Norms` saw them on this rank, read its part of the tokens."""
    for number, size in enumerate(sizes, start=1):
        trial.require(
            size <= share,
            f"of {len(sizes)} norms in a forward, number {number} reads {size:,} elements: {share:,}, "
            f"1/{trial.num_ranks} of the tokens, are this rank's part",
            help="Norm first, then gather: a norm looks at one token at a time.",
            rank=rank,
            cause="this norm stands where all tokens are together: every rank computes it for all of them"
            if size == trial.num_ranks * share
            else "",
        )


class Dropped(TorchDispatchMode):
    """On a rank: how many numbers each dropout acts on, whichever module it is in.

    A mask that is drawn for more, and of which a part is used, counts as that part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._masks: dict[int, Tensor] = {}
        """By address; they are held so that no other tensor gets it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._opname
        if name == "native_dropout":
            self.sizes.append(local(args[0]).numel())
        elif name in ("bernoulli", "bernoulli_"):
            self._masks[memory_of(local(result))] = result
        elif name in ("mul", "mul_"):
            masks = [x for x in tensors_in(args) if memory_of(local(x)) in self._masks]
            self.sizes += [local(result).numel() for _ in masks[:1]]
        return result


def run_on_tokens(trial: Trial, probe: Callable, runs: list[tuple]) -> list[dict]:
    """Runs a probe; where a shape inside the attention does not fit, says which one."""
    try:
        return trial.run(probe, per_rank=runs)
    except CheckEnded as end:
        if end.verdict == Verdict.CRASHED and ("view size" in end.message or "shape '[" in end.message):
            end.cause = (
                "in CausalSelfAttention.forward b and s are read from the input: s is s/n there, and what "
                "c_attn returns has s tokens"
            )
            end.help = "Give the attention a forward that reads b and s after c_attn."
        raise


def used_parameters(module: nn.Module, call: Callable[[], Tensor], frozen: list[str]) -> list[str]:
    """On a rank: the parameters to which backward leads from what a call returns.

    If some are frozen, it goes backward without them.
    """
    named = dict(module.named_parameters())
    for name in frozen:
        named[name].requires_grad_(False)
    y = call()
    below = graph_of(y)
    if frozen:
        y.sum().backward()
    reached = {id(node.variable) for node in below if hasattr(node, "variable")}
    return [name for name, parameter in named.items() if id(parameter) in reached]


def tell_partial_use(trial: Trial, end: CheckEnded, probe: Callable, runs: list[tuple]) -> None:
    """Where ranks parted, say which parameters only some of them use, if without those all is well.

    `probe(rank, frozen, *run)` returns `used_parameters`.
    """
    if "called" not in end.message:
        return
    with contextlib.suppress(CheckEnded):
        used = trial.run(probe, [], per_rank=runs)
        users = {name: tuple(r for r in range(trial.num_ranks) if name in used[r]) for name in chain(*used)}
        partly = {name: ranks for name, ranks in users.items() if len(ranks) < trial.num_ranks}
        if partly:
            trial.run(probe, list(partly), per_rank=runs)
            told = [
                f"{' and '.join(name for name in partly if partly[name] == ranks)} on {of_ranks(ranks)} alone"
                for ranks in dict.fromkeys(partly.values())
            ]
            end.cause = (
                f"not every rank's forward uses the same parameters: {', '.join(told)}. Backward calls a "
                "parameter's hook, and the collective in that, where it was used and nowhere else; with "
                "these frozen all ranks come through"
            )
            end.help = "Use every parameter on every rank."
            if all(name.endswith("bias") for name in partly):
                end.help = "A bias is added after the reduce-scatter, to each rank's own tokens."


def mark_backward(recording) -> None:
    """On a rank: marks the moment before backward, and several before it: see `alive_before_backward`."""
    for number in range(WAITS):
        recording.mark(f"waited {number}")
        time.sleep(0.004)
    recording.mark(BACKWARD)


def alive_before_backward(recording) -> int:
    """Bytes alive between forward and backward: gloo lets go of a collective's tensors a little late."""
    return min(recording.alive(mark) for mark in (*(f"waited {n}" for n in range(WAITS)), BACKWARD))


def is_kept_as_view(x: Tensor, num_ranks: int) -> bool:
    """On a rank: whether, in memory as large as all ranks' x, a part is kept that is x, and no other."""
    views = [
        y
        for y in gc.get_objects()
        if type(y) is Tensor
        and y.numel() == x.numel()
        and storage_bytes([y]) == num_ranks * storage_bytes([x])
    ]
    alike = len({y.storage_offset() for y in views}) == 1 and torch.equal(views[0].flatten(), x.flatten())
    return num_ranks > 1 and alike


def kept_bytes(config: dict, batch_size: int, sequence_length: int, num_ranks: int, masks: bool) -> int:
    """What one block may keep: every layer its whole gathered input, everything else this rank's part.

    The attention's probabilities are not dropped, so its core is the fused kernel.
    """
    whole = 4 * batch_size * sequence_length * config["n_embd"]
    part, tokens = whole // num_ranks, batch_size * sequence_length // num_ranks
    norms = 2 * (part + 8 * tokens)
    core = 4 * part + 4 * config["n_head"] * tokens
    return norms + 2 * whole + core + 8 * part + (2 * part if masks else 0)


def sends_as_much(
    trial: Trial, seen: SimpleNamespace, stretch: str, num_bytes: float, means: str, help: str
) -> None:
    """No rank sends more than `sends_at_most` allows, and all together no less than half of that of all."""
    sends_at_most(trial, seen, stretch, num_bytes, means, help)
    n = trial.num_ranks
    sent = sum(wire_bytes(recording.select(None, stretch), n) for recording in each_rank(seen, "recording"))
    due = (n - 1) * num_bytes
    trial.require(
        sent >= due / 2,
        f"{where(stretch)} sent about {sent:,.0f} bytes from all ranks together, where {means} send "
        f"{due:,.0f}",
        help="What a rank needs and has not made itself has to travel.",
    )
