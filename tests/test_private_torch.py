"""No private module of torch is needed: these come and go with its versions."""

import ast
from pathlib import Path

import pytest

from grader.judging.verdicts import Verdict
from grader.ranks import forkserver, server
from grader.ranks.launcher import ROOT, Launcher
from tests.attempts import look, twisted

ALLOWED = (
    "torch.utils._python_dispatch",  # where "Extending PyTorch" finds TorchDispatchMode: no public name
    "torch._subclasses.fake_tensor",  # pages follow a step of GPT-2 without its memory: no public name
    "torch.distributed.tensor.experimental._attention",  # PyTorch's own ring, asked for by name, on CUDA
)

WITHOUT_PRIVATE_MODULES = """
import sys

class Refuse:
    def find_spec(name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_globals["__name__"]:
            frame = frame.f_back
        private = name.startswith("torch.") and any(part[0] == "_" for part in name.split("."))
        if private and not frame.f_globals["__name__"].startswith("torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse)
"""


def is_private(name: str) -> bool:
    return name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))


def imported(path: Path) -> set[str]:
    """Everything that a file imports, by its full name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", ["grader", "nanogpt", "solutions", "lessons", "infra"])
def test_no_file_imports_one(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        private = {name for name in imported(path) if is_private(name) and not name.startswith(ALLOWED)}
        assert not private, f"{path.relative_to(ROOT)} imports {sorted(private)}"


def test_the_rank_server_starts_without_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = next(name for name in forkserver.WARM_UP if is_private(name))
    monkeypatch.setattr(server, "FORK_SERVER", WITHOUT_PRIVATE_MODULES + server.FORK_SERVER)
    ours = Launcher()
    try:
        report = look(tmp_path, twisted(f"import {missing}"), ours)
        assert f"ModuleNotFoundError: No module named '{missing}'" in report.text
        assert look(tmp_path, twisted(), ours).verdict == Verdict.PASSED
    finally:
        ours.close()
