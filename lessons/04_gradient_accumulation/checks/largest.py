"""Checks of `largest_microbatch`. The judge measures real models; it does not know the formulas."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from grader.checks import Answers, Trial, check, compare_answers, exercise, kept_for_backward, whole
from lessons_shared.sizes import sized_gpt
from nanogpt.model import GPT, GPTConfig

exercise(
    "largest_microbatch",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "The states do not depend on b. How much do two sequences keep, and how much more do three? What do "
        "the two tensors of the head add for each sequence?",
        "Some activations are there once, whatever b is: the positions, for one. So one sequence is not half "
        "of two. A straight line has a slope and an intercept; two calls of activation_bytes give both.",
        "(memory - states - intercept) // slope, and never below 0. Or count b up until it no longer fits.",
    ),
)

STATES = {"fp32": (4, 4, 8), "mixed": (2, 2, 12), "mixed_fp32_gradients": (2, 4, 12)}
"""Bytes a parameter of weights, gradients and optimizer."""


# --- what is true ---


@lru_cache
def num_parameters(config: GPTConfig) -> int:
    """The elements of a real model's parameters."""
    return sum(parameter.numel() for parameter in sized_gpt(config).parameters())


@lru_cache
def saved_bytes(config: GPTConfig, batch_size: int, sequence_length: int) -> int:
    """Bytes of the distinct storages that autograd keeps, measured on a real model."""
    tokens, targets = torch.randint(config.vocab_size, (2, batch_size, sequence_length)).unbind()
    return sum(size for _, size in kept_for_backward(GPT(config).train(), tokens.clone(), targets.clone()))


