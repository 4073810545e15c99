"""Which side of the line a file of the grader is on is seen from where it lies, and holds."""

import ast
from pathlib import Path

from grader.judging.course import lessons
from grader.judging.numbers import ask
from grader.ranks.launcher import ROOT, Code, Launcher, Limits

FILES = sorted((ROOT / "grader").rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, *, inside_functions: bool) -> set[str]:
    """The grader's own modules that a file imports."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if inside_functions else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    modules = {name_of(file) for file in FILES}
    return {name for name in found if name.startswith("grader.")} & modules


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 2 or parts[-1] in ("judging", "ranks", "beside") else ""


def test_no_room_imports_what_lies_across_the_line() -> None:
    allowed = {"judging": {"judging", "ranks"}, "ranks": {"ranks", "beside"}, "beside": {"beside", "ranks"}}
    for path in FILES:
        here = room(name_of(path))
        if here:
            there = {other: room(other) for other in imports_of(path, inside_functions=True)}
            wrong = {other for other, its in there.items() if its not in allowed[here]}
            assert not wrong, f"{name_of(path)} imports {wrong}"


def test_no_file_imports_its_importer() -> None:
    graph = {name_of(path): imports_of(path, inside_functions=False) - {name_of(path)} for path in FILES}
    graph = {name: {other for other in found if other in graph} for name, found in graph.items()}
    while free := [name for name, found in graph.items() if not found]:
        graph = {name: found - set(free) for name, found in graph.items() if name not in free}
    assert not graph, f"a circle, or what imports it: {sorted(graph)}"


def test_a_lessons_checks_need_one_import_of_the_grader() -> None:
    folders = [ROOT / "lessons" / "shared", *(lesson.directory / "checks" for lesson in lessons())]
    for folder in folders:
        for path in folder.rglob("*.py"):
            found = imports_of(path, inside_functions=True)
            assert found <= {"grader.checks"}, f"{path.relative_to(ROOT)} imports {found}"


def test_what_lies_with_all_lessons_is_needed_by_two() -> None:
    shared = ROOT / "lessons" / "shared"
    for path in shared.glob("[!_]*.py"):
        name = f"lessons_shared.{path.stem}"
        needs = {
            each.name for each in lessons() if f"from {name} import" in texts_of(each.directory / "checks")
        }
        inside = f"from .{path.stem} import" in texts_of(shared)
        assert inside or len(needs) > 1, f"{name} is imported by {needs or 'no lesson'}"


def texts_of(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.rglob("*.py"))


def test_nothing_that_judges_is_in_a_rank(launcher: Launcher) -> None:
    """What a probe uses of the judge's side came by value; the judge's modules never enter the process."""
    look = "import sys\ndef answer(config): return [n for n in sys.modules if n.startswith('grader.')]"
    report = launcher.run(ask, Code(cells=(("cell 1", look),)), [("answer", [[1]])], limits=Limits())
    (names,) = report.ranks[0].result
    assert "grader.beside.worker" in names
    assert not [name for name in names if room(name) not in ("beside", "ranks")], names
