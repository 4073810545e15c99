"""What the checks of this lesson share: runs on a rank's tokens, and what is alive after a forward."""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grader.checks import BACKWARD, CheckEnded, Trial, Verdict, tensors_in

SIZES = (2, 1, 4, 3)
FEWER = (2, 1, 3)
"""For what takes long, and of which four ranks would show nothing that three do not."""
WAITS = 8


class Norms(TorchDispatchMode):
    """On a rank: how many numbers each layer norm was given, wherever it is called from."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_layer_norm.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


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
            self.sizes.append(args[0].numel())
        elif name in ("bernoulli", "bernoulli_"):
            self._masks[result.untyped_storage().data_ptr()] = result
        elif name in ("mul", "mul_"):
            masks = [x for x in tensors_in(args) if x.untyped_storage().data_ptr() in self._masks]
            self.sizes += [result.numel() for _ in masks[:1]]
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


def mark_backward(recording) -> None:
    """On a rank: marks the moment before backward, and several before it: see `alive_before_backward`."""
    for number in range(WAITS):
        recording.mark(f"waited {number}")
        time.sleep(0.004)
    recording.mark(BACKWARD)


def alive_before_backward(recording) -> int:
    """Bytes alive between forward and backward: gloo lets go of a collective's tensors a little late."""
    return min(recording.alive(mark) for mark in (*(f"waited {n}" for n in range(WAITS)), BACKWARD))


def kept_bytes(config: dict, batch_size: int, sequence_length: int, num_ranks: int, masks: bool) -> int:
    """What one block may keep: every layer its whole gathered input, everything else this rank's part.

    The attention's probabilities are not dropped, so its core is the fused kernel.
    """
    whole = 4 * batch_size * sequence_length * config["n_embd"]
    part, tokens = whole // num_ranks, batch_size * sequence_length // num_ranks
    norms = 2 * (part + 8 * tokens)
    core = 4 * part + 4 * config["n_head"] * tokens
    return norms + 2 * whole + core + 8 * part + (2 * part if masks else 0)
