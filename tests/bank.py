"""The bank of mistakes: wrong implementations, kept as edits to the reference."""

import tomllib
from dataclasses import dataclass, replace

from grader.judging.course import Lesson, lessons
from grader.judging.judge import Settings, grade_exercise
from grader.judging.submission import Submission, from_cells
from grader.judging.trial import Exercise
from grader.judging.verdicts import ExerciseReport
from grader.ranks.isolation import ROOT
from grader.ranks.launcher import Code, Launcher, Session, shared_launcher
from grader.ranks.limits import Limits
from nanogpt.implementation import Cell

BETWEEN_DEFINITIONS = "\n\n\n"


@dataclass(frozen=True)
class Mistake:
    """One entry of a `solutions/<slug>.mistakes.toml`."""

    lesson: Lesson
    name: str
    exercise: str
    why: str
    check: str
    says: str
    edits: tuple[tuple[str, str], ...]
    tag: str = ""
    breaks: tuple[str, ...] = ()
    """The sentences of the exercise's docstring, or of the lesson's rules, that it breaks."""
    base: str = ""
    """What the edits apply to, as a path in the repository; "" is the reference."""

    def submission(self) -> Submission:
        """The reference with the mistake in it, a definition a cell: most cells have been read before."""
        path = ROOT / self.base if self.base else self.lesson.solution
        source = path.read_text()
        for old, new in self.edits:
            if source.count(old) != 1:
                raise ValueError(
                    f"{self.name}: its old text stands {source.count(old)} times in {path.name}:\n{old}"
                )
            source = source.replace(old, new)
        parts = source.split(BETWEEN_DEFINITIONS)
        cells = tuple(Cell(f"cell {number}", part) for number, part in enumerate(parts, 1))
        return from_cells(path, cells, trusted=True)


def mistakes() -> list[Mistake]:
    """Every mistake of every lesson."""
    found = []
    for lesson in lessons():
        path = lesson.solution.with_suffix(".mistakes.toml")
        for entry in tomllib.loads(path.read_text())["mistake"] if path.exists() else []:
            pairs = entry.pop("edits", None) or [{"old": entry.pop("old"), "new": entry.pop("new")}]
            edits = tuple((pair["old"], pair["new"]) for pair in pairs)
            breaks = entry.pop("breaks", ())
            breaks = (breaks,) if isinstance(breaks, str) else tuple(breaks)
            found.append(Mistake(lesson=lesson, edits=edits, breaks=breaks, **entry))
    return found


class SharedCode(Code):
    """A mistake of ours: any ranks that have had another one will do."""

    @property
    def kin(self) -> Code:
        return Code(trusted=True)


class BankLauncher(Launcher):
    """Ranks that one mistake leaves to the next, and the next, for a while: starting them takes longest."""

    MOST_USES = 50
    LIMITS = Limits(idle=1.0)
    """Many mistakes hang. What a busy machine takes for hung is tried again with the usual limits."""

    def __init__(self) -> None:
        super().__init__()
        self._uses = 0

    def borrow(self, num_ranks: int, world_size: int, code: Code) -> Session:
        """A session: mostly of ranks that another mistake has left."""
        self._uses += 1
        if self._uses % self.MOST_USES == 0:  # groups that submissions have made stay as long as their ranks
            self.dismiss()
        return super().borrow(num_ranks, world_size, code)


def judge(
    submission: Submission,
    lesson: Lesson,
    exercise: Exercise,
    only_checks: tuple[str, ...] = (),
    ranks: tuple[int, ...] = (),
    launcher: Launcher | None = None,
) -> ExerciseReport:
    """Grade one exercise of a submission in this process's own ranks."""
    code, settings = submission.code(), Settings(seed=7, ranks=ranks)
    if isinstance(launcher, BankLauncher):
        code = SharedCode(**vars(code))
        settings = replace(settings, keep_ranks=True, tries_again=False, limits=launcher.LIMITS)
    return grade_exercise(
        exercise,
        lesson.name,
        code,
        launcher or shared_launcher(),
        settings,
        submission.locate,
        only_checks,
    )
