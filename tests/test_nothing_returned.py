"""A forward without a return is the learner's mistake, and no check fails over what is not there."""

import pytest

from grader.judging.course import lessons
from grader.judging.verdicts import Verdict
from tests.bank import Mistake, judge

RETURNS = {
    "ColumnParallelLinear": "\n        return gather_from_group(y, self.group) if self.gather_output else y",
    "RowParallelLinear": "\n        return y if self.bias is None else y + self.bias",
    "VocabParallelEmbedding": (
        "\n        return reduce_from_group(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)"
    ),
}


@pytest.mark.parametrize("name", RETURNS)
def test_a_forward_that_returns_nothing_is_wrong(name: str) -> None:
    lesson = next(each for each in lessons() if each.slug == "tensor_parallel")
    edit = (RETURNS[name], RETURNS[name].replace("return ", ""))
    forgotten = Mistake(lesson, "no_return", name, why="", check="", says="None", edits=(edit,))
    report = judge(forgotten.submission(), lesson, lesson.exercises[name], ranks=(2,))
    assert report.verdict == Verdict.WRONG, [check.text for check in report.checks]
    assert not [check.text for check in report.checks if check.verdict == Verdict.GRADER_ERROR]
