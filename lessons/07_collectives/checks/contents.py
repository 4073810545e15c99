"""What stands in a wrong tensor: whose parts were added, whose shards stand where, what nobody waited for."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import CheckEnded, Trial, Verdict, is_close

from .traffic import shared_memory, unwaited

Whole = Tensor | Sequence[Tensor]


def require_close(
    trial: Trial,
    seen: SimpleNamespace,
    case: int | None,
    what: str,
    actual: Whole,
    expected: Whole,
    *,
    alternatives: Mapping[str, Whole],
    help: str,
    rtol: float | None = None,
    contents: Callable[[int], str] = lambda rank: "",
) -> None:
    """`trial.close`, and a cause where no alternative fits: a forgotten handle, or what the tensors hold.

    Args:
        case: its number, in `seen.cases`; None is all that was recorded.
        contents: says what a rank's tensor holds, "" where it can not tell.
    """
    try:
        trial.close(what, actual, expected, alternatives=alternatives, help=help, rtol=rtol)
    except CheckEnded as end:
        if end.verdict == Verdict.WRONG:
            forgotten = unwaited(seen.recordings, case) if seen.device == "cpu" else ""
            forgotten = forgotten or shared_memory(seen.recordings, case)
            end.cause = forgotten or end.cause or _told(actual, expected, rtol, contents)
        raise


def _told(actual: Whole, expected: Whole, rtol: float | None, contents: Callable[[int], str]) -> str:
    """What the wrong ranks hold; nothing at all where one of them holds something else."""
    wanted = [expected] * len(actual) if isinstance(expected, Tensor) else expected
    pairs = list(enumerate(zip(actual, wanted, strict=True)))
    if any(not isinstance(a, Tensor) or a.shape != e.shape for _, (a, e) in pairs):
        return ""
    held = [contents(r) for r, (a, e) in pairs if not is_close(a, e, rtol)]
    return "; ".join(held) if all(held) else ""


def parts_in(found: Tensor, values: Sequence[Tensor]) -> list[int] | None:
    """How often each rank's part is in a sum; None if it is no such sum, or too short to tell."""
    columns = torch.stack([value.flatten().double() for value in values], dim=1)  # (elements, ranks)
    if len(columns) < 2 * len(values) or not found.isfinite().all():
        return None
    target = found.flatten().double()
    times = torch.linalg.lstsq(columns, target[:, None]).solution.flatten()
    whole = times.round()
    if (times - whole).abs().max() > 1e-3 or (
        columns @ whole - target
    ).abs().max() > 1e-4 * columns.abs().max():
        return None
    return [int(count) for count in whole]


def chunk_told(found: Tensor, place: int, chunks: Sequence[Sequence[Tensor]]) -> str:
    """Such as "of chunk 2 the parts of ranks 0 and 1"; `chunks[c][r]` is rank r's part of chunk c."""
    n = len(chunks)
    for c in (place, *(c for c in range(n) if c != place)):
        parts = [part[: len(found)] for part in chunks[c]]
        counts = parts_in(found, parts) if len(parts[0]) == len(found) else None
        if counts is None:
            continue
        if not any(counts):
            return f"nothing of chunk {c}"
        ranks = [f"{r} ({count} times)" if count != 1 else f"{r}" for r, count in enumerate(counts) if count]
        return f"of chunk {c} the parts of rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
    return ""


def owners(places: Sequence[Tensor], shards: Sequence[Tensor]) -> list[int | None]:
    """For each place, the rank whose shard stands there."""
    return [next((r for r, s in enumerate(shards) if is_close(p, s, 0.0)), None) for p in places]
