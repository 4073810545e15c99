"""Tricks that must not work: leaving early, forging, reading the reference, replacing the tools."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch

from grader.beside.tampering import RefusedError, _hook
from grader.judging.closeness import is_close
from grader.judging.judge import Settings, grade_submission
from grader.judging.stories import ending
from grader.judging.submission import read_submission
from grader.judging.verdicts import Verdict
from grader.ranks import leftovers, plain
from grader.ranks.event_log import MAX_EVENT
from grader.ranks.isolation import Isolation
from grader.ranks.launcher import ROOT, Code, Launcher, Limits, RankReport, RunReport
from grader.ranks.recording import Event
from grader.report import summary
from grader.work import find_work
from tests.attempts import FORWARD, MECHANISM, grade, look, twisted

REFERENCE = ROOT / "solutions" / "tensor_parallel.py"
LIMITS = Limits(timeout=20)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not import tests

LEAVING = {
    "os._exit": ("os._exit(0)", "ended with exit status 0 before it had given its result"),
    "sys.exit": ("sys.exit(0)", "the code called sys.exit(0) before its result was complete"),
    "atexit": (
        "import atexit; atexit.register(os._exit, 0); sys.exit()",
        "before its result was complete",
    ),
    "an exit status that can not be printed": (
        "class Odd:\n    def __str__(self): raise RuntimeError\nraise SystemExit(Odd())",
        "raised SystemExit: it can not be described",
    ),
    "an endless exit status": ("sys.exit('y' * 10**8)", f"sys.exit({'y' * 100}) before"),
    "an exception from no line": (
        "code = compile('1 / 0', 'x.py', 'exec')\nexec(code.replace(co_linetable=b''))",
        "raised ZeroDivisionError: it can not be described",
    ),
}

THE_LOG = """
import os, sys

def the_log():
    frame = sys._getframe()
    while "log" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["log"]
"""
"""What a submission may write to without any token: the list of its rank's events."""

FORGING = {
    "junk on every descriptor": """
        for descriptor in range(3, 60):
            try: os.write(descriptor, b"passed" * 9)
            except OSError: pass
        time.sleep(5)
    """,
    "a result without the token": """
        import struct
        for descriptor in range(3, 60):
            try: os.write(descriptor, struct.pack("<cQ", b"R", 80) + bytes(80))
            except OSError: pass
        time.sleep(5)
    """,
    "a pickle as a result": """
        import pickle, struct
        class Bomb:
            def __reduce__(self): return os.system, ("touch exploded",)
        bomb = bytes(32) + pickle.dumps(Bomb())
        for descriptor in range(3, 60):
            try: os.write(descriptor, struct.pack("<cQ", b"R", len(bomb)) + bomb)
            except OSError: pass
        time.sleep(5)
    """,
    "an error of the machine's": """
        frame = sys._getframe()
        while not callable(frame.f_locals.get("answer")): frame = frame.f_back
        error = {"type": "MachineError", "message": "there is no network", "machine": True}
        import json
        frame.f_locals["answer"](b"X", json.dumps(error).encode())
        time.sleep(5)
    """,
    "an event nested without end": "the_log().add(b'[' * 16000)",
    "an event of odd types": """
        import json
        event = dict(kind=[], num_bytes="x", num_elements=0, dtype="", shape=[], group=[[0]], peer=None,
                     op="", asynchronous=True, file="", line=0, after="", index=0)
        the_log().add(json.dumps(event).encode())
    """,
    "a list of events without end": "the_log()._memory[:16] = bytes([255] * 16)",
    "an event longer than the list": "the_log().add(b''); the_log()._memory[16:20] = bytes([255] * 4)",
}

