"""Row-parallel linear layers."""

from types import SimpleNamespace

import torch

from grader.checks import (
    BACKWARD,
    Trial,
    check,
    each_rank,
    exercise,
    parts,
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
from .shared import SIZES, gather_costs, one_all_reduce
from .starts import is_zero, starts_as_slices

exercise(
    "RowParallelLinear",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "x @ W.T is a sum over the input features. Each rank adds up its part of them: a partial sum of "
        "the full shape.",
        "What happens to a bias that every rank adds before the sum over the ranks?",
        "input_is_parallel=False: x arrives whole; one of your four functions cuts it.",
    ),
)


@check("RowParallelLinear")
def weight_is_this_ranks_columns(trial: Trial) -> None:
    """Rank r holds the r-th contiguous slice of the input features, and the whole bias."""
    n = trial.num_ranks
    for name, seen in trial.once(LINEAR["RowParallelLinear"]).items():
        trial.close(
            f"weight ({name})",
            each_rank(seen, "weights", "weight"),
            parts(seen.weight, 1, n),
            alternatives=weight_alternatives(seen.weight, 1, n),
        )
        if seen.bias is not None:
            trial.close(
                f"bias ({name})",
                each_rank(seen, "weights", "bias"),
                seen.bias,
                alternatives={
                    "bias/n: the sum comes out right, and its gradient n times too small": seen.bias / n,
                    "zero on all ranks but one": [seen.bias] + [torch.zeros_like(seen.bias)] * (n - 1),
                },
                help="Every rank holds the whole bias, and adds it after the sum.",
            )


@check("RowParallelLinear")
def row_shards_stand_alone(trial: Trial) -> None:
    """No slice is a view that keeps the whole weight alive; `from_linear` makes no bias where none was."""
    copies(trial, "RowParallelLinear")


@check("RowParallelLinear", world_sizes=(2,), subgroup=False)
def row_keeps_the_dtype(trial: Trial) -> None:
    """`from_linear` keeps the dense layer's dtype."""
    dtype_stays(trial, "RowParallelLinear")


def row_output(trial: Trial, seen: SimpleNamespace, name: str) -> None:
    n = trial.num_ranks
    partial = [
        x.double() @ w.double().T for x, w in zip(parts(seen.x, -1, n), parts(seen.weight, 1, n), strict=True)
    ]
    alternatives = {
        "this rank's partial sum: nothing was summed over the ranks": partial,
        "the mean of the ranks' partial results: their sum belongs there": seen.dense.output / n,
    }
    if seen.bias is not None:
        bias = seen.bias.double()
        alternatives |= {
            "the bias was added n times: once by each rank, before the sum": seen.dense.product + n * bias,
            "without the bias": seen.dense.product,
            "the mean of the ranks' partial products, and the bias: their sum belongs there": (
                seen.dense.product / n + bias
            ),
            "this rank's partial sum and the bias: nothing was summed over the ranks": [
                p + bias for p in partial
            ],
        }
    trial.close(
        f"the output ({name})",
        each_rank(seen, "output"),
        seen.dense.output,
        alternatives=alternatives,
        help="Sum the partial products over the group, then add the bias once.",
    )


@check("RowParallelLinear")
def output_is_the_dense_layers(trial: Trial) -> None:
    """The output is the dense layer's, whole, on every rank."""
    for name in ONE_WAY:
        row_output(trial, trial.once(LINEAR["RowParallelLinear"])[name], name)


@check("RowParallelLinear")
def whole_input_is_cut(trial: Trial) -> None:
    """With input_is_parallel=False it takes the whole x, and x's gradient is whole again."""
    n = trial.num_ranks
    for name in OTHER_WAY["RowParallelLinear"]:
        seen = trial.once(LINEAR["RowParallelLinear"])[name]
        row_output(trial, seen, name)
        own = [
            torch.cat(
                [p if k == r else torch.zeros_like(p) for k, p in enumerate(parts(seen.dense.x, -1, n))], -1
            )
            for r in range(n)
        ]
        trial.close(
            f"the gradient of x ({name})",
            each_rank(seen, "gradient"),
            seen.dense.x,
            alternatives={"zero outside this rank's slice: partial": own},
            help="scatter_to_group cuts x, and joins the gradients in backward.",
        )


