"""The attention, by heads."""

import copy
from types import SimpleNamespace
from typing import NoReturn

import torch
from torch import Tensor, nn

from grader.checks import (
    Trial,
    check,
    each_rank,
    exercise,
    parts,
    row_order,
    stand_alone,
)
from lessons_shared.cut_gpt import (
    fused_of,
    heads_of,
    own_part,
    shape_of,
    small_config,
)
from lessons_shared.refusals import refused, undividable
from lessons_shared.wire import computes_a_share
from nanogpt.model import CausalSelfAttention, GPTConfig

from .branches import BRANCHES, branch_communication, branch_dropout, branch_output, branch_refusal_probe
from .shared import SIZES

exercise(
    "tensor_parallel_attention",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Print c_attn.weight.shape. Its 3h rows are all the queries, then all the keys, then all the values; "
        "within each, head by head.",
        "What would rank 0 of 3 get if you gave ColumnParallelLinear.from_linear the weight as it is?",
        "Reorder the rows first, so that the r-th contiguous slice holds the r-th heads of q, of k and of v: "
        "unflatten, transpose, flatten. The bias has the same order as the rows.",
    ),
)


def wrong_rows(trial: Trial, whole: dict, held: dict, rank: int) -> NoReturn:
    """End the check: say how the rows of this rank's c_attn are wrong."""
    n = trial.num_ranks
    weight = whole["c_attn.weight"]
    if row_order(held["c_attn.weight"], heads_of(weight, rank, n)) is not None:
        message = "c_attn.weight holds the right rows, and c_attn.bias does not: it was cut in another order"
        trial.wrong(message, help="Reorder the bias as you reorder the rows, then cut both.", rank=rank)
    contiguous = row_order(held["c_attn.weight"], own_part(weight, 0, rank, n)) is not None
    trial.wrong(
        "c_attn was cut contiguously, as one matrix: rank 0 got queries where it needs queries, "
        "keys and values of its heads"
        if contiguous
        else "the rows of c_attn are not this rank's heads of q, of k and of v (bias included)",
        help="Cut q, k and v each by heads, and join this rank's three parts.",
        rank=rank,
    )


