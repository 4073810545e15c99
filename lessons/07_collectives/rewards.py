"""What follows a green check: the learner's own run, beside the course's."""

from typing import Any

from grader import run_ranks
from lessons.collectives import measures, pictures
from solutions import collectives as ours


def ring_all_reduce(yours: Any) -> None:
    """What travels on four ranks, chunk by chunk, and how long a large tensor takes."""
    print("Your ring on four ranks. A box is a message: the chunk that leaves, and whose parts are in it.")
    ways = {"yours": yours, "the course's": ours.ring_all_reduce}
    travels = {how: run_ranks(measures.travels, function, ranks=4) for how, function in ways.items()}
    if travels["yours"] == travels["the course's"]:
        print("Message for message, the course's sends the same.")
        del travels["the course's"]
    timed = [*ways.values(), measures.torchs_all_reduce]
    seconds = run_ranks(measures.seconds_of, timed, 2_000_000, 6, ranks=4)[0]
    milliseconds = dict(zip((*ways, "PyTorch's"), (1000 * s for s in seconds), strict=True))
    pictures.draw_travels(travels, milliseconds)
    sent = sum(run_ranks(measures.messages_of, yours, pictures.ELEMENTS, ranks=4)[0])
    print(
        f"A rank sends {sent / (4 * pictures.ELEMENTS):.2f} S. No all-reduce needs less than 1.50 S a rank."
    )
    print("Can you come closer to PyTorch's time?")
