"""Ranks that stay for several runs of one submission: nothing of a run is mistaken for another's."""

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from grader.checks import Trial
from grader.judging.judge import Settings, grade_exercise
from grader.judging.trial import Check, Exercise
from grader.judging.verdicts import Verdict
from grader.ranks.launcher import Code, Launcher, Limits, Session

LIMITS = Limits(timeout=20.0)
COUNTING = Code(cells=(("cell 1", "import os\nnumber = []\ndef count(): number.append(1)"),))


def run(session: Session, code: Code = COUNTING, action: str = "count") -> Any:
    """Two ranks do something of the submission; how it ended, and what each rank tells."""

    def probe(rank, action):  # inside, so that it travels by value
        import os

        print("said", action)
        getattr(rank.submission, action)()
        return os.getpid(), rank.submission.number

    return session.run(probe, code, [[action], [action]], limits=LIMITS)


def test_the_next_run_has_the_same_processes_and_the_submission_anew(launcher: Launcher) -> None:
    with Session(launcher) as session:
        first, second = run(session), run(session)
    assert (first.fresh, second.fresh) == (True, False)
    assert [rank.result for rank in first.ranks] == [rank.result for rank in second.ranks]
    assert [rank.result[1] for rank in second.ranks] == [[1], [1]]
    assert [rank.output for rank in second.ranks] == ["said count\n"] * 2


def test_another_submission_and_what_follows_trouble_get_fresh_ranks(launcher: Launcher) -> None:
    source = COUNTING.cells[0][1] + "\ndef fail(): raise ValueError('mine')\ndef leave(): os._exit(0)"
    other = Code(cells=(("cell 1", source),))
    with Session(launcher) as session:
        assert run(session).fresh
        assert run(session, other).fresh
        for action in ("fail", "leave"):
            report = run(session, other, action)
            assert (report.ended, report.fresh) == ("trouble", action == "leave")
        report = run(session, other)
        assert (report.ended, report.fresh) == ("complete", True)


def test_the_courses_own_modules_use_the_same_ranks_and_a_submission_does_not(launcher: Launcher) -> None:
    def probe(rank):
        return [name for name in ("ring_all_reduce", "Flat") if name in vars(rank.submission)]

    with Session(launcher) as session:
        found = [
            session.run(probe, code, [[], []], limits=LIMITS)
            for code in (
                Code(module="solutions.collectives", trusted=True),
                Code(module="solutions.fsdp", trusted=True),
                Code(module="solutions.fsdp"),
            )
        ]
    assert [(report.fresh, report.ranks[0].result) for report in found[:2]] == [
        (True, ["ring_all_reduce"]),
        (False, ["Flat"]),
    ]
    assert found[2].fresh


def test_between_two_runs_nothing_moves_and_afterwards_nothing_is_left(
    launcher: Launcher, tmp_path: Path
) -> None:
    beat = tmp_path / "beat"
    source = f"""
import threading, time
number = 0
def count():
    def go_on():
        while True:
            open({str(beat)!r}, "a").write(".")
            time.sleep(0.01)
    threading.Thread(target=go_on, daemon=True).start()
    time.sleep(0.1)
"""
    with Session(launcher) as session:
        pids = [rank.result[0] for rank in run(session, Code(cells=(("cell 1", source),))).ranks]
        beats = beat.stat().st_size
        time.sleep(0.3)
        assert beat.stat().st_size == beats > 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_that_was_killed_while_it_rested_is_replaced_or_named(launcher: Launcher) -> None:
    with Session(launcher) as session:
        pids = [rank.result[0] for rank in run(session).ranks]
        psutil.Process(pids[0]).kill()
        report = run(session)
        assert report.ended == "trouble" and not report.fresh
        assert run(session).ended == "complete"


def test_a_launcher_lends_ranks_to_the_next_exercise_until_it_dismisses_them(launcher: Launcher) -> None:
    session = launcher.borrow(2, 2, COUNTING)
    pids = [rank.result[0] for rank in run(session).ranks]
    launcher.give_back(2, 2, session)
    again = launcher.borrow(2, 2, COUNTING)
    assert again is session and not run(again).fresh
    launcher.give_back(2, 2, again)
    launcher.dismiss()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(("wrong_when", "verdict"), [("seen > 1", Verdict.PASSED), ("True", Verdict.WRONG)])
def test_what_is_wrong_on_ranks_that_had_worked_must_be_wrong_on_fresh_ones(
    launcher: Launcher, wrong_when: str, verdict: Verdict
) -> None:
    source = f"import sys\nseen = sys.__dict__['seen'] = sys.__dict__.get('seen', 0) + 1\nbad = {wrong_when}"

    def probe(rank):
        return rank.submission.bad

    def nothing(trial: Trial) -> None:
        trial.run(lambda rank: None)

    def is_good(trial: Trial) -> None:
        trial.require(not any(trial.run(probe)), "bad")

    checks = [Check(f.__name__, "made_up", "", f, list) for f in (nothing, is_good)]
    exercise = Exercise("made_up", (2,), False, (), False, True, (), checks)
    code = Code(cells=(("cell 1", source),))
    report = grade_exercise(exercise, "00", code, launcher, Settings(limits=LIMITS), lambda file, line: "")
    assert [check.verdict for check in report.checks] == [Verdict.PASSED, verdict]


def test_the_second_try_draws_what_the_first_has_not_seen(launcher: Launcher) -> None:
    """Who fails at first may have written down, in a folder that both see, what the others' inputs were."""
    drawn = []

    def nothing(trial: Trial) -> None:
        trial.run(lambda rank: None)

    def fails(trial: Trial) -> None:
        drawn.append((trial.normal(4).tolist(), trial.seed()))
        trial.run(lambda rank: None)
        trial.wrong("bad")

    checks = [Check(f.__name__, "made_up", "", f, list) for f in (nothing, fails)]
    exercise = Exercise("made_up", (2,), False, (), False, True, (), checks)
    settings = Settings(seed=3, limits=LIMITS)
    for _ in range(2):
        grade_exercise(exercise, "00", Code(), launcher, settings, lambda file, line: "")
    first, second, *again = drawn
    assert first[0] != second[0] and first[1] != second[1]
    assert again == [first, second]


@pytest.mark.parametrize(
    ("observed", "tries_again", "verdict"),
    [(True, True, Verdict.PASSED), (False, True, Verdict.WRONG), (True, False, Verdict.WRONG)],
)
def test_what_was_seen_of_fresh_ranks_is_looked_at_twice_and_their_numbers_once(
    launcher: Launcher, observed: bool, tries_again: bool, verdict: Verdict
) -> None:
    looks = []

    def on_time_the_second_time(trial: Trial) -> None:
        trial.run(lambda rank: None)
        looks.append(trial.reused)
        if observed:
            trial.require(len(looks) == 2, "it answers late")
        trial.equal("the number of looks", len(looks), 2)

    checks = [Check("punctual", "made_up", "", on_time_the_second_time, list)]
    exercise = Exercise("made_up", (2,), False, (), False, True, (), checks)
    settings = Settings(limits=LIMITS, tries_again=tries_again)
    report = grade_exercise(exercise, "00", COUNTING, launcher, settings, lambda file, line: "")
    assert (report.verdict, looks) == (verdict, [False] * (1 + (observed and tries_again)))
