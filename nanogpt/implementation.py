"""Reads a person's notebook or `.py` file: as source, cell by cell, and as a namespace of its definitions.

A notebook is run as a person would run it, except that a cell which fails does not end the run: its
error is kept, and told when something that it should have defined is needed.
"""

import ast
import contextlib
import importlib.util
import io
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

# nbformat takes in jsonschema, which builds forty grammars for a check of addresses that no notebook has: a
# second or two, ten times all the rest. Where it can not import them it does without that check.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
import nbformat  # noqa: E402

_MAGIC = re.compile(r"\s*(%|!|\?|[\w.]+\?{1,2}\s*$)")
_ASSIGNED_MAGIC = re.compile(r"\s*[\w.,\s\[\]]+?\s*=\s*(%\w|!\S)")
_TIMED_STATEMENT = re.compile(r"(\s*)%time\s+(.+)")
_IMPORTED = re.compile(r"(?:import|from)[^,;#()'\"\r\n]*")
_GOES_ON = re.compile(r"\\(?:\r\n|\r|\n)")
_DOT_BEFORE_A_NAME = re.compile(r"\.\s*[^\s.]")
MOST_DOTS = 100
"""In the name of a module: Python's parser takes memory by its square, and nothing ends it meanwhile."""
MOST_QUOTED = 100
"""Characters of a line."""
PYTHON = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
"""What reads it here: a newer one may know more."""
_CELL_MAGIC_AROUND_PYTHON = re.compile(r"%%(time|capture|prun)\b")


@dataclass(frozen=True)
class Cell:
    """One piece of source that runs as a whole."""

    label: str
    """How a message names it: "cell 7" (of all cells, text included, from 1), or the file's name."""
    source: str
    """Python without IPython's magics; line n is line n of the cell as the person sees it."""
    tags: tuple[str, ...] = ()
    """The cell's tags; "demo" marks one that only shows something."""
    error: str = ""
    """Why this is not Python, with the line, as a sentence; empty when it is."""


def read_cells(
    path: str | os.PathLike[str], *, tolerant: bool = False, text: str | None = None
) -> list[Cell]:
    """The code of a notebook, cell by cell in order, or of a `.py` file as one cell. Runs nothing.

    Empty cells are left out. Magic lines (`%`, `!`, `?`) become `pass`, a cell magic (`%%`) comments out
    its cell. A cell that is not Python raises, or with `tolerant` has its `error` set instead, so that
    the other cells can be used; demo cells never raise. What has been read already is given as `text`.

    Raises:
        ValueError: one sentence: no such file, not readable, not a notebook, not Python.
    """
    path = Path(path)
    if path.suffix not in (".ipynb", ".py"):
        raise ValueError(f"{path}: expected a notebook (.ipynb) or a Python file (.py)")
    text = _read_text(path) if text is None else text
    cells = _notebook_cells(path, text) if path.suffix == ".ipynb" else [_cell(path.name, text)]
    for cell in cells:
        if cell.error and not tolerant and "demo" not in cell.tags:
            raise ValueError(f"{path}: {cell.error}")
    return cells


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the path of a notebook (.ipynb) or a Python file (.py)")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8: save it as that") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {_one_line(error)}") from None


def _notebook_cells(path: Path, text: str) -> list[Cell]:
    try:
        notebook = nbformat.reads(text, as_version=4)
        cells = [
            _cell(
                f"cell {number}",
                without_magics(cell.source),
                tuple(map(str, cell.metadata.get("tags") or ())),
            )
            for number, cell in enumerate(notebook.cells, start=1)
            if cell.cell_type == "code"
        ]
    except Exception as error:  # nbformat lets through whatever json, its schema or a missing key raises
        told = type(error).__module__.partition(".")[0] in ("nbformat", "jsonschema", "json")
        what = (
            _one_line(error)
            if told
            else "its parts are not what Jupyter writes. If it opens there, save it anew"
        )
        raise ValueError(f"{path} is not a notebook: {what}") from None
    return [cell for cell in cells if cell.source.strip()]


def _cell(label: str, source: str, tags: tuple[str, ...] = ()) -> Cell:
    try:
        _refuse_endless_names(source)
        compile(source, label, "exec", dont_inherit=True)
    except SyntaxError as error:
        quoted = f" at {error.text.strip()[:MOST_QUOTED]!r}" if error.text and error.text.strip() else ""
        line = f", line {error.lineno}" if error.lineno else ""
        return Cell(label, source, tags, f"{label}{line}: {error.msg}{quoted} ({PYTHON})")
    except (ValueError, RecursionError, MemoryError) as error:
        return Cell(label, source, tags, f"{label}: not Python, {_one_line(error)}")
    return Cell(label, source, tags)


def without_magics(source: str) -> str:
    """A cell with IPython's own lines turned into `pass` or comments; lines keep their numbers."""
    lines = source.split("\n")
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    lines = [line.removeprefix(indent) for line in lines]  # as IPython does where the first line has one
    if lines[first].startswith("%%"):
        if not _CELL_MAGIC_AROUND_PYTHON.match(lines[first]):
            return "\n".join(f"# {line}" for line in lines)
        lines[first] = f"# {lines[first]}"
    if _parse_error("\n".join(lines)) is None:
        return "\n".join(lines)  # `%` at the start of a line may well be Python, inside brackets
    for number, line in enumerate(lines):
        if not (_MAGIC.match(line) or _ASSIGNED_MAGIC.match(line)) or _continues(lines[:number]):
            continue
        indent = line[: len(line) - len(line.lstrip())]
        timed = _TIMED_STATEMENT.match(line)
        lines[number] = indent + (timed[2] if timed else f"pass  # {line.strip()}")
        if line.rstrip().endswith("\\") and number + 1 < len(lines):  # the command goes on in the next line
            lines[number + 1] = f"# {lines[number + 1]}"
    return "\n".join(lines)


