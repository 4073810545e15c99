"""Find the bug: a low-rank adapter under sequence parallelism."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import BACKWARD, Trial, backward, check, each_rank, exercise, parts
from lessons_shared.cut_gpt import describe, gradients_of
from lessons_shared.evaluation import evaluates_alike, in_evaluation
from lessons_shared.given_weights import give_weights, require_fit
from lessons_shared.pairs import all_close
from lessons_shared.passes import BOTH, HALF, sums_of_two_passes
from lessons_shared.wire import sends_at_most

from .shared import SIZES

exercise(
    "AdaptedRowLinear",
    world_sizes=SIZES,
    subgroup=True,
    uses=("reduce_scatter_sequence",),
    hints=(
        "Two parameters learn. For each: does every rank have all of it? And which tokens does a rank "
        "use it for?",
        "down is cut, as the weight beside it is, and meets all tokens. up is whole on every rank, and "
        "meets this "
        "rank's tokens alone.",
        "up is to this layer what a norm's weight is to a block. How did you complete the norm's gradient?",
    ),
)


def adapter_probe(rank, sizes: tuple, weights: dict, x: Tensor, upstream: Tensor) -> dict:
    layer = rank.submission.AdaptedRowLinear(*sizes, group=rank.group).to(rank.device)
    zero_at_first = not layer.up.any()
    if unfit := give_weights(layer, weights):
        return {"unfit": unfit}
    x = x.clone().requires_grad_()
    with rank.record() as recording:
        y = layer(x)
        recording.mark(BACKWARD)
        backward(y, upstream)
    held = describe(layer)
    gradient = None if x.grad is None else x.grad.clone()
    backward(layer(x), HALF * upstream)
    return {
        "output": y, "gradient": gradient, "twice": gradients_of(layer), "recording": recording,
        "zero_at_first": zero_at_first, **held, "evaluation": in_evaluation(layer, x, upstream),
    }  # fmt: skip


def observe_adapter(trial: Trial) -> SimpleNamespace:
    n = trial.num_ranks
    low = trial.choice([r for r in (2, 3) if r != n])  # 1/r of something is no mean over the ranks
    width, out, batch = 12 * trial.integer(1, 2), trial.choice([10, 14]), 2
    s = n * trial.integer(16, 20)  # low numbers that travel twice are more than what is let pass
    weight, bias = trial.normal(out, width) / math.sqrt(width), trial.normal(out)
    down, up = trial.normal(low, width) / math.sqrt(width), trial.normal(out, low)
    x, upstream = trial.normal(batch, s, width), trial.normal(batch, s, out)
    leaves = [t.double().requires_grad_() for t in (x, down, up)]
    whole_x, whole_down, whole_up = leaves
    y = whole_x @ weight.double().T + whole_x @ whole_down.T @ whole_up.T + bias.double()
    y.backward(upstream.double())
    frozen = (whole_x @ weight.double().T + bias.double()).detach()
    low_x = (whole_x @ whole_down.T).detach()
    own_up = [
        u.flatten(0, 1).double().T @ z.flatten(0, 1)
        for u, z in zip(parts(upstream, 1, n), parts(low_x, 1, n), strict=True)
    ]
    runs = []
    for r in range(n):
        cut = {"weight": parts(weight, 1, n)[r], "down": parts(down, 1, n)[r], "bias": bias, "up": up}
        runs.append(((width, out, low), cut, parts(x, 2, n)[r].contiguous(), parts(upstream, 1, n)[r]))
    results = trial.run(adapter_probe, per_rank=runs)
    require_fit(trial, results, [own for _, own, *_ in runs])
    return SimpleNamespace(
        results=results, output=y.detach(), x_gradient=whole_x.grad, down=whole_down.grad, up=whole_up.grad,
        own_up=own_up, sizes=(batch, s, out, low), frozen=frozen,
        down_slips=down_slips(parts(upstream, 1, n), x, up, parts(whole_down.grad, 1, n)),
        x_gradient_through_frozen=upstream.double() @ weight.double(),
    )  # fmt: skip


def down_slips(
    upstreams: list[Tensor], x: Tensor, up: Tensor, right: list[Tensor]
) -> dict[str, list[Tensor]]:
    """Cause → the ranks' gradients of `down` if another one is summed over them than that of `up`."""
    n = len(right)
    summed = sum(upstreams).double() @ up.double()  # (b, s/n, r)
    of_all = torch.cat([summed] * n, 1).flatten(0, 1).T @ x.flatten(0, 1).double()
    return {
        "the gradient of a rank's r numbers a token is summed over the ranks, which have other tokens": (
            parts(of_all, 1, n)
        ),
        "the gradient of x A^T, which each rank has of all tokens, is summed over the ranks": [
            n * g for g in right
        ],
        "down's gradient is summed over the ranks, which have other columns": [sum(right)] * n,
    }


DIVIDED_BY_LOW_RANK = "the adapter's part is divided by its r: LoRA's alpha / r has no place here"


