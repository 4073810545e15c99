"""How pictures look: one set of colours, which colour-blind readers tell apart, and letters one can read."""

import matplotlib.pyplot as plt

# Okabe and Ito's palette.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, RED, PINK, GREY = "#0072B2", "#D55E00", "#CC79A7", "#B8B8B8"
RANKS = (BLUE, ORANGE, GREEN, PINK)
"""One for each of four ranks."""

COMPUTE, WIRE, WAITING = SKY, ORANGE, GREY
"""What a rank does in a timeline."""

STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.fontsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.dpi": 100,
}


def figure(*shape: int, **options: object) -> tuple:
    """`plt.subplots` in the course's style."""
    plt.rcParams.update(STYLE)
    return plt.subplots(*shape, **options)
