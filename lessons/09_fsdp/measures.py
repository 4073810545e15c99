"""What the page measures on ranks: bytes alive, elements sent, a step in time, norms of gradients."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from grader import run_ranks
from grader.beside.measure import settle
from lessons.page.hidden import GIGABIT
from lessons.page.tap import Tap
from lessons.page.watch import Watch
from nanogpt.data import Tokens, load_tokens
from nanogpt.model import GPT, GPTConfig

WAYS = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
DEEP = GPTConfig(block_size=64, vocab_size=512, n_layer=12, n_head=4, n_embd=128, bias=False)
"""A deeper model, with a small table."""


def held_by_data_parallel(config: GPTConfig, tokens: Tokens) -> dict[str, tuple[float, float]]:
    """On a rank: MB of weights, gradients and AdamW's state, and a sum that tells copies apart."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    model = GPT(config)
    module = nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        inputs, targets = (x.chunk(2)[group.rank()] for x in tokens.batch(4, 64, seed=0, step=step))
        optimizer.zero_grad()
        module(inputs, targets)[1].backward()
        optimizer.step()
    held = {
        "weights": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "optimizer": [t for s in optimizer.state.values() for t in s.values() if t.dim() > 0],
    }
    return {
        name: (sum(t.nbytes for t in ts) / 1e6, sum(t.double().abs().sum().item() for t in ts))
        for name, ts in held.items()
    }


def held_and_sent(wrap: Any, how: str, config: GPTConfig, tokens: Tokens) -> dict[str, float]:
    """On a rank: bytes alive by what they are, and elements sent in one step."""
    group = dist.group.WORLD
    inputs, targets = (x.chunk(group.size())[group.rank()] for x in tokens.batch(4, 64, seed=0, step=0))
    with Watch(memory=True) as watch:
        module, optimizer = wrap(how, GPT(config), group, torch.optim.AdamW, lr=1e-3)
        settle()
        watch.mark("step")
        module(inputs, targets)[1].backward()
        getattr(module, "finish_gradient_synchronization", lambda: None)()
        settle()
        watch.mark("update")
        optimizer.step()
        optimizer.zero_grad()
        settle()
        watch.mark("end of step")
    alive = watch.recording.alive
    return {
        "weights": alive("step"),
        "gradients": alive("update") - alive("step"),
        "optimizer": alive("end of step") - alive("step"),
        "sent": (watch.sent_bytes(after="step") + watch.sent_bytes(after="update")) / 4,
    }


def alive_over_step(shard: Callable[[GPT, Any], nn.Module] | None) -> list[float]:
    """On a rank: MB alive at each block's attention, on the way forward and on the way back."""
    group, names = dist.group.WORLD, []

    def look(name: str) -> None:
        settle()
        names.append(name)
        watch.mark(name)

    with Watch(memory=True) as watch:
        model = GPT(DEEP)
        for number, block in enumerate(model.transformer.h):

            def enter(core: nn.Module, args: Any, number: int = number) -> None:
                look(f"forward {number}")
                args[0].register_hook(lambda gradient: look(f"backward {number}"))

            block.attn.core.register_forward_pre_hook(enter)
        module = shard(model, group) if shard else model
        del model
        settle()
        inputs, targets = (x % 512 for x in load_tokens("stdlib").batch(1, 8, seed=0, step=group.rank()))
        module(inputs, targets)[1].backward()
    return [watch.recording.alive(name) / 1e6 for name in names]


def steps_in_time(
    ways: dict[str, Any], rows: int = 2, bytes_per_second: float = GIGABIT, repeat: int = 5
) -> dict[str, dict[str, Any]]:
    """On a rank: the fastest step of each way, which take turns on an imitated wire; times in ms."""
    group = dist.group.WORLD
    inputs, targets = (x % 512 for x in load_tokens("stdlib").batch(rows, 64, seed=0, step=group.rank()))
    modules = {how: shard(GPT(DEEP), group) for how, shard in ways.items()}
    best: dict[str, dict[str, Any]] = {}
    for _ in range(repeat):
        for how, module in modules.items():
            module.zero_grad()
            dist.barrier()
            with Tap(bytes_per_second) as tap:
                began = time.perf_counter()
                loss = module(inputs, targets)[1]
                forward = time.perf_counter()
                loss.backward()
                ended = time.perf_counter()

            def since(moment: float, began: float = began) -> float:
                return 1000 * (moment - began)

            step = {
                "forward": since(forward),
                "end": since(ended),
                "sent": [(e["kind"], since(e["start"]), since(e["end"])) for e in tap.log],
                "waits": [(e["kind"], *map(since, e["waits"])) for e in tap.log],
                # for the wire, not for a peer that is late
                "exposed": [(e["kind"], 1000 * max(0.0, e["end"] - e["waits"][0])) for e in tap.log],
            }
            best[how] = min(best.get(how, step), step, key=lambda step: step["end"])
    return best


def norm_on_rank(clipped_step: Any, shard: Any, config: GPTConfig, tokens: Tokens) -> float:
    """On a rank: the norm of the gradient that a clipped step of a sharded model returns."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    sharded = shard(GPT(config), group)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    inputs, targets = (x.chunk(2)[group.rank()] for x in tokens.batch(8, 64, seed=0, step=0))
    return float(clipped_step(sharded, optimizer, inputs, targets, 1.0, group))


def show_norms(clipped_step: Any, shard: Any, config: GPTConfig, tokens: Tokens) -> None:
    """What one process takes for the norm of the gradient, and what two ranks do."""
    torch.manual_seed(0)
    alone = GPT(config)
    alone(*tokens.batch(8, 64, seed=0, step=0))[1].backward()
    print(f"one process: {nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item():.3f}")
    for r, norm in enumerate(run_ranks(norm_on_rank, clipped_step, shard, config, tokens, ranks=2)):
        print(f"rank {r}:      {norm:.3f}")
