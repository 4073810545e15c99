"""The whole model."""

from functools import cache, partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import (
    BACKWARD,
    CheckEnded,
    Fault,
    Trial,
    check,
    each_rank,
    exercise,
    is_close,
    parts,
    told,
)
from lessons_shared.alone import tell_cases
from lessons_shared.cut_gpt import (
    cut_dim,
    dense_model,
    drawn_weights,
    fused_of,
    head_orders,
    heads_of,
    is_special,
    small_config,
)
from lessons_shared.cut_gpt_checks import (
    attentions,
    given_one_is_changed,
    gradients_are_those_of_training,
    later_loss_is_right,
    logits_are_right,
    matrices_are_cut,
    sampling_is_right,
    table_gradients_are_right,
    table_is_cut,
    training_is_right,
)
from lessons_shared.cut_gpt_runs import built, model_case, passes
from lessons_shared.cut_gpt_slips import losses_of_slips
from lessons_shared.passes import BOTH, CLEARED, require_after_clearing
from lessons_shared.refusals import refusal_of, refused, undividable
from lessons_shared.wire import computes_a_share, sends_at_most, where, wire_bytes
from nanogpt.model import GPT, GPTConfig

from .embedding import NO_ROWS, STEPS, kinds_of
from .shared import PADDING, SIZES

exercise(
    "tensor_parallelize",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Every piece exists: each block's attention and MLP, the token table, the loss. GPT.loss may be "
        "replaced on the model: model.loss = a function of (logits, targets).",
        "wte and lm_head share one Parameter in the dense model. Which layer gives this rank's logits from "
        "this rank's rows, and completes the gradient of its input?",
        "A vocabulary that does not divide: rows of zeros give logits of 0, which are words to a softmax. "
        "For sampling, forward without targets must return whole logits: a forward hook can gather them.",
    ),
)


MODEL_STEPS = {
    **STEPS,
    NO_ROWS: "A rank without rows has no word: it has nothing to look up, and adds nothing to the loss's "
    "sums. Which size is 0 there, or below?",
}


def model_probe(rank, cases: list) -> list[dict]:
    return [passes(rank, "tensor_parallelize", *case, twice=True) for case in cases]


def observe_model(trial: Trial) -> list[SimpleNamespace]:
    seen = [model_case(trial, "v divides", small_config(trial, bias=True), trial.integer(5, 9))]
    if trial.in_full or trial.num_ranks == 3:
        uneven = small_config(trial, bias=False, vocab_size=undividable(trial, 30), n_layer=1)
        seen.append(model_case(trial, "v does not divide", uneven, trial.integer(5, 9)))
    if trial.num_ranks == 4:
        few = small_config(trial, bias=False, vocab_size=5, n_layer=1)
        seen.append(
            model_case(trial, "5 words on 4 ranks, so that the last two pad", few, trial.integer(5, 9))
        )
    cases = [(case.config, case.weights, case.idx, case.targets) for case in seen]
    try:
        results = trial.run(model_probe, cases)
    except CheckEnded as end:
        kinds = [kinds_of(case.name, case.config["vocab_size"], trial.num_ranks) for case in seen]
        tell_cases(end, lambda i: trial.run(model_probe, [cases[i]]), kinds, MODEL_STEPS)
        raise
    for number, case in enumerate(seen):
        case.results = [result[number] for result in results]
    return seen


