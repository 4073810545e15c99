"""Checks of `broadcast_parameters`: equal weights everywhere."""

from copy import deepcopy
from pathlib import Path
from traceback import extract_tb
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from grader.checks import Fault, Trial, check, exercise

from .means import require_waits
from .models import (
    SHARED,
    Mixed,
    build,
    by_rank,
    seeds,
    turn,
    weights,
)

exercise(
    "broadcast_parameters",
    world_sizes=(2, 1, 4),
    subgroup=True,
    hints=(
        "state_dict() leaves some buffers out and names tied weights twice. model.parameters() and "
        "model.buffers() do neither.",
        "dist.broadcast writes into the tensor that it is given, so the Parameter objects can stay. Hand "
        "over tensor.detach(), which shares its memory, or work under torch.no_grad(): autograd warns where "
        "a collective writes into a tensor that it watches, and will refuse it in a later release.",
        "src= counts ranks of the world. group_src= counts ranks of the group.",
    ),
)


def places(model: nn.Module) -> dict[str, int]:
    """Where each parameter and buffer begins in memory."""
    return {name: t.data_ptr() for name, t in (*model.named_parameters(), *model.named_buffers())}


OTHER_MEMORY = (
    "parameters_to_vector() takes no weight that lies in memory in another order, and vector_to_parameters() "
    "gives all of them other memory, in one dtype: broadcast each parameter in place instead"
)


def spread(rank: Any, seed: int, turned: bool = False) -> dict:
    """Broadcast; with `turned`, some tensors lie in memory in another order on all ranks but the first."""
    model = build(Mixed, seed).to(rank.device)
    if turned and rank.rank > 0:
        turn(model)
    objects = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    before = places(model)
    with rank.record() as recording:
        try:
            rank.submission.broadcast_parameters(model, rank.group)
        except RuntimeError as error:
            through = {Path(frame.filename).name for frame in extract_tb(error.__traceback__)}
            if "convert_parameters.py" in through:
                error.add_note(OTHER_MEMORY)
            raise
    now = dict(model.named_parameters(remove_duplicate=False))
    return {
        "weights": weights(model),
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "replaced": [name for name, number in objects.items() if name not in now or id(now[name]) != number],
        "moved": [name for name, place in places(model).items() if place != before.get(name)],
        "trained": {name: p.requires_grad and p.is_leaf for name, p in now.items()},
        "recording": recording,
        "device": rank.device.type,
        "shared": sum(b.numel() == SHARED for b in model.buffers()),  # each has its own on another device
    }


def observe_broadcast(trial: Trial) -> SimpleNamespace:
    numbers = seeds(trial)
    starts = [build(Mixed, number) for number in numbers]
    return SimpleNamespace(starts=starts, results=trial.run(spread, per_rank=[(s,) for s in numbers]))


def observe_turned(trial: Trial) -> SimpleNamespace:
    numbers = seeds(trial)
    starts = [build(Mixed, number) for number in numbers]
    return SimpleNamespace(starts=starts, results=trial.run(spread, per_rank=[(s, True) for s in numbers]))


def place_of(name: str, model: nn.Module) -> str:
    """Where else a tensor is than where one may have looked for it."""
    if name not in model.state_dict():
        return ": it is not persistent, so state_dict() leaves it out; model.buffers() finds it"
    return ": it belongs to a module inside, and model.buffers() finds it too" if "inside" in name else ""


def left_out(seen: SimpleNamespace, dtype: torch.dtype) -> str:
    """That all that has come is of floating point, where this dtype is not, and something has come."""
    came = [
        tensor.is_floating_point()
        for r, model in enumerate(seen.starts)
        for kind, own in (("weights", weights(model)), ("buffers", dict(model.named_buffers())))
        for name, tensor in own.items()
        for found in [seen.results[r][kind].get(name)]
        if found is not None and found.dtype == tensor.dtype and not torch.equal(found, tensor)
    ]
    alone = not dtype.is_floating_point and came and all(came)
    return f": what is of floating point has come alone, and this is {dtype}" if alone else ""


