"""ZeRO and FSDP by hand: optimizer state, gradients and weights cut over the ranks that share a batch.

Data parallel ranks all keep the same optimizer state, the same mean gradients and the same weights. Each
stage cuts one more of the three. Sources: Rajbhandari et al. 2019, "ZeRO" (arXiv:1910.02054); Zhao et al.
2023, "PyTorch FSDP" (arXiv:2304.11277).
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim import Optimizer

from nanogpt.model import GPT


def state_bytes_per_rank(num_parameters: int, num_ranks: int, stage: int) -> dict[str, float]:
    """Bytes of model state on one rank: `weights`, `gradients`, `optimizer` and their `total`.

    Mixed precision: 2 bytes a parameter for the weight, 2 for its gradient, 12 for the optimizer (an fp32
    copy of the weight and Adam's two moments). Stage 0 is plain data parallelism; 1 cuts the optimizer's
    state over the ranks, 2 the gradients as well, 3 the weights too. Source: arXiv:1910.02054, figure 1.
    """
    # answer
    weights = 2 * num_parameters / (num_ranks if stage >= 3 else 1)
    gradients = 2 * num_parameters / (num_ranks if stage >= 2 else 1)
    optimizer = 12 * num_parameters / (num_ranks if stage >= 1 else 1)
    total = weights + gradients + optimizer
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "total": total}
    # end of answer


def communication_elements(num_parameters: int, num_ranks: int, stage: int) -> dict[str, float]:
    """Elements that one rank sends in a step: by `all_reduce`, by `reduce_scatter` and by `all_gather`.

    All three go round a ring, and each is a total over the step: in stage 3, every weight is gathered for
    forward and for backward. What a stage does not use is 0. Source: arXiv:1910.02054, section 7.
    """
    # answer
    once_round = num_parameters * (num_ranks - 1) / num_ranks
    return {
        "all_reduce": 2 * once_round if stage == 0 else 0.0,
        "reduce_scatter": once_round if stage >= 1 else 0.0,
        "all_gather": {0: 0.0, 1: once_round, 2: once_round, 3: 2 * once_round}[stage],
    }
    # end of answer


# answer: a tensor in n equal shares, the two collectives on them, settings of optimizers
def own_share(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's share of a tensor of P elements: a flat view of at most ceil(P/n) of them, perhaps none."""
    size = -(-tensor.numel() // group.size())
    start = min(group.rank() * size, tensor.numel())
    return tensor.view(-1)[start : start + size]


def start_reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Send a tensor on its way; the result waits for it, and returns the mean of this rank's share."""
    n, own = group.size(), own_share(tensor, group).numel()
    padded = F.pad(tensor.flatten(), (0, -tensor.numel() % n))
    mean = padded.new_empty(padded.numel() // n)
    work = dist.reduce_scatter(mean, list(padded.chunk(n)), group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return mean.div_(n)[:own]

    return finish


def all_gather_shares(tensor: Tensor, group: ProcessGroup) -> None:
    """Fill a tensor, of which every rank has its own share up to date, with the shares of all."""
    n, share = group.size(), own_share(tensor, group)
    joined = tensor.new_empty(tensor.numel() + -tensor.numel() % n)
    padded = F.pad(share, (0, joined.numel() // n - share.numel()))
    dist.all_gather(list(joined.chunk(n)), padded, group=group)
    tensor.view(-1).copy_(joined[: tensor.numel()])


def copy_settings(source: Optimizer, target: Optimizer) -> None:
    """Learning rates and the like, group by group."""
    for one, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update({name: value for name, value in one.items() if name != "params"})


# end of answer


class ShardedOptimizer(Optimizer):
    """ZeRO-1: any optimizer, of which each rank keeps the state of its share of the weights alone.

    Every rank has the whole model. `.grad` holds the rank's own gradient, which nothing has averaged: `step`
    reduce-scatters the mean, updates this rank's share, and hands the new weights round, 2P elements in
    all. It is told as other optimizers are: by `param_groups`, which schedulers change. Parameters that are
    frozen, or that no rank's backward reached (`.grad` is None), stay as they are: they do not decay. Every
    rank's backward reaches the same parameters. Source: arXiv:1910.02054, section 5.1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        group: ProcessGroup,
        **kwargs: Any,
    ) -> None:
        """`params` as any optimizer takes them, `kwargs` for `optimizer_class`; shares are over `group`."""
        # answer
        super().__init__(params, kwargs)  # makes param_groups of the whole parameters
        self.group = group
        groups = [
            {**whole, "params": [own_share(p.detach(), group) for p in whole["params"]]}
            for whole in self.param_groups
        ]
        self.inner = optimizer_class(groups, **kwargs)
        self.defaults = self.inner.defaults
        self.state = self.inner.state
        copy_settings(self.inner, self)
        # end of answer

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step on the mean of all ranks' gradients; all ranks call it and end with the same weights.

        A closure is called once, first of all and with gradients enabled: its backward makes the gradients.
        Returns its loss, this rank's own, or None without a closure.
        """
        # answer
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        copy_settings(self, self.inner)  # a scheduler may have changed the learning rate
        for parameter, share in self._trained():
            share.grad = self._mean_gradient(parameter)
        self.inner.step()
        for parameter, share in self._trained():
            share.grad = None
            all_gather_shares(parameter, self.group)
        return loss
        # end of answer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters, in whatever form this rank holds them."""
        # answer
        super().zero_grad(set_to_none)
        for whole in self.param_groups:
            for parameter in whole["params"]:
                parameter.share_grad = None
        # end of answer

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's share."""
        # answer
        copy_settings(self, self.inner)
        return self.inner.state_dict()
        # end of answer

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank, with the learning rate and the like of then."""
        # answer
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state
        copy_settings(self.inner, self)
        # end of answer

    # answer: two more methods
    def _trained(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Parameters, and the view of this rank's share of each."""
        for whole, own in zip(self.param_groups, self.inner.param_groups, strict=True):
            for parameter, share in zip(whole["params"], own["params"], strict=True):
                if parameter.requires_grad:
                    yield parameter, share

    def _mean_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Of this rank's share: reduced here, unless ShardedGradients did it during backward."""
        ready, own = getattr(parameter, "share_grad", None), parameter.grad
        if ready is not None or own is None:
            return ready
        return start_reduce_scatter(own, self.group)()

    # end of answer


class ShardedGradients(nn.Module):
    """ZeRO-2: during backward each gradient goes to the ranks that own a share of it, and is freed.

    What is left of a gradient on a rank is the mean of its share, ready for the ShardedOptimizer of the same
    submission. Gradients of several backward passes add up there. Ranks start with the same weights, and
    every rank's backward reaches the same parameters. Source: arXiv:1910.02054, section 5.2.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        """Keep the module, and have its trained parameters call a hook when their gradient is there."""
        # answer
        super().__init__()
        self.module = module
        self.group = group
        self.flying: tuple[nn.Parameter, Callable[[], Tensor]] | None = None
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
        # end of answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        # answer
        return self.module(*args, **kwargs)
        # end of answer

    def _gradient_is_there(self, parameter: nn.Parameter) -> None:
        """Your hook: autograd calls it when this pass has added all of its gradient to parameter.grad."""
        # answer
        self.finish_gradient_synchronization()  # the one before: it travelled while this one was computed
        self.flying = parameter, start_reduce_scatter(parameter.grad, self.group)
        parameter.grad = None
        # end of answer

    def finish_gradient_synchronization(self) -> None:
        """Wait for what is still on its way. Does nothing when nothing is."""
        # answer
        if self.flying is None:
            return
        (parameter, finish), self.flying = self.flying, None
        before, mean = getattr(parameter, "share_grad", None), finish()
        parameter.share_grad = mean if before is None else before + mean
        # end of answer


# answer: weights that are gathered and freed together
Place = tuple[nn.Module, str, str]
"""A module, its name for one of its weights, and GPT's name for it."""


class Flat:
    """Parameters laid end to end and cut into n equal pieces, of which this rank keeps one.

    At rest, the modules have `shards`: what of each parameter lies in this rank's piece (perhaps nothing).
    Gathered, they have `wholes`: the parameters that they were given, with all hooks that stand on them, as
    views into one buffer. To free them is to shrink the buffer's storage to nothing: autograd may have kept
    them for backward, and finds them filled again by then.
    """

    def __init__(self, places: dict[nn.Parameter, list[Place]], group: ProcessGroup) -> None:
        self.group = group
        self.places = list(places.values())
        flat = torch.cat([parameter.detach().flatten() for parameter in places])
        flat = F.pad(flat, (0, -flat.numel() % group.size()))
        dist.broadcast(flat, group=group, group_src=0)
        self.buffer, self.num_bytes = flat, flat.untyped_storage().nbytes()
        self.piece_size = flat.numel() // group.size()
        first, last = group.rank() * self.piece_size, (group.rank() + 1) * self.piece_size
        self.shards: list[nn.Parameter] = []
        self.wholes = list(places)
        start = 0
        for parameter in self.wholes:
            end = start + parameter.numel()
            # Through .data, autograd does not take a gathering for a change of what it kept.
            parameter.data = flat[start:end].view(parameter.shape)
            shard = flat[max(start, first) : min(end, last)].clone()  # may be empty
            self.shards.append(nn.Parameter(shard, parameter.requires_grad))
            start = end
        for places_of_one, shard in zip(self.places, self.shards, strict=True):
            for module, name, _ in places_of_one:
                setattr(module, name, shard)
        self.free()

    @torch.no_grad()
    def gather(self) -> None:
        """Make every weight whole, on every rank."""
        if self.buffer.untyped_storage().nbytes():
            return
        self.buffer.untyped_storage().resize_(self.num_bytes)
        piece = torch.cat([shard.detach() for shard in self.shards])
        piece = F.pad(piece, (0, self.piece_size - piece.numel()))
        dist.all_gather(list(self.buffer.chunk(self.group.size())), piece, group=self.group)
        for places, whole in zip(self.places, self.wholes, strict=True):
            for module, name, _ in places:
                module.__dict__[name] = whole  # hides the shard, which parameters() still finds

    def free(self) -> None:
        """Leave the shards alone."""
        for places in self.places:
            for module, name, _ in places:
                module.__dict__.pop(name, None)
        self.buffer.untyped_storage().resize_(0)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Add the mean of all ranks' gradients to the shards' `.grad`, and drop the whole ones."""
        if all(whole.grad is None for whole in self.wholes):
            return
        own = [torch.zeros_like(w) if w.grad is None else w.grad for w in self.wholes]
        means = start_reduce_scatter(torch.cat([gradient.flatten() for gradient in own]), self.group)()
        for shard, mean in zip(self.shards, means.split([s.numel() for s in self.shards]), strict=True):
            shard.grad = mean if shard.grad is None else shard.grad + mean
        for whole in self.wholes:
            whole.grad = None


def find_places(model: nn.Module) -> dict[nn.Parameter, list[Place]]:
    """Where each parameter is used: a tied one in several places."""
    places: dict[nn.Parameter, list[Place]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, name, f"{prefix}.{name}".lstrip(".")))
    return places


def flatten(places: dict[nn.Parameter, list[Place]], group: ProcessGroup) -> list[Flat]:
    """One Flat for each dtype, and for what is trained and what is not."""
    kinds: dict[Any, dict[nn.Parameter, list[Place]]] = {}
    for parameter, where in places.items():
        kinds.setdefault((parameter.dtype, parameter.requires_grad), {})[parameter] = where
    return [Flat(of_one_kind, group) for of_one_kind in kinds.values()]


# end of answer


class FullySharded(nn.Module):
    """ZeRO-3: wraps a GPT, of which each rank keeps its shards; a block is whole while it is at work.

    The constructor takes the weights of the group's rank 0. `parameters()` are this rank's shards, for any
    optimizer. A block is gathered before its forward and before its backward, and freed after each. What
    lies outside the blocks is gathered for the whole pass, and nothing is left of it after one under no_grad.
    After `loss.backward()` the mean gradients stand in the shards' `.grad`. Frozen weights neither move nor
    decay, so a flat shard must not mix them with trained ones. A hook that stands on a parameter of the GPT
    goes on working: it gets the whole gradient of this rank, and what it returns is averaged.

    Source: arXiv:1910.02054, section 5.3; arXiv:2304.11277, section 3.
    """

    def __init__(self, module: GPT, group: ProcessGroup) -> None:
        """Cut every parameter of the module, which is emptied, and hook on to its blocks."""
        # answer
        super().__init__()
        if not hasattr(module, "transformer"):
            raise ValueError(f"expected a GPT, got a {type(module).__name__}: shard it before it is wrapped")
        self.module = module
        self.open: list[Flat] = []  # the block whose backward is going on
        places = find_places(module)
        self.flats: list[Flat] = []
        for block in module.transformer.h:
            unit = flatten({p: places.pop(p) for p in list(block.parameters())}, group)
            block.register_forward_pre_hook(partial(self._before_block, unit))
            block.register_forward_hook(partial(self._after_block, unit))
            self.flats += unit
        self.outside = flatten(places, group)
        self.flats += self.outside
        # end of answer

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """What the GPT returns: logits and loss of this rank's tokens (b, s)."""
        # answer
        for flat in self.flats:
            flat.free()  # an earlier pass may have stopped half-way, with weights that are old by now
        for flat in self.outside:
            flat.gather()
        logits, loss = self.module(idx, targets)
        if logits.requires_grad:
            logits.register_hook(self._backward_begins)
        else:
            self._free_outside()
        return logits, loss
        # end of answer

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole weights under GPT's names, on every rank; all ranks call it."""
        # answer
        state = self.module.state_dict()
        for flat in self.flats:
            flat.gather()
            for places, whole in zip(flat.places, flat.wholes, strict=True):
                state.update(dict.fromkeys([name for _, _, name in places], whole.detach().clone()))
            flat.free()
        return state
        # end of answer

    # answer: the hooks
    def _before_block(self, unit: list[Flat], block: nn.Module, args: Any) -> None:
        for flat in unit:
            flat.gather()

    def _after_block(self, unit: list[Flat], block: nn.Module, args: Any, x: Tensor) -> None:
        for flat in unit:
            flat.free()
        if x.requires_grad:
            x.register_hook(partial(self._backward_enters, unit))

    def _backward_begins(self, gradient: Tensor) -> None:
        for flat in self.outside:
            flat.gather()  # there, unless an earlier backward has freed it
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_enters(self, unit: list[Flat], gradient: Tensor) -> None:
        """The gradient of a block's output is complete: so is all that the block after it has to do."""
        self._close_block()
        self.open = unit
        for flat in unit:
            flat.gather()

    def _close_block(self) -> None:
        for flat in self.open:
            flat.reduce_gradients()
            flat.free()
        self.open = []

    def _backward_ends(self) -> None:
        self._close_block()
        for flat in self.outside:
            flat.reduce_gradients()
        self._free_outside()

    def _free_outside(self) -> None:
        for flat in self.outside:
            flat.free()

    # end of answer


def fully_shard_gpt(model: GPT, mesh: DeviceMesh) -> GPT:
    """ZeRO-3 by PyTorch: `torch.distributed.fsdp.fully_shard` on the given model, a unit for each block.

    What lies outside the blocks is the last unit. `mesh` has one dimension, the ranks to shard over.
    Changes and returns the model.
    """
    # answer
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
    # end of answer


def clipped_step(
    module: nn.Module,
    optimizer: Optimizer,
    inputs: Tensor,
    targets: Tensor,
    max_norm: float,
    group: ProcessGroup,
) -> Tensor:
    """One step of a fully sharded model, with the gradient clipped to a norm of at most `max_norm`.

    `module(inputs, targets)` returns (outputs, loss), `module.parameters()` are this rank's shards, and after
    `backward` their `.grad` are this rank's shards of the mean gradient (None where a rank has none).
    The norm is that of the whole gradient, as if one process had it; where it is larger than `max_norm`,
    every rank multiplies its gradients by max_norm / norm. Returns the norm before clipping, a scalar
    that is the same on every rank.
    """
    # answer
    optimizer.zero_grad()
    _, loss = module(inputs, targets)
    loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    square = sum((g.square().sum() for g in gradients), torch.zeros((), device=loss.device))
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    for gradient in gradients:
        gradient.mul_((max_norm / norm).clamp(max=1.0))
    optimizer.step()
    return norm
    # end of answer


# --- training ---

from solutions.fsdp_training import PARALLEL as PARALLEL  # noqa: E402
