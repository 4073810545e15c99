"""What column- and row-parallel layers have in common: the cases, the run, the start."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import (
    BACKWARD,
    CheckEnded,
    Trial,
    backward,
    each_rank,
    parts,
    stand_alone,
    storage_bytes,
)
from lessons_shared.alone import NO_BIAS, tell_cases
from lessons_shared.cut_gpt import local, own_part
from lessons_shared.evaluation import evaluates_alike, in_evaluation
from lessons_shared.refusals import refusal_of
from lessons_shared.results import memory_of, overwritten, results_stay


def linear_probe(rank, kind: str, cases: list[dict]) -> list[dict]:
    return [one_linear(rank, getattr(rank.submission, kind), case) for case in cases]


def one_linear(rank, layer_class: type, case: dict) -> dict:
    out_features, in_features = case["weight"].shape
    has_bias = case["bias"] is not None
    linear = nn.Linear(in_features, out_features, bias=has_bias, device=rank.device)
    linear.to(case["weight"].dtype)
    fill(linear, {"weight": case["weight"], "bias": case["bias"]})
    if case["own"]:
        layer = layer_class(in_features, out_features, has_bias, group=rank.group, **case["options"])
        layer.to(rank.device)
        fill(layer, case["own"])
    else:
        layer = layer_class.from_linear(linear, group=rank.group, **case["options"])
    held = {name: storage_bytes([p]) for name, p in layer.named_parameters()}
    x = case["x"].clone().requires_grad_()
    with rank.record() as recording:
        y = layer(x)
        recording.mark(BACKWARD)
        backward(y, case["upstream"])
    dense_changed = not torch.equal(linear.weight, case["weight"])
    dense = {memory_of(p) for p in linear.parameters()}
    shared = [name for name, p in layer.named_parameters() if memory_of(local(p.detach())) in dense]
    dense_shapes = {id(p): case[name].shape for name, p in linear.named_parameters()}
    taken = [name for name, p in layer.named_parameters() if dense_shapes.get(id(p), p.shape) != p.shape]
    backward(layer(x.detach()), case["upstream"])  # a second pass adds to what is there
    twice = {name: None if p.grad is None else p.grad.clone() for name, p in layer.named_parameters()}
    return {
        "output": y,
        "gradient": x.grad,
        "weights": {name: p.detach() for name, p in layer.named_parameters()},
        "twice": twice,
        "held": held,
        "dense_changed": dense_changed,
        "shared": shared,
        "taken": taken,
        "evaluation": in_evaluation(layer, x, case["upstream"]),
        "frozen": where_frozen(layer, case),
        "overwritten": overwritten(layer, case["x"], upstream=case["upstream"]),
        "recording": recording,
    }


def fill(layer: nn.Module, values: dict[str, Tensor | None]) -> None:
    """On a rank: write these values into a layer's parameters, as a checkpoint would; what differs stays."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            value = values.get(name)
            if value is not None and value.shape == parameter.shape:
                parameter.copy_(value)


def where_frozen(layer: nn.Module, case: dict) -> Tensor | None:
    """On a rank: the gradient of x where weight and bias need none, as below an adapter."""
    layer.requires_grad_(False)
    x = case["x"].clone().requires_grad_()
    backward(layer(x), case["upstream"])
    return x.grad


def require_where_frozen(trial: Trial, seen: SimpleNamespace, name: str) -> None:
    """The gradient of x is that with trained weights."""
    trained = each_rank(seen, "gradient")
    trial.close(
        f"the gradient of x where weight and bias are frozen ({name})",
        each_rank(seen, "frozen"),
        trained,
        help="x needs its gradient, and the sum over the ranks in it, whether the weight is trained or not.",
    )


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


DIRECT = "the layer was built directly, not by from_linear"
COPIED_WITHOUT_BIAS = "from_linear is given a layer without bias"
DIMS = {2: "x has two dimensions, (tokens, features)", 3: "x has three dimensions, (b, s, features)"}
STEPS = {
    **dict.fromkeys(
        DIMS.values(),
        "A layer takes any number of dimensions before the last: F.linear does, and a backward of your own "
        "may flatten them, as in gradient.flatten(0, -2).T @ x.flatten(0, -2).",
    ),
    **NO_BIAS,
    COPIED_WITHOUT_BIAS: "linear.bias is None then: hand over whether there is one, and copy only that.",
    DIRECT: "What forward and backward need, the constructor sets, whoever calls it.",
}


def kinds_of(case: dict) -> list[str]:
    """What is special about a case, as a rank gets it."""
    made = [DIRECT] if case["own"] else [] if case["bias"] is not None else [COPIED_WITHOUT_BIAS]
    return [DIMS[case["x"].dim()], *made, *(NO_BIAS if case["bias"] is None else [])]


ONE_WAY = ("plain", "3-D", "without bias", "built directly", "built directly, without bias")
OTHER_WAY = {
    "ColumnParallelLinear": ("gather_output=True", "built directly, gather_output=True"),
    "RowParallelLinear": ("input_is_parallel=False", "built directly, input_is_parallel=False"),
}
"""The cases in which the output stays cut, or x comes cut, and those with the other option."""


