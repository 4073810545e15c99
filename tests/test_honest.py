"""Correct submissions of every style pass: a false accusation is the worst fault that a grader can have."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from grader.judging.course import find_exercise
from grader.judging.judge import Settings, grade_submission
from grader.judging.trial import Layout, Trial
from grader.judging.verdicts import CheckReport, ExerciseReport, Verdict, combine
from grader.ranks.isolation import Isolation
from grader.ranks.launcher import Code, Launcher, Limits
from grader.work import find_work
from tests.attempts import BACKWARD, CORRECT, FORWARD, MECHANISM, grade, look, twisted

ALL = (FORWARD, BACKWARD, MECHANISM)

STYLES = {
    "prints, warns and logs": """
        import logging, warnings
        logging.basicConfig(level=logging.DEBUG)
        print("x is", x, "ünïcode 日本語")
        warnings.warn("old", FutureWarning)
        warnings.warn("older", DeprecationWarning)
    """,
    "measures and looks around": """
        import gc, inspect, signal
        gc.collect(), len(gc.get_objects()), inspect.currentframe(), sys._getframe()
        signal.signal(signal.SIGALRM, lambda *a: None)
        time.perf_counter()
    """,
    "its own additions to torch, and another print": """
        import builtins
        torch.Tensor.my_shape = property(lambda self: tuple(self.shape))
        torch.Tensor.__repr__ = lambda self, **options: "a tensor"
        torch.nn.Module.number = lambda self: 1
        builtins.print = lambda *values, **options: None
        torch.nn.Dropout.__repr__ = lambda self: "a dropout"
        sys.excepthook = sys.displayhook = lambda *values: None
    """,
    "objects whose methods are replaced, and optimizers": """
        from nanogpt.model import GPT, GPTConfig
        model = GPT(GPTConfig(block_size=4, vocab_size=8, n_layer=1, n_head=1, n_embd=4))
        wrapped = lambda forward: lambda *a: forward(*a)
        for module in model.modules(): module.forward = wrapped(module.forward)
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            model(torch.zeros(1, 4, dtype=torch.long))[0].sum().backward()
            kind(model.parameters(), lr=0.1).step()
    """,
    "programs and processes": """
        import multiprocessing, subprocess
        subprocess.run(["true"]), subprocess.run("git rev-parse HEAD", shell=True, capture_output=True)
        queue = multiprocessing.get_context("fork").Queue()
        child = multiprocessing.get_context("fork").Process(target=queue.put, args=(1,))
        child.start(), queue.get(), child.join()
    """,
    "names like those of the course's folders": """
        import shutil, subprocess, tempfile
        folder = tempfile.mkdtemp()
        os.makedirs(f"{folder}/tests/solutions")
        shutil.rmtree(folder)
        subprocess.run(["git", "log", "-1"], capture_output=True)
        subprocess.run(["echo", "my solutions"], capture_output=True)
    """,
    "threads that compute": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as pool: list(pool.map(lambda i: torch.ones(3) * i, range(4)))
    """,
    "torch's lazy corners": """
        import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor
        import torch.distributed.nn.functional, torch.distributed.pipelining, torch.fx, torch.func
        import torch.profiler
        import torch.utils.checkpoint, torch.utils.data, torch.nn.attention, torch.export, torch.library
        torch.func.grad(lambda a: a.sum())(torch.ones(3))
        torch.vmap(torch.sin)(torch.ones(3, 3))
        torch.fx.symbolic_trace(torch.nn.Linear(3, 3))
        with torch.profiler.profile(): torch.ones(3).sum()
        torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(3, requires_grad=True), use_reentrant=False)
        torch.set_printoptions(precision=2), torch.manual_seed(0)
    """,
}

