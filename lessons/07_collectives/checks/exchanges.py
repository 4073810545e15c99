"""What `all_to_all` is asked to exchange, and what each rank made of it."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import CheckEnded, Trial, Verdict

from .cases import FILL, MIXED, PLAIN, SPACED, TRANSPOSED, draw, lay_out


@dataclass(frozen=True)
class Exchange:
    """One call: what each rank has for each."""

    rows: list[list[Tensor]]
    """`rows[s][r]` goes from rank s to rank r."""
    told: bool = False
    """Whether the shapes are handed over."""
    layout: str = PLAIN
    in_a_tuple: bool = False
    about: str = "parts of one shape"

    @property
    def one_sided(self) -> bool:
        """Whether one rank has something for another that has nothing for it."""
        n, rows = len(self.rows), self.rows
        return any(rows[s][r].numel() and not rows[r][s].numel() for s in range(n) for r in range(n))

    @property
    def values(self) -> list[Tensor]:
        """One tensor of each rank, as the other exercises' cases have it."""
        return [row[0] for row in self.rows]

    def __str__(self) -> str:
        dtype = str(self.rows[0][0].dtype).removeprefix("torch.")
        layout = f", not contiguous ({self.layout})" if self.layout else ""
        kind = ", in a tuple" if self.in_a_tuple else ""
        return f"{self.about}, {dtype}{layout}{kind}{', with `shapes`' if self.told else ''}"


def exchange(
    trial: Trial,
    shape: Callable[[int, int], Sequence[int]],
    dtype: torch.dtype = torch.float32,
    about: str = "parts of one shape",
    **options: Any,
) -> Exchange:
    """Rank s has for rank r a tensor of `shape(s, r)`, with numbers of its own."""
    n = trial.num_ranks
    rows = [[draw(trial, *shape(s, r), dtype=dtype).values[0] for r in range(n)] for s in range(n)]
    return Exchange(rows, about=about, **options)


