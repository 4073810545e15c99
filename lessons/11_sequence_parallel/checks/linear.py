"""A column-parallel product that gathers its input, forgets it, and gathers it again."""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

from grader.checks import (
    BACKWARD,
    CheckEnded,
    Trial,
    backward,
    check,
    each_rank,
    exercise,
    parts,
    settle,
    storage_bytes,
)
from lessons_shared.alone import NO_BIAS, tell_cases
from lessons_shared.evaluation import evaluates_alike, in_silence
from lessons_shared.needed import IN_ORDER, none_is_missing
from lessons_shared.pairs import ONE_PIECE, stored_transposed
from lessons_shared.results import overwritten, results_stay
from lessons_shared.wire import lie_in_one_piece

from .functions import joined_otherwise, other_tokens
from .shared import SIZES, alive_before_backward, is_kept_as_view, mark_backward, sends_as_much

exercise(
    "gathered_linear",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "An autograd.Function decides for itself what is kept: ctx.save_for_backward(x, weight), with "
        "the x that came "
        "in. F.linear inside its forward keeps nothing.",
        "y = X W^T + bias, X gathered. Backward: the gradient of X is gradient @ weight; that of the "
        "weight is "
        "gradient^T @ X; that of the bias is the gradient, summed over tokens.",
        "This rank's gradient of X is a part of a sum: which of your functions brings each rank its "
        "tokens? And the "
        "weight's gradient needs X whole: gather it once more.",
    ),
)


def linear_probe(rank, cases: list) -> list[dict]:
    return [one_linear(rank, *case) for case in cases]


ARGUMENTS = ("x", "weight", "bias")
AFTERWARDS = "backward has ended"


def with_one_frozen(rank, inputs: list[Tensor | None], upstream: Tensor) -> dict:
    """For each of x, weight and bias the gradients of the others, where it needs none."""
    found = {}
    there = {name: given for name, given in zip(ARGUMENTS, inputs, strict=True) if given is not None}
    for frozen in there:
        leaves = {name: x.clone().requires_grad_(name != frozen) for name, x in there.items()}
        backward(rank.submission.gathered_linear(*map(leaves.get, ARGUMENTS), rank.group), upstream)
        found[frozen] = {name: leaf.grad for name, leaf in leaves.items() if name != frozen}
    return found


def stored_otherwise(rank, inputs: list[Tensor | None], upstream: Tensor) -> dict:
    """Output and gradients where rank 0's x and gradient are the same numbers, stored transposed."""
    x, *others = (given if given is None else given.clone() for given in inputs)
    if rank.group.rank() == 0:
        x, upstream = stored_transposed(x), stored_transposed(upstream)
    leaves = [given if given is None else given.requires_grad_() for given in (x, *others)]
    with rank.record() as recording:
        y = rank.submission.gathered_linear(*leaves, rank.group)
        backward(y, upstream)
    gradients = {name: leaf.grad for name, leaf in zip(ARGUMENTS, leaves, strict=True) if leaf is not None}
    return {"output": y, "recording": recording, **gradients}