@check("AdaptedRowLinear")
def adapter_output_stays_right(trial: Trial) -> None:
    """The output is this rank's tokens of the dense layer with its adapter (it was before, too)."""
    seen = trial.once(observe_adapter)
    n, (*_, low) = trial.num_ranks, seen.sizes
    others = {
        DIVIDED_BY_LOW_RANK: seen.frozen + (seen.output - seen.frozen) / low,
        "the frozen layer's alone: the adapter adds nothing": seen.frozen,
    }
    trial.close(
        "the output",
        each_rank(seen, "output"),
        parts(seen.output, 1, n),
        alternatives={cause: parts(y, 1, n) for cause, y in others.items()},
        help="y = x W^T + (x A^T) B^T + bias, with no factor.",
    )
    for rank, zero in enumerate(each_rank(seen, "zero_at_first")):
        trial.require(zero, "up is not zero at the start: the adapter changes the model at once", rank=rank)


@check("AdaptedRowLinear")
def up_learns_from_all_tokens(trial: Trial) -> None:
    """The gradient of `up` comes from all tokens, and is the same on every rank."""
    seen = trial.once(observe_adapter)
    own = "only what this rank's own tokens gave: every rank trains an adapter of its own"
    found = [g.get("down") for g in each_rank(seen, "gradients")]
    summed = [cause for cause, slip in seen.down_slips.items() if all_close(found, slip)]
    trial.close(
        "the gradient of up",
        [g.get("up") for g in each_rank(seen, "gradients")],
        seen.up,
        alternatives={
            ". Instead, ".join([own, *summed[:1]]): seen.own_up,
            "the mean over the ranks, where the sum belongs: each rank saw other tokens": seen.up
            / trial.num_ranks,
            **{f"what rank {r}'s tokens gave, on every rank": own for r, own in enumerate(seen.own_up)},
            DIVIDED_BY_LOW_RANK: seen.up / seen.sizes[-1],
        },
        help="Every rank has all of up: its gradient is that of all tokens, on every rank.",
    )


@check("AdaptedRowLinear")
def down_and_x_stay_right(trial: Trial) -> None:
    """The gradients of `down` and of x are this rank's slices of the dense ones (they were before, too)."""
    seen = trial.once(observe_adapter)
    n = trial.num_ranks
    trial.close(
        "the gradient of down",
        [g.get("down") for g in each_rank(seen, "gradients")],
        parts(seen.down, 1, n),
        alternatives=seen.down_slips,
        help="down is cut: each rank has the whole gradient of its own columns.",
    )
    through_frozen = seen.x_gradient_through_frozen
    trial.close(
        "the gradient of x",
        each_rank(seen, "gradient"),
        parts(seen.x_gradient, 2, n),
        alternatives={
            "what comes through the frozen weight is missing": parts(seen.x_gradient - through_frozen, 2, n),
            "what comes through the adapter is missing": parts(through_frozen, 2, n),
        },
        help="x has a gradient through both, the frozen weight and the adapter: a frozen weight has none "
        "itself, and passes that of x on. Detach nothing.",
    )


@check("AdaptedRowLinear")
def adapter_passes_add_up(trial: Trial) -> None:
    """A second pass, of half the size, adds half to `up`'s and `down`'s gradients; the layer stays frozen."""
    seen = trial.once(observe_adapter)
    twice = each_rank(seen, "twice")
    trial.close(
        "the gradient of up after two passes",
        [g.get("up") for g in twice],
        BOTH * seen.up,
        alternatives=sums_of_two_passes([seen.up] * trial.num_ranks, trial.num_ranks),
    )
    down = [BOTH * g for g in parts(seen.down, 1, trial.num_ranks)]
    trial.close("the gradient of down after two passes", [g.get("down") for g in twice], down)
    for rank, gradients in enumerate(twice):
        trial.require(
            not set(gradients) & {"weight", "bias"},
            "the frozen layer has a gradient: only the adapter learns",
            rank=rank,
        )


@check("AdaptedRowLinear")
def adapter_sends_little(trial: Trial) -> None:
    """One (b, s, out) each way, r numbers a token, and what `up` itself weighs."""
    seen = trial.once(observe_adapter)
    b, s, out, low = seen.sizes
    whole, thin, up = 4 * b * s * out, 4 * b * s * low, 4 * out * low
    help = "The tokens' own numbers were where they belong. Only up's gradient, (out, r), needs a sum."
    sends_at_most(
        trial,
        seen,
        "",
        whole + thin,
        "one reduce-scatter of y and one of r numbers a token",
        "A rank needs the r numbers of its own tokens: reduce_scatter_sequence adds the ranks' parts of just "
        "these.",
    )
    means = "one all-gather of y's gradient, r numbers a token, and a sum of up's gradient"
    sends_at_most(trial, seen, BACKWARD, whole + thin + 2 * up, means, help)


@check("AdaptedRowLinear")
def adapter_is_the_same_in_evaluation(trial: Trial) -> None:
    """In eval mode and under torch.no_grad() outputs and gradients are those of training."""
    evaluates_alike(trial, trial.once(observe_adapter).results)
