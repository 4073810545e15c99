"""Column-parallel linear layers."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from grader.checks import (
    BACKWARD,
    Recording,
    Trial,
    check,
    each_rank,
    exercise,
    parts,
    told,
)
from lessons_shared.refusals import refused, undividable
from lessons_shared.wire import computes_a_share, nothing_travels

from .linears import (
    LINEAR,
    ONE_WAY,
    OTHER_WAY,
    copies,
    dtype_stays,
    layer_keeps_its_results,
    linear_refusal_probe,
    require_where_frozen,
    same_in_evaluation,
    weight_alternatives,
)
from .shared import SIZES, gather_costs, one_all_reduce, used_twice, uses_add_up
from .starts import is_zero, starts_as_slices

exercise(
    "ColumnParallelLinear",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "nn.Linear keeps its weight as (out, in): output features are its rows. The bias goes with them.",
        "Every rank uses all of x: which of your four functions completes x's gradient?",
        "A slice of a Parameter is a view that keeps the whole matrix alive: clone it.",
    ),
)


@check("ColumnParallelLinear")
def weight_is_this_ranks_rows(trial: Trial) -> None:
    """Rank r holds the r-th contiguous slice of the output features, of the weight and of the bias."""
    n = trial.num_ranks
    for name, seen in trial.once(LINEAR["ColumnParallelLinear"]).items():
        trial.close(
            f"weight ({name})",
            each_rank(seen, "weights", "weight"),
            parts(seen.weight, 0, n),
            alternatives=weight_alternatives(seen.weight, 0, n),
        )
        if seen.bias is not None:
            trial.close(
                f"bias ({name})",
                each_rank(seen, "weights", "bias"),
                parts(seen.bias, 0, n),
            )


@check("ColumnParallelLinear")
def column_shards_stand_alone(trial: Trial) -> None:
    """No slice is a view that keeps the whole weight alive; `from_linear` makes no bias where none was."""
    copies(trial, "ColumnParallelLinear")


@check("ColumnParallelLinear", world_sizes=(2,), subgroup=False)
def column_keeps_the_dtype(trial: Trial) -> None:
    """`from_linear` keeps the dense layer's dtype."""
    dtype_stays(trial, "ColumnParallelLinear")


@check("ColumnParallelLinear")
def output_is_the_dense_layers_slice(trial: Trial) -> None:
    """Rank r's output is the r-th slice of the dense layer's."""
    n = trial.num_ranks
    for name in ONE_WAY:
        seen = trial.once(LINEAR["ColumnParallelLinear"])[name]
        trial.close(
            f"the output ({name})",
            each_rank(seen, "output"),
            parts(seen.dense.output, -1, n),
            alternatives={
                "without the bias": parts(seen.dense.product, -1, n),
                "the whole output: it was gathered": [seen.dense.output] * n,
            },
        )


@check("ColumnParallelLinear")
def gathered_output_is_whole(trial: Trial) -> None:
    """With gather_output=True every rank gets the whole output, and the gradients are still right."""
    n = trial.num_ranks
    for name in OTHER_WAY["ColumnParallelLinear"]:
        seen = trial.once(LINEAR["ColumnParallelLinear"])[name]
        trial.close(
            f"the output ({name})",
            each_rank(seen, "output"),
            seen.dense.output,
            alternatives={
                "this rank's slice: nothing was gathered": parts(seen.dense.output, -1, n),
                "without the bias": seen.dense.product,
            },
        )
        column_gradients(trial, seen, name)


@check("ColumnParallelLinear")
def input_gradient_is_whole(trial: Trial) -> None:
    """The gradient of x is the dense layer's: every rank's rows have had their say."""
    n = trial.num_ranks
    for name in ONE_WAY:
        seen = trial.once(LINEAR["ColumnParallelLinear"])[name]
        partial = [
            u.double() @ w.double()
            for u, w in zip(parts(seen.upstream, -1, n), parts(seen.weight, 0, n), strict=True)
        ]
        trial.close(
            f"the gradient of x ({name})",
            each_rank(seen, "gradient"),
            seen.dense.x,
            alternatives={"partial: only this rank's rows have contributed": partial},
            help="x enters sharded computation here: that is what copy_to_group is for.",
        )
        require_where_frozen(trial, seen, name)


def shared_use_probe(rank, weight: Tensor, x: Tensor, upstream: Tensor, beside: Tensor) -> dict:
    linear = nn.Linear(*reversed(weight.shape), bias=False, device=rank.device)
    with torch.no_grad():
        linear.weight.copy_(weight)
    layer = rank.submission.ColumnParallelLinear.from_linear(linear, group=rank.group)
    return {"gradient": used_twice(layer, x, upstream, beside)}