READING = {
    "open": f"open({str(REFERENCE)!r}).read()",
    "open, and hide that it failed": f"try: open({str(REFERENCE)!r})\nexcept BaseException: pass",
    "os.open": f"os.open({str(REFERENCE)!r}, os.O_RDONLY)",
    "below an open folder": f"folder = os.open({str(ROOT)!r}, os.O_RDONLY); "
    "os.open('solutions', os.O_RDONLY, dir_fd=folder)",
    "import": "import solutions.tensor_parallel",
    "importlib": "import importlib; importlib.import_module('solutions.tensor_parallel')",
    "linecache": f"import linecache; linecache.getlines({str(REFERENCE)!r})",
    "a link": f"os.link({str(REFERENCE)!r}, 'own.py')",
    "a symbolic link": f"os.symlink({str(ROOT / 'solutions')!r}, f'own{{group.rank()}}{{time.time()}}'); "
    "open(next(n for n in os.listdir() if n.startswith('own')) + '/tensor_parallel.py')",
    "cat": f"import subprocess; subprocess.run(['cat', {str(REFERENCE)!r}])",
    "a shell": "os.popen('cat solutions/tensor_parallel.py').read()",
    "git": "import subprocess; subprocess.run(['git', 'show', 'HEAD:solutions/tensor_parallel.py'])",
    "the course's git": f"import subprocess; subprocess.run(['git', 'log', '-p'], cwd={str(ROOT)!r})",
    "git, told where": f"import subprocess; subprocess.run(['git', '-C', {str(ROOT)!r}, 'log', '-p'])",
    "git, told by a variable": f"os.environ['GIT_DIR'] = {str(ROOT / '.git')!r}; os.popen('git log -p')",
    "a list, from the course": f"import subprocess; subprocess.run(['ls', 'solutions'], cwd={str(ROOT)!r})",
    "another Python": "os.execl(sys.executable, 'python', '-c', 'from solutions import fsdp')",
}

REPLACING = {
    "torch.allclose": "torch.allclose = lambda *a, **k: True",
    "torch.Tensor.__add__": "torch.Tensor.__add__ = lambda a, b: a",
    "torch.distributed.all_reduce": "dist.all_reduce = lambda *a, **k: None",
    "time.sleep": "time.sleep = lambda seconds: None",
    "builtins.open": "import builtins; builtins.open = print",
    "json.dumps": "import json; json.dumps = lambda *a, **k: '{}'",
    "pickle.loads": "import pickle; pickle.loads = lambda *a: None",
    "grader.beside.recorder.Recorder.__torch_dispatch__": """
        import grader.beside.recorder
        blind = lambda self, f, t, a=(), k=None: f(*a, **(k or {}))
        grader.beside.recorder.Recorder.__torch_dispatch__ = blind
    """,
    "grader.beside.recorder._C10D": "import grader.beside.recorder; grader.beside.recorder._C10D.clear()",
    "grader.beside.recorder._event": """
        import grader.beside.recorder
        grader.beside.recorder.Recorder._event.__code__ = (lambda self, func, args, kwargs: None).__code__
    """,
    "torch.nn.functional.mse_loss": "torch.nn.functional.mse_loss.__code__ = (lambda *a: 0).__code__",
    "torch.nn.functional.cross_entropy": "torch.nn.functional.cross_entropy.__defaults__ = (None,)",
    "torch.nn.modules.dropout.Dropout.forward": "torch.nn.Dropout.forward = lambda self, x: x",
    "nanogpt.model.GPT.forward": "import nanogpt.model; nanogpt.model.GPT.forward = print",
    "torch.autograd.graph.saved_tensors_hooks.__enter__": """
        torch.autograd.graph.saved_tensors_hooks.__enter__ = lambda self: None
    """,
    "random.Random.uniform": "import random; random.Random.uniform = lambda *a: 0.0",
    "sys._getframe": "before = sys._getframe; sys._getframe = lambda depth=0: before(depth + 1)",
    "torch.set_default_dtype": "torch.set_default_dtype(torch.float64)",
    "weakref.ref": "import weakref; weakref.ref = lambda thing, *a: lambda: thing",
    "torch.equal": """
        import grader.beside.tampering
        grader.beside.tampering.Guard.verify = grader.beside.tampering.Place.replaced = lambda self: ""
        torch.equal = lambda *a: True
    """,
}

PUT_BACK = """
    from grader.beside.recorder import Window
    before = vars(Window)[{name!r}]
    Window.{name} = lambda *a: None
    try: dist.all_reduce(torch.ones(3), group=group)
    except Exception: pass
    finally: Window.{name} = before
"""
MADE_UP = """
    import gc
    from grader.beside.recorder import Window
    from grader.ranks.recording import Event
    dist.all_reduce(torch.ones(3), group=group)
    windows = [thing for thing in gc.get_objects() if type(thing) is Window]
    for window in windows: {line}
"""
LYING = """
    class Liar(torch.Tensor):
        def __eq__(self, other): return torch.tensor(True)
        def __sub__(self, other): return torch.zeros(())
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return torch.zeros(()) if function is torch.Tensor.sub else super().__torch_function__(
                function, types, args, kwargs or {})
"""


