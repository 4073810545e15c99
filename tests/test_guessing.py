"""A guess stands beside the truth, whatever it is; nobody is stopped."""

import pytest
from IPython.display import DisplayHandle

from grader import guess
from grader.guessing import Truth, factor

TRUTHS = [Truth("bytes", "bytes <sent>", 5.28, "MB", "2 (n-1)/n S"), Truth("ranks", "ranks", 64, "", "given")]


@pytest.mark.parametrize(
    ("guessed", "truth", "told"),
    [
        (None, 5.0, "no guess"),
        (5.0, 5.0, "exactly"),
        (5.2, 5.0, "right"),
        (10.0, 5.0, "2.0 times too high"),
        (2.5, 5.0, "2.0 times too low"),
        (1600.0, 5.0, "320 times too high"),
        (5.0, 61_234.0, "12,000 times too low"),
        (5e6, 5.0, "1e+06 times too high"),
        (5e-6, 5.0, "1e+06 times too low"),
        (-5.0, 5.0, "another sign"),
        (4, 4.42, "right"),
        (4.4, 4.42, "right"),
        (4.0, 4.42, "1.1 times too low"),
        (5, 4.42, "1.1 times too high"),
        (40, 44.2, "1.1 times too low"),
        (0.0, 5.0, "not zero"),
        (5.0, 0.0, "zero"),
    ],
)
def test_the_factor_is_told(guessed: float | None, truth: float, told: str) -> None:
    assert factor(guessed, truth) == told


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    bundles: list[dict] = []

    def display(bundle: dict, raw: bool) -> DisplayHandle | None:
        bundles.append(bundle)
        return None

    monkeypatch.setattr("IPython.display.display", display)
    return bundles


def test_guess_and_truth_stand_side_by_side(shown: list[dict]) -> None:
    guess(bytes=10.56, ranks=...).compare(TRUTHS)
    first, second = shown[0]["text/plain"].splitlines()
    assert first == "bytes <sent>: you 10.6, true 5.28 MB (2.0 times too high). 2 (n-1)/n S"
    assert second.startswith("ranks: you -, true 64")
    assert "&lt;sent&gt;" in shown[0]["text/html"]


def test_no_guess_and_no_number_stop_nobody(shown: list[dict], capsys: pytest.CaptureFixture[str]) -> None:
    guess(bytes="many", ranks=None).compare(TRUTHS)
    told = capsys.readouterr().out
    assert "bytes='many' is no number" in told
    assert "No guess yet" in told
    assert all("you -" in line for line in shown[0]["text/plain"].splitlines())
