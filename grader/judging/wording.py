"""Words for the places, the ranks and the numbers that an explanation names."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, ones_like


def slices(dim: int, num_dims: int) -> str:
    """What the parts of a tensor along a dimension are called."""
    if num_dims == 1:
        return "elements"
    if num_dims == 2:
        return ("rows", "columns")[dim]
    return f"indices of dimension {dim}"


def span(name: str, first: int, last: int) -> str:
    """Such as "rows 4 to 7" or "row 4"."""
    noun, _, rest = name.partition(" ")
    where = f"{first} to {last}" if first != last else f"{first}"
    if first == last:
        noun = {"indices": "index"}.get(noun, noun.removesuffix("s"))
    return f"{noun} {where} {rest}".rstrip()


def listed(items: Sequence[object]) -> str:
    """Such as "0, 2 and 3"."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def of_ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 1" or "ranks 0, 2, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def ordinal(number: int) -> str:
    """Such as "second" or "21st"."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number // 10 % 10 != 1 else "th"
    return {2: "second", 3: "third", 4: "fourth"}.get(number, f"{number}{ending}")


def short(value: float) -> str:
    """A number in five digits."""
    return f"{value:.5g}"


def apart(one: float, other: float) -> tuple[str, str]:
    """Two numbers in five digits, or in as many as tell one from the other."""
    for digits in range(5, 17):
        told = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if told[0] != told[1]:
            break
    return told if told[0] != told[1] else (f"{one}", f"{other}")


def tell_where(wrong: Tensor) -> str:
    """Which part of a tensor a mask covers, when it is rows, columns or a block; "" where it is scattered."""
    told, inside = [], ones_like(wrong)
    for dim in range(wrong.dim()):
        hit = wrong.movedim(dim, 0).flatten(1).any(1) if wrong.dim() > 1 else wrong
        inside &= hit.view([-1 if d == dim else 1 for d in range(wrong.dim())])
        places = hit.nonzero().flatten().tolist()
        if 0 < len(places) < len(hit):
            told.append(_places(places, slices(dim, wrong.dim()), len(hit)))
    covered = wrong.sum() / inside.sum() if told else 0.0
    return " and ".join(told) if covered > 0.5 and "" not in told else ""


def _places(places: list[int], name: str, size: int) -> str:
    steps = {after - before for before, after in pairwise(places)}
    if steps <= {1}:
        return f"{span(name, places[0], places[-1])} of {size}"
    if len(steps) == 1 and len(places) > 2:
        return f"every {ordinal(steps.pop())} of the {name}, from {places[0]} on"
    return f"{name} {listed(places)} of {size}" if len(places) <= 4 else ""
