"""The three functions along the sequence."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grader.checks import BACKWARD, CheckEnded, Fault, Trial, check, each_rank, exercise, parts, tensors_in
from lessons_shared.cut_gpt import local
from lessons_shared.pairs import Pairs
from lessons_shared.refusals import refusal_of, refused, undividable
from lessons_shared.results import memory_of
from lessons_shared.wire import nothing_travels, wire_bytes

from .shared import SIZES, sends_as_much

exercise(
    "gather_sequence",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "dist.all_gather fills a list of n tensors, in rank order; join them along dimension 1.",
        "Backward: what follows is cut work, so each rank has found a part of the gradient of *every* "
        "token. Which "
        "sum belongs to this rank's tokens?",
        "dist.reduce_scatter(output, list_of_n, group=group) sums the r-th tensors of all ranks' lists "
        "on rank r. It "
        "wants contiguous tensors: split(...), then .contiguous().",
    ),
)
exercise(
    "reduce_scatter_sequence",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "The mirror image of gather_sequence: its backward is this forward, and the other way round.",
        "This rank's tokens of y are the sum of all ranks' x there. So the gradient of this rank's x is "
        "the gradient "
        "of y, for all tokens: who has it?",
    ),
)
exercise(
    "scatter_sequence",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Everyone has x already: the forward is a slice along dimension 1, and sends nothing.",
        "Backward: each rank knows the gradient of its own tokens alone; all ranks need that of all tokens.",
    ),
)


def drawn(trial: Trial, name: str, dtype: torch.dtype) -> SimpleNamespace:
    """x and the upstream gradient by rank, alike or different as the contract has it, and what is right."""
    n, batch = trial.num_ranks, 3 if trial.in_full else trial.choice([1, 3])
    own, width = trial.integer(2, 4), trial.choice([3, 5, 7])
    large, small = (batch, n * own, width), (batch, own, width)

    def alike(shape: tuple) -> list[Tensor]:
        return [trial.normal(*shape, dtype=torch.float64).to(dtype)] * n

    def different(shape: tuple) -> list[Tensor]:
        return [trial.normal(*shape, dtype=torch.float64).to(dtype) for _ in range(n)]

    def joined(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat(tensors, 1)] * n

    def summed(tensors: list[Tensor]) -> list[Tensor]:
        return parts(sum(tensor.double() for tensor in tensors), 1, n)

    if name == "gather_sequence":
        xs, upstreams = different(small), different(large)
        outputs, gradients = joined(xs), summed(upstreams)
    elif name == "reduce_scatter_sequence":
        xs, upstreams = different(large), different(small)
        outputs, gradients = summed(xs), joined(upstreams)
    else:
        xs, upstreams = alike(large), different(small)
        outputs, gradients = parts(xs[0], 1, n), joined(upstreams)
    return SimpleNamespace(xs=xs, upstreams=upstreams, outputs=outputs, gradients=gradients)


PAIRS = Pairs(drawn, leading=1)


def joined_otherwise(xs: list[Tensor]) -> dict[str, Tensor]:
    """Ways to join the ranks' (b, s/n, h) to (b, s, h) that are none: by cause, what every rank has."""
    return {
        "joined in the opposite order": torch.cat(xs[::-1], 1),
        "interleaved: one token of each rank in turn": torch.stack(xs, 2).flatten(1, 2),
        "the ranks' x lie one after the other in memory, (n, b, s/n, h), and were only viewed as (b, s, h): "
        "join them by cat along dimension 1": torch.stack(xs).view(torch.cat(xs, 1).shape),
    }


def other_tokens(whole: Tensor, n: int) -> dict[str, list[Tensor] | Fault]:
    """Ways to give each rank a part of (b, s, h) that is not its own: by cause, what every rank has."""
    contiguous = parts(whole, 1, n)
    as_it_lies = [piece.view_as(contiguous[0]) for piece in whole.flatten().chunk(n)]
    return {
        "pieces of memory as it lies, which are rows of the batch: tokens are dimension 1": Fault(
            as_it_lies, "Split along dimension 1 first, and lay the parts one behind the other."
        ),
        "every n-th token, where contiguous ones belong": [whole[:, r::n] for r in range(n)],
        "the first rank's tokens on every rank": [contiguous[0]] * n,
        "the tokens of the rank opposite": contiguous[::-1],
    }


