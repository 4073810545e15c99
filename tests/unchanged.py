"""A plugin of pytest for `make test`: the second time, what has passed and has not changed since is left out.

A test depends on every file of the repository, and on what is installed; a test of one lesson not on files
that are another lesson's alone. What has passed stands in pytest's own cache, so `--cache-clear` forgets it.
Whoever chooses tests (`-k`, `-m`, a path) means them: nothing is left out then.
"""

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PASSED = "course/passed"
OURS = "course_unchanged"
"""What a worker and the process that leads them tell each other by this name."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "cache") and names(ROOT):
        config.pluginmanager.register(Unchanged(config), OURS)


class Unchanged:
    """In a worker of pytest-xdist it leaves out and remembers; in the process that leads them, it keeps."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.left_out = 0
        self.passed: dict[str, str] = {}
        self._items: dict[str, pytest.Item] = {}
        self._fingerprints: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = Files(ROOT)
        self._items = {item.nodeid: item for item in items}
        self._fingerprints = {item.nodeid: files.fingerprint(item) for item in items}
        if not getattr(self.config, "workerinput", {OURS: everything(self.config)})[OURS]:
            return
        known = self.config.cache.get(PASSED, {})
        same = [item for item in items if known.get(item.nodeid) == self._fingerprints[item.nodeid]]
        self.left_out = len(same)
        items[:] = [item for item in items if item not in set(same)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self._fingerprints:
            if report.when == "call" and report.passed:
                self.passed[report.nodeid] = self._fingerprints[report.nodeid]
            elif not report.passed:
                self.passed.pop(report.nodeid, None)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._items:  # what was edited while the tests ran is not known to have passed
            files = Files(ROOT)
            same = {name for name in self.passed if files.fingerprint(self._items[name]) == self.passed[name]}
            self.passed = {name: self.passed[name] for name in same}
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[OURS] = (self.left_out, self.passed)
            return
        self.config.cache.set(PASSED, {**self.config.cache.get(PASSED, {}), **self.passed})
        if self.left_out and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node) -> None:
        node.workerinput[OURS] = everything(self.config)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self.left_out, passed = getattr(node, "workeroutput", {}).get(OURS, (self.left_out, {}))
        self.passed |= passed

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.left_out:
            says = "passed before, and nothing that they depend on has changed: they are left out"
            terminalreporter.write_line(f"{self.left_out} tests {says} (--cache-clear among ARGS runs all)")


def everything(config: pytest.Config) -> bool:
    """Whether nobody has chosen among the tests."""
    by_default = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return by_default and not (config.option.keyword or config.option.markexpr)


class Files:
    """What all files hold, and what is installed, at one time."""

    def __init__(self, root: Path) -> None:
        self._installed = sorted(each.name for entry in sys.path for each in Path(entry).glob("*.dist-info"))
        self._installed += [str(root), platform.platform(), platform.python_version(), str(os.cpu_count())]
        self._held = {name: held(root / name) for name in names(root)}
        self._made: dict[tuple[str, str], str] = {}

    def fingerprint(self, item: pytest.Item) -> str:
        """Of all that a test depends on."""
        test, lesson = item.nodeid.partition("::")[0], about(item)
        if (test, lesson) not in self._made:
            lines = [f"{name} {what}" for name, what in self._held.items() if matters(name, test, lesson)]
            text = "\n".join(lines + self._installed)
            self._made[test, lesson] = hashlib.sha256(text.encode()).hexdigest()
        return self._made[test, lesson]


def names(root: Path) -> list[str]:
    """All files of the repository, and what is new and not ignored; none where there is no git to ask."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return sorted(set(filter(None, listed.stdout.split("\0"))))


def held(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "nothing"


def about(item: pytest.Item) -> str:
    """The slug of the one lesson that a test is about, if it is given one."""
    given = getattr(item, "callspec", None)
    for value in given.params.values() if given else ():
        if slug := getattr(getattr(value, "lesson", value), "slug", ""):
            return slug
    return ""


def matters(name: str, test: str, lesson: str) -> bool:
    """Whether a file may change what a test finds: any file, unless the test is about one lesson."""
    path = Path(name)
    if not lesson:
        return True
    if path.parts[0] == "lessons" and path.parts[1][0].isdigit():
        return path.parts[1].partition("_")[2] == lesson
    if path.parts[0] == "solutions" and path.suffix != ".py":
        return path.name.partition(".")[0] == lesson
    if path.parts[0] == "tests" and path.name.startswith("test_"):
        return name == test
    return path.parts[0] != "docs" and not (len(path.parts) == 1 and path.suffix == ".md")