def observe_linear(kind: str):
    """Seven cases by name; each says what every rank did, and what the dense layer does.

    Three are of layers that are built directly, into which the slices are loaded then.
    """

    def observe(trial: Trial) -> dict[str, SimpleNamespace]:
        n = trial.num_ranks
        column = kind == "ColumnParallelLinear"
        other = {"gather_output": True} if column else {"input_is_parallel": False}
        other_way, built = OTHER_WAY[kind]
        plans = [
            ("plain", True, {}, (trial.integer(3, 6),)),
            ("3-D", True, {}, (trial.integer(2, 3), trial.integer(3, 5))),
            ("without bias", False, {}, (trial.integer(3, 6),)),
            (other_way, True, other, (trial.integer(2, 3), trial.integer(2, 4))),
            ("built directly", True, {}, (trial.integer(3, 6),)),
            ("built directly, without bias", False, {}, (trial.integer(3, 6),)),
            (built, True, other, (trial.integer(2, 3), trial.integer(2, 4))),
        ]
        cases = [draw_linear(trial, column, *plan) for plan in plans]

        def run(some: list[dict]) -> list[list[dict]]:
            by_rank = [([case["ranks"][r] for case in some],) for r in range(n)]
            return trial.run(linear_probe, kind, per_rank=by_rank)

        try:
            results = run(cases)
        except CheckEnded as end:
            kinds = [kinds_of(case["ranks"][0]) for case in cases]
            tell_cases(end, lambda i: run([cases[i]]), kinds, STEPS)
            raise
        seen = {}
        for number, case in enumerate(cases):
            mine = [result[number] for result in results]
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
            "own": {
                "weight": own_part(weight, 0 if column else 1, r, n),
                "bias": own_part(bias, 0, r, n) if column and has_bias else bias,
            }
            if name.startswith("built directly")
            else {},
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


def linear_refusal_probe(rank, kind: str, sizes: tuple) -> dict:
    return refusal_of(getattr(rank.submission, kind), *sizes, group=rank.group)


def copies(trial: Trial, kind: str) -> None:
    """What a layer has stands alone; what `from_linear` makes has a bias only if the dense layer has one."""
    for name, seen in trial.once(LINEAR[kind]).items():
        if name.startswith("built directly"):
            stand_alone(trial, seen.results, "built directly, ")
            continue
        expected = {"weight"} if seen.bias is None else {"weight", "bias"}
        stand_alone(trial, seen.results)
        for rank, result in enumerate(seen.results):
            names = set(result["weights"])
            trial.require(
                names <= expected,
                f"the dense layer has no bias, and this one has {', '.join(sorted(names - expected))}",
                help="from_linear hands over whether there is a bias: linear.bias is None or not.",
                rank=rank,
            )
            trial.require(
                not result["taken"],
                f"{' and '.join(result['taken'])}: the dense layer's own Parameter, with another .data. The "
                "dense layer has become the part",
                help="Make a new one from a copy, nn.Parameter(part.detach().clone()), and leave the dense "
                "layer as it is.",
                rank=rank,
            )
            trial.require(
                not result["shared"],
                f"{', '.join(result['shared'])} lies in the dense layer's own memory",
                help="Copy what this rank keeps, the bias too: .detach().clone().",
                rank=rank,
            )
            trial.require(not result["dense_changed"], "from_linear changed the dense layer", rank=rank)


def same_in_evaluation(trial: Trial, kind: str) -> None:
    """In eval mode and under no_grad a layer does what it does in training."""
    for name, seen in trial.once(LINEAR[kind]).items():
        evaluates_alike(trial, seen.results, name)


def layer_keeps_its_results(trial: Trial, kind: str) -> None:
    """A second call of a layer leaves the first one's results alone."""
    for seen in trial.once(LINEAR[kind]).values():
        results_stay(trial, each_rank(seen, "overwritten"))


def dtype_probe(rank, kind: str, size: int) -> dict:
    """What `from_linear` makes of a layer in bfloat16."""
    linear = nn.Linear(size, size, dtype=torch.bfloat16, device=rank.device)
    layer = getattr(rank.submission, kind).from_linear(linear, group=rank.group)
    made = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    if all(tensor.dtype == torch.bfloat16 for tensor in made.values()):
        x = torch.ones(2, layer.weight.size(1), dtype=torch.bfloat16, device=rank.device)
        made["its output"] = layer(x)
    return made


def dtype_stays(trial: Trial, kind: str) -> None:
    """A layer in bfloat16 is cut into layers in bfloat16."""
    for rank, made in enumerate(trial.run(dtype_probe, kind, 4 * trial.num_ranks)):
        for name, tensor in made.items():
            if not isinstance(tensor, Tensor):
                continue  # the output is looked at elsewhere
            trial.require(
                tensor.dtype == torch.bfloat16,
                f"{name} is {tensor.dtype}, where the dense layer's is torch.bfloat16",
                help="Compute in the dtype of x and of the weights."
                if name == "its output"
                else "Cut the dense layer's own tensors: then the shards have their dtype and device.",
                rank=rank,
            )
