"""Checks of `count_parameters`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from grader.checks import Answers, Trial, check, exercise, require_whole_numbers, whole
from nanogpt.model import GPTConfig

from .models import PARTS, Where, draw, draw_family, measured, parameters, total_help

exercise(
    "count_parameters",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Print `[(n, tuple(p.shape)) for n, p in GPT(config).named_parameters()]` and group the names.",
        "A linear layer has in·out weights, and out biases if config.bias. Which table has block_size rows?",
        "Two norms a block, and one after the last block; lm_head.weight is the token table itself.",
    ),
)


def count(trial: Trial) -> Answers:
    gpt2 = GPTConfig(vocab_size=50257, bias=False)
    configs = [*draw_family(trial), *(draw(trial, bias=bias) for bias in (False, True)), gpt2]
    configs += [replace(config, bias=not config.bias) for config in configs[-3:]]
    return Answers(trial, "count_parameters", [(config,) for config in configs], parameters)


def mlp_projection(config: GPTConfig) -> int:
    """The parameters of the mlps' c_proj: from 4h to h in every block."""
    return config.n_layer * config.n_embd * (4 * config.n_embd + config.bias)


def attention_projection(config: GPTConfig) -> int:
    """The parameters of attention's c_proj: from h to h in every block."""
    return config.n_layer * config.n_embd * (config.n_embd + config.bias)


def last_norm(config: GPTConfig) -> int:
    """The parameters of ln_f."""
    return config.n_embd * (1 + config.bias)


def biases(config: GPTConfig, per_layer: int) -> int:
    """So many biases of h numbers in every block."""
    return config.n_layer * per_layer * config.n_embd * config.bias


MOVES: dict[str, dict[str, Callable[[GPTConfig], int]]] = {
    "the mlp's c_proj, h by 4h, is counted here: attention's has the same name": {
        "attention": mlp_projection,
        "mlp": lambda c: -mlp_projection(c),
    },
    "attention's c_proj, h by h, is counted in mlp: the mlp's has the same name": {
        "attention": lambda c: -attention_projection(c),
        "mlp": attention_projection,
    },
    "the last norm, ln_f, is counted here": {
        "embedding": last_norm,
        "norm": lambda c: -last_norm(c),
    },
    "the biases of the linear layers are counted in norm: what attention and mlp have too few, norm has too "
    "many": {
        "attention": lambda c: -biases(c, 4),
        "mlp": lambda c: -biases(c, 5),
        "norm": lambda c: biases(c, 9),
    },
}
"""How it reads → the parts that something was moved between, and what each has too many, or with - too few.

It reads as it is told of the one that is compared first.
"""


def moved(answers: Answers, where: Where, part: str) -> dict[str, Callable[[GPTConfig], int]]:
    """What this part has too much or too little in all calls, and another one too little or too much."""

    def off(other: str, size: Callable[[GPTConfig], int]) -> bool:
        asked = answers.select(other, where, 0.0)
        return all(
            size(*each.call) != 0 and whole(each.given) == each.true + size(*each.call) for each in asked
        )

    return {
        told: sizes[part]
        for told, sizes in MOVES.items()
        if part in sizes and all(off(other, size) for other, size in sizes.items())
    }


def moved_slips(part: str, found: dict[str, Callable[[GPTConfig], int]], c: GPTConfig) -> dict[str, float]:
    """What the part has with what does not belong to it, or without what does."""
    return {told: parameters(c)[part] + size(c) for told, size in found.items()}


def parameter_slips(part: str, c: GPTConfig) -> dict[str, float]:
    h, norm = c.n_embd, c.n_embd * (1 + c.bias)
    linear = c.n_layer * h * (h + c.bias)  # one h by h layer in every block
    slips = {
        "embedding": {
            "the position table is missing: block_size rows of h": c.vocab_size * h,
            "the token table is missing: vocab_size rows of h": c.block_size * h,
        },
        "attention": {
            "c_proj is missing: h by h, after the heads are joined": 3 * linear,
            "c_attn makes queries, keys and values: 3h outputs": 2 * linear,
            "c_attn has a bias for each of its 3h outputs: here it has one for each input": (
                parameters(c)["attention"] - 2 * c.n_layer * h * c.bias
            ),
        },
        "mlp": {
            "c_fc has 4h biases, as many as outputs: here it has h": (
                parameters(c)["mlp"] - 3 * c.n_layer * h * c.bias
            ),
        },
        "norm": {
            "the norm after the last block is missing": 2 * c.n_layer * norm,
            "there are two norms in a block": (c.n_layer + 1) * norm,
        },
        "head": {"the head is tied: its matrix is the token table, which embedding counts": c.vocab_size * h},
        "total": {"the total has the tied table twice": parameters(c)["total"] + c.vocab_size * h},
    }
    return slips.get(part, {})


@check("count_parameters")
def counts_are_whole_numbers_by_part(trial: Trial) -> None:
    """The answer has embedding, attention, mlp, norm, head and total, each a whole number."""
    require_whole_numbers(trial, trial.once(count), (*PARTS, "total"))


@check("count_parameters")
def tables_and_weights_are_counted(trial: Trial) -> None:
    """Without biases, embedding, attention, mlp and norm have the parameters of the real model."""
    compare_parts(trial, lambda config: not config.bias, "Count the weights of this part one by one.")


@check("count_parameters")
def biases_count_with_their_layer(trial: Trial) -> None:
    """With biases, each part has its own biases too, as in the real model."""
    help = "Each linear layer and each norm has a bias as long as its output. The tables have none."
    compare_parts(trial, lambda config: config.bias, help)


def compare_parts(trial: Trial, where: Where, help: str) -> None:
    for part in ("embedding", "attention", "mlp", "norm"):
        found = moved(trial.once(count), where, part)
        slips = partial(moved_slips, part, found) if found else partial(parameter_slips, part)
        measured(trial, trial.once(count), part, slips=slips, help=help, where=where)


@check("count_parameters")
def tied_head_counts_once(trial: Trial) -> None:
    """The head has 0 parameters of its own (it is the token table), and the total counts the table once."""
    answers = trial.once(count)
    for key, help in (("head", "The head is tied: 0."), ("total", total_help(answers, PARTS))):
        measured(trial, answers, key, slips=partial(parameter_slips, key), help=help)