@pytest.mark.parametrize("name", LEAVING)
def test_leaving_is_not_passing(name: str, tmp_path: Path, launcher: Launcher) -> None:
    lines, words = LEAVING[name]
    report = look(tmp_path, twisted(lines), launcher)
    assert report.verdict == Verdict.CRASHED
    assert words in report.message


@pytest.mark.parametrize("name", FORGING)
def test_a_forged_result_is_refused(name: str, tmp_path: Path, launcher: Launcher) -> None:
    report = look(tmp_path, THE_LOG + twisted(FORGING[name]), launcher, idle=1.5)
    assert report.verdict == Verdict.REFUSED
    assert "wrote to the grader's result channel" in report.message
    assert not (tmp_path / "exploded").exists()
    assert not (ROOT / "exploded").exists()


def test_two_results_are_refused(tmp_path: Path, launcher: Launcher) -> None:
    """Sending one's own and letting the grader send its own afterwards."""
    lines = """
        import struct
        for descriptor in range(3, 60):
            try: os.write(descriptor, struct.pack("<cQ", b"X", 40) + bytes(40))
            except OSError: pass
    """
    assert look(tmp_path, twisted(lines), launcher).verdict == Verdict.REFUSED


def test_the_token_is_in_no_frame_and_no_dictionary(tmp_path: Path, launcher: Launcher) -> None:
    lines = """
        import gc
        frame, tokens = sys._getframe(), 0
        while frame:
            tokens += any(type(v) is bytes and len(v) == 32 for v in frame.f_locals.values())
            tokens += any("token" in v for v in frame.f_locals.values() if type(v) is dict)
            frame = frame.f_back
        tokens += any("token" in d and "probe" in d for d in gc.get_objects() if type(d) is dict)
        assert tokens == 0
    """
    assert look(tmp_path, twisted(lines), launcher).verdict == Verdict.PASSED


MOST_MEMORY = """
def most_memory():  # of the supervisor, in KiB
    with open(f"/proc/{os.getppid()}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
"""


def test_a_flood_of_events_fills_no_memory(tmp_path: Path) -> None:
    """Events need no token. What is one in every field is kept, up to a limit; anything else is refused."""
    event = {field.name: 0 for field in fields(Event)} | {"shape": [], "group": [], "peer": None}
    event |= {name: "" for name in ("kind", "dtype", "op", "file", "after")}
    event |= {"asynchronous": True, "in_one_piece": True}
    assert Event.from_plain(event)
    room = MAX_EVENT - len(json.dumps(event))
    bodies = {
        "kept": json.dumps(event | {"file": "x" * room}),
        "nested": json.dumps(event | {"shape": [[]] * (room // 4)}),
        "numbers": json.dumps(event | {"num_bytes": 10**400}),
    }
    launcher = Launcher()
    try:
        launcher.warm_up()
        for name, body in bodies.items():
            lines = f"""
                before = most_memory()
                for _ in range(1500): the_log().add({body!r}.encode())
                with open({str(tmp_path / name)!r}, "a") as file: print(most_memory() - before, file=file)
            """
            source = THE_LOG + MOST_MEMORY + twisted(lines)
            report = look(tmp_path, source, launcher)
            assert report.verdict == (Verdict.PASSED if name == "kept" else Verdict.REFUSED), report.text
        grown = [int(line) for line in (tmp_path / "kept").read_text().split()]
        assert grown and max(grown) < 64 << 10
    finally:
        launcher.close()


SEGMENTS = """
import ctypes
system = ctypes.CDLL(None)
system.shmat.restype = ctypes.c_void_p
def make_segment(size):
    place = system.shmat(system.shmget(0, size, 0o1600), None, 0)
    ctypes.memset(place, 1, size)
    system.shmdt(ctypes.c_void_p(place))
"""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            "import threading\nfor _ in range(400): threading.Thread(target=time.sleep, args=(9,)).start()",
            "threads",
        ),
        (  # no file is larger than the limit: whoever writes fast would end at that of a file
            "for _ in range(80): os.write(os.memfd_create('x'), bytes(10**7))\ntime.sleep(9)",
            "GiB",
        ),
        (SEGMENTS + "for _ in range(8): make_segment(10**8)\ntime.sleep(9)", "GiB"),
    ],
    ids=["threads", "memory without a name", "memory without a process"],
)
def test_what_no_list_of_processes_shows_is_counted(
    lines: str, words: str, tmp_path: Path, launcher: Launcher
) -> None:
    report = look(tmp_path, twisted(lines), launcher, max_threads=300, memory_bytes=2**29)
    assert report.verdict in (Verdict.REFUSED, Verdict.OUT_OF_MEMORY)
    assert words in report.message


