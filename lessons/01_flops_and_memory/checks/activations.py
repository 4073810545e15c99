"""Checks of `activation_bytes`."""

from itertools import combinations
from typing import Any

from grader.checks import Answers, Trial, check, exercise, named_cause, require_whole_numbers, whole
from nanogpt.model import GPTConfig

from .models import ALTERATIONS, PARTS, Where, alter, draw_wide_family, measured, saved_bytes

NEAR = 0.01
"""How far off a total may be. In the models that are asked about, whatever has neither h nor v nor s² is less
in all, and each tensor of (b, s, h), (b·s, v) or (b, a, s, s) is more."""

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
    calls = [*draw_wide_family(trial, 0.0), *draw_wide_family(trial, trial.choice([0.05, 0.1, 0.5]))]
    calls += [alter(*calls[0], dropout=p) for p in (0.001, 0.1, 0.5, 0.0)]
    return Answers(trial, "activation_bytes", calls, saved_bytes)


def activation_slips(c: GPTConfig, b: int, s: int) -> dict[str, float]:
    """What known slips give: one of them, or two that are about other tensors."""
    right = saved_bytes(c, b, s)["total"]
    slips = [*everywhere(c, b, s), *(with_dropout if c.dropout else without_dropout)(c, b, s)]
    pairs = {
        f"{one}; and {other}": right + by + of_other
        for (of, one, by), (and_of, other, of_other) in combinations(slips, 2)
        if of != and_of and "numbers" not in (of, and_of)
    }
    blocks = c.n_layer * b * (34 * s * c.n_embd + 5 * c.n_head * s * s)
    textbook = {"this is the textbook formula: blocks alone, 16-bit, another attention": blocks}
    return textbook | {text: right + by for _, text, by in slips} | pairs


def large_slips(c: GPTConfig, b: int, s: int) -> dict[str, float]:
    """Those of them that are too large to pass."""
    right = saved_bytes(c, b, s)["total"]
    return {text: n for text, n in activation_slips(c, b, s).items() if abs(n - right) > NEAR * right}


Slip = tuple[str, str, float]
"""What its bytes are a multiple of, the cause, and by how many bytes the total is off then.

Two multiples of one thing, such as "width", a tensor of (b, s, h) in each layer, add up to a third, which may
be another slip's: two of them are no cause.
"""


ONE_MISSING = "one tensor of (b, s, h) is missing: the input of lm_head, or of the last norm"
MASK_MISSING = "one tensor of (b, s, h) is missing, the mask of the dropout behind the embeddings"


