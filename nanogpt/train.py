"""Trains a GPT: `python -m nanogpt.train`, or on several ranks

    torchrun --nproc-per-node 2 -m nanogpt.train --parallel data_parallel --implementation PATH

A run from its options to its last checkpoint; the steps are in `loop.py`, process groups in `launch.py`.
"""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch.distributed as dist
import tyro

from nanogpt import combined, launch, runs, tokenizer
from nanogpt.config import TrainConfig, require_same_run
from nanogpt.cores import keep_to_quota
from nanogpt.data import Tokens, load_tokens
from nanogpt.implementation import load_implementation, require
from nanogpt.loop import Place, Techniques, Trainer
from nanogpt.memory import ask_for_large_pages, keep_freed_memory
from nanogpt.own_model import OwnModel
from nanogpt.technique import Implementation, find_technique
from nanogpt.unfinished import fill_in


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    keep_to_quota()

    def program(rank: int, store: dist.Store | None) -> None:
        config = read_options(sys.argv[1:] if arguments is None else arguments, quiet=rank > 0)
        with launch.process_group(config, store) as place:
            train(config, place, store)

    return launch.run(program)


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


def techniques(config: TrainConfig, place: Place) -> Techniques:
    """The techniques that the options name, by whom they name.

    Raises:
        ValueError: there is none of that name, the file does not define what it needs, or they do not go
            together.
    """
    sizes = {} if config.parallel is None else combined.read_sizes(config.parallel, place.num_ranks)
    ways = {name: find_technique("PARALLEL", name) for name in sizes}
    others = {"CHECKPOINT": config.checkpoint, "ACCUMULATE": "accumulate" if config.accumulate > 1 else None}
    found = {table: find_technique(table, name) for table, name in others.items() if name is not None}
    whose = implementations(config.implementation, [*ways.values(), *found.values()], tell=place.rank == 0)
    chosen = {table.lower(): adapter(whose[adapter]) for table, (adapter, _) in found.items()}
    if "accumulate" in chosen and any(adapter.axis == "data" for adapter, _ in ways.values()):
        chosen["accumulate"].check()
    if ways:
        by_name = {name: (adapter, whose[adapter]) for name, (adapter, _) in ways.items()}
        chosen["parallel"] = combined.on_axes(sizes, by_name, place.device.type)
    if config.model is not None:
        file = load_implementation(config.model)
        require(file, "GPT")
        chosen["parallel"] = OwnModel(file, dist.group.WORLD if place.num_ranks > 1 else None)
        if place.rank == 0:
            print(f"yours: the GPT of {config.model}, from the weights that one rank starts with", flush=True)
    return Techniques(**chosen)


def implementations(
    named: str, found: Sequence[tuple[type, ModuleType]], *, tell: bool
) -> dict[type, Implementation | None]:
    """By whom each adapter's technique is; `found` has the course's own beside it. None is PyTorch's.

    Exercises that a person's file does not define, or has not finished, come from the course: a line says so.

    Raises:
        ValueError: a file can not be read, or does not define what a technique needs.
    """
    if named in ("solutions", "torch"):
        return {adapter: None if named == "torch" else solution for adapter, solution in found}
    files = {adapter: lesson_of(solution) if named == "lessons" else named for adapter, solution in found}
    theirs = {file: load_implementation(file) for file in dict.fromkeys(files.values())}
    has = [each for each, _ in found if vars(theirs[files[each]]).keys() & set(each.exercises)]
    whose: dict[type, Implementation | None] = {}
    for adapter, solution in found:
        lent: Sequence[str] = adapter.exercises
        whose[adapter] = solution
        if adapter in has or not has:
            whose[adapter] = file = theirs[files[adapter]]
            for name in adapter.exercises:
                require(file, name)
            lent = fill_in(file, solution)
        if tell:
            yours = [name for name in adapter.exercises if name not in lent]
            print(f"yours: {', '.join(yours) or 'nothing yet'}", flush=True)
        if tell and lent:
            print(f"the course's own, as {files[adapter]} has none yet: {', '.join(lent)}")
    return whose


def lesson_of(solution: ModuleType) -> str:
    """The learner's notebook of the lesson that a module of the course solves.

    Raises:
        ValueError: it is not there.
    """
    slug = solution.__name__.rpartition(".")[2]
    found = sorted(Path("lessons").glob(f"*_{slug}/{slug}.ipynb"))
    if not found:
        raise ValueError(
            f"--implementation lessons: there is no lessons/*_{slug}/{slug}.ipynb in {Path.cwd()}"
        )
    return str(found[0])


def tokens_of(config: TrainConfig, place: Place) -> Tokens:
    """The dataset: rank 0 makes it where it is missing, the others read it."""
    if place.rank > 0:
        place.barrier()
    tokens = load_tokens(config.dataset, config.cache, openwebtext_parts=config.openwebtext_parts)
    if place.rank == 0:
        place.barrier()
    return tokens


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
    keep_freed_memory()  # both of the whole process, so not for somebody else who calls main
    ask_for_large_pages()
    sys.exit(main())
