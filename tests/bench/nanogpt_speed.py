"""Tokens a second of `nanogpt.train`, alone or beside karpathy's nanoGPT.

`python -m tests.bench.nanogpt_speed --nanogpt PATH` runs the two training scripts in turn, each as its users
would, with the same sizes, on the same tokens, in float32 on two CPU threads, and prints the ratio of the
median times of a step. PATH is a checkout of https://github.com/karpathy/nanoGPT. Nothing is compiled.
"""

import json
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from nanogpt.data import load_tokens

WARM_UP = 5  # steps of a run that do not count


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure training speed on the CPU."""

    nanogpt: Path | None = None
    """A checkout of karpathy/nanoGPT to run beside ours."""
    rounds: int = 5
    """Runs of each, in turn."""
    steps: int = 30
    """Steps a run."""
    threads: int = 2
    """CPU threads."""
    n_layer: int = 2
    """Transformer blocks."""
    n_head: int = 4
    """Attention heads."""
    n_embd: int = 128
    """Width of the residual stream."""
    block_size: int = 128
    """Tokens in a sequence."""
    batch_size: int = 4
    """Sequences in a step."""

    def sizes(self) -> dict[str, int]:
        names = ("n_layer", "n_head", "n_embd", "block_size", "batch_size")
        return {name: getattr(self, name) for name in names}


def run(command: list[str], folder: Path, threads: int) -> str:
    """Standard output of a command that must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def ours(bench: Bench, folder: Path) -> list[float]:
    """Seconds of each step of a run of `nanogpt.train`."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in bench.sizes().items()]
    options += ["--device=cpu", f"--max-steps={bench.steps}", "--eval-batches=1", "--eval-interval=1000"]
    out = tempfile.mkdtemp(dir=folder)
    run([sys.executable, "-m", "nanogpt.train", *options, f"--out-dir={out}"], folder, bench.threads)
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    speeds = [record["tokens_per_second"] for record in map(json.loads, lines) if "loss" in record]
    return [bench.batch_size * bench.block_size / speed for speed in speeds]


def theirs(bench: Bench, folder: Path) -> list[float]:
    """Seconds of each step of a run of nanoGPT's train.py, as it prints them."""
    assert bench.nanogpt is not None
    options = [f"--{name}={value}" for name, value in bench.sizes().items()]
    options += ["--dataset=stdlib", "--device=cpu", "--dtype=float32", "--compile=False", "--bias=False"]
    options += [
        f"--max_iters={bench.steps - 1}",
        "--eval_iters=1",
        "--eval_interval=1000",
        "--log_interval=1",
    ]
    options += ["--gradient_accumulation_steps=1", "--dropout=0.0", "--always_save_checkpoint=False"]
    printed = run(
        [sys.executable, str(bench.nanogpt.resolve() / "train.py"), *options], folder, bench.threads
    )
    return [float(ms) / 1000 for ms in re.findall(r"^iter \d+: .*time ([\d.]+)ms", printed, re.MULTILINE)]


def prepare_nanogpt_data(folder: Path) -> None:
    """Our tokens, where nanoGPT looks for its own."""
    tokens = load_tokens("stdlib")
    data = folder / "data" / "stdlib"
    data.mkdir(parents=True)
    tokens.train.tofile(data / "train.bin")
    tokens.validation.tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 4096}))


def main() -> None:
    """Measure and print."""
    bench = tyro.cli(Bench)
    if bench.nanogpt is not None and not (bench.nanogpt / "train.py").is_file():
        raise SystemExit(f"{bench.nanogpt} is no checkout of nanoGPT: it has no train.py")
    num_tokens = bench.batch_size * bench.block_size
    times: dict[str, list[float]] = {"ours": [], "nanoGPT": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_nanogpt_data(folder)
        for _ in range(bench.rounds):
            times["ours"] += ours(bench, folder)[WARM_UP:]
            if bench.nanogpt is not None:
                times["nanoGPT"] += theirs(bench, folder)[WARM_UP:]
    medians = {who: statistics.median(seconds) for who, seconds in times.items() if seconds}
    for who, seconds in medians.items():
        fastest = num_tokens / min(times[who])
        print(
            f"{who}: {num_tokens / seconds:,.0f} tokens a second (median step; the fastest: {fastest:,.0f})"
        )
    if "nanoGPT" in medians:
        print(f"ours is {medians['nanoGPT'] / medians['ours']:.3f} times as fast")


if __name__ == "__main__":
    main()
