"""Checks of `all_to_all`: every rank gets what each had for it, in rounds of one sender and one receiver."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import CheckEnded, Fault, Trial, check, exercise

from .carried import require_carried
from .cases import IN_FLOAT64, require_own_memory
from .exchanges import (
    LEAVE_NO_ROUND_OUT,
    ROUND_K,
    Exchange,
    joined,
    observe_even,
    observe_layouts,
    observe_slow,
    observe_tuple,
    observe_uneven,
)
from .meetings import (
    in_a_round_left_out,
    large_messages,
    left_out,
    never_met,
    others_are_right,
    require_bytes,
    require_turns,
    why_two_meet,
)
from .traffic import require_messages_alone, require_waits

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


def slips(case: Exchange) -> dict[str, list[Tensor]]:
    """What known slips would have returned."""
    n, rows = len(case.rows), case.rows

    def each(entry: Callable[[int, int], Tensor]) -> list[Tensor]:
        return [joined([entry(r, s) for s in range(n)]) for r in range(n)]

    whole = rows[0][0].dtype == torch.int64
    rounded = {IN_FLOAT64: each(lambda r, s: rows[s][r].double().long())} if whole else {}
    return rounded | {
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
            if entry.dtype != true.dtype:
                trial.wrong(
                    f"given {case}, its entry of rank {s} is {str(entry.dtype).removeprefix('torch.')}",
                    cause="an empty tensor has a dtype, too, that of all the others"
                    if right_beside_full_ones(case, answers)
                    else "",
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


def right_beside_full_ones(case: Exchange, answers: list[dict[str, Any]]) -> bool:
    """Whether the dtype is right where nothing that goes or comes is empty."""
    dtype, n, rows = case.rows[0][0].dtype, len(case.rows), case.rows
    full = [(r, s) for r in range(n) for s in range(n) if rows[r][s].numel() and rows[s][r].numel()]
    as_many = all(len(answer["entries"]) == n for answer in answers)
    return as_many and all(getattr(answers[r]["entries"][s], "dtype", None) == dtype for r, s in full)


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
            if cause and others_are_right(case, answers, lambda s, r: s ^ r >= n):
                end.cause, end.help = cause, ROUND_K
            cause = left_out(seen, i)
            if cause and others_are_right(case, answers, partial(in_a_round_left_out, case)):
                end.cause, end.help = cause, LEAVE_NO_ROUND_OUT
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
    require_own_memory(trial, "all_to_all", lambda: [trial.normal(5) for _ in range(trial.num_ranks)])


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
    """It is made of isend and irecv, which bring what comes out: no collective is called."""
    for observe in (observe_even, observe_uneven):
        require_messages_alone(trial, trial.once(observe))
    require_carried(trial, "all_to_all", lambda _: [[trial.normal(3) for _ in range(trial.num_ranks)]])


@check("all_to_all", subgroup=False)
def tensors_go_straight_to_their_owners(trial: Trial) -> None:
    """A rank sends each other rank the bytes that it has for it, once: (n-1)/n of S where parts are alike."""
    for seen in (trial.once(observe_even), trial.once(observe_uneven)):
        for i, case in enumerate(seen.cases):
            for r, recording in enumerate(seen.recordings):
                require_bytes(trial, case, i, r, recording, never_met(seen, i))


@check("all_to_all")
def a_round_has_one_sender_and_one_receiver(trial: Trial) -> None:
    """n - 1 rounds: in each a rank sends to one rank and receives from one, and no two send to the same."""
    seen, n = trial.once(observe_even), trial.num_ranks
    sent, come = (
        [large_messages(recording, kind) for recording in seen.recordings] for kind in ("send", "recv")
    )
    for r in range(n):
        for kind, row in (("sends", sent[r]), ("receives", come[r])):
            trial.require(
                len(row) == n - 1,
                f"it {kind} {len(row)} tensors in a call, and there are n - 1 = {n - 1} others",
                help="One round for each of the others.",
                rank=r,
                cause=never_met(seen, 0),
            )
    if seen.device == "cpu":
        require_turns(trial, seen, 0)
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


@check("all_to_all", subgroup=False)
def rounds_come_in_turn_with_shapes_too(trial: Trial) -> None:
    """Where shapes are handed over, too, a round is over before the next one begins."""
    seen = trial.once(observe_uneven)
    if seen.device == "cpu":
        for i in range(len(seen.cases)):
            require_turns(trial, seen, i)
    require_waits(trial, seen)


@check("all_to_all")
def every_message_is_waited_for(trial: Trial) -> None:
    """Every isend and irecv is over when the call returns."""
    require_waits(trial, trial.once(observe_even))
