"""Techniques found by name, and training on real ranks under torchrun."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

from nanogpt import loopback
from nanogpt.metrics import read_metrics
from nanogpt.parallel import Parallel
from nanogpt.technique import find_technique
from nanogpt.train import main
from tests.test_nanogpt_training import OPTIONS

TECHNIQUES = """
from nanogpt.parallel import Parallel

class Split(Parallel):
    exercises = ("{exercise}",)

    def share(self, tensor):
        return tensor.tensor_split(self.group.size())[self.group.rank()]

PARALLEL = {{"{name}": Split}}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of techniques with one module that cannot be imported."""
    folder = tmp_path / "techniques_to_find"
    folder.mkdir()
    (folder / "splitting.py").write_text(TECHNIQUES.format(name="split", exercise="Split"))
    (folder / "other.py").write_text(TECHNIQUES.format(name="other", exercise=""))
    (folder / "zz_broken.py").write_text("import does_not_exist")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("techniques_to_find")]:
        monkeypatch.delitem(sys.modules, name)
    return "techniques_to_find"


def test_found_by_name_and_no_more_imported_than_needed(package: str) -> None:
    adapter, module = find_technique("PARALLEL", "other", package)
    assert issubclass(adapter, Parallel)
    assert module.__name__ == "techniques_to_find.other"
    assert "techniques_to_find.splitting" not in sys.modules
    assert find_technique("PARALLEL", "split", package)[0].exercises == ("Split",)


def test_an_adapter_in_a_file_of_its_own_belongs_to_the_technique_beside_it(
    package: str, tmp_path: Path
) -> None:
    (tmp_path / package / "beside.py").write_text("")
    (tmp_path / package / "beside_training.py").write_text(TECHNIQUES.format(name="apart", exercise=""))
    assert find_technique("PARALLEL", "apart", package)[1].__name__ == f"{package}.beside"


def test_unknown_name_lists_the_known_and_the_broken(package: str) -> None:
    with pytest.raises(ValueError, match=r"known are: other, split; .*zz_broken \(ModuleNotFoundError"):
        find_technique("PARALLEL", "nope", package)
    with pytest.raises(ValueError, match="which Python does not find"):
        find_technique("PARALLEL", "nope", "no_such_package_anywhere")


def test_shares_are_counted_by_asking(package: str) -> None:
    class Group:
        def rank(self) -> int:
            return 1

        def size(self) -> int:
            return 4

    assert find_technique("PARALLEL", "split", package)[0](None, Group()).num_shares(4) == 4
    assert Parallel().num_shares(4) == 1


def torchrun(*options: str, ranks: int = 2, cache: Path) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    return subprocess.run(
        [*start, "-m", "nanogpt.train", *OPTIONS, "--cache", str(cache), *options],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def losses(run: Path) -> list[float]:
    return [
        record.get("loss", record.get("validation_loss")) for record in read_metrics(run / "metrics.jsonl")
    ]


def learners_notebook(path: Path, body: str) -> Path:
    """A notebook as a learner has it, with a gradient average of their own, or a stub."""
    cells = [
        "import torch, torch.distributed as dist\nfrom torch import nn\nfrom grader import check, run_ranks",
        "def shard_batch(tensor, group):\n    return tensor.tensor_split(group.size())[group.rank()]",
        "check(shard_batch)",
        f"""
class DataParallel(nn.Module):
    def __init__(self, module, group):
        super().__init__()
        self.module, self.group = module, group

    def forward(self, *args):
        return self.module(*args)

    def no_sync(self):
        import contextlib
        return contextlib.nullcontext()

    def finish_gradient_synchronization(self):
        {body}
