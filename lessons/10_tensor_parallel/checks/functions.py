"""The four functions between replicated and cut tensors."""

import gc
import weakref
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import BACKWARD, Trial, check, each_rank, exercise, parts
from lessons_shared.pairs import Pairs, bytes_held
from lessons_shared.refusals import refusal_of, refused, undividable
from lessons_shared.wire import nothing_travels

from .shared import SIZES, gather_costs, one_all_reduce, used_twice, uses_add_up

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


def drawn(
    trial: Trial, name: str, dtype: torch.dtype = torch.float32, number: bool = False
) -> SimpleNamespace:
    """x and the upstream gradient by rank, alike or different as the contract has it, and what is right.

    They are tensors of two or three dimensions, or one `number` without dimensions.
    """
    n = trial.num_ranks
    width = trial.integer(5, 9)
    shapes = [(trial.integer(3, 4), trial.integer(4, 5)), (trial.integer(12, 15),)]
    shape = shapes[0] if trial.in_full else trial.choice(shapes)
    large, small = (*shape, n * width), () if number else (*shape, width)

    def normal(sizes: tuple) -> Tensor:
        return trial.normal(*(sizes or (1,)), dtype=torch.float64).to(dtype).view(sizes)

    def alike(sizes: tuple) -> list[Tensor]:
        return [normal(sizes)] * n

    def different(sizes: tuple) -> list[Tensor]:
        return [normal(sizes) for _ in range(n)]

    def summed(tensors: list[Tensor]) -> list[Tensor]:
        return [sum(tensor.double() for tensor in tensors)] * n

    def joined(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat(tensors, -1)] * n

    if name == "copy_to_group":
        xs, upstreams = alike(small), different(small)
        outputs, gradients = xs, summed(upstreams)
    elif name == "reduce_from_group":
        xs, upstreams = different(small), alike(small)
        outputs, gradients = summed(xs), upstreams
    elif name == "gather_from_group":
        xs, upstreams = different(small), alike(large)
        outputs, gradients = joined(xs), parts(upstreams[0], -1, n)
    else:
        xs, upstreams = alike(large), different(small)
        outputs, gradients = parts(xs[0], -1, n), joined(upstreams)
    return SimpleNamespace(xs=xs, upstreams=upstreams, outputs=outputs, gradients=gradients)


PAIRS = Pairs(drawn, leading=2)


def one_number(trial: Trial, name: str) -> dict[str, SimpleNamespace]:
    """The case of an x without dimensions, by what is said of it."""
    return {"a single number": drawn(trial, name, number=True)}


@check("copy_to_group")
def output_is_the_input(trial: Trial) -> None:
    """The forward returns x as it is."""
    seen = PAIRS.plain(trial, "copy_to_group")
    trial.close("the output", each_rank(seen, "output"), seen.outputs)


@check("copy_to_group")
def gradient_is_summed_over_ranks(trial: Trial) -> None:
    """The gradient of the input is the sum of the gradients of all ranks."""
    seen = PAIRS.plain(trial, "copy_to_group")
    trial.close(
        "the gradient of x",
        each_rank(seen, "gradient"),
        seen.gradients,
        alternatives={
            "this rank's own gradient alone: nothing was summed": seen.upstreams,
            "the mean over the ranks, where the sum belongs": seen.gradients[0] / trial.num_ranks,
        },
        terms=seen.upstreams,
        help="Every rank used x for another part of the work: add up what they found, in backward.",
    )


def shared_use_probe(rank, x: Tensor, upstream: Tensor, beside: Tensor) -> dict:
    def use(handed: Tensor) -> Tensor:
        return rank.submission.copy_to_group(handed, rank.group)

    return {"gradient": used_twice(use, x, upstream, beside)}


@check("copy_to_group", world_sizes=(2, 4), subgroup=False)
def other_uses_of_x_are_not_summed(trial: Trial) -> None:
    """What else x is used for, such as a residual connection, is not summed over the ranks."""
    x, beside, *upstreams = (trial.normal(4, 7) for _ in range(2 + trial.num_ranks))
    results = trial.run(shared_use_probe, per_rank=[(x, upstream, beside) for upstream in upstreams])
    uses_add_up(trial, results, sum(u.double() for u in upstreams), beside)


@check("copy_to_group")
def sends_one_all_reduce_and_only_in_backward(trial: Trial) -> None:
    """The forward communicates nothing, the backward one all-reduce of the gradient's size."""
    seen = PAIRS.plain(trial, "copy_to_group")
    nothing_travels(trial, seen, "", "x is on every rank already.")
    num_bytes = seen.upstreams[0].numel() * 4
    one_all_reduce(trial, seen, BACKWARD, num_bytes, "dist.all_reduce does it in one call.")


@check("copy_to_group")
def leaves_its_inputs_alone(trial: Trial) -> None:
    """Neither x nor the gradient that comes in is changed."""
    PAIRS.leave_inputs_alone(trial, "copy_to_group")


