"""A report's seed draws the same again: for every exercise by itself, whatever else is graded or fails."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from grader import check as check_cell
from grader.cli import grade
from grader.judging.judge import Settings, grade_exercise
from grader.judging.trial import Check, Exercise, Trial
from grader.ranks.launcher import Code, Launcher

WRONG = "def copy_to_group(x, group):\n    return x * x + 1\n"


def drawn(trial: Trial) -> list:
    """Something of every kind that a trial draws."""
    numbers = [trial.integer(0, 10**9), trial.choice(range(10**9)), trial.seed(), trial.rng.random()]
    tensors = [trial.normal(3), trial.tokens(10**6, 3), torch.rand(3)]
    return [*numbers, *(tensor.tolist() for tensor in tensors)]


def observe(trial: Trial) -> list:
    return drawn(trial)


def watch(names: list[str], seed: int | None, *, before: int = 0, exercise: str = "made_up") -> dict:
    """What each check draws, by check and layout; `before` of them draw more, and one fails on the way."""
    seen: dict[tuple[str, str], list] = {}

    def function(name: str, trial: Trial) -> None:
        seen[name, str(trial.layout)] = [*drawn(trial), trial.once(observe), *drawn(trial)]
        for _ in range(before):
            drawn(trial)
        trial.require(name != "fails", "wrong")

    checks = [
        Check(name, exercise, name, lambda trial, name=name: function(name, trial), list) for name in names
    ]
    made_up = Exercise(exercise, (2, 1), False, (), False, True, (), checks)
    report = grade_exercise(made_up, "99", Code(), Launcher(), Settings(seed=seed), lambda file, line: "")
    assert report.seed is not None and seed in (None, report.seed)
    seen["seed", ""] = [report.seed]
    return seen


def test_a_check_draws_the_same_whatever_other_checks_do() -> None:
    alone = watch(["b"], 5)
    among = watch(["fails", "a", "b"], 5, before=2)
    assert {key: value for key, value in among.items() if key[0] == "b"} == {
        key: value for key, value in alone.items() if key[0] == "b"
    }


def test_seeds_checks_layouts_and_exercises_draw_differently() -> None:
    first = watch(["a", "b"], 5)
    firsts = [value[0] for value in first.values()]
    firsts += [value[0] for value in watch(["a", "b"], 6).values()]
    firsts += [value[0] for key, value in watch(["a", "b"], 5, exercise="other").items() if key[0] != "seed"]
    assert len(set(firsts)) == len(firsts)
    assert first["a", "with 2 ranks"][7] == first["b", "with 2 ranks"][7]  # what they observe together


def test_without_a_seed_one_is_drawn_and_named() -> None:
    once, again = watch(["a"], None), watch(["a"], None)
    assert once != again
    assert watch(["a"], once["seed", ""][0]) == once


def test_drawing_leaves_the_random_numbers_of_who_asks_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    watch(["a"], 5)
    assert torch.equal(torch.rand(3), expected)


def failing_checks(path: Path, *arguments: str) -> tuple[int, list]:
    report = path.with_suffix(".json")
    result = CliRunner().invoke(grade, [str(path), *arguments, "--json", str(report), "--isolation", "off"])
    assert result.exit_code == 1, result.output
    data = json.loads(report.read_text())
    exercise = next(one for one in data["exercises"] if one["name"] == "copy_to_group")
    return data["seed"], [check for check in exercise["checks"] if check["verdict"] != "passed"]


def test_a_reports_seed_replays_a_failing_check(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Other exercises, other jobs, and in a notebook: the same numbers are wrong by the same amount."""
    path = tmp_path / "mine.py"
    path.write_text(WRONG)
    few = ["--only", "copy_to_group", "--ranks", "2"]
    seed, failed = failing_checks(path, *few)
    assert any("expected" in check["message"] for check in failed)
    assert failing_checks(path, *few)[1] != failed
    path.write_text(f"{WRONG}\ndef reduce_from_group(x, group):\n    return x\n")
    more = [*few, "--only", "reduce_from_group", "--jobs", "2", "--seed", str(seed)]
    assert failing_checks(path, *more) == (seed, failed)

    scope: dict = {"__name__": "__main__"}
    exec(compile(WRONG, "cell", "exec"), scope)
    check_cell(scope["copy_to_group"], seed=seed)
    output = " ".join(capsys.readouterr().out.split())
    assert failed[0]["message"] in output
    assert f"check(copy_to_group, seed={seed}) draws the same again" in output
