"""The recorder: sees every collective, message and matrix multiply of one rank, whoever calls them.

It is a `TorchDispatchMode`, so it stands below every door to communication (`torch.distributed`, the group
object's own methods, functional collectives, `P2POp`) and replaces none of them.
"""

import os
import random
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grader.beside.flights import WAITING, Flights
from grader.beside.flops import flops_of
from grader.beside.measure import ask, own_storage, tensors_in
from grader.beside.unseen import most_calls, world_ranks
from grader.ranks.recording import Event, Recording, Totals

# Operation → kind of event, and which argument holds the whole tensor (see Event.num_bytes).
_C10D = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
}
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_COMMUNICATION = ("c10d", "_c10d_functional")
_DTENSOR = os.path.join(os.path.dirname(torch.__file__), "distributed", "tensor", "")


def _pieces_that_leave(kind: str, arguments: Sequence[Any]) -> int:
    """Of a scatter or gather, how many pieces this rank sends: the root alone is given a list of them."""
    if kind == "scatter":
        return max(len(tensors_in(arguments[1])) - 1, 0)
    return int(kind != "gather" or not tensors_in(arguments[0]))


_TAKE_PIECES = ("alltoall_", "send", "recv_", "recv_any_source_")
"""Of _C10D: what NCCL copies itself, or sends as it lies. So it does with coalesced calls."""


def _in_one_piece(name: str, arguments: Iterable[Any]) -> bool:
    """Whether NCCL would take an operation's tensors; of a list for each rank, it copies each."""
    if name in _TAKE_PIECES or "coalesced" in name:
        return True
    each = (value if isinstance(value, list | tuple) else [value] for value in arguments)
    return all(ask(_lies_in_order, t) for values in each for t in values if isinstance(t, Tensor))