@check("RowParallelLinear")
def input_gradient_is_this_ranks_slice(trial: Trial) -> None:
    """The gradient of this rank's slice of x is that slice of the dense layer's gradient."""
    n = trial.num_ranks
    for name in ONE_WAY:
        seen = trial.once(LINEAR["RowParallelLinear"])[name]
        own = parts(seen.dense.x, -1, n)
        trial.close(
            f"the gradient of x ({name})",
            each_rank(seen, "gradient"),
            own,
            alternatives={"n times too large: backward summed over the ranks": [n * g for g in own]},
        )
        require_where_frozen(trial, seen, name)


@check("RowParallelLinear")
def row_gradients_are_the_dense_ones(trial: Trial) -> None:
    """The gradient of weight is a slice of the dense layer's, that of the bias is whole on every rank."""
    n = trial.num_ranks
    for name, seen in trial.once(LINEAR["RowParallelLinear"]).items():
        own = parts(seen.dense.weight, 1, n)
        trial.close(
            f"the gradient of weight after two passes ({name})",
            each_rank(seen, "twice", "weight"),
            [2 * g for g in own],
            alternatives={"n times too large: backward summed over the ranks": [2 * n * g for g in own]},
        )
        if seen.bias is not None:
            trial.close(
                f"the gradient of bias after two passes ({name})",
                each_rank(seen, "twice", "bias"),
                2 * seen.dense.bias,
                alternatives={
                    "n times too large: backward summed it over the ranks": 2 * n * seen.dense.bias,
                    "n times too small: each rank added a part of the bias": 2 * seen.dense.bias / n,
                    "zero on all ranks but the first: rank 0 alone adds the bias": [2 * seen.dense.bias]
                    + [torch.zeros_like(seen.dense.bias)] * (n - 1),
                },
                help="The bias is added after the sum, by every rank: its gradient needs no communication.",
            )


@check("RowParallelLinear")
def row_sends_one_all_reduce_forward(trial: Trial) -> None:
    """The forward sends one all-reduce of the output's size, the backward nothing (whole x: all-gather)."""
    for name, seen in trial.once(LINEAR["RowParallelLinear"]).items():
        help = "One all-reduce of the partial products; the weight's shards never travel."
        one_all_reduce(trial, seen, "", seen.dense.output.numel() * 4, help)
        if name in OTHER_WAY["RowParallelLinear"]:
            help = "scatter_to_group's backward joins the slices' gradients; copy_to_group's sums whole ones."
            gather_costs(trial, seen, BACKWARD, seen.x.numel() * 4, help)
        else:
            nothing_travels(trial, seen, BACKWARD, "The gradient of the output is on every rank already.")


@check("RowParallelLinear")
def row_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the dense layer's product."""
    for seen in trial.once(LINEAR["RowParallelLinear"]).values():
        rows = seen.x.numel() // seen.x.size(-1)
        computes_a_share(trial, seen, 2 * rows * seen.weight.numel() / trial.num_ranks)


@check("RowParallelLinear", world_sizes=(2, 1, 4), subgroup=False)
def row_starts_as_slices(trial: Trial) -> None:
    """Built directly, the ranks' weights are the slices of one random layer: no two ranks have the same."""
    results = starts_as_slices(trial, "RowParallelLinear", (24 * trial.num_ranks, 48), (48, 24))
    is_zero(trial, "the initial bias", [result["first"].get("bias") for result in results], 48)


@check("RowParallelLinear", world_sizes=(2, 4), subgroup=False)
def row_refuses_what_does_not_divide(trial: Trial) -> None:
    """in_features that are not divisible by the ranks are a ValueError."""
    size = undividable(trial)
    refused(trial, size, linear_refusal_probe, "RowParallelLinear", (size, 4))


@check("RowParallelLinear")
def row_is_the_same_in_evaluation(trial: Trial) -> None:
    """In eval mode and under torch.no_grad() outputs and gradients are those of training."""
    same_in_evaluation(trial, "RowParallelLinear")


@check("RowParallelLinear", world_sizes=(2,), subgroup=False)
def row_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    layer_keeps_its_results(trial, "RowParallelLinear")
