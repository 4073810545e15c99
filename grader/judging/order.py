"""Recognises rows, columns or slices of a tensor that are the right ones in the wrong places."""

from collections.abc import Iterator

import torch
from torch import Tensor

from grader.judging.wording import listed, slices, span

MOST_NUMBERS = 50_000_000
"""Of differences to be looked at; beyond, no order is searched."""

Order = list[int | None]
"""Place → the place of which it holds what belongs there; None is nothing known."""


def find_order(actual: Tensor, expected: Tensor, dim: int, rtol: float) -> Order | None:
    """Where each slice of `actual` along `dim` belongs; None if that is not known of all, or all are right.

    Of a tensor that is shifted, what was not there to be shifted in may be anything.
    """
    hit = _hits(actual, expected, dim, rtol)
    if hit is None:
        return None
    size = len(hit)
    for order in _regular(size):
        if hit[range(size), order].all():
            return list(order)
    found = _all_known(hit, 0) or _shift(hit)
    return None if found == list(range(size)) or _from_nowhere(actual, dim, found, 0) else found


def find_origin(actual: Tensor, whole: Tensor, dim: int, start: int, rtol: float) -> Order | None:
    """Where each slice of `actual` stands in the `whole`; those that belong from `start` on, if they are."""
    hit = _hits(actual, whole, dim, rtol)
    order = None if hit is None else _all_known(hit, start)
    return None if _from_nowhere(actual, dim, order, start) else order


def _from_nowhere(actual: Tensor, dim: int, order: Order | None, start: int) -> bool:
    """Whether a slice in a wrong place is all zeros: it is missing, and not that of another place."""
    return order is not None and any(
        place is not None and place != start + i and not actual.select(dim, i).any()
        for i, place in enumerate(order)
    )


def _hits(actual: Tensor, whole: Tensor, dim: int, rtol: float) -> Tensor | None:
    """Which slice of one equals which of the other: bit for bit, if every one has its like."""
    a, e = (tensor.movedim(dim, 0).reshape(tensor.size(dim), -1) for tensor in (actual, whole))
    if min(len(a), len(e)) < 2 or a.numel() * len(e) > MOST_NUMBERS or e.size(1) == 0:
        return None
    distance = torch.cdist(a, e, p=torch.inf)
    same = distance == 0
    near = max(rtol, 1e-9) * max(e.abs().max().item(), 1e-3)
    return same if same.any(1).all() else distance <= near


def _regular(size: int) -> Iterator[list[int]]:
    """Orders that have a name: reversed, rotated, and parts dealt out in turn."""
    yield list(range(size))[::-1]
    for parts in range(2, size // 2 + 1):
        if size % parts == 0:
            yield [i % parts * (size // parts) + i // parts for i in range(size)]


def _all_known(hit: Tensor, start: int) -> Order | None:
    if not hit.any(1).all():
        return None
    order: Order = []
    for i, row in enumerate(hit.tolist()):
        follows = (order[-1] or 0) + 1 if order else 0
        likely = (start + i, follows)
        order.append(next((place for place in likely if place < len(row) and row[place]), row.index(True)))
    return order


def _shift(hit: Tensor) -> Order | None:
    size = len(hit)
    for step in (s * sign for s in range(1, size // 2 + 1) for sign in (1, -1)):
        if size - abs(step) >= 3 and torch.diagonal(hit, step).all():
            return [i + step if 0 <= i + step < size else None for i in range(size)]
    return None


def tell_order(order: Order, dim: int, num_dims: int) -> str:
    """An order in words."""
    name, size = slices(dim, num_dims), len(order)
    if None in order:
        step = next(place - i for i, place in enumerate(order) if place is not None)
        told = f"i {'+' if step > 0 else '-'} {abs(step)}"
        return (
            f"it is shifted by {abs(step)}: {span(name, 0, 0).replace('0', 'i')} holds what belongs in {told}"
        )
    if len(set(order)) == 1:
        return f"all {name} hold what belongs in {order[0]}"
    if order == list(range(size))[::-1]:
        return f"the {name} are in reverse order"
    step = order[0] or 0
    if order == [(i + step) % size for i in range(size)]:
        return f"the {name} are rotated: first stands what belongs in {step}"
    if order in _regular(size):
        return f"the {name} are interleaved: next to each other stand {listed(order[:3])} and so on"
    moved = [run for run in runs_of(order) if run[0] != run[2]]
    turned = _turned(order)
    if turned:
        return f"{', '.join(span(name, *run) for run in turned)} are in reverse order"
    if len(moved) <= 4:
        told = ", ".join(
            f"{span(name, first, last)} hold{'s' if first == last else ''} what belongs in "
            f"{span(name, place, place + last - first)}"
            for first, last, place in moved
        )
        sources = [place for _, _, place in moved]
        often = len(sources) > len(set(sources))
        return told + (": is it one buffer, kept several times without a copy?" if often else "")
    return f"the right {name} in another order: first stand {listed(order[:3])}"


def _turned(order: Order) -> list[tuple[int, int]]:
    """The stretches that stand in reverse, where nothing else is wrong; the first and last place of each."""
    found, first = [], 0
    while first < len(order):
        last = order[first]
        assert last is not None
        if last < first or order[first : last + 1] != list(range(first, last + 1))[::-1]:
            return []
        if last > first:
            found.append((first, last))
        first = last + 1
    return found if len(found) <= 4 else []


def runs_of(order: Order) -> list[tuple[int, int, int]]:
    """Stretches that belong together: first place, last place, and where the first belongs."""
    runs: list[tuple[int, int, int]] = []
    for i, place in enumerate(order):
        assert place is not None
        if runs and place == runs[-1][2] + i - runs[-1][0]:
            runs[-1] = (runs[-1][0], i, runs[-1][2])
        else:
            runs.append((i, i, place))
    return runs
