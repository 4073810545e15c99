"""The training loop: its arithmetic, exact resume, and a kill in the middle of a save."""

import functools
import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nanogpt import checkpoint, runs, sample
from nanogpt.config import TrainConfig
from nanogpt.data import Tokens
from nanogpt.loop import Place, Techniques, Trainer
from nanogpt.metrics import MetricsFile, draw_loss, flops_per_token, peak_flops_per_second, read_metrics
from nanogpt.model import GPT, Dropout, GPTConfig
from nanogpt.optimizer import adamw, clip_gradients, learning_rate
from nanogpt.parallel import Parallel
from nanogpt.technique import Accumulation
from nanogpt.train import main

SMALL: dict[str, Any] = {
    **dict(n_layer=1, n_head=2, n_embd=16, block_size=8, batch_size=4, max_steps=8),
    **dict(warmup_steps=2, eval_interval=4, eval_batches=2, checkpoint_interval=3, device="cpu"),
}
OPTIONS = [item for name, value in SMALL.items() for item in (f"--{name.replace('_', '-')}", str(value))]


def trainer(run_dir: Path, parallel: Parallel | None = None, **changes: Any) -> Trainer:
    """A trainer on a small model and 500 made-up tokens of 64."""
    run_dir.mkdir(parents=True, exist_ok=True)
    rows = np.random.default_rng(0).integers(0, 64, 500).astype(np.uint16)
    config = TrainConfig(**{**SMALL, **changes})
    tokens = Tokens(train=rows, validation=rows[:100], encoding="stdlib")
    return Trainer(
        config,
        run_dir,
        tokens,
        64,
        Techniques(parallel=parallel or Parallel()),
        Place(device=torch.device("cpu")),
    )


def curve(run_dir: Path) -> list[tuple[int, str, float]]:
    """What of a run's metrics does not depend on the clock."""
    kinds = ("loss", "validation_loss", "gradient_norm", "learning_rate")
    return [
        (r["step"], kind, r[kind])
        for r in read_metrics(run_dir / "metrics.jsonl")
        for kind in kinds
        if kind in r
    ]


def interrupted(run_dir: Path, at: int, parallel: Parallel | None = None, **changes: Any) -> None:
    """A run that ends in Ctrl-C when step `at` begins."""
    run = trainer(run_dir, parallel, **changes)
    real = run.train_step

    def step() -> tuple[Tensor, Tensor, float]:
        if run.step == at:
            raise KeyboardInterrupt
        return real()

    run.train_step = step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.run()


class OwnStream(Parallel):
    """A technique that gives dropout a random stream of its own."""

    def wrap(self, model: GPT) -> nn.Module:
        for part in model.modules():
            if isinstance(part, Dropout):
                part.generator = torch.Generator().manual_seed(7)
        return model


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    config = TrainConfig(warmup_steps=4, max_steps=104, learning_rate=1.0, min_learning_rate=0.1)
    assert [round(learning_rate(step, config), 6) for step in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert learning_rate(54, config) == pytest.approx(0.55)
    assert learning_rate(104, config) == learning_rate(500, config) == 0.1


def test_decay_groups_are_nanogpts() -> None:
    config = TrainConfig(bias=True, weight_decay=0.3)
    model = GPT(config.model_config(64))
    decayed, kept = adamw(model, config).param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_nothing_to_clip_is_a_norm_of_zero() -> None:
    assert clip_gradients(GPT(GPTConfig(n_layer=1, n_head=1, n_embd=4)).parameters(), 1.0) == 0.0


def test_the_norm_of_a_long_gradient_is_exact() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.empty(4096, 1024))
    parameter.grad = torch.randn_like(parameter)
    exact = parameter.grad.double().norm().item()
    assert clip_gradients([parameter], 1.0).item() == pytest.approx(exact, rel=1e-6)
    assert parameter.grad.double().norm().item() == pytest.approx(1.0, rel=1e-5)


