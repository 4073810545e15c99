"""The rows of the table: prediction and measurement side by side, and what is between them by its name."""

from dataclasses import dataclass
from pathlib import Path

from infra.memory_table.differences import differences
from infra.memory_table.measure import Found, Measured, Sent
from infra.memory_table.predict import Predicted, predict
from infra.memory_table.ways import Way, train_config
from nanogpt.data import load_tokens
from nanogpt.tokenizer import load_encoding

HELD = ("weights", "gradients", "optimizer", "activations")
"""What is held. Other columns: "wire data" is what is sent as recorded, along an axis of the ranks, and
"witnessed" what is sent beyond what is recorded."""


@dataclass(frozen=True)
class Row:
    """One way by one maker on some ranks."""

    way: Way
    by: str
    num_ranks: int
    predicted: Predicted
    measured: Measured
    notes: dict[str, list[str]]
    """Column → why it is not as predicted; of "witnessed": not as recorded."""
    unexplained: dict[str, float]
    """Column → bytes that nothing here explains."""


def rows(found: Found, num_ranks: int) -> list[Row]:
    """Put the predictions beside what was measured on `num_ranks` ranks."""
    vocab_size = -(-load_encoding(load_tokens("stdlib", None).encoding).n_vocab // 64) * 64
    return [_row(way, by, num_ranks, measured, vocab_size) for (way, by), measured in found.ways.items()]


def _row(way: Way, by: str, num_ranks: int, measured: Measured, vocab_size: int) -> Row:
    train = train_config(way, Path())
    model = train.model_config(vocab_size)
    predicted = predict(way, num_ranks, train, model)
    left = {column: getattr(measured, column) - getattr(predicted, column) for column in HELD}
    for axis in {**predicted.by_axis, **measured.wire.by_axis}:
        recorded, formula = (sent.get(axis, 0.0) for sent in (measured.wire.by_axis, predicted.by_axis))
        left[f"wire {axis}"] = recorded - formula
    named = [(d.column, d.reason, d.num_bytes) for d in differences(way, by, num_ranks, train, model)]
    if measured.wire.witnessed is not None:
        left["witnessed"] = measured.wire.witnessed - measured.wire.recorded
        named += [("witnessed", reason, size) for reason, size in measured.wire.extra.items()]
    notes: dict[str, list[str]] = {}
    for column, reason, size in named:
        left[column] = left.get(column, 0.0) - size
        axis = column.removeprefix("wire ")
        along = f" along {axis}" if axis != column and len(predicted.by_axis) > 1 else ""
        notes.setdefault(column, []).append(f"{size:+,.0f} bytes{along}: {reason}")
    unexplained = {column: size for column, size in left.items() if round(size)}
    for column, size in unexplained.items():
        of = " (witnessed)" if column == "witnessed" else ""
        notes.setdefault(column, []).append(f"{size:+,.0f} bytes: not explained{of}")
    return Row(way, by, num_ranks, predicted, measured, notes, unexplained)


def frames(sent: list[Sent]) -> tuple[float, float] | None:
    """The least and the largest share of what travelled that was frames; None where nobody looked."""
    shares = [each.framing / each.witnessed for each in sent if each.witnessed and each.framing is not None]
    return (min(shares), max(shares)) if shares else None
