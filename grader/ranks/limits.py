"""What a run may use: held by the supervisor, outside the ranks."""

import math
import time
from dataclasses import dataclass, replace

MOST_DENIED = 3
"""How many times its timeout a run may be given beyond it, where the machine had no core for its ranks."""


@dataclass(frozen=True)
class Limits:
    """What one run may use; the limits hold for all its processes together."""

    timeout: float = 30.0
    """Seconds until a run that still computes is ended: those in which it has a core, where that is known."""
    idle: float = 3.0
    """Seconds without any progress on any rank after which the ranks count as deadlocked."""
    memory_bytes: int = 4 * 2**30
    """Memory beyond what torch itself takes."""
    max_processes: int = 64
    max_threads: int = 1000
    ends_at: float = math.inf
    """When all runs of a grading have had their time, in seconds of time.monotonic()."""

    def now(self) -> "Limits":
        """The limits of a run that begins now: none goes on after the end of all."""
        left = self.ends_at - time.monotonic()
        return replace(self, timeout=round(max(1.0, min(self.timeout, left)), 1))

    @property
    def used_up(self) -> bool:
        """Whether the time of all runs is over."""
        return time.monotonic() >= self.ends_at
