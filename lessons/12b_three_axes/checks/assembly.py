"""Checks of `parallelize_on_mesh`: each technique once, on its own group, in an order that keeps gradients.

Techniques that only write down how they are called show it; `assembled` looks at a GPT that was really cut.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn

from grader.checks import Trial, check, exercise
from nanogpt.model import GPT, GPTConfig

from .meshes import APART, PARTS, Sizes, meshes_on, ranks_along, told

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
LINES: dict[int, list[Sizes]] = {4: [{"data": 2, APART: 2}], 2: [], 1: []}
"""Number of ranks → meshes of one dimension that have some of them only."""
CONFIG = {"block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 20, "vocab_size": 48, "dropout": 0.0}


class Wrapped(nn.Module):
    """What a technique that only tells has made of a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def telling(name: str, log: list, made: list) -> Callable:
    """On a rank: a technique that writes down its name, its ranks, and whether it got what was made last."""

    def technique(module: nn.Module, group: Any) -> nn.Module:
        ranks = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
        log.append([name, ranks, module is made[-1]])
        made.append(Wrapped(module))
        return made[-1]

    return technique


def telling_probe(rank: Any, cases: list[tuple[Sizes, tuple[str, ...]]]) -> list[dict]:
    """Call it, for each mesh and names, with techniques that write down their calls and groups."""
    found = []
    for mesh, (_, names) in zip(meshes_on(rank, [sizes for sizes, _ in cases]), cases, strict=True):
        log: list = []
        made: list = [GPT(GPTConfig(**{**CONFIG, "n_layer": 1}))]
        techniques = {name: telling(name, log, made) for name in names}
        try:
            returned = rank.submission.parallelize_on_mesh(made[0], mesh, techniques)
            ended = "returned"
        except (ValueError, KeyError) as error:
            returned, ended = None, f"{type(error).__name__}: {error}"
        left = sorted(techniques)
        found.append({"log": log, "ended": ended, "last": returned is made[-1], "left": left})
    return found


def observe_calls(trial: Trial) -> SimpleNamespace:
    """The techniques are handed over in an order that is nobody's."""
    sizes = [*MESHES[trial.num_ranks], *PARTS[trial.num_ranks], *LINES[trial.num_ranks]]
    results = trial.run(telling_probe, [(each, ("context", "data", "tensor")) for each in sizes])
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
        needed = [dim for dim in sizes if sizes[dim] > 1 and dim != APART]  # one rank may do without
        lacking = [name for name in names if name not in sizes]
        trial.require(
            set(needed) <= set(names) <= set(sizes) and len(set(names)) == len(names),
            f"on a mesh of {told(sizes)} these were applied: {', '.join(names) or 'none'}",
            help="One call for each name of mesh.mesh_dim_names.",
            rank=rank,
            cause=f'the mesh has no dimension "{lacking[0]}"' if lacking else "",
        )


@check("parallelize_on_mesh")
def every_technique_has_its_own_group(trial: Trial) -> None:
    """A technique works on the ranks that differ in its own coordinate alone."""
    for rank, sizes, result in calls(trial):
        for name, ranks, _ in result["log"]:
            if name not in sizes:
                continue
            trial.require(
                ranks,
                f"on a mesh of {told(sizes)} the technique of {name} got something that is no ProcessGroup",
                help=f"A technique takes a group: mesh.get_group({name!r}). mesh[{name!r}] is another mesh.",
                rank=rank,
            )
            right = list(ranks_along(rank, sizes, name))
            others = [
                dim
                for dim in sizes
                if dim not in (name, APART) and list(ranks_along(rank, sizes, dim)) == ranks
            ]
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
def the_techniques_stay_as_they_are(trial: Trial) -> None:
    """The techniques that were handed over are there for the next model, too."""
    for rank, sizes, result in calls(trial):
        gone = sorted({"context", "data", "tensor"} - set(result["left"]))
        trial.require(
            not gone,
            f"on a mesh of {told(sizes)} {', '.join(gone)} had gone from the given techniques afterwards",
            help="Look a technique up, techniques[name], and leave it there: a second model needs it.",
            rank=rank,
            cause="the caller's own dictionary was emptied: pop() and del take away what they find",
        )


FIRST = (
    "Tensor parallelism makes new parameters. A hook on an old one is never called again: its gradient is "
    "not summed, and nothing complains."
)
LAST = (
    "What wraps comes last: context parallelism has to find the GPT's blocks and parameters, and no wrapper."
)


def whose_order(trial: Trial) -> str:
    """What the order on every mesh came from; "" where nothing explains them all."""
    orders = [
        ([dim for dim in sizes if dim in names], names)
        for _, sizes, result in calls(trial)
        for names in [[name for name, _, _ in result["log"]]]
    ]
    if all(names == dims for dims, names in orders):
        return "the order is that of the mesh's dimensions, which says nothing about gradients"
    if all(names == dims[::-1] for dims, names in orders):
        return "the order is that of the mesh's dimensions, the last one first: it may have them in any order"
    return ""


@check("parallelize_on_mesh")
def layers_then_tokens_then_batch(trial: Trial) -> None:
    """What replaces layers comes first, then what cuts tokens, then what wraps: each on the one before."""
    for rank, sizes, result in calls(trial):
        names = [name for name, _, _ in result["log"]]
        trial.require(
            names == [name for name in ORDER if name in names],
            f"on a mesh of {told(sizes)} they were applied in the order {', '.join(names)}",
            help=FIRST if names[:1] != ["tensor"] and "tensor" in names else LAST,
            rank=rank,
            cause=whose_order(trial),
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


FOURTH = "pipeline"
"""A dimension of which the exercise knows nothing."""


def observe_refusals(trial: Trial) -> SimpleNamespace:
    """Each dimension of several ranks without its technique, and a fourth one, for which there is none."""
    sizes = MESHES[trial.num_ranks][0]
    cases = {dim: (sizes, tuple(name for name in ORDER if name != dim)) for dim in sizes if sizes[dim] > 1}
    cases[FOURTH] = ({FOURTH: 2, "data": trial.num_ranks // 2}, ORDER)
    results = trial.run(telling_probe, list(cases.values()))
    return SimpleNamespace(missing={dim: [own[i] for own in results] for i, dim in enumerate(cases)})


def told_end(ended: str) -> str:
    """How a call ended, in words."""
    return ended if ended == "returned" else f"raised {ended}"


@check("parallelize_on_mesh", world_sizes=(4, 2))
def a_dimension_without_a_technique_is_refused(trial: Trial) -> None:
    """A dimension of several ranks without a technique is a ValueError, before any technique was applied."""
    for dim, results in trial.once(observe_refusals).missing.items():
        for rank, result in enumerate(results):
            trial.require(
                result["ended"].startswith("ValueError"),
                f"without a technique for {dim} it {told_end(result['ended'])}, where a ValueError belongs",
                help="Along a dimension where nothing works, all ranks do the same work. Raise a ValueError.",
                rank=rank,
                cause="the three are looked for, and not what the mesh has: it has a fourth dimension here"
                if dim == FOURTH and result["ended"] == "returned"
                else "",
            )
            trial.require(
                not result["log"],
                f"the ValueError for {dim} came after {result['log'] and result['log'][0][0]} was applied",
                help="Look for what is missing first: a model that is cut half-way is of no use.",
                rank=rank,
            )
