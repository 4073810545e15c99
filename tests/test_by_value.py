"""What a notebook defines travels to ranks, also when it reaches torch's unusual modules."""

import subprocess
import sys
from pathlib import Path

import pytest

from grader.ranks.by_value import by_value

ONCE_DIFFERENTIABLE = """
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

OPERATIONS = """
import torch


def double(x):
    return torch.ops.aten.mul(x, 2)
"""

SETTINGS = """
import torch
import torch.distributed as dist


def double(x):
    assert dist.config
    return 2 * x
"""

LOADED = """
import pickle, sys, torch
double = pickle.loads(open(sys.argv[1], "rb").read())
x = torch.ones(2, requires_grad=True)
double(x).sum().backward()
print(x.grad.tolist())
"""


@pytest.mark.parametrize("cell", [ONCE_DIFFERENTIABLE, OPERATIONS, SETTINGS])
def test_function_travels(cell: str, tmp_path: Path) -> None:
    names: dict = {"__name__": "__main__"}
    exec(cell, names)
    pickled = tmp_path / "double"
    pickled.write_bytes(by_value(names["double"]))
    command = [sys.executable, "-c", LOADED, str(pickled)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[2.0, 2.0]\n"
