"""Opens the course in JupyterLab: `make lab`. Arguments go on to JupyterLab."""

import os
import sys
import tempfile
from pathlib import Path

from jupyter_core import paths

FOLDERS = {
    "JUPYTER_CONFIG_DIR": paths.jupyter_config_dir,
    "JUPYTER_DATA_DIR": paths.jupyter_data_dir,
    "JUPYTER_RUNTIME_DIR": paths.jupyter_runtime_dir,
    "IPYTHONDIR": lambda: os.environ.get("IPYTHONDIR", "~/.ipython"),
    "MPLCONFIGDIR": lambda: os.environ.get("MPLCONFIGDIR", "~/.config/matplotlib"),
}
"""Where Jupyter and what runs in it keep their own things, and how each finds the place."""


def main() -> None:
    """Become JupyterLab."""
    home = Path(os.path.expanduser("~"))
    if not home.is_absolute():  # a user whom the system does not know, as containers may start one
        home = Path(tempfile.mkdtemp(prefix="scale-by-hand-jupyter-"))
        os.environ["HOME"] = str(home)
        print(f"This user has no home: Jupyter keeps its settings in {home}", file=sys.stderr)
    if stuck := [name for name, folder in FOLDERS.items() if not can_write(Path(folder()).expanduser())]:
        instead = Path(tempfile.mkdtemp(prefix="scale-by-hand-jupyter-"))
        print(f"{home} can not be written: Jupyter keeps its settings in {instead}", file=sys.stderr)
        os.environ.update({name: str(instead / name.lower()) for name in stuck})
    commands = str(Path(sys.executable).parent)  # such as `grade`, for cells that begin with "!"
    os.environ["PATH"] = os.pathsep.join([commands, os.environ.get("PATH", os.defpath)])
    command = [sys.executable, "-m", "jupyterlab", "--LabApp.default_url=/lab/tree/lessons"]
    if os.getuid() == 0:  # Jupyter refuses to run as root, which is who you are on most pods
        command.append("--allow-root")
    os.execv(sys.executable, [*command, *sys.argv[1:]])


def can_write(folder: Path) -> bool:
    """Whether a folder can be made, or is there and can be written: something is made there, and removed."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
