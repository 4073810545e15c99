"""How `ring_attention` and `zigzag_ring_attention` are observed and judged: alike, on other parts."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import Trial, is_close, settle
from lessons_shared.evaluation import without_gradients

from .frozen import NEEDING, gradients_of_some
from .ring_slips import by_parts, last_terms, wrong_formulas, wrong_journeys, wrong_outputs
from .shared import (
    BACKWARD,
    Watch,
    attention,
    causal,
    hops_at_most,
    neighbours_only,
    nothing_is_long,
    plain_positions,
    went,
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
        recording.mark(BACKWARD)
        watch.long, watch.order = "", []
        others_went_back = hold_back(rank, "backward")
        fits = isinstance(out, Tensor) and out.shape == parts[0].shape and out.requires_grad
        if fits:
            out.backward(upstream.transpose(1, 2))
    return {
        **went(out, fits, leaves, (q, k, v, upstream), before),
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
    seen.results = trial.run(attend, kind.name, seen.length, per_rank=parts, delays=True)
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

    def others(i: int) -> dict[str, list[Tensor]]:
        slips = {cause: by_parts(seen, value[i]) for cause, value in formulas().items()}
        if n > 1 and i == 0:
            told = "only what the block adds that is computed last: = in the place of +=?"
            return slips | {told: last_terms(seen)}
        return slips | wrong_journeys(seen, i) if n > 1 else slips

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
        "something: the hop is waited for before the block is computed",
        help="Start the hop, compute the block that is there, then wait: one block at a time. The first "
        "block is your own, and needs nothing from anybody.",
    )
    trial.require(
        all(r["second_computed"] for r in seen.results),
        f"the first hop travels while the first block is computed, and no other: rank {trial.num_ranks - 1} "
        "did not compute its second block before the second hop had arrived",
        help="At every step the same: start the hop, compute the block that is there, then wait.",
    )
    trial.require(
        seen.results[0]["others_went_back"],
        "rank 0 began its backward late, and some other rank did not compute with its own block before rank "
        "0 had sent something: in backward the hop is waited for before the block is computed",
        help="As in forward: start the hop, compute what the block that is there adds, then wait.",
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
        alive = result["recording"].alive(BACKWARD)
        trial.require(
            n < 4 or alive < 0.99 * (2 * (n - 1) + 1) * seen.block,
            f"after the forward {alive / seen.block:.1f} blocks are alive on this rank (a block is its part "
            f"of q, k, v or the output): the keys and values of all {n} ranks are kept for backward",
            help="Keep your own q, k, v, out and lse. In backward keys and values travel again.",
            rank=r,
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
    for r, result in enumerate(seen.results):
        most = kind.most_pairs(r, n)
        for after, times, told in (("", 1, "forward"), (BACKWARD, 3, "backward")):
            flops = result["recording"].flops(after)
            allowed = times * most * pair_flops(seen) + slack_flops(seen)
            each = f", at most {times} times in backward" if after else ""
            trial.require(
                flops <= allowed,
                f"the {told} took {flops:,} FLOPs; {most} pairs of chunks that rank {r} has to look at take "
                f"{most * pair_flops(seen):,.0f}{each}",
                help="A block that lies in the future is passed on, and not computed and masked."
                if kind.chunks == 1
                else "Of two parts compute only the pairs of chunks that are seen: 2 of 4 after step 0.",
                rank=r,
            )


def require_unchanged(trial: Trial, seen: SimpleNamespace) -> None:
    for r, result in enumerate(seen.results):
        trial.require(
            not result["changed"],
            f"changed in place: {', '.join(result['changed'])}",
            help="Receive into tensors of your own, and add into tensors of your own.",
            rank=r,
        )


def between_two_others(
    attention_of: Callable, group, parts: list[Tensor], d_out: Tensor
) -> tuple[list, bool]:
    """The gradients of the second of three attentions; and whether its output outlives all who held it.

    An output that an `autograd.Function` puts on its ctx, and not into save_for_backward, is held by the ctx
    that it holds. Only Python's garbage collector, which comes when it likes, lets go of such a circle.
    """
    leaves = [x.clone().requires_grad_() for x in parts]
    scaled = [[scale * x for x in leaves] for scale in (2.0, 1.0, 0.5)]
    collects = gc.isenabled()
    gc.disable()
    try:
        outs = [attention_of(*inputs, group) for inputs in scaled]
        outs[1].backward(d_out)
        second = weakref.ref(outs[1])
        outs.clear()
        return [x.grad for x in leaves], second() is not None
    finally:
        if collects:
            gc.enable()


def attend_in(rank, name: str, more: bool, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> dict:
    """As `attend`, and no more than values; then the same again, between two other attentions.

    With `more`, without gradients as well, and where not all of q, k and v need one.
    """
    attention_of = getattr(rank.submission, name)
    parts = [x.transpose(1, 2) for x in (q, k, v)]
    leaves = [x.clone().requires_grad_() for x in parts]
    out = attention_of(*leaves, rank.group)
    found = {"out": out, "gradients": [None] * 3, "between": [None] * 3, "outlived": False}
    if isinstance(out, Tensor) and out.requires_grad and out.shape == parts[0].shape:
        d_out = upstream.transpose(1, 2).to(out.dtype)
        out.backward(d_out)
        found["gradients"] = [x.grad for x in leaves]
        found["between"], found["outlived"] = between_two_others(attention_of, rank.group, parts, d_out)
        if more:
            found["silent"] = without_gradients(attention_of, *parts, rank.group)
            found["needing"] = {
                told: gradients_of_some(attention_of, rank.group, parts, d_out, told) for told in NEEDING
            }
    return found


def observe_in(trial: Trial, kind: Kind, dtype: torch.dtype) -> SimpleNamespace:
    """A run of `attend_in`, and what plain attention gives: what, by rank, what it should be."""
    seen = draw(trial, kind, dtype)
    parts = [[x[:, w] for x in (seen.q, seen.k, seen.v, seen.upstream)] for w in seen.where]
    seen.results = trial.run(attend_in, kind.name, dtype == torch.float64, per_rank=parts)
    q, k, v = (x.double().transpose(1, 2).requires_grad_() for x in (seen.q, seen.k, seen.v))
    seen.inputs = [q, k, v]
    seen.out = out = attention(q, k, v, causal(seen.length))[0]
    out.backward(seen.upstream.double().transpose(1, 2))
    seen.found = [("the output", [r["out"] for r in seen.results], by_parts(seen, out))]
    for i, (label, x) in enumerate(zip("qkv", (q, k, v), strict=True)):
        gradients = [r["gradients"][i] for r in seen.results]
        seen.found.append((f"the gradient of {label}", gradients, by_parts(seen, x.grad)))
    return seen


def require_dtype(trial: Trial, kind: Kind, seen: SimpleNamespace, exact: SimpleNamespace) -> None:
    """In float64 the result has ten digits, in bfloat16 it is a bfloat16, where it is right in float32."""
    for dtype, rtol in ((torch.float64, 1e-9), (torch.bfloat16, 0.1)):
        run = exact if dtype == torch.float64 else observe_in(trial, kind, dtype)
        for what, actual, expected in run.found:
            for r, tensor in enumerate(actual):
                trial.require(
                    not isinstance(tensor, Tensor) or tensor.dtype == dtype,
                    f"{what} is {getattr(tensor, 'dtype', None)} where the inputs are {dtype}",
                    help="Receive into torch.empty_like(...) of what is sent, and cast back at the end.",
                    rank=r,
                )
            if is_right(seen):  # else another check says what is wrong, and it is not the dtype
                trial.close(
                    f"{what} in {str(dtype).removeprefix('torch.')}",
                    actual,
                    expected,
                    help="In float32 it is right. A buffer or a cast of another dtype loses digits, or takes "
                    "the bytes for other numbers.",
                    rtol=rtol,
                )


def is_right(seen: SimpleNamespace) -> bool:
    """Whether output and gradients are those of plain attention."""
    pairs = list(zip([r["out"] for r in seen.results], by_parts(seen, seen.out), strict=True))
    for i in range(3):
        whole = by_parts(seen, sum(share[i] for share in seen.shares))
        pairs += zip([r["gradients"][i] for r in seen.results], whole, strict=True)
    return all(isinstance(x, Tensor) and is_close(x, right) for x, right in pairs)


def require_calls_apart(trial: Trial, exact: SimpleNamespace) -> None:
    """The middle one of three attentions has the gradients that it has alone, and is let go of."""
    for i, label in enumerate("qkv"):
        alone = [r["gradients"][i] for r in exact.results]
        if all(isinstance(x, Tensor) for x in alone):
            trial.close(
                f"the gradient of {label}, with an attention before and one after it in the same forward,",
                [r["between"][i] for r in exact.results],
                alone,
                help="A model has many layers: each call keeps its own tensors, with ctx.save_for_backward. "
                "A variable of the module, or of the class, has those of another call.",
            )
    for r, result in enumerate(exact.results):
        trial.require(
            not result["outlived"],
            "after its backward, when nobody holds the output any more, its memory is still taken: the "
            "output holds its ctx, and the ctx the output, until Python's garbage collector finds the circle",
            help="Give what backward needs to ctx.save_for_backward, the output too: what you put on ctx "
            "yourself (ctx.out = out) is not let go of after backward.",
            rank=r,
        )
