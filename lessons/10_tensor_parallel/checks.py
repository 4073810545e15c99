"""What lesson 10 is held to: values against the dense layer in float64, and the way they were reached."""

import copy
import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import Trial, check, exercise
from grader.measure import storage_bytes
from nanogpt.model import GPT, MLP, CausalSelfAttention, Dropout, GPTConfig

BACKWARD = "backward begins"
SIZES = (2, 1, 4, 3)
SLACK = 16
"""Bytes a rank by which traffic may exceed what is expected: chunks are rounded up."""


# Shared by the exercises


def drawn_alike(module: nn.Module, trial: Trial) -> nn.Module:
    """Give every parameter numbers of the judge's, biases and norms too: zeros and ones hide mistakes."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = trial.normal(*parameter.shape)
            scale = 1 / math.sqrt(parameter.size(-1)) if parameter.dim() > 1 else 0.5
            is_gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(drawn * scale + (1.0 if is_gain else 0.0))
    return module


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.float() for name, parameter in module.named_parameters()}


def own_part(tensor: Tensor, dim: int, rank: int, num_ranks: int) -> Tensor:
    return tensor.chunk(num_ranks, dim)[rank]


def parts(tensor: Tensor, dim: int, num_ranks: int) -> list[Tensor]:
    return list(tensor.chunk(num_ranks, dim))


def describe(module: nn.Module) -> dict:
    """On a rank: what a module holds. Gradients that are missing stay missing."""
    named = dict(module.named_parameters())
    return {
        "weights": {name: p.detach() for name, p in named.items()},
        "gradients": {name: p.grad.clone() for name, p in named.items() if p.grad is not None},
        "held": {name: storage_bytes([p]) for name, p in named.items()},
    }


def backward(y: Tensor, upstream: Tensor) -> None:
    """On a rank: backward, unless the output is no good already; the checks of output and gradient tell."""
    if isinstance(y, Tensor) and y.requires_grad and y.shape == upstream.shape:
        y.backward(upstream)


def each_rank(seen: SimpleNamespace, *path: str) -> list:
    """One part of every rank's result; None where a rank does not have it."""
    values = list(seen.results)
    for key in path:
        values = [None if value is None else value.get(key) for value in values]
    return values


def shape_of(tensor: Tensor | None) -> tuple | None:
    return None if tensor is None else tuple(tensor.shape)


def wire_bytes(events: list, num_ranks: int) -> float:
    """Bytes that one rank sends, with rings: what `all_reduce` costs, whichever calls it was made of."""
    share = (num_ranks - 1) / num_ranks
    factor = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}
    return sum(event.num_bytes * factor.get(event.kind, 0 if event.kind == "recv" else 1) for event in events)


def told(events: list) -> str:
    return ", ".join(event.describe() for event in events[:6]) or "nothing"


def one_all_reduce(trial: Trial, seen: SimpleNamespace, stretch: str, num_bytes: int, help: str) -> None:
    """One all-reduce of so many bytes, or as many bytes by reduce-scatter and all-gather, or by messages."""
    where = "the backward" if stretch else "the forward"
    for rank, recording in enumerate(each_rank(seen, "recording")):
        events = recording.select(None, stretch)
        reduces = [event for event in events if event.kind == "all_reduce"]
        if trial.num_ranks == 1 and not events:
            continue
        if not events:
            trial.wrong(f"{where} communicated nothing, where one all-reduce belongs", help=help, rank=rank)
        if len(reduces) > 1 or (reduces and len(events) > 1):
            trial.wrong(
                f"{where} communicated more than one all-reduce: {told(events)}", help=help, rank=rank
            )
        allowed = 2 * (trial.num_ranks - 1) / trial.num_ranks * num_bytes + SLACK * trial.num_ranks
        sent = wire_bytes(events, trial.num_ranks)
        if sent > allowed or (reduces and reduces[0].num_bytes != num_bytes):
            trial.wrong(
                f"{where} sent {told(events)}: about {sent:,.0f} bytes from this rank, "
                f"where one all-reduce of {num_bytes:,} bytes sends {allowed - SLACK * trial.num_ranks:,.0f}",
                help=help,
                rank=rank,
            )


def nothing_travels(trial: Trial, seen: SimpleNamespace, stretch: str, help: str) -> None:
    where = "the backward" if stretch else "the forward"
    for rank, recording in enumerate(each_rank(seen, "recording")):
        events = recording.select(None, stretch)
        if trial.num_ranks > 1 and events:
            trial.wrong(
                f"{where} communicated: {told(events)}; nothing has to travel there", help=help, rank=rank
            )


def refused(trial: Trial, seen: SimpleNamespace, size: int) -> None:
    """A ValueError came that names both numbers; seen.results hold the type's name and the message."""
    for rank, result in enumerate(seen.results):
        if trial.num_ranks == 1:
            return
        if result["error"] is None:
            trial.wrong(
                f"{size} does not divide by {trial.num_ranks} ranks, and no error was raised",
                help="Use shard_size: it raises the ValueError for you.",
                rank=rank,
            )
        kind, message = result["error"]
        if kind != "ValueError":
            trial.wrong(f"expected a ValueError, got {kind}: {message}", help="Use shard_size.", rank=rank)
        for number in (size, trial.num_ranks):
            if str(number) not in message:
                trial.wrong(
                    f"the ValueError does not name the number {number}: {message!r}",
                    help="Say which number does not divide by which: shard_size does.",
                    rank=rank,
                )


def error_of(function, *arguments, **options) -> tuple[str, str] | None:
    """On a rank: the type and text of what a call raises. A stub's NotImplementedError passes through."""
    try:
        function(*arguments, **options)
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def undividable(trial: Trial, least: int = 5) -> int:
    """A number that does not divide by the group's size (any number where one rank divides all)."""
    n = trial.num_ranks
    return trial.integer(least // n + 1, least // n + 4) * n + (trial.integer(1, n - 1) if n > 1 else 0)


# The four functions between replicated and cut

exercise(
    "copy_to_group",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "The forward has nothing to do. What does each rank know, in backward, of how x moved the loss?",
        "Write a torch.autograd.Function. Keep the group on ctx in forward; backward returns one value for "
        "each argument of forward, so None for the group.",
        "dist.all_reduce writes into the tensor it is given, and wants it contiguous. Whose tensor is the "
        "gradient that comes in?",
    ),
)
exercise(
    "reduce_from_group",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "The mirror image of copy_to_group: the sum is in the forward.",
        "y = x_0 + x_1 + ...: what is the derivative of y by x_0? What follows is replicated, so every rank "
        "already has the whole gradient of y.",
    ),
)
exercise(
    "gather_from_group",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "dist.all_gather fills a list of n tensors, in rank order; join them along the last dimension.",
        "Backward: y is x_0 | x_1 | ..., side by side. Which part of y's gradient belongs to this rank's x?",
    ),
)
exercise(
    "scatter_to_group",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Everyone has x already, so the forward is a slice, and sends nothing.",
        "Backward: each rank knows the gradient of its own slice only, and all ranks need all of it.",
    ),
)


def pair_probe(rank, name: str, cases: list) -> list[dict]:
    return [one_pair(rank, name, *case) for case in cases]


def one_pair(rank, name: str, x: Tensor, upstream: Tensor, scrambled: bool) -> dict:
    function = getattr(rank.submission, name)
    if scrambled:  # the same numbers, stored in another order
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
        upstream = upstream.transpose(0, -1).contiguous().transpose(0, -1)
    leaf = x.clone().requires_grad_()
    handed = leaf * 1.0
    before, given = handed.detach().clone(), upstream.clone()
    with rank.record() as recording:
        y = function(handed, rank.group)
        after_forward = handed.detach().clone()
        recording.mark(BACKWARD)
        backward(y, upstream)
    return {
        "output": y,
        "gradient": leaf.grad,
        "x_changed": not torch.equal(before, after_forward),
        "upstream_changed": not torch.equal(given, upstream),
        "recording": recording,
    }


