"""What a lesson's checks are written with: `exercise`, `check` and the `Trial` that a check is given.

A check is a function whose docstring is the sentence that the learner reads. It runs on the judge's side: it
draws inputs, has a probe run on ranks, computes what is expected, and compares. The probe is a function of
the same file that runs on every rank; only it touches the learner's code.
"""

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from grader.judging.evidence import Evidence
from grader.judging.explain import Alternatives, Terms, compare
from grader.judging.messages import seen_from
from grader.judging.stories import Locate, ending
from grader.judging.verdicts import CheckEnded, CheckReport, Verdict
from grader.ranks.launcher import Code, Launcher, Session
from grader.ranks.limits import Limits
from grader.ranks.recording import Event

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """How many ranks, and whether they are some of the world's alone."""

    num_ranks: int
    world_size: int

    def __str__(self) -> str:
        if self.world_size == 1:
            return "with 1 rank"
        if self.world_size > self.num_ranks:
            members = " and ".join(map(str, self.group))
            return f"with a group of {self.num_ranks} in a world of {self.world_size} (world ranks {members})"
        return f"with {self.num_ranks} ranks"

    @property
    def group(self) -> list[int]:
        """World ranks. Of a larger world the odd ones: no two are neighbours, and rank 0 is not in it."""
        return list(
            range(self.world_size) if self.world_size == self.num_ranks else range(1, self.world_size, 2)
        )


IN_A_LARGER_WORLD = Layout(2, 5)
"""Its group has neither the world's first rank nor its last."""


@dataclass
class Exercise:
    """One exercise and its checks."""

    name: str
    world_sizes: tuple[int, ...]
    subgroup: bool
    hints: tuple[str, ...]
    optional: bool
    distributed: bool
    uses: tuple[str, ...]
    checks: list["Check"] = field(default_factory=list)

    def layouts(self) -> list[Layout]:
        """The layouts to try, in order."""
        layouts = [Layout(n, n) for n in self.world_sizes]
        return [*layouts, IN_A_LARGER_WORLD] if self.subgroup else layouts


@dataclass(frozen=True)
class Check:
    """A named property of an exercise."""

    name: str
    exercise: str
    sentence: str
    function: Callable[["Trial"], None]
    layouts: Callable[[Sequence[Layout]], list[Layout]]
    """Of the layouts that there are, those to try it in."""
    optional: bool = False

    def report(self, verdict: Verdict, **more: Any) -> CheckReport:
        """How it came out."""
        return CheckReport(self.name, self.sentence, verdict, optional=self.optional, **more)


REGISTRY: dict[str, dict[str, Exercise]] = {}
"""Module name of a lesson's checks → its exercises, in lesson order."""


def exercise(
    name: str,
    *,
    world_sizes: Sequence[int] = (2, 1, 4),
    subgroup: bool = False,
    hints: Sequence[str] = (),
    optional: bool = False,
    distributed: bool = True,
    uses: Sequence[str] = (),
) -> None:
    """Declare an exercise of this lesson.

    Args:
        name: the learner's class or function; unique in the course.
        world_sizes: the numbers of ranks to check with, in this order.
        subgroup: also with two ranks of five, world ranks 1 and 3.
        hints: from a nudge to nearly the answer.
        optional: graded only where the submission defines it.
        distributed: whether its ranks need a process group.
        uses: other exercises of the same submission that its checks need.
    """
    lesson = REGISTRY.setdefault(_lesson_of(sys._getframe(1).f_globals["__name__"]), {})
    if name in lesson:
        raise ValueError(f"exercise {name} is declared twice")
    lesson[name] = Exercise(
        name, tuple(world_sizes), subgroup, tuple(hints), optional, distributed, tuple(uses)
    )


