"""Checks of `largest_microbatch`. The judge measures real models; it does not know the formulas."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from grader.checks import Answers, Trial, check, compare_answers, exercise
from nanogpt.model import GPT, GPTConfig

exercise(
    "largest_microbatch",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "The states do not depend on b. How much do two sequences keep, and how much more do three?",
        "Some activations are there once, whatever b is: the positions, for one. So one sequence is not half "
        "of two. A straight line has a slope and an intercept; two calls of activation_bytes give both.",
        "(memory - states - intercept) // slope, and never below 0. Or count b up until it no longer fits.",
    ),
)

STATES = {"fp32": (4, 4, 8), "mixed": (2, 2, 12), "mixed_fp32_gradients": (2, 4, 12)}
"""Bytes a parameter of weights, gradients and optimizer."""


@lru_cache
def num_parameters(config: GPTConfig) -> int:
    """The elements of a real model's parameters."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


@lru_cache
def saved_bytes(config: GPTConfig, batch_size: int, sequence_length: int) -> int:
    """Bytes of the distinct storages that autograd keeps, measured on a real model."""
    model = GPT(config).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(config.vocab_size, (2, batch_size, sequence_length))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _graph = model(tokens[0].clone(), tokens[1].clone())
    return sum(kept.values())


def line(config: GPTConfig, sequence_length: int) -> tuple[int, int]:
    """Measured activation bytes: what every sequence adds, and what is there once."""
    two, three = (saved_bytes(config, b, sequence_length) for b in (2, 3))
    return three - two, two - 2 * (three - two)