def one_linear(rank, in_full: bool, x: Tensor, weight: Tensor, bias: Tensor | None, upstream: Tensor) -> dict:
    leaves = [None if leaf is None else leaf.clone().requires_grad_() for leaf in (x, weight, bias)]
    given = upstream.clone()
    with rank.record(memory=True) as recording:
        y = rank.submission.gathered_linear(*leaves, rank.group)
        mark_backward(recording)
        kept_as_view = is_kept_as_view(x, rank.num_ranks)
        backward(y, upstream)
        if in_full:
            settle()
            recording.mark(AFTERWARDS)
    held = [y, *(leaf.grad for leaf in leaves if leaf is not None)]
    held_bytes = storage_bytes(each for each in held if isinstance(each, Tensor))
    gradients = [None if leaf is None or leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    backward(rank.submission.gathered_linear(*leaves, rank.group), upstream)

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return rank.submission.gathered_linear(x, weight, bias, rank.group)

    there = [tensor for tensor in (x, weight, bias) if tensor is not None]
    return {
        "output": y,
        "evaluation": in_silence(rank.submission.gathered_linear, *leaves, rank.group),
        "overwritten": overwritten(call, *there, upstream=upstream),
        "x": gradients[0],
        "weight": gradients[1],
        "bias": gradients[2],
        "weight_twice": leaves[1].grad,
        "one frozen": with_one_frozen(rank, [x, weight, bias], upstream) if in_full else None,
        "stored otherwise": stored_otherwise(rank, [x, weight, bias], upstream) if in_full else None,
        "changed": [
            name
            for name, now, was in (
                ("x", leaves[0], x),
                ("weight", leaves[1], weight),
                ("bias", leaves[2], bias),
                ("the gradient that came into backward", upstream, given),
            )
            if was is not None and not torch.equal(now, was)
        ],
        "recording": recording,
        "held": held_bytes,
        "kept as view": kept_as_view,
    }


def linear_case(trial: Trial, with_bias: bool) -> SimpleNamespace:
    n, batch, own = trial.num_ranks, trial.integer(2, 3), trial.integer(4, 5)  # a shape tells which is which
    width, out = trial.choice([10, 14]), trial.choice([25, 29])  # a weight is larger than any rank's x
    xs = [trial.normal(batch, own, width) for _ in range(n)]
    weights = [trial.normal(out, width) for _ in range(n)]
    biases = [trial.normal(out) if with_bias else None for _ in range(n)]
    upstreams = [trial.normal(batch, n * own, out) for _ in range(n)]
    whole = torch.cat(xs, 1).double().requires_grad_()
    case = SimpleNamespace(xs=xs, weights=weights, biases=biases, upstreams=upstreams, name="with bias")
    case.name = "with bias" if with_bias else "without bias"
    case.outputs, case.for_weight, case.for_bias = [], [], []
    for weight, bias, upstream in zip(weights, biases, upstreams, strict=True):
        w = weight.double().requires_grad_()
        b = None if bias is None else bias.double().requires_grad_()
        y = F.linear(whole, w, b)
        y.backward(upstream.double())
        case.outputs.append(y.detach())
        case.for_weight.append(w.grad)
        case.for_bias.append(None if b is None else b.grad)
    case.for_x = parts(whole.grad, 1, n)
    case.whole_bytes = whole.numel() * 4
    return case


def observe_linear(trial: Trial) -> list[SimpleNamespace]:
    cases = [linear_case(trial, True), linear_case(trial, False)]

    def run(some: list[SimpleNamespace]) -> list[list[dict]]:
        runs = [
            ([(trial.in_full, c.xs[r], c.weights[r], c.biases[r], c.upstreams[r]) for c in some],)
            for r in range(trial.num_ranks)
        ]
        return trial.run(linear_probe, per_rank=runs)

    try:
        results = run(cases)
    except CheckEnded as end:
        tell_cases(end, lambda i: run([cases[i]]), [[], NO_BIAS], NO_BIAS)
        raise
    for number, case in enumerate(cases):
        case.results = [result[number] for result in results]
    return cases


@check("gathered_linear")
def product_of_all_tokens(trial: Trial) -> None:
    """The output is this rank's features of all tokens, (b, s, out/n), with its bias."""
    for seen in trial.once(observe_linear):
        ways = joined_otherwise(seen.xs)
        trial.close(
            f"the output ({seen.name})",
            each_rank(seen, "output"),
            seen.outputs,
            alternatives={
                f"the gathered x is another: {cause}": [
                    F.linear(x, *each) for each in zip(seen.weights, seen.biases, strict=True)
                ]
                for cause, x in ways.items()
            },
            help="gather_sequence joins the ranks' x along dimension 1, the tokens.",
        )


@check("gathered_linear")
def linear_leaves_its_inputs_alone(trial: Trial) -> None:
    """Neither x, weight and bias nor the incoming gradient are changed."""
    for seen in trial.once(observe_linear):
        for rank, changed in enumerate(each_rank(seen, "changed")):
            trial.require(
                not changed,
                f"changed in place: {', '.join(changed)} ({seen.name})",
                help="Collectives, and operations such as add_, write into what they are given: give a copy.",
                rank=rank,
            )


@check("gathered_linear")
def gradient_of_own_tokens(trial: Trial) -> None:
    """The gradient of x is the sum of what all ranks' features found for this rank's tokens."""
    for seen in trial.once(observe_linear):
        n = trial.num_ranks
        alone = [
            parts(u.double() @ w.double(), 1, n)[r]
            for r, (u, w) in enumerate(zip(seen.upstreams, seen.weights, strict=True))
        ]
        trial.close(
            f"the gradient of x ({seen.name})",
            each_rank(seen, "x"),
            seen.for_x,
            alternatives={"only this rank's features: nothing was summed": alone}
            | other_tokens(torch.cat(seen.for_x, 1), n),
            help="gradient @ weight is this rank's part of a sum: reduce-scatter it.",
        )


def tokens_in_another_order(seen: SimpleNamespace) -> dict[str, list[Tensor]]:
    """Gradients of the weight from a gradient of y and an x that were not flattened alike."""
    x = torch.cat(seen.xs, 1).double()
    by_rank = torch.cat(seen.xs, 0).double().flatten(0, 1)
    by_token = x.transpose(0, 1).flatten(0, 1)
    ways = {
        "x was transposed before it was flattened, and the gradient was not": lambda u: (
            u.flatten(0, 1).T @ by_token
        ),
        "the gradient was transposed before it was flattened, and x was not": lambda u: (
            u.transpose(0, 1).flatten(0, 1).T @ x.flatten(0, 1)
        ),
        "the ranks' tokens of x stand one below the other, the gradient's sequence by sequence": lambda u: (
            u.flatten(0, 1).T @ by_rank
        ),
    }
    return {told: [way(u.double()) for u in seen.upstreams] for told, way in ways.items()}


@check("gathered_linear")
def weight_learns_from_all_tokens(trial: Trial) -> None:
    """The gradients of weight and bias come from all tokens, and two passes add up."""
    for seen in trial.once(observe_linear):
        n, own = trial.num_ranks, []
        for rank, (x, upstream) in enumerate(zip(seen.xs, seen.upstreams, strict=True)):
            mine = parts(upstream, 1, n)[rank]
            own.append(mine.flatten(0, 1).double().T @ x.flatten(0, 1).double())
        first_alone = {
            f"only the tokens of ranks 0 to {last}: those of the others are missing from the gathered x": [
                sum(
                    mine.flatten(0, 1).double().T @ x.flatten(0, 1).double()
                    for mine, x in zip(parts(u, 1, n)[: last + 1], seen.xs, strict=False)
                )
                for u in seen.upstreams
            ]
            for last in range(1, n - 1)
        }
        trial.close(
            f"the gradient of the weight ({seen.name})",
            each_rank(seen, "weight"),
            seen.for_weight,
            alternatives={
                "only this rank's own tokens: x was not gathered again": own,
                **first_alone,
                **tokens_in_another_order(seen),
                "this rank's own tokens stand in the place of every rank's": [
                    u.flatten(0, 1).double().T @ x.repeat(1, n, 1).flatten(0, 1).double()
                    for u, x in zip(seen.upstreams, seen.xs, strict=True)
                ],
                "summed over the ranks, but each rank has rows of its own": sum(seen.for_weight),
            },
            help="gradient^T @ X, with the X of all tokens, gathered once more.",
        )
        trial.close(
            f"the gradient of the weight after two passes ({seen.name})",
            each_rank(seen, "weight_twice"),
            [2 * g for g in seen.for_weight],
        )
        if seen.for_bias[0] is not None:
            mine = [parts(u, 1, trial.num_ranks)[r].sum((0, 1)) for r, u in enumerate(seen.upstreams)]
            trial.close(
                f"the gradient of the bias ({seen.name})",
                each_rank(seen, "bias"),
                seen.for_bias,
                alternatives={
                    "only this rank's own tokens: the gradient that comes in is that of all tokens": mine,
                    "summed over the ranks, but each rank has rows of its own": sum(seen.for_bias),
                },
                help="The gradient of y, summed over all s tokens.",
            )


@check("gathered_linear", world_sizes=(2,), subgroup=False)
def what_is_frozen_takes_no_other_gradient_along(trial: Trial) -> None:
    """Where one of x, weight and bias needs no gradient, the others have the same as ever."""
    for seen in trial.once(observe_linear):
        for frozen, others in seen.results[0]["one frozen"].items():
            found = {
                name: [result["one frozen"][frozen][name] for result in seen.results]
                for name in others
                if all(gradient is not None for gradient in each_rank(seen, name))
            }
            where = f"{frozen} needs none ({seen.name})"
            none_is_missing(trial, found, where)
            for name, gradients in found.items():
                right = {"x": seen.for_x, "weight": seen.for_weight, "bias": seen.for_bias}[name]
                trial.close(f"the gradient of {name} where {where}", gradients, right, help=IN_ORDER)


@check("gathered_linear", world_sizes=(2,), subgroup=False)
def linear_takes_any_layout(trial: Trial) -> None:
    """It works for tensors that lie differently in memory on different ranks."""
    for seen in trial.once(observe_linear):
        found = [result["stored otherwise"] for result in seen.results]
        for name, what, right in (
            ("output", "the output", seen.outputs),
            ("x", "the gradient of x", seen.for_x),
            ("weight", "the gradient of the weight", seen.for_weight),
            ("bias", "the gradient of the bias", seen.for_bias),
        ):
            if right[0] is not None:
                where = f"(rank 0's x and gradient stored transposed, {seen.name})"
                trial.close(f"{what} {where}", [each[name] for each in found], right)
        lie_in_one_piece(trial, [each["recording"] for each in found], ONE_PIECE)


@check("gathered_linear")
def keeps_its_own_tokens_only(trial: Trial) -> None:
    """Between forward and backward the output is alive, and this rank's tokens: the gathered x is gone."""
    for seen in trial.once(observe_linear):
        own = seen.whole_bytes // trial.num_ranks
        for rank, recording in enumerate(each_rank(seen, "recording")):
            alive, output = alive_before_backward(recording), seen.outputs[rank].numel() * 4
            kept, weight = alive - output, seen.weights[rank].numel() * 4
            cause, help = "", "Save the x that came in, (b, s/n, in), and gather it again in backward."
            if kept in (weight, own + weight):
                cause = f"a copy of the weight, {weight:,} bytes, is kept, as contiguous() of weight.T is one"
                help = "Save the weight that came in: the layer holds it anyway."
            elif seen.results[rank]["kept as view"] and kept == seen.whole_bytes:
                cause = (
                    "what is kept are this rank's tokens, (b, s/n, in), as a view of the gathered x: a view "
                    "keeps all of the memory that it lies in"
                )
                help = "Save the x that came in, or a clone() of this rank's part of the gathered one."
            elif "all_gather" in recording.kinds(after=BACKWARD) and kept >= seen.whole_bytes:
                help = (
                    "Backward gathers x again, and something keeps it all the same: memory that stays from "
                    "call to call counts, too, be it a module's, a global's, a closure's or the ctx's."
                )
            elif "all_gather" in recording.kinds(after=BACKWARD):
                help = "Backward gathers x again, and needs this rank's x and the weight: what else is kept?"
            trial.require(
                kept < own + own // 2,  # a copy of x, in another order, is still this rank's tokens
                f"{alive:,} bytes were made and are still there after the forward: the output has "
                f"{output:,}, this rank's x {own:,}, and the gathered x {seen.whole_bytes:,} ({seen.name})",
                help=help,
                rank=rank,
                cause=cause,
            )


@check("gathered_linear", world_sizes=(2,), subgroup=False)
def lets_go_after_backward(trial: Trial) -> None:
    """After backward the gathered x is gone, too, while the output is alive."""
    for seen in trial.once(observe_linear):
        own = seen.whole_bytes // trial.num_ranks
        for rank, recording in enumerate(each_rank(seen, "recording")):
            kept = recording.alive(AFTERWARDS) - seen.results[rank]["held"]
            trial.require(
                kept < own + own // 2,
                f"after backward {kept:,} bytes are still there beside the output and the gradients: this "
                f"rank's x has {own:,}, and the gathered x {seen.whole_bytes:,} ({seen.name})",
                help="Let what backward gathers be a local variable: what is on the ctx lives as long as the "
                "output.",
                rank=rank,
            )


ALL_REDUCED = (
    "An all-reduce of the gradient of x sends twice as much, and leaves n-1 parts that nobody needs: "
    "reduce-scatter."
)


@check("gathered_linear")
def gathers_twice_and_reduces_once(trial: Trial) -> None:
    """Forward one all-gather; backward one all-gather and one reduce-scatter."""
    for seen in trial.once(observe_linear):
        help = "x travels forward and once more backward, its gradient once; no weights, no outputs."
        reduced = [e for each in each_rank(seen, "recording") for e in each.select("all_reduce", BACKWARD)]
        if any(event.num_bytes == seen.whole_bytes for event in reduced):
            help = ALL_REDUCED
        sends_as_much(trial, seen, "", seen.whole_bytes, "one all-gather of x would", help)
        means = "one all-gather and one reduce-scatter of x would"
        sends_as_much(trial, seen, BACKWARD, 2 * seen.whole_bytes, means, help)


@check("gathered_linear")
def linear_works_without_gradients(trial: Trial) -> None:
    """Under torch.no_grad() the output is the same."""
    for seen in trial.once(observe_linear):
        evaluates_alike(trial, seen.results)


@check("gathered_linear", world_sizes=(2,), subgroup=False)
def linear_keeps_its_results(trial: Trial) -> None:
    """What a call and its backward return stays as it is when others of the same shapes are made."""
    for seen in trial.once(observe_linear):
        results_stay(trial, each_rank(seen, "overwritten"))
