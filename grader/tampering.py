"""Notices a submission that reads the reference, or that replaces the tools it is measured with."""

import builtins
import gc
import os
import sys
import time
import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional


class RefusedError(RuntimeError):
    """The submission did something that makes grading it pointless."""


class Guard:
    """Remembers what torch and the grader were made of, before any learner's code has run."""

    def __init__(self) -> None:
        from grader import frames, loading, measure, plain, recorder, recording, worker

        places: list[Any] = [
            builtins,
            gc,
            os,
            time,
            torch,
            torch.Tensor,
            torch._C._distributed_c10d.ProcessGroup,
            torch.nn.functional,
            torch.nn.Module,
            torch.autograd,
            torch.optim.Optimizer,
            dist,
            dist.distributed_c10d,
            frames,
            loading,
            measure,
            plain,
            recorder,
            recorder.Recorder,
            recorder.Window,
            recording,
            recording.Recording,
            worker,
            worker.Rank,
        ]
        self._before = [(place, _callables(place)) for place in places]
        self._violation = ""
        self._forbidden: tuple[str, ...] = ()
        self._installed = False

    def watch(self, forbidden: list[str]) -> None:
        """From now on, refuse to open files below the `forbidden` folders."""
        self._forbidden = tuple(os.path.realpath(path) for path in forbidden)
        if not self._installed:
            sys.addaudithook(self._audit)
            self._installed = True

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not self._forbidden or not isinstance(args[0], str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(args[0]))
        if any(path == folder or path.startswith(folder + os.sep) for folder in self._forbidden):
            name = os.path.join(os.path.basename(os.path.dirname(path)), os.path.basename(path))
            self._violation = f"it reads the course's own solution ({name})"
            raise RefusedError(self._violation)

    def verify(self) -> None:
        """Raises RefusedError when the submission read the reference or replaced a tool."""
        if self._violation:
            raise RefusedError(self._violation)
        for place, before in self._before:
            now = vars(place)
            for name, value in before.items():
                if now.get(name) is not value:
                    owner = getattr(place, "__qualname__", getattr(place, "__name__", str(place)))
                    raise RefusedError(f"it replaces {owner}.{name}")


def _callables(place: Any) -> dict[str, Any]:
    kinds = (
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        type,
        staticmethod,
        classmethod,
    )
    return {name: value for name, value in vars(place).items() if isinstance(value, kinds)}