@pytest.mark.skipif(not leftovers.SEGMENTS.exists(), reason="only Linux tells who has made a segment")
def test_segments_that_nobody_removes_end_with_the_run(tmp_path: Path, launcher: Launcher) -> None:
    size = 100_003  # of no other segment: other tests make theirs meanwhile
    assert look(tmp_path, twisted(SEGMENTS + f"make_segment({size})"), launcher).verdict == Verdict.PASSED
    assert str(size) not in leftovers.SEGMENTS.read_text().split()


@pytest.mark.parametrize("whom", ["os.getppid()", "psutil.Process(os.getppid()).ppid()"])
def test_who_stops_the_keeper_waits_for_nothing(whom: str, tmp_path: Path) -> None:
    """Neither the supervisor nor the fork server: the clock is theirs."""
    launcher = Launcher()
    try:
        launcher.warm_up()
        began = time.monotonic()
        look(tmp_path, twisted(f"import psutil, signal\nos.kill({whom}, signal.SIGSTOP)"), launcher)
        assert look(tmp_path, twisted(), launcher).verdict == Verdict.PASSED
        assert time.monotonic() - began < LIMITS.timeout + 20  # 50 seconds or more for each run that waits
    finally:
        launcher.close()


def test_who_kills_a_rank_outside_the_group_is_refused() -> None:
    ranks = [RankReport("dead", exit_code=-9), RankReport("done"), RankReport("done")]
    told = ending(RunReport("trouble", 1.0, ranks), lambda file, line: "", LIMITS, (1, 2))
    assert told is not None and told.verdict == Verdict.REFUSED
    assert "outside the group" in told.message
    ranks[0] = RankReport("failed", error={"type": "OSError"})
    told = ending(RunReport("trouble", 1.0, ranks), lambda file, line: "", LIMITS, (1, 2))
    assert told is not None and told.verdict == Verdict.GRADER_ERROR


@pytest.mark.parametrize("name", READING)
def test_reading_the_reference_is_refused(name: str, tmp_path: Path, launcher: Launcher) -> None:
    report = look(tmp_path, twisted(READING[name]), launcher)
    assert report.verdict == Verdict.REFUSED
    assert "the course's own solution" in report.message


def test_a_folder_of_the_same_name_is_not_the_references(tmp_path: Path) -> None:
    """rmtree opens folders below open ones, as os.open with `dir_fd` does: a cache of one's own, too."""
    (tmp_path / "solutions" / "__pycache__").mkdir(parents=True)
    (tmp_path / "solutions" / "only_there.py").touch()
    (tmp_path / "own" / "solutions").mkdir(parents=True)
    hook = _hook((str(tmp_path / "solutions"),), frozenset(), [])
    for folder, name in (("own", "solutions"), (".", "solutions"), ("solutions", "only_there.py")):
        is_theirs = folder != "own"
        opened = os.open(tmp_path / folder, os.O_RDONLY)
        with pytest.raises(RefusedError, match="own solutions") if is_theirs else contextlib.nullcontext():
            hook("open", (name, None, os.O_RDONLY))
        os.close(opened)


@pytest.mark.parametrize("name", REPLACING)
def test_replaced_tools_are_refused(name: str, tmp_path: Path, launcher: Launcher) -> None:
    report = look(tmp_path, twisted(REPLACING[name]), launcher)
    assert report.verdict == Verdict.REFUSED
    assert name in report.message


