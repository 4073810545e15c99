"""A tap on the wire: what a rank sends and when; if asked to, a wire that is slower than this machine's."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

SHARE_SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,
}
"""Of the whole tensor's bytes, what a rank sends where a collective goes round a ring of n ranks."""

TAPPED = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "isend": "send",
}
"""The functions of `torch.distributed` that a tap sees; `send` and batches of messages call `isend`."""


class Tap:
    """Inside `with`, writes down every collective and message of this rank; with a speed, imitates a wire.

    Such a wire carries one message at a time. Something has arrived when the real communication is over and
    the wire would have carried it. To wait for it is a sleep, which leaves the processor to others, as a
    network card does. Functions are tapped where they are called as `dist.all_reduce(...)`.

    Args:
        bytes_per_second: speed of the wire in each direction; None is the machine as it is.
        across: speed of a second wire, for what is sent to a rank of another machine, or in a group with
            ranks of several. Each rank has both wires, and both may be busy at once.
        machine_size: ranks of a machine, neighbours by their number in the world.
    """

    def __init__(
        self, bytes_per_second: float | None = None, *, across: float | None = None, machine_size: int = 1
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._across, self._machine_size = across, machine_size
        self.log: list[dict[str, Any]] = []
        """What was sent, in order: `kind`, `bytes` of the whole tensor, `start` and `end` in seconds.

        What somebody has waited for has `waits`, from when to when, and `kept`: how long the wire was why.
        """
        self._busy_until: dict[float, float] = {}
        self._originals: dict[str, Callable] = {}

    def __enter__(self) -> "Tap":
        for name in TAPPED:
            self._originals[name] = getattr(dist, name)
            tapped = functools.partial(self._send, name)
            self._set(name, functools.update_wrapper(tapped, self._originals[name]))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            self._set(name, original)

    def _set(self, name: str, function: Callable) -> None:
        setattr(dist, name, function)
        if name == "isend":  # P2POp and batch_isend_irecv take no other than their own module's
            dist.distributed_c10d.isend = function

    def _send(self, name: str, *arguments: Any, async_op: bool = False, **options: Any) -> Any:
        num_bytes = max(map(_bytes_of, (*arguments, *options.values())))
        always = {} if name == "isend" else {"async_op": True}
        work = self._originals[name](*arguments, **options, **always)
        start = time.perf_counter()
        arrival, speed = 0.0, self._speed(name, arguments, options)
        if speed:
            n = dist.get_world_size(options.get("group"))
            seconds = SHARE_SENT[TAPPED[name]](n) * num_bytes / speed
            arrival = self._busy_until[speed] = max(self._busy_until.get(speed, 0.0), start) + seconds
        entry = {"kind": TAPPED[name], "bytes": num_bytes, "start": start, "end": arrival}
        self.log.append(entry)
        sent = _Sent(work, entry)
        if name == "isend" or async_op:
            return sent
        entry["kept"] = max(0.0, arrival - start)
        return sent.wait()

    def _speed(self, name: str, arguments: tuple, options: dict[str, Any]) -> float | None:
        """Of the wire that carries this."""
        if self._across is None:
            return self.bytes_per_second
        group = options.get("group") or dist.group.WORLD
        ranks = dist.get_process_group_ranks(group)
        if name == "isend":
            to = options.get("group_dst")
            by_world = arguments[1] if len(arguments) > 1 else options.get("dst")
            ranks = [dist.get_rank(), by_world if to is None else ranks[to]]
        machines = {rank // self._machine_size for rank in ranks}
        return self.bytes_per_second if len(machines) == 1 else self._across


class _Sent:
    """The handle of what was started under a tap."""

    def __init__(self, work: Any, entry: dict[str, Any]) -> None:
        self._work, self._entry = work, entry

    def wait(self) -> None:
        began = time.perf_counter()
        self._entry.setdefault("kept", max(0.0, self._entry["end"] - began))
        self._work.wait()
        time.sleep(max(0.0, self._entry["end"] - time.perf_counter()))
        over = time.perf_counter()
        self._entry["end"] = self._entry["end"] or over
        self._entry.setdefault("waits", (began, over))


def _bytes_of(argument: Any) -> int:
    """Of a tensor, or of a list of them; 0 for anything else."""
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(_bytes_of, argument)) if isinstance(argument, list | tuple) else 0
