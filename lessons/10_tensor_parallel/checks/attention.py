"""The attention, by heads."""

import copy
import math
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
    head_orders,
    heads_of,
    own_part,
    shape_of,
    small_config,
)
from lessons_shared.cut_gpt_checks import given_one_is_changed
from lessons_shared.refusals import refused, undividable
from lessons_shared.wire import computes_a_share
from nanogpt.model import CausalSelfAttention, GPTConfig

from .branches import (
    BRANCHES,
    branch_communication,
    branch_dropout,
    branch_in_evaluation,
    branch_output,
    branch_refusal_probe,
)
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


def wrong_rows(trial: Trial, seen: SimpleNamespace) -> None:
    """End the check if the rows of c_attn are not those of a rank's heads: say which they are."""
    n, whole = trial.num_ranks, seen.weights["c_attn.weight"]
    held = each_rank(seen, "weights", "c_attn.weight")
    right = [row_order(own, heads_of(whole, rank, n)) is not None for rank, own in enumerate(held)]
    rank = next((r for r in range(n) if not right[r]), None)
    if rank is None:
        wrong_bias(trial, seen)
    size, heads = seen.config["n_embd"] // seen.config["n_head"], seen.config["n_head"]
    own = range(heads // n * rank, heads // n * (rank + 1))
    trial.wrong(
        f"c_attn has {heads_told(held[rank], whole, size)} (bias apart); needed are the heads "
        f"{own[0]} to {own[-1]} of each",
        cause=next((cause for cause, cut in other_cuts(whole, size, n).items() if are_rows(held, cut)), ""),
        help="Cut q, k and v each by heads, and join this rank's three parts.",
        rank=rank,
    )


def wrong_bias(trial: Trial, seen: SimpleNamespace) -> NoReturn:
    """End the check: the rows of c_attn.weight are right, and its bias is not; say what it is."""
    orders = head_orders(seen.weights, each_rank(seen, "weights"))
    rank = orders.index(None)
    whole, held = seen.weights["c_attn.bias"], each_rank(seen, "weights", "c_attn.bias")
    wrong = [bias for bias, order in zip(held, orders, strict=True) if order is None]
    cause = help = ""
    if not any(bias.any() for bias in wrong):
        cause = "it is as a layer has it that was just built: the dense layer's was not taken over"
        help = "Copy the dense layer's bias, cut as the rows of the weight are."
    elif all(torch.isin(bias, whole).all() for bias in wrong):
        cause = "it was cut in another order"
        help = "Reorder the bias as you reorder the rows, then cut both."
    what = "is zero" if not held[rank].any() else "does not"
    message = f"c_attn.weight holds the right rows, and c_attn.bias {what}"
    trial.wrong(message, cause=cause, help=help, rank=rank)


def other_cuts(whole: Tensor, size: int, n: int) -> dict[str, list[Tensor]]:
    """Ways to cut the rows q|k|v that are not by contiguous heads: by cause, each rank's rows."""
    by_head = [part.unflatten(0, (-1, size)) for part in whole.chunk(3)]
    return {
        "c_attn was cut contiguously, as one matrix": parts(whole, 0, n),
        "every n-th head, where contiguous ones belong": [
            torch.cat([part[r::n].flatten(0, 1) for part in by_head]) for r in range(n)
        ],
        "the first rank's heads on every rank": [heads_of(whole, 0, n)] * n,
        "every n-th row, and so a part of every head": [whole[r::n] for r in range(n)],
    }


def are_rows(held: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether every rank has these rows, in whichever order."""
    return all(row_order(own, rows) is not None for own, rows in zip(held, expected, strict=True))


def heads_told(own: Tensor, whole: Tensor, size: int) -> str:
    """Which heads' rows these are, such as `of q the heads [0, 1], of k [0], of v none`."""
    origin = torch.cdist(own.double(), whole.double()).argmin(dim=1)
    if not torch.allclose(own, whole[origin], atol=1e-6):
        return "rows that are not in the dense c_attn"
    per_part = len(whole) // 3
    told = []
    for number, name in enumerate("qkv"):
        rows = origin[origin // per_part == number] % per_part
        heads = sorted(set((rows // size).tolist()))
        is_whole = len(rows) == size * len(heads)
        told.append(f"of {name} {'' if is_whole else 'parts of '}{heads if heads else 'none'}")
    return f"the heads {', '.join(told)}"


@check("tensor_parallel_attention")
def heads_are_cut_by_rank(trial: Trial) -> None:
    """Rank r holds the r-th heads of queries, keys and values, and those columns of c_proj."""
    n = trial.num_ranks
    for seen in trial.once(BRANCHES["tensor_parallel_attention"]).values():
        h = seen.x.size(-1)
        given_one_is_changed(trial, seen)
        for weights in each_rank(seen, "weights"):
            trial.equal("the shape of c_attn.weight", shape_of(weights.get("c_attn.weight")), (3 * h // n, h))
            if "c_attn.bias" in seen.weights:
                trial.equal("the shape of c_attn.bias", shape_of(weights.get("c_attn.bias")), (3 * h // n,))
        if None in head_orders(seen.weights, each_rank(seen, "weights")):
            wrong_rows(trial, seen)
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
        } | (scaled_otherwise(attention, seen.x, n) | exchanged(attention, seen.x))

    branch_output(trial, "tensor_parallel_attention", partial)


def exchanged(attention: CausalSelfAttention, x: Tensor) -> dict[str, Tensor]:
    """The dense output, if two of queries, keys and values are taken for each other."""
    found = {}
    for told, order in (
        ("queries and keys", (1, 0, 2)),
        ("keys and values", (0, 2, 1)),
        ("queries and values", (2, 1, 0)),
    ):
        layer = copy.deepcopy(attention)
        with torch.no_grad():
            for parameter in layer.c_attn.parameters():
                parameter.copy_(parameter.unflatten(0, (3, -1))[list(order)].flatten(0, 1))
            found[f"{told} have changed places in c_attn"] = layer(x.double())
    return found


def scaled_otherwise(attention: CausalSelfAttention, x: Tensor, n: int) -> dict[str, Tensor]:
    """The dense output, if the scores are divided by something else than the root of the head size."""
    h, size = x.size(-1), attention.head_size
    found = {}
    for told, divisor in (
        ("not divided at all", 1.0),
        ("divided by the head size, not by its root", size),
        ("divided by the root of the width h, not of the head size", math.sqrt(h)),
        ("divided by the root of h/n, not of the head size", math.sqrt(h / n)),
        ("divided by the root of a head size of h·n/a", math.sqrt(size * n)),
        ("divided by the root of a head size of h/(a·n)", math.sqrt(size / n)),
    ):
        layer = copy.deepcopy(attention)
        with torch.no_grad():
            for parameter in layer.c_attn.parameters():
                parameter[:h] *= math.sqrt(size) / divisor
            found[f"the scores are {told}"] = layer(x.double())
    return found


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
    """The dropout after the sum drops the same elements on every rank; probabilities are dropped, too."""
    for rank, result in enumerate(branch_dropout(trial, "tensor_parallel_attention")):
        trial.require(
            not torch.equal(*result["before the sum"]),
            "without the dropout after the sum two calls in training mode give the same: the attention "
            "probabilities are not dropped any more",
            help="Leave attention.core as it is. Each rank drops in its own heads, and need not drop alike.",
            rank=rank,
            cause="the dropout of attention.core was switched off",
        )


@check("tensor_parallel_attention", world_sizes=(2, 4, 3), subgroup=False)
def attention_refuses_heads_that_do_not_divide(trial: Trial) -> None:
    """Heads that are not divisible by the ranks are a ValueError; nothing was changed."""
    heads = undividable(trial)
    config = small_config(trial, n_head=heads, n_embd=heads * 12, dropout=0.1)  # the width divides
    refused(trial, heads, branch_refusal_probe, "tensor_parallel_attention", config, heads=True)


@check("tensor_parallel_attention")
def attention_is_the_same_in_evaluation(trial: Trial) -> None:
    """In eval mode and under torch.no_grad() outputs and gradients are those of training."""
    branch_in_evaluation(trial, "tensor_parallel_attention")
