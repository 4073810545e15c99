"""Recognises what went wrong between the ranks: whose part came, whose is missing, how the whole was cut.

Each function looks at the tensors of all ranks, and says a cause only if it gives every one of them, those
that are right as well.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from grader.judging.closeness import is_close
from grader.judging.order import find_origin, runs_of, tell_order
from grader.judging.patterns import Pair
from grader.judging.wording import listed, of_ranks, short, slices, span

MOST_TERMS = 8


def between_ranks(pairs: Sequence[Pair], terms: Mapping[str, Sequence[Tensor]]) -> str:
    """The first pattern that gives all ranks' tensors, in words.

    Args:
        terms: what the expected tensors are sums of: name → by rank. "" names the ranks' own parts, of which
            each rank has one and the sum is over them.
    """
    found = whose(pairs) or of_terms(pairs, terms) or extreme(pairs, terms) or not_reduced(pairs)
    return found or reduced_too_often(pairs) or cut_otherwise(pairs)


def whose(pairs: Sequence[Pair]) -> str:
    """The right tensors on the wrong ranks."""
    n = len(pairs)
    if n < 2 or not _alike_in_shape(pairs):
        return ""
    found = [
        r if pair.fits(pair.expected) else next((s for s in range(n) if pair.fits(pairs[s].expected)), None)
        for r, pair in enumerate(pairs)
    ]
    if None in found or found == list(range(n)):
        return ""
    if len(set(found)) == 1:
        return f"every rank has what rank {found[0]} should have"
    swapped = ", ".join(f"rank {r} has rank {s}'s" for r, s in enumerate(found) if r != s)
    return f"the right values on the wrong ranks: {swapped}"


def not_reduced(pairs: Sequence[Pair]) -> str:
    """Every rank should have the same, and has a part: what reduction of the parts is what is expected?"""
    first = pairs[0]
    if len(pairs) < 2 or not _alike_in_shape(pairs) or not _all_equal([p.expected for p in pairs], first):
        return ""
    parts = torch.stack([pair.actual for pair in pairs])
    if _all_equal(list(parts), first) or any(pair.fits(pair.expected) for pair in pairs):
        return ""
    reductions: dict[str, Callable[[], Tensor]] = {
        "the ranks have parts that add up to it: nothing was summed over the ranks": lambda: parts.sum(0),
        "its mean over the ranks is right: each rank still has its own": lambda: parts.mean(0),
        "the largest of the ranks' values is right: each rank still has its own": lambda: parts.amax(0),
        "the root of the sum of the ranks' squares is right: each rank has its own part's": lambda: (
            parts.square().sum(0).sqrt()
        ),
    }
    return next(
        (told for told, value in reductions.items() if is_close(value(), first.expected, first.rtol)), ""
    )


def reduced_too_often(pairs: Sequence[Pair]) -> str:
    """Every rank should have its own, and has the sum or the mean of all."""
    first = pairs[0]
    expected = [pair.expected for pair in pairs]
    if len(pairs) < 2 or not _alike_in_shape(pairs) or _all_equal(expected, first):
        return ""
    total = torch.stack(expected).sum(0)
    guesses = {"sum": total, "mean": total / len(pairs)}
    for name, guess in guesses.items():
        if all(pair.fits(guess) for pair in pairs):
            return f"every rank has the {name} over the ranks of what each of them should have"
    return ""


def cut_otherwise(pairs: Sequence[Pair]) -> str:
    """Every rank has slices of what all of them together should have, but not its own."""
    first, n = pairs[0], len(pairs)
    if n < 2 or not _alike_in_shape(pairs) or _all_equal([pair.expected for pair in pairs], first):
        return ""
    for dim in range(first.actual.dim()):
        size = first.actual.size(dim)
        whole = torch.cat([pair.expected for pair in pairs], dim)
        orders = [find_origin(pair.actual, whole, dim, r * size, pair.rtol) for r, pair in enumerate(pairs)]
        if None not in orders:
            return _tell_cut(orders, size, dim, first.actual.dim())
    return ""


def _tell_cut(orders: list[Any], size: int, dim: int, num_dims: int) -> str:
    """Where each rank's slices stand in the whole: every n-th of them, in one piece, or here and there."""
    n, name = len(orders), slices(dim, num_dims)
    nth = {2: "second", 3: "third"}.get(n, f"{n}th")
    if orders == [[r + n * i for i in range(size)] for r in range(n)]:
        return f"each rank has every {nth} of the {name} of the whole, where one piece of it belongs"
    if [place for order in orders for place in order] == [i % n * size + i // n for i in range(n * size)]:
        return f"each rank has one piece of the whole, where every {nth} of its {name} belongs"
    if [place for order in orders for place in order] == list(range(n * size))[::-1]:
        return f"the {name} of the whole are in reverse order"
    inside, own = [[place - r * size for place in order] for r, order in enumerate(orders)], list(range(size))
    if all(order == inside[0] != own for order in inside) and sorted(inside[0]) == own:
        return f"each rank has its own {name}, but {tell_order(inside[0], dim, num_dims)}"
    told = []
    for r, order in enumerate(orders):
        for first, last, place in runs_of(order):
            if place != r * size + first:
                there = span(name, place % size, place % size + last - first)
                verb = "holds" if first == last else "hold"
                told.append(f"{span(name, first, last)} of rank {r} {verb} {there} of rank {place // size}")
    return "; ".join(told[:3]) + (" and so on" if len(told) > 3 else "")


def of_terms(pairs: Sequence[Pair], terms: Mapping[str, Sequence[Tensor]]) -> str:
    """What is a sum was put together from the right terms, some of them missing or counted twice."""
    named = _named(terms, len(pairs))
    if not 2 <= len(named) <= MOST_TERMS:
        return ""
    told: dict[int, tuple[str, str]] = {}  # calling a rank's own part so, and by the rank's number
    for r, pair in enumerate(pairs):
        times = _times(pair, torch.stack([by_rank[r].double().flatten() for by_rank in named.values()], 1))
        if times is None:
            return ""
        if any(value != 1 for value in times):
            own = [OWN if name == part_of(r) else name for name in named]
            told[r] = _tell_times(times, own), _tell_times(times, list(named))
    for way in range(2):
        said = {each[way] for each in told.values()}
        if len(said) == 1:
            return said.pop()
    if any(not each[0] for each in told.values()):
        return ""  # a factor on one of them
    return "; ".join(f"on rank {r} {each[1]}" for r, each in told.items())


OWN = "this rank's own part"


def part_of(rank: int) -> str:
    """What a rank adds to a sum over the ranks, as terms call it."""
    return f"rank {rank}'s part"


def _named(terms: Mapping[str, Sequence[Tensor]], num_ranks: int) -> dict[str, Sequence[Tensor]]:
    """Terms by name, on each rank; those without a name are the ranks' own parts."""
    parts = {part_of(r): [part] * num_ranks for r, part in enumerate(terms.get("", ()))}
    return parts | {name: by_rank for name, by_rank in terms.items() if name}


def extreme(pairs: Sequence[Pair], terms: Mapping[str, Sequence[Tensor]]) -> str:
    """The largest, the smallest or the product of the ranks' parts, where their sum or mean belongs."""
    named = _named(terms, len(pairs))
    if len(named) < 2 or not all(name.startswith("rank ") for name in named):
        return ""
    parts = [torch.stack([by_rank[r].double() for by_rank in named.values()]) for r in range(len(pairs))]
    reductions: dict[str, Callable[[Tensor], Tensor]] = {
        "largest": lambda x: x.amax(0),
        "smallest": lambda x: x.amin(0),
        "product": lambda x: x.prod(0),
    }
    for name, reduce in reductions.items():
        if all(pair.fits(reduce(part)) for pair, part in zip(pairs, parts, strict=True)):
            return f"it is the {name} of the ranks' parts: which operation do they reduce with?"
    return ""


def _times(pair: Pair, terms: Tensor) -> list[Fraction] | None:
    """How often each term is in the tensor, where once is as it should be; None where it is no such sum."""
    if len(terms) < 2 * terms.size(1) + 2 or torch.linalg.matrix_rank(terms) < terms.size(1):
        return None
    both = torch.stack([pair.actual.flatten(), pair.expected.flatten()], 1)
    found = torch.linalg.lstsq(terms, both).solution
    right = found[:, 1]
    if not is_close(terms @ right, pair.expected.flatten(), pair.rtol) or (right.abs() < 1e-6).any():
        return None
    times = [Fraction(value).limit_denominator(16) for value in (found[:, 0] / right).tolist()]
    counted = torch.tensor([float(value) for value in times], dtype=torch.float64)
    return times if is_close(pair.actual.flatten(), terms @ (counted * right), pair.rtol) else None


def _tell_times(times: list[Fraction], names: list[str]) -> str:
    groups: dict[Fraction, list[str]] = {}
    for value, name in zip(times, names, strict=True):
        groups.setdefault(value, []).append(name)
    if len(groups) == 1:
        return ""  # a factor, which is told elsewhere
    missing = groups.pop(Fraction(0), [])
    if missing and len(groups) == 1:
        ((value, there),) = groups.items()
        often = "" if value == 1 else f", {short(float(value))} times"
        few = f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        return (
            f"only {there[0]} is in it{often}"
            if len(there) == 1
            else few + (f", and the rest is there{often}" if often else "")
        )
    told = [
        f"{listed(there)} count{'s' if len(there) == 1 else ''} {short(float(value))} times"
        for value, there in groups.items()
        if value != 1
    ]
    return ", ".join([*told, *([f"{listed(missing)} missing"] if missing else [])])


def _alike_in_shape(pairs: Sequence[Pair]) -> bool:
    shape = pairs[0].actual.shape
    return all(pair.actual.shape == shape == pair.expected.shape for pair in pairs)


def _all_equal(tensors: Sequence[Tensor], pair: Pair) -> bool:
    return all(is_close(tensor, tensors[0], pair.rtol) for tensor in tensors[1:])


def tell_agreement(pairs: Sequence[Pair], wrong: Sequence[int]) -> str:
    """What can be seen of the ranks together, where no cause is known."""
    n, first = len(pairs), pairs[0]
    if n < 2 or len(wrong) < n or not _alike_in_shape(pairs):
        return ""
    same = _all_equal([pair.actual for pair in pairs], first)
    should = _all_equal([pair.expected for pair in pairs], first)
    if same and not should:
        return "; all ranks have the same, where each should have its own"
    if should and not same:
        return "; the ranks differ from each other, where all should have the same"
    return ""


def tell_ranks(wrong: Sequence[int], num_ranks: int) -> str:
    """On which ranks something is wrong."""
    if num_ranks == 1:
        return ""
    right = [r for r in range(num_ranks) if r not in wrong]
    if not right:
        return " on every rank"
    if len(right) == 1 and num_ranks > 2:
        return f" on every rank but rank {right[0]}"
    return f" on {of_ranks(wrong)}"
