"""What follows a green check: the learner's own mesh at work."""

from typing import Any

from grader import run_ranks
from lessons.three_axes import measures
from lessons.three_axes.measures import sizes_of
from solutions.context_parallel import context_parallelize
from solutions.data_parallel import DataParallel
from solutions.tensor_parallel import tensor_parallelize


def parallelize_on_mesh(yours: Any) -> None:  # the name of its exercise
    """What one rank of four sends along each axis in a step, on every way to lay out two axes."""
    techniques = {"tensor": tensor_parallelize, "context": context_parallelize, "data": DataParallel}
    print("MB that a rank sends in a step, with your assembly of the course's techniques:")
    print(f"{'':18} {'data':>7} {'context':>9} {'tensor':>8}")
    meshes = (sizes_of(data=2, tensor=2), sizes_of(data=2, context=2), sizes_of(context=2, tensor=2))
    cases = [(yours, techniques, sizes) for sizes in meshes]
    found = run_ranks(measures.each, measures.one_step, cases, ranks=4)[0]
    for sizes, sent in zip(meshes, found, strict=True):
        told = " × ".join(axis for axis in sizes if sizes[axis] > 1)
        numbers = [sent[axis] / 1e6 for axis in ("data", "context", "tensor")]
        print(f"{told:18} {numbers[0]:7.2f} {numbers[1]:9.2f} {numbers[2]:8.2f}")
    print("Which of the three would you let leave the machine? Section 6 puts times to it.")
