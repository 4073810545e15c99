"""Context parallelism in the training loop: by a ring, by heads, and PyTorch's own version of the ring.

`--parallel context_parallel` with `--implementation torch` puts PyTorch's experimental ring under the same
model; otherwise `context_parallelize` of the implementation does it all. `--parallel ulysses` takes
`ulysses_attention` of the implementation, and the course's own model around it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from nanogpt.model import GPT, FusedAttention, GPTConfig
from nanogpt.parallel import Parallel
from nanogpt.technique import Checkpointing
from solutions.context_parallel import context_parallelize, cut_sequence


def parallelize_with_torch(model: GPT, group: ProcessGroup) -> GPT:
    """`context_parallelize`, with attention on PyTorch's ring. Changes and returns the given model.

    The ring balances its load as the zigzag does, with the same chunks, so tokens, loss and gradients are
    those of this lesson. It has kernels for CUDA alone.
    """
    from torch.distributed.tensor.experimental import _attention as experimental

    model = context_parallelize(model, group)
    mesh = DeviceMesh.from_group(group, model.lm_head.weight.device.type)
    balancer = experimental._HeadTailLoadBalancer(2 * group.size(), group.size(), mesh.device_type)
    # Cutting a tensor is what switches the balanced ring on; this one is thrown away.
    unused = torch.zeros(2 * group.size(), device=mesh.device_type)
    experimental._context_parallel_shard(mesh, [unused], [0], load_balancer=balancer)
    experimental._enable_context_parallel_dispatcher()
    experimental.set_rotate_method("alltoall")  # a ring; the default gathers all keys
    style = experimental._ContextParallel
    for block in model.transformer.h:
        block.attn.core = FusedAttention(dropout=0.0)
        parallelize_module(block.attn.core, mesh, style(2, style.AttentionType.SDPA))
    return model


class ContextParallelTraining(Parallel):
    """`--parallel context_parallel`: the whole batch on every rank, of which each takes its tokens."""

    exercises = ("context_parallelize",)
    axis = "context"
    keeps_no_scores = (
        "--parallel context_parallel: ring attention keeps no scores, and computes them again in backward "
        "already"
    )

    def check(self, config: GPTConfig, num_ranks: int) -> None:
        """The sequence must divide, and PyTorch's version needs a GPU."""
        parts = 2 * num_ranks
        if config.block_size % parts:
            raise ValueError(
                f"block_size={config.block_size} is not divisible by {parts}: context parallelism gives each "
                f"of {num_ranks} ranks two chunks of every sequence"
            )
        if self.implementation is None and dist.get_backend(self.group) != "nccl":
            raise ValueError(
                "--parallel context_parallel --implementation torch needs CUDA: PyTorch's context "
                "parallelism is an experiment that knows no attention kernel of the CPU"
            )

    def build(self, model: GPT, checkpointing: Checkpointing) -> nn.Module:
        """The attention core changes first, so that blocks which are computed again have the new one.

        Raises:
            ValueError: attention is to be recomputed, which it is already.
        """
        if checkpointing.recomputes == "attention":
            raise ValueError(f"--checkpoint attention does not go with {self.keeps_no_scores}")
        return checkpointing.apply(self.wrap(model))

    def wrap(self, model: GPT) -> nn.Module:
        """The same model, on parts of the sequence. Loss and gradients come out the same on every rank."""
        if self.implementation is None:
            return parallelize_with_torch(model, self.group)
        return self.implementation.context_parallelize(model, self.group)


def split_plainly(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's part of the whole x: of n consecutive ones the r-th.

    Raises:
        ValueError: x does not divide.
    """
    if x.size(dim) % group.size():
        raise ValueError(f"a sequence of {x.size(dim)} is not divisible by {group.size()} ranks")
    return x.chunk(group.size(), dim)[group.rank()]


class UlyssesTraining(ContextParallelTraining):
    """`--parallel ulysses`: the same, but attention cuts heads, and gets its tokens by all-to-alls."""

    exercises = ("ulysses_attention",)
    keeps_no_scores = "--parallel ulysses: attention is one function then, of which no part is computed again"

    def check(self, config: GPTConfig, num_ranks: int) -> None:
        """Sequence and heads must divide, and PyTorch has no version."""
        if self.implementation is None:
            raise ValueError(
                "--parallel ulysses has no --implementation torch: PyTorch cuts attention by a ring alone "
                "(DeepSpeed has Ulysses)"
            )
        for what, number in (("block_size", config.block_size), ("n_head", config.n_head)):
            if number % num_ranks:
                raise ValueError(
                    f"{what}={number} is not divisible by {num_ranks}: each rank takes a part of every "
                    "sequence, and in attention whole heads"
                )

    def wrap(self, model: GPT) -> nn.Module:
        """The same model, on plain parts of the sequence."""
        attention = self.implementation.ulysses_attention
        return cut_sequence(model, self.group, attention, split_plainly, last=self.group.size() - 1)


PARALLEL: dict[str, type[Parallel]] = {
    "context_parallel": ContextParallelTraining,
    "ulysses": UlyssesTraining,
}
