"""What the checks of this lesson share: drawn weights, parts of a sequence, what a rank holds and sends."""

import copy
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from grader.checks import (
    BACKWARD,
    CheckEnded,
    Trial,
    Verdict,
    each_rank,
    parts,
    row_order,
    storage_bytes,
    told,
)

SIZES = (2, 1, 4, 3)
WAITS = 8
SLACK = 64
"""Bytes a collective may be off by: padding, a length, a few numbers about it."""


def small_config(trial: Trial, **changes) -> dict:
    """Heads that divide over 1 to 4 ranks, an odd head size, a vocabulary that 2 and 3 and 4 divide."""
    config = {
        "block_size": 28,
        "vocab_size": 48,
        "n_layer": 2,
        "n_head": 12,
        "n_embd": 12 * trial.choice([2, 3]),
        "dropout": 0.0,
        "bias": True,
    }
    return config | changes


def run_on_tokens(trial: Trial, probe: Callable, runs: list[tuple]) -> list[dict]:
    """Runs a probe; where a shape inside the attention does not fit, says which one."""
    try:
        return trial.run(probe, per_rank=runs)
    except CheckEnded as end:
        if end.verdict == Verdict.CRASHED and ("view size" in end.message or "shape '[" in end.message):
            end.cause = (
                "in CausalSelfAttention.forward b and s are read from the input: s is s/n there, and what "
                "c_attn returns has s tokens"
            )
            end.help = "Give the attention a forward that reads b and s after c_attn."
        raise


def describe(module: nn.Module) -> dict:
    """On a rank: what a module holds. Gradients that are missing stay missing."""
    named = dict(module.named_parameters())
    return {
        "weights": {name: local(p.detach()) for name, p in named.items()},
        "gradients": gradients_of(module),
        "held": {name: storage_bytes([local(p.detach())]) for name, p in named.items()},
    }


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """On a rank: the gradients that there are."""
    return {name: local(p.grad).clone() for name, p in module.named_parameters() if p.grad is not None}


def local(tensor: Tensor) -> Tensor:
    """On a rank: its own part of a DTensor; anything else as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def mark_backward(recording) -> None:
    """On a rank: marks the moment before backward, and several before it: see `alive_before_backward`."""
    for number in range(WAITS):
        recording.mark(f"waited {number}")
        time.sleep(0.004)
    recording.mark(BACKWARD)


def alive_before_backward(recording) -> int:
    """Bytes alive between forward and backward: gloo lets go of a collective's tensors a little late."""
    return min(recording.alive(mark) for mark in (*(f"waited {n}" for n in range(WAITS)), BACKWARD))


def wire_bytes(events: list, num_ranks: int) -> float:
    """Bytes that one rank sends, with rings, whichever calls they were made of."""
    share = (num_ranks - 1) / num_ranks
    factor = {"all_reduce": 2 * share, "send": 1.0, "recv": 0.0}
    return sum(event.num_bytes * factor.get(event.kind, share) for event in events)


def sends_at_most(
    trial: Trial, seen: SimpleNamespace, stretch: str, num_bytes: float, means: str, help: str
) -> None:
    """No more than (n-1)/n times so many bytes leaves a rank in a stretch; `means` says what they are."""
    n = trial.num_ranks
    where = "the backward" if stretch else "the forward"
    for rank, recording in enumerate(each_rank(seen, "recording")):
        events = recording.select(None, stretch)
        sent, allowed = wire_bytes(events, n), (n - 1) / n * num_bytes
        if n > 1 and sent > allowed + SLACK * max(1, len(events)):
            largest = sorted(events, key=lambda event: -event.num_bytes)
            trial.wrong(
                f"{where} sent about {sent:,.0f} bytes from here, where {means} send {allowed:,.0f}: "
                f"{told(largest)}",
                help=help,
                rank=rank,
            )


CUTS = {
    "attn.c_proj.weight": 1,
    "mlp.c_fc.weight": 0,
    "mlp.c_fc.bias": 0,
    "mlp.c_proj.weight": 1,
}


def cut_dim(name: str) -> int | None:
    """Along which dimension a block's parameter is cut, None if replicated; c_attn is cut by heads."""
    return next((dim for suffix, dim in CUTS.items() if name.endswith(suffix)), None)


