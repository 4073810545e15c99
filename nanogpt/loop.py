"""The training loop. It knows steps, losses and files; of ranks only what a `Parallel` does for it."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanogpt import checkpoint, runs
from nanogpt.config import TrainConfig
from nanogpt.data import Tokens
from nanogpt.metrics import (
    MetricsFile,
    ProgressBar,
    doubt,
    draw_loss,
    flops_per_token,
    peak_flops_per_second,
    read_metrics,
)
from nanogpt.model import GPT
from nanogpt.optimizer import learning_rate
from nanogpt.parallel import Parallel
from nanogpt.technique import Accumulation, Checkpointing, num_counted, weighed


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process runs. One process on its own is rank 0 of 1."""

    device: torch.device
    rank: int = 0
    num_ranks: int = 1
    barrier: Callable[[], None] = lambda: None
    """Returns when every rank has called it."""


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """What the lessons bring to a run; without any it is plain training on one rank."""

    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    accumulate: Accumulation = field(default_factory=Accumulation)


class Trainer:
    """A training run: built from its options, then `run`.

    Raises:
        ValueError: the technique cannot train this model on so many ranks, or there is nothing to resume.
    """

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        tokens: Tokens,
        vocab_size: int,
        techniques: Techniques,
        place: Place,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.tokens = tokens
        self.parallel = parallel = techniques.parallel
        self.accumulation = techniques.accumulate
        self.place = place
        self.model_config = config.model_config(vocab_size)
        self.micro_batch_size = config.batch_size // config.accumulate
        parallel.check(self.model_config, place.num_ranks)
        self._require_equal_shares()
        torch.manual_seed(config.seed)
        model = GPT(self.model_config).to(place.device)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if config.compile:
            model.compile()
        self.module = parallel.build(model, techniques.checkpoint)
        self.optimizer = parallel.optimizer(self.module, config)
        torch.manual_seed(config.seed + (0 if parallel.draws_alike else place.rank))
        self.step = 0
        if config.resume:
            self._restore()

    def _require_equal_shares(self) -> None:
        self.num_shares = shares = self.parallel.num_shares(self.place.num_ranks)
        if self.micro_batch_size % shares:
            raise ValueError(
                f"a micro-batch of {self.micro_batch_size} sequences (batch_size / accumulate) does not "
                f"divide over {shares} ranks: choose --batch-size {shares * self.config.accumulate} "
                "or a multiple of it"
            )

    def _restore(self) -> None:
        found = checkpoint.steps(self.run_dir)
        if not found:
            return  # interrupted before the first checkpoint: the run starts again
        self.step = found[-1]
        state = checkpoint.load_rank_state(
            self.run_dir,
            self.step,
            rank=self.place.rank,
            num_ranks=self.place.num_ranks,
            device=self.place.device,
        )
        checkpoint.restore_rank_state(state, self.module, self.optimizer)

    def run(self) -> None:
        """Trains until `max_steps`; rank 0 reports."""
        report = Report(self) if self.place.rank == 0 else None
        try:
            if self.step == 0:
                self._validate(report)
            while self.step < self.config.max_steps:
                loss, norm, rate = self.train_step()
                loss_value = self.parallel.mean_loss(loss).item()
                if report is not None:
                    report.step(self.step, loss_value, norm.item(), rate)
                last = self.step == self.config.max_steps
                if last or self.step % self.config.eval_interval == 0:
                    self._validate(report)
                if last or self.step % self.config.checkpoint_interval == 0:
                    self._save(report)
        finally:
            if report is not None:
                report.close()

    def train_step(self) -> tuple[Tensor, Tensor, float]:
        """One optimizer step: the loss of this rank's share, the gradient's norm, the learning rate.

        The loss is weighed by the targets of the share that count: a plain mean over ranks is the batch's.
        """
        config = self.config
        idx, targets = self._batch(config.batch_size, self.step)
        rate = learning_rate(self.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        inputs, goals = self.parallel.share(idx), self.parallel.share(targets)
        weight = num_counted(goals) * self.num_shares / num_counted(targets)
        module = Microbatches(self._forward, self.module, self.parallel, config.accumulate, weight)
        loss = self.accumulation.accumulate(module, inputs, goals, config.accumulate)
        module.require_all_seen()
        self.parallel.synchronize(self.module)
        norm = self.parallel.update(self.module, self.optimizer, config.grad_clip or float("inf"))
        self.step += 1
        return loss, norm, rate

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The mean loss over the validation batches, the same ones each time."""
        self.module.eval()
        total, counted = torch.zeros(2, device=self.place.device)
        for number in range(self.config.eval_batches):
            idx, targets = self._batch(self.config.batch_size, number, validation=True)
            counted += num_counted(targets)
            for rows, goals in zip(
                idx.split(self.micro_batch_size), targets.split(self.micro_batch_size), strict=True
            ):
                own = self.parallel.share(goals)
                total += weighed(self._forward(self.parallel.share(rows), own)[1], num_counted(own))
        self.module.train()
        return self.parallel.mean_loss(total * self.num_shares / counted).item()

    def _batch(self, batch_size: int, step: int, validation: bool = False) -> tuple[Tensor, Tensor]:
        """The same batch on every rank: tokens and next tokens, (b, s) each."""
        idx, targets = self.tokens.batch(
            batch_size, self.config.block_size, seed=self.config.seed, step=step, validation=validation
        )
        if self.place.device.type == "cuda":
            idx, targets = idx.pin_memory(), targets.pin_memory()
        return idx.to(self.place.device, non_blocking=True), targets.to(self.place.device, non_blocking=True)

    def _forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and loss of this rank's share, in the precision asked for."""
        bf16 = self.config.dtype == "bfloat16"
        with torch.autocast(self.place.device.type, dtype=torch.bfloat16, enabled=bf16):
            return self.module(idx, targets)

    def _validate(self, report: "Report | None") -> None:
        loss = self.validation_loss()
        if report is not None:
            report.validation(self.step, loss)

    def _save(self, report: "Report | None") -> None:
        checkpoint.save(
            self.run_dir,
            self.step,
            checkpoint.rank_state(self.module, self.optimizer),
            self.parallel.whole_state_dict(self.module),
            rank=self.place.rank,
            barrier=self.place.barrier,
        )
        if report is not None:
            report.restart_clock()


class Microbatches(nn.Module):
    """The module that an `Accumulation` calls: tells the technique which micro-batch is the step's last.

    The ranks need not talk before the last one: all others run inside `Parallel.accumulating`.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        module: nn.Module,
        parallel: Parallel,
        num_microbatches: int,
        weight: Tensor | None = None,
    ) -> None:
        """`weight` multiplies losses: what this rank's share counts in a plain mean over ranks; None is 1."""
        super().__init__()
        self.module = module
        self._call = forward
        self._weight = weight
        self._left = num_microbatches
        self._quiet = contextlib.ExitStack()
        if num_microbatches > 1:
            self._quiet.enter_context(parallel.accumulating(module))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        self._left -= 1
        if self._left == 0:
            self._quiet.close()
        logits, loss = self._call(idx, targets)
        return logits, loss if self._weight is None else weighed(loss, self._weight)

    def require_all_seen(self) -> None:
        """Raise a ValueError unless every micro-batch was there, once."""
        self._quiet.close()
        if self._left:
            more = "fewer" if self._left > 0 else "more"
            raise ValueError(
                f"accumulate_gradients called the model {abs(self._left)} times {more} than it was told to"
            )


class Report:
    """What rank 0 says and writes."""

    def __init__(self, trainer: Trainer) -> None:
        config, place = trainer.config, trainer.place
        self.run_dir, self.config = trainer.run_dir, config
        ranks = f"{place.num_ranks} rank{'s' * (place.num_ranks > 1)}"
        told = (
            config.model and config.model.name,
            config.parallel,
            config.checkpoint and f"checkpoint {config.checkpoint}",
            ranks,
        )
        self.title = ", ".join(filter(None, told))
        self.tokens_per_step = config.batch_size * config.block_size
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.peak = peak = peak_flops_per_second(place.device, dtype) * place.num_ranks
        self.doubted = False
        self.mfu_per_token_per_second = flops_per_token(trainer.model_config, trainer.num_parameters) / peak
        self.metrics = MetricsFile(self.run_dir / "metrics.jsonl", after_step=trainer.step)
        self.bar = ProgressBar(trainer.step, config.max_steps, shown=True)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Validation and checkpoints do not count as time of a step."""
        self.started = time.perf_counter()

    def step(self, step: int, loss: float, norm: float, rate: float) -> None:
        """Of a step that ends now: what it takes to say so is part of the next one."""
        now = time.perf_counter()
        speed = self.tokens_per_step / (now - self.started)
        self.started = now
        mfu = speed * self.mfu_per_token_per_second
        self.metrics.write(
            step=step, loss=loss, gradient_norm=norm, learning_rate=rate, tokens_per_second=speed, mfu=mfu
        )
        self.bar.update(loss=loss, tokens_per_second=speed, mfu=mfu)
        if mfu > 1 and not self.doubted:
            self.doubted = True
            self.bar.say(doubt(step, mfu, self.peak))
            peak_flops_per_second.cache_clear()  # the next run of this process measures it again

    def validation(self, step: int, loss: float) -> None:
        self.metrics.write(step=step, validation_loss=loss)
        self.bar.say(f"step {step}: validation loss {loss:.4f}")
        self.restart_clock()

    def close(self) -> None:
        self.bar.close()
        self.metrics.close()
        alone = runs.beside(self.run_dir, self.config)
        draw_loss(
            read_metrics(self.run_dir / "metrics.jsonl"),
            self.run_dir / "loss.png",
            title=self.title,
            one_rank=read_metrics(alone / "metrics.jsonl") if alone else None,
        )
