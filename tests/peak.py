"""The most bytes that are alive while something runs: what the formulas of memory are held to."""

from collections.abc import Callable

from grader.beside.recorder import Recorder
from grader.ranks.recording import Recording


def peak_bytes(function: Callable[[], object]) -> int:
    """Bytes of the storages that `function()` made and that were alive at once, at the worst moment."""
    recorder = Recorder(lambda event: None, lambda file: False)
    with recorder, recorder.record(memory=True) as window:
        function()
    return Recording.from_plain(window.to_plain()).peak_bytes
