"""`--model FILE`: the workshop's model, parallel by itself, is the dense one, step for step."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grader import run_ranks
from nanogpt import checkpoint, runs
from nanogpt.config import TrainConfig
from nanogpt.implementation import load_implementation
from nanogpt.model import GPT, GPTConfig
from nanogpt.own_model import OwnModel
from nanogpt.technique import Checkpointing, find_technique
from tests.beside_dense import require_the_same, train_beside_dense
from tests.test_nanogpt_training import OPTIONS, curve

EDITED = Path(__file__).parent / "alternatives" / "tensor_parallel__model.py"
CONFIG = {"block_size": 16, "vocab_size": 48, "n_layer": 2, "n_head": 6, "n_embd": 24, "bias": True}


def train(path: Path) -> dict[str, Any]:
    return train_beside_dense(OwnModel, load_implementation(path), GPTConfig(**CONFIG), length=9)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_trains_as_the_dense_model(ranks: int) -> None:
    for result in run_ranks(train, EDITED, ranks=ranks):
        require_the_same(result)


def losses(num_ranks: int, kept: str | None) -> list[float]:
    """On a rank, as the loop does it: built, then seeded, then a few steps with dropout."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**CONFIG, dropout=0.3))
    own = OwnModel(load_implementation(EDITED), dist.group.WORLD if num_ranks > 1 else None)
    keeps = Checkpointing()
    if kept is not None:
        adapter, solution = find_technique("CHECKPOINT", kept)
        keeps = adapter(solution)
    module = own.build(model, keeps)
    assert own.draws_alike
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found, generator = [], torch.Generator().manual_seed(1)
    for _ in range(3):
        idx, targets = torch.randint(48, (2, 3, 9), generator=generator)
        loss = module(idx, targets)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kept", [None, "every"])
def test_two_ranks_drop_what_one_drops(kept: str | None) -> None:
    (alone,) = run_ranks(losses, 1, None, ranks=1)
    for found in run_ranks(losses, 2, kept, ranks=2):
        assert found == pytest.approx(alone, abs=1e-5)


class Two:
    """A group of two, seen from its rank 0; nothing is sent."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


class Renamed(GPT):
    def __init__(self, config: GPTConfig, group: Any = None) -> None:
        super().__init__(config)
        self.transformer["norm"] = self.transformer.pop("ln_f")


class CutAttention(GPT):
    def __init__(self, config: GPTConfig, group: Any = None) -> None:
        super().__init__(config)
        for block in self.transformer.h:
            block.attn.c_attn = torch.nn.Linear(config.n_embd, 3 * config.n_embd // 2)


@pytest.mark.parametrize(
    ("their_gpt", "says"),
    [
        (GPT, "takes no group, so it is for one rank: give GPT.__init__, Block.__init__ and MLP.__init__"),
        (lambda config, group=None: GPT(config), "is the whole model on each of 2 ranks"),
        (Renamed, "not called as GPT's: transformer.ln_f.bias"),
        (CutAttention, "c_attn.weight is (36, 24) on a rank and (72, 24) in GPT: only the MLPs'"),
    ],
)
def test_what_is_no_parallel_copy_is_a_sentence(their_gpt: Any, says: str) -> None:
    own = OwnModel(SimpleNamespace(GPT=their_gpt), Two())
    with pytest.raises(ValueError, match=re.escape(says)):
        own.build(GPT(GPTConfig(**CONFIG)), Checkpointing())


def test_what_does_not_go_together_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="does not go with --parallel"):
        TrainConfig(model=EDITED, parallel="data_parallel")
    with pytest.raises(ValueError, match="does not go with --compile"):
        TrainConfig(model=EDITED, compile=True)


@pytest.mark.slow
def test_two_ranks_follow_the_curve_of_one(tmp_path: Path, cache: Path) -> None:
    found = []
    for name, ranks, options in (("one", 1, []), ("two", 2, ["--model", str(EDITED)])):
        start = ["-m", "nanogpt.ranks", "--nproc-per-node", "2"] if ranks > 1 else []
        folder = ["--cache", str(cache), "--out-dir", str(tmp_path / name)]
        command = [sys.executable, *start, "-m", "nanogpt.train", *OPTIONS, *folder, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        found.append(curve(tmp_path / name))
    assert f"yours: the GPT of {EDITED}" in done.stdout
    assert runs.beside(tmp_path / "two", runs.read_run(tmp_path / "two").train) == tmp_path / "one"
    weights, _ = checkpoint.load_weights(tmp_path / "two")
    GPT(runs.read_run(tmp_path / "two").model).load_state_dict(weights, strict=False)
    for (step, kind, alone), (_, _, together) in zip(*found, strict=True):
        assert together == pytest.approx(alone, abs=1e-4), (step, kind)
