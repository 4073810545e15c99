"""One rank: loads the submission, runs a check's probe on it, and sends back plain data.

This runs in a process of its own, forked for one run, or for several of the same submission one after the
other. Nothing here is trusted afterwards: the judge reads what arrives as data and draws its own conclusions.
"""

import errno
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from json import dumps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from grader.beside.flights import WaitedTwiceError
from grader.beside.loading import LENT, LoadError, error_text, load_submission
from grader.beside.recorder import Recorder, Window, watch_backends, watch_handles
from grader.beside.tampering import Guard, RefusedError
from grader.beside.unseen import calls_made, unseen
from grader.ranks import plain
from grader.ranks.box import FRESH
from grader.ranks.event_log import EventLog
from grader.ranks.frames import receive_frame, send_frame
from grader.ranks.recording import Event, Recording

LEAST_ROOM = 1 << 20
"""Bytes that a folder has left which is not full."""
PIECE = 0.01
"""Seconds of waiting for a note after which a rank looks again."""


class Rank:
    """What a probe is given: the learner's names, the process group and the recorder."""

    def __init__(
        self,
        submission: SimpleNamespace,
        group: Any,
        rank: int,
        num_ranks: int,
        device: torch.device,
        recorder: Recorder,
        run: int,
        meshes: dict[tuple, DeviceMesh],
    ) -> None:
        self.submission = submission
        self.group = group
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self._recorder = recorder
        self._run = run
        self._meshes = meshes

    def record(self, **options: Any) -> AbstractContextManager[Window]:
        """Record a stretch (see `Recorder.record`); the recording can be returned as it is."""
        return self._recorder.record(**options)

    @contextmanager
    def changed_messages(self) -> Iterator[None]:
        """Inside, what this rank sends is changed on its way: each byte of a message is one larger."""
        self._recorder.changes_messages = True
        try:
            yield
        finally:
            self._recorder.changes_messages = False

    def mesh(self, ranks: Any, names: tuple[str, ...]) -> DeviceMesh:
        """A mesh of world ranks, nested lists of them. Each is made once, however many runs ask for it.

        A group takes milliseconds, and three threads for as long as its rank lives.
        """
        key = repr(ranks), names
        if key not in self._meshes:
            self._meshes[key] = DeviceMesh(self.device.type, ranks, mesh_dim_names=names)
        return self._meshes[key]

    def tell(self, note: str) -> None:
        """Leave a note for the other ranks of this run, beside the messages that are judged."""
        dist.distributed_c10d._get_default_store().set(f"run {self._run}: {note}", "")

    def hears(self, notes: Sequence[str], seconds: float) -> bool:
        """Whether all these notes are left within so many seconds, or have been.

        The time is looked at in pieces: while a machine stands still, and who would leave the notes with it,
        one piece goes by at most.
        """
        store = dist.distributed_c10d._get_default_store()
        keys = [f"run {self._run}: {note}" for note in notes]
        for _ in range(round(seconds / PIECE)):
            if store.check(keys):
                return True
            time.sleep(PIECE)
        return store.check(keys)

    def seed(self, number: int) -> None:
        """Seed torch's random numbers."""
        _seed(number, self.device)


def _seed(number: int, device: torch.device) -> None:
    """What torch.manual_seed does, without its note for a GPU that is not there: a tenth of a small check."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def run_worker(
    connection: socket.socket,
    world_rank: int,
    header: dict[str, Any],
    directory: Path,
    dump: Any,
    log: EventLog,
    guard: Guard,
) -> None:
    """Do one rank's work, then stay until the supervisor lets go: a peer may still need this rank alive.

    The supervisor may also send another order: the same submission, loaded anew, another probe.
    """
    _, body = receive_frame(connection)
    order = plain.decode(body)
    answer = _answering(connection, order.pop("token"))
    del body
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    try:
        os.chdir(directory)
        device = torch.device("cpu")
        if header["device"] == "cuda":
            device = _gpu(world_rank)
        group = _start_group(world_rank, header, directory, device)
    except Exception as error:
        answer(b"X", dumps(_why_not_connected(error, header)).encode())
        receive_frame(connection)
        return
    send_frame(connection, b"B", b"")  # what goes wrong from now on is no trouble of the machine's
    current = SimpleNamespace(recorder=None, number=0, meshes={})  # the run that goes on
    watch_backends(lambda: current.recorder)
    watch_handles(lambda: current.recorder)
    while True:
        try:
            answer(b"R", _work(world_rank, header, order, device, group, log, guard, current))
        except BaseException as error:
            answer(b"X", _words_of(error))
        order = plain.decode(receive_frame(connection)[1])
        gc.collect()  # what the run before has left in circles is none of the next one's memory
        gc.freeze()  # what stays is not looked at again


def _answering(connection: socket.socket, token: bytes) -> Callable[[bytes, bytes], None]:
    """What sends the result. The token is in no frame's locals while the submission runs."""

    def answer(kind: bytes, body: bytes) -> None:
        send_frame(connection, kind, token + body)

    return answer


def _why_not_connected(error: Exception, header: dict[str, Any]) -> dict[str, Any]:
    """The machine's fault, unless it lies in folders that nobody but the submission fills or closes."""
    full = [folder for folder in FRESH if _is_full(folder)] if header["shut_in"] else []
    if full:
        return _describe(RefusedError(f"it has filled {full[0]}, which its ranks need to find each other"))
    missing = any(os.strerror(number) in str(error) for number in (errno.EACCES, errno.ENOENT))
    if missing and header["shut_in"] and header["device"] == "cpu":  # a GPU's files are the machine's
        return _describe(
            RefusedError("it has closed or removed the folder in which its ranks find each other")
        )
    message = f"the ranks could not connect: {error_text(error)}"
    return {"type": "MachineError", "message": message, "machine": True}


