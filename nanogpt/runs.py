"""Folders of runs: naming a new one, finding the last one, and what each says about itself."""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from nanogpt.config import TrainConfig, same_curve
from nanogpt.model import GPTConfig

RUNS = Path("runs")
_CONFIG = "config.json"


@dataclass(frozen=True)
class Run:
    """What a run's folder says it is."""

    folder: Path
    train: TrainConfig
    model: GPTConfig
    encoding: str

    def write(self) -> None:
        """Notes it in the folder, for `--resume` and `nanogpt.sample`."""
        known = {"train": self.train.to_json(), "model": vars(self.model), "encoding": self.encoding}
        temporary = self.folder / f".{_CONFIG}.{os.getpid()}"
        temporary.write_text(json.dumps(known, indent=2) + "\n")
        os.replace(temporary, self.folder / _CONFIG)


def read_run(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        ValueError: there is none, or what it says about itself cannot be read.
    """
    try:
        known = json.loads((folder / _CONFIG).read_text())
        return Run(
            folder, TrainConfig.from_json(known["train"]), GPTConfig(**known["model"]), known["encoding"]
        )
    except OSError:
        raise ValueError(f"{folder} is not the folder of a run: it has no {_CONFIG}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / _CONFIG} cannot be read: {error}") from None


def last_run() -> Path:
    """The folder in `runs/` that was started or resumed last.

    Raises:
        ValueError: there is none.
    """
    found = sorted(RUNS.glob(f"*/{_CONFIG}"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise ValueError(f"there is no run in {RUNS.resolve()} yet: start one with python -m nanogpt.train")
    return found[-1].parent


def beside(folder: Path, config: TrainConfig) -> Path | None:
    """The last other run in the same folder that trained the same on one rank: its curve is to be met."""
    found = sorted(folder.parent.glob(f"*/{_CONFIG}"), key=lambda path: path.stat().st_mtime_ns)
    for path in reversed(found):
        with contextlib.suppress(ValueError):
            run = read_run(path.parent)
            alone = run.train.parallel is None and run.train.model is None
            if path.parent != folder and alone and same_curve(run.train, config):
                return path.parent
    return None


def new_run(out_dir: Path | None) -> Path:
    """Makes the folder of a new run, `runs/<date and time>` unless another is asked for.

    Raises:
        ValueError: it cannot be made, or holds a run already.
    """
    folder = out_dir or RUNS / time.strftime("%Y-%m-%d_%H-%M-%S")
    if out_dir is None:
        number = 1
        while folder.exists():
            number += 1
            folder = RUNS / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{number}"
    if (folder / _CONFIG).exists():
        raise ValueError(
            f"{folder} holds a run already: add --resume to go on with it, or choose another --out-dir"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder {folder} cannot be made: {error.strerror}") from None
    return folder
