"""What the fork server imports for all ranks is the course as it is now, not as it was when it started."""

from pathlib import Path

import pytest

from grader.judging.verdicts import Verdict
from grader.ranks import launcher, server
from grader.ranks.launcher import Launcher
from tests.attempts import look, twisted


def test_an_edited_course_is_imported_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (launcher, server):
        monkeypatch.setattr(module, "ROOT", tmp_path / "course")
    (tmp_path / "course").mkdir()
    for name in ("grader", "lessons", "solutions"):
        (tmp_path / "course" / name).symlink_to(Path(server.__file__).parents[2] / name)
    nanogpt = tmp_path / "course" / "nanogpt"
    nanogpt.mkdir()
    for path in (Path(server.__file__).parents[2] / "nanogpt").iterdir():
        if path.is_file():
            (nanogpt / path.name).write_bytes(path.read_bytes())
    says = twisted("from nanogpt.model import GREETING\nassert GREETING == 'good day', GREETING")
    ours = Launcher()
    try:
        for greeting, verdict in (("hello", Verdict.CRASHED), ("good day", Verdict.PASSED)):
            with (nanogpt / "model.py").open("a") as file:
                file.write(f"\nGREETING = {greeting!r}\n")
            report = look(tmp_path, says, ours)
            assert report.verdict == verdict, report.text
        (nanogpt / "model.py").write_text("def (")
        report = look(tmp_path, says, ours)
        assert report.verdict == Verdict.CRASHED
        assert "SyntaxError" in report.message
        assert look(tmp_path, twisted(), ours).verdict == Verdict.PASSED
    finally:
        ours.close()
