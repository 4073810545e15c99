"""Lesson 11 by the plan of its own page, with what the plan leaves out: own masks, whole words.

A plan leaves a norm's gradients Partial(): who steps with them makes the sum.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from solutions.tensor_parallel import copy_to_group, gather_from_group, vocab_parallel_cross_entropy

GATHER = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
SCATTER = RowwiseParallel(output_layouts=Shard(1))
BLOCK = {
    "ln_1": SequenceParallel(),
    "attn": GATHER,
    "attn.c_attn": ColwiseParallel(),
    "attn.c_proj": SCATTER,
    "ln_2": SequenceParallel(),
    "mlp": GATHER,
    "mlp.c_fc": ColwiseParallel(),
    "mlp.c_proj": SCATTER,
}
ENDS = {
    "transformer.wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "transformer.ln_f": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
}


def separate(dropout, group):
    seed = torch.randint(2**62, (1,))
    dist.broadcast(seed, group_src=0, group=group)
    dropout.generator = torch.Generator().manual_seed(int(seed) + group.rank())


def require_whole_heads(num_heads, group):
    if num_heads % group.size():
        raise ValueError(f"{num_heads} heads over {group.size()} ranks")


def sequence_parallel_block(block, group):
    attention = block.attn
    require_whole_heads(attention.c_proj.in_features // attention.head_size, group)
    with torch.no_grad():
        for p in attention.c_attn.parameters():
            p.copy_(p.unflatten(0, (3, group.size(), -1)).transpose(0, 1).flatten(0, 2))
    parallelize_module(block, DeviceMesh.from_group(group, "cpu"), BLOCK)
    for dropout in (attention.resid_dropout, block.mlp.dropout):
        separate(dropout, group)
    return block


def sequence_parallelize(model, group):
    require_whole_heads(model.config.n_head, group)
    for block in model.transformer.h:
        sequence_parallel_block(block, group)
    parts, n, v = model.transformer, group.size(), model.config.vocab_size
    whole = F.pad(parts.wte.weight.detach(), (0, 0, 0, -v % n))
    parts.wte.weight = model.lm_head.weight = nn.Parameter(whole)
    parallelize_module(model, DeviceMesh.from_group(group, "cpu"), ENDS)
    model.lm_head.weight = parts.wte.weight
    separate(parts.drop, group)

    def embed(idx, positions):
        if len(positions) % n:
            raise ValueError(f"{len(positions)} tokens over {n} ranks")
        places = F.embedding(positions.chunk(n)[group.rank()], copy_to_group(parts.wpe.weight, group))
        return parts.drop(parts.wte(idx) + places)

    def forward(idx, targets=None):
        if idx.size(1) > model.config.block_size:
            raise ValueError(f"{idx.size(1)} tokens, where a block has {model.config.block_size}")
        x = embed(idx, torch.arange(idx.size(1)))
        for block in parts.h:
            x = block(x)
        logits = model.head(x)
        if targets is None:
            return gather_from_group(logits[:, -1:], group)[..., :v], None
        words = torch.arange(logits.size(-1)) + group.rank() * logits.size(-1)
        shown = logits.masked_fill(words >= v, float("-inf"))
        return logits, vocab_parallel_cross_entropy(shown.flatten(0, 1), targets.flatten(), group)

    model.forward = forward
    return model
