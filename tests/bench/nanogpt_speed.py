"""Tokens a second of `nanogpt.train`, alone or beside karpathy's nanoGPT.

`python -m tests.bench.nanogpt_speed --nanogpt PATH` runs the two training scripts in turn, each as its users
would, with the same sizes, on the same tokens, in float32 on two CPU threads. A round is one run of each; its
ratio is that of the median times of a step. Printed are the median of the rounds' ratios and all of them.
Then the two models alone, in one process, a forward and backward of each in turn. PATH is a checkout of
https://github.com/karpathy/nanoGPT. Nothing is compiled.
"""

import importlib.util
import json
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn

from nanogpt.data import load_tokens
from nanogpt.model import GPT, GPTConfig

WARM_UP = 5  # steps of a run that do not count
VOCAB_SIZE = 4096
Size = Literal["default", "small", "medium"]
SIZES: dict[Size, dict[str, int]] = {
    # what nanogpt.train does without options
    "default": {"n_layer": 2, "n_head": 4, "n_embd": 128, "block_size": 128, "batch_size": 4},
    # what nanoGPT's README runs on a laptop
    "small": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12},
    # the model of nanoGPT's config/train_shakespeare_char.py, on fewer sequences
    "medium": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 4},
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure training speed on the CPU."""

    nanogpt: Path | None = None
    """A checkout of karpathy/nanoGPT to run beside ours."""
    sizes: tuple[Size, ...] = ("default", "small", "medium")
    """Models and batches."""
    rounds: int = 5
    """Runs of each, in turn."""
    steps: int = 30
    """Steps a run."""
    threads: int = 2
    """CPU threads."""


def run(command: list[str], folder: Path, threads: int) -> str:
    """Standard output of a command that must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def ours(bench: Bench, size: Size, folder: Path) -> float:
    """Median seconds of a step in a run of `nanogpt.train`."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES[size].items()]
    options += ["--device=cpu", f"--max-steps={bench.steps}", "--eval-batches=1", "--eval-interval=1000"]
    out = tempfile.mkdtemp(dir=folder)
    run([sys.executable, "-m", "nanogpt.train", *options, f"--out-dir={out}"], folder, bench.threads)
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    speeds = [record["tokens_per_second"] for record in map(json.loads, lines) if "loss" in record]
    return num_tokens(size) / statistics.median(speeds[WARM_UP:])


def theirs(bench: Bench, size: Size, folder: Path) -> float:
    """Median seconds of a step in a run of nanoGPT's train.py, as it prints them."""
    assert bench.nanogpt is not None
    options = [f"--{name}={value}" for name, value in SIZES[size].items()]
    options += ["--dataset=stdlib", "--device=cpu", "--dtype=float32", "--compile=False", "--bias=False"]
    options += [f"--max_iters={bench.steps - 1}", "--eval_iters=1", "--eval_interval=1000"]
    options += ["--log_interval=1", "--gradient_accumulation_steps=1", "--dropout=0.0"]
    options += ["--always_save_checkpoint=False"]
    printed = run(
        [sys.executable, str(bench.nanogpt.resolve() / "train.py"), *options], folder, bench.threads
    )
    times = re.findall(r"^iter \d+: .*time ([\d.]+)ms", printed, re.MULTILINE)
    return statistics.median(float(ms) / 1000 for ms in times[WARM_UP:])


def num_tokens(size: Size) -> int:
    """Of one step."""
    return SIZES[size]["batch_size"] * SIZES[size]["block_size"]


def prepare(bench: Bench, folder: Path) -> None:
    """Make the folder one in which nanoGPT's train.py finds our tokens, and what it reads beside itself."""
    tokens = load_tokens("stdlib")
    data = folder / "data" / "stdlib"
    data.mkdir(parents=True)
    tokens.train.tofile(data / "train.bin")
    tokens.validation.tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCAB_SIZE}))
    if bench.nanogpt is not None:
        (folder / "configurator.py").symlink_to(bench.nanogpt.resolve() / "configurator.py")


def the_loops(bench: Bench, size: Size, folder: Path) -> None:
    """Run both scripts in turn and print their ratio; without a checkout, ours alone."""
    mine: list[float] = []
    ratios: list[float] = []
    for number in range(bench.rounds):
        kinds = [ours] if bench.nanogpt is None else [ours, theirs] if number % 2 == 0 else [theirs, ours]
        seconds = {kind: kind(bench, size, folder) for kind in kinds}
        mine.append(seconds[ours])
        if theirs in seconds:
            ratios.append(seconds[theirs] / seconds[ours])
    speed = num_tokens(size) / statistics.median(mine)
    print(f"{size}: ours {speed:,.0f} tokens a second", end="")
    if ratios:
        listed = " ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
        print(f", {statistics.median(ratios):.3f} times nanoGPT (rounds: {listed})", end="")
    print(flush=True)


def nanogpts_model(checkout: Path, size: Size) -> nn.Module:
    """nanoGPT's own GPT."""
    spec = importlib.util.spec_from_file_location("model_of_nanogpt", checkout / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT(module.GPTConfig(**shape(size)))


def shape(size: Size) -> dict[str, int | bool]:
    """What both models' `GPTConfig` take."""
    sizes = {name: value for name, value in SIZES[size].items() if name != "batch_size"}
    return {**sizes, "vocab_size": VOCAB_SIZE, "bias": False}


def forward_and_backward(model: nn.Module, idx: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    """Seconds, and the loss."""
    model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    loss = model(idx, targets)[1]
    loss.backward()
    return time.perf_counter() - began, loss.detach()


def the_models(bench: Bench, size: Size) -> None:
    """The two models alone, on the same weights and tokens: print the ratio of their times."""
    assert bench.nanogpt is not None
    torch.set_num_threads(bench.threads)
    model, other = GPT(GPTConfig(**shape(size))), nanogpts_model(bench.nanogpt, size)
    other.load_state_dict(model.state_dict())
    idx, targets = torch.randint(VOCAB_SIZE, (2, SIZES[size]["batch_size"], SIZES[size]["block_size"]))
    ratios = []
    for number in range(bench.rounds * bench.steps):
        pair = (model, other) if number % 2 else (other, model)
        found = {each: forward_and_backward(each, idx, targets) for each in pair}
        torch.testing.assert_close(found[model][1], found[other][1])
        ratios.append(found[other][0] / found[model][0])
    print(f"{size}: the model alone {statistics.median(ratios[WARM_UP:]):.3f} times nanoGPT's", flush=True)


def main() -> None:
    """Measure and print."""
    bench = tyro.cli(Bench)
    if bench.nanogpt is not None and not (bench.nanogpt / "train.py").is_file():
        raise SystemExit(f"{bench.nanogpt} is no checkout of nanoGPT: it has no train.py")
    if bench.steps <= WARM_UP:
        raise SystemExit(f"--steps {bench.steps}: the first {WARM_UP} do not count, so ask for more")
    with tempfile.TemporaryDirectory() as folder:
        prepare(bench, Path(folder))
        for size in bench.sizes:
            the_loops(bench, size, Path(folder))
            if bench.nanogpt is not None:
                the_models(bench, size)


if __name__ == "__main__":
    main()