@check("ColumnParallelLinear", world_sizes=(2, 4), subgroup=False)
def only_its_own_use_of_x_is_summed(trial: Trial) -> None:
    """What else x is used for is not summed over the ranks."""
    n, width = trial.num_ranks, trial.integer(5, 9)
    weight, x, beside = trial.normal(3 * n, width), trial.normal(4, width), trial.normal(4, width)
    upstream = trial.normal(4, 3 * n)
    runs = [(weight, x, part, beside) for part in parts(upstream, -1, n)]
    results = trial.run(shared_use_probe, per_rank=runs)
    uses_add_up(trial, results, upstream.double() @ weight.double(), beside)


def column_gradients(trial: Trial, seen: SimpleNamespace, case: str) -> None:
    n = trial.num_ranks
    for name, whole in (("weight", seen.dense.weight), ("bias", seen.dense.bias)):
        if whole is None:
            continue
        own = parts(whole, 0, n)
        trial.close(
            f"the gradient of {name} after two passes ({case})",
            each_rank(seen, "twice", name),
            [2 * g for g in own],
            alternatives={
                "summed over the ranks: n times too large": [2 * n * g for g in own],
                "that of one pass: the second was not added": own,
            },
        )


@check("ColumnParallelLinear")
def shard_gradients_are_the_dense_ones(trial: Trial) -> None:
    """The gradients of weight and bias are slices of the dense layer's, and add up over two passes."""
    for name in ONE_WAY:
        column_gradients(trial, trial.once(LINEAR["ColumnParallelLinear"])[name], name)


@check("ColumnParallelLinear")
def column_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the dense layer's product."""
    for seen in trial.once(LINEAR["ColumnParallelLinear"]).values():
        rows = seen.x.numel() // seen.x.size(-1)
        computes_a_share(trial, seen, 2 * rows * seen.weight.numel() / trial.num_ranks, partial(joined, seen))


def joined(seen: SimpleNamespace, recording: Recording) -> str:
    """Whether the forward has gathered the weight, in words; else ""."""
    sizes = (seen.weight.numel(), seen.weight.numel() // len(seen.results))
    gathered = [event.num_elements for event in recording.select("all_gather", "")]
    if not set(sizes) & set(gathered):
        return ""
    return "the ranks' slices of the weight were gathered, and not what they make of x"


@check("ColumnParallelLinear")
def column_sends_one_all_reduce_backward(trial: Trial) -> None:
    """The forward sends nothing (gather_output: one all-gather), the backward one all-reduce of x's size."""
    for name, seen in trial.once(LINEAR["ColumnParallelLinear"]).items():
        if name in OTHER_WAY["ColumnParallelLinear"]:
            gather_costs(trial, seen, "", seen.dense.output.numel() * 4)
            for rank, recording in enumerate(each_rank(seen, "recording")):
                gathers = recording.select("all_gather", "")
                trial.require(
                    len(gathers) <= 1,
                    f"the forward has {len(gathers)} all-gathers: {told(gathers)}",
                    help="Add this rank's part of the bias first, then gather the output, in one all-gather.",
                    rank=rank,
                )
        else:
            nothing_travels(trial, seen, "", "x is on every rank already, and the output stays cut.")
        help = "The backward sends the gradient of x, in copy_to_group, and no other: shards need none."
        one_all_reduce(trial, seen, BACKWARD, seen.x.numel() * 4, help)


@check("ColumnParallelLinear", world_sizes=(2, 1, 4), subgroup=False)
def column_starts_as_slices(trial: Trial) -> None:
    """Built directly, the ranks' weights are the slices of one random layer: no two ranks have the same."""
    n = trial.num_ranks
    results = starts_as_slices(trial, "ColumnParallelLinear", (48, 24 * n), (24, 48))
    is_zero(trial, "the initial bias", [result["first"].get("bias") for result in results], 24)


@check("ColumnParallelLinear", world_sizes=(2, 4), subgroup=False)
def column_refuses_what_does_not_divide(trial: Trial) -> None:
    """out_features that are not divisible by the ranks are a ValueError."""
    size = undividable(trial)
    refused(trial, size, linear_refusal_probe, "ColumnParallelLinear", (4, size))


@check("ColumnParallelLinear")
def column_is_the_same_in_evaluation(trial: Trial) -> None:
    """In eval mode and under torch.no_grad() outputs and gradients are those of training."""
    same_in_evaluation(trial, "ColumnParallelLinear")


@check("ColumnParallelLinear", world_sizes=(2,), subgroup=False)
def column_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    layer_keeps_its_results(trial, "ColumnParallelLinear")
