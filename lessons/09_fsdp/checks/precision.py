"""Checks of `FullySharded`: dtypes of its own for gathered weights and for sums of gradients."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from grader.checks import Recording, Trial, check
from grader.checks import told as told_events

from .fully_sharded import dtypes_of, evaluate, full
from .models import SHORT, build, bytes_of, seeds, short_gpt, weights
from .runs import run
from .wire import SMALL, travelled

SETTINGS = {
    "param_dtype": {"param_dtype": torch.bfloat16},
    "both": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}
ALONE = {"reduce_dtype": torch.bfloat16}
RANKS = (3, 2)
"""By three a bfloat16 number does not divide without rounding."""
REDUCTIONS = ("reduce_scatter", "all_reduce", "reduce")
TOLD = {
    "param_dtype": "with param_dtype=bfloat16",
    "both": "with param_dtype=bfloat16 and reduce_dtype=float32",
}


def step_in(rank: Any, seed: int, how: str, tokens: Tensor, targets: Tensor) -> dict:
    """A step of SGD on a float32 model with dtypes of its own."""
    model = build(short_gpt, seed).to(rank.device)
    sharded = rank.submission.FullySharded(model, rank.group, **SETTINGS[how])
    start = full(sharded)
    optimizer = SGD(sharded.parameters(), lr=1.0)
    with rank.record() as recording:
        recording.mark("forward")
        logits, loss = sharded(tokens, targets)
        recording.mark("backward")
        loss.backward()
    result = {
        "start": start,
        "shards": dtypes_of(sharded.parameters()),
        "gradients": dtypes_of(p.grad for p in sharded.parameters() if p.grad is not None),
        "logits": str(logits.dtype),
        "loss": loss.detach().float(),
        "recording": recording,
    }
    optimizer.step()
    result["end"] = full(sharded)
    result["later loss"] = evaluate(sharded, tokens, targets)[1].float()
    return result


def reduce_alone(rank: Any, seed: int, tokens: Tensor, targets: Tensor) -> Recording:
    """What a backward of a float32 model sends with a reduce_dtype alone."""
    sharded = rank.submission.FullySharded(build(short_gpt, seed).to(rank.device), rank.group, **ALONE)
    loss = sharded(tokens, targets)[1]
    with rank.record() as recording:
        loss.backward()
    return recording


def observe(trial: Trial) -> SimpleNamespace:
    numbers = seeds(trial)
    data = [(trial.tokens(SHORT.vocab_size, 2, 4), trial.tokens(SHORT.vocab_size, 2, 4)) for _ in numbers]
    results = {
        how: run(trial, step_in, per_rank=[(s, how, *d) for s, d in zip(numbers, data, strict=True)])
        for how in SETTINGS
    }
    alone = run(trial, reduce_alone, per_rank=[(numbers[0], *batch) for batch in data])
    gradients, losses = [], []
    for batch in data:
        model = build(short_gpt, numbers[0]).to(torch.bfloat16)
        loss = model(*batch)[1]
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.float() for name, p in model.named_parameters()})
    mean = {name: sum(each[name] for each in gradients) / len(gradients) for name in gradients[0]}
    model = build(short_gpt, numbers[0])

    def loss_of(state: dict[str, Tensor], rank: int) -> float:
        """Of a bfloat16 model with these weights, on this rank's batch."""
        other = build(short_gpt, 0)
        other.load_state_dict(state)
        with torch.no_grad():
            return other.to(torch.bfloat16)(*data[rank])[1].item()

    return SimpleNamespace(
        results=results,
        alone=alone,
        model=model,
        start=weights(model),
        mean=mean,
        losses=losses,
        loss_of=loss_of,
    )


@check("FullySharded", first_of=RANKS)
def masters_keep_their_dtype(trial: Trial) -> None:
    """With param_dtype=bfloat16, shards, their gradients and full_state_dict() stay float32, not rounded."""
    seen = trial.once(observe)
    for how, results in seen.results.items():
        for r, result in enumerate(results):
            for what, found in (
                ("the shards", result["shards"]),
                ("their .grad", result["gradients"]),
                ("the weights of full_state_dict()", dtypes_of(result["start"].values())),
            ):
                trial.require(
                    found == ["torch.float32"],
                    f"{TOLD[how]}, {what} of a float32 model are in {', '.join(found)}",
                    help="Only what is gathered is bfloat16; the optimizer works on the shards.",
                    rank=r,
                )
    for name, expected in seen.start.items():
        trial.close(
            f"{name} in full_state_dict(), with param_dtype=bfloat16",
            [result["start"].get(name) for result in seen.results["both"]],
            expected,
            alternatives={"it was rounded to bfloat16": expected.to(torch.bfloat16).float()},
            help="Gather the shards as they are: in their own dtype.",
        )


