"""What surrounds a training program on one rank or many: its process group, and errors that are said once."""

import contextlib
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, its default arguments would hold the group until Python ends

from nanogpt.config import TrainConfig
from nanogpt.loop import Place
from nanogpt.turns import keep_to_one_core, take_whole_turns

_SAID = "rank 0 has said what is wrong"


def run(program: Callable[[int, dist.Store | None], None]) -> int:
    """Run `program(rank, store)`; the exit status. The store is None where torchrun started nothing.

    A mistake of the person who runs it is one sentence from one rank, and status 2.
    """
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store = next(dist.rendezvous("env://"))[0] if num_ranks > 1 or "RANK" in os.environ else None
    try:
        program(rank, store)
        return 0
    except ValueError as error:
        return _say(f"error: {error}", 2, rank, store)
    except NotImplementedError as error:
        if (sentence := _unfinished(error)) is None:
            raise
        return _say(f"error: {sentence}", 2, rank, store)
    except KeyboardInterrupt:
        return _say("interrupted: go on with python -m nanogpt.train --resume", 130, rank, store)
    except SystemExit as exit_:  # tyro has shown the help, or said what is wrong
        status = exit_.code if isinstance(exit_.code, int) else 1
        return _say("", status, rank, store) if status else 0


def _say(sentence: str, status: int, rank: int, store: dist.Store | None) -> int:
    """Says it once: the other ranks give rank 0 a moment, and speak only if it has nothing to say.

    They must not end before it has spoken: torchrun ends all ranks as soon as one fails.
    """
    if rank > 0 and store is not None:
        with contextlib.suppress(RuntimeError):
            store.wait([_SAID], timedelta(seconds=10))
            return status
    if sentence:
        print(f"rank {rank}: {sentence}" if rank > 0 else sentence, file=sys.stderr, flush=True)
    if rank == 0 and store is not None:
        store.set(_SAID, "yes")
    return status


def _unfinished(error: NotImplementedError) -> str | None:
    """A sentence if this comes from an exercise that says so itself, with where it stands."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if (
        not linecache.getline(frame.filename, frame.lineno or 0)
        .strip()
        .startswith("raise NotImplementedError")
    ):
        return None
    hint = f" ({error})" if str(error) else ""
    where = f"{frame.filename.strip('<>')}, line {frame.lineno}"
    return f"the exercise {frame.name} in {where}, is not finished{hint}"


@contextlib.contextmanager
def process_group(config: TrainConfig, store: dist.Store | None) -> Iterator[Place]:
    """This process's place, with the default process group around it if torchrun started it.

    Raises:
        ValueError: the options and the way the process was started do not go together.
    """
    if store is None:
        if config.parallel is not None:
            options = f"--parallel {config.parallel} --implementation {config.implementation}"
            raise ValueError(
                "--parallel needs ranks, which torchrun starts: torchrun --nproc-per-node 2 "
                f"-m nanogpt.train {'--resume' if config.resume else options}"
            )
        yield Place(device=_device(config.device, 0, 1))
        return
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if config.parallel is None and config.model is None and num_ranks > 1:
        raise ValueError(
            f"torchrun started {num_ranks} ranks, but not how they share the work: "
            "add --parallel data_parallel, or start one with python -m nanogpt.train"
        )
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    device = _device(config.device, local_rank, num_local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if device.type == "cpu":
        take_whole_turns()
        if torch.get_num_threads() == 1:  # as torchrun asks for
            keep_to_one_core(local_rank, num_local)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, device_id=device_id)
    yield Place(device=device, rank=rank, num_ranks=num_ranks, barrier=dist.barrier)
    dist.destroy_process_group()  # not after an error: the other ranks may be somewhere else


def _device(name: str, local_rank: int, num_local: int) -> torch.device:
    """One GPU for each rank, or the CPU.

    Raises:
        ValueError: there is no such device, or not one for each rank.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if num_gpus >= num_local else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: use cpu, cuda or auto") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"--device {name}: use cpu, cuda or auto")
    wanted = local_rank if num_local > 1 or device.index is None else device.index
    if max(wanted + 1, num_local) > num_gpus:
        raise ValueError(
            f"--device {name}: {num_local} rank(s) need a GPU each and torch sees {num_gpus} here; "
            "--device cpu works everywhere"
        )
    return torch.device("cuda", wanted)
