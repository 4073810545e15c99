"""Checks of `parallelize_on_mesh`: with the course's techniques, a GPT has one rank's loss and gradients."""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from grader.checks import BACKWARD, Trial, check
from lessons_shared.cut_gpt import TABLE, cut_dim, drawn_weights, heads_of, own_part
from nanogpt.model import GPT, GPTConfig

from .assembly import CONFIG, MESHES
from .meshes import Sizes, meshes_on, place, ranks_along, told

ZERO3: dict[int, list[Sizes]] = {
    4: [{"data": 2, "context": 1, "tensor": 2}, {"context": 2, "data": 2}],
    2: [{"data": 2}],
    1: [],
}
"""Meshes on which FullySharded stands in data's place."""


def on_rank(name: str) -> Callable:
    """On a rank: the course's technique."""
    module, function = {
        "tensor": ("tensor_parallel", "tensor_parallelize"),
        "context": ("context_parallel", "context_parallelize"),
        "data": ("data_parallel", "DataParallel"),
        "zero3": ("fsdp", "FullySharded"),
    }[name]
    return getattr(importlib.import_module(f"solutions.{module}"), function)


def training_probe(rank: Any, cases: list, weights: dict, idx: Tensor, targets: Tensor) -> list[dict]:
    meshes_of = meshes_on(rank, [sizes for sizes, _ in cases])
    return [
        one_step(rank, mesh, sizes, zero3, weights, idx, targets)
        for mesh, (sizes, zero3) in zip(meshes_of, cases, strict=True)
    ]


def one_step(
    rank: Any, mesh: DeviceMesh, sizes: Sizes, zero3: bool, weights: dict, idx: Tensor, targets: Tensor
) -> dict:
    """Two passes of this rank's rows, the second recorded; loss, gradients under GPT's names."""
    model = GPT(GPTConfig(**CONFIG))
    model.load_state_dict(weights, strict=False)
    techniques = {name: on_rank("zero3" if zero3 and name == "data" else name) for name in sizes}
    module = rank.submission.parallelize_on_mesh(model.double().to(rank.device), mesh, techniques)
    replicas, own = sizes.get("data", 1), place(rank.rank, sizes).get("data", 0)
    rows = [x.chunk(replicas)[own] for x in (idx, targets)]
    finish = getattr(module, "finish_gradient_synchronization", lambda: None)
    module(*rows)[1].backward()
    finish()
    with rank.record() as recording:
        loss = module(*rows)[1]
        recording.mark(BACKWARD)
        loss.backward()
        finish()
    if zero3:
        with torch.no_grad():
            for shard in module.parameters():
                shard.copy_(shard.grad if shard.grad is not None else torch.zeros_like(shard))
        gradients = module.full_state_dict()
    else:
        named = getattr(module, "module", module)
        gradients = {name: p.grad for name, p in named.named_parameters()}
    return {"loss": loss.detach(), "gradients": gradients, "recording": recording}


def observe(trial: Trial) -> SimpleNamespace:
    """As many targets count in every row: shares of a batch are equal."""
    weights = drawn_weights(trial, {**CONFIG, "bias": True})
    idx, targets = (trial.tokens(CONFIG["vocab_size"], 4, CONFIG["block_size"]) for _ in range(2))
    targets[:, 2 : trial.integer(4, 6)] = -1
    cases = [(sizes, False) for sizes in MESHES[trial.num_ranks]]
    cases += [(sizes, True) for sizes in ZERO3[trial.num_ranks]]
    dense = GPT(GPTConfig(**CONFIG)).double()
    dense.load_state_dict(weights, strict=False)
    loss = dense(idx, targets)[1]
    loss.backward()
    return SimpleNamespace(
        cases=cases,
        results=trial.run(training_probe, cases, weights, idx, targets),
        loss=loss.detach(),
        gradients={name: p.grad for name, p in dense.named_parameters()},
    )


def own_slice(name: str, whole: Tensor, rank: int, sizes: Sizes) -> Tensor:
    """What a rank has of a parameter that the tensor axis may have cut."""
    n, own = sizes.get("tensor", 1), place(rank, sizes).get("tensor", 0)
    if "c_attn." in name:
        return heads_of(whole, own, n)
    dim = 0 if name in TABLE else cut_dim(name)
    return whole if dim is None else own_part(whole, dim, own, n)


def case_name(sizes: Sizes, zero3: bool) -> str:
    return f"{told(sizes)}{', ZeRO-3 along data' if zero3 else ''}"


@check("parallelize_on_mesh")
def loss_is_that_of_one_rank(trial: Trial) -> None:
    """On every mesh, the mean along "data" of the ranks' losses is that of one rank on the whole batch."""
    seen = trial.once(observe)
    for i, (sizes, zero3) in enumerate(seen.cases):
        losses = [result[i]["loss"] for result in seen.results]
        means = [
            torch.stack([losses[other] for other in ranks_along(r, sizes, "data")]).mean()
            if "data" in sizes
            else losses[r]
            for r in range(trial.num_ranks)
        ]
        trial.close(f"the loss on a mesh of {case_name(sizes, zero3)}", means, seen.loss)


@check("parallelize_on_mesh")
def gradients_are_those_of_one_rank(trial: Trial) -> None:
    """Each rank has its part of one rank's gradients, after two passes, also with ZeRO-3 along data."""
    seen = trial.once(observe)
    for i, (sizes, zero3) in enumerate(seen.cases):
        for name, whole in seen.gradients.items():
            trial.close(
                f"the gradient of {name} after two passes on a mesh of {case_name(sizes, zero3)}",
                [result[i]["gradients"].get(name) for result in seen.results],
                [2 * own_slice(name, whole, rank, sizes) for rank in range(trial.num_ranks)],
                rtol=1e-9,
                help="Which technique's hooks stand on parameters that another one has replaced?",
            )


@check("parallelize_on_mesh")
def every_message_is_on_an_axis(trial: Trial) -> None:
    """What is sent goes along one dimension, and along every dimension of several ranks something is sent."""
    seen = trial.once(observe)
    for i, (sizes, zero3) in enumerate(seen.cases):
        for rank, result in enumerate(seen.results):
            groups = {ranks_along(rank, sizes, dim): dim for dim in sizes if sizes[dim] > 1}
            events = [event for event in result[i]["recording"].select() if len(event.group) > 1]
            for event in events:
                trial.require(
                    tuple(event.group) in groups,
                    f"{event.describe()} went to the ranks {list(event.group)} on a mesh of "
                    f"{case_name(sizes, zero3)}: no dimension has them as a group",
                    help="Each technique talks along its own dimension.",
                    rank=rank,
                )
            silent = [dim for ranks, dim in groups.items() if ranks not in {tuple(e.group) for e in events}]
            trial.require(
                not silent,
                f"nothing was sent along {', '.join(silent)} on a mesh of {case_name(sizes, zero3)}",
                help="Is its technique applied, and is what it returned what you return?",
                rank=rank,
            )
