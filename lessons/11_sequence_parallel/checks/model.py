"""The whole model: values, gradients, what it sends, keeps and computes."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from grader.checks import (
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

from .model_runs import built, dense_model, observe_model
from .shared import (
    BIAS_ADDED_OFTEN,
    SIZES,
    attention_gradients_are_right,
    block_gradients_are_right,
    cut_dim,
    fused_of,
    heads_of,
    local,
    sends_at_most,
    small_config,
    wire_bytes,
)

exercise(
    "sequence_parallelize",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Four places: the embedding (which tokens does this rank keep, and who completes the gradients "
        "of both "
        "tables?), the blocks, the last norm and the gather before the head, and the forward without "
        "targets.",
        "tensor_parallelize of lesson 10 cuts the table, the head and the loss. Take the blocks out "
        "while it works, and "
        "cut them by sequence_parallel_block. Its head has a copy_to_group: with a gather before it, "
        "what would the "
        "gradient be?",
        "GPT.forward calls self.embed, the blocks, self.head, self.loss: each may be replaced on the "
        "model. Without "
        "targets it takes the last token of x: whose last token is that now?",
        "Without targets a length that does not divide may be refused. Or pad at the end (attention is "
        "causal), and take the logits of the last real token from the gathered x.",
    ),
)

TABLE = ("transformer.wte.weight", "lm_head.weight")


def shared_table(tensors: dict) -> Tensor | None:
    """The token table, under whichever of its two names comes first."""
    return next((tensors[name] for name in TABLE if name in tensors), None)


def row_ranges(table: Tensor, shards: list[Tensor | None]) -> list[tuple[int, int]] | None:
    """(first row, number of rows) of the table on each rank, padding left out; None if rows are missing."""
    if any(shard is None or shard.dim() != 2 or shard.size(1) != table.size(1) for shard in shards):
        return None
    first, ranges = 0, []
    for shard in shards:
        size = min(len(shard), len(table) - first)
        while size and not torch.equal(shard[:size], table[first : first + size]):
            size -= 1
        ranges.append((first, size))
        first += size
    return ranges if first == len(table) else None


def ranges_of(seen: SimpleNamespace) -> list[tuple[int, int]] | None:
    return row_ranges(shared_table(seen.weights), [shared_table(w) for w in each_rank(seen, "weights")])


@check("sequence_parallelize")
def sequence_parallel_loss_is_the_dense_one(trial: Trial) -> None:
    """The loss is the dense model's, the same on every rank, with ignored targets too."""
    for seen in trial.once(observe_model).plain:
        trial.close(
            f"the loss ({seen.name})",
            each_rank(seen, "loss"),
            seen.loss,
            alternatives={BIAS_ADDED_OFTEN: seen.biases_added_often},
            help="Every rank's logits are for all tokens and its part of the vocabulary. Are the tokens "
            "in order, with "
            "their own positions?",
        )


