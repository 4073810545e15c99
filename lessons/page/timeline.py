"""A training step of one rank in time: what its processor does, and what travels meanwhile."""

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt

from lessons.page.look import COMPUTE, GREEN, WAITING, WIRE


@dataclass(frozen=True)
class Step:
    """One step of one rank, in milliseconds from its beginning."""

    forward: float
    """When forward was over."""
    backward: float
    """When backward was over."""
    end: float
    """When all gradients had arrived."""
    sent: list[dict[str, Any]]
    """What a `Tap` wrote down, with `start` and `end` in milliseconds."""

    @property
    def exposed(self) -> float:
        """Milliseconds that the step waits after backward."""
        return self.end - self.backward


def draw_timeline(axes: plt.Axes, step: Step, title: str) -> None:
    """The processor above, the wire below."""
    for a, b, color, told in (
        (0.0, step.forward, GREEN, "forward"),
        (step.forward, step.backward, COMPUTE, "backward"),
        (step.backward, step.end, WAITING, "waiting"),
    ):
        axes.barh("processor", b - a, left=a, color=color, edgecolor="black")
        if b - a > 0.1 * step.end:
            axes.text((a + b) / 2, 0, told, ha="center", va="center")
    free = 0.0
    for entry in step.sent:
        a, b = max(entry["start"], free), entry["end"]  # the wire carries one message at a time
        axes.barh("wire", b - a, left=a, color=WIRE, edgecolor="black", linewidth=0.5)
        free = b
    axes.axvline(step.end, color="black", linestyle=":")
    axes.set_title(f"{title}: {step.end:.0f} ms a step, {step.exposed:.0f} of them waiting after backward")
    axes.invert_yaxis()