def pair_inputs(trial: Trial, name: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """x and the upstream gradient, by rank, each replicated or not as the function's contract has it."""
    n = trial.num_ranks
    width = trial.integer(5, 9)
    shape = trial.choice([(trial.integer(12, 15),), (trial.integer(3, 4), trial.integer(4, 5))])
    large, small = (*shape, n * width), (*shape, width)

    def alike(sizes: tuple) -> list[Tensor]:
        return [trial.normal(*sizes).to(dtype)] * n

    def different(sizes: tuple) -> list[Tensor]:
        return [trial.normal(*sizes).to(dtype) for _ in range(n)]

    return {
        "copy_to_group": lambda: (alike(small), different(small)),
        "reduce_from_group": lambda: (different(small), alike(small)),
        "gather_from_group": lambda: (different(small), alike(large)),
        "scatter_to_group": lambda: (alike(large), different(small)),
    }[name]()


def pair_expected(name: str, xs: list[Tensor], upstreams: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients by rank."""
    n = len(xs)
    if name == "copy_to_group":
        return xs, [sum(u.double() for u in upstreams)] * n
    if name == "reduce_from_group":
        return [sum(x.double() for x in xs)] * n, upstreams
    if name == "gather_from_group":
        return [torch.cat(xs, -1)] * n, parts(upstreams[0], -1, n)
    return parts(xs[0], -1, n), [torch.cat(upstreams, -1)] * n


PLAIN = ((torch.float32, False),)
OTHERS = ((torch.float64, True), (torch.bfloat16, False))
"""(dtype, stored transposed)"""


def observe_pair(name: str, kinds: tuple = PLAIN):
    def observe(trial: Trial) -> list[SimpleNamespace]:
        inputs = [pair_inputs(trial, name, dtype) for dtype, _ in kinds]
        runs = [
            (
                name,
                [(xs[r], upstreams[r], kind[1]) for (xs, upstreams), kind in zip(inputs, kinds, strict=True)],
            )
            for r in range(trial.num_ranks)
        ]
        results = trial.run(pair_probe, per_rank=runs)
        seen = []
        for number, (xs, upstreams) in enumerate(inputs):
            outputs, gradients = pair_expected(name, xs, upstreams)
            mine = [result[number] for result in results]
            seen.append(
                SimpleNamespace(
                    xs=xs, upstreams=upstreams, results=mine, outputs=outputs, gradients=gradients
                )
            )
        return seen

    return observe


OBSERVE = {
    name: observe_pair(name)
    for name in ("copy_to_group", "reduce_from_group", "gather_from_group", "scatter_to_group")
}


def pair(trial: Trial, name: str) -> SimpleNamespace:
    """The plain case of one of the four functions."""
    return trial.once(OBSERVE[name])[0]


def inputs_unchanged(trial: Trial, name: str) -> None:
    seen = pair(trial, name)
    for rank, result in enumerate(seen.results):
        trial.require(
            not result["x_changed"],
            "x itself was changed by the call",
            help="Work on a copy: collectives write into the tensor they are given.",
            rank=rank,
        )
        trial.require(
            not result["upstream_changed"],
            "the gradient that came into backward was changed in place",
            help="Someone else may still need it (a residual connection does): work on a copy.",
            rank=rank,
        )


def other_layouts(trial: Trial, name: str) -> None:
    for (dtype, scrambled), seen in zip(OTHERS, observe_pair(name, OTHERS)(trial), strict=True):
        kind = "a transposed float64 x" if scrambled else "a bfloat16 x"
        trial.close(f"the output for {kind}", each_rank(seen, "output"), [o.to(dtype) for o in seen.outputs])
        trial.close(
            f"the gradient of {kind}", each_rank(seen, "gradient"), [g.to(dtype) for g in seen.gradients]
        )


@check("copy_to_group")
def output_is_the_input(trial: Trial) -> None:
    """The forward returns x as it is."""
    seen = pair(trial, "copy_to_group")
    trial.close("the output", each_rank(seen, "output"), seen.outputs)


@check("copy_to_group")
def gradient_is_summed_over_ranks(trial: Trial) -> None:
    """The gradient of the input is the sum of the gradients of all ranks."""
    seen = pair(trial, "copy_to_group")
    trial.close(
        "the gradient of x",
        each_rank(seen, "gradient"),
        seen.gradients,
        alternatives={
            "this rank's own gradient alone: nothing was summed": seen.upstreams,
            "the mean over the ranks, where the sum belongs": seen.gradients[0] / trial.num_ranks,
        },
        help="Every rank used x for another part of the work: add up what they found, in backward.",
    )


@check("copy_to_group")
def sends_one_all_reduce_and_only_in_backward(trial: Trial) -> None:
    """The forward communicates nothing, the backward one all-reduce of the gradient's size."""
    seen = pair(trial, "copy_to_group")
    nothing_travels(trial, seen, "", "x is on every rank already.")
    num_bytes = seen.upstreams[0].numel() * 4
    one_all_reduce(trial, seen, BACKWARD, num_bytes, "dist.all_reduce does it in one call.")


@check("copy_to_group")
def leaves_its_inputs_alone(trial: Trial) -> None:
    """Neither x nor the gradient that comes in is changed."""
    inputs_unchanged(trial, "copy_to_group")


@check("copy_to_group", world_sizes=(2, 4), subgroup=False)
def takes_any_layout_and_dtype(trial: Trial) -> None:
    """It works for tensors that are not contiguous, and keeps the dtype."""
    other_layouts(trial, "copy_to_group")


@check("reduce_from_group")
def output_is_the_sum(trial: Trial) -> None:
    """The forward returns the sum of all ranks' x on every rank."""
    seen = pair(trial, "reduce_from_group")
    trial.close(
        "the output",
        each_rank(seen, "output"),
        seen.outputs,
        alternatives={
            "this rank's own x: nothing was summed": seen.xs,
            "the mean over the ranks, where the sum belongs": seen.outputs[0] / trial.num_ranks,
        },
    )


@check("reduce_from_group")
def gradient_passes_unchanged(trial: Trial) -> None:
    """The gradient of the output arrives at x as it is."""
    seen = pair(trial, "reduce_from_group")
    trial.close(
        "the gradient of x",
        each_rank(seen, "gradient"),
        seen.gradients,
        alternatives={
            "summed over the ranks: n times too large": sum(seen.gradients),
            "zero: the sum was made where autograd does not see it": torch.zeros_like(seen.gradients[0]),
        },
        help="What follows the sum is replicated: every rank already has the whole gradient.",
    )


@check("reduce_from_group")
def sends_one_all_reduce_and_only_in_forward(trial: Trial) -> None:
    """The forward communicates one all-reduce of x's size, the backward nothing."""
    seen = pair(trial, "reduce_from_group")
    one_all_reduce(trial, seen, "", seen.xs[0].numel() * 4, "dist.all_reduce does it in one call.")
    nothing_travels(trial, seen, BACKWARD, "Every rank has the whole gradient already.")


@check("reduce_from_group")
def leaves_its_inputs_alone_too(trial: Trial) -> None:
    """Neither x nor the gradient that comes in is changed."""
    inputs_unchanged(trial, "reduce_from_group")


@check("reduce_from_group", world_sizes=(2, 4), subgroup=False)
def takes_any_layout_and_dtype_too(trial: Trial) -> None:
    """It works for tensors that are not contiguous, and keeps the dtype."""
    other_layouts(trial, "reduce_from_group")


@check("gather_from_group")
def output_is_joined_in_rank_order(trial: Trial) -> None:
    """The forward joins all ranks' x along the last dimension, rank 0 first."""
    seen = pair(trial, "gather_from_group")
    alternatives = {"joined in the reverse order of ranks": torch.cat(seen.xs[::-1], -1)}
    alternatives["interleaved: one column of each rank in turn"] = torch.stack(seen.xs, -1).flatten(-2)
    trial.close("the output", each_rank(seen, "output"), seen.outputs, alternatives=alternatives)


@check("gather_from_group")
def gradient_is_this_ranks_slice(trial: Trial) -> None:
    """The gradient of x is this rank's slice of the gradient of the output."""
    seen = pair(trial, "gather_from_group")
    n = trial.num_ranks
    trial.close(
        "the gradient of x",
        each_rank(seen, "gradient"),
        seen.gradients,
        alternatives={
            "summed over the ranks: n times too large, for each has the same gradient": [
                g * n for g in seen.gradients
            ],
            "the first rank's slice on every rank": [seen.gradients[0]] * n,
            "zero: the parts came out of all_gather without a path for the gradient": [
                torch.zeros_like(g) for g in seen.gradients
            ],
        },
        help="Cut the incoming gradient as the forward joined it.",
    )


@check("gather_from_group")
def sends_one_all_gather_forward(trial: Trial) -> None:
    """The forward sends each part once to everyone, the backward nothing."""
    seen = pair(trial, "gather_from_group")
    gather_costs(trial, seen, "", seen.outputs[0].numel() * 4)
    nothing_travels(trial, seen, BACKWARD, "Every rank has the whole gradient: it only has to cut it.")


@check("gather_from_group")
def gather_leaves_its_inputs_alone(trial: Trial) -> None:
    """Neither x nor the gradient that comes in is changed."""
    inputs_unchanged(trial, "gather_from_group")


@check("gather_from_group", world_sizes=(2, 4), subgroup=False)
def gather_takes_any_layout_and_dtype(trial: Trial) -> None:
    """It works for tensors that are not contiguous, and keeps the dtype."""
    other_layouts(trial, "gather_from_group")


def gather_costs(trial: Trial, seen: SimpleNamespace, stretch: str, num_bytes: int) -> None:
    """At most what one all-gather of so many bytes (gathered) sends."""
    where = "the backward" if stretch else "the forward"
    n = trial.num_ranks
    for rank, recording in enumerate(each_rank(seen, "recording")):
        events = recording.select(None, stretch)
        if n == 1:
            continue
        trial.require(bool(events), f"{where} communicated nothing, where one all-gather belongs", rank=rank)
        sent, allowed = wire_bytes(events, n), (n - 1) / n * num_bytes
        trial.require(
            sent <= allowed + SLACK * n,
            f"{where} sent {told(events)}: about {sent:,.0f} bytes from this rank, where an all-gather sends "
            f"{allowed:,.0f}",
            help="Each part has to reach each rank once: dist.all_gather.",
            rank=rank,
        )


@check("scatter_to_group")
def output_is_this_ranks_slice(trial: Trial) -> None:
    """The forward returns the r-th contiguous slice of the last dimension on rank r."""
    seen = pair(trial, "scatter_to_group")
    n = trial.num_ranks
    trial.close(
        "the output",
        each_rank(seen, "output"),
        seen.outputs,
        alternatives={
            "every n-th column, where a contiguous slice belongs": [seen.xs[0][..., r::n] for r in range(n)],
            "the first slice on every rank": [seen.outputs[0]] * n,
            "the slices in reverse order": seen.outputs[::-1],
        },
    )


@check("scatter_to_group")
def gradient_is_joined(trial: Trial) -> None:
    """The gradient of x is every rank's gradient, joined in rank order."""
    seen = pair(trial, "scatter_to_group")
    n = trial.num_ranks
    own = [
        torch.cat([u if r == k else torch.zeros_like(u) for k in range(n)], -1)
        for r, u in enumerate(seen.upstreams)
    ]
    trial.close(
        "the gradient of x",
        each_rank(seen, "gradient"),
        seen.gradients,
        alternatives={
            "zero outside this rank's own slice: the others' gradients are missing": own,
            "joined in the reverse order of ranks": torch.cat(seen.upstreams[::-1], -1),
        },
        help="Each rank knows the gradient of its own slice only; backward has to gather them.",
    )


@check("scatter_to_group")
def sends_one_all_gather_backward(trial: Trial) -> None:
    """The forward sends nothing, the backward each part once to everyone."""
    seen = pair(trial, "scatter_to_group")
    nothing_travels(trial, seen, "", "Every rank has the whole x: it only has to cut it.")
    gather_costs(trial, seen, BACKWARD, seen.xs[0].numel() * 4)


@check("scatter_to_group")
def scatter_leaves_its_inputs_alone(trial: Trial) -> None:
    """Neither x nor the gradient that comes in is changed."""
    inputs_unchanged(trial, "scatter_to_group")


@check("scatter_to_group", world_sizes=(2, 4), subgroup=False)
def scatter_takes_any_layout_and_dtype(trial: Trial) -> None:
    """It works for tensors that are not contiguous, and keeps the dtype."""
    other_layouts(trial, "scatter_to_group")


def scatter_refusal_probe(rank, x: Tensor) -> dict:
    return {"error": error_of(rank.submission.scatter_to_group, x, rank.group)}


@check("scatter_to_group", world_sizes=(2, 4), subgroup=False)
def scatter_refuses_what_does_not_divide(trial: Trial) -> None:
    """A last dimension that does not divide by the ranks is a ValueError that names both numbers."""
    size = undividable(trial)
    seen = SimpleNamespace(results=trial.run(scatter_refusal_probe, trial.normal(2, size)))
    refused(trial, seen, size)


# The two linear layers

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


def stand_alone(trial: Trial, results: list[dict], what: str = "") -> None:
    for rank, result in enumerate(results):
        for name, held in result["held"].items():
            own = result["weights"][name].numel() * result["weights"][name].element_size()
            trial.require(
                held <= own,
                f"{what}{name} is a view: its {own:,} bytes keep {held:,} bytes alive",
                help="A slice shares the whole tensor's memory. Clone it, so that the whole can be freed.",
                rank=rank,
            )


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


def initial_probe(rank, kind: str, in_features: int, out_features: int) -> dict:
    """A layer built directly on ranks that are seeded alike, and what its linear algebra gives."""
    rank.seed(1234)
    layer = getattr(rank.submission, kind)(in_features, out_features, group=rank.group)
    bare = getattr(rank.submission, kind)(in_features, out_features, bias=False, group=rank.group)
    return {
        "weights": {name: p.detach() for name, p in layer.named_parameters()},
        "without_bias": sorted(name for name, _ in bare.named_parameters()),
        "held": {name: storage_bytes([p]) for name, p in layer.named_parameters()},
    }


def built_directly(trial: Trial, kind: str) -> None:
    n = trial.num_ranks
    cut, free = 12 * n, 24
    sizes = (free, cut) if kind == "ColumnParallelLinear" else (cut, free)
    results = trial.run(initial_probe, kind, *sizes)
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
        trial.require(
            not any(torch.equal(weight, other["weights"]["weight"]) for other in results[:rank]),
            "ranks that are seeded alike drew the same weight: the slices of the layer repeat one another",
            help="Draw the whole weight and keep this rank's slice, or seed by rank.",
            rank=rank,
        )
    if kind == "RowParallelLinear":
        first = results[0]["weights"]["bias"]
        trial.close("the initial bias", [r["weights"]["bias"] for r in results], first)


@check("ColumnParallelLinear", world_sizes=(2, 1, 4), subgroup=False)
def column_starts_sensibly(trial: Trial) -> None:
    """Built directly it has random weights, other ones on each rank though the ranks are seeded alike."""
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
    """Built directly it has random weights, other ones on each rank, and the same bias on all."""
    built_directly(trial, "RowParallelLinear")


@check("RowParallelLinear", world_sizes=(2, 4), subgroup=False)
def row_refuses_what_does_not_divide(trial: Trial) -> None:
    """in_features that do not divide by the ranks are a ValueError that names both numbers."""
    size = undividable(trial)
    seen = SimpleNamespace(results=trial.run(linear_refusal_probe, "RowParallelLinear", (size, 4)))
    refused(trial, seen, size)


# Dropout after a sum

exercise(
    "share_dropout",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Dropout.generator may hold a torch.Generator: a stream of random numbers of the dropout's own.",
        "Equal seeds give equal streams. Who picks the seed, and how do the others learn of it?",
        "dist.broadcast(tensor, group_src=0, group=group) sends what the group's rank 0 holds to everyone.",
    ),
)


def dropout_probe(rank, seed: int, probability: float, shape: tuple) -> dict:
    rank.seed(seed)
    first, second = Dropout(probability), Dropout(probability)
    first = rank.submission.share_dropout(first, rank.group, rank.device)
    second = rank.submission.share_dropout(second, rank.group, rank.device)
    ones = torch.ones(*shape, device=rank.device)
    with rank.record() as recording:
        masks = [first(ones), first(ones), second(ones)]
    return {
        "masks": masks,
        "recording": recording,
        "asleep": first.eval()(ones),
        "own": torch.rand(8),
    }


def observe_dropout(trial: Trial) -> SimpleNamespace:
    """Each rank has a seed of its own."""
    probability = trial.choice([0.2, 0.3, 0.4])
    shape = (trial.integer(30, 40), trial.integer(40, 50))
    base = trial.integer(1, 10**6)
    runs = [(base + rank, probability, shape) for rank in range(trial.num_ranks)]
    results = trial.run(dropout_probe, per_rank=runs)
    return SimpleNamespace(results=results, probability=probability, shape=shape)


@check("share_dropout")
def mask_is_the_same_on_every_rank(trial: Trial) -> None:
    """Every rank drops the same elements, though the ranks are seeded differently."""
    seen = trial.once(observe_dropout)
    for number in range(3):
        masks = [masks[number] for masks in each_rank(seen, "masks")]
        for rank, mask in enumerate(masks):
            trial.require(
                torch.equal(mask, masks[0]),
                f"ranks 0 and {rank} dropped different elements of the same tensor",
                help="Seed the generator with a number that every rank received from the group's rank 0.",
                rank=rank,
            )


@check("share_dropout")
def mask_is_random(trial: Trial) -> None:
    """The mask changes from call to call, and from one dropout to the next."""
    first, later, other = trial.once(observe_dropout).results[0]["masks"]
    trial.require(not torch.equal(first, later), "two calls of one dropout dropped the same elements")
    trial.require(
        not torch.equal(first, other),
        "two dropouts have the same stream of masks: every layer would drop the same elements",
        help="Draw a new seed for each dropout.",
    )


@check("share_dropout", world_sizes=(2,), subgroup=False)
def mask_follows_the_seed_of_the_run(trial: Trial) -> None:
    """Runs with another torch.manual_seed drop other elements."""
    runs = [
        [(base + rank, 0.3, (30, 40)) for rank in range(trial.num_ranks)]
        for base in (trial.integer(1, 1000), trial.integer(2000, 3000))
    ]
    first, again = (trial.run(dropout_probe, per_rank=each)[0]["masks"][0] for each in runs)
    trial.require(
        not torch.equal(first, again),
        "two runs with different seeds dropped the same elements: the seed is a constant",
        help="Let rank 0 draw the seed from torch's global stream, so that it follows torch.manual_seed.",
    )


@check("share_dropout")
def rate_and_scale_are_right(trial: Trial) -> None:
    """It drops with probability p and scales what stays by 1/(1-p); in eval mode it does nothing."""
    seen = trial.once(observe_dropout)
    for rank, result in enumerate(seen.results):
        mask = result["masks"][0]
        kept = (mask != 0).double().mean().item()
        spread = math.sqrt(seen.probability * (1 - seen.probability) / mask.numel())
        trial.require(
            abs(kept - (1 - seen.probability)) < 6 * spread,
            f"{kept:.3f} of the elements stayed; p = {seen.probability} keeps {1 - seen.probability:.3f}",
            rank=rank,
        )
        values = mask[mask != 0]
        trial.close("what stays of ones", values, torch.full_like(values, 1 / (1 - seen.probability)))
        trial.close("the output in eval mode", result["asleep"], torch.ones(*seen.shape))


@check("share_dropout")
def other_random_numbers_stay_the_ranks_own(trial: Trial) -> None:
    """torch's global stream still differs between ranks that were seeded differently."""
    own = each_rank(trial.once(observe_dropout), "own")
    for rank in range(1, trial.num_ranks):
        trial.require(
            not torch.equal(own[rank], own[0]),
            f"ranks 0 and {rank} draw the same numbers from torch's global stream afterwards",
            help="Seed a generator of the dropout's own; torch.manual_seed changes everyone's numbers.",
            rank=rank,
        )


@check("share_dropout")
def masks_cost_nothing(trial: Trial) -> None:
    """Once shared, a dropout communicates no more: agreeing on a seed is enough."""
    seen = trial.once(observe_dropout)
    for rank, recording in enumerate(each_rank(seen, "recording")):
        trial.require(
            trial.num_ranks == 1 or not recording.select(),
            f"during three calls there travelled: {told(recording.select())}",
            help="Equal generators give equal masks, for ever: nothing has to be sent at a call.",
            rank=rank,
        )


# MLP and attention

exercise(
    "tensor_parallel_mlp",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "GELU works on each element alone, so it does not care how the hidden features are cut. Which layer "
        "leaves them cut, and which takes them cut?",
        "Replace mlp.c_fc and mlp.c_proj by layers from from_linear; MLP.forward stays as it is.",
        "The dropout comes after the sum: its input is the same on every rank, and so must its mask be.",
    ),
)
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

