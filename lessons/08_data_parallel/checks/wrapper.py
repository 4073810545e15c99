"""Checks of `DataParallel` as a whole: weights at the start, gradients, training."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import CheckEnded, Fault, Trial, check, exercise, is_close

from .means import BOTH, NOTHING_AVERAGED, draw_passes, expected_gradients, require_mean, sizes_of
from .models import (
    Mixed,
    build,
    by_rank,
    gradients,
    seeds,
    tiny_gpt,
    turn,
    weights,
)

exercise(
    "DataParallel",
    world_sizes=(2, 1, 4),
    subgroup=True,
    hints=(
        "Start with buckets as lists of parameters, made once in the constructor, and a hook that counts "
        "which gradients of "
        "a bucket are there. parameter.register_post_accumulate_grad_hook(hook) calls hook(parameter).",
        "Send with async_op=True and keep the work object: finish_gradient_synchronization() waits for it, "
        "and only then "
        "puts the means back.",
        "A bucket that is full must not leave before the bucket in front of it: the ranks' hooks may fire "
        "in different "
        "orders, the all-reduces may not. What stays back because of an unused parameter leaves in finish.",
    ),
)


def step(rank: Any, seed: int, drifted: bool, weight: float, tokens: Tensor, targets: Tensor) -> dict:
    """One backward of a tiny GPT whose ranks start with different weights, the loss weighed by its share.

    With `drifted`, the ranks' weights differ again when backward begins.
    """
    model = build(tiny_gpt, seed).to(rank.device)
    model.register_buffer("mask", torch.full((3,), float(seed % 7919)), persistent=False)
    model.transformer.drop.register_buffer("drawn", torch.tensor(2**40 + seed))
    model.to(rank.device)
    wrapped = rank.submission.DataParallel(model, rank.group)
    start = {**weights(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}}
    own = [id(p) for p in model.parameters()]
    if drifted:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + rank.rank)
    before = weights(model)
    with rank.record() as recording:
        wrapped.finish_gradient_synchronization()
        recording.mark("evaluation")
        with torch.no_grad():
            by_keyword = wrapped(tokens, targets=targets)[1]
        recording.mark("without gradients")
        wrapped.finish_gradient_synchronization()
        recording.mark("step")
        _, loss = wrapped(tokens, targets)
        (weight * loss).backward()
        wrapped.finish_gradient_synchronization()
        first = gradients(model)
        recording.mark("finished again")
        wrapped.finish_gradient_synchronization()
    return {
        "start": start,
        "before": before,
        "gradients": first,
        "again": gradients(model),
        "loss": loss.detach(),
        "by keyword": by_keyword,
        "weights": weights(model),
        "same": sorted(id(p) for p in wrapped.parameters()) == sorted(own),
        "recording": recording,
    }


def observe_step(trial: Trial, drifted: bool = False) -> SimpleNamespace:
    """Rank r has 1 + r % 2 of the rows: a loss that is weighed by them makes the plain mean the batch's."""
    numbers, n = seeds(trial), trial.num_ranks
    sizes = [1 + r % 2 for r in range(n)]
    data = [(trial.tokens(23, size, 8), trial.tokens(23, size, 8)) for size in sizes]
    shares = [n * size / sum(sizes) for size in sizes]
    results = trial.run(
        step, per_rank=[(s, drifted, w, *d) for s, w, d in zip(numbers, shares, data, strict=True)]
    )
    own, losses = [], []
    for weight, (tokens, targets) in zip(shares, data, strict=True):
        model = build(tiny_gpt, numbers[0]).double()
        loss = model(tokens, targets)[1]
        (weight * loss).backward()
        own.append(gradients(model))
        losses.append(loss.detach())
    expected = {name: torch.stack([g[name] for g in own]).mean(0) for name in own[0]}
    starts = [
        {
            **weights(build(tiny_gpt, s)),
            "mask": torch.full((3,), float(s % 7919)),
            PERSISTENT: torch.tensor(2**40 + s),
        }
        for s in numbers
    ]
    return SimpleNamespace(
        results=results, own=own, expected=expected, starts=starts, sizes=sizes, losses=losses
    )


PERSISTENT = "transformer.drop.drawn"
"""A buffer that state_dict() has; "mask" is one that it leaves out."""


def why_a_buffer(seen: SimpleNamespace, name: str) -> str:
    """Of a buffer that is still the rank's own: which others are. All parameters are right."""
    found = [result["start"][PERSISTENT].tolist() for result in seen.results]
    own = [start[PERSISTENT].tolist() for start in seen.starts]
    if name == "mask" and found == own:
        return ": no buffer was broadcast: parameters() has none of them, buffers() has"
    if name == "mask" and found == own[:1] * len(own):
        return ": it is a buffer that is not persistent: state_dict() leaves it out. The parameters are right"
    return ": it is a buffer; the parameters are right" if name in ("mask", PERSISTENT) else ""


def observe_drifted(trial: Trial) -> SimpleNamespace:
    return observe_step(trial, drifted=True)


