"""Runs of the whole model: without dropout in two shapes, and with dropout under two kinds of seeds.

Four ranks on two cores spend most of it in small collectives, so a second layer, and a second backward, are
where they can show something.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from grader.checks import CheckEnded, Trial, parts
from lessons_shared.cut_gpt import dense_model, describe, drawn_weights, gradients_of, local, small_config
from lessons_shared.cut_gpt_runs import built, model_case, passes

from .masks import marked, watch
from .shared import FEWER, Dropped, Norms, mark_backward, run_on_tokens, tell_partial_use, used_parameters
from .slips import SUMMED_TWICE, gradients_summed_twice, own_token_gradients, with_biases_added_often

NAME = "sequence_parallelize"
RATE = 0.4
CUT_ASLEEP = "the ranks share a seed, and the model was in eval mode when it was cut"
WORDS = 12


def model_probe(rank, cases: list) -> list[dict]:
    return [passes(rank, NAME, *case, twice) for case, twice in cases]


def dropping_probe(rank, cases: list) -> list[dict]:
    return [one_dropping(rank, *case) for case in cases]


def model_use_probe(
    rank, frozen: list[str], config: dict, weights: dict, idx: Tensor, targets: Tensor
) -> list[str]:
    model = built(rank, NAME, config, weights)
    return used_parameters(model, lambda: model(idx, targets)[1], frozen)


def case_with_slips(trial: Trial, name: str, config: dict) -> SimpleNamespace:
    """A case of the dense model, and functions that tell what known slips would make of it."""
    n = trial.num_ranks
    case = model_case(trial, name, config, n * trial.integer(6 // n, 9 // n))
    idx, targets = case.idx, case.targets
    dense = dense_model(config, case.weights)

    def run_backward(model: nn.Module) -> dict[str, Tensor]:
        model(idx, targets)[1].backward()
        return {}

    def own_tokens() -> dict[str, list[Tensor]]:
        positions = case.gradients["transformer.wpe.weight"]
        places = parts(torch.arange(idx.size(1)), 0, n)
        by_rank = [torch.zeros_like(positions).index_copy(0, own, positions[own]) for own in places]
        return own_token_gradients(dense, n, run_backward) | {"transformer.wpe.weight": by_rank}

    case.biases_added_often = lambda: with_biases_added_often(dense, n)(idx, targets)[1].detach()
    case.summed_twice = cache(lambda: gradients_summed_twice(dense, list(SUMMED_TWICE), n, run_backward))
    case.own_tokens = cache(own_tokens)
    return case


def one_dropping(
    rank, config: dict, weights: dict, awake: bool, seed: int, in_full: bool, idx: Tensor, targets: Tensor
) -> dict:
    """What was dropped in two runs; in full also the first one's gradients, bytes alive, and eval mode."""
    rank.seed(seed)
    model = built(rank, NAME, config, weights, probability_dropout=False, awake=awake).train()
    rank.seed(seed + 1)
    runs, losses = [], []
    for _ in range(2):
        seen, hooks = watch(model.transformer.h)
        with Dropped() as dropped:
            loss = model(idx, targets)[1]
        if in_full and not runs:
            loss.backward()
        runs.append(seen)
        losses.append(local(loss.detach()))
        for hook in hooks:
            hook.remove()
        del loss
    if not in_full:
        return {"first": runs[0], "second": runs[1], "dropped": dropped.sizes}
    held = describe(model)
    with rank.record(memory=True) as recording:
        with Norms() as norms:
            logits, loss = model(idx, targets)
        mark_backward(recording)
    del logits, loss
    model.eval()
    with torch.no_grad():
        asleep = local(model(idx, targets)[1])
    return {
        "first": runs[0], "second": runs[1], "dropped": dropped.sizes, "losses": losses,
        "asleep": asleep, "recording": recording,
        "gradients": gradients_of(model), "weights": held["weights"], "normed": norms.sizes,
    }  # fmt: skip


def observe_model(trial: Trial) -> list[SimpleNamespace]:
    """Cases without dropout, with the ranks' results."""
    n = trial.num_ranks
    odd = 30 + trial.choice([1, 5, 7, 11])  # not divisible by any number of ranks
    few = n in FEWER
    cases = [case_with_slips(trial, "v divides", small_config(trial, bias=True, n_layer=2 if few else 1))]
    if trial.in_full or n == 3:
        uneven = small_config(trial, bias=False, vocab_size=odd, n_layer=1)
        cases.append(case_with_slips(trial, "v does not divide", uneven))
    given = [
        ((case.config, case.weights, case.idx, case.targets), few and case is cases[0]) for case in cases
    ]
    return with_results(trial, cases, model_probe, [given] * n)


def observe_dropping(trial: Trial) -> list[SimpleNamespace]:
    """Cases with dropout, with the ranks' results; the first was run in full."""
    n = trial.num_ranks
    config = small_config(trial, dropout=RATE, vocab_size=WORDS, n_layer=1, n_embd=96)
    weights = marked(drawn_weights(trial, config))
    idx, targets = (trial.tokens(WORDS, 2, 24) for _ in range(2))
    base = trial.integer(1, 10**6)
    kinds = {"with dropout, each rank seeded by itself": [base + 10 * r for r in range(n)]}
    if trial.in_full:
        kinds[CUT_ASLEEP] = [base] * n
    cases = [
        SimpleNamespace(name=name, config=config, weights=weights, idx=idx, targets=targets) for name in kinds
    ]
    if trial.in_full:  # two layers, whose dropouts differ; the gradients are looked at in the first case
        deeper = {**config, "n_layer": 2}
        cases[-1].config, cases[-1].weights = deeper, marked(drawn_weights(trial, deeper))
    given = [
        [
            (
                case.config,
                case.weights,
                case.name != CUT_ASLEEP,
                kinds[case.name][r],
                number == 0,
                idx,
                targets,
            )
            for number, case in enumerate(cases)
        ]
        for r in range(n)
    ]
    return with_results(trial, cases, dropping_probe, given)


def with_results(
    trial: Trial, cases: list[SimpleNamespace], probe: Callable, given: list[list]
) -> list[SimpleNamespace]:
    """The cases, with what each rank made of them."""
    try:
        results = run_on_tokens(trial, probe, [(mine,) for mine in given])
    except CheckEnded as end:
        first = cases[0]
        alone = (first.config, first.weights, first.idx, first.targets)
        tell_partial_use(trial, end, model_use_probe, [alone] * trial.num_ranks)
        raise
    for number, case in enumerate(cases):
        case.results = [result[number] for result in results]
    return cases
