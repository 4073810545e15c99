"""Trains the model in every way on real ranks: what each holds, what it asks torch to send, what travels.

The ranks are a program of their own (`ranks`), so that they can have a network of their own (`witness`).
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from infra.memory_table.ways import Way, makers
from infra.memory_table.witness import ROOT, UNSHARE, find_header_bytes
from nanogpt.data import load_tokens


@dataclass(frozen=True)
class Plan:
    """What the ranks are to do."""

    ways: tuple[Way, ...]
    rounds: int
    """Timed steps of each; ours and PyTorch's take turns."""
    witnessed: int = 0
    """Steps of each whose bytes the interface counts; the least is kept."""
    collectives: bool = False
    """Whether lesson 07's collectives and torch's are measured, too, on one tensor."""
    sizes: dict[str, int] = field(default_factory=dict)
    """What is other than in the table's model and batch: fields of a TrainConfig."""


@dataclass(frozen=True)
class Sent:
    """What one rank sends, in bytes: the mean of all ranks, because one interface carries them all."""

    by_axis: dict[str, float]
    """What torch was asked to send along each axis of the ranks, by rings that send nothing in vain."""
    extra: dict[str, float]
    """What is known to be sent beyond that → bytes (see `gloo`)."""
    witnessed: float | None
    """What the loopback interface carried, without the frames; None where nobody could look."""
    framing: float | None
    """The frames: one header of IP and TCP for each packet."""

    @property
    def recorded(self) -> float:
        """Along all axes."""
        return sum(self.by_axis.values())


@dataclass(frozen=True)
class Measured:
    """What the rank that holds most has in one step, in bytes, what a rank sends, and how fast all are."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Alive after a micro-batch's forward that was not before, with its tokens, without loss and logits."""
    wire: Sent
    tokens_per_second: float
    loss_difference: float
    """Largest difference of a step's loss to training on one rank."""


@dataclass(frozen=True)
class Found:
    """What all ranks together have found."""

    ways: dict[tuple[Way, str], Measured]
    """Way, "solutions" or "torch" → numbers."""
    collectives: dict[tuple[str, str], Sent]
    """Collective, "lesson 07" or "torch" → what it sends for one tensor (see `single`)."""
    header_bytes: int | None
    """Of a packet: what was taken off for each."""
    why_not_witnessed: str
    """A sentence, "" where the bytes were witnessed."""


def measure(plan: Plan, num_ranks: int) -> Found:
    """Measure every way with the course's own code ("solutions") and with PyTorch's ("torch")."""
    load_tokens("stdlib", None)  # once, before the ranks ask for them
    header, why_not = find_header_bytes() if plan.witnessed else (None, "nobody asked")
    told = {**asdict(plan), "num_ranks": num_ranks, "header_bytes": header}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(told))
        command = [sys.executable, "-m", "infra.memory_table.ranks", name]
        subprocess.run([*(UNSHARE if header else ()), *command], cwd=ROOT, check=True)
        by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    keys = [(way, by) for way in plan.ways for by in makers(way)]
    ways = [_of_all(rows) for rows in zip(*(rank["ways"] for rank in by_rank), strict=True)]
    return Found(
        ways=dict(zip(keys, ways, strict=True)),
        collectives={
            (row["name"], row["by"]): _mean_sent([rank["collectives"][i]["sent"] for rank in by_rank])
            for i, row in enumerate(by_rank[0]["collectives"])
        },
        header_bytes=header,
        why_not_witnessed=why_not,
    )


def _of_all(ranks: tuple[dict, ...]) -> Measured:
    """The largest of every number, the mean of what is sent; the speed is of all ranks together."""
    largest = {name: max(rank[name] for rank in ranks) for name in ranks[0] if name != "wire"}
    return Measured(**largest, wire=_mean_sent([rank["wire"] for rank in ranks]))


def _mean_sent(ranks: list[dict]) -> Sent:
    """Each rank tells what it was asked for; rank 0 what the interface carried for all."""
    n = len(ranks)

    def mean(field: str) -> dict[str, float]:
        keys = dict.fromkeys(key for rank in ranks for key in rank[field])
        return {key: sum(rank[field].get(key, 0.0) for rank in ranks) / n for key in keys}

    carried = {name: ranks[0][name] for name in ("witnessed", "framing")}
    return Sent(
        by_axis=mean("by_axis"),
        extra=mean("extra"),
        **{name: None if total is None else total / n for name, total in carried.items()},
    )
