"""Right answers under many seeds: is one ever refused, and how near does one come to a tolerance?

    python -m tests.bench.seeds OUT.jsonl                      the solutions, 200 seeds
    python -m tests.bench.seeds OUT.jsonl --seeds 20 --alternatives
    python -m tests.bench.seeds OUT.jsonl --seeds 0            only the table of what OUT.jsonl holds

Each seed grades every exercise with one number of ranks, another one from seed to seed (`--every` for all of
them). Everything runs in this process, one exercise at a time. What is in the file is not run again, so this
can be stopped and gone on with. `grade PATH --only EXERCISE --ranks N --seed SEED` replays a line.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from grader.judging import trial as trials
from grader.judging.closeness import error_used
from grader.judging.course import lessons
from grader.judging.evidence import Evidence
from grader.judging.judge import Settings, Task, grade_task, tasks
from grader.judging.submission import read_submission
from grader.judging.verdicts import Verdict
from grader.ranks.isolation import ROOT
from grader.ranks.launcher import Launcher, shared_launcher
from grader.work import find_work

Line = dict[str, Any]


class Nearest:
    """While right answers are compared: what used most of its tolerance, and what was taken for a race."""

    def __init__(self) -> None:
        self.used, self.what, self.races = 0.0, "", 0
        self._compare, self._add = trials.compare, Evidence.add
        trials.compare = self._watch
        Evidence.add = lambda evidence, other: self._count(evidence, other)

    def _count(self, evidence: Evidence, other: Evidence) -> None:
        self.races += len(other.races)
        self._add(evidence, other)

    def _watch(
        self,
        what: str,
        actual: list[Any],
        expected: list[Tensor],
        alternatives: Any = None,
        rtol: float | None = None,
        factors: Any = None,
        terms: Any = None,
        plain: list[Tensor] | None = None,
        coarse: bool = False,
    ) -> Any:
        for rank, (a, e) in enumerate(zip(actual, expected, strict=True)):
            used = error_used(a, e, rtol, plain[rank] if plain else None) if isinstance(a, Tensor) else 0.0
            if self.used < used <= 1.0:
                self.used, self.what = used, what
        return self._compare(what, actual, expected, alternatives, rtol, factors, terms, plain, coarse)

    def take(self) -> Line:
        """What was found since the last time."""
        found = {"used": self.used, "what": self.what, "races": self.races}
        self.used, self.what, self.races = 0.0, "", 0
        return found


def right_answers(alternatives: bool, wanted: str) -> list[Task]:
    """The exercises of the solutions, or of the alternatives, whose lesson and name contain a word."""
    found = []
    if alternatives:
        for path in sorted((ROOT / "tests" / "alternatives").glob("*.py")):
            for submission, lesson in find_work(str(path), ()):
                names = tuple(name for name in lesson.exercises if name in submission.definitions)
                found += tasks(submission, lesson, names)
    else:
        for lesson in lessons():
            submission = read_submission(lesson.solution, module=f"solutions.{lesson.slug}", trusted=True)
            found += tasks(submission, lesson)
    return [task for task in found if wanted in f"{task.lesson.name} {task.exercise.name}"]


def to_run(
    answers: list[Task], seeds: range, every: bool, done: set[tuple]
) -> Iterator[tuple[Task, int, int]]:
    """Answers, seeds and numbers of ranks that are not in the file."""
    for seed in seeds:
        for number, task in enumerate(answers):
            sizes = task.exercise.world_sizes
            for ranks in sizes if every else [sizes[(seed + number) % len(sizes)]]:
                if (name_of(task), task.exercise.name, seed, ranks) not in done:
                    yield task, seed, ranks


def name_of(task: Task) -> str:
    """The submission, as the file names it."""
    return Path(task.submission.path).stem


def run(task: Task, seed: int, ranks: int, nearest: Nearest, launcher: Launcher) -> Line:
    """Grade one exercise with one seed."""
    nearest.take()
    report = grade_task(task, launcher, Settings(ranks=(ranks,), seed=seed))
    found = nearest.take()
    told = [f"{check.name}: {' '.join(check.said)}" for check in report.checks if not check.holds]
    return {
        "answer": name_of(task),
        "exercise": task.exercise.name,
        "seed": seed,
        "ranks": ranks,
        "verdict": str(report.verdict),
        "told": told,
        **found,
    }


def table(lines: list[Line]) -> str:
    """A line an exercise: runs, refusals, and the most of a tolerance that was used."""
    by_exercise: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        by_exercise.setdefault((line["answer"], line["exercise"]), []).append(line)
    rows = []
    for (answer, exercise), runs in by_exercise.items():
        worst = max(runs, key=lambda run: run["used"])
        refused = [run for run in runs if run["verdict"] != Verdict.PASSED]
        races = sum(run["races"] for run in runs)
        nearest = f"{worst['used']:.1%} of a tolerance (seed {worst['seed']}, {worst['ranks']} ranks"
        rows.append(
            f"{answer:34} {exercise:30} {len(runs):5} runs, {len(refused)} refused, {races} races, "
            f"at most {nearest}: {worst['what']})"
        )
        rows += [f"    seed {run['seed']}, {run['ranks']} ranks: {'; '.join(run['told'])}" for run in refused]
    refusals = sum(line["verdict"] != Verdict.PASSED for line in lines)
    seeds = len({line["seed"] for line in lines})
    return "\n".join([*rows, f"{len(lines)} gradings under {seeds} seeds: {refusals} refused"])


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--alternatives", action="store_true")
    parser.add_argument("--every", action="store_true", help="every number of ranks for each seed")
    parser.add_argument("--only", default="", help="a part of a lesson's or an exercise's name")
    options = parser.parse_args()
    lines = (
        [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    )
    done = {(line["answer"], line["exercise"], line["seed"], line["ranks"]) for line in lines}
    answers = right_answers(options.alternatives, options.only)
    nearest, launcher = Nearest(), shared_launcher()
    seeds = range(options.first, options.first + options.seeds)
    with options.out.open("a") as file:
        for task, seed, ranks in to_run(answers, seeds, options.every, done):
            lines.append(run(task, seed, ranks, nearest, launcher))
            file.write(json.dumps(lines[-1]) + "\n")
            file.flush()
            if lines[-1]["verdict"] != Verdict.PASSED:
                print(table(lines[-1:]), flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
