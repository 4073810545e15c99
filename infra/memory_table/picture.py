"""Draws what a rank holds and sends in every way to train, with the prediction as a line across each bar."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from infra.memory_table.rows import Row
from lessons.page.look import BLUE, GREEN, GREY, ORANGE, PINK, YELLOW, figure

PARTS = {"weights": BLUE, "gradients": ORANGE, "optimizer": GREEN, "activations": GREY}
RECORDED, WITNESSED = PINK, YELLOW
WIDTH = 8.6
"""Inches: as wide as GitHub shows a README, so that a letter of 9 points is one of 9 there."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """A column of panels a number of ranks: what is held above what is sent, by the course's own code."""
    ours = [row for row in rows if row.by == "solutions"]
    sizes = sorted({row.num_ranks for row in ours})
    shape = {"sharey": True, "sharex": "row", "squeeze": False}
    shown, panels = figure(2, len(sizes), figsize=(WIDTH, 13.5), **shape)
    for (held, sent), num_ranks in zip(panels.T, sizes, strict=True):
        of_these = [row for row in ours if row.num_ranks == num_ranks]
        _draw_held(held, of_these)
        _draw_sent(sent, of_these)
        held.set_title(f"{num_ranks} ranks")
        held.set_xlabel("MB on the rank that holds most")
        sent.set_xlabel("MB that a rank sends in a step")
    for panel, bottom in zip(panels[:, 0], (0.49, 0.0), strict=True):
        handles, labels = panel.get_legend_handles_labels()
        shown.legend(
            handles,
            labels,
            loc="lower center",
            bbox_to_anchor=(0.5, bottom),
            ncols=len(labels),
            columnspacing=1.2,
        )
    shown.tight_layout(rect=(0, 0.025, 1, 1), h_pad=4.0)
    shown.savefig(path, dpi=170)
    plt.close(shown)


def _draw_held(panel: plt.Axes, rows: Sequence[Row]) -> None:
    left = [0.0] * len(rows)
    for part, colour in PARTS.items():
        widths = [getattr(row.measured, part) / 1e6 for row in rows]
        panel.barh(range(len(rows)), widths, left=left, color=colour, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    _finish(panel, rows, [sum(getattr(row.predicted, part) for part in PARTS) for row in rows])


def _draw_sent(panel: plt.Axes, rows: Sequence[Row]) -> None:
    """The wider bar behind is what travelled; none where nobody could look."""
    witnessed = [(row.measured.wire.witnessed or 0.0) / 1e6 for row in rows]
    recorded = [row.measured.wire.recorded / 1e6 for row in rows]
    panel.barh(range(len(rows)), witnessed, color=WITNESSED, label="witnessed on the interface")
    panel.barh(range(len(rows)), recorded, height=0.45, color=RECORDED, label="recorded: asked of torch")
    _finish(panel, rows, [row.predicted.wire for row in rows])


def _finish(panel: plt.Axes, rows: Sequence[Row], predicted: Sequence[float]) -> None:
    """Ticks and names."""
    places = range(len(rows))
    megabytes = [size / 1e6 for size in predicted]
    panel.plot(megabytes, places, "|", color="black", markersize=18, label="predicted")
    panel.set_yticks(places, [_label(row) for row in rows])
    panel.set_ylim(len(rows) - 0.4, -0.6)


def _label(row: Row) -> str:
    """Two lines for what is two things; on two axes each has half of the four ranks."""
    return str(row.way).replace("=2", "").replace(", ", "\n").replace("+", " +\n")