class Written(TorchDispatchMode):
    """On a rank: which operations in place wrote into a part of x, and whether communication was given x."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x
        self.by: list[str] = []
        self.given = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shared = [y for y in tensors_in(args) if memory_of(local(y)) == memory_of(self.x)]
        if func.namespace == "c10d":
            self.given |= bool(shared) and func._opname != "send"
        elif func._opname.endswith("_") and any(y is args[0] and y.numel() < self.x.numel() for y in shared):
            self.by.append(func._opname)
        return func(*args, **(kwargs or {}))


def written_probe(rank, name: str, x: Tensor) -> list[str]:
    """The operations that wrote into a part of x, where nothing that communicates could have."""
    handed = x.clone().requires_grad_() * 1.0
    with Written(handed) as written:
        getattr(rank.submission, name)(handed, rank.group)
    return [] if written.given else written.by


def left_alone(trial: Trial, name: str) -> None:
    """Neither x nor the gradient that comes in is changed; who writes into views of x is told so."""
    try:
        PAIRS.leave_inputs_alone(trial, name)
    except CheckEnded as end:
        if "x itself" not in end.message or end.cause:
            raise
        seen = PAIRS.plain(trial, name)
        by = trial.run(written_probe, name, per_rank=[(x,) for x in seen.xs])
        if all(own for own, changed in zip(by, each_rank(seen, "x_changed"), strict=True) if changed):
            names = sorted({name for own in by for name in own})
            end.cause = f"{' and '.join(names)} wrote into a part of x, and no collective was given x"
            end.help = "split, chunk and narrow are views: += on one writes into x. Add into a clone() of it."
        raise


def sends_no_more_again(trial: Trial, seen: SimpleNamespace) -> None:
    """Where a hook has stayed on x, the backward of a second call with this x sends what the first's did."""
    for rank, again in enumerate(each_rank(seen, "again")):
        if again is not None:
            passes = (seen.results[rank]["recording"], again)
            first, second = (wire_bytes(each.select(None, BACKWARD), trial.num_ranks) for each in passes)
            trial.require(
                second <= first,
                f"x was given to a second call, whose backward sent about {second:,.0f} bytes from here, "
                f"and that of the first {first:,.0f}",
                help="An autograd.Function has a backward of its own for each call, and leaves nothing on x.",
                rank=rank,
                cause="a hook is registered on x itself in forward, once more at each call, and stays there",
            )


# gather_sequence


@check("gather_sequence")
def gathered_in_rank_order(trial: Trial) -> None:
    """Every rank gets all tokens, (b, s, h), in rank order along dimension 1."""
    seen = PAIRS.plain(trial, "gather_sequence")
    trial.close(
        "the output",
        each_rank(seen, "output"),
        seen.outputs,
        alternatives=joined_otherwise(seen.xs),
        help="all_gather gives the ranks' tensors in rank order: torch.cat(parts, dim=1).",
    )


@check("gather_sequence")
def gather_sums_the_gradients_of_own_tokens(trial: Trial) -> None:
    """The gradient of x is the sum over the ranks of the gradients of this rank's tokens."""
    seen = PAIRS.plain(trial, "gather_sequence")
    n = trial.num_ranks
    own = [parts(u, 1, n)[r] for r, u in enumerate(seen.upstreams)]
    trial.close(
        "the gradient of x",
        each_rank(seen, "gradient"),
        seen.gradients,
        alternatives={
            "only this rank's own gradient: nothing was summed": own,
            "the mean over the ranks": [g / n for g in seen.gradients],
        }
        | other_tokens(sum(u.double() for u in seen.upstreams), n),
        help="In lesson 10 what followed a gather was replicated. Here it is cut: each rank knows a part.",
    )


