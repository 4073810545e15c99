"""What follows a green check: the learner's own block, beside the course's."""

from typing import Any

from grader import run_ranks
from lessons.sequence_parallel import measures, pictures
from solutions import sequence_parallel as ours

RANKS = 2


def sequence_parallel_block(yours: Any) -> None:  # the name of its exercise
    """One block on two ranks: the bytes that it keeps, and those that it sends."""
    cuts = {"yours": yours, "the course's": ours.sequence_parallel_block}
    found = {name: run_ranks(measures.costs_of_a_block, cut, ranks=RANKS)[0] for name, cut in cuts.items()}
    pictures.draw_costs(found, RANKS)
    for name, cost in found.items():
        print(f"{name:13} keeps {cost['kept']:,} bytes, sends {cost['forward'] + cost['backward']:,.0f}")
    print(
        "Can yours keep less than the course's and send no more? Two kept tensors are the GELU's in and out."
    )
