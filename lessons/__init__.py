"""The lessons: `lessons.data_parallel` is the folder 08_data_parallel, since no name begins with a digit."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent


class _WithoutTheNumber:
    """Finds a lesson's folder by its slug."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, slug = name.rpartition(".")
        found = HERE.glob(f"[0-9][0-9]*_{slug}") if parent == __name__ else ()
        folders = [folder for folder in found if folder.name.partition("_")[2] == slug]
        if not folders:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folders[0])]
        return spec


sys.meta_path.append(_WithoutTheNumber())