def weights_were_averaged(trial: Trial) -> bool:
    """Whether weights that differ when backward begins are their mean over ranks after it."""
    name = "transformer.h.0.attn.c_attn.weight"
    try:
        results = trial.once(observe_drifted).results
    except CheckEnded:
        return False
    mean = torch.stack(by_rank(results, "before", name)).mean(0)
    return all(is_close(weight, mean) for weight in by_rank(results, "weights", name))


def are_weights(seen: SimpleNamespace) -> bool:
    """Whether what stands in every `.grad` is the mean of all ranks' weights, or their sum."""
    names, n = seen.expected, len(seen.results)
    found = {name: by_rank(seen.results, "gradients", name) for name in names}
    return any(
        all(
            isinstance(each, Tensor) and is_close(each, times * seen.starts[0][name])
            for name in names
            for each in found[name]
        )
        for times in {1, n}
    )


@check("DataParallel")
def ranks_start_with_the_weights_of_rank_0(trial: Trial) -> None:
    """The constructor gives every rank the parameters and buffers of the group's rank 0."""
    seen = trial.once(observe_step)
    for name, start in seen.starts[0].items():
        starts = [s[name] for s in seen.starts]
        told = "each rank still has what it started with" + why_a_buffer(seen, name)
        trial.close(
            f"{name} after the constructor",
            by_rank(seen.results, "start", name),
            start,
            alternatives={told: starts} if trial.num_ranks > 1 else {},
            help="Call broadcast_parameters in the constructor.",
        )


@check("DataParallel")
def gradient_is_that_of_the_whole_batch(trial: Trial) -> None:
    """After backward and finish_gradient_synchronization(), all ranks have the whole batch's gradient."""
    seen = trial.once(observe_step)
    try:
        require_mean(
            trial,
            seen,
            list(seen.expected),
            "Average each gradient over the group, once, and put it back into .grad.",
        )
    except CheckEnded as end:
        if are_weights(seen):
            end.cause = "in .grad are the weights: they were sent, and put back there, in place of gradients"
            end.help = "A parameter is the weight. What is sent is parameter.grad, once backward has made it."
        elif end.cause == NOTHING_AVERAGED and weights_were_averaged(trial):
            end.cause = "what is averaged are the weights, not the gradients"
            end.help = "A hook is handed the parameter, which is the weight. Its gradient is parameter.grad."
        raise


@check("DataParallel")
def forward_returns_what_the_module_returns(trial: Trial) -> None:
    """What the wrapper returns is what the module returns, on each rank for its own rows."""
    seen = trial.once(observe_step)
    trial.close(
        "the loss that the wrapper returns",
        [result["loss"] for result in seen.results],
        seen.losses,
        help="return self.module(*args, **kwargs)",
    )
    trial.close(
        "the loss of wrapped(tokens, targets=targets)",
        [result["by keyword"] for result in seen.results],
        seen.losses,
        help="return self.module(*args, **kwargs): what is given by name is handed on, too.",
    )


@check("DataParallel")
def weights_change_in_the_optimizer_only(trial: Trial) -> None:
    """Synchronisation leaves the weights as they are, and it is the module's own that are trained."""
    seen = trial.once(observe_drifted)
    for name in seen.expected:
        before = by_rank(seen.results, "before", name)
        trial.close(
            f"the weight {name} after backward",
            by_rank(seen.results, "weights", name),
            before,
            rtol=0.0,
            help="A hook is handed the parameter. What has to be averaged is parameter.grad.",
        )
    for r, result in enumerate(seen.results):
        trial.require(
            result["same"],
            "wrapped.parameters() are not the parameters of the given module",
            rank=r,
            help="Keep the module as an attribute (self.module = module), and do not copy it.",
        )


def turned_step(rank: Any, seed: int, tokens: Tensor, targets: Tensor, order: tuple[str, ...]) -> dict:
    """One pass of the awkward model, two weights of which lie in memory transposed."""
    model = build(Mixed, seed).to(rank.device)
    turn(model)
    wrapped = rank.submission.DataParallel(model, rank.group, bucket_bytes=1)
    F.cross_entropy(wrapped(tokens, order), targets).backward()
    wrapped.finish_gradient_synchronization()
    return {"gradients": gradients(model)}


@check("DataParallel", world_sizes=(2,), subgroup=False)
def memory_may_have_another_order(trial: Trial) -> None:
    """Where weights, and so their gradients, lie in memory transposed, the mean is that by element."""
    seed, passes = trial.seed(), draw_passes(trial, [BOTH])
    results = trial.run(turned_step, seed, per_rank=passes[0])
    expected, own = expected_gradients(seed, passes)
    seen = SimpleNamespace(results=results, expected=expected, own=own, sizes=sizes_of(passes))
    require_mean(
        trial,
        seen,
        help="A gradient lies in memory as its weight does: flatten() and reshape(-1) go by rows, whatever "
        "the order, and as_strided() by memory.",
    )