def check(
    name: str,
    *,
    world_sizes: Sequence[int] | None = None,
    subgroup: bool = True,
    first_of: Sequence[int] = (),
    optional: bool = False,
) -> Callable[[Callable[["Trial"], None]], Callable[["Trial"], None]]:
    """Declare a check of exercise `name`; its docstring's first paragraph is what the learner reads.

    Args:
        world_sizes: only at these numbers of ranks; None is all of the exercise's.
        subgroup: also in the layout with two ranks of five, if the exercise has that.
        first_of: only at one number of ranks, the first of these that there is. For what takes long, and
            does not depend on how many they are: three ranks show most, and a machine may have two GPUs.
        optional: an extra, shown as a star. It is looked at once all checks before it hold, and the exercise
            passes without it.
    """

    def register(function: Callable[["Trial"], None]) -> Callable[["Trial"], None]:
        owner = REGISTRY.get(_lesson_of(function.__module__), {}).get(name)
        if owner is None:
            raise ValueError(f"check {function.__name__}: declare exercise({name!r}) before it")
        if not function.__doc__:
            all_left_out = ": unset PYTHONOPTIMIZE, which leaves all out" if sys.flags.optimize > 1 else ""
            raise ValueError(
                f"check {function.__name__} has no docstring: the learner reads it{all_left_out}"
            )
        sentence = " ".join(function.__doc__.split("\n\n")[0].split())

        def fits(layout: Layout) -> bool:
            if layout.world_size > layout.num_ranks:
                return subgroup
            return world_sizes is None or layout.num_ranks in world_sizes

        def fitting(layouts: Sequence[Layout]) -> list[Layout]:
            if not first_of:
                return [layout for layout in layouts if fits(layout)]
            return [layout for n in first_of for layout in layouts if layout == Layout(n, n)][:1]

        owner.checks.append(Check(function.__name__, name, sentence, function, fitting, optional))
        return function

    return register


def _lesson_of(module: str) -> str:
    """The module of the lesson's `checks/__init__.py`, for itself and for the files beside it."""
    return module.partition(".")[0]


def derived_seed(seed: int, *names: object) -> int:
    """A seed for a part of what is drawn: the same for the same names, and unlike that of any others."""
    digest = hashlib.sha256("\0".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:7], "little")


