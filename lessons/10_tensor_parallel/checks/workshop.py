"""The workshop's exercise: an edited copy of nanogpt/model.py."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import (
    BACKWARD,
    Trial,
    check,
    drawn_alike,
    each_rank,
    exercise,
    storage_bytes,
    told,
    weights_of,
)
from lessons_shared.cut_gpt import cut_dim, dense_model, describe, own_part, small_config
from lessons_shared.wire import wire_bytes
from nanogpt.model import GPT, GPTConfig

from .shared import PADDING
from .starts import is_drawn, is_zero, no_twins

exercise(
    "GPT",
    optional=True,
    subgroup=True,
    hints=(
        "Follow the group: GPT(config, group) to Block(config, group) to MLP(config, group).",
        "group=None must still be the dense model. In MLP, pick the class of the two linear layers by it.",
        "GPT._init_weights looks for nn.Linear: are your parallel layers one? And are slices that are drawn "
        "from one seed on all ranks different slices?",
    ),
)


def workshop_probe(rank, config: dict, weights: dict, idx: Tensor, targets: Tensor, seed: int) -> dict:
    model_class = rank.submission.GPT
    dense = model_class(GPTConfig(**config))
    dense_shapes = {name: list(p.shape) for name, p in dense.named_parameters()}
    rank.seed(seed)  # the same on every rank
    model = model_class(GPTConfig(**config), rank.group).to(rank.device)
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    held = {name: storage_bytes([p]) for name, p in model.named_parameters()}
    fits = all(list(weights[name].shape) == shape for name, shape in shapes.items() if name in weights)
    answer = {"shapes": shapes, "dense_shapes": dense_shapes, "initial": initial, "held": held, "fits": fits}
    if not fits or any(name not in weights for name in shapes):
        return answer
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    with rank.record() as recording:
        _, loss = model(idx, targets)
        recording.mark(BACKWARD)
        loss.backward()
    return answer | {"loss": loss, "recording": recording, **describe(model)}


def observe_workshop(trial: Trial) -> SimpleNamespace:
    n = trial.num_ranks
    config = small_config(trial)
    model = drawn_alike(GPT(GPTConfig(**config)), trial)
    weights = weights_of(model)

    def cut(name: str, whole: Tensor, rank: int) -> Tensor:
        dim = cut_dim(name) if ".mlp." in name else None
        return whole if dim is None else own_part(whole, dim, rank, n).contiguous()

    shards = [{name: cut(name, w, rank) for name, w in weights.items()} for rank in range(n)]
    idx, targets = (trial.tokens(config["vocab_size"], 2, 7) for _ in range(2))
    seed = trial.seed()
    results = trial.run(workshop_probe, per_rank=[(config, shard, idx, targets, seed) for shard in shards])
    dense = dense_model(config, weights)
    loss = dense(idx, targets)[1]
    loss.backward()
    gradients = {name: [cut(name, p.grad, rank) for rank in range(n)] for name, p in dense.named_parameters()}
    alternatives = {
        f"the bias of c_proj was added {times}": workshop_loss(config, weights, idx, targets, factor)
        for times, factor in (("n times, by each rank before the sum", n), ("never", 0))
    }
    alternatives["nothing was summed over the ranks: each has its partial sum"] = [
        workshop_loss(config, weights, idx, targets, 1, own=(rank, n)) for rank in range(n)
    ]
    return SimpleNamespace(
        results=results, config=config, shards=shards, loss=loss.detach(), gradients=gradients, idx=idx,
        alternatives=alternatives,
    )  # fmt: skip


def workshop_loss(
    config: dict, weights: dict, idx: Tensor, targets: Tensor, bias_factor: int, own: tuple = (0, 1)
) -> Tensor:
    """The dense loss, with c_proj's bias that many times, and with one rank's hidden features alone."""
    changed = dict(weights)
    for name, weight in weights.items():
        if name.endswith("mlp.c_proj.bias"):
            changed[name] = bias_factor * weight
        if name.endswith("mlp.c_proj.weight"):
            rank, n = own
            mask = (
                torch.zeros(n).index_fill(0, torch.tensor(rank), 1.0).repeat_interleave(weight.size(1) // n)
            )
            changed[name] = weight * mask
    return dense_model(config, changed)(idx, targets)[1].detach()


@check("GPT")
def mlps_are_cut(trial: Trial) -> None:
    """Given a group, every MLP holds this rank's shards, and nothing else changed its shape or name."""
    seen = trial.once(observe_workshop)
    for rank, result in enumerate(seen.results):
        names = set(seen.shards[rank])
        trial.require(
            set(result["shapes"]) == names,
            f"the parameters' names changed: {', '.join(sorted(set(result['shapes']) ^ names)[:4])}",
            help="The layers keep their attributes: mlp.c_fc and mlp.c_proj, each with weight and bias.",
            rank=rank,
        )
        for name, shape in result["shapes"].items():
            expected = list(seen.shards[rank][name].shape)
            trial.require(
                shape == expected,
                f"{name} is {tuple(shape)} on this rank, where {tuple(expected)} is expected",
                help="c_fc is cut by output features, c_proj by input features; hand the group down to them.",
                rank=rank,
            )
            own = math.prod(shape) * 4
            trial.require(
                result["held"][name] <= own, f"{name} is a view that keeps the whole alive", rank=rank
            )