def _lies_in_order(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


@cache
def _unfolds(kind: type) -> bool:
    """Whether tensors of a class are made of others, as a DTensor is."""
    return hasattr(kind, "__tensor_flatten__")


def _has_no_numbers(tensor: Tensor) -> bool:
    """Whether a tensor is a fake one: it may say that it lies on the CPU, but its storage lies nowhere."""
    strided = ask(Tensor.layout.__get__, tensor) == torch.strided
    return strided and ask(Tensor.untyped_storage, tensor).device.type == "meta"


def _is_for_shapes_alone(tensors: list[Tensor]) -> bool:
    """Whether DTensor asks, on tensors without numbers, what an operation on the whole would give."""
    some = any(type(t) is not Tensor and _has_no_numbers(t) for t in tensors)
    frame: FrameType | None = sys._getframe(1) if some else None
    while frame is not None and not frame.f_code.co_filename.startswith(_DTENSOR):
        frame = frame.f_back
    return frame is not None


def _changed(tensor: Tensor) -> Tensor:
    """Another tensor like it, of which every byte is one larger."""
    other = tensor.clone()
    torch.empty(0, dtype=torch.uint8, device=other.device).set_(other.untyped_storage()).add_(1)
    return other


@cache
def _communicates(func: Any) -> bool:
    """Whether torch.distributed has it. Looked up once: torch splits the name at every question."""
    return func.namespace in _COMMUNICATION


@cache
def _defaults(func: Any) -> dict[str, Any]:
    """The arguments of an operation, in their order, with their defaults."""
    return {argument.name: argument.default_value for argument in func._schema.arguments}


class Recorder(TorchDispatchMode):
    """Watches one rank from the moment it is entered; `record()` opens a stretch that is kept.

    Args:
        on_event: called with every event before it starts, recorded or not (the hang report needs them).
        is_learner: tells whether a code file is the learner's.
        delay_seed: when given, each communication waits up to 10 ms first, so that what is right by
            luck of timing goes wrong.
        on_wait: called when a handle is asked for its end, with the `Event.index` of what it stands for, or 0
            where nobody knows; and when that has answered, with None.
        local: see what computes, too; without it only what communicates is seen, and no buffer is followed.
    """

    def __init__(
        self,
        on_event: Callable[[Event], None],
        is_learner: Callable[[str], bool],
        delay_seed: int | None = None,
        on_wait: Callable[[int | None], None] = lambda _: None,
        local: bool = True,
    ) -> None:
        super().__init__()
        self._local = local
        self._on_event = on_event
        self._on_wait = on_wait
        self._is_learner = is_learner
        self._delays = None if delay_seed is None else random.Random(delay_seed)
        self._index = 0
        self._window: Window | None = None
        self._unwaited: dict[int, int] = {}
        """Storage of what a functional collective brings → `Event.index`, until somebody waits for it."""
        self.changes_messages = False
        """Whether every message that is sent is another than the one that was handed over."""
        self.calls: Counter[tuple[int, ...]] = Counter()
        """World ranks of a group → calls that its backend counts for what was seen (see beside.unseen)."""
        self.flights = Flights(lambda: self._place()[:2])

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Where torch asks: nothing is compiled below a recorder, and the fence takes a tenth of its time."""
        return False

    @contextmanager
    def record(
        self, saved: bool = False, memory: bool = False, ignore: Iterable[Tensor] = ()
    ) -> Iterator["Window"]:
        """Keep what happens inside.

        Args:
            saved: count what autograd keeps for backward. This hides in-place changes of kept tensors
                from autograd's own check, so record values without it.
            memory: count which storages live.
            ignore: tensors whose storages `saved` leaves out: parameters and buffers.
        """
        if self._window is not None:
            raise RuntimeError("record() inside record()")
        window = Window(memory, self._index)
        self._window = window
        try:
            with window.watch_saved(ignore) if saved else nullcontext():
                yield window
        finally:
            window.close(self._index)
            self._window = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if _unfolds(kind):
                return NotImplemented  # a DTensor first turns into what its rank computes and sends
        communicates = _communicates(func)
        if not communicates and not self._local:
            return func(*args, **kwargs)
        self._index += 1
        event = self._event(func, args, kwargs) if communicates else None
        if self._local:
            self.flights.before(func, args, kwargs, event)
        try:
            if event is not None:
                self._on_event(event)
                if event.peer is not None and not 0 <= event.peer < len(event.group):
                    raise IndexError(f"there is no rank {event.peer} in a group of {len(event.group)}")
                if self._delays is not None:
                    time.sleep(self._delays.uniform(0.0, 0.01))
                if self.changes_messages and event.kind == "send":
                    args = ([_changed(tensor) for tensor in args[0]], *args[1:])
            result = func(*args, **kwargs)
        except BaseException:
            if event is not None and self._window is not None:
                self._window.did_not_start(event)
            raise
        if event is not None and func.namespace == "c10d":
            self.flights.started(func, args, event, result)
        if communicates and func.namespace == "_c10d_functional":
            self._follow(func, args, event, result)
        if self._window is not None:
            self._window.see(func, args, kwargs, result, event, self._index)
        return result

    def _follow(self, func: Any, args: Any, event: Event | None, result: Any) -> None:
        """See a functional collective, or that somebody waits for one: only the first time ends it."""
        if event is not None:
            self._unwaited |= dict.fromkeys(_storages(tensors_in(result)), event.index)
        elif func._opname == "wait_tensor":
            ended = {self._unwaited.get(key) for key in _storages(tensors_in(args))} - {None}
            self._unwaited = {key: index for key, index in self._unwaited.items() if index not in ended}
            if ended and self._window is not None:
                self._window.saw_wait()

    def saw_backend_call(
        self, kind: str, tensors: list[Tensor], group: tuple[int, ...], pieces: int = 1
    ) -> None:
        """Count a collective that was called on the backend object, below torch's dispatcher."""
        self._index += 1
        self.calls[group] += most_calls(f"{kind}_", len(tensors), len(group))
        event = self._make(kind, tensors, group, None, "", True, pieces)
        self._on_event(event)
        if self._window is not None:
            self._window.add(event)

    @contextmanager
    def wait(self, handle: Any, blocks: bool) -> Iterator[None]:
        """Count that somebody asks a handle, such as `isend` returns, for its end."""
        self._on_wait(self.flights.index(handle))
        try:
            first = self.flights.waited(handle, blocks)
            if first and self._window is not None:
                self._window.saw_wait()
            yield
        finally:
            self._on_wait(None)
        if blocks:
            self.flights.ended(handle)

    def _event(self, func: Any, args: Any, kwargs: Any) -> Event | None:
        name = func._opname
        if func.namespace == "c10d" and name in _C10D:
            defaults = _defaults(func)
            values = defaults | dict(zip(defaults, args, strict=False)) | kwargs
            kind, position = _C10D[name]
            tensors = [] if position is None else tensors_in(args[position])
            group = dist.ProcessGroup.unbox(values["process_group"])
            ranks = tuple(dist.get_process_group_ranks(group))
            peer = next((values[key] for key in ("dst", "src", "root_rank") if key in values), None)
            asynchronous = bool(values.get("async_op", values.get("asyncOp", True)))
            self.calls[ranks] += most_calls(name, len(tensors), len(ranks))
            tag, piece = values.get("tag", 0), _in_one_piece(name, values.values())
            pieces = _pieces_that_leave(kind, args)
            return self._make(
                kind, tensors, ranks, peer, "", asynchronous, pieces, tag=tag, in_one_piece=piece
            )
        if func.namespace == "_c10d_functional" and name in _FUNCTIONAL:
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            ranks = tuple(dist.get_process_group_ranks(group))
            op = next((a.upper() for a in args[1:-1] if isinstance(a, str)), "")
            scale = len(ranks) if _FUNCTIONAL[name] == "all_gather" else 1
            tensors = tensors_in(args[0])
            self.calls[ranks] += most_calls(name, len(tensors), len(ranks))
            return self._make(_FUNCTIONAL[name], tensors, ranks, None, op, True, scale)
        return None

    def _make(
        self,
        kind: str,
        tensors: list[Tensor],
        group: tuple[int, ...],
        peer: int | None,
        op: str,
        asynchronous: bool,
        scale: int = 1,
        tag: int = 0,
        in_one_piece: bool = True,
    ) -> Event:
        file, line, called_op = self._place(looking_for_op=kind in _REDUCTIONS and not op)
        counts = [ask(Tensor.numel, t) for t in tensors]
        sizes = [ask(Tensor.element_size, t) for t in tensors]
        return Event(
            kind=kind,
            num_bytes=sum(n * size for n, size in zip(counts, sizes, strict=True)) * scale,
            num_elements=sum(counts) * scale,
            dtype=str(ask(Tensor.dtype.__get__, tensors[0])).removeprefix("torch.") if tensors else "",
            shape=tuple(ask(Tensor.size, tensors[0])) if tensors else (),
            group=group,
            peer=peer,
            op=op or called_op,
            asynchronous=asynchronous,
            file=file,
            line=line,
            after=self._window.mark_name if self._window else "",
            index=self._index,
            tag=tag,
            in_one_piece=in_one_piece,
        )

    def _place(self, looking_for_op: bool = False) -> tuple[str, int, str]:
        """The learner's innermost line on the stack, and the reduction that was asked for."""
        op = ""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if (
                looking_for_op
                and not op
                and file.endswith("distributed_c10d.py")
                and isinstance(frame.f_locals.get("op"), dist.ReduceOp | dist.ReduceOp.RedOpType)
            ):
                op = str(frame.f_locals["op"]).rpartition(".")[2]
            if self._is_learner(file):
                return file, frame.f_lineno, op
            frame = frame.f_back
        return "", 0, op


class Window:
    """One recorded stretch, while it is being recorded."""

    def __init__(self, memory: bool, index: int) -> None:
        self._recording = Recording(span=(index, index))
        self._memory = memory
        self._alive: dict[int, tuple[int, Any]] = {}  # storage → bytes when last looked at, a weak reference
        self._alive_bytes = 0
        self._saved: dict[int, int] = {}
        self.mark_name = ""

    def to_plain(self) -> dict[str, Any]:
        return self._recording.to_plain()

    def mark(self, name: str) -> None:
        """Begin a new stretch called `name`, such as "backward begins"."""
        self.mark_name = name
        self._measure_again()
        self._recording.alive_at[name] = self._alive_bytes
        self._recording.totals.setdefault(name, Totals())

    def close(self, index: int) -> None:
        self._recording.span = self._recording.span[0], index
        self._measure_again()
        self._recording.alive_at["end"] = self._alive_bytes
        self._recording.saved_bytes = sum(self._saved.values())

    def add(self, event: Event) -> None:
        self._recording.events.append(event)

    def did_not_start(self, event: Event) -> None:
        self._recording.failed.append(event.index)

    def saw_wait(self) -> None:
        self._recording.totals[self.mark_name].waits += 1
        self._recording.waited_after.append(len(self._recording.events))

    def see(self, func: Any, args: Any, kwargs: Any, result: Any, event: Event | None, index: int) -> None:
        """Count one operation that has just run."""
        tensors = [result] if type(result) is Tensor else tensors_in(result)
        if event is not None:
            self.add(event)
        if _is_for_shapes_alone(tensors):
            return
        flops = flops_of(func, args, kwargs, result)
        if flops is not None:
            totals = self._recording.totals[self.mark_name]
            totals.flops += flops
            totals.last_compute = index
        for tensor in tensors:
            num_elements = tensor.numel() if type(tensor) is Tensor else ask(Tensor.numel, tensor)
            if num_elements > self._recording.largest_elements:
                self._recording.largest_elements = num_elements
        if self._memory:
            given = _storages([*tensors_in(args), *tensors_in(kwargs)])
            for key, storage in {**_storages(tensors), **given}.items():
                if key in self._alive or key not in given:
                    self._watch(key, storage)

    def _watch(self, key: int, storage: Any) -> None:
        """Count a storage that is new, or has been resized, as FSDP does to free weights and to fill them."""
        size = storage.nbytes()
        before, reference = self._alive.get(key, (0, None))
        if size == before and reference is not None:
            return
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._forget(key))
        self._alive[key] = (size, reference)
        self._alive_bytes += size - before
        if self._alive_bytes > self._recording.peak_bytes:
            self._measure_again()
            self._recording.peak_bytes = max(self._recording.peak_bytes, self._alive_bytes)

    def _measure_again(self) -> None:
        """Look at every storage: no operation tells when one is resized."""
        # Not list(...): making its pairs may start Python's garbage collector, which forgets some meanwhile.
        for key, (before, reference) in self._alive.copy().items():
            storage = reference()
            if storage is not None and storage.nbytes() != before:
                self._alive[key] = (storage.nbytes(), reference)
                self._alive_bytes += storage.nbytes() - before

    def _forget(self, key: int) -> None:
        self._alive_bytes -= self._alive.pop(key, (0, None))[0]

    def watch_saved(self, ignore: Iterable[Tensor]) -> AbstractContextManager:
        """Count the distinct storages that autograd keeps for backward, without those of `ignore`."""
        ignored = {own_storage(tensor).data_ptr() for tensor in ignore}

        def pack(tensor: Tensor) -> Tensor:
            storage = own_storage(tensor)
            if storage.data_ptr() not in ignored:
                self._saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _storages(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """The storages behind some tensors, by their address."""
    storages = [
        t.untyped_storage() if type(t) is Tensor else ask(Tensor.untyped_storage, t)
        for t in tensors
        if (t.device if type(t) is Tensor else ask(Tensor.device.__get__, t)).type != "meta"
    ]
    return {storage._cdata: storage for storage in storages}


_BACKEND_METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}


