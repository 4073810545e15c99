"""Keys and values of fewer heads than the queries have, alike for all attentions that are cut over ranks."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import Event, Fault, Recording, Trial

from .ring_slips import by_parts
from .rings import Kind
from .shared import BACKWARD, attention, blocks_on_the_wire, causal

PER_GROUP = 3
"""Heads of q that share one of k and v."""


def attend_grouped(rank, name: str, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> dict:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with rank.record() as recording:
        out = getattr(rank.submission, name)(*leaves, rank.group)
        recording.mark(BACKWARD)
        if isinstance(out, Tensor) and out.requires_grad and out.shape == q.shape:
            out.backward(upstream)
    return {"out": out, "gradients": [x.grad for x in leaves], "recording": recording}


def observe(trial: Trial, kind: Kind) -> SimpleNamespace:
    n = trial.num_ranks
    b, a_kv, chunk, d = 2, kind.grouped(n), trial.integer(3, 5), trial.choice((6, 10))
    length = n * kind.chunks * chunk
    q, upstream = (trial.normal(b, PER_GROUP * a_kv, length, d) for _ in range(2))
    k, v = (trial.normal(b, a_kv, length, d) for _ in range(2))
    where = [kind.positions(length, r, n) for r in range(n)]
    parts = [[x[:, :, w] for x in (q, k, v, upstream)] for w in where]
    results = trial.run(attend_grouped, kind.name, per_rank=parts)
    block = k[:, :, where[0]].numel() * k.element_size()
    return SimpleNamespace(q=q, k=k, v=v, upstream=upstream, where=where, results=results, block=block)


def plainly(seen: SimpleNamespace, spread: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Output and gradients of q, k and v, where `spread` gives each head of q its keys and values."""
    inputs = [x.double().requires_grad_() for x in (seen.q, seen.k, seen.v)]
    q, k, v = inputs
    out = attention(q, spread(k), spread(v), causal(q.size(2)))[0]
    out.backward(seen.upstream.double())
    return [out.detach(), *(x.grad for x in inputs)]


def require_values(trial: Trial, seen: SimpleNamespace) -> None:
    """Output and gradients, with k and v of fewer heads."""
    n, a_kv = trial.num_ranks, seen.k.size(1)
    right = plainly(seen, lambda x: x.repeat_interleave(PER_GROUP, dim=1))
    turns = plainly(seen, lambda x: x.repeat(1, PER_GROUP, 1, 1))
    by_rank = plainly(
        seen,
        lambda x: torch.cat([y.repeat(1, PER_GROUP, 1, 1) for y in x.chunk(min(n, a_kv), dim=1)], dim=1),
    )
    in_turn = plainly(seen, lambda x: x[:, kv_of_heads_in_turn(n, a_kv)])
    found = [[r["out"] for r in seen.results], *([r["gradients"][i] for r in seen.results] for i in range(3))]
    for i, label in enumerate(("the output", *(f"the gradient of {x}" for x in "qkv"))):
        wrong = {
            "head i of q meets head i % a_kv of k and v; heads that share one follow one another, so it is "
            "i // (a / a_kv)": by_parts(seen, turns[i]),
            "of a rank's heads, head i of q meets head i % (a_kv / n) of k and v; heads that share one "
            "follow one another": by_parts(seen, by_rank[i]),
            "heads are dealt out in turn, rank r's are r, r + n and so on, and what meets on a rank does not "
            "belong together": Fault(
                by_parts(seen, in_turn[i]),
                "A rank has heads that follow one another: cut them with chunk(n).",
            ),
        }
        if i > 1:
            terms = of_heads(seen, i - 1)
            wrong |= {
                "it is summed over heads of q that are a_kv apart: those that share a head follow one "
                "another": by_parts(seen, terms.flatten(1, 2).unflatten(1, (PER_GROUP, a_kv)).sum(1)),
                "it is averaged over the heads of q that share a head, and is the sum": by_parts(
                    seen, terms.mean(2)
                ),
                "it is of the first head of q that shares a head alone, and is the sum over all": by_parts(
                    seen, terms[:, :, 0]
                ),
                "it is of the last head of q that shares a head alone, and is the sum over all": by_parts(
                    seen, terms[:, :, -1]
                ),
            }
        trial.close(
            f"with {a_kv} heads of k and v for {PER_GROUP * a_kv} of q, {label}",
            found[i],
            by_parts(seen, right[i]),
            wrong,
            help="repeat_interleave a block of k and v over its heads where you compute with it; its "
            "gradient is the sum over the heads of q that share it.",
        )