def _continues(lines: list[str]) -> bool:
    """Whether a line after these would stand inside an open bracket or string, or after a backslash."""
    error = _parse_error("\n".join(lines))
    if lines and lines[-1].endswith("\\") and not lines[-1].lstrip().startswith("#"):
        return True
    return error is not None and ("never closed" in error or "unterminated triple-quoted" in error)


def _parse_error(source: str) -> str | None:
    try:
        _refuse_endless_names(source)
        ast.parse(source)
    except SyntaxError as error:
        return error.msg or "not Python"
    except (ValueError, RecursionError, MemoryError) as error:
        return _one_line(error)
    return None


def _refuse_endless_names(source: str) -> None:
    """Raise ValueError before what the parser has no limit for."""
    for imported in _IMPORTED.finditer(_GOES_ON.sub(" ", source)):
        if len(_DOT_BEFORE_A_NAME.findall(imported[0])) > MOST_DOTS:
            raise ValueError(f"the import of a name with more than {MOST_DOTS} dots")


class Definitions(SimpleNamespace):
    """What a file's cells defined, as attributes; a missing one is an AttributeError that says why."""

    def __init__(
        self, path: Path, cells: list[Cell], failures: dict[str, str], names: dict[str, object]
    ) -> None:
        super().__init__(**names)
        self.__dict__["_why_missing"] = lambda name: _why_missing(name, path, cells, failures)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(self.__dict__["_why_missing"](name), name=name, obj=self)


def _why_missing(name: str, path: Path, cells: list[Cell], failures: dict[str, str]) -> str:
    text = f"{path} does not define {name}"
    defining = re.compile(
        rf"^(def|class|async def)\s+{re.escape(name)}\b|^{re.escape(name)}\s*[:=]", re.MULTILINE
    )
    should = [cell.label for cell in cells if cell.label in failures and defining.search(cell.source)]
    for label in should or list(failures)[:1]:
        return f"{text}: {failures[label]}"
    return text


def load_implementation(path: str | os.PathLike[str]) -> SimpleNamespace:
    """Runs a notebook or `.py` file and returns its definitions as attributes.

    Cells run in order in one module, without demo cells, with nothing printed. What cells call of the
    package `grader` does nothing meanwhile. A cell that raises is passed over; reading an attribute that is
    missing because of it is an AttributeError with that cell and its error.

    Raises:
        ValueError: one sentence: the file cannot be read as a notebook or as Python.
    """
    path = Path(path)
    cells = read_cells(path, tolerant=path.suffix == ".ipynb")
    module = ModuleType("implementation_" + re.sub(r"\W", "_", path.stem))
    module.__file__ = str(path)
    module.__dict__.update(display=_nothing, get_ipython=_NoShell)
    sys.modules[module.__name__] = module  # dataclasses and pickle look a class's module up by its name
    if str(path.parent.resolve()) not in sys.path:
        sys.path.append(str(path.parent.resolve()))  # helper modules beside the file
    failures: dict[str, str] = {}
    with (
        _silent_grader(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        for cell in cells:
            if "demo" not in cell.tags and (failure := _run(cell, module, path)):
                failures[cell.label] = failure
    names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return Definitions(path, cells, failures, names)


def require(implementation: object, name: str) -> object:
    """The attribute `name` of an implementation.

    Raises:
        ValueError: it is not there; the sentence says which cell failed, if one did.
    """
    try:
        return getattr(implementation, name)
    except AttributeError as error:
        raise ValueError(str(error)) from None


def _run(cell: Cell, module: ModuleType, path: Path) -> str:
    """Runs a cell in the module; what went wrong as a sentence, or nothing."""
    if cell.error:
        return cell.error
    filename = f"<{path.name}, {cell.label}>"
    # The source is kept where inspect.getsource and tracebacks look for it.
    linecache.cache[filename] = (len(cell.source), None, cell.source.splitlines(True), filename)
    try:
        exec(compile(cell.source, filename, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == filename]
        where = f", line {lines[-1]}" if lines else ""
        return f"{cell.label}{where} failed with {type(error).__name__}: {_one_line(error)}"
    return ""


@contextlib.contextmanager
def _silent_grader() -> Iterator[None]:
    """In place of the package `grader`, one whose functions for notebooks do nothing.

    Its other modules stay importable from their usual place, if it is installed.
    """
    stand_in = ModuleType("grader")
    names = dict.fromkeys(("check", "guess", "own", "run_ranks"), _nothing)
    stand_in.__dict__.update(names, __path__=[])
    before = sys.modules.get("grader")
    if before is not None:
        stand_in.__path__ = list(getattr(before, "__path__", []))
    elif (spec := importlib.util.find_spec("grader")) is not None:
        stand_in.__path__ = list(spec.submodule_search_locations or [])
    sys.modules["grader"] = stand_in
    try:
        yield
    finally:
        del sys.modules["grader"]
        if before is not None:
            sys.modules["grader"] = before


def _nothing(*args: object, **kwargs: object) -> None:
    """Does nothing, for any arguments."""


class _NoShell:
    """What get_ipython() gives here: in a script that nbconvert has made, magics are calls of its methods."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__
