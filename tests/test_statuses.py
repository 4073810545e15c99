"""Status 1 speaks of the learner, 2 of the machine or of us; in one sentence, and always with a report."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from grader.cli import grade
from grader.judging.course import find_exercise
from grader.judging.reading import MAX_PARTS, MAX_SOURCE
from grader.ranks.faults import unforeseen
from grader.ranks.launcher import ROOT
from tests.attempts import CORRECT, twisted

QUICK = ["--only", "copy_to_group", "--ranks", "1", "--isolation", "off"]
NOTEBOOK = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def run(tmp_path: Path, *arguments: str | Path) -> tuple[Result, dict]:
    """What `grade` says, and its report."""
    result = CliRunner().invoke(grade, [*map(str, arguments), "--json", str(tmp_path / "report.json")])
    return result, json.loads((tmp_path / "report.json").read_text())


def cut() -> bytes:
    """A notebook whose end was lost on the way."""
    lesson, _ = find_exercise("copy_to_group")  # type: ignore[misc]
    data = lesson.notebook.read_bytes()
    return data[: len(data) // 2]


def notebook(source: str) -> bytes:
    """A notebook of one cell."""
    cell = {"cell_type": "code", "source": source, "metadata": {}, "outputs": [], "execution_count": None}
    return json.dumps({**NOTEBOOK, "cells": [cell]}).encode()


HAND_INS = {
    "empty.py": (b"", "there is no exercise in it"),
    "empty.ipynb": (b"", "is not a notebook"),
    "cut.ipynb": (cut(), "is not a notebook"),
    "braces.ipynb": (b"{}", "is not a notebook"),
    "words.ipynb": (b"not json", "is not a notebook"),
    "text alone.ipynb": (json.dumps(NOTEBOOK).encode(), "there is no exercise in it"),
    "syntax.py": (b"def copy_to_group(x, group:\n    return x\n", "line 1: '(' was never closed"),
    "other.py": (b"x = 1\n", "there is no exercise in it"),
    "bytes.py": (b"\xff\xfe\x00", "is not text in UTF-8"),
    "null.py": (b"x = 1\0", "null bytes"),
    "essay.pdf": (b"%PDF-1.7", "expected a notebook (.ipynb) or a Python file (.py)"),
    "no name": (b"x = 1", "expected a notebook (.ipynb) or a Python file (.py)"),
    "parts.ipynb": (b"[" + b"{}," * (MAX_PARTS + 1) + b"{}]", "more than 1,000,000 lists and objects"),
    "endless.py": (b"x = 1\n" * (MAX_SOURCE // 6 + 1), "more than 1024 KiB of code"),
    "dots.py": (b"import a" + b".a" * 60_000, "the import of a name with more than 100 dots"),
    "more dots.py": (
        b"x = 1;from a" + b"\\\n .a" * 60_000 + b" import b",
        "the import of a name with more than 100 dots",
    ),
    "dots.ipynb": (notebook("import a" + ".a" * 60_000), "the import of a name with more than 100 dots"),
    "control \x1b[31m.py": (b"x = 1\n", "control \\x1b[31m.py"),
}


@pytest.mark.parametrize("name", HAND_INS)
@pytest.mark.parametrize("only", [[], QUICK[:2]], ids=["", "only"])
def test_a_bad_hand_in_has_a_report_and_status_1(name: str, only: list[str], tmp_path: Path) -> None:
    content, words = HAND_INS[name]
    (tmp_path / name).write_bytes(content)
    result, report = run(tmp_path, tmp_path / name, *only)
    assert result.exit_code == 1, result.output
    assert words.replace(" in it", "") in result.output
    assert result.output.startswith("grade: ") and result.output.count("\n") == 1
    assert (report["verdict"], report["passed"], report["total"]) == ("unreadable", 0, len(only) // 2)
    assert f"grade: {report['message']}\n" == result.output
    assert len(report["submissions"][0]["sha256"]) == 64
    for exercise in report["exercises"]:
        assert (exercise["name"], exercise["verdict"]) == ("copy_to_group", "unreadable")
        assert exercise["lesson"] == find_exercise("copy_to_group")[0].name  # type: ignore[index]


def test_a_long_chain_of_branches_is_read_in_order(tmp_path: Path) -> None:
    chain = "".join(f"elif x == {number}:\n    y = {number}\n" for number in range(1200))
    (tmp_path / "mine.py").write_text(f"x = 0\nif x == -1:\n    def copy_to_group(): ...\n{chain}{CORRECT}")
    result, report = run(tmp_path, tmp_path / "mine.py", *QUICK)
    assert (result.exit_code, report["verdict"]) == (0, "passed"), result.output


def make_links(folder: Path) -> dict[str, tuple[Path, str]]:
    """What is no file, or only points to one: the path to hand in, and what is said."""
    (folder / "secret").write_text("password: s3cret")
    (folder / "right.py").write_text(CORRECT)
    (folder / "work.ipynb").mkdir()
    (folder / "deep" / "folder").mkdir(parents=True)
    (folder / "deep" / "right.py").write_text(CORRECT)
    os.mkfifo(folder / "pipe.py")
    for link, target in {
        "reference.py": ROOT / "solutions" / "tensor_parallel.py",
        "secret.py": folder / "secret",
        "endless.py": "/dev/zero",
        "input.py": "/dev/stdin",
        "loop.py": folder / "loop.py",
        "nowhere.py": folder / "nowhere",
        "right link.py": folder / "right.py",
        "folder": ROOT / "solutions",
        "above": ROOT,
        "inside": ROOT / "tests" / "bench",
        "far": folder / "deep" / "folder",
    }.items():
        (folder / link).symlink_to(target)
    link = "is a symbolic link: hand in the file itself"
    back = "goes back by .. from where a link has led: name the file without it"
    ours = "leads by a link to the course's own solutions: hand in a file of yours"
    return {
        **{name: (folder / f"{name}.py", link) for name in ("reference", "secret", "endless", "input")},
        **{name: (folder / f"{name}.py", link) for name in ("loop", "nowhere", "right link")},
        "pipe": (folder / "pipe.py", "is a pipe: hand in a file"),
        "a device": (Path("/dev/zero"), "is a device: hand in a file"),
        "a folder": (
            folder / "work.ipynb",
            "is a folder: give the path of a notebook (.ipynb) or a Python file (.py)",
        ),
        "back from the tests": (folder / "inside" / ".." / "attempts.py", back),
        "back to another": (folder / "far" / ".." / "right.py", back),
        "a link above": (folder / "folder" / "tensor_parallel.py", ours),
        "a notebook": (folder / "folder" / "tensor_parallel.ipynb", ours),
        "a link far above": (folder / "above" / "solutions" / "tensor_parallel.py", ours),
    }


LINKS = ["reference", "secret", "endless", "input", "loop", "nowhere", "right link", "pipe", "a device"]
LINKS += [
    "a folder",
    "back from the tests",
    "back to another",
    "a link above",
    "a notebook",
    "a link far above",
]


@pytest.mark.parametrize("name", LINKS)
def test_what_only_points_somewhere_is_refused_unread(name: str, tmp_path: Path) -> None:
    path, words = make_links(tmp_path)[name]
    result, report = run(tmp_path, path, *QUICK[:2])
    assert (result.exit_code, report["verdict"]) == (1, "unreadable"), result.output
    assert result.output == f"grade: {path} {words}\n"
    assert report["submissions"] == [{"path": str(path), "sha256": ""}]


def test_a_harmless_link_above_is_fine_and_a_copy_is_an_answer(tmp_path: Path) -> None:
    """Homes and checkouts are reached through links. Nothing tells who wrote a copy, or a hard link."""
    (tmp_path / "real" / "folder").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "mine.py").write_text(CORRECT)
    os.link(tmp_path / "real" / "mine.py", tmp_path / "real" / "too.py")
    for name in ("mine.py", "too.py", "folder/../mine.py"):
        result, report = run(tmp_path, tmp_path / "home" / name, *QUICK)
        assert (result.exit_code, report["verdict"]) == (0, "passed"), result.output


def test_a_link_to_the_solutions_is_not_the_solutions(tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(ROOT / "solutions")
    result, report = run(tmp_path, tmp_path / "mine")
    assert (result.exit_code, report["verdict"]) == (1, "unreadable")
    assert "is a symbolic link" in result.output


def test_the_reference_is_isolated_where_isolation_is_asked_for(tmp_path: Path, isolated: object) -> None:
    result, report = run(tmp_path, "solutions", "--only", "shard_batch", "--ranks", "1", "--isolation", "on")
    assert (result.exit_code, report["isolated"]) == (0, True), result.output
    assert "(isolated run)" in result.output


def test_one_unreadable_notebook_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [find_exercise(name)[0] for name in ("shard_batch", "copy_to_group")]  # type: ignore[index]
    for lesson in found:
        shutil.copytree(lesson.directory / "checks", tmp_path / lesson.name / "checks")
        shutil.copy(lesson.directory / "lesson.md", tmp_path / lesson.name)
    copies = [type(lesson)(tmp_path / lesson.name) for lesson in found]
    copies[0].notebook.write_text("{")
    shutil.copy(found[1].notebook, copies[1].notebook)
    monkeypatch.setattr("grader.work.lessons", lambda: tuple(copies))
    result, report = run(tmp_path)
    assert (result.exit_code, report["verdict"]) == (1, "not passed")
    verdicts = {exercise["name"]: exercise["verdict"] for exercise in report["exercises"]}
    assert (verdicts["shard_batch"], verdicts["copy_to_group"]) == ("unreadable", "not attempted")


@pytest.mark.parametrize(
    ("path", "words"),
    [("missing.py", "missing.py: there is no such file"), (".", "is a folder: give the path of a notebook")],
)
def test_a_path_that_leads_nowhere_is_status_2(path: str, words: str, tmp_path: Path) -> None:
    result, report = run(tmp_path, tmp_path / path)
    assert (result.exit_code, report["verdict"]) == (2, "could not grade")
    assert words in result.output and result.output.count("\n") == 1


def test_a_report_that_can_not_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{CORRECT}")
    for report in (tmp_path / "no such folder" / "report.json", Path("/proc/report.json")):
        result = CliRunner().invoke(grade, [str(tmp_path / "mine.py"), *QUICK, "--json", str(report)])
        assert result.exit_code == 2
        assert result.output.startswith(f"grade: the report can not be written to {report}: ")
        assert result.output.count("\n") == 1
    assert not (tmp_path / "ran").exists()


def test_what_nobody_expected_is_status_2_with_its_traceback_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grader.grading.find_work", lambda path, only: {}["an odd fault"])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    result, report = run(tmp_path, "mine.py")
    assert (result.exit_code, report["verdict"]) == (2, "could not grade")
    assert "this is a fault of the grader, not of the submission: KeyError: 'an odd fault'" in result.output
    assert result.output.count("\n") == 1 and result.output == f"grade: {report['message']}\n"
    file = Path(report["message"].rpartition(" ")[2])
    assert file.parent == tmp_path and "Traceback (most recent call last)" in file.read_text()


def test_the_machines_own_faults_say_what_to_do() -> None:
    full = OSError(28, "No space left on device", "/tmp/x")
    assert unforeseen(full).startswith("there is no space left on a disk, here or in the folder for tempor")
    assert "`make grade` sets up what the course needs" in unforeseen(
        ModuleNotFoundError("No module named 'rich'", name="rich")
    )


def test_all_runs_of_a_submission_have_an_end(tmp_path: Path) -> None:
    limits = ["--total-timeout", "5", "--jobs", "1"]
    names = ["--only", "copy_to_group", "--only", "reduce_from_group", "--ranks", "1", "--isolation", "off"]
    (tmp_path / "mine.py").write_text(
        twisted("while True: pass") + "\ndef reduce_from_group(x, group):\n    while True: pass\n"
    )
    result, report = run(tmp_path, tmp_path / "mine.py", *names, *limits)
    assert (result.exit_code, report["verdict"]) == (1, "not passed")
    assert [exercise["verdict"] for exercise in report["exercises"]] == ["hung", "hung"]
    said = " ".join(result.output.split())
    assert "had used up the time for all of them" in said
    assert "`grade --total-timeout` allows more seconds" in said


# In a process of its own


def grade_in(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*command], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, timeout=300
    )


@pytest.mark.parametrize(
    "environment",
    [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}],
)
def test_where_the_output_is_ascii_marks_are_letters(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def copy_to_group(x, group):\n    raise ValueError('日本 — ok')\n")
    done = grade_in(environment, sys.executable, "-m", "grader", str(tmp_path / "mine.py"), *QUICK)
    assert done.returncode == 1, done.stderr
    text = done.stdout.decode("ascii")
    assert "x copy_to_group: crashed" in text
    assert "ValueError: \\u65e5\\u672c - ok" in text


def test_without_loopback_the_next_step_is_told(tmp_path: Path, without_network: list[str]) -> None:
    (tmp_path / "mine.py").write_text(CORRECT)
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "grader", str(tmp_path / "mine.py"), *QUICK, "--json", str(report)]
    done = grade_in({}, *without_network, *command)
    assert done.returncode == 2
    assert b"loopback interface, and it is down: raise it, as root, with `ip link set lo up`" in done.stderr
    assert json.loads(report.read_text())["verdict"] == "could not grade"


@pytest.mark.parametrize("asked", [["list"], ["mine.py", *QUICK]], ids=["list", "run"])
def test_where_nobody_reads_on_the_status_is_not_the_learners(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CORRECT)
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as nobody:
        command = [sys.executable, "-m", "grader", *asked]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=nobody, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (2, b"")


def test_no_module_is_taken_from_where_one_stands(tmp_path: Path) -> None:
    for name in ("click", "rich", "torch", "lessons"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the one that was meant')")
    done = subprocess.run(
        [sys.executable, "-m", "grader", "list"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "") and "copy_to_group" in done.stdout


def test_without_docstrings_the_next_step_is_told() -> None:
    done = grade_in({"PYTHONOPTIMIZE": "2"}, sys.executable, "-m", "grader", "solutions", *QUICK)
    assert done.returncode == 2 and b"unset PYTHONOPTIMIZE" in done.stderr


def test_who_reads_only_the_first_lines_sees_no_traceback() -> None:
    reader = f"{shlex.quote(sys.executable)} -m grader list | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = grade_in({}, "bash", "-c", reader)
    assert done.stderr == b""
