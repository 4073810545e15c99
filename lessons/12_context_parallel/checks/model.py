"""Checks of `context_parallelize`: a GPT of which every rank computes a part of the sequence."""

from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import CheckEnded, Event, Fault, Trial, Verdict, check, exercise, is_close
from lessons_shared.cut_gpt import gradients_of
from lessons_shared.cut_gpt_checks import gradients_are_those_of_training
from lessons_shared.earlier import KEPT, KEPT_BY_SHAPE, by_earlier_counts
from lessons_shared.evaluation import EVALUATED, HELP, LONGER, later_is_right, noted, without_gradients
from lessons_shared.passes import of_what_was_cleared
from lessons_shared.wire import wire_bytes
from nanogpt.model import GPT

from .model_losses import (
    built,
    config_of,
    dense,
    drawn,
    of_own_means,
    other_losses,
    small_config,
    uneven,
)
from .shared import (
    BACKWARD,
    FEW,
    ONE_BLOCK,
    SIZES,
    Watch,
    hops_at_most,
    neighbours_only,
    nothing_is_long,
    summed_back,
)

exercise(
    "context_parallelize",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "GPT.forward is made of embed, the blocks, head and loss. Only attention looks at other tokens: its "
        "`core` is a part that you can replace. embed and loss are methods that you can replace, too.",
        "The loss: sum the cross entropies of your own tokens, all-reduce the sum and the number of counted "
        "targets, divide. An all-reduce knows no backward: let the gradient flow through your own sum alone.",
        "Each rank's backward finds the part of a parameter's gradient that its own tokens make. "
        "parameter.register_hook(hook) is given what one backward adds, before it is added to .grad.",
    ),
)


TIED = "transformer.wte.weight"


NO_GRAPH = (
    "a rank that counts no target must go backward all the same, if only with zeros: the others wait for it "
    "in the sums of the gradients"
)

CUT_FIRST = "Cut tokens and positions before they are embedded: a rank embeds its own alone."
IN_EVERY_MODE = "Cut tokens and positions in evaluation, too: a rank has its own tokens, in every mode."


def run_model(rank, sizes: dict, weights: dict, idx: Tensor, all_targets: list[Tensor]) -> dict:
    """A recorded pass over the first targets, half the loss over the second, a fresh one over the third.

    Then the same in evaluation mode: a pass over the first targets, and what comes under no_grad.
    """
    given = built(sizes, weights).to(rank.device)
    model = rank.submission.context_parallelize(given, rank.group)
    before = [x.clone() for x in (idx, *all_targets)]
    with rank.record() as recording, Watch(sizes["length"], dims=3) as watch:
        logits, loss = model(idx, all_targets[0])
        forward, watch.long = watch.long, ""
        recording.mark(BACKWARD)
        loss.backward()
    first = gradients_of(model)
    second_loss = model(idx, all_targets[1])[1]
    (0.5 * second_loss).backward()
    both = gradients_of(model)
    third_loss = model(idx, all_targets[2])[1]
    model.zero_grad()
    try:
        third_loss.backward()
    except RuntimeError as error:
        error.add_note(NO_GRAPH)
        raise
    third = gradients_of(model)
    model.eval().zero_grad()
    with noted(EVALUATED):
        model(idx, all_targets[0])[1].backward()
    with Watch(sizes["length"], dims=3) as watch_evaluation:
        found = in_evaluation(model, idx, all_targets, rank.group.size())
    return {
        **found,
        "gradients in evaluation": gradients_of(model),
        "given back": model is given,
        "logits": logits.detach() if isinstance(logits, Tensor) else None,
        "third": third,
        "losses": [x.detach() for x in (loss, second_loss, third_loss)],
        "first": first,
        "both": both,
        "names": sorted(name for name, _ in model.named_parameters()),
        "long": [forward, watch.long],
        "long in evaluation": watch_evaluation.long,
        "unchanged": all(torch.equal(x, y) for x, y in zip((idx, *all_targets), before, strict=True)),
        "recording": recording,
    }


def by_name(model: nn.Module, idx: Tensor, targets: Tensor) -> Any:
    """On a rank: what the model returns where tokens and targets come by GPT's names for them."""
    try:
        return model(idx=idx, targets=targets)
    except TypeError as error:
        error.add_note(
            "the model is called as before, and tokens and targets may come by GPT's names for them: "
            "model(idx=..., targets=...). Give a forward of your own the same names"
        )
        raise


