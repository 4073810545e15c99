"""Checks of `merge_attention`: attention to two blocks, from attention to each."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Fault, Trial, check, exercise

from .block_slips import VANISHED, VANISHING, of_nothing
from .blocks import far_below_zero
from .shared import attention

exercise(
    "merge_attention",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "out_a is already divided by exp(lse_a). Multiply it by that again, add, divide by the sum.",
        "exp(lse) overflows for scores of a hundred. Subtract the larger lse from both first.",
        "Where both are -inf the larger one is -inf: take 0 instead, and do not divide by 0.",
    ),
)


def wrote_into(merge: Callable, given: list[Tensor]) -> tuple[Any, bool]:
    """What a merge returns, and whether it changed what it was given."""
    before = [x.detach().clone() for x in given]
    found = merge(*given)
    return found, not all(map(torch.equal, given, before))


def merge_probe(rank, cases: list) -> list:
    merge = rank.submission.merge_attention
    results = []
    for out_a, lse_a, out_b, lse_b, d_out in cases:
        outs = [x.clone().requires_grad_() for x in (out_a, out_b)]
        lses = [x.clone().requires_grad_() for x in (lse_a, lse_b)]
        # Not leaves: a merge may write into nothing that it was given, and autograd would refuse a leaf.
        given = [outs[0] * 1, lses[0] * 1, outs[1] * 1, lses[1] * 1]
        plain = [x.detach().clone() for x in given]
        found, wrote = wrote_into(merge, given)
        result = {"pair": isinstance(found, tuple | list) and len(found) == 2}
        with torch.no_grad():
            result["wrote"] = [wrote, wrote_into(merge, given)[1]]
        intact = not any(result["wrote"])
        result["wrote"].append(wrote_into(merge, plain)[1])
        if result["pair"]:
            out, lse = found
            result |= {"out": out.detach().clone(), "lse": lse.detach().clone()}
            shapes = (out.shape, lse.shape) == (d_out.shape, d_out.shape[:-1])
            if out.requires_grad and shapes and intact:
                ((out * d_out).sum() + (lse * d_out[..., 0]).sum()).backward()
                result["gradients"] = [x.grad for x in (outs[0], lses[0], outs[1], lses[1])]
        results.append(result)
    return results


MERGES = (
    "two blocks",
    "nothing in the first",
    "nothing in the second",
    "nothing in both",
    "large scores",
    "scores far below 0",
)


def observe_merges(trial: Trial) -> SimpleNamespace:
    """Two blocks of keys, of which some queries see nothing."""
    b, a, s, d = trial.integer(1, 2), trial.integer(2, 3), trial.integer(5, 7), trial.integer(3, 6)
    cases, expected = [], []
    for name in MERGES:
        scale = 60.0 if name == "large scores" else 2.0
        q = scale * trial.normal(b, a, s, d)
        sizes = trial.integer(2, 4), trial.integer(5, 7)
        keys, values = ([trial.normal(b, a, size, d) for size in sizes] for _ in range(2))
        if name == "scores far below 0":
            far_below_zero(q, *keys)
        masks = [torch.ones(s, size, dtype=torch.bool) for size in sizes]
        blind = torch.arange(s) % 2 == 0
        if name in ("nothing in the first", "nothing in both"):
            masks[0][blind] = False
        if name in ("nothing in the second", "nothing in both"):
            masks[1][blind] = False
        parts = [attention(q, k, v, m) for k, v, m in zip(keys, values, masks, strict=True)]
        whole = attention(q, torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 1))
        given = [x.float() for pair in parts for x in pair]
        cases.append((*given, trial.normal(b, a, s, d)))
        expected.append(whole)
    results = trial.run(merge_probe, cases)[0]
    return SimpleNamespace(
        cases=dict(zip(MERGES, cases, strict=True)),
        results=dict(zip(MERGES, results, strict=True)),
        expected=dict(zip(MERGES, expected, strict=True)),
    )


ALONE = {"nothing in the first": "first", "nothing in the second": "second"}
NOTHING_TWICE = "NaN where both lse are -inf: -inf - (-inf) is NaN, and so is 0 / 0"


def require_merge(trial: Trial, name: str, help: str) -> None:
    seen = trial.once(observe_merges)
    out_a, lse_a, out_b, lse_b, _ = (x.double() for x in seen.cases[name])
    result, (out, lse) = seen.results[name], seen.expected[name]
    trial.require(
        result["pair"],
        f"merge_attention did not return two tensors ({name})",
        help="Return out and lse.",
    )
    a, b = (x.masked_fill(x == -math.inf, 0.0).unsqueeze(-1) for x in (lse_a, lse_b))
    empty = (lse_a == -math.inf) & (lse_b == -math.inf)
    others = {
        "the outputs are added without rescaling": out_a + out_b,
        "the outputs are averaged without rescaling": (out_a + out_b) / 2,
        "the two weights are swapped": out_a + out_b - out,
        "the outputs are weighted by lse, not by exp(lse)": (a * out_a + b * out_b) / (a + b),
        "weighted by exp(lse), and not divided by the sum": out_a * a.exp() + out_b * b.exp(),
        "weighted by exp(lse - the larger one), and not divided by the sum": sum(
            (x - torch.maximum(lse_a, lse_b).masked_fill(empty, 0.0)).exp().unsqueeze(-1) * y
            for x, y in ((lse_a, out_a), (lse_b, out_b))
        ),
        "it is the first block's alone": out_a,
        "it is the second block's alone": out_b,
        NOTHING_TWICE: out.masked_fill(empty.unsqueeze(-1), math.nan),
    }
    if (lse < VANISHING).all():
        others[VANISHED] = torch.zeros_like(out)
    only_nan = {}
    if name in ALONE:
        one, other = (lse_a, lse_b) if ALONE[name] == "first" else (lse_b, lse_a)
        alone = (one == -math.inf) & (other > -math.inf)
        only_nan = {f"NaN where the {ALONE[name]} block alone is empty, its lse -inf": alone}
    step = "Begin with the larger of the two lse: it is finite where one block has something."
    others |= {
        told: Fault(out.masked_fill(rows.unsqueeze(-1), math.nan), step) for told, rows in only_nan.items()
    }
    trial.close(f"out of both blocks ({name})", result["out"], out, others, help, rtol=1e-4)
    largest = torch.maximum(lse_a, lse_b).masked_fill(empty, 0.0)
    lses = {
        "the larger lse was taken off before exp, and is not added again": lse - largest,
        NOTHING_TWICE: lse.masked_fill(empty, math.nan),
        "the two lse are added": lse_a + lse_b,
        "it is the larger of the two lse": torch.maximum(lse_a, lse_b),
        "it is the first block's": lse_a,
        "it is the second block's": lse_b,
        "it is the mean of the two lse": (lse_a + lse_b) / 2,
    }
    if (lse < VANISHING).all():
        lses[VANISHED] = torch.full_like(lse, -math.inf)
    lses |= of_nothing(result["lse"], lse)
    lses |= {told: Fault(lse.masked_fill(rows, math.nan), step) for told, rows in only_nan.items()}
    trial.close(f"lse of both blocks ({name})", result["lse"], lse, lses, help, rtol=1e-4)


NO_BACKWARD = "Make new tensors, also where no backward is to come: the caller may need the old ones."
CALLS = {
    "": "Make new tensors: backward may need the old ones.",
    "under torch.no_grad() ": NO_BACKWARD,
    "where no input needs a gradient, ": NO_BACKWARD,
}
"""How a merge was called → the next step, if it wrote into what it was given."""


@check("merge_attention")
def what_is_merged_stays_as_it_was(trial: Trial) -> None:
    """The given out and lse are not written to."""
    seen = trial.once(observe_merges)
    for name in MERGES:
        for (when, help), wrote in zip(CALLS.items(), seen.results[name]["wrote"], strict=True):
            told = f"{when}merge_attention changed a tensor that it was given ({name})"
            trial.require(not wrote, told, help)


@check("merge_attention")
def merged_is_attention_to_both(trial: Trial) -> None:
    """Merged out and lse are those of attention to both blocks at once."""
    require_merge(
        trial,
        "two blocks",
        "Weigh each out by its share of the sum of exponentials: exp(lse_a) / (exp(lse_a) + exp(lse_b)).",
    )


@check("merge_attention")
def a_block_that_was_not_seen_changes_nothing(trial: Trial) -> None:
    """Where one lse is -inf, on either side, the other block's out and lse come back."""
    for name in ("nothing in the first", "nothing in the second"):
        require_merge(
            trial,
            name,
            "exp(-inf) is 0, which is right; a difference of two lse with an -inf, or a sum that begins with "
            "it, may not be: begin with the larger one.",
        )


