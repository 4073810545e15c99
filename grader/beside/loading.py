"""Brings a submission to life inside a rank: runs its cells, or unpickles what a notebook sent by value."""

import importlib
import linecache
import os
import pickle
import sys
import traceback
import types
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

MODULE_NAME = "submission"
LENT = "<solutions"
"""How the file names of lent modules begin."""


class LoadError(RuntimeError):
    """A name that the check needs does not exist because the code that defines it failed."""

    def __init__(
        self,
        message: str,
        error_type: str = "LoadError",
        frames: list[list[Any]] | None = None,
        source: str = "",
    ) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.frames = frames
        self.source = source


class Names(SimpleNamespace):
    """The learner's names as attributes; a missing one says why it is missing."""

    def __init__(self, namespace: dict[str, Any], failures: list[LoadError]) -> None:
        super().__init__(**{name: value for name, value in namespace.items() if not name.startswith("__")})
        self.__dict__["_failures"] = failures

    def __getattr__(self, name: str) -> Any:
        failures = self.__dict__.get("_failures", [])
        # Of several cells that failed, the story is the one that should have defined the name.
        for failure in sorted(failures, key=lambda failure: name not in failure.source):
            raise failure
        raise LoadError(f"{name} is not defined", "NameError")


def load_submission(order: dict[str, Any]) -> Names:
    """The learner's names, from `order["cells"]` (source) or `order["pickled"]` (by value)."""
    _silence_the_grader()
    if order["guarded"]:
        _lend(order["lent"])
    if order["directory"] and order["directory"] not in sys.path:
        sys.path.append(order["directory"])
    if order["pickled"]:
        return Names(pickle.loads(order["pickled"]), [])
    if order["module"]:
        return Names(vars(importlib.import_module(order["module"])), [])
    module = types.ModuleType(MODULE_NAME)
    module.__dict__.update(display=_nothing, get_ipython=_NoShell)
    sys.modules[MODULE_NAME] = module
    failures = []
    for label, source in order["cells"]:
        if label.endswith(".py"):
            module.__file__ = os.path.join(order["directory"], label)
        linecache.cache[label] = (len(source), None, source.splitlines(keepends=True), label)
        try:
            exec(_compiled(source, label), module.__dict__)
        except (Exception, SystemExit) as error:
            frames = [[f.filename, f.lineno, f.name] for f in traceback.extract_tb(error.__traceback__)]
            failures.append(LoadError(error_text(error), type(error).__name__, frames, source))
    return Names(vars(module), failures)


@lru_cache
def _compiled(source: str, label: str) -> types.CodeType:
    """The same source is loaded anew for every run, and to compile a lesson takes most of an empty one."""
    return compile(source, label, "exec", dont_inherit=True)


class _NothingElse:
    """Finds none of the reference's modules, wherever a copy of them lies: an import path has many ends."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("solutions."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _lend(modules: list[list[str]]) -> None:
    """Make modules of the reference importable from their source; the others then can not be found."""
    package = sys.modules["solutions"] = types.ModuleType("solutions")
    package.__path__ = []
    if not any(isinstance(finder, _NothingElse) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NothingElse())
    for name, source in modules:
        label = f"{LENT}{name.removeprefix('solutions')}>"
        linecache.cache[label] = (len(source), None, source.splitlines(keepends=True), label)
        module = sys.modules[name] = types.ModuleType(name)
        exec(_compiled(source, label), module.__dict__)
        setattr(package, name.partition(".")[2], module)


def error_text(error: BaseException) -> str:
    """What an exception says; nothing when its own code fails."""
    try:
        return str(error)[:2000]
    except BaseException:
        return ""


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing, for any arguments."""


class _NoShell:
    """What get_ipython() gives here: in a script that nbconvert has made, magics are calls of its methods."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _silence_the_grader() -> None:
    """Inside a submission what the course's own cells call does nothing."""
    grader = sys.modules["grader"]
    for name in ("check", "guess", "own", "run_ranks"):
        setattr(grader, name, _nothing)