@check("copy_to_group", world_sizes=(2, 4), subgroup=False)
def takes_any_layout_and_dtype(trial: Trial) -> None:
    """It works for tensors that lie differently in memory on different ranks, and keeps the dtype."""
    PAIRS.take_any_kind(trial, "copy_to_group", one_number(trial, "copy_to_group"))


@check("copy_to_group", world_sizes=(2,), subgroup=False)
def copy_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    PAIRS.keep_results(trial, "copy_to_group")


@check("copy_to_group", world_sizes=(2,), subgroup=False)
def copy_works_without_gradients(trial: Trial) -> None:
    """Under torch.no_grad() the output is the same."""
    PAIRS.work_without_gradients(trial, "copy_to_group")


@check("reduce_from_group")
def output_is_the_sum(trial: Trial) -> None:
    """The forward returns the sum of all ranks' x on every rank."""
    seen = PAIRS.plain(trial, "reduce_from_group")
    trial.close(
        "the output",
        each_rank(seen, "output"),
        seen.outputs,
        alternatives={
            "this rank's own x: nothing was summed": seen.xs,
            "the mean over the ranks, where the sum belongs": seen.outputs[0] / trial.num_ranks,
        },
        terms=seen.xs,
    )
    if trial.num_ranks > 2:  # of two ranks each would round alike
        one_sum(trial)


def sum_probe(rank, x: Tensor) -> Tensor:
    return rank.submission.reduce_from_group(x.requires_grad_(), rank.group).detach()


def one_sum(trial: Trial) -> None:
    """The ranks' outputs are one sum, bit for bit."""
    xs = [trial.normal(500) for _ in range(trial.num_ranks)]
    first, *others = trial.run(sum_probe, per_rank=[(x,) for x in xs])
    for rank, other in enumerate(others, start=1):
        differ = int((first != other).sum())
        trial.require(
            not differ,
            f"{differ} of {first.numel()} numbers of its sum are not rank 0's: they differ in the last bits",
            cause="each rank rounds in an order of its own, as x + (total - x).detach() does with its own x",
            help="Return what the all-reduce made, the same on every rank: what is replicated drifts apart "
            "otherwise. total + (x - x.detach()) does, or an autograd.Function.",
            rank=rank,
        )


@check("reduce_from_group")
def gradient_passes_unchanged(trial: Trial) -> None:
    """The gradient of the output arrives at x as it is."""
    seen = PAIRS.plain(trial, "reduce_from_group")
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
    seen = PAIRS.plain(trial, "reduce_from_group")
    one_all_reduce(trial, seen, "", seen.xs[0].numel() * 4, "dist.all_reduce does it in one call.")
    nothing_travels(trial, seen, BACKWARD, "Every rank has the whole gradient already.")


@check("reduce_from_group")
def leaves_its_inputs_alone_too(trial: Trial) -> None:
    """Neither x nor the gradient that comes in is changed."""
    PAIRS.leave_inputs_alone(trial, "reduce_from_group")


@check("reduce_from_group", world_sizes=(2, 4), subgroup=False)
def takes_any_layout_and_dtype_too(trial: Trial) -> None:
    """It works for tensors that lie differently in memory on different ranks, and keeps the dtype."""
    PAIRS.take_any_kind(trial, "reduce_from_group", one_number(trial, "reduce_from_group"))


@check("reduce_from_group", world_sizes=(2,), subgroup=False)
def reduce_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    PAIRS.keep_results(trial, "reduce_from_group")


@check("reduce_from_group", world_sizes=(2,), subgroup=False)
def reduce_works_without_gradients(trial: Trial) -> None:
    """Under torch.no_grad() the output is the same."""
    PAIRS.work_without_gradients(trial, "reduce_from_group")


@check("gather_from_group")
def output_is_joined_in_rank_order(trial: Trial) -> None:
    """The forward joins all ranks' x along the last dimension, rank 0 first."""
    seen = PAIRS.plain(trial, "gather_from_group")
    alternatives = {"joined in the reverse order of ranks": torch.cat(seen.xs[::-1], -1)}
    alternatives["interleaved: one column of each rank in turn"] = torch.stack(seen.xs, -1).flatten(-2)
    told = (
        "the ranks' x lie one after the other in memory, and were only viewed as (..., n·k): join them by cat"
    )
    alternatives[told] = torch.stack(seen.xs).view(seen.outputs[0].shape)
    trial.close(
        "the output",
        each_rank(seen, "output"),
        seen.outputs,
        alternatives=alternatives,
        help="The last dimension gets n times as long, and no other changes its size or its place: "
        "torch.cat(parts, dim=-1) does it for any shape.",
    )


@check("gather_from_group")
def gradient_is_this_ranks_slice(trial: Trial) -> None:
    """The gradient of x is this rank's slice of the gradient of the output."""
    seen = PAIRS.plain(trial, "gather_from_group")
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
    seen = PAIRS.plain(trial, "gather_from_group")
    gather_costs(trial, seen, "", seen.outputs[0].numel() * 4)
    nothing_travels(trial, seen, BACKWARD, "Every rank has the whole gradient: it only has to cut it.")


