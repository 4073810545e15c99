"""Plays a ring with other rules, to find the one that a wrong ring may have followed.

In step 1, 2, ... rank r sends one of its n pieces to a neighbour, and puts what arrives into a place. A rule
says which piece and which place, as a number to start from and how far it moves with each step.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import product

import torch
from torch import Tensor

from grader.checks import is_close

from .cases import Case


@dataclass(frozen=True)
class Rule:
    """Indices are counted from the rank, in the direction in which messages go."""

    sent: tuple[int, int]
    """Which piece is sent in step 0, and how far that moves with each step."""
    put: tuple[int, int]
    """The same of the place for what arrives."""
    adds: bool
    num_steps: int
    returned: int = 0
    """Of a reduce-scatter: which piece comes back."""


def right_rule(n: int, adds: bool) -> Rule:
    """Of a reduce-scatter, which adds what arrives, or of an all-gather."""
    return Rule((0, -1), (-1, -1), True, n - 1) if adds else Rule((1, -1), (0, -1), False, n - 1)


def play(pieces: list[list[Tensor | None]], rule: Rule, way: int) -> list[list[Tensor | None]]:
    """What stands in each rank's n places in the end; None is what nobody has written."""
    n = len(pieces)
    places = [list(row) for row in pieces]

    def index(rank: int, moving: tuple[int, int], step: int) -> int:
        return (rank + way * (moving[0] + moving[1] * step)) % n

    for step in range(1, rule.num_steps + 1):
        sent = [places[r][index(r, rule.sent, step)] for r in range(n)]
        for r, row in enumerate(places):
            place, came = index(r, rule.put, step), sent[(r - way) % n]
            there = row[place]
            if rule.adds:
                row[place] = None if came is None or there is None else there + came
            else:
                row[place] = came
    return places


def neighbours_of(right: Rule, n: int) -> list[list[Rule]]:
    """Rules that differ in one thing from the right one, and others that do in two; likely ones first."""
    moves = [(start, by) for by in (-1, 0, 1) for start in range(-1, n - 1)]
    returned = range(n if right.adds else 1)
    rules = [Rule(*parts) for parts in product(moves, moves, (True, False), (n - 2, n - 1, n), returned)]

    def differs(rule: Rule) -> int:
        return sum(mine != other for mine, other in zip(astuple(rule), astuple(right), strict=True))

    def far_off(rule: Rule) -> int:
        both = ((rule.sent, right.sent), (rule.put, right.put))
        return sum(_off(mine, other, n) for mine, other in both if mine[1] == other[1])

    likely = sorted(rules, key=far_off)
    return [[rule for rule in likely if differs(rule) == things] for things in (1, 2)]


def _off(mine: tuple[int, int], other: tuple[int, int], n: int) -> int:
    return min((mine[0] - other[0]) % n, (other[0] - mine[0]) % n)


def told(rule: Rule, right: Rule, what: str, n: int) -> list[tuple[str, str]]:
    """What a rule does that the right one does not: subjects and verbs."""
    said = []
    for name, mine, other in (
        (f"the index of the {what} that is sent", rule.sent, right.sent),
        (f"the index of the place for the {what} that arrives", rule.put, right.put),
    ):
        if mine[1] == 0:
            said.append((name, "stands still and does not move on with the step"))
        elif mine[1] != other[1]:
            said.append((name, "moves the wrong way from step to step"))
        elif mine != other:
            said.append((name, f"is off by {_off(mine, other, n)}"))
    if rule.adds != right.adds:
        verb = (
            "is added to what stands there, and should only be copied"
            if rule.adds
            else "takes the place of the rank's own part, and should be added to it"
        )
        said.append(("what arrives", verb))
    if rule.returned != right.returned:
        off = min(rule.returned, n - rule.returned)
        said.append((f"the index of the {what} that is returned", f"is off by {off}"))
    if rule.num_steps != right.num_steps:
        said.append(("it", f"takes {rule.num_steps} steps, where {right.num_steps} are needed"))
    return said


def one_of(rules: Sequence[list[tuple[str, str]]]) -> str:
    """Rules that lead to the same, in words: one thing each is told by its subject, the likeliest first."""
    if len(rules[0]) > 1:
        return ", and ".join(f"{subject} {verb}" for subject, verb in rules[0])
    verbs: dict[str, list[str]] = {}
    for ((subject, verb),) in rules:
        known = verbs.setdefault(subject, [])
        known += [verb] if verb not in known else []
    return ", or ".join(f"{subject} {' or '.join(of_one)}" for subject, of_one in verbs.items())


def other_rules(case: Case, actual: Sequence[Tensor], way: int, reduces: bool) -> dict[str, list[Tensor]]:
    """Rules that give what the ranks have, in words, and what they give; nothing where none does.

    Args:
        actual: by rank: the shard of a reduce-scatter, or what was gathered.
        way: 1 where messages go to the next rank, -1 where they go to the one before.
    """
    n, right = len(case.values), right_rule(len(case.values), reduces)
    if n < 3 or (reduces and case.num_elements < n):
        return {}  # two ranks are each other's neighbours on both sides
    start = chunks_of(case) if reduces else own_shards(case)
    for rules in neighbours_of(right, n):
        found = []
        for rule in rules:
            rows = play(start, rule, way)
            if reduces:
                at = [(r + way * rule.returned) % n for r in range(n)]
                rows = [[row[i][: len(a)]] for i, row, a in zip(at, rows, actual, strict=True)]
            values = [_joined(row, a) for row, a in zip(rows, actual, strict=True)]
            if None not in values:
                found.append((told(rule, right, "chunk" if reduces else "shard", n), values))
        if found:
            return {one_of([said for said, _ in found]): found[0][1]}
    return {}


def _joined(row: list[Tensor | None], actual: Tensor) -> Tensor | None:
    """The places joined, if they give what a rank has; what nobody has written may be anything.

    Nothing but a rank's own shard is no sign of anything.
    """
    written = [place for place, piece in enumerate(row) if piece is not None]
    if len(written) < min(2, len(row)) or actual.dim() == 0 or len(actual) % len(row):
        return None
    there = actual.chunk(len(row))
    if not all(is_close(there[place], row[place]) for place in written):
        return None
    return torch.cat([there[i] if piece is None else piece for i, piece in enumerate(row)])


def partial_sums(case: Case, way: int) -> list[Tensor]:
    """What a reduce-scatter leaves in the tensors that it was given, if it adds into them."""
    rows = play(chunks_of(case), right_rule(len(case.values), adds=True), way)
    return [torch.cat(row)[: case.num_elements].view_as(case.values[0]) for row in rows]


def chunks_of(case: Case) -> list[list[Tensor | None]]:
    """Each rank's tensor, flattened, padded and cut."""
    size = len(case.values) * case.chunk_size
    padded = [torch.cat([v.flatten(), v.new_zeros(size - case.num_elements)]) for v in case.values]
    return [list(tensor.split(case.chunk_size)) for tensor in padded]


def own_shards(case: Case) -> list[list[Tensor | None]]:
    """Each rank's own shard in its place, and nothing in the others."""
    n = len(case.values)
    return [[value if place == r else None for place in range(n)] for r, value in enumerate(case.values)]
