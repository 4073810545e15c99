"""`python -m infra.memory_table`: one model trained in every way, predicted and measured bytes side by side.

What is held is that of the rank that holds most, what is sent the mean of all ranks, in MB (10^6 bytes). Each
way is made by this course ("solutions") and by PyTorch ("torch"); their steps take turns, so that their
speeds can be compared. Bytes on the wire have three numbers: predicted by the lessons' formulas; recorded,
which is what torch was asked to send; witnessed, which is what the loopback interface carried.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from infra.memory_table.measure import Found, Plan, Sent, measure
from infra.memory_table.rows import HELD, Row, frames, rows
from infra.memory_table.single import NUM_ELEMENTS, predicted_bytes
from infra.memory_table.ways import WAYS
from nanogpt.combined import AXES

WITNESSED_STEPS = 3


@dataclass(frozen=True)
class Options:
    """Train the same small GPT in every way, and compare what it should cost with what it does."""

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of ranks."""
    only: tuple[str, ...] = ()
    """Only these values of --parallel, such as zero1 zero2; all if not given."""
    rounds: int = 20
    """Timed steps of each way."""
    json: Path | None = None
    """Write the numbers to this file."""
    picture: Path | None = None
    """Draw the bytes of a rank to this file."""


def plan(options: Options, num_ranks: int) -> Plan:
    """What the options ask for on so many ranks."""
    ways = tuple(
        way
        for way in WAYS
        if way.num_ranks in (None, num_ranks) and (not options.only or way.parallel in options.only)
    )
    return Plan(ways, options.rounds, witnessed=WITNESSED_STEPS, collectives=True)


def _mb(*sizes: float | None) -> str:
    return " ".join("-" if size is None else f"{size / 1e6:.2f}" for size in sizes)


def print_table(console: Console, table_rows: list[Row]) -> None:
    """Predicted and measured side by side; below, every difference by its name."""
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.add_column(f"{table_rows[0].num_ranks} ranks, MB: predicted measured")
    for column in ("by", *HELD, "wire: predicted recorded witnessed", "tokens/s", "loss"):
        table.add_column(column, justify="left" if column == "by" else "right")
    marks: dict[str, int] = {}

    def marked(text: str, notes: list[str]) -> str:
        numbers = [str(marks.setdefault(note, len(marks) + 1)) for note in notes]
        return f"{text} [{','.join(numbers)}]" if numbers else text

    for row in table_rows:
        sizes = ((getattr(row.predicted, name), getattr(row.measured, name)) for name in HELD)
        cells = [marked(_mb(*pair), row.notes.get(name, [])) for name, pair in zip(HELD, sizes, strict=True)]
        wire = row.measured.wire
        wire_notes = [note for column, notes in row.notes.items() if column not in HELD for note in notes]
        cells.append(marked(_mb(row.predicted.wire, wire.recorded, wire.witnessed), wire_notes))
        speed, loss = row.measured.tokens_per_second, row.measured.loss_difference
        table.add_row(str(row.way), row.by, *cells, f"{speed:,.0f}", f"{loss:.0e}")
    console.print(table, markup=False)
    for note, number in marks.items():
        console.print(f"[{number}] {note}", markup=False)


def print_axes(console: Console, table_rows: list[Row]) -> None:
    """What a rank sends along each axis, of the ways that have more than one."""
    table = Table(box=None, pad_edge=False)
    table.add_column("along an axis, MB a rank: predicted recorded")
    for axis in AXES:
        table.add_column(axis, justify="right")
    for row in table_rows:
        formulas, recorded = row.predicted.by_axis, row.measured.wire.by_axis
        if len(formulas) > 1:
            cells = (
                _mb(formulas[axis], recorded.get(axis, 0.0)) if axis in formulas else "-" for axis in AXES
            )
            table.add_row(str(row.way), *cells)
    if table.row_count:
        console.print(table, markup=False)


def print_collectives(console: Console, collectives: dict[tuple[str, str], Sent], num_ranks: int) -> None:
    """Lesson 07's and torch's on one tensor, and how often what is predicted really travels."""
    table = Table(box=None, pad_edge=False)
    table.add_column(f"{num_ranks} ranks, {NUM_ELEMENTS:,} numbers, MB a rank")
    for column in ("by", "predicted", "recorded", "witnessed", "times predicted", "with frames"):
        table.add_column(column, justify="left" if column == "by" else "right")
    for (name, by), sent in collectives.items():
        predicted = predicted_bytes(name, num_ranks)
        times = ["-", "-"]
        if sent.witnessed is not None and sent.framing is not None:
            times = [f"{total / predicted:.4f}" for total in (sent.witnessed, sent.witnessed + sent.framing)]
        table.add_row(name, by, *_mb(predicted, sent.recorded, sent.witnessed).split(), *times)
    console.print(table, markup=False)


def print_witness(console: Console, found: Found) -> None:
    """How the bytes were witnessed, or why not."""
    if found.why_not_witnessed:
        why = f"this machine gives us no network of our own ({found.why_not_witnessed})"
        console.print(f"Witnessed: nothing, because {why}.", markup=False)
        return
    shares = frames([measured.wire for measured in found.ways.values()])
    assert shares is not None, "what was witnessed has frames"
    console.print(
        "Witnessed: on loopback, in a network of its own, where nothing else travels; the least of "
        f"{WITNESSED_STEPS} steps. Taken off: the headers of IP and TCP, {found.header_bytes} bytes of each "
        f"packet, {shares[0]:.2%} to {shares[1]:.2%} more.",
        markup=False,
    )


def main() -> None:
    """Entry point."""
    options = tyro.cli(Options, prog="python -m infra.memory_table", description=Options.__doc__)
    known = {way.parallel for way in WAYS}
    if unknown := set(options.only) - known:
        sys.exit(f"--only {' '.join(sorted(unknown))}: choose from {', '.join(sorted(filter(None, known)))}")
    console = Console(width=None if sys.stdout.isatty() else 190, highlight=False)
    everything: list[Row] = []
    alone: list[dict] = []
    for num_ranks in options.ranks:
        with console.status(f"training on {num_ranks} ranks"):
            found = measure(plan(options, num_ranks), num_ranks)
        table_rows = rows(found, num_ranks)
        print_table(console, table_rows)
        print_axes(console, table_rows)
        print_collectives(console, found.collectives, num_ranks)
        print_witness(console, found)
        console.print()
        everything += table_rows
        for (name, by), sent in found.collectives.items():
            alone.append({"collective": name, "by": by, "num_ranks": num_ranks, **dataclasses.asdict(sent)})
    if options.json is not None:
        plain = [{**dataclasses.asdict(row), "way": str(row.way)} for row in everything]
        options.json.write_text(json.dumps({"ways": plain, "collectives": alone}, indent=2) + "\n")
    if options.picture is not None:
        from infra.memory_table.picture import draw  # matplotlib is slow to import

        draw(everything, options.picture)


if __name__ == "__main__":
    main()
