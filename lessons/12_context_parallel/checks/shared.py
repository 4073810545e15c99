"""What the checks of this lesson share: plain attention, who has which positions, messages round a ring."""

import gc
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grader.checks import Event, Fault, Recording, Trial, is_close, tensors_in

BACKWARD = "backward begins"
SIZES = (2, 1, 4, 3)
FEW = 64
"""Bytes of a message that carries no block: a size, a flag."""

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "dot", "mv")
EXPONENTIALS = ("exp", "exp_", "exp2", "exp2_", "_softmax", "logsumexp")
TORCHS = ("aten", "prim", "prims", "inductor", "profiler", "c10d", "_c10d_functional")
"""Namespaces of operations that are no kernel of somebody's own."""


def plain_positions(length: int, rank: int, num_ranks: int) -> Tensor:
    """The positions that rank r has when it takes the r-th part of a sequence."""
    return torch.arange(length).chunk(num_ranks)[rank]


def zigzag_positions(length: int, rank: int, num_ranks: int) -> Tensor:
    """The positions that rank r has when it takes chunks r and 2n-1-r of 2n."""
    chunks = torch.arange(length).chunk(2 * num_ranks)
    return torch.cat([chunks[rank], chunks[2 * num_ranks - 1 - rank]])


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float = 1.0) -> tuple:
    """Attention and its log-sum-exp, in float64; seen (s_q, s_k) is True where a query sees a key.

    A query that sees nothing gets 0 and -inf, and a gradient of 0.
    """
    q, k, v = q.double(), k.double(), v.double()
    scores = scale * (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if seen is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    blind = ~seen.any(-1)
    scores = scores.masked_fill(~(seen | blind.unsqueeze(-1)), -math.inf)
    out = (scores.softmax(-1) @ v).masked_fill(blind.unsqueeze(-1), 0.0)
    return out, scores.logsumexp(-1).masked_fill(blind, -math.inf)


def causal(length: int) -> Tensor:
    """True where a query sees a key."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def as_returned(out: Any) -> Tensor | None:
    """On a rank, before backward: a copy of an output, if it can be in memory that no recording counts."""
    if type(out) is Tensor and out.dtype == torch.float32:
        return torch.from_numpy(out.detach().cpu().numpy().copy())
    return out.detach().clone() if isinstance(out, Tensor) else None


def unchanged(now: Tensor, before: Tensor) -> bool:
    """Whether a tensor has the numbers that it had, NaN included."""
    return torch.allclose(now.to(before.device), before, 0, 0, equal_nan=True)


def went(
    out: Any,
    returned: Tensor | None,
    fits: bool,
    leaves: list[Tensor],
    now: Iterable[Tensor],
    before: Iterable[Tensor],
    *more: str,
) -> dict:
    """On a rank: what a forward and backward left. Leaves are (b, s/n, a, d).

    What was given, `now` and `before`, is q, k, v, the upstream gradient, and what `more` names. `returned`
    is the output before backward.
    """
    names = [*"qkv", "the gradient that came in", *more]
    return {
        "out": returned,
        "rewritten": returned is not None and not unchanged(out, returned),
        "gradients": [x.grad if x.grad is None else x.grad.transpose(1, 2) for x in leaves],
        "differentiable": fits,
        "changed": [
            name for name, x, was in zip(names, now, before, strict=True) if not torch.equal(x.detach(), was)
        ],
    }


class Watch(TorchDispatchMode):
    """On a rank: looks for tensors as long as the sequence, and at what comes first, product or message.

    A kernel of somebody's own is a product, too; so is an exponential where none came before the first one:
    who multiplies and adds up by himself computes a block as well.

    Args:
        hop: bytes that leave a rank in a hop. `before_second_hop` is called before more than that is sent.
        at_second_block: called at the first product after a message after a product.
        whole: how many numbers the whole sequence has; a tensor of as many is long, whatever its shape. 0
            looks at shapes alone.

    Attributes:
        held: bytes of all that has been received and was still there at the last product.
    """

    def __init__(
        self,
        length: int,
        dims: int = 2,
        at_first_product: Callable | None = None,
        hop: int = 0,
        before_second_hop: Callable | None = None,
        at_second_block: Callable | None = None,
        whole: int = 0,
    ) -> None:
        super().__init__()
        self.whole = whole
        self.held = 0
        self._received: list[weakref.ref] = []
        self.hop, self.sent = hop, 0
        self.before_second_hop = before_second_hop
        self.at_second_block = at_second_block
        self.length = length
        self.dims = dims
        self.at_first_product = at_first_product
        self.long = ""
        self.order: list[str] = []
        self._by_hand: bool | None = None
        """Whether the first block was computed without a product; None before it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname == "send":
            if self.before_second_hop and self.sent >= self.hop:
                self.before_second_hop()
                self.before_second_hop = None
            self.sent += sum(x.numel() * x.element_size() for x in tensors_in(args[0]))
        if func.namespace == "c10d" and func._opname in ("recv_", "recv_any_source_"):
            self._received += [weakref.ref(x.untyped_storage()) for x in tensors_in(args[0])]
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.order.append("message")
        elif self._is_product(func):
            if self.at_first_product and "product" not in self.order:
                self.at_first_product()
            if self.at_second_block and "product" in self.order and self.order[-1] == "message":
                self.at_second_block()
                self.at_second_block = None
            self.order.append("product")
            self.held = self._bytes_there()
            if self.hop and self.held > 2.5 * self.hop:  # what a circle holds goes when Python looks for it
                gc.collect()
                self.held = self._bytes_there()
        for tensor in tensors_in(result):
            large = self.whole and tensor.is_floating_point() and tensor.numel() >= self.whole
            if not self.long and (large or is_long(tensor, self.length, self.dims)):
                self.long = f"{func._opname} made a tensor of shape {tuple(tensor.shape)}"
                if not is_long(tensor, self.length, self.dims):
                    self.long += ", as many numbers as all of the sequence has"
        return result

    def _is_product(self, func: Any) -> bool:
        product = func._opname in PRODUCTS or "attention" in func._opname or func.namespace not in TORCHS
        exponential = func._opname in EXPONENTIALS
        if self._by_hand is None and (product or exponential):
            self._by_hand = exponential
        return product or (exponential and bool(self._by_hand))

    def _bytes_there(self) -> int:
        """Of all that has been received."""
        storages = [storage for reference in self._received if (storage := reference()) is not None]
        return sum({id(storage): storage.nbytes() for storage in storages}.values())


def is_long(tensor: Tensor, length: int, dims: int) -> bool:
    """Whether numbers in so many dimensions have one of this size, or a mask has two. Tokens may be long."""
    if tensor.dtype == torch.bool:
        return list(tensor.shape).count(length) >= 2
    return tensor.is_floating_point() and tensor.dim() >= dims and length in tensor.shape


ONE_BLOCK = (
    "A rank needs its own queries and one block of keys and values at a time: attend to the block that is "
    "there, merge, and let it go."
)


def nothing_is_long(trial: Trial, found: str, length: int, rank: int, help: str = ONE_BLOCK) -> None:
    """What `Watch.long` told is nothing."""
    trial.require(not found, f"{found}, and the whole sequence is {length} long", help=help, rank=rank)


def blocks_on_the_wire(events: list[Event]) -> list[Event]:
    """What carries blocks: messages that were sent, and collectives. Not a size or a flag."""
    return [event for event in events if event.num_bytes > FEW and event.kind != "recv"]


def changed_everywhere(results: list[dict]) -> str:
    """Which of q, k and v were changed in place on every rank; "" if none was."""
    return ", ".join(name for name in "qkv" if all(name in result["changed"] for result in results))


def with_changed(results: list[dict], found: list, others: dict[str, Any]) -> dict[str, Any]:
    """Causes of wrong gradients; where none fits, that inputs were changed in place."""
    names = changed_everywhere(results)
    fits = all(isinstance(each, Tensor) for each in found) and any(
        all(map(is_close, found, x.values if isinstance(x, Fault) else x)) for x in others.values()
    )
    if fits or not names:
        return others
    told = f"changed in place: {names}. What comes after that works with other numbers"
    step = "x.to(dtype) copies nothing where x has that dtype: x * c makes a new tensor, x.mul_(c) does not."
    return {**others, told: Fault(found, step)}


def output_stays(trial: Trial, results: list[dict]) -> None:
    """Require that the backward did not write into the output, of which it is known that it was right."""
    for rank, result in enumerate(results):
        trial.require(
            not result["rewritten"],
            "the output was right when it was returned, and its own backward changed it in place",
            help="Make a new tensor in backward: (out * d_out).sum(-1) does, and out.mul_(d_out) writes into "
            "what the caller has.",
            rank=rank,
        )


def neighbours_only(trial: Trial, events: list[Event], rank: int, largest: int) -> None:
    """Blocks go to neighbours on the ring. (An all-to-all may be a hop of the ring: PyTorch's own is.)"""
    n = trial.num_ranks
    ring = {(rank + 1) % n, (rank - 1) % n}
    for event in blocks_on_the_wire(events):
        is_hop = event.kind == "all_to_all" and event.num_bytes <= largest
        if event.kind == "send" or is_hop:
            if event.kind == "send" and event.peer not in ring:
                trial.wrong(
                    f"{event.describe()}: it is no neighbour of rank {rank} on a ring of {n}",
                    help="Send to rank (r + 1) % n and receive from rank (r - 1) % n, as often as it takes.",
                    rank=rank,
                )
            continue
        trial.wrong(
            f"keys and values went through a collective: {event.describe()}",
            help="An all-gather leaves all keys and values on every rank: no rank could take a longer "
            "sequence than one alone. Send blocks from neighbour to neighbour.",
            cause="an all-gather posing as a ring?" if event.kind == "all_gather" else "",
            rank=rank,
        )


IN_ONE_PIECE = (
    "A block travels in one message: one of keys and one of values a hop, and in backward one of each "
    "gradient."
)


def hops_at_most(
    trial: Trial, recording: Recording, after: str, rank: int, most: int, block: int, why: str
) -> None:
    """At most so many blocks of so many bytes leave this rank in a stretch, in at most so many messages."""
    events = blocks_on_the_wire(recording.select(None, after))
    where = "the backward" if after else "the forward"
    sent = sum(event.num_bytes for event in events)
    told = f"{len(events)} messages, {sent:,} bytes, {sent / block:.3g} blocks"
    fits = sent <= most * block + FEW
    trial.require(
        not fits or len(events) <= most,
        f"{where} sent {len(events)} messages from this rank, where {most} are enough, and no more "
        f"bytes than is right: {sent / block:.3g} blocks in all",
        help=IN_ONE_PIECE,
        rank=rank,
        cause="blocks are sent in pieces",
    )
    trial.require(
        fits,
        f"{where} sent {told} from this rank, where {most} blocks are enough (one block: {block:,} bytes)",
        help=why,
        rank=rank,
    )


THROUGH_OWN_TERM = (
    "Let the loss's gradient pass as it is: the value is the sum of all, and backward goes on through this "
    "rank's term."
)


def summed_back(results: list[dict], times_n: Tensor | list[Tensor]) -> dict[str, Fault]:
    """By cause: gradients n times too large, if each rank's backward has an all-reduce of a few numbers."""
    by_rank = [r["recording"].select("all_reduce", BACKWARD) for r in results]
    if len(results) == 1 or not all(any(event.num_bytes <= FEW for event in events) for events in by_rank):
        return {}
    cause = (
        "n times too large: backward has an all-reduce of the loss's own gradient, as the backward of a "
        "differentiable all_reduce does. The loss is one, and each rank's gradient of it whole already"
    )
    return {cause: Fault(times_n, THROUGH_OWN_TERM)}
