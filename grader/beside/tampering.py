"""Notices a submission that reads the reference, or that replaces the tools it is measured with.

What this can and can not do stands in grader.isolation.
"""

import builtins
import contextlib
import gc
import json
import os
import pickle
import random
import re
import shlex
import socket
import struct
import sys
import time
import types
import weakref
from collections.abc import Callable, Sequence, Set
from functools import cache
from operator import is_, itemgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional
from torch import nn
from torch.utils import _python_dispatch

from grader.beside import recorder
from grader.ranks.event_log import EventLog

READING_GIT = {
    "archive",
    "cat-file",
    "checkout",
    "clone",
    "diff",
    "grep",
    "log",
    "restore",
    "show",
    "worktree",
}
PROCESS_EVENTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"}
_MODULE = re.compile(r"(?<![\w/.-])(?:\./)?solutions[/.](\w+)")
_IMPORT = re.compile(r"\b(?:from|import)\s+solutions\b")
FUNCTION_PARTS = {"__code__", "__defaults__", "__kwdefaults__"}
WRITES_DOWN = (recorder, recorder.Recorder, recorder.Window, EventLog)
MEASURED_WITH = (
    torch.autograd.graph.saved_tensors_hooks,
    nn.Dropout,
    nn.Embedding,
    nn.LayerNorm,
    nn.Linear,
    nn.ModuleList,
    nn.Parameter,
    nn.Sequential,
    random.Random,
    weakref,
)
"""What probes build on and the recorder uses, and not all of torch: a look at a class copies ten pages.

No optimizer, since torch itself gives these classes another `step` when the first one is made.
"""
SINGLE_TOOLS = ((sys, "_getframe"), (random, "Random"))
"""Of modules that programs change for honest reasons, such as to see more of an exception."""
OF_OBJECTS = (
    ", which all objects of the class share. Set it on the modules that are to change, and not on their class"
)
DEFAULT_DTYPE = "torch's default dtype, with torch.set_default_dtype: give the tensors that you make a dtype"
"""What a torch.Storage tells that is another one."""
MODEL = "nanogpt.model"
OURS = ("grader.", MODEL)
HARMLESS = {"print", "input", "breakpoint", "__repr__", "__str__", "__format__"}
"""What people replace for honest reasons, such as to see more of a tensor."""


class RefusedError(RuntimeError):
    """The submission did something that makes grading it pointless."""


class Guard:
    """Remembers what torch and the grader were made of, before any learner's code has run."""

    def __init__(self) -> None:
        modules = [module for name, module in sys.modules.items() if name.startswith("grader.")]
        classes = [kind for module in modules for kind in _classes_of(module)]
        others = [
            builtins,
            gc,
            json,
            os,
            pickle,
            socket,
            socket.socket,
            struct,
            time,
            torch,
            torch.Tensor,
            dist.ProcessGroup,
            torch.autograd,
            torch.nn.functional,
            torch.nn.Module,
            torch.optim.Optimizer,
            _python_dispatch,
            _python_dispatch.TorchDispatchMode,
            dist,
            dist.distributed_c10d,
            *MEASURED_WITH,
            *_classes_of(sys.modules.get(MODEL)),
        ]
        self._places = [Place(place) for place in dict.fromkeys([*others, *modules, *classes])]
        self._places += [Place(owner, {name}) for owner, name in SINGLE_TOOLS]
        self._near = [place.at_a_glance() for place in self._places if place.owner in WRITES_DOWN]
        tools = (tool for place in self._places for tool in place.tools.values())
        self._tools = frozenset(id(getattr(tool, "__func__", tool)) for tool in tools)
        self._replaced = Place.replaced  # not looked up later: a submission could put its own there
        self._violations: list[str] = []
        self._watching = False

    def watch(self, forbidden: Sequence[str], shut_in: bool) -> None:
        """From now on, refuse to read files below the `forbidden` folders, and to rewrite the grader.

        Where ranks are shut in, nothing lies in these folders: no program that they start can read it.
        """
        if not self._watching:
            folders = tuple(os.path.realpath(path) for path in forbidden)
            sys.addaudithook(_hook(folders, self._tools, self._violations, shut_in))
            self._watching = True

    def glance(self) -> None:
        """The same of what writes communication down, while it does: it may be put back afterwards."""
        for now, length, fetch, tools, place in self._near:
            if len(now) == length and all(map(is_, fetch(now), tools)):
                continue
            if name := self._replaced(place):
                self._violations.append(f"it replaces {name}")
                raise RefusedError(self._violations[0])

    def verify(self) -> None:
        """Raises RefusedError when the submission read the reference or replaced a tool."""
        if self._violations:
            raise RefusedError(self._violations[0])
        for place in self._places:
            name = self._replaced(place)
            if name:
                raise RefusedError(f"it replaces {name}")


