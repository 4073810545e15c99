"""What a rank did, as the grader's own recorder saw it: messages and collectives, FLOPs, bytes."""

from collections.abc import Iterable
from contextlib import ExitStack

from torch import Tensor

from grader.beside.recorder import Recorder
from grader.ranks.recording import Recording
from lessons.page.tap import SHARE_SENT


class Watch:
    """Inside `with`, this rank is recorded; afterwards `recording` is what it did.

    Args:
        saved: count the bytes that autograd keeps for backward (`recording.saved_bytes`).
        memory: count the bytes alive at each mark, and the peak.
        ignore: tensors that `saved` leaves out: parameters and buffers.
    """

    def __init__(self, *, saved: bool = False, memory: bool = False, ignore: Iterable[Tensor] = ()) -> None:
        self._options = {"saved": saved, "memory": memory, "ignore": list(ignore)}
        self.recording = Recording()

    def __enter__(self) -> "Watch":
        self._stack = ExitStack()
        recorder = self._stack.enter_context(Recorder(lambda event: None, lambda file: False))
        self._window = self._stack.enter_context(recorder.record(**self._options))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self.recording = Recording.from_plain(self._window.to_plain())

    def mark(self, name: str) -> None:
        """Give the stretch that begins here a name."""
        self._window.mark(name)

    def sent_bytes(self, kind: str | None = None, after: str | None = None) -> float:
        """What this rank sent, by messages and round rings: of one kind, of one stretch; None is any."""
        events = self.recording.select(kind, after)
        return sum(SHARE_SENT[e.kind](len(e.group)) * e.num_bytes for e in events if e.kind in SHARE_SENT)
