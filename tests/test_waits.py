"""Who waits for all that it has started is right, by whatever handle; who waits for the last one is not."""

from textwrap import indent

import pytest

from grader.judging.course import find_exercise
from grader.judging.submission import read_submission
from grader.judging.verdicts import Verdict
from tests.bank import judge

HEAD = """
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

def all_reduce_gradients(model, group):
    trained, n = [p for p in model.parameters() if p.requires_grad], group.size()
    for p in trained:
        p.grad = (torch.zeros_like(p) if p.grad is None else p.grad).contiguous() / n
    grads = [p.grad for p in trained]
"""
STARTED = "works = [dist.all_reduce(g, group=group, async_op=True) for g in grads]\n"

RIGHT = {
    "each handle": STARTED + "for work in works: work.wait()",
    "backwards": STARTED + "while works: works.pop().wait()",
    "each future": STARTED + "torch.futures.wait_all([work.get_future() for work in works])",
    "polls": STARTED + "while not all([work.is_completed() for work in works]): pass",
    "blocks": "for g in grads: dist.all_reduce(g, group=group)",
    "one at a time": """
work = None
for g in grads:
    if work is not None: work.wait()
    work = dist.all_reduce(g, group=group, async_op=True)
work.wait()""",
    "coalesced": """
with dist._coalescing_manager(group, async_ops=True) as together:
    for g in grads: dist.all_reduce(g, group=group)
together.wait()""",
    "coalesced, blocks": """
with dist._coalescing_manager(group):
    for g in grads: dist.all_reduce(g, group=group)""",
    "one call": "dist.all_reduce_coalesced(grads, group=group, async_op=True).wait()",
    "flat, and the last handle": """
flat = _flatten_dense_tensors(grads)
work = dist.all_reduce(flat, group=group, async_op=True)
work.wait()
for p, g in zip(trained, _unflatten_dense_tensors(flat, grads)): p.grad = g""",
    "functional": """
for p in trained: p.grad = functional.wait_tensor(functional.all_reduce(p.grad, 'sum', group))""",
    "functional, all at once": """
sums = functional.all_reduce_coalesced(grads, 'sum', group)
for p, g in zip(trained, sums): p.grad = functional.wait_tensor(g)""",
    "functional, waits where it is used": """
sums = [functional.all_reduce(g, 'sum', group) for g in grads]
for p, g in zip(trained, sums): p.grad = g + 0""",
    "functional, waits when it is read": """
for p in trained: p.grad = functional.all_reduce(p.grad, 'sum', group)""",
    "in two halves": """
for p in trained:
    flat = p.grad.new_zeros(-(-p.numel() // n) * n)
    flat[:p.numel()] = p.grad.flatten()
    part = torch.empty_like(flat[:flat.numel() // n])
    first = dist.reduce_scatter_tensor(part, flat, group=group, async_op=True)
    first.wait()
    dist.all_gather_into_tensor(flat, part, group=group, async_op=True).wait()
    p.grad = flat[:p.numel()].view_as(p)""",
    "the group's own method": "for g in grads: group.allreduce([g]).wait()",
    "the backend's": "for g in grads: group._get_backend(g.device).allreduce([g]).wait()",
}
WRONG = {
    "the last": STARTED + "works[-1].wait()",
    "the first": STARTED + "works[0].wait()",
    "none": STARTED,
    "the last, by its future": STARTED + "works[-1].get_future().wait()",
    "two of them": STARTED + "works[1].wait()\nworks[-1].wait()",
    "a barrier": STARTED + "dist.barrier(group)",
    "all but one": STARTED + "for work in works[1:]: work.wait()",
}


def verdict(tmp_path, body: str) -> tuple[Verdict, str]:
    path = tmp_path / "submitted.py"
    path.write_text(HEAD + indent(body.strip("\n"), "    ") + "\n")
    lesson, exercise = find_exercise("all_reduce_gradients")
    report = judge(read_submission(path), lesson, exercise, ("every_all_reduce_is_over",), ranks=(2,))
    return report.verdict, "\n".join(check.text for check in report.checks)


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT)
def test_who_waits_for_all_is_right(tmp_path, body: str) -> None:
    found, text = verdict(tmp_path, body)
    assert found == Verdict.PASSED, text


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_who_waits_for_some_is_wrong(tmp_path, body: str) -> None:
    found, text = verdict(tmp_path, body)
    assert found == Verdict.WRONG and "says nothing of those that were started" in text, text