def in_evaluation(model: nn.Module, idx: Tensor, all_targets: list[Tensor], n: int) -> dict:
    """The losses over the first targets, which come by name, and the third, and that of a shorter batch."""
    logits_by_place, last = without_gradients(lambda: model(idx, all_targets[2]))
    logits, loss = without_gradients(lambda: by_name(model, idx, all_targets[0]))
    with noted(LONGER), torch.no_grad():
        shorter = model(*(x[:, : 2 * n].contiguous() for x in (idx, all_targets[1])))[1]
    return {
        "silent": [loss, None, last],
        "silent logits": logits_by_place,
        "logits by name": logits,
        "shorter": shorter,
    }


def observe(trial: Trial) -> SimpleNamespace:
    sizes = small_config(trial, n_layer=1 if trial.num_ranks == 4 else 2)
    weights = drawn(trial, sizes)
    b, length = (2 if trial.num_ranks == 3 else 3), sizes["length"]
    idx = trial.tokens(sizes["vocab_size"], b, length)
    targets = [uneven(trial, sizes, b), trial.tokens(sizes["vocab_size"], b, length)]
    few = trial.tokens(sizes["vocab_size"], b, length)
    few[:, length // (2 * trial.num_ranks) :] = -1  # rank 0 counts some, the others none
    targets.append(few)
    seen = SimpleNamespace(sizes=sizes, weights=weights, idx=idx, targets=targets, num_ranks=trial.num_ranks)
    seen.results = trial.run(run_model, sizes, weights, idx, targets)
    seen.expected = [dense(sizes, weights, idx, t) for t in targets]
    short = slice(0, 2 * trial.num_ranks)
    seen.shorter = dense(sizes, weights, idx[:, short], targets[1][:, short])[0]
    return seen


def require_loss(trial: Trial, number: int, what: str, help: str) -> None:
    seen = trial.once(observe)
    trial.close(
        what,
        [r["losses"][number] for r in seen.results],
        seen.expected[number][0],
        partial(others_that_explain_all, seen, number),
        help,
    )


COUNT_AGAIN = "Count the targets of each call anew, and keep no number of it in the model or in a closure."


def others_that_explain_all(seen: SimpleNamespace, number: int) -> dict[str, Any]:
    """Cause → a loss. One number is soon met by chance: a cause must not be at odds with the other losses."""
    others = [
        other_losses(seen, targets)
        | by_earlier_counts(loss * (targets != -1).sum(), targets, seen.targets[:k])
        for k, (targets, (loss, _)) in enumerate(zip(seen.targets, seen.expected, strict=True))
    ]
    found = [[r["losses"][k] for r in seen.results] for k in range(len(others))]

    def fits(cause: str, k: int) -> bool:
        value = others[k].get(cause)
        return not isinstance(value, Tensor) or all(is_close(x, value) for x in found[k])

    return {
        cause: Fault(value, COUNT_AGAIN) if cause in (KEPT, KEPT_BY_SHAPE) else value
        for cause, value in others[number].items()
        if all(fits(cause, k) for k in range(len(others)) if k != number)
    }


@check("context_parallelize")
def passes_go_through(trial: Trial) -> None:
    """Forward and backward go through on every rank, in training and evaluation, whatever targets count."""
    trial.once(observe)


@check("context_parallelize")
def loss_is_that_of_one_process(trial: Trial) -> None:
    """With every target counted, the loss on every rank is that of the dense model on the whole batch."""
    require_loss(
        trial,
        1,
        "the loss",
        "Cut tokens, their positions in the whole sequence, and targets alike; let every attention be the "
        "ring on the same parts; and give every rank the mean of all.",
    )
    seen = trial.once(observe)
    later_is_right(trial, "the loss", [r["shorter"] for r in seen.results], seen.shorter)


@check("context_parallelize")
def loss_is_the_mean_over_all_counted_tokens(trial: Trial) -> None:
    """Where ranks count different numbers of targets, or one counts none, it is the mean over all counted."""
    help = "Sum the losses of the counted targets over all ranks, and divide by how many all ranks count."
    require_loss(trial, 0, "the loss where ranks count different numbers of targets", help)
    require_loss(trial, 2, "the loss where all counted targets are on one rank", help)


@check("context_parallelize")
def loss_is_the_same_where_no_gradient_is_wanted(trial: Trial) -> None:
    """In eval mode, under torch.no_grad(), every rank has the loss that it had in training."""
    seen = trial.once(observe)
    for number, told in ((0, ""), (2, " where all counted targets are on one rank,")):
        trial.close(
            f"the loss in evaluation, under no_grad,{told}",
            [r["silent"][number] for r in seen.results],
            [r["losses"][number] for r in seen.results],
            partial(own_losses, seen, seen.targets[number]),
            HELP,
        )
    same_logits(trial, seen, [r["logits"] for r in seen.results])


def same_logits(trial: Trial, seen: SimpleNamespace, logits: list) -> None:
    """A rank's logits are those that it has in training, and where targets come by place."""
    if not all(isinstance(each, Tensor) for each in logits):
        return
    trial.close(
        "the logits of a rank's tokens in evaluation, under no_grad,",
        [r["silent logits"] for r in seen.results],
        logits,
        help=IN_EVERY_MODE,
    )
    trial.close(
        "the logits of a rank's tokens where targets come by name, targets=...,",
        [r["logits by name"] for r in seen.results],
        logits,
        {
            f"they are those of rank {r}, on every rank": Fault(
                [logits[r]] * trial.num_ranks,
                "That belongs where there are no targets. A forward hook is not given what has a name in the "
                "call: the loss that comes back tells.",
            )
            for r in (0, trial.num_ranks - 1)
        }
        if trial.num_ranks > 1
        else {},
        help="Whether targets come by name or by place changes nothing.",
    )


def own_losses(seen: SimpleNamespace, targets: Tensor) -> dict[str, Fault]:
    """Cause → what each rank has where it is told of its own targets alone."""
    others = other_losses(seen, targets)
    return {cause: other for cause, other in others.items() if isinstance(other, Fault)}


PASSES = {
    "first": "",
    "both": " after two passes",
    "third": " after zero_grad(), where all counted targets are on one rank,",
}


def require_gradients(
    trial: Trial,
    key: str,
    expected: dict[str, Tensor],
    others: Callable[[str], dict[str, Tensor | Fault]],
    help: str,
) -> None:
    seen = trial.once(observe)
    n = trial.num_ranks
    for name, right in expected.items():
        found = [r[key].get(name) for r in seen.results]
        what = f"the gradient of {name}{PASSES[key]}"
        present = [g for g in found if isinstance(g, Tensor) and g.shape == right.shape]
        if n > 1 and len(present) == n and not all(is_close(g, present[0]) for g in present):
            total = torch.stack([g.double() for g in present]).sum(0)
            trial.require(
                not is_close(total.float(), right.float(), 1e-4),
                f"{what} differs from rank to rank, and the ranks' gradients add up to the right one",
                cause="each rank has what its own tokens make of it",
                help="Sum every parameter's gradient over the group, once a backward.",
            )
        trial.close(
            what,
            found,
            right,
            lambda name=name, right=right: others(name) | summed_back(seen.results, n * right),
            help,
        )


N_TIMES = (
    "all of it counts once for each rank: n times too much leaves the loss already, or it is summed over the "
    "group twice"
)
LOOK_AT_THE_LOGITS = (
    "Print the gradient of the logits on one rank. Where that is n times too large already, autograd has "
    "followed the sum of the losses, or something stands in for it: a rank's own part enters once."
)


@check("context_parallelize")
def gradients_are_complete_and_the_same_everywhere(trial: Trial) -> None:
    """After loss.backward() every parameter has the dense model's gradient, on every rank."""
    seen = trial.once(observe)
    right = seen.expected[0][1]
    tied_alone = all(
        isinstance(result["first"].get(name), Tensor) and is_close(result["first"][name], g)
        for result in seen.results
        for name, g in right.items()
        if name != TIED
    )
    means = cache(partial(of_own_means, seen, seen.targets[0]))

    def others(name: str) -> dict[str, Tensor | Fault]:
        if tied_alone:
            told = (
                "of the tied weight alone it was summed twice: it has two names, and got the hook under both"
            )
            return {told: trial.num_ranks * right[name]}
        n_times = {N_TIMES: Fault(trial.num_ranks * right[name], LOOK_AT_THE_LOGITS)}
        return {cause: gradients[name] for cause, gradients in means().items()} | n_times

    require_gradients(
        trial,
        "first",
        right,
        others,
        "The loss is a mean over all ranks' tokens, so the gradient is the sum of what each rank's tokens "
        "make: through its own part of the loss, and then summed over the group.",
    )


@check("context_parallelize")
def gradients_where_one_rank_counts(trial: Trial) -> None:
    """Where all counted targets are on one rank, every rank has the dense model's gradient all the same."""
    seen, n = trial.once(observe), trial.num_ranks
    first, second, third = (gradients for _, gradients in seen.expected)
    require_gradients(
        trial,
        "third",
        third,
        lambda name: of_what_was_cleared([third[name]] * n, [first[name] + 0.5 * second[name]] * n, n),
        "A rank without counted targets adds zeros, and takes part in every sum.",
    )


@check("context_parallelize")
def a_second_backward_adds_its_gradient(trial: Trial) -> None:
    """A second pass, of half its loss, adds half its gradient to what is there."""
    seen, n = trial.once(observe), trial.num_ranks
    first, second = seen.expected[0][1], seen.expected[1][1]
    require_gradients(
        trial,
        "both",
        {name: first[name] + 0.5 * second[name] for name in first},
        lambda name: {
            "what the first pass left was summed over the ranks once more": (
                n * first[name] + 0.5 * second[name]
            ),
            "the first pass's is right, and the second's is summed twice: is a hook registered in forward, "
            "once more at each call?": first[name] + 0.5 * n * second[name],
            "only the second pass is there": 0.5 * second[name],
            "only the first pass is there": first[name],
            "the second pass counts in full, not by half: the factor is lost": first[name] + second[name],
        },
        "What a backward adds is summed over the ranks, once, and then added to .grad: a parameter's "
        "register_hook is given that, and not what is in .grad from before.",
    )


@check("context_parallelize")
def gradients_are_the_same_in_evaluation(trial: Trial) -> None:
    """A backward in evaluation mode gives the gradients that one in training gives."""
    results = trial.once(observe).results
    first, evaluated = ([r[key] for r in results] for key in ("first", "gradients in evaluation"))
    gradients_are_those_of_training(trial, first, evaluated)


def largest_of(events: list[Event]) -> str:
    """The words for the largest of what was sent; "" for nothing."""
    return f"the largest: {max(events, key=lambda e: e.num_bytes).describe()}" if events else ""


def sums_cost_one_all_reduce(trial: Trial, events: list[Event], rank: int, num_bytes: int) -> None:
    """A backward's collectives send no more than one all-reduce of all gradients, of so many bytes."""
    n = trial.num_ranks
    sent, allowed = wire_bytes(events, n), 2 * (n - 1) / n * num_bytes
    gathered = sum(e.num_bytes for e in events if e.kind == "all_gather")
    cause = (
        f"each gradient is gathered from all ranks, and summed on each: an all-gather brings {n} of them, "
        f"and sends n/2 = {n / 2:g} times what an all-reduce does"
    )
    trial.require(
        sent <= allowed + FEW * (1 + len(events)),
        f"the backward sent about {sent:,.0f} bytes through collectives, {largest_of(events)}; one "
        f"all-reduce of each gradient sends {allowed:,.0f}",
        help="Sum each parameter's gradient with one all-reduce a backward, and gather none.",
        rank=rank,
        cause=cause if abs(gathered - n * num_bytes) <= FEW * len(events) else "",
    )


@check("context_parallelize")
def model_messages_go_to_neighbours(trial: Trial) -> None:
    """Keys and values travel as in ring attention, gradients once; no states or logits are gathered."""
    seen, n = trial.once(observe), trial.num_ranks
    b, s = seen.idx.shape
    layers, width = seen.sizes["n_layer"], seen.sizes["n_embd"]
    block = b * (s // n) * width * 4
    parameters = sum(w.numel() * 4 for w in seen.weights.values())
    for r, result in enumerate(seen.results):
        recording = result["recording"]
        for after in ("", BACKWARD):
            events = recording.select(None, after)
            hops = [e for e in events if e.kind in ("send", "recv", "all_to_all")]
            neighbours_only(trial, hops, r, 4 * block)
            rest = [e for e in events if e not in hops]
            if after:
                sums_cost_one_all_reduce(trial, rest, r, parameters)
            else:
                total = sum(e.num_bytes for e in rest)
                trial.require(
                    total <= 16 * b * s + FEW * (1 + len(rest)),
                    f"the forward put {total:,} bytes through collectives, {largest_of(rest)}; a few "
                    "numbers a token are enough",
                    help="Blocks of keys and values go from neighbour to neighbour; the loss needs a sum "
                    "and a count.",
                    rank=r,
                )
            if n > 1:
                sends = SimpleNamespace(select=lambda kind, after, hops=hops: hops)
                most = layers * (2 * (n - 1) + (2 * n if after else 0))
                hops_at_most(trial, sends, after, r, most, block, "As many as ring attention needs.")


@check("context_parallelize", world_sizes=(4, 3), subgroup=False)
def no_rank_holds_the_sequence(trial: Trial) -> None:
    """No state of the model is as long as the sequence, in any mode: embeddings to logits are s/n long."""
    seen = trial.once(observe)
    for r, result in enumerate(seen.results):
        for found in result["long"][: 2 if trial.num_ranks == 3 else 1]:
            help = CUT_FIRST if found.startswith("embedding ") else ONE_BLOCK
            nothing_is_long(trial, found, seen.sizes["length"], r, help)
        found = result["long in evaluation"]
        nothing_is_long(
            trial, found and f"under no_grad {found}", seen.sizes["length"], r, help=IN_EVERY_MODE
        )


@check("context_parallelize")
def each_rank_computes_its_tokens(trial: Trial) -> None:
    """A rank's layers run on s/n tokens, and its attention on what these see."""
    seen, n = trial.once(observe), trial.num_ranks
    b, s = seen.idx.shape
    layers, width, words = (seen.sizes[key] for key in ("n_layer", "n_embd", "vocab_size"))
    part = s // n
    linear = b * part * (24 * layers * width**2 + 2 * width * words)
    for r, result in enumerate(seen.results):
        pairs = max((r + 1) * part**2, (2 * n + 2) * (part / 2) ** 2)
        core = 4 * b * layers * width * (pairs + part)
        for after, times, told in (("", 1, "forward"), (BACKWARD, 3, "backward")):
            flops = result["recording"].flops(after)
            trial.require(
                flops <= 1.02 * times * (linear + core),
                f"the {told} took {flops:,} FLOPs on this rank; its {part} of {s} tokens take "
                f"{times * (linear + core):,.0f}",
                help="Cut tokens and positions before the embedding, and leave out blocks of the future.",
                rank=r,
            )


@check("context_parallelize")
def names_stay_gpts_and_the_batch_stays(trial: Trial) -> None:
    """Parameters keep GPT's names, and the given tokens and targets are not written to."""
    seen = trial.once(observe)
    for r, result in enumerate(seen.results):
        trial.equal(
            f"the parameters' names on rank {r}",
            result["names"],
            sorted(seen.weights),
            help="Change the given model, or return one with the same names.",
        )
        trial.require(
            result["unchanged"], "tokens or targets were changed", help="Cut copies out of them.", rank=r
        )


def refusal_probe(rank, sizes: dict, idx: Tensor, targets: Tensor | None) -> str | Tensor:
    """The error's name, or the loss, or without targets the logits."""
    torch.manual_seed(0)
    try:
        model = rank.submission.context_parallelize(GPT(config_of(sizes)).to(rank.device), rank.group)
        logits, loss = model(idx, targets)
        return (logits if targets is None else loss).detach()
    except Exception as error:
        return type(error).__name__


def refusals(trial: Trial, sizes: dict, idx: Tensor, targets: Tensor | None) -> list[str | Tensor]:
    """What `refusal_probe` tells. It catches errors: a run that ends in none was not refused everywhere."""
    try:
        return trial.run(refusal_probe, sizes, idx, targets)
    except CheckEnded as end:
        if end.verdict in (Verdict.CRASHED, Verdict.HUNG):
            s, n = idx.size(1), trial.num_ranks
            end.cause = f"{s} tokens over {n} ranks were not refused by a ValueError on every rank"
            end.help = "Ask before anything is cut or sent: 2n divides s for zigzag parts, n for plain ones."
        raise


@check("context_parallelize", world_sizes=(2, 3, 4))
def a_sequence_that_does_not_divide_is_refused(trial: Trial) -> None:
    """A sequence whose length is not divisible by n is a ValueError when the model is called.

    If it is divisible by n and not by 2n, plain parts have the dense model's loss.
    """
    sizes, n = small_config(trial), trial.num_ranks
    length = sizes["length"] - trial.integer(1, n - 1)
    idx = trial.tokens(sizes["vocab_size"], 2, length)
    for r, told in enumerate(refusals(trial, sizes, idx, idx)):
        trial.require(
            told == "ValueError",
            f"{length} tokens over {n} ranks gave {told if isinstance(told, str) else 'a loss'} where a "
            "ValueError belongs",
            help="Raise a ValueError that names both numbers, before anything is sent. tensor.chunk would "
            "cut uneven parts.",
            rank=r,
        )
    odd = trial.tokens(sizes["vocab_size"], 2, sizes["length"] - n)
    torch.manual_seed(0)
    dense = GPT(config_of(sizes))(odd, odd)[1].detach()
    help = "Zigzag parts are two pieces each: refuse what 2n does not divide, or tokens are lost."
    told = f"{odd.size(1)} tokens, which {n} divides and {2 * n} does not"
    found = refusals(trial, sizes, odd, odd)
    if all(isinstance(loss, Tensor) for loss in found):
        trial.close(f"the loss of {told},", found, dense, help=help)
        return
    for r, error in enumerate(found):
        trial.require(
            isinstance(error, str) and error == "ValueError",
            f"{told}, gave {error if isinstance(error, str) else 'a loss, and an error on another rank'}",
            help=help,
            rank=r,
        )
