"""What the two branches of a block have in common: the cases, the run, dropout, communication."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import (
    BACKWARD,
    Trial,
    backward,
    drawn_alike,
    each_rank,
    weights_of,
)
from lessons_shared.cut_gpt import (
    describe,
    small_config,
)
from lessons_shared.evaluation import evaluates_alike, in_evaluation, later_is_right, twice_as_long
from lessons_shared.refusals import refusal_of
from nanogpt.model import MLP, CausalSelfAttention, GPTConfig

from .shared import one_all_reduce

BRANCH = {
    "tensor_parallel_mlp": (MLP, "c_fc", "dropout"),
    "tensor_parallel_attention": (CausalSelfAttention, "c_attn", "resid_dropout"),
}


def branch_probe(rank, name: str, cases: list) -> list[dict]:
    return [one_branch(rank, name, *case) for case in cases]


def one_branch(rank, name: str, config: dict, weights: dict, x: Tensor, upstream: Tensor) -> dict:
    given = BRANCH[name][0](GPTConfig(**config))
    given.load_state_dict(weights)
    branch = getattr(rank.submission, name)(given.to(rank.device), rank.group)
    x = x.clone().requires_grad_()
    with rank.record() as recording:
        y = branch(x)
        recording.mark(BACKWARD)
        backward(y, upstream)
    return {
        "output": y,
        "gradient": x.grad,
        "recording": recording,
        "given_back": branch is given,
        **describe(branch),
        "evaluation": in_evaluation(branch, x, upstream),
        "longer": twice_as_long(branch, x),
    }


def dense_branch(branch: nn.Module, x: Tensor, upstream: Tensor) -> SimpleNamespace:
    branch, x = copy.deepcopy(branch).double(), x.double().requires_grad_()
    y = branch(x)
    y.backward(upstream.double())
    gradients = {name: p.grad for name, p in branch.named_parameters()}
    return SimpleNamespace(output=y.detach(), x=x.grad, gradients=gradients)


def observe_branch(name: str):
    def observe(trial: Trial) -> dict[str, SimpleNamespace]:
        seen = {
            "with bias": branch_case(trial, name, bias=True),
            "without bias": branch_case(trial, name, bias=False),
        }
        run_cases(trial, name, list(seen.values()))
        return seen

    return observe


def run_cases(trial: Trial, name: str, cases: list[SimpleNamespace]) -> None:
    """Give each case its results, by rank."""
    given = [(case.config, case.weights, case.x, case.upstream) for case in cases]
    results = trial.run(branch_probe, name, given)
    for number, case in enumerate(cases):
        case.results = [result[number] for result in results]


def branch_case(trial: Trial, name: str, **changes: Any) -> SimpleNamespace:
    config = small_config(trial, **changes)
    branch = drawn_alike(BRANCH[name][0](GPTConfig(**config)), trial)
    shape = (trial.integer(2, 3), trial.integer(3, 7), config["n_embd"])
    x, upstream = trial.normal(*shape), trial.normal(*shape)
    dense = dense_branch(branch, x, upstream)
    dense.longer = twice_as_long(copy.deepcopy(branch).double(), x.double())
    return SimpleNamespace(dense=dense, weights=weights_of(branch), x=x, upstream=upstream, config=config)


BRANCHES = {name: observe_branch(name) for name in BRANCH}


def branch_output(trial: Trial, name: str, partial) -> None:
    n = trial.num_ranks
    for kind, seen in trial.once(BRANCHES[name]).items():
        bias = seen.weights.get("c_proj.bias")
        alternatives = partial(seen)
        if bias is not None:
            alternatives |= {
                "the bias of c_proj was added n times": seen.dense.output + (n - 1) * bias,
                "without the bias of c_proj": seen.dense.output - bias,
            }
        trial.close(
            f"the output ({kind})", each_rank(seen, "output"), seen.dense.output, alternatives=alternatives
        )
        later_is_right(trial, f"the output ({kind})", each_rank(seen, "longer"), seen.dense.longer)


def branch_in_evaluation(trial: Trial, name: str) -> None:
    for kind, seen in trial.once(BRANCHES[name]).items():
        evaluates_alike(trial, seen.results, kind)


def branch_communication(trial: Trial, name: str) -> None:
    for seen in trial.once(BRANCHES[name]).values():
        num_bytes = seen.x.numel() * 4
        help = "c_fc or c_attn stays cut (gather nothing), c_proj takes it cut and sums once."
        one_all_reduce(trial, seen, "", num_bytes, help)
        one_all_reduce(trial, seen, BACKWARD, num_bytes, "Only the gradient of x is summed, once.")


def branch_dropout_probe(rank, name: str, config: dict, weights: dict, x: Tensor, seed: int) -> dict:
    branch = BRANCH[name][0](GPTConfig(**config))
    branch.load_state_dict(weights)
    late = copy.deepcopy(branch).to(rank.device).eval()
    branch.to(rank.device).train()
    rank.seed(seed)
    branch, late = (getattr(rank.submission, name)(each, rank.group) for each in (branch, late))
    rank.seed(seed + 1)
    outputs = [branch(x), branch(x), late.train()(x)]
    getattr(branch, BRANCH[name][2], nn.Identity()).eval()  # what is left of dropout is before the sum
    before_the_sum = [branch(x), branch(x)]
    return {"outputs": outputs, "before the sum": before_the_sum, "asleep": branch.eval()(x)}


def branch_dropout(trial: Trial, name: str) -> list[dict]:
    """What the dropout after the sum does; returns the ranks' results."""
    config = small_config(trial, dropout=0.4)
    branch = drawn_alike(BRANCH[name][0](GPTConfig(**config)), trial)
    x = trial.normal(3, 5, config["n_embd"])
    base = trial.integer(1, 10**6)
    runs = [(name, config, weights_of(branch), x, base + 10 * rank) for rank in range(trial.num_ranks)]
    results = trial.run(branch_dropout_probe, per_rank=runs)
    for rank, result in enumerate(results):
        for number in range(3):
            trial.require(
                torch.equal(result["outputs"][number] == 0, results[0]["outputs"][number] == 0),
                f"ranks 0 and {rank} dropped different elements of the output, which is the same on both",
                help="The ranks are seeded differently here. share_dropout makes their masks agree."
                if number < 2
                else "A dropout in eval mode may train later: p alone says whether it must be shared.",
                rank=rank,
                cause=""
                if number < 2
                else "it was in eval mode when it was cut; one that was in training mode is right",
            )
        first, second, _ = result["outputs"]
        dropped = (first == 0).double().mean().item()
        trial.require(
            dropped < 0.1 or not torch.equal(first == 0, second == 0),
            "two calls in training mode dropped the same elements of the output",
            help="Seed a generator once, when the dropout is shared: each call draws on from there.",
            rank=rank,
        )
        bias_alone = ((first - branch.c_proj.bias.detach()).abs() < 1e-6).double().mean().item()
        trial.require(
            0.1 < dropped < 0.8,
            "the output was not dropped at random in training mode",
            help=f"{BRANCH[name][2]} belongs after c_proj and its bias, as in the dense one.",
            rank=rank,
            cause="of what is dropped c_proj's bias is left: it is added after the dropout"
            if 0.1 < bias_alone < 0.8
            else "",
        )
    dense = copy.deepcopy(branch).double().eval()(x.double()).detach()
    trial.close("the output in eval mode", [r["asleep"] for r in results], dense)
    return results


def branch_refusal_probe(rank, name: str, config: dict) -> dict:
    branch = BRANCH[name][0](GPTConfig(**config))
    return refusal_of(getattr(rank.submission, name), branch, rank.group)
