"""The whole model."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import (
    BACKWARD,
    Trial,
    check,
    drawn_alike,
    each_rank,
    exercise,
    parts,
    row_order,
    stand_alone,
    told,
    weights_of,
)
from nanogpt.model import GPT, GPTConfig

from .layers import fused_with_bias, heads_of, small_config
from .linears import computes_a_share
from .shared import SIZES, SLACK, describe, error_of, refused, undividable, wire_bytes
from .vocabulary import row_ranges

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


def model_probe(rank, cases: list) -> list[dict]:
    return [one_model(rank, *case) for case in cases]


def one_model(rank, config: dict, weights: dict, idx: Tensor, targets: Tensor) -> dict:
    model = built(rank, config, weights)
    with rank.record() as recording:
        logits, loss = model(idx, targets)
        recording.mark(BACKWARD)
        loss.backward()
    held = describe(model)
    model(idx, targets)[1].backward()
    model.eval()
    with torch.no_grad():
        last, none = model(idx)
    named = dict(model.named_parameters(remove_duplicate=False))
    head, table = named.get("lm_head.weight"), named.get("transformer.wte.weight")
    return {
        "loss": loss,
        "logits": logits,
        "last": last,
        "no_loss": none is None,
        "tied": head is not None and table is not None and head.data_ptr() == table.data_ptr(),
        "twice": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        "recording": recording,
        **held,
    }


def built(rank, config: dict, weights: dict) -> nn.Module:
    """On a rank: the dense model with the judge's weights, given to the learner's function."""
    model = GPT(GPTConfig(**config))
    model.load_state_dict(weights, strict=False)  # the tied table comes once
    return rank.submission.tensor_parallelize(model.to(rank.device), rank.group)


def dense_model(config: dict, weights: dict) -> GPT:
    model = GPT(GPTConfig(**config))
    model.load_state_dict(weights, strict=False)
    return model.double()


def observe_model(trial: Trial) -> dict[str, SimpleNamespace]:
    uneven = small_config(trial, bias=False, vocab_size=undividable(trial, 30))
    seen = {
        "v divides": model_case(trial, small_config(trial, bias=True)),
        "v does not divide": model_case(trial, uneven),
    }
    cases = [(case.config, case.weights, case.idx, case.targets) for case in seen.values()]
    results = trial.run(model_probe, cases)
    for number, case in enumerate(seen.values()):
        case.results = [result[number] for result in results]
    return seen


def model_case(trial: Trial, config: dict) -> SimpleNamespace:
    weights = weights_of(drawn_alike(GPT(GPTConfig(**config)), trial))
    shape = (trial.integer(2, 3), trial.integer(5, 9))
    idx, targets = trial.tokens(config["vocab_size"], *shape), trial.tokens(config["vocab_size"], *shape)
    targets[0, : trial.integer(1, 3)] = -1
    dense = dense_model(config, weights)
    logits, loss = dense(idx, targets)
    loss.backward()
    gradients = {name: p.grad for name, p in dense.named_parameters()}
    with torch.no_grad():
        last, _ = dense(idx)
    return SimpleNamespace(
        config=config, weights=weights, idx=idx, targets=targets, gradients=gradients,
        loss=loss.detach(), logits=logits.detach(), last=last,
    )  # fmt: skip


TABLE = ("transformer.wte.weight", "lm_head.weight")
CUTS = {
    "attn.c_proj.weight": 1,
    "mlp.c_fc.weight": 0,
    "mlp.c_fc.bias": 0,
    "mlp.c_proj.weight": 1,
}


def cut_dim(name: str) -> int | None:
    """Along which dimension a parameter of GPT is cut, None if replicated (see is_special for the others)."""
    return next((dim for suffix, dim in CUTS.items() if name.endswith(suffix)), None)


def is_special(name: str) -> bool:
    return name in TABLE or ".c_attn." in name


def shared_table(tensors: dict) -> Tensor | None:
    """The token table, under whichever of its two names comes first."""
    return next((tensors[name] for name in TABLE if name in tensors), None)


def dense_table(seen: SimpleNamespace, tensors: dict) -> Tensor:
    table = shared_table(tensors)
    assert table is not None
    return table


@check("tensor_parallelize")
def model_loss_is_the_dense_one(trial: Trial) -> None:
    """The loss is the dense model's on every rank."""
    for name, seen in trial.once(observe_model).items():
        v, n = seen.config["vocab_size"], trial.num_ranks
        padding = torch.zeros(*seen.logits.shape[:-1], -v % n, dtype=torch.float64)
        padded = torch.cat([seen.logits, padding], -1)
        counted = F.cross_entropy(padded.flatten(0, 1), seen.targets.flatten(), ignore_index=-1)
        trial.close(
            f"the loss ({name})",
            each_rank(seen, "loss"),
            seen.loss,
            alternatives={"the rows that pad the vocabulary were counted as words": counted},
        )


