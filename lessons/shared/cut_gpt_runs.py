"""Runs a GPT that a submission has cut over ranks, and the dense one beside it."""

import contextlib
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from grader.checks import BACKWARD, Trial
from nanogpt.model import GPT, GPTConfig

from .cut_gpt import dense_model, describe, drawn_weights, gradients_of, local, tied, train
from .evaluation import EVALUATED, LONGER, noted
from .passes import HALF, after_clearing


def dense_on(rank, config: dict, weights: dict) -> GPT:
    """On a rank: the dense model with the judge's weights."""
    model = GPT(GPTConfig(**config))
    model.load_state_dict(weights, strict=False)  # the tied table comes once
    return model.to(rank.device)


def built(
    rank, function: str, config: dict, weights: dict, probability_dropout: bool = True, awake: bool = True
) -> nn.Module:
    """On a rank: the dense model, in training mode if awake, given to the learner's function."""
    model = dense_on(rank, config, weights).train(awake)
    if not probability_dropout:
        for block in model.transformer.h:
            block.attn.core.dropout = 0.0
    return getattr(rank.submission, function)(model, rank.group)


def passes(
    rank, function: str, config: dict, weights: dict, idx: Tensor, targets: Tensor, twice: bool
) -> dict:
    """On a rank: one recorded step, what it left, perhaps further backwards, and the logits alone."""
    given = dense_on(rank, config, weights)
    model = getattr(rank.submission, function)(given, rank.group)
    with rank.record() as recording:
        logits, loss = model(idx, targets)
        recording.mark(BACKWARD)
        loss.backward()
    held = describe(model)
    if twice:
        (HALF * model(idx, targets)[1]).backward()
        held["twice"] = gradients_of(model)
        held |= after_clearing(model, lambda: model(idx, targets)[1].backward())
    in_training = local(model(idx)[0].detach())
    model.eval()
    in_evaluation = local(model(idx)[0].detach())
    if twice:
        model.zero_grad()
        with noted(EVALUATED):
            model(idx, targets)[1].backward()
        held["gradients in evaluation"] = gradients_of(model)
    with torch.no_grad():
        last, none = model(idx)
        quiet, quiet_loss = model(idx=idx, targets=targets)  # a forward hook sees no argument with a name
        with noted(LONGER):
            longer = model(*(torch.cat([x, x], 1) for x in (idx, targets)))[1]
    return {
        "loss": local(loss), "logits": local(logits), "last": local(last), "no_loss": none is None,
        "last in training": in_training, "last in evaluation": in_evaluation,
        "quiet": local(quiet), "quiet loss": local(quiet_loss), "longer": local(longer),
        "tied": tied(model), "given_back": model is given, "recording": recording, **held,
    }  # fmt: skip


def model_case(trial: Trial, name: str, config: dict, length: int) -> SimpleNamespace:
    """Weights, tokens and targets, of which some are ignored; and what the dense model makes of them."""
    weights = drawn_weights(trial, config)
    shape = (trial.integer(2, 3), length)
    idx, targets = (trial.tokens(config["vocab_size"], *shape) for _ in range(2))
    targets[0, : trial.integer(1, 3)] = -1
    dense = dense_model(config, weights)
    logits, loss = dense(idx, targets)
    loss.backward()
    gradients = {name: p.grad for name, p in dense.named_parameters()}
    with torch.no_grad():
        last, _ = dense(idx)
        longer = dense(*(torch.cat([x, x], 1) for x in (idx, targets)))[1]
    return SimpleNamespace(
        name=name, config=config, weights=weights, idx=idx, targets=targets, gradients=gradients,
        loss=loss.detach(), logits=logits.detach(), last=last, longer=longer,
    )  # fmt: skip


HOT, COLD = 100.0, 1e-8
"""Temperatures: every word is nearly as likely as the others, and the likeliest one alone."""


def sampling_probe(rank, function: str, config: dict, weights: dict, idx: Tensor, steps: int) -> dict:
    """What `generate` adds, greedily and sampled; logits and loss of a sequence that is a token shorter."""
    model = built(rank, function, config, weights).eval()
    found = {"greedy": model.generate(idx, steps, top_k=1), "shorter": None, "loss": None}
    rank.seed(7)
    found["sampled"], found["sampled next"] = (model.generate(idx, 2, temperature=HOT) for _ in range(2))
    found["cold"] = model.generate(idx, 1, temperature=COLD)
    with noted("generate was called with one prompt, (1, s)"):
        found["one prompt"] = model.generate(idx[:1], 1, top_k=1)
    with torch.no_grad(), contextlib.suppress(Exception):  # a length that does not divide may be refused
        found["shorter"] = local(model(idx[:, :-1])[0])
    with torch.no_grad(), contextlib.suppress(Exception):
        found["loss"] = local(model(idx[:, :-1], idx[:, 1:])[1])
    return found


def training_probe(rank, function: str, config: dict, weights: dict, batches: list) -> dict:
    """The losses of a few steps."""
    return {name: train(built(rank, function, config, weights), batches, name) for name in ("SGD", "AdamW")}
