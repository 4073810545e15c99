"""Checks of `gradient_norm`: parts are added up, and copies count once."""

import math
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grader.checks import CheckEnded, Fault, Trial, Verdict, check, exercise, is_close
from grader.checks import told as told_events

from .meshes import APART, Sizes, meshes, meshes_on, parts, place, told, which_mesh

exercise(
    "gradient_norm",
    world_sizes=(4, 2, 1),
    hints=(
        "Add up the squares of all numbers that a rank has, and sum that over all ranks. How often has each "
        "number been counted?",
        "As often as there are ranks with a copy: the product of the sizes of all dimensions along which the "
        "parameter is not cut. Divide its squares by that before you sum.",
        "Sum over the whole mesh by an all-reduce along each dimension in turn. Every rank must take part in "
        "each, also a rank that lacks a gradient.",
    ),
)

PARAMETERS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "shard of one number": ((1,), ("data", "context")),
    "matrix": ((24, 30), ("tensor",)),
    "norm": ((33,), ()),
    "shard of a matrix": ((40, 30), ("tensor", "data")),
    "shard of a norm": ((17,), ("data",)),
    "of parts of tokens": ((20, 12), ("context",)),
    "learned number": ((), ()),
}
"""Name → shape of the whole gradient, and the dimensions along which it is cut.

The first is alone in being cut so, and most ranks have nothing of it.
"""
KINDS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16 of hundreds": torch.float16,
    "bfloat16": torch.bfloat16,
}
ALONE = "float32, one number in all"
"""A model of which most ranks have no gradient at all."""
INFINITE = "float32, with an infinite number"
"""A model of which some ranks have an infinite number in their part of a gradient, and the others none."""
RENAMED = "float32, with the names exchanged"
"""The first model once more, in which each parameter has the name of another."""


def names_in(kind: str) -> list[str]:
    """The parameters of a model of this kind."""
    return list(PARAMETERS)[: 1 if kind == ALONE else None]


def name_in(kind: str, name: str) -> str:
    """What a parameter is called in a model of this kind."""
    names = names_in(kind)
    return names[names.index(name) - 1] if kind == RENAMED else name


def drawn(trial: Trial, name: str, scale: float) -> Tensor:
    """A whole gradient. A number that is alone is never small: it counts in the norm."""
    shape = PARAMETERS[name][0]
    return scale * (trial.normal(*shape) if math.prod(shape) > 1 else 10 + trial.normal(1).view(shape))


def own_part(whole: Tensor, cut: tuple[str, ...], rank: int, sizes: Sizes) -> Tensor:
    """A rank's part of a gradient, flat; empty where there are fewer numbers than ranks."""
    if not whole.dim():
        return whole.clone()
    flat = whole.flatten()
    for dim in cut:
        flat = flat.tensor_split(sizes[dim])[place(rank, sizes)[dim]]
    return flat.clone()


def every_part(whole: Tensor, cut: tuple[str, ...], sizes: Sizes) -> list[Tensor]:
    """All parts of a gradient, each once."""
    parts = [whole.flatten()]
    for dim in cut:
        parts = [part for each in parts for part in each.tensor_split(sizes[dim])]
    return parts


def norm_on(rank: Any, gradients: dict, cut_along: dict, mesh: Any) -> Any:
    """On a rank: the norm; an error is told where it asks for what may be missing, or nothing is there."""
    try:
        return rank.submission.gradient_norm(gradients, cut_along, mesh)
    except Exception as error:
        if isinstance(error, KeyError) and {*error.args} & (cut_along.keys() - gradients.keys()):
            error.add_note(
                "this rank has no such gradient: an empty shard of ZeRO-3 may be missing, while `cut_along` "
                "names every parameter"
            )
        elif not gradients:
            error.add_note(
                "this rank was given no gradient at all: empty shards of ZeRO-3 may be missing, and here all "
                "are. torch.stack and sum make no tensor of an empty list: begin with torch.zeros(())"
            )
        raise


