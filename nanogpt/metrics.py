"""What a run reports: a progress bar, a file of metrics, a picture of the loss, and MFU."""

import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanogpt.model import GPTConfig

# Dense bf16 FLOP/s from the vendors' data sheets; the first name that the device's name contains counts.
_PEAK_FLOPS_PER_SECOND = {
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "T4": 65e12,
    "V100": 125e12,
}


_ENOUGH_PRODUCTS, _MOST_PRODUCTS = 8, 60
"""A peak is found when so many products in a row were no faster: what else runs on the machine slows some."""
_MOST_SECONDS = 1.0
"""Of measuring: one product of bfloat16 takes a second on a processor that knows none."""


def flops_per_token(config: GPTConfig, num_parameters: int) -> float:
    """Forward and backward of one token: 6 per weight, and 12·L·h·s for attention over a full row.

    The position table multiplies nothing and is not counted; the token table is, as the head.
    Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    weights = num_parameters - config.block_size * config.n_embd
    return 6 * weights + 12 * config.n_layer * config.n_embd * config.block_size


@cache
def peak_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """What the device could do at best: from its data sheet, or else measured once with a large product."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for known, peak in _PEAK_FLOPS_PER_SECOND.items():
            if known in name:
                return peak
    size = 8192 if device.type == "cuda" else 1024
    a = torch.ones(size, size, device=device, dtype=dtype)
    best, since = float("inf"), 0
    began = time.perf_counter()
    for _ in range(_MOST_PRODUCTS):
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        seconds = time.perf_counter() - start
        since = 0 if seconds < 0.99 * best else since + 1
        best = min(best, seconds)
        if since == _ENOUGH_PRODUCTS or start + seconds > began + _MOST_SECONDS:
            break
    return 2 * size**3 / best


def doubt(step: int, mfu: float, peak: float) -> str:
    """What is said of an MFU above 100%, which no machine has."""
    return (
        f"step {step}: MFU {mfu:.0%} is no MFU: nothing is faster than its peak. The peak, {peak / 1e9:,.0f} "
        "GFLOP/s, was measured before the first step, while something else ran on the machine. Compare "
        "tokens a second, or start the run again when the machine is quiet."
    )


class MetricsFile:
    """A line of JSON for each record. Floats are written so that they read back bit for bit."""

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        """Opens the file to go on after `after_step` steps: later lines, and half ones, are dropped."""
        kept = [record for record in read_metrics(path) if after_step and record["step"] <= after_step]
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(temporary, path)
        self.file = path.open("a", buffering=1)

    def write(self, **record: Any) -> None:
        self.file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a line that a kill cut short ends them."""
    records: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class ProgressBar:
    """Steps done, with loss, tokens a second and MFU beside."""

    def __init__(self, first_step: int, last_step: int, *, shown: bool) -> None:
        self.bar = tqdm(total=last_step, initial=first_step, desc="training", unit="step", disable=not shown)

    def update(self, *, loss: float, tokens_per_second: float, mfu: float) -> None:
        self.bar.set_postfix_str(
            f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s, MFU {mfu:.1%}", refresh=False
        )
        self.bar.update()

    def say(self, text: str) -> None:
        if not self.bar.disable:
            self.bar.write(text)

    def close(self) -> None:
        self.bar.close()


def draw_loss(
    records: list[dict[str, Any]],
    path: Path,
    *,
    title: str = "",
    one_rank: list[dict[str, Any]] | None = None,
) -> None:
    """The loss curve of a run's records, as a picture; in grey behind it that of the same run on one rank."""
    from matplotlib.figure import Figure  # takes a second to import, and only the end of a run needs it

    training = [(record["step"], record["loss"]) for record in records if "loss" in record]
    validation = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if alone := [(record["step"], record["loss"]) for record in one_rank or [] if "loss" in record]:
        axes.plot(*zip(*alone, strict=True), linewidth=5, color="0.8", label="the same run on one rank")
    if training:
        axes.plot(*zip(*training, strict=True), linewidth=0.8, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    if training or validation:
        axes.legend()
    figure.savefig(path, dpi=120)