BUILT_IN = """
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    import torch.distributed._functional_collectives as functional

    def layers(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    mesh, n, ones = DeviceMesh.from_group(group, "cpu"), group.size(), torch.ones(2, 4)
    sharded, parallel = layers(), layers()
    fully_shard(sharded, mesh=mesh)
    parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    replicated = nn.parallel.DistributedDataParallel(layers(), process_group=group)
    for model in (sharded, parallel, replicated):
        model(ones).sum().backward()
        torch.optim.AdamW(model.parameters(), foreach=False).step()
    whole = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    (whole @ whole).full_tensor()
    dist.reduce_scatter(torch.zeros(2), [torch.zeros(2)] * n, group=group)
    dist.all_gather_object([None] * n, {"a": 1}, group=group)
    dist.monitored_barrier(group)
    with dist._coalescing_manager(group):
        for _ in range(3): dist.all_reduce(torch.ones(3), group=group)
    group.allreduce([torch.ones(3)]).wait()
    group._get_backend(torch.device("cpu")).allreduce([torch.ones(3)]).wait()
    functional.reduce_scatter_tensor_coalesced([torch.ones(2 * n)] * 2, "sum", [0, 0], group)[0] + 1
    functional.all_gather_into_tensor_coalesced([torch.ones(2)] * 2, group)[0] + 1
    other = (group.rank() + 1) % n
    pair = [dist.P2POp(dist.isend, torch.ones(3), group=group, group_peer=other)]
    pair.append(dist.P2POp(dist.irecv, torch.ones(3), group=group, group_peer=(group.rank() - 1) % n))
    for work in dist.batch_isend_irecv(pair): work.wait()
"""

DRESSED = '''from __future__ import annotations
"""Übung."""
import torch
import torch.distributed as dist
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
HERE = Path(__file__).parent

class Pair(NamedTuple):
    group: dist.ProcessGroup
    number: int = 1

@dataclass
class Context(Generic[T]):
    pair: Pair
    names: list[str] = field(default_factory=list)

class größe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, context):
        ctx.context = context
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(g, group=ctx.context.pair.group, async_op=True)
        work.wait()
        return g, None

if True:
    class Layer(torch.nn.Module):
        def __init__(self, group: dist.ProcessGroup) -> None:
            super().__init__()
            self.group = group

        def forward(self, x):
            class Mine(torch.Tensor): pass
            return größe.apply(x, Context(Pair(self.group))).as_subclass(Mine)

    def copy_to_group(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return Layer(group)(x)

if __name__ == "__main__":
    raise SystemExit("this is not run")
'''


def notebook(*cells: str | tuple[str]) -> str:
    """A notebook's text: strings are code, a tuple of one is Markdown."""
    shared = {"metadata": {}}
    made = [
        {**shared, "cell_type": "code", "source": cell, "outputs": [], "execution_count": None, "id": f"c{i}"}
        if isinstance(cell, str)
        else {**shared, "cell_type": "markdown", "source": cell[0], "id": f"c{i}"}
        for i, cell in enumerate(cells)
    ]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def passes(report: ExerciseReport) -> bool:
    assert report.verdict == Verdict.PASSED, "\n".join(check.text for check in report.checks)
    return True


@pytest.mark.parametrize("name", STYLES)
def test_styles_pass(name: str, tmp_path: Path, launcher: Launcher) -> None:
    assert passes(grade(tmp_path, twisted(STYLES[name]), launcher, *ALL))


def test_everything_that_torch_sends_by_itself_is_seen(tmp_path: Path, launcher: Launcher) -> None:
    """No call of torch's own parallelisms counts as hidden from the recorder."""
    assert passes(grade(tmp_path, twisted(BUILT_IN), launcher, FORWARD, timeout=60))