def _is_full(folder: str) -> bool:
    system = os.statvfs(folder)
    return system.f_bfree * system.f_frsize < LEAST_ROOM or system.f_ffree == 0


def _work(
    world_rank: int,
    header: dict[str, Any],
    order: dict[str, Any],
    device: torch.device,
    group: Any,
    log: EventLog,
    guard: Guard,
    current: SimpleNamespace,
) -> bytes:
    torch.set_num_threads(1)
    if device.type == "cpu":  # memory that nothing was written to holds NaN: it is no zero by chance
        torch.set_deterministic_debug_mode("warn")
    is_learner = _learner_code(order)

    guarded = order["guarded"]
    glance = guard.glance if guarded else lambda: None

    def on_event(event: Event) -> None:
        glance()
        log.add(dumps(vars(event)).encode())

    def on_wait(index: int | None) -> None:
        if index is not None:
            glance()
        log.waits_for = index or 0

    graded = bool(order["probe"])
    recorder = Recorder(on_event, is_learner, order["delay_seed"], on_wait=on_wait, local=graded)
    current.recorder = recorder
    current.number += 1
    _seed(order["seed"], device)
    members = header["group"]
    if guarded:
        guard.watch(order["forbidden"], header["shut_in"])
    if world_rank not in members:
        return plain.encode({"result": None, "races": []})
    verify, before = guard.verify, calls_made()
    try:
        submission = load_submission(order)
        probe = pickle.loads(order["probe"]) if graded else _call_function
        rank = Rank(
            submission,
            group,
            members.index(world_rank),
            len(members),
            device,
            recorder,
            current.number,
            current.meshes,
        )
        arguments = _to_device(order["arguments"], device)
        with recorder:
            found = {"result": probe(rank, *arguments)}
            found["races"] = [asdict(race) for race in recorder.flights.races()]
        result = plain.encode(found, (Window, Recording), plain.MAX_TEXT)
        hidden = unseen(before, recorder.calls)
        if hidden and guarded:
            raise RefusedError(
                f"{hidden} of its calls to torch.distributed went past the recorder: "
                "they were made in another thread, inside a torch.library custom op, or with dispatch modes "
                "switched off"
            )
        return result
    finally:
        if guarded:  # looking at everything touches a thousand pages, a quarter of what a small run takes
            verify()


def _call_function(rank: Rank, arguments: bytes) -> Any:
    """The probe of `run_ranks`: a function and its arguments, by value."""
    function, args = pickle.loads(arguments)
    return function(*args)


def _start_group(world_rank: int, header: dict[str, Any], directory: Path, device: torch.device) -> Any:
    if not header["distributed"]:
        return None
    cards = {name for _, name in socket.if_nameindex()}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if "lo" in cards else "lo0"  # whatever a cluster's shell says
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(directory / "rendezvous"), header["world_size"]),
        rank=world_rank,
        world_size=header["world_size"],
        timeout=timedelta(seconds=header["timeout"] + 60),
    )
    members = header["group"]
    if len(members) == header["world_size"]:
        return dist.group.WORLD
    return dist.new_group(members)


def _gpu(world_rank: int) -> torch.device:
    """The GPU of a rank; where NCCL allows it, ranks share what there is."""
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError("this machine has no CUDA GPU that torch can use")
    return torch.device("cuda", world_rank % count)


def _learner_code(order: dict[str, Any]) -> Callable[[str], bool]:
    """Tells the learner's code files from torch, Python, the grader and the course."""
    labels = set(order["labels"])
    directory = order["directory"]
    ours = tuple(
        os.path.realpath(path) + os.sep
        for path in (
            sys.prefix,
            sys.base_prefix,
            Path(torch.__file__).parent,
            Path(__file__).parent,
            *order["ours"],
        )
    )

    @cache
    def is_learner(file: str) -> bool:
        if file in labels:
            return True
        if labels:
            return bool(directory) and file.startswith(directory + os.sep) and not file.startswith(ours)
        return not file.startswith(("<frozen", LENT, *ours))

    return is_learner


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_device(item, device) for item in value)
    return value


def _words_of(error: BaseException) -> bytes:
    """An exception as it is sent. What its own code makes of the attempt to describe it is not waited for."""
    try:
        return dumps(_describe(error)).encode()
    except BaseException:
        kind = type.__getattribute__(type(error), "__name__")
        message = "it can not be described: its own code, or its place, raises another one"
        return dumps({"type": str(kind)[:500], "message": message, "frames": [], "notes": []}).encode()


def _describe(error: BaseException) -> dict[str, Any]:
    """An exception as plain data. Nothing of a learner's exception class is relied on."""
    if isinstance(error, SystemExit):
        code = str(error.code)[:100]
        error = RuntimeError(f"the code called sys.exit({code}) before its result was complete")
    frames = [[f.filename, f.lineno, f.name] for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, LoadError):
        frames = error.frames or frames
    kind = (
        error.error_type if isinstance(error, LoadError) else type.__getattribute__(type(error), "__name__")
    )
    try:
        notes = BaseException.__getattribute__(error, "__notes__")
    except AttributeError:
        notes = []
    told = [str(note) for note in notes if type(note) is str]
    plain_error = {
        "type": str(kind)[:500],
        "message": error_text(error),
        "frames": frames[-40:],
        "notes": [note[:500] for note in told[:3]],
    }
    return plain_error | ({"waited_twice": error.told()} if type(error) is WaitedTwiceError else {})
