"""`make lessons`: build the notebooks, the README's table and environment.yml."""

import argparse
import sys
from pathlib import Path

from infra.lessons import build
from infra.lessons.source import Lesson, discover


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: all is built (or, with --check, nothing is stale)."""
    parser = argparse.ArgumentParser(prog="python -m infra.lessons", description=__doc__)
    parser.add_argument("lesson", nargs="*", help="number or slug of a lesson; without one, all of them")
    parser.add_argument("--check", action="store_true", help="only say what is stale; executes nothing")
    parser.add_argument("--no-execute", action="store_true", help="leave the solved notebooks alone")
    parser.add_argument("--force", action="store_true", help="execute, and overwrite edited notebooks too")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    lessons = discover(options.root)
    problems: list[ValueError] = []
    try:
        chosen = choose(lessons, options.lesson)
        if options.check:
            return report_stale(options.root, chosen)
        problems += build_all(chosen, execute=not options.no_execute, force=options.force)
        if not problems:
            build.build_shared(options.root, lessons)
    except ValueError as error:
        problems.append(error)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def choose(lessons: list[Lesson], wanted: list[str]) -> list[Lesson]:
    """The lessons with these numbers or slugs, or all. Raises ValueError for one that is not there."""
    for word in wanted:
        if not any(_answers_to(lesson, word) for lesson in lessons):
            known = ", ".join(f"{lesson.number} {lesson.slug}" for lesson in lessons) or "none"
            raise ValueError(f"no lesson {word!r}; there are: {known}")
    return [lesson for lesson in lessons if not wanted or any(_answers_to(lesson, w) for w in wanted)]


def build_all(lessons: list[Lesson], *, execute: bool, force: bool) -> list[ValueError]:
    """Build one lesson after the other; one that fails does not stop the rest."""
    problems: list[ValueError] = []
    for lesson in lessons:
        try:
            build.build_lesson(lesson, execute=execute, force=force)
        except ValueError as error:
            problems.append(error)
    return problems


def report_stale(root: Path, lessons: list[Lesson]) -> int:
    stale = list(build.find_stale(root, lessons))
    for one in stale:
        print(f"stale: {one}")
    print("run `make lessons`" if stale else f"{len(lessons)} lessons: nothing is stale")
    return 1 if stale else 0


def _answers_to(lesson: Lesson, word: str) -> bool:
    return word in (lesson.slug, lesson.number, lesson.number.lstrip("0"), lesson.folder.name)


if __name__ == "__main__":
    sys.exit(main())
