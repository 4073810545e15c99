"""Lesson 08 otherwise: PyTorch's own DistributedDataParallel, made to keep the lesson's contract."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map


def all_reduce_gradients(model, group):
    """An all-reduce in two halves: an all-to-all of which each rank adds up its part, and an all-gather."""
    n = group.size()
    for parameter in model.parameters():
        if parameter.requires_grad:
            flat = parameter.new_zeros(-(-parameter.numel() // n) * n)
            if parameter.grad is not None:
                flat[: parameter.numel()] = parameter.grad.flatten()
            parts = torch.empty_like(flat)
            dist.all_to_all_single(parts, flat, group=group)
            dist.all_gather_into_tensor(flat, parts.view(n, -1).mean(0), group=group)
            parameter.grad = flat[: parameter.numel()].view_as(parameter)


def share_loss(loss_sum, num_counted, group):
    """An all-reduce in two halves."""
    counted = torch.tensor(int(num_counted), device=loss_sum.device)
    dist.reduce(counted, group=group, group_dst=0)
    dist.broadcast(counted, group=group, group_src=0)
    return loss_sum * group.size() / counted


class Anchored(nn.Module):
    """The module, with an output that depends on each trained parameter, be it by zero.

    DistributedDataParallel starts from its hooks: where none fires it sends nothing, and its peers wait.
    """

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        anchor = next(p for p in self.module.parameters() if p.requires_grad)
        zero = 0.0 * anchor.flatten()[0]

        def tie(output):
            floating = isinstance(output, torch.Tensor) and output.is_floating_point()
            return output + zero if floating else output

        return tree_map(tie, self.module(*args, **kwargs))


class DataParallel(nn.Module):
    def __init__(self, module, group, bucket_bytes=25 * 2**20):
        super().__init__()
        self.parallel = DistributedDataParallel(
            Anchored(module),
            process_group=group,
            bucket_cap_mb=bucket_bytes / 2**20,
            find_unused_parameters=True,
        )
        self.parallel.broadcast_buffers = False  # else every forward sends them, inside no_sync() too

    def forward(self, *args, **kwargs):
        return self.parallel(*args, **kwargs)

    def finish_gradient_synchronization(self):
        """Nothing is left to do: backward has waited."""

    def no_sync(self):
        return self.parallel.no_sync()


def smallest_hidden_share(num_parameters, flops_per_second, bytes_per_second, element_bytes=2):
    if flops_per_second <= 0 or bytes_per_second <= 0:
        raise ValueError("speeds are positive")
    whole, rest = divmod(element_bytes * int(flops_per_second), 2 * int(bytes_per_second))
    return whole + (rest > 0)
