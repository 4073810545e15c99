"""What runs on the ranks: the model trained in every way, weighed, recorded, witnessed and timed.

`measure` starts it as a program of its own, with a network of its own where there is one to be had, and with
a folder: `plan.json` is what to do, and each rank leaves its numbers there.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grader.beside.measure import storage_bytes, tensors_in
from grader.beside.recorder import Recorder, Window
from grader.ranks.box import raise_loopback
from grader.ranks.recording import Recording
from infra.memory_table.gloo import asked_for, beyond
from infra.memory_table.single import collectives
from infra.memory_table.ways import ONE_RANK, Way, makers, train_config
from infra.memory_table.witness import Look, Witness
from nanogpt.data import load_tokens
from nanogpt.loop import Place, Techniques, Trainer
from nanogpt.technique import Accumulation
from nanogpt.tokenizer import load_encoding
from nanogpt.turns import keep_to_one_core, take_whole_turns

WARM_UP = 2
"""The first step makes the optimizer's state, and in the second PyTorch's DDP deals out its buckets anew."""

START = "fork" if sys.platform == "linux" else "spawn"
"""A forked rank imports nothing anew, which takes half of the processor's time where each step is short."""

LATE_SECONDS = 0.25
"""By which, with much to spare, a thread has ended that had nothing left to do."""


def main(folder: Path) -> None:
    """Start the ranks, and wait for them."""
    plan = json.loads((folder / "plan.json").read_text())
    if plan["header_bytes"]:
        raise_loopback()
    barrier = mp.get_context(START).Barrier(plan["num_ranks"])
    mp.start_processes(_rank, (plan, folder, barrier), nprocs=plan["num_ranks"], start_method=START)


def _rank(rank: int, plan: dict[str, Any], folder: Path, barrier: Barrier) -> None:
    torch.set_num_threads(1)
    num_ranks, header = plan["num_ranks"], plan["header_bytes"]
    take_whole_turns()
    keep_to_one_core(rank, num_ranks)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    witness = Witness(barrier, rank, header) if header else None
    witnessed = plan["witnessed"] if witness else 0
    place = Place(device=torch.device("cpu"), rank=rank, num_ranks=num_ranks, barrier=dist.barrier)
    alone = _Run(ONE_RANK, "solutions", Place(device=place.device), folder, plan["sizes"])
    for _ in range(WARM_UP + 1 + witnessed + plan["rounds"]):
        alone.step()
    found: dict[str, list] = {"ways": [], "collectives": []}
    for way in (Way(**fields) for fields in plan["ways"]):
        runs = [_Run(way, by, place, folder, plan["sizes"]) for by in makers(way)]
        for run in runs:
            for _ in range(WARM_UP):
                run.step()
            run.measured_step()
            for _ in range(witnessed):
                run.witnessed_step(witness)
        for _ in range(plan["rounds"]):
            for run in runs:
                run.step()
        found["ways"] += [run.result(alone.losses) for run in runs]
    if plan["collectives"]:
        found["collectives"] = [_collective(*named, witness, witnessed) for named in collectives()]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _collective(
    name: str, by: str, call: Callable[[], None], witness: Witness | None, witnessed: int
) -> dict[str, Any]:
    """One collective, recorded and witnessed."""
    with recorder() as opened, opened.record() as window:
        call()
    looks = [witness.look(call) for _ in range(witnessed)] if witness else []
    return {"name": name, "by": by, "sent": sent(Recording.from_plain(window.to_plain()), looks, {})}


def recorder() -> Recorder:
    """One that only writes down."""
    return Recorder(lambda event: None, lambda file: False)


ALL_RANKS = "all ranks"
"""Instead of an axis: a group that is none."""


def sent(
    recording: Recording, looks: list[Look | None], groups: dict[tuple[int, ...], str]
) -> dict[str, Any]:
    """The fields of a `measure.Sent`; what was witnessed is of all ranks together, and on rank 0.

    Args:
        groups: ranks that talk along an axis → the axis.
    """
    num_bytes, framing = min((look for look in looks if look is not None), default=(None, None))
    by_axis: dict[str, float] = {}
    for event in recording.events:
        axis = groups.get(tuple(event.group), ALL_RANKS)
        by_axis[axis] = by_axis.get(axis, 0.0) + asked_for([event])
    return {
        "by_axis": {axis: size for axis, size in by_axis.items() if size},
        "extra": beyond(recording.events),
        "witnessed": num_bytes,
        "framing": framing,
    }


