"""What the page measures: on one process, and on ranks with the learner's code."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grader import run_ranks
from lessons.page.hidden import GIGABIT, paces
from lessons.page.loopback import loopback_bytes
from lessons.page.tap import Tap
from lessons.page.timeline import Step
from nanogpt.data import Tokens, load_tokens
from nanogpt.model import GPT, GPTConfig

SLOW = "1 Gbit/s"
WIRES: dict[str, float | None] = {SLOW: GIGABIT, "10 Gbit/s": 10 * GIGABIT, "this machine": None}


def step_seconds(config: GPTConfig, tokens: Tokens, batch_sizes: Sequence[int]) -> list[float]:
    """Seconds of one forward and backward, the least of three, for each size of a batch."""
    torch.manual_seed(0)
    model = GPT(config)

    def one(batch_size: int) -> float:
        inputs, targets = tokens.batch(batch_size, config.block_size, seed=0, step=0)
        begin = time.perf_counter()
        model(inputs, targets)[1].backward()
        return time.perf_counter() - begin

    one(4)  # warm up
    return [min(one(b) for _ in range(3)) for b in batch_sizes]


def never_talk(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Each rank keeps its own gradients."""


def train_on_halves(average: Any, config: GPTConfig, num_steps: int = 10) -> list[Tensor]:
    """The head's weights after each step, of a rank that trains on its own half of each batch."""
    group, tokens = dist.group.WORLD, load_tokens("stdlib")
    torch.manual_seed(0)  # both ranks start with the same model
    model = GPT(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    seen = []
    for step in range(num_steps):
        batch = tokens.batch(8, config.block_size, seed=0, step=step)
        inputs, targets = (each.chunk(2)[group.rank()] for each in batch)
        optimizer.zero_grad()
        model(inputs, targets)[1].backward()
        average(model, group)
        optimizer.step()
        seen.append(model.lm_head.weight.detach().clone())
    return seen


def batches(config: GPTConfig, tokens: Tokens) -> dict[str, tuple[Tensor, Tensor]]:
    """Batches that two ranks share equally, and others."""
    drawn = {f"{b} rows": tokens.batch(b, config.block_size, seed=0, step=0) for b in (8, 9, 3)}
    inputs, targets = tokens.batch(8, config.block_size, seed=0, step=0)
    targets[:4, :-10] = -1  # a prompt that is not to be learned
    return {**drawn, "8 rows, 4 with prompts": (inputs, targets)}


def relative_error(
    loss_of: Any, config: GPTConfig, inputs: Tensor, targets: Tensor, learners: dict[str, Any]
) -> float:
    """On a rank: how far the mean over ranks is from the gradient of one process on the whole batch."""
    group, shard = dist.group.WORLD, learners["shard_batch"]
    torch.manual_seed(0)
    model = GPT(config)
    model(inputs, targets)[1].backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    loss_of(model, shard(inputs, group), shard(targets, group), group).backward()
    learners["all_reduce_gradients"](model, group)
    mean = torch.cat([p.grad.flatten() for p in model.parameters()])
    return ((mean - whole).norm() / whole.norm()).item()


def all_reduced_bytes(
    data_parallel: Any, config: GPTConfig, bucket_bytes: int, num_microbatches: int, quiet: bool
) -> list[int]:
    """On a rank: the bytes of each all-reduce of a step; `quiet` keeps all but the last backward silent."""
    wrapped = data_parallel(GPT(config), dist.group.WORLD, bucket_bytes)
    inputs = torch.zeros(2, config.block_size, dtype=torch.int64)
    with Tap() as tap:
        for i in range(num_microbatches):
            if quiet and i < num_microbatches - 1:
                with wrapped.no_sync():
                    wrapped(inputs, inputs)[1].backward()
            else:
                wrapped(inputs, inputs)[1].backward()
                wrapped.finish_gradient_synchronization()
    return [entry["bytes"] for entry in tap.log]


def loopback_bytes_of_a_step(data_parallel: Any, config: GPTConfig, repeat: int = 5) -> int | None:
    """On a rank: the least of a few steps, since other programs use the loopback interface too."""
    wrapped = data_parallel(GPT(config), dist.group.WORLD)
    inputs = torch.zeros(1, config.block_size, dtype=torch.int64)
    counts = []
    for _ in range(repeat):
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()
        wrapped(inputs, inputs)[1].backward()
        wrapped.finish_gradient_synchronization()
        dist.barrier()
        counts.append(None if before is None else loopback_bytes() - before)
    return None if None in counts else min(counts)


def timed_steps(ways: dict[str, Any], wires: Sequence[str], config: GPTConfig, rows: int = 16) -> dict:
    """Steps on two ranks, by wire and way; a way is a function of model and group, as `in_turns` wants it."""
    tokens = load_tokens("stdlib")
    inputs, targets = tokens.batch(rows, config.block_size, seed=0, step=0)
    found = run_ranks(in_turns, ways, wires, config, inputs, targets, ranks=2)[0]
    return {(wire, how): [_step_of(*one) for one in steps] for wire, how, steps in found}


def in_turns(
    ways: dict[str, Any],
    wires: Sequence[str],
    config: GPTConfig,
    inputs: Tensor,
    targets: Tensor,
    repeat: int = 6,
) -> list[tuple]:
    """On a rank: steps on each wire in each way. They take turns: a busy moment of the machine hits all.

    A way makes of (model, group) a module to call, and a function that ends the step's communication.
    """
    group = dist.group.WORLD
    inputs, targets = (each.tensor_split(group.size())[group.rank()] for each in (inputs, targets))
    made = {how: way(GPT(config), group) for how, way in ways.items()}
    steps: dict[tuple[str, str], list] = {(wire, how): [] for wire in wires for how in ways}
    for _ in range(repeat):
        for (wire, how), found in steps.items():
            found.append(_one_step(*made[how], WIRES[wire], inputs, targets))
    return [(wire, how, found) for (wire, how), found in steps.items()]


def in_buckets(bucket_bytes: float) -> Any:
    """A way to average after backward, in buckets of up to that many bytes."""

    def way(model: nn.Module, group: dist.ProcessGroup) -> tuple:
        def finish() -> None:
            free, buckets = 0.0, []
            for gradient in (p.grad for p in model.parameters()):
                if gradient.nbytes > free:
                    free = bucket_bytes
                    buckets.append([])
                free -= gradient.nbytes
                buckets[-1].append(gradient)
            for gradients in buckets:
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                dist.all_reduce(flat, group=group)
                for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                    gradient.copy_(mean.view_as(gradient) / group.size())

        return model, finish

    return way


def hidden_shares(
    way: Any, config: GPTConfig, ratios: Sequence[float], inputs: Tensor, targets: Tensor, repeat: int = 7
) -> list[float]:
    """On a rank: which part of the wire's time is hidden, where backward takes `ratio` times as long as it.

    In each round a step without a wire tells how long backward takes. What counts as not hidden is what the
    imitated wire still carries when backward is over, without gloo's own price.
    """
    group = dist.group.WORLD
    inputs, targets = (each.tensor_split(group.size())[group.rank()] for each in (inputs, targets))
    model = GPT(config)
    module, finish = way(model, group)
    sent = 2 * (group.size() - 1) / group.size() * sum(4 * p.numel() for p in model.parameters())
    found: list[list[float]] = [[] for _ in ratios]

    def seconds_of_backward() -> float:
        (_, began, ended, _), _ = _one_step(module, finish, None, inputs, targets)
        return ended - began

    for _, backward in zip(range(repeat), paces(seconds_of_backward), strict=False):
        for shares, ratio in zip(found, ratios, strict=True):
            (_, _, ended, _), log = _one_step(module, finish, sent * ratio / backward, inputs, targets)
            shares.append(1 - max(0.0, log[-1]["end"] - ended) * ratio / backward)
    return [statistics.median(shares) for shares in found]


def pytorchs_buckets(config: GPTConfig, bucket_megabytes: float) -> list[list[int]]:
    """On a rank: the bytes of each bucket of PyTorch's wrapper, in the first and in the second backward."""
    sizes: list[list[int]] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sizes[-1].append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    module = nn.parallel.DistributedDataParallel(GPT(config), bucket_cap_mb=bucket_megabytes)
    module.register_comm_hook(None, hook)
    inputs = torch.zeros(2, config.block_size, dtype=torch.int64)
    for _ in range(2):
        sizes.append([])
        module(inputs, inputs)[1].backward()
    return sizes


def _one_step(
    module: nn.Module, finish: Any, bytes_per_second: float | None, inputs: Tensor, targets: Tensor
) -> tuple[list[float], list[dict]]:
    """When a step began, and its forward, its backward and the rest were over; its all-reduces."""
    module.zero_grad()
    dist.barrier()
    with Tap(bytes_per_second) as tap:
        times = [time.perf_counter()]
        loss = module(inputs, targets)[1]
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        finish()
        times.append(time.perf_counter())
    return times, tap.log


def _step_of(times: list[float], log: list[dict]) -> Step:
    began, *ends = times
    sent = [{**entry, **{key: 1000 * (entry[key] - began) for key in ("start", "end")}} for entry in log]
    return Step(*(1000 * (end - began) for end in ends), sent)


class Line(nn.Module):
    """A straight line through points, called as GPT is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.layer(inputs)
        return outputs, (outputs - targets).square().mean()


def one_broken_batch(step: Any) -> bool:
    """On a rank: what a step returns where the batch of the last rank is broken."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    targets = torch.full((4, 1), float("nan") if group.rank() == group.size() - 1 else 1.0)
    return step(model, optimizer, torch.ones(4, 1), targets, group)


def show_a_broken_batch(step: Any) -> None:
    """Two ranks take a step; how it ends."""
    try:
        print("the ranks returned", run_ranks(one_broken_batch, step, ranks=2))
    except RuntimeError as error:
        print(error)