def fused_of(tensors: dict, prefix: str) -> Tensor | None:
    """c_attn's rows with the bias as a last column, None where there is no weight."""
    weight, bias = (tensors.get(f"{prefix}attn.c_attn.{part}") for part in ("weight", "bias"))
    if weight is None or bias is None:
        return weight
    return torch.cat([weight, bias.unsqueeze(1)], dim=1) if weight.size(0) == bias.size(0) else None


def heads_of(fused: Tensor, rank: int, num_ranks: int) -> Tensor:
    """The rows of a rank's heads in q, in k and in v."""
    return torch.cat([part.chunk(num_ranks)[rank] for part in fused.chunk(3)])


def block_gradients_are_right(
    trial: Trial,
    seen: SimpleNamespace,
    which: str,
    prefix: str,
    passes: int,
    only_replicated: bool | None = None,
) -> None:
    """Gradients of a block under `which` in the results: all, or those of replicated parameters, or the rest.

    `seen` has `weights` and `gradients` of the dense model, and `own_tokens`: what each rank's tokens gave.
    """
    n = trial.num_ranks
    often = "" if passes == 1 else f" after {passes} passes"
    for name, whole in seen.gradients.items():
        if (
            not name.startswith(prefix)
            or ".c_attn." in name
            or name.endswith(("wte.weight", "lm_head.weight"))
        ):
            continue
        dim = cut_dim(name)
        if only_replicated is not None and only_replicated != (dim is None):
            continue
        expected = [passes * g for g in ([whole] * n if dim is None else parts(whole, dim, n))]
        own = seen.own_tokens.get(name)
        alternatives: dict = {} if passes == 1 else {"that of one pass": [g / passes for g in expected]}
        for cause, doubled in getattr(seen, "summed_twice", {}).items():
            g = passes * doubled[name]
            alternatives[cause] = [g] * n if dim is None else parts(g, dim, n)
        if dim is not None:
            alternatives["summed over the ranks, but this parameter is cut"] = [sum(expected)] * n
        if own is not None:
            alternatives |= {
                "only what this rank's own tokens gave: nothing was summed": [passes * g for g in own],
                "the mean over the ranks, where the sum belongs: each rank saw other tokens": [
                    g / n for g in expected
                ],
            }
        trial.close(
            f"the gradient of {name}{often} ({seen.name})",
            [g.get(name) for g in each_rank(seen, which)],
            expected,
            alternatives=alternatives,
            help=(
                "Every rank has the whole parameter and uses it for its own tokens: its gradient is the "
                "sum over "
                "the group, once for each backward."
                if dim is None
                else "What enters this layer is a slice of the features of every token; is its gradient "
                "there "
                "for every token?"
            ),
        )


def attention_gradients_are_right(trial: Trial, seen: SimpleNamespace, which: str, prefix: str) -> None:
    """c_attn by heads, in whichever order its rows lie."""
    n = trial.num_ranks
    fused, gradient = fused_of(seen.weights, prefix), fused_of(seen.gradients, prefix)
    orders = []
    for rank, held in enumerate(each_rank(seen, "weights")):
        order = row_order(fused_of(held, prefix), heads_of(fused, rank, n))
        trial.require(
            order is not None,
            f"{prefix}attn.c_attn does not hold this rank's heads of q, of k and of v ({seen.name})",
            help="tensor_parallel_attention of lesson 10 cuts it by heads.",
            rank=rank,
        )
        orders.append(order)
    expected = own_rows(gradient, orders)
    total = sum(expected)
    trial.close(
        f"the gradient of {prefix}attn.c_attn ({seen.name})",
        [fused_of(g, prefix) for g in each_rank(seen, which)],
        expected,
        alternatives={
            cause: own_rows(fused_of(doubled, prefix), orders)
            for cause, doubled in getattr(seen, "summed_twice", {}).items()
        }
        | {
            "summed over the ranks, but this parameter is cut": [total] * n,
            "its bias was summed over the ranks, but it is cut": [
                torch.cat([g[:, :-1], total[:, -1:]], dim=1) for g in expected
            ],
        },
        help="Its input are all tokens, gathered; its gradient comes from all of them.",
    )