BRANCH = {
    "tensor_parallel_mlp": (MLP, "c_fc", "dropout"),
    "tensor_parallel_attention": (CausalSelfAttention, "c_attn", "resid_dropout"),
}


def branch_probe(rank, name: str, cases: list) -> list[dict]:
    return [one_branch(rank, name, *case) for case in cases]


def one_branch(rank, name: str, config: dict, weights: dict, x: Tensor, upstream: Tensor) -> dict:
    branch = BRANCH[name][0](GPTConfig(**config))
    branch.load_state_dict(weights)
    branch.to(rank.device)
    branch = getattr(rank.submission, name)(branch, rank.group)
    x = x.clone().requires_grad_()
    with rank.record() as recording:
        y = branch(x)
        recording.mark(BACKWARD)
        backward(y, upstream)
    return {"output": y, "gradient": x.grad, "recording": recording, **describe(branch)}


def small_config(trial: Trial, **changes) -> dict:
    """Heads that divide over 1 to 4 ranks, an odd head size, a vocabulary that 2 and 3 and 4 divide."""
    config = {
        "block_size": 16,
        "vocab_size": 48,
        "n_layer": 2,
        "n_head": 12,
        "n_embd": 12 * trial.choice([2, 3]),
        "dropout": 0.0,
        "bias": True,
    }
    return config | changes


def dense_branch(branch: nn.Module, x: Tensor, upstream: Tensor) -> SimpleNamespace:
    branch, x = copy.deepcopy(branch).double(), x.double().requires_grad_()
    y = branch(x)
    y.backward(upstream.double())
    gradients = {name: p.grad for name, p in branch.named_parameters()}
    return SimpleNamespace(output=y.detach(), x=x.grad, gradients=gradients)


def observe_branch(name: str):
    def observe(trial: Trial) -> dict[str, SimpleNamespace]:
        seen = {
            "with bias": branch_case(trial, name, bias=True),
            "without bias": branch_case(trial, name, bias=False),
        }
        cases = [(case.config, case.weights, case.x, case.upstream) for case in seen.values()]
        results = trial.run(branch_probe, name, cases)
        for number, case in enumerate(seen.values()):
            case.results = [result[number] for result in results]
        return seen

    return observe


def branch_case(trial: Trial, name: str, bias: bool) -> SimpleNamespace:
    config = small_config(trial, bias=bias)
    branch = drawn_alike(BRANCH[name][0](GPTConfig(**config)), trial)
    shape = (trial.integer(2, 3), trial.integer(3, 7), config["n_embd"])
    x, upstream = trial.normal(*shape), trial.normal(*shape)
    dense = dense_branch(branch, x, upstream)
    return SimpleNamespace(dense=dense, weights=weights_of(branch), x=x, upstream=upstream, config=config)


BRANCHES = {name: observe_branch(name) for name in BRANCH}


def branch_output(trial: Trial, name: str, partial) -> None:
    n = trial.num_ranks
    for kind, seen in trial.once(BRANCHES[name]).items():
        bias = seen.weights.get("c_proj.bias")
        alternatives = partial(seen)
        if bias is not None:
            alternatives |= {
                "the bias of c_proj was added n times": seen.dense.output + (n - 1) * bias,
                "without the bias of c_proj": seen.dense.output - bias,
            }
        trial.close(
            f"the output ({kind})", each_rank(seen, "output"), seen.dense.output, alternatives=alternatives
        )


def branch_communication(trial: Trial, name: str) -> None:
    for seen in trial.once(BRANCHES[name]).values():
        num_bytes = seen.x.numel() * 4
        help = "c_fc or c_attn stays cut (gather nothing), c_proj takes it cut and sums once."
        one_all_reduce(trial, seen, "", num_bytes, help)
        one_all_reduce(trial, seen, BACKWARD, num_bytes, "Only the gradient of x is summed, once.")


def branch_dropout_probe(rank, name: str, config: dict, weights: dict, x: Tensor, seed: int) -> dict:
    branch = BRANCH[name][0](GPTConfig(**config))
    branch.load_state_dict(weights)
    branch.to(rank.device).train()
    rank.seed(seed)
    branch = getattr(rank.submission, name)(branch, rank.group)
    rank.seed(seed + 1)
    return {"outputs": [branch(x), branch(x)], "asleep": branch.eval()(x)}


def branch_dropout(trial: Trial, name: str) -> None:
    config = small_config(trial, dropout=0.4)
    branch = drawn_alike(BRANCH[name][0](GPTConfig(**config)), trial)
    x = trial.normal(3, 5, config["n_embd"])
    base = trial.integer(1, 10**6)
    runs = [(name, config, weights_of(branch), x, base + 10 * rank) for rank in range(trial.num_ranks)]
    results = trial.run(branch_dropout_probe, per_rank=runs)
    for rank, result in enumerate(results):
        for number in range(2):
            trial.require(
                torch.equal(result["outputs"][number] == 0, results[0]["outputs"][number] == 0),
                f"ranks 0 and {rank} dropped different elements of the output, which is the same on both",
                help="The ranks are seeded differently here. share_dropout makes their masks agree.",
                rank=rank,
            )
        first, second = result["outputs"]
        trial.require(
            not torch.equal(first == 0, second == 0) and 0.1 < (first == 0).double().mean().item() < 0.8,
            "the output was not dropped at random in training mode",
            help=f"{BRANCH[name][2]} belongs after c_proj, as in the dense one.",
            rank=rank,
        )
    dense = copy.deepcopy(branch).double().eval()(x.double()).detach()
    trial.close("the output in eval mode", [r["asleep"] for r in results], dense)


