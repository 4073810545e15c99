"""Grouped-query attention: fewer key heads than query heads, and copies of them where ranks are many."""

import copy
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import (
    BACKWARD,
    Fault,
    Trial,
    backward,
    check,
    drawn_alike,
    each_rank,
    exercise,
    parts,
    row_order,
    stand_alone,
    told,
    weights_of,
)
from lessons_shared.cut_gpt import describe, fused_of, gradients_of, own_part, shape_of
from lessons_shared.cut_gpt_checks import given_one_is_changed
from lessons_shared.evaluation import evaluates_alike, in_evaluation, later_is_right, twice_as_long
from lessons_shared.passes import (
    BOTH,
    CLEARED,
    HALF,
    after_clearing,
    require_after_clearing,
    sums_of_two_passes,
)
from lessons_shared.refusals import refusal_of
from lessons_shared.wire import computes_a_share, wire_bytes
from nanogpt.grouped import GroupedQueryAttention

from .branches import dense_branch
from .shared import PADDING, SIZES, one_all_reduce

NAME = "tensor_parallel_grouped_attention"
HEADS = 12
KV_HEADS = {1: (4,), 2: (4, 2, 1), 3: (3, 1), 4: (4, 2, 1)}
"""Number of ranks → key and value heads to try: as many as ranks or more, and fewer."""

exercise(
    "tensor_parallel_grouped_attention",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Write down, for 4 ranks, 12 query heads and 2 key heads: which query heads has rank 2, and which "
        "key head do they read? Then the same for 2 ranks and 4 key heads. One formula gives both.",
        "As in tensor_parallel_attention: build a c_attn whose rows are rank 0's heads, then rank 1's, and "
        "so on; a key head that two ranks need is in it twice. ColumnParallelLinear.from_linear cuts it.",
        "Copies of a key head see other queries, so each finds a part of its gradient. A hook on the weight, "
        "parameter.register_hook, may sum these rows, over the ranks with the same head and no others. "
        "Without a new group: zeros for every key head, your part in its place, one all-reduce, and take "
        "your place out again. (dist.new_group is for all ranks of the world, also for those outside the "
        "group, unless it is called with use_local_synchronization=True.)",
    ),
)


def grouped_probe(rank, cases: list) -> list[dict]:
    return [one_grouped(rank, *case) for case in cases]


def one_grouped(
    rank, shape: tuple, weights: dict[str, Tensor], x: Tensor, upstream: Tensor
) -> dict:  # on every rank
    given = GroupedQueryAttention(*shape)
    given.load_state_dict(weights)
    attention = getattr(rank.submission, NAME)(given.to(rank.device), rank.group)
    x = x.clone().requires_grad_()
    with rank.record() as recording:
        y = forward(attention, x, shape)
        recording.mark(BACKWARD)
        backward(y, upstream)
    held = describe(attention)
    gradient = None if x.grad is None else x.grad.clone()
    backward(attention(x), HALF * upstream)
    twice = gradients_of(attention)
    return {
        "output": y,
        "gradient": gradient,
        "recording": recording,
        "given_back": attention is given,
        "twice": twice,
        **after_clearing(attention, lambda: backward(attention(x), upstream)),
        **held,
        "evaluation": in_evaluation(attention, x, upstream),
        "longer": twice_as_long(attention, x),
    }


def forward(attention: GroupedQueryAttention, x: Tensor, shape: tuple) -> Tensor:
    """On a rank: the output; an error is told what it met."""
    try:
        return attention(x)
    except Exception as error:
        rows = len(attention.c_attn.weight) // attention.head_size
        error.add_note(
            f"the attention had {heads_told(shape[2])}; now num_heads={attention.num_heads}, "
            f"num_kv_heads={attention.num_kv_heads}, and c_attn.weight has the rows of {rows} heads"
        )
        raise


def heads_told(num_kv_heads: int) -> str:
    """Such as "12 query heads and 1 key head"."""
    return f"{HEADS} query heads and {num_kv_heads} key head{'s' * (num_kv_heads > 1)}"


