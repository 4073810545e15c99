"""What holds of every GPT that is cut over ranks, whatever travels between its pieces."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grader.checks import CheckEnded, Fault, Trial, each_rank, is_close, parts, stand_alone, weights_of
from nanogpt.model import GPT, GPTConfig

from .cut_gpt import (
    TABLE,
    cut_dim,
    dense_model,
    drawn_weights,
    head_orders,
    is_special,
    row_ranges,
    shared_table,
    train,
)
from .cut_gpt_runs import sampling_probe, training_probe
from .evaluation import later_is_right
from .passes import CLEARED, after_zero_grad


def ranges_of(seen: SimpleNamespace) -> list[tuple[int, int]] | None:
    """Which rows of the token table each rank has, see `row_ranges`."""
    table = shared_table(seen.weights)
    assert table is not None
    return row_ranges(table, [shared_table(held) for held in each_rank(seen, "weights")])


def own_words(seen: SimpleNamespace, ranges: list[tuple[int, int]], whole: Tensor, dim: int) -> list[Tensor]:
    """Each rank's rows of the table, or columns of logits."""
    return [whole.narrow(dim, first, size) for first, size in ranges]


def given_one_is_changed(trial: Trial, seen: SimpleNamespace) -> None:
    """The model that was given came back, with GPT's names."""
    for rank, result in enumerate(seen.results):
        trial.require(
            result["given_back"],
            "another module came back than the one that was given",
            help="Change the given one and return it: who holds it would see no change.",
            rank=rank,
        )
        odd = sorted((set(seen.weights) ^ set(result["weights"])) - set(TABLE))
        trial.require(
            not odd,
            f"these parameters are missing, or new: {', '.join(odd)}",
            help="Parameter names stay the dense one's, and a bias is there if it has one.",
            rank=rank,
        )