def test_no_logits_are_kept_for_backward() -> None:
    """The loss needs its own copy of them, normalised; a second one is 4·b·s·v bytes for nothing."""
    model, seen, alive = GPT(GPTConfig(8, 64, 1, 2, 16)), [], []

    class Watching(nn.Module):
        def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            logits, loss = model(idx, targets)
            seen.append(weakref.ref(logits))
            loss.register_hook(lambda _: alive.append(seen[-1]() is not None))
            return logits, loss

    idx = torch.zeros(4, 8, dtype=torch.long)
    Accumulation().accumulate(Watching(), idx, idx, 2)
    assert alive == [False, False]


def test_the_time_of_a_step_includes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MetricsFile.write

    def slow(self: MetricsFile, **record: Any) -> None:
        real(self, **record)
        time.sleep(0.05)

    monkeypatch.setattr(MetricsFile, "write", slow)
    trainer(tmp_path, max_steps=3).run()
    speeds = [r["tokens_per_second"] for r in read_metrics(tmp_path / "metrics.jsonl") if "loss" in r]
    assert all(4 * 8 / speed > 0.05 for speed in speeds[1:])


def test_one_step_is_adamw_on_the_clipped_gradient_of_the_batch(tmp_path: Path) -> None:
    run = trainer(tmp_path, grad_clip=0.01, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in run.module.named_parameters()}
    idx, targets = run.tokens.batch(4, 8, seed=run.config.seed, step=0)
    _, loss = run.module(idx, targets)
    gradients = dict(zip(before, torch.autograd.grad(loss, list(run.module.parameters())), strict=True))
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    reported, reported_norm, rate = run.train_step()
    torch.testing.assert_close((reported, reported_norm), (loss.detach(), norm))
    for name, parameter in run.module.named_parameters():
        g = gradients[name] * 0.01 / norm
        torch.testing.assert_close(parameter.detach(), before[name] - rate * g / (g.abs() + 1e-8))


def test_accumulation_is_the_big_batch(tmp_path: Path) -> None:
    for count in (1, 2, 4):
        trainer(tmp_path / str(count), accumulate=count).run()
    whole, halves, quarters = ([value for *_, value in curve(tmp_path / str(n))] for n in (1, 2, 4))
    assert halves == pytest.approx(whole, rel=1e-4)
    assert quarters == pytest.approx(whole, rel=1e-4)


def test_the_techniques_moments(tmp_path: Path) -> None:
    """`accumulating` covers all micro-batches but the last, then one `synchronize`, then clipping."""
    moments: list[str] = []

    class Watching(Parallel):
        def accumulating(self, module: nn.Module) -> Any:
            moments.append("accumulating")
            return super().accumulating(module)

        def synchronize(self, module: nn.Module) -> None:
            moments.append("synchronize")

        def clip_gradients(self, module: nn.Module, max_norm: float) -> Tensor:
            moments.append(f"clip {max_norm}")
            return super().clip_gradients(module, max_norm)

    trainer(tmp_path, Watching(), accumulate=4, grad_clip=0.0).train_step()
    assert moments == ["accumulating", "synchronize", "clip inf"]


def test_bf16_trains(tmp_path: Path) -> None:
    trainer(tmp_path / "bf16", dtype="bfloat16").run()
    trainer(tmp_path / "fp32").run()
    assert all(p.dtype == torch.float32 for p in checkpoint.load_weights(tmp_path / "bf16")[0].values())
    bf16, fp32 = ([value for *_, value in curve(tmp_path / name)] for name in ("bf16", "fp32"))
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=0.1)


@pytest.mark.parametrize("at", [0, 2, 3, 5, 7])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, at: int) -> None:
    changes = {"dropout": 0.2, "accumulate": 2, "bias": True}
    trainer(tmp_path / "whole", **changes).run()
    interrupted(tmp_path / "cut", at, **changes)
    trainer(tmp_path / "cut", resume=True, **changes).run()
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    (cut, cut_step), (whole, _) = (checkpoint.load_weights(tmp_path / name) for name in ("cut", "whole"))
    assert cut_step == 8
    assert all(tensor.equal(whole[name]) for name, tensor in cut.items())


