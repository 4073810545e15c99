"""Checks of `parallelize_on_mesh`: each technique on its own axis, in an order that keeps gradients right."""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import BACKWARD, Trial, check, exercise
from lessons_shared.cut_gpt import TABLE, cut_dim, drawn_weights, heads_of, own_part
from nanogpt.model import GPT, GPTConfig

from .meshes import Sizes, mesh_on, place, ranks_along, told

exercise(
    "parallelize_on_mesh",
    world_sizes=(4, 2, 1),
    hints=(
        "mesh.mesh_dim_names has the names of the dimensions, and mesh.get_group(name) is this rank's group "
        "along one.",
        "Tensor parallelism replaces layers and their parameters. Whatever holds on to a parameter, or has "
        "put a hook on one, must come later.",
        "So the order is fixed: tensor, context, data. The order of the mesh and that of the dictionary have "
        "no say in it.",
    ),
)

ORDER = ("tensor", "context", "data")
MESHES: dict[int, list[Sizes]] = {
    4: [
        {"data": 2, "context": 1, "tensor": 2},
        {"data": 2, "context": 2, "tensor": 1},
        {"data": 1, "context": 2, "tensor": 2},
        {"tensor": 2, "context": 1, "data": 2},
        {"context": 2, "data": 2},
        {"tensor": 4},
        {"data": 4},
        {"context": 4},
    ],
    2: [{"tensor": 2, "data": 1}, {"data": 2}],
    1: [{"data": 1, "context": 1, "tensor": 1}],
}
ZERO3: dict[int, list[Sizes]] = {
    4: [{"data": 2, "context": 1, "tensor": 2}, {"context": 2, "data": 2}],
    2: [{"data": 2}],
    1: [],
}
"""Meshes on which FullySharded stands in data's place."""
CONFIG = {"block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 20, "vocab_size": 48, "dropout": 0.0}


# --- with techniques that only tell ---


class Wrapped(nn.Module):
    """What a technique that only tells has made of a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def telling(name: str, log: list, made: list) -> Callable:
    """On a rank: a technique that writes down its name, its ranks, and whether it got what was made last."""

    def technique(module: nn.Module, group: Any) -> nn.Module:
        log.append([name, torch.distributed.get_process_group_ranks(group), module is made[-1]])
        made.append(Wrapped(module))
        return made[-1]

    return technique


def telling_probe(rank: Any, all_sizes: list[Sizes], names: tuple[str, ...]) -> list[dict]:
    """Call it with techniques that write down when they are called, and with which group."""
    found = []
    for sizes in all_sizes:
        log: list = []
        made: list = [GPT(GPTConfig(**{**CONFIG, "n_layer": 1}))]
        techniques = {name: telling(name, log, made) for name in names}
        try:
            returned = rank.submission.parallelize_on_mesh(made[0], mesh_on(rank, sizes), techniques)
            ended = "returned"
        except (ValueError, KeyError) as error:
            returned, ended = None, f"{type(error).__name__}: {error}"
        found.append({"log": log, "ended": ended, "last": returned is made[-1]})
    return found


def observe_calls(trial: Trial) -> SimpleNamespace:
    """The techniques are handed over in an order that is nobody's."""
    sizes = MESHES[trial.num_ranks]
    results = trial.run(telling_probe, sizes, ("context", "data", "tensor"))
    return SimpleNamespace(sizes=sizes, results=results)


def calls(trial: Trial) -> list[tuple[int, Sizes, dict]]:
    """Rank, mesh, and what was told there."""
    seen = trial.once(observe_calls)
    return [
        (rank, sizes, result)
        for rank, results in enumerate(seen.results)
        for sizes, result in zip(seen.sizes, results, strict=True)
    ]


@check("parallelize_on_mesh")
def every_dimension_has_its_technique(trial: Trial) -> None:
    """Each dimension of the mesh gets its technique, once; one without a dimension is not applied."""
    for rank, sizes, result in calls(trial):
        trial.require(
            result["ended"] == "returned",
            f"on a mesh of {told(sizes)} it ended in {result['ended']}",
            help="The mesh may lack some of the three, and has them in any order.",
            rank=rank,
        )
        names = [name for name, _, _ in result["log"]]
        needed = [dim for dim in sizes if sizes[dim] > 1]  # one rank may do without
        trial.require(
            set(needed) <= set(names) <= set(sizes) and len(set(names)) == len(names),
            f"on a mesh of {told(sizes)} these were applied: {', '.join(names) or 'none'}",
            help="One call for each name of mesh.mesh_dim_names.",
            rank=rank,
        )


@check("parallelize_on_mesh")
def every_technique_has_its_own_group(trial: Trial) -> None:
    """A technique works on the ranks that differ in its own coordinate alone."""
    for rank, sizes, result in calls(trial):
        for name, ranks, _ in result["log"]:
            if name not in sizes:
                continue
            right = list(ranks_along(rank, sizes, name))
            others = [dim for dim in sizes if dim != name and list(ranks_along(rank, sizes, dim)) == ranks]
            cause = f'these are the ranks along "{others[0]}"' if others else ""
            if len(ranks) == trial.num_ranks and not others:
                cause = "these are all ranks of the world"
            trial.require(
                ranks == right,
                f"on a mesh of {told(sizes)} the technique of {name} got ranks {ranks}; expected: {right}",
                help=f"mesh.get_group({name!r}) asks by name, wherever the dimension stands.",
                rank=rank,
                cause=cause,
            )


@check("parallelize_on_mesh")
def layers_then_tokens_then_batch(trial: Trial) -> None:
    """What replaces layers comes first, then what cuts tokens, then what wraps: each on the one before."""
    for rank, sizes, result in calls(trial):
        names = [name for name, _, _ in result["log"]]
        trial.require(
            names == [name for name in ORDER if name in names],
            f"on a mesh of {told(sizes)} they were applied in the order {', '.join(names)}",
            help="Tensor parallelism makes new parameters. A hook on an old one is never called again: its "
            "gradient is not summed, and nothing complains.",
            rank=rank,
        )
        trial.require(
            all(chained for _, _, chained in result["log"]),
            f"on a mesh of {told(sizes)} a technique got another module than the one before it returned",
            help="Hand on what each technique returns.",
            rank=rank,
        )
        trial.require(
            result["last"],
            f"on a mesh of {told(sizes)} it returned something else than the last technique did",
            help="The wrapper is what is called: without it nothing averages the gradients.",
            rank=rank,
        )


def observe_refusals(trial: Trial) -> SimpleNamespace:
    sizes = MESHES[trial.num_ranks][:1]
    return SimpleNamespace(
        missing={
            dim: trial.run(telling_probe, sizes, tuple(name for name in ORDER if name != dim))
            for dim in sizes[0]
            if sizes[0][dim] > 1
        }
    )


@check("parallelize_on_mesh", world_sizes=(4, 2))
def a_dimension_without_a_technique_is_refused(trial: Trial) -> None:
    """A dimension of the mesh that has no technique is a ValueError, before any technique was applied."""
    for dim, results in trial.once(observe_refusals).missing.items():
        for rank, (result,) in enumerate(results):
            trial.require(
                result["ended"].startswith("ValueError"),
                f"without a technique for {dim} it ended so: {result['ended']}",
                help="Along a dimension where nothing works, all ranks do the same work. Raise a ValueError.",
                rank=rank,
            )
            trial.require(
                not result["log"],
                f"the ValueError for {dim} came after {result['log'] and result['log'][0][0]} was applied",
                help="Look for what is missing first: a model that is cut half-way is of no use.",
                rank=rank,
            )


# --- with the course's ---


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
    return [one_step(rank, sizes, zero3, weights, idx, targets) for sizes, zero3 in cases]


def one_step(rank: Any, sizes: Sizes, zero3: bool, weights: dict, idx: Tensor, targets: Tensor) -> dict:
    """Two passes of this rank's rows, the second recorded; loss, gradients under GPT's names."""
    model = GPT(GPTConfig(**CONFIG))
    model.load_state_dict(weights, strict=False)
    techniques = {name: on_rank("zero3" if zero3 and name == "data" else name) for name in sizes}
    module = rank.submission.parallelize_on_mesh(
        model.double().to(rank.device), mesh_on(rank, sizes), techniques
    )
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
