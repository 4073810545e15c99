"""What follows a green check: the learner's own run, beside the course's."""

from functools import partial
from typing import Any

import matplotlib.pyplot as plt
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lessons.activation_checkpointing import measures
from lessons.page.mountain import draw_mountains
from solutions import activation_checkpointing as ours


def checkpoint(yours: Any) -> None:  # the name of its exercise
    """The bytes of a step through six wide layers, each under a checkpoint."""
    meters = {
        "plain": measures.step_of_wide_layers(None),
        "the course's": measures.step_of_wide_layers(ours.checkpoint),
        "yours": measures.step_of_wide_layers(yours),
    }
    title = "Six layers, eight times as wide inside, each under a checkpoint"
    draw_mountains(meters, title, reference="the course's")
    plt.show()
    for told, meter in meters.items():
        kept, peak = meter.at("backward"), meter.peak
        print(f"{told:13} kept after the forward {kept:12,} bytes, at the worst moment {peak:12,}")
    pytorchs = measures.step_of_wide_layers(partial(torch_checkpoint, use_reentrant=False)).peak
    less, more = meters["the course's"].peak - pytorchs, meters["yours"].peak - pytorchs
    told = f"PyTorch's needs {less:,} bytes less than the course's at the worst moment"
    if more > 0:
        print(f"{told}. Can yours?")
    else:
        print(f"{told}, and so does yours." if more == 0 else f"{told}, and yours {-more:,} less than that.")