def let_go() -> None:
    """Wait until communication that is through holds its tensors no longer.

    The thread of gloo that has run it drops them after the caller goes on, on a busy machine a while after.
    """
    dist.barrier()
    time.sleep(LATE_SECONDS)


class _Run:
    """One way of training, step by step."""

    def __init__(self, way: Way, by: str, place: Place, folder: Path, sizes: dict[str, int]) -> None:
        config = replace(train_config(way, folder), **sizes)
        tokens = load_tokens("stdlib", None)
        vocab_size = -(-load_encoding(tokens.encoding).n_vocab // 64) * 64
        parallel, checkpoint, accumulate = way.find(by)
        self.watching = _Watching(accumulate)
        self.trainer = Trainer(
            config,
            folder,
            tokens,
            vocab_size,
            Techniques(parallel=parallel, checkpoint=checkpoint, accumulate=self.watching),
            place,
        )
        self.groups = way.groups(place.num_ranks)
        self.tokens_per_step = config.batch_size * config.block_size
        self.losses: list[float] = []
        self.looks: list[Look | None] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        """One training step, timed from the moment that all ranks are there."""
        if self.trainer.place.num_ranks > 1:
            dist.barrier()
        began = time.perf_counter()
        loss, _, _ = self.trainer.train_step()
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(self.trainer.parallel.mean_loss(loss).item())

    def measured_step(self) -> None:
        """One step under the recorder."""
        trainer = self.trainer
        update = trainer.parallel.update

        def weigh_first(module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
            let_go()
            window.mark("update begins")
            return update(module, optimizer, max_norm)

        trainer.parallel.update = weigh_first
        with recorder() as opened, opened.record(memory=True) as window:
            self.watching.window = window
            loss, _, _ = trainer.train_step()
        del trainer.parallel.update
        self.watching.window = None
        self.losses.append(trainer.parallel.mean_loss(loss).item())
        self.recording = Recording.from_plain(window.to_plain())

    def witnessed_step(self, witness: Witness) -> None:
        """One step while rank 0 counts what travels."""
        losses: list[Tensor] = []
        self.looks.append(witness.look(lambda: losses.append(self.trainer.train_step()[0])))
        self.losses.append(self.trainer.parallel.mean_loss(losses[0]).item())

    def result(self, losses: list[float]) -> dict[str, Any]:
        """The fields of a `measure.Measured`; `losses` are those of one rank."""
        alive, watching = self.recording.alive_at, self.watching
        optimizer = self.trainer.optimizer
        optimizer = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer wraps one
        return dict(
            weights=_bytes(self.trainer.module.parameters()),
            gradients=alive["update begins"] - alive["accumulate begins"] - watching.loss,
            optimizer=_bytes(tensor for tensor in tensors_in(optimizer.state) if tensor.dim() > 0),
            activations=alive["forward ended"] - alive["forward begins"] + watching.given - watching.loss,
            wire=sent(self.recording, self.looks, self.groups),
            tokens_per_second=self.tokens_per_step / statistics.median(self.seconds[WARM_UP:]),
            loss_difference=max(abs(a - b) for a, b in zip(self.losses, losses, strict=True)),
        )


class _Watching(Accumulation):
    """Marks where the last micro-batch's forward begins and ends."""

    def __init__(self, inner: Accumulation) -> None:
        super().__init__(inner.implementation)
        self.inner = inner
        self.window: Window | None = None

    def accumulate(self, module: nn.Module, inputs: Tensor, targets: Tensor, num_microbatches: int) -> Tensor:
        if self.window is None:
            return self.inner.accumulate(module, inputs, targets, num_microbatches)
        self.window.mark("accumulate begins")
        marked = _Marked(module, self.window)
        loss = self.inner.accumulate(marked, inputs, targets, num_microbatches)
        self.given, self.loss = marked.given, marked.loss
        return loss


class _Marked(nn.Module):
    """Gives no logits back, which live only as long as the caller wants; notes what the pass was given."""

    def __init__(self, module: nn.Module, window: Window) -> None:
        super().__init__()
        self.module, self.window = module, window

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        self.window.mark("forward begins")
        loss = self.module(idx, targets)[1]
        let_go()
        self.window.mark("forward ended")
        self.given = sum(tensor.numel() * tensor.element_size() for tensor in (idx, targets))
        self.loss = loss.element_size()
        return None, loss


def _bytes(tensors) -> int:
    return storage_bytes(t.to_local() if isinstance(t, DTensor) else t for t in tensors)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