@check("tensor_parallelize")
def logits_are_cut_in_training_and_whole_for_sampling(trial: Trial) -> None:
    """With targets the logits are this rank's part, without them those of the last position, whole."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_model).items():
        v = seen.config["vocab_size"]
        share = -(-v // n)
        for rank, result in enumerate(seen.results):
            logits = result["logits"]
            trial.require(
                isinstance(logits, Tensor) and logits.shape[:-1] == seen.logits.shape[:-1],
                f"the logits with targets have shape {tuple(getattr(logits, 'shape', ()))}, where (b, s) = "
                f"{tuple(seen.idx.shape)} and at most {share} columns are expected ({name})",
                rank=rank,
            )
            trial.require(
                logits.size(-1) <= share,
                f"the logits with targets have {logits.size(-1)} columns of a vocabulary of {v}: more than "
                f"the {share} of this rank's part",
                help="The whole logits are the largest tensor of a step: leave them cut.",
                rank=rank,
            )
            trial.require(result["no_loss"], "a loss was returned without targets", rank=rank)
        trial.close(
            f"the logits of the last position ({name})",
            each_rank(seen, "last"),
            seen.last,
            help="Without targets gather the ranks' parts, and cut off what pads the vocabulary.",
        )
        ranges = row_ranges(
            dense_table(seen, seen.weights), [shared_table(w) for w in each_rank(seen, "weights")]
        )
        if ranges is not None:
            trial.close(
                f"this rank's logits ({name})",
                [r["logits"][..., :size] for r, (_, size) in zip(seen.results, ranges, strict=True)],
                [seen.logits[..., first : first + size] for first, size in ranges],
            )


@check("tensor_parallelize")
def every_matrix_is_cut(trial: Trial) -> None:
    """Every matrix of attention and MLP and the token table are shards; the table stays tied."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_model).items():
        for rank, result in enumerate(seen.results):
            held = result["weights"]
            missing = sorted(set(seen.weights) - set(held) - set(TABLE))
            trial.require(
                not missing,
                f"these parameters are missing: {', '.join(missing)}",
                help="Parameter names stay GPT's.",
                rank=rank,
            )
            table = shared_table(held)
            trial.require(table is not None, "there is no transformer.wte.weight", rank=rank)
            share = -(-seen.config["vocab_size"] // n)
            trial.require(
                table.size(0) <= share,
                f"the token table has {table.size(0)} rows on this rank, where {share} is its share ({name})",
                rank=rank,
            )
            trial.require(
                result["tied"] and not all(t in held for t in TABLE),
                "lm_head and wte have weights of their own: the table was untied",
                help="model.lm_head.weight = model.transformer.wte.weight, after both are cut.",
                rank=rank,
            )
        trial.require(
            row_ranges(dense_table(seen, seen.weights), [shared_table(w) for w in each_rank(seen, "weights")])
            is not None,
            f"the ranks' rows of the token table, joined, are not the table ({name})",
        )
        for parameter, whole in seen.weights.items():
            if is_special(parameter):
                continue
            dim = cut_dim(parameter)
            expected = whole if dim is None else parts(whole, dim, n)
            trial.close(parameter, each_rank(seen, "weights", parameter), expected)
        for layer in range(seen.config["n_layer"]):
            fused = fused_of(seen.weights, layer)
            for rank, held in enumerate(each_rank(seen, "weights")):
                trial.require(
                    row_order(fused_of(held, layer), heads_of(fused, rank, n)) is not None,
                    f"c_attn of block {layer} does not hold this rank's heads of q, of k and of v",
                    rank=rank,
                )
        stand_alone(trial, seen.results)


def fused_of(tensors: dict, layer: int) -> Tensor:
    prefix = f"transformer.h.{layer}.attn."
    return fused_with_bias({k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)})


@check("tensor_parallelize")
def replicated_gradients_are_complete(trial: Trial) -> None:
    """Norms, positions and the biases after a sum have the dense model's gradient, the same on every rank."""
    for name, seen in trial.once(observe_model).items():
        for parameter, whole in seen.gradients.items():
            if is_special(parameter) or cut_dim(parameter) is not None:
                continue
            trial.close(
                f"the gradient of {parameter} ({name})",
                [g.get(parameter) for g in each_rank(seen, "gradients")],
                whole,
                help="A gradient that differs by rank is partial: somewhere above, a replicated tensor "
                "enters sharded computation without copy_to_group. Attention, MLP, or the head?",
            )