@check("GPT")
def dense_model_is_still_there(trial: Trial) -> None:
    """Without a group it is the dense model."""
    seen = trial.once(observe_workshop)
    dense = {name: list(p.shape) for name, p in GPT(GPTConfig(**seen.config)).named_parameters()}
    for rank, result in enumerate(seen.results):
        trial.require(
            result["dense_shapes"] == dense,
            "GPT(config) has other parameters than the dense model",
            rank=rank,
        )


def ran(trial: Trial) -> SimpleNamespace:
    """The observation, if the parameters could be filled and the model ran."""
    seen = trial.once(observe_workshop)
    if any("loss" not in result for result in seen.results):
        trial.wrong("the parameters do not have the shapes of shards, so the model was not run (see above)")
    return seen


@check("GPT")
def edited_models_loss_is_the_dense_one(trial: Trial) -> None:
    """The loss is the dense model's on every rank."""
    seen = ran(trial)
    trial.close("the loss", each_rank(seen, "loss"), seen.loss, alternatives=seen.alternatives)


@check("GPT")
def edited_models_gradients_are_the_dense_ones(trial: Trial) -> None:
    """Every gradient is complete, and the same on every rank where the parameter is replicated."""
    seen = ran(trial)
    n = trial.num_ranks
    for name, expected in seen.gradients.items():
        trial.close(
            f"the gradient of {name}",
            [g.get(name) for g in each_rank(seen, "gradients")],
            expected,
            alternatives={"n times too large: a sum too many": [n * g for g in expected]},
            help="Partial gradients below an MLP come from a c_fc that does not sum its input's gradient.",
        )


@check("GPT")
def edited_model_sums_once_a_block_each_way(trial: Trial) -> None:
    """Each MLP costs one all-reduce of b·s·h forward and one backward, and nothing else travels."""
    seen = ran(trial)
    n, layers = trial.num_ranks, seen.config["n_layer"]
    one = 2 * (n - 1) / n * seen.idx.numel() * seen.config["n_embd"] * 4
    for rank, recording in enumerate(each_rank(seen, "recording")):
        for stretch in ("", BACKWARD):
            events = recording.select(None, stretch)
            trial.require(
                wire_bytes(events, n) <= layers * one + PADDING * n * layers,
                f"the {'backward' if stretch else 'forward'} sent {told(events)}, where {layers} all-reduces "
                "of b·s·h belong",
                rank=rank,
            )
            trial.require(
                n == 1 or bool(events),
                f"the {'backward' if stretch else 'forward'} communicated nothing",
                rank=rank,
            )


@check("GPT")
def edited_model_starts_at_random(trial: Trial) -> None:
    """Seeded alike, the ranks start with different slices as small as GPT-2's, and are the same elsewhere."""
    seen = trial.once(observe_workshop)
    starts = each_rank(seen, "initial")
    deviations = {"mlp.c_fc.weight": 0.02, "mlp.c_proj.weight": 0.02 / math.sqrt(2 * seen.config["n_layer"])}
    for name in starts[0]:
        weights = [start[name] for start in starts]
        if (end := next((end for end in deviations if name.endswith(end)), None)) is not None:
            in_features = seen.config["n_embd"] * (4 if "c_proj" in name else 1)
            is_drawn(trial, f"the start of {name}", weights, deviations[end], in_features)
            no_twins(trial, f"the start of {name}", weights)
            continue
        if ".mlp." in name:
            is_zero(trial, f"the start of {name}", weights, weights[0].numel())
        for rank, weight in enumerate(weights):
            trial.require(
                torch.equal(weight, weights[0]),
                f"{name} is the same on every rank in a dense layer, and starts with other numbers here",
                help="Ranks that were seeded alike draw alike as long as all take as many numbers, and none "
                "seeds anew: draw whole matrices, and keep slices.",
                rank=rank,
            )
