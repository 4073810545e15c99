"""Checks of `broadcast`: a tensor reaches every rank, down a binomial tree."""

from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import CheckEnded, Fault, Trial, Verdict, check, exercise, is_close

from .carried import require_carried
from .cases import (
    CHANNELS_LAST,
    IN_FLOAT64,
    MIXED,
    SPACED,
    TRANSPOSED,
    Case,
    as_it_lies,
    ask,
    draw,
    dtypes,
    layouts,
    require_between,
    require_in_place,
    sizes,
)
from .traffic import SMALL, require_messages_alone, require_waits, sends

exercise(
    "broadcast",
    world_sizes=(2, 1, 4, 3, 5, 8),
    subgroup=True,
    hints=(
        "Count ranks from the source: place = (rank - source) % n. Now the source is always at place 0.",
        "After round k the places 0 ... 2^k - 1 have the tensor. To whom does each of them send in the "
        "next round, and who receives from whom?",
        "A place that would lie beyond n gets nothing. A tensor that is not contiguous can not travel: send "
        "and receive a contiguous copy, and copy the result back.",
    ),
)
COUNT_PLACES = (
    "Count places as (rank - source) % n, and go back by (place + source) % n. rank ^ source stays in 0 to "
    "n - 1 only where n is a power of two."
)
MISS_EACH_OTHER = "With source 0 every message meets its receive: from another source they miss each other"
THERE_AND_BACK = (
    "Go back from places to ranks as ranks became places, where you send and where you receive: "
    "place = (rank - source) % n, and rank = (place + source) % n."
)
OWN_ORDER = (
    "the numbers left in the order in which they lie in the source's memory, and were taken for the order in "
    "this rank's, which is another"
)
OWN_ORDER_STEP = (
    "empty_like() and clone() keep the strides of a tensor that has no gaps: with "
    "memory_format=torch.contiguous_format they give one that lies in the order of its indices."
)
FEW = (2, 1, 4, 3)  # eight ranks are for the shape of the tree alone, and five for where it ends


def from_sources(trial: Trial, cases: list[Case]) -> list[Case]:
    """The same cases, each from some rank of the group."""
    return [Case(c.values, c.layout, trial.integer(0, trial.num_ranks - 1)) for c in cases]


