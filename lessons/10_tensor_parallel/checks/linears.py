"""Column- and row-parallel linear layers."""

import math
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import (
    BACKWARD,
    Trial,
    backward,
    check,
    each_rank,
    exercise,
    parts,
    stand_alone,
    storage_bytes,
)

from .functions import gather_costs
from .shared import SIZES, error_of, nothing_travels, one_all_reduce, own_part, refused, shape_of, undividable

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


def linear_probe(rank, kind: str, cases: list[dict]) -> dict:
    results = [one_linear(rank, getattr(rank.submission, kind), case) for case in cases]
    return {"cases": results}


def one_linear(rank, layer_class: type, case: dict) -> dict:
    out_features, in_features = case["weight"].shape
    linear = nn.Linear(in_features, out_features, bias=case["bias"] is not None, device=rank.device)
    linear.to(case["weight"].dtype)
    with torch.no_grad():
        linear.weight.copy_(case["weight"])
        if case["bias"] is not None:
            linear.bias.copy_(case["bias"])
    layer = layer_class.from_linear(linear, group=rank.group, **case["options"])
    held = {name: storage_bytes([p]) for name, p in layer.named_parameters()}
    x = case["x"].clone().requires_grad_()
    with rank.record() as recording:
        y = layer(x)
        recording.mark(BACKWARD)
        backward(y, case["upstream"])
    dense_changed = not torch.equal(linear.weight, case["weight"])
    backward(layer(x.detach()), case["upstream"])  # a second pass adds to what is there
    twice = {name: p.grad for name, p in layer.named_parameters()}
    return {
        "output": y,
        "gradient": x.grad,
        "weights": {name: p.detach() for name, p in layer.named_parameters()},
        "twice": twice,
        "held": held,
        "dense_changed": dense_changed,
        "recording": recording,
    }


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None, upstream: Tensor) -> SimpleNamespace:
    """Output and gradients in float64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    bias = None if bias is None else bias.double().requires_grad_()
    y = F.linear(x, weight, bias)
    y.backward(upstream.double())
    return SimpleNamespace(
        output=y.detach(),
        x=x.grad,
        weight=weight.grad,
        bias=None if bias is None else bias.grad,
        product=F.linear(x, weight).detach(),
    )


def observe_linear(kind: str):
    """Four cases by name; each says what every rank did, and what the dense layer does."""

    def observe(trial: Trial) -> dict[str, SimpleNamespace]:
        n = trial.num_ranks
        column = kind == "ColumnParallelLinear"
        other = {"gather_output": True} if column else {"input_is_parallel": False}
        plans = [
            ("plain", True, {}, (trial.integer(3, 6),)),
            ("3-D", True, {}, (trial.integer(2, 3), trial.integer(3, 5))),
            ("without bias", False, {}, (trial.integer(3, 6),)),
            ("other option", True, other, (trial.integer(2, 3), trial.integer(2, 4))),
        ]
        cases = [draw_linear(trial, column, *plan) for plan in plans]
        runs = [([case["ranks"][r] for case in cases],) for r in range(n)]
        results = trial.run(linear_probe, kind, per_rank=runs)
        seen = {}
        for number, case in enumerate(cases):
            mine = [result["cases"][number] for result in results]
            seen[case["name"]] = SimpleNamespace(results=mine, dense=case["dense"], **case["drawn"])
        return seen

    return observe


def draw_linear(trial: Trial, column: bool, name: str, has_bias: bool, options: dict, lead: tuple) -> dict:
    n = trial.num_ranks
    cut, free = n * trial.integer(2, 5), trial.integer(3, 11)
    in_features, out_features = (free, cut) if column else (cut, free)
    weight = trial.normal(out_features, in_features)
    bias = trial.normal(out_features) if has_bias else None
    x, upstream = trial.normal(*lead, in_features), trial.normal(*lead, out_features)
    whole_x = column or options
    whole_y = not column or options
    ranks = [
        {
            "weight": weight,
            "bias": bias,
            "options": options,
            "x": x if whole_x else own_part(x, -1, r, n).contiguous(),
            "upstream": upstream if whole_y else own_part(upstream, -1, r, n).contiguous(),
        }
        for r in range(n)
    ]
    drawn = {"weight": weight, "bias": bias, "x": x, "upstream": upstream}
    return {"name": name, "ranks": ranks, "drawn": drawn, "dense": dense_linear(x, weight, bias, upstream)}


LINEAR = {kind: observe_linear(kind) for kind in ("ColumnParallelLinear", "RowParallelLinear")}


def weight_alternatives(weight: Tensor, dim: int, n: int) -> dict[str, list[Tensor]]:
    """Ways to cut a weight (out, in) that are not the r-th contiguous slice along dim."""
    strided = [weight[r::n] if dim == 0 else weight[:, r::n] for r in range(n)]
    wrong_dim = [p for p in parts(weight, 1 - dim, n)] if weight.size(1 - dim) % n == 0 else []
    found = {
        f"every n-th {'row' if dim == 0 else 'column'}, where a contiguous slice belongs": strided,
        "the first slice on every rank": [parts(weight, dim, n)[0]] * n,
        "the slices in reverse order of ranks": parts(weight, dim, n)[::-1],
    }
    if wrong_dim:
        name = "input features (columns)" if dim == 0 else "output features (rows)"
        found[f"cut along the {name}, the wrong dimension"] = wrong_dim
    return found


def computes_a_share(trial: Trial, seen: SimpleNamespace, stretch: str, num_flops: float) -> None:
    """Matrix products on each rank cost a share of the dense ones."""
    for rank, recording in enumerate(each_rank(seen, "recording")):
        flops = recording.flops(after=stretch)
        trial.require(
            flops <= 1.05 * num_flops,
            f"the forward computed {flops:,} FLOPs on this rank, where 1/{trial.num_ranks} of the dense "
            f"layer's, {num_flops:,.0f}, is its share",
            help="Multiply with this rank's shard alone. Cutting a whole product afterwards is not parallel.",
            rank=rank,
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
    """The shards are tensors of their own, not views that keep the whole weight alive."""
    for seen in trial.once(LINEAR["ColumnParallelLinear"]).values():
        stand_alone(trial, seen.results)


@check("ColumnParallelLinear")
def output_is_the_dense_layers_slice(trial: Trial) -> None:
    """Rank r's output is the r-th slice of the dense layer's."""
    n = trial.num_ranks
    for name in ("plain", "3-D", "without bias"):
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
    seen = trial.once(LINEAR["ColumnParallelLinear"])["other option"]
    n = trial.num_ranks
    trial.close(
        "the output",
        each_rank(seen, "output"),
        seen.dense.output,
        alternatives={
            "this rank's slice: nothing was gathered": parts(seen.dense.output, -1, n),
            "without the bias": seen.dense.product,
        },
    )
    column_gradients(trial, seen)


@check("ColumnParallelLinear")
def input_gradient_is_whole(trial: Trial) -> None:
    """The gradient of x is the dense layer's: every rank's rows have had their say."""
    n = trial.num_ranks
    for name in ("plain", "3-D", "without bias"):
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


def column_gradients(trial: Trial, seen: SimpleNamespace) -> None:
    n = trial.num_ranks
    for name, whole in (("weight", seen.dense.weight), ("bias", seen.dense.bias)):
        if whole is None:
            continue
        own = parts(whole, 0, n)
        trial.close(
            f"the gradient of {name} after two passes",
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
    for name in ("plain", "3-D", "without bias"):
        column_gradients(trial, trial.once(LINEAR["ColumnParallelLinear"])[name])


@check("ColumnParallelLinear")
def column_sends_one_all_reduce_backward(trial: Trial) -> None:
    """The forward sends nothing (gather_output: one all-gather), the backward one all-reduce of x's size."""
    for name, seen in trial.once(LINEAR["ColumnParallelLinear"]).items():
        if name == "other option":
            gather_costs(trial, seen, "", seen.dense.output.numel() * 4)
        else:
            nothing_travels(trial, seen, "", "x is on every rank already, and the output stays cut.")
        help = "The backward sends the gradient of x, in copy_to_group, and no other: shards need none."
        one_all_reduce(trial, seen, BACKWARD, seen.x.numel() * 4, help)