@check("sequence_parallelize")
def logits_are_those_of_tensor_parallelize(trial: Trial) -> None:
    """With targets: this rank's part of the vocabulary for all tokens; without: the last token's, whole."""
    for seen in trial.once(observe_model).plain:
        v, share = seen.config["vocab_size"], -(-seen.config["vocab_size"] // trial.num_ranks)
        for rank, result in enumerate(seen.results):
            shape = tuple(getattr(result["logits"], "shape", ()))
            trial.require(
                shape[:-1] == tuple(seen.idx.shape) and shape[-1] <= share,
                f"the logits with targets have shape {shape}, where (b, s) = {tuple(seen.idx.shape)} and "
                "at most "
                f"{share} of {v} columns are expected ({seen.name})",
                help="Called and returning as tensor_parallelize: all tokens, this rank's words.",
                rank=rank,
            )
            trial.require(result["no_loss"], "a loss was returned without targets", rank=rank)
        trial.close(
            f"the logits of the last position ({seen.name})",
            each_rank(seen, "last"),
            seen.last,
            help="The last token lies on the last rank that has one: gather before you take it. And cut "
            "off what pads "
            "the vocabulary.",
        )
        ranges = ranges_of(seen)
        if ranges is not None:
            trial.close(
                f"this rank's logits ({seen.name})",
                [r["logits"][..., :size] for r, (_, size) in zip(seen.results, ranges, strict=True)],
                [seen.logits[..., first : first + size] for first, size in ranges],
            )


@check("sequence_parallelize")
def model_is_cut_as_by_tensor_parallelize(trial: Trial) -> None:
    """Every matrix of attention and MLP and the token table are shards; names stay, the table stays tied."""
    n = trial.num_ranks
    for seen in trial.once(observe_model).plain:
        for rank, result in enumerate(seen.results):
            held = result["weights"]
            missing = sorted(set(seen.weights) - set(held) - set(TABLE))
            trial.require(
                not missing, f"parameters are missing: {', '.join(missing)}", "Names stay GPT's.", rank=rank
            )
            share = -(-seen.config["vocab_size"] // n)
            table = shared_table(held)
            trial.require(
                table is not None and table.size(0) <= share,
                f"the token table is {tuple(getattr(table, 'shape', ()))} on this rank, where {share} "
                "rows are its "
                f"share ({seen.name})",
                rank=rank,
            )
            trial.require(
                result["tied"] and not all(name in held for name in TABLE),
                "lm_head and wte have weights of their own: the table was untied",
                rank=rank,
            )
        trial.require(
            ranges_of(seen) is not None,
            f"the ranks' rows of the token table, joined, are not it ({seen.name})",
        )
        for name, whole in seen.weights.items():
            if name in TABLE or ".c_attn." in name:
                continue
            dim = cut_dim(name)
            trial.close(
                name, each_rank(seen, "weights", name), whole if dim is None else parts(whole, dim, n)
            )
        for layer in range(seen.config["n_layer"]):
            prefix = f"transformer.h.{layer}."
            for rank, held in enumerate(each_rank(seen, "weights")):
                heads = heads_of(fused_of(seen.weights, prefix), rank, n)
                trial.require(
                    row_order(fused_of(held, prefix), heads) is not None,
                    f"c_attn of block {layer} does not hold this rank's heads of q, of k and of v",
                    rank=rank,
                )
        stand_alone(trial, seen.results)


@check("sequence_parallelize")
def replicated_gradients_are_summed(trial: Trial) -> None:
    """Norms, positions and the biases after a reduce-scatter have the dense gradient on every rank."""
    for seen in trial.once(observe_model).plain:
        block_gradients_are_right(trial, seen, "gradients", "", 1, only_replicated=True)


@check("sequence_parallelize")
def sliced_gradients_are_the_dense_models(trial: Trial) -> None:
    """Every slice of a matrix, and of the token table, has its part of the dense gradient."""
    for seen in trial.once(observe_model).plain:
        block_gradients_are_right(trial, seen, "gradients", "", 1, only_replicated=False)
        for layer in range(seen.config["n_layer"]):
            attention_gradients_are_right(trial, seen, "gradients", f"transformer.h.{layer}.")
        table_gradients_are_right(trial, seen, "gradients", 1)


def table_gradients_are_right(trial: Trial, seen: SimpleNamespace, which: str, passes: int) -> None:
    ranges = ranges_of(seen)
    if ranges is None:
        return
    whole = passes * shared_table(seen.gradients)
    actual = [shared_table(g) for g in each_rank(seen, which)]
    trial.close(
        f"the gradient of the token table ({seen.name})",
        [None if a is None else a[:size] for a, (_, size) in zip(actual, ranges, strict=True)],
        [whole[first : first + size] for first, size in ranges],
        alternatives={
            cause: [passes * shared_table(doubled)[first : first + size] for first, size in ranges]
            for cause, doubled in getattr(seen, "summed_twice", {}).items()
        },
        help="The table is used twice: by the head, for all tokens, and by the embedding, whose rows on "
        "this rank "
        "were looked up for all tokens, too.",
    )


@check("sequence_parallelize")
def gradients_of_two_passes_add_up(trial: Trial) -> None:
    """A second pass adds the same gradient again: complete after each backward, and summed once."""
    for seen in trial.once(observe_model).plain:
        block_gradients_are_right(trial, seen, "twice", "", 2)
        table_gradients_are_right(trial, seen, "twice", 2)


@check("sequence_parallelize")
def sends_what_tensor_parallel_sends(trial: Trial) -> None:
    """Forward no more than tensor parallelism; backward also what is gathered again, and small sums."""
    n = trial.num_ranks
    for seen in trial.once(observe_model).plain:
        tokens, layers, h = seen.idx.numel(), seen.config["n_layer"], seen.config["n_embd"]
        whole, positions = 4 * tokens * h, 4 * seen.config["block_size"] * h
        loss = 2 * 6 * 4 * tokens  # a few numbers a token
        help = "A gather and a reduce-scatter send half of an all-reduce each. No shards, no logits."
        means = f"{2 * layers + 1} all-gathers, {2 * layers} reduce-scatters and the embedding"
        sends_at_most(trial, seen, "", (4 * layers + 3) * whole + positions + loss, means, help)
        sums = 2 * sum(
            4 * g.numel() for k, g in seen.gradients.items() if cut_dim(k) is None and g.dim() == 1
        )
        allowed = (n - 1) / n * ((10 * layers + 6) * whole + sums + 3 * positions + 2 * loss)
        for rank, recording in enumerate(each_rank(seen, "recording")):
            events = recording.select()
            sent = wire_bytes(events, n)
            trial.require(
                n == 1 or sent <= allowed + 64 * len(events),
                f"one pass sent about {sent:,.0f} bytes from here, where {allowed:,.0f} are allowed, "
                "gathering again "
                f"included ({seen.name}); the largest: "
                f"{told(sorted(events, key=lambda event: -event.num_bytes))}",
                help=help,
                rank=rank,
            )


@check("sequence_parallelize")
def every_rank_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the dense model's products."""
    n = trial.num_ranks
    for seen in trial.once(observe_model).plain:
        b, s = seen.idx.shape
        h, layers, v = (seen.config[key] for key in ("n_embd", "n_layer", "vocab_size"))
        dense = layers * (24 * b * s * h * h + 4 * b * s * s * h) + 2 * b * s * h * n * -(-v // n)
        for rank, recording in enumerate(each_rank(seen, "recording")):
            flops = recording.flops(after="")
            trial.require(
                flops <= 1.05 * dense / n,
                f"the forward computed {flops:,} FLOPs on this rank, where {dense / n:,.0f} are 1/{n}",
                help="Multiply with this rank's slices alone.",
                rank=rank,
            )


def sampling_probe(rank, config: dict, weights: dict, idx: Tensor, steps: int) -> dict:
    model = built(rank, config, weights).eval()
    greedy = model.generate(idx, steps, top_k=1)
    rank.seed(7)
    sampled = model.generate(idx, steps)
    with torch.no_grad():
        try:
            odd = local(model(idx[:, : idx.size(1) - 1])[0])
        except Exception:  # a length that does not divide may be refused
            odd = None
    return {"greedy": greedy, "sampled": sampled, "odd": odd}


@check("sequence_parallelize", world_sizes=(2, 4), subgroup=False)
def sampling_still_works(trial: Trial) -> None:
    """`model.generate` gives the dense model's tokens on every rank; uneven lengths may be refused."""
    n = trial.num_ranks
    odd = 30 + trial.choice([1, 5, 7, 11])
    config = small_config(trial, vocab_size=odd, block_size=3 * n)
    weights = weights_of(drawn_alike(GPT(GPTConfig(**config)), trial))
    idx, steps = trial.tokens(config["vocab_size"], 2, 3 * n), 4
    results = trial.run(sampling_probe, config, weights, idx, steps)
    greedy = dense_model(config, weights).eval().generate(idx, steps, top_k=1)
    for rank, result in enumerate(results):
        trial.require(
            torch.equal(result["greedy"], greedy),
            f"with top_k=1 it went on with {result['greedy'][0, -steps:].tolist()}, the dense model with "
            f"{greedy[0, -steps:].tolist()}",
            help="generate needs the whole logits of the last token, (b, 1, v), on every rank.",
            rank=rank,
        )
        trial.require(
            torch.equal(result["sampled"], results[0]["sampled"]),
            "ranks that are seeded alike sampled different tokens",
            rank=rank,
        )
    with torch.no_grad():
        last = dense_model(config, weights)(idx[:, : 3 * n - 1])[0]
    if all(result["odd"] is not None for result in results):
        trial.close(
            "the logits of the last token, where the length does not divide by the ranks",
            each_rank(SimpleNamespace(results=results), "odd"),
            last,
            help="What pads the sequence comes after the last real token: take the logits of that one.",
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


@check("sequence_parallelize", world_sizes=(2, 4), subgroup=False)
def sequence_parallel_training_is_the_dense_one(trial: Trial) -> None:
    """The losses of a few steps lie on the dense model's, with SGD and with AdamW."""
    config = small_config(trial, vocab_size=37, n_layer=1)
    weights = weights_of(GPT(GPTConfig(**config)))
    weights = {k: w + 0.1 * trial.normal(*w.shape) for k, w in weights.items()}
    batches = [[trial.tokens(config["vocab_size"], 2, 8) for _ in range(2)] for _ in range(4)]
    results = trial.run(training_probe, config, weights, batches)
    for name in ("SGD", "AdamW"):
        expected = train(dense_model(config, weights), batches, name)
        what = f"the list of losses of {len(batches)} steps of {name}"
        trial.close(what, each_rank(SimpleNamespace(results=results), name), expected, rtol=2e-3)