def observe_sources(trial: Trial) -> SimpleNamespace:
    size = trial.integer(200, 400)
    cases = [draw(trial, size, source=source) for source in range(trial.num_ranks)]
    kinds = (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    return ask(trial, "broadcast", [*cases, *from_sources(trial, dtypes(trial, *kinds))])


def observe_source_0(trial: Trial) -> SimpleNamespace:
    return ask(trial, "broadcast", [draw(trial, 300, source=0)])


def observe_sizes(trial: Trial) -> SimpleNamespace:
    return ask(trial, "broadcast", from_sources(trial, sizes(trial)))


def observe_layouts(trial: Trial) -> SimpleNamespace:
    """The shared ones, then one of one dimension and one of three."""
    n = trial.num_ranks
    others = [draw(trial, 2 * n + 1, layout=SPACED), draw(trial, 3, n + 1, 4, layout=TRANSPOSED)]
    return ask(trial, "broadcast", from_sources(trial, [*layouts(trial), *others]))


def observe_bits(trial: Trial) -> SimpleNamespace:
    """-0.0 where the others have -1, and complex numbers."""
    source = trial.num_ranks - 1
    zeros = [torch.full((5,), -0.0 if r == source else -1.0) for r in range(trial.num_ranks)]
    pairs = [torch.view_as_complex(value) for value in draw(trial, 5, 2).values]
    return ask(trial, "broadcast", [Case(values, source=source) for values in (zeros, pairs)])


def observe_slow(trial: Trial) -> SimpleNamespace:
    cases = [draw(trial, 20_000, source=trial.integer(0, trial.num_ranks - 1)) for _ in range(3)]
    return ask(trial, "broadcast", cases, delays=True)


def never_told(trial: Trial, seen: SimpleNamespace, i: int) -> tuple[str, str]:
    """The cause and the next step, where no message goes to those that are wrong, and they are as before."""
    n, case = trial.num_ranks, seen.cases[i]
    answers = [answer["tensor"] for answer in seen.answers[i]]
    left = [r for r in range(n) if not is_close(answers[r], case.values[case.source], rtol=0.0)]
    told = {event.peer for recording in seen.recordings for event in sends(recording, i)}
    as_before = all(is_close(answers[r], case.values[r], rtol=0.0) for r in left)
    if not left or not as_before or told & {None, *left}:
        return "", ""
    rounds = n.bit_length() - 1
    some = f"no message goes to rank {' or '.join(map(str, left))}"
    if case.source and is_right_from_source_0(trial):  # so that all rounds are there
        return (
            f"{some}. With source 0 every rank is told: here, ranks are miscounted from the source",
            COUNT_PLACES,
        )
    if {(r - case.source) % n for r in left} != set(range(2**rounds, n)):
        return some, "Who has the tensor sends it to one that has not, until nobody is left without it."
    return (
        f"the last round is missing: {some}. After {rounds} round{'s' * (rounds > 1)} 2^{rounds} = "
        f"{2**rounds} ranks have it, and {n} ranks take ceil(log2 {n}) = {rounds + 1}",
        "Go on while a rank is left: ceil(log2 n) rounds, where log2 n is rounded up.",
    )


def require_the_sources(
    trial: Trial, seen: SimpleNamespace, help: str, of: torch.dtype | None = None
) -> None:
    """Every rank's tensor holds what the source's did."""
    for i, (case, answers) in enumerate(zip(seen.cases, seen.answers, strict=True)):
        if of not in (None, case.values[0].dtype):
            continue
        expected = case.values[case.source]
        alternatives: dict[str, Tensor | Fault] = {
            "what it held before: nothing was written into the tensor that was given": Fault(
                case.values, on_some_ranks=True
            ),
            **{
                f"it is the tensor of rank {r}, and the source is rank {case.source}: rank {r} began with "
                "its own, or sent on before the source's had arrived": Fault(value, on_some_ranks=True)
                for r, value in enumerate(case.values)
                if r != case.source
            },
            "these are sums over the ranks, not one rank's tensor": case.total,
            "it went through float32, in which whole numbers above 2^24 and float64 lose their last digits": (
                expected.float().to(expected.dtype)
            ),
            IN_FLOAT64: expected.double().to(expected.dtype),
        }
        if case.layout in (MIXED, CHANNELS_LAST):
            alternatives[OWN_ORDER] = Fault(as_it_lies(case), OWN_ORDER_STEP)
        try:
            trial.close(
                f"the tensor ({case}) after the call",
                [answer["tensor"] for answer in answers],
                expected,
                alternatives=alternatives,
                rtol=0.0,
                help=help,
            )
        except CheckEnded as end:
            cause, step = never_told(trial, seen, i)
            end.cause, end.help = cause or end.cause, step or end.help
            raise
        require_in_place(trial, case, answers, expected, rtol=0.0)


def is_right_from_source_0(trial: Trial) -> bool:
    """Whether a broadcast from the group's rank 0, where place and rank are the same, does what it should."""
    try:
        seen = trial.once(observe_source_0)
    except CheckEnded:
        return False
    return all(is_close(each["tensor"], seen.cases[0].values[0], rtol=0.0) for each in seen.answers[0])


@check("broadcast", world_sizes=FEW)
def every_rank_has_the_sources_tensor(trial: Trial) -> None:
    """After the call every rank's tensor holds the source's numbers, whichever rank of the group it is."""
    try:
        seen = trial.once(observe_sources)
    except CheckEnded as end:
        if "there is no rank" in end.cause and is_right_from_source_0(trial):
            end.cause += (
                ". With source 0 all is right: counted from another source, places, or the way back from "
                "them to ranks, leave 0 to n - 1"
            )
            end.help = COUNT_PLACES
        elif end.verdict == Verdict.HUNG and " float32" in end.message and is_right_from_source_0(trial):
            end.cause = ". ".join(filter(None, (end.cause, MISS_EACH_OTHER)))
            end.help = THERE_AND_BACK
        raise
    require_the_sources(
        trial,
        seen,
        "`source` is a rank in the group, as group_src and group_dst are. Receive into the tensor itself.",
        of=torch.float32,
    )


@check("broadcast", world_sizes=(5,), subgroup=False)
def a_last_round_may_reach_one_rank(trial: Trial) -> None:
    """Five ranks take three rounds: in the last one, one rank alone is left."""
    seen = trial.once(observe_source_0)
    require_the_sources(trial, seen, "There are ceil(log2 n) rounds: go on while one is left.")


@check("broadcast", world_sizes=FEW, subgroup=False)
def any_size_is_broadcast(trial: Trial) -> None:
    """Tensors of any shape and size: 0-dim, one element, many dimensions."""
    require_the_sources(trial, trial.once(observe_sizes), "The whole tensor travels: nothing is cut.")


@check("broadcast", world_sizes=FEW)
def any_dtype_is_broadcast(trial: Trial) -> None:
    """Whole numbers, truth values, complex ones, float64 and bfloat16 arrive bit for bit."""
    require_the_sources(trial, trial.once(observe_sources), "Send the tensor's own dtype.")
    seen = trial.once(observe_bits)
    for case, answers in zip(seen.cases, seen.answers, strict=True):
        expected = case.values[case.source]
        for r, answer in enumerate(answers):
            tensor = answer["tensor"]
            same = tensor.dtype == expected.dtype and torch.equal(bits(tensor), bits(expected))
            trial.require(
                same,
                f"the tensor ({case}) begins with {tensor[0].item():.4g} after the call, where the source's "
                f"begins with {expected[0].item():.4g}",
                cause=what_is_lost(tensor, expected),
                help="Send the tensor's own bytes, and write what came with copy_(): no sum, no other dtype.",
                rank=r,
            )


def bits(tensor: Tensor) -> Tensor:
    """Its bytes."""
    return tensor.contiguous().view(torch.uint8)


def what_is_lost(tensor: Tensor, expected: Tensor) -> str:
    """What became of it on the way, if that is seen."""
    if tensor.is_complex() and expected.is_complex() and torch.equal(tensor.real, expected.real):
        return "the real parts came, and the imaginary ones are not those of the source"
    if not expected.is_complex() and torch.equal(tensor, expected):
        return "the sign of zero is gone: 0.0 + -0.0 is 0.0"
    return ""


@check("broadcast", world_sizes=(2, 3), subgroup=False)
def tensors_need_not_be_contiguous(trial: Trial) -> None:
    """A tensor that does not lie in one piece of memory is filled as well, and nothing else is."""
    seen = trial.once(observe_layouts)
    require_the_sources(
        trial,
        seen,
        "contiguous() makes a copy where it must: copy what has arrived back into the tensor.",
    )
    require_between(trial, seen)


@check("broadcast", world_sizes=(2, 4), subgroup=False)
def nothing_is_used_before_it_arrived(trial: Trial) -> None:
    """When messages are slow, every rank still has the right tensor when the call returns."""
    require_the_sources(
        trial,
        trial.once(observe_slow),
        "isend and irecv return at once. wait() for the receive before you read or send on what came.",
    )


@check("broadcast", world_sizes=FEW, subgroup=False)
def only_messages_are_used(trial: Trial) -> None:
    """It is made of isend and irecv, which bring what comes out: no collective is called."""
    for observe in (observe_sources, observe_sizes):
        require_messages_alone(trial, trial.once(observe))
    require_carried(trial, "broadcast", lambda _: [trial.normal(12), 0], receivers=range(1, trial.num_ranks))


@check("broadcast", world_sizes=FEW)
def every_message_is_waited_for(trial: Trial) -> None:
    """Every isend and irecv is over when the call returns."""
    require_waits(trial, trial.once(observe_sources))


@check("broadcast")
def messages_form_a_tree(trial: Trial) -> None:
    """n - 1 messages in all, at most ceil(log2 n) from any rank; all have it after ceil(log2 n) rounds."""
    seen, n = trial.once(observe_sources), trial.num_ranks
    rounds = (n - 1).bit_length()
    for i, case in enumerate(seen.cases):
        if case.num_bytes <= SMALL * 2:
            continue
        edges = [
            (r, event.peer, event.num_bytes)
            for r, recording in enumerate(seen.recordings)
            for event in sends(recording, i)
            if event.num_bytes > SMALL
        ]
        trial.require(
            len(edges) == n - 1,
            f"{len(edges)} messages were sent (source {case.source}), where n - 1 = {n - 1} are enough",
            help="Every rank but the source receives the tensor exactly once.",
            cause=_who_has_it_already(edges, case.source) if len(edges) > n - 1 else "",
        )
        trial.require(
            sum(num_bytes for _, _, num_bytes in edges) <= (n - 1) * (case.num_bytes + SMALL),
            f"{sum(num_bytes for _, _, num_bytes in edges):,} bytes were sent, where {n - 1} tensors are "
            f"{(n - 1) * case.num_bytes:,}",
            help="A message is the tensor, and nothing else.",
        )
        require_few_from_each(trial, edges, case.source, rounds)
        require_few_rounds(trial, edges, case.source, rounds)


def _who_has_it_already(edges: list[tuple], source: int) -> str:
    """Who is sent what it has, in words."""
    receivers = [receiver for _, receiver, _ in edges]
    if source in receivers and len(set(receivers)) == len(receivers):
        return (
            f"rank {source}, who has the tensor, is sent it too: the tree stands on another rank, to which "
            "it is brought first"
        )
    return "every message is the whole tensor to somebody who has it already?"


def require_few_from_each(trial: Trial, edges: list[tuple], source: int, rounds: int) -> None:
    """A star, in which the source serves everybody, sends n - 1 from one rank."""
    for r in range(trial.num_ranks):
        count = sum(sender == r for sender, _, _ in edges)
        star = count == trial.num_ranks - 1
        trial.require(
            count <= rounds,
            f"it sends {count} messages (source {source}), more than ceil(log2 {trial.num_ranks}) = {rounds}",
            cause="a star: one rank sends to all others, one after the other" if star else "",
            help="Whoever has received the tensor helps to send it: the number who have it doubles.",
            rank=r,
        )


def require_few_rounds(trial: Trial, edges: list[tuple], source: int, rounds: int) -> None:
    """Where a rank that has the tensor sends one message in each round, all have it after so many rounds.

    A chain, in which everybody has one message to send, takes n - 1; a tree of two children each more than
    ceil(log2 n) from seven ranks on.
    """
    if any(receiver is None for _, receiver, _ in edges):
        return
    comes = rounds_of(edges, source)
    last = max(comes, key=lambda r: comes[r])
    senders = [sender for sender, _, _ in edges]
    chain = comes[last] == trial.num_ranks - 1 > rounds and len(set(senders)) == len(senders)
    turned = rounds_of(edges[::-1], source)  # every rank serves those whom it serves last first
    cause = "some ranks that have it send no more while others wait for it"
    help = "Whoever has received the tensor helps to send it, and so does the source: it goes on sending."
    if chain:
        cause = "a chain: each rank sends to the next one"
    elif max(turned.values()) <= rounds:
        cause = (
            "the tree is right, and the order is not: who has few to pass it on to is served first. Were "
            f"each rank's messages sent from the last to the first, {rounds} rounds would do"
        )
        help = "Serve first the rank that has the most others behind it: the largest step comes first."
    trial.require(
        comes[last] <= rounds,
        f"the tensor comes to it in round {comes[last]} (source {source}), where a rank sends one message in "
        f"a round; a binomial tree takes ceil(log2 {trial.num_ranks}) = {rounds}",
        cause=cause,
        help=help,
        rank=last,
    )


def rounds_of(edges: list[tuple], source: int) -> dict[int, int]:
    """In which round the tensor comes to a rank, where who has it sends one message in each."""
    comes, reached = {source: 0}, [source]
    for r in reached:
        receivers = [receiver for sender, receiver, _ in edges if sender == r and receiver not in comes]
        comes |= {receiver: comes[r] + turn for turn, receiver in enumerate(receivers, start=1)}
        reached += receivers
    return comes