@check("ColumnParallelLinear")
def column_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the dense layer's product."""
    for seen in trial.once(LINEAR["ColumnParallelLinear"]).values():
        rows = seen.x.numel() // seen.x.size(-1)
        computes_a_share(trial, seen, "", 2 * rows * seen.weight.numel() / trial.num_ranks)


def initial_probe(rank, kind: str, in_features: int, out_features: int, seed: int) -> dict:
    """A layer built directly on ranks that are seeded alike."""
    build = partial(getattr(rank.submission, kind), in_features, out_features, group=rank.group)
    rank.seed(seed)
    layer, bare = build(), build(bias=False)
    return {
        "weights": {name: p.detach() for name, p in layer.named_parameters()},
        "without_bias": sorted(name for name, _ in bare.named_parameters()),
        "held": {name: storage_bytes([p]) for name, p in layer.named_parameters()},
    }


def built_directly(trial: Trial, kind: str) -> None:
    n = trial.num_ranks
    cut, free = 12 * n, 24
    sizes = (free, cut) if kind == "ColumnParallelLinear" else (cut, free)
    results = trial.run(initial_probe, kind, *sizes, trial.seed())
    shape = (12, free) if kind == "ColumnParallelLinear" else (free, 12)
    bias_size = 12 if kind == "ColumnParallelLinear" else free
    typical = 1 / math.sqrt(sizes[0])
    for rank, result in enumerate(results):
        weight, bias = result["weights"].get("weight"), result["weights"].get("bias")
        trial.equal("the shape of weight", shape_of(weight), shape)
        trial.equal("the shape of bias", shape_of(bias), (bias_size,))
        trial.equal("the parameters without bias", list(result["without_bias"]), ["weight"])
        spread = weight.double().std().item()
        trial.require(
            0.05 * typical < spread < 3 * typical,
            f"the standard deviation of the initial weight is {spread:.3g}; with {sizes[0]} input features "
            f"something near {typical:.3g} (as nn.Linear) or 0.02 (as GPT-2) is expected",
            help="torch.empty holds whatever was there: draw the weight.",
            rank=rank,
        )
        trial.require(
            bias.double().abs().max().item() <= 2 * typical,
            "the initial bias is large: it was not set",
            help="Zero is the usual start.",
            rank=rank,
        )
    if kind == "RowParallelLinear":
        first = results[0]["weights"]["bias"]
        trial.close("the initial bias", [r["weights"]["bias"] for r in results], first)