def require_rank_0s(trial: Trial, kind: str, names: list[str]) -> None:
    """Named parameters ("weights") or buffers are those that rank 0 started with."""
    seen = trial.once(observe_broadcast)
    own = [weights(m) if kind == "weights" else dict(m.named_buffers()) for m in seen.starts]
    for name in names:
        starts = [tensors[name] for tensors in own]
        of = place_of(name, seen.starts[0])
        alternatives = {
            f"each rank still has what it started with{of or left_out(seen, starts[0].dtype)}": starts,
            f"it is what the rank started with{of}": Fault(starts, on_some_ranks=True),
            "the last rank's": starts[-1],
        }
        if starts[0].is_floating_point():
            alternatives["the mean of all ranks' values"] = torch.stack(starts).mean(0)
            alternatives["the sum of all ranks' values"] = torch.stack(starts).sum(0)
        if trial.num_ranks == 1:
            alternatives = {}
        for dtype in (torch.float32, torch.float64):
            if not torch.equal(through := starts[0].to(dtype).to(starts[0].dtype), starts[0]):
                told = str(dtype).removeprefix("torch.")
                numbers = "so many digits" if starts[0].is_floating_point() else "such whole numbers"
                alternatives[f"it went through {told}, which does not hold {numbers}"] = through
        trial.close(
            f"{name} after the broadcast",
            by_rank(seen.results, kind, name),
            starts[0],
            alternatives=alternatives,
            rtol=0.0,
            help="Broadcast it from the group's rank 0, in place, in its own dtype.",
        )


@check("broadcast_parameters")
def parameters_are_those_of_rank_0(trial: Trial) -> None:
    """Every rank ends with the parameters of the group's rank 0."""
    require_rank_0s(
        trial, "weights", ["embed.weight", "left.weight", "left.bias", "right.weight", "right.bias"]
    )


@check("broadcast_parameters")
def frozen_parameters_are_those_of_rank_0(trial: Trial) -> None:
    """Parameters that are not trained (requires_grad False) are the same on every rank too."""
    require_rank_0s(trial, "weights", ["frozen.weight"])


@check("broadcast_parameters")
def buffers_are_those_of_rank_0(trial: Trial) -> None:
    """Buffers, such as a running mean, a count or a mask, are those of rank 0, bit for bit."""
    require_rank_0s(trial, "buffers", ["mean", "count", "table"])


@check("broadcast_parameters")
def buffers_of_modules_inside_are_those_of_rank_0(trial: Trial) -> None:
    """Buffers of modules inside are those of rank 0 too: whole numbers beyond 2^53, float64, truth values."""
    names = ["inside.0.drawn", "inside.0.kept", "inside.0.noise", "inside.0.exact", "shared"]
    require_rank_0s(trial, "buffers", names)


@check("broadcast_parameters")
def non_persistent_buffers_are_those_of_rank_0(trial: Trial) -> None:
    """Buffers that state_dict() leaves out (persistent=False) are those of rank 0 too."""
    require_rank_0s(trial, "buffers", ["mask"])


IN_ANOTHER_ORDER = {
    "left.weight": "transposed",
    "right.weight": "transposed",
    "table": "transposed",
    "image": "channels_last",
}
"""How these lie, once turned."""


