"""What the checks of this lesson share: drawn weights, what a rank holds, bytes on the wire."""

from types import SimpleNamespace

from torch import Tensor, nn

from grader.checks import Trial, each_rank, storage_bytes, told

SIZES = (2, 1, 4, 3)
SLACK = 16


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.float() for name, parameter in module.named_parameters()}


def own_part(tensor: Tensor, dim: int, rank: int, num_ranks: int) -> Tensor:
    return tensor.chunk(num_ranks, dim)[rank]


def describe(module: nn.Module) -> dict:
    """On a rank: what a module holds. Gradients that are missing stay missing."""
    named = dict(module.named_parameters())
    return {
        "weights": {name: p.detach() for name, p in named.items()},
        "gradients": {name: p.grad.clone() for name, p in named.items() if p.grad is not None},
        "held": {name: storage_bytes([p]) for name, p in named.items()},
    }


def shape_of(tensor: Tensor | None) -> tuple | None:
    return None if tensor is None else tuple(tensor.shape)


def wire_bytes(events: list, num_ranks: int) -> float:
    """Bytes that one rank sends, with rings: what `all_reduce` costs, whichever calls it was made of."""
    share = (num_ranks - 1) / num_ranks
    factor = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}
    return sum(event.num_bytes * factor.get(event.kind, 0 if event.kind == "recv" else 1) for event in events)


def one_all_reduce(trial: Trial, seen: SimpleNamespace, stretch: str, num_bytes: int, help: str) -> None:
    """One all-reduce of so many bytes, or as many bytes by reduce-scatter and all-gather, or by messages."""
    where = "the backward" if stretch else "the forward"
    for rank, recording in enumerate(each_rank(seen, "recording")):
        events = recording.select(None, stretch)
        reduces = [event for event in events if event.kind == "all_reduce"]
        if trial.num_ranks == 1 and not events:
            continue
        if not events:
            trial.wrong(f"{where} communicated nothing, where one all-reduce belongs", help=help, rank=rank)
        if len(reduces) > 1 or (reduces and len(events) > 1):
            trial.wrong(
                f"{where} communicated more than one all-reduce: {told(events)}", help=help, rank=rank
            )
        allowed = 2 * (trial.num_ranks - 1) / trial.num_ranks * num_bytes + SLACK * trial.num_ranks
        sent = wire_bytes(events, trial.num_ranks)
        if sent > allowed or (reduces and reduces[0].num_bytes != num_bytes):
            trial.wrong(
                f"{where} sent {told(events)}: about {sent:,.0f} bytes from this rank, "
                f"where one all-reduce of {num_bytes:,} bytes sends {allowed - SLACK * trial.num_ranks:,.0f}",
                help=help,
                rank=rank,
            )


def nothing_travels(trial: Trial, seen: SimpleNamespace, stretch: str, help: str) -> None:
    where = "the backward" if stretch else "the forward"
    for rank, recording in enumerate(each_rank(seen, "recording")):
        events = recording.select(None, stretch)
        if trial.num_ranks > 1 and events:
            trial.wrong(
                f"{where} communicated: {told(events)}; nothing has to travel there", help=help, rank=rank
            )


def refused(trial: Trial, seen: SimpleNamespace, size: int) -> None:
    """A ValueError came that names both numbers; seen.results hold the type's name and the message."""
    for rank, result in enumerate(seen.results):
        if trial.num_ranks == 1:
            return
        if result["error"] is None:
            trial.wrong(
                f"{size} does not divide by {trial.num_ranks} ranks, and no error was raised",
                help="Use shard_size: it raises the ValueError for you.",
                rank=rank,
            )
        kind, message = result["error"]
        if kind != "ValueError":
            trial.wrong(f"expected a ValueError, got {kind}: {message}", help="Use shard_size.", rank=rank)
        for number in (size, trial.num_ranks):
            if str(number) not in message:
                trial.wrong(
                    f"the ValueError does not name the number {number}: {message!r}",
                    help="Say which number does not divide by which: shard_size does.",
                    rank=rank,
                )


def error_of(function, *arguments, **options) -> tuple[str, str] | None:
    """On a rank: the type and text of what a call raises. A stub's NotImplementedError passes through."""
    try:
        function(*arguments, **options)
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def undividable(trial: Trial, least: int = 5) -> int:
    """A number that does not divide by the group's size (any number where one rank divides all)."""
    n = trial.num_ranks
    return trial.integer(least // n + 1, least // n + 4) * n + (trial.integer(1, n - 1) if n > 1 else 0)
