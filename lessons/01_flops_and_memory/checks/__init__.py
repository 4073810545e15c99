"""What lesson 01 is held to. The judge measures real models; it does not know the formulas."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from grader.checks import (
    Answers,
    Trial,
    check,
    compare_answers,
    exercise,
    require_refusal,
    require_whole_numbers,
    whole,
)
from nanogpt.model import GPT, GPTConfig

Where = Callable[..., bool]
PARTS = ("embedding", "attention", "mlp", "norm", "head")

HINTS = {
    "count_parameters": (
        "Print `[(n, tuple(p.shape)) for n, p in GPT(config).named_parameters()]` and group the names.",
        "A linear layer has in·out weights, and out biases if config.bias. Which table has block_size rows?",
        "Two norms a block, and one after the last block; lm_head.weight is the token table itself.",
    ),
    "forward_flops": (
        "A product of (m, k) with (k, n) takes 2·m·k·n FLOPs. List the products of one block.",
        "Every linear layer sees all b·s tokens. The two products inside attention are s by s for each head.",
        "Does the number of heads matter? A head is d = h/a wide, and there are a of them.",
    ),
    "training_flops": (
        "y = x @ w has two gradients, for x and for w: how large are the two products that make them?",
        "What is recomputed is one more forward of that part, not one more forward and backward.",
    ),
    "model_state_bytes": (
        "Adam keeps two numbers a parameter, the means of gradient and squared gradient, always in fp32.",
        "16-bit weights are too coarse for small updates: mixed recipes keep an fp32 copy in the optimizer.",
    ),
    "activation_bytes": (
        "Take the table of saved tensors in the lesson row by row: write each shape with b, s, h, a, v.",
        "Views of one storage count once: without dropout, q, k and v are views of c_attn's output.",
        "With dropout, masks are fp32, and the core keeps scaled q and k, v and three (b, a, s, s) tensors.",
    ),
    "model_flops_utilization": (
        "FLOPs a second that brought the training on, over FLOPs a second that the machine could do.",
        "training_flops of one sequence, over its tokens, is what one token costs.",
    ),
    "utilization_report": (
        "Hold each number against something you know: the parameter count, 2**30, the datasheet's footnote.",
        "state_dict() lists a tied tensor under each of its names; parameters() lists it once.",
        "Recomputing keeps the machine busy: whose utilization goes up by that, hardware's or model's?",
    ),
}
for name, hints in HINTS.items():
    exercise(name, world_sizes=(1,), hints=hints, distributed=False)


# --- what is true: measured on real models ---


class Recomputed(nn.Module):
    """A module whose forward runs again in backward, all of it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        return checkpoint(self.module, *inputs, use_reentrant=False, preserve_rng_state=False)


@lru_cache
def parameters(config: GPTConfig) -> dict[str, int]:
    """The elements of a real model's parameters, by part."""
    with torch.device("meta"):
        model = GPT(config)
    counts = dict.fromkeys((*PARTS, "total"), 0)
    for name, parameter in model.named_parameters():
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


@lru_cache
def flops(
    config: GPTConfig, batch_size: int, sequence_length: int, recompute: str | None = None
) -> dict[str, int]:
    """What FlopCounterMode counts: a forward by part, or with `recompute` forward and backward in all."""
    with torch.device("cpu" if config.n_embd < 100 else "meta"):  # large models are counted without numbers
        model, tokens = GPT(config), torch.zeros(batch_size, sequence_length, dtype=torch.long)
    blocks = model.transformer.h
    for i, block in enumerate(blocks):
        if recompute == "attention":
            block.attn.core = Recomputed(block.attn.core)
        elif recompute == "full":
            blocks[i] = Recomputed(block)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH), set_checkpoint_early_stop(False):
        loss = model(tokens, tokens)[1]
        if recompute is not None:
            loss.backward()
            return {"total": counter.get_total_flops()}
    by_module = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    counts = {part: 0 for part in ("attention", "mlp", "head")}
    for i in range(config.n_layer):
        counts["attention"] += by_module[f"GPT.transformer.h.{i}.attn"]
        counts["mlp"] += by_module[f"GPT.transformer.h.{i}.mlp"]
    return counts | {"head": by_module["GPT.lm_head"], "total": counter.get_total_flops()}


