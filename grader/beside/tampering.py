"""Notices a submission that reads the reference, or that replaces the tools it is measured with.

What this can and can not do stands in grader.isolation.
"""

import builtins
import gc
import json
import os
import pickle
import re
import shlex
import socket
import struct
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional
from torch.utils import _python_dispatch

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
FUNCTION_PARTS = {"__code__", "__defaults__", "__kwdefaults__"}
HARMLESS = {"print", "input", "breakpoint", "__repr__", "__str__", "__format__"}
"""What people replace for honest reasons, such as to see more of a tensor."""


class RefusedError(RuntimeError):
    """The submission did something that makes grading it pointless."""


class Guard:
    """Remembers what torch and the grader were made of, before any learner's code has run."""

    def __init__(self) -> None:
        modules = [module for name, module in sys.modules.items() if name.startswith("grader.")]
        classes = [
            value
            for module in modules
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__.startswith("grader.")
        ]
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
        ]
        self._places = [Place(place) for place in dict.fromkeys([*others, *modules, *classes])]
        tools = (tool for place in self._places for tool in place.tools.values())
        self._tools = frozenset(id(getattr(tool, "__func__", tool)) for tool in tools)
        self._replaced = Place.replaced  # not looked up later: a submission could put its own there
        self._violations: list[str] = []
        self._watching = False

    def watch(self, forbidden: Sequence[str]) -> None:
        """From now on, refuse to read files below the `forbidden` folders, and to rewrite the grader."""
        if not self._watching:
            folders = tuple(os.path.realpath(path) for path in forbidden)
            sys.addaudithook(_hook(folders, self._tools, self._violations))
            self._watching = True

    def verify(self) -> None:
        """Raises RefusedError when the submission read the reference or replaced a tool."""
        if self._violations:
            raise RefusedError(self._violations[0])
        for place in self._places:
            name = self._replaced(place)
            if name:
                raise RefusedError(f"it replaces {name}")


class Place:
    """A module or class, as it was."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        ours = getattr(owner, "__name__", "").startswith("grader.")
        members = {name: value for name, value in vars(owner).items() if name not in HARMLESS}
        self.tools = {name: value for name, value in members.items() if _is_tool(value, ours)}
        tables = {
            name: value
            for name, value in members.items()
            if ours and type(value) is dict and name[:2] != "__"
        }
        self.tables = {name: (table, dict(table)) for name, table in tables.items()}
        self.inherited = (
            frozenset(dir(owner)) - vars(owner).keys() if isinstance(owner, type) else frozenset()
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

    def _called(self, name: str) -> str:
        module = "" if isinstance(self.owner, types.ModuleType) else f"{self.owner.__module__}."
        return f"{module}{getattr(self.owner, '__qualname__', self.owner.__name__)}.{name}"


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
    forbidden: tuple[str, ...], tools: frozenset[int], violations: list[str]
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
            if any(where == folder or where.startswith(folder + os.sep) for folder in forbidden):
                refuse(f"it reads the course's own solution ({_called(where)})")

    def look_below(path: Any) -> None:
        """A path that lies below an open folder, as os.open's `dir_fd` says without telling which."""
        if not isinstance(path, str | bytes) or os.path.isabs(path) or os.path.lexists(path):
            return
        name = os.path.normpath(os.fsdecode(path))
        for folder in forbidden:
            if name.split(os.sep)[0] == os.path.basename(folder) or os.path.isfile(f"{folder}/{name}"):
                refuse("it reads the course's own solutions")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "object.__setattr__":
            owner, name = arguments[0], arguments[1]
            if name in FUNCTION_PARTS and (id(owner) in tools or _is_ours(owner)):
                refuse(f"it rewrites {owner.__module__}.{owner.__name__}")
        elif event in ("open", "os.link", "os.rename"):
            look(arguments[0])
            if event == "open" and arguments[1] is None:  # os.open
                look_below(arguments[0])
        elif event in PROCESS_EVENTS and _reads(_words(arguments), forbidden):
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


def _reads(words: list[str], forbidden: tuple[str, ...]) -> bool:
    if any(os.path.basename(word) == "git" for word in words) and READING_GIT & set(words):
        return True
    named = re.compile(r"(?<![\w/.-])(\./)?solutions([/.]|$)")
    return any(named.search(word) or any(folder in word for folder in forbidden) for word in words)
