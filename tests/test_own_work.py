"""A later lesson goes on with the learner's own exercise where it passes, and says so."""

import shutil
from pathlib import Path

import nbformat
import pytest

from grader import own, own_work, run_ranks
from grader.judging.course import Lesson, find_exercise
from grader.judging.submission import from_cells
from grader.ranks.launcher import ROOT
from nanogpt.implementation import Cell


def ring(function, numbers: list[float]) -> list[float]:
    """On a rank: what an all-reduce of these numbers leaves."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(numbers) * (1 + dist.get_rank())
    function(tensor, dist.group.WORLD)
    return tensor.tolist()


def lesson_with(notebook: Path, folder: Path) -> Lesson:
    """Lesson 07 with another notebook in the learner's place."""
    found = find_exercise("ring_all_reduce")
    assert found is not None
    here = folder / found[0].name
    shutil.copytree(found[0].directory, here)
    shutil.copy(notebook, here / "collectives.ipynb")
    return Lesson(here)


@pytest.fixture
def in_the_place_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    exercise = find_exercise("ring_all_reduce")[1]

    def put(notebook: Path) -> None:
        lesson = lesson_with(notebook, tmp_path)
        monkeypatch.setattr(own_work, "find_exercise", lambda name: (lesson, exercise))

    return put


def test_what_passes_is_the_learners(in_the_place_of, capsys: pytest.CaptureFixture[str]) -> None:
    in_the_place_of(ROOT / "solutions" / "collectives.ipynb")
    mine = own("ring_all_reduce")
    assert "ring_all_reduce: yours, from collectives.ipynb" in capsys.readouterr().out
    assert mine.__module__.startswith("implementation")
    assert run_ranks(ring, mine, [1.0, 2.0, 3.0], ranks=2) == [[3.0, 6.0, 9.0]] * 2


def test_what_does_not_pass_is_the_courses(
    in_the_place_of, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = nbformat.read(ROOT / "solutions" / "collectives.ipynb", as_version=4)
    cell = next(cell for cell in notebook.cells if cell.metadata.get("exercise") == "ring_all_reduce")
    cell.source = cell.source.replace("tensor.copy_(", "tensor.add_(")
    nbformat.write(notebook, tmp_path / "wrong.ipynb")
    in_the_place_of(tmp_path / "wrong.ipynb")
    assert own("ring_all_reduce").__module__ == "solutions.collectives"
    assert (
        "the course's own, from its solutions (yours is wrong in collectives.ipynb)"
        in capsys.readouterr().out
    )


def test_what_is_not_written_yet_is_the_courses(capsys: pytest.CaptureFixture[str]) -> None:
    assert own("ring_all_reduce").__module__ == "solutions.collectives"
    assert "(yours is not attempted in collectives.ipynb)" in capsys.readouterr().out


def test_no_notebook_is_no_obstacle(
    in_the_place_of, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.ipynb").write_text("{")
    in_the_place_of(tmp_path / "cut.ipynb")
    assert own("ring_all_reduce").__module__ == "solutions.collectives"
    assert "the course's own" in capsys.readouterr().out


def test_a_name_that_is_none_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="the course has no exercise 'ring'"):
        own("ring")


def test_what_is_fetched_is_no_answer() -> None:
    cells = (Cell("cell 1", 'DataParallel = own("DataParallel")\nshard_batch = len'),)
    assert from_cells(Path("mine.ipynb"), cells).definitions.keys() == {"shard_batch"}
