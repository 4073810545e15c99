"""What stands before the text of lesson.md, between two lines of dashes: time, difficulty, what it needs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from infra.lessons.exercises import LessonError

FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
MOST_STARS = 3


def stars(difficulty: int) -> str:
    """Such as "★★☆"."""
    return "★" * difficulty + "☆" * (MOST_STARS - difficulty)


@dataclass(frozen=True)
class Effort:
    """What an exercise asks of a learner."""

    stars: int
    """Difficulty, from 1 to 3."""
    minutes: int
    optional: bool = False
    """Whether the rest of the page does without it."""

    def __str__(self) -> str:
        left_out = ", and may be left out" if self.optional else ""
        return f"{stars(self.stars)} · about {self.minutes} minutes{left_out}"


@dataclass(frozen=True)
class Front:
    """What a lesson asks of a learner."""

    reading: int
    """Minutes."""
    needs: tuple[str, ...]
    """Slugs of the lessons that come before."""
    exercises: dict[str, Effort]

    @property
    def building(self) -> int:
        """Minutes that the exercises take together, without those that may be left out."""
        return sum(effort.minutes for effort in self.exercises.values() if not effort.optional)

    @property
    def more(self) -> int:
        """Minutes of the exercises that may be left out."""
        return sum(effort.minutes for effort in self.exercises.values() if effort.optional)

    @property
    def hardest(self) -> str:
        """The stars of the hardest exercise."""
        return stars(max(effort.stars for effort in self.exercises.values()))

    @property
    def hours(self) -> str:
        """Such as "2¼ h", or "2¼ h, and 1 h more" where something may be left out."""
        more = f", and {in_hours(self.more)} more" if self.more else ""
        return in_hours(self.reading + self.building) + more


def in_hours(minutes: int) -> str:
    """Such as "2¼ h"."""
    quarters = max(1, round(minutes / 15))
    return f"{quarters // 4 or ''}{('', '¼', '½', '¾')[quarters % 4]} h"


def without(text: str) -> str:
    """lesson.md from its title on."""
    return FRONT_MATTER.sub("", text)


def read(path: Path, text: str, exercises: Sequence[str]) -> Front | None:
    """Read it from lesson.md; None where there is none. Raises LessonError."""
    if not (found := FRONT_MATTER.match(text)):
        return None
    try:
        told = yaml.safe_load(found[1])
        efforts = {name: Effort(**effort) for name, effort in told.pop("exercises").items()}
        front = Front(**{**told, "needs": tuple(told["needs"])}, exercises=efforts)
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        why = " ".join(str(error).split())
        message = f"between the dashes stand reading, needs and exercises ({why})"
        raise LessonError(path, 1, message) from error
    if list(front.exercises) != list(exercises):
        message = f"between the dashes stand the exercises, in their order: {', '.join(exercises)}"
        raise LessonError(path, 1, message)
    return front
