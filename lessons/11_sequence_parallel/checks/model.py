"""The whole model: values, gradients, what it sends and computes."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import CheckEnded, Trial, Verdict, check, each_rank, exercise, told
from lessons_shared.cut_gpt import cut_dim, dense_model, drawn_weights, local, small_config
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
from lessons_shared.cut_gpt_runs import built
from lessons_shared.cut_gpt_slips import BIASES, losses_of_slips
from lessons_shared.passes import BOTH, CLEARED
from lessons_shared.refusals import refusal_of, refused, undividable
from lessons_shared.wire import computes_a_share, sends_at_most, wire_bytes
from nanogpt.model import GPT, GPTConfig

from .gradients import attention_gradients_are_right, block_gradients_are_right
from .model_runs import NAME, observe_model
from .shared import FEWER, SIZES
from .slips import BIAS_ADDED_OFTEN

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


def other_losses(seen: SimpleNamespace, num_ranks: int) -> dict[str, Tensor]:
    """What known slips would lead to."""
    found = losses_of_slips(dense_model(seen.config, seen.weights), seen.idx, seen.targets, num_ranks)
    found.pop(BIASES, None)  # there is another word for it here
    return {BIAS_ADDED_OFTEN: seen.biases_added_often(), **found}


@check("sequence_parallelize")
def sequence_parallel_loss_is_the_dense_one(trial: Trial) -> None:
    """The loss is the dense model's, the same on every rank, with ignored targets too."""
    for seen in trial.once(observe_model):
        trial.close(
            f"the loss ({seen.name})",
            each_rank(seen, "loss"),
            seen.loss,
            alternatives=partial(other_losses, seen, trial.num_ranks),
            help="Every rank's logits are for all tokens and its part of the vocabulary. Are the tokens "
            "in order, with "
            "their own positions?",
        )
        later_loss_is_right(trial, seen)


@check("sequence_parallelize")
def logits_are_those_of_tensor_parallelize(trial: Trial) -> None:
    """With targets: this rank's part of the vocabulary for all tokens; without: the last token's, whole."""
    help = (
        "The last token lies on the last rank that has one: gather before you take it. And cut off what pads "
        "the vocabulary."
    )
    for seen in trial.once(observe_model):
        logits_are_right(trial, seen, help)


@check("sequence_parallelize")
def model_is_cut_as_by_tensor_parallelize(trial: Trial) -> None:
    """Every matrix of attention and MLP and the token table are shards; names stay, the table stays tied."""
    for seen in trial.once(observe_model):
        given_one_is_changed(trial, seen)
        table_is_cut(trial, seen)
        matrices_are_cut(trial, seen, attentions(seen.config))


@check("sequence_parallelize")
def replicated_gradients_are_summed(trial: Trial) -> None:
    """Norms, positions and the biases after a reduce-scatter have the dense gradient on every rank."""
    for seen in trial.once(observe_model):
        block_gradients_are_right(trial, seen, "gradients", 1, only_replicated=True)


@check("sequence_parallelize")
def sliced_gradients_are_the_dense_models(trial: Trial) -> None:
    """Every slice of a matrix, and of the token table, has its part of the dense gradient."""
    for seen in trial.once(observe_model):
        block_gradients_are_right(trial, seen, "gradients", 1, only_replicated=False)
        for prefix in attentions(seen.config):
            attention_gradients_are_right(trial, seen, "gradients", prefix)
        table_gradients_are_right(trial, seen, "gradients", 1)


@check("sequence_parallelize", world_sizes=FEWER)
def gradients_of_two_passes_add_up(trial: Trial) -> None:
    """A second pass, of half its loss, adds half to every gradient; one after zero_grad has its own alone."""
    for seen in trial.once(observe_model)[:1]:
        for which, passes in (("twice", BOTH), *((name, 1) for name in CLEARED)):
            block_gradients_are_right(trial, seen, which, passes)
            table_gradients_are_right(trial, seen, which, passes)


@check("sequence_parallelize", world_sizes=FEWER)
def gradients_are_the_same_in_evaluation(trial: Trial) -> None:
    """A backward in evaluation mode gives the gradients that one in training gives."""
    for seen in trial.once(observe_model)[:1]:
        trained, evaluated = (each_rank(seen, key) for key in ("gradients", "gradients in evaluation"))
        gradients_are_those_of_training(trial, trained, evaluated, f" ({seen.name})")


@check("sequence_parallelize")
def sends_what_tensor_parallel_sends(trial: Trial) -> None:
    """Forward at most half an all-reduce more than tensor parallelism; backward what is gathered again."""
    n = trial.num_ranks
    for seen in trial.once(observe_model):
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


