"""What a notebook defines travels to ranks, also when it reaches modules that no import finds."""

import subprocess
import sys
from pathlib import Path

from grader.by_value import by_value

DEFINED = """
import torch
from torch.autograd.function import once_differentiable


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return 2 * gradient


def double(x):
    return Double.apply(x)
"""

LOADED = """
import pickle, sys, torch
double = pickle.loads(open(sys.argv[1], "rb").read())
x = torch.ones(2, requires_grad=True)
double(x).sum().backward()
print(x.grad.tolist())
"""


def test_once_differentiable_travels(tmp_path: Path) -> None:
    cell: dict = {"__name__": "__main__"}
    exec(DEFINED, cell)
    pickled = tmp_path / "double"
    pickled.write_bytes(by_value(cell["double"]))
    command = [sys.executable, "-c", LOADED, str(pickled)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[2.0, 2.0]\n"
