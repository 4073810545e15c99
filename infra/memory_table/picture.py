"""Draws what a rank holds, for every way to train, with the prediction as a line across each bar."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from infra.memory_table.__main__ import Row

PARTS = {"weights": "#4c72b0", "gradients": "#dd8452", "optimizer": "#55a868", "activations": "#c7c7c7"}


def draw(rows: Sequence["Row"], path: Path) -> None:
    """One panel a number of ranks, one bar a way, made by the course's own code."""
    ours = [row for row in rows if row.by == "solutions"]
    sizes = sorted({row.num_ranks for row in ours})
    figure, panels = plt.subplots(
        1, len(sizes), figsize=(5.5 * len(sizes) + 1, 4.6), sharey=True, sharex=True, squeeze=False
    )
    for panel, num_ranks in zip(panels[0], sizes, strict=True):
        _draw_panel(panel, [row for row in ours if row.num_ranks == num_ranks])
        panel.set_title(f"{num_ranks} ranks")
        panel.set_xlabel("MB on the rank that holds most")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_panel(panel: plt.Axes, rows: Sequence["Row"]) -> None:
    names = [str(row.way).replace(", ", "\n") for row in rows]
    places = range(len(rows))
    left = [0.0] * len(rows)
    for part, colour in PARTS.items():
        widths = [getattr(row.measured, part) / 1e6 for row in rows]
        panel.barh(places, widths, left=left, color=colour, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    predicted = [sum(getattr(row.predicted, part) for part in PARTS) / 1e6 for row in rows]
    panel.plot(predicted, places, "|", color="black", markersize=18, label="predicted")
    panel.set_yticks(places, names, fontsize=8)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.spines[["top", "right"]].set_visible(False)
