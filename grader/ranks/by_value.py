"""Pickles functions and classes by value, so that what a notebook defined runs in another process."""

import importlib
import io
import sys
from types import ModuleType
from typing import Any

import cloudpickle


def by_value(value: Any) -> bytes:
    """Pickle a value with the functions and classes that it is made of."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


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
