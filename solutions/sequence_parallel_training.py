"""Sequence parallelism in the training loop, and PyTorch's own version of it.

`--parallel sequence_parallel` with `--implementation torch` is the DTensor plan of tensor parallelism with
`SequenceParallel` for the norms; otherwise `sequence_parallelize` of the implementation does it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nanogpt.model import GPT, Dropout, GPTConfig
from nanogpt.optimizer import clip_gradients
from nanogpt.parallel import Parallel, complete_gradients
from solutions.tensor_parallel_training import TensorParallelTraining, require_divides


def sequence_parallelize_with_dtensor(model: GPT, group: ProcessGroup) -> GPT:
    """`sequence_parallelize` by PyTorch: a plan says how each layer's input and output lie on the ranks.

    Changes and returns the given model. With targets the logits come back whole. The position table is cut by
    rows, too. Sampling needs a length that divides.

    Raises:
        ValueError: n_head is not divisible by the number of ranks.
    """
    require_divides(model.config.n_head, group.size())
    device = model.lm_head.weight.device
    mesh = DeviceMesh.from_group(group, device.type)
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    for block in model.transformer.h:
        _order_by_rank(block.attn.c_attn, group.size())
        plan = {
            "ln_1": SequenceParallel(),
            "attn": gather,
            "attn.c_attn": ColwiseParallel(),
            "attn.c_proj": RowwiseParallel(output_layouts=Shard(1)),
            "ln_2": SequenceParallel(),
            "mlp": gather,
            "mlp.c_fc": ColwiseParallel(),
            "mlp.c_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    plan = {
        "transformer.wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "transformer.wpe": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "transformer.ln_f": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    model.lm_head.weight = model.transformer.wte.weight  # each got a DTensor of its own
    for module in model.modules():
        if isinstance(module, Dropout):
            module.generator = _own_generator(group, device)
    return model


@torch.no_grad()
def _order_by_rank(c_attn: nn.Linear, num_ranks: int) -> None:
    """Rows q|k|v of all heads, to q|k|v of rank 0, of rank 1, ...: a contiguous cut is by heads then."""
    for parameter in c_attn.parameters():
        parameter.copy_(parameter.unflatten(0, (3, num_ranks, -1)).transpose(0, 1).flatten(0, 2))


def _own_generator(group: ProcessGroup, device: torch.device) -> torch.Generator:
    """Random numbers that differ between ranks, however they are seeded."""
    seed = torch.randint(2**62, (1,)).to(device)
    dist.broadcast(seed, group_src=0, group=group)
    return torch.Generator(device).manual_seed(int(seed) + group.rank())


class SequenceParallelTraining(TensorParallelTraining):
    """`--parallel sequence_parallel`: the whole batch on every rank, of which each keeps its tokens."""

    exercises = ("sequence_parallelize",)

    def check(self, config: GPTConfig, num_ranks: int) -> None:
        """Heads and tokens must divide over the ranks."""
        super().check(config, num_ranks)
        if config.block_size % num_ranks:
            raise ValueError(
                f"block_size={config.block_size} is not divisible by {num_ranks} ranks: sequence parallelism "
                "gives each rank an equal part of every sequence"
            )

    def wrap(self, model: GPT) -> nn.Module:
        """The same model, cut."""
        self.config = model.config
        if self.implementation is None:
            return sequence_parallelize_with_dtensor(model, self.group)
        return self.implementation.sequence_parallelize(model, self.group)

    @torch.no_grad()
    def clip_gradients(self, module: nn.Module, max_norm: float) -> Tensor:
        """DTensors know how they are cut; their norm is that of the whole."""
        if self.implementation is not None:
            return super().clip_gradients(module, max_norm)
        complete_gradients(module)
        norm = clip_gradients(module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        if self.implementation is None and name == "transformer.wpe.weight":
            return torch.cat(self._gather(tensor, 0))
        return super()._whole(name, tensor)


PARALLEL: dict[str, type[Parallel]] = {"sequence_parallel": SequenceParallelTraining}
