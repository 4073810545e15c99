"""Reads a submission as text: which exercises it defines, and which are still the stub. Runs nothing."""

import ast
import contextlib
import hashlib
import sysconfig
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from grader.judging.reading import UnreadableError, at_most, read_regular_file, refuse_endless_source
from grader.ranks.isolation import ROOT
from grader.ranks.launcher import Code
from nanogpt.implementation import Cell, read_cells

READING_SECONDS = 30
_PARSER = threading.Lock()
"""Several threads that parse at a time can end in a SystemError of Python 3.11's parser."""

COURSE_PACKAGES = ("nanogpt", "solutions", "grader", "torch", "lessons")


def is_learners(file: str) -> bool:
    """Whether a code file can be the learner's: not installed, not Python's, not the course's."""
    path = Path(file)
    others = [Path(sysconfig.get_path("stdlib")), *(ROOT / name for name in COURSE_PACKAGES)]
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return path.suffix == ".py" and not installed and not any(folder in path.parents for folder in others)


@dataclass(frozen=True)
class Submission:
    """A notebook or `.py` file, as cells of source."""

    path: Path
    cells: tuple[Cell, ...]
    module: str = ""
    """Set for the course's own solutions: imported by this name instead of run from source."""
    trusted: bool = False
    definitions: dict[str, ast.AST] = field(default_factory=dict)
    """Top-level name → its last definition; imports from the course or torch do not count."""
    borrowed: frozenset[str] = frozenset()
    """Names that it imports from the course's own solutions."""
    open_ended: bool = False
    """It has an `import *`, so more names may exist than can be seen."""
    sha256: str = ""
    """Of the file as it was read."""
    fault: str = ""
    """Why nothing in it can be graded, as a sentence."""

    def locate(self, file: str, line: int) -> str:
        """Where code is, in the learner's words: "cell 3, line 7: `y = x`"; "" for others' code."""
        for cell in self.cells:
            if cell.label == file:
                lines = cell.source.splitlines()
                text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
                return f"{file}, line {line}: `{text}`" if text else f"{file}, line {line}"
        beside = not self.trusted and self.path.parent.resolve() in Path(file).parents
        return f"{Path(file).name}, line {line}" if beside and is_learners(file) else ""

    def code(self, skip: frozenset[str] = frozenset(), lent: tuple[tuple[str, str], ...] = ()) -> Code:
        """What the ranks run; `skip` holds the sources of cells to leave out, `lent` is as in Code."""
        cells = tuple(
            (cell.label, cell.source) for cell in self.cells if not cell.error and cell.source not in skip
        )
        directory = str(self.path.parent.resolve())
        return Code(
            cells=cells,
            module=self.module,
            directory="" if self.trusted else directory,
            trusted=self.trusted,
            lent=() if self.trusted else lent,
        )

    def broken_cells(self) -> list[str]:
        """What is no Python, one sentence a cell."""
        return [cell.error for cell in self.cells if cell.error]


def read_submission(path: Path, *, module: str = "", trusted: bool = False) -> Submission:
    """Read a notebook or `.py` file: a regular one, and nothing that a link leads to.

    Raises:
        UnreadableError: one sentence: a link, not a notebook, not Python.
        NothingToReadError: one sentence: there is no such file, or this user may not read it.
    """
    data = read_regular_file(path)
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        return replace(_from_bytes(path, data, module, trusted), sha256=sha256)
    except UnreadableError as error:
        raise UnreadableError(str(error), sha256) from None


def _from_bytes(path: Path, data: bytes, module: str, trusted: bool) -> Submission:
    with _PARSER, warnings.catch_warnings(), at_most(READING_SECONDS, path):
        warnings.simplefilter("ignore")  # an odd escape in a string, or a cell without an id, is no fault
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UnreadableError(f"{path} is not text in UTF-8: save it as that") from None
        refuse_endless_source(path, text)
        try:
            cells = tuple(read_cells(path, tolerant=path.suffix == ".ipynb", text=text))
            return from_cells(path, cells, module=module, trusted=trusted)
        except ValueError as error:
            raise UnreadableError(str(error)) from None
        except RecursionError:
            raise UnreadableError(f"{path} has code that is nested too deep to be read") from None


def from_cells(path: Path, cells: tuple[Cell, ...], *, module: str = "", trusted: bool = False) -> Submission:
    """A submission from cells that have been read already."""
    definitions: dict[str, ast.AST] = {}
    borrowed: set[str] = set()
    open_ended = False
    for cell in cells:
        if cell.error:
            continue
        tree = _parsed(cell.source)
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "solutions":
                borrowed |= {alias.asname or alias.name for alias in node.names}
        for name, node in _defined(tree.body):
            if name == "*":
                open_ended = True
            else:
                definitions[name] = node
    return Submission(path, cells, module, trusted, definitions, frozenset(borrowed), open_ended)


@lru_cache
def _parsed(source: str) -> ast.Module:
    """Of a notebook that is checked again, or of one mistake after the other, most cells are as they were."""
    return ast.parse(source)


def _statements(body: list[Any]) -> Iterator[ast.AST]:
    """All statements, however deep: of a tree's nodes a tenth. A chain of elif lies as deep as it is long."""
    left = list(body)
    while left:
        node = left.pop()
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, part, [])


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """What statements at the top define, also those in a branch, in the order of the lines."""
    left = body[::-1]
    while left:
        node = left.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Assign(value=ast.Call(func=ast.Name(id="own"))):
                pass  # another lesson's exercise is fetched, not answered
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    for leaf in ast.walk(target):
                        if isinstance(leaf, ast.Name):
                            yield leaf.id, node
            case ast.Expr(value=ast.NamedExpr(target=ast.Name(id=name))):
                yield name, node
            case ast.ImportFrom() if (node.module or "").split(".")[0] not in COURSE_PACKAGES:
                for alias in node.names:
                    yield alias.asname or alias.name, node
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While() | ast.Match():
                handlers = [part.body for part in getattr(node, "handlers", getattr(node, "cases", []))]
                parts = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")] + handlers
                left += [inner for part in parts for inner in part][::-1]


def is_untouched(node: ast.AST, given: ast.AST | None) -> bool:
    """Whether a definition is what the lesson gave, or says nothing: `pass`, `...`, NotImplementedError."""
    if given is not None and _alike(node, given):
        return True
    if isinstance(node, ast.FunctionDef):
        return _is_empty(node.body)
    if isinstance(node, ast.ClassDef):
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        others = [
            item for item in node.body if not isinstance(item, ast.FunctionDef) and not _says_nothing(item)
        ]
        return (
            not others
            and all(_is_empty(method.body) for method in methods)
            and not node.bases[1:]
            and (bool(methods) or not node.bases)
        )
    return False


def _alike(node: ast.AST, given: ast.AST) -> bool:
    with contextlib.suppress(RecursionError):  # nested deeper than anything that a lesson gives
        return ast.dump(node) == ast.dump(given)
    return False


def _is_empty(body: list[ast.stmt]) -> bool:
    return all(_says_nothing(statement) for statement in body)


def _says_nothing(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Raise(exc=ast.Name(id="NotImplementedError")):
            return True
        case ast.Raise(exc=ast.Call(func=ast.Name(id="NotImplementedError"))):
            return True
    return False