def largest(
    config: GPTConfig,
    memory_bytes: float,
    recipe: str,
    sequence_length: int,
    states: float | None = None,
    share: float = 1.0,
) -> int:
    """The answer of a measured search; with other states or another share of the activations, a slip's."""
    each, once = (share * size for size in line(config, sequence_length))
    states = num_parameters(config) * sum(STATES[recipe]) if states is None else states
    return max(0, int((memory_bytes - states - once) // each))


def needed(config: GPTConfig, batch_size: int, recipe: str, sequence_length: int) -> int:
    """Bytes with which a batch just fits."""
    each, once = line(config, sequence_length)
    return num_parameters(config) * sum(STATES[recipe]) + once + each * batch_size


# --- what is asked ---


def draw(trial: Trial, **fixed: Any) -> GPTConfig:
    heads = trial.integer(2, 5)
    sizes = {
        "block_size": trial.integer(13, 40),
        "vocab_size": trial.integer(13, 97),
        "n_layer": trial.integer(1, 4),
        "n_head": heads,
        "n_embd": heads * trial.integer(3, 11),
        "dropout": trial.choice([0.0, 0.1]),
        "bias": trial.choice([True, False]),
    }
    return GPTConfig(**(sizes | fixed))


def asking(trial: Trial, config: GPTConfig, recipe: str, batch_size: int, extra: Callable) -> tuple:
    """A call whose answer is near `batch_size`; `extra(each)` bytes more than that batch needs."""
    length = trial.integer(5, config.block_size - 1)
    memory = needed(config, batch_size, recipe, length) + extra(line(config, length)[0])
    return config, memory, recipe, length


def ask(trial: Trial, calls: list[tuple]) -> Answers:
    return Answers(trial, "largest_microbatch", calls, largest)


def ask_between(trial: Trial) -> Answers:
    """Every recipe, with dropout and without; neighbours that differ in one thing; memory between sizes."""
    half = lambda each: each // 2 + trial.integer(-each // 4, each // 4)  # noqa: E731
    calls = [
        asking(trial, draw(trial, dropout=dropout), recipe, trial.integer(3, 30), half)
        for recipe in STATES
        for dropout in (0.0, 0.1)
    ]
    heavy = draw(trial, n_layer=3, n_head=5, n_embd=55)  # two bytes a parameter are several sequences
    memory = needed(heavy, 20, "mixed_fp32_gradients", 5)
    calls += [(heavy, memory, recipe, 5) for recipe in STATES]
    config, memory, recipe, length = asking(trial, draw(trial), "mixed", 20, half)
    calls += [(config, memory, recipe, length), (config, memory, recipe, length - 2)]
    calls += [
        (replace(config, n_layer=config.n_layer + 1), memory, recipe, length),
        (replace(config, dropout=0.1 - config.dropout), memory, recipe, length),
        (replace(config, vocab_size=config.vocab_size + 50), 2 * memory, recipe, length),
        (config, memory, recipe, length),
    ]
    return ask(trial, calls)


def ask_exact(trial: Trial) -> Answers:
    calls = []
    for recipe in STATES:
        for extra in (0, -1):
            config = draw(trial)
            calls.append(asking(trial, config, recipe, trial.integer(3, 40), lambda _, extra=extra: extra))
    return ask(trial, calls)


def ask_none(trial: Trial) -> Answers:
    """Without dropout: there, one sequence keeps what the line says."""
    calls = [asking(trial, draw(trial, dropout=0.0), recipe, 1, lambda _: -1) for recipe in STATES]
    calls += [
        asking(trial, draw(trial, dropout=0.0), "fp32", 0, lambda each: -3 * each),
        asking(trial, draw(trial, dropout=0.0), "mixed", 0, lambda each: each // 2),
        (draw(trial), 0, "fp32", 9),
        asking(trial, draw(trial, dropout=0.0), "fp32", 1, lambda _: 0),
    ]
    return ask(trial, calls)


def ask_large(trial: Trial) -> Answers:
    half = lambda each: each // 2  # noqa: E731
    calls = [asking(trial, draw(trial), "mixed", trial.integer(300, 2000), half) for _ in range(3)]
    small = draw(trial, n_layer=1, n_head=2, n_embd=6, vocab_size=300)
    return ask(trial, [*calls, asking(trial, small, "fp32", trial.integer(2000, 3000), half)])


# --- what known slips lead to ---


def slips(config: GPTConfig, memory: int, recipe: str, length: int) -> dict[str, float]:
    each, once = line(config, length)
    parameters, sizes = num_parameters(config), STATES[recipe]
    right = largest(config, memory, recipe, length)
    states = parameters * sum(sizes)
    head = 2 * 4 * length * config.vocab_size
    return {
        "what fills the memory exactly fits, too": largest(config, memory - 1, recipe, length),
        "activations are fp32, whatever the recipe: 4 bytes a number": largest(
            config, memory, recipe, length, share=0.5
        ),
        "the weights alone are no model state: gradients and optimizer stay too": largest(
            config, memory, recipe, length, states=parameters * sizes[0]
        ),
        "the states are missing: weights, gradients and optimizer": largest(
            config, memory, recipe, length, states=0
        ),
        "these are the states of fp32: the recipe says how many bytes a parameter has": largest(
            config, memory, recipe, length, states=16 * parameters
        ),
        "the longest sequence, block_size, where sequence_length is asked": largest(
            config, memory, recipe, config.block_size
        ),
        "positions are kept once, not for every sequence: activations are not b times those of one": max(
            0, (memory - states) // (each + once)
        ),
        "one too many: this is the first that does not fit": right + 1,
        "one too few": right - 1,
        "fewer than none": (memory - states - once) // each,
        "a power of two: every whole number is allowed": 2 ** (right.bit_length() - 1) if right else 0,
        "what backward makes and nobody keeps is not in lesson 01's formulas": max(
            0, (memory - states - once) // (each + head)
        ),
    }


def require(trial: Trial, answers: Answers, help: str) -> None:
    compare_answers(trial, answers, slips=slips, help=help)


# --- the checks ---


@check("largest_microbatch")
def agrees_with_a_measured_search(trial: Trial) -> None:
    """States and measured activations of that many sequences fit, and of one more do not."""
    help = (
        "Add model_state_bytes(P, recipe)['total'] and activation_bytes(config, b, s)['total'], for a few b."
    )
    require(trial, trial.once(ask_between), help)


@check("largest_microbatch")
def fits_means_at_most(trial: Trial) -> None:
    """What needs exactly memory_bytes fits; what needs one byte more does not."""
    help = "Compare with <=, in whole numbers, and count once what is there once, such as the positions."
    require(trial, trial.once(ask_exact), help)


@check("largest_microbatch")
def zero_where_one_does_not_fit(trial: Trial) -> None:
    """Where the states, or one sequence beside them, do not fit, the answer is 0."""
    help = "Without room for one sequence the answer is 0: not below, not 1, and no error."
    require(trial, trial.once(ask_none), help)


@check("largest_microbatch")
def small_models_take_many_sequences(trial: Trial) -> None:
    """Where thousands of sequences fit, the answer says how many."""
    require(trial, trial.once(ask_large), "The search has no upper end.")