@pytest.mark.parametrize("name", ["add", "see", "saw_wait"])
def test_tools_that_are_put_back_are_refused(name: str, tmp_path: Path, launcher: Launcher) -> None:
    report = look(tmp_path, twisted(PUT_BACK.format(name=name)), launcher, MECHANISM)
    assert report.verdict == Verdict.REFUSED
    assert f"it replaces grader.beside.recorder.Window.{name}" in report.message


@pytest.mark.parametrize(
    "line",
    [
        "window._recording.events.clear()",
        "window.add(Event('send', 4, 1, 'float32', (1,), (0, 1), 0, '', True, '', 0, '', 1))",
    ],
    ids=["hidden", "made up"],
)
def test_a_recording_is_what_was_written_down_event_by_event(
    line: str, tmp_path: Path, launcher: Launcher
) -> None:
    report = look(tmp_path, twisted(MADE_UP.format(line=line)), launcher, MECHANISM)
    assert report.verdict == Verdict.REFUSED
    assert "what was recorded is not what the list of events says" in report.cause


@pytest.mark.parametrize(
    "lines",
    [
        """
        from torch.utils._python_dispatch import _disable_current_modes
        with _disable_current_modes(): dist.all_reduce(torch.ones(3), group=group)
        """,
        """
        import threading
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3), group=group))
        thread.start(); thread.join()
        """,
    ],
)
def test_hidden_communication_is_refused(lines: str, tmp_path: Path, launcher: Launcher) -> None:
    report = look(tmp_path, twisted(lines), launcher)
    assert report.verdict == Verdict.REFUSED
    assert "went past the recorder" in report.message


def test_a_lying_tensor_is_read_for_what_it_holds(tmp_path: Path, launcher: Launcher) -> None:
    source = twisted(LYING, returns="(Copy.apply(x, group) * 0).as_subclass(Liar)")
    report = look(tmp_path, source, launcher)
    assert report.verdict == Verdict.WRONG
    assert "it is zero everywhere" in report.cause


def test_inputs_changed_in_place_do_not_move_the_comparison(tmp_path: Path, launcher: Launcher) -> None:
    report = look(tmp_path, twisted("x.data.zero_()"), launcher)
    assert report.verdict == Verdict.WRONG


def test_an_object_is_never_pickled_for_the_judge() -> None:
    class Bomb:
        def __reduce__(self):
            return os._exit, (0,)

    with pytest.raises(plain.NotPlainError, match="is a Bomb"):
        plain.encode({"output": Bomb()})


def test_an_imaginary_part_is_not_left_out() -> None:
    assert not is_close(torch.tensor([1.0 + 1j]), torch.tensor([1.0]))
    assert is_close(torch.tensor([1.0 + 1j]), torch.tensor([1.0 + 1j]))


@pytest.mark.parametrize("dtype", ["torch.float8_e4m3fn", "torch.uint16"])
def test_numbers_that_nothing_is_computed_in_are_the_learners_mistake(
    dtype: str, tmp_path: Path, launcher: Launcher
) -> None:
    report = look(tmp_path, twisted(returns=f"torch.ones(x.shape).to({dtype})"), launcher)
    assert report.verdict == Verdict.WRONG and f"nothing is computed in: a tensor of {dtype}" in report.text


@pytest.mark.parametrize("told", ["[[]] * 2**24", "10 ** 400"])
def test_what_an_object_says_of_itself_is_the_learners_mistake(
    told: str, tmp_path: Path, launcher: Launcher
) -> None:
    thing = f"type('Mine', (), {{'to_plain': lambda self: {told}}})()"
    report = look(tmp_path, twisted(returns=thing), launcher)
    assert report.verdict == Verdict.WRONG and "a Mine: return tensors" in report.text


def test_an_answer_that_is_too_long_is_the_learners_mistake(tmp_path: Path, launcher: Launcher) -> None:
    report = look(tmp_path, twisted(returns="['x' * 2**20] * 8"), launcher)
    assert report.verdict == Verdict.WRONG and "more than 8 MiB of text" in report.text


def test_an_imported_reference_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "submission.py"
    path.write_text("from solutions.tensor_parallel import copy_to_group\n")
    ((submission, lesson),) = find_work(str(path), ("copy_to_group",))
    (report,) = grade_submission(submission, lesson, Launcher(), Settings(), ("copy_to_group",))
    assert report.verdict == Verdict.REFUSED
    assert report.message == "it is imported from the course's own solutions"


