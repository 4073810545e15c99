"""Tensor parallelism in the training loop, and PyTorch's own version of it.

`--parallel tensor_parallel` with `--implementation torch` cuts the same matrices with DTensor
(`torch.distributed.tensor.parallel`); otherwise `tensor_parallelize` of the implementation does it.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nanogpt.model import GPT, Dropout, GPTConfig
from nanogpt.parallel import Parallel, clip_parts, local
from nanogpt.technique import Checkpointing

CUT_DIMS = {
    "wte.weight": 0,
    "lm_head.weight": 0,
    "attn.c_attn.weight": 0,
    "attn.c_attn.bias": 0,
    "attn.c_proj.weight": 1,
    "mlp.c_fc.weight": 0,
    "mlp.c_fc.bias": 0,
    "mlp.c_proj.weight": 1,
}
"""End of a parameter's name → the dimension along which it is cut. All others are replicated."""
TABLE, HEAD = "transformer.wte.weight", "lm_head.weight"
"""The two names of one matrix."""


def cut_dim(name: str) -> int | None:
    """The dimension along which GPT's parameter `name` is cut, None if every rank has it whole."""
    return next((dim for end, dim in CUT_DIMS.items() if name.endswith(end)), None)


def parallelize_with_dtensor(model: GPT, group: ProcessGroup) -> GPT:
    """`tensor_parallelize` by PyTorch: parameters become DTensors that know how they are cut.

    Changes and returns the given model. The logits come back whole; `loss_parallel` could avoid that.

    Raises:
        ValueError: n_head is not divisible by the number of ranks.
    """
    require_divides(model.config.n_head, group.size())
    device = model.lm_head.weight.device
    mesh = DeviceMesh.from_group(group, device.type)
    for block in model.transformer.h:
        _order_by_rank(block.attn.c_attn, group.size())
        plan = {
            "attn.c_attn": ColwiseParallel(),
            "attn.c_proj": RowwiseParallel(),
            "mlp.c_fc": ColwiseParallel(),
            "mlp.c_proj": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    plan = {
        "transformer.wte": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    model.lm_head.weight = model.transformer.wte.weight  # each got a DTensor of its own
    for module in model.modules():
        if isinstance(module, Dropout):
            module.generator = _agreed_generator(group, device)
    return model


def require_divides(num_heads: int, num_ranks: int) -> None:
    """Raise a ValueError if heads cannot be shared out."""
    if num_heads % num_ranks:
        raise ValueError(
            f"n_head={num_heads} is not divisible by {num_ranks} ranks: tensor parallelism gives each rank "
            "whole heads"
        )


@torch.no_grad()
def _order_by_rank(c_attn: nn.Linear, num_ranks: int) -> None:
    """Rows q|k|v of all heads, to q|k|v of rank 0, of rank 1, ...: a contiguous cut is by heads then."""
    for parameter in c_attn.parameters():
        parameter.copy_(parameter.unflatten(0, (3, num_ranks, -1)).transpose(0, 1).flatten(0, 2))


def _agreed_generator(group: ProcessGroup, device: torch.device) -> torch.Generator:
    """Random numbers that are the same on every rank: DTensor's local results know of no dropout."""
    seed = torch.randint(2**62, (1,)).to(device)
    dist.broadcast(seed, group_src=0, group=group)
    return torch.Generator(device).manual_seed(int(seed))


class TensorParallelTraining(Parallel):
    """`--parallel tensor_parallel`: the whole batch on every rank, a slice of every matrix."""

    exercises = ("tensor_parallelize",)
    axis = "tensor"

    def check(self, config: GPTConfig, num_ranks: int) -> None:
        """Heads must divide over the ranks."""
        require_divides(config.n_head, num_ranks)

    def build(self, model: GPT, checkpointing: Checkpointing) -> nn.Module:
        """Cut first: what is computed again are the cut layers."""
        return checkpointing.apply(self.wrap(model))

    def wrap(self, model: GPT) -> nn.Module:
        """The same model, cut."""
        self.config = model.config
        if self.implementation is None:
            return parallelize_with_dtensor(model, self.group)
        return self.implementation.tensor_parallelize(model, self.group)

    def clip_gradients(self, module: nn.Module, max_norm: float) -> Tensor:
        """Shards count on every rank, what is replicated counts once."""
        return clip_parts(module, max_norm, [self])

    def cuts(self, name: str) -> bool:
        """Matrices, and the biases that go with a part of the outputs."""
        return cut_dim(name) is not None

    @torch.no_grad()
    def whole_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Of the parameters alone: buffers that a cut layer may have are no weights."""
        return self.whole(dict(module.named_parameters()))

    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gathers every shard; q, k and v of c_attn, which lie by rank, are put back in GPT's order.

        Raises:
            ValueError: a parameter does not have the shape of a shard.
        """
        own = {name: local(tensor) for name, tensor in weights.items()}
        if TABLE in own:
            own.pop(HEAD, None)  # gathered once
        whole = {name: self._whole(name, tensor) for name, tensor in own.items()}
        if TABLE in whole:
            whole[HEAD] = whole[TABLE]
        return whole

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        dim = cut_dim(name)
        if dim is None:
            return tensor
        n = self.group.size()
        shards = self._gather(tensor, dim)
        if ".c_attn." in name:  # each rank holds its heads' q|k|v
            return torch.cat(shards).unflatten(0, (n, 3, -1)).transpose(0, 1).flatten(0, 2)
        joined = torch.cat(shards, dim)
        if name.endswith(("wte.weight", "lm_head.weight")):
            return joined[: self.config.vocab_size]
        return joined

    def _gather(self, tensor: Tensor, dim: int) -> list[Tensor]:
        """Every rank's shard; they may differ in length along `dim`, as those of an uneven vocabulary do."""
        n = self.group.size()
        sizes = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(n)]
        dist.all_gather(sizes, torch.tensor([tensor.size(dim)], device=tensor.device), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = tensor.new_zeros([longest if d == dim else k for d, k in enumerate(tensor.shape)])
        padded.narrow(dim, 0, tensor.size(dim)).copy_(tensor)
        shards = [torch.empty_like(padded) for _ in range(n)]
        dist.all_gather(shards, padded, group=self.group)
        return [shard.narrow(dim, 0, int(size)) for shard, size in zip(shards, sizes, strict=True)]


PARALLEL: dict[str, type[Parallel]] = {"tensor_parallel": TensorParallelTraining}