def branch_refusal_probe(rank, name: str, config: dict) -> dict:
    branch = BRANCH[name][0](GPTConfig(**config))
    return {"error": error_of(getattr(rank.submission, name), branch, rank.group)}


def mlp_cuts(weights: dict, rank: int, n: int) -> dict[str, Tensor]:
    """This rank's part of each of an MLP's tensors (weights or gradients)."""
    cut = {
        "c_fc.weight": own_part(weights["c_fc.weight"], 0, rank, n),
        "c_proj.weight": own_part(weights["c_proj.weight"], 1, rank, n),
    }
    if "c_fc.bias" in weights:
        cut["c_fc.bias"] = own_part(weights["c_fc.bias"], 0, rank, n)
        cut["c_proj.bias"] = weights["c_proj.bias"]
    return cut


@check("tensor_parallel_mlp")
def mlp_shards_are_slices(trial: Trial) -> None:
    """c_fc is cut by rows, c_proj by columns, contiguously, and nothing keeps the whole alive."""
    n = trial.num_ranks
    for seen in trial.once(BRANCHES["tensor_parallel_mlp"]).values():
        expected = [mlp_cuts(seen.weights, rank, n) for rank in range(n)]
        for name in expected[0]:
            trial.close(
                name,
                each_rank(seen, "weights", name),
                [e[name] for e in expected],
            )
        stand_alone(trial, seen.results)


@check("tensor_parallel_mlp")
def mlp_output_is_the_dense_one(trial: Trial) -> None:
    """The output is the dense MLP's on every rank."""

    def partial(seen: SimpleNamespace) -> dict:
        w, n = {k: v.double() for k, v in seen.weights.items()}, trial.num_ranks
        sums = []
        for rank in range(n):
            cut = mlp_cuts(w, rank, n)
            hidden = F.gelu(F.linear(seen.x.double(), cut["c_fc.weight"], cut.get("c_fc.bias")))
            sums.append(F.linear(hidden, cut["c_proj.weight"], cut.get("c_proj.bias")))
        return {"this rank's partial sum: nothing was summed over the ranks": sums}

    branch_output(trial, "tensor_parallel_mlp", partial)


@check("tensor_parallel_mlp")
def mlp_input_gradient_is_whole(trial: Trial) -> None:
    """The gradient of x is the dense MLP's on every rank."""
    for kind, seen in trial.once(BRANCHES["tensor_parallel_mlp"]).items():
        trial.close(
            f"the gradient of x ({kind})",
            each_rank(seen, "gradient"),
            seen.dense.x,
            help="Partial gradients of x leave every layer norm below with a gradient that differs by rank.",
        )


@check("tensor_parallel_mlp")
def mlp_shard_gradients_are_the_dense_ones(trial: Trial) -> None:
    """The gradient of every shard is the slice of the dense gradient, and that of c_proj.bias is whole."""
    n = trial.num_ranks
    for seen in trial.once(BRANCHES["tensor_parallel_mlp"]).values():
        expected = [mlp_cuts(seen.dense.gradients, rank, n) for rank in range(n)]
        for name in expected[0]:
            actual = [g.get(name) for g in each_rank(seen, "gradients")]
            trial.close(f"the gradient of {name}", actual, [e[name] for e in expected])


@check("tensor_parallel_mlp")
def mlp_sends_one_all_reduce_each_way(trial: Trial) -> None:
    """One all-reduce of b·s·h in the forward, one in the backward, and no other."""
    branch_communication(trial, "tensor_parallel_mlp")


