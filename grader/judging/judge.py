"""Grades: for every exercise asked for, every check in every layout of ranks, and what came of it."""

import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from grader.judging import group_and_world
from grader.judging.course import Lesson
from grader.judging.messages import told
from grader.judging.side_by_side import side_by_side
from grader.judging.stories import Locate
from grader.judging.submission import Submission, is_untouched
from grader.judging.trial import IN_A_LARGER_WORLD, Check, Exercise, Layout, Trial, derived_seed
from grader.judging.verdicts import CheckEnded, CheckReport, ExerciseReport, Verdict, combine, readable
from grader.ranks.faults import CannotGradeError, keep_traceback
from grader.ranks.launcher import Code, Launcher
from grader.ranks.limits import Limits

RANKS_SHARE_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The variable by which NCCL 2.30 and newer lets several ranks have one GPU, where it is 1."""
ENDINGS_UNTIL_SKIP = 2
"""After so many runs of one exercise that ended early, the rest of its checks is skipped."""


Ends = dict[tuple[str, Layout], CheckEnded | CheckReport | None]
"""Name of a check and layout → how it ended there: None where it holds."""

Tell = Callable[[CheckReport], None]
"""Hears of a check that has ended."""


@dataclass(frozen=True)
class Settings:
    """What a grading may be told."""

    ranks: tuple[int, ...] = ()
    """Only these world sizes; empty is all."""
    device: str = "cpu"
    limits: Limits = field(default_factory=Limits)
    seed: int | None = None
    """Draw the same inputs again; None draws new ones."""
    layouts_at_a_time: int = 1
    """In how many layouts of ranks to try a check at the same time."""
    keep_ranks: bool = False
    """More exercises of the same submission follow: leave them the ranks, until the launcher is closed."""
    tries_again: bool = True
    """Whether fresh ranks are asked, too, where a run before, or a busy machine, may be to blame."""


@dataclass(frozen=True)
class Task:
    """An exercise of a submission, to be graded."""

    submission: Submission
    lesson: Lesson
    exercise: Exercise


def tasks(submission: Submission, lesson: Lesson, only: Sequence[str] = ()) -> list[Task]:
    """What there is to grade in a submission of a lesson; optional exercises where it defines them."""
    wanted = []
    for exercise in lesson.exercises.values():
        asked_for = exercise.name in only
        if asked_for or (not only and (not exercise.optional or exercise.name in submission.definitions)):
            wanted.append(Task(submission, lesson, exercise))
    return wanted


def grade_task(task: Task, launcher: Launcher, settings: Settings) -> ExerciseReport:
    """Grade one exercise of a submission."""
    submission, lesson = task.submission, task.lesson
    return _without_a_run(submission, lesson, task.exercise) or grade_exercise(
        task.exercise,
        lesson.name,
        submission.code(lesson.demonstrations, lesson.lent),
        launcher,
        settings,
        submission.locate,
    )


def grade_submission(
    submission: Submission, lesson: Lesson, launcher: Launcher, settings: Settings, only: Sequence[str] = ()
) -> list[ExerciseReport]:
    """Grade a submission's exercises of one lesson, one after the other."""
    return [grade_task(task, launcher, settings) for task in tasks(submission, lesson, only)]


def _without_a_run(submission: Submission, lesson: Lesson, exercise: Exercise) -> ExerciseReport | None:
    """The report on an exercise that needs no ranks: it is not there, untouched, or the reference."""
    if submission.fault:
        return ExerciseReport(
            lesson.name, exercise.name, Verdict.UNREADABLE, message=readable(submission.fault)
        )
    node = submission.definitions.get(exercise.name)
    if node is None and exercise.name in submission.borrowed and not submission.trusted:
        message = "it is imported from the course's own solutions"
        return ExerciseReport(lesson.name, exercise.name, Verdict.REFUSED, message=message)
    if node is None and not submission.open_ended:
        broken = [cell.error for cell in submission.cells if cell.error and exercise.name in cell.source]
        verdict = Verdict.CRASHED if broken else Verdict.NOT_ATTEMPTED
        message = broken[0] if broken else "not defined"
        return ExerciseReport(lesson.name, exercise.name, verdict, message=message)
    if node is not None and is_untouched(node, lesson.given.get(exercise.name)):
        return ExerciseReport(lesson.name, exercise.name, Verdict.NOT_ATTEMPTED, message="still as given")
    return None


