"""When computing hides the wire of ZeRO-3: predicted, measured on an imitated wire, and a published run."""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from grader import run_ranks
from grader.guessing import Truth
from lessons.fsdp.measures import DEEP
from lessons.page import hidden
from lessons.page.hidden import GIGABIT, MACHINES
from lessons.page.look import GREY, RANKS, figure
from lessons.page.tap import SHARE_SENT, Tap
from lessons.page.watch import Watch
from nanogpt.data import load_tokens
from nanogpt.model import GPT

PARAMETERS = 8_030_261_248
"""Of Llama 3 8B."""

LOCAL_TOKENS = 2 * 8192
"""Of one GPU in one backward in torchtitan's runs of it."""

TOKENS_PER_SECOND = {8: 5_762, 128: 5_605}
"""Of one GPU, by the number of H100, eight in a machine: FSDP in bf16, torchtitan's tables 1 and 3."""

CARD = 50e9
"""Bytes a second of one network card of 400 Gbit/s; an H100 machine has one for each GPU."""

MICRO_BATCH = 4096
"""Tokens, in the questions of the page."""

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Tokens of a rank, as multiples of the fewest that hide everything."""

BOTH_WAYS = {"arrowstyle": "<->"}


def least_tokens(flops_per_second: float, bytes_per_second: float) -> float:
    """Of a rank whose computing takes as long as its wire, with two bytes a number."""
    return flops_per_second / bytes_per_second


def predictions() -> list[Truth]:
    """Tokens that an H100 needs, and what is left where it has too few."""
    flops, nvlink = MACHINES["H100, NVLink"]
    needed = least_tokens(flops, CARD)
    times = needed / MICRO_BATCH
    accumulated = (4 * 6 + 4 * times - 4) / (4 * 6)
    return [
        Truth(
            "nvlink", "tokens an H100 needs, NVLink", least_tokens(flops, nvlink), "tokens", "989e12 / 450e9"
        ),
        Truth("card", "tokens it needs, 50 GB/s", needed, "tokens", "989e12 / 50e9"),
        Truth(
            "times",
            "times its computing, for a step of 4 micro-batches",
            times,
            "times",
            f"{needed:,.0f} / 4,096, for each of the 4. Data parallel with no_sync: {accumulated:.1f} times",
        ),
    ]


# --- measured ---


def step_of(module: nn.Module, inputs: Tensor, targets: Tensor, speed: float | None) -> tuple[float, list]:
    """On a rank: seconds of a forward and a backward, and what a tap on a wire of this speed wrote down."""
    module.zero_grad()
    dist.barrier()
    with Tap(speed) as tap:
        began = time.perf_counter()
        module(inputs, targets)[1].backward()
        return time.perf_counter() - began, tap.log


def hidden_parts(shard: Any, repeat: int = 3) -> list[float]:
    """On a rank: which part of the wire's time nobody waits for, where computing takes RATIOS times as long.

    In each round a step of the whole model tells how long computing takes. Waiting is for the imitated wire,
    without gloo's own price.
    """
    group = dist.group.WORLD
    inputs, targets = (
        x % DEEP.vocab_size for x in load_tokens("stdlib").batch(4, 64, seed=0, step=group.rank())
    )
    whole, sharded = GPT(DEEP), shard(GPT(DEEP), group)
    _, log = step_of(sharded, inputs, targets, None)
    sent = sum(SHARE_SENT[entry["kind"]](group.size()) * entry["bytes"] for entry in log)
    found: list[list[float]] = [[] for _ in RATIOS]
    for _ in range(repeat):
        mean = torch.tensor(step_of(whole, inputs, targets, None)[0])
        dist.all_reduce(mean, group=group)
        computing = mean.item() / group.size()
        for parts, ratio in zip(found, RATIOS, strict=True):
            wire = computing / ratio
            _, log = step_of(sharded, inputs, targets, sent / wire)
            parts.append(1 - sum(entry["kept"] for entry in log) / wire)
    return [statistics.median(parts) for parts in found]


def draw_hidden_parts(ways: Mapping[str, Any]) -> None:
    """The hidden part for two ranks and several wires, of each way to shard."""
    measured = {}
    for how, shard in ways.items():
        run = run_ranks(hidden_parts, shard, ranks=2)
        measured[f"measured: {how}"] = [statistics.fmean(parts) for parts in zip(*run, strict=True)]
    told = {"the formula: all but the first gather starts ahead": lambda x: min(1, x)}
    hidden.draw_shares(RATIOS, told, measured, ("formula", *ways))


def draw_machines(smallest_hidden_share: Callable[..., int]) -> None:
    """On published machines, with the function of lesson 08."""
    hidden.draw_machines(
        partial(smallest_hidden_share, PARAMETERS),
        (LOCAL_TOKENS, "torchtitan's\nmicro-batch"),
        "ZeRO-3's wire",
        "bf16, all of the data sheet's FLOP/s",
    )


def show_published_run(smallest_hidden_share: Callable[..., int]) -> None:
    """What the function of lesson 08 says of torchtitan's runs on one machine and on sixteen."""
    fastest = TOKENS_PER_SECOND[8]
    for num_gpus, machine in ((8, "H100, NVLink"), (128, "H100, between machines")):
        flops = 6 * PARAMETERS * TOKENS_PER_SECOND[num_gpus]
        least = smallest_hidden_share(PARAMETERS, flops, MACHINES[machine][1])
        print(
            f"{num_gpus:3} GPUs: {TOKENS_PER_SECOND[num_gpus]:,} tokens a second and GPU are "
            f"{flops / 1e12:.0f} TFLOP/s, which need {least:,} tokens; there are {LOCAL_TOKENS:,}. "
            f"Speed of a GPU: {TOKENS_PER_SECOND[num_gpus] / fastest:.0%}"
        )


