"""ZeRO and FSDP by hand: optimizer state, gradients and weights cut over the ranks that share a batch.

Data parallel ranks all keep the same optimizer state, the same mean gradients and the same weights. Each
stage cuts one more of the three. Sources: Rajbhandari et al. 2019, "ZeRO" (arXiv:1910.02054); Zhao et al.
2023, "PyTorch FSDP" (arXiv:2304.11277).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    state over the ranks, 2 the gradients as well, 3 the weights too.

    Source: arXiv:1910.02054, figure 1.
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
    forward and for backward. What a stage does not use is 0.

    Source: arXiv:1910.02054, section 7.
    """
    # answer
    once_round = num_parameters * (num_ranks - 1) / num_ranks
    return {
        "all_reduce": 2 * once_round if stage == 0 else 0.0,
        "reduce_scatter": once_round if stage >= 1 else 0.0,
        "all_gather": {0: 0.0, 1: once_round, 2: once_round, 3: 2 * once_round}[stage],
    }
    # end of answer


def copy_settings(source: Optimizer, target: Optimizer) -> None:
    """Learning rates and the like, group by group."""
    for one, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update({name: value for name, value in one.items() if name != "params"})


class OptimizerShell(Optimizer):
    """Given: an optimizer of whole parameters, `param_groups`, around one of this rank's shares, `inner`.

    A subclass says what the share of a parameter is (`cut`), and how a step is made of it (`update`).
    """

    def __init__(
        self, params: Iterable[Any], optimizer_class: type[Optimizer], group: ProcessGroup, **kwargs: Any
    ) -> None:
        """`params` as any optimizer takes them, `kwargs` for `optimizer_class`; shares are over `group`."""
        super().__init__(params, kwargs)  # makes param_groups of the whole parameters
        self.group = group
        self.inner = optimizer_class([self._shares_of(whole) for whole in self.param_groups], **kwargs)
        self.defaults = self.inner.defaults
        self.state = self.inner.state
        copy_settings(self.inner, self)

    def _shares_of(self, whole: dict[str, Any]) -> dict[str, Any]:
        return {**whole, "params": [self.cut(p) for p in whole["params"]]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group of whole parameters; `Optimizer` adds the first ones so, before there is `inner`."""
        super().add_param_group(param_group)
        if hasattr(self, "inner"):
            self.inner.add_param_group(self._shares_of(self.param_groups[-1]))

    def shares(self) -> dict[nn.Parameter, Tensor]:
        """Trained parameters, and this rank's share of each, as `inner` has it."""
        return {
            parameter: share
            for whole, own in zip(self.param_groups, self.inner.param_groups, strict=True)
            for parameter, share in zip(whole["params"], own["params"], strict=True)
            if parameter.requires_grad
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Calls the closure, if there is one, then `update`; returns the closure's loss, this rank's own."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        copy_settings(self, self.inner)  # a scheduler may have changed the learning rate
        self.update()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, and what ShardedGradients (section 3.2) may leave in `share_grad`."""
        super().zero_grad(set_to_none)
        for whole in self.param_groups:
            for parameter in whole["params"]:
                parameter.share_grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's share."""
        copy_settings(self, self.inner)
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank, with the learning rate and the like of then."""
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state
        copy_settings(self.inner, self)


# answer: shares of tensors, two collectives that carry many tensors at once
BUCKET_BYTES = 25 * 2**20
"""As in PyTorch's DistributedDataParallel: large enough that a message is worth its price."""


def by_rank(tensor: Tensor, n: int) -> Tensor:
    """A tensor of P elements as n rows, one for each rank, padded with zeros: (n, ceil(P/n))."""
    padding = -tensor.numel() % n
    flat = tensor.flatten()
    return (F.pad(flat, (0, padding)) if padding else flat).view(n, -1)


def share_size(tensor: Tensor, n: int) -> int:
    """The length of a row: ceil(P/n)."""
    return -(-tensor.numel() // n)


def own_share(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's row without the padding, a flat view: ceil(P/n) elements or fewer, perhaps none."""
    size = share_size(tensor, group.size())
    start = min(group.rank() * size, tensor.numel())
    return tensor.view(-1)[start : start + size]


def fill_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Deal out parameters, in their order, to buckets of one dtype. A larger one has a bucket to itself."""
    buckets: list[list[nn.Parameter]] = []
    free_bytes = 0
    for parameter in parameters:
        if not buckets or parameter.nbytes > free_bytes or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            free_bytes = bucket_bytes
        buckets[-1].append(parameter)
        free_bytes -= parameter.nbytes
    return buckets


def start_reduce_scatter(tensors: list[Tensor], group: ProcessGroup) -> Callable[[], list[Tensor]]:
    """Send tensors on their way, side by side; the result waits, and returns the mean of each one's share."""
    n = group.size()
    rows = torch.cat([by_rank(tensor, n) for tensor in tensors], dim=1)
    row = torch.empty_like(rows[0])
    work = dist.reduce_scatter(row, list(rows), group=group, async_op=True)
    sizes = [share_size(tensor, n) for tensor in tensors]
    own_sizes = [own_share(tensor, group).numel() for tensor in tensors]

    def finish() -> list[Tensor]:
        work.wait()
        means = row.div_(n).split(sizes)
        return [mean[:own_size] for mean, own_size in zip(means, own_sizes, strict=True)]

    return finish


def all_gather_shares(tensors: list[Tensor], group: ProcessGroup) -> None:
    """Fill tensors, of which every rank has its own share up to date, with the shares of all."""
    n = group.size()
    row = torch.cat([by_rank(tensor, n)[group.rank()] for tensor in tensors])
    rows = row.new_empty(n, row.numel())
    dist.all_gather(list(rows), row, group=group)
    shares = rows.split([share_size(tensor, n) for tensor in tensors], dim=1)
    for tensor, of_all_ranks in zip(tensors, shares, strict=True):
        places = tensor.view(-1).split(share_size(tensor, n))  # fewer than n where shares are empty
        for rank, (place, share) in enumerate(zip(places, of_all_ranks, strict=False)):
            if rank != group.rank():  # its own share is there
                place.copy_(share[: place.numel()])


# end of answer


class ShardedOptimizer(OptimizerShell):
    """ZeRO-1: wraps any optimizer; each rank keeps the state of its own share of the weights only.

    The ranks' shares differ by no more than the largest parameter, or by fewer than n numbers for each. Every
    rank has the whole model, and `.grad` is its own gradient, not yet averaged: a step may use it up. Nothing
    else of the model's size stays from one step to the next. A step sends 2P elements in all. A parameter
    that is frozen, or that no backward reached (its `.grad` is None), stays as it is: it does not decay.
    Backward reaches the same parameters on every rank. Closures, schedulers, `zero_grad` and `state_dict`
    work as with any optimizer: the shell sees to that. A group that is added later, by `add_param_group`, is
    trained from then on.

    Source: arXiv:1910.02054, section 5.1.
    """

    def cut(self, parameter: nn.Parameter) -> Tensor:
        """This rank's share of a parameter, as the inner optimizer gets it: what it writes there, it writes
        into the weight.
        """
        # answer
        return own_share(parameter.detach(), self.group)
        # end of answer

    def update(self) -> None:
        """One step on the mean of all ranks' gradients; all ranks call it and end with the same weights."""
        # answer
        shares = self.shares()
        for parameter, mean in self._mean_gradients(shares).items():
            shares[parameter].grad = mean
        self.inner.step()
        moved = [parameter for parameter, share in shares.items() if share.grad is not None]
        for bucket in fill_buckets(moved, BUCKET_BYTES):
            all_gather_shares(bucket, self.group)
        for share in shares.values():
            share.grad = None
        # end of answer

    # answer: one more method
    def _mean_gradients(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Of this rank's shares: what ShardedGradients has left there, and the rest is reduced here."""
        means = {p: p.share_grad for p in parameters if getattr(p, "share_grad", None) is not None}
        own = [p for p in parameters if p not in means and p.grad is not None]
        for bucket in fill_buckets(own, BUCKET_BYTES):
            finish = start_reduce_scatter([p.grad for p in bucket], self.group)
            means.update(zip(bucket, finish(), strict=True))
        return means

    # end of answer


class ShardedGradients(nn.Module):
    """ZeRO-2: during backward each gradient goes to the ranks that own a share of it, and is freed.

    What is left of a gradient on a rank is the mean of its share, ready for the ShardedOptimizer of the
    same submission. The gradients of several backward passes add up there. The ranks start with the same
    weights, and backward reaches the same parameters on every rank, in the same order.

    Source: arXiv:1910.02054, section 5.2.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        """Keep the module, and have its trained parameters call a hook when their gradient is there."""
        # answer
        super().__init__()
        self.module = module
        self.group = group
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        bucket_bytes = min(BUCKET_BYTES, sum(p.nbytes for p in trained) // 8)
        # Backward meets the last parameters first.
        self.buckets = fill_buckets(reversed(trained), bucket_bytes)
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket}
        self.flying: tuple[list[nn.Parameter], Callable[[], list[Tensor]]] | None = None
        for parameter in trained:
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
        bucket = self.bucket_of[parameter]
        if all(each.grad is not None for each in bucket):
            self._send(bucket)
        # end of answer

    def finish_gradient_synchronization(self) -> None:
        """Wait for what is still on its way. Does nothing when nothing is."""
        # answer
        for bucket in self.buckets:
            held_back = [parameter for parameter in bucket if parameter.grad is not None]
            if held_back:  # another parameter of the bucket got no gradient
                self._send(held_back)
        self._receive()
        # end of answer

    # answer: two more methods
    def _send(self, parameters: list[nn.Parameter]) -> None:
        """Start to reduce their gradients, all in one, and let go of them."""
        self._receive()  # the bucket before: it travelled while these gradients were computed
        self.flying = parameters, start_reduce_scatter([p.grad for p in parameters], self.group)
        for parameter in parameters:
            parameter.grad = None

    def _receive(self) -> None:
        """Wait for the bucket that is on its way, if one is, and add its means to the shares."""
        if self.flying is None:
            return
        (parameters, finish), self.flying = self.flying, None
        for parameter, mean in zip(parameters, finish(), strict=True):
            before = getattr(parameter, "share_grad", None)
            parameter.share_grad = mean if before is None else before + mean

    # end of answer


# answer: the parameters of one dtype in one buffer, and its pieces
class Flat:
    """Parameters of one dtype laid end to end and cut into n equal pieces, of which this rank keeps one.

    `shards` are what of each parameter lies in this rank's piece. Gathered, the parameters are views into
    one buffer. To free them is to shrink the buffer's storage to nothing: autograd may have kept views of
    it for backward, and finds them filled again by then.
    """

    def __init__(
        self, parameters: list[nn.Parameter], group: ProcessGroup, param_dtype: torch.dtype | None
    ) -> None:
        self.group, self.wholes = group, parameters
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        flat = F.pad(flat, (0, -flat.numel() % group.size()))
        dist.broadcast(flat, group=group, group_src=0)
        self.piece_size = flat.numel() // group.size()
        first, last = group.rank() * self.piece_size, (group.rank() + 1) * self.piece_size
        self.buffer = flat.to(param_dtype or flat.dtype)
        self.num_bytes = self.buffer.untyped_storage().nbytes()
        self.shards: list[nn.Parameter] = []
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            shard = flat[max(start, first) : min(end, last)].clone()  # may be empty
            self.shards.append(nn.Parameter(shard, parameter.requires_grad))
            # Through .data, autograd does not take a gathering for a change of what it kept.
            parameter.data = self.buffer[start:end].view(parameter.shape)
            start = end
        self.work: dist.Work | None = None
        self.free()

    @torch.no_grad()
    def all_gather_into(self, buffer: Tensor) -> dist.Work:
        """Start to fill a buffer with the pieces of all ranks, in the buffer's dtype."""
        piece = torch.cat([shard.detach() for shard in self.shards])
        piece = F.pad(piece, (0, self.piece_size - piece.numel())).to(buffer.dtype)
        rows = list(buffer.chunk(self.group.size()))
        return dist.all_gather(rows, piece, group=self.group, async_op=True)

    def start_gather(self) -> None:
        if self.buffer.untyped_storage().nbytes():
            return
        self.buffer.untyped_storage().resize_(self.num_bytes)
        self.work = self.all_gather_into(self.buffer)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = None

    def free(self) -> None:
        self.wait()  # nothing may arrive in memory that was given back
        self.buffer.untyped_storage().resize_(0)


# end of answer


class ShardedUnit:
    """Parameters that are whole from `gather()` to `free()`, of which this rank keeps a share in between.

    The constructor takes the weights of the group's rank 0, and leaves the parameters freed. The Parameter
    objects stay those that were given: modules and hooks have them. `parameters` is their list, and `shards`
    one flat nn.Parameter for each, in the same order, perhaps empty, of its dtype and its `requires_grad`;
    together a rank's shards have an n-th of all numbers, and at most the largest parameter, or one for each,
    more. `param_dtype` is the dtype of gathered weights, that of the parameters unless given; the shards keep
    theirs. `reduce_dtype` is kept for `reduce_gradients`.

    Source: arXiv:2304.11277, section 3.2.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: ProcessGroup,
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """Cut the parameters, keep this rank's shards, and free the rest."""
        # answer
        self.parameters = list(parameters)
        self.group, self.reduce_dtype = group, reduce_dtype
        kinds: dict[Any, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
        self.flats = [Flat(of_one_kind, group, param_dtype) for of_one_kind in kinds.values()]
        shard_of = {
            whole: shard for flat in self.flats for whole, shard in zip(flat.wholes, flat.shards, strict=True)
        }
        self.shards = [shard_of[parameter] for parameter in self.parameters]
        # end of answer

    def start_gather(self) -> None:
        """Send for the shards of all ranks, as they are by now, and do not wait for them.

        Does nothing where the weights are whole, or on their way, already.
        """
        # answer
        for flat in self.flats:
            flat.start_gather()
        # end of answer

    def gather(self) -> None:
        """Wait until the parameters are whole; start the gather if nobody has."""
        # answer
        self.start_gather()
        for flat in self.flats:
            flat.wait()
        # end of answer

    def free(self) -> None:
        """Give back the memory of the whole weights, whoever holds a view of them.

        A gather that is on its way is waited for first: it would arrive in memory that was given back. A
        view that autograd has kept is right again after the next `gather()`.
        """
        # answer
        for flat in self.flats:
            flat.free()
        # end of answer


@torch.no_grad()
def reduce_gradients(unit: ShardedUnit) -> None:
    """Add the mean of all ranks' gradients to the `.grad` of the shards, and drop the whole gradients.

    The ranks' gradients are summed in the unit's `reduce_dtype`, else in their own, and the mean has the
    shard's dtype. A rank receives its own share alone: P elements travel in all. A unit of which no
    parameter has a gradient is left as it is; a single missing one counts as zero. A frozen shard gets no
    `.grad`.
    """
    # answer
    if all(whole.grad is None for whole in unit.parameters):
        return
    for flat in unit.flats:
        if not flat.shards[0].requires_grad:
            continue
        own = [torch.zeros_like(w) if w.grad is None else w.grad for w in flat.wholes]
        gradient = torch.cat([g.flatten() for g in own])
        gradient = gradient.to(unit.reduce_dtype or gradient.dtype)
        (means,) = start_reduce_scatter([gradient], unit.group)()
        for shard, mean in zip(flat.shards, means.split([s.numel() for s in flat.shards]), strict=True):
            mean = mean.to(shard.dtype)
            shard.grad = mean if shard.grad is None else shard.grad + mean
        for whole in flat.wholes:
            whole.grad = None
    # end of answer


def gather_in_forward(block: nn.Module, unit: ShardedUnit) -> None:
    """From now on, each forward of the block gathers its unit first, and frees it when it is over."""
    # answer
    block.register_forward_pre_hook(lambda block, args: unit.gather())
    block.register_forward_hook(lambda block, args, x: unit.free())
    # end of answer


def gather_in_backward(blocks: Sequence[nn.Module], units: Sequence[ShardedUnit]) -> None:
    """From now on, backward gathers a block's unit when it enters the block, and reduces and frees it after.

    `blocks` compute one after the other, and `units[i]` has the parameters of `blocks[i]`. A unit is reduced
    and freed before backward gathers the next one, the last of all when backward is over: then the mean
    gradients of all blocks are in the shards' `.grad`.
    """
    # answer
    at_work: list[ShardedUnit] = []  # the unit of the block that backward is in

    def leave() -> None:
        while at_work:
            unit = at_work.pop()
            reduce_gradients(unit)
            unit.free()

    def enter(unit: ShardedUnit, gradient: Tensor) -> None:
        """The gradient of a block's output is complete: so is all that the block after it has to do."""
        leave()
        at_work.append(unit)
        unit.gather()
        torch.autograd.Variable._execution_engine.queue_callback(leave)

    def watch(unit: ShardedUnit, block: nn.Module, args: Any, x: Tensor) -> None:
        if x.requires_grad:
            x.register_hook(partial(enter, unit))

    for block, unit in zip(blocks, units, strict=True):
        block.register_forward_hook(partial(watch, unit))
    # end of answer


def gather_ahead(blocks: Sequence[nn.Module], units: Sequence[ShardedUnit]) -> None:
    """From now on, while a block computes, the gather of the unit that comes next is under way.

    In forward that is the next block's unit, in backward the one before; nothing waits for it until its own
    block computes. Called after `gather_in_forward` and `gather_in_backward` of the same blocks. No more
    than two units are whole, or on their way, at a time, and after backward none is, wherever it ends.

    Source: arXiv:2304.11277, section 3.3.
    """
    # answer

    def started_by(unit: ShardedUnit, block: nn.Module, args: Any, x: Tensor) -> None:
        if x.requires_grad and args[0].requires_grad:  # else backward ends in this block
            x.register_hook(lambda gradient: unit.start_gather())

    for i, block in enumerate(blocks):
        if i + 1 < len(blocks):
            block.register_forward_pre_hook(lambda block, args, i=i: units[i + 1].start_gather())
        if i > 0:
            block.register_forward_hook(partial(started_by, units[i - 1]))
    # end of answer


class FullySharded(nn.Module):
    """ZeRO-3: wraps a GPT so that each rank keeps its shards, and a block is whole only while it is at work.

    The constructor takes the weights of the group's rank 0. `parameters()` are this rank's shards, for any
    optimizer. Shards, gathered weights and gradients have the dtype of their parameter, whichever that is. A
    block is gathered before its forward and before its backward, and freed after each: no more than two are
    whole at a time. What lies outside the blocks may stay gathered from forward to backward. A forward under
    no_grad leaves nothing gathered (a star). Each forward computes with the shards as they are by then. After
    backward, from the loss or from the logits, the mean gradients are in the shards' `.grad`, added to what
    was there. Another forward may come between a loss and its backward. A step sends no more than two
    all-gathers of the weights and one reduce-scatter of the gradients would. Frozen weights are cut as well;
    they neither move nor decay. A hook on a parameter of the GPT keeps working: it gets this rank's whole
    gradient, and what it returns is averaged.

    With `param_dtype`, weights are gathered, and blocks compute, in that dtype. With `reduce_dtype`,
    gradients are summed over the ranks in that one, else in the dtype in which blocks compute. Shards, their
    `.grad` and `full_state_dict()` keep the dtype of the parameters. With `prefetch`, the gather of the block
    that comes next is under way while one computes.

    Source: arXiv:1910.02054, section 5.3; arXiv:2304.11277, section 3.
    """

    def __init__(
        self,
        module: GPT,
        group: ProcessGroup,
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        prefetch: bool = False,
    ) -> None:
        """Cut every parameter of the module, which is emptied, and hook on to its blocks."""
        # answer
        super().__init__()
        if not hasattr(module, "transformer"):
            raise ValueError(f"expected a GPT, got a {type(module).__name__}: shard it before it is wrapped")
        self.module = module
        blocks = module.transformer.h
        inside = {parameter for block in blocks for parameter in block.parameters()}
        outside = [parameter for parameter in module.parameters() if parameter not in inside]
        self.units = [
            ShardedUnit(parameters, group, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
            for parameters in (*(block.parameters() for block in blocks), outside)
        ]
        *of_blocks, self.outside = self.units
        for block, unit in zip(blocks, of_blocks, strict=True):
            gather_in_forward(block, unit)
        gather_in_backward(blocks, of_blocks)
        if prefetch:
            gather_ahead(blocks, of_blocks)
        # end of answer

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """What the GPT returns: logits and loss of this rank's tokens (b, s)."""
        # answer
        for unit in self.units:
            unit.free()  # an earlier pass may have stopped half-way, with weights that are old by now
        self.outside.gather()
        logits, loss = self.module(idx, targets)
        if logits.requires_grad:
            logits.register_hook(self._backward_begins)
        else:
            self.outside.free()
        return logits, loss
        # end of answer

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole weights under GPT's names, of a tied table one at least, on every rank; all call it."""
        # answer
        state = self.module.state_dict()
        whole_of: dict[nn.Parameter, Tensor] = {}
        for unit in self.units:
            for flat in unit.flats:
                buffer = flat.shards[0].new_empty(flat.buffer.numel())  # in the shards' dtype
                flat.all_gather_into(buffer).wait()
                sizes = [whole.numel() for whole in flat.wholes]
                pieces = buffer[: sum(sizes)].split(sizes)
                for whole, piece in zip(flat.wholes, pieces, strict=True):
                    whole_of[whole] = piece.view(whole.shape)
        names = self.module.named_parameters(remove_duplicate=False)
        return state | {name: whole_of[whole] for name, whole in names}
        # end of answer

    # answer: the shards by name, and the ends of backward
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, under GPT's names: `parameters()` asks here as well."""
        shard_of = {
            whole: shard
            for unit in self.units
            for whole, shard in zip(unit.parameters, unit.shards, strict=True)
        }
        for name, whole in self.module.named_parameters(*args, **kwargs):
            yield name, shard_of[whole]

    def _backward_begins(self, gradient: Tensor) -> None:
        self.outside.gather()  # there, unless an earlier backward has freed it
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        reduce_gradients(self.outside)
        self.outside.free()

    # end of answer


# answer: a mean across machines
def average_across(across: ProcessGroup, parameters: list[nn.Parameter]) -> None:
    """The mean of shards' gradients over ranks that hold the same shards, in all-reduces of many at once."""
    for bucket in fill_buckets([p for p in parameters if p.grad is not None], BUCKET_BYTES):
        gradients = [p.grad for p in bucket]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=across)
        means = (flat / across.size()).split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


def average_when_backward_ends(across: ProcessGroup, sharded: nn.Module, args: Any, outputs: Any) -> None:
    """A forward hook: FullySharded queues work until backward ends, so this queues its own from the queue."""
    average = partial(average_across, across, list(sharded.parameters()))
    queue = torch.autograd.Variable._execution_engine.queue_callback
    if outputs[0].requires_grad:
        outputs[0].register_hook(lambda gradient: queue(lambda: queue(average)))


# end of answer


def hybrid_shard(model: GPT, mesh: DeviceMesh) -> nn.Module:
    """Hybrid sharding (HSDP): ZeRO-3 inside each machine, data parallelism across machines.

    The `mesh` is as PyTorch's `fully_shard` takes it, its ranks ascending: ranks along its second dimension
    are one machine, and cut the weights among themselves; ranks along its first dimension hold the same
    shards. The module that is returned works as your FullySharded does, with `parameters()` and
    `full_state_dict()`. All ranks start with the weights of the mesh's first rank. After `loss.backward()`
    the mean gradients over all ranks of the mesh are in the shards' `.grad`, added to what was there, and
    nothing else has to be called. In a step weights and whole gradients travel inside machines alone; across
    machines each backward sends what one all-reduce of the shards' gradients does. A rank keeps nothing
    besides its shards, their gradients, and the optimizer's state of both.

    Raises:
        ValueError: the mesh has not two dimensions.

    Source: arXiv:2304.11277, section 3.2.2.
    """
    # answer
    if mesh.ndim != 2:
        raise ValueError(f"the mesh has two dimensions, machines and their ranks; this one has {mesh.ndim}")
    across, inside = mesh.get_group(0), mesh.get_group(1)
    sharded = FullySharded(model, inside)
    for shard in sharded.parameters():
        dist.broadcast(shard.detach(), group=across, group_src=0)
    sharded.register_forward_hook(partial(average_when_backward_ends, across))
    return sharded
    # end of answer


def fully_shard_gpt(model: GPT, mesh: DeviceMesh) -> GPT:
    """ZeRO-3 by PyTorch: `torch.distributed.fsdp.fully_shard` on the given model, a unit for each block.

    What lies outside the blocks is one more unit. `mesh` has one dimension, the ranks to shard over. Units
    are freed after forward, as they are by default. Changes and returns the given model.
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
    The norm is that of the whole gradient, as if one process had it, also of a model in float64, though no
    gradient travels for it; where it is larger than `max_norm`, every rank multiplies its gradients by
    max_norm / norm (with PyTorch's 1e-6 added to the norm, or without). Returns the norm before clipping, a
    scalar that is the same on every rank.
    """
    # answer
    optimizer.zero_grad()
    _, loss = module(inputs, targets)
    loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    square = sum((g.square().sum() for g in gradients), loss.new_zeros((), dtype=torch.float64))
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    for gradient in gradients:
        gradient.mul_((max_norm / norm).clamp(max=1.0))
    optimizer.step()
    return norm
    # end of answer