def grade_exercise(
    exercise: Exercise,
    lesson: str,
    code: Code,
    launcher: Launcher,
    settings: Settings,
    locate: Locate,
    only_checks: Iterable[str] = (),
    tell: Tell = lambda report: None,
) -> ExerciseReport:
    """Run an exercise's checks on code that defines it; `tell` hears of each as it ends, in any order."""
    began = time.monotonic()
    layouts, notes = layouts_of(exercise, settings)
    seed = settings.seed if settings.seed is not None else secrets.randbits(31)
    trials = [
        Trial(
            layout,
            code,
            launcher,
            derived_seed(seed, exercise.name, layout),
            locate,
            settings.limits,
            settings.device,
            exercise.distributed,
            tries_again=settings.tries_again,
        )
        for layout in layouts
    ]
    wanted = set(only_checks)
    reports: list[CheckReport] = []
    told: set[str] = set()

    def tell_once(report: CheckReport) -> None:
        if report.name not in told:
            told.add(report.name)
            tell(report)

    with _one_thread(), ExitStack() as kept:
        if not settings.keep_ranks:
            kept.callback(launcher.dismiss)
        for trial in trials:
            kept.callback(trial.release_ranks)
        checks = [check for check in exercise.checks if not wanted or check.name in wanted]
        known = _ends_until_one_fails(checks, trials, launcher, settings.layouts_at_a_time, tell_once)
        for check in checks:
            ended = sum(r.verdict not in (Verdict.PASSED, Verdict.WRONG, Verdict.SKIPPED) for r in reports)
            good = all(report.holds or report.optional for report in reports)
            if ended >= ENDINGS_UNTIL_SKIP or (check.optional and not good):
                report = check.report(Verdict.SKIPPED, message="not reached")
            else:
                report = _run_check(check, trials, known, ask_more=good)
            reports.append(report)
            tell_once(report)
    verdict = combine(reports)
    if verdict == Verdict.PASSED:
        notes += _for_gpus(trials, locate)
    seconds = time.monotonic() - began
    return ExerciseReport(
        lesson, exercise.name, verdict, tuple(reports), seconds=seconds, seed=seed, notes=notes
    )


