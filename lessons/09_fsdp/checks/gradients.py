"""Checks of `ShardedGradients`: gradients are reduced to their owners during backward, and freed."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from grader.checks import CheckEnded, Trial, check, exercise, is_close, settle
from lessons_shared.evaluation import noted

from .models import LAYER_BYTES, NUM_LAYERS, Chain, Odd, build, draw, weights
from .parts import counted_passes, gradients_by_rank, means_by_pass, trained_on
from .runs import require_in_evaluation
from .training import (
    FORGOTTEN,
    LEARNING_RATE,
    LOST,
    PASSES,
    Rule,
    expected_weights,
    require_weights,
    train,
    whole_batch,
)
from .wire import SMALL, require_travelled

exercise(
    "ShardedGradients",
    world_sizes=(2, 1, 4, 3),
    subgroup=True,
    uses=("ShardedOptimizer",),
    hints=(
        "register_post_accumulate_grad_hook calls you when a gradient is complete, in the middle of "
        "backward.",
        "In the hook, reduce-scatter parameter.grad, keep your share of the mean, and set parameter.grad "
        "to None.",
        "A share has another shape than its parameter, so it can not stand in .grad. Put it where your "
        "ShardedOptimizer looks first: in an attribute of the parameter, for instance. Who forgets it in "
        "zero_grad()?",
        "An asynchronous reduction still needs its input. If all inputs wait until finish_…, no gradient was "
        "freed: wait for one before the next is sent.",
    ),
)

FEWER = (2, 1, 3)
"""Numbers of ranks that train in more than one way: four would show nothing that three do not."""


def wrap(rank: Any, model: Any) -> Any:
    return rank.submission.ShardedGradients(model, rank.group)


NOTHING_ON_ITS_WAY = (
    "finish_gradient_synchronization() was called when nothing was on its way: then it does nothing"
)


def train_on_ranks(
    rank: Any, seed: int, kinds: list[tuple[str, str]], batches: list[tuple[Tensor, Tensor]]
) -> dict:
    """Weights by kind of training; "once" calls finish after a step's last pass, "always" after each, twice.

    "first" are those after one step of SGD, "once".
    """
    ends = {}

    def sharded(params: Any, optimizer_class: Any, **settings: Any) -> Any:
        return rank.submission.ShardedOptimizer(params, optimizer_class, rank.group, **settings)

    for kind, when in kinds:
        model = build(Odd, seed, torch.float64).to(rank.device)
        wrapped = wrap(rank, model)

        def finish(passes_left: int, wrapped: Any = wrapped, when: str = when) -> None:
            if when == "always" or passes_left == 0:
                wrapped.finish_gradient_synchronization()
            if when == "always":
                with noted(NOTHING_ON_ITS_WAY):
                    wrapped.finish_gradient_synchronization()

        steps = train(wrapped, batches, kind, sharded, finish, look_at=model)
        ends[f"{kind} {when}"] = steps[-1].weights
        if (kind, when) == ("SGD", "once"):
            ends["first"] = steps[0].weights
    return ends


def observe_training(trial: Trial, delays: bool = False) -> SimpleNamespace:
    kinds = [("SGD", "once"), ("SGD", "always"), ("AdamW", "once"), ("groups", "always")]
    kinds = kinds if trial.in_full else kinds[:3]
    if delays or trial.num_ranks not in FEWER:
        kinds = kinds[:1]
    seed, by_rank = trial.seed(), draw(trial, sum(PASSES))
    per_rank = [(batches,) for batches in by_rank]
    results = trial.run(train_on_ranks, seed, kinds, per_rank=per_rank, delays=delays)
    return SimpleNamespace(results=results, seed=seed, by_rank=by_rank)


def forwards_first(rank: Any, seed: int, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The weights after a step of SGD whose forwards all come before its backward passes."""
    model = build(Odd, seed, torch.float64).to(rank.device)
    wrapped = wrap(rank, model)
    optimizer = rank.submission.ShardedOptimizer(wrapped.parameters(), SGD, rank.group, lr=LEARNING_RATE)
    optimizer.zero_grad()
    for loss in [wrapped(*batch)[1] for batch in batches[: PASSES[0]]]:
        loss.backward()
    wrapped.finish_gradient_synchronization()
    optimizer.step()
    return weights(model)


