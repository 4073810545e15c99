"""Training a GPT, on one process or on many: nothing left out, and nothing besides.

    python -m nanogpt.minimal                          one process
    torchrun --nproc-per-node 2 -m nanogpt.minimal     two, which share the batch: the same losses

What makes it data parallel are the four lines marked ←. The rest is the training loop that you know.
`nanogpt.train` is the same with options, checkpoints, and every other technique of the course.
"""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, its default arguments would hold the group until Python ends

from nanogpt.data import load_tokens
from nanogpt.model import GPT, GPTConfig

NUM_STEPS, BATCH_SIZE, BLOCK_SIZE = 100, 8, 64
CONFIG = GPTConfig(
    block_size=BLOCK_SIZE, vocab_size=4096, n_layer=2, n_head=4, n_embd=128, dropout=0.0, bias=False
)


def train(rank: int, num_ranks: int) -> list[float]:
    """Train; return the loss of the whole batch at every step, the same on every rank."""
    tokens = load_tokens("stdlib")  # the source of Python's standard library
    torch.manual_seed(0)
    model = GPT(CONFIG)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)  # ← the same weights everywhere
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    began = time.perf_counter()
    for step in range(NUM_STEPS):
        inputs, targets = tokens.batch(BATCH_SIZE, BLOCK_SIZE, seed=0, step=step)  # the same on every rank
        mine = slice(rank * BATCH_SIZE // num_ranks, (rank + 1) * BATCH_SIZE // num_ranks)
        _, loss = model(inputs[mine], targets[mine])  # ← a share of the batch
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # ← the sum of all ranks' gradients
            parameter.grad /= num_ranks  # ← and now the mean: that of the whole batch
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if rank == 0 and step % 10 == 9:
            speed = (step + 1) * BATCH_SIZE * BLOCK_SIZE / (time.perf_counter() - began)
            print(
                f"step {step + 1:3}  loss of rank 0's share {loss.item():.3f}  {speed:,.0f} tokens a second"
            )
    means = torch.stack(losses)
    dist.all_reduce(means)
    return (means / num_ranks).tolist()


def main() -> None:
    """Join the ranks that torchrun has started, or be the only one, and train."""
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if num_ranks == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    if rank == 0:
        print(f"{num_ranks} rank{'s' * (num_ranks > 1)}, {BATCH_SIZE} sequences a step")
    losses = train(rank, num_ranks)
    if rank == 0:
        print(f"loss of the whole batch: {losses[0]:.5f} at the first step, {losses[-1]:.5f} at the last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
