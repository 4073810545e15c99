"""Data parallelism by hand: every rank has the whole model and a share of the batch.

The gradient of a mean over the whole batch is the mean of the gradients of equal shares, so ranks
that start with the same weights and average their gradients stay the same for ever. Where shares
differ, each rank's loss is weighed first.
Sources: Li et al. 2020, "PyTorch Distributed" (arXiv:2006.15704); Goyal et al. 2017 (arXiv:1706.02677).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from nanogpt.model import GPT
from nanogpt.parallel import Parallel


def shard_batch(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's rows of a batch that every rank has: (b, ...) to (b/n, ...).

    The shares are disjoint and are the whole batch together. Where b is not divisible by n, two
    shares differ by at most one row. Tensors of one batch are cut at the same rows. Nothing is sent,
    and the given tensor stays as it was.
    """
    # answer
    return tensor.tensor_split(group.size())[group.rank()]
    # end of answer


def broadcast_parameters(model: nn.Module, group: ProcessGroup) -> None:
    """Give every rank the parameters and buffers of the group's rank 0, in place.

    Frozen parameters and non-persistent buffers count too, and those of modules inside modules. Each
    arrives bit for bit, in its own dtype. It may lie in memory in another order on each rank. The
    Parameter objects stay the same ones, so that optimizers and ties keep hold of them. Each tensor
    is sent once.
    """
    # answer
    for tensor in [*model.parameters(), *model.buffers()]:
        sent = tensor.detach().contiguous()  # what travels is memory, in the order in which it lies
        dist.broadcast(sent, group=group, group_src=0)
        tensor.detach().copy_(sent)
    # end of answer


def all_reduce_gradients(model: nn.Module, group: ProcessGroup) -> None:
    """Replace every `.grad` by its mean over the ranks of the group, in the model's dtype.

    A gradient that is None on some ranks counts as zero there. A frozen parameter keeps None, and
    a weight that is used in two places (a tie) is sent once. A gradient may lie in memory in another
    order on each rank. A rank sends no more bytes than an all-reduce of its gradients would. No weight
    changes, and no buffer.

    An extra that earns a star: in a model of two dtypes, no gradient loses digits.
    """
    # answer
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mean = gradient.contiguous() / group.size()
            dist.all_reduce(mean, group=group)
            parameter.grad = mean
    # end of answer


def share_loss(loss_sum: Tensor, num_counted: Tensor | int, group: ProcessGroup) -> Tensor:
    """This rank's loss, weighed so that a plain mean over ranks is the mean over all counted targets.

    It is loss_sum · n / (counted targets of all ranks), to the digits of loss_sum's dtype. So are its
    gradients: their mean over the n ranks is the gradient of one process on the whole batch, however many
    targets each rank has. One number travels.

    Args:
        loss_sum: the sum of this rank's losses over its counted targets, a scalar with its graph.
        num_counted: how many these are, a tensor or an int, perhaps 0 (but not on all ranks).
            Neither argument is changed.
    """
    # answer
    counted = torch.as_tensor(num_counted, device=loss_sum.device).clone()
    dist.all_reduce(counted, group=group)
    return (loss_sum.double() / counted * group.size()).to(loss_sum.dtype)
    # end of answer


# answer: a bucket, and how parameters are dealt out to buckets
class Bucket:
    """Parameters of one dtype whose gradients travel together in one all-reduce."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def send(self, group: ProcessGroup) -> None:
        """Move the gradients out of `.grad`, so that the next pass starts afresh, and all-reduce them."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(group.size())
        for parameter in self.parameters:
            parameter.grad = None
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def receive(self) -> None:
        """Wait, and add the means to what has come into `.grad` meanwhile."""
        self.work.wait()
        means = self.flat.split([p.numel() for p in self.parameters])
        for parameter, mean in zip(self.parameters, means, strict=True):
            mean = mean.view_as(parameter)
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        del self.flat, self.work