def right_where_forwards_come_first(trial: Trial, seen: Any) -> bool:
    """Whether no pass of a step is lost where no forward comes between them."""
    try:
        ends = trial.run(forwards_first, seen.seed, per_rank=[(batches,) for batches in seen.by_rank])
    except CheckEnded:
        return False
    right = whole_batch(Odd, seen.seed, seen.by_rank, "SGD", Rule(), num_steps=1)
    return all(is_close(end[name], expected) for end in ends for name, expected in right.items())


def require_kind(trial: Trial, seen: Any, kind: str, when: str, help: str) -> None:
    expected = expected_weights(trial, Odd, seen.seed, seen.by_rank, kind)

    def explain() -> str:
        firsts = [result["first"] for result in seen.results]
        told = trained_on(expected.start, firsts, gradients_by_rank(Odd, seen.seed, seen.by_rank))
        told = told or counted_passes(expected.start, firsts, means_by_pass(Odd, seen.seed, seen.by_rank))
        return FORGOTTEN if told == LOST and right_where_forwards_come_first(trial, seen) else told

    ends = [result[f"{kind} {when}"] for result in seen.results]
    require_weights(trial, ends, expected, kind, help, explain)


@check("ShardedGradients")
def sgd_trains_as_one_process_does(trial: Trial) -> None:
    """With the ShardedOptimizer, two steps of SGD end at one process's weights on the whole batch."""
    seen = trial.once(observe_training)
    require_kind(trial, seen, "SGD", "once", "What the optimizer steps on is the mean over the ranks, once.")


@check("ShardedGradients", world_sizes=FEWER)
def two_passes_add_up(trial: Trial) -> None:
    """Gradients of two backward passes add up, also when finish_gradient_synchronization() comes between."""
    seen = trial.once(observe_training)
    require_kind(
        trial, seen, "SGD", "always", "Reduce the new gradient alone, and add its mean to the share you have."
    )


@check("ShardedGradients", world_sizes=FEWER)
def adamw_trains_as_one_process_does(trial: Trial) -> None:
    """Two steps of AdamW end at the weights of one process: a tie, frozen weights, a single number."""
    seen = trial.once(observe_training)
    require_kind(trial, seen, "AdamW", "once", "zero_grad() must forget the shares' gradients too.")


@check("ShardedGradients", world_sizes=(2,), subgroup=False)
def parameter_groups_keep_their_settings(trial: Trial) -> None:
    """Two parameter groups with settings of their own train as they do in one process."""
    seen = trial.once(observe_training)
    require_kind(trial, seen, "groups", "always", "Hand each parameter's share to its own group.")


def observe_delays(trial: Trial) -> SimpleNamespace:
    return observe_training(trial, delays=True)


@check("ShardedGradients", world_sizes=(2,), subgroup=False)
def finish_waits_for_the_network(trial: Trial) -> None:
    """On a network that takes its time the weights are as right as on a fast one."""
    seen = trial.once(observe_delays)
    require_kind(trial, seen, "SGD", "once", "Until work.wait() has returned, the share is not there.")


def what_is_left(rank: Any, seed: int, tokens: Tensor, targets: Tensor) -> dict:
    """What is in `.grad` and in `share_grad` after a pass and finish; a parameter is used by no rank.

    And what a call by name returns before that, or the words of its TypeError.
    """
    model = build(Odd, seed, torch.float64).to(rank.device)
    wrapped = wrap(rank, model)
    with torch.no_grad():
        try:
            by_name = wrapped(tokens, targets=targets)
        except TypeError as error:
            by_name = str(error)
    rank.submission.ShardedOptimizer(wrapped.parameters(), SGD, rank.group, lr=0.1).zero_grad()
    wrapped(tokens, targets)[1].backward()
    wrapped.finish_gradient_synchronization()
    left = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    shares = {name: getattr(p, "share_grad", None) for name, p in model.named_parameters()}
    shares = {name: share.clone() for name, share in shares.items() if isinstance(share, Tensor)}
    return {"left": left, "shares": shares, "by name": by_name}