def table_is_cut(trial: Trial, seen: SimpleNamespace) -> None:
    """Every rank has its share of the rows, all rows are somewhere, and head and embedding stay tied."""
    share = -(-seen.config["vocab_size"] // trial.num_ranks)
    for rank, result in enumerate(seen.results):
        table = shared_table(result["weights"])
        trial.require(table is not None, "there is no transformer.wte.weight", rank=rank)
        trial.require(
            table.size(0) <= share,
            f"the token table has {table.size(0)} rows on this rank; {share} is its share ({seen.name})",
            rank=rank,
        )
        trial.require(
            result["tied"] and not all(name in result["weights"] for name in TABLE),
            "lm_head and wte have weights of their own: the table was untied",
            help="model.lm_head.weight = model.transformer.wte.weight, after both are cut.",
            rank=rank,
        )
    trial.require(
        ranges_of(seen) is not None,
        f"the ranks' rows of the token table, joined, are not the table ({seen.name})",
    )


def matrices_are_cut(trial: Trial, seen: SimpleNamespace, prefixes: list[str]) -> None:
    """Every matrix of the blocks is a slice in a tensor of its own; `prefixes` are of the attentions."""
    n, held = trial.num_ranks, each_rank(seen, "weights")
    for name, whole in seen.weights.items():
        if not is_special(name):
            dim = cut_dim(name)
            expected = whole if dim is None else parts(whole, dim, n)
            trial.close(name, each_rank(seen, "weights", name), expected)
    for prefix in prefixes:
        for rank, order in enumerate(head_orders(seen.weights, held, prefix)):
            trial.require(
                order is not None,
                f"{prefix}c_attn does not hold this rank's heads of q, of k and of v",
                rank=rank,
            )
    stand_alone(trial, seen.results)


def attentions(config: dict) -> list[str]:
    """The beginnings of names of a GPT's attentions."""
    return [f"transformer.h.{layer}.attn." for layer in range(config["n_layer"])]


def logits_are_right(trial: Trial, seen: SimpleNamespace, help: str) -> None:
    """With targets this rank's part of the vocabulary, without them whole ones of the last position."""
    v, share = seen.config["vocab_size"], -(-seen.config["vocab_size"] // trial.num_ranks)
    for rank, result in enumerate(seen.results):
        shape = tuple(getattr(result["logits"], "shape", ()))
        trial.require(
            shape[:-1] == tuple(seen.idx.shape) and shape[-1] <= share,
            f"the logits with targets have shape {shape}, where (b, s) = {tuple(seen.idx.shape)} and at most "
            f"{share} columns of a vocabulary of {v} are expected ({seen.name})",
            help="The whole logits are the largest tensor of a step: leave them cut.",
            rank=rank,
        )
        trial.require(result["no_loss"], "a loss was returned without targets", rank=rank)
        keys = ("last in training", "last", "quiet", "last in evaluation")
        *widths, by_mode = (getattr(result[key], "shape", (0,))[-1] for key in keys)
        decides = "the mode of the model" if by_mode == v else "whether gradients are wanted"
        for width, told, alone in (
            (v, "with targets and without,", ""),
            (shape[-1], "without targets", ", where there are no targets"),
        ):
            trial.require(
                trial.num_ranks == 1 or widths != [shape[-1], v, width],
                f"{told} the logits have {v} columns in evaluation under no_grad, and {shape[-1]} in "
                f"training ({seen.name})",
                cause=f"{decides} decides whether logits are gathered{alone}",
                help="Whether there are targets decides, everywhere: gather where the loss is None.",
                rank=rank,
            )
    for where, key in (("", "last"), (" in training, without targets", "last in training")):
        trial.close(
            f"the logits of the last position{where} ({seen.name})",
            each_rank(seen, key),
            seen.last,
            help=help,
        )
    for what, key, same_as in (("the loss", "quiet loss", "loss"), ("the logits", "quiet", "logits")):
        trial.close(
            f"{what} in evaluation under no_grad, with targets by name, targets=..., ({seen.name})",
            each_rank(seen, key),
            each_rank(seen, same_as),
            help="What is computed and returned depends on the targets, and on no mode of the model. A "
            "forward hook is not given what has a name in the call: the loss that comes back tells.",
        )
    ranges = ranges_of(seen)
    if ranges is not None:
        trial.close(
            f"this rank's logits ({seen.name})",
            [logits[..., :size] for logits, (_, size) in zip(each_rank(seen, "logits"), ranges, strict=True)],
            own_words(seen, ranges, seen.logits, -1),
        )


def later_loss_is_right(trial: Trial, seen: SimpleNamespace) -> None:
    """The loss of a later, longer call in evaluation, where that of one of the same lengths is right."""
    pairs = zip(each_rank(seen, "quiet loss"), each_rank(seen, "loss"), strict=True)
    if all(isinstance(x, Tensor) and isinstance(y, Tensor) and is_close(x, y) for x, y in pairs):
        later_is_right(trial, f"the loss ({seen.name})", each_rank(seen, "longer"), seen.longer)


def gradients_are_those_of_training(
    trial: Trial, trained: list[dict], evaluated: list[dict], told: str = ""
) -> None:
    """A backward after eval() gives what one before gives: nothing is dropped in these models."""
    for name in trained[0]:
        try:
            trial.close(
                f"the gradient of {name} in evaluation{told}",
                [gradients.get(name) for gradients in evaluated],
                [gradients.get(name) for gradients in trained],
            )
        except CheckEnded as end:
            end.cause = (
                "the same call in training mode gives another one, and no dropout is at work: in your code "
                "the mode decides"
            )
            end.help = "eval() switches dropout off, and no gradient: ask no module for its `training`."
            raise


def table_gradients_are_right(trial: Trial, seen: SimpleNamespace, which: str, passes: float) -> None:
    """The rows' gradient under `which` in the results, that of the embedding and that of the head."""
    ranges = ranges_of(seen)
    if ranges is None:
        return
    actual = [shared_table(gradients) for gradients in each_rank(seen, which)]
    expected = own_words(seen, ranges, passes * shared_table(seen.gradients), 0)
    trial.close(
        f"the gradient of the token table{after(passes, which)} ({seen.name})",
        [None if a is None else a[:size] for a, (_, size) in zip(actual, ranges, strict=True)],
        expected,
        alternatives=lambda: (
            {
                cause: own_words(seen, ranges, passes * shared_table(doubled), 0)
                for cause, doubled in getattr(seen, "summed_twice", dict)().items()
            }
            | after_zero_grad(expected, trial.num_ranks, which)
        ),
        help="The table is used twice, as embedding and as head, each time for all tokens; its gradient is "
        "the sum of both.",
    )


def after(passes: float, which: str = "") -> str:
    """Words for how often backward ran, and whether gradients were cleared before."""
    if which in CLEARED:
        return f" {CLEARED[which]}"
    return "" if passes == 1 else " after two passes, the second of half the size,"


def sampling_is_right(trial: Trial, function: str, config: dict, length: int) -> None:
    """`generate` goes on as the dense model does, and samples alike.

    A length that is odd may be refused; else its logits and its loss are the dense model's.
    """
    steps, weights = 4, drawn_weights(trial, config)
    idx = trial.tokens(config["vocab_size"], 5, length)
    results = trial.run(sampling_probe, function, config, weights, idx, steps)
    dense = dense_model(config, weights).eval()
    greedy = dense.generate(idx, steps, top_k=1)
    for rank, result in enumerate(results):
        trial.require(
            torch.equal(result["greedy"], greedy),
            f"with top_k=1 it continued {idx[0].tolist()} by {result['greedy'][0, length:].tolist()}, the "
            f"dense model by {greedy[0, length:].tolist()}",
            help="generate needs the whole logits of the last token, (b, 1, v), on every rank.",
            rank=rank,
        )
        trial.require(
            torch.equal(result["sampled"], results[0]["sampled"]),
            "ranks that are seeded alike sampled different tokens",
            rank=rank,
        )
        trial.require(
            not torch.equal(result["sampled"], result["sampled next"]),
            "two calls of generate, one after the other, sampled the same tokens",
            help="Let it draw on from torch's global stream: what seeds that anew, or sets it back, makes "
            "every sample the same.",
            rank=rank,
        )
        options_count(trial, rank, result, greedy[:, : length + 1])
    shorter = [result["shorter"] for result in results]
    if all(logits is not None for logits in shorter):
        with torch.no_grad():
            last = dense(idx[:, :-1])[0]
        trial.close(
            "the logits of the last token of a sequence that is one shorter",
            shorter,
            last,
            alternatives=lambda: logits_beside_a_pad(dense, idx[:, :-1], trial.num_ranks),
            help="Pad at the end, and take the last real token's logits: a pad before it shifts it.",
        )
    shorter_has_the_dense_loss(trial, dense, idx, [result["loss"] for result in results])


def options_count(trial: Trial, rank: int, result: dict, greedy: Tensor) -> None:
    """Tokens follow `temperature`, and one prompt is enough; `greedy` ends with the likeliest ones."""
    for name, told in (("cold", "with a temperature near 0"), ("one prompt", "with one prompt and top_k=1")):
        trial.require(
            torch.equal(result[name], greedy[: len(result[name])]),
            f"{told} it continued by {result[name][:, -1].tolist()}, where the likeliest tokens are "
            f"{greedy[: len(result[name]), -1].tolist()}",
            help="temperature and top_k are what they are for the dense model: GPT.generate may be called.",
            cause="the logits are not divided by the temperature, as the dense model's are"
            if name == "cold"
            else "",
            rank=rank,
        )


@torch.no_grad()
def logits_beside_a_pad(dense: GPT, tokens: Tensor, num_ranks: int) -> dict[str, Tensor | Fault]:
    """Cause → the last logits, if the tokens (b, s) are filled up to what the ranks divide."""
    s, most = tokens.size(1), dense.config.block_size - 1
    padding = -s % num_ranks
    places = torch.arange(s + padding)
    zeros, last = torch.zeros_like(tokens[:, :1]), tokens[:, -1:]

    def logits(before: list[Tensor], after: list[Tensor], positions: Tensor) -> Tensor:
        x = dense.embed(torch.cat([*before, tokens, *after], 1), positions)  # (b, s + padding, h)
        for block in dense.transformer.h:
            x = block(x)
        return dense.head(x)[:, [-1]]

    found: dict[str, Tensor | Fault] = {}
    for pad, told in ((zeros, "a token 0"), (last, "the last token again")):
        for end, where in ((most, ""), (s - 1, ", at the last one's position")):
            cause = f"these are the logits of a pad: {told}{where}"
            step = f"Take the logits at {s - 1}, which are the last token's: what stands behind it fills up."
            found[cause] = Fault(logits([], [pad] * padding, places.clamp(max=end)), step)
        cause = f"what fills up ({told}) stands before the tokens: they see it, and have later positions"
        found[cause] = logits([pad] * padding, [], places.clamp(max=most))
    return found if padding else {}


def shorter_has_the_dense_loss(trial: Trial, dense: GPT, idx: Tensor, losses: list[Any]) -> None:
    """A sequence that is one token shorter than `idx` may be refused by all ranks, or has the dense loss."""
    if any(loss is None for loss in losses):
        return
    tokens, targets = idx[:, :-1], idx[:, 1:]
    padding = min(-tokens.size(1) % trial.num_ranks, dense.config.block_size - tokens.size(1))
    padded = [F.pad(each, (0, padding)) for each in (tokens, targets)]
    with torch.no_grad():
        trial.close(
            "the loss of a sequence that is one shorter",
            losses,
            dense(tokens, targets)[1],
            alternatives={
                "what fills up was counted as targets": Fault(
                    dense(*padded)[1], "Fill targets up with -1, which does not count, or refuse the length."
                )
            },
        )


def training_is_right(trial: Trial, function: str, config: dict) -> None:
    """A few steps of SGD and of AdamW have the dense model's losses."""
    weights = weights_of(GPT(GPTConfig(**config)))
    weights = {name: weight + 0.1 * trial.normal(*weight.shape) for name, weight in weights.items()}
    batches = [[trial.tokens(config["vocab_size"], 2, 8) for _ in range(2)] for _ in range(3)]
    results = trial.run(training_probe, function, config, weights, batches)
    for name in ("SGD", "AdamW"):
        expected = train(dense_model(config, weights), batches, name)
        what = f"the losses of {len(batches)} steps of {name}"
        trial.close(what, [result[name] for result in results], expected, rtol=2e-3)
