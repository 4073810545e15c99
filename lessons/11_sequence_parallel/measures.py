"""What the page measures: bytes kept and sent, and gradients, on ranks with the learner's code."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from grader import run_ranks
from lessons.page.memory import kept_bytes
from lessons.page.watch import Watch
from nanogpt.data import load_tokens
from nanogpt.model import GPT, Block, GPTConfig
from solutions import sequence_parallel as ours
from solutions import tensor_parallel as lesson_10

SHAPE = {"block_size": 64, "vocab_size": 4096, "n_layer": 4, "n_head": 8, "n_embd": 128}
CONFIG = GPTConfig(**SHAPE)
WITH_DROPOUT = GPTConfig(**SHAPE, dropout=0.1)
ROWS, LENGTH, WIDTH = 4, 64, 128
S = 4 * ROWS * LENGTH * WIDTH
"""Bytes of the residual stream."""

Cut = Callable[[Any, ProcessGroup], Any]


def dense_block(config: GPTConfig = CONFIG) -> Block:
    """One block with the fused core, which keeps no (s, s) matrix."""
    torch.manual_seed(0)
    block = GPT(config).transformer.h[0]
    block.attn.core.dropout = 0.0
    return block


def tensor_parallel_block(block: Block, group: ProcessGroup) -> Block:
    """Lesson 10's cut of a block."""
    lesson_10.tensor_parallel_attention(block.attn, group)
    lesson_10.tensor_parallel_mlp(block.mlp, group)
    return block


def kept_with_whole_tokens(config: GPTConfig) -> int:
    """On a rank: the bytes that a tensor-parallel block keeps."""
    block = tensor_parallel_block(dense_block(config), dist.group.WORLD)
    return kept_bytes(block, torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True))


def kept_with_own_tokens(block_of: Callable[[ProcessGroup], nn.Module]) -> int:
    """On a rank: the bytes that a block kept which takes this rank's tokens."""
    group = dist.group.WORLD
    x = torch.randn(ROWS, LENGTH // group.size(), WIDTH, requires_grad=True)
    return kept_bytes(block_of(group), x)


def costs_of_a_block(cut: Cut) -> dict[str, int | float]:
    """On a rank: what a block keeps, and what it sends forward and backward."""
    group = dist.group.WORLD
    found = {"kept": kept_with_own_tokens(lambda group: cut(dense_block(), group))}
    block = cut(dense_block(), group)
    x = torch.randn(ROWS, LENGTH // group.size(), WIDTH, requires_grad=True)
    return found | sent_bytes(lambda: block(x).sum())


def costs_of_a_layer(layer: Callable[[Tensor, Tensor, None, ProcessGroup], Tensor]) -> dict[str, int | float]:
    """On a rank: what a column-parallel layer keeps of its input, and what it sends."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    x = torch.randn(ROWS, LENGTH // group.size(), WIDTH, requires_grad=True)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4 * WIDTH // group.size(), WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return layer(x, self.weight, None, group)

    module = Layer()
    return {"kept": kept_bytes(module, x)} | sent_bytes(lambda: module(x).sum())


def sent_bytes(forward: Callable[[], Tensor]) -> dict[str, float]:
    """Bytes that this rank sends in forward and in backward."""
    with Watch() as watch:
        loss = forward()
        watch.mark("backward")
        loss.backward()
    return {"forward": watch.sent_bytes(after=""), "backward": watch.sent_bytes(after="backward")}


def wire_of_a_step(parallelize: Cut) -> dict[str, float]:
    """On a rank: the bytes that one step of the whole model sends."""
    torch.manual_seed(0)
    model = parallelize(GPT(CONFIG), dist.group.WORLD)
    inputs, targets = load_tokens("stdlib").batch(ROWS, LENGTH, seed=0, step=0)
    return sent_bytes(lambda: model(inputs, targets)[1])


def without_hooks(module: nn.Module) -> None:
    """Replace the parameters of a module and its children: a new `Parameter` has no hook."""
    for child in module.modules():
        for name, p in list(child.named_parameters(recurse=False)):
            setattr(child, name, nn.Parameter(p.detach()))


def shares_of_gradients(cut: Cut, summed: bool) -> dict[str, list[float]]:
    """Parameter that every rank has whole → on each rank, its gradient's share of the dense one.

    The share is that of the projection: 1 for the whole gradient, and those of parts add up to 1.
    """
    dense = dense_block()
    dense(stream()).square().sum().backward()
    ranks = run_ranks(gradients, cut, summed, ranks=2)
    shares = {}
    for name in ranks[0]:
        whole = dense.get_parameter(name).grad
        shares[name] = [((rank[name] * whole).sum() / whole.square().sum()).item() for rank in ranks]
    return shares


def gradients(cut: Cut, summed: bool) -> dict[str, Tensor]:
    """On a rank: the gradients of what it has whole in a block; not `summed`: without the block's hooks."""
    group = dist.group.WORLD
    block = cut(dense_block(), group)
    if not summed:
        without_hooks(block)
    block(stream().chunk(group.size(), 1)[group.rank()]).square().sum().backward()
    whole = ("ln_1.", "ln_2.", "attn.c_proj.bias", "mlp.c_proj.bias")
    return {name: p.grad for name, p in block.named_parameters() if name.startswith(whole)}


def stream() -> Tensor:
    """(b, s, h), the same on every rank."""
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


class AsFound(ours.AdaptedRowLinear):
    """The program to repair, as it was found."""

    def sum_over_group(self, gradient: Tensor) -> Tensor:
        return gradient


def fine_tune(layer: type[nn.Module], num_steps: int = 60) -> tuple[float, float, float]:
    """On a rank: first and last loss, and the norm of `up`; the first half of the tokens is a prompt."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    adapted = layer(32, 16, 4, group=group)
    x, wanted = torch.randn(2, 8, 32), torch.randn(2, 8, 16)
    counts = (torch.arange(8) >= 4).float()[:, None]
    mine, wanted, counts = (
        t.chunk(group.size(), dim)[group.rank()] for t, dim in ((x, 2), (wanted, 1), (counts, 0))
    )
    optimizer = torch.optim.Adam([adapted.down, adapted.up], lr=0.02)
    losses = []
    for _ in range(num_steps):
        loss = ((adapted(mine) - wanted).square() * counts).sum() / (2 * 4 * 16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
    return losses[0], losses[-1], adapted.up.detach().norm().item()
