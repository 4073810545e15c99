"""Training curves beside that of one rank: what matters is the difference."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from lessons.page.look import BLUE, GREEN, ORANGE, PINK, RED, figure

SMALLEST = 1e-8
"""Where no difference at all is drawn: a logarithm has no zero."""
IN_A_ROW = 4
"""Names in a row of the legend, below the panels: a loss may go wherever one would stand inside."""


def draw_differences(
    curves: Mapping[str, Sequence[float]],
    reference: Sequence[float],
    *,
    broken: Sequence[str] = (),
    name: str = "one rank",
) -> None:
    """Left the losses, right how far each is from the reference, on a log axis; broken ones in red."""
    picture, (left, right) = figure(1, 2, figsize=(9.5, 3.4))
    left.plot(reference, color="black", linewidth=8, alpha=0.2, label=name)
    good = iter(((BLUE, 4), (ORANGE, 1.5), (GREEN, 1), (PINK, 0.7)))  # a later one lies on an earlier one
    for told, losses in curves.items():
        if told in broken:
            style = {"color": RED, "linestyle": "--"}
        else:
            color, width = next(good)
            style = {"color": color, "linewidth": width}
        left.plot(losses, label=told, **style)
        steps = [max(abs(a - b), SMALLEST) for a, b in zip(losses, reference, strict=True)]
        right.semilogy(steps, marker=".", markersize=4, **style)
    left.set(xlabel="step", ylabel="loss", title="Loss")
    picture.legend(
        *left.get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=IN_A_ROW
    )
    right.set(xlabel="step", ylim=(SMALLEST / 10, None), title=f"Difference from {name}")
    right.axhline(SMALLEST, color="black", linewidth=0.5)
    right.text(0, SMALLEST / 1.5, "no difference", fontsize=9, va="top")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plt.tight_layout()
    plt.show()