def test_files_of_its_own_shadow_nothing(tmp_path: Path, launcher: Launcher) -> None:
    """Neither torch, nor json, nor the grader, nor the lesson's checks; nor is a conftest read."""
    trap = f"open({str(tmp_path / 'sprung')!r}, 'w').close()\nraise SystemExit('shadow')\n"
    names = ("torch.py", "json.py", "conftest.py", "sitecustomize.py", "checks.py", "pytest.py")
    for name in names:
        (tmp_path / name).write_text(trap)
    for package in ("grader", "nanogpt", "torch", "lessons"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(trap)
    source = twisted("import json, torch, grader.beside.recorder, nanogpt.model")
    assert look(tmp_path, source, launcher).verdict == Verdict.PASSED
    assert not (tmp_path / "sprung").exists()


# Shut in


def test_a_killed_fork_server_is_replaced_and_leaves_nothing(tmp_path: Path) -> None:
    launcher = Launcher()
    try:
        launcher.warm_up()
        first = Path(launcher._servers[False].directory)
        assert first.is_dir()
        lines = "import psutil; psutil.Process(os.getppid()).parent().kill()"
        look(tmp_path, twisted(lines), launcher)
        assert look(tmp_path, twisted(), launcher).verdict == Verdict.PASSED
        assert not first.exists()
    finally:
        launcher.close()


def hold(rank, own: str, start: str):
    """What a rank's objects tell of what ranks were given."""
    values = [value for table in gc.get_objects() if type(table) is dict for value in table.values()]
    held = [item for value in values for item in (value if type(value) is list else [value])]
    return sorted({text for text in held if type(text) is str and text.startswith(start)})


def test_a_rank_holds_its_own_inputs_alone(launcher: Launcher) -> None:
    arguments = [(f"given-{number}", "given-") for number in range(2)]
    report = launcher.run(hold, Code(), arguments, limits=LIMITS)
    assert [rank.result for rank in report.ranks] == [["given-", "given-0"], ["given-", "given-1"]]


# The command


def processes_below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.parametrize("number", ["SIGINT", "SIGKILL"])
def test_a_killed_grade_leaves_no_process(number: str, tmp_path: Path) -> None:
    (tmp_path / "submission.py").write_text(twisted("time.sleep(0.1)\nwhile True: pass"))
    command = [sys.executable, "-m", "grader", str(tmp_path / "submission.py"), "--only", "copy_to_group"]
    judge = subprocess.Popen(
        [*command, "--ranks", "2", "--isolation", "off"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in the background nobody hears it
    )
    deadline = time.monotonic() + 90
    below: list[psutil.Process] = []
    while len(below) < 4 and time.monotonic() < deadline:  # fork server, supervisor, two ranks
        time.sleep(0.2)
        below = processes_below(judge.pid)
    assert len(below) >= 4
    judge.send_signal(getattr(signal, number))
    output, _ = judge.communicate(timeout=30)
    _, alive = psutil.wait_procs(below, timeout=15)
    assert not alive
    assert "Traceback" not in output
    if number == "SIGINT":
        assert (judge.returncode, output.splitlines()[-1]) == (2, "grade: it was interrupted")


def test_the_last_line_says_what_a_score_is_worth(tmp_path: Path, launcher: Launcher) -> None:
    report = grade(tmp_path, twisted(), launcher, FORWARD)
    opened = "1 of 1 exercises passed (formative: the ranks were not isolated"
    assert summary([report], Isolation("off")) == f"{opened})"
    assert summary([report], Isolation("auto", why_open="it is raining")) == f"{opened}: it is raining)"
    assert summary([report], Isolation("on")) == "1 of 1 exercises passed (isolated run)"


def test_a_long_chain_of_elif_is_read(tmp_path: Path) -> None:
    chain = "".join(f"    elif x == {i}:\n        x = {i}\n" for i in range(1500))
    path = tmp_path / "chain.py"
    path.write_text(f"def f(x):\n    if x:\n        from solutions.fsdp import FullySharded\n{chain}")
    assert read_submission(path).borrowed == {"FullySharded"}
