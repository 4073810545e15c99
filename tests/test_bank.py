"""The bank of mistakes is rich, and each mistake has a name of its own."""

from collections import Counter

import pytest

from grader.judging.course import lessons
from tests.bank import mistakes

BANK = mistakes()
EXERCISES = [(lesson, exercise) for lesson in lessons() for exercise in lesson.exercises.values()]


@pytest.mark.parametrize(("lesson", "exercise"), EXERCISES, ids=lambda x: x.name)
def test_bank_is_rich(lesson, exercise) -> None:
    mine = [m for m in BANK if m.lesson == lesson and m.exercise == exercise.name]
    assert len(mine) >= 6, f"{exercise.name} has {len(mine)} mistakes in the bank: at least six"
    tags = Counter(m.tag for m in mine)
    assert tags["mechanism"], f"{exercise.name}: no mistake with the right numbers by the wrong mechanism"
    assert tags["special_case"], f"{exercise.name}: no mistake that is right in a special case only"


def test_names_are_unique() -> None:
    twice = [name for name, count in Counter((m.exercise, m.name) for m in BANK).items() if count > 1]
    assert not twice
