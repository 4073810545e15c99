"""An optional check is a star: the exercise passes without it, and everything that reports says so."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from grader.cli import grade
from grader.judging.course import lessons
from grader.judging.verdicts import CheckReport, ExerciseReport, Verdict, combine
from grader.report import exercise_lines, print_table
from tests.bank import judge, mistakes

GOOD = CheckReport("near", "It is near.", Verdict.PASSED)
BAD = CheckReport("near", "It is near.", Verdict.WRONG, message="7 is far")
STAR = CheckReport("exact", "It is exact.", Verdict.PASSED, optional=True)
MISSED = CheckReport("exact", "It is exact.", Verdict.WRONG, message="5 too few", optional=True)
NOT_LOOKED_AT = CheckReport("exact", "It is exact.", Verdict.SKIPPED, optional=True)
LARGE_TERMS = Path(__file__).parent / "alternatives" / "flops_and_memory__large_terms.py"


def report(*checks: CheckReport) -> ExerciseReport:
    return ExerciseReport("01_counts", "count", combine(checks), checks)


def read(*checks: CheckReport) -> str:
    return "\n".join(line for line, _ in exercise_lines(report(*checks)))


def table(*checks: CheckReport) -> str:
    console = Console(record=True, width=100)
    with console.capture() as captured:
        print_table(console, [report(*checks)])
    return captured.get()


@pytest.mark.parametrize("star", [STAR, MISSED, NOT_LOOKED_AT])
def test_the_other_checks_decide(star: CheckReport) -> None:
    assert combine([GOOD, star]) == Verdict.PASSED
    assert combine([BAD, star]) == Verdict.WRONG


def test_a_star_that_fails_by_itself_is_the_graders_fault() -> None:
    broken = CheckReport("exact", "It is exact.", Verdict.GRADER_ERROR, optional=True)
    assert combine([GOOD, broken]) == Verdict.GRADER_ERROR


def test_a_star_is_shown_with_the_verdict() -> None:
    assert read(GOOD, STAR) == "✓ count: passed ★\n  ✓ It is near.\n  ★ It is exact."
    assert "✓ passed (1 of 1 checks) ★" in table(GOOD, STAR)


def test_what_a_missed_star_lacks_is_told_where_all_else_holds() -> None:
    text = read(GOOD, MISSED)
    assert text.startswith("✓ count: passed ☆\n")
    assert "  ☆ It is exact.\n      5 too few\n" in text
    assert "the exercise passes without" in text
    assert "hint" not in text
    assert "✓ passed (1 of 1 checks) ☆" in table(GOOD, MISSED)


def test_a_failure_is_told_before_any_star() -> None:
    text = read(BAD, NOT_LOOKED_AT)
    assert text.startswith("✗ count: wrong\n")
    assert "7 is far" in text
    assert "☆ It is exact." in text
    assert "★" not in text
    assert "not looked at" not in text
    assert "✗ wrong (0 of 1 checks)" in table(BAD, NOT_LOOKED_AT)


def test_a_report_file_says_which_checks_are_optional() -> None:
    assert [check["optional"] for check in asdict(report(GOOD, STAR))["checks"]] == [False, True]


def test_it_is_not_looked_at_where_another_check_fails() -> None:
    wrong = next(m for m in mistakes() if m.name == "logits_too")
    graded = judge(wrong.submission(), wrong.lesson, wrong.lesson.exercises[wrong.exercise])
    assert graded.checks[-1].optional
    assert graded.checks[-1].verdict == Verdict.SKIPPED


def test_an_exercise_passes_without_its_star(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    path = tmp_path / "mine.py"
    path.write_text(LARGE_TERMS.read_text())
    only = ["--only", "activation_bytes", "--json", str(file)]
    result = CliRunner().invoke(grade, [str(path), *only])
    assert result.exit_code == 0, result.output
    assert "✓ activation_bytes: passed ☆" in result.output
    assert "too few" in " ".join(result.output.split())
    data = json.loads(file.read_text())
    assert (data["verdict"], data["passed"], data["total"]) == ("passed", 1, 1)
    star = data["exercises"][0]["checks"][-1]
    assert star["optional"] and star["verdict"] == "wrong"


def test_stars_come_last() -> None:
    for lesson in lessons():
        for exercise in lesson.exercises.values():
            optional = [check.optional for check in exercise.checks]
            assert optional == sorted(optional), exercise.name
            assert not all(optional), exercise.name
