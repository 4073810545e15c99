"""What follows a green check: the learner's own ring, beside the course's."""

from typing import Any

import matplotlib.pyplot as plt

from lessons.context_parallel import measures, pictures, rings
from lessons.context_parallel.rings import RingLog
from lessons.page.look import figure
from solutions import context_parallel as ours

RANKS = 4


def ring_attention(yours: Any) -> None:  # the name of its exercise
    """Four ranks: which block is where at which step, and what each rank makes of it."""
    _, panels = figure(2, 1, figsize=(7.5, 7.6))
    for axes, (name, attention) in zip(
        panels, (("Yours", yours), ("The course's", ours.ring_attention)), strict=True
    ):
        found = rings.logs(attention, RANKS)
        held = [blocks_held(found, r) for r in range(RANKS)]
        computed = [[j in found[r].computed for j in held[r]] for r in range(RANKS)]
        told = [[what(found[r], j) for j in held[r]] for r in range(RANKS)]
        pictures.draw_steps(axes, held, computed, told)
        axes.set_title(f"{name}: the forward on {RANKS} ranks, as it was recorded")
        sent = measures.blocks_sent([each.cost for each in found])
        block = 4 * 2 * (measures.LENGTH // RANKS) ** 2 * 16
        work = sum(each.cost["flops"][0] for each in found) / block
        multiplied = f"{work:.2f} blocks" if work else "in a kernel that no counter knows (lesson 01)"
        print(f"{name}: {sent[0]:.0f} blocks sent forward, {sent[1]:.0f} backward; multiplied: {multiplied}")
    plt.tight_layout()
    plt.show()
    print("Eight would do, since half of every diagonal block is masked.")


def blocks_held(found: list[RingLog], rank: int) -> list[int]:
    """Whose block a rank had at each step: those that it sent on, and the last that it was sent."""
    arrived = [each.sent[-1] for each in found if each.sent and each.to == rank]
    return [*found[rank].sent, *arrived]


def what(log: RingLog, block: int) -> str:
    """Computed before it was sent on or after, or only passed on."""
    if block not in log.computed:
        return "passed on" if block in log.sent else "not needed"
    if block not in log.sent:
        return "computed"
    return "computed while\nit travels" if block in log.under_way else "computed,\nthen sent"
