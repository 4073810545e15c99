"""Checks of `utilization_report`, the program to repair."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from grader.checks import Trial, check, exercise, show
from lessons_shared.sizes import sized_gpt
from nanogpt.model import GPTConfig

from .models import core_flops, draw, flops, parameters, utilization

exercise(
    "utilization_report",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Make experiments. Count GPT-2 with count_parameters. Divide 16 bytes a parameter by 2**30. Ask for "
        "the report with recompute none and full, and with and without the star. What should change?",
        "state_dict() lists a tied tensor under each of its names; parameters() lists it once. And a GiB has "
        "7 % more bytes than a GB.",
        "With sparsity, half of the datasheet's products are with zeros that nobody computes. And what is "
        "recomputed keeps the machine busy: whose utilization goes up, the hardware's or the model's?",
    ),
)


def report(rank: Any, calls: list[list[Any]], tied: bool = True) -> list[tuple[Any, str]]:
    """The probe: the learner's reports on models without storage, and what of its arguments each changed."""
    reports = []
    for i, (config, *arguments) in enumerate(calls):
        model = sized_gpt(GPTConfig(**config)).train(i % 2 == 0)
        model.transformer.h[0].train(i % 2 == 1)
        if not tied:
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
            model.transformer.wpe.requires_grad_(False)
            model.bfloat16()
        names, modes, told = list(model.state_dict()), modes_of(model), repr(arguments)
        given = rank.submission.utilization_report(model, *arguments)
        changed = "the model" if list(model.state_dict()) != names else ""
        if modes_of(model) != modes:
            changed = "the mode of the model, training or evaluation, or which of its parameters are frozen"
        reports.append((given, changed or "the datasheet" * (repr(arguments) != told)))
    return reports


def modes_of(model: nn.Module) -> list[bool]:
    """Whether each module is in training mode, and each parameter asks for a gradient."""
    return [*(m.training for m in model.modules()), *(p.requires_grad for p in model.parameters())]


CARDS = (("none", 1), ("full", 1), ("none", 2), ("full", 2))
"""The four reports on each run: what is recomputed, and the datasheet's figure over the dense peak."""


