"""Pickles functions and classes by value, so that what a notebook defined runs in another process."""

import copyreg
import importlib
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
    return cloudpickle.dumps(value)


def _by_name(module: ModuleType) -> tuple[Any, tuple[str]]:
    return importlib.import_module, (module.__name__,)