def probe(rank: Any, cases: list) -> list[dict]:
    found = []
    meshes_of = meshes_on(rank, [sizes for sizes, *_ in cases])
    for mesh, (_, gradients, cut_along) in zip(meshes_of, cases, strict=True):
        before = {name: gradient.clone() for name, gradient in gradients.items()}
        with rank.record() as recording:
            norm = norm_on(rank, gradients, cut_along, mesh)
        dist.barrier()  # who hangs hangs here, and not where others are at the next mesh
        same = all(torch.equal(before[name], gradient) for name, gradient in gradients.items())
        norm = norm.detach().double() if isinstance(norm, Tensor) and norm.numel() == 1 else norm
        found.append({"norm": norm, "unchanged": same, "recording": recording})
    return found


def observe(trial: Trial) -> SimpleNamespace:
    """Every mesh in float32, and the first in other dtypes; norms and shards of several sizes.

    Meshes that stand side by side have gradients of different models.
    """
    plans = [(sizes, "float32") for sizes in meshes(trial)]
    plans += [(meshes(trial)[0], kind) for kind in (*KINDS, ALONE) if kind != "float32"]
    plans += [(sizes, "float32") for sizes in parts(trial)]
    plans += [(meshes(trial)[0], kind) for kind in (INFINITE, RENAMED)]
    wholes = []
    for sizes, kind in plans:
        scale = 300.0 if kind.startswith("float16") else 1.0
        models = [
            {name: drawn(trial, name, scale).to(KINDS.get(kind, torch.float32)) for name in names_in(kind)}
            for _ in range(sizes.get(APART, 1))
        ]
        if kind == INFINITE:
            models[0]["matrix"][0, 0] = math.inf
        models = wholes[0][:1] if kind == RENAMED else models
        wholes.append([models[which_mesh(rank, sizes)] for rank in range(trial.num_ranks)])
    by_rank = []
    for rank in range(trial.num_ranks):
        cases = []
        for (sizes, kind), whole in zip(plans, wholes, strict=True):
            own = {name: own_part(x, PARAMETERS[name][1], rank, sizes) for name, x in whole[rank].items()}
            present = {name_in(kind, name): part for name, part in own.items() if part.numel()}
            cut_along = {name_in(kind, name): list(PARAMETERS[name][1]) for name in whole[rank]}
            cases.append((sizes, present, cut_along))
        by_rank.append((cases,))
    try:
        results = trial.run(probe, per_rank=by_rank)
    except CheckEnded as end:
        lacking = what_is_lacking(by_rank)
        if end.verdict == Verdict.HUNG and lacking and returns_where_none_lacks(trial, by_rank):
            end.cause, end.help = lacking, HAND_OVER_ZERO
        raise
    return SimpleNamespace(plans=plans, wholes=wholes, by_rank=by_rank, results=results)


HAND_OVER_ZERO = (
    "As many calls on every rank: add up all squares of a rank first, and sum that along the mesh's "
    "dimensions, not of those gradients that are there. Or let a rank that lacks one take part with 0."
)


def what_is_lacking(by_rank: list) -> str:
    """Which rank lacks a gradient that others have, and what comes of it; "" where none does."""
    for of_plan in zip(*(cases for (cases,) in by_rank), strict=True):
        held = [set(gradients) for _, gradients, _ in of_plan]
        for rank, names in enumerate(held):
            lacking = sorted(set().union(*held) - names)
            if lacking:
                has = next(r for r, other in enumerate(held) if lacking[0] in other)
                return (
                    f'rank {rank} lacks a gradient, of "{lacking[0]}", that rank {has} has, and makes other '
                    "calls than its peers. With the gradients that all ranks have, all of it returns"
                )
    return ""