class Trial:
    """One exercise in one layout of ranks: draws inputs, runs probes, compares.

    Its runs use the same ranks, one after the other, as long as all of them answer.

    What a check draws, and what an observation draws that checks share, depends on the seed and on its own
    name: which other checks ran, and how they ended, changes nothing.

    Attributes:
        num_ranks: size of the group, n.
        device: the kind of device that the ranks compute on. Random numbers that are expected of them, such
            as dropout's, have to be drawn there.
        rng: Python random numbers of the check that runs.
        reused: whether a run had ranks that had worked before. What fails then must fail `apart` as well.
        tries_again: whether it is asked to; else what fails at first counts.
    """

    def __init__(
        self,
        layout: Layout,
        code: Code,
        launcher: Launcher,
        seed: int,
        locate: Locate,
        limits: Limits,
        device: str,
        distributed: bool,
        keep_ranks: bool = True,
        tries_again: bool = True,
    ) -> None:
        self._with = partial(
            Trial,
            code=code,
            launcher=launcher,
            seed=seed,
            locate=locate,
            limits=limits,
            device=device,
            distributed=distributed,
            keep_ranks=False,
        )
        self.num_ranks = layout.num_ranks
        self.layout = layout
        self._seed = seed
        self.rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._code = code
        self._launcher = launcher
        self._keep_ranks = keep_ranks
        self.tries_again = tries_again
        self._session: Session | None = None
        self.reused = False
        self.strewn: Event | None = None
        """The first collective of a tensor that NCCL would refuse."""
        self._locate = locate
        self._limits = limits
        self.device = torch.device(device)
        self._distributed = distributed
        self._seen: dict[Callable[..., Any], Any] = {}
        self._told: dict[Callable[..., Any], Evidence] = {}
        self._evidence = Evidence()
        self.where = str(layout) if distributed else ""
        self.output = ""

    @property
    def in_full(self) -> bool:
        """Whether these are two ranks that are the world, which show what need not be shown at each size."""
        return self.num_ranks == self.layout.world_size == 2

    @cached_property
    def apart(self) -> "Trial":
        """The same trial anew, in which every run has ranks of its own, and inputs that none has seen."""
        return self._with(self.layout, seed=derived_seed(self._seed, "apart"))

    @property
    def as_the_world(self) -> "Trial":
        """The same draws for as many ranks that are the whole world, in which every run has its own."""
        return self._with(Layout(self.num_ranks, self.num_ranks))

    def release_ranks(self) -> None:
        """Leave the ranks that it has kept to the next exercise of this submission."""
        if self._session is not None:
            self._launcher.give_back(self.num_ranks, self.layout.world_size, self._session)
            self._session = None

    def _ranks(self) -> Session:
        if not self._keep_ranks:
            return Session(self._launcher)
        if self._session is None:
            self._session = self._launcher.borrow(self.num_ranks, self.layout.world_size, self._code)
        return self._session

    @contextlib.contextmanager
    def drawing(self, name: str) -> Iterator[None]:
        """Inside, draw for what has this name; torch's own random numbers are its own as well."""
        before = self.rng, self._generator
        seed = derived_seed(self._seed, name)
        self.rng, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            try:
                yield
            finally:
                self.rng, self._generator = before

    def integer(self, low: int, high: int) -> int:
        """A random whole number from low to high, both included."""
        return self.rng.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        """One of the options."""
        return self.rng.choice(options)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random normal numbers."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64).to(dtype)

    def tokens(self, vocab_size: int, *shape: int) -> Tensor:
        """Random tokens."""
        return torch.randint(vocab_size, shape, generator=self._generator)

    def seed(self) -> int:
        """A random seed."""
        return self.rng.getrandbits(31)

    def once(self, observe: Callable[["Trial"], T]) -> T:
        """The result of `observe(trial)`, run once however many checks ask. Its ending, too, is kept."""
        if observe not in self._seen:
            before, self._evidence = self._evidence, Evidence()
            try:
                with self.drawing(getattr(observe, "__qualname__", "")):
                    self._seen[observe] = observe(self)
            except CheckEnded as end:
                self._seen[observe] = CheckEnded(
                    Verdict.SKIPPED, "the run that this check looks at ended early (see above)"
                )
                raise end
            finally:
                self._told[observe], self._evidence = self._evidence, before
        self._evidence.add(self._told[observe])
        seen = self._seen[observe]
        if isinstance(seen, CheckEnded):
            raise seen
        return seen

    def begin_check(self) -> None:
        """From now on, what was seen beside the numbers is of the runs that another check looks at."""
        self._evidence = Evidence()

    def run(
        self,
        probe: Callable[..., Any],
        *arguments: Any,
        per_rank: Sequence[Sequence[Any]] | None = None,
        delays: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> list[Any]:
        """Run `probe(rank, *arguments, *per_rank[r])` on every rank of the group; results by rank.

        Ranks are seeded differently unless `seeds` (one a rank) says otherwise. With `delays`, every
        communication waits a little, a different time on each rank. A rank that crashes, hangs, is out of
        memory or disagrees with its peers ends the check with that verdict.
        """
        limits = self._limits.now()
        if self._limits.used_up:
            raise CheckEnded(
                Verdict.HUNG,
                "not reached: the runs of this submission had used up the time for all of them",
                help="Which of its runs take long? `grade --total-timeout` allows more seconds.",
            )
        orders = [[*arguments, *(per_rank[r] if per_rank else ())] for r in range(self.num_ranks)]
        session = self._ranks()
        report = session.run(
            probe,
            self._code,
            orders,
            limits=limits,
            group=self.layout.group,
            world_size=self.layout.world_size,
            distributed=self._distributed,
            device=self.device.type,
            seeds=seeds or [self.seed() for _ in range(self.num_ranks)],
            delay_seed=self.seed() if delays else None,
        )
        self.reused |= not report.fresh
        if not self._keep_ranks:
            session.close()
        group = self.layout.group
        self.output = "\n".join(report.ranks[r].output for r in group)
        for r, rank in enumerate(group):
            races, events = report.ranks[rank].races, report.ranks[rank].events
            self._evidence.races += [(r, replace(x, event=seen_from(x.event, group))) for x in races]
            self._evidence.events += [(r, seen_from(event, group)) for event in events]
            self.strewn = self.strewn or next((event for event in events if not event.in_one_piece), None)
        trouble = ending(report, self._locate, limits, group, alone=not self._distributed)
        if trouble is not None:
            raise trouble
        return [report.ranks[r].result for r in group]

    def close(
        self,
        what: str,
        actual: Any,
        expected: Any,
        alternatives: Alternatives | Callable[[], Alternatives] | None = None,
        help: str = "",
        rtol: float | None = None,
        factors: Mapping[str, float] | None = None,
        terms: Terms | Callable[[], Terms] | None = None,
        plain: Any = None,
        coarse: bool = False,
    ) -> None:
        """Require tensors to be equal up to the order of sums.

        `actual` and `expected` are one tensor or a list by rank, and so is `plain`; `help` says what is asked
        for; the rest is as for `explain.compare`. A known fault has its next step beside it (see Fault).
        """
        actuals, expecteds = self._by_rank(actual, expected)
        plains = None if plain is None else self._by_rank(plain, expecteds)[0]
        difference = compare(what, actuals, expecteds, alternatives, rtol, factors, terms, plains, coarse)
        if difference is not None:
            cause, step, sure = difference.cause, difference.step, difference.sure
            if difference.wrong and not difference.of_no_message:
                by_rank = len(expecteds) == self.num_ranks  # one tensor alone may be of any rank
                wrong = difference.wrong if by_rank else range(self.num_ranks)
                evidence = self._evidence.without("changed") if difference.before_writes else self._evidence
                seen, then = evidence.cause(wrong, len(expecteds), self._locate)
                if seen:
                    guessed = difference.known and not evidence.explains(wrong)
                    cause = f"{cause}. What was seen: {seen}" if guessed else seen
                    step, sure = step if guessed and step else then, True
            raise CheckEnded(Verdict.WRONG, difference.message, cause, step, asked=help, sure=sure)

    def equal(self, what: str, actual: Any, expected: Any, help: str = "") -> None:
        """Require equality of numbers, strings, or containers of them; of tensors, bit for bit."""
        by_rank = isinstance(expected, list | tuple) and any(isinstance(item, Tensor) for item in expected)
        if isinstance(expected, Tensor) or by_rank:
            self.close(what, actual, expected, help=help, rtol=0.0)
        elif (type(actual) is bool and type(expected) is not bool) or not _equal(actual, expected):
            raise CheckEnded(Verdict.WRONG, f"{what}: expected {expected!r}, got {actual!r}", asked=help)

    def require(
        self, condition: bool, message: str, help: str = "", rank: int | None = None, cause: str = ""
    ) -> None:
        """Require a condition; the message says what is wrong when it does not hold, `help` the next step."""
        if not condition:
            self.wrong(message, help, rank, cause)

    def wrong(
        self, message: str, help: str = "", rank: int | None = None, cause: str = "", asked: str = ""
    ) -> NoReturn:
        """End the check: wrong. `help` is the next step after what the message says, `asked` what holds."""
        message = message if rank is None else f"rank {rank}: {message}"
        raise CheckEnded(Verdict.WRONG, message, cause, help, asked=asked, observed=True)

    def _by_rank(self, actual: Any, expected: Any) -> tuple[list[Any], list[Tensor]]:
        many = isinstance(actual, list | tuple)
        actuals = list(actual) if many else [actual]
        if isinstance(expected, list | tuple):
            expecteds = list(expected)
            if not many:
                actuals = [actual] * len(expecteds)
        else:
            expecteds = [expected] * len(actuals)
        return actuals, expecteds


def _equal(actual: Any, expected: Any) -> bool:
    with contextlib.suppress(Exception):
        return bool(actual == expected)
    return False