@dataclass(frozen=True)
class Need:
    """Bytes of a training step when backward begins: a straight line in the batch."""

    states: float
    once: float
    """Activations that do not depend on the batch."""
    each: float
    """Activations of a sequence."""
    head: float
    """Of a sequence, the gradients of the log-probabilities and of the logits."""

    def of(self, batch_size: int) -> float:
        """What a batch needs."""
        return self.states + self.once + batch_size * (self.each + self.head)

    def largest(self, memory_bytes: float) -> int:
        """The largest batch that fits."""
        return max(0, int((memory_bytes - self.states - self.once) // (self.each + self.head)))

    def told(self, batch_size: int) -> str:
        """The terms, in words."""
        activations, head = self.once + batch_size * self.each, batch_size * self.head
        return (
            f"states {self.states:,}, activations {activations:,}, the head's two tensors {head:,}: "
            f"together {self.of(batch_size):,} bytes"
        )


@lru_cache
def need(config: GPTConfig, recipe: str, sequence_length: int) -> Need:
    """What is true."""
    two, three = (saved_bytes(config, b, sequence_length) for b in (2, 3))
    each = three - two
    head = 2 * 4 * sequence_length * config.vocab_size
    return Need(num_parameters(config) * sum(STATES[recipe]), two - 2 * each, each, head)


def largest(config: GPTConfig, memory_bytes: float, recipe: str, sequence_length: int) -> int:
    """The right answer."""
    return need(config, recipe, sequence_length).largest(memory_bytes)


# --- what is asked ---


def draw(trial: Trial, **fixed: Any) -> GPTConfig:
    """A model for which the head's moment is the worst one of a step: tests hold it."""
    heads = trial.integer(2, 4)
    sizes = {
        "block_size": trial.integer(33, 48),
        "vocab_size": trial.integer(150, 300),
        "n_layer": trial.integer(1, 4),
        "n_head": heads,
        "n_embd": heads * trial.integer(3, 7),
        "dropout": trial.choice([0.0, 0.1]),
        "bias": trial.choice([True, False]),
    }
    return GPTConfig(**(sizes | fixed))


def asking(trial: Trial, config: GPTConfig, recipe: str, batch_size: int, extra: Callable) -> tuple:
    """A call whose answer is near `batch_size`; `extra(each)` bytes more than that batch needs."""
    length = trial.integer(25, config.block_size - 1)
    true = need(config, recipe, length)
    return config, true.of(batch_size) + extra(true.each + true.head), recipe, length


def ask(trial: Trial, calls: list[tuple]) -> Answers:
    return Answers(trial, "largest_microbatch", calls, largest)


def ask_between(trial: Trial) -> Answers:
    """Every recipe, with dropout and without; neighbours that differ in one thing; memory between sizes.

    A few hundred sequences: so a small term that is missing is more than one of them.
    """
    half = lambda each: each // 2 + trial.integer(-each // 4, each // 4)  # noqa: E731
    calls = [
        asking(trial, draw(trial, dropout=dropout), recipe, trial.integer(100, 400), half)
        for recipe in STATES
        for dropout in (0.0, 0.1)
    ]
    heavy = draw(trial, n_layer=3, n_head=5, n_embd=55, vocab_size=275)  # two bytes a parameter are sequences
    memory = need(heavy, "mixed_fp32_gradients", 6).of(20) + 20_000
    calls += [(heavy, memory, recipe, 6) for recipe in STATES]
    config, memory, recipe, length = asking(trial, draw(trial), "mixed", 200, half)
    calls += [(config, memory, recipe, length), (config, memory, recipe, length - 2)]
    calls += [
        (replace(config, n_layer=config.n_layer + 1), memory, recipe, length),
        (replace(config, dropout=0.1 - config.dropout), memory, recipe, length),
        (replace(config, vocab_size=config.vocab_size + 50), 2 * memory, recipe, length),
        (config, memory, recipe, length),
    ]
    return ask(trial, calls)


def ask_exact(trial: Trial) -> Answers:
    """To the byte; and with 64 bytes to spare, where < and <= are the same."""
    calls = []
    for recipe in STATES:
        for extra in (0, -1, 64):
            config = draw(trial)
            calls.append(asking(trial, config, recipe, trial.integer(9, 400), lambda _, extra=extra: extra))
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
    small = draw(trial, n_layer=1, n_head=2, n_embd=6, vocab_size=160)
    for least in (2000, 66_000, 70_000):  # the most need some 5 GB
        calls.append(asking(trial, small, "fp32", trial.integer(least, least + 1000), half))
    return ask(trial, calls)


# --- what known slips lead to ---


FEWER_THAN_NONE = "fewer than none"
FITS_EXACTLY = "what fills the memory exactly fits, too"
FIRST_TOO_LARGE = "always one too many: this is the first that does not fit"


def slips(config: GPTConfig, memory: int, recipe: str, length: int) -> dict[str, float]:
    true = need(config, recipe, length)
    weights, gradients, optimizer = (num_parameters(config) * size for size in STATES[recipe])
    right, longest = true.largest(memory), need(config, recipe, config.block_size)
    halves = replace(true, once=true.once / 2, each=true.each / 2)
    statistics = 4 * config.n_layer * config.n_head * length
    is_mixed = recipe != "fp32"
    streams = 4 * (2 * config.n_layer + 1) * config.n_embd * length
    cores = 4 * config.n_layer * config.n_head * length**2

    def without(masks: int) -> Need:
        return replace(true, each=true.each - masks) if config.dropout else true

    wrong = {
        "the head's two tensors of (b, s, v) are missing: backward makes the gradients of the "
        "log-probabilities and of the logits first": replace(true, head=0),
        "one tensor of (b, s, v) too few at the head: backward makes two, in fp32": replace(
            true, head=true.head / 2
        ),
        "one tensor of (b, s, v) too many at the head: the logits are not kept, the log-probabilities are "
        "an activation": replace(true, head=true.head * 1.5),
        "the head's two tensors are fp32 with the mixed recipes too: 4 bytes a number": replace(
            true, head=true.head / 2
        )
        if is_mixed
        else true,
        "activations are fp32 with the mixed recipes too: 4 bytes a number": halves if is_mixed else true,
        "activations and the head's tensors are fp32 with the mixed recipes too: 4 bytes a number": replace(
            halves, head=true.head / 2
        )
        if is_mixed
        else true,
        "activations are fp32: 4 bytes a number": halves,
        "the weights alone are no model state: gradients and optimizer stay too": replace(
            true, states=weights
        ),
        "the gradients are missing: a second micro-batch adds to those of the first": replace(
            true, states=weights + optimizer
        ),
        "the optimizer's state is missing": replace(true, states=weights + gradients),
        "the states are missing: weights, gradients and optimizer": replace(true, states=0),
        "these are the states of fp32: the recipe says how many bytes a parameter has": replace(
            true, states=16 * num_parameters(config)
        ),
        "the longest sequence, block_size, where sequence_length is asked": longest,
        "activations of the longest sequence, block_size, where sequence_length is asked": replace(
            longest, head=true.head
        ),
        "the head's two tensors are of the longest sequence, block_size, where sequence_length is asked": (
            replace(true, head=longest.head)
        ),
        "these are the activations without dropout: with it other tensors are kept, masks among them": need(
            replace(config, dropout=0.0), recipe, length
        ),
        "dropout's masks of (b, s, h) are missing: one after the embeddings, two in each block": (
            without(streams)
        ),
        "dropout's mask of (b, a, s, s) is missing in each layer's core": without(cores),
        "dropout's masks are missing: one in each core, one after the embeddings, two in each block": (
            without(streams + cores)
        ),
        "positions are kept once, not for every sequence: activations are not b times those of one": replace(
            true, once=0, each=true.each + true.once
        ),
        "the attention's log-sum-exp is missing: 4·L·a·s bytes a sequence, where dropout is 0": true
        if config.dropout
        else replace(true, each=true.each - statistics),
        "4·L·a·s bytes a sequence are missing, with dropout and without: as many as the attention's "
        "log-sum-exp has, which is kept without": replace(true, each=true.each - statistics),
    }
    return {
        FITS_EXACTLY: true.largest(memory - 1),
        **{text: need_of_slip.largest(memory) for text, need_of_slip in wrong.items()},
        FEWER_THAN_NONE: (memory - true.states - true.once) // (true.each + true.head),
        "a power of two: every whole number is allowed": 2 ** (right.bit_length() - 1) if right else 0,
        FIRST_TOO_LARGE: right + 1,
        "always one too few: one more fits": right - 1,
    }


def of_the_last_byte(config: GPTConfig, memory: int, recipe: str, length: int) -> dict[str, float]:
    """The slips that can be told apart where memory is filled to the byte; other terms look all alike."""
    known = slips(config, memory, recipe, length)
    return {text: known[text] for text in (FITS_EXACTLY, FIRST_TOO_LARGE)}


def of_no_room(config: GPTConfig, memory: int, recipe: str, length: int) -> dict[str, float]:
    """The slips that can be told apart where 0 or 1 fits; other terms look all alike."""
    return {FEWER_THAN_NONE: slips(config, memory, recipe, length)[FEWER_THAN_NONE]}


def require(
    trial: Trial, answers: Answers, help: str, known: Callable[..., dict[str, float]] = slips
) -> None:
    """Compare; where an answer is wrong, tell the terms of what is needed."""
    values = [value for value in map(whole, answers.given) if value is not None]
    most = max(values, default=0)
    at_most = (
        {f"never more than {most:,}: has the search an upper end?": most}
        if most and values.count(most) > 1
        else {}
    )
    compare_answers(
        trial,
        answers,
        slips=lambda *call: known(*call) | {text: min(most, largest(*call)) for text in at_most},
        help=f"{help} {terms_of_first_wrong(answers)}".strip(),
    )


def terms_of_first_wrong(answers: Answers) -> str:
    """What the first wrong answer needs, term by term; or the right one, where that is larger."""
    asked = zip(answers.calls, map(whole, answers.given), answers.true, strict=True)
    call, value, true = next((each for each in asked if each[1] != each[2]), (None, None, None))
    if value is None:
        return ""
    config, memory, recipe, length = call
    size = max(value, true)
    return f"For {size:,}: {need(config, recipe, length).told(size)}, where there are {memory:,}."


# --- the checks ---


@check("largest_microbatch")
def agrees_with_a_measured_search(trial: Trial) -> None:
    """A training step with that many sequences fits, and with one more it does not."""
    help = (
        "Add model_state_bytes(P, recipe)['total'], activation_bytes(config, b, s)['total'] and the head's "
        "two tensors, for a few b."
    )
    require(trial, trial.once(ask_between), help)


@check("largest_microbatch")
def fits_means_at_most(trial: Trial) -> None:
    """What needs exactly memory_bytes fits; what needs one byte more does not."""
    help = "Compare with <=, in whole numbers, and count once what is there once, such as the positions."
    require(trial, trial.once(ask_exact), help, of_the_last_byte)


@check("largest_microbatch")
def zero_where_one_does_not_fit(trial: Trial) -> None:
    """Where the states, or one sequence beside them, do not fit, the answer is 0."""
    help = "Without room for one sequence the answer is 0: not below, not 1, and no error."
    require(trial, trial.once(ask_none), help, of_no_room)


@check("largest_microbatch")
def small_models_take_many_sequences(trial: Trial) -> None:
    """Where thousands of sequences fit, the answer says how many."""
    require(trial, trial.once(ask_large), "The search has no upper end.")
