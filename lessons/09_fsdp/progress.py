"""How far a FullySharded is: each stage of building it is tried on its own."""

from typing import Any

import torch
import torch.distributed as dist

from grader import run_ranks
from lessons.fsdp import measures
from nanogpt.data import load_tokens
from nanogpt.model import GPT

CONFIG = measures.DEEP


def sharded_and_dense(shard: Any) -> tuple[Any, GPT]:
    """What the ranks start with, each with other weights; and a GPT with those of rank 0."""
    torch.manual_seed(dist.get_rank())
    sharded = shard(GPT(CONFIG), dist.group.WORLD)
    torch.manual_seed(0)
    return sharded, GPT(CONFIG)


def same(sharded: Any, dense: GPT) -> bool:
    """Whether the whole weights are those of the dense model, but for rounding."""
    whole = sharded.full_state_dict()
    return all(torch.allclose(whole[name], weight, atol=1e-5) for name, weight in dense.state_dict().items())


def cut_and_gather(shard: Any) -> bool:
    """A rank has a share of the parameters, and full_state_dict() gives it rank 0's weights."""
    sharded, dense = sharded_and_dense(shard)
    sizes = [sum(p.numel() for p in module.parameters()) for module in (sharded, dense)]
    return sizes[0] < 0.6 * sizes[1] and same(sharded, dense)


def forward(shard: Any) -> bool:
    """Without gradients, the loss is that of one process."""
    sharded, dense = sharded_and_dense(shard)
    inputs, targets = (x % CONFIG.vocab_size for x in load_tokens("stdlib").batch(2, 16, seed=0, step=0))
    with torch.no_grad():
        return torch.allclose(sharded(inputs, targets)[1], dense(inputs, targets)[1], atol=1e-5)


def backward(shard: Any) -> bool:
    """After a step on different rows, the weights are those of one process with all rows."""
    sharded, dense = sharded_and_dense(shard)
    inputs, targets = (x % CONFIG.vocab_size for x in load_tokens("stdlib").batch(4, 16, seed=0, step=0))
    for module, share in (
        (sharded, slice(dist.get_rank(), None, dist.get_world_size())),
        (dense, slice(None)),
    ):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(inputs[share], targets[share])[1].backward()
        optimizer.step()
    return same(sharded, dense)


def free(shard: Any) -> bool:
    """While blocks compute one after the other, less is alive than all weights."""
    forward_megabytes = measures.alive_over_step(shard)[: CONFIG.n_layer]
    return max(forward_megabytes) < sum(p.numel() for p in GPT(CONFIG).parameters()) * 4 / 1e6


def show(shard: Any) -> None:
    """A line for each stage, on two ranks."""
    for number, (stage, told) in enumerate(
        (
            (cut_and_gather, "cut and gather: full_state_dict() has rank 0's weights"),
            (forward, "forward: the loss is that of one process"),
            (backward, "backward: after a step the weights are those of one process"),
            (free, "free: less is alive in forward than all weights"),
        ),
        start=1,
    ):
        try:
            reached, why = all(run_ranks(stage, shard, ranks=2)), "it ran, and this is not so"
        except RuntimeError as error:
            reached, why = False, str(error).splitlines()[0]
        print(f"{number}. {told}: {'yes' if reached else 'not yet'}")
        if not reached:
            print(f"   {why}")
