"""Checks of `model_state_bytes`."""

from functools import lru_cache, partial

import torch
from torch import nn

from grader.checks import Answers, Trial, check, exercise, require_refusal, require_whole_numbers

from .models import Where, measured

exercise(
    "model_state_bytes",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Adam keeps two numbers a parameter, the means of gradient and squared gradient, always in fp32.",
        "16-bit weights are too coarse for small updates: mixed recipes keep an fp32 copy in the optimizer.",
    ),
)

RECIPES = {
    "fp32": (torch.float32, torch.float32, False),
    "mixed": (torch.bfloat16, torch.bfloat16, True),
    "mixed_fp32_gradients": (torch.bfloat16, torch.float32, True),
}


@lru_cache
def state_bytes(num_parameters: int, recipe: str) -> dict[str, int]:
    """Bytes that a real AdamW step on that many parameters leaves behind, on the meta device."""
    weight_dtype, gradient_dtype, has_master = RECIPES[recipe]
    weights = torch.zeros(num_parameters, dtype=weight_dtype, device="meta")
    gradients = torch.zeros(num_parameters, dtype=gradient_dtype, device="meta")
    updated = nn.Parameter(weights.float())
    updated.grad = gradients.float()
    optimizer = torch.optim.AdamW([updated], foreach=False)
    optimizer.step()
    kept = [value for name, value in optimizer.state[updated].items() if name != "step"]
    kept += [updated] if has_master else []
    sizes = {
        "weights": weights.nbytes,
        "gradients": gradients.nbytes,
        "optimizer": sum(tensor.nbytes for tensor in kept),
    }
    return sizes | {"total": sum(sizes.values())}


def count_states(trial: Trial) -> Answers:
    numbers = (
        trial.integer(10**3, 10**6),
        124_337_664,
        trial.integer(10**9, 10**11),
        2 * trial.integer(9, 99) + 1,
    )
    calls = [(number, recipe) for number in numbers for recipe in RECIPES]
    return Answers(trial, "model_state_bytes", calls, state_bytes)


def state_slips(key: str, num_parameters: int, recipe: str) -> dict[str, float]:
    slips: dict[tuple[str, str], dict[str, float]] = {
        ("weights", "fp32"): {"fp32 is 4 bytes": 2, "fp32 is 4 bytes: 8 are fp64": 8},
        ("gradients", "fp32"): {
            "fp32 is 4 bytes": 2,
            "fp32 is 4 bytes: 8 are fp64": 8,
            "a gradient for each weight is there from backward to the optimizer's step": 0,
        },
        ("optimizer", "fp32"): {
            "Adam keeps two moments, not one": 4,
            "fp32 weights are their own master copy: the optimizer has the two moments alone": 12,
            "the optimizer has the two moments alone: weights and gradients count with themselves": 16,
        },
        ("weights", "mixed"): {
            "the master copy counts with the optimizer: weights are the 16-bit ones": 6,
            "weights are the 16-bit ones: the fp32 ones are the master copy, and the optimizer's": 4,
        },
        ("gradients", "mixed"): {
            "gradients are 16-bit here: fp32 ones are another recipe, mixed_fp32_gradients": 4,
            "gradients are 16-bit here: 6 bytes are a 16-bit one and an fp32 one beside it": 6,
        },
        ("gradients", "mixed_fp32_gradients"): {
            "20 bytes a parameter keep a 16-bit gradient beside the fp32 one: here there is one": 6,
            "fp32 gradients take 4 bytes": 2,
        },
        ("optimizer", "mixed"): {
            "an fp32 master copy and two fp32 moments are 12 bytes: the copy is missing, or the moments are "
            "16-bit": 8,
            "Adam's moments stay fp32, 4 bytes each, and so does the master copy": 6,
            "the master copy is fp32: 4 bytes, not 2": 10,
            "Adam's two moments are fp32, and the master copy is missing": 4,
        },
    }
    for part in ("weights", "optimizer"):
        slips[part, "mixed_fp32_gradients"] = slips[part, "mixed"]
    known = {text: size * num_parameters for text, size in slips.get((key, recipe), {}).items()}
    right = state_bytes(num_parameters, recipe)[key]
    told = "the total is the sum of the three parts: here it is twice that"
    return known | {"these are bits: a byte has 8": 8 * right} | ({told: 2 * right} if key == "total" else {})


@check("model_state_bytes")
def states_are_whole_numbers(trial: Trial) -> None:
    """The answer has weights, gradients, optimizer and total, each a whole number."""
    require_whole_numbers(trial, trial.once(count_states), ("weights", "gradients", "optimizer", "total"))


@check("model_state_bytes")
def fp32_keeps_four_numbers(trial: Trial) -> None:
    """fp32: weight, gradient and Adam's two moments, 4 bytes each."""
    compare_recipe(trial, "fp32")


@check("model_state_bytes")
def mixed_keeps_a_master_copy(trial: Trial) -> None:
    """mixed: 16-bit weights and gradients; the optimizer has fp32 master weights and two fp32 moments."""
    compare_recipe(trial, "mixed")


@check("model_state_bytes")
def fp32_gradients_cost_two_bytes_more(trial: Trial) -> None:
    """mixed_fp32_gradients: as mixed, with 4 bytes for a gradient: 18 in all."""
    compare_recipe(trial, "mixed_fp32_gradients")


def compare_recipe(trial: Trial, recipe: str) -> None:
    for key in ("weights", "gradients", "optimizer", "total"):
        help = f"Which numbers does {recipe} keep under {key!r}, and how many bytes has each?"
        where: Where = lambda _, word: word == recipe  # noqa: E731
        slips = partial(state_slips, key)
        states = trial.once(count_states)
        measured(trial, states, key, slips=slips, help=help, where=where, alterations={})


@check("model_state_bytes")
def unknown_recipe_is_refused(trial: Trial) -> None:
    """Another recipe is a ValueError."""
    calls = [(trial.integer(10, 99), word) for word in ("bf16", "FP32", "", "mixed_fp32")]
    require_refusal(trial, Answers(trial, "model_state_bytes", calls, lambda *_: None), RECIPES)