def watch_backends(present: Callable[[], Recorder]) -> None:
    """Make calls on a backend object (`group._get_backend(...)`) seen too: they pass below the dispatcher.

    Once in a process; `present` gives the recorder of the run that goes on.
    """
    backend = torch._C._distributed_c10d.Backend

    def watched(name: str, kind: str) -> Callable[..., Any]:
        original = getattr(backend, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            position = 1 if kind in ("reduce_scatter", "gather", "all_to_all") else 0
            tensors = tensors_in(args[position : position + 1])
            pieces = _pieces_that_leave(kind, args)
            present().saw_backend_call(kind, tensors, world_ranks(self), pieces)
            return original(self, *args, **kwargs)

        return call

    for name, kind in _BACKEND_METHODS.items():
        setattr(backend, name, watched(name, kind))


def watch_handles(present: Callable[[], Recorder]) -> None:
    """Count how often a handle is asked for its end: one that nobody asks is a bug, and leaves no trace.

    A message whose end is waited for twice is one as well, and would be a deadlock.

    Once in a process; `present` gives the recorder of the run that goes on.
    """

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(dist.Work, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with present().wait(self, blocks=name == "wait"):
                return original(self, *args, **kwargs)

        return call

    for name in WAITING:
        if hasattr(dist.Work, name):
            setattr(dist.Work, name, watched(name))
