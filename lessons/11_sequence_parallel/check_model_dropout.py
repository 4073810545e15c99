"""The whole model with dropout: what each rank holds, drops, keeps and learns."""

from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import Trial, check
from nanogpt.model import GPT, GPTConfig

from .check_model import built, dense_model, table_gradients_are_right
from .masks import drop_as_seen, masks_differ, stream_is_cut, watch
from .shared import (
    alive_before_backward,
    attention_gradients_are_right,
    block_gradients_are_right,
    by_group_rank,
    describe,
    drawn_alike,
    each_rank,
    gradients_of,
    kept_bytes,
    local,
    mark_backward,
    small_config,
    weights_of,
)

RATE = 0.4
WORDS = 12


def dropout_probe(rank, cases: list) -> list[dict]:
    return [one_dropping(rank, *case) for case in cases]


def one_dropping(rank, config: dict, weights: dict, seed: int, idx: Tensor, targets: Tensor) -> dict:
    rank.seed(seed)
    model = built(rank, config, weights, drop_probabilities=False).train()
    rank.seed(seed + 1)
    runs, losses = [], []
    for _ in range(2):
        seen, hooks = watch(model.transformer.h)
        loss = model(idx, targets)[1]
        if not runs:
            loss.backward()
        runs.append(seen)
        losses.append(local(loss.detach()))
        for hook in hooks:
            hook.remove()
        del loss
    held = describe(model)
    with rank.record(memory=True) as recording:
        logits, loss = model(idx, targets)
        mark_backward(recording)
    del logits, loss
    model.eval()
    with torch.no_grad():
        asleep = local(model(idx, targets)[1])
    return {
        "first": runs[0], "second": runs[1], "losses": losses, "asleep": asleep, "recording": recording,
        "gradients": gradients_of(model), "weights": held["weights"],
    }  # fmt: skip


def observe_dropout(trial: Trial) -> list[SimpleNamespace]:
    n = trial.num_ranks
    config = small_config(trial, dropout=RATE, vocab_size=WORDS, n_embd=96)
    weights = weights_of(drawn_alike(GPT(GPTConfig(**config)), trial))
    idx, targets = (trial.tokens(WORDS, 2, 24) for _ in range(2))
    base = trial.integer(1, 10**6)
    kinds = {"the ranks share a seed": [base] * n, "each rank has a seed": [base + 10 * r for r in range(n)]}
    runs = [([(config, weights, seeds[r], idx, targets) for seeds in kinds.values()],) for r in range(n)]
    results = trial.run(dropout_probe, per_rank=runs)
    return [
        SimpleNamespace(
            name=name, config=config, weights=weights, idx=idx, targets=targets,
            results=[result[number] for result in results],
        )
        for number, name in enumerate(kinds)
    ]  # fmt: skip


@check("sequence_parallelize")
def residual_stream_has_this_ranks_tokens(trial: Trial) -> None:
    """What enters and leaves a block, and what its norms read, are s/n tokens."""
    for seen in trial.once(observe_dropout):
        stream_is_cut(trial, seen, seen.idx.numel() * seen.config["n_embd"] // trial.num_ranks)


@check("sequence_parallelize")
@by_group_rank
def dropout_differs_where_tokens_differ(trial: Trial) -> None:
    """Ranks drop different elements of their different tokens, also if they share a seed."""
    for seen in trial.once(observe_dropout):
        masks_differ(trial, seen.results, RATE, True, seen.name)


@check("sequence_parallelize")
@by_group_rank
def gradients_are_right_with_dropout(trial: Trial) -> None:
    """With dropout, loss and gradients are the dense model's with the same elements dropped."""
    for seen in trial.once(observe_dropout):
        dense = dense_model(seen.config, seen.weights)
        if not drop_as_seen(dense, dense.transformer.h, seen, RATE, True):
            continue
        loss = dense(seen.idx, seen.targets)[1]
        loss.backward()
        trial.close(
            f"the loss ({seen.name})",
            [result["losses"][0] for result in seen.results],
            loss.detach(),
            help="Where all ranks hold the same tokens, they must drop the same elements; where they "
            "hold their own, "
            "their own.",
        )
        seen.gradients = {name: p.grad for name, p in dense.named_parameters()}
        seen.own_tokens = {}
        block_gradients_are_right(trial, seen, "gradients", "", 1)
        for layer in range(seen.config["n_layer"]):
            attention_gradients_are_right(trial, seen, "gradients", f"transformer.h.{layer}.")
        table_gradients_are_right(trial, seen, "gradients", 1)


@check("sequence_parallelize")
def nothing_is_dropped_in_eval_mode(trial: Trial) -> None:
    """In eval mode the loss is the dense model's."""
    for seen in trial.once(observe_dropout):
        dense = dense_model(seen.config, seen.weights).eval()
        with torch.no_grad():
            expected = dense(seen.idx, seen.targets)[1]
        trial.close(f"the loss in eval mode ({seen.name})", each_rank(seen, "asleep"), expected)


@check("sequence_parallelize")
def bytes_alive_are_what_the_formula_says(trial: Trial) -> None:
    """With dropout no more is alive after the forward than 2 + 16/n times (b, s, h) a block, and the head."""
    for seen in trial.once(observe_dropout):
        (b, s), n, h = seen.idx.shape, trial.num_ranks, seen.config["n_embd"]
        layers, part = seen.config["n_layer"], 4 * b * s * h // n
        block = kept_bytes(seen.config, b, s, n, masks=True)
        logits = 4 * b * s * -(-WORDS // n)
        # The embedding's mask; the last norm's input and what the head reads; logits and loss; indices.
        rest = 2 * part + n * part + 6 * logits + 64 * b * s
        for rank, recording in enumerate(each_rank(seen, "recording")):
            alive, allowed = alive_before_backward(recording), layers * block + rest
            trial.require(
                alive <= allowed + layers * part // 2,
                f"{alive:,} bytes are alive after the forward: {allowed:,} are expected if the linear "
                "layers keep their "
                f"gathered inputs, {allowed - 2 * layers * (n - 1) * part:,} if they gather them again",
                help="Norms, masks and the stream have s/n tokens on a rank. What else is kept whole, "
                "(b, s, h)?",
                rank=rank,
            )