NOTHING_TO_FINISH = (
    ("", "before any pass", "A pass is pending from a forward on, until finish_… ends it: remember which."),
    (
        "without gradients",
        "after a forward under torch.no_grad()",
        "Such a forward has no backward, and makes nothing pending: torch.is_grad_enabled() tells.",
    ),
    ("finished again", "a second time", "A pass is pending until finish_… ends it: forget it there."),
)
"""Stretch of the recording, what was done there, the next step."""


@check("DataParallel")
def finish_does_nothing_when_nothing_is_pending(trial: Trial) -> None:
    """finish_gradient_synchronization() before any pass that needs it, or a second time, does nothing."""
    seen = trial.once(observe_step)
    for r, result in enumerate(seen.results):
        for when, told, help in NOTHING_TO_FINISH:
            trial.require(
                result["recording"].count(after=when) == 0,
                f"called {told}, finish_… communicates",
                rank=r,
                help=help,
            )
    for name in seen.expected:
        trial.close(
            f"the gradient of {name} after a second finish",
            by_rank(seen.results, "again", name),
            by_rank(seen.results, "gradients", name),
            rtol=0.0,
            help="A second finish has nothing to send, to divide or to write: forget what is done.",
        )


def train(rank: Any, seed: int, steps: list[tuple[Tensor, Tensor]]) -> dict:
    """A few steps in float64, where the order of a sum does not show."""
    ends: dict = {"recordings": []}
    for name in OPTIMIZERS:
        model = build(tiny_gpt, seed).double().to(rank.device)
        wrapped = rank.submission.DataParallel(model, rank.group, bucket_bytes=4000)
        optimizer = make_optimizer(name, wrapped)
        with rank.record() as recording:
            for tokens, targets in steps:
                optimizer.zero_grad(set_to_none=name == "SGD")
                wrapped(tokens, targets)[1].backward()
                wrapped.finish_gradient_synchronization()
                optimizer.step()
        ends[name] = weights(model)
        ends["recordings"].append(recording)
    return ends


OPTIMIZERS = ("SGD", "AdamW")
LARGE = 16
"""Numbers that a message has at least if it is one of gradients, and no flag."""


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD shows a sum that should be a mean, which AdamW hides."""
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.5)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def observe_training(trial: Trial) -> SimpleNamespace:
    numbers, n = seeds(trial), trial.num_ranks
    steps = [(trial.tokens(23, 2 * n, 8), trial.tokens(23, 2 * n, 8)) for _ in range(2)]
    shares = [[(t[2 * r : 2 * r + 2], y[2 * r : 2 * r + 2]) for t, y in steps] for r in range(n)]
    results = trial.run(train, per_rank=list(zip(numbers, shares, strict=True)))
    return SimpleNamespace(results=results, seed=numbers[0], steps=steps)


def train_alone(seen: SimpleNamespace, name: str, factor: float) -> dict[str, Tensor]:
    """The weights of one process on the whole batches, gradients times a factor."""
    model = build(tiny_gpt, seen.seed).double()
    optimizer = make_optimizer(name, model)
    for tokens, targets in seen.steps:
        optimizer.zero_grad()
        (factor * model(tokens, targets)[1]).backward()
        optimizer.step()
    return weights(model)


IN_FLOAT32 = "the module's gradients are float64, and what travels is float32: they lose digits"
AS_THEY_ARE = (
    "Flatten and send gradients as they are: torch.zeros(size) is float32, as what .float() makes is."
)


def require_training(trial: Trial, optimizer: str) -> None:
    """Two steps end at the weights of one process on the whole batch."""
    seen, n = trial.once(observe_training), trial.num_ranks
    expected = train_alone(seen, optimizer, 1.0)
    others = {}
    if n > 1:
        others["the weights after training on the sum of the gradients"] = train_alone(seen, optimizer, n)
        others["the weights after training on the mean divided by n"] = train_alone(seen, optimizer, 1 / n)
    recordings = [recording for result in seen.results for recording in result["recordings"]]
    sent = {e.dtype for recording in recordings for e in recording.select() if e.num_elements >= LARGE}
    for name in expected:
        found = by_rank(seen.results, optimizer, name)
        as_far_off = sent == {"float32"} and all(is_close(each, expected[name], rtol=1e-5) for each in found)
        trial.close(
            f"{name} after two steps of {optimizer}",
            found,
            expected[name],
            alternatives={told: end[name] for told, end in others.items()}
            | ({IN_FLOAT32: Fault(found, AS_THEY_ARE)} if as_far_off else {}),
            help="Compare the gradients of each step with those of one process on the whole batch.",
        )


@check("DataParallel")
def sgd_trains_as_one_process_does(trial: Trial) -> None:
    """Two steps of SGD end at the weights of one process that had the whole batches."""
    require_training(trial, "SGD")


@check("DataParallel")
def adamw_trains_as_one_process_does(trial: Trial) -> None:
    """Two steps of AdamW, gradients zeroed in place, end at the weights of one process."""
    require_training(trial, "AdamW")