def padding_left_out_at_the_end(seen: SimpleNamespace, n: int) -> dict[str, Tensor]:
    """Cause → the loss where several ranks have rows that pad, and the last one's alone are left out."""
    rows = -(-seen.config["vocab_size"] // n)
    pads = n * rows - seen.config["vocab_size"]
    if pads <= rows:
        return {}
    padding = torch.zeros(*seen.logits.shape[:-1], pads - rows, dtype=torch.float64)
    padded = torch.cat([seen.logits, padding], -1).flatten(0, 1)
    counted = F.cross_entropy(padded, seen.targets.flatten(), ignore_index=-1)
    return {"of the rows that pad the vocabulary the last rank's alone were left out": counted}


@check("tensor_parallelize")
def model_loss_is_the_dense_one(trial: Trial) -> None:
    """The loss is the dense model's on every rank."""
    for seen in trial.once(observe_model):
        v, n = seen.config["vocab_size"], trial.num_ranks
        padding = torch.zeros(*seen.logits.shape[:-1], -v % n, dtype=torch.float64)
        padded = torch.cat([seen.logits, padding], -1)
        counted = F.cross_entropy(padded.flatten(0, 1), seen.targets.flatten(), ignore_index=-1)
        trial.close(
            f"the loss ({seen.name})",
            each_rank(seen, "loss"),
            seen.loss,
            alternatives=lambda seen=seen, counted=counted, n=n: {
                "the rows that pad the vocabulary were counted as words": counted,
                **padding_left_out_at_the_end(seen, n),
                **losses_of_slips(dense_model(seen.config, seen.weights), seen.idx, seen.targets, n),
            },
        )
        later_loss_is_right(trial, seen)


@check("tensor_parallelize")
def logits_are_cut_in_training_and_whole_for_sampling(trial: Trial) -> None:
    """With targets the logits are this rank's part, without them those of the last position, whole."""
    for seen in trial.once(observe_model):
        logits_are_right(
            trial, seen, "Without targets gather the ranks' parts, and cut off what pads the vocabulary."
        )


@check("tensor_parallelize")
def every_matrix_is_cut(trial: Trial) -> None:
    """Every matrix of attention and MLP and the token table are shards; the table stays tied."""
    for seen in trial.once(observe_model):
        given_one_is_changed(trial, seen)
        table_is_cut(trial, seen)
        matrices_are_cut(trial, seen, attentions(seen.config))


def is_replicated(parameter: str) -> bool:
    """Whether every rank has all of it: norms, positions, and the biases after a sum."""
    return not is_special(parameter) and cut_dim(parameter) is None


def partial_from_the_head(seen: SimpleNamespace, n: int) -> dict[str, list[Tensor]]:
    """The gradients of what is replicated, by rank, where nobody sums what leaves the head backwards.

    Of a branch's hidden features each rank has its n-th, and its copy_to_group sums what they send back.
    """
    dense = dense_model(seen.config, seen.weights)
    given, normed = {}, []
    for module in dense.modules():
        module.register_forward_pre_hook(lambda module, inputs: given.update({module: inputs[0]}))
    dense.transformer.ln_f.register_forward_hook(lambda _, inputs, output: normed.append(output))
    logits, loss = dense(seen.idx, seen.targets)
    (upstream,) = torch.autograd.grad(loss, logits, retain_graph=True)
    table = dense.lm_head.weight.detach()
    found: dict[Tensor, list[Tensor]] = {}

    def back(norm: nn.LayerNorm, output: Tensor, gradients: list[Tensor]) -> list[Tensor]:
        """From the gradients of an output, by rank, to those of the norm's input, and of its parameters."""
        wanted = [given[norm], *norm.parameters()]
        rows = [torch.autograd.grad(output, wanted, g, retain_graph=True) for g in gradients]
        below, *others = (list(column) for column in zip(*rows, strict=True))
        found.update(zip(norm.parameters(), others, strict=True))
        return below

    shares = torch.arange(len(table)).split(-(-len(table) // n))
    stream = back(dense.transformer.ln_f, normed[0], [upstream[..., r] @ table[r] for r in shares])
    for block in reversed(dense.transformer.h):
        for norm, last in ((block.ln_2, block.mlp.c_proj), (block.ln_1, block.attn.c_proj)):
            if last.bias is not None:
                found[last.bias] = [g.sum((0, 1)) for g in stream]
            own = [parts(g @ last.weight, -1, n)[r] for r, g in enumerate(stream)]
            branch = back(norm, given[last], [torch.cat(own, -1)] * n)
            stream = [g + more for g, more in zip(stream, branch, strict=True)]
    length = seen.idx.size(1)
    found[dense.transformer.wpe.weight] = [
        F.pad(g.sum(0), (0, 0, 0, len(dense.transformer.wpe.weight) - length)) for g in stream
    ]
    return {name: found[weight] for name, weight in dense.named_parameters() if weight in found}


def head_slips(seen: SimpleNamespace, n: int) -> dict[str, dict[str, list[Tensor] | Fault]]:
    """Parameter → cause → what would be found. Only a slip that explains every replicated one is a cause."""
    if n == 1 or -(-seen.config["vocab_size"] // n) * (n - 1) >= seen.config["vocab_size"]:
        return {}  # a rank without rows
    whole = {name: [g] * n for name, g in seen.gradients.items() if is_replicated(name)}
    unsummed = partial_from_the_head(seen, n)
    last = {name: unsummed[name] for name in whole if name.startswith("transformer.ln_f.")}
    slips = {
        "partial: this rank's rows of the head alone, for what leaves the head backwards is summed by "
        "nobody": (unsummed, "copy_to_group before the head: its backward sums the ranks' parts."),
        "partial in ln_f alone: what leaves the cut table backwards is summed, but after ln_f": (
            whole | last,
            "Put copy_to_group between ln_f and the table: directly before what is cut.",
        ),
    }
    return {
        name: {
            cause: Fault(gradients[name], step)
            for cause, (gradients, step) in slips.items()
            if explains_all(gradients, each_rank(seen, "gradients"))
        }
        for name in whole
    }


def explains_all(gradients: dict[str, list[Tensor]], found: list[dict[str, Tensor]]) -> bool:
    """Whether these, by rank, are what the ranks have."""
    return all(
        isinstance(mine := found[r].get(name), Tensor) and is_close(mine, g)
        for name, of_ranks in gradients.items()
        for r, g in enumerate(of_ranks)
    )


@check("tensor_parallelize")
def replicated_gradients_are_complete(trial: Trial) -> None:
    """Norms, positions and the biases after a sum have the dense model's gradient, the same on every rank."""
    for seen in trial.once(observe_model):
        slips = cache(partial(head_slips, seen, trial.num_ranks))
        # From the loss down: what is wrong first is nearest to the cause.
        for parameter, whole in reversed(seen.gradients.items()):
            if not is_replicated(parameter):
                continue
            trial.close(
                f"the gradient of {parameter} ({seen.name})",
                [g.get(parameter) for g in each_rank(seen, "gradients")],
                whole,
                alternatives=lambda slips=slips, name=parameter: slips().get(name, {}),
                help="A gradient that differs by rank is partial: somewhere above, a replicated tensor "
                "enters sharded computation without copy_to_group. Attention, MLP, or the head?",
            )


@check("tensor_parallelize")
def shard_gradients_are_the_dense_models(trial: Trial) -> None:
    """Every shard has its part of the dense model's gradient; passes add up until zero_grad."""
    n = trial.num_ranks
    for seen in trial.once(observe_model):
        for parameter, whole in seen.gradients.items():
            if is_special(parameter):
                continue
            dim = cut_dim(parameter)
            expected = [whole] * n if dim is None else parts(whole, dim, n)
            trial.close(
                f"the gradient of {parameter} after two passes ({seen.name})",
                [g.get(parameter) for g in each_rank(seen, "twice")],
                [BOTH * g for g in expected],
                alternatives={"that of one pass": expected},
            )
            require_after_clearing(
                trial,
                f"the gradient of {parameter}",
                seen.name,
                {which: [g.get(parameter) for g in each_rank(seen, which)] for which in CLEARED},
                expected,
                n,
            )
        table_gradients_are_right(trial, seen, "gradients", 1)
        for prefix in attentions(seen.config):
            orders = head_orders(seen.weights, each_rank(seen, "weights"), prefix)
            gradient = fused_of(seen.gradients, prefix)
            if None not in orders:
                trial.close(
                    f"the gradient of {prefix}c_attn ({seen.name})",
                    [fused_of(g, prefix) for g in each_rank(seen, "gradients")],
                    [heads_of(gradient, rank, n)[order] for rank, order in enumerate(orders)],
                )


@check("tensor_parallelize")
def gradients_are_the_same_in_evaluation(trial: Trial) -> None:
    """A backward in evaluation mode gives the gradients that one in training gives."""
    for seen in trial.once(observe_model):
        trained, evaluated = (each_rank(seen, key) for key in ("gradients", "gradients in evaluation"))
        gradients_are_those_of_training(trial, trained, evaluated, f" ({seen.name})")


@check("tensor_parallelize")
def model_communicates_twice_a_block_each_way(trial: Trial) -> None:
    """Two all-reduces of b·s·h a block each way, one for the vocabulary, a few numbers for the loss."""
    n = trial.num_ranks
    for seen in trial.once(observe_model):
        tokens, layers = seen.idx.numel(), seen.config["n_layer"]
        one = 2 * (n - 1) / n * tokens * seen.config["n_embd"] * 4
        for rank, recording in enumerate(each_rank(seen, "recording")):
            for stretch, few in (("", 6 * 8 * tokens), (BACKWARD, 2 * 8 * tokens)):
                events = recording.select(None, stretch)
                sent, allowed = wire_bytes(events, n), (2 * layers + 1) * one + few
                trial.require(
                    sent <= allowed + PADDING * n * max(1, len(events)),
                    f"{where(stretch)} sent about {sent:,.0f} bytes from here; {2 * layers + 1} all-reduces "
                    f"of b·s·h and a few numbers a token are {allowed:,.0f} ({seen.name}); the largest: "
                    f"{told(sorted(events, key=lambda event: -event.num_bytes))}",
                    help="Two all-reduces a block each way, and the vocabulary's; no shards, no logits.",
                    rank=rank,
                )


def last_probe(rank, config: dict, weights: dict, idx: Tensor) -> dict:
    """What a call without targets sends; and the logits' columns, where sequences of one token have some."""
    model = built(rank, "tensor_parallelize", config, weights).eval()
    with torch.no_grad():
        with rank.record() as recording:
            model(idx)
        logits, _ = model(idx[:, :1], idx[:, 1:2])
    return {"recording": recording, "columns": logits.size(-1)}


@check("tensor_parallelize", world_sizes=(2, 3), subgroup=False)
def last_logits_alone_are_gathered(trial: Trial) -> None:
    """Without targets the logits of the last position are gathered, and no others."""
    config = small_config(trial, n_layer=1)
    idx = trial.tokens(config["vocab_size"], 2, 16)
    results = trial.run(last_probe, config, drawn_weights(trial, config), idx)
    whole, last = (4 * n * m for n, m in ((idx.numel(), config["n_embd"]), (len(idx), config["vocab_size"])))
    sends_at_most(
        trial,
        SimpleNamespace(results=results),
        "",
        3 * 2 * whole + 3 * last,
        "without targets three all-reduces of b·s·h, and the logits of the last position,",
        "Without targets take the last position first, then gather its logits: nobody needs the others.",
    )
    v, share = config["vocab_size"], -(-config["vocab_size"] // trial.num_ranks)
    for rank, result in enumerate(results):
        trial.require(
            result["columns"] <= share,
            f"with targets, where a sequence has one token, the logits have {result['columns']} columns, and "
            f"a rank's part has {share}",
            help="Whether there are targets decides: gather where the loss is None.",
            rank=rank,
            cause="the length of the logits decides whether they are gathered: one position may have a target"
            if result["columns"] == v
            else "",
        )


@check("tensor_parallelize")
def model_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the dense model's products."""
    n = trial.num_ranks
    for seen in trial.once(observe_model):
        b, s = seen.idx.shape
        h, layers, v = (seen.config[key] for key in ("n_embd", "n_layer", "vocab_size"))
        forward = layers * (24 * b * s * h * h + 4 * b * s * s * h) + 2 * b * s * h * n * -(-v // n)
        computes_a_share(trial, seen, forward / n)


def stream_probe(rank, config: dict, weights: dict, idx: Tensor, targets: Tensor, seed: int) -> dict:
    """What enters each block and leaves the last, twice in training mode, and the loss in eval mode.

    And the same of a model that was in eval mode when it was cut.
    """
    rank.seed(seed)
    model, late = (built(rank, "tensor_parallelize", config, weights, awake=awake) for awake in (True, False))
    awake = model.training
    rank.seed(seed + 1)

    def stream_of(model: nn.Module) -> list[Tensor]:
        stream: list[Tensor] = []
        hooks = [
            hook
            for block in model.transformer.h
            for hook in (
                block.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0].detach().clone())),
                block.register_forward_hook(lambda _, inputs, output: stream.append(output.detach().clone())),
            )
        ]
        model(idx, targets)
        for hook in hooks:
            hook.remove()
        return stream

    found = {"first": stream_of(model), "second": stream_of(model), "late": stream_of(late.train())}
    return found | {"asleep": model.eval()(idx, targets)[1], "awake": awake}


def same_stream(trial: Trial, rank: int, mine: list[Tensor], others: list[Tensor], cause: str = "") -> None:
    """What enters and leaves the blocks of a rank is what it is on rank 0."""
    for place, (x, first) in enumerate(zip(mine, others, strict=True)):
        here = f"block {place // 2}" if place % 2 == 0 else f"what follows block {place // 2}"
        trial.require(
            torch.allclose(x, first, rtol=1e-4, atol=1e-5),
            f"what enters {here} differs from rank 0's: their dropouts drop different elements"
            if place % 2 == 0
            else f"{here} differs from rank 0's: a dropout of that block drops different elements",
            help="A dropout in eval mode may train later: p alone says whether it must be shared."
            if cause
            else "The ranks are seeded differently. Share transformer.drop and both dropouts of a block.",
            rank=rank,
            cause=cause,
        )


@check("tensor_parallelize", world_sizes=(2, 1, 3))
def dropout_after_a_sum_is_the_same_everywhere(trial: Trial) -> None:
    """With dropout the residual stream stays the same on every rank, however the ranks are seeded."""
    config = small_config(trial, dropout=0.3)
    weights = drawn_weights(trial, config)
    idx, targets = (trial.tokens(config["vocab_size"], 2, 8) for _ in range(2))
    base = trial.integer(1, 10**6)
    runs = [(config, weights, idx, targets, base + 10 * rank) for rank in range(trial.num_ranks)]
    results = trial.run(stream_probe, per_rank=runs)
    for rank, result in enumerate(results):
        same_stream(trial, rank, result["first"], results[0]["first"])
        cause = "this model was in eval mode when it was cut; one that was cut in training mode is right"
        same_stream(trial, rank, result["late"], results[0]["late"], cause)
        zeros = (result["first"][0] == 0).double().mean().item()
        trial.require(
            0.1 < zeros < 0.5 and not torch.equal(result["first"][0], result["second"][0]),
            "the embedding's dropout does not drop at random in training mode",
            rank=rank,
            cause="" if result["awake"] else "the model was in training mode, and came back in eval mode",
        )
    dense = dense_model(config, weights).eval()
    trial.close("the loss in eval mode", [r["asleep"] for r in results], dense(idx, targets)[1].detach())


@check("tensor_parallelize", world_sizes=(2, 3), subgroup=False)
def generate_still_works(trial: Trial) -> None:
    """`model.generate` gives the dense model's tokens, and the same ones on every rank."""
    config = small_config(trial, vocab_size=undividable(trial, 30), n_layer=1, block_size=5)
    sampling_is_right(trial, "tensor_parallelize", config, 3)


@check("tensor_parallelize", world_sizes=(2,), subgroup=False)
def training_curve_is_the_dense_one(trial: Trial) -> None:
    """The losses of a few steps lie on the dense model's, with SGD and with AdamW."""
    config = small_config(trial, vocab_size=undividable(trial, 30))
    training_is_right(trial, "tensor_parallelize", config)


def model_refusal_probe(rank, config: dict) -> dict:
    return refusal_of(rank.submission.tensor_parallelize, GPT(GPTConfig(**config)), rank.group)


@check("tensor_parallelize", world_sizes=(2, 4), subgroup=False)
def model_refuses_heads_that_do_not_divide(trial: Trial) -> None:
    """Heads that are not divisible by the ranks are a ValueError; nothing was changed."""
    heads = undividable(trial)
    config = small_config(trial, n_head=heads, n_embd=heads * 12, dropout=0.1)
    refused(trial, heads, model_refusal_probe, config, heads=True)
