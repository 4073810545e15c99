"""The same attention called otherwise: in another dtype, between two others, with some inputs frozen."""

import gc
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grader.checks import Fault, Trial, is_close
from lessons_shared.evaluation import in_silence, noted
from lessons_shared.results import overwritten

from .frozen import NEEDING, gradients_of_some
from .large_scores import attend_largely, make_large
from .ring_slips import by_parts
from .rings import Kind, draw
from .shared import attention, blocks_on_the_wire, causal

WRITTEN_OVER = (
    "a later call of the same shapes wrote into what this one keeps for its backward, which had gone well "
    "before, in a call alone: is a buffer kept from call to call, such as the out= of torch.cat?"
)


def between_two_others(
    attention_of: Callable, group, parts: list[Tensor], d_out: Tensor
) -> tuple[list, bool]:
    """The gradients of the second of three attentions; and whether its output outlives all who held it.

    An output that an `autograd.Function` puts on its ctx, and not into save_for_backward, is held by the ctx
    that it holds. Only Python's garbage collector, which comes when it likes, lets go of such a circle.
    """
    leaves = [x.clone().requires_grad_() for x in parts]
    scaled = [[scale * x for x in leaves] for scale in (2.0, 1.0, 0.5)]
    collects = gc.isenabled()
    gc.disable()
    try:
        outs = [attention_of(*inputs, group) for inputs in scaled]
        try:
            outs[1].backward(d_out)
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                error.add_note(WRITTEN_OVER)
            raise
        second = weakref.ref(outs[1])
        outs.clear()
        return [x.grad for x in leaves], second() is not None
    finally:
        if collects:
            gc.enable()


