"""What a machine reads of a grading: one JSON file, whatever came of it."""

import json
import platform
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grader.judging.verdicts import ExerciseReport, Verdict
from grader.ranks.isolation import ROOT, Isolation

FORMAT = "scale-by-hand report 2"


@dataclass
class Record:
    """What one call of `grade` was asked, and what came of it so far."""

    settings: dict[str, Any]
    seed: int
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    isolation: Isolation = field(default_factory=Isolation)
    submissions: dict[str, str] = field(default_factory=dict)
    """Path → SHA-256, "" for what is no file or can not be read."""
    reports: list[ExerciseReport] = field(default_factory=list)
    verdict: str = "could not grade"
    """That, passed, not passed, or unreadable: of all exercises together."""
    message: str = ""
    """Why there are no more reports, as a sentence."""


def write_report(path: Path, record: Record) -> None:
    """Write the report. Raises OSError where that is impossible."""
    text = json.dumps(_plain(record), indent=2)
    path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def make_sure_it_can_be_written(path: Path) -> None:
    """Raises OSError before anything is graded, rather than after."""
    existed = path.exists()
    with path.open("a"):
        pass
    if not existed:
        path.unlink()


def _plain(record: Record) -> dict[str, Any]:
    closed = record.isolation.closed
    return {
        "format": FORMAT,
        "verdict": record.verdict,
        "message": record.message,
        "passed": _count(record.reports, Verdict.PASSED),
        "total": len(record.reports),
        "isolated": closed,
        "not_isolated_because": record.isolation.why_open,
        "score_is": "a grade, if a teacher owns this machine" if closed else "formative",
        "seed": record.seed,
        "settings": record.settings,
        "submissions": [{"path": path, "sha256": sha256} for path, sha256 in record.submissions.items()],
        "course": {"version": _course_version(), "commit": _commit()},
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": _version_of("torch"),
        },
        "started": record.started.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "exercises": [asdict(report) for report in record.reports],
    }


def _count(reports: Sequence[ExerciseReport], verdict: Verdict) -> int:
    return sum(report.verdict == verdict for report in reports)


def _course_version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def _commit() -> str:
    """Of the course; "" where it is no checkout, or git does not say."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
