"""Checks of `forward_flops`."""

from functools import partial

from grader.checks import Answers, Trial, check, exercise, require_whole_numbers
from nanogpt.model import GPTConfig

from .models import batch_for, core_flops, draw, draw_family, flops, measured, parameters, total_help

exercise(
    "forward_flops",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "A product of (m, k) with (k, n) takes 2·m·k·n FLOPs. List the products of one block.",
        "Every linear layer sees all b·s tokens. The two products inside attention are s by s for each head.",
        "Does the number of heads matter? A head is d = h/a wide, and there are a of them.",
    ),
)


def count_forward(trial: Trial) -> Answers:
    calls = [batch_for(trial, config) for config in draw_family(trial)]
    calls += [(GPTConfig(vocab_size=50257, bias=False), 1, 1024), (draw(trial), trial.integer(2, 5), 1)]
    return Answers(trial, "forward_flops", calls, flops)


def forward_slips(key: str, c: GPTConfig, b: int, s: int) -> dict[str, float]:
    if key == "head":
        return head_slips(c, b, s)
    right, tokens = flops(c, b, s), b * s
    with_biases = right[key] + bias_additions(key, c, tokens)
    known = {"attention": attention_slips, "mlp": mlp_slips, "total": total_slips}[key](c, b, s)
    return known | {"adding the biases is not counted: products are": with_biases}


def attention_slips(c: GPTConfig, b: int, s: int) -> dict[str, float]:
    right, core = flops(c, b, s)["attention"], core_flops(c, b, s)
    square = 2 * c.n_layer * b * s * c.n_embd**2
    return {
        "c_proj is missing, attention's second linear layer: (b·s, h) times (h, h)": right - square,
        "c_attn has 3h columns, for q, k and v: this is one of them": right - 2 * square,
        "the core is missing: q times k, and probabilities times v, s by s for each head": right - core,
        (
            "half of the s by s core is missing: the causal half, which the mask hides and the products "
            "compute, or one of the two products, q times k and probabilities times v"
        ): right - core // 2,
        "the core's causal half alone, s(s+1)/2 scores a head: the mask hides the others, and the products "
        "compute them": right - core + core * (s + 1) // (2 * s),
        "the core is that of one head: there are n_head of them, each h/a wide": right
        - core
        + core // c.n_head,
        "the core is that of one sequence: there are b of them": right - core + core // b,
        "one side of the s by s core is block_size long: both are as long as the sequence": right
        + core * (c.block_size - s) // s,
        "the core is block_size by block_size: it is as long as the sequence": right
        - core
        + core * c.block_size**2 // s**2,
        "a head is h/a wide: here each has the full width": right + (c.n_head - 1) * core,
        "these are multiplications with their additions: each of the two is a FLOP": right / 2,
    }


def mlp_slips(c: GPTConfig, b: int, s: int) -> dict[str, float]:
    right = flops(c, b, s)["mlp"]
    half = (
        "half of it: one of the two linear layers is missing, (h, 4h) and (4h, h), or a multiplication and "
        "its addition count as one"
    )
    wide = "the MLP is 4h wide inside"
    gelu = "GELU's numbers are counted, 4h a token in each layer: only products are"
    return {
        half: right / 2,
        wide: right / 4,
        f"{wide}, and so both layers are large": right * 5 / 8,
        gelu: right + 4 * c.n_layer * c.n_embd * b * s,
    }


def total_slips(c: GPTConfig, b: int, s: int) -> dict[str, float]:
    right, tokens = flops(c, b, s), b * s
    embedding = 2 * tokens * c.vocab_size * c.n_embd
    return {
        "the embedding look-up copies rows, it multiplies nothing": right["total"] + embedding,
        "the head is missing": right["total"] - right["head"],
        "2·P a token is an estimate: norms multiply nothing, the core has no parameters": (
            2 * tokens * parameters(c)["total"]
        ),
    }


def bias_additions(key: str, c: GPTConfig, tokens: int) -> int:
    """One operation for each number that a bias is added to."""
    widths = {"attention": 3 + 1, "mlp": 4 + 1}
    wide = widths.get(key, sum(widths.values()))
    return c.bias * c.n_layer * tokens * wide * c.n_embd


def head_slips(c: GPTConfig, b: int, s: int) -> dict[str, float]:
    tied = "tied means no parameters of its own; the product with the table is still done: 2·b·s·h·v"
    last = "with targets all s positions go through the head, not the last alone"
    return {tied: 0, last: flops(c, b, s)["head"] // s}


@check("forward_flops")
def flops_are_whole_numbers_by_part(trial: Trial) -> None:
    """The answer has attention, mlp, head and total, each a whole number."""
    require_whole_numbers(trial, trial.once(count_forward), ("attention", "mlp", "head", "total"))


@check("forward_flops")
def parts_are_what_the_counter_counts(trial: Trial) -> None:
    """Attention, MLP and head have the FLOPs that torch's FlopCounterMode counts in their modules."""
    for part in ("attention", "mlp", "head"):
        help = "Count 2·m·k·n for every product of (m, k) with (k, n)."
        measured(trial, trial.once(count_forward), part, slips=partial(forward_slips, part), help=help)


@check("forward_flops")
def total_is_what_the_counter_counts(trial: Trial) -> None:
    """The total is what FlopCounterMode counts in a forward pass with plain attention."""
    answers = trial.once(count_forward)
    help = total_help(answers, ("attention", "mlp", "head"))
    measured(trial, answers, "total", slips=partial(forward_slips, "total"), help=help)
