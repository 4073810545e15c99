"""Checks of `context_parallelize` at work: with dropout, in training, and when it samples."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from grader.checks import Fault, Trial, check
from nanogpt.model import Dropout

from .model import observe, refusals
from .model_losses import built, dense, drawn, small_config, uneven
from .shared import Watch


def dropout_probe(rank, sizes: dict, weights: dict, idx: Tensor, targets: Tensor) -> Tensor:
    model = built(sizes, weights).to(rank.device)
    model = rank.submission.context_parallelize(model, rank.group).train()
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
    return model(idx, targets)[1].detach()


@check("context_parallelize", world_sizes=(2, 1), subgroup=False)
def attention_probabilities_are_not_dropped(trial: Trial) -> None:
    """In training mode with dropout, attention's probabilities are left whole."""
    sizes = small_config(trial, dropout=0.4)
    weights = drawn(trial, sizes)
    idx, targets = (trial.tokens(sizes["vocab_size"], 2, sizes["length"]) for _ in range(2))
    trial.close(
        "the loss in training mode, with all other dropouts set to 0,",
        trial.run(dropout_probe, sizes, weights, idx, targets),
        dense({**sizes, "dropout": 0.0}, weights, idx, targets)[0],
        help="Ring attention recomputes its weights in backward, and would have to draw the same mask again.",
    )


KINDS = ("transformer.drop", "attn.resid_dropout", "mlp.dropout")
"""GPT's dropouts outside the attention core, by the ends of their names."""
NONE = "none of them"


def one_dropout_probe(rank, sizes: dict, weights: dict, idx: Tensor, targets: Tensor, kinds: tuple) -> dict:
    """Loss with the dropouts of one kind alone, by kind, and with none of them."""
    losses = {}
    for kind in (*kinds, NONE):
        model = rank.submission.context_parallelize(built(sizes, weights).to(rank.device), rank.group).train()
        for name, module in model.named_modules():
            if isinstance(module, Dropout) and not name.endswith(kind):
                module.p = 0.0
        losses[kind] = model(idx, targets)[1].detach()
    return losses


@check("context_parallelize", world_sizes=(2,), subgroup=False)
def other_dropouts_stay_on(trial: Trial) -> None:
    """In training mode each of the other dropouts drops: after the embeddings, the attention, the MLP."""
    sizes = small_config(trial, dropout=0.4)
    weights = drawn(trial, sizes)
    idx, targets = (trial.tokens(sizes["vocab_size"], 2, sizes["length"]) for _ in range(2))
    for r, losses in enumerate(trial.run(one_dropout_probe, sizes, weights, idx, targets, KINDS)):
        for kind in KINDS:
            trial.require(
                not torch.equal(losses[kind], losses[NONE]),  # close they may be: a loss is a mean
                f"with dropout=0.4 in {kind} alone, the loss in training mode is the one without dropout",
                help="Replace the attention's core, and leave the model's dropouts as they are.",
                rank=r,
            )


def training_probe(rank, sizes: dict, weights: dict, batches: list) -> dict:
    def parallel() -> nn.Module:
        model = built(sizes, weights, torch.float64).to(rank.device)
        return rank.submission.context_parallelize(model, rank.group)

    return {name: train(parallel(), batches, make) for name, make in OPTIMIZERS.items()}