@pytest.mark.parametrize(
    "source",
    [
        DRESSED,
        CORRECT.replace("\n", "\r\n"),
        "\ufeff" + CORRECT,
        CORRECT + "\nPATTERN = '\\d'\nimport sys; sys.exit(0)\n",
        "from grader import check, run_ranks\n"
        + CORRECT
        + "\ncheck(copy_to_group)\nprint(run_ranks(copy_to_group)[0])\n",
        CORRECT.replace("def copy_to_group(x, group):\n    return", "copy_to_group = lambda x, group:"),
        CORRECT.replace("def copy_to_group(x, group):\n    return", "(copy_to_group := lambda x, group:")
        + ")",
        CORRECT.replace("def copy_to_group", "match 1:\n  case 1:\n   def copy_to_group"),
        CORRECT.replace("def copy_to_group", "@torch.compile\ndef copy_to_group"),
        "get_ipython().run_line_magic('matplotlib', 'inline')\nget_ipython().system('ls')\n" + CORRECT,
    ],
    ids=[
        "dressed",
        "Windows",
        "byte order mark",
        "sys.exit at the end",
        "check inside",
        "lambda",
        "walrus",
        "match",
        "torch.compile",
        "nbconvert",
    ],
)
def test_forms_of_a_file_pass(source: str, tmp_path: Path, launcher: Launcher) -> None:
    assert passes(grade(tmp_path, source, launcher, *ALL))


@pytest.mark.parametrize(
    "source",
    [
        "from helper import copy_to_group",
        "from helper import *",
        "import helper\ncopy_to_group = helper.copy_to_group",
    ],
)
def test_a_helper_beside_the_file_is_found(
    source: str, tmp_path: Path, launcher: Launcher, isolated: Launcher
) -> None:
    (tmp_path / "helper.py").write_text(CORRECT)
    (tmp_path / "submission.py").write_text(source)
    ((submission, lesson),) = find_work(str(tmp_path / "submission.py"), ("copy_to_group",))
    inside = Launcher(Isolation("on", (tmp_path,)))
    try:
        for one in (launcher, inside) if source.startswith("import") else (launcher,):
            settings = Settings(ranks=(2,), limits=Limits(timeout=20))
            (report,) = grade_submission(submission, lesson, one, settings, ("copy_to_group",))
            assert passes(report)
    finally:
        inside.close()


@pytest.mark.parametrize(
    "cells",
    [
        (("# Text",), "%matplotlib inline\n!ls\nimport torch", CORRECT, "check(copy_to_group)", "1 / 0"),
        ("def broken(:\n    pass", "import asyncio\nawait asyncio.sleep(0)", CORRECT),
        ("import no_such_module", "x = undefined", "raise SystemExit", CORRECT),
        ("def copy_to_group(x, group):\n    raise ValueError('an older one')", CORRECT),
        ("%%time\n" + CORRECT.lstrip(), "from IPython.display import display\ndisplay(1)"),
        (textwrap.indent(CORRECT, "  "),),
    ],
    ids=[
        "magics",
        "cells that are no Python",
        "cells that fail",
        "defined twice",
        "a cell magic",
        "indented",
    ],
)
def test_notebooks_pass(cells: tuple, tmp_path: Path, launcher: Launcher) -> None:
    assert passes(grade(tmp_path, notebook(*cells), launcher, FORWARD, name="notebook.ipynb"))


def test_the_cell_that_failed_is_the_story(tmp_path: Path, launcher: Launcher) -> None:
    cells = notebook("import no_such_module", CORRECT.replace("class Copy", "1 / 0\nclass Copy"))
    (report,) = grade(tmp_path, cells, launcher, FORWARD, name="notebook.ipynb").checks
    assert report.verdict == Verdict.CRASHED
    assert "raised ZeroDivisionError" in report.message
    assert report.details == ("at cell 2, line 10: `1 / 0`",)


def test_a_stub_inside_is_not_attempted(tmp_path: Path, launcher: Launcher) -> None:
    lines = "def inner(n):\n    if n: inner(n - 1)\n    raise NotImplementedError('about 1 line')\ninner(9)"
    report = look(tmp_path, twisted(lines), launcher)
    assert report.verdict == Verdict.NOT_ATTEMPTED
    assert report.message == "a part of it is still to be written"


