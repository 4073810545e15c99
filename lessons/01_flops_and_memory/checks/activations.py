"""Checks of `activation_bytes`."""

from grader.checks import Answers, Trial, check, exercise, require_whole_numbers, whole
from nanogpt.model import GPTConfig

from .models import PARTS, Where, alter, batch_for, draw, draw_family, measured, saved_bytes

exercise(
    "activation_bytes",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Take the table of saved tensors in the lesson row by row: write each shape with b, s, h, a, v.",
        "Views of one storage count once: without dropout, q, k and v are views of c_attn's output.",
        "With dropout, masks are fp32, and the core keeps scaled q and k, v and three (b, a, s, s) tensors.",
    ),
)


def measure(trial: Trial) -> Answers:
    """Both families, and one batch with every dropout: a number above 0 is dropout, however small."""
    dropout = trial.choice([0.05, 0.1, 0.5])
    configs = draw_family(trial, dropout=0.0) + draw_family(trial, dropout=dropout)
    calls = [batch_for(trial, config) for config in configs]
    calls += [(draw(trial, dropout=p), trial.integer(2, 5), 1) for p in (0.0, dropout)]
    calls += [alter(*calls[0], dropout=p) for p in (0.05, 0.1, 0.5, 0.0)]
    return Answers(trial, "activation_bytes", calls, saved_bytes)


def activation_slips(c: GPTConfig, b: int, s: int) -> dict[str, float]:
    tokens, layers = b * s, c.n_layer
    stream, scores, logits = 4 * tokens * c.n_embd, 4 * b * c.n_head * s * s, 4 * tokens * c.vocab_size
    masks = (2 * layers + 1) * stream + layers * scores
    right = saved_bytes(c, b, s)["total"]
    stream_a_layer = (
        "a block has two masks of (b, s, h): after the attention and after the MLP"
        if c.dropout
        else "the core's output is missing: c_proj keeps its input, as every linear layer does"
    )
    off = {
        "the positions are missing: s int64 numbers": -8 * s,
        "positions are kept once for the whole batch": 8 * (b - 1) * s,
        "the tokens or the targets are missing: b·s int64 numbers each": -8 * tokens,
        "tokens, targets and positions are missing": -16 * tokens - 8 * s,
        "tokens, targets and positions are int64: 8 bytes each": -8 * tokens - 4 * s,
        "the loss keeps one number more: how many targets it counted": -4,
        "the log-sum-exp is missing: one number for each query of each head": -4 * layers * tokens * c.n_head,
        "each norm keeps a mean and a deviation for every token": -8 * tokens * (2 * layers + 1),
        "each norm keeps two numbers for every token, a mean and a deviation: one is missing": (
            -4 * tokens * (2 * layers + 1)
        ),
        "the last norm is missing": -stream - 8 * tokens,
        "the log-probabilities are missing: the loss keeps (b·s, v) numbers": -logits,
        "the loss keeps log-probabilities, and the logits are not kept beside them": logits,
        "one tensor of (b, s, h) is missing: the input of lm_head, or the embedding's mask": -stream,
        "the core's output is kept once: it is the input of c_proj too": layers * stream,
        "q, k and v are views of one storage, c_attn's output": 3 * layers * stream,
        "the GELU keeps its input, and c_proj keeps the GELU's output": -4 * layers * stream,
        "masks are fp32 on the CPU: 4 bytes a number, not one": -masks // 4 * 3,
        "the masks of (b, s, h) are fp32 on the CPU, as the core's is: 4 bytes a number, not one": (
            -3 * (2 * layers + 1) * stream // 4
        ),
        "the core's mask is fp32 on the CPU, as the others are: 4 bytes a number, not one": (
            -3 * layers * scores // 4
        ),
        "the masks of (b, s, h) are missing: one after the embeddings, two in each block": (
            -(2 * layers + 1) * stream
        ),
        stream_a_layer: -layers * stream,
        "the core's dropout keeps its mask, and its product with the probabilities": -2 * layers * scores,
        "with dropout the core keeps three (b, a, s, s) tensors: one is missing": -layers * scores,
        "weights are kept by the model, not for backward: parameters are left out": 4 * linear_weights(c),
        "weights of the MLPs are kept by the model, not for backward: parameters are left out": 32
        * layers
        * c.n_embd**2,
        "the fused core keeps no s by s matrix: that is what it is for": layers * scores,
    }
    blocks = layers * b * (34 * s * c.n_embd + 5 * c.n_head * s * s)
    textbook = {"this is the textbook formula: blocks alone, 16-bit, another attention": blocks}
    return textbook | {text: right + size for text, size in off.items()}


def linear_weights(c: GPTConfig) -> int:
    """The elements of all matrices that something is multiplied with."""
    return 12 * c.n_layer * c.n_embd**2 + c.vocab_size * c.n_embd


@check("activation_bytes")
def activation_parts_add_up(trial: Trial) -> None:
    """The answer has embedding, attention, mlp, norm, head and total: whole bytes, and the parts add up."""
    answers = trial.once(measure)
    require_whole_numbers(trial, answers, (*PARTS, "total"))
    for call, given in zip(answers.calls, answers.given, strict=True):
        parts, total = {part: whole(given[part]) for part in PARTS}, whole(given["total"])
        message = f"{answers.asked(call)}: the parts add up to {sum(parts.values()):,}, total is {total:,}"
        trial.require(sum(parts.values()) == total, message, help="The total is their sum.")
        for part, least in surely_kept(*call).items():
            message = (
                f"{answers.asked(call, part)} is {parts[part]:,}; this part alone keeps {least:,} or more"
            )
            trial.require(parts[part] >= least, message, help="A storage counts where it is kept first.")


def surely_kept(config: GPTConfig, batch_size: int, sequence_length: int) -> dict[str, int]:
    """Bytes that no reading counts elsewhere: tokens; q, k, v; the GELU's; statistics; log-probabilities."""
    tokens, layers = batch_size * sequence_length, config.n_layer
    width = layers * tokens * config.n_embd
    sizes = (
        8 * tokens,
        12 * width,
        32 * width,
        8 * tokens * (2 * layers + 1),
        4 * tokens * config.vocab_size,
    )
    return dict(zip(PARTS, sizes, strict=True))


@check("activation_bytes")
def equals_saved_bytes_without_dropout(trial: Trial) -> None:
    """dropout=0: the total is, to the byte, what autograd keeps with the fused attention."""
    compare_saved(trial, lambda config, *_: config.dropout == 0)


@check("activation_bytes")
def equals_saved_bytes_with_dropout(trial: Trial) -> None:
    """dropout > 0: the total is, to the byte, what autograd keeps: masks, and the plain core's matrices."""
    compare_saved(trial, lambda config, *_: config.dropout > 0)


def compare_saved(trial: Trial, where: Where) -> None:
    answers = trial.once(measure)
    help = "Print what saved_tensors_hooks sees, and compare part by part."
    for call, given, true in zip(answers.calls, answers.given, answers.true, strict=True):
        if where(*call) and isinstance(given, dict) and whole(given.get("total")) != true["total"]:
            parts = [part for part in PARTS if whole(given.get(part)) != true[part]]
            listed = "; ".join(f"{part} {given.get(part)}, measured {true[part]}" for part in parts)
            help = f"If a storage counts as its first keeper's, these parts differ: {listed}."
            break
    measured(trial, answers, "total", slips=activation_slips, help=help, where=where)