def observe_what_is_left(trial: Trial) -> SimpleNamespace:
    seed, data = trial.seed(), [batches[0] for batches in draw(trial, 1)]
    results = trial.run(what_is_left, seed, per_rank=data)
    own, outputs = [], []
    for batch in data:
        model = build(Odd, seed, torch.float64)
        logits, loss = model(*batch)
        loss.backward()
        own.append({name: p.grad for name, p in model.named_parameters()})
        outputs.append((logits.detach(), loss.detach()))
    return SimpleNamespace(results=results, own=own, outputs=outputs)


@check("ShardedGradients", world_sizes=(2,), subgroup=False)
def what_is_given_by_name_is_handed_on(trial: Trial) -> None:
    """Called as wrapped(tokens, targets=targets), it returns what the module returns."""
    seen = trial.once(observe_what_is_left)
    help = "return self.module(*args, **kwargs): what is given by name is handed on, too."
    returned = [result["by name"] for result in seen.results]
    for r, each in enumerate(returned):
        trial.require(
            not isinstance(each, str),
            f"wrapped(tokens, targets=targets) ended in TypeError: {each}",
            help=help,
            rank=r,
            cause="targets, given by name, do not reach the module" if "'targets'" in str(each) else "",
        )
        trial.require(
            isinstance(each, tuple) and len(each) == 2,
            f"wrapped(tokens, targets=targets) returned {type(each).__name__}; the module, logits and loss",
            help=help,
            rank=r,
        )
    for place, what in enumerate(("logits", "loss")):
        trial.close(
            f"the {what} of wrapped(tokens, targets=targets)",
            [each[place] for each in returned],
            [outputs[place] for outputs in seen.outputs],
            help=help,
        )


@check("ShardedGradients", world_sizes=(2, 3), subgroup=False)
def no_gradient_waits_for_others(trial: Trial) -> None:
    """After finish no `.grad` is a rank's own: also where another of its bucket never got a gradient."""
    seen = trial.once(observe_what_is_left)
    for r, result in enumerate(seen.results):
        for name, gradient in result["left"].items():
            own = [gradients[name] for gradients in seen.own]
            right = own[0] is not None and is_close(gradient, torch.stack(own).mean(0))
            mine = own[r] is not None and is_close(gradient, own[r])
            zero = not gradient.any()
            trial.require(
                right,
                f"after finish_gradient_synchronization() {name} still has a .grad that is not the mean",
                help="Set parameter.grad to None once it is sent: a gradient of zeros has the same size."
                if zero
                else "finish_… sends what is held back, too: parameters without a gradient will not come.",
                rank=r,
                cause="it was set to zero, which frees nothing"
                if zero
                else "it is this rank's own gradient, which nothing has reduced"
                if mine
                else "",
            )


@check("ShardedGradients", world_sizes=(2, 3), subgroup=False)
def a_share_is_divided_before_the_step(trial: Trial) -> None:
    """What is in `share_grad`, if anything is, is no sum of the ranks' gradients: it is ready for a step."""
    seen, n = trial.once(observe_what_is_left), trial.num_ranks
    for name, own in seen.own[0].items():
        shares = [result["shares"].get(name) for result in seen.results]
        if own is None or any(share is None for share in shares):
            continue
        found = torch.cat([share.flatten() for share in shares])[: own.numel()]
        total = sum(gradients[name] for gradients in seen.own).flatten()
        summed = found.shape == total.shape and is_close(found, total) and not is_close(found, total / n)
        trial.require(
            not summed,
            f"after finish_gradient_synchronization() {name}.share_grad has a share of the sum, and "
            "not of the mean",
            help="Divide by the number of ranks when the sum has come, and not in the step.",
        )


