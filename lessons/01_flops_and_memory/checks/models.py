"""What is true, measured on real models; and the models and batches that the judge asks about."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from grader.checks import Answers, CheckEnded, Trial, compare_answers, kept_for_backward, whole
from lessons_shared.sizes import sized_gpt
from nanogpt.model import GPT, GPTConfig

Where = Callable[..., bool]
PARTS = ("embedding", "attention", "mlp", "norm", "head")
LARGE = 15_000_000
"""Elements of the residual stream times rows of two matrices, from which on computing takes longer than
torch's way without numbers (on one thread, about).
"""


# --- what is true ---


@lru_cache
def parameters(config: GPTConfig) -> dict[str, int]:
    """The elements of a real model's parameters, by part."""
    counts = dict.fromkeys((*PARTS, "total"), 0)
    for name, parameter in sized_gpt(config).named_parameters():
        counts[part_of(name)] += parameter.numel()
        counts["total"] += parameter.numel()
    return counts


def part_of(name: str) -> str:
    """The part that a module or parameter of this name belongs to."""
    pieces = name.split(".")
    for part, names in (("attention", {"attn"}), ("mlp", {"mlp"}), ("norm", {"ln_1", "ln_2", "ln_f"})):
        if names.intersection(pieces):
            return part
    return "embedding" if {"wte", "wpe", "drop"}.intersection(pieces) else "head"


def flops(
    config: GPTConfig, batch_size: int, sequence_length: int, recompute: str | None = None
) -> dict[str, int]:
    """What FlopCounterMode counts: a forward by part, or with `recompute` forward and backward in all.

    What is recomputed runs forward once more, all of it. Blocks are alike: one is counted, for each of them.
    """
    of, n = counted(replace(config, n_layer=1), batch_size, sequence_length), config.n_layer
    if recompute is None:
        parts = {"attention": n * of["attention"], "mlp": n * of["mlp"], "head": of["head"]}
        return parts | {"total": n * of["block"] + of["head"]}
    again = {"none": 0, "attention": of["core"], "full": of["block"]}[recompute]
    return {"total": n * (of["block"] + of["block backward"] + again) + of["head"] + of["head backward"]}


@lru_cache
def counted(config: GPTConfig, batch_size: int, sequence_length: int) -> dict[str, int]:
    """FLOPs of the first block, of parts of it, and of the head: forward, and backward."""
    if config.n_embd * (config.n_embd + config.vocab_size) * batch_size * sequence_length < LARGE:
        model, device = GPT(config), "cpu"
    else:
        model, device = sized_gpt(config), "meta"
    tokens = torch.zeros(batch_size, sequence_length, dtype=torch.long, device=device)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        x = model.transformer.h[0](model.embed(tokens, torch.arange(sequence_length).to(device)))
        ended = x.detach().requires_grad_()
        loss = model.head(ended).sum()
        modules = {name: sum(operations.values()) for name, operations in counter.get_flop_counts().items()}
        totals = [counter.get_total_flops()]
        loss.backward()
        totals.append(counter.get_total_flops())
        x.backward(ended.grad)
        totals.append(counter.get_total_flops())
    return {
        "attention": modules["Block.attn"],
        "core": modules["Block.attn.core"],
        "mlp": modules["Block.mlp"],
        "block": modules["Block"],
        "head": modules["Linear"],
        "head backward": totals[1] - totals[0],
        "block backward": totals[2] - totals[1],
    }


@lru_cache
def saved_bytes(config: GPTConfig, batch_size: int, sequence_length: int) -> dict[str, int]:
    """Distinct storages that autograd keeps, by the part whose module keeps them first."""
    tokens, targets = torch.randint(config.vocab_size, (2, batch_size, sequence_length)).unbind()
    sizes = dict.fromkeys((*PARTS, "total"), 0)
    for name, size in kept_for_backward(GPT(config).train(), tokens.clone(), targets.clone()):
        sizes[part_of(name)] += size
        sizes["total"] += size
    return sizes


def core_flops(config: GPTConfig, batch_size: int, sequence_length: int) -> int:
    """One forward of the attention core in every layer: what recomputing it adds to a training step."""
    with_core = flops(config, batch_size, sequence_length, "attention")
    return with_core["total"] - flops(config, batch_size, sequence_length, "none")["total"]


def utilization(config: GPTConfig, tokens_per_second: float, peak: float, sequence_length: int) -> float:
    """The FLOPs that are counted in a forward and backward, a second, over the peak."""
    counted = flops(config, 1, sequence_length, "none")["total"]
    return tokens_per_second / sequence_length * counted / peak


# --- what is asked ---


def draw(trial: Trial, **fixed: Any) -> GPTConfig:
    """A small model of odd sizes."""
    heads = fixed.get("n_head", trial.integer(2, 5))
    sizes = {
        "block_size": trial.integer(11, 40),
        "vocab_size": trial.integer(13, 97),
        "n_layer": trial.integer(2, 4),
        "n_head": heads,
        "n_embd": heads * trial.integer(3, 13),
        "bias": trial.choice([True, False]),
    }
    return GPTConfig(**(sizes | fixed))


def draw_family(trial: Trial, **fixed: Any) -> list[GPTConfig]:
    """Models of which neighbours differ in one thing alone, and the first one again at the end."""
    config = draw(trial, n_head=2, n_embd=12 * trial.integer(1, 4), **fixed)
    family = [config]
    for change in (
        {"block_size": config.block_size + trial.integer(1, 9)},
        {"vocab_size": config.vocab_size + trial.integer(1, 9)},
        {"n_layer": 1},
        {"n_head": trial.choice([3, 4, 6])},
        {"n_embd": config.n_embd + 12 * trial.integer(1, 3)},
        {"bias": not config.bias},
    ):
        family.append(replace(family[-1], **change))
    return [*family, draw(trial, **fixed), config]