@check("broadcast_parameters", world_sizes=(2, 4), subgroup=False)
def weights_may_lie_in_another_order(trial: Trial) -> None:
    """A weight or buffer that lies in memory in another order on some ranks alone is rank 0's everywhere."""
    seen = trial.once(observe_turned)
    other = deepcopy(seen.starts[0])
    turn(other)
    strides = {name: tensor.stride() for name, tensor in (*other.named_parameters(), *other.named_buffers())}
    for r, result in enumerate(seen.results):
        turned = "lay in another order than rank 0's, and " * (
            r > 0 and set(result["moved"]) <= {*IN_ANOTHER_ORDER}
        )
        trial.require(
            not result["moved"],
            f"these {turned}lie in other memory now: {result['moved']}. A view of the old sees the old "
            "numbers",
            help="Write into the memory that is there, with tensor.detach().copy_(...), and put no other "
            "tensor in its place.",
            rank=r,
        )
    for name, order in IN_ANOTHER_ORDER.items():
        kind = "weights" if name.endswith("weight") else "buffers"
        own = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in seen.starts]
        starts = [tensors[name].detach() for tensors in own]
        start = starts[0]
        trial.close(
            f"{name}, {order} in memory on every rank but the first, after the broadcast",
            by_rank(seen.results, kind, name),
            start,
            alternatives={
                "its own numbers: what came was written into a copy, which contiguous(), reshape() and "
                "flatten() make where memory has another order": Fault(
                    starts,
                    "Receive into a contiguous tensor of your own, and copy_ that into the tensor itself.",
                ),
                "rank 0's memory, read in another order: a collective sends memory as it lies": [
                    start if r == 0 else start.as_strided(start.shape, strides[name])
                    for r in range(trial.num_ranks)
                ],
            },
            rtol=0.0,
            help="Send tensor.contiguous(), and copy what has come back into the tensor.",
        )


@check("broadcast_parameters")
def parameter_objects_stay(trial: Trial) -> None:
    """The model keeps its Parameter objects, so that optimizers and tied weights keep hold of them."""
    seen = trial.once(observe_broadcast)
    trained = {n: p.requires_grad for n, p in seen.starts[0].named_parameters(remove_duplicate=False)}
    for r, result in enumerate(seen.results):
        trial.require(
            not result["replaced"],
            f"these are new Parameter objects: {result['replaced']}. An optimizer made before would train "
            "the old ones",
            help="Write into the tensors: broadcast into parameter.detach(), or copy_ under torch.no_grad().",
            rank=r,
        )
        trial.equal(
            "which parameters are trained", result["trained"], trained, help="Leave requires_grad alone."
        )


@check("broadcast_parameters")
def every_tensor_is_sent_once(trial: Trial) -> None:
    """What travels is one copy of the model: a tied weight once, and no rank's weights but rank 0's."""
    seen = trial.once(observe_broadcast)
    tensors = [*seen.starts[0].parameters(), *seen.starts[0].buffers()]
    size = sum(t.numel() * t.element_size() for t in tensors)
    for r, result in enumerate(seen.results):
        summed = result["recording"].bytes("all_reduce")
        moved = result["recording"].bytes() + summed  # an all-reduce is a reduce-scatter and an all-gather
        trial.require(
            moved <= 1.5 * size,
            f"{moved} bytes went through collectives, and the model has {size}: "
            + (
                "all ranks' weights were gathered"
                if "all_gather" in result["recording"].kinds()
                else "an all-reduce sends twice what a broadcast does, and makes 0.0 of -0.0"
                if summed
                else "something went twice"
            ),
            help="One broadcast for each tensor. model.parameters() names a tied weight once, state_dict() "
            "twice.",
            rank=r,
        )
        times = sum(event.num_elements == SHARED for event in result["recording"].select("broadcast"))
        trial.require(
            times <= result["shared"],
            f"a buffer of {SHARED} numbers, which two modules share, was sent {times} times",
            help="model.buffers() names it once; the buffers of each module by itself name it twice.",
            rank=r,
        )


@check("broadcast_parameters")
def every_broadcast_is_over(trial: Trial) -> None:
    """When the call returns, every broadcast is over: each one that was started was waited for."""
    results = trial.once(observe_broadcast).results
    # PyTorch's own dist._broadcast_coalesced waits in C++, where nobody sees it.
    if any(result["recording"].waits() for result in results):
        require_waits(trial, results, "a weight may not be rank 0's yet when the call returns")