def test_streams_of_a_technique_are_resumed_too(tmp_path: Path) -> None:
    trainer(tmp_path / "whole", OwnStream(), dropout=0.2).run()
    interrupted(tmp_path / "cut", 5, OwnStream(), dropout=0.2)
    trainer(tmp_path / "cut", OwnStream(), dropout=0.2, resume=True).run()
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    trainer(tmp_path / "plain", dropout=0.2).run()
    assert curve(tmp_path / "plain") != curve(tmp_path / "whole")


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import matplotlib.backends.backend_agg, matplotlib.figure  # once, not in every child
    from nanogpt import checkpoint
    from nanogpt.train import main

    def run(*arguments):
        pid = os.fork()
        if pid == 0:
            os._exit(main(arguments))
        return os.waitpid(pid, 0)[1]

    real, calls = checkpoint._sync, 0
    def killing(at):
        def sync(path):
            global calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            real(path)
        return sync

    folder, options = sys.argv[1], sys.argv[2:]
    for at in (1, 3, 4, 7, 8):  # four calls of _sync a save, of which the last follows the rename
        checkpoint._sync = killing(at)
        status = run(*options, "--out-dir", f"{folder}/{at}")
        print(os.WTERMSIG(status), checkpoint.steps(Path(f"{folder}/{at}")))
        checkpoint._sync = real
        assert run("--resume", "--out-dir", f"{folder}/{at}") == 0
    assert run(*options, "--out-dir", f"{folder}/whole") == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="ends its children with SIGKILL, which needs fork")
def test_a_kill_during_a_save_loses_nothing(tmp_path: Path, cache: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), *OPTIONS, "--cache", str(cache)]
    done = subprocess.run([*command, "--dropout", "0.2"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(f"{signal.SIGKILL.value} [")]
    assert lines == ["9 []", "9 []", "9 [3]", "9 [3]", "9 [3, 6]"]
    whole = curve(tmp_path / "whole")
    assert whole[-1][0] == 8
    for at in (1, 3, 4, 7, 8):
        assert curve(tmp_path / str(at)) == whole
        assert checkpoint.steps(tmp_path / str(at)) == [6, 8]
        assert not list((tmp_path / str(at) / "checkpoints").glob("*.partial"))


def test_damaged_checkpoint_is_a_sentence(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    path = tmp_path / "checkpoints" / "step-00000008" / "rank-0.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(
        ValueError, match=r"step-00000008 is damaged .*delete it to resume from the checkpoint before"
    ):
        trainer(tmp_path, resume=True)


def test_another_number_of_ranks_is_a_sentence(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    (tmp_path / "checkpoints" / "step-00000008" / "rank-1.pt").touch()
    with pytest.raises(ValueError, match="was trained on 2 ranks: resume it on as many, not on 1"):
        trainer(tmp_path, resume=True)


def test_metrics_go_on_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.1}\n{"step": 2, "loss": 0.2}\n{"step": 3, "lo')
    file = MetricsFile(path, after_step=1)
    file.write(step=2, loss=1 / 3)
    file.close()
    assert read_metrics(path) == [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 1 / 3}]


def test_an_mfu_above_100_percent_is_called_none_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    busy = functools.cache(lambda *_: 1000.0)  # what a machine that was busy could do
    monkeypatch.setattr("nanogpt.loop.peak_flops_per_second", busy)
    trainer(tmp_path).run()
    said = "".join(capfd.readouterr())
    assert said.count("is no MFU: nothing is faster than its peak") == 1
    assert "was measured before the first step" in said
    assert not busy.cache_info().currsize  # so that the next run measures it again


@pytest.mark.parametrize(
    ("seconds", "fastest", "products"),
    [([0.03] * 6 + [0.01] + [0.03] * 100, 0.01, 15), ([0.6] * 100, 0.6, 2)],
    ids=["the fastest of many", "no more than seconds"],
)
def test_a_peak_is_measured(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], fastest: float, products: int
) -> None:
    """Products that take these seconds, by a clock that is read before all, and before and after each."""
    times = [0.0]
    for end in accumulate(seconds):
        times += [times[-1], end]
    clock = iter(times)
    monkeypatch.setattr("nanogpt.metrics.time.perf_counter", lambda: next(clock))
    peak = peak_flops_per_second.__wrapped__(torch.device("cpu"), torch.float32)
    assert peak == pytest.approx(2 * 1024**3 / fastest)
    assert next(clock) == pytest.approx(sum(seconds[:products]))


