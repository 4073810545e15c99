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
    "all_gather_into_tensor": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "isend": lambda n: 1.0,
}
"""Of the whole tensor's bytes, what a rank puts on the wire where it goes round a ring of n ranks."""


class Tap:
    """Inside `with`, writes down every collective and message of this rank; with a speed, imitates a wire.

    Such a wire carries one message at a time. Something has arrived when the real communication is over and
    the wire would have carried it. To wait for it is a sleep, which leaves the processor to others, as a
    network card does. Functions are tapped where they are called as `dist.all_reduce(...)`.

    Args:
        bytes_per_second: speed of the wire in each direction; None is the machine as it is.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self.log: list[dict[str, Any]] = []
        """What was sent, in order: `kind`, `bytes` of the whole tensor, `start` and `end` in seconds."""
        self._busy_until = 0.0
        self._originals: dict[str, Callable] = {}

    def __enter__(self) -> "Tap":
        for kind in SHARE_SENT:
            self._originals[kind] = getattr(dist, kind)
            setattr(dist, kind, functools.partial(self._send, kind))
        return self

    def __exit__(self, *error: object) -> None:
        for kind, original in self._originals.items():
            setattr(dist, kind, original)

    def _send(self, kind: str, *arguments: Any, async_op: bool = False, **options: Any) -> Any:
        num_bytes, start = max(map(_bytes_of, (*arguments, *options.values()))), time.perf_counter()
        always = {} if kind == "isend" else {"async_op": True}
        work = self._originals[kind](*arguments, **options, **always)
        arrival = 0.0
        if self.bytes_per_second:
            n = dist.get_world_size(options.get("group"))
            seconds = SHARE_SENT[kind](n) * num_bytes / self.bytes_per_second
            arrival = self._busy_until = max(self._busy_until, start) + seconds
        entry = {"kind": kind, "bytes": num_bytes, "start": start, "end": arrival}
        self.log.append(entry)
        sent = _Sent(work, entry)
        if kind == "isend" or async_op:
            return sent
        return sent.wait()


class _Sent:
    """The handle of what was started under a tap."""

    def __init__(self, work: Any, entry: dict[str, Any]) -> None:
        self._work, self._entry = work, entry

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._entry["end"] - time.perf_counter()))
        self._entry["end"] = self._entry["end"] or time.perf_counter()


def _bytes_of(argument: Any) -> int:
    """Of a tensor, or of a list of them; 0 for anything else."""
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(_bytes_of, argument)) if isinstance(argument, list | tuple) else 0