@check("merge_attention")
def nothing_on_both_sides_stays_nothing(trial: Trial) -> None:
    """Where both lse are -inf, out is 0 and lse -inf."""
    require_merge(trial, "nothing in both", "Where both are empty put in 0 for out, and -inf for lse.")


@check("merge_attention")
def large_lse_do_not_overflow(trial: Trial) -> None:
    """Where lse are in the hundreds, nothing overflows."""
    require_merge(trial, "large scores", "Subtract the larger lse from both before exp.")


@check("merge_attention")
def lse_far_below_zero_do_not_vanish(trial: Trial) -> None:
    """Where both lse are near -150, both blocks count as anywhere else."""
    require_merge(
        trial,
        "scores far below 0",
        "Subtract the larger lse from both before exp, also where it is below 0. Only -inf needs another "
        "number in its place.",
    )


@check("merge_attention")
def gradient_of_a_merge(trial: Trial) -> None:
    """Where autograd follows the merge, the gradients of out and lse are right, on -inf's other side too."""
    seen = trial.once(observe_merges)
    for name in ("two blocks", "nothing in the first", "nothing in the second"):
        result = seen.results[name]
        if "gradients" not in result:
            continue  # a merge for use inside an autograd.Function
        out_a, lse_a, out_b, lse_b, d_out = (x.double() for x in seen.cases[name])
        inputs = [x.clone().requires_grad_() for x in (out_a, lse_a, out_b, lse_b)]
        lses = torch.stack([inputs[1], inputs[3]])
        shares = lses.softmax(0).unsqueeze(-1)
        of_out = ((shares[0] * inputs[0] + shares[1] * inputs[2]) * d_out).sum()
        of_lse = (lses.logsumexp(0) * d_out[..., 0]).sum()
        through_out = torch.autograd.grad(of_out, inputs, retain_graph=True)
        through_lse = torch.autograd.grad(of_lse, inputs, allow_unused=True, materialize_grads=True)
        labels = ("out_a", "lse_a", "out_b", "lse_b")
        for label, found, one, other in zip(
            labels, result["gradients"], through_out, through_lse, strict=True
        ):
            trial.close(
                f"the gradient of {label} ({name})",
                torch.zeros_like(one) if found is None else found,
                one + other,
                {
                    "the shares are constants: nothing comes back through the weights of the two out": other,
                    "what comes back through the merged lse is missing": one,
                }
                if label.startswith("lse")
                else {},
                help="Each out is weighed by a softmax over the two lse, whose gradient goes to both. "
                "So does that of the merged lse.",
                rtol=1e-4,
            )