OPTIMIZERS: dict[str, Callable] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.5),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def train(model: nn.Module, batches: list, make: Callable) -> Tensor:
    optimizer = make(model.parameters())
    losses = []
    for idx, targets in batches:
        optimizer.zero_grad()
        loss = model(idx, targets)[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@check("context_parallelize", world_sizes=(2,), subgroup=False)
def training_curve_is_that_of_one_process(trial: Trial) -> None:
    """In float64 the losses of four steps lie on one process's, with SGD and with AdamW."""
    sizes = small_config(trial, n_layer=1)
    weights = drawn(trial, sizes)
    batches = [
        [trial.tokens(sizes["vocab_size"], 2, sizes["length"]), uneven(trial, sizes, 2)] for _ in range(4)
    ]
    results = trial.run(training_probe, sizes, weights, batches)
    for name, make in OPTIMIZERS.items():
        expected = train(built(sizes, weights, torch.float64), batches, make)
        trial.close(
            f"the losses of four steps of {name} in float64",
            [r[name] for r in results],
            expected,
            help="Compare loss and gradients of the first step; sum in the model's dtype.",
            rtol=1e-6,
        )


MODES = {"eval mode, under no_grad": False, "training mode, with gradients": True}


def last_probe(rank, sizes: dict, weights: dict, idx: Tensor) -> dict:
    """By mode: the logits, whether there was a loss, and what was as long as the sequence. No dropout."""
    model = rank.submission.context_parallelize(built(sizes, weights).to(rank.device), rank.group)
    found = {}
    for mode, training in MODES.items():
        with torch.set_grad_enabled(training), Watch(sizes["length"], dims=3) as watch:
            logits, loss = model.train(training)(idx)
        logits = logits.detach() if isinstance(logits, Tensor) else None
        found[mode] = {"logits": logits, "loss": loss is not None, "long": watch.long}
    return found


def other_last_logits(everywhere: Tensor, n: int) -> dict[str, Fault]:
    """Cause → what each rank would have, of the logits of all tokens (b, s, v)."""
    s = everywhere.size(1)
    lasts = {
        "zigzag": [s - r * s // (2 * n) - 1 for r in range(n)],
        "plain": [(r + 1) * s // n - 1 for r in range(n)],
    }
    senders = {"zigzag": n - 1, "plain": 0}
    found = {}
    for parts, places in lasts.items():
        ends = [everywhere[:, [place]] for place in places]
        other = senders[parts]
        found[f"each rank has those of the last of its own tokens, in {parts} parts"] = Fault(
            ends, "Only one rank has the last token of the sequence: let it hand its logits to all."
        )
        found[f"every rank has those of rank {other}'s last token, in {parts} parts"] = Fault(
            ends[other], f"In {parts} parts rank {n - 1 - other} has the last token of the sequence."
        )
    return found if n > 1 else {}


@check("context_parallelize", world_sizes=(2, 3), optional=True)
def every_rank_can_sample(trial: Trial) -> None:
    """Without targets every rank gets the logits of the last token and no loss, in both modes."""
    sizes = small_config(trial)
    weights = drawn(trial, sizes)
    idx = trial.tokens(sizes["vocab_size"], 2, sizes["length"])
    with torch.no_grad():
        everywhere = built(sizes, weights).eval()(idx, idx)[0]
    results = trial.run(last_probe, sizes, weights, idx)
    for mode in MODES:
        trial.close(
            f"what comes without targets in {mode},",
            [result[mode]["logits"] for result in results],
            everywhere[:, [-1]],
            lambda: other_last_logits(everywhere, trial.num_ranks),
            help="GPT takes the last token of what it was given: here that is a rank's own last token.",
        )
        for rank, result in enumerate(results):
            trial.require(
                not result[mode]["loss"], f"without targets it returned a loss in {mode}", rank=rank
            )
            if trial.num_ranks > 2:  # with two ranks two parts side by side are as long
                trial.require(
                    not result[mode]["long"],
                    f"without targets, in {mode}, {result[mode]['long']}, and the whole sequence is "
                    f"{sizes['length']} long",
                    help="Do not gather the tokens. Only the rank that has the last one can make its logits: "
                    "let it hand them to all, (b, 1, v).",
                    rank=rank,
                )
    refused_without_targets(trial, sizes, idx[:, :-1])


def refused_without_targets(trial: Trial, sizes: dict, idx: Tensor) -> None:
    """Tokens that the ranks do not divide are a ValueError in a call without targets, too."""
    for rank, told in enumerate(refusals(trial, sizes, idx, None)):
        logits = isinstance(told, Tensor)
        trial.require(
            not logits and told == "ValueError",
            f"without targets {idx.size(1)} tokens over {trial.num_ranks} ranks gave "
            f"{'logits' if logits else told} where a ValueError belongs",
            help="Ask where the tokens are cut: a call comes there with targets and without.",
            rank=rank,
            cause="whether it divides is asked only where there are targets, as in the loss"
            if logits
            else "",
        )


@check("context_parallelize", optional=True)
def the_given_model_comes_back(trial: Trial) -> None:
    """The model that was given is changed and comes back, and no copy of it."""
    for r, result in enumerate(trial.once(observe).results):
        trial.require(
            result["given back"],
            "another module came back than the one that was given",
            help="Change the given one and return it: who holds it would see no change.",
            rank=r,
        )