def kv_of_heads_in_turn(num_ranks: int, num_kv: int) -> Tensor:
    """By head of q: the head of k and v that it meets, where both are dealt out to the ranks in turn."""
    if num_kv % num_ranks:
        return torch.arange(num_kv).repeat_interleave(PER_GROUP)
    heads = torch.arange(PER_GROUP * num_kv)
    rank, own = heads % num_ranks, heads // num_ranks
    return rank + num_ranks * (own // PER_GROUP)


def of_heads(seen: SimpleNamespace, i: int) -> Tensor:
    """The gradient of k (1) or v (2) by each head of q: (b, a_kv, heads of q that share it, s, d)."""
    inputs = [seen.q.double()]
    inputs += [x.double().repeat_interleave(PER_GROUP, dim=1).requires_grad_() for x in (seen.k, seen.v)]
    attention(*inputs, causal(seen.q.size(2)))[0].backward(seen.upstream.double())
    return inputs[i].grad.unflatten(1, (seen.k.size(1), -1))


def require_bytes(
    trial: Trial,
    seen: SimpleNamespace,
    sent: Callable[[Recording, str], float],
    most: Callable[[str], float],
    cause_in_backward: str = "",
) -> None:
    """What leaves a rank is of a_kv heads: `most` in blocks of k, in forward ("") and in backward."""
    for r, result in enumerate(seen.results):
        for after, where in (("", "forward"), (BACKWARD, "backward")):
            blocks = sent(result["recording"], after) / seen.block
            late = bool(after and cause_in_backward)
            trial.require(
                blocks <= most(after) + 0.1,
                f"the {where} sent {blocks:.3g} blocks of {seen.k.size(1)} heads where {most(after):.3g} are "
                f"enough: k and v have {seen.k.size(1)} heads, and q has {seen.q.size(1)}",
                help=ADD_UP
                if late
                else "Send k and v as they were given, and give each head of q its copy where you compute.",
                cause=cause_in_backward if late else "k and v repeated before they are sent?",
                rank=r,
            )


FOLDED_LATE = "k and v travel with their own heads, and in backward their gradients with the heads of q"
ADD_UP = "Add up the gradients of the heads of q that share a head of k and v before they travel, not after."


def folded_late(seen: SimpleNamespace, events: list[Event]) -> bool:
    """Whether a ring's backward sends k and v as they are, and gradients of as many heads as q has."""
    n, blocks = len(seen.results), [event.num_bytes / seen.block for event in events]
    if not blocks or blocks[0] > 2.1:  # k and v leave before any gradient, in one message or in two
        return False
    return any(abs(sum(blocks) - 2 * (n - 1) - 2 * PER_GROUP * hops) < 0.1 for hops in (n - 1, n))


def require_ring(trial: Trial, seen: SimpleNamespace) -> None:
    """All of it, for a ring."""
    n = trial.num_ranks
    require_values(trial, seen)

    def sends(recording: Recording, after: str) -> list[Event]:
        return blocks_on_the_wire(recording.select(None, after))

    late = all(folded_late(seen, sends(result["recording"], BACKWARD)) for result in seen.results)
    require_bytes(
        trial,
        seen,
        lambda recording, after: sum(event.num_bytes for event in sends(recording, after)),
        lambda after: 4 * n - 2 if after else 2 * (n - 1),
        FOLDED_LATE if late else "",
    )
