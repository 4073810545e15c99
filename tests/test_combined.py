"""Techniques on the axes of a mesh: what `--parallel` may say, and what does not go together."""

from pathlib import Path

import nbformat
import pytest

from nanogpt.combined import Combined, on_axes, read_sizes
from nanogpt.config import TrainConfig
from nanogpt.model import GPT, GPTConfig
from nanogpt.parallel import Parallel
from nanogpt.technique import find_technique
from nanogpt.train import implementations

CONFIG = GPTConfig(vocab_size=64, block_size=8, n_layer=1, n_head=4, n_embd=8, dropout=0.0, bias=False)


class Ranks:
    """As much of a process group as is asked for here."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._num_ranks


def adapters(names: list[str]) -> dict[str, tuple]:
    return {name: find_technique("PARALLEL", name) for name in names}


def combined(**sizes: int) -> Combined:
    return Combined(
        {name: way(solution, Ranks(sizes[name])) for name, (way, solution) in adapters([*sizes]).items()}
    )


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "sizes"),
    [
        ("data_parallel", 3, {"data_parallel": 3}),
        ("zero3=4", 4, {"zero3": 4}),
        ("data_parallel=2+tensor_parallel=2", 4, {"data_parallel": 2, "tensor_parallel": 2}),
        ("tensor_parallel + zero3=2", 6, {"tensor_parallel": 3, "zero3": 2}),
        (
            "zero3=2+context_parallel+tensor_parallel=2",
            8,
            {"zero3": 2, "context_parallel": 2, "tensor_parallel": 2},
        ),
    ],
)
def test_sizes(parallel: str, num_ranks: int, sizes: dict[str, int]) -> None:
    assert read_sizes(parallel, num_ranks) == sizes


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ("data_parallel=2", "needs 2 ranks, and torchrun started 4: --nproc-per-node 2"),
        ("data_parallel=2+tensor_parallel=4", "needs 8 ranks"),
        ("data_parallel=3+tensor_parallel", "a multiple of 3 ranks, and torchrun started 4"),
        ("data_parallel+tensor_parallel", "give data_parallel or tensor_parallel its number of ranks"),
        ("data_parallel=2+data_parallel=2", "data_parallel is there twice"),
        ("data_parallel=two", "such as tensor_parallel=2"),
        ("data_parallel=0+zero3", "such as tensor_parallel=2"),
        ("data_parallel=2+", "such as tensor_parallel=2"),
    ],
)
def test_what_can_not_be_the_sizes_of_four_ranks(parallel: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"--parallel {parallel}".replace("+", r"\+")) as error:
        read_sizes(parallel, 4)
    assert says in str(error.value)


def test_one_technique_an_axis() -> None:
    with pytest.raises(ValueError, match="tensor_parallel and sequence_parallel both cut the tensor axis"):
        on_axes(
            {"tensor_parallel": 2, "sequence_parallel": 2},
            adapters(["tensor_parallel", "sequence_parallel"]),
            "cpu",
        )


def test_pytorchs_own_is_one_technique_at_a_time() -> None:
    ways = {name: (way, None) for name, (way, _) in adapters(["zero3", "tensor_parallel"]).items()}
    with pytest.raises(ValueError, match="one technique at a time"):
        on_axes({"zero3": 2, "tensor_parallel": 2}, ways, "cpu")


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_pieces_of_gradients_are_not_clipped_where_layers_are_cut(name: str) -> None:
    both = combined(**{name: 2, "tensor_parallel": 2})
    with pytest.raises(ValueError, match="zero3 and data_parallel can"):
        both.optimizer(GPT(CONFIG), TrainConfig(n_embd=8))


def test_each_is_checked_with_its_own_ranks_and_with_the_tokens_and_heads_that_are_left() -> None:
    combined(data_parallel=3, tensor_parallel=4).check(CONFIG, 12)
    with pytest.raises(ValueError, match="tensor_parallel=3: n_head=4 is not divisible by 3"):
        combined(data_parallel=2, tensor_parallel=3).check(CONFIG, 6)
    with pytest.raises(ValueError, match=r"sequence_parallel=4: block_size=2 .* context axis has 2"):
        combined(context_parallel=4, sequence_parallel=4).check(CONFIG, 16)
    with pytest.raises(ValueError, match=r"ulysses=4: n_head=2 .* tensor axis has 2 of 4 heads"):
        combined(ulysses=4, tensor_parallel=2).check(CONFIG, 8)


def test_a_batch_is_cut_into_as_many_shares_as_there_are_replicas() -> None:
    assert combined(data_parallel=2, tensor_parallel=4).num_shares(8) == 2
    assert combined(context_parallel=2, tensor_parallel=2).num_shares(4) == 1
    assert Parallel().num_shares(1) == 1


def test_each_technique_comes_from_the_learners_notebook_of_its_own_lesson(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here that of lesson 08 has half of what it takes, and that of lesson 12 is not there."""
    lesson = tmp_path / "lessons" / "08_data_parallel"
    lesson.mkdir(parents=True)
    split = "def shard_batch(tensor, group):\n    return 'mine'"
    wrapper = (
        "class DataParallel:\n    def forward(self):\n        raise NotImplementedError('about 30 lines')"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"{split}\n\n{wrapper}")])
    nbformat.write(notebook, lesson / "data_parallel.ipynb")
    monkeypatch.chdir(tmp_path)
    found = find_technique("PARALLEL", "data_parallel")
    (theirs,) = implementations("lessons", [found], tell=True).values()
    assert theirs.shard_batch(None, None) == "mine"
    assert theirs.DataParallel is found[1].DataParallel
    assert "yours: shard_batch\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"there is no lessons/\*_context_parallel/context_parallel.ipynb"):
        implementations("lessons", [found, find_technique("PARALLEL", "context_parallel")], tell=True)