class Place:
    """A module or class, as it was: all of it, or a few names alone."""

    def __init__(self, owner: Any, only: Set[str] = frozenset()) -> None:
        self.owner = owner
        ours = getattr(owner, "__name__", "").startswith("grader.")
        names = only or vars(owner).keys() - HARMLESS
        members = {name: value for name, value in vars(owner).items() if name in names}
        self.tools = {name: value for name, value in members.items() if _is_tool(value, ours)}
        tables = {
            name: value
            for name, value in members.items()
            if ours and type(value) is dict and name[:2] != "__"
        }
        self.tables = {name: (table, dict(table)) for name, table in tables.items()}
        self.inherited = (
            frozenset(dir(owner)) - vars(owner).keys() - HARMLESS if isinstance(owner, type) else frozenset()
        )

    def replaced(self) -> str:
        """The name of the first tool that is not what it was, or nothing."""
        now = vars(self.owner)
        for name, value in self.tools.items():
            if now.get(name) is not value:
                return self._called(name)
        for name, (table, entries) in self.tables.items():
            if now.get(name) is not table or any(table.get(key) is not entries[key] for key in entries):
                return self._called(name)
        for name in self.inherited & now.keys():
            if _is_tool(now[name], False):
                return self._called(name)
        return ""

    def at_a_glance(self) -> tuple[Any, int, itemgetter, tuple[Any, ...], "Place"]:
        """What `Guard.glance` looks at: of a module, its own functions.

        The members as they are, how many they were, what fetches tools from them, and what these were.
        """
        names = [name for name, tool in self.tools.items() if isinstance(tool, types.FunctionType)]
        now = vars(self.owner)
        return now, len(now), itemgetter(*names), tuple(now[name] for name in names), self

    def _called(self, name: str) -> str:
        module = "" if isinstance(self.owner, types.ModuleType) else f"{self.owner.__module__}."
        called = f"{module}{getattr(self.owner, '__qualname__', self.owner.__name__)}.{name}"
        if called == "torch.Storage":
            return DEFAULT_DTYPE
        is_layer = isinstance(self.owner, type) and issubclass(self.owner, nn.Module)
        return called + (OF_OBJECTS if is_layer and self.owner is not nn.Module else "")


def _classes_of(module: types.ModuleType | None) -> list[type]:
    """The classes of the course's own that a module names; none where it was not there to be imported."""
    named = vars(module).values() if module else ()
    return [value for value in named if isinstance(value, type) and value.__module__.startswith(OURS)]


def _is_tool(value: Any, modules_too: bool) -> bool:
    kinds: tuple[type, ...] = (
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        type,
        staticmethod,
        classmethod,
        property,
    )
    return isinstance(value, (*kinds, types.ModuleType) if modules_too else kinds)