def everywhere(c: GPTConfig, b: int, s: int) -> list[Slip]:
    """Slips in what is kept with dropout and without."""
    tokens, layers, logits = b * s, c.n_layer, 4 * b * s * c.vocab_size
    stream, norms, linear = 4 * tokens * c.n_embd, 2 * layers + 1, linear_weights(c)
    one = "a norm's output is the input of the linear layer behind it, one storage, and counts once"
    return [
        ("integers", "the positions are missing: s int64 numbers", -8 * s),
        ("integers", "positions are int64, 8 bytes each, not 4", -4 * s),
        ("integers", "positions are kept once for the whole batch", 8 * (b - 1) * s),
        ("integers", "positions are int64, and kept once for the whole batch", 4 * tokens - 8 * s),
        (
            "integers",
            "tokens and targets are b·s int64 numbers each: one of them is missing, or both have 4 bytes a "
            "number, not 8",
            -8 * tokens,
        ),
        ("integers", "tokens, targets and positions are missing", -16 * tokens - 8 * s),
        ("integers", "tokens, targets and positions are int64: 8 bytes each", -8 * tokens - 4 * s),
        ("count", "the loss keeps one number more: how many targets it counted", -4),
        ("count", "how many targets the loss counted is one number of 4 bytes, not 8", 4),
        ("statistics", "each norm keeps a mean and a deviation for every token", -8 * tokens * norms),
        (
            "statistics",
            "each norm keeps two numbers for every token, a mean and a deviation: one is missing",
            -4 * tokens * norms,
        ),
        ("norms", one, norms * stream),
        ("width", f"{one} (in the blocks)", 2 * layers * stream),
        ("logits", "the log-probabilities are missing: the loss keeps (b·s, v) numbers", -logits),
        ("logits", "log-probabilities are fp32: 4 bytes each, not 2", -logits // 2),
        ("logits", "the loss keeps log-probabilities, and the logits are not kept beside them", logits),
        (
            "logits",
            "the gradients of logits and log-probabilities are temporary: the peak has them, backward makes "
            "them, and nothing keeps them",
            2 * logits,
        ),
        ("once", f"{ONE_MISSING}, or the embedding's mask" if c.dropout else ONE_MISSING, -stream),
        ("last norm", "the last norm is missing", -stream - 8 * tokens),
        ("once", "the embedding's sum is the first norm's input, one storage: it counts once", stream),
        ("width", "the GELU keeps its input, and c_proj keeps the GELU's output", -4 * layers * stream),
        (
            "weights",
            "weights are kept by the model, not for backward: parameters are left out",
            4 * linear,
        ),
        (
            "weights",
            "weights of the MLPs are kept by the model, not for backward: parameters are left out",
            32 * layers * c.n_embd**2,
        ),
        *numbers_of_another_size(c, b, s),
    ]


def numbers_of_another_size(c: GPTConfig, b: int, s: int) -> list[Slip]:
    """Everything but integers in 2 bytes, or counted and not measured in bytes."""
    tokens, layers, scores = b * s, c.n_layer, 4 * b * c.n_head * s * s * c.n_layer
    floats = saved_bytes(c, b, s)["total"] - 16 * tokens - 8 * s - 4
    statistics = 8 * tokens * (2 * layers + 1)
    each_query = 0 if c.dropout else 4 * layers * tokens * c.n_head
    large = floats - statistics - each_query
    logits, streams = 4 * tokens * c.vocab_size, (2 * layers + 1) * 4 * tokens * c.n_embd
    half = "these numbers are fp32, 4 bytes each: here they have 2"
    found = {
        half: -floats // 2,
        f"{half} (all but the norms' statistics)": -(floats - statistics) // 2,
        f"{half} (all but the core's log-sum-exp)": -(floats - each_query) // 2,
        f"{half} (all but statistics and log-sum-exp)": -large // 2,
        f"{half} (all but statistics, log-sum-exp and log-probabilities)": -(large - logits) // 2,
        "a number of fp32 has 4 bytes: these are numbers, not bytes": -3 * floats // 4,
        "4 bytes a number belong to the integers too, and they have 8": -8 * tokens - 4 * s,
    }
    if c.dropout:
        masks = streams + scores
        found[f"{half}, and masks, which are fp32 on the CPU, have 1"] = -floats // 2 - masks // 4
        found[f"{half} (the tensors of (b, s, h) alone)"] = -(large - logits - 3 * scores) // 2
    return [("numbers", text, by) for text, by in found.items()]


def without_dropout(c: GPTConfig, b: int, s: int) -> list[Slip]:
    """Slips in what the fused core keeps."""
    width, each_query = c.n_layer * 4 * b * s * c.n_embd, c.n_layer * 4 * b * s * c.n_head
    scores = c.n_layer * 4 * b * c.n_head * s * s
    fused = "the fused core keeps no s by s matrix: that is what it is for"
    return [
        ("scores", "the log-sum-exp is missing: one number for each query of each head", -each_query),
        (
            "scores",
            "the log-sum-exp is one number for each query of each head, a for a token: here it has as many "
            "as a head has numbers, h/a",
            each_query * (c.n_embd // c.n_head - c.n_head) / c.n_head,
        ),
        ("scores", fused, scores),
        ("scores", f"{fused}. It keeps a log-sum-exp for each query", scores - each_query),
        ("scores", f"{fused}. Here it has two", 2 * scores),
        ("scores", f"{fused}. Here it has two, and no log-sum-exp", 2 * scores - each_query),
        (
            "scores",
            "these are the plain core's three s by s matrices: without dropout the fused core runs, and "
            "keeps none of them, but a log-sum-exp for each query",
            3 * scores - each_query,
        ),
        ("width", "the core's output is missing: c_proj keeps its input, as every linear layer does", -width),
        ("width", "the core's output is kept once: it is the input of c_proj too", width),
        ("width", "q, k and v are views of one storage, c_attn's output", 3 * width),
        (
            "width",
            "q, k and v are views of one storage, c_attn's output: here it counts once for each of them",
            6 * width,
        ),
        ("width", "q, k and v are three tensors of (b, s, h): one alone is counted", -2 * width),
        ("width", "q, k and v are missing: three tensors of (b, s, h)", -3 * width),
    ]


COPIED = "q, k and v are copied out of c_attn's output: it is not kept beside scaled q and k, and v"
WIDE_MASK = "the MLP's dropout comes after c_proj: its mask is a tensor of (b, s, h), and not of (b, s, 4h)"
COPIED_OR_WIDE = f"each layer has three tensors of (b, s, h) too many. Either {COPIED}; or {WIDE_MASK}"


def copied_or_wide(answers: Answers, where: Where) -> str:
    """Of two slips that give one total, the one whose part is not as measured, where the other's is."""
    attention, mlp = (all(a.right for a in answers.select(x, where, 0.0)) for x in ("attention", "mlp"))
    return COPIED_OR_WIDE if attention == mlp else WIDE_MASK if attention else COPIED


def with_dropout(c: GPTConfig, b: int, s: int) -> list[Slip]:
    """Slips in masks, and in what the plain core keeps."""
    tokens, layers = b * s, c.n_layer
    stream, scores = 4 * tokens * c.n_embd, layers * 4 * b * c.n_head * s * s
    width, masks = layers * stream, (2 * layers + 1) * stream
    plain = "with dropout the core is not fused, and keeps three (b, a, s, s) tensors"
    all_masks = "a mask has a number for every element, also for those that dropout makes zero"
    bits = (2 * layers + 1) * (stream // 32) + layers * (scores // layers // 32)
    fused = 4 * layers * tokens * c.n_head - 3 * scores
    return [
        ("numbers", "it is right for dropout=0: with dropout, other tensors are kept", fused - masks),
        ("masks", "masks are fp32 on the CPU: 4 bytes a number, not one", -(masks + scores) // 4 * 3),
        ("masks", "masks are fp32 on the CPU: 4 bytes a number, not one bit", bits - masks - scores),
        (
            "masks",
            "the masks of (b, s, h) are fp32 on the CPU, as the core's is: 4 bytes a number, not one",
            -3 * masks // 4,
        ),
        (
            "masks",
            "the core's mask is fp32 on the CPU, as the others are: 4 bytes a number, not one",
            -3 * scores // 4,
        ),
        ("masks", f"{all_masks}: here it has 1 - dropout of them", -c.dropout * (masks + scores)),
        (
            "masks",
            f"{all_masks}: here those of (b, s, h) have 1 - dropout of them",
            -c.dropout * masks,
        ),
        (
            "masks",
            "the masks of (b, s, h) are missing: one after the embeddings, two in each block",
            -masks,
        ),
        ("width", "a block has two masks of (b, s, h): after the attention and after the MLP", -width),
        (
            "scores",
            "the core's dropout keeps its mask, and its product with the probabilities",
            -2 * scores,
        ),
        ("scores", "with dropout the core keeps three (b, a, s, s) tensors: one is missing", -scores),
        (
            "scores",
            "with dropout the core keeps three (b, a, s, s) tensors: here are four. Softmax keeps its "
            "output, the probabilities, and not the scores",
            scores,
        ),
        (
            "scores",
            "the core's three matrices are of (b, a, s, s), and s is sequence_length: these are of "
            "config.block_size, which a sequence may be shorter than",
            3 * (scores // s**2 * c.block_size**2 - scores),
        ),
        (
            "scores",
            "the core's three matrices are of (b, a, s, s): here they are of s by config.block_size, and a "
            "sequence may be shorter, which has as many keys as queries",
            3 * (scores // s * c.block_size - scores),
        ),
        (
            "scores",
            f"{plain}. Here it has the fused one's log-sum-exp",
            fused,
        ),
        ("width", "scaled queries and scaled keys are missing: the plain core keeps both", -2 * width),
        ("width", "the core's output is kept once: it is the input of c_proj too", width),
        ("width", COPIED_OR_WIDE, 3 * width),
    ]


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
        beside = keys_beside(answers)
        least = surely_kept(*call).items()
        short = [f'{what} in "{part}"' for part, (size, what) in least if parts[part] < size]
        trial.require(
            sum(parts.values()) == total,
            message,
            cause=f"what the parts lack is under {' and '.join(map(repr, beside))}, which nobody asked for"
            if beside
            else "",
            help=f"Each thing belongs to a part that keeps it: count {'; '.join(short) or 'it there'}."
            if beside
            else "The total is their sum.",
        )


@check("activation_bytes")
def activation_parts_have_what_they_keep(trial: Trial) -> None:
    """Each part has at least what no other keeps: q, k and v; two inputs in the MLP; log-probabilities."""
    answers = trial.once(measure)
    require_whole_numbers(trial, answers, (*PARTS, "total"))
    for call, given in zip(answers.calls, answers.given, strict=True):
        true = answers.truth(*call)["total"]
        for part, (least, what) in surely_kept(*call).items():
            if whole(given[part]) < least - NEAR * true:
                trial.wrong(
                    f"{answers.asked(call, part)} is {whole(given[part]):,}; this part alone keeps {what}: "
                    f"{least:,} or more",
                    cause=why_off(answers, call[0].dropout > 0)
                    or (TEXTBOOKS if is_textbooks(answers, part, call[0].dropout > 0) else ""),
                    help=f'Count {what} in "{part}", the part that keeps them: the total is right.'
                    if whole(given["total"]) == true
                    else "",
                )


TEXTBOOKS = "numbers have 2 bytes and masks 1, as in the textbook's 34sbh: here all are fp32, of 4 bytes"


def textbooks(c: GPTConfig, b: int, s: int) -> dict[str, list[int]]:
    """Formulas for 16 bits, of a part or of the blocks as a whole: with the s by s matrices, and without.

    None is a multiple of four bytes a number: that could be a count in fp32, with fewer tensors.
    """
    stream, scores = b * s * c.n_embd, c.n_layer * b * c.n_head * s * s
    width, matrices = c.n_layer * stream, (0, 2 * scores, 5 * scores)
    return {
        "attention": [n * width + some for n in (6, 9, 10, 11) for some in matrices],
        "mlp": [n * width for n in (17, 18, 19)],
        "blocks": [34 * width + some + last for some in matrices for last in (0, 2 * stream)],
    }


def is_textbooks(answers: Answers, part: str, dropout: bool) -> bool:
    """Whether one formula gives this part, or the blocks, in all calls with dropout, or in all without."""
    fits: list[list[bool]] = []
    for call, given in zip(answers.calls, answers.given, strict=True):
        if (call[0].dropout > 0) == dropout:
            blocks = sum(whole(given[of_block]) for of_block in ("attention", "mlp", "norm"))
            formulas = textbooks(*call)
            by_part = [number == whole(given[part]) for number in formulas.get(part, ())]
            of_blocks = [number == blocks and part in formulas for number in formulas["blocks"]]
            fits.append(by_part + of_blocks)
    return any(map(all, zip(*fits, strict=True)))


def keys_beside(answers: Answers) -> list[str]:
    """Keys that nobody asked for, where the parts and they add up to the total in every call; else none."""
    keys = [key for key in answers.given[0] if key not in (*PARTS, "total")]
    sums = [sum(whole(given.get(key)) or 0 for key in (*PARTS, *keys)) for given in answers.given]
    return keys if sums == [whole(given["total"]) for given in answers.given] else []


def why_off(answers: Answers, dropout: bool) -> str:
    """The known slip that gives the totals of all calls with dropout, or of all without."""
    asked = answers.select("total", lambda config, *_: (config.dropout > 0) == dropout, NEAR)
    if all(answer.right for answer in asked):
        return ""
    return named_cause(answers, asked, "total", large_slips, ALTERATIONS, NEAR)


def surely_kept(config: GPTConfig, batch_size: int, sequence_length: int) -> dict[str, tuple[int, str]]:
    """Bytes that no reading counts elsewhere, and what they are."""
    tokens, layers = batch_size * sequence_length, config.n_layer
    width = layers * tokens * config.n_embd
    return {
        "attention": (12 * width, "q, k and v"),
        "mlp": (32 * width, "the inputs of the GELU and of c_proj"),
        "head": (4 * tokens * config.vocab_size, "the log-probabilities"),
    }


@check("activation_bytes")
def near_saved_bytes_without_dropout(trial: Trial) -> None:
    """dropout=0: the total is, within 1 %, what autograd keeps with the fused attention."""
    compare_saved(trial, lambda config, *_: config.dropout == 0, NEAR)


@check("activation_bytes")
def near_saved_bytes_with_dropout(trial: Trial) -> None:
    """dropout > 0: the total is, within 1 %, what autograd keeps: masks, and the plain core's matrices."""
    compare_saved(trial, lambda config, *_: config.dropout > 0, NEAR)


@check("activation_bytes", optional=True)
def equals_saved_bytes(trial: Trial) -> None:
    """The total is, to the byte, what autograd keeps, without dropout and with it."""
    compare_saved(trial, lambda config, *_: config.dropout == 0)
    compare_saved(trial, lambda config, *_: config.dropout > 0)


def compare_saved(trial: Trial, where: Where, tolerance: float = 0.0) -> None:
    answers = trial.once(measure)
    help = "Print what saved_tensors_hooks sees, and compare part by part."
    for call, given, true in zip(answers.calls, answers.given, answers.true, strict=True):
        total = whole(given.get("total")) if isinstance(given, dict) else None
        if where(*call) and total is not None and abs(total - true["total"]) > tolerance * true["total"]:
            parts = [part for part in PARTS if whole(given.get(part)) != true[part]]
            listed = "; ".join(f"{part} {given.get(part)}, measured {true[part]}" for part in parts)
            help = f"If a storage counts as its first keeper's, these parts differ: {listed}."
            break
    slips = large_slips if tolerance else activation_slips
    which = {COPIED_OR_WIDE: copied_or_wide(answers, where)}
    if all(answer.right for answer in answers.select("total", lambda c, *_: c.dropout == 0, tolerance)):
        which[f"{ONE_MISSING}, or the embedding's mask"] = MASK_MISSING  # the inputs are there

    def told(*call: Any) -> dict[str, float]:
        return {which.get(text, text): n for text, n in slips(*call).items()}

    measured(trial, answers, "total", slips=told, help=help, where=where, tolerance=tolerance)