def last_probe(rank, config: dict, weights: dict, idx: Tensor) -> dict:
    """What a call without targets sends."""
    model = built(rank, NAME, config, weights).eval()
    with torch.no_grad(), rank.record() as recording:
        model(idx)
    return {"recording": recording}


@check("sequence_parallelize", world_sizes=(2, 3), subgroup=False)
def last_logits_alone_are_gathered(trial: Trial) -> None:
    """Without targets the logits of the last position are gathered, and no others."""
    config = small_config(trial, n_layer=1, n_embd=60, vocab_size=480)
    idx = trial.tokens(config["vocab_size"], 2, 6 * trial.num_ranks)
    results = trial.run(last_probe, config, drawn_weights(trial, config), idx)
    whole, last = (4 * n * m for n, m in ((idx.numel(), config["n_embd"]), (len(idx), config["vocab_size"])))
    positions = 4 * config["block_size"] * config["n_embd"]
    sends_at_most(
        trial,
        SimpleNamespace(results=results),
        "",
        7 * whole + positions + 3 * last,
        "without targets 3 all-gathers, 2 reduce-scatters, the embedding and the logits of the last position",
        "Without targets take the last position first, then gather its logits: nobody needs the others.",
    )


@check("sequence_parallelize")
def every_rank_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the dense model's products."""
    n = trial.num_ranks
    for seen in trial.once(observe_model):
        b, s = seen.idx.shape
        h, layers, v = (seen.config[key] for key in ("n_embd", "n_layer", "vocab_size"))
        dense = layers * (24 * b * s * h * h + 4 * b * s * s * h) + 2 * b * s * h * n * -(-v // n)
        computes_a_share(trial, seen, dense / n)


@check("sequence_parallelize", world_sizes=(2, 3), subgroup=False)
def sampling_still_works(trial: Trial) -> None:
    """`generate` gives the dense model's tokens; uneven lengths are refused, or have its logits and loss."""
    n = trial.num_ranks
    odd = 30 + trial.choice([1, 5, 7, 11])
    config = small_config(trial, vocab_size=odd, n_layer=1, block_size=3 * n)
    sampling_is_right(trial, NAME, config, 3 * n)
    pads_have_positions(trial, config | {"block_size": 3 * n + 1})


def longest_probe(rank, config: dict, weights: dict, idx: Tensor) -> dict:
    """The logits of a sequence as long as a model takes; None if it refuses lengths that do not divide."""
    model = built(rank, NAME, config, weights).eval()
    refused = {"logits": None}
    with torch.no_grad():
        try:
            model(idx[:, :-2])
        except Exception:
            return refused
        try:
            return {"logits": local(model(idx)[0])}
        except ValueError:
            return refused


def pads_have_positions(trial: Trial, config: dict) -> None:
    """Who fills up what the ranks do not divide also fills up a sequence of `block_size` tokens."""
    weights = drawn_weights(trial, config)
    idx = trial.tokens(config["vocab_size"], 2, config["block_size"])
    try:
        results = trial.run(longest_probe, config, weights, idx)
    except CheckEnded as end:
        if end.verdict == Verdict.CRASHED and "index out of range" in end.message:
            end.cause = (
                f"a sequence of block_size={config['block_size']} tokens is filled up to a length that "
                "the ranks divide, and the positions of the pads lie beyond the table. A shorter one is right"
            )
            end.help = "Give the pads any position that there is: nobody looks at them."
        raise
    logits = each_rank(SimpleNamespace(results=results), "logits")
    if all(each is not None for each in logits):
        with torch.no_grad():
            dense = dense_model(config, weights).eval()(idx)[0]
        trial.close(
            "the logits of the last of block_size tokens, which the ranks do not divide", logits, dense
        )


@check("sequence_parallelize", world_sizes=(2,), subgroup=False)
def sequence_parallel_training_is_the_dense_one(trial: Trial) -> None:
    """The losses of a few steps lie on the dense model's, with SGD and with AdamW."""
    training_is_right(trial, NAME, small_config(trial, vocab_size=37, n_layer=1))


def refusal_probe(rank, config: dict) -> dict:
    return refusal_of(rank.submission.sequence_parallelize, GPT(GPTConfig(**config)), rank.group)


@check("sequence_parallelize", world_sizes=(2, 4), subgroup=False)
def model_refuses_heads_that_do_not_divide(trial: Trial) -> None:
    """Heads that are not divisible by the ranks are a ValueError; nothing was changed."""
    heads = undividable(trial)
    config = small_config(trial, n_head=heads, n_embd=heads * 12, dropout=0.1)
    refused(trial, heads, refusal_probe, config, heads=True)
