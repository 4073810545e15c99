"""Trains a GPT: `python -m nanogpt.train`, or on several ranks

    torchrun --nproc-per-node 2 -m nanogpt.train --parallel data_parallel --implementation PATH

This file reads the command line, starts and ends the process group, and turns mistakes of the person
who runs it into one sentence and exit status 2. Training itself is in `loop.py`.
"""

import contextlib
import dataclasses
import io
import linecache
import os
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from nanogpt import runs, tokenizer
from nanogpt.config import TrainConfig, require_same_run
from nanogpt.cores import keep_to_quota
from nanogpt.data import Tokens, load_tokens
from nanogpt.implementation import load_implementation, require
from nanogpt.loop import Place, Techniques, Trainer
from nanogpt.memory import keep_freed_memory
from nanogpt.technique import Implementation, Technique, find_technique
from nanogpt.turns import keep_to_one_core, take_whole_turns

_SAID = "rank 0 has said what is wrong"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    keep_to_quota()
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store = next(dist.rendezvous("env://"))[0] if num_ranks > 1 or "RANK" in os.environ else None
    try:
        config = read_options(arguments, quiet=rank > 0)
        with process_group(config, store) as place:
            train(config, place, store)
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


def read_options(arguments: Sequence[str], *, quiet: bool) -> TrainConfig:
    """The configuration that the command line asks for; of a resumed run, its own with what is added."""
    with contextlib.ExitStack() as stack:
        if quiet:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        config = tyro.cli(TrainConfig, args=arguments, prog="python -m nanogpt.train")
        if not config.resume:
            return config
        run = runs.read_run(config.out_dir or runs.last_run())
        before = dataclasses.replace(run.train, out_dir=run.folder)
        config = tyro.cli(TrainConfig, args=arguments, default=before, prog="python -m nanogpt.train")
    require_same_run(before, config)
    return config


@contextlib.contextmanager
def process_group(config: TrainConfig, store: dist.Store | None):
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
    if config.parallel is None and num_ranks > 1:
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


def techniques(config: TrainConfig, place: Place) -> Techniques:
    """The techniques that the options name, by whom they name.

    Of a learner's file that has some of them the rest is the course's own, which is said.

    Raises:
        ValueError: there is none of that name, or the file does not define what it needs.
    """
    wanted = {"PARALLEL": config.parallel, "CHECKPOINT": config.checkpoint}
    if config.accumulate > 1:
        wanted["ACCUMULATE"] = "accumulate"
    found = {table: find_technique(table, name) for table, name in wanted.items() if name is not None}
    theirs: Implementation | None = None
    if found and config.implementation not in ("solutions", "torch"):
        theirs = load_implementation(config.implementation)
        names = vars(theirs).keys()
        has = [table for table, (adapter, _) in found.items() if names & set(adapter.exercises)]
    chosen: dict[str, Technique] = {}
    for table, (adapter, solution) in found.items():
        implementation = None if config.implementation == "torch" else solution
        if theirs is not None and (table in has or not has):
            implementation = theirs
            for name in adapter.exercises:
                require(theirs, name)
        elif theirs is not None and place.rank == 0:
            missing = " and ".join(adapter.exercises)
            print(f"{config.implementation} has no {missing}: the course's own is used")
        group = (dist.group.WORLD,) if table == "PARALLEL" else ()
        chosen[table] = adapter(implementation, *group)
    return Techniques(**{table.lower(): technique for table, technique in chosen.items()})


def tokens_of(config: TrainConfig, place: Place) -> Tokens:
    """The dataset: rank 0 makes it where it is missing, the others read it."""
    if place.rank > 0:
        place.barrier()
    tokens = load_tokens(config.dataset, config.cache, openwebtext_parts=config.openwebtext_parts)
    if place.rank == 0:
        place.barrier()
    return tokens


def train(config: TrainConfig, place: Place, store: dist.Store | None) -> None:
    """One run, from its options to its last checkpoint."""
    chosen = techniques(config, place)
    tokens = tokens_of(config, place)
    vocab_size = -(-tokenizer.load_encoding(tokens.encoding).n_vocab // 64) * 64  # GPT-2: 50257 to 50304
    chosen.parallel.check(config.model_config(vocab_size), place.num_ranks)
    folder = _run_folder(config, place, store)
    run = runs.Run(folder, config, config.model_config(vocab_size), tokens.encoding)
    trainer = Trainer(config, folder, tokens, vocab_size, chosen, place)
    if place.rank == 0:
        run.write()
        print(f"{folder}: {trainer.num_parameters:,} parameters", flush=True)
    trainer.run()
    if place.rank == 0:
        print(f"{folder}: metrics.jsonl, loss.png, checkpoints. See what it says: python -m nanogpt.sample")


def _run_folder(config: TrainConfig, place: Place, store: dist.Store | None) -> Path:
    if config.resume and config.out_dir is not None:
        return config.out_dir
    if place.rank > 0 and store is not None:
        return Path(store.get("folder of the run").decode())
    folder = runs.new_run(config.out_dir)
    if store is not None:
        store.set("folder of the run", str(folder))
    return folder


if __name__ == "__main__":
    keep_freed_memory()  # of the whole process, so not for somebody else who calls main
    sys.exit(main())