def measure(rank: Any, training: bool, seed: int, x: Tensor) -> dict:
    """One step, and another one's backward: what is alive and what travels when."""
    with rank.record(memory=True) as recording:
        model = build(Chain, seed).to(rank.device)
        wrapped = wrap(rank, model).train(training)
        optimizer = rank.submission.ShardedOptimizer(wrapped.parameters(), SGD, rank.group, lr=0.01)
        optimizer.zero_grad()
        settle()
        recording.mark("forward")
        loss = wrapped(x)[1]
        recording.mark("backward")
        loss.backward()
        recording.mark("finish")
        wrapped.finish_gradient_synchronization()
        del loss
        left = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        settle()
        recording.mark("step")
        optimizer.step()
        recording.mark("over")
        optimizer.zero_grad()
        loss = wrapped(x)[1]
        recording.mark("second backward")
        loss.backward()
        recording.mark("second finish")
        wrapped.finish_gradient_synchronization()
    return {"recording": recording, "left": left, "device": rank.device.type}


def observe_memory(trial: Trial, training: bool = False) -> SimpleNamespace:
    batches = [(trial.normal(2, 16),) for _ in range(trial.num_ranks)]
    results = trial.run(measure, training, trial.seed(), per_rank=batches)
    return SimpleNamespace(results=results, model=build(Chain, 0))


def observe_memory_in_training(trial: Trial) -> SimpleNamespace:
    return observe_memory(trial, training=True)


def observed_in(trial: Trial, training: bool) -> SimpleNamespace:
    return trial.once(observe_memory_in_training if training else observe_memory)


SIZE = NUM_LAYERS * LAYER_BYTES
IN_EVERY_BACKWARD = (
    "Reduce in every backward, whatever self.training is: one may follow in evaluation mode, too."
)


@check("ShardedGradients", world_sizes=(2, 4), subgroup=False)
def a_share_of_the_gradients_is_left(trial: Trial) -> None:
    """After backward a rank holds its share of the gradients, P/n numbers, and nothing of the others'."""
    require_in_evaluation(partial(require_share_left, trial), help=IN_EVERY_BACKWARD)


def require_share_left(trial: Trial, training: bool) -> None:
    """Of a model in this mode."""
    n = trial.num_ranks
    for r, result in enumerate(observed_in(trial, training).results):
        held = result["recording"].alive("step") - result["recording"].alive("forward")
        trial.require(
            held <= SIZE // n + LAYER_BYTES + SMALL,
            f"{held:,} bytes besides the weights are alive on it after backward. All gradients are "
            f"{SIZE:,} bytes, "
            f"a share is 1/{n} of it",
            help="Set parameter.grad to None when it is reduced."
            if result["left"]
            else "No .grad is left: let go of what was sent and received, too. A view keeps the whole tensor "
            "alive.",
            rank=r,
            cause="all gradients are still there" if result["left"] >= SIZE else "",
        )


def in_one_piece(recording: Any) -> str:
    """Whether most gradients leave together when the last is there, in words; else ""."""
    sizes = [event.num_bytes for event in recording.select(after="backward")]
    return (
        "one bucket has nearly all gradients, and waits for the last" if max([*sizes, 0]) > SIZE / 2 else ""
    )


@check("ShardedGradients", world_sizes=(2, 4), subgroup=False)
def gradients_leave_during_backward(trial: Trial) -> None:
    """Gradients are reduced and freed while backward goes on: all of them are never there at once."""
    require_in_evaluation(partial(require_leaving, trial), help=IN_EVERY_BACKWARD)