@check("tensor_parallel_attention")
def heads_are_cut_by_rank(trial: Trial) -> None:
    """Rank r holds the r-th heads of queries, keys and values, and those columns of c_proj."""
    n = trial.num_ranks
    for seen in trial.once(BRANCHES["tensor_parallel_attention"]).values():
        fused = fused_of(seen.weights)
        for rank, weights in enumerate(each_rank(seen, "weights")):
            h = seen.x.size(-1)
            trial.equal("the shape of c_attn.weight", shape_of(weights.get("c_attn.weight")), (3 * h // n, h))
            if "c_attn.bias" in seen.weights:
                trial.equal("the shape of c_attn.bias", shape_of(weights.get("c_attn.bias")), (3 * h // n,))
            own = fused_of(weights)
            if row_order(own, heads_of(fused, rank, n)) is None:
                wrong_rows(trial, seen.weights, weights, rank)
        columns = parts(seen.weights["c_proj.weight"], 1, n)
        trial.close("c_proj.weight", each_rank(seen, "weights", "c_proj.weight"), columns)
        stand_alone(trial, seen.results)


@check("tensor_parallel_attention")
def attention_output_is_the_dense_one(trial: Trial) -> None:
    """The output is the dense attention's on every rank."""
    n = trial.num_ranks

    def by_rank(attention: nn.Module, seen: SimpleNamespace, cut) -> list[Tensor]:
        """Each rank's partial output when its c_attn is what `cut` makes of the fused tensor."""
        outputs = []
        for rank in range(n):
            layer = copy.deepcopy(attention)
            for name in ("weight", "bias"):
                fused = getattr(attention.c_attn, name)
                if fused is not None:
                    setattr(layer.c_attn, name, nn.Parameter(cut(fused.detach(), rank)))
            layer.c_proj.weight = nn.Parameter(own_part(layer.c_proj.weight.detach(), 1, rank, n))
            layer.c_proj.bias = None
            outputs.append(layer(seen.x.double()).detach())
        return outputs

    def partial(seen: SimpleNamespace) -> dict:
        attention = CausalSelfAttention(GPTConfig(**seen.config))
        attention.load_state_dict(seen.weights)
        attention = attention.double()
        bias = seen.weights.get("c_proj.bias", torch.zeros(1)).double()
        mixed = sum(by_rank(attention, seen, lambda t, rank: own_part(t, 0, rank, n))) + bias
        own = [y + bias for y in by_rank(attention, seen, lambda t, rank: heads_of(t, rank, n))]
        return {
            "queries, keys and values mixed up: the fused c_attn was cut contiguously as one matrix": mixed,
            "this rank's heads alone: nothing was summed over the ranks": own,
        }

    branch_output(trial, "tensor_parallel_attention", partial)


@check("tensor_parallel_attention")
def attention_input_gradient_is_whole(trial: Trial) -> None:
    """The gradient of x is the dense attention's on every rank."""
    for kind, seen in trial.once(BRANCHES["tensor_parallel_attention"]).items():
        trial.close(f"the gradient of x ({kind})", each_rank(seen, "gradient"), seen.dense.x)


@check("tensor_parallel_attention")
def attention_shard_gradients_are_the_dense_ones(trial: Trial) -> None:
    """The gradient of every shard is that part of the dense gradient."""
    n = trial.num_ranks
    for seen in trial.once(BRANCHES["tensor_parallel_attention"]).values():
        fused, gradient = fused_of(seen.weights), fused_of(seen.dense.gradients)
        actual, expected = [], []
        for rank, (weights, gradients) in enumerate(
            zip(each_rank(seen, "weights"), each_rank(seen, "gradients"), strict=True)
        ):
            order = row_order(fused_of(weights), heads_of(fused, rank, n))
            if order is None:
                trial.wrong(
                    "c_attn does not hold this rank's heads, so its gradient cannot be compared", rank=rank
                )
            trial.require("c_attn.weight" in gradients, "c_attn.weight has no gradient", rank=rank)
            actual.append(fused_of(gradients))
            expected.append(heads_of(gradient, rank, n)[order])
        trial.close("the gradient of c_attn (bias as last column)", actual, expected)
        columns = parts(seen.dense.gradients["c_proj.weight"], 1, n)
        trial.close("the gradient of c_proj.weight", each_rank(seen, "gradients", "c_proj.weight"), columns)
        if "c_proj.bias" in seen.weights:
            whole = seen.dense.gradients["c_proj.bias"]
            trial.close("the gradient of c_proj.bias", each_rank(seen, "gradients", "c_proj.bias"), whole)


@check("tensor_parallel_attention")
def attention_sends_one_all_reduce_each_way(trial: Trial) -> None:
    """One all-reduce of b·s·h in the forward, one in the backward, and no other."""
    branch_communication(trial, "tensor_parallel_attention")


@check("tensor_parallel_attention")
def attention_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the projections and of the heads."""
    for seen in trial.once(BRANCHES["tensor_parallel_attention"]).values():
        b, s, h = seen.x.shape
        dense = 2 * b * s * 4 * h * h + 4 * b * s * s * h
        computes_a_share(trial, seen, dense / trial.num_ranks)


@check("tensor_parallel_attention", world_sizes=(2, 1, 4), subgroup=False)
def attention_drops_alike_on_every_rank(trial: Trial) -> None:
    """The dropout after the sum drops the same elements on every rank, however the ranks are seeded."""
    branch_dropout(trial, "tensor_parallel_attention")


@check("tensor_parallel_attention", world_sizes=(2, 4), subgroup=False)
def attention_refuses_heads_that_do_not_divide(trial: Trial) -> None:
    """Heads that do not divide by the ranks are a ValueError that names both numbers; nothing was changed."""
    heads = undividable(trial)
    config = small_config(trial, n_head=heads, n_embd=heads * 12)  # the width divides; the heads do not
    results = trial.run(branch_refusal_probe, "tensor_parallel_attention", config)
    refused(trial, results, heads)