def own_rows(fused: Tensor, orders: list[list[int]]) -> list[Tensor]:
    """Each rank's rows of c_attn, in the order in which the rank has them."""
    return [heads_of(fused, rank, len(orders))[order] for rank, order in enumerate(orders)]


HEAD = ("ln_f",)
BLOCKS = ("ln_1", "ln_2")
BOTH_SUM = (
    "one sum too many, n times too large there: gather_sequence's backward sums, and so does the "
    "copy_to_group that begins "
)
SUMMED_TWICE = {
    BOTH_SUM + "lesson 10's lm_head": HEAD,
    BOTH_SUM + "lesson 10's c_attn and c_fc": BLOCKS,
    BOTH_SUM + "lesson 10's layers (c_attn, c_fc, lm_head)": HEAD + BLOCKS,
}
"""cause: the norms after which the gradient is summed twice"""


def gradients_summed_twice(
    dense: nn.Module, causes: list[str], num_ranks: int, run_backward: Callable[[nn.Module], dict]
) -> dict[str, dict[str, Tensor]]:
    """By cause: every parameter's gradient, if that of some norms' outputs is n times too large.

    `run_backward(model)` returns what is to be known besides.
    """

    def scaled(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        return scale_gradient(output, num_ranks)

    found = {}
    for cause in causes:
        model = copy.deepcopy(dense)
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in SUMMED_TWICE[cause]:
                module.register_forward_hook(scaled)
        others = run_backward(model)
        found[cause] = {name: p.grad for name, p in model.named_parameters()} | others
    return found


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x itself; backward multiplies."""
    return factor * x - ((factor - 1) * x).detach()


def with_biases_added_often(dense: nn.Module, num_ranks: int) -> nn.Module:
    """A copy in which the biases after a sum over ranks count n times."""
    model = copy.deepcopy(dense)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("c_proj.bias"):
                parameter.mul_(num_ranks)
    return model


BIAS_ADDED_OFTEN = "the bias n times: every rank added it before the reduce-scatter"


def own_token_gradients(dense: nn.Module, num_ranks: int) -> dict[str, list[Tensor]]:
    """Watch a dense model: once it has run backward, the dictionary holds what each rank's tokens gave.

    For norms, and for the biases of the layers before a sum: by parameter's name, one tensor a rank.
    """
    found: dict[str, list[Tensor]] = {}

    def norm_hook(name: str):
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            unit = nn.functional.layer_norm(inputs[0].detach(), inputs[0].shape[-1:], eps=1e-5)

            def see(gradient: Tensor) -> None:
                found[f"{name}.weight"] = [g.sum((0, 1)) for g in parts(gradient * unit, 1, num_ranks)]
                found[f"{name}.bias"] = [g.sum((0, 1)) for g in parts(gradient, 1, num_ranks)]

            if output.requires_grad:
                output.register_hook(see)

        return hook

    def bias_hook(name: str):
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            def see(gradient: Tensor) -> None:
                found[f"{name}.bias"] = [g.sum((0, 1)) for g in parts(gradient, 1, num_ranks)]

            if output.requires_grad:
                output.register_hook(see)

        return hook

    for name, module in dense.named_modules():
        if name.rpartition(".")[2] in ("ln_1", "ln_2", "ln_f"):
            module.register_forward_hook(norm_hook(name))
        elif name.endswith("c_proj"):
            module.register_forward_hook(bias_hook(name))
    return found


def kept_bytes(config: dict, batch_size: int, sequence_length: int, num_ranks: int, masks: bool) -> int:
    """What one block may keep: every layer its whole gathered input, everything else this rank's part.

    The attention's probabilities are not dropped, so its core is the fused kernel.
    """
    whole = 4 * batch_size * sequence_length * config["n_embd"]
    part, tokens = whole // num_ranks, batch_size * sequence_length // num_ranks
    norms = 2 * (part + 8 * tokens)
    core = 4 * part + 4 * config["n_head"] * tokens
    return norms + 2 * whole + core + 8 * part + (2 * part if masks else 0)