def draw_wide_family(trial: Trial, dropout: float) -> list[tuple[GPTConfig, int, int]]:
    """Calls with models wide enough that their large tensors decide, each unlike the one before in one thing.

    Of at most three layers and at least four heads of 24, with v from h to 2h, and s from d to 2d.
    """
    d, a = 8 * trial.integer(3, 4), 4
    config = GPTConfig(
        block_size=2 * d,
        vocab_size=a * d + trial.integer(1, 30),
        n_layer=trial.integer(2, 3),
        n_head=a,
        n_embd=a * d,
        dropout=dropout,
        bias=trial.choice([True, False]),
    )
    b, s = trial.integer(2, 4), d + trial.integer(1, d - 1)
    longer = replace(config, block_size=2 * d + trial.integer(1, 9))
    taller = replace(longer, vocab_size=config.vocab_size + trial.integer(1, 30))
    one = replace(taller, n_layer=1)
    wide = replace(one, n_head=5, n_embd=5 * d)
    other = replace(wide, bias=not config.bias)
    models = config, longer, taller, one, wide, other, config
    return [(config, b + 1, s), (config, b, 2 * d), *((each, b, s) for each in models)]


def batch_for(trial: Trial, config: GPTConfig) -> tuple[GPTConfig, int, int]:
    """A model and a batch for it: sequences of block_size tokens, or shorter ones."""
    return (
        config,
        trial.integer(2, 5),
        trial.choice([config.block_size, trial.integer(3, config.block_size - 1)]),
    )


def alter(config: GPTConfig, *rest: Any, **changes: Any) -> tuple:
    """The arguments of a call with one of them changed; sequence_length=0 is the model's block_size."""
    batch = dict(zip(("batch_size", "sequence_length"), rest, strict=False))
    batch |= {name: value or config.block_size for name, value in changes.items() if name in batch}
    sizes = {name: value for name, value in changes.items() if hasattr(config, name)}
    return replace(config, **sizes), *batch.values(), *rest[2:]


def small_dropout_is_none(config: GPTConfig, *rest: Any, small: float) -> tuple:
    """The arguments of a call with no dropout in place of a small one."""
    return alter(config, *rest, dropout=0.0 if config.dropout <= small else config.dropout)


ALTERATIONS = {
    "it is right for a model of one layer: there are n_layer blocks": partial(alter, n_layer=1),
    "it is right for a model without biases: here config.bias is True": partial(alter, bias=False),
    "it is right for a model with biases: here config.bias is False": partial(alter, bias=True),
    "it is right for dropout=0: with dropout, other tensors are kept": partial(alter, dropout=0.0),
    "a small dropout counts as none here: any number above 0 keeps masks": partial(
        small_dropout_is_none, small=0.1
    ),
    "a dropout of 0.001 counts as none here: any number above 0 keeps masks": partial(
        small_dropout_is_none, small=0.001
    ),
    "it is right for dropout > 0: without it, other tensors are kept": partial(alter, dropout=0.5),
    "it is right for a batch of one sequence: multiply by batch_size": partial(alter, batch_size=1),
    "it is right for sequences of block_size: these are shorter": partial(alter, sequence_length=0),
}


def measured(
    trial: Trial,
    answers: Answers,
    key: str,
    *,
    where: Where = lambda *_: True,
    alterations: dict[str, Callable[..., tuple]] = ALTERATIONS,
    **options: Any,
) -> None:
    """Require the answers (their `key`) to be the true ones; say which other key has what is missing."""
    try:
        compare_answers(trial, answers, key, alterations=alterations, where=where, **options)
    except CheckEnded as end:
        end.cause = "; ".join(filter(None, (end.cause, elsewhere(answers, key, where))))
        raise


def elsewhere(answers: Answers, key: str, where: Where) -> str:
    """Another key that has as many too many, or too few, as this one has too few or too many, in each call.

    Or one that is not asked for, which is no fault by itself, and has what is missing.
    """
    rows = [
        (given, true)
        for call, given, true in zip(answers.calls, answers.given, answers.true, strict=True)
        if where(*call) and isinstance(given, dict)
    ]

    def off(other: str) -> list[int | None]:
        found = [(whole(given.get(other)), true.get(other, 0)) for given, true in rows]
        return [None if value is None else value - expected for value, expected in found]

    own = off(key)
    if None in own or not any(own) or key == "total":
        return ""
    for other in rows[0][0]:
        if other not in (key, "total") and off(other) == [-by for by in own]:
            if other not in rows[0][1]:
                return f"there is a key {other!r} that is not asked for, and it has as many"
            return f"{other!r} has as many too {'many' if sum(own) < 0 else 'few'}"
    return ""


def total_help(answers: Answers, parts: Iterable[str]) -> str:
    """What to do about a wrong total: nothing, where it is the sum of parts that are wrong themselves."""
    parts = list(parts)
    sums = [
        [whole(given.get(key)) for key in ("total", *parts)] if isinstance(given, dict) else [None]
        for given in answers.given
    ]
    if all(None not in values and values[0] == sum(values[1:]) for values in sums):
        return "It is the sum of your parts: it follows from the part above."
    return f"The total is {' + '.join(parts)}."