@check("gather_sequence")
def gather_sends_one_of_each(trial: Trial) -> None:
    """Forward one all-gather, backward one reduce-scatter: (n-1)/n of the whole each way."""
    seen = PAIRS.plain(trial, "gather_sequence")
    whole = seen.outputs[0].numel() * 4
    sends_as_much(trial, seen, "", whole, "one all-gather would", "One all-gather of this rank's tokens.")
    help = "An all-reduce sends twice as much, and leaves n-1 parts that nobody needs: reduce-scatter."
    sends_as_much(trial, seen, BACKWARD, whole, "one reduce-scatter would", help)
    sends_no_more_again(trial, seen)


@check("gather_sequence")
def gather_leaves_its_inputs_alone(trial: Trial) -> None:
    """Neither x nor the incoming gradient is changed."""
    left_alone(trial, "gather_sequence")


@check("gather_sequence")
def gather_takes_any_dtype_and_layout(trial: Trial) -> None:
    """It works for tensors that lie differently in memory on different ranks, and keeps the dtype."""
    PAIRS.take_any_kind(trial, "gather_sequence")


@check("gather_sequence", world_sizes=(2,), subgroup=False)
def gather_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    PAIRS.keep_results(trial, "gather_sequence")


@check("gather_sequence", world_sizes=(2,), subgroup=False)
def gather_works_without_gradients(trial: Trial) -> None:
    """Under torch.no_grad() the output is the same."""
    PAIRS.work_without_gradients(trial, "gather_sequence")


# reduce_scatter_sequence


@check("reduce_scatter_sequence")
def own_tokens_of_the_sum(trial: Trial) -> None:
    """Rank r gets the r-th tokens, (b, s/n, h), of the sum over the ranks."""
    seen = PAIRS.plain(trial, "reduce_scatter_sequence")
    n = trial.num_ranks
    trial.close(
        "the output",
        each_rank(seen, "output"),
        seen.outputs,
        alternatives={
            "only this rank's own x: nothing was summed": [parts(x, 1, n)[r] for r, x in enumerate(seen.xs)],
            "the mean over the ranks": [o / n for o in seen.outputs],
        }
        | other_tokens(sum(x.double() for x in seen.xs), n),
        help="Split x along dimension 1 into n parts: the r-th of each rank is summed on rank r.",
    )


@check("reduce_scatter_sequence")
def reduce_scatter_gathers_gradients(trial: Trial) -> None:
    """The gradient of x is that of all tokens, whole on every rank."""
    seen = PAIRS.plain(trial, "reduce_scatter_sequence")
    n, own = trial.num_ranks, [torch.zeros_like(u) for u in seen.upstreams]
    alone = [torch.cat([*own[:r], seen.upstreams[r], *own[r + 1 :]], 1) for r in range(n)]
    trial.close(
        "the gradient of x",
        each_rank(seen, "gradient"),
        seen.gradients,
        alternatives={
            "zero for the other ranks' tokens: they were not gathered": alone,
            "divided by the number of ranks": [g / n for g in seen.gradients],
        },
        help="Every rank's x went into every token of the sum: its gradient is needed for all of them.",
    )


@check("reduce_scatter_sequence")
def reduce_scatter_sends_one_of_each(trial: Trial) -> None:
    """Forward one reduce-scatter, backward one all-gather: (n-1)/n of the whole each way."""
    seen = PAIRS.plain(trial, "reduce_scatter_sequence")
    whole = seen.xs[0].numel() * 4
    help = "An all-reduce sends twice as much, and leaves n-1 parts that nobody needs: reduce-scatter."
    sends_as_much(trial, seen, "", whole, "one reduce-scatter would", help)
    sends_as_much(trial, seen, BACKWARD, whole, "one all-gather would", "One all-gather of the gradients.")
    sends_no_more_again(trial, seen)


@check("reduce_scatter_sequence")
def reduce_scatter_leaves_its_inputs_alone(trial: Trial) -> None:
    """Neither x nor the incoming gradient is changed."""
    left_alone(trial, "reduce_scatter_sequence")


@check("reduce_scatter_sequence")
def reduce_scatter_takes_any_dtype_and_layout(trial: Trial) -> None:
    """It works for tensors that lie differently in memory on different ranks, and keeps the dtype."""
    PAIRS.take_any_kind(trial, "reduce_scatter_sequence")