def test_flops_per_token_are_palms() -> None:
    config = GPTConfig(vocab_size=50257, bias=False)
    # Published: 874,944,921,600 for forward and backward of 1,024 tokens of GPT-2 124M.
    assert flops_per_token(config, 124_337_664) * 1024 == pytest.approx(874_944_921_600, rel=1e-3)


def test_a_run_is_drawn_over_the_same_run_on_one_rank(tmp_path: Path) -> None:
    def run(name: str, **options: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        runs.Run(folder, TrainConfig(**options), GPTConfig(), "stdlib").write()
        return folder

    alone = run("alone", max_steps=50)
    run("longer", max_steps=100)
    run("other_ranks", max_steps=50, parallel="zero1")
    run("own_model", max_steps=50, model=Path("my_model.py"))
    run("other_rate", max_steps=50, learning_rate=1.0)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    two = run("two", max_steps=50, parallel="data_parallel", checkpoint="every", accumulate=2)
    assert runs.beside(two, runs.read_run(two).train) == alone
    assert runs.beside(alone, runs.read_run(alone).train) is None
    records = [{"step": step, "loss": 8.0 - step} for step in range(3)]
    for name, one_rank in (("with", records), ("without", None)):
        draw_loss(records, tmp_path / f"{name}.png", title="zero1, 2 ranks", one_rank=one_rank)
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_train_and_sample_from_the_command_line(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sample.main([]) == 2
    assert "no run in" in capsys.readouterr().err
    assert main([*OPTIONS, "--cache", str(cache), "--learning_rate", "0.003"]) == 0
    run = runs.last_run()
    assert runs.read_run(run).train.learning_rate == 0.003
    assert {path.name for path in run.iterdir()} == {
        "config.json",
        "checkpoints",
        "loss.png",
        "metrics.jsonl",
    }
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    records = read_metrics(run / "metrics.jsonl")
    assert {"step", "loss", "tokens_per_second", "mfu", "learning_rate", "gradient_norm"} == set(records[1])
    capsys.readouterr()
    assert sample.main(["--prompt", "import os", "--max-new-tokens", "5", "--num-samples", "3"]) == 0
    texts = capsys.readouterr().out
    assert texts.count("import os") == 3
    assert sample.main(["--prompt", "import os", "--max-new-tokens", "5", "--num-samples", "3"]) == 0
    assert capsys.readouterr().out == texts
    assert main(["--resume", "--max-steps", "9"]) == 0
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == 9


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--n-head", "3"], "n_head=3 does not divide n_embd=16"),
        (["--batch-size", "3", "--accumulate", "2"], "does not divide into"),
        (["--max-steps", "0"], "must be 1 or more"),
        (["--dropout", "1"], "below 1"),
        (["--implementation", "a.py"], "--implementation needs --parallel"),
        (
            ["--parallel", "data_parallel"],
            "torchrun --nproc-per-node 2 -m nanogpt.train --parallel data_parallel",
        ),
        (["--device", "abacus"], "use cpu, cuda or auto"),
        (["--no-such-option"], "no-such-option"),
        (["--dataset", "nope"], "nope"),
        (["--resume", "--out-dir", "/nowhere"], "not the folder of a run"),
        (["--out-dir", "/dev/null/run"], "cannot be made"),
        (["--block-size", "10000000"], "block_size=10000000 is too long"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_sentence_and_status_2(
    options: list[str], says: str, tmp_path: Path, cache: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main([*OPTIONS, "--cache", str(cache), *options]) == 2
    told = capsys.readouterr()
    assert says in " ".join((told.err + told.out).replace("│", " ").split())
    assert "Traceback" not in told.err


def test_a_run_is_not_overwritten_and_does_not_change(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*OPTIONS, "--cache", str(cache), "--out-dir", str(tmp_path / "a")]
    assert main([*options, "--max-steps", "1"]) == 0
    assert main(options) == 2
    assert "add --resume" in capsys.readouterr().err
    assert main(["--resume", "--out-dir", str(tmp_path / "a"), "--n-layer", "2"]) == 2
    assert "n_layer was 1 when this run started and cannot become 2" in capsys.readouterr().err


def test_help_tells_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "--accumulate" in text
    assert "Optimizer steps of the whole run" in text
    assert json.dumps(TrainConfig().to_json())


FAULTS = """
    import resource
    import torch
    from nanogpt.memory import keep_freed_memory

    def faults():  # pages that the system had to fill for three tensors of 16 MiB, ten times
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            [torch.ones(1 << 22) for _ in range(3)]
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    first = faults()
    keep_freed_memory()
    faults()
    print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how memory is kept is asked of glibc")
def test_freed_memory_is_taken_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FAULTS)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    by_default, kept = map(int, done.stdout.split())
    assert kept * 50 < by_default, f"{kept} pages are filled again, {by_default} by default"


PAGES = """
    import resource
    import sys
    import torch
    from nanogpt.train import ask_for_large_pages  # with all that training imports

    if sys.argv[1] == "ask":
        ask_for_large_pages()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def large_pages_can_be_asked_for() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[madvise]" in setting.read_text()


@pytest.mark.skipif(
    not large_pages_can_be_asked_for(), reason="this system gives large pages always, or never"
)
def test_a_tensor_lies_in_large_pages() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    by_default, asked = (
        int(
            subprocess.run(
                [sys.executable, "-c", textwrap.dedent(PAGES), word],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            ).stdout
        )
        for word in ("leave", "ask")
    )
    assert asked * 4 < by_default, f"{asked} pages are filled for 64 MiB, {by_default} by default"


class Masked(Tokens):
    """Tokens of which many targets do not count: in `empty` rows all, in the others fewer and fewer."""

    empty = 1

    def batch(self, batch_size: int, block_size: int, **which: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = super().batch(batch_size, block_size, **which)
        for row, goals in enumerate(targets):
            goals[max(0, row + 1 - self.empty) * 2 :] = -1
        return inputs, targets


class Half(Parallel):
    """One of two ranks that never meet: its rows, and what it would send."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.gradients = rank, []

    def share(self, tensor: Tensor) -> Tensor:
        return tensor.tensor_split(2)[self.rank]

    def update(self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        self.gradients = [p.grad.clone() for p in module.parameters()]
        return super().update(module, optimizer, max_norm)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_shares_in_which_other_numbers_of_targets_count_are_one_batch(
    tmp_path: Path, accumulate: int, empty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a micro-batch, or a whole share, in which none counts."""
    monkeypatch.setattr(Masked, "empty", empty)
    rows = np.random.default_rng(0).integers(0, 64, 500).astype(np.uint16)
    tokens = Masked(train=rows, validation=rows[:100], encoding="stdlib")

    def one_step(parallel: Parallel, ranks: int, accumulate: int) -> tuple[float, float]:
        config = TrainConfig(**{**SMALL, "accumulate": accumulate, "dropout": 0.0})
        place = Place(device=torch.device("cpu"), num_ranks=ranks)
        one = Trainer(config, tmp_path, tokens, 64, Techniques(parallel=parallel), place)
        validation = one.validation_loss()
        return one.train_step()[0].item(), validation

    class Whole(Half):
        def share(self, tensor: Tensor) -> Tensor:
            return tensor

    whole, halves = Whole(0), [Half(0), Half(1)]
    expected = one_step(whole, 1, 1)
    found = [one_step(half, 2, accumulate) for half in halves]
    for i in range(2):
        assert sum(each[i] for each in found) / 2 == pytest.approx(expected[i], rel=1e-5)
    for gradient, *parts in zip(whole.gradients, *(half.gradients for half in halves), strict=True):
        torch.testing.assert_close(sum(parts) / 2, gradient, rtol=1e-5, atol=1e-7)
