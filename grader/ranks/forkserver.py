"""A process with torch imported that forks a supervisor for every run: ranks start in milliseconds.

Started by grader.launcher, with the number of a socket as its argument. It never loads a submission and
never starts a thread; runs are handed over as one end of a socket pair each.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback

import psutil
import torch

import grader.beside.measure  # noqa: F401 (the guard remembers what is there: probes use it)
from grader.beside.tampering import Guard
from grader.ranks.frames import send_frame
from grader.ranks.large_pages import LargePages
from grader.ranks.leftovers import MARK, kill_marked
from grader.ranks.processes import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, prctl
from grader.ranks.supervisor import supervise
from nanogpt.turns import take_whole_turns

WARM_UP = (
    "cloudpickle",
    "matplotlib.pyplot",
    "numpy.ctypeslib",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.profiler._cupti_monitor",
    "torch.utils.flop_counter",
    "torch._dynamo",  # which puts a torch.manual_seed of its own in place when it is first needed
    "nanogpt.data",
    "nanogpt.parallel",
)
"""What torch, a probe, or the first cell of a notebook would else import in every rank.

Matplotlib alone is half a second of processor time, and nanogpt a quarter of a small run. Nothing here is
needed: some of it is torch's private affair, which comes and goes with its versions.
"""


def warm_up() -> None:
    """Import what ranks need. Nothing may ask CUDA for its devices: a fork of who did can not use them."""
    for module in WARM_UP:
        with contextlib.suppress(Exception):  # not there, or being edited: who needs it will hear why
            importlib.import_module(module)
    with contextlib.suppress(Exception):  # torch's compiler has an nn.Module.__init__ of its own, too
        importlib.import_module("torch._dynamo.mutation_guard").install_generation_tagging_init()


def main() -> None:
    """Serve runs until the judge closes its end."""
    warm_up()
    gc.freeze()  # a rank that collects its garbage must not copy every page that holds an object of ours
    gc.enable()
    control = socket.socket(fileno=int(sys.argv[1]))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    take_whole_turns()
    torch.set_num_threads(1)
    guard = Guard()
    supervisors: set[int] = set()
    prctl(PR_SET_DUMPABLE, 0)
    directory = tempfile.tempdir = tempfile.mkdtemp(prefix="scale-by-hand-")
    control.sendall(b"ready " + directory.encode())
    control.setblocking(False)
    try:
        _serve(control, guard, supervisors)
    finally:
        _end_all()
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # taking torch down in good order would take half a second


def _serve(control: socket.socket, guard: Guard, supervisors: set[int]) -> None:
    memory = LargePages()
    while True:
        select.select([control], [], [], 0.2)
        _reap(supervisors)
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except BlockingIOError:
            continue
        if not message:
            break
        pid = os.fork()
        if pid == 0:
            control.close()
            try:
                _keep(socket.socket(fileno=descriptors[0]), guard)
            finally:
                os._exit(0)
        supervisors.add(pid)
        os.close(descriptors[0])
        memory.move_a_piece()  # while the run goes on: nobody waits for all of it


def _keep(judge: socket.socket, guard: Guard) -> None:
    """Keep one run. What fails here is no rank's doing: the judge is told, so that it blames nobody."""
    try:
        supervise(judge, guard)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
        judge.setblocking(True)
        send_frame(judge, b"S", json.dumps({"ended": "fault", "reason": reason}).encode())


def _reap(supervisors: set[int]) -> None:
    """Collect ended children. A supervisor that ended leaves nothing; an orphan of a killed one is killed."""
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):  # a rank has stopped its keeper: no clock would end that run
                os.kill(pid, signal.SIGKILL)
                continue
            supervisors.discard(pid)
            if sys.platform != "linux" and os.WIFSIGNALED(status):  # there they do not become this one's
                kill_marked(os.environ[MARK], [p.pid for p in psutil.Process().children(recursive=True)])
            for child in psutil.Process().children():
                if child.pid not in supervisors:
                    child.kill()
    except (ChildProcessError, psutil.NoSuchProcess):
        return


def _end_all() -> None:
    """End every process below this one: a supervisor ends its ranks by itself when the judge has gone."""
    _, left = psutil.wait_procs(psutil.Process().children(), timeout=0.5)
    while left:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, left = psutil.wait_procs(psutil.Process().children(), timeout=0.1)
