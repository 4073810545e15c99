"""`python -m infra.memory_table`: one model trained in every way, predicted and measured bytes side by side.

Every number is for the rank that holds most, in MB (10^6 bytes). Each way is made by this course
("solutions") and by PyTorch ("torch"); their steps take turns, so that their speeds can be compared.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from infra.memory_table.differences import differences
from infra.memory_table.measure import Measured, Plan, measure
from infra.memory_table.predict import Predicted, predict
from infra.memory_table.ways import WAYS, Way, train_config
from nanogpt.data import load_tokens
from nanogpt.tokenizer import load_encoding

COLUMNS = ("weights", "gradients", "optimizer", "activations", "wire")


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


@dataclass(frozen=True)
class Row:
    """One way by one maker on some ranks."""

    way: Way
    by: str
    num_ranks: int
    predicted: Predicted
    measured: Measured
    notes: dict[str, list[str]]
    """Column → why it is not as predicted."""
    unexplained: dict[str, float]
    """Column → bytes that nothing here explains."""


def rows(options: Options, num_ranks: int) -> list[Row]:
    """Measure on `num_ranks` ranks, and put the predictions beside."""
    ways = tuple(way for way in WAYS if not options.only or way.parallel in options.only)
    vocab_size = -(-load_encoding(load_tokens("stdlib", None).encoding).n_vocab // 64) * 64
    return [
        _row(way, by, num_ranks, measured, vocab_size)
        for (way, by), measured in measure(Plan(ways, options.rounds), num_ranks).items()
    ]


def _row(way: Way, by: str, num_ranks: int, measured: Measured, vocab_size: int) -> Row:
    train = train_config(way, Path())
    model = train.model_config(vocab_size)
    predicted = predict(way, num_ranks, train, model)
    notes: dict[str, list[str]] = {}
    left = {column: getattr(measured, column) - getattr(predicted, column) for column in COLUMNS}
    for difference in differences(way, by, num_ranks, train, model):
        if not left[difference.column]:
            continue
        size = left[difference.column] if difference.num_bytes is None else difference.num_bytes
        left[difference.column] -= size
        notes.setdefault(difference.column, []).append(f"{size:+,.0f} bytes: {difference.reason}")
    unexplained = {column: size for column, size in left.items() if round(size)}
    for column, size in unexplained.items():
        notes.setdefault(column, []).append(f"{size:+,.0f} bytes: not explained")
    return Row(way, by, num_ranks, predicted, measured, notes, unexplained)


def print_table(console: Console, table_rows: list[Row]) -> None:
    """Predicted and measured side by side; below, every difference by its name."""
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.add_column(f"{table_rows[0].num_ranks} ranks, MB: predicted measured")
    for column in ("by", *COLUMNS, "tokens/s", "loss"):
        table.add_column(column, justify="left" if column == "by" else "right")
    marks: dict[str, int] = {}
    for row in table_rows:
        cells = []
        for column in COLUMNS:
            numbers = [str(marks.setdefault(note, len(marks) + 1)) for note in row.notes.get(column, [])]
            pair = f"{getattr(row.predicted, column) / 1e6:.2f} {getattr(row.measured, column) / 1e6:.2f}"
            cells.append(f"{pair} [{','.join(numbers)}]" if numbers else pair)
        speed, loss = row.measured.tokens_per_second, row.measured.loss_difference
        table.add_row(str(row.way), row.by, *cells, f"{speed:,.0f}", f"{loss:.0e}")
    console.print(table, markup=False)
    for note, number in marks.items():
        console.print(f"[{number}] {note}", markup=False)


def main() -> None:
    """Entry point."""
    options = tyro.cli(Options, prog="python -m infra.memory_table", description=Options.__doc__)
    known = {way.parallel for way in WAYS}
    if unknown := set(options.only) - known:
        sys.exit(f"--only {' '.join(sorted(unknown))}: choose from {', '.join(sorted(filter(None, known)))}")
    console = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
    everything: list[Row] = []
    for num_ranks in options.ranks:
        with console.status(f"training on {num_ranks} ranks"):
            found = rows(options, num_ranks)
        print_table(console, found)
        console.print()
        everything += found
    if options.json is not None:
        plain = [{**dataclasses.asdict(row), "way": str(row.way)} for row in everything]
        options.json.write_text(json.dumps(plain, indent=2) + "\n")
    if options.picture is not None:
        from infra.memory_table.picture import draw

        draw(everything, options.picture)


if __name__ == "__main__":
    main()
