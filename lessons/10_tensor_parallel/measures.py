"""What the page measures: a block on one process, and on ranks a step, its twins and its drift."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from lessons.page.memory import kept_bytes
from lessons.page.tap import Tap
from lessons.page.watch import Watch
from nanogpt.model import GPT, MLP, GPTConfig
from solutions import tensor_parallel as ours


def block_bytes(width: int) -> tuple[int, int]:
    """Of a dense block: training state at 16 bytes a weight, and what one sequence keeps for backward."""
    config = GPTConfig(block_size=256, vocab_size=64, n_layer=1, n_head=width // 64, n_embd=width)
    block = GPT(config).transformer.h[0]
    x = torch.randn(1, config.block_size, width, requires_grad=True)
    return 16 * sum(p.numel() for p in block.parameters()), kept_bytes(block, x)


def trained_slice(each_draws_its_own: bool, num_steps: int = 50) -> tuple[Tensor, float]:
    """On a rank seeded like the others: its hidden features after training, (8, 16), and the loss.

    Two cut layers learn what a random network computes. Each rank draws its slices itself, or keeps those
    of layers that all ranks drew whole.
    """
    group = dist.group.WORLD
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    y = torch.tanh(x @ torch.randn(16, 4))
    layers = [
        ours.ColumnParallelLinear(16, 8 * group.size(), group=group),
        ours.RowParallelLinear(8 * group.size(), 4, group=group),
    ]
    for layer in layers if each_draws_its_own else ():
        torch.nn.init.normal_(layer.weight, std=0.02)
    model = nn.Sequential(layers[0], nn.GELU(), layers[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(num_steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return layers[0].weight.detach(), (model(x) - y).square().mean().item()


def mlp_on_a_rank(cut: Any, config: GPTConfig, x: Tensor) -> dict[str, Any]:
    """On a rank: the output of a cut MLP, and the shapes that it holds."""
    torch.manual_seed(0)
    mlp = cut(MLP(config), dist.group.WORLD)
    return {"output": mlp(x), "shapes": {name: list(p.shape) for name, p in mlp.named_parameters()}}


def step(parallelize: Callable, config: GPTConfig, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """On a rank: what one training step sends, keeps and computes, and which parameters lie here."""
    torch.manual_seed(0)
    model = GPT(config)
    dense = {name: p.shape for name, p in model.named_parameters()}
    model = parallelize(model, dist.group.WORLD)
    with Watch(saved=True, ignore=[*model.parameters(), *model.buffers()]) as watch:
        loss = model(inputs, targets)[1]
        watch.mark("backward")
        loss.backward()
    recording = watch.recording
    cut = sum(p.numel() for name, p in model.named_parameters() if p.shape != dense[name])
    return {
        "forward": [event.num_elements for event in recording.select(None, "")],
        "backward": [event.num_elements for event in recording.select(None, "backward")],
        "events": [(event.index, event.num_bytes, event.after) for event in recording.select()],
        "sent": watch.sent_bytes(),
        "kept": recording.saved_bytes,
        "flops": recording.flops(""),
        "cut": cut,
        "replicated": sum(p.numel() for p in model.parameters()) - cut,
    }


class AsFound(ours.MultiQueryAttention):
    """The program to repair, as it was found."""

    def __init__(self, width: int, num_heads: int, *, group: ProcessGroup) -> None:
        super().__init__(width, num_heads, group=group)
        for parameter in self.key_value.parameters():
            parameter.register_hook(self.sum_over_group)

    def sum_over_group(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=self.group)
        return gradient

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.query(x).view(b, s, -1, self.head_size).transpose(1, 2)
        k, v = (part.unsqueeze(1).expand_as(q) for part in self.key_value(x).chunk(2, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))


WIDTHS = [64, 128, 256, 512]


def overheads(
    parallelize: Callable, num_tokens: int = 256, repeat: int = 7
) -> tuple[float, list[tuple[float, float]]]:
    """On a rank of two: a wire's speed, and by width FLOP/s and seconds of waiting a second of computing.

    The wire is one for which the widest blocks should wait a quarter of the time that they compute. Computing
    is counted in processor time, so that other programs do not count.
    """
    group, wire, found = dist.group.WORLD, None, []
    for width in reversed(WIDTHS):
        torch.manual_seed(0)
        config = GPTConfig(block_size=num_tokens, vocab_size=64, n_layer=2, n_head=4, n_embd=width)
        blocks = parallelize(GPT(config), group).transformer.h
        x = torch.randn(1, num_tokens, width)
        alone = statistics.median(_blocks(blocks, x, None)[0] for _ in range(repeat))
        if wire is None:
            seconds = torch.tensor(alone)
            dist.all_reduce(seconds)
            sent = len(blocks) * 4 * x.nbytes  # a ring of two sends each tensor once
            wire = sent / (0.25 * seconds.item() / group.size())
        rounds = [_blocks(blocks, x, wire) for _ in range(repeat)]
        computed, waited = (statistics.median(each) for each in zip(*rounds, strict=True))
        flops = len(blocks) * 72 * width**2 * num_tokens / group.size()
        found.append((flops / computed, waited / computed))
    return wire, found[::-1]


def _blocks(blocks: nn.ModuleList, x: Tensor, bytes_per_second: float | None) -> tuple[float, float]:
    """Forward and backward of all blocks: seconds of the processor, and seconds of waiting for the wire."""
    x = x.clone().requires_grad_()
    dist.barrier()
    with Tap(bytes_per_second) as tap:
        begin = time.process_time()
        y = x
        for block in blocks:
            y = block(y)
        y.sum().backward()
        computed = time.process_time() - begin
    return computed, sum(max(0.0, sent["end"] - sent["waits"][0]) for sent in tap.log)


def copies(attention: Any, num_steps: int = 20) -> list[tuple[Tensor, Tensor]]:
    """On a rank: after each step, its copies of key_value's weight and of the weight of a norm below."""
    torch.manual_seed(0)
    norm, layer = nn.LayerNorm(32), attention(32, 4, group=dist.group.WORLD)
    x, y = torch.randn(2, 8, 32), torch.randn(2, 8, 32)
    for parameter in (layer.query.weight, layer.key_value.weight, layer.project.weight):
        parameter.data *= 5  # small weights learn slowly
    optimizer = torch.optim.SGD([*norm.parameters(), *layer.parameters()], lr=0.1)
    seen = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        (layer(norm(x)) - y).square().mean().backward()
        optimizer.step()
        seen.append((layer.key_value.weight.detach().clone(), norm.weight.detach().clone()))
    return seen