def returns_where_none_lacks(trial: Trial, by_rank: list) -> bool:
    """Whether the ranks return where each has a part of every gradient."""
    held_by_all = []
    for of_plan in zip(*(cases for (cases,) in by_rank), strict=True):
        held_by_all.append(set.intersection(*(set(gradients) for _, gradients, _ in of_plan)))
    same = [
        (
            [
                (sizes, {name: x for name, x in gradients.items() if name in names}, cut_along)
                for (sizes, gradients, cut_along), names in zip(cases, held_by_all, strict=True)
                if names
            ],
        )
        for (cases,) in by_rank
    ]
    try:
        trial.run(probe, per_rank=same)
    except CheckEnded:
        return False
    return True


ONE_ROOT = "Sum the squares over parameters and ranks, each once, then take one root."


def root(squares: Any) -> Tensor:
    return torch.as_tensor(squares, dtype=torch.float64).sqrt()


def slips(seen: SimpleNamespace, i: int, num_ranks: int) -> dict:
    """Cause → the norm that it leads to, by rank, on a mesh that is the whole world."""
    (sizes, kind), whole = seen.plans[i], seen.wholes[i][0]
    squares = {name: x.double().square().sum() for name, x in whole.items()}
    own_squares = [
        {name: gradient.double().square().sum() for name, gradient in cases[i][1].items()}
        for (cases,) in seen.by_rank
    ]
    local = [sum(squares.values()) for squares in own_squares]

    def group_sum(rank: int, dims: tuple[str, ...]) -> Tensor:
        own = place(rank, sizes)
        fixed = [dim for dim in sizes if dim not in dims]
        return sum(local[o] for o in range(num_ranks) if all(place(o, sizes)[d] == own[d] for d in fixed))

    def along(rank: int, name: str, dims: tuple[str, ...]) -> Tensor:
        own = place(rank, sizes)
        fixed = [dim for dim in sizes if dim not in dims]
        same = (o for o in range(num_ranks) if all(place(o, sizes)[d] == own[d] for d in fixed))
        return sum(own_squares[o].get(name, 0.0) for o in same)

    every = range(num_ranks)
    known: dict[str, Any] = {
        "what several ranks have counts once for each of them": root(sum(local)),
        "it is that of this rank's own numbers": Fault(
            [root(x) for x in local], "Sum the squares over the dimensions along which a parameter is cut."
        ),
        "it is summed along the dimensions where ranks have copies, and not along those that cut": Fault(
            [root(sum(copies_of(name, sizes) * x for name, x in own.items())) for own in own_squares],
            "Ranks that differ along a dimension in `cut_along` have different parts: sum over these.",
        ),
        "ranks' norms are added up, where their squares belong": Fault(sum(root(x) for x in local), ONE_ROOT),
        "norms are added up, where their squares belong": Fault(
            sum(
                root(part.double().square().sum())
                for name, x in whole.items()
                for part in every_part(x, PARAMETERS[name][1], sizes)
            ),
            ONE_ROOT,
        ),
        "the norms of a parameter's parts are added up, where their squares belong": Fault(
            root(
                sum(
                    sum(
                        root(part.double().square().sum())
                        for part in every_part(x, PARAMETERS[name][1], sizes)
                    )
                    ** 2
                    for name, x in whole.items()
                )
            ),
            ONE_ROOT,
        ),
        "roots are added up, of each parameter's squares or of those that are cut alike": Fault(
            sum(root(x) for x in squares.values()), ONE_ROOT
        ),
        "the norm of each gradient is rounded to the gradient's dtype before it is squared": Fault(
            root(
                sum(
                    part.double().norm().to(part.dtype).double().square()
                    for name, x in whole.items()
                    for part in every_part(x, PARAMETERS[name][1], sizes)
                )
            ),
            "Widen the gradient before you take its norm: gradient.double().",
        ),
        "squares are taken, and added up, in the gradient's own dtype, which has too few digits, or ends too "
        "early: float16 at 65,504": Fault(
            root(
                sum(
                    part.square().sum().double()
                    for name, x in whole.items()
                    for part in every_part(x, PARAMETERS[name][1], sizes)
                )
            ),
            "Widen the gradient before you square it: gradient.float(), or wider.",
        ),
        "it is the square of the norm": Fault(sum(squares.values()), ONE_ROOT),
        "what no dimension cuts is left out": root(sum(x for n, x in squares.items() if PARAMETERS[n][1])),
        "what has no dimensions, a learned number, is left out": Fault(
            root(sum(x for name, x in squares.items() if whole[name].dim())),
            "Ask numel(), which is 1 there: size(0) and len() have no answer.",
        ),
        "it is averaged over the ranks": root(sum(local) / num_ranks),
    }
    if kind in KINDS:
        known[f"it is the right norm, rounded to {str(KINDS[kind]).removeprefix('torch.')}"] = Fault(
            root(sum(squares.values())).to(KINDS[kind]).double(),
            "Return it as it was added up, in float32 or wider.",
        )
    cuts = {name: PARAMETERS[name][1] for name in squares}
    for some in product(*(ways_to_add(cut, sizes) for cut in cuts.values())):
        short = {name: dims for (name, cut), dims in zip(cuts.items(), some, strict=True) if dims != cut}
        if short:
            told_short = ", and ".join(
                f'what "{cuts[name][0]}" and "{cuts[name][1]}" cut is added up along "{dim}" alone'
                for name, (dim,) in short.items()
            )
            known[told_short] = Fault(
                [
                    root(sum(along(r, name, dims) for name, dims in zip(cuts, some, strict=True)))
                    for r in every
                ],
                "A part is on one place along each dimension in `cut_along`: add up along all of them.",
            )
    for dim in sizes:
        if sizes[dim] > 1:
            known[f'all of it is summed along "{dim}" alone'] = [root(group_sum(r, (dim,))) for r in every]
    return known


