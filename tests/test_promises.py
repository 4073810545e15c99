"""Every sentence of an exercise's docstring is a promise: a mistake breaks it, or it says why none can."""

import ast

import pytest

from grader.judging.course import Lesson, lessons
from tests.bank import mistakes
from tests.promises import descriptions, normal, promises, sentences

BANK = mistakes()


@pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson.slug)
def test_every_sentence_has_a_mistake_that_breaks_it(lesson: Lesson) -> None:
    told = {(name, sentence) for name, all_of_it in promises(lesson).items() for sentence in all_of_it}
    broken = {(m.exercise, normal(s)) for m in BANK if m.lesson == lesson for s in m.breaks}
    described = {(d.exercise, d.sentence) for d in descriptions(lesson)}
    lines = [
        *(f"no mistake breaks it: {each}" for each in sorted(told - broken - described)),
        *(f"a mistake quotes what is not said: {each}" for each in sorted(broken - told)),
        *(f"described, but not said: {each}" for each in sorted(described - told)),
        *(f"both broken and described: {each}" for each in sorted(described & broken)),
    ]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson.slug)
def test_every_mistake_quotes_what_it_breaks(lesson: Lesson) -> None:
    silent = [f"{m.exercise}: {m.name}" for m in BANK if m.lesson == lesson and not m.breaks]
    assert not silent, "\n".join(silent)


@pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson.slug)
def test_a_program_that_is_given_promises_what_the_reference_does(lesson: Lesson) -> None:
    """A learner reads the docstring in the notebook, and mistakes are held to the one in the reference."""
    documented = promises(lesson)
    for name, node in lesson.given.items():
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and name in documented:
            told = sentences(ast.get_docstring(node) or "")
            reference = next(n for n in ast.parse(lesson.solution.read_text()).body if named(n, name))
            assert told == sentences(ast.get_docstring(reference) or "")


def named(node: ast.AST, name: str) -> bool:
    """Whether it defines this name."""
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name


def test_a_description_has_a_reason() -> None:
    for lesson in lessons():
        for each in descriptions(lesson):
            assert len(each.reason.split()) >= 3, f"{each.exercise}: {each.sentence}"


def test_how_sentences_are_told_apart() -> None:
    text = """First of all. The second (e.g. this. One) is `a. B` long,
    on two lines.

    Args:
        x: (b, s, h). Not changed.
        kinds, others: more.

    Raises:
        ValueError: it does not divide.

    Li et al. Found it, section 3.2.
    """
    assert sentences(text) == [
        "First of all.",
        "The second (e.g. this. One) is `a. B` long, on two lines.",
        "x: (b, s, h).",
        "Not changed.",
        "kinds, others: more.",
        "ValueError: it does not divide.",
        "Li et al. Found it, section 3.2.",
    ]
    assert sentences("1. **One.** Two\n   goes on.\n2. Three.") == ["One.", "Two goes on.", "Three."]