# --- two kinds of wire ---


def step_on_two_wires(shard: Any, shape: tuple[int, ...], repeat: int = 3) -> dict[str, float]:
    """On a rank of two machines of two: MB kept, MB sent inside and across, milliseconds a step."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    torch.manual_seed(0)
    module = shard(GPT(DEEP), mesh)
    inputs, targets = (
        x % DEEP.vocab_size for x in load_tokens("stdlib").batch(2, 64, seed=0, step=dist.get_rank())
    )
    with Watch() as watch:
        module(inputs, targets)[1].backward()
    sent = {"inside": 0.0, "across": 0.0}
    for event in watch.recording.events:
        where = "inside" if len({rank // 2 for rank in event.group}) == 1 else "across"
        sent[where] += SHARE_SENT[event.kind](len(event.group)) * event.num_bytes / 1e6
    seconds = []
    for _ in range(repeat):
        dist.barrier()
        with Tap(10 * GIGABIT, across=GIGABIT, machine_size=2):
            began = time.perf_counter()
            module(inputs, targets)[1].backward()
            seconds.append(time.perf_counter() - began)
    kept = sum(p.numel() * p.element_size() for p in module.parameters()) / 1e6
    return {"kept": kept, **sent, "milliseconds": 1000 * min(seconds)}


def show_two_wires(fully_sharded: Any, hybrid_shard: Any) -> None:
    """ZeRO-3 over four ranks, and hybrid on two machines of two."""

    def over_all(model: GPT, mesh: Any) -> nn.Module:
        return fully_sharded(model, mesh.get_group())

    print("                         weights kept   sent inside   sent across   a step")
    for how, shard, shape in (
        ("FullySharded on 4 ranks", over_all, (4,)),
        ("hybrid_shard on 2 x 2", hybrid_shard, (2, 2)),
    ):
        found = run_ranks(step_on_two_wires, shard, shape, ranks=4)[0]
        print(
            f"{how:24} {found['kept']:9.2f} MB {found['inside']:10.2f} MB {found['across']:10.2f} MB "
            f"{found['milliseconds']:5.0f} ms"
        )


def draw_mesh() -> None:
    """Two machines of four ranks: who has which shard, and what travels where."""
    _, axes = figure(figsize=(8.5, 2.5))
    for machine in (0, 1):
        y = -1.6 * machine
        axes.add_patch(plt.Rectangle((-0.2, y - 0.15), 7.6, 1.2, fill=False, edgecolor=GREY))
        axes.text(-0.35, y + 0.45, f"machine {machine}", ha="right", va="center")
        for r, color in enumerate(RANKS):
            axes.add_patch(plt.Rectangle((2 * r, y), 1.2, 0.9, facecolor=color, alpha=0.6, edgecolor="black"))
            words = f"rank {4 * machine + r}\nshard {r}"
            axes.text(2 * r + 0.6, y + 0.45, words, ha="center", va="center", fontsize=9)
            if r:
                axes.annotate("", (2 * r - 0.05, y + 0.45), (2 * r - 0.75, y + 0.45), arrowprops=BOTH_WAYS)
    for r in range(4):
        axes.annotate("", (2 * r + 0.6, -0.05), (2 * r + 0.6, -0.65), arrowprops=BOTH_WAYS)
    inside = "inside, along the second dimension:\ngather weights, reduce-scatter gradients"
    axes.text(7.6, 0.45, inside, va="center")
    axes.text(7.6, -0.35, "across, along the first:\nall-reduce the gradient of a shard", va="center")
    axes.set(xlim=(-1.6, 12.2), ylim=(-1.9, 1.2))
    axes.axis("off")
    plt.show()
