"""The four functions between replicated and cut tensors."""

from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import BACKWARD, Trial, backward, check, each_rank, exercise, parts, told

from .shared import SIZES, SLACK, error_of, nothing_travels, one_all_reduce, refused, undividable, wire_bytes

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
