"""How many bytes are alive while a step goes on: a mountain over time."""

from collections.abc import Mapping

import matplotlib.pyplot as plt

from lessons.page.look import BLUE, GREEN, GREY, ORANGE, PINK, figure
from lessons.page.memory import Meter


def draw_mountains(
    meters: Mapping[str, Meter], title: str, *, share: bool = False, reference: str = ""
) -> plt.Axes:
    """A curve for each meter, with a dot where it has the mark "backward"; the axes, to add to.

    With `share` the curves have the same width: they go over the share of a step's operations. The one
    named `reference` is broad and grey: others may lie on it.
    """
    _, axes = figure(figsize=(9, 3.2))
    colors = iter((BLUE, ORANGE, GREEN, PINK))
    for told, meter in meters.items():
        color, thick = (GREY, 5) if told == reference else (next(colors), 1.5)
        width = len(meter.history) - 1 if share else 1
        places = [i / width for i in range(len(meter.history))]
        axes.plot(places, [size / 1e6 for size in meter.history], color=color, linewidth=thick, label=told)
        if "backward" in meter.marks:
            axes.plot(places[meter.marks["backward"]], meter.at("backward") / 1e6, "o", color=color)
    dots = "; a dot: backward begins" if any("backward" in meter.marks for meter in meters.values()) else ""
    unit = "share of the step's operations" if share else "operations of one step, in their order"
    axes.set(xlabel=unit + dots, ylabel="MB alive", ylim=0, xlim=0, title=title)
    if len(meters) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    plt.tight_layout()
    return axes
