"""Trains the model on real ranks, and measures on each what it holds, sends and takes in time."""

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grader.beside.measure import storage_bytes, tensors_in
from grader.beside.recorder import Recorder, Window
from grader.ranks.recording import Recording, revive
from infra.memory_table.ways import ONE_RANK, Way, train_config
from nanogpt.data import load_tokens
from nanogpt.loop import Place, Techniques, Trainer
from nanogpt.technique import Accumulation
from nanogpt.tokenizer import load_encoding
from nanogpt.turns import take_whole_turns

TRAVELS = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "broadcast": 1,
    "reduce": 1,
    "all_to_all": 1,
}
"""Collective → how often (n-1)/n of its tensor leaves each rank, on a ring (lesson 07)."""

WARM_UP = 2
"""The first step makes the optimizer's state, and in the second PyTorch's DDP deals out its buckets anew."""


@dataclass(frozen=True)
class Measured:
    """What the rank that holds most does in one step, in bytes, and how fast all of them are."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Alive after a micro-batch's forward that was not before, with its tokens, without loss and logits."""
    wire: float
    """Sent by this rank in one step."""
    tokens_per_second: float
    loss_difference: float
    """Largest difference of a step's loss to training on one rank."""


@dataclass(frozen=True)
class Plan:
    """What the ranks are to do."""

    ways: tuple[Way, ...]
    rounds: int
    """Timed steps of each; ours and PyTorch's take turns."""


def measure(plan: Plan, num_ranks: int) -> dict[tuple[Way, str], Measured]:
    """Measure every way with the course's own code ("solutions") and with PyTorch's ("torch")."""
    load_tokens("stdlib", None)  # once, before the ranks ask for them
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (num_ranks, plan, Path(folder)), nprocs=num_ranks)
        by_rank = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    keys = [(way, by) for way in plan.ways for by in _makers(way)]
    return {key: _worst([Measured(**rows[i]) for rows in by_rank]) for i, key in enumerate(keys)}


def _makers(way: Way) -> tuple[str, ...]:
    return ("solutions", "torch") if way.in_pytorch else ("solutions",)


def _worst(ranks: list[Measured]) -> Measured:
    """The largest of every number; the speed is of all ranks together and the same on each."""
    return Measured(**{name: max(asdict(rank)[name] for rank in ranks) for name in asdict(ranks[0])})


def _rank(rank: int, num_ranks: int, plan: Plan, folder: Path) -> None:
    torch.set_num_threads(1)
    take_whole_turns()
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    place = Place(device=torch.device("cpu"), rank=rank, num_ranks=num_ranks, barrier=dist.barrier)
    alone = _Run(ONE_RANK, "solutions", Place(device=place.device), folder)
    for _ in range(WARM_UP + 1 + plan.rounds):
        alone.step()
    rows = []
    for way in plan.ways:
        runs = [_Run(way, by, place, folder) for by in _makers(way)]
        for run in runs:
            for _ in range(WARM_UP):
                run.step()
            run.measured_step()
        for _ in range(plan.rounds):
            for run in runs:
                run.step()
        rows += [asdict(run.result(alone.losses)) for run in runs]
    (folder / f"{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


class _Run:
    """One way of training, step by step."""

    def __init__(self, way: Way, by: str, place: Place, folder: Path) -> None:
        config = train_config(way, folder)
        tokens = load_tokens("stdlib", None)
        vocab_size = -(-load_encoding(tokens.encoding).n_vocab // 64) * 64
        parallel, checkpoint, accumulate = way.find(by, dist.group.WORLD)
        self.watching = _Watching(accumulate)
        self.trainer = Trainer(
            config,
            folder,
            tokens,
            vocab_size,
            Techniques(parallel=parallel, checkpoint=checkpoint, accumulate=self.watching),
            place,
        )
        self.tokens_per_step = config.batch_size * config.block_size
        self.losses: list[float] = []
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
            dist.barrier()  # communication that is through lets go of its tensors
            window.mark("update begins")
            return update(module, optimizer, max_norm)

        recorder = Recorder(lambda event: None, lambda file: False)
        trainer.parallel.update = weigh_first
        with recorder, recorder.record(memory=True) as window:
            self.watching.window = window
            loss, _, _ = trainer.train_step()
        del trainer.parallel.update
        self.watching.window = None
        self.losses.append(trainer.parallel.mean_loss(loss).item())
        self.recording: Recording = revive(window.to_plain())

    def result(self, losses: list[float]) -> Measured:
        """What was measured; `losses` are those of one rank."""
        alive, watching = self.recording.alive_at, self.watching
        optimizer = self.trainer.optimizer
        optimizer = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer wraps one
        return Measured(
            weights=_bytes(self.trainer.module.parameters()),
            gradients=alive["update begins"] - alive["accumulate begins"] - watching.loss,
            optimizer=_bytes(tensor for tensor in tensors_in(optimizer.state) if tensor.dim() > 0),
            activations=alive["forward ended"] - alive["forward begins"] + watching.given - watching.loss,
            wire=_sent(self.recording),
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
        self.window.mark("forward ended")
        self.given = sum(tensor.numel() * tensor.element_size() for tensor in (idx, targets))
        self.loss = loss.element_size()
        return None, loss


def _bytes(tensors) -> int:
    return storage_bytes(t.to_local() if isinstance(t, DTensor) else t for t in tensors)


def _sent(recording: Recording) -> float:
    """Bytes that this rank sent."""
    total = 0.0
    for event in recording.events:
        n = len(event.group)
        if event.kind == "send":
            total += event.num_bytes
        elif event.kind in TRAVELS:
            total += TRAVELS[event.kind] * event.num_bytes * (n - 1) / n
    return total
