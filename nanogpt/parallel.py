"""What the training loop asks of a way to train on many ranks.

The loop holds one `Parallel`, and calls its methods at the moments where ranks may have to do something.
The base class is training on one rank: it does nothing.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanogpt.config import TrainConfig
from nanogpt.model import GPT, GPTConfig
from nanogpt.optimizer import adamw, clip_gradients
from nanogpt.technique import Checkpointing, Implementation, Technique


class Group(Protocol):
    """The little that is asked of a process group here."""

    def rank(self) -> int:
        """This process's number in the group."""

    def size(self) -> int:
        """How many processes there are."""


class Parallel(Technique):
    """Training on one rank, and the methods that a technique overrides.

    The order in which the loop calls them: `check` (model not yet built), `build` and `optimizer` once,
    then for every step `share`, `accumulating` around all micro-batches but the last, `synchronize` after
    the last backward, `update`, and now and then `mean_loss` and `whole_state_dict`.
    Every rank calls each of them at the same moment, so each may communicate.

    The model that `build` gets has the same weights on every rank. After it, rank r seeds torch with
    seed + r, so plain dropout differs between ranks; where masks must agree, set `Dropout.generator`
    (the state of every module's `generator` is kept in checkpoints), or `draws_alike` where all must.
    """

    axis: Literal["data", "context", "tensor"] = "data"
    """What its ranks share out: sequences, the tokens of each sequence, or every layer (see `Combined`)."""
    draws_alike: bool = False
    """Whether every rank goes on with the same random numbers after `build`."""
    clips_by_name: bool = True
    """Whether gradients are clipped where their parameters' names are known."""

    def __init__(self, implementation: Implementation | None = None, group: Group | None = None) -> None:
        """`implementation` None asks for PyTorch's own version of the technique."""
        super().__init__(implementation)
        self.group = group

    def check(self, config: GPTConfig, num_ranks: int) -> None:
        """Raise a ValueError of one sentence if this model cannot be trained on so many ranks."""

    def build(self, model: GPT, checkpointing: Checkpointing) -> nn.Module:
        """What `wrap` makes of a model that keeps fewer activations.

        The model changes before it is wrapped; a technique that replaces layers overrides the order.

        Raises:
            ValueError: the technique and this checkpointing do not go together.
        """
        return self.wrap(checkpointing.apply(model))

    def wrap(self, model: GPT) -> nn.Module:
        """What the loop calls as module(idx, targets), for (logits, loss), on this rank's `share`.

        `module.parameters()` go to this rank's optimizer; `module.state_dict()` is what this rank keeps
        in a checkpoint and gets back through `load_state_dict`.
        """
        return model

    def optimizer(self, module: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
        """AdamW as `config` says, over what this rank updates."""
        return adamw(module, config)

    def share(self, tensor: Tensor) -> Tensor:
        """This rank's part of a global batch (b, s), which every rank has; b divides over the ranks."""
        return tensor

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Around forward and backward of every micro-batch of a step but the last."""
        return nullcontext()

    def synchronize(self, module: nn.Module) -> None:
        """After a step's last backward: when it returns, every gradient is complete."""

    def update(self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """One optimizer step on the clipped gradients, which are gone afterwards; their norm before."""
        norm = self.clip_gradients(module, max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def clip_gradients(self, module: nn.Module, max_norm: float) -> Tensor:
        """Scale gradients so that the norm of all of them, over all ranks, is at most max_norm.

        Returns the norm before. An infinite max_norm only measures.
        """
        return clip_gradients(module.parameters(), max_norm)

    def cuts(self, name: str) -> bool:
        """Whether a rank has only a part of the parameter `name` of the module that was built."""
        return False

    def mean_loss(self, loss: Tensor) -> Tensor:
        """The loss of the global batch, a detached scalar, from the weighed loss of this rank's share.

        Weighed by its targets that count: over ranks that have other shares, the plain mean is the batch's.
        """
        return loss.detach()

    def whole_state_dict(self, module: nn.Module) -> Mapping[str, Tensor]:
        """The dense weights under GPT's names, the same on every rank."""
        return self.whole(module.state_dict())

    def whole(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The dense weights, from those that a GPT has after `wrap` has cut its layers."""
        return weights

    def num_shares(self, num_ranks: int) -> int:
        """Into how many parts `share` cuts the batch."""
        rows = torch.zeros(num_ranks, 1)
        return num_ranks // max(1, self.share(rows).size(0))


@torch.no_grad()
def clip_parts(module: nn.Module, max_norm: float, axes: Sequence[Parallel]) -> Tensor:
    """`clip_gradients` where a rank may have parts: what an axis `cuts` is added up over its group.

    What no axis cuts is the same on all ranks, and counts once.
    """
    complete_gradients(module)
    names = [name for name, _ in module.named_parameters()]
    axes = [axis for axis in axes if any(map(axis.cuts, names))]
    gradients = [(name, local(p.grad)) for name, p in module.named_parameters() if p.grad is not None]
    device = next(module.parameters()).device
    squares = torch.zeros([2] * len(axes), device=device)  # one index an axis: 1 where it cuts
    for name, gradient in gradients:
        squares[tuple(int(axis.cuts(name)) for axis in axes)] += gradient.float().square().sum()
    for number, axis in enumerate(axes):
        cut = squares.select(number, 1).clone()
        dist.all_reduce(cut, group=axis.group)
        squares.select(number, 1).copy_(cut)
    norm = squares.sum().sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.mul_(scale)
    return norm


def complete_gradients(module: nn.Module) -> None:
    """Make the sums that DTensors still owe: torch 2.11 scales a sum not yet taken as if it were."""
    for parameter in module.parameters():
        if hasattr(parameter.grad, "redistribute"):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a DTensor; another tensor is its own."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