FILES = {
    "a syntax error": ("s.py", b"def copy_to_group(x)\n    pass", "s.py, line 1: expected ':'"),
    "empty": ("s.py", b"", "there is no exercise called copy_to_group in it"),
    "no exercise": ("s.py", b"x = 1", "there is no exercise called copy_to_group in it"),
    "binary": ("s.py", bytes(range(256)), "is not text in UTF-8"),
    "a null byte": ("s.py", b"x = 1\0", "null bytes"),
    "nested without end": ("s.py", b"x = " + b"(" * 5000 + b")" * 5000, "too many nested parentheses"),
    "minus without end": ("s.py", b"x = " + b"-" * 100_000 + b"1", "not Python"),
    "broken JSON": ("s.ipynb", b"{not json", "is not a notebook"),
    "an empty notebook": ("s.ipynb", b"", "is not a notebook"),
    "no cells": ("s.ipynb", notebook().encode(), "there is no exercise"),
    "text alone": ("s.ipynb", notebook(("# Text",)).encode(), "there is no exercise"),
    "a broken exercise": (
        "s.ipynb",
        notebook("import torch", "def copy_to_group(x, group):\n    return x +").encode(),
        "cell 2, line 2: invalid syntax",
    ),
    "another kind of file": ("s.txt", b"x", "expected a notebook (.ipynb) or a Python file (.py)"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_can_not_be_read_are_told_in_a_sentence(name: str, tmp_path: Path) -> None:
    file, content, words = FILES[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        find_work(str(tmp_path / file), ("copy_to_group",))
    assert "\n" not in str(error.value)


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.py"):
        with pytest.raises(ValueError, match=f"^{path}"):
            find_work(str(path), ())


@pytest.mark.parametrize(
    "source",
    [
        "def copy_to_group(x, group):\n    '''doc'''\n    raise NotImplementedError('about 1 line')\n",
        "def copy_to_group(x, group): ...\n",
        "def copy_to_group(x, group):\n    pass\n",
    ],
)
def test_stubs_are_not_attempted(source: str, tmp_path: Path, launcher: Launcher) -> None:
    (tmp_path / "s.py").write_text(source)
    ((submission, lesson),) = find_work(str(tmp_path / "s.py"), ("copy_to_group",))
    (report,) = grade_submission(submission, lesson, launcher, Settings(), ("copy_to_group",))
    assert report.verdict == Verdict.NOT_ATTEMPTED


def test_slow_imports_are_stopped(tmp_path: Path, launcher: Launcher) -> None:
    report = look(tmp_path, "import time\ntime.sleep(100)\n" + CORRECT, launcher, idle=1.5)
    assert report.verdict == Verdict.HUNG
    assert "rank 0 stood in submission.py, line 2: `time.sleep(100)`" in report.details


def test_an_exercises_verdict_is_that_of_the_check_that_is_told() -> None:
    def verdict(*kinds: Verdict) -> Verdict:
        checks = [CheckReport(f"check_{i}", "It holds.", kind) for i, kind in enumerate(kinds)]
        return combine(checks)

    good, wrong, crashed, stub = Verdict.PASSED, Verdict.WRONG, Verdict.CRASHED, Verdict.NOT_ATTEMPTED
    assert verdict(good, wrong, crashed) == wrong
    assert verdict(good, crashed, wrong) == crashed
    assert verdict(wrong, stub, wrong) == stub  # what a stub inside returns is wrong for that reason
    assert verdict(wrong, crashed, Verdict.GRADER_ERROR) == Verdict.GRADER_ERROR
    assert verdict(wrong, Verdict.REFUSED) == Verdict.REFUSED
    assert verdict(good, Verdict.SKIPPED) == good


def test_documents_leave_more_to_compare_than_rounding() -> None:
    """Where every token is a document of its own, the gradients of q and k are zero but for rounding."""
    _, exercise = find_exercise("document_attention")
    observe = exercise.checks[0].function.__globals__["observe"]
    for seed in range(300):
        trial = Trial(Layout(1, 1), Code(), Launcher(), seed, lambda *_: "", Limits(), "cpu", True)
        trial.run = lambda *_, **__: []
        documents = observe(trial).documents
        assert all(len(set(row.tolist())) < len(row) for row in documents), f"seed {seed}: {documents}"