@check("tensor_parallelize")
def shard_gradients_are_the_dense_models(trial: Trial) -> None:
    """Every shard has its part of the dense model's gradient, and a second backward adds to it."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_model).items():
        for parameter, whole in seen.gradients.items():
            if is_special(parameter):
                continue
            dim = cut_dim(parameter)
            expected = [whole] * n if dim is None else parts(whole, dim, n)
            trial.close(
                f"the gradient of {parameter} after two passes ({name})",
                [g.get(parameter) for g in each_rank(seen, "twice")],
                [2 * g for g in expected],
                alternatives={"that of one pass": expected},
            )
        table_gradients(trial, name, seen)
        for layer in range(seen.config["n_layer"]):
            fused, gradient = fused_of(seen.weights, layer), fused_of(seen.gradients, layer)
            orders = [
                row_order(fused_of(held, layer), heads_of(fused, rank, n))
                for rank, held in enumerate(each_rank(seen, "weights"))
            ]
            if None not in orders:
                trial.close(
                    f"the gradient of c_attn of block {layer} ({name})",
                    [fused_of(g, layer) for g in each_rank(seen, "gradients")],
                    [heads_of(gradient, rank, n)[order] for rank, order in enumerate(orders)],
                )


def table_gradients(trial: Trial, name: str, seen: SimpleNamespace) -> None:
    ranges = row_ranges(
        dense_table(seen, seen.weights), [shared_table(w) for w in each_rank(seen, "weights")]
    )
    if ranges is None:
        return
    whole = dense_table(seen, seen.gradients)
    actual = [shared_table(g) for g in each_rank(seen, "gradients")]
    trial.close(
        f"the gradient of the token table ({name})",
        [None if a is None else a[:size] for a, (_, size) in zip(actual, ranges, strict=True)],
        [whole[first : first + size] for first, size in ranges],
        help="The table is used twice, as embedding and as head; its gradient is the sum of both.",
    )


@check("tensor_parallelize")
def model_communicates_twice_a_block_each_way(trial: Trial) -> None:
    """Two all-reduces of b·s·h a block each way, one for the vocabulary, a few numbers for the loss."""
    n = trial.num_ranks
    for name, seen in trial.once(observe_model).items():
        tokens, layers = seen.idx.numel(), seen.config["n_layer"]
        one = 2 * (n - 1) / n * tokens * seen.config["n_embd"] * 4
        for rank, recording in enumerate(each_rank(seen, "recording")):
            for stretch, few in (("", 6 * 8 * tokens), (BACKWARD, 2 * 8 * tokens)):
                events = recording.select(None, stretch)
                sent, allowed = wire_bytes(events, n), (2 * layers + 1) * one + few
                trial.require(
                    sent <= allowed + SLACK * n * max(1, len(events)),
                    f"the {'backward' if stretch else 'forward'} sent about {sent:,.0f} bytes from here; "
                    f"{2 * layers + 1} all-reduces of b·s·h and a few numbers a token are {allowed:,.0f} "
                    f"({name}); the largest: {told(sorted(events, key=lambda event: -event.num_bytes))}",
                    help="Two all-reduces a block each way, and the vocabulary's; no shards, no logits.",
                    rank=rank,
                )


@check("tensor_parallelize")
def model_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the dense model's products, forward and backward."""
    n = trial.num_ranks
    for seen in trial.once(observe_model).values():
        b, s = seen.idx.shape
        h, layers, v = (seen.config[key] for key in ("n_embd", "n_layer", "vocab_size"))
        forward = layers * (24 * b * s * h * h + 4 * b * s * s * h) + 2 * b * s * h * n * -(-v // n)
        computes_a_share(trial, seen, "", forward / n)


def stream_probe(rank, config: dict, weights: dict, idx: Tensor, targets: Tensor, seed: int) -> dict:
    """What enters each block and leaves the last, twice in training mode and once in eval mode."""
    rank.seed(seed)
    model = built(rank, config, weights).train()
    rank.seed(seed + 1)
    stream: list[Tensor] = []
    blocks = model.transformer.h
    for block in blocks:
        block.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0].detach().clone()))
        block.register_forward_hook(lambda _, inputs, output: stream.append(output.detach().clone()))
    losses = [model(idx, targets)[1] for _ in range(2)]
    half = len(stream) // 2
    model.eval()
    asleep = model(idx, targets)[1]
    return {"first": stream[:half], "second": stream[half : 2 * half], "losses": losses, "asleep": asleep}


