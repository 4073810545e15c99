"""Pickles functions and classes by value, so that what a notebook defined runs in another process."""

import copyreg
import importlib
import io
import sys
from types import ModuleType
from typing import Any

import cloudpickle
from torch.utils._config_module import ConfigModule


def by_value(value: Any) -> bytes:
    """Pickle a value with the functions and classes that it is made of.

    torch keeps its settings in modules of their own types, which no pickle takes, and any function that says
    `dist` and `.config` reaches one: those travel by name.
    """
    for module in list(sys.modules.values()):
        if isinstance(module, ConfigModule):
            copyreg.pickle(type(module), _by_name)
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _by_name(module: ModuleType) -> tuple[Any, tuple[str]]:
    return importlib.import_module, (module.__name__,)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, which would copy a module that cannot be imported, such as `torch._C._functions`.

    What torch's `once_differentiable` returns reaches that one, and its copy cannot be loaded: here such
    a module is an attribute of the one that it belongs to.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and obj.__name__ not in sys.modules:
            owner, _, name = obj.__name__.rpartition(".")
            if getattr(sys.modules.get(owner), name, None) is obj:
                return getattr, (sys.modules[owner], name)
        return super().reducer_override(obj)