def observe_even(trial: Trial) -> SimpleNamespace:
    size = trial.integer(200, 400)
    kinds = (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    return ask(
        trial,
        [
            exchange(trial, lambda s, r: (size,)),
            *(exchange(trial, lambda s, r: (size,), kind) for kind in kinds),
        ],
    )


def observe_uneven(trial: Trial) -> SimpleNamespace:
    """All sizes differ; sizes that depend on the pair alone; empty ones and (), somewhere or everywhere."""
    base, silent = trial.integer(50, 90), trial.integer(0, trial.num_ranks - 1)
    many = {"about": "parts of other sizes", "told": True}
    return ask(
        trial,
        [
            exchange(trial, lambda s, r: (base + 5 * (s + r),), about="sizes that differ by pair"),
            exchange(trial, lambda s, r: (0, 3), about="all parts empty"),
            exchange(trial, lambda s, r: (), about="parts of no dimension"),
            exchange(trial, lambda s, r: (base + 7 * s + 13 * r,), **many),
            exchange(trial, lambda s, r: (2 + s, 30 + r), torch.int32, **many),
            exchange(trial, lambda s, r: () if s == silent else (2 + r,), about=NO_DIMENSION, told=True),
            exchange(trial, lambda s, r: (40 * ((s + 2 * r) % 3),), about="some parts empty", told=True),
            exchange(
                trial,
                lambda s, r: (0 if s == silent else 60,),
                torch.int32,
                about="one rank has nothing",
                told=True,
            ),
        ],
    )


NO_DIMENSION = "one rank's parts have no dimension"


def observe_layouts(trial: Trial) -> SimpleNamespace:
    layouts = (TRANSPOSED, SPACED, MIXED)
    return ask(trial, [exchange(trial, lambda s, r: (6, 5 + trial.num_ranks), layout=x) for x in layouts])


def observe_tuple(trial: Trial) -> SimpleNamespace:
    return ask(trial, [exchange(trial, lambda s, r: (7,), in_a_tuple=True)])


def observe_slow(trial: Trial) -> SimpleNamespace:
    return ask(trial, [exchange(trial, lambda s, r: (20_000,)) for _ in range(2)], delays=True)


class Counted(list):
    """A list that tells which entry was asked for and is not there."""

    def __getitem__(self, key: Any) -> Any:
        try:
            return super().__getitem__(key)
        except IndexError:
            raise IndexError(f"{NOT_THERE}[{key}]: there are {len(self)}, one a rank") from None


NOT_THERE = "there is no tensors"


@contextlib.contextmanager
def told_of_kinds(given: Sequence[Tensor]) -> Iterator[None]:
    """A call that crashes inside is told what is special in what it was given."""
    try:
        yield
    except Exception as error:
        if isinstance(given, tuple) and "tuple" in str(error):
            error.add_note("`tensors` is a tuple here, as torch.chunk returns it: list(tensors) makes a list")
        elif all(tensor.dim() == 0 for tensor in given):
            error.add_note("in this call no tensor has a dimension: their shape is ()")
        raise


def call(
    rank: Any, cases: list[tuple[list[Tensor], str, bool, list[list[int]] | None]], counted: bool = False
) -> dict[str, Any]:
    """The probe: every case in turn, each in a stretch of the recording named by its number.

    A function without `shapes` ends before the first case that hands them over. With `counted`, an index
    that is out of range is told.
    """
    answers = []
    takes_shapes = "shapes" in inspect.signature(rank.submission.all_to_all).parameters
    with rank.record() as recording:
        for i, (values, layout, in_a_tuple, shapes) in enumerate(cases):
            if shapes is not None and not takes_shapes:
                break
            laid = [lay_out(value, layout, rank.rank) for value in values]
            kind = tuple if in_a_tuple else Counted if counted else list
            given = kind(tensor for tensor, _ in laid)
            recording.mark(f"{i}")
            with told_of_kinds(given):
                if shapes is None:
                    returned = rank.submission.all_to_all(given, rank.group)
                else:
                    returned = rank.submission.all_to_all(given, rank.group, shapes=shapes)
            recording.mark("after")
            kept = len(given) == len(laid) and all(a is b for a, (b, _) in zip(given, laid, strict=True))
            is_list = isinstance(returned, list | tuple)
            entries = list(returned) if is_list else []
            answers.append(
                {
                    "kind": type(returned).__name__,
                    "is_list": is_list,
                    "kinds": [type(entry).__name__ for entry in entries],
                    "entries": [e.clone() if isinstance(e, Tensor) else None for e in entries],
                    "given": [tensor.clone() for tensor, _ in laid],
                    "kept": kept,
                    "returns what was given": returned is given,
                    "between": all(b is None or bool((b == FILL).all()) for _, b in laid),
                }
            )
    return {"answers": answers, "recording": recording, "device": rank.device.type}


def ask(trial: Trial, cases: list[Exchange], delays: bool = False) -> SimpleNamespace:
    """Call it with all cases; `answers[i][r]` is what rank r made of case i.

    Cases with `shapes` come last: a function that is right without that argument is not asked for them.
    """

    def of_rank(r: int) -> list[tuple]:
        return [
            (
                case.rows[r],
                case.layout,
                case.in_a_tuple,
                [list(row[r].shape) for row in case.rows] if case.told else None,
            )
            for case in cases
        ]

    def run(*options: bool) -> list[dict[str, Any]]:
        per_rank = [(of_rank(r), *options) for r in range(trial.num_ranks)]
        return trial.run(call, per_rank=per_rank, delays=delays)

    try:
        results = run()
    except CheckEnded as end:
        if end.verdict == Verdict.CRASHED and "raised IndexError" in end.message:
            tell_index(trial.num_ranks, partial(run, True))
        tell_own_size(end, cases)
        tell_what_is_sent(end, cases)
        if others := [case for case in cases if case.about != NO_DIMENSION]:
            tell_falsy_shape(end, cases, lambda: ask(trial, others))
        if end.verdict == Verdict.HUNG:
            others = [case for case in cases if not case.one_sided]
            tell_own_emptiness(end, cases, lambda: ask(trial, others))
        raise
    answers = list(zip(*(result["answers"] for result in results), strict=True))
    return SimpleNamespace(
        cases=cases[: len(answers)],
        answers=answers,
        recordings=[result["recording"] for result in results],
        device=results[0]["device"],
    )


def tell_index(n: int, run_counted: Callable[[], Any]) -> None:
    """Which entry was asked for and is not there: that of a partner past the last rank?"""
    try:
        run_counted()
    except CheckEnded as end:
        if end.verdict != Verdict.CRASHED or f"{NOT_THERE}[" not in end.message:
            return
        past = f"{NOT_THERE}[{n}]" in end.message and not is_power_of_two(n)
        if past:
            end.cause = (
                "a partner is asked for that is not there, as by rank ^ k where n is no power of two, or "
                "by rank + k without % n"
            )
            end.help = ROUND_K
        raise


def numbers_of(end: CheckEnded, pattern: str) -> tuple[int, ...]:
    """The numbers that a pattern finds in what is said of ranks that parted; () where it does not fit."""
    found = re.search(pattern, end.message, re.DOTALL)
    return tuple(map(int, found.groups())) if found else ()


def tell_if_others_pass(end: CheckEnded, run_others: Callable[[], Any], cause: str, help: str) -> None:
    """The cause and the next step belong to one kind of case: told where all is well with the others."""
    with contextlib.suppress(CheckEnded):
        run_others()
        end.cause, end.help = cause, help


def tell_own_size(end: CheckEnded, cases: Sequence[Exchange]) -> None:
    """Does a rank make room, without `shapes`, for tensors like its own entry?"""
    found = numbers_of(end, r"rank (\d+) called send of (\d+) .*, and rank (\d+) called recv of (\d+) ")
    if not found or cases[0].told:
        return
    source, sent, rank, room = found
    coming, own = (cases[0].rows[r][rank].numel() for r in (source, rank))
    if (coming, own) == (sent, room) and coming != own:
        end.cause = (
            f"rank {rank} makes room for {own} elements, as many as tensors[{rank}] has, its own entry. "
            f"Without `shapes`, what comes from rank {source} has the shape of tensors[{source}]"
        )
        end.help = "Where there are no `shapes`, receive into a tensor of the shape of tensors[source]."


def tell_what_is_sent(end: CheckEnded, cases: Sequence[Exchange]) -> None:
    """Does a rank make room for as much as it sends, or for what comes from the rank that it sends to?"""
    found = numbers_of(end, r"rank (\d+) called send of (\d+) .*, and rank (\d+) called recv of (\d+) ")
    if not found or found[1] == found[3]:
        return
    source, sent, rank, room = found
    to = (2 * rank - source) % len(cases[0].rows)  # in the same round
    for case in cases:
        goes = [part.numel() for part in case.rows[rank]]
        comes = [row[rank].numel() for row in case.rows]
        known = {comes[to]: f"shapes[{to}] says, of what comes from rank {to}"} if case.told else {}
        known |= {goes[r]: f"it sends to rank {r}" for r in (to, source)}
        if comes[source] == sent and room in known:
            shape = f"shapes[{source}], which is handed over" if case.told else f"that of tensors[{source}]"
            end.cause = (
                f"rank {rank} makes room for {room} elements, as many as {known[room]}. The shape of what "
                f"comes from rank {source} is {shape}"
            )
            end.help = (
                "Receive into a tensor of the shape shapes[source], or of tensors[source] without `shapes`."
            )
            return


def tell_falsy_shape(end: CheckEnded, cases: Sequence[Exchange], run_others: Callable[[], Any]) -> None:
    """Is a shape of () taken for none that was handed over?"""
    found = numbers_of(end, r"rank (\d+) called send of 1 .*, and rank (\d+) called recv of (\d+) ")
    if not found:
        return
    source, rank, room = found
    if any(c.about == NO_DIMENSION and room == c.rows[rank][source].numel() for c in cases):
        tell_if_others_pass(
            end,
            run_others,
            f"shapes[{source}] is (), the shape of a tensor without dimensions, and is taken for one that "
            f"was not handed over: rank {rank} makes room for a tensor like its own tensors[{source}]",
            "() is False where a truth value is asked for, as by `or` and `if`: ask `shapes is None`.",
        )


def tell_own_emptiness(end: CheckEnded, cases: Sequence[Exchange], run_others: Callable[[], Any]) -> None:
    """Does a rank receive nothing where it has nothing to send, or leave a round out where nothing comes?

    What it would send in that round goes to rank `to`, which is the same one of two.
    """
    found = numbers_of(end, r"rank (\d+) called send of (\d+) .*, and rank (\d+) never received it")
    if not found:
        return
    source, sent, rank = found
    to = (2 * rank - source) % len(cases[0].rows)
    for case in cases:
        comes, goes, back = case.rows[source][rank], case.rows[rank][to], case.rows[rank][source]
        if sent not in (comes.numel(), comes.nbytes) or not case.one_sided:
            continue
        if sent and not (back.numel() and goes.numel()):
            tell_if_others_pass(
                end,
                run_others,
                f"rank {rank} starts no receive for what shapes[{source}] says is not empty: its own "
                f"tensors[{to if back.numel() else source}] is. Where both are empty, or neither, all goes "
                "well",
                "shapes[s] says whether something comes from rank s, and tensors[s] whether something goes: "
                "one of them may stay at home, and the other one of that round goes all the same.",
            )
            return
        if not sent and goes.numel():
            tell_if_others_pass(
                end,
                run_others,
                f"rank {rank} starts no receive for the empty tensor that rank {source} sends it: its own "
                f"tensors[{to}] is not empty. Where both are empty, or neither, all goes well",
                LEAVE_NO_ROUND_OUT,
            )
            return


LEAVE_NO_ROUND_OUT = (
    "An empty tensor may stay at home, if both sides know it, and the other one of that round goes all the "
    "same: leave out a message, not a round."
)


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


ROUND_K = "In round k send to rank (r + k) % n, and receive from rank (r - k) % n: right for every n."


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
