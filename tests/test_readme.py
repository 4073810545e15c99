"""The documents say what is true: their commands exist, their links lead somewhere, their examples run."""

import html
import re
import shlex
from pathlib import Path

import pytest
import yaml

from grader import cli
from grader.judging.course import Lesson
from grader.judging.submission import read_submission
from grader.judging.verdicts import Verdict
from infra import wrong_answer
from tests.bank import judge, mistakes

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / "infra", ROOT / "nanogpt"]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(path for folder in FOLDERS for path in folder.rglob("README.md")),
]
WORKFLOWS = sorted((ROOT / "infra" / "ci").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def grade_lines(text: str) -> list[list[str]]:
    """Arguments of every `grade …` in a text, without comments."""
    quoted = re.findall(r"`grade( [^`\n]*)?`", text)
    lines = re.findall(r"^grade\b([^\n#]*)", text, re.MULTILINE)
    return [shlex.split(arguments) for arguments in [*quoted, *lines]]


def options_of(command: str) -> set[str]:
    return {name for parameter in cli.grade.commands[command].params for name in parameter.opts}


def test_as_many_wrong_answers_are_kept_as_it_says() -> None:
    (words,) = re.findall(r"(\S+ (?:hundred|thousand)) wrong answers", (ROOT / "README.md").read_text())
    hundreds = {"Twenty-three hundred": 23, "Twenty-four hundred": 24}
    assert len(mistakes()) // 100 == hundreds[words]


@each_document
def test_every_make_target_exists(path: Path) -> None:
    text = path.read_text()
    named = re.findall(r"(?:^|`)(?:\w+=\S+ )?make ([a-z]+)", text, re.MULTILINE)
    assert set(named) <= TARGETS


@each_document
def test_every_grade_command_exists(path: Path) -> None:
    for arguments in grade_lines(path.read_text()):
        first = arguments[0] if arguments else "run"
        command = first if first in cli.grade.commands else "run"
        used = {argument for argument in arguments if argument.startswith("--")}
        assert used <= options_of(command), arguments


@each_document
def test_every_link_inside_the_repository_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@each_document
def test_every_path_in_a_command_exists(path: Path) -> None:
    for target in re.findall(r"\b(?:lessons|infra|solutions)/\d*\w+(?:/[\w.]+)+", path.read_text()):
        if "slug" not in target:
            assert (ROOT / target).exists(), target


def test_the_picture_of_a_wrong_answer_says_what_the_grader_says() -> None:
    drawn = html.unescape(re.sub(r"<[^>]+>", "", wrong_answer.PICTURE.read_text())).replace("\xa0", " ")
    told = [line.strip() for line, _ in wrong_answer.report_lines()]
    assert "✗ all_reduce_gradients: hung" in told
    assert [line for line in told if line not in drawn] == []


def test_ci_runs_what_the_readme_tells_a_person_to_run() -> None:
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line and line[0] != "#"]
    assert commands[-1] == "exec make test"
    assert all(command.startswith(("set ", "cd ")) for command in commands[:-1])
    assert "make test" in (ROOT / "README.md").read_text()


@each_workflow
def test_a_workflow_is_yaml_and_holds_no_secret(path: Path) -> None:
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    assert "secrets." not in text


@each_workflow
def test_a_workflow_runs_only_what_exists(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    for job in workflow["jobs"].values():
        for script in (step["run"] for step in job["steps"] if "run" in step):
            assert "${{" not in script, "an input in a script is a way in"
            assert set(re.findall(r"--[a-z]+", script)) <= options_of("run")
            for name in re.findall(r"(?:\.ci|infra)/\S+?(?=[)\s]|$)", script):
                assert (ROOT / name).exists(), name


def test_the_example_of_a_check_runs_and_passes_the_reference(tmp_path: Path) -> None:
    """CONTRIBUTING's checks are a real one."""
    example = next(block for block in blocks(ROOT / "CONTRIBUTING.md", "python") if "def observe" in block)
    folder = tmp_path / "99_contributing"
    folder.mkdir()
    (folder / "checks").mkdir()
    (folder / "checks" / "__init__.py").write_text(example)
    lesson = Lesson(folder)
    submission = read_submission(ROOT / "solutions" / "tensor_parallel.py", trusted=True)
    report = judge(submission, lesson, lesson.exercises["copy_to_group"])
    assert report.verdict is Verdict.PASSED