@check("tensor_parallelize", world_sizes=(2, 1, 4))
def dropout_after_a_sum_is_the_same_everywhere(trial: Trial) -> None:
    """With dropout the residual stream stays the same on every rank, however the ranks are seeded."""
    config = small_config(trial, dropout=0.3)
    model = drawn_alike(GPT(GPTConfig(**config)), trial)
    weights = weights_of(model)
    idx, targets = (trial.tokens(config["vocab_size"], 2, 8) for _ in range(2))
    base = trial.integer(1, 10**6)
    runs = [(config, weights, idx, targets, base + 10 * rank) for rank in range(trial.num_ranks)]
    results = trial.run(stream_probe, per_rank=runs)
    for rank, result in enumerate(results):
        for place, (mine, first) in enumerate(zip(result["first"], results[0]["first"], strict=True)):
            where = f"block {place // 2}" if place % 2 == 0 else f"what follows block {place // 2}"
            trial.require(
                torch.allclose(mine, first, rtol=1e-4, atol=1e-5),
                f"what enters {where} differs from rank 0's: their dropouts drop different elements"
                if place % 2 == 0
                else f"{where} differs from rank 0's: a dropout of that block drops different elements",
                help="The ranks are seeded differently. Share transformer.drop and both dropouts of a block.",
                rank=rank,
            )
        zeros = (result["first"][0] == 0).double().mean().item()
        trial.require(
            0.1 < zeros < 0.5 and not torch.equal(result["first"][0], result["second"][0]),
            "the embedding's dropout does not drop at random in training mode",
            rank=rank,
        )
    dense = dense_model(config, weights).eval()
    trial.close("the loss in eval mode", [r["asleep"] for r in results], dense(idx, targets)[1].detach())


def sampling_probe(rank, config: dict, weights: dict, idx: Tensor, steps: int) -> dict:
    model = built(rank, config, weights).eval()
    greedy = model.generate(idx, steps, top_k=1)
    rank.seed(7)
    return {"greedy": greedy, "sampled": model.generate(idx, steps)}


@check("tensor_parallelize", world_sizes=(2, 4), subgroup=False)
def generate_still_works(trial: Trial) -> None:
    """`model.generate` gives the dense model's tokens, and the same ones on every rank."""
    config = small_config(trial, vocab_size=undividable(trial, 30))
    model = drawn_alike(GPT(GPTConfig(**config)), trial)
    weights = weights_of(model)
    idx = trial.tokens(config["vocab_size"], 2, 3)
    results = trial.run(sampling_probe, config, weights, idx, 6)
    dense = dense_model(config, weights).eval()
    greedy = dense.generate(idx, 6, top_k=1)
    for rank, result in enumerate(results):
        trial.require(
            torch.equal(result["greedy"], greedy),
            f"with top_k=1 it continued {idx[0].tolist()} by {result['greedy'][0, 3:].tolist()}, the dense "
            f"model by {greedy[0, 3:].tolist()}",
            help="generate needs whole logits: (b, 1, v) without targets.",
            rank=rank,
        )
        trial.require(
            torch.equal(result["sampled"], results[0]["sampled"]),
            "ranks that are seeded alike sampled different tokens",
            rank=rank,
        )


def training_probe(rank, config: dict, weights: dict, batches: list) -> dict:
    return {name: train(built(rank, config, weights), batches, name) for name in ("SGD", "AdamW")}


def train(model: nn.Module, batches: list, name: str) -> Tensor:
    rates = {"SGD": {"lr": 0.1, "momentum": 0.5}, "AdamW": {"lr": 3e-3, "weight_decay": 0.1}}
    optimizer = getattr(torch.optim, name)(model.parameters(), **rates[name])
    losses = []
    for idx, targets in batches:
        loss = model(idx, targets)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@check("tensor_parallelize", world_sizes=(2, 4), subgroup=False)
def training_curve_is_the_dense_one(trial: Trial) -> None:
    """The losses of a few steps lie on the dense model's, with SGD and with AdamW."""
    config = small_config(trial, vocab_size=undividable(trial, 30))
    weights = weights_of(GPT(GPTConfig(**config)))
    weights = {k: w + 0.1 * trial.normal(*w.shape) for k, w in weights.items()}
    batches = [[trial.tokens(config["vocab_size"], 2, 8) for _ in range(2)] for _ in range(5)]
    results = trial.run(training_probe, config, weights, batches)
    for name in ("SGD", "AdamW"):
        expected = train(dense_model(config, weights), batches, name)
        what = f"the losses of {len(batches)} steps of {name}"
        trial.close(what, each_rank(SimpleNamespace(results=results), name), expected, rtol=2e-3)


def model_refusal_probe(rank, config: dict) -> dict:
    return {"error": error_of(rank.submission.tensor_parallelize, GPT(GPTConfig(**config)), rank.group)}


@check("tensor_parallelize", world_sizes=(2, 4), subgroup=False)
def model_refuses_heads_that_do_not_divide(trial: Trial) -> None:
    """A number of heads that does not divide by the ranks is a ValueError that names both numbers."""
    heads = undividable(trial)
    config = small_config(trial, n_head=heads, n_embd=heads * 12)
    refused(trial, SimpleNamespace(results=trial.run(model_refusal_probe, config)), heads)