def observe(trial: Trial) -> list[SimpleNamespace]:
    """A case for each number of key heads; the last one without biases."""
    numbers = KV_HEADS[trial.num_ranks]
    cases = [grouped_case(trial, kv, bias=i + 1 < len(numbers)) for i, kv in enumerate(numbers)]
    given = [(case.shape, case.weights, case.x, case.upstream) for case in cases]
    results = trial.run(grouped_probe, given)
    for number, case in enumerate(cases):
        case.results = [result[number] for result in results]
    return cases


def grouped_case(trial: Trial, num_kv_heads: int, bias: bool) -> SimpleNamespace:
    size = trial.choice([3, 5])
    shape = (HEADS * size, HEADS, num_kv_heads, bias)
    attention = drawn_alike(GroupedQueryAttention(*shape), trial)
    sequence = trial.integer(4, 7)
    x, upstream = (trial.normal(2, sequence, shape[0]) for _ in range(2))
    return SimpleNamespace(
        shape=shape,
        size=size,
        kv_heads=num_kv_heads,
        copies=max(1, trial.num_ranks // num_kv_heads),
        told=heads_told(num_kv_heads),
        attention=attention,
        weights=weights_of(attention),
        x=x,
        upstream=upstream,
        dense=dense_branch(attention, x, upstream),
    )


def rows_of(seen: SimpleNamespace, fused: Tensor, rank: int, n: int) -> Tensor:
    """A rank's rows of a tensor whose rows are all queries, keys and values."""
    first = rank * seen.kv_heads // n
    return heads_at(seen, fused, own_part(torch.arange(HEADS), 0, rank, n), kv_range(seen, first, n))


def kv_range(seen: SimpleNamespace, first: int, n: int) -> Tensor:
    """As many key heads as a rank needs, from `first` on, round the end."""
    return (first + torch.arange(max(1, seen.kv_heads // n))) % seen.kv_heads


def heads_at(seen: SimpleNamespace, fused: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The rows of these query heads, and of these key and value heads."""
    heads = fused.unflatten(0, (-1, seen.size))
    wanted = torch.cat([queries, HEADS + keys, HEADS + seen.kv_heads + keys])
    return heads[wanted].flatten(0, 1)


@check("tensor_parallel_grouped_attention")
def key_heads_are_where_their_queries_are(trial: Trial) -> None:
    """Rank r holds its query heads, the key and value heads that these read, and its columns of c_proj."""
    n = trial.num_ranks
    for seen in trial.once(observe):
        given_one_is_changed(trial, seen)
        fused = fused_of(seen.weights)
        expected = [rows_of(seen, fused, rank, n) for rank in range(n)]
        for rank, weights in enumerate(each_rank(seen, "weights")):
            shape = (len(expected[rank]), seen.shape[0])
            trial.require(
                shape_of(weights.get("c_attn.weight")) == shape,
                f"with {seen.told}, c_attn.weight is {shape_of(weights.get('c_attn.weight'))} on this rank, "
                f"where {shape} belongs: {HEADS // n} query heads of {seen.size} rows, and "
                f"{max(1, seen.kv_heads // n)} of keys and of values",
                help="max(1, a_kv // n) key heads and as many value heads are on a rank.",
                rank=rank,
            )
            if row_order(fused_of(weights), expected[rank]) is None:
                wrong_heads(trial, seen, rank)
        columns = parts(seen.weights["c_proj.weight"], 1, n)
        trial.close("c_proj.weight", each_rank(seen, "weights", "c_proj.weight"), columns)
        stand_alone(trial, seen.results)


def wrong_heads(trial: Trial, seen: SimpleNamespace, rank: int) -> None:
    """End the check: say which rows are there instead."""
    n, whole, d = trial.num_ranks, seen.weights["c_attn.weight"], seen.size
    own = seen.results[rank]["weights"]["c_attn.weight"]
    origin = torch.cdist(own.double(), whole.double()).argmin(dim=1)
    message = f"with {seen.told}, c_attn has rows that the dense one has not"
    if torch.allclose(own, whole[origin], atol=1e-6):
        kinds = torch.arange(HEADS + 2 * seen.kv_heads).split([HEADS, seen.kv_heads, seen.kv_heads])
        there = {name: origin[(origin // d >= k[0]) & (origin // d <= k[-1])] // d - k[0] for name, k in
                 zip(("q", "k", "v"), kinds, strict=True)}  # fmt: skip
        listed = ", ".join(f"of {name} {sorted(set(heads.tolist()))}" for name, heads in there.items())
        queries = own_part(torch.arange(HEADS), 0, rank, n).tolist()
        keys = kv_range(seen, rank * seen.kv_heads // n, n).tolist()
        message = (
            f"with {seen.told}, c_attn has the heads {listed}; needed are of q {queries}, of k and v {keys}"
        )
        if row_order(own, rows_of(seen, whole, rank, n)) is not None:
            message = f"with {seen.told}, c_attn.weight holds the right rows, and its bias does not"
    trial.wrong(
        message,
        help=f"Query head i reads key head i // {HEADS // seen.kv_heads}: go from a rank's first query head "
        "to the key head that it reads.",
        rank=rank,
    )


@check("tensor_parallel_grouped_attention")
def grouped_output_is_the_dense_one(trial: Trial) -> None:
    """The output is the dense attention's on every rank."""
    for seen in trial.once(observe):
        bias = seen.weights.get("c_proj.bias")
        added = {} if bias is None else {
            "the bias of c_proj was added n times": seen.dense.output + (trial.num_ranks - 1) * bias
        }  # fmt: skip
        trial.close(
            f"the output ({seen.told})", each_rank(seen, "output"), seen.dense.output, alternatives=added
        )
        dense = twice_as_long(copy.deepcopy(seen.attention).double(), seen.x.double())
        later_is_right(trial, f"the output ({seen.told})", each_rank(seen, "longer"), dense)


@check("tensor_parallel_grouped_attention")
def grouped_input_gradient_is_whole(trial: Trial) -> None:
    """The gradient of x is the dense attention's on every rank."""
    for seen in trial.once(observe):
        by_rank = [pulled_by(seen, rank, trial.num_ranks) for rank in range(trial.num_ranks)]
        trial.close(
            f"the gradient of x ({seen.told})",
            each_rank(seen, "gradient"),
            seen.dense.x,
            alternatives={"what this rank's heads found alone: nothing was summed": [p.x for p in by_rank]},
            help="Whole x goes into cut work. copy_to_group sums what all ranks' heads found, once.",
        )


def pulled_by(seen: SimpleNamespace, rank: int, n: int) -> SimpleNamespace:
    """The dense backward of one rank's query heads alone: of all others nothing arrives."""
    attention = copy.deepcopy(seen.attention)
    mask = own_part(torch.arange(seen.shape[0]), 0, rank, n)
    with torch.no_grad():
        kept = attention.c_proj.weight[:, mask].clone()
        attention.c_proj.weight.zero_()[:, mask] = kept
    return dense_branch(attention, seen.x, seen.upstream)


@check("tensor_parallel_grouped_attention")
def copies_get_the_whole_gradient(trial: Trial) -> None:
    """Every shard has its part of the dense gradient, copies all of theirs; passes add up until zero_grad."""
    n = trial.num_ranks
    for seen in trial.once(observe):
        orders = [
            row_order(fused_of(weights), rows_of(seen, fused_of(seen.weights), rank, n))
            for rank, weights in enumerate(each_rank(seen, "weights"))
        ]
        if None in orders:
            trial.wrong("c_attn does not hold this rank's heads, so its gradient cannot be compared")
        gradients = [fused_of(g) for g in each_rank(seen, "gradients")]
        if any(not g.numel() for g in gradients):
            trial.wrong("c_attn.weight or its bias has no gradient")
        num_queries = HEADS // n * seen.size
        whole = fused_of(seen.dense.gradients)
        back = [torch.tensor(order).argsort() for order in orders]
        own = [g[at] for g, at in zip(gradients, back, strict=True)]
        expected = [rows_of(seen, whole, rank, n) for rank in range(n)]
        trial.close(
            f"the gradient of the queries' rows of c_attn ({seen.told})",
            [g[:num_queries] for g in own],
            [g[:num_queries] for g in expected],
            help="No other rank has these query heads: their gradient is complete as it is.",
        )
        trial.close(
            f"the gradient of the keys' and values' rows of c_attn ({seen.told})",
            [g[num_queries:] for g in own],
            [g[num_queries:] for g in expected],
            alternatives=lambda seen=seen: other_sums(seen, n),
            help="A copy needs the sum over all ranks with the same key head, and nothing of other heads.",
        )
        twice = [fused_of(g)[at] for g, at in zip(each_rank(seen, "twice"), back, strict=True)]
        trial.close(
            f"the gradient of the queries' rows of c_attn after two passes ({seen.told})",
            [g[:num_queries] for g in twice],
            [BOTH * g[:num_queries] for g in expected],
        )
        trial.close(
            f"the gradient of the keys' and values' rows of c_attn after two passes ({seen.told})",
            [g[num_queries:] for g in twice],
            [BOTH * g[num_queries:] for g in expected],
            alternatives=sums_of_two_passes([g[num_queries:] for g in expected], seen.copies),
        )
        require_after_clearing(
            trial,
            "the gradient of the keys' and values' rows of c_attn",
            seen.told,
            {
                which: [
                    fused_of(g)[at][num_queries:] for g, at in zip(each_rank(seen, which), back, strict=True)
                ]
                for which in CLEARED
            },
            [g[num_queries:] for g in expected],
            seen.copies,
        )
        columns = parts(seen.dense.gradients["c_proj.weight"], 1, n)
        trial.close("the gradient of c_proj.weight", each_rank(seen, "gradients", "c_proj.weight"), columns)


def other_sums(seen: SimpleNamespace, n: int) -> dict[str, list[Tensor] | Fault]:
    """Gradients of each rank's keys and values, if they were summed over other ranks than the copies.

    The bias is their last column, and may be alone in that, or the only one that is right.
    """
    pulled = [fused_of(pulled_by(seen, rank, n).gradients) for rank in range(n)]
    alone = [rows_of(seen, pulled[rank], rank, n)[HEADS // n * seen.size :] for rank in range(n)]
    whole = [rows_of(seen, sum(pulled), rank, n)[HEADS // n * seen.size :] for rank in range(n)]
    found = {
        "only what this rank's queries found: the copies drift apart": alone,
        "averaged over the copies, where the dense gradient is a sum": [g / seen.copies for g in whole],
        "summed over all ranks: other ranks' key heads are in it": [sum(alone)] * n,
    }
    if seen.copies == 1:
        return {}
    apart = n // seen.copies
    if apart > 1:
        found[f"summed over ranks that are {apart} apart: copies of a key head lie on neighbours"] = [
            sum(alone[rank % apart :: apart]) for rank in range(n)
        ]
    known: dict[str, list[Tensor] | Fault] = dict(found)
    right = [rows_of(seen, fused_of(seen.dense.gradients), r, n)[HEADS // n * seen.size :] for r in range(n)]
    for summed, other, pairs in (
        ("values'", "keys'", zip(alone, right, strict=True)),
        ("keys'", "values'", zip(right, alone, strict=True)),
    ):
        known[f"the {summed} rows are summed over the copies, and the {other} are what this rank found"] = (
            Fault(
                [torch.cat([keys[: len(keys) // 2], values[len(keys) // 2 :]]) for keys, values in pairs],
                "A copy is a key head and a value head, 2 · head_size rows of c_attn: sum both.",
            )
        )
    if "c_attn.bias" in seen.weights:
        for told_sum, wrong in found.items():
            pairs = list(zip(wrong, right, strict=True))
            known[f"of c_attn.bias alone it is {told_sum}"] = Fault(
                [torch.cat([g[:, :-1], w[:, -1:]], 1) for w, g in pairs],
                "c_attn.weight's copies are right. c_attn.bias has rows of these heads: do the same there.",
            )
            known[f"of c_attn.weight alone it is {told_sum}"] = Fault(
                [torch.cat([w[:, :-1], g[:, -1:]], 1) for w, g in pairs],
                "c_attn.bias's copies are right. c_attn.weight has rows of these heads: do the same there.",
            )
    return known


@check("tensor_parallel_grouped_attention")
def grouped_attention_sends_little(trial: Trial) -> None:
    """One all-reduce of b·s·h forward; one backward and, where there are copies, their gradients."""
    n = trial.num_ranks
    for seen in trial.once(observe):
        num_bytes = seen.x.numel() * 4
        one_all_reduce(trial, seen, "", num_bytes, "c_attn stays cut, c_proj takes it cut and sums once.")
        if seen.copies == 1:
            one_all_reduce(
                trial, seen, BACKWARD, num_bytes, "There are no copies: only x's gradient is summed."
            )
            continue
        own = rows_of(seen, fused_of(seen.weights), 0, n)[HEADS // n * seen.size :].numel() * 4
        allowed = 2 * (n - 1) / n * num_bytes + (n - 1) * own + 2 * PADDING * n
        for rank, recording in enumerate(each_rank(seen, "recording")):
            events = recording.select(None, BACKWARD)
            sent = wire_bytes(events, n)
            trial.require(
                sent <= allowed,
                f"with {seen.told}, the backward sent {told(events)}: about {sent:,.0f} bytes from here, "
                f"where x's gradient and the copies' need {allowed:,.0f} at most",
                help="x's gradient is summed once, for queries, keys and values together. Of c_attn's "
                "gradient only the copied rows travel.",
                rank=rank,
            )


@check("tensor_parallel_grouped_attention")
def grouped_attention_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the projections and of the heads; copies come on top."""
    n = trial.num_ranks
    for seen in trial.once(observe):
        b, s, h = seen.x.shape
        rows = len(rows_of(seen, fused_of(seen.weights), 0, n))
        computes_a_share(trial, seen, 2 * b * s * h * (rows + h / n) + 4 * b * s * s * h / n)


def grouped_refusal_probe(rank, shapes: list[tuple]) -> list[dict]:
    function = getattr(rank.submission, NAME)
    return [refusal_of(function, GroupedQueryAttention(*shape), rank.group) for shape in shapes]


@check("tensor_parallel_grouped_attention", world_sizes=(2, 4), subgroup=False)
def heads_that_can_not_be_shared_out_are_refused(trial: Trial) -> None:
    """Heads that do not divide are a ValueError; nothing was changed."""
    n = trial.num_ranks
    cases = {  # query heads, key heads
        (n + 1, n + 1): f"{n + 1} query heads are not divisible by {n} ranks",
        (n + 1, 1): f"{n + 1} query heads are not divisible by {n} ranks",
        (n // 2, n // 2): f"with fewer query heads ({n // 2}) than ranks ({n}) some ranks have none",
        (12, 3): f"of 3 key heads and {n} ranks neither divides the other",
    }
    # Widths divide by 2 and by 4: the heads alone tell.
    results = trial.run(grouped_refusal_probe, [(12 * heads, heads, kv) for heads, kv in cases])
    for rank, result in enumerate(results):
        for refusal, why in zip(result, cases.values(), strict=True):
            trial.require(
                refusal["error"] is not None,
                f"{why}, and no error was raised",
                help="Ask before you cut: shard_size for the queries, an if for the keys.",
                rank=rank,
            )
            kind, message = refusal["error"]
            trial.require(
                kind == "ValueError", f"{why}: expected a ValueError, got {kind}: {message}", rank=rank
            )
            trial.require(
                not refusal["changed"],
                f"the ValueError came too late: already changed was {', '.join(refusal['changed'][:3])}",
                help="Ask both before you replace anything.",
                rank=rank,
            )


@check("tensor_parallel_grouped_attention")
def grouped_is_the_same_in_evaluation(trial: Trial) -> None:
    """In eval mode and under torch.no_grad() outputs and gradients are those of training."""
    for seen in trial.once(observe):
        evaluates_alike(trial, seen.results, seen.told)