def fill_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Deal out parameters in the given order, a new bucket when the last one is full or of another dtype."""
    buckets: list[Bucket] = []
    free_bytes = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        if not buckets or num_bytes > free_bytes or parameter.dtype != buckets[-1].parameters[0].dtype:
            buckets.append(Bucket([]))
            free_bytes = bucket_bytes
        buckets[-1].parameters.append(parameter)
        free_bytes -= num_bytes
    return buckets


# end of answer


class DataParallel(nn.Module):
    """Averages a module's gradients over a group, a bucket at a time, while backward goes on.

    The constructor copies weights and buffers of the group's rank 0 to all ranks. A bucket holds up
    to `bucket_bytes` of gradients (a larger gradient has a bucket to itself), neighbours in backward. You
    may also close it as PyTorch does, with the gradient that fills it. It is all-reduced, asynchronously,
    from the first pass on, as soon as its gradients are there and the bucket before it has left: so every
    rank sends the same buckets in the same order, whatever order its own backward takes. Gradients travel
    in the module's dtype. The mean is plain, each rank counts as much as any other: where shares differ,
    weigh the loss (`share_loss`).

    An extra that earns a star: in a module of two dtypes, each gradient travels in its own. Another: a
    forward under `torch.no_grad()`, or in `no_sync()`, between backward and finish leaves the pass pending.

    Source: arXiv:2006.15704, section 3.2.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup, bucket_bytes: int = 25 * 2**20) -> None:
        """Copy the weights, deal the parameters out to buckets, register a hook on each."""
        # answer
        super().__init__()
        self.module = module
        self.group = group
        self.synchronizing = True
        broadcast_parameters(module, group)
        # Backward meets the last parameters first. parameters() names a tied weight once.
        trained = [p for p in module.parameters() if p.requires_grad]
        self.buckets = fill_buckets(reversed(trained), bucket_bytes)
        self.waiting = deque(self.buckets)  # what has not been sent in this round
        self.ready: set[nn.Parameter] = set()  # whose gradient is there in this round
        self.pending = False
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
        # end of answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns.

        Outside `no_sync()`, and with gradients switched on, it makes a pass pending.
        """
        # answer
        if self.synchronizing and torch.is_grad_enabled():
            if self.ready:  # an earlier backward, after which nobody called it
                self.finish_gradient_synchronization()
            self.pending = True  # on every rank, also where backward will use none of the parameters
        return self.module(*args, **kwargs)
        # end of answer

    def _gradient_is_there(self, parameter: nn.Parameter) -> None:
        """Your hook: autograd calls it when this pass has added all of its gradient to parameter.grad."""
        # answer
        if not self.synchronizing:
            return
        if parameter in self.ready:  # a second backward
            self.finish_gradient_synchronization()
        self.ready.add(parameter)
        self.pending = True
        while self.waiting and self.ready.issuperset(self.waiting[0].parameters):
            self.waiting.popleft().send(self.group)
        # end of answer

    def finish_gradient_synchronization(self) -> None:
        """Send what unused parameters held back, wait, and put the means into every `.grad`.

        A pass is pending since its forward, on all ranks: also on a rank whose backward reaches none
        of the module's parameters. Its backward comes before this call. Does nothing when nothing is
        pending.
        """
        # answer
        if not self.pending:
            return
        self.pending = False
        while self.waiting:
            self.waiting.popleft().send(self.group)
        for bucket in self.buckets:
            bucket.receive()
        self.waiting.extend(self.buckets)
        self.ready.clear()
        # end of answer

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward of a micro-batch: gradients add up and nothing is sent.

        The next backward outside reduces all that has added up; what zero_grad() has cleared until then
        is gone. An exception that leaves it ends it too. One may stand inside another: the outer one goes
        on until its own end. Other modules reduce their gradients meanwhile.
        """
        # answer
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before
        # end of answer


def smallest_hidden_share(
    num_parameters: int, flops_per_second: float, bytes_per_second: float, element_bytes: int = 2
) -> int:
    """The fewest tokens of a rank whose backward takes at least as long as the all-reduce of its gradients.

    There are so many ranks that (n-1)/n counts as 1: a rank sends 2·S bytes round the ring, where S is
    P · `element_bytes`. Backward takes 4·P FLOPs a token. It is a whole number of tokens, rounded up. Where
    the two times are equal, the all-reduce is hidden. P cancels: the same speeds give the same answer for
    every P.

    Args:
        num_parameters: P, each with a gradient of `element_bytes` bytes.
        flops_per_second: how fast a rank computes.
        bytes_per_second: how fast a rank sends. Bytes, not bits.

    Raises:
        ValueError: a speed is 0 or negative.

    Source: "How to Scale Your Model", section "Data parallelism" of its chapter on GPUs.
    """
    # answer
    if flops_per_second <= 0 or bytes_per_second <= 0:
        raise ValueError(f"speeds are above 0, not {flops_per_second} and {bytes_per_second}")
    return int(-(-element_bytes * flops_per_second // (2 * bytes_per_second)))
    # end of answer


def guarded_step(
    model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor, group: ProcessGroup
) -> bool:
    """One training step that leaves out a broken batch; says whether the step was taken.

    `inputs` and `targets` are this rank's share. If the loss of any rank's share is not finite, no
    rank changes a weight or the optimizer's state, and all ranks return False. Where all losses and
    gradients are finite, all ranks step on the mean gradient, clipped to norm 1, and return True.
    """
    # answer
    optimizer.zero_grad()
    _, loss = model(inputs, targets)
    finite = loss.isfinite().float()
    dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
    if not finite:
        return False  # a broken batch
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    return True
    # end of answer


# --- training ---


class DataParallelTraining(Parallel):
    """`--parallel data_parallel`: a share of the batch on each rank, gradients averaged."""

    exercises = ("DataParallel", "shard_batch")

    def wrap(self, model: GPT) -> nn.Module:
        """The model in `DataParallel`, or in PyTorch's own when there is no implementation."""
        self.model = model
        if self.implementation is None:
            return nn.parallel.DistributedDataParallel(model, process_group=self.group)
        return self.implementation.DataParallel(model, self.group)

    def share(self, tensor: Tensor) -> Tensor:
        """This rank's rows (b/n, s) of a global batch (b, s)."""
        split = shard_batch if self.implementation is None else self.implementation.shard_batch
        return split(tensor, self.group)

    def accumulating(self, module: nn.Module) -> AbstractContextManager[None]:
        """Both wrappers call it `no_sync`."""
        return module.no_sync()

    def synchronize(self, module: nn.Module) -> None:
        """PyTorch's wrapper waits at the end of backward by itself."""
        if self.implementation is not None:
            module.finish_gradient_synchronization()

    def mean_loss(self, loss: Tensor) -> Tensor:
        """The plain mean over ranks: the loop has weighed each share by its targets."""
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=self.group)
        return mean / self.group.size()

    def whole_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Every rank has the whole model."""
        return self.model.state_dict()


PARALLEL: dict[str, type[Parallel]] = {"data_parallel": DataParallelTraining}