@check("reduce_scatter_sequence", world_sizes=(2,), subgroup=False)
def reduce_scatter_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    PAIRS.keep_results(trial, "reduce_scatter_sequence")


@check("reduce_scatter_sequence", world_sizes=(2,), subgroup=False)
def reduce_scatter_works_without_gradients(trial: Trial) -> None:
    """Under torch.no_grad() the output is the same."""
    PAIRS.work_without_gradients(trial, "reduce_scatter_sequence")


def refusal_probe(rank, name: str, x: Tensor) -> dict:
    return refusal_of(getattr(rank.submission, name), x, rank.group)


def length_is_refused(trial: Trial, name: str) -> None:
    """A sequence that does not divide is refused."""
    length = undividable(trial)
    refused(trial, length, refusal_probe, name, trial.normal(2, length, 3))


@check("reduce_scatter_sequence", world_sizes=(2, 4), subgroup=False)
def reduce_scatter_refuses_what_does_not_divide(trial: Trial) -> None:
    """A sequence length that is not divisible by the ranks is a ValueError."""
    length_is_refused(trial, "reduce_scatter_sequence")


# scatter_sequence


@check("scatter_sequence")
def own_tokens_of_x(trial: Trial) -> None:
    """Rank r gets the r-th tokens of x, (b, s/n, h)."""
    seen = PAIRS.plain(trial, "scatter_sequence")
    n = trial.num_ranks
    trial.close(
        "the output",
        each_rank(seen, "output"),
        seen.outputs,
        alternatives={
            "the sum over the ranks: x is the same on all of them": [n * o for o in seen.outputs],
        }
        | other_tokens(seen.xs[0], n),
        help="Rank r takes tokens r·s/n up to (r+1)·s/n, along dimension 1.",
    )


@check("scatter_sequence")
def scatter_gathers_gradients(trial: Trial) -> None:
    """The gradient of x is that of all tokens, whole on every rank."""
    seen = PAIRS.plain(trial, "scatter_sequence")
    n, none = trial.num_ranks, [torch.zeros_like(u) for u in seen.upstreams]
    alone = [torch.cat([*none[:r], seen.upstreams[r], *none[r + 1 :]], 1) for r in range(n)]
    trial.close(
        "the gradient of x",
        each_rank(seen, "gradient"),
        seen.gradients,
        alternatives={
            "zero for the other ranks' tokens: they were not gathered": alone,
            "divided by the number of ranks": [g / n for g in seen.gradients],
        },
        help="Slicing alone makes autograd put zeros there. x is the same on every rank, and so is its "
        "gradient.",
    )


@check("scatter_sequence")
def scatter_sends_only_backward(trial: Trial) -> None:
    """The forward sends nothing, the backward one all-gather."""
    seen = PAIRS.plain(trial, "scatter_sequence")
    nothing_travels(trial, seen, "", "Every rank has the whole x: it only has to cut it.")
    whole = seen.xs[0].numel() * 4
    sends_as_much(trial, seen, BACKWARD, whole, "one all-gather would", "One all-gather of the gradients.")
    sends_no_more_again(trial, seen)


@check("scatter_sequence")
def scatter_leaves_its_inputs_alone(trial: Trial) -> None:
    """Neither x nor the incoming gradient is changed."""
    left_alone(trial, "scatter_sequence")


@check("scatter_sequence")
def scatter_takes_any_dtype_and_layout(trial: Trial) -> None:
    """It works for tensors that lie differently in memory on different ranks, and keeps the dtype."""
    PAIRS.take_any_kind(trial, "scatter_sequence")


@check("scatter_sequence", world_sizes=(2,), subgroup=False)
def scatter_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    PAIRS.keep_results(trial, "scatter_sequence")


@check("scatter_sequence", world_sizes=(2,), subgroup=False)
def scatter_works_without_gradients(trial: Trial) -> None:
    """Under torch.no_grad() the output is the same."""
    PAIRS.work_without_gradients(trial, "scatter_sequence")


@check("scatter_sequence", world_sizes=(2, 4), subgroup=False)
def scatter_refuses_what_does_not_divide(trial: Trial) -> None:
    """A sequence length that is not divisible by the ranks is a ValueError."""
    length_is_refused(trial, "scatter_sequence")