def require_leaving(trial: Trial, training: bool) -> None:
    """Of a model in this mode."""
    n = trial.num_ranks
    for r, result in enumerate(observed_in(trial, training).results):
        recording = result["recording"]
        sent = [event.index for event in recording.select(after="backward")]
        trial.require(
            bool(sent) and sent[0] < recording.last_compute("backward"),
            "no gradient was sent before backward's last matrix product",
            help="Reduce from a hook on each parameter that is called once .grad is there: one that "
            "register_hook takes is called before. A bucket that holds the whole model leaves last.",
            rank=r,
            cause=in_one_piece(recording),
        )
        first, second = (recording.bytes(after=name) for name in ("backward", "second backward"))
        trial.require(
            second >= 0.9 * first,
            f"the first step's backward sends {first:,} bytes, and the second's {second:,}",
            help="Each backward begins anew: what counts gradients, or lists buckets, is set back.",
            rank=r,
            cause="gradients leave during the first backward alone, and wait for finish_… in the next",
        )
        freed = recording.alive("step") - recording.alive("forward") <= SIZE // n + LAYER_BYTES + SMALL
        # At the end of backward there are a share of all, and a few whole ones on their way.
        held = recording.alive("finish") - recording.alive("forward")
        trial.require(
            held <= SIZE // n + SIZE // 4 + LAYER_BYTES + SMALL,
            f"when backward is over, {held:,} bytes besides the weights are alive on it. All gradients "
            f"are {SIZE:,}",
            help="Wait for a reduction before you start the one after next, and let go of its input.",
            rank=r,
            cause="gradients stay until finish_gradient_synchronization()" if held >= SIZE and freed else "",
        )
        if result["device"] == "cpu":  # NCCL's collectives end without anybody who waits
            require_waiting(trial, r, recording)


def require_waiting(trial: Trial, rank: int, recording: Any) -> None:
    """What nobody has waited for when backward is over is at most a few gradients.

    Which handles were waited for is not known, only how many: those that were not are the smallest here.
    """
    sizes = sorted(event.num_bytes for event in recording.select(after="backward"))
    on_their_way = max(0, len(sizes) - recording.waits(after="backward"))
    held = sum(sizes[:on_their_way])
    trial.require(
        held <= SIZE // 4 + LAYER_BYTES + SMALL,
        f"when backward is over, {on_their_way} of the {len(sizes)} communications that it has started were "
        f"not waited for. They hold {held:,} bytes of gradients; all gradients are {SIZE:,}",
        help="Wait for a reduction before you start the one after next: until then it keeps its input.",
        rank=rank,
        cause="gradients stay until finish_gradient_synchronization(), which waits for all that hold them"
        if recording.waits(after="finish") >= on_their_way
        else "",
    )


@check("ShardedGradients", world_sizes=(2, 4), subgroup=False)
def a_gradient_is_reduced_to_its_owners(trial: Trial) -> None:
    """Backward sends P elements: each gradient once, to the ranks that own it. No all-reduce."""
    seen = trial.once(observe_memory)
    for r, result in enumerate(seen.results):
        recording = result["recording"]
        sizes = [recording.bytes("all_reduce", after=name) for name in ("backward", "finish")]
        trial.require(
            sum(sizes) <= SIZE // 4,
            f"{sum(sizes):,} bytes of gradients were all-reduced",
            help="Reduce-scatter each gradient (or reduce it to its owner): half the bytes.",
            rank=r,
            cause="every rank got every mean, and threw most of it away",
        )
        late = recording.bytes(after="finish")
        trial.require(
            late <= SIZE // 4,
            f"{late:,} bytes travel in finish_gradient_synchronization(), after backward",
            help="All but the last few have left during backward. finish_… waits.",
            rank=r,
        )
        require_travelled(
            trial, r, recording, seen.model, 1, what="backward", after="backward", extra=SIZE // 4
        )


@check("ShardedGradients", world_sizes=(2, 4), subgroup=False)
def the_optimizer_finds_its_share_ready(trial: Trial) -> None:
    """The ShardedOptimizer's step only hands the new weights round, P elements: nothing is reduced again."""
    seen = trial.once(observe_memory)
    for r, result in enumerate(seen.results):
        recording = result["recording"]
        again = sum(recording.bytes(kind, "step") for kind in ("all_reduce", "reduce_scatter", "reduce"))
        trial.require(
            again <= SMALL,
            f"step() reduces {again:,} bytes, and backward has done that already",
            help="Look whether ShardedGradients has left a mean for this parameter.",
            rank=r,
            cause="the gradients are reduced twice",
        )
        require_travelled(trial, r, recording, seen.model, 1, what="step()", after="step")