@check("ColumnParallelLinear", world_sizes=(2, 1, 4), subgroup=False)
def column_starts_sensibly(trial: Trial) -> None:
    """Built directly it has its shard of random weights."""
    built_directly(trial, "ColumnParallelLinear")


def linear_refusal_probe(rank, kind: str, sizes: tuple) -> dict:
    return {"error": error_of(getattr(rank.submission, kind), *sizes, group=rank.group)}


@check("ColumnParallelLinear", world_sizes=(2, 4), subgroup=False)
def column_refuses_what_does_not_divide(trial: Trial) -> None:
    """out_features that do not divide by the ranks are a ValueError that names both numbers."""
    size = undividable(trial)
    seen = SimpleNamespace(results=trial.run(linear_refusal_probe, "ColumnParallelLinear", (4, size)))
    refused(trial, seen, size)


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
    """The shards are tensors of their own, not views that keep the whole weight alive."""
    for seen in trial.once(LINEAR["RowParallelLinear"]).values():
        stand_alone(trial, seen.results)


def row_output(trial: Trial, seen: SimpleNamespace, name: str) -> None:
    n = trial.num_ranks
    partial = [
        x.double() @ w.double().T for x, w in zip(parts(seen.x, -1, n), parts(seen.weight, 1, n), strict=True)
    ]
    alternatives = {"this rank's partial sum: nothing was summed over the ranks": partial}
    if seen.bias is not None:
        bias = seen.bias.double()
        alternatives |= {
            "the bias was added n times: once by each rank, before the sum": seen.dense.product + n * bias,
            "without the bias": seen.dense.product,
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
    for name in ("plain", "3-D", "without bias"):
        row_output(trial, trial.once(LINEAR["RowParallelLinear"])[name], name)


@check("RowParallelLinear")
def whole_input_is_cut(trial: Trial) -> None:
    """With input_is_parallel=False it takes the whole x, and x's gradient is whole again."""
    seen = trial.once(LINEAR["RowParallelLinear"])["other option"]
    n = trial.num_ranks
    row_output(trial, seen, "input_is_parallel=False")
    own = [
        torch.cat(
            [p if k == r else torch.zeros_like(p) for k, p in enumerate(parts(seen.dense.x, -1, n))], -1
        )
        for r in range(n)
    ]
    trial.close(
        "the gradient of x",
        each_rank(seen, "gradient"),
        seen.dense.x,
        alternatives={"zero outside this rank's slice: partial": own},
        help="scatter_to_group cuts x, and joins the gradients in backward.",
    )


@check("RowParallelLinear")
def input_gradient_is_this_ranks_slice(trial: Trial) -> None:
    """The gradient of this rank's slice of x is that slice of the dense layer's gradient."""
    n = trial.num_ranks
    for name in ("plain", "3-D", "without bias"):
        seen = trial.once(LINEAR["RowParallelLinear"])[name]
        own = parts(seen.dense.x, -1, n)
        trial.close(
            f"the gradient of x ({name})",
            each_rank(seen, "gradient"),
            own,
            alternatives={"n times too large: backward summed over the ranks": [n * g for g in own]},
        )


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
        if name == "other option":
            gather_costs(trial, seen, BACKWARD, seen.x.numel() * 4)
        else:
            nothing_travels(trial, seen, BACKWARD, "The gradient of the output is on every rank already.")


@check("RowParallelLinear")
def row_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the dense layer's product."""
    for seen in trial.once(LINEAR["RowParallelLinear"]).values():
        rows = seen.x.numel() // seen.x.size(-1)
        computes_a_share(trial, seen, "", 2 * rows * seen.weight.numel() / trial.num_ranks)


@check("RowParallelLinear", world_sizes=(2, 1, 4), subgroup=False)
def row_starts_sensibly(trial: Trial) -> None:
    """Built directly it has its shard of random weights, and the same bias on all ranks."""
    built_directly(trial, "RowParallelLinear")


@check("RowParallelLinear", world_sizes=(2, 4), subgroup=False)
def row_refuses_what_does_not_divide(trial: Trial) -> None:
    """in_features that do not divide by the ranks are a ValueError that names both numbers."""
    size = undividable(trial)
    seen = SimpleNamespace(results=trial.run(linear_refusal_probe, "RowParallelLinear", (size, 4)))
    refused(trial, seen, size)
