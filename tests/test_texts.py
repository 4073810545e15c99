"""What a lesson's text says of other lessons is so."""

import re

import pytest

from grader.judging.course import Lesson, lessons
from tests.promises import prose, sentences

NUMBERS = {lesson.name.partition("_")[0] for lesson in lessons()}


def announced(text: str) -> list[str]:
    """Sentences that call a lesson "to come" that is there."""
    return [
        sentence
        for sentence in sentences(text)
        if re.search(r"\bto come\b|\bnot yet written\b", sentence)
        and NUMBERS & set(re.findall(r"\d\d", sentence))
    ]


@pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson.slug)
def test_no_lesson_that_is_there_is_to_come(lesson: Lesson) -> None:
    assert not announced(prose(lesson.directory / "lesson.md"))


def test_a_lesson_that_is_announced_is_seen() -> None:
    assert announced("FSDP (lesson 09, to come) shards.") == ["FSDP (lesson 09, to come) shards."]
    assert not announced(
        "The lessons to come want chunk r on rank r. Lesson 09 shards. Lesson 96 is to come."
    )
