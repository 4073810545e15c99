"""What the page measures: bytes by axis, norms, and what becomes of a loss that is weighed wrongly."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from grader import run_ranks
from lessons.page.tap import SHARE_SENT
from lessons.page.watch import Watch
from nanogpt.data import load_tokens
from nanogpt.model import GPT, GPTConfig

CONFIG = GPTConfig(block_size=64, vocab_size=4096, n_layer=2, n_head=4, n_embd=64, dropout=0.0, bias=False)
ROWS = 4
CUT_BY_TENSOR = ("c_attn.weight", "c_proj.weight", "c_fc.weight", "wte.weight", "lm_head.weight")
"""Ends of the names of what lesson 10 cuts; there are no biases on this page."""

Sizes = Mapping[str, int]


def sizes_of(data: int = 1, context: int = 1, tensor: int = 1) -> dict[str, int]:
    """A mesh with all three dimensions."""
    return {"data": data, "context": context, "tensor": tensor}


def mesh_of(sizes: Sizes) -> DeviceMesh:
    """On a rank: the mesh."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def batch_of(mesh: DeviceMesh, step: int = 0) -> tuple[Tensor, Tensor]:
    """On a rank: its rows of a batch."""
    d, place = mesh["data"].size(), mesh.get_local_rank("data")
    inputs, targets = load_tokens("stdlib").batch(ROWS, CONFIG.block_size, seed=0, step=step)
    return inputs.chunk(d)[place], targets.chunk(d)[place]


def finish(module: nn.Module) -> None:
    """End the backward of lesson 08's wrapper; the others need nothing."""
    getattr(module, "finish_gradient_synchronization", lambda: None)()


def one_step(assemble: Callable, techniques: Mapping, sizes: Sizes) -> dict[str, float]:
    """On a rank: bytes that it sent along each axis in a step, and the "loss" of the whole batch."""
    mesh = mesh_of(sizes)
    torch.manual_seed(0)
    module = assemble(GPT(CONFIG), mesh, techniques)
    groups = {
        tuple(dist.get_process_group_ranks(mesh.get_group(axis))): axis for axis in sizes if sizes[axis] > 1
    }
    with Watch() as watch:
        loss = module(*batch_of(mesh))[1]
        loss.backward()
        finish(module)
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    sent = {**dict.fromkeys(sizes, 0.0), "loss": mean.item()}
    for event in watch.recording.events:
        if tuple(event.group) in groups and event.kind in SHARE_SENT:
            share = SHARE_SENT[event.kind](len(event.group))
            sent[groups[tuple(event.group)]] += share * event.num_bytes
    return sent


def each(function: Callable, cases: list[tuple]) -> list[Any]:
    """On a rank: a function of each case in turn; processes that are there already cost nothing."""
    return [function(*case) for case in cases]


def bytes_by_way(
    predict: Callable, assemble: Callable, ways: Mapping[str, tuple]
) -> dict[str, tuple[dict, dict]]:
    """For each way (techniques, sizes, whether ZeRO-3 works along data): bytes predicted, and recorded."""
    cases = [(assemble, techniques, sizes) for techniques, sizes, _ in ways.values()]
    recorded = run_ranks(each, one_step, cases, ranks=4)[0]
    predicted = [predict(CONFIG, ROWS, sizes, zero3) for _, sizes, zero3 in ways.values()]
    return dict(zip(ways, zip(predicted, recorded, strict=True), strict=True))


def gradients_on(
    assemble: Callable, techniques: Mapping, mesh: DeviceMesh, sharded: bool
) -> tuple[dict[str, Tensor], dict[str, set[str]]]:
    """On a rank: its gradients after one step, and along which axes each is cut."""
    torch.manual_seed(0)
    module = assemble(GPT(CONFIG), mesh, techniques)
    module(*batch_of(mesh))[1].backward()
    finish(module)
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return gradients, {name: cut_along(name, sharded) for name, _ in module.named_parameters()}


def cut_along(name: str, sharded: bool) -> set[str]:
    """The axes along which a parameter of the page's models is cut."""
    return ({"tensor"} if name.endswith(CUT_BY_TENSOR) else set()) | ({"data"} if sharded else set())


def norms(norm: Callable, assemble: Callable, techniques: Mapping, sizes: Sizes, sharded: bool) -> dict:
    """On a rank: the norm of its own numbers, of all ranks' squares, and as `norm` has it ("yours")."""
    mesh = mesh_of(sizes)
    gradients, cut = gradients_on(assemble, techniques, mesh, sharded)
    own = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum()
    every = own.clone()
    dist.all_reduce(every)
    return {
        "own": own.sqrt().item(),
        "all": every.sqrt().item(),
        "yours": float(norm(gradients, cut, mesh)),
    }


def norm_of_one_rank() -> float:
    """Of the same step, on the whole batch."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    inputs, targets = load_tokens("stdlib").batch(ROWS, CONFIG.block_size, seed=0, step=0)
    model(inputs, targets)[1].backward()
    return torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()


def weighed_as_found(loss: Tensor, targets: Tensor, mesh: DeviceMesh) -> Tensor:
    """The program to repair, as it was found."""
    data = mesh.get_group("data")
    counted = (targets != -1).sum()
    everywhere = counted.clone()
    dist.all_reduce(everywhere)
    return loss * counted * data.size() / everywhere


def weighed_run(
    weigh: Callable, norm: Callable, assemble: Callable, techniques: Mapping, sizes: Sizes, steps: int
) -> list[tuple[float, float]]:
    """On a rank: loss and gradient norm at each step of AdamW; prompts of different length do not count."""
    mesh = mesh_of(sizes)
    torch.manual_seed(0)
    module = assemble(GPT(CONFIG), mesh, techniques)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    found = []
    for step in range(steps):
        inputs, targets = batch_of(mesh, step)
        for row, own in enumerate(targets, mesh.get_local_rank("data") * len(targets)):
            own[: 6 * row] = -1
        loss, counted = module(inputs, targets)[1], (targets != -1).sum()
        optimizer.zero_grad()
        weigh(loss, targets, mesh).backward()
        finish(module)
        named = {name: p.grad for name, p in module.named_parameters()}
        size = norm(named, {name: cut_along(name, False) for name in named}, mesh)
        optimizer.step()
        logged = torch.stack([loss.detach() * counted, counted.float()])
        dist.all_reduce(logged)
        found.append(((logged[0] / logged[1]).item(), float(size)))
    return found


def in_pytorch() -> dict[str, Any]:
    """On a rank of four: PyTorch's tensor parallelism in every MLP, and ZeRO-3 around it, on one mesh."""
    torch.manual_seed(0)
    dense = GPT(CONFIG)
    model: Any = copy.deepcopy(dense)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for block in model.transformer.h:
        plan = {"c_fc": ColwiseParallel(), "c_proj": RowwiseParallel()}
        parallelize_module(block.mlp, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    loss = model(*batch_of(mesh))[1]
    loss.backward()
    mean = loss.detach() / 2
    dist.all_reduce(mean, group=mesh.get_group("data"))
    inputs, targets = load_tokens("stdlib").batch(ROWS, CONFIG.block_size, seed=0, step=0)
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    block = model.transformer.h[0]
    return {
        "difference": abs(mean.item() - dense(inputs, targets)[1].item()),
        "weights": {
            name: (tuple(w.shape), tuple(w.to_local().shape), w.device_mesh.mesh_dim_names)
            for name, w in (("mlp.c_fc", block.mlp.c_fc.weight), ("ln_1", block.ln_1.weight))
        },
        "refused": "same mesh" in refused,
    }
