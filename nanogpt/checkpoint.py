"""Checkpoints that are whole or not there, and the state that makes a resumed run the same run.

A run's folder holds `checkpoints/step-00000100/` with a file `rank-<r>.pt` for each rank and the dense
weights in `model.safetensors`. It is written as `step-00000100.partial`, and renamed when every file of
every rank is on the disk: whatever happens before the rename, the last good checkpoint is still there.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_KEPT = 2
_NAME = re.compile(r"step-(\d+)")


def rank_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything of one rank that the next step depends on, but for the step's number."""
    generators = _generators(module)
    return {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "generators": {name: generator.get_state() for name, generator in generators.items()},
    }


def restore_rank_state(state: Mapping[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Puts a `rank_state` back."""
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    if torch.cuda.is_available() and state["random_cuda"]:
        torch.cuda.set_rng_state_all(state["random_cuda"])
    for name, generator in _generators(module).items():
        generator.set_state(state["generators"][name])


def _generators(module: nn.Module) -> dict[str, torch.Generator]:
    """Random streams of the module's parts, such as a `Dropout.generator`, by the part's name."""
    found = ((name, getattr(part, "generator", None)) for name, part in module.named_modules())
    return {name: generator for name, generator in found if isinstance(generator, torch.Generator)}


def save(
    run: Path,
    step: int,
    state: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    rank: int,
    barrier: Callable[[], None],
) -> None:
    """Writes the checkpoint after `step` steps. Every rank calls this, with its own state.

    Args:
        weights: the dense weights, the same on every rank; rank 0 writes them.
        barrier: returns when every rank has called it.
    """
    final = _folder(run, step)
    partial = final.with_name(final.name + ".partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
        partial.mkdir(parents=True)
    barrier()
    torch.save(state, partial / f"rank-{rank}.pt")
    _sync(partial / f"rank-{rank}.pt")
    if rank == 0:
        save_file(_plain(weights), partial / "model.safetensors")
        _sync(partial / "model.safetensors")
    barrier()
    if rank == 0:
        _sync(partial)
        if final.exists():  # saved by the run before this one was resumed: the same state
            shutil.rmtree(partial)
        else:
            partial.rename(final)
        _sync(final.parent)
        for old in steps(run)[:-_KEPT]:
            shutil.rmtree(_folder(run, old))
    barrier()


def _plain(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and a tied weight once: safetensors stores no shared memory."""
    seen: dict[int, str] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if seen.setdefault(tensor.data_ptr(), name) == name or tensor.numel() == 0:
            tensor = tensor.detach().cpu().contiguous()
            whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            plain[name] = tensor if whole else tensor.clone()
    return plain


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def steps(run: Path) -> list[int]:
    """The steps after which the run has a whole checkpoint, the last one last."""
    matches = (_NAME.fullmatch(path.name) for path in (run / "checkpoints").glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def load_rank_state(
    run: Path, step: int, *, rank: int, num_ranks: int, device: torch.device
) -> dict[str, Any]:
    """What `save` was given by this rank.

    Raises:
        ValueError: the file is damaged, or the run had another number of ranks.
    """
    folder = _folder(run, step)
    before = len(list(folder.glob("rank-*.pt")))
    if before != num_ranks:
        raise ValueError(f"{run} was trained on {before} ranks: resume it on as many, not on {num_ranks}")
    try:
        state = torch.load(folder / f"rank-{rank}.pt", map_location=device, weights_only=True)
    except Exception as error:  # torch.load raises whatever the damage leads to
        raise ValueError(
            f"{folder} is damaged ({type(error).__name__}): delete it to resume from the checkpoint before"
        ) from None
    state["random"] = state["random"].cpu()
    state["random_cuda"] = [each.cpu() for each in state["random_cuda"]]
    state["generators"] = {name: each.cpu() for name, each in state["generators"].items()}
    return state


def load_weights(run: Path) -> tuple[dict[str, Tensor], int]:
    """The dense weights of the run's last checkpoint, and its step.

    Raises:
        ValueError: there is no checkpoint yet, or it is damaged.
    """
    if not (found := steps(run)):
        raise ValueError(f"{run} has no checkpoint yet: train first, with python -m nanogpt.train")
    try:
        return load_file(_folder(run, found[-1]) / "model.safetensors"), found[-1]
    except Exception as error:
        raise ValueError(f"{_folder(run, found[-1])} is damaged ({type(error).__name__})") from None