def _for_gpus(trials: Sequence[Trial], locate: Locate) -> tuple[str, ...]:
    """What gloo has taken, and NCCL would refuse."""
    strewn = next((trial.strewn for trial in trials if trial.strewn is not None), None)
    if strewn is None:
        return ()
    call = readable(told(strewn, locate))
    return (
        f"on GPUs NCCL will refuse the {call}: its tensor does not lie in order in one piece of memory. "
        "x.contiguous() does",
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """The judge computes little, and the cores are the ranks'."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def layouts_of(exercise: Exercise, settings: Settings) -> tuple[list[Layout], tuple[str, ...]]:
    """The layouts to try an exercise in, and what there is to say of those that are left out."""
    layouts = [x for x in exercise.layouts() if not settings.ranks or x.num_ranks in settings.ranks]
    if settings.device != "cuda":
        return layouts, ()
    count = torch.cuda.device_count()
    if count == 0:
        raise CannotGradeError("this machine has no CUDA GPU that torch can use: leave the device at cpu")
    if os.environ.get(RANKS_SHARE_GPUS) == "1":
        return layouts, ()
    on_four = replace(IN_A_LARGER_WORLD, world_size=4)  # the last rank of four is in the group
    layouts = [on_four if count == 4 and layout == IN_A_LARGER_WORLD else layout for layout in layouts]
    possible = [layout for layout in layouts if layout.world_size <= count]
    if len(possible) == len(layouts):
        return layouts, ()
    left_out = ", ".join(map(str, sorted({x.world_size for x in layouts if x not in possible})))
    return possible, (
        f"NCCL needs a GPU a rank, and this machine has {count}: left out world size {left_out}",
    )


def _ends_until_one_fails(
    checks: Sequence[Check], trials: Sequence[Trial], launcher: Launcher, at_a_time: int, tell: Tell
) -> Ends:
    """Try the checks in several layouts at a time; once something fails, one after the other is quicker."""
    ends: Ends = {}

    def go_through(trial: Trial, _: Launcher) -> None:
        for check in checks:
            fitting = [each.layout for each in _fitting(check, trials)]
            if trial.layout in fitting and not any(ends.values()):
                ends[check.name, trial.layout] = _try(check, trial)
                places = [(check.name, layout) for layout in fitting]
                if all(place in ends and ends[place] is None for place in places):
                    tell(check.report(Verdict.PASSED))

    if at_a_time > 1:
        for _ in side_by_side(go_through, trials, at_a_time, launcher):
            continue
    return ends


def _fitting(check: Check, trials: Sequence[Trial]) -> list[Trial]:
    layouts = check.layouts([trial.layout for trial in trials])
    return [trial for trial in trials if trial.layout in layouts]


def _run_check(check: Check, trials: Sequence[Trial], known: Ends, ask_more: bool) -> CheckReport:
    report = check.report(Verdict.SKIPPED, message="no number of ranks fits")
    fitting = _fitting(check, trials)
    for number, trial in enumerate(fitting):
        place = check.name, trial.layout
        end = known[place] if place in known else _try(check, trial)
        if isinstance(end, CheckReport):
            return end
        if end is not None:
            if ask_more and not end.sure:
                trial, end = _surer(check, trial, end, fitting[number + 1 :])
            only_outside = (
                trial.layout.world_size > trial.num_ranks
                and report.verdict == Verdict.PASSED
                and end.verdict in (Verdict.WRONG, Verdict.CRASHED, Verdict.HUNG)
                and _try_once(check, trial.as_the_world) is None
            )
            cause, help = end.cause, end.help
            if only_outside:
                cause, help = group_and_world.narrowed(cause, help)
            return replace(
                report,
                verdict=end.verdict,
                where=trial.where,
                message=end.message,
                cause=cause,
                help=help,
                details=end.details,
                asked=end.asked,
            )
        report = check.report(Verdict.PASSED)
    return report


def _try(check: Check, trial: Trial) -> CheckEnded | CheckReport | None:
    """How a check ends in one layout: None where it passes, a report where it fails by itself.

    What fails on ranks that had worked before counts only if it fails on fresh ones too. So does what was
    seen of fresh ones beside their numbers: a starved thread holds bytes for longer, and answers late.
    """
    end = _try_once(check, trial)
    doubtful = trial.reused or (isinstance(end, CheckEnded) and end.observed)
    return _try_once(check, trial.apart) if end is not None and doubtful and trial.tries_again else end


def _try_once(check: Check, trial: Trial) -> CheckEnded | CheckReport | None:
    trial.begin_check()
    try:
        with trial.drawing(check.name):
            check.function(trial)
    except CheckEnded as end:
        return end
    except CannotGradeError:
        raise
    except Exception as error:
        return _unexpected(check, trial, error)
    return None


def _surer(check: Check, trial: Trial, end: CheckEnded, others: Sequence[Trial]) -> tuple[Trial, CheckEnded]:
    """The same failure on more ranks, unless its cause is confirmed there: on two, "twice" is "n times".

    What explains the numbers of two ranks, and not those of more, is no cause.
    """
    for other in others:
        if other.num_ranks > trial.num_ranks and other.num_ranks == other.layout.world_size:
            found = _try(check, other)
            if not isinstance(found, CheckEnded) or found.verdict != end.verdict or found.cause == end.cause:
                break
            return other, found
    return trial, end


def _unexpected(check: Check, trial: Trial, error: Exception) -> CheckReport:
    """A check that fails by itself: our fault, kept apart from the learner's."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    file = keep_traceback(error)
    return check.report(
        Verdict.GRADER_ERROR,
        where=str(trial.layout),
        message=f"the check itself failed ({place}): {type(error).__name__}: {readable(str(error))}",
        help="This is a fault of the grader, or the result had an unexpected form: please report it"
        + (f"; its traceback is in {file}" if file else "")
        + ".",
    )
