"""Checks of `all_to_all`: every rank gets what each had for it, in rounds of one sender and one receiver."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import CheckEnded, Event, Fault, Recording, Trial, Verdict, check, exercise

from .cases import FILL, MIXED, PLAIN, SPACED, TRANSPOSED, draw, lay_out
from .traffic import SMALL, events, require_messages_alone, require_waits, sends

exercise(
    "all_to_all",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    hints=(
        "Nobody may be sent two tensors at a time. If everybody begins with rank 0, rank 0 is.",
        "In round k = 1 ... n - 1 rank r sends to rank (r + k) % n. From which rank does it receive then?",
        "Before a round, make an empty tensor of the shape of what comes from (r - k) % n. Start the send "
        "and the receive as one batch, and wait for both before the next round.",
    ),
)


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
    """All sizes differ; sizes that depend on the pair alone; empty ones, everywhere and on one rank."""
    base, silent = trial.integer(50, 90), trial.integer(0, trial.num_ranks - 1)
    many = {"about": "parts of other sizes", "told": True}
    return ask(
        trial,
        [
            exchange(trial, lambda s, r: (base + 5 * (s + r),), about="sizes that differ by pair"),
            exchange(trial, lambda s, r: (0, 3), about="all parts empty"),
            exchange(trial, lambda s, r: (), about="parts of no dimension"),
            exchange(trial, lambda s, r: (base + 7 * s + 13 * r,), **many),
            exchange(trial, lambda s, r: (2 + s, 30 + r), **many),
            exchange(trial, lambda s, r: (40 * ((s + 2 * r) % 3),), about="some parts empty", told=True),
            exchange(
                trial, lambda s, r: (0 if s == silent else 60,), about="one rank has nothing", told=True
            ),
        ],
    )


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


@contextmanager
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


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


ROUND_K = "In round k send to rank (r + k) % n, and receive from rank (r - k) % n: right for every n."


def never_met(seen: SimpleNamespace, i: int) -> str:
    """Why some pairs exchange nothing, if these are what partners rank ^ k for k < n leave out; else ""."""
    n, case = len(seen.recordings), seen.cases[i]
    if is_power_of_two(n):
        return ""
    for r, recording in enumerate(seen.recordings):
        peers = {event.peer for event in sends(recording, i)}
        if any((s in peers) != (r ^ s < n) for s in range(n) if s != r and case.rows[r][s].numel()):
            return ""
    r, s = next((r, s) for r in range(n) for s in range(r + 1, n) if r ^ s >= n)
    return (
        f"ranks {r} and {s} exchange nothing with one another, as with the partner rank ^ k in round k < n: "
        f"{r} ^ {s} = {r ^ s}. Such partners meet everybody only where n is a power of two"
    )


def others_are_right(case: Exchange, answers: list[dict[str, Any]]) -> bool:
    """Whether what came is right for all pairs but those that partners rank ^ k for k < n leave out."""
    n = len(answers)
    return all(
        len(answer["entries"]) == n
        and answer["entries"][s] is not None
        and torch.equal(answer["entries"][s], case.rows[s][r])
        for r, answer in enumerate(answers)
        for s in range(n)
        if r ^ s < n
    )


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def slips(case: Exchange) -> dict[str, list[Tensor]]:
    """What known slips would have returned."""
    n, rows = len(case.rows), case.rows

    def each(entry: Callable[[int, int], Tensor]) -> list[Tensor]:
        return [joined([entry(r, s) for s in range(n)]) for r in range(n)]

    return {
        "this rank's own tensors: nothing was exchanged": each(lambda r, s: rows[r][s]),
        "the right tensors in the order in which they came, own first: rank 0's belongs first": each(
            lambda r, s: rows[(r - s) % n][r]
        ),
        "the right tensors in the order of the ranks after this one, own first: rank 0's belongs first": each(
            lambda r, s: rows[(r + s) % n][r]
        ),
        "what came stands in the place of the rank that was sent to in that round, not of who sent it": each(
            lambda r, s: rows[(2 * r - s) % n][r]
        ),
        "what rank s has for itself: the sender picks its own entry, not the receiver's": each(
            lambda r, s: rows[r][r] if r == s else rows[s][s]
        ),
        "what rank s has for its partner of another round: the tensor that is sent and the rank to which "
        "it is sent do not go together": each(
            lambda r, s: rows[r][r] if r == s else rows[s][(2 * s - r) % n]
        ),
        "rank s's first tensor, on every rank": each(lambda r, s: rows[s][0]),
        "this rank's own entry is zeros: it has not been put there": each(
            lambda r, s: torch.zeros_like(rows[r][r]) if r == s else rows[s][r]
        ),
        "all entries but this rank's own are what came last: one buffer stands in all of them": each(
            lambda r, s: rows[r][r] if r == s else rows[(r + 1) % n][r]
        ),
    }


def require_lists(trial: Trial, case: Exchange, answers: list[dict[str, Any]]) -> None:
    """Every rank has a list of n tensors, of the dtype and of the shapes that were sent."""
    n = trial.num_ranks
    for r, answer in enumerate(answers):
        trial.require(
            answer["is_list"],
            f"given {case} it returned {answer['kind']}, not a list of tensors",
            help="Is the `return` missing?"
            if answer["kind"] == "NoneType"
            else "Return a list, one entry a rank.",
            rank=r,
        )
        trial.require(
            len(answer["entries"]) == n,
            f"given {case} it returned {len(answer['entries'])} entries for {n} ranks",
            help="One entry for each rank of the group, this one included.",
            rank=r,
        )
        for s, (entry, kind) in enumerate(zip(answer["entries"], answer["kinds"], strict=True)):
            true = case.rows[s][r]
            trial.require(
                entry is not None,
                f"given {case}, its entry of rank {s} is {kind}, not a tensor",
                help="Its own entry is its own tensor." if s == r else "What comes from rank s is entry s.",
                rank=r,
            )
            trial.require(
                entry.dtype == true.dtype,
                f"given {case}, its entry of rank {s} is {str(entry.dtype).removeprefix('torch.')}",
                help="Make new tensors with new_empty or empty_like: they keep dtype and device.",
                rank=r,
            )
            trial.require(
                entry.shape == true.shape,
                f"given {case}, its entry of rank {s} has the shape {tuple(entry.shape)}, and what rank {s} "
                f"had for it {tuple(true.shape)}",
                help="shapes[s] is the shape of what comes from rank s; without shapes, that of tensors[s].",
                rank=r,
            )


def require_exchanged(trial: Trial, seen: SimpleNamespace, help: str, of: torch.dtype | None = None) -> None:
    """Entry s of rank r is what rank s had for it."""
    n = trial.num_ranks
    for i, (case, answers) in enumerate(zip(seen.cases, seen.answers, strict=True)):
        if of not in (None, case.rows[0][0].dtype):
            continue
        try:
            require_lists(trial, case, answers)
            trial.close(
                f"what was returned, given {case}",
                [joined(answer["entries"]) for answer in answers],
                [joined([case.rows[s][r] for s in range(n)]) for r in range(n)],
                alternatives=partial(slips, case),
                rtol=0.0,
                help=help,
            )
        except CheckEnded as end:
            cause = never_met(seen, i)
            if cause and others_are_right(case, answers):
                end.cause, end.help = cause, ROUND_K
            raise


@check("all_to_all")
def every_tensor_reaches_its_owner(trial: Trial) -> None:
    """Entry s of what rank r returns is the tensor that rank s had for rank r."""
    require_exchanged(
        trial,
        trial.once(observe_even),
        "tensors[to] goes to rank `to`; what comes from rank `source` is entry `source`.",
        of=torch.float32,
    )


@check("all_to_all", subgroup=False)
def sizes_may_differ(trial: Trial) -> None:
    """Tensors of other shapes for each pair of ranks, empty ones among them, with `shapes` and without."""
    require_exchanged(
        trial, trial.once(observe_uneven), "What comes has its own shape: shapes[s], else that of tensors[s]."
    )


@check("all_to_all")
def any_dtype_is_exchanged(trial: Trial) -> None:
    """Whole numbers, truth values, float64 and bfloat16 arrive bit for bit."""
    require_exchanged(trial, trial.once(observe_even), "Send the tensors' own dtype.")


@check("all_to_all", world_sizes=(2, 3), subgroup=False)
def tensors_need_not_be_contiguous(trial: Trial) -> None:
    """Tensors that do not lie in one piece of memory are exchanged as well."""
    seen = trial.once(observe_layouts)
    require_exchanged(trial, seen, "Only contiguous tensors travel: contiguous() copies where it must.")
    require_untouched(trial, seen)


@check("all_to_all", world_sizes=(2, 4), subgroup=False)
def nothing_is_used_before_it_arrived(trial: Trial) -> None:
    """When messages are slow, every rank still returns the right tensors."""
    require_exchanged(trial, trial.once(observe_slow), "wait() for the receive before you return what came.")


def require_untouched(trial: Trial, seen: SimpleNamespace) -> None:
    """The tensors that were handed over are as they were, bit for bit, and so is their list."""
    for case, answers in zip(seen.cases, seen.answers, strict=True):
        for r, answer in enumerate(answers):
            trial.require(
                answer["kept"],
                f"given {case}, the list `tensors` itself has other entries after the call",
                cause="it returns the list that it was given, with what came put into it"
                if answer["returns what was given"]
                else "",
                help="received = tensors is the caller's own list: begin with list(tensors), or a new one.",
                rank=r,
            )
        trial.close(
            f"the inputs ({case}) after the call",
            [joined(answer["given"]) for answer in answers],
            [joined(row) for row in case.rows],
            alternatives={
                "they hold what came: a receive writes into the input": Fault(
                    [joined(answer["given"]) for answer in answers], on_some_ranks=True
                )
            }
            if came_in(case, answers)
            else {},
            rtol=0.0,
            help="Receive into new memory.",
        )
        for r, answer in enumerate(answers):
            trial.require(
                answer["between"], f"given {case} it wrote between the elements of its inputs", rank=r
            )


def came_in(case: Exchange, answers: list[dict[str, Any]]) -> bool:
    """Whether each input is as it was, or is what came from the rank that it was for; and one has come."""
    n, come = len(case.rows), False
    for r, answer in enumerate(answers):
        for s in range(n):
            now, was, other = answer["given"][s], case.rows[r][s], case.rows[s][r]
            if torch.equal(now, was):
                continue
            if not torch.equal(now, other):
                return False
            come = True
    return come


@check("all_to_all")
def inputs_are_unchanged(trial: Trial) -> None:
    """The tensors that were handed over are the same afterwards, and so is the list that they stand in."""
    require_untouched(trial, trial.once(observe_even))


@check("all_to_all", world_sizes=(2,), subgroup=False)
def tensors_may_stand_in_a_tuple(trial: Trial) -> None:
    """The tensors may be handed over in a tuple, as torch.chunk returns them."""
    require_exchanged(trial, trial.once(observe_tuple), "A tuple is read as a list is.")


@check("all_to_all", subgroup=False)
def only_messages_are_used(trial: Trial) -> None:
    """It is made of isend and irecv: no collective of torch.distributed is called."""
    for observe in (observe_even, observe_uneven):
        require_messages_alone(trial, trial.once(observe))


@check("all_to_all", subgroup=False)
def tensors_go_straight_to_their_owners(trial: Trial) -> None:
    """A rank sends each other rank the bytes that it has for it, once: (n-1)/n of S where parts are alike."""
    for seen in (trial.once(observe_even), trial.once(observe_uneven)):
        for i, case in enumerate(seen.cases):
            for r, recording in enumerate(seen.recordings):
                require_bytes(trial, case, i, r, recording, never_met(seen, i))


def require_bytes(trial: Trial, case: Exchange, i: int, r: int, recording: Recording, unmet: str) -> None:
    """What one rank sends to each in one case; `unmet` says why some pairs exchange nothing, or is ""."""
    messages = sends(recording, i)
    if any(event.peer is None for event in messages):
        return
    everything = sum(t.numel() * t.element_size() for t in case.rows[r])
    for to in range(trial.num_ranks):
        to_it = [event for event in messages if event.peer == to]
        sent, tensor = sum(event.num_bytes for event in to_it), case.rows[r][to]
        has = tensor.numel() * tensor.element_size() if to != r else 0
        large = [event for event in to_it if event.num_bytes > SMALL]
        cause = ""
        if sent > has and large and all(event.num_bytes >= everything > has for event in large):
            cause = "it sends all that it has, and the receiver picks its own"
        elif not sent and has:
            cause = unmet or "what it has for that rank travels by way of another one, or not at all"
        elif sent > has + SMALL:
            cause = "what is others' travels by way of this rank, is padded, or goes twice"
        trial.require(
            has <= sent <= has + SMALL,
            f"given {case} it sends {sent:,} bytes to rank {to}, and has {has:,} for it",
            cause=cause,
            help="tensors[to], and nothing else, goes to rank `to`, and straight there.",
            rank=r,
        )
        trial.require(
            len(large) <= 1,
            f"given {case} it sends rank {to} its tensor in {len(large)} messages",
            help="Each tensor goes in one message: n - 1 rounds are enough.",
            rank=r,
        )


def why_two_meet(peers: list[list[int]]) -> str:
    """Why two ranks send to the same one, by whom each rank sends to in turn; "" where that is unknown.

    On three ranks, those who go through all partners rank ^ k and leave out who is not there do what those
    do who go by the numbers of the ranks. Where there are four as well, only the first come this far.
    """
    n = len(peers)
    if not is_power_of_two(n) and all(
        row == [r ^ k for k in range(1, 2 * n) if r ^ k < n] for r, row in enumerate(peers)
    ):
        words = (
            f"each rank goes through rank ^ 1, rank ^ 2, ... and leaves out who is not there. {n} is no "
            "power of two, so it is in its next round before the others are"
        )
        by_number = all(row == sorted(row) for row in peers)
        return f"{words}. To go by the numbers of the others is the same on {n} ranks" if by_number else words
    if all(row == sorted(row) for row in peers):
        return "every rank goes through the others in the same order, rank 0 first"
    return ""


@check("all_to_all")
def a_round_has_one_sender_and_one_receiver(trial: Trial) -> None:
    """n - 1 rounds: in each a rank sends to one rank and receives from one, and no two send to the same."""
    seen, n = trial.once(observe_even), trial.num_ranks
    sent, come = ([_large(recording, kind) for recording in seen.recordings] for kind in ("send", "recv"))
    for r in range(n):
        for kind, row in (("sends", sent[r]), ("receives", come[r])):
            trial.require(
                len(row) == n - 1,
                f"it {kind} {len(row)} tensors in a call, and there are n - 1 = {n - 1} others",
                help="One round for each of the others.",
                rank=r,
                cause=never_met(seen, 0),
            )
    if any(event.peer is None for row in (*sent, *come) for event in row):
        return
    for k in range(n - 1):
        for to in range(n):
            senders = [r for r in range(n) if sent[r][k].peer == to]
            trial.require(
                len(senders) < 2,
                f"in round {k + 1} ranks {' and '.join(map(str, senders))} all send to rank {to}",
                cause=why_two_meet([[event.peer for event in row] for row in sent]),
                help="In round k send to rank (r + k) % n: then all targets differ.",
            )
        for r in range(n):
            to, source = sent[r][k].peer, come[r][k].peer
            trial.require(
                sent[source][k].peer == r,
                f"in round {k + 1} it waits for rank {source}, which sends to rank "
                f"{sent[source][k].peer} then",
                help="Who sends to r + k receives from r - k.",
                rank=r,
            )
    if seen.device == "cpu":
        require_turns(trial, seen, 0)


@check("all_to_all", subgroup=False)
def rounds_come_in_turn_with_shapes_too(trial: Trial) -> None:
    """Where shapes are handed over, too, a round is over before the next one begins."""
    seen = trial.once(observe_uneven)
    if seen.device == "cpu":
        for i in range(len(seen.cases)):
            require_turns(trial, seen, i)
    require_waits(trial, seen)


def _large(recording: Recording, kind: str) -> list[Event]:
    """The messages of the first case."""
    return [e for e in events(recording, 0) if e.kind == kind and e.num_bytes > SMALL]


def require_turns(trial: Trial, seen: SimpleNamespace, i: int) -> None:
    """In a case, no more than a send and a receive are under way at a time."""
    for r, recording in enumerate(seen.recordings):
        for started, event in enumerate(recording.events):
            if event.after != f"{i}":
                continue
            over = sum(before <= started for before in recording.waited_after)
            trial.require(
                started - over < 2,
                f"given {seen.cases[i]} it starts {event.describe()} while {started - over} messages are "
                "still under way",
                cause="the messages of all rounds are started at once, or of two",
                help="Wait for both messages of a round before the next one begins.",
                rank=r,
            )


@check("all_to_all")
def every_message_is_waited_for(trial: Trial) -> None:
    """Every isend and irecv is over when the call returns."""
    require_waits(trial, trial.once(observe_even))