def ways_to_add(cut: tuple[str, ...], sizes: Sizes) -> list[tuple[str, ...]]:
    """All dimensions that cut a parameter; and each of two, where the other one has several ranks."""
    return [cut, *((dim,) for dim in cut if any(sizes[other] > 1 for other in cut if other != dim))]


def named(seen: SimpleNamespace, i: int) -> dict[str, Fault]:
    """A cause, where the first model's norm is another one once its parameters have exchanged their names."""
    pair = (0, [kind for _, kind in seen.plans].index(RENAMED))
    of_both = [[result[j]["norm"] for j in pair] for result in seen.results]
    if i not in pair or not all(isinstance(x, Tensor) and x.isfinite().all() for x in chain(*of_both)):
        return {}
    for first, then in of_both:
        if first.numel() == then.numel() == 1 and not is_close(first, then, 1e-5):
            told = (
                "a parameter's name decides how it counts: the same gradients have a norm of "
                f"{first.item():.5g}, and of {then.item():.5g} where they have exchanged their names"
            )
            own = [result[i]["norm"] for result in seen.results]
            return {told: Fault(own, "Ask cut_along[name], and not the name.")}
    return {}


def copies_of(name: str, sizes: Sizes) -> int:
    """How many ranks of a mesh have the same part of a parameter's gradient."""
    return math.prod(size for dim, size in sizes.items() if dim not in PARAMETERS[name][1])


def norms_of(whole: list[dict[str, Tensor]]) -> list[Tensor]:
    """The norm of the gradient that each rank has a part of."""
    return [root(sum(x.double().square().sum() for x in own.values())) for own in whole]


A_SCALAR = (
    "A tensor without dimensions, as torch.zeros(()) and sum() give: reshape(()) of one element, too. item() "
    "makes a number of Python's of it."
)


