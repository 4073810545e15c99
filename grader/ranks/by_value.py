"""Pickles functions and classes by value, so that what a notebook defined runs in another process."""

import importlib
import io
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import cloudpickle

_known: WeakKeyDictionary[Callable[..., Any], bytes] = WeakKeyDictionary()


def by_value(value: Any) -> bytes:
    """Pickle a value with the functions and classes that it is made of."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def function_by_value(function: Callable[..., Any]) -> bytes:
    """The same of a function, which is taken to stay as it is: a second time costs nothing.

    To find what a function is made of, all modules are looked through, which takes milliseconds.
    """
    if getattr(function, "__closure__", ()) is not None:
        return by_value(function)  # what it closes over may change
    if function not in _known:
        _known[function] = by_value(function)
    return _known[function]


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, and torch's unusual modules.

    Some are of types of their own, which no pickle takes: the settings that a function reaches which says
    `dist` and `.config`, and `torch.ops`. They travel by name. Others are in no list of modules, such as
    `torch._C._functions`, which `once_differentiable` reaches; cloudpickle would copy them, and the copy
    cannot be loaded. They travel as attributes of the module that they belong to.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType):
            known = sys.modules.get(obj.__name__)
            if known is obj and type(obj) is not ModuleType:
                return importlib.import_module, (obj.__name__,)
            owner, _, name = obj.__name__.rpartition(".")
            if known is None and getattr(sys.modules.get(owner), name, None) is obj:
                return getattr, (sys.modules[owner], name)
        return super().reducer_override(obj)
