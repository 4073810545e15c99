"""How `ring_attention` and `zigzag_ring_attention` are observed and judged: alike, on other parts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import CheckEnded, Trial, settle

from . import left_to_autograd
from .ring_slips import by_parts, of_the_last_block, wrong_formulas, wrong_journeys, wrong_outputs
from .shared import (
    BACKWARD,
    Watch,
    as_returned,
    attention,
    causal,
    hops_at_most,
    neighbours_only,
    nothing_is_long,
    output_stays,
    plain_positions,
    went,
    with_changed,
    zigzag_positions,
)

BEGINNING, PATIENCE = 60.0, 2.0
"""Seconds that rank 0 waits for the others to begin, and then holds back its messages: a rank that does not
wait for them computes its block at once. The second hop is held back likewise, for the last rank's block."""


@dataclass(frozen=True)
class Kind:
    """One of the exercises in which attention is cut over ranks."""

    name: str
    positions: Callable[[int, int, int], Tensor]
    """(length, rank, num_ranks) → the positions of a rank's part."""
    chunks: int
    """Chunks that a rank has."""
    heads: Callable[[int], int] = lambda num_ranks: 5
    grouped: Callable[[int], int] = lambda num_ranks: 2
    """num_ranks → heads of q; and of k and v where each serves three of q."""

    def most_pairs(self, rank: int, num_ranks: int) -> int:
        """Pairs of chunks that a rank has to multiply, those on the diagonal whole."""
        return 2 * num_ranks + 2 if self.chunks == 2 else rank + 1


PLAIN = Kind("ring_attention", plain_positions, 1)
ZIGZAG = Kind("zigzag_ring_attention", zigzag_positions, 2)


def hold_back(rank, stretch: str) -> bool:
    """Tell that this rank begins. On rank 0: whether every other one computes a block without a message."""
    rank.tell(f"rank {rank.rank} begins {stretch}")
    others = range(1, rank.num_ranks) if rank.rank == 0 else ()
    if not others or rank.device.type != "cpu":
        return True  # NCCL's first message connects the ranks, and waits for all of them
    rank.hears([f"rank {r} begins {stretch}" for r in others], BEGINNING)
    return rank.hears([f"rank {r} computes {stretch}" for r in others], PATIENCE)


def hold_second_hop(rank) -> bool:
    """Before a rank's second hop: whether the last rank, which sees all blocks, computes the second one."""
    return rank.device.type != "cpu" or rank.hears(["the second block"], PATIENCE)


