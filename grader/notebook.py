"""`check` and `run_ranks`: the grader from a notebook cell."""

import ast
import difflib
import inspect
import linecache
import os
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grader.beside.loading import LENT
from grader.cell_output import in_notebook
from grader.ranks.by_value import by_value
from grader.ranks.launcher import ROOT, Code, Limits, shared_launcher
from nanogpt.cores import keep_to_quota

keep_to_quota()  # the kernel's torch, too: it has taken a thread a core that it sees
if in_notebook():  # the ranks' server imports torch while the first cells do something else
    shared_launcher().begin()

if TYPE_CHECKING:
    from grader.judging.course import Lesson
    from grader.judging.judge import Settings, Tell
    from grader.judging.trial import Exercise
    from grader.judging.verdicts import ExerciseReport


def check(definition: Any, device: str = "cpu", seed: int | None = None) -> None:
    """Grade one exercise: `check(ColumnParallelLinear)`, in the cell after its definition.

    The definition travels by value to fresh processes, one a rank. A line is shown as each check ends, and
    at the end the report.

    Args:
        definition: the class or function; it is found in the course by its name.
        device: "cpu" (gloo) or "cuda" (NCCL, a GPU a rank).
        seed: draw the same inputs again, those of a report that names this seed.

    What can not be checked, such as a name that is no exercise, is told in a sentence.
    """
    from grader.cell_output import Progress, reward, show
    from grader.judging.course import find_exercise, lessons
    from grader.judging.judge import Settings
    from grader.judging.side_by_side import sensible_jobs
    from grader.judging.verdicts import Verdict

    name = definition if isinstance(definition, str) else getattr(definition, "__name__", str(definition))
    found = find_exercise(name)
    if found is None:
        close = difflib.get_close_matches(name, [each for x in lessons() for each in x.exercises], 1)
        print(f"the course has no exercise {name!r}" + (f": did you mean {close[0]}?" if close else ""))
    elif isinstance(definition, str):
        print(f"give the definition itself: check({name})")
    else:
        settings = Settings(device=device, seed=seed, layouts_at_a_time=sensible_jobs(device))
        with Progress() as progress:
            report = _report(name, definition, settings, *found, progress.tell)
        again = f"drawn with seed {report.seed}: check({name}, seed={report.seed}) draws the same again"
        passed = report.verdict == Verdict.PASSED
        show(report, () if report.seed is None or passed else (again,))
        if passed and in_notebook():
            reward(found[0].directory, name, definition)


def _report(
    name: str,
    definition: Any,
    settings: "Settings",
    lesson: "Lesson",
    exercise: "Exercise",
    tell: "Tell",
) -> "ExerciseReport":
    """Grade a definition. A broken program that a lesson gives is run too: its failure is where to start."""
    from grader.judging.judge import grade_exercise
    from grader.judging.verdicts import ExerciseReport, Verdict

    given = lesson.given.get(name)
    untouched = _is_untouched(definition, given)
    if untouched and given is None:
        message = "write it, run its cell, and check again"
        return ExerciseReport(lesson.name, name, Verdict.NOT_ATTEMPTED, message=message)
    names = {name: definition, **_others(definition, exercise.uses)}
    code = Code(pickled=by_value(names), directory=os.getcwd(), lent=lesson.lent)
    report = grade_exercise(exercise, lesson.name, code, shared_launcher(), settings, _locate, tell=tell)
    if untouched:
        return replace(report, verdict=Verdict.NOT_ATTEMPTED, message="as it was given; this is how it fails")
    return report


def run_ranks(
    function: Callable[..., Any], *args: Any, ranks: int = 4, timeout: float = 120.0, device: str = "cpu"
) -> list[Any]:
    """Run `function(*args)` on ranks, each a process of its own, and return each rank's result, in order.

    Inside, `torch.distributed` is initialised: `dist.get_rank()` tells the rank. A result is plain data:
    tensors, numbers, strings, None, and lists, tuples and dicts of these. What ranks print is shown.

    Args:
        ranks: how many.
        timeout: seconds until the ranks are stopped; a deadlock is noticed earlier.
        device: "cpu" (gloo) or "cuda" (NCCL; `torch.cuda.current_device()` is then this rank's GPU).

    Raises:
        RuntimeError: a rank raised, the ranks hung, or ran out of memory; the message says where each stood.
    """
    from grader.judging.stories import ending

    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least one is needed")
    limits = Limits(timeout=timeout, idle=5.0, memory_bytes=16 * 2**30)
    arguments = [(by_value((function, args)),)] * ranks
    report = shared_launcher().run(None, Code(trusted=True), arguments, limits=limits, device=device)
    for rank, state in enumerate(report.ranks):
        if state.output:
            print(textwrap.indent(state.output.rstrip("\n"), f"[rank {rank}] "))
    trouble = ending(report, _locate, limits, range(ranks))
    if trouble is not None:
        message, *parts = [trouble.message, trouble.cause, *trouble.details, trouble.help]
        lines = [_wrapped(message, ""), *(_wrapped(part, "  ") for part in parts if part)]
        raise RuntimeError("\n".join(lines)) from None
    return [state.result for state in report.ranks]


def _wrapped(text: str, indent: str) -> str:
    """Lines that a notebook shows whole; a quoted line of code breaks between its words alone."""
    return textwrap.fill(
        text,
        width=100,
        initial_indent=indent,
        subsequent_indent=indent + "    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _others(definition: Any, uses: tuple[str, ...]) -> dict[str, Any]:
    """The other exercises that a check needs, from where this one was defined."""
    module = sys.modules.get(getattr(definition, "__module__", ""))
    return {name: getattr(module, name) for name in uses if hasattr(module, name)}


def _is_untouched(definition: Any, given: Any) -> bool:
    from grader.judging.submission import is_untouched

    with suppress(OSError, TypeError, SyntaxError, StopIteration):
        return is_untouched(_tree(definition), given)
    return False


def _tree(definition: Any) -> Any:
    """The syntax tree of a definition. Python finds no class of a notebook: its methods know their cell."""
    if inspect.isclass(definition):
        methods = [item for item in vars(definition).values() if inspect.isfunction(item)]
        if not methods:
            raise OSError("a class without methods of its own")
        lines, _ = inspect.findsource(inspect.unwrap(methods[0]))
        found = [node for node in ast.parse("".join(lines)).body if isinstance(node, ast.ClassDef)]
        return next(node for node in reversed(found) if node.name == definition.__name__)
    return ast.parse(textwrap.dedent(inspect.getsource(definition))).body[0]


def _locate(file: str, line: int) -> str:
    """A line of the notebook, as its reader knows it."""
    if "site-packages" in file or "/lib/python" in file or file.startswith(("<frozen", LENT)):
        return ""
    if file.startswith(
        (str(ROOT / "grader"), str(ROOT / "nanogpt"), str(ROOT / "lessons"), str(ROOT / "solutions"))
    ):
        return ""
    text = linecache.getline(file, line).strip()
    cell = _cell_number(file)
    where = f"cell In[{cell}]" if cell else file.rpartition("/")[2]
    return f"{where}, line {line}: `{text}`" if text else ""


def _cell_number(file: str) -> int | None:
    """The execution count of the cell that IPython compiled under this file name."""
    with suppress(Exception):
        from IPython import get_ipython

        return get_ipython().compile._filename_map.get(file)
    return None