@check("tensor_parallel_mlp")
def mlp_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the MLP's products."""
    for seen in trial.once(BRANCHES["tensor_parallel_mlp"]).values():
        h = seen.x.size(-1)
        computes_a_share(trial, seen, "", 2 * (seen.x.numel() // h) * 8 * h * h / trial.num_ranks)


@check("tensor_parallel_mlp", world_sizes=(2, 1, 4), subgroup=False)
def mlp_drops_alike_on_every_rank(trial: Trial) -> None:
    """Its dropout drops the same elements on every rank, however the ranks are seeded."""
    branch_dropout(trial, "tensor_parallel_mlp")


@check("tensor_parallel_mlp", world_sizes=(3,), subgroup=False)
def mlp_refuses_what_does_not_divide(trial: Trial) -> None:
    """A hidden width that does not divide by the ranks is a ValueError that names both numbers."""
    width = trial.choice([4, 5, 7, 8])  # 4h divides by 1, 2 and 4 whatever h is
    config = small_config(trial, n_embd=width, n_head=1)
    results = trial.run(branch_refusal_probe, "tensor_parallel_mlp", config)
    refused(trial, SimpleNamespace(results=results), 4 * width)


def heads_of(tensor: Tensor, rank: int, n: int) -> Tensor:
    """Rank's rows of a fused q|k|v tensor: the r-th heads of each, in the order q, k, v."""
    return torch.cat([own_part(part, 0, rank, n) for part in tensor.chunk(3)])


def row_order(actual: Tensor | None, expected: Tensor) -> list[int] | None:
    """Which row of `expected` each row of `actual` is, if they are the same rows in some order."""
    if actual is None or actual.shape != expected.shape:
        return None
    order = torch.cdist(actual.double(), expected.double()).argmin(dim=1)
    same = torch.allclose(actual.double(), expected.double()[order], atol=1e-6)
    return order.tolist() if same and len(set(order.tolist())) == len(order) else None


def fused_with_bias(tensors: dict) -> Tensor:
    """c_attn's weight with the bias as one more column, so that both are followed through a reordering.

    An empty tensor where the two are missing or do not fit.
    """
    weight, bias = tensors.get("c_attn.weight"), tensors.get("c_attn.bias")
    if weight is None or weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return torch.empty(0, 0)
    return weight if bias is None else torch.cat([weight, bias.unsqueeze(1)], 1)


@check("tensor_parallel_attention")
def heads_are_cut_by_rank(trial: Trial) -> None:
    """Rank r holds the r-th heads of queries, keys and values, and those columns of c_proj."""
    n = trial.num_ranks
    for seen in trial.once(BRANCHES["tensor_parallel_attention"]).values():
        fused = fused_with_bias(seen.weights)
        for rank, weights in enumerate(each_rank(seen, "weights")):
            h = seen.x.size(-1)
            trial.equal("the shape of c_attn.weight", shape_of(weights.get("c_attn.weight")), (3 * h // n, h))
            if "c_attn.bias" in seen.weights:
                trial.equal("the shape of c_attn.bias", shape_of(weights.get("c_attn.bias")), (3 * h // n,))
            own = fused_with_bias(weights)
            if row_order(own, heads_of(fused, rank, n)) is None:
                contiguous = row_order(own, own_part(fused, 0, rank, n)) is not None
                trial.wrong(
                    "c_attn was cut contiguously, as one matrix: rank 0 got queries where it needs queries, "
                    "keys and values of its heads"
                    if contiguous
                    else "the rows of c_attn are not this rank's heads of q, of k and of v (bias included)",
                    help="Cut q, k and v each by heads, and join this rank's three parts.",
                    rank=rank,
                )
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
        fused, gradient = fused_with_bias(seen.weights), fused_with_bias(seen.dense.gradients)
        actual, expected = [], []
        for rank, (weights, gradients) in enumerate(
            zip(each_rank(seen, "weights"), each_rank(seen, "gradients"), strict=True)
        ):
            order = row_order(fused_with_bias(weights), heads_of(fused, rank, n))
            if order is None:
                trial.wrong(
                    "c_attn does not hold this rank's heads, so its gradient cannot be compared", rank=rank
                )
            trial.require("c_attn.weight" in gradients, "c_attn.weight has no gradient", rank=rank)
            actual.append(fused_with_bias(gradients))
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
        computes_a_share(trial, seen, "", dense / trial.num_ranks)


@check("tensor_parallel_attention", world_sizes=(2, 1, 4), subgroup=False)
def attention_drops_alike_on_every_rank(trial: Trial) -> None:
    """The dropout after the sum drops the same elements on every rank, however the ranks are seeded."""
    branch_dropout(trial, "tensor_parallel_attention")


@check("tensor_parallel_attention", world_sizes=(2, 4), subgroup=False)
def attention_refuses_heads_that_do_not_divide(trial: Trial) -> None:
    """A number of heads that does not divide by the ranks is a ValueError that names both numbers."""
    heads = undividable(trial)
    config = small_config(trial, n_head=heads, n_embd=heads * 12)  # the width divides; the heads do not
    results = trial.run(branch_refusal_probe, "tensor_parallel_attention", config)
    refused(trial, SimpleNamespace(results=results), heads)


# The vocabulary

exercise(
    "VocabParallelEmbedding",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "A token's row is on one rank. What can the others add to a sum so that it comes out right?",
        "Shift the tokens by this rank's first row; what lies outside 0..rows-1 belongs to someone else.",
        "Look up any row for someone else's token (it must exist), and put zeros in its place.",
    ),
)
exercise(
    "vocab_parallel_cross_entropy",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Cross entropy of one token: log(sum of exp(logits)) - logit of the target. Which of the two needs "
        "all ranks, and how many numbers a token does each rank have to tell?",
        "Subtract the largest logit of all ranks before exp: an all-reduce with op=dist.ReduceOp.MAX. It is "
        "a constant to autograd: detach it.",
        "The target's logit is on one rank; the others add zero, as in the embedding.",
    ),
)


def embedding_probe(rank, cases: list) -> list[dict]:
    return [one_embedding(rank, *case) for case in cases]


def one_embedding(rank, table: Tensor, idx: Tensor, upstream: Tensor) -> dict:
    embedding = nn.Embedding(*table.shape, device=rank.device)
    with torch.no_grad():
        embedding.weight.copy_(table)
    layer = rank.submission.VocabParallelEmbedding.from_embedding(embedding, group=rank.group)
    held = describe(layer)
    before = idx.clone()
    with rank.record() as recording:
        y = layer(idx)
        recording.mark(BACKWARD)
        backward(y, upstream)
    backward(layer(idx), upstream)
    return {
        "output": y,
        "recording": recording,
        "idx_changed": not torch.equal(before, idx),
        "twice": layer.weight.grad,
        "weight": layer.weight.detach(),
        "held": held["held"],
        "weights": held["weights"],
    }


def observe_embedding(trial: Trial) -> dict[str, SimpleNamespace]:
    n = trial.num_ranks
    even = n * trial.integer(20, 30)
    plans = {
        "v divides": (even, lambda v: trial.tokens(v, 2, 7)),
        "v does not divide": (undividable(trial, 9), lambda v: trial.tokens(v, 3, 4)),
        "all tokens on the last rank": (even, lambda v: trial.tokens(v // n, 9) + v - v // n),
        "v is small": (5, lambda v: torch.arange(5).repeat(2)),
    }
    seen = {name: embedding_case(trial, size, draw(size)) for name, (size, draw) in plans.items()}
    results = trial.run(embedding_probe, [(case.table, case.idx, case.upstream) for case in seen.values()])
    for number, case in enumerate(seen.values()):
        case.results = [result[number] for result in results]
    return seen


def embedding_case(trial: Trial, size: int, idx: Tensor) -> SimpleNamespace:
    width = trial.integer(3, 6)
    table, upstream = trial.normal(size, width), trial.normal(*idx.shape, width)
    weight = table.double().requires_grad_()
    y = F.embedding(idx, weight)
    y.backward(upstream.double())
    return SimpleNamespace(table=table, idx=idx, upstream=upstream, output=y.detach(), gradient=weight.grad)


def row_ranges(table: Tensor, shards: list[Tensor]) -> list[tuple[int, int]] | None:
    """(first row, number of rows) of the table on each rank, padding left out; None if rows are missing."""
    if any(shard is None or shard.dim() != 2 or shard.size(1) != table.size(1) for shard in shards):
        return None
    first, ranges = 0, []
    for shard in shards:
        size = min(len(shard), len(table) - first)
        while size and not torch.equal(shard[:size], table[first : first + size]):
            size -= 1
        ranges.append((first, size))
        first += size
    return ranges if first == len(table) else None


@check("VocabParallelEmbedding")
def rows_are_cut_by_rank(trial: Trial) -> None:
    """Rank r holds the r-th contiguous rows of the table, as many as its share, in a tensor of its own."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_embedding).items():
        size, width = seen.table.shape
        share = -(-size // n)
        for rank, weight in enumerate(each_rank(seen, "weight")):
            trial.require(
                weight.dim() == 2 and weight.size(1) == width and weight.size(0) <= share,
                f"weight is {tuple(weight.shape)} on this rank ({name}: {size} rows over {n} ranks), where "
                f"at most ({share}, {width}) is its share",
                help="Cut the rows; a padded vocabulary has ceil(v/n) of them on every rank.",
                rank=rank,
            )
        trial.require(
            row_ranges(seen.table, each_rank(seen, "weight")) is not None,
            f"the ranks' rows, joined in rank order, are not the table's ({name}: {size} rows)",
            help="Rank 0 has the first rows, rank 1 the next: contiguous, and none missing at the end.",
        )
        stand_alone(trial, seen.results)


@check("VocabParallelEmbedding")
def embedding_output_is_the_dense_one(trial: Trial) -> None:
    """Every rank gets every token's row."""
    for name, seen in trial.once(observe_embedding).items():
        ranges = row_ranges(seen.table, each_rank(seen, "weight"))
        alternatives = {}
        if ranges is not None:
            first_rows = [table_row(seen, *each) for each in ranges if each[1]]
            own = [own_rows(seen, *each) for each in ranges]
            alternatives = {
                "zero where another rank has the row: nothing was summed over the ranks": own,
                "a stray row was added by each rank that does not have the token": sum(
                    o.double() + s for o, s in zip(own, first_rows, strict=False)
                ),
            }
        trial.close(f"the output ({name})", each_rank(seen, "output"), seen.output, alternatives=alternatives)
        for rank, result in enumerate(seen.results):
            trial.require(not result["idx_changed"], "the tokens were changed in place", rank=rank)


def own_rows(seen: SimpleNamespace, first: int, size: int) -> Tensor:
    """What a rank with these rows can contribute: the others' tokens are zero."""
    mine = (seen.idx >= first) & (seen.idx < first + size)
    return seen.table[seen.idx] * mine.unsqueeze(-1)


def table_row(seen: SimpleNamespace, first: int, size: int) -> Tensor:
    """What a rank adds by mistake if it looks up its first row for the others' tokens."""
    other = (seen.idx < first) | (seen.idx >= first + size)
    return seen.table[first].double() * other.unsqueeze(-1)


@check("VocabParallelEmbedding")
def row_gradients_are_the_dense_tables(trial: Trial) -> None:
    """The gradient of the rows is the dense table's, repeated tokens added up, over two passes as well."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_embedding).items():
        ranges = row_ranges(seen.table, each_rank(seen, "weight"))
        if ranges is None:
            trial.wrong("the rows are not the table's, so their gradients cannot be compared")
        own = [seen.gradient[first : first + size] for first, size in ranges]
        actual = [t[:size] for t, (_, size) in zip(each_rank(seen, "twice"), ranges, strict=True)]
        trial.close(
            f"the gradient of weight after two passes ({name})",
            actual,
            [2 * g for g in own],
            alternatives={"n times too large: backward summed over the ranks": [2 * n * g for g in own]},
            help="Other ranks' tokens must leave no gradient in this rank's rows.",
        )


@check("VocabParallelEmbedding")
def embedding_sends_one_all_reduce_forward(trial: Trial) -> None:
    """The forward sends one all-reduce of the output's size, the backward nothing."""
    for seen in trial.once(observe_embedding).values():
        one_all_reduce(trial, seen, "", seen.output.numel() * 4, "Sum the rows found; never send the table.")
        nothing_travels(trial, seen, BACKWARD, "The gradient of the output is on every rank already.")


def direct_embedding_probe(rank, size: int, width: int) -> dict:
    rank.seed(99)
    layer = rank.submission.VocabParallelEmbedding(size, width, group=rank.group)
    return {"weight": layer.weight.detach(), "output": layer(torch.arange(size, device=rank.device))}


@check("VocabParallelEmbedding", world_sizes=(2, 1, 4), subgroup=False)
def embedding_starts_sensibly(trial: Trial) -> None:
    """Built directly it has random rows, other ones on each rank though the ranks are seeded alike."""
    n = trial.num_ranks
    size = 8 * n
    results = trial.run(direct_embedding_probe, size, 16)
    whole = torch.cat([result["weight"] for result in results])
    trial.equal("the shape of all rows joined", tuple(whole.shape), (size, 16))
    trial.close("the rows of all tokens", [result["output"] for result in results], whole)
    spread = whole.double().std().item()
    trial.require(
        0.005 < spread < 3.0,
        f"the standard deviation of the initial rows is {spread:.3g}; 1 (as nn.Embedding) or 0.02 (as GPT-2) "
        "is expected",
    )
    for rank, result in enumerate(results):
        trial.require(
            not any(torch.equal(result["weight"], other["weight"]) for other in results[:rank]),
            "ranks that are seeded alike drew the same rows: different words have the same vector",
            help="Draw the whole table and keep this rank's rows, or seed by rank.",
            rank=rank,
        )


def entropy_probe(rank, cases: list[dict]) -> dict:
    return {"cases": [one_entropy(rank, case) for case in cases]}


def one_entropy(rank, case: dict) -> dict:
    leaf = case["logits"].clone().requires_grad_()
    logits = leaf * 1.0
    before = logits.detach().clone()
    targets = case["targets"].clone()
    with rank.record(memory=True) as recording:
        loss = rank.submission.vocab_parallel_cross_entropy(logits, targets, rank.group)
        unchanged = torch.equal(before, logits.detach()) and torch.equal(targets, case["targets"])
        recording.mark(BACKWARD)
        (loss * case["factor"]).backward()
    return {"loss": loss, "gradient": leaf.grad, "unchanged": unchanged, "recording": recording}


def entropy_cases(trial: Trial) -> dict[str, tuple[Tensor, Tensor]]:
    """Whole logits (N, v) and targets (N,); the last holds words that do not exist, as padding does."""
    n = trial.num_ranks
    share = trial.integer(20, 30)
    v = n * share

    def logits() -> Tensor:
        return 2 * trial.normal(trial.integer(6, 12), v)

    plain, some, last, large, padded = (logits() for _ in range(5))
    ignored = trial.tokens(v, len(some))
    ignored[: trial.integer(2, len(some) - 2)] = -1
    offset = 500.0 * torch.arange(len(large)).unsqueeze(1)
    padded[:, v - trial.integer(2, share) :] = float("-inf")
    return {
        "plain": (plain, trial.tokens(v, len(plain))),
        "with ignored targets": (some, ignored),
        "all targets on the last rank": (last, trial.tokens(share, len(last)) + v - share),
        "large logits": (large + offset, trial.tokens(v, len(large))),
        "padded vocabulary": (
            padded,
            trial.tokens(v - share, len(padded)) if n > 1 else trial.tokens(2, len(padded)),
        ),
    }


def observe_entropy(trial: Trial) -> dict[str, SimpleNamespace]:
    n = trial.num_ranks
    cases = entropy_cases(trial)
    factors = {name: trial.integer(2, 5) for name in cases}
    runs = [
        (
            [
                {
                    "logits": own_part(logits, -1, rank, n).contiguous(),
                    "targets": targets,
                    "factor": factors[name],
                }
                for name, (logits, targets) in cases.items()
            ],
        )
        for rank in range(n)
    ]
    results = trial.run(entropy_probe, per_rank=runs)
    seen = {}
    for number, (name, (logits, targets)) in enumerate(cases.items()):
        whole = logits.double().requires_grad_()
        loss = F.cross_entropy(whole, targets, ignore_index=-1)
        (loss * factors[name]).backward()
        seen[name] = SimpleNamespace(
            results=[result["cases"][number] for result in results],
            loss=loss.detach(),
            gradient=whole.grad,
            softmax=softmax_part(whole.detach(), targets, factors[name]),
            logits=logits,
            targets=targets,
        )
    return seen


def softmax_part(logits: Tensor, targets: Tensor, factor: float) -> Tensor:
    """The gradient of the mean without what comes through the target's logit."""
    counted = targets != -1
    return factor * logits.softmax(-1) * counted.unsqueeze(1) / counted.sum()


def entropy_alternatives(seen: SimpleNamespace, n: int) -> dict:
    logits, targets = seen.logits.double(), seen.targets
    counted = targets != -1
    each = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    zeroed = F.cross_entropy(logits, targets.clamp(min=0), reduction="none")
    mine = [
        shard.logsumexp(-1)[counted].mean()
        - logits.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)[counted].mean()
        for shard in parts(logits, -1, n)
    ]
    return {
        "divided by all targets, ignored ones too": each.sum() / len(targets),
        "ignored targets (-1) were counted as if they were token 0": zeroed.mean(),
        "the sum over the targets, where the mean belongs": each.sum(),
        "the sum of exponentials of this rank's part alone": mine,
    }


@check("vocab_parallel_cross_entropy")
def loss_is_the_dense_one(trial: Trial) -> None:
    """The loss is the mean over the counted targets, the same on every rank."""
    for name in ("plain", "with ignored targets", "all targets on the last rank"):
        seen = trial.once(observe_entropy)[name]
        alternatives = entropy_alternatives(seen, trial.num_ranks)
        trial.close(f"the loss ({name})", each_rank(seen, "loss"), seen.loss, alternatives=alternatives)


@check("vocab_parallel_cross_entropy")
def loss_is_stable(trial: Trial) -> None:
    """Logits in the thousands, and columns of -inf, give the right loss and gradient: no inf, no NaN."""
    for name in ("large logits", "padded vocabulary"):
        seen = trial.once(observe_entropy)[name]
        help = "Subtract the largest logit of the whole row, over all ranks, before exp."
        trial.close(f"the loss ({name})", each_rank(seen, "loss"), seen.loss, help=help)
        entropy_gradient(trial, seen, name)


def entropy_gradient(trial: Trial, seen: SimpleNamespace, name: str) -> None:
    n = trial.num_ranks
    own = parts(seen.gradient, -1, n)
    trial.close(
        f"the gradient of the logits ({name})",
        each_rank(seen, "gradient"),
        own,
        alternatives={
            "n times too large: backward summed over the ranks": [n * g for g in own],
            "the target's part is missing: only the softmax is there": parts(seen.softmax, -1, n),
        },
        help="softmax minus one at the target, divided by the number of counted targets.",
    )


@check("vocab_parallel_cross_entropy")
def logits_gradient_is_the_dense_one(trial: Trial) -> None:
    """The gradient of this rank's logits is that slice of the dense gradient, zero for ignored targets."""
    for name in ("plain", "with ignored targets", "all targets on the last rank"):
        entropy_gradient(trial, trial.once(observe_entropy)[name], name)


@check("vocab_parallel_cross_entropy")
def only_a_few_numbers_a_token_travel(trial: Trial) -> None:
    """Only (N,) vectors and scalars travel, a handful in all, forward and backward."""
    n = trial.num_ranks
    for seen in trial.once(observe_entropy).values():
        num_targets = len(seen.targets)
        for rank, recording in enumerate(each_rank(seen, "recording")):
            sizes = [
                event.num_elements / (n if event.kind == "all_gather" else 1) for event in recording.select()
            ]
            trial.require(
                max(sizes, default=0) <= 4 * num_targets and sum(sizes) <= 6 * num_targets + 16,
                f"for {num_targets} targets there travelled: {told(recording.select())}",
                help="Three numbers a token are enough: the largest logit, the sum of exponentials, the "
                "target's logit.",
                rank=rank,
            )


@check("vocab_parallel_cross_entropy")
def full_logits_never_exist(trial: Trial) -> None:
    """No rank ever makes a tensor as large as the full logits, and the inputs are left alone."""
    for seen in trial.once(observe_entropy).values():
        for rank, result in enumerate(seen.results):
            largest = result["recording"].largest_elements
            trial.require(
                trial.num_ranks == 1 or largest <= 0.8 * seen.logits.numel(),
                f"a tensor of {largest:,} numbers was made, where this rank's logits are "
                f"{seen.logits.numel() // trial.num_ranks:,} of {seen.logits.numel():,}",
                help="Reduce your part of each row to one number before anything is sent.",
                rank=rank,
            )
            trial.require(
                result["unchanged"],
                "logits or targets were changed in place",
                help="Work on copies.",
                rank=rank,
            )


# The whole model

exercise(
    "tensor_parallelize",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Every piece exists: each block's attention and MLP, the token table, the loss. GPT.loss may be "
        "replaced on the model: model.loss = a function of (logits, targets).",
        "wte and lm_head share one Parameter in the dense model. Which layer gives this rank's logits from "
        "this rank's rows, and completes the gradient of its input?",
        "A vocabulary that does not divide: rows of zeros give logits of 0, which are words to a softmax. "
        "For sampling, forward without targets must return whole logits: a forward hook can gather them.",
    ),
)


def model_probe(rank, cases: list) -> list[dict]:
    return [one_model(rank, *case) for case in cases]


def one_model(rank, config: dict, weights: dict, idx: Tensor, targets: Tensor) -> dict:
    model = built(rank, config, weights)
    with rank.record() as recording:
        logits, loss = model(idx, targets)
        recording.mark(BACKWARD)
        loss.backward()
    held = describe(model)
    model(idx, targets)[1].backward()
    model.eval()
    with torch.no_grad():
        last, none = model(idx)
    named = dict(model.named_parameters(remove_duplicate=False))
    head, table = named.get("lm_head.weight"), named.get("transformer.wte.weight")
    return {
        "loss": loss,
        "logits": logits,
        "last": last,
        "no_loss": none is None,
        "tied": head is not None and table is not None and head.data_ptr() == table.data_ptr(),
        "twice": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        "recording": recording,
        **held,
    }


def built(rank, config: dict, weights: dict) -> nn.Module:
    """On a rank: the dense model with the judge's weights, given to the learner's function."""
    model = GPT(GPTConfig(**config))
    model.load_state_dict(weights, strict=False)  # the tied table comes once
    return rank.submission.tensor_parallelize(model.to(rank.device), rank.group)


def dense_model(config: dict, weights: dict) -> GPT:
    model = GPT(GPTConfig(**config))
    model.load_state_dict(weights, strict=False)
    return model.double()


def observe_model(trial: Trial) -> dict[str, SimpleNamespace]:
    uneven = small_config(trial, bias=False, vocab_size=undividable(trial, 30))
    seen = {
        "v divides": model_case(trial, small_config(trial, bias=True)),
        "v does not divide": model_case(trial, uneven),
    }
    cases = [(case.config, case.weights, case.idx, case.targets) for case in seen.values()]
    results = trial.run(model_probe, cases)
    for number, case in enumerate(seen.values()):
        case.results = [result[number] for result in results]
    return seen


def model_case(trial: Trial, config: dict) -> SimpleNamespace:
    weights = weights_of(drawn_alike(GPT(GPTConfig(**config)), trial))
    shape = (trial.integer(2, 3), trial.integer(5, 9))
    idx, targets = trial.tokens(config["vocab_size"], *shape), trial.tokens(config["vocab_size"], *shape)
    targets[0, : trial.integer(1, 3)] = -1
    dense = dense_model(config, weights)
    logits, loss = dense(idx, targets)
    loss.backward()
    gradients = {name: p.grad for name, p in dense.named_parameters()}
    with torch.no_grad():
        last, _ = dense(idx)
    return SimpleNamespace(
        config=config, weights=weights, idx=idx, targets=targets, gradients=gradients,
        loss=loss.detach(), logits=logits.detach(), last=last,
    )  # fmt: skip


TABLE = ("transformer.wte.weight", "lm_head.weight")
CUTS = {
    "attn.c_proj.weight": 1,
    "mlp.c_fc.weight": 0,
    "mlp.c_fc.bias": 0,
    "mlp.c_proj.weight": 1,
}


def cut_dim(name: str) -> int | None:
    """Along which dimension a parameter of GPT is cut, None if replicated (see is_special for the others)."""
    return next((dim for suffix, dim in CUTS.items() if name.endswith(suffix)), None)


def is_special(name: str) -> bool:
    return name in TABLE or ".c_attn." in name


def shared_table(tensors: dict) -> Tensor | None:
    """The token table, under whichever of its two names comes first."""
    return next((tensors[name] for name in TABLE if name in tensors), None)


def dense_table(seen: SimpleNamespace, tensors: dict) -> Tensor:
    table = shared_table(tensors)
    assert table is not None
    return table


@check("tensor_parallelize")
def model_loss_is_the_dense_one(trial: Trial) -> None:
    """The loss is the dense model's on every rank."""
    for name, seen in trial.once(observe_model).items():
        v, n = seen.config["vocab_size"], trial.num_ranks
        padding = torch.zeros(*seen.logits.shape[:-1], -v % n, dtype=torch.float64)
        padded = torch.cat([seen.logits, padding], -1)
        counted = F.cross_entropy(padded.flatten(0, 1), seen.targets.flatten(), ignore_index=-1)
        trial.close(
            f"the loss ({name})",
            each_rank(seen, "loss"),
            seen.loss,
            alternatives={"the rows that pad the vocabulary were counted as words": counted},
        )


@check("tensor_parallelize")
def logits_are_cut_in_training_and_whole_for_sampling(trial: Trial) -> None:
    """With targets the logits are this rank's part, without them those of the last position, whole."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_model).items():
        v = seen.config["vocab_size"]
        share = -(-v // n)
        for rank, result in enumerate(seen.results):
            logits = result["logits"]
            trial.require(
                isinstance(logits, Tensor) and logits.shape[:-1] == seen.logits.shape[:-1],
                f"the logits with targets have shape {tuple(getattr(logits, 'shape', ()))}, where (b, s) = "
                f"{tuple(seen.idx.shape)} and at most {share} columns are expected ({name})",
                rank=rank,
            )
            trial.require(
                logits.size(-1) <= share,
                f"the logits with targets have {logits.size(-1)} columns of a vocabulary of {v}: more than "
                f"the {share} of this rank's part",
                help="The whole logits are the largest tensor of a step: leave them cut.",
                rank=rank,
            )
            trial.require(result["no_loss"], "a loss was returned without targets", rank=rank)
        trial.close(
            f"the logits of the last position ({name})",
            each_rank(seen, "last"),
            seen.last,
            help="Without targets gather the ranks' parts, and cut off what pads the vocabulary.",
        )
        ranges = row_ranges(
            dense_table(seen, seen.weights), [shared_table(w) for w in each_rank(seen, "weights")]
        )
        if ranges is not None:
            trial.close(
                f"this rank's logits ({name})",
                [r["logits"][..., :size] for r, (_, size) in zip(seen.results, ranges, strict=True)],
                [seen.logits[..., first : first + size] for first, size in ranges],
            )


@check("tensor_parallelize")
def every_matrix_is_cut(trial: Trial) -> None:
    """Every matrix of attention and MLP and the token table are shards; the table stays tied."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_model).items():
        for rank, result in enumerate(seen.results):
            held = result["weights"]
            missing = sorted(set(seen.weights) - set(held) - set(TABLE))
            trial.require(
                not missing,
                f"these parameters are missing: {', '.join(missing)}",
                help="Parameter names stay GPT's.",
                rank=rank,
            )
            table = shared_table(held)
            trial.require(table is not None, "there is no transformer.wte.weight", rank=rank)
            share = -(-seen.config["vocab_size"] // n)
            trial.require(
                table.size(0) <= share,
                f"the token table has {table.size(0)} rows on this rank, where {share} is its share ({name})",
                rank=rank,
            )
            trial.require(
                result["tied"] and not all(t in held for t in TABLE),
                "lm_head and wte have weights of their own: the table was untied",
                help="model.lm_head.weight = model.transformer.wte.weight, after both are cut.",
                rank=rank,
            )
        trial.require(
            row_ranges(dense_table(seen, seen.weights), [shared_table(w) for w in each_rank(seen, "weights")])
            is not None,
            f"the ranks' rows of the token table, joined, are not the table ({name})",
        )
        for parameter, whole in seen.weights.items():
            if is_special(parameter):
                continue
            dim = cut_dim(parameter)
            expected = whole if dim is None else parts(whole, dim, n)
            trial.close(parameter, each_rank(seen, "weights", parameter), expected)
        for layer in range(seen.config["n_layer"]):
            fused = fused_of(seen.weights, layer)
            for rank, held in enumerate(each_rank(seen, "weights")):
                trial.require(
                    row_order(fused_of(held, layer), heads_of(fused, rank, n)) is not None,
                    f"c_attn of block {layer} does not hold this rank's heads of q, of k and of v",
                    rank=rank,
                )
        stand_alone(trial, seen.results)


def fused_of(tensors: dict, layer: int) -> Tensor:
    prefix = f"transformer.h.{layer}.attn."
    return fused_with_bias({k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)})


@check("tensor_parallelize")
def replicated_gradients_are_complete(trial: Trial) -> None:
    """Norms, positions and the biases after a sum have the dense model's gradient, the same on every rank."""
    for name, seen in trial.once(observe_model).items():
        for parameter, whole in seen.gradients.items():
            if is_special(parameter) or cut_dim(parameter) is not None:
                continue
            trial.close(
                f"the gradient of {parameter} ({name})",
                [g.get(parameter) for g in each_rank(seen, "gradients")],
                whole,
                help="A gradient that differs by rank is partial: somewhere above, a replicated tensor "
                "enters sharded computation without copy_to_group. Attention, MLP, or the head?",
            )


@check("tensor_parallelize")
def shard_gradients_are_the_dense_models(trial: Trial) -> None:
    """Every shard has its part of the dense model's gradient, and a second backward adds to it."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_model).items():
        for parameter, whole in seen.gradients.items():
            if is_special(parameter):
                continue
            dim = cut_dim(parameter)
            expected = [whole] * n if dim is None else parts(whole, dim, n)
            trial.close(
                f"the gradient of {parameter} after two passes ({name})",
                [g.get(parameter) for g in each_rank(seen, "twice")],
                [2 * g for g in expected],
                alternatives={"that of one pass": expected},
            )
        table_gradients(trial, name, seen)
        for layer in range(seen.config["n_layer"]):
            fused, gradient = fused_of(seen.weights, layer), fused_of(seen.gradients, layer)
            orders = [
                row_order(fused_of(held, layer), heads_of(fused, rank, n))
                for rank, held in enumerate(each_rank(seen, "weights"))
            ]
            if None not in orders:
                trial.close(
                    f"the gradient of c_attn of block {layer} ({name})",
                    [fused_of(g, layer) for g in each_rank(seen, "gradients")],
                    [heads_of(gradient, rank, n)[order] for rank, order in enumerate(orders)],
                )


def table_gradients(trial: Trial, name: str, seen: SimpleNamespace) -> None:
    ranges = row_ranges(
        dense_table(seen, seen.weights), [shared_table(w) for w in each_rank(seen, "weights")]
    )
    if ranges is None:
        return
    whole = dense_table(seen, seen.gradients)
    actual = [shared_table(g) for g in each_rank(seen, "gradients")]
    trial.close(
        f"the gradient of the token table ({name})",
        [None if a is None else a[:size] for a, (_, size) in zip(actual, ranges, strict=True)],
        [whole[first : first + size] for first, size in ranges],
        help="The table is used twice, as embedding and as head; its gradient is the sum of both.",
    )


@check("tensor_parallelize")
def model_communicates_twice_a_block_each_way(trial: Trial) -> None:
    """Two all-reduces of b·s·h a block each way, one for the vocabulary, a few numbers for the loss."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_model).items():
        tokens, layers = seen.idx.numel(), seen.config["n_layer"]
        one = 2 * (n - 1) / n * tokens * seen.config["n_embd"] * 4
        for rank, recording in enumerate(each_rank(seen, "recording")):
            for stretch, few in (("", 6 * 8 * tokens), (BACKWARD, 2 * 8 * tokens)):
                events = recording.select(None, stretch)
                sent, allowed = wire_bytes(events, n), (2 * layers + 1) * one + few
                trial.require(
                    sent <= allowed + SLACK * n * max(1, len(events)),
                    f"the {'backward' if stretch else 'forward'} sent about {sent:,.0f} bytes from here; "
                    f"{2 * layers + 1} all-reduces of b·s·h and a few numbers a token are {allowed:,.0f} "
                    f"({name}); the largest: {told(sorted(events, key=lambda event: -event.num_bytes))}",
                    help="Two all-reduces a block each way, and the vocabulary's; no shards, no logits.",
                    rank=rank,
                )


@check("tensor_parallelize")
def model_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the dense model's products, forward and backward."""
    n = trial.num_ranks
    for seen in trial.once(observe_model).values():
        b, s = seen.idx.shape
        h, layers, v = (seen.config[key] for key in ("n_embd", "n_layer", "vocab_size"))
        forward = layers * (24 * b * s * h * h + 4 * b * s * s * h) + 2 * b * s * h * n * -(-v // n)
        computes_a_share(trial, seen, "", forward / n)


def stream_probe(rank, config: dict, weights: dict, idx: Tensor, targets: Tensor, seed: int) -> dict:
    """What enters each block and leaves the last, twice in training mode and once in eval mode."""
    rank.seed(seed)
    model = built(rank, config, weights).train()
    rank.seed(seed + 1)
    stream: list[Tensor] = []
    blocks = model.transformer.h
    for block in blocks:
        block.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0].detach().clone()))
        block.register_forward_hook(lambda _, inputs, output: stream.append(output.detach().clone()))
    losses = [model(idx, targets)[1] for _ in range(2)]
    half = len(stream) // 2
    model.eval()
    asleep = model(idx, targets)[1]
    return {"first": stream[:half], "second": stream[half : 2 * half], "losses": losses, "asleep": asleep}


@check("tensor_parallelize", world_sizes=(2, 1, 4))
def dropout_after_a_sum_is_the_same_everywhere(trial: Trial) -> None:
    """With dropout the residual stream stays the same on every rank, however the ranks are seeded."""
    config = small_config(trial, dropout=0.3)
    model = drawn_alike(GPT(GPTConfig(**config)), trial)
    weights = weights_of(model)
    idx, targets = (trial.tokens(config["vocab_size"], 2, 8) for _ in range(2))
    base = trial.integer(1, 10**6)
    runs = [(config, weights, idx, targets, base + 10 * rank) for rank in range(trial.num_ranks)]
    results = trial.run(stream_probe, per_rank=runs)
    for rank, result in enumerate(results):
        for place, (mine, first) in enumerate(zip(result["first"], results[0]["first"], strict=True)):
            where = f"block {place // 2}" if place % 2 == 0 else f"what follows block {place // 2}"
            trial.require(
                torch.allclose(mine, first, rtol=1e-4, atol=1e-5),
                f"what enters {where} differs from rank 0's: their dropouts drop different elements"
                if place % 2 == 0
                else f"{where} differs from rank 0's: a dropout of that block drops different elements",
                help="The ranks are seeded differently. Share transformer.drop and both dropouts of a block.",
                rank=rank,
            )
        zeros = (result["first"][0] == 0).double().mean().item()
        trial.require(
            0.1 < zeros < 0.5 and not torch.equal(result["first"][0], result["second"][0]),
            "the embedding's dropout does not drop at random in training mode",
            rank=rank,
        )
    dense = dense_model(config, weights).eval()
    trial.close("the loss in eval mode", [r["asleep"] for r in results], dense(idx, targets)[1].detach())


def sampling_probe(rank, config: dict, weights: dict, idx: Tensor, steps: int) -> dict:
    model = built(rank, config, weights).eval()
    greedy = model.generate(idx, steps, top_k=1)
    rank.seed(7)
    return {"greedy": greedy, "sampled": model.generate(idx, steps)}


@check("tensor_parallelize", world_sizes=(2, 4), subgroup=False)
def generate_still_works(trial: Trial) -> None:
    """`model.generate` gives the dense model's tokens, and the same ones on every rank."""
    config = small_config(trial, vocab_size=undividable(trial, 30))
    model = drawn_alike(GPT(GPTConfig(**config)), trial)
    weights = weights_of(model)
    idx = trial.tokens(config["vocab_size"], 2, 3)
    results = trial.run(sampling_probe, config, weights, idx, 6)
    dense = dense_model(config, weights).eval()
    greedy = dense.generate(idx, 6, top_k=1)
    for rank, result in enumerate(results):
        trial.require(
            torch.equal(result["greedy"], greedy),
            f"with top_k=1 it continued {idx[0].tolist()} by {result['greedy'][0, 3:].tolist()}, the dense "
            f"model by {greedy[0, 3:].tolist()}",
            help="generate needs whole logits: (b, 1, v) without targets.",
            rank=rank,
        )
        trial.require(
            torch.equal(result["sampled"], results[0]["sampled"]),
            "ranks that are seeded alike sampled different tokens",
            rank=rank,
        )


def training_probe(rank, config: dict, weights: dict, batches: list) -> dict:
    return {name: train(built(rank, config, weights), batches, name) for name in ("SGD", "AdamW")}


def train(model: nn.Module, batches: list, name: str) -> Tensor:
    rates = {"SGD": {"lr": 0.1, "momentum": 0.5}, "AdamW": {"lr": 3e-3, "weight_decay": 0.1}}
    optimizer = getattr(torch.optim, name)(model.parameters(), **rates[name])
    losses = []
    for idx, targets in batches:
        loss = model(idx, targets)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@check("tensor_parallelize", world_sizes=(2, 4), subgroup=False)
def training_curve_is_the_dense_one(trial: Trial) -> None:
    """The losses of a few steps lie on the dense model's, with SGD and with AdamW."""
    config = small_config(trial, vocab_size=undividable(trial, 30))
    weights = weights_of(GPT(GPTConfig(**config)))
    weights = {k: w + 0.1 * trial.normal(*w.shape) for k, w in weights.items()}
    batches = [[trial.tokens(config["vocab_size"], 2, 8) for _ in range(2)] for _ in range(5)]
    results = trial.run(training_probe, config, weights, batches)
    for name in ("SGD", "AdamW"):
        expected = train(dense_model(config, weights), batches, name)
        what = f"the losses of {len(batches)} steps of {name}"
        trial.close(what, each_rank(SimpleNamespace(results=results), name), expected, rtol=2e-3)


def model_refusal_probe(rank, config: dict) -> dict:
    return {"error": error_of(rank.submission.tensor_parallelize, GPT(GPTConfig(**config)), rank.group)}


@check("tensor_parallelize", world_sizes=(2, 4), subgroup=False)
def model_refuses_heads_that_do_not_divide(trial: Trial) -> None:
    """A number of heads that does not divide by the ranks is a ValueError that names both numbers."""
    heads = undividable(trial)
    config = small_config(trial, n_head=heads, n_embd=heads * 12)
    refused(trial, SimpleNamespace(results=trial.run(model_refusal_probe, config)), heads)


# Find the bug

exercise(
    "MultiQueryAttention",
    world_sizes=SIZES,
    subgroup=True,
    uses=("ColumnParallelLinear", "RowParallelLinear"),
    hints=(
        "Draw it: what is replicated, what is cut? Go along each path from replicated to cut, and ask what "
        "completes the gradient there.",
        "There are two paths from x to the heads. One leads through ColumnParallelLinear, which takes care "
        "of itself. The other leads through key_value.",
        "The hook repairs the gradient of key_value's weights, and nothing below them. Where would one "
        "all-reduce repair both?",
    ),
)


class DenseMultiQueryAttention(nn.Module):
    """What the program computes, on one process, under the same names."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_size = width // num_heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * self.head_size)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.query(x).view(b, s, -1, self.head_size).transpose(1, 2)
        k, v = (part.unsqueeze(1).expand_as(q) for part in self.key_value(x).chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))


MULTI_QUERY_CUTS = {"query.weight": 0, "query.bias": 0, "project.weight": 1}


def multi_query_probe(rank, width: int, num_heads: int, weights: dict, x: Tensor, upstream: Tensor) -> dict:
    layer = rank.submission.MultiQueryAttention(width, num_heads, group=rank.group)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(weights[name])
    x = x.clone().requires_grad_()
    with rank.record() as recording:
        y = layer(x)
        recording.mark(BACKWARD)
        backward(y, upstream)
    held = describe(layer)
    gradient = None if x.grad is None else x.grad.clone()
    backward(layer(x), upstream)
    twice = describe(layer)["gradients"]
    return {"output": y, "gradient": gradient, "recording": recording, **held, "twice": twice}


def observe_multi_query(trial: Trial) -> SimpleNamespace:
    n, num_heads = trial.num_ranks, 12
    width = num_heads * trial.integer(2, 4)
    dense = drawn_alike(DenseMultiQueryAttention(width, num_heads), trial)
    weights = weights_of(dense)

    def cut(name: str, whole: Tensor, rank: int) -> Tensor:
        dim = MULTI_QUERY_CUTS.get(name)
        return whole if dim is None else own_part(whole, dim, rank, n).contiguous()

    x, upstream = (trial.normal(2, 6, width) for _ in range(2))
    shards = [{name: cut(name, w, rank) for name, w in weights.items()} for rank in range(n)]
    runs = [(width, num_heads, shard, x, upstream) for shard in shards]
    results = trial.run(multi_query_probe, per_rank=runs)
    expected = dense_branch(dense, x, upstream)
    gradients = {name: [cut(name, g, rank) for rank in range(n)] for name, g in expected.gradients.items()}
    return SimpleNamespace(
        results=results, output=expected.output, x_gradient=expected.x, gradients=gradients, x=x, width=width
    )


@check("MultiQueryAttention")
def forward_stays_right(trial: Trial) -> None:
    """The output is that of the dense attention (it was before, too)."""
    seen = trial.once(observe_multi_query)
    trial.close("the output", each_rank(seen, "output"), seen.output)


@check("MultiQueryAttention")
def gradient_of_x_is_complete(trial: Trial) -> None:
    """The gradient of x is the dense one, the same on every rank."""
    seen = trial.once(observe_multi_query)
    trial.close(
        "the gradient of x",
        each_rank(seen, "gradient"),
        seen.x_gradient,
        help="One part came through the queries, one through the keys and values. Which of them is partial?",
    )


@check("MultiQueryAttention")
def gradients_of_all_weights_are_complete(trial: Trial) -> None:
    """Every weight has the dense gradient, key_value's the same on every rank, and two passes add up."""
    seen = trial.once(observe_multi_query)
    n = trial.num_ranks
    for name, expected in seen.gradients.items():
        actual = [g.get(name) for g in each_rank(seen, "twice")]
        trial.close(
            f"the gradient of {name} after two passes",
            actual,
            [2 * g for g in expected],
            alternatives={
                "summed twice: once in copy_to_group, and once more by the hook": [
                    2 * n * g for g in expected
                ]
            },
            help="key_value is replicated: its gradient needs one sum over the ranks, no more and no less.",
        )


@check("MultiQueryAttention")
def bug_fix_sends_little(trial: Trial) -> None:
    """The forward still sends one all-reduce; the backward the gradients of x and of the one key head."""
    seen = trial.once(observe_multi_query)
    n = trial.num_ranks
    one_all_reduce(trial, seen, "", seen.output.numel() * 4, "The forward was right: leave it as it is.")
    small = sum(g[0].numel() * 4 for name, g in seen.gradients.items() if name.startswith("key_value"))
    allowed = 2 * (n - 1) / n * (2 * seen.x.numel() * 4 + small) + SLACK * n
    for rank, recording in enumerate(each_rank(seen, "recording")):
        events = recording.select(None, BACKWARD)
        trial.require(
            wire_bytes(events, n) <= allowed,
            f"the backward sent {told(events)}: more than the gradients of x and of the one key head need",
            rank=rank,
        )


# The workshop's exercise: an edited copy of nanogpt/model.py

exercise(
    "GPT",
    optional=True,
    subgroup=True,
    hints=(
        "Follow the group: GPT(config, group) to Block(config, group) to MLP(config, group).",
        "group=None must still be the dense model. In MLP, pick the class of the two linear layers by it.",
        "GPT._init_weights looks for nn.Linear: are your parallel layers one? And are slices that are drawn "
        "from one seed on all ranks different slices?",
    ),
)


def workshop_probe(rank, config: dict, weights: dict, idx: Tensor, targets: Tensor) -> dict:
    model_class = rank.submission.GPT
    dense = model_class(GPTConfig(**config))
    dense_shapes = {name: list(p.shape) for name, p in dense.named_parameters()}
    model = model_class(GPTConfig(**config), rank.group).to(rank.device)
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    initial = {name: p.detach().clone() for name, p in model.named_parameters() if ".mlp." in name}
    held = {name: storage_bytes([p]) for name, p in model.named_parameters()}
    fits = all(list(weights[name].shape) == shape for name, shape in shapes.items() if name in weights)
    answer = {"shapes": shapes, "dense_shapes": dense_shapes, "initial": initial, "held": held, "fits": fits}
    if not fits or any(name not in weights for name in shapes):
        return answer
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    with rank.record() as recording:
        _, loss = model(idx, targets)
        recording.mark(BACKWARD)
        loss.backward()
    return answer | {"loss": loss, "recording": recording, **describe(model)}


def observe_workshop(trial: Trial) -> SimpleNamespace:
    n = trial.num_ranks
    config = small_config(trial)
    model = drawn_alike(GPT(GPTConfig(**config)), trial)
    weights = weights_of(model)

    def cut(name: str, whole: Tensor, rank: int) -> Tensor:
        dim = cut_dim(name) if ".mlp." in name else None
        return whole if dim is None else own_part(whole, dim, rank, n).contiguous()

    shards = [{name: cut(name, w, rank) for name, w in weights.items()} for rank in range(n)]
    idx, targets = (trial.tokens(config["vocab_size"], 2, 7) for _ in range(2))
    results = trial.run(workshop_probe, per_rank=[(config, shard, idx, targets) for shard in shards])
    dense = dense_model(config, weights)
    loss = dense(idx, targets)[1]
    loss.backward()
    gradients = {name: [cut(name, p.grad, rank) for rank in range(n)] for name, p in dense.named_parameters()}
    alternatives = {
        f"the bias of c_proj was added {times}": workshop_loss(config, weights, idx, targets, factor)
        for times, factor in (("n times, by each rank before the sum", n), ("never", 0))
    }
    alternatives["nothing was summed over the ranks: each has its partial sum"] = [
        workshop_loss(config, weights, idx, targets, 1, own=(rank, n)) for rank in range(n)
    ]
    return SimpleNamespace(
        results=results, config=config, shards=shards, loss=loss.detach(), gradients=gradients, idx=idx,
        alternatives=alternatives,
    )  # fmt: skip


def workshop_loss(
    config: dict, weights: dict, idx: Tensor, targets: Tensor, bias_factor: int, own: tuple = (0, 1)
) -> Tensor:
    """The dense loss, with c_proj's bias that many times, and with one rank's hidden features alone."""
    changed = dict(weights)
    for name, weight in weights.items():
        if name.endswith("mlp.c_proj.bias"):
            changed[name] = bias_factor * weight
        if name.endswith("mlp.c_proj.weight"):
            rank, n = own
            mask = (
                torch.zeros(n).index_fill(0, torch.tensor(rank), 1.0).repeat_interleave(weight.size(1) // n)
            )
            changed[name] = weight * mask
    return dense_model(config, changed)(idx, targets)[1].detach()


@check("GPT")
def mlps_are_cut(trial: Trial) -> None:
    """Given a group, every MLP holds this rank's shards, and nothing else changed its shape or name."""
    seen = trial.once(observe_workshop)
    for rank, result in enumerate(seen.results):
        names = set(seen.shards[rank])
        trial.require(
            set(result["shapes"]) == names,
            f"the parameters' names changed: {', '.join(sorted(set(result['shapes']) ^ names)[:4])}",
            help="The layers keep their attributes: mlp.c_fc and mlp.c_proj, each with weight and bias.",
            rank=rank,
        )
        for name, shape in result["shapes"].items():
            expected = list(seen.shards[rank][name].shape)
            trial.require(
                shape == expected,
                f"{name} is {tuple(shape)} on this rank, where {tuple(expected)} is expected",
                help="c_fc is cut by output features, c_proj by input features; hand the group down to them.",
                rank=rank,
            )
            own = math.prod(shape) * 4
            trial.require(
                result["held"][name] <= own, f"{name} is a view that keeps the whole alive", rank=rank
            )


@check("GPT")
def dense_model_is_still_there(trial: Trial) -> None:
    """Without a group it is the dense model."""
    seen = trial.once(observe_workshop)
    dense = {name: list(p.shape) for name, p in GPT(GPTConfig(**seen.config)).named_parameters()}
    for rank, result in enumerate(seen.results):
        trial.require(
            result["dense_shapes"] == dense,
            "GPT(config) has other parameters than the dense model",
            rank=rank,
        )


def ran(trial: Trial) -> SimpleNamespace:
    """The observation, if the parameters could be filled and the model ran."""
    seen = trial.once(observe_workshop)
    if any("loss" not in result for result in seen.results):
        trial.wrong("the parameters do not have the shapes of shards, so the model was not run (see above)")
    return seen


@check("GPT")
def edited_models_loss_is_the_dense_one(trial: Trial) -> None:
    """The loss is the dense model's on every rank."""
    seen = ran(trial)
    trial.close("the loss", each_rank(seen, "loss"), seen.loss, alternatives=seen.alternatives)


@check("GPT")
def edited_models_gradients_are_the_dense_ones(trial: Trial) -> None:
    """Every gradient is complete, and the same on every rank where the parameter is replicated."""
    seen = ran(trial)
    n = trial.num_ranks
    for name, expected in seen.gradients.items():
        trial.close(
            f"the gradient of {name}",
            [g.get(name) for g in each_rank(seen, "gradients")],
            expected,
            alternatives={"n times too large: a sum too many": [n * g for g in expected]},
            help="Partial gradients below an MLP come from a c_fc that does not sum its input's gradient.",
        )


@check("GPT")
def edited_model_sums_once_a_block_each_way(trial: Trial) -> None:
    """Each MLP costs one all-reduce of b·s·h forward and one backward, and nothing else travels."""
    seen = ran(trial)
    n, layers = trial.num_ranks, seen.config["n_layer"]
    one = 2 * (n - 1) / n * seen.idx.numel() * seen.config["n_embd"] * 4
    for rank, recording in enumerate(each_rank(seen, "recording")):
        for stretch in ("", BACKWARD):
            events = recording.select(None, stretch)
            trial.require(
                wire_bytes(events, n) <= layers * one + SLACK * n * layers,
                f"the {'backward' if stretch else 'forward'} sent {told(events)}, where {layers} all-reduces "
                "of b·s·h belong",
                rank=rank,
            )
            trial.require(
                n == 1 or bool(events),
                f"the {'backward' if stretch else 'forward'} communicated nothing",
                rank=rank,
            )


@check("GPT")
def edited_model_starts_at_random(trial: Trial) -> None:
    """The MLPs start with small random weights, other ones on every rank."""
    seen = trial.once(observe_workshop)
    for rank, result in enumerate(seen.results):
        for name, initial in result["initial"].items():
            if not name.endswith("weight"):
                continue
            spread = initial.double().std().item()
            trial.require(
                1e-4 < spread < 0.5,
                f"{name} starts with a standard deviation of {spread:.3g}; GPT-2 has 0.02 (c_proj less)",
                help="_init_weights only knows nn.Linear: tell it of your layers.",
                rank=rank,
            )
            trial.require(
                not any(torch.equal(initial, other["initial"][name]) for other in seen.results[:rank]),
                f"{name} starts with the same numbers on two ranks: they are not slices of one matrix",
                rank=rank,
            )