""",
        "run_ranks(no_such_name)",
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)
    return path


AVERAGE = """for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= self.group.size()"""


def test_two_ranks_with_a_learners_notebook_learn_what_one_rank_learns(tmp_path: Path, cache: Path) -> None:
    assert main([*OPTIONS, "--cache", str(cache), "--out-dir", str(tmp_path / "one")]) == 0
    path = learners_notebook(tmp_path / "mine.ipynb", AVERAGE)
    done = torchrun(
        "--parallel", "data_parallel", "--implementation", str(path),
        "--accumulate", "2", "--out-dir", str(tmp_path / "two"), cache=cache,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "yours: DataParallel, shard_batch"
    torch.testing.assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-4, atol=0)
    assert done.stdout.count("parameters") == 1  # rank 0 alone prints
    assert len(list((tmp_path / "two").glob("checkpoints/step-00000008/rank-*.pt"))) == 2


def test_an_exercise_that_is_not_written_comes_from_the_course(tmp_path: Path, cache: Path) -> None:
    path = learners_notebook(tmp_path / "mine.ipynb", 'raise NotImplementedError("about 3 lines")')
    done = torchrun("--parallel", "data_parallel", "--implementation", str(path), cache=cache)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [
        "yours: shard_batch",
        f"the course's own, as {path} has none yet: DataParallel",
    ]


def test_unfinished_exercise_is_one_sentence_from_one_rank(tmp_path: Path, cache: Path) -> None:
    body = f"{AVERAGE}\n        raise NotImplementedError('one line')"
    path = learners_notebook(tmp_path / "mine.ipynb", body)
    done = torchrun("--parallel", "data_parallel", "--implementation", str(path), cache=cache)
    said = [line for line in done.stderr.splitlines() if "is not finished" in line]
    assert len(said) == 1
    assert said[0].startswith(
        "error: the exercise finish_gradient_synchronization in mine.ipynb, cell 4, line"
    )
    assert said[0].endswith("is not finished (one line)")
    assert "exitcode  : 2" in done.stderr


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that `torchrun --nproc-per-node 1` gives, without its seconds."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


SCALES_IN_THE_END = """
def accumulate_gradients(model, inputs, targets, num_microbatches):
    for rows, goals in zip(inputs.tensor_split(num_microbatches), targets.tensor_split(num_microbatches)):
        (model(rows, goals)[1] * goals.numel()).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= targets.numel()
"""
SUMS_BY_HAND = """
import torch

def accumulate_gradients(model, inputs, targets, num_microbatches):
    weights = list(model.parameters())
    for rows, goals in zip(inputs.tensor_split(num_microbatches), targets.tensor_split(num_microbatches)):
        loss = model(rows, goals)[1] * goals.numel() / targets.numel()
        for p, gradient in zip(weights, torch.autograd.grad(loss, weights)):
            p.grad = gradient if p.grad is None else p.grad + gradient
"""


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--parallel", "nope"], "no such technique in the package 'solutions'; known are: "),
        (["--parallel", "data_parallel", "--implementation", "missing.ipynb"], "there is no such file"),
        (["--parallel", "data_parallel", "--implementation", "empty.py"], "does not define DataParallel"),
        (
            ["--parallel", "data_parallel", "--implementation", "failed.ipynb"],
            "cell 1, line 1 failed with NameError",
        ),
        (["--parallel", "data_parallel", "--implementation", "broken.py"], "line 1"),
        (
            ["--parallel", "zero3", "--accumulate", "2", "--implementation", "scales.py"],
            "scale each micro-batch's loss before its backward()",
        ),
        (
            ["--parallel", "data_parallel", "--accumulate", "2", "--implementation", "by_hand.py"],
            "let backward() alone change .grad",
        ),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(
    options: list[str], says: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("empty.py").touch()
    Path("broken.py").write_text("def f(:")
    Path("scales.py").write_text(SCALES_IN_THE_END)
    Path("by_hand.py").write_text(SUMS_BY_HAND)
    failed = nbformat.v4.new_code_cell("class DataParallel(undefined):\n    pass")
    nbformat.write(nbformat.v4.new_notebook(cells=[failed]), "failed.ipynb")
    try:
        assert main([*OPTIONS, *options]) == 2
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert says in told


def on_ranks(*arguments: str, inside: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "nanogpt.ranks", "--nproc-per-node", "2", *arguments]
    return subprocess.run([*(inside or []), *start], capture_output=True, text=True, timeout=120, check=False)


def test_a_mistake_is_the_last_thing_that_ranks_say() -> None:
    done = on_ranks("-m", "nanogpt.train", "--parallel", "data_paralel")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --parallel data_paralel: no such technique")
    assert "torch" not in done.stderr


def test_without_loopback_ranks_are_not_started(without_network: list[str]) -> None:
    done = on_ranks("-m", "nanogpt.train", "--parallel", "data_parallel", inside=without_network)
    assert done.returncode == 2
    assert done.stderr == f"error: {loopback.DOWN}\n"


def test_a_rank_that_was_ended_from_outside_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, time\n"
        "os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else time.sleep(60)\n"
    )
    done = on_ranks(str(program))
    assert done.returncode == 1
    assert done.stderr == "error: rank 1 was ended from outside, by SIGKILL\n"
