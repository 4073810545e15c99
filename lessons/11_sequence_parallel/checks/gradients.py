"""Gradients of what every rank has whole, and of what is cut."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import Fault, Trial, each_rank, is_close, parts
from lessons_shared.cut_gpt import cut_dim, fused_of, head_orders, heads_of, is_special
from lessons_shared.cut_gpt_checks import after
from lessons_shared.passes import BOTH, HALF, after_zero_grad, sums_of_two_passes

ASKED = {
    None: "Every rank has the whole parameter and uses it for its own tokens: its gradient is the sum over "
    "the group, once for each backward.",
    0: "Every rank has rows of its own, and their gradient comes from all tokens: the ranks sum nothing.",
    1: "What enters this layer is a slice of every token's features; is its gradient there for every token?",
}
"""What holds for the gradient of a parameter that is cut along this dimension, or along none."""


AN_NTH_OF_A_BIAS = (
    "an n-th of it: the mean over the ranks where their sum belongs, or a bias that was divided by n before "
    "it was added"
)
OWN_TOKENS_ALONE = "only what this rank's own tokens gave: nothing was summed"


def block_gradients_are_right(
    trial: Trial,
    seen: SimpleNamespace,
    which: str,
    passes: float,
    only_replicated: bool | None = None,
    asked: str = "",
) -> None:
    """Gradients of a block under `which` in the results: all, or those of replicated parameters, or the rest.

    `asked` is told where one is wrong; "" tells what holds for a parameter of its kind.

    `seen` has `weights` and `gradients` of the dense model, and may have the functions `own_tokens` and
    `summed_twice` (see slips.py).
    """
    n = trial.num_ranks
    for name, whole in seen.gradients.items():
        if is_special(name):
            continue
        dim = cut_dim(name)
        if only_replicated is not None and only_replicated != (dim is None):
            continue
        expected = by_rank(whole, name, n, passes)
        trial.close(
            f"the gradient of {name}{after(passes, which)} ({seen.name})",
            [g.get(name) for g in each_rank(seen, which)],
            expected,
            alternatives=partial(slips_of, seen, which, name, expected, passes),
            help=asked or ASKED[dim],
        )


def slips_of(
    seen: SimpleNamespace, which: str, name: str, expected: list[Tensor], passes: float
) -> dict[str, Tensor | list[Tensor] | Fault]:
    """What known slips would make of a gradient of a block that is expected by rank."""
    n, dim, whole = len(expected), cut_dim(name), seen.gradients[name]
    found: dict = {} if passes == 1 else {"that of one pass": [g / passes for g in expected]}
    for cause, doubled in getattr(seen, "summed_twice", dict)().items():
        if explains_all(doubled, each_rank(seen, which), passes):
            found[cause] = by_rank(doubled[name], name, n, passes)
            return found
    if dim is not None:
        found["summed over the ranks, but this parameter is cut"] = [sum(expected)] * n
    else:
        found["n times too large: what is a sum over the ranks already was summed once more"] = Fault(
            [n * g for g in expected],
            "Sum it once. Is a hook registered twice? Is it whole without one, as before a scatter_sequence?",
        )
    if dim is None and passes == BOTH:
        found |= sums_of_two_passes([whole] * n, n)
    found |= after_zero_grad(expected, n, which)
    own = getattr(seen, "own_tokens", dict)().get(name)
    if own is not None:
        found |= {
            OWN_TOKENS_ALONE: [passes * g for g in own],
            AN_NTH_OF_A_BIAS
            if name.endswith("bias") and "ln" not in name
            else "the mean over the ranks, where the sum belongs: each rank saw other tokens": [
                g / n for g in expected
            ],
        }
        if passes == BOTH:
            told = "the first pass's is right, and of the second there is what this rank's own tokens gave"
            found[told] = Fault(
                [g / BOTH + HALF * mine for g, mine in zip(expected, own, strict=True)],
                "Sum what each backward adds, whatever .grad holds already.",
            )
    return found


def by_rank(whole: Tensor, name: str, num_ranks: int, passes: float) -> list[Tensor]:
    """What each rank has of a parameter's gradient, after some passes."""
    dim = cut_dim(name)
    return [passes * g for g in ([whole] * num_ranks if dim is None else parts(whole, dim, num_ranks))]


def explains_all(gradients: dict[str, Tensor], found: list[dict[str, Tensor]], passes: float) -> bool:
    """Whether these would be the gradients of all norms, biases and matrices that have no order of their own.

    One parameter alone may be n times too large for many reasons.
    """
    expected = {
        name: by_rank(g, name, len(found), passes) for name, g in gradients.items() if not is_special(name)
    }
    return all(
        isinstance(mine := found[r].get(name), Tensor) and is_close(mine, g)
        for name, of_ranks in expected.items()
        for r, g in enumerate(of_ranks)
    )


def attention_gradients_are_right(trial: Trial, seen: SimpleNamespace, which: str, prefix: str) -> None:
    """c_attn by heads, in whichever order its rows lie."""
    n = trial.num_ranks
    orders = head_orders(seen.weights, each_rank(seen, "weights"), prefix)
    for rank, order in enumerate(orders):
        trial.require(
            order is not None,
            f"{prefix}c_attn does not hold this rank's heads of q, of k and of v ({seen.name})",
            help="tensor_parallel_attention of lesson 10 cuts it by heads.",
            rank=rank,
        )
    expected = own_rows(fused_of(seen.gradients, prefix), orders)
    total = sum(expected)
    trial.close(
        f"the gradient of {prefix}c_attn ({seen.name})",
        [fused_of(g, prefix) for g in each_rank(seen, which)],
        expected,
        alternatives=lambda: (
            {
                cause: own_rows(fused_of(doubled, prefix), orders)
                for cause, doubled in getattr(seen, "summed_twice", dict)().items()
                if explains_all(doubled, each_rank(seen, which), 1)
            }
            | {
                "summed over the ranks, but this parameter is cut": [total] * n,
                "its bias was summed over the ranks, but it is cut": [
                    torch.cat([g[:, :-1], total[:, -1:]], dim=1) for g in expected
                ],
            }
        ),
        help="Its input are all tokens, gathered; its gradient comes from all of them.",
    )


def own_rows(fused: Tensor, orders: list[list[int]]) -> list[Tensor]:
    """Each rank's rows of c_attn, in the order in which the rank has them."""
    return [heads_of(fused, rank, len(orders))[order] for rank, order in enumerate(orders)]