def _hook(
    forbidden: tuple[str, ...], tools: frozenset[int], violations: list[str], shut_in: bool = False
) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook, which nothing can remove.

    Python calls it before it opens a file, starts a process, or gives a function other code or defaults:
    to look at those of all tools after each run would call it thousands of times.
    """

    def refuse(reason: str) -> None:
        violations.append(reason)
        raise RefusedError(reason)

    def look(path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            where = os.path.realpath(os.fsdecode(path))
            if any(_is_below(where, folder) for folder in forbidden):
                refuse(f"it reads the course's own solution ({_called(where)})")

    def look_below(path: Any) -> None:
        """A path that lies below an open folder, as os.open's `dir_fd` says without telling which."""
        is_relative = isinstance(path, str | bytes) and not os.path.isabs(path)
        if is_relative and _found_below_open_folders(path) & _held_in(forbidden):
            refuse("it reads the course's own solutions")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "object.__setattr__":
            owner, name = arguments[0], arguments[1]
            if name in FUNCTION_PARTS and (id(owner) in tools or _is_ours(owner)):
                refuse(f"it rewrites {owner.__module__}.{owner.__name__}")
        elif event in ("open", "os.link", "os.rename"):
            look(arguments[0])
            if event == "open" and arguments[1] is None and not shut_in:  # os.open
                look_below(arguments[0])
        elif event in PROCESS_EVENTS and not shut_in and _reads(event, arguments, forbidden):
            refuse("it starts a program that reads the course's own solutions")

    return hook


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("grader.")


def _called(path: str) -> str:
    """The last folder and name of a file; of a compiled module, those of its source."""
    folder, name = os.path.split(path)
    if os.path.basename(folder) == "__pycache__":
        folder, name = os.path.dirname(folder), name.partition(".")[0] + ".py"
    return f"{os.path.basename(folder)}/{name}"


def _words(arguments: tuple[Any, ...]) -> list[str]:
    """The words of the command lines among an event's arguments."""
    words: list[str] = []
    for argument in arguments:
        parts = argument if isinstance(argument, list | tuple) else [argument]
        for part in parts:
            if isinstance(part, str | bytes | os.PathLike):
                text = os.fsdecode(part)
                try:
                    words += [text, *shlex.split(text)]
                except ValueError:
                    words += text.split()
    return words


def _reads(event: str, arguments: tuple[Any, ...], forbidden: tuple[str, ...]) -> bool:
    """Whether a command line names what lies in the course's folders, or asks the course's git for it."""
    words = _words(arguments)
    where = os.fsdecode((arguments[2] if event == "subprocess.Popen" else None) or os.getcwd())
    places = [os.path.realpath(os.path.join(where, word)) for word in (*words, "")]
    if any(_is_below(place, folder) for place in places for folder in forbidden):
        return True
    if any(_IMPORT.search(word) or any(folder in word for folder in forbidden) for word in words):
        return True
    modules = {
        name.partition(".")[0] for folder in filter(os.path.isdir, forbidden) for name in os.listdir(folder)
    }
    if any(modules & set(_MODULE.findall(word)) for word in words):
        return True
    if not (any(os.path.basename(word) == "git" for word in words) and READING_GIT & set(words)):
        return False
    courses = [os.path.dirname(folder) for folder in forbidden]
    told = [*words, *_variables_of_git(arguments)]
    return any(_is_below(place, course) for place in places for course in courses) or any(
        course in word for word in told for course in courses
    )


def _variables_of_git(arguments: tuple[Any, ...]) -> list[str]:
    """What the environment of a process to be started tells git, such as where its folder is."""
    variables = next((each for each in arguments if isinstance(each, dict)), os.environ)
    return [os.fsdecode(value) for name, value in variables.items() if os.fsdecode(name).startswith("GIT_")]


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


@cache
def _held_in(folders: tuple[str, ...]) -> frozenset[tuple[int, int]]:
    """Device and inode of these folders, and of all that is in them."""
    inside = [
        os.path.join(where, name)
        for folder in folders
        for where, below, files in os.walk(folder)
        for name in (*below, *files)
    ]
    return frozenset(_identity(os.stat(path)) for path in (*folders, *inside) if os.path.exists(path))


def _found_below_open_folders(path: str | bytes) -> set[tuple[int, int]]:
    """Device and inode of what has this path below any folder that this process has open."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            found.add(_identity(os.stat(path, dir_fd=int(name))))
    return found


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
