"""What `check` shows below a cell: lines while it runs, then the report, escaped and folded."""

import nbclient
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from grader import cell_output
from grader.cell_output import EMPTY, Progress, show
from grader.judging.course import find_exercise
from grader.judging.judge import Settings, grade_exercise
from grader.judging.submission import from_cells
from grader.judging.verdicts import CheckReport, ExerciseReport, Verdict, combine
from grader.ranks.launcher import ROOT, shared_launcher
from nanogpt.implementation import Cell

PASSED = CheckReport("a", "Sums are right.", Verdict.PASSED)
WRONG = CheckReport(
    "b", "Nothing is sent.", Verdict.WRONG, "with 2 ranks", "<b>12</b> bytes", "a broadcast", "Send none."
)


class Shown:
    """Stands in for IPython's display."""

    def __init__(self) -> None:
        self.bundles: list[dict] = []

    def display(self, bundle: dict, raw: bool, display_id: bool = False) -> "Shown":
        self.bundles.append(bundle)
        return self

    update = display


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    fake = Shown()
    monkeypatch.setattr("IPython.display.display", fake.display)
    monkeypatch.setattr(cell_output, "in_notebook", lambda: True)
    return fake


def report(*checks: CheckReport) -> ExerciseReport:
    failed = [check for check in checks if not check.holds]
    return ExerciseReport("07", "total", Verdict.WRONG if failed else Verdict.PASSED, checks)


def test_a_line_comes_as_each_check_ends_and_goes_at_the_end(shown: Shown) -> None:
    with Progress() as progress:
        progress.tell(PASSED)
        assert "Sums are right." in shown.bundles[-1]["text/html"]
        progress.tell(WRONG)
        assert "Sums are right." in shown.bundles[-1]["text/html"]
        assert "Nothing is sent." in shown.bundles[-1]["text/html"]
    assert shown.bundles[0] == shown.bundles[-1] == EMPTY
    assert {bundle["text/plain"] for bundle in shown.bundles} == {""}


def test_an_error_on_the_way_leaves_no_lines(shown: Shown) -> None:
    with pytest.raises(KeyboardInterrupt), Progress() as progress:
        progress.tell(PASSED)
        raise KeyboardInterrupt
    assert shown.bundles[-1] == EMPTY


def test_what_passed_is_folded_where_something_failed(shown: Shown) -> None:
    show(report(PASSED, WRONG), ("drawn with seed 7",))
    page = shown.bundles[0]["text/html"]
    open_part, _, folded = page.partition("<details>")
    assert "Nothing is sent." in open_part
    assert "likely cause: a broadcast" in open_part
    assert "Sums are right." not in open_part
    assert "✓ 1 passed" in folded
    assert "Sums are right." in folded
    assert "drawn with seed 7" in folded
    assert "Sums are right." in shown.bundles[0]["text/plain"]


def test_the_headline_is_the_verdict_of_what_is_told(shown: Shown) -> None:
    hung = CheckReport("c", "It ends.", Verdict.HUNG, "with 2 ranks", "deadlock")
    skipped = CheckReport("d", "It ends twice.", Verdict.SKIPPED)
    checks = PASSED, WRONG, hung, skipped
    show(ExerciseReport("07", "total", combine(checks), checks))
    text = shown.bundles[0]["text/plain"]
    assert text.splitlines()[0] == "✗ total: wrong"
    assert "(- means: not looked at" in text


def test_what_passed_is_open_where_all_did(shown: Shown) -> None:
    show(report(PASSED))
    assert "<details>" not in shown.bundles[0]["text/html"]


def test_what_a_submission_wrote_is_text_and_no_html(shown: Shown) -> None:
    show(report(WRONG))
    assert "&lt;b&gt;12&lt;/b&gt;" in shown.bundles[0]["text/html"]


def test_outside_a_notebook_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.tell(PASSED)
    show(report(PASSED))
    assert capsys.readouterr().out.splitlines() == ["✓ total: passed", "  ✓ Sums are right."]


@pytest.mark.parametrize("layouts_at_a_time", [1, 2])
@pytest.mark.parametrize("edit", [("", ""), ("        dist.all_reduce", "        dist.broadcast")])
def test_each_check_is_told_of_once_with_what_came_of_it(layouts_at_a_time: int, edit: tuple) -> None:
    found = find_exercise("all_reduce_gradients")
    assert found is not None
    lesson, exercise = found
    text = lesson.solution.read_text().replace(*edit) if edit[0] else lesson.solution.read_text()
    submission = from_cells(lesson.solution, (Cell("my.py", text),), trusted=True)
    told: list[CheckReport] = []
    settings = Settings(seed=7, layouts_at_a_time=layouts_at_a_time)
    arguments = exercise, lesson.name, submission.code(), shared_launcher(), settings, submission.locate
    graded = grade_exercise(*arguments, tell=told.append)
    assert sorted(check.name for check in told) == sorted(check.name for check in graded.checks)
    assert {check.name: check.verdict for check in told} == {c.name: c.verdict for c in graded.checks}
    assert (graded.verdict == Verdict.PASSED) == (not edit[0])


@pytest.mark.slow
def test_the_hint_that_is_named_can_be_asked_for_in_a_cell() -> None:
    notebook = new_notebook(cells=[new_code_cell(cell_output.HINT.format("shard_batch").partition(" (")[0])])
    nbclient.execute(notebook, cwd=str(ROOT), extra_arguments=["--IPKernelApp.log_level=ERROR"])
    told = "".join(output.text for output in notebook.cells[0].outputs)
    assert "grade hint shard_batch 2" in told