def require_norm(trial: Trial, kinds: tuple[str, ...], help: str) -> None:
    seen = trial.once(observe)
    for i, (sizes, kind) in enumerate(seen.plans):
        if kind not in kinds or APART in sizes:
            continue
        right = norms_of(seen.wholes[i])[0]
        right_slips = named(seen, i) or {
            cause: value
            for cause, value in slips(seen, i, trial.num_ranks).items()
            if trial.num_ranks > 1 or "square of" in cause
        }
        norms = [result[i]["norm"] for result in seen.results]
        trial.close(
            f"the norm on a mesh of {told(sizes)} ({kind})",
            norms,
            right,
            right_slips,
            help if all(isinstance(norm, Tensor) and not norm.dim() for norm in norms) else A_SCALAR,
            rtol=1e-5,
        )


@check("gradient_norm")
def every_number_counts_once(trial: Trial) -> None:
    """On every mesh the norm is that of the whole gradient: parts are added up, and copies count once."""
    require_norm(
        trial,
        ("float32", ALONE, RENAMED),
        "Count each number once: divide a parameter's squares by the number of ranks that have a copy of "
        "them, or sum them along those dimensions alone that cut it.",
    )


@check("gradient_norm")
def squares_are_added_up_in_float32(trial: Trial) -> None:
    """Gradients of float64, bfloat16, and float16 whose squares it can not hold have the right norm, too."""
    require_norm(trial, tuple(KINDS), "gradient.float() before it is squared, or wider.")


@check("gradient_norm")
def what_is_infinite_shows(trial: Trial) -> None:
    """Where a number of one rank's part is infinite, no rank's norm is finite."""
    seen = trial.once(observe)
    which = [kind for _, kind in seen.plans].index(INFINITE)
    for rank, result in enumerate(seen.results):
        norm = result[which]["norm"]
        if not isinstance(norm, Tensor):
            continue
        trial.require(
            not norm.isfinite(),
            f"the norm is {norm.item():.5g}, where a number of the whole gradient is inf",
            help="Leave nothing out of the sum: who trains tells by the norm that a step has overflowed.",
            rank=rank,
        )


@check("gradient_norm", world_sizes=(4, 2))
def the_world_may_be_larger(trial: Trial) -> None:
    """A mesh may have some of the world's ranks only: what the others have does not count."""
    seen = trial.once(observe)
    for i, (sizes, _) in enumerate(seen.plans):
        if APART not in sizes:
            continue
        right = norms_of(seen.wholes[i])
        everywhere = root(sum(norm.square() for norm in right) * sizes[APART] / trial.num_ranks)
        trial.close(
            f"the norm in a world of {trial.num_ranks} ranks, on a mesh of {told(sizes)}",
            [result[i]["norm"] for result in seen.results],
            right,
            {
                "gradients of ranks outside the mesh are in it: the default group has all ranks": everywhere,
                "copies are counted on all ranks of the world, and the mesh has fewer": Fault(
                    [norm / sizes[APART] ** 0.5 for norm in right],
                    "Multiply the sizes of the mesh's own dimensions: mesh.size(i), and no world size.",
                ),
                "squares and copies are those of all ranks of the world, and the mesh has fewer": Fault(
                    everywhere / sizes[APART] ** 0.5,
                    "Sum along each dimension of the mesh, and count copies by the sizes of these.",
                ),
            },
            help="Sum along each dimension of the mesh: mesh.get_group(dim).",
            rtol=1e-5,
        )


@check("gradient_norm")
def no_gradient_travels(trial: Trial) -> None:
    """Only a few numbers are sent, and the given gradients stay as they are."""
    seen = trial.once(observe)
    most = 8 * len(PARAMETERS) + 64
    for rank, result in enumerate(seen.results):
        for (sizes, _), each in zip(seen.plans, result, strict=True):
            events = [event for event in each["recording"].select() if len(event.group) > 1]
            sent = sum(event.num_elements for event in events)
            trial.require(
                sent <= most,
                f"{sent} numbers were sent on a mesh of {told(sizes)}: {told_events(events)}",
                help="A sum of squares is one number. Send that, and no gradient.",
                rank=rank,
            )
            trial.require(each["unchanged"], "a given gradient was changed", help="Square a copy.", rank=rank)