@lru_cache
def saved_bytes(config: GPTConfig, batch_size: int, sequence_length: int) -> dict[str, int]:
    """Distinct storages that autograd keeps, by the part whose module keeps them first."""
    model = GPT(config).train()
    inside = [""]
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
        module.register_forward_hook(lambda *_: inside.pop() and None)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[str, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept.setdefault(storage.data_ptr(), (inside[-1], storage.nbytes()))
        return tensor

    tokens, targets = torch.randint(config.vocab_size, (2, batch_size, sequence_length)).unbind()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _graph = model(tokens.clone(), targets.clone())
    sizes = dict.fromkeys((*PARTS, "total"), 0)
    for name, size in kept.values():
        sizes[part_of(name)] += size
        sizes["total"] += size
    return sizes


# --- what is asked: models that the judge draws ---


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


ALTERATIONS = {
    "it is right for a model of one layer: there are n_layer blocks": partial(alter, n_layer=1),
    "it is right for a model without biases: here config.bias is True": partial(alter, bias=False),
    "it is right for a model with biases: here config.bias is False": partial(alter, bias=True),
    "it is right for dropout=0: with dropout, other tensors are kept": partial(alter, dropout=0.0),
    "it is right for dropout > 0: without it, other tensors are kept": partial(alter, dropout=0.5),
    "it is right for a batch of one sequence: multiply by batch_size": partial(alter, batch_size=1),
    "it is right for sequences of block_size: these are shorter": partial(alter, sequence_length=0),
}
measured = partial(compare_answers, alterations=ALTERATIONS)


# --- count_parameters ---


def count(trial: Trial) -> Answers:
    gpt2 = GPTConfig(vocab_size=50257, bias=False)
    configs = [*draw_family(trial), *(draw(trial, bias=bias) for bias in (False, True)), gpt2]
    configs += [replace(config, bias=not config.bias) for config in configs[-3:]]
    return Answers(trial, "count_parameters", [(config,) for config in configs], parameters)


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
        slips = partial(parameter_slips, part)
        measured(trial, trial.once(count), part, slips=slips, help=help, where=where)


@check("count_parameters")
def tied_head_counts_once(trial: Trial) -> None:
    """The head has 0 parameters of its own (it is the token table), and the total counts the table once."""
    answers = trial.once(count)
    for key, help in (("head", "The head is tied: 0."), ("total", total_help(answers, PARTS))):
        measured(trial, answers, key, slips=partial(parameter_slips, key), help=help)


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


# --- forward_flops ---


def count_forward(trial: Trial) -> Answers:
    calls = [batch_for(trial, config) for config in draw_family(trial)]
    calls += [(GPTConfig(vocab_size=50257, bias=False), 1, 1024), (draw(trial), trial.integer(2, 5), 1)]
    return Answers(trial, "forward_flops", calls, flops)


def core_flops(config: GPTConfig, batch_size: int, sequence_length: int) -> int:
    """One forward of the attention core in every layer: what recomputing it adds to a training step."""
    with_core = flops(config, batch_size, sequence_length, "attention")
    return with_core["total"] - flops(config, batch_size, sequence_length, "none")["total"]


def forward_slips(key: str, c: GPTConfig, b: int, s: int) -> dict[str, float]:
    if key == "head":
        return head_slips(c, b, s)
    right, core, tokens = flops(c, b, s), core_flops(c, b, s), b * s
    attention, total = right["attention"], right["total"]
    return {
        "the core is missing: q times k, and probabilities times v, s by s for each head": attention - core,
        (
            "half of the s by s core is missing: the causal half, which the mask hides and the products "
            "compute, or one of the two products, q times k and probabilities times v"
        ): attention - core // 2,
        "a head is h/a wide: here each has the full width": attention + (c.n_head - 1) * core,
        "the embedding look-up copies rows, it multiplies nothing": total
        + 2 * tokens * c.vocab_size * c.n_embd,
        "the head is missing": total - right["head"],
        "2·P a token is an estimate: norms multiply nothing, the core has no parameters": (
            2 * tokens * parameters(c)["total"]
        ),
    }


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


# --- training_flops ---

WORDS = ("none", "attention", "full")


def count_training(trial: Trial) -> Answers:
    batches = [batch_for(trial, config) for config in draw_family(trial)]
    calls = [(*batch, word) for batch in batches for word in WORDS]
    return Answers(trial, "training_flops", [*calls, batches[0]], step_flops)


def step_flops(c: GPTConfig, b: int, s: int, recompute: str = "none") -> dict[str, int]:
    return flops(c, b, s, recompute)


def training_slips(c: GPTConfig, b: int, s: int, recompute: str = "none") -> dict[str, float]:
    forward, core = flops(c, b, s), core_flops(c, b, s)
    step = 3 * forward["total"]
    slips = {
        "only the forward is there: for each of its products, backward has two": forward["total"],
        "backward counts like one forward: each product has two gradients to make": 2 * forward["total"],
        "6·P a token is an estimate: norms multiply nothing, the core has no parameters": (
            6 * b * s * parameters(c)["total"]
        ),
        "the head is computed again too: only the blocks run twice": 4 * forward["total"],
        "only the core runs again here: a block has projections and an MLP too": step + core,
        "all of attention runs again here, and nothing else": step + forward["attention"],
        "the core's backward is counted again too: only its forward runs twice": step + 3 * core,
        "half of the core runs again: it is two products, scores and weighted sum": step + core // 2,
        "the core of one layer alone runs again": step + core // c.n_layer,
    }
    return slips if recompute == "none" else {"nothing is computed again here": step} | slips


@check("training_flops")
def backward_is_two_forwards(trial: Trial) -> None:
    """Without recomputation (also when the argument is left out): what a real forward and backward take."""
    compare_word(trial, "none", "Three times the forward: see how forward_flops counts.")


@check("training_flops")
def attention_core_runs_again(trial: Trial) -> None:
    """With recompute="attention": one more forward of the attention core in every layer."""
    compare_word(trial, "attention", "Add the core's forward in each layer: scores and weighted sum.")


@check("training_flops")
def full_runs_the_blocks_again(trial: Trial) -> None:
    """With recompute="full": one more forward of every block, and none of the head."""
    compare_word(trial, "full", "Add one forward of attention and MLP, in each layer.")


def compare_word(trial: Trial, word: str, help: str) -> None:
    def has_word(c: GPTConfig, b: int, s: int, recompute: str = "none") -> bool:
        return recompute == word

    measured(trial, trial.once(count_training), "total", slips=training_slips, help=help, where=has_word)


@check("training_flops")
def unknown_recompute_is_refused(trial: Trial) -> None:
    """Another word for recompute is a ValueError."""
    calls = [(*batch_for(trial, draw(trial)), word) for word in ("selective", "Full", "", "core")]
    require_refusal(trial, Answers(trial, "training_flops", calls, lambda *_: None), WORDS)


# --- model_state_bytes ---

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
    slips = {
        ("optimizer", "fp32"): {"Adam keeps two moments, not one": 4},
        ("weights", "fp32"): {"fp32 is 4 bytes": 2},
        ("optimizer", "mixed"): {"the fp32 master copy is missing: it counts here": 8},
        ("weights", "mixed"): {"the master copy counts with the optimizer: weights are the 16-bit ones": 6},
        ("gradients", "mixed_fp32_gradients"): {
            "20 bytes a parameter keep a 16-bit gradient beside the fp32 one: here there is one": 6,
            "fp32 gradients take 4 bytes": 2,
        },
    }
    slips["optimizer", "mixed_fp32_gradients"] = slips["optimizer", "mixed"]
    slips["weights", "mixed_fp32_gradients"] = slips["weights", "mixed"]
    return {text: size * num_parameters for text, size in slips.get((key, recipe), {}).items()}


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
        compare_answers(trial, trial.once(count_states), key, slips=slips, help=help, where=where)


@check("model_state_bytes")
def unknown_recipe_is_refused(trial: Trial) -> None:
    """Another recipe is a ValueError."""
    calls = [(trial.integer(10, 99), word) for word in ("bf16", "FP32", "", "mixed_fp32")]
    require_refusal(trial, Answers(trial, "model_state_bytes", calls, lambda *_: None), RECIPES)


# --- activation_bytes ---


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
    off = {
        "the positions are missing: s int64 numbers": -8 * s,
        "positions are kept once for the whole batch": 8 * (b - 1) * s,
        "the tokens or the targets are missing: b·s int64 numbers each": -8 * tokens,
        "tokens, targets and positions are missing": -16 * tokens - 8 * s,
        "tokens, targets and positions are int64: 8 bytes each": -8 * tokens - 4 * s,
        "the loss keeps one number more: how many targets it counted": -4,
        "the log-sum-exp is missing: one number for each query of each head": -4 * layers * tokens * c.n_head,
        "each norm keeps a mean and a deviation for every token": -8 * tokens * (2 * layers + 1),
        "the last norm is missing": -stream - 8 * tokens,
        "the log-probabilities are missing: the loss keeps (b·s, v) numbers": -logits,
        "the loss keeps log-probabilities, and the logits are not kept beside them": logits,
        "one tensor of (b, s, h) is missing: the input of lm_head, or the embedding's mask": -stream,
        "the core's output is kept once: it is the input of c_proj too": layers * stream,
        "q, k and v are views of one storage, c_attn's output": 3 * layers * stream,
        "the GELU keeps its input, and c_proj keeps the GELU's output": -4 * layers * stream,
        "masks are fp32 on the CPU: 4 bytes a number, not one": -masks // 4 * 3,
        "the core's dropout keeps its mask, and its product with the probabilities": -2 * layers * scores,
        "with dropout the core keeps three (b, a, s, s) tensors: one is missing": -layers * scores,
        "the fused core keeps no s by s matrix: that is what it is for": layers * scores,
    }
    blocks = layers * b * (34 * s * c.n_embd + 5 * c.n_head * s * s)
    textbook = {"this is the textbook formula: blocks alone, 16-bit, another attention": blocks}
    return textbook | {text: right + size for text, size in off.items()}


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


# --- model_flops_utilization ---


def utilize(trial: Trial) -> Answers:
    calls = []
    for _ in range(4):
        heads, block_size = trial.integer(4, 12), 64 * trial.integer(8, 40)
        config = draw(
            trial, n_head=heads, n_embd=96 * heads, block_size=block_size, n_layer=2, vocab_size=997
        )
        peak = trial.choice([312e12, 149.7e12, 989.5e12, 3.1e11])
        for length in (block_size, block_size // trial.integer(3, 5)):
            calls.append((config, float(trial.integer(10**2, 10**6)), peak, length))
    return Answers(trial, "model_flops_utilization", calls, utilization)


def utilization(config: GPTConfig, tokens_per_second: float, peak: float, sequence_length: int) -> float:
    """The FLOPs that are counted in a forward and backward, a second, over the peak."""
    counted = flops(config, 1, sequence_length, "none")["total"]
    return tokens_per_second / sequence_length * counted / peak


def utilization_slips(c: GPTConfig, rate: float, peak: float, s: int) -> dict[str, float]:
    right, every = utilization(c, rate, peak, s), parameters(c)["total"]
    forward, full = flops(c, 1, s)["total"] / s, flops(c, 1, s, "full")["total"] / s
    matrices = every - c.block_size * c.n_embd
    return {
        "in percent: a fraction of 1 is asked for": 100 * right,
        "upside down: achieved over peak": 1 / right,
        "peak_flops_per_second is an argument: this is a fraction of an A100's 312e12": right * peak / 312e12,
        "only the forward is counted: backward takes twice as much again": rate / peak * forward,
        "what is computed a second time to save memory does not count": rate / peak * full,
        "6·N alone leaves out attention's core: 12·L·h·s a token": rate / peak * 6 * matrices,
        "6·P leaves out the core, and counts positions, which multiply nothing": rate / peak * 6 * every,
        "sequence_length is the length here, not config.block_size": utilization(c, rate, peak, c.block_size),
        "these are the FLOPs of a sequence for every token: divide by sequence_length": s * right,
    }


@check("model_flops_utilization")
def counted_flops_over_peak(trial: Trial) -> None:
    """FLOPs that forward and backward take, over the peak, within 1 % (PaLM's formula passes)."""
    compare_fraction(trial, lambda c, rate, peak, s: s == c.block_size)


@check("model_flops_utilization")
def shorter_sequences_cost_less(trial: Trial) -> None:
    """The same for sequences shorter than block_size: the core's share shrinks with the sequence."""
    compare_fraction(trial, lambda c, rate, peak, s: s < c.block_size)


def compare_fraction(trial: Trial, where: Where) -> None:
    help = "FLOPs of a token's forward and backward, times tokens a second, over the peak."
    answers = trial.once(utilize)
    compare_answers(trial, answers, slips=utilization_slips, help=help, where=where, tolerance=0.01)


# --- utilization_report (find the bug) ---


def report(rank: Any, calls: list[list[Any]]) -> list[Any]:
    """The probe: the learner's report on models without storage."""
    reports = []
    for config, *arguments in calls:
        with torch.device("meta"):
            model = GPT(GPTConfig(**config))
        names = list(model.state_dict())
        reports.append(rank.submission.utilization_report(model, *arguments))
        if list(model.state_dict()) != names:
            reports[-1] = "a report of a model that it has changed"
    return reports


CARDS = (("none", 1), ("full", 1), ("none", 2), ("full", 2))
"""The four reports on each run: what is recomputed, and the datasheet's figure over the dense peak."""


def read_reports(trial: Trial) -> list[tuple]:
    runs, calls = [], []
    for _ in range(3):
        heads, block_size = trial.integer(4, 8), 64 * trial.integer(8, 30)
        vocab_size = 64 * trial.integer(99, 400)
        sizes = {"block_size": block_size, "n_layer": 2, "n_head": heads, "n_embd": 96 * heads}
        config = draw(trial, vocab_size=vocab_size, **sizes)
        length, peak = trial.integer(block_size // 2, block_size), trial.choice([1e14, 149.7e12])
        runs.append((config, float(trial.integer(10**2, 10**5)), length, peak))
        for word, factor in CARDS:
            datasheet = {"flops_per_second": factor * peak, "with_sparsity": factor == 2}
            calls.append([asdict(config), *runs[-1][1:3], datasheet, word])
    given = trial.run(report, calls)[0]
    return [(run, card, given[4 * i + j]) for i, run in enumerate(runs) for j, card in enumerate(CARDS)]


def compare_report(
    trial: Trial,
    key: str,
    truth: Callable[..., float],
    help: str | Callable[[str, int], str],
    cards: Iterable[tuple[str, int]] = CARDS,
) -> None:
    """What the reports say under `key` is true, for some of the four cards; `help` can depend on the card."""
    tolerance = 0.01 if key.endswith("utilization") else 1e-6
    for run, (word, factor), given in trial.once(read_reports):
        if (word, factor) not in cards:
            continue
        value = given.get(key) if isinstance(given, dict) else given
        right = truth(*run, word)
        message = (
            f"{key} is {value!r}, and should be {right:.6g}: {run[0]!r}, {run[1]} tokens/s, length {run[2]}, "
            f"recompute={word!r}, a card of {factor * run[3]:.4g} FLOP/s{' with sparsity' * (factor == 2)}"
        )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        told = help(word, factor) if callable(help) else help
        trial.require(is_number and math.isclose(value, right, rel_tol=tolerance), message, help=told)


@check("utilization_report")
def parameters_are_counted_once(trial: Trial) -> None:
    """parameters counts the tied table once."""
    help = "The token table is lm_head's weight too, and state_dict() lists it under both names."
    compare_report(trial, "parameters", lambda c, *_: parameters(c)["total"], help)


@check("utilization_report")
def memory_is_in_gib(trial: Trial) -> None:
    """model_state_gib is 16 bytes a parameter, in units of 2**30 bytes."""
    help = "1 GB is 10**9 bytes, 1 GiB is 2**30, which is 7 % more. (And each parameter counts once.)"
    compare_report(trial, "model_state_gib", lambda c, *_: 16 * parameters(c)["total"] / 2**30, help)


@check("utilization_report")
def recomputation_is_hardware_work_alone(trial: Trial) -> None:
    """With recompute="full" the hardware's utilization rises by the blocks' forward, the model's does not."""
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
