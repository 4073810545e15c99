"""What known slips lead to: the dense model with the slip in it, and what each rank's tokens gave.

A case has these as functions, which a comparison calls that has failed: mostly none is needed.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from grader.checks import parts

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
        model = fresh_copy(dense)
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in SUMMED_TWICE[cause]:
                module.register_forward_hook(scaled)
        others = run_backward(model)
        found[cause] = {name: p.grad for name, p in model.named_parameters()} | others
    return found


def fresh_copy(dense: nn.Module) -> nn.Module:
    """A copy that has no gradients."""
    model = copy.deepcopy(dense)
    model.zero_grad()
    return model


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


def own_token_gradients(
    dense: nn.Module, num_ranks: int, run_backward: Callable[[nn.Module], dict]
) -> dict[str, list[Tensor]]:
    """What each rank's tokens gave: by parameter's name, one tensor a rank.

    Of norms, and of the biases of the layers before a sum.
    """
    model = fresh_copy(dense)
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

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("ln_1", "ln_2", "ln_f"):
            module.register_forward_hook(norm_hook(name))
        elif name.endswith("c_proj"):
            module.register_forward_hook(bias_hook(name))
    run_backward(model)
    return found