def read_reports(trial: Trial) -> list[tuple]:
    runs, calls = [], []
    for _ in range(3):
        heads, block_size = trial.integer(4, 8), 64 * trial.integer(16, 30)
        vocab_size = 64 * trial.integer(99, 400)
        sizes = {"block_size": block_size, "n_layer": 2, "n_head": heads, "n_embd": 96 * heads}
        config = draw(trial, vocab_size=vocab_size, **sizes)
        length = trial.integer(block_size // 2, 2 * block_size // 3)  # so much shorter that it shows
        peak = trial.choice([1e14, 149.7e12])
        runs.append((config, float(trial.integer(10**2, 10**5)), length, peak))
        for word, factor in CARDS:
            datasheet = {"flops_per_second": factor * peak, "with_sparsity": factor == 2}
            calls.append([asdict(config), *runs[-1][1:3], datasheet, word])
    given = trial.run(report, calls)[0]
    return [(run, card, *given[4 * i + j]) for i, run in enumerate(runs) for j, card in enumerate(CARDS)]


def compare_report(
    trial: Trial,
    key: str,
    truth: Callable[..., float],
    help: str | Callable[[str, int], str],
    cards: Iterable[tuple[str, int]] = CARDS,
) -> None:
    """What the reports say under `key` is true, for some of the four cards; `help` can depend on the card."""
    tolerance = 0.01 if key.endswith("utilization") else 1e-6
    asked = [each[:3] for each in trial.once(read_reports) if each[1] in cards]
    for run, (word, factor), given in asked:
        value = given.get(key) if isinstance(given, dict) else given
        right = truth(*run, word)
        message = (
            f"{key} is {show(value)}, and should be {show(right)}: {run[0]!r}, {run[1]} tokens/s, "
            f"length {run[2]}, recompute={word!r}, a card of {factor * run[3]:.4g} FLOP/s"
            f"{' with sparsity' * (factor == 2)}"
        )
        cause = "" if agrees(value, right, tolerance) else why_wrong(key, asked, tolerance)
        told = help
        if callable(help):  # it speaks of the card, and the cause may be another thing
            told = "" if cause else help(word, factor)
        trial.require(agrees(value, right, tolerance), message, help=told, cause=cause)


def agrees(value: Any, right: float, tolerance: float) -> bool:
    """Whether a report's value is this number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isclose(value, right, rel_tol=tolerance)


def why_wrong(key: str, asked: list[tuple], tolerance: float) -> str:
    """The known way to be wrong that gives every one of these reports, of several the nearest, or nothing."""
    if not all(isinstance(given, dict) for _, _, given in asked):
        return ""
    known = [slips(key, *run, *card) for run, card, _ in asked]
    values = [given.get(key) for _, _, given in asked]
    fitting = {
        text: max(abs(value - told[text]) / told[text] for value, told in zip(values, known, strict=True))
        for text in known[0]
        if all(agrees(value, told[text], tolerance) for value, told in zip(values, known, strict=True))
    }
    return min(fitting, key=fitting.__getitem__, default="")


NO_ADDRESSES = "this model lies on the meta device, where every data_ptr() is 0 and tells none from another"


def slips(
    key: str, c: GPTConfig, rate: float, length: int, peak: float, word: str, factor: int
) -> dict[str, float]:
    """What known slips report."""
    count, table = parameters(c)["total"], c.vocab_size * c.n_embd
    if key == "parameters":
        return {
            "the tied table is counted twice": count + table,
            f"one tensor alone is counted, of the last norm: {NO_ADDRESSES}": c.n_embd,
            f"one tensor alone is counted, the token table: {NO_ADDRESSES}": table,
        }
    if key == "model_state_gib":
        return {
            "that is in GB of 10**9 bytes: a GiB has 2**30, 7 % more": 16 * count / 1e9,
            "the tied table is counted twice": 16 * (count + table) / 2**30,
            "that is in GB of 10**9 bytes, and the tied table is counted twice": 16 * (count + table) / 1e9,
        }
    work = model_slips(c, rate, length, peak, word)
    if key == "hardware_flops_utilization":
        work = hardware_slips(c, rate, length, peak, word)
    figures = {
        "": 1.0,
        "the figure with sparsity is taken for the peak": 1 / factor,
        "a dense card's figure is halved too": 2.0 / factor,
        "the figure with sparsity is doubled, and half of it is the dense peak": 0.25 if factor == 2 else 1.0,
        "the peak is doubled": 0.5,
        "every card's figure is doubled, where only one with sparsity is halved": 0.5 / factor,
    }
    return {
        " and ".join(filter(None, (text, figure))): value * times
        for text, value in work.items()
        for figure, times in figures.items()
        if text or figure
    }


POSITIONS_MULTIPLY = (
    "the position table is counted among the matrices: its rows are looked up, and multiply nothing"
)
LONGEST = "sequence_length is the length here, not config.block_size"
CORE_MISSING = "attention's core is missing: it has no parameters, and its products count"


def model_slips(c: GPTConfig, rate: float, length: int, peak: float, word: str) -> dict[str, float]:
    """What the model's utilization becomes, the right one first."""
    right = of_the_model(c, rate, length, peak, word)
    positions = 6 * c.block_size * c.n_embd * rate / peak
    return {
        "": right,
        "what runs a second time counts for the model too": of_the_hardware(c, rate, length, peak, word),
        CORE_MISSING: right - 3 * core_flops(c, 1, length) * rate / length / peak,
        POSITIONS_MULTIPLY: right + positions,
        LONGEST: of_the_model(c, rate, c.block_size, peak, word),
    }


def hardware_slips(c: GPTConfig, rate: float, length: int, peak: float, word: str) -> dict[str, float]:
    """What the hardware's utilization becomes, the right one first."""
    right, model = of_the_hardware(c, rate, length, peak, word), of_the_model(c, rate, length, peak, word)
    core = core_flops(c, 1, length) * rate / length / peak
    again = core if word == "full" else 0.0
    positions = 6 * c.block_size * c.n_embd * rate / peak
    return {
        "": right,
        "what runs a second time is not counted": model,
        'the blocks count twice with recompute="none", too': of_the_hardware(c, rate, length, peak, "full"),
        "all of the forward is counted again, the head's too": model * (4 / 3 if word == "full" else 1),
        "the blocks' linear layers are counted again; attention's core, which runs again too, is not": right
        - again,
        "attention's core alone is counted again: the blocks' linear layers run again too": model + again,
        CORE_MISSING: right - 3 * core - again,
        POSITIONS_MULTIPLY: right + positions,
        LONGEST: of_the_hardware(c, rate, c.block_size, peak, word),
    }


@check("utilization_report")
def arguments_are_left_alone(trial: Trial) -> None:
    """Model and datasheet are the same after the report."""
    changed = next((each[3] for each in trial.once(read_reports) if each[3]), "")
    help = "Both are the caller's, who may ask for another report: work on numbers of your own."
    trial.require(not changed, f"utilization_report has changed {changed}", help=help)


@check("utilization_report")
def parameters_are_counted_once(trial: Trial) -> None:
    """parameters counts the tied table once."""
    few = any(
        isinstance(given, dict) and given.get("parameters", math.inf) < parameters(run[0])["total"]
        for run, _, given, _ in trial.once(read_reports)
    )
    help = "The token table is lm_head's weight too, and state_dict() lists it under both names."
    if few:
        help = "Every Parameter counts, once: model.parameters() tells tensors apart by identity (`is`)."
    compare_report(trial, "parameters", lambda c, *_: parameters(c)["total"], help)


def read_apart(trial: Trial) -> tuple[GPTConfig, Any]:
    """A report on a model in bfloat16 with a table of its own for the head, and a frozen one."""
    config = draw(trial)
    card = {"flops_per_second": 1e14, "with_sparsity": False}
    ((given, _),) = trial.run(report, [[asdict(config), 100.0, config.block_size, card, "none"]], False)[0]
    return config, given


@check("utilization_report")
def a_table_of_its_own_counts(trial: Trial) -> None:
    """Where the head has a table of its own, as in section 5, it counts too, and so do frozen parameters."""
    config, given = trial.once(read_apart)
    value = given.get("parameters") if isinstance(given, dict) else given
    tied = parameters(config)["total"]
    right = tied + config.vocab_size * config.n_embd
    frozen = "frozen parameters are missing (requires_grad is False): they are the model's too"
    slips = {
        "one table is taken off, or never counted, whether the tie is there or not": tied,
        frozen: right - config.block_size * config.n_embd,
    }
    cause = next((text for text, wrong in slips.items() if agrees(value, wrong, 1e-6)), "")
    trial.require(
        agrees(value, right, 1e-6),
        f"parameters is {show(value)}, and should be {show(right)}: {config!r}, whose lm_head.weight was "
        "replaced by a Parameter of its own, and whose wpe.weight is frozen",
        help="Ask the model for all of them"
        + ("." if cause == frozen else ": its config does not know whether two names are one tensor."),
        cause=cause,
    )


@check("utilization_report")
def memory_is_in_gib(trial: Trial) -> None:
    """model_state_gib is 16 bytes a parameter, in units of 2**30 bytes."""
    help = "16 bytes for each parameter, each counted once, over 2**30: weights, gradients and optimizer."
    compare_report(
        trial, "model_state_gib", lambda c, *_: 16 * parameters(c)["total"] / 2**30, lambda *_: help
    )
    config, given = trial.once(read_apart)
    value = given.get("model_state_gib") if isinstance(given, dict) else given
    right = 16 * (parameters(config)["total"] + config.vocab_size * config.n_embd) / 2**30
    trial.require(
        agrees(value, right, 1e-6),
        f"model_state_gib is {show(value)}, and should be {show(right)}: {config!r}, in bfloat16, and "
        "lm_head.weight is a Parameter of its own",
        cause="a parameter counts by the bytes that its number has here"
        if agrees(value, right / 2, 1e-6)
        else "",
        help="16 bytes are a parameter's weight, gradient, fp32 copy and two moments, whatever its dtype is.",
    )


@check("utilization_report")
def recomputation_is_hardware_work_alone(trial: Trial) -> None:
    """Utilization is of the FLOPs that training takes; what is recomputed counts for the hardware's alone."""
    compare_report(trial, "model_flops_utilization", of_the_model, model_help, CARDS[:2])
    compare_report(trial, "hardware_flops_utilization", of_the_hardware, hardware_help, CARDS[:2])


@check("utilization_report")
def peak_is_dense(trial: Trial) -> None:
    """A figure with sparsity is twice what dense matrices can reach: utilization is of the dense peak."""
    compare_report(trial, "model_flops_utilization", of_the_model, model_help, CARDS[2:3])
    compare_report(trial, "hardware_flops_utilization", of_the_hardware, hardware_help, CARDS[2:])


PLAIN = "Nothing is recomputed and the printed peak is dense here: compare a token's FLOPs, and the peak."
SPARSE = (
    "with_sparsity: half of the printed products are with zeros that are left out. Halve the peak. "
    "(If a dense card's report is wrong above, mend that first.)"
)


def model_help(recompute: str, factor: int) -> str:
    if recompute == "full":
        return "What runs a second time brings the training no further: it counts for the hardware alone."
    return SPARSE if factor == 2 else PLAIN


def hardware_help(recompute: str, factor: int) -> str:
    if recompute == "full":  # the report without recomputation comes first, and is right then
        return "The hardware ran the blocks' forward once more, and not the head's."
    return SPARSE if factor == 2 else PLAIN


def of_the_model(c: GPTConfig, rate: float, length: int, peak: float, _: str) -> float:
    return utilization(c, rate, peak, length)


def of_the_hardware(c: GPTConfig, rate: float, length: int, peak: float, recompute: str) -> float:
    return rate / length * flops(c, 1, length, recompute)["total"] / peak
