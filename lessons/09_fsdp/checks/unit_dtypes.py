"""Checks of `ShardedUnit`: dtypes of shards, of gathered weights, and of what travels."""

from typing import Any

import torch
from torch import Tensor

from grader.checks import Recording, Trial, check

from .unit import TIMES
from .units import SHAPES, copies, make_parameters, num_bytes


def mix(rank: Any, tensors: list[Tensor], low: bool) -> dict:
    """Dtypes of shards and weights, values, and what was gathered; values when the shards have changed."""
    given = make_parameters(tensors, rank.device)
    settings = {"param_dtype": torch.bfloat16} if low else {}
    unit = rank.submission.ShardedUnit(given, rank.group, **settings)
    shards = [str(shard.dtype) for shard in unit.shards]
    totals = [shard.detach().double().sum() for shard in unit.shards]
    with rank.record() as recording:
        unit.gather()
    result = {
        "shards": shards,
        "totals": totals,
        "dtypes": [str(p.dtype) for p in given],
        "values": [copy.double() for copy in copies(given)],
        "recording": recording,
        "device": rank.device.type,
        "reduce_dtype": str(getattr(unit, "reduce_dtype", None)),
    }
    unit.free()
    result["left"] = [p.untyped_storage().nbytes() for p in given]
    with torch.no_grad():
        for shard in unit.shards:
            shard.mul_(TIMES)
    unit.gather()
    result["later values"] = [copy.double() for copy in copies(given)]
    unit.free()
    return result


A_NUMBER = 8
"""Bytes that a parameter may keep when it is freed: some give it a number to stand for the weights."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float32)


def mixed_tensors(trial: Trial) -> list[Tensor]:
    return [trial.normal(*shape, dtype=dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]


def short(dtypes: list[str]) -> str:
    return ", ".join(dtype.removeprefix("torch.") for dtype in dtypes)


def require_dtypes(trial: Trial, results: list[dict], tensors: list[Tensor], gathered: Any) -> None:
    own = [str(tensor.dtype) for tensor in tensors]
    for r, result in enumerate(results):
        trial.require(
            result["reduce_dtype"] in ("None", str(gathered)),
            f"no reduce_dtype was given, and unit.reduce_dtype is {result['reduce_dtype']}",
            help="Keep what was given, None too: reduce_gradients then sums gradients in their own dtype.",
            rank=r,
        )
        found = result["shards"]
        trial.require(
            found == own or sorted(found) != sorted(own),
            f"the parameters are in {short(own)}, and the shards in {short(found)}",
            help="unit.shards[i] belongs to unit.parameters[i].",
            rank=r,
            cause="the shards are in another order than the parameters",
        )
        for i, tensor in enumerate(tensors):
            trial.require(
                found[i] == own[i],
                f"the shard of a parameter in {tensor.dtype} is in {found[i]}",
                help="param_dtype is the dtype of what is gathered: cast what you send, not what you keep."
                if gathered
                else "Shards keep the dtype of their parameter: lay out each dtype by itself.",
                rank=r,
            )
            dtype = gathered or tensor.dtype
            trial.require(
                result["dtypes"][i] == str(dtype),
                f"a parameter in {tensor.dtype} is in {result['dtypes'][i]} when it is gathered, and "
                f"should be in {dtype}",
                help="The buffer has the dtype of gathered weights, and so has what is sent.",
                rank=r,
            )
            trial.close(
                f"the gathered values of a parameter in {tensor.dtype}",
                [each["values"][i] for each in results],
                tensor.to(dtype).double(),
                help="Nothing is rounded to another dtype on its way.",
            )
            trial.close(
                f"the gathered values of a parameter in {tensor.dtype}, after its shards were multiplied by "
                f"{TIMES},",
                [each["later values"][i] for each in results],
                TIMES * tensor.to(dtype).double(),
                alternatives={"it is what it was before the shards changed": tensor.to(dtype).double()},
                help="The optimizer writes into the shards: cast them each time that you send them.",
            )


@check("ShardedUnit", world_sizes=(2, 3), subgroup=False)
def every_parameter_keeps_its_dtype(trial: Trial) -> None:
    """Parameters of several dtypes in one unit keep them, in their shards and gathered, and all are freed."""
    tensors = mixed_tensors(trial)
    results = trial.run(mix, tensors, False)
    for r, result in enumerate(results):
        if result["device"] == "cpu":  # NCCL's collectives end without anybody who waits
            require_all_waited(trial, r, result["recording"])
    for r, result in enumerate(results):
        for tensor, left in zip(tensors, result["left"], strict=True):
            trial.require(
                left <= A_NUMBER,
                f"after free() of a unit of several dtypes, one in {tensor.dtype} lies in {left} bytes",
                help="Shrink every buffer: there is one for each dtype.",
                rank=r,
                cause="others were freed: free() leaves some dtypes out" if not all(result["left"]) else "",
            )
    require_dtypes(trial, results, tensors, None)


def require_all_waited(trial: Trial, rank: int, recording: Recording) -> None:
    """When gather() returns, everything that it has started was waited for."""
    started, waited = recording.count(), recording.waits()
    trial.require(
        waited >= started,
        f"gather() of parameters of several dtypes has waited for {waited} of the {started} communications "
        "that it has started",
        help="Keep the handle of each all-gather, and call wait() of every one.",
        rank=rank,
        cause="the others may still be on their way: the weights are right where these happen to be early",
    )


@check("ShardedUnit", world_sizes=(2, 3), subgroup=False)
def weights_travel_in_param_dtype(trial: Trial) -> None:
    """With param_dtype=bfloat16, shards keep their dtype, and what travels and is gathered is bfloat16."""
    tensors = mixed_tensors(trial)
    results = trial.run(mix, tensors, True)
    require_dtypes(trial, results, tensors, torch.bfloat16)
    for i, tensor in enumerate(tensors):
        trial.close(
            f"the sum of all numbers in the ranks' shards of a parameter in {tensor.dtype}",
            torch.stack([result["totals"][i] for result in results]).sum(),
            tensor.double().sum(),
            alternatives={"the shards were rounded to param_dtype": tensor.bfloat16().double().sum()},
            help="An optimizer works on the shards: cut them first, and cast what you send.",
        )
    most = 2 * sum(tensor.numel() + 2 * trial.num_ranks for tensor in tensors)
    for r, result in enumerate(results):
        moved = num_bytes(result["recording"].events)
        trial.require(
            moved <= most,
            f"{moved} bytes of weights travelled, and in bfloat16 they have no more than {most}",
            help="Cast this rank's piece before you send it: piece.to(buffer.dtype).",
            rank=r,
            cause="they were cast when they had arrived" if moved > 1.4 * most else "",
        )