@check("gather_from_group")
def gather_leaves_its_inputs_alone(trial: Trial) -> None:
    """Neither x nor the gradient that comes in is changed."""
    PAIRS.leave_inputs_alone(trial, "gather_from_group")


@check("gather_from_group", world_sizes=(2, 4), subgroup=False)
def gather_takes_any_layout_and_dtype(trial: Trial) -> None:
    """It works for tensors that lie differently in memory on different ranks, and keeps the dtype."""
    PAIRS.take_any_kind(trial, "gather_from_group")


@check("gather_from_group", world_sizes=(2,), subgroup=False)
def gather_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    PAIRS.keep_results(trial, "gather_from_group")


@check("gather_from_group", world_sizes=(2,), subgroup=False)
def gather_works_without_gradients(trial: Trial) -> None:
    """Under torch.no_grad() the output is the same."""
    PAIRS.work_without_gradients(trial, "gather_from_group")


@check("scatter_to_group")
def output_is_this_ranks_slice(trial: Trial) -> None:
    """The forward returns the r-th contiguous slice of the last dimension on rank r."""
    seen = PAIRS.plain(trial, "scatter_to_group")
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
def the_slice_is_a_copy(trial: Trial) -> None:
    """The slice keeps itself alive, and not the whole x; nor does its graph."""
    seen = PAIRS.plain(trial, "scatter_to_group")
    own = seen.outputs[0].numel() * seen.xs[0].element_size()
    for rank, held in enumerate(each_rank(seen, "held")):
        trial.require(
            held <= own,
            f"the slice is a view of x: its {own:,} bytes keep {held:,} bytes alive, and who writes into it "
            "writes into x",
            help="chunk, narrow and indexing with a slice give views: clone() what belongs to this rank.",
            rank=rank,
        )
    if trial.in_full:
        width = trial.integer(5, 9)
        x = trial.normal(1, trial.num_ranks * width)
        for rank, result in enumerate(trial.run(row_probe, per_rank=[(x,)] * trial.num_ranks)):
            trial.require(
                result["held"] <= 4 * width,
                f"of an x of one row the slice is a view: its {4 * width} bytes keep {result['held']} alive",
                cause="contiguous() copies nothing where memory is contiguous, as a slice of one row is",
                help="clone() always copies.",
                rank=rank,
            )
            trial.require(
                not result["x is there"],
                "nobody has x any more, and the whole of it is still there until backward",
                cause="the slice is a copy, and its graph keeps x: it was saved for backward",
                help="Backward needs the gradient and the group: keep no tensor in ctx.",
                rank=rank,
            )


def row_probe(rank, x: Tensor) -> dict:
    """What the slice keeps alive, and whether x is still there when only the slice is."""
    given = x.requires_grad_() * 1.0
    storage = weakref.ref(given.untyped_storage())
    y = rank.submission.scatter_to_group(given, rank.group)
    del given
    gc.collect()
    return {"held": bytes_held(y), "x is there": storage() is not None}


@check("scatter_to_group")
def gradient_is_joined(trial: Trial) -> None:
    """The gradient of x is every rank's gradient, joined in rank order."""
    seen = PAIRS.plain(trial, "scatter_to_group")
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
    seen = PAIRS.plain(trial, "scatter_to_group")
    nothing_travels(trial, seen, "", "Every rank has the whole x: it only has to cut it.")
    gather_costs(trial, seen, BACKWARD, seen.xs[0].numel() * 4)


@check("scatter_to_group")
def scatter_leaves_its_inputs_alone(trial: Trial) -> None:
    """Neither x nor the gradient that comes in is changed."""
    PAIRS.leave_inputs_alone(trial, "scatter_to_group")


@check("scatter_to_group", world_sizes=(2, 4), subgroup=False)
def scatter_takes_any_layout_and_dtype(trial: Trial) -> None:
    """It works for tensors that lie differently in memory on different ranks, and keeps the dtype."""
    PAIRS.take_any_kind(trial, "scatter_to_group")


@check("scatter_to_group", world_sizes=(2,), subgroup=False)
def scatter_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    PAIRS.keep_results(trial, "scatter_to_group")


@check("scatter_to_group", world_sizes=(2,), subgroup=False)
def scatter_works_without_gradients(trial: Trial) -> None:
    """Under torch.no_grad() the output is the same."""
    PAIRS.work_without_gradients(trial, "scatter_to_group")


def scatter_refusal_probe(rank, x: Tensor) -> dict:
    return refusal_of(rank.submission.scatter_to_group, x, rank.group)


@check("scatter_to_group", world_sizes=(2, 4), subgroup=False)
def scatter_refuses_what_does_not_divide(trial: Trial) -> None:
    """A last dimension that is not divisible by the ranks is a ValueError."""
    size = undividable(trial)
    refused(trial, size, scatter_refusal_probe, trial.normal(2, size))