def attend(rank, name: str, length: int, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> dict:
    """One forward and backward of a rank's part. Tensors come as (b, s/n, a, d), and go in as a GPT's do."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before = [x.detach().clone() for x in (q, k, v, upstream)]
    parts = [x.transpose(1, 2) for x in leaves]  # (b, a, s/n, d)
    others_computed = hold_back(rank, "forward")
    heard: list[bool] = []
    last = rank.rank == rank.num_ranks - 1
    watch = Watch(
        length,
        at_first_product=lambda: rank.tell(f"rank {rank.rank} computes forward"),
        hop=2 * k.numel() * k.element_size(),
        before_second_hop=None if last else lambda: heard.append(hold_second_hop(rank)),
        at_second_block=lambda: rank.tell("the second block") if last else None,
        whole=rank.num_ranks * q.numel() if rank.num_ranks > 3 else 0,  # three may be q, k and v in one
    )
    with rank.record(memory=True) as recording, watch:
        out = getattr(rank.submission, name)(*parts, rank.group)
        settle()
        forward, long, held = list(watch.order), watch.long, watch.held
        watch.whole = 0  # four blocks joined are keys, values and their gradients
        watch.before_second_hop = watch.at_second_block = None
        watch.at_first_product = lambda: rank.tell(f"rank {rank.rank} computes backward")
        returned = as_returned(out)
        recording.mark(BACKWARD)
        watch.long, watch.order = "", []
        others_went_back = hold_back(rank, "backward")
        fits = isinstance(out, Tensor) and out.shape == parts[0].shape and out.requires_grad
        if fits:
            out.backward(upstream.transpose(1, 2))
    return {
        **went(out, returned, fits, leaves, (q, k, v, upstream), before),
        "forward": forward,
        "others_computed": others_computed,
        "others_went_back": others_went_back,
        "second_computed": all(heard),
        "long": [long, watch.long],
        "held": held,
        "recording": recording,
    }


def draw(trial: Trial, kind: Kind, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """Sizes of which no product is the sequence's length, so that `Watch` takes nothing else for it."""
    n = trial.num_ranks
    b, a, d = (2 if n == 3 else 3), kind.heads(n), trial.choice((34, 38))
    chunk = trial.choice((5, 7)) if kind.chunks == 1 else trial.choice((3, 5))
    length = n * kind.chunks * chunk
    q, k, v, upstream = (trial.normal(b, length, a, d, dtype=dtype) for _ in range(4))
    where = [kind.positions(length, r, n) for r in range(n)]
    return SimpleNamespace(q=2 * q, k=k, v=v, upstream=upstream, length=length, where=where, chunk=chunk)


def observe(trial: Trial, kind: Kind) -> SimpleNamespace:
    """A run in which every message is late, by another time on each rank, and rank 0's by much."""
    seen = draw(trial, kind)
    parts = [[x[:, w] for x in (seen.q, seen.k, seen.v, seen.upstream)] for w in seen.where]
    try:
        seen.results = trial.run(attend, kind.name, seen.length, per_rank=parts, delays=True)
    except CheckEnded as end:
        left_to_autograd.tell_those_without_use(trial, end, kind.name, parts)
        raise
    seen.by_autograd = cache(partial(left_to_autograd.kept_by_autograd, trial, kind.name, parts))
    heads = [x.double().transpose(1, 2) for x in (seen.q, seen.k, seen.v, seen.upstream)]
    seen.inputs = [x.requires_grad_() for x in heads[:3]]
    seen.d_out = heads[3]
    seen.out = attention(*seen.inputs, causal(seen.length))[0]
    seen.shares = shares(seen)
    b, _, a, d = seen.q.shape
    seen.block = b * a * d * seen.length // trial.num_ranks * 4
    return seen


def shares(seen: SimpleNamespace) -> list[list[Tensor]]:
    """What the queries of each rank add to the gradients of the whole q, k and v: by rank, then q, k, v."""
    found = []
    for where in seen.where:
        d_out = torch.zeros_like(seen.d_out)
        d_out[:, :, where] = seen.d_out[:, :, where]
        found.append(list(torch.autograd.grad(seen.out, seen.inputs, d_out, retain_graph=True)))
    return found


def require_outputs(trial: Trial, seen: SimpleNamespace) -> None:
    trial.close(
        "the output",
        [r["out"] for r in seen.results],
        by_parts(seen, seen.out),
        partial(wrong_outputs, seen),
        help="Compare each block with plain attention: which ranks' keys are there at step t, which of them "
        "does a query see, and is what arrives awaited before it is used?",
    )
    output_stays(trial, seen.results)


def require_gradients(trial: Trial, seen: SimpleNamespace) -> None:
    n = trial.num_ranks
    for r, result in enumerate(seen.results):
        trial.require(
            result["differentiable"],
            "the output has no gradient",
            help="Return what your autograd.Function's apply returns.",
            rank=r,
        )
    formulas = cache(partial(wrong_formulas, seen))

    def slips_of(i: int) -> dict[str, Any]:
        slips = {cause: by_parts(seen, value[i]) for cause, value in formulas().items()}
        if n > 1 and i == 0:
            return slips | of_the_last_block(seen)
        return slips | wrong_journeys(seen, i) if n > 1 else slips

    def others(i: int) -> dict[str, Any]:
        return with_changed(seen.results, [r["gradients"][i] for r in seen.results], slips_of(i))

    for i, label in enumerate("qkv"):
        trial.close(
            f"the gradient of {label}",
            [r["gradients"][i] for r in seen.results],
            by_parts(seen, sum(share[i] for share in seen.shares)),
            partial(others, i),
            help="A block's gradient gathers a part on every rank that uses the block, and must arrive, "
            "complete, on the rank that owns the block."
            if i
            else "The gradient of q adds up at home: a term from every block that its queries see.",
        )


def require_ring(trial: Trial, seen: SimpleNamespace) -> None:
    """Messages between neighbours, as many as the syllabus has."""
    n = trial.num_ranks
    for r, result in enumerate(seen.results):
        recording = result["recording"]
        for after, blocks in (("", 2), (BACKWARD, 4)):
            neighbours_only(trial, recording.select(None, after), r, blocks * seen.block)
        hops_at_most(
            trial,
            recording,
            "",
            r,
            2 * (n - 1),
            seen.block,
            "Keys and values make n - 1 hops: each rank sends what it has just used to the next, one block "
            "each of keys and values, and the last ones are not sent on.",
        )
        hops_at_most(
            trial,
            recording,
            BACKWARD,
            r,
            2 * (n - 1) + 2 * n,
            seen.block,
            "Keys and values make n - 1 hops again, two messages each at most. Their gradients make n hops, "
            "or n - 1 where the term of a block's own rank waits for them at home.",
        )


def require_travel_while_computing(trial: Trial, seen: SimpleNamespace) -> None:
    """The first hop has started when the first block is computed, and is not waited for; the second, too."""
    for r, result in enumerate(seen.results):
        order = result["forward"]
        if trial.num_ranks > 1 and "message" in order and "product" in order:
            trial.require(
                order.index("message") < order.index("product"),
                "the first block is computed before any message is started: the processor waits for the "
                "network, and the network for the processor",
                help="Start to send and to receive, compute the block that is there, then wait.",
                rank=r,
            )
    trial.require(
        seen.results[0]["others_computed"],
        "rank 0 started late, and some other rank did not compute its first block before rank 0 had sent "
        "something: the hop is waited for before the block is computed, or a rank leaves its own block out",
        help="Start the hop, compute the block that is there, then wait: one block at a time. The first "
        "block is your own, and needs nothing from anybody.",
    )
    trial.require(
        all(r["second_computed"] for r in seen.results),
        f"the first hop travels while the first block is computed, and no other: rank {trial.num_ranks - 1} "
        "did not compute its second block before the second hop had arrived",
        help="At every step the same: start the hop, compute the block that is there, then wait.",
    )
    cause = kept_with_each_hop(seen)
    trial.require(
        seen.results[0]["others_went_back"],
        "rank 0 began its backward late, and some other rank did not compute with its own block before rank "
        "0 had sent something: in backward the hop is waited for before the block is computed",
        help=(left_to_autograd.ONE if cause else "As in forward: ")
        + "start the hop, compute what the block that is there adds, then wait.",
        cause=cause,
    )


def alive_after_forward(seen: SimpleNamespace, r: int) -> float:
    """In blocks: a rank's part of q, k, v or the output."""
    return seen.results[r]["recording"].alive(BACKWARD) / seen.block


def keeps_all(seen: SimpleNamespace, r: int) -> bool:
    """Whether as much is alive after the forward as all keys and values are. Fewer ranks do not tell."""
    n = len(seen.results)
    return n > 3 and alive_after_forward(seen, r) >= 0.99 * (2 * (n - 1) + 1)


def kept_with_each_hop(seen: SimpleNamespace) -> str:
    """The cause where hops are left to autograd, which keeps what they bring; "" where they are not."""
    last = len(seen.results) - 1  # it computes all blocks
    if not keeps_all(seen, last) or not seen.by_autograd():
        return ""
    return (
        "each hop is an autograd.Function of its own: autograd calls its backward between those of two "
        f"blocks, and keeps the blocks that came: after the forward {alive_after_forward(seen, last):.1f} "
        f"blocks are alive on rank {last}"
    )


def require_nothing_long(trial: Trial, seen: SimpleNamespace) -> None:
    """No tensor is as long as the sequence, and what forward leaves is not all keys."""
    n = trial.num_ranks
    for r, result in enumerate(seen.results):
        for found in result["long"][
            : 2 if n == 3 else 1
        ]:  # four blocks joined are as long as four ranks' keys
            nothing_is_long(trial, found, seen.length, r)
        hops = result["held"] / (2 * seen.block)  # each brings keys and values
        trial.require(
            n < 4 or r < n - 1 or hops < 2.5,  # the last rank computes all blocks
            f"when the last block is computed, {hops:.2g} blocks of keys and values that were received are "
            f"still there, of {n - 1} in all: with its own the rank holds all keys",
            help="Let a block go when it was computed and has left: the one that is there and the one that "
            "comes are two.",
            rank=r,
        )
        cause = kept_with_each_hop(seen) if keeps_all(seen, r) else ""
        trial.require(
            not keeps_all(seen, r),
            f"after the forward {alive_after_forward(seen, r):.1f} blocks are alive on this rank (a block is "
            f"its part of q, k, v or the output): the keys and values of all {n} ranks are kept for backward",
            help=(left_to_autograd.ONE if cause else "For backward: ")
            + "keep your own q, k, v, out and lse; in backward keys and values travel again.",
            rank=r,
            cause=cause,
        )


def pair_flops(seen: SimpleNamespace) -> float:
    """Products of one chunk of queries with one of keys, and of the weights with one of values."""
    b, _, a, d = seen.q.shape
    return 4 * b * a * d * seen.chunk**2


def slack_flops(seen: SimpleNamespace) -> float:
    """What small products, such as a sum over d written as one, may add."""
    b, length, a, d = seen.q.shape
    return 0.02 * pair_flops(seen) + 4 * b * a * d * length / len(seen.where)


def require_work(trial: Trial, seen: SimpleNamespace, kind: Kind) -> None:
    """No more products than the visible blocks need, and three times that in backward."""
    n = trial.num_ranks
    units = "blocks" if kind.chunks == 1 else "pairs of chunks"
    for r, result in enumerate(seen.results):
        most = kind.most_pairs(r, n)
        visible = "1 block" if most == 1 else f"{most} {units}"
        for after, times, told in (("", 1, "forward"), (BACKWARD, 3, "backward")):
            flops = result["recording"].flops(after)
            allowed = times * most * pair_flops(seen) + slack_flops(seen)
            each = f", at most {times} times in backward" if after else ""
            every = n * kind.chunks**2  # of a rank's queries with all keys
            masked = not after and 0 <= flops - every * pair_flops(seen) <= slack_flops(seen)
            trial.require(
                flops <= allowed,
                f"the {told} took {flops:,} FLOPs; rank {r} has to look at {visible}: "
                f"{most * pair_flops(seen):,.0f} FLOPs{each}",
                help="A block that lies in the future is passed on, and not computed and masked."
                if kind.chunks == 1
                else "Of two parts compute only the pairs of chunks that are seen: 2 of 4 after step 0.",
                rank=r,
                cause=f"all {every} {units} are computed: what lies in the future is masked, and not left out"
                if masked
                else "",
            )


def require_unchanged(trial: Trial, seen: SimpleNamespace) -> None:
    for r, result in enumerate(seen.results):
        trial.require(
            not result["changed"],
            f"changed in place: {', '.join(result['changed'])}",
            help="Make new tensors in backward: d_out * out is one, d_out.mul_(out) writes into what came in."
            if result["changed"] == ["the gradient that came in"]
            else "Receive into tensors of your own, and add into tensors of your own.",
            rank=r,
        )