def smaller(x: Tensor, chunk: int) -> Tensor:
    """Chunks of (b, a, s, d) without the last token of each, and the first half of each head's width."""
    return x.unflatten(2, (-1, chunk))[:, :, :, :-1, : x.size(-1) // 2].flatten(2, 3)


def with_smaller_parts(
    attention_of: Callable, group, chunk: int, parts: list[Tensor], d_out: Tensor
) -> list[Tensor]:
    """The gradients of an attention of fewer tokens, with narrower heads."""
    leaves = [smaller(x, chunk).clone().requires_grad_() for x in parts]
    with noted("it was a later call, of fewer tokens and with narrower heads: is something kept?"):
        attention_of(*leaves, group).backward(smaller(d_out, chunk))
    return [x.grad for x in leaves]


def attend_in(
    rank, name: str, chunk: int | None, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, *large: Tensor
) -> dict:
    """As `attend`, and no more than values; then the same again, between two other attentions.

    With the length of a chunk, without gradients as well, where not all of q, k and v need one, and smaller;
    and with other inputs, of large scores, where there are some.
    """
    attention_of = getattr(rank.submission, name)
    parts = [x.transpose(1, 2) for x in (q, k, v)]
    leaves = [x.clone().requires_grad_() for x in parts]
    with rank.record() as recording:
        out = attention_of(*leaves, rank.group)
    returned = out.detach().clone() if isinstance(out, Tensor) else None
    found = {"out": returned, "gradients": [None] * 3, "between": [None] * 3, "outlived": False}
    found |= {"overwritten": {}, "forward": recording}
    if isinstance(out, Tensor) and out.requires_grad and out.shape == parts[0].shape:
        d_out = upstream.transpose(1, 2).to(out.dtype)
        out.backward(d_out)
        found["gradients"] = [x.grad for x in leaves]
        found["between"], found["outlived"] = between_two_others(attention_of, rank.group, parts, d_out)
        if chunk:

            def attend(*given: Tensor) -> Tensor:
                return attention_of(*given, rank.group)

            found["overwritten"] = overwritten(attend, *parts, upstream=d_out)
            found |= in_silence(attention_of, *(x.clone() for x in parts), rank.group)
            found["needing"] = {
                told: gradients_of_some(attention_of, rank.group, parts, d_out, told) for told in NEEDING
            }
            found["smaller"] = with_smaller_parts(attention_of, rank.group, chunk, parts, d_out)
        if large:
            found["large"] = attend_largely(attention_of, rank.group, *large)
    return found


THROWN_AWAY = (
    "a second backward over the same graph (retain_graph) fails where the first went well: that one threw "
    "away what the second needs. Keep it with ctx.save_for_backward, or leave it on ctx"
)


def twice_over(rank, name: str, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> dict:
    """The gradients of two backwards over one graph, and what was the first ones' when they were there."""
    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
    out, d_out = getattr(rank.submission, name)(*leaves, rank.group), upstream.transpose(1, 2)
    first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    before = [gradient.clone() for gradient in first]
    try:
        second = torch.autograd.grad(out, leaves, d_out)
    except Exception as error:
        if "modified by an inplace operation" not in str(error):
            error.add_note(THROWN_AWAY)
        raise
    return {"before": before, "after": list(first), "second": list(second)}


def require_twice_over(trial: Trial, kind: Kind) -> None:
    """Two losses of one output have a backward each: neither knows of the other."""
    seen = draw(trial, kind, torch.float64)
    parts = [[x[:, w] for x in (seen.q, seen.k, seen.v, seen.upstream)] for w in seen.where]
    results = trial.run(twice_over, kind.name, per_rank=parts)
    for i, label in enumerate("qkv"):
        before, after, second = ([r[when][i] for r in results] for when in ("before", "after", "second"))
        trial.close(
            f"the gradient of {label} that a second backward over the same graph gives",
            second,
            before,
            alternatives={
                "the first backward's is still in it: it adds up in what is kept from forward": [
                    2 * gradient for gradient in before
                ]
            },
            help="Make what backward adds up in backward: there may be two of one forward (retain_graph).",
            rtol=1e-9,
        )
        trial.close(f"the gradient of {label} of the first backward, after a second one", after, before)


def observe_in(trial: Trial, kind: Kind, dtype: torch.dtype, large: bool = False) -> SimpleNamespace:
    """A run of `attend_in`, and what plain attention gives: what, by rank, what it should be."""
    seen = draw(trial, kind, dtype)
    parts = [[x[:, w] for x in (seen.q, seen.k, seen.v, seen.upstream)] for w in seen.where]
    if large:
        seen.large = make_large(seen)
        parts = [own + more for own, more in zip(parts, seen.large.parts, strict=True)]
    chunk = seen.chunk if dtype == torch.float64 else None
    seen.results = trial.run(attend_in, kind.name, chunk, per_rank=parts)
    q, k, v = (x.double().transpose(1, 2).requires_grad_() for x in (seen.q, seen.k, seen.v))
    seen.inputs = [q, k, v]
    seen.out = out = attention(q, k, v, causal(seen.length))[0]
    seen.d_out = seen.upstream.double().transpose(1, 2)
    out.backward(seen.d_out, retain_graph=True)
    seen.found = [("the output", [r["out"] for r in seen.results], by_parts(seen, out))]
    for i, (label, x) in enumerate(zip("qkv", (q, k, v), strict=True)):
        gradients = [r["gradients"][i] for r in seen.results]
        seen.found.append((f"the gradient of {label}", gradients, by_parts(seen, x.grad)))
    return seen


def require_dtype(trial: Trial, kind: Kind, seen: SimpleNamespace, exact: SimpleNamespace) -> None:
    """In float64 the result has ten digits, in bfloat16 it is a bfloat16, where it is right in float32."""
    for dtype, rtol in ((torch.float64, 1e-9), (torch.bfloat16, 0.1)):
        run = exact if dtype == torch.float64 else observe_in(trial, kind, dtype)
        for what, actual, expected in run.found:
            for r, tensor in enumerate(actual):
                trial.require(
                    not isinstance(tensor, Tensor) or tensor.dtype == dtype,
                    f"{what} is {getattr(tensor, 'dtype', None)} where the inputs are {dtype}",
                    help="Receive into torch.empty_like(...) of what is sent, and cast back at the end.",
                    rank=r,
                )
            if is_right(seen):  # else another check says what is wrong, and it is not the dtype
                trial.close(
                    f"{what} in {str(dtype).removeprefix('torch.')}",
                    actual,
                    expected,
                    alternatives=through_float32(run.found[0], (what, actual, expected)),
                    help="In float32 it is right. A buffer or a cast of another dtype loses digits, or takes "
                    "the bytes for other numbers.",
                    rtol=rtol,
                )
        travel_as_they_are(trial, run, dtype)


def travel_as_they_are(trial: Trial, seen: SimpleNamespace, dtype: torch.dtype) -> None:
    """No block of the forward is sent in a wider dtype than that of the inputs."""
    name = str(dtype).removeprefix("torch.")
    for r, result in enumerate(seen.results):
        for event in blocks_on_the_wire(result["forward"].select(None, "")):
            sent = getattr(torch, event.dtype, dtype)
            trial.require(
                not sent.is_floating_point or sent.itemsize <= dtype.itemsize,
                f"the forward sends {event.num_elements} {event.dtype}, and q, k and v are {name}: "
                f"{sent.itemsize // dtype.itemsize} times the bytes",
                help="Send what was given, and widen it where it is computed with.",
                rank=r,
            )


Found = tuple[str, list[Any], list[Tensor]]
"""What a call gave: its name, and by rank what it is and what it should be."""


def through_float32(output: Found, found: Found) -> dict[str, Fault]:
    """What explains a result in float64 that has float32's digits, beside the output of the same call."""

    def agrees(result: Found, rtol: float) -> bool:
        _, actual, expected = result
        return all(
            isinstance(a, Tensor) and a.dtype == torch.float64 and is_close(a, e, rtol=rtol)
            for a, e in zip(actual, expected, strict=True)
        )

    if not agrees(found, 1e-5):
        return {}
    if output[0] != found[0] and agrees(output, 1e-9):
        told = (
            "forward has all of float64's digits, and backward has float32's: what forward keeps for it, the "
            "log-sum-exp for one, or what backward adds up in, is float32"
        )
        step = (
            "Keep what ctx keeps in the dtype in which it was computed: widened later, its digits are gone."
        )
    else:
        told = "it has float32's digits: something on the way is float32"
        step = "Make buffers with empty_like, zeros_like or dtype=, and cast nothing to a narrower dtype."
    return {told: Fault(found[1], step)}


def is_right(seen: SimpleNamespace) -> bool:
    """Whether output and gradients are those of plain attention."""
    pairs = list(zip([r["out"] for r in seen.results], by_parts(seen, seen.out), strict=True))
    for i in range(3):
        whole = by_parts(seen, sum(share[i] for share in seen.shares))
        pairs += zip([r["gradients"][i] for r in seen.results], whole, strict=True)
    return all(isinstance(x, Tensor) and is_close(x, right) for x, right in pairs)


def require_calls_apart(trial: Trial, exact: SimpleNamespace) -> None:
    """The middle one of three attentions has the gradients that it has alone, and is let go of."""
    for i, label in enumerate("qkv"):
        alone = [r["gradients"][i] for r in exact.results]
        if all(isinstance(x, Tensor) for x in alone):
            trial.close(
                f"the gradient of {label}, with an attention before and one after it in the same forward,",
                [r["between"][i] for r in exact.results],
                alone,
                help="A model has many layers: each call keeps its own tensors, with ctx.save_for_backward. "
                "A variable of the module, or of the class, has those of another call.",
            )
    if all("smaller" in r for r in exact.results):
        require_smaller(trial, exact)
    for r, result in enumerate(exact.results):
        trial.require(
            not result["outlived"],
            "after its backward, when nobody holds the output any more, its memory is still taken: the "
            "output holds its ctx, and the ctx the output, until Python's garbage collector finds the circle",
            help="Give what backward needs to ctx.save_for_backward, the output too: what you put on ctx "
            "yourself (ctx.out = out) is not let go of after backward.",
            rank=r,
        )


def require_smaller(trial: Trial, exact: SimpleNamespace) -> None:
    """The gradients of an attention of fewer tokens and half the width, after others, are right."""
    width, chunk = exact.q.size(-1), exact.chunk
    narrow = width // 2
    inputs = [smaller(x.detach(), chunk).requires_grad_() for x in exact.inputs]
    attention(*inputs, causal(inputs[0].size(2)))[0].backward(smaller(exact.d_out, chunk))
    kept = [w[w % chunk < chunk - 1] for w in exact.where]
    places = SimpleNamespace(where=[w - w // chunk for w in kept])
    factor = math.sqrt(narrow / width)
    told = f"its backward scales by 1/sqrt({width}), as calls before: it is kept from one to another"
    step = "Compute what the width decides in each call, or keep it on that call's ctx."
    for i, label in enumerate("qkv"):
        right = by_parts(places, inputs[i].grad)
        trial.close(
            f"the gradient of {label}, of fewer tokens and with d = {narrow} after calls with d = {width},",
            [r["smaller"][i] for r in exact.results],
            right,
            {told: Fault([factor * x for x in right], step)} if i < 2 else {},
            help="What the shapes of a call decide is decided again in each call.",
            rtol=1e-9,
        )
