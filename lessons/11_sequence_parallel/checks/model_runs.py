"""One run of the whole model: without dropout in two shapes, and with dropout under two kinds of seeds."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from grader.checks import BACKWARD, Trial, drawn_alike, parts, weights_of
from nanogpt.model import GPT, GPTConfig

from .masks import watch
from .shared import (
    SUMMED_TWICE,
    describe,
    gradients_of,
    gradients_summed_twice,
    local,
    mark_backward,
    own_token_gradients,
    run_on_tokens,
    small_config,
    with_biases_added_often,
)

RATE = 0.4
WORDS = 12


def model_probe(rank, plain: list, dropping: list) -> dict:
    return {
        "plain": [one_model(rank, *case) for case in plain],
        "dropping": [one_dropping(rank, *case) for case in dropping],
    }


def built(rank, config: dict, weights: dict, drop_probabilities: bool = True) -> nn.Module:
    """On a rank: the dense model with the judge's weights, given to the learner's function."""
    model = GPT(GPTConfig(**config))
    model.load_state_dict(weights, strict=False)  # the tied table comes once
    if not drop_probabilities:
        for block in model.transformer.h:
            block.attn.core.dropout = 0.0
    return rank.submission.sequence_parallelize(model.to(rank.device), rank.group)


def one_model(rank, config: dict, weights: dict, idx: Tensor, targets: Tensor) -> dict:
    model = built(rank, config, weights)
    with rank.record() as recording:
        logits, loss = model(idx, targets)
        recording.mark(BACKWARD)
        loss.backward()
    held = describe(model)
    model(idx, targets)[1].backward()
    twice = gradients_of(model)
    model.eval()
    with torch.no_grad():
        last, none = model(idx)
    named = dict(model.named_parameters(remove_duplicate=False))
    head, table = named.get("lm_head.weight"), named.get("transformer.wte.weight")
    tied = head is not None and table is not None and local(head).data_ptr() == local(table).data_ptr()
    return {
        "loss": local(loss), "logits": local(logits), "last": local(last), "no_loss": none is None,
        "tied": tied, "twice": twice, "recording": recording, **held,
    }  # fmt: skip


def dense_model(config: dict, weights: dict) -> GPT:
    model = GPT(GPTConfig(**config))
    model.load_state_dict(weights, strict=False)
    return model.double()


def model_case(trial: Trial, name: str, config: dict) -> SimpleNamespace:
    n = trial.num_ranks
    weights = weights_of(drawn_alike(GPT(GPTConfig(**config)), trial))
    shape = (trial.integer(2, 3), n * trial.integer(6 // n, 9 // n))
    idx, targets = trial.tokens(config["vocab_size"], *shape), trial.tokens(config["vocab_size"], *shape)
    targets[0, : trial.integer(1, 3)] = -1
    dense = dense_model(config, weights)

    def run_backward(model: nn.Module) -> dict[str, Tensor]:
        model(idx, targets)[1].backward()
        return {}

    summed_twice = gradients_summed_twice(dense, list(SUMMED_TWICE), n, run_backward)
    with torch.no_grad():
        _, biases_added_often = with_biases_added_often(dense, n)(idx, targets)
    own_tokens = own_token_gradients(dense, n)
    logits, loss = dense(idx, targets)
    loss.backward()
    gradients = {name: p.grad for name, p in dense.named_parameters()}
    positions = gradients["transformer.wpe.weight"]
    places = parts(torch.arange(shape[1]), 0, n)
    own_tokens["transformer.wpe.weight"] = [
        torch.zeros_like(positions).index_copy(0, own, positions[own]) for own in places
    ]
    with torch.no_grad():
        last, _ = dense(idx)
    return SimpleNamespace(
        name=name, config=config, weights=weights, idx=idx, targets=targets, gradients=gradients,
        own_tokens=own_tokens, summed_twice=summed_twice, biases_added_often=biases_added_often,
        loss=loss.detach(), logits=logits.detach(), last=last,
    )  # fmt: skip


def one_dropping(
    rank, config: dict, weights: dict, seed: int, in_full: bool, idx: Tensor, targets: Tensor
) -> dict:
    """What was dropped in two runs; in full also the first one's gradients, bytes alive, and eval mode."""
    rank.seed(seed)
    model = built(rank, config, weights, drop_probabilities=False).train()
    rank.seed(seed + 1)
    runs, losses = [], []
    for _ in range(2):
        seen, hooks = watch(model.transformer.h)
        loss = model(idx, targets)[1]
        if in_full and not runs:
            loss.backward()
        runs.append(seen)
        losses.append(local(loss.detach()))
        for hook in hooks:
            hook.remove()
        del loss
    if not in_full:
        return {"first": runs[0], "second": runs[1]}
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


def observe_model(trial: Trial) -> SimpleNamespace:
    """`plain` and `dropping`: cases with the ranks' results; the first that drops was run in full."""
    n = trial.num_ranks
    odd = 30 + trial.choice([1, 5, 7, 11])  # divides by no number of ranks
    plain = [
        model_case(trial, "v divides", small_config(trial, bias=True)),
        model_case(trial, "v does not divide", small_config(trial, bias=False, vocab_size=odd, n_layer=1)),
    ]
    config = small_config(trial, dropout=RATE, vocab_size=WORDS, n_embd=96)
    weights = weights_of(drawn_alike(GPT(GPTConfig(**config)), trial))
    idx, targets = (trial.tokens(WORDS, 2, 24) for _ in range(2))
    base = trial.integer(1, 10**6)
    kinds = {"each rank has a seed": [base + 10 * r for r in range(n)], "the ranks share a seed": [base] * n}
    dropping = [
        SimpleNamespace(name=name, config=config, weights=weights, idx=idx, targets=targets) for name in kinds
    ]
    given = [(case.config, case.weights, case.idx, case.targets) for case in plain]
    runs = [
        (
            given,
            [
                (config, weights, seeds[r], number == 0, idx, targets)
                for number, seeds in enumerate(kinds.values())
            ],
        )
        for r in range(n)
    ]
    results = run_on_tokens(trial, model_probe, runs)
    for name, cases in (("plain", plain), ("dropping", dropping)):
        for number, case in enumerate(cases):
            case.results = [result[name][number] for result in results]
    return SimpleNamespace(plain=plain, dropping=dropping)