@check("FullySharded", first_of=RANKS)
def blocks_compute_in_param_dtype(trial: Trial) -> None:
    """With param_dtype=bfloat16, logits are bfloat16, and loss and step near those of a bfloat16 model."""
    seen = trial.once(observe)
    for how, results in seen.results.items():
        for r, result in enumerate(results):
            trial.require(
                result["logits"] == "torch.bfloat16",
                f"{TOLD[how]}, the logits are in {result['logits']}",
                help="The module computes with what was gathered.",
                rank=r,
            )
            off = abs(result["loss"].item() - seen.losses[r]) / seen.losses[r]
            trial.require(off < 0.02, f"{TOLD[how]}, the loss is off by {off:.0%}", rank=r)
            moved, mean = (
                torch.cat([each[name].flatten() for name in seen.mean])
                for each in (
                    {name: seen.start[name] - result["end"][name] for name in seen.mean},
                    seen.mean,
                )
            )
            off = float((moved - mean).norm() / mean.norm())
            trial.require(
                off < 0.05,
                f"{TOLD[how]}, a step of SGD is off by {off:.0%} of its length",
                help="The mean of the ranks' gradients goes into the shards' .grad, in the shards' dtype.",
                rank=r,
                cause="the shards did not move" if float(moved.norm()) == 0.0 else "",
            )
            later, expected = result["later loss"].item(), seen.loss_of(result["end"], r)
            trial.require(
                abs(later - expected) < 0.01 * expected,
                f"{TOLD[how]}, after a step of SGD the loss is {later:.3f}, and of the weights in "
                f"full_state_dict() it is {expected:.3f}",
                help="The optimizer writes into the float32 shards: cast them each time that you send them.",
                rank=r,
                cause="it is the loss of before: blocks compute with the weights that they began with"
                if abs(later - result["loss"].item()) < 1e-3 * later
                else "",
            )


@check("FullySharded", first_of=RANKS)
def each_travels_in_its_dtype(trial: Trial) -> None:
    """Weights travel in param_dtype, gradients in reduce_dtype, or else in the dtype of the computation."""
    seen, n = trial.once(observe), trial.num_ranks
    size, outside = bytes_of(seen.model), bytes_of(seen.model) - bytes_of(seen.model.transformer.h)
    for how, results in seen.results.items():
        reduced_in = 4 if how == "both" else 2
        for r, result in enumerate(results):
            recording = result["recording"]
            forward, backward = (travelled(recording, n, after=when) for when in ("forward", "backward"))
            weights_sent, most = forward.gathered + forward.others, 1.15 * size / 2 + outside + SMALL
            trial.require(
                0.5 * size / 2 <= weights_sent <= most,
                f"{TOLD[how]}, {weights_sent:,} bytes of weights travelled in forward: the float32 model "
                f"has {size:,}",
                help="Cast a shard before it is sent: half the bytes.",
                rank=r,
                cause="they travelled in float32" if weights_sent > most else "",
            )
            sent = backward.reduced + backward.all_reduced
            expected = size * reduced_in / 4
            trial.require(
                backward.others > 0 or 0.8 * expected <= sent <= 1.3 * expected + outside + SMALL,
                f"{TOLD[how]}, {sent:,} bytes of gradients were reduced, and {expected:,.0f} are due",
                help="gradient.to(reduce_dtype) before the reduce-scatter; without one, as it is.",
                rank=r,
            )
            reduced = [e for kind in REDUCTIONS for e in recording.select(kind, "backward")]
            narrow = [e for e in reduced if e.dtype == "bfloat16"]
            trial.require(
                how != "both" or not narrow,
                f"{TOLD[how]}, backward sends {told_events(narrow)}: {reduced_in} bytes a number are due",
                help="Every unit is told reduce_dtype, that of what lies outside the blocks, too.",
                rank=r,
                cause=f"{len(narrow)} of {len(reduced)} reductions are in bfloat16",
            )
    for r, recording in enumerate(seen.alone):
        reduced = [e for kind in REDUCTIONS for e in recording.select(kind)]
        wide = [e for e in reduced if e.dtype != "bfloat16" and e.num_bytes > SMALL]
        trial.require(
            not wide,
            f"with reduce_dtype=bfloat16 alone, backward sends {told_events(wide)}: 2 bytes a number are due",
            help="gradient.to(reduce_dtype) before the reduce-scatter, whether param_dtype is given or not.",
            rank=r,
            cause="with param_dtype given as well, gradients are summed in reduce_dtype",
        )
