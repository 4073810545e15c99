"""Checks of `chunked_cross_entropy`: the loss of a head whose logits never exist all at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grader.checks import Fault, Trial, check, exercise, is_close
from lessons_shared.passes import of_the_loss_alone

from .models import STATE_BYTES

exercise(
    "chunked_cross_entropy",
    world_sizes=(1,),
    distributed=False,
    uses=("checkpoint",),
    hints=(
        "The loss is a sum over tokens, divided by how many count. What of it can a chunk compute alone?",
        'F.cross_entropy(..., reduction="sum") of a chunk that counts nothing is 0, where "mean" is 0/0.',
        "A loop over chunks alone keeps every chunk's logits for backward. What did you build in 3.1?",
        "Checkpoint each chunk, not the loop: inside one checkpoint, backward would make all of them again.",
    ),
)

BYTES = 4
NUM_CHUNKS, FEW = 40, 8


def whole(x: Tensor, weight: Tensor, targets: Tensor, chunk_size: int = 0) -> Tensor:
    """What is asked for, with all logits at once."""
    return F.cross_entropy(x @ weight.T, targets, ignore_index=-1)


def chunks(x: Tensor, targets: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), targets.split(size), strict=True))


def mean_of_means(x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    means = [whole(rows, weight, goals) for rows, goals in chunks(x, targets, size) if (goals != -1).any()]
    return torch.stack(means).mean()


def weighed_by_tokens(x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    parts = [len(rows) * whole(rows, weight, g) for rows, g in chunks(x, targets, size) if (g != -1).any()]
    return torch.stack(parts).sum() / len(x)


def over_all_tokens(x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    return whole(x, weight, targets) * (targets != -1).sum() / len(targets)


def sum_over_targets(x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    return whole(x, weight, targets) * (targets != -1).sum()


def without_the_rest(x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    end = len(x) // size * size
    kept = F.cross_entropy(x[:end] @ weight.T, targets[:end], ignore_index=-1, reduction="sum")
    return kept / (targets != -1).sum()


def without_the_rest_at_all(x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    end = len(x) // size * size
    return whole(x[:end], weight, targets[:end])


def over_losses(x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    losses = F.cross_entropy(x @ weight.T, targets, ignore_index=-1, reduction="none")
    return losses.sum() / (losses > 1e-6).sum()


def over_chunks(x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    return sum_over_targets(x, weight, targets, size) / len(x.split(size))


def as_token(token: int, x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    taken = targets.masked_fill(targets == -1, token % len(weight))
    return F.cross_entropy(x @ weight.T, taken, reduction="sum") / (targets != -1).sum()


def without_token_0(x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    return sum_over_targets(x, weight, targets, size) / (targets > 0).sum()


def as_token_0_counted(x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    return F.cross_entropy(x @ weight.T, targets.clamp(min=0))


SLIPS = {
    "this is the mean of the chunks' means: a chunk with fewer counted targets counts as much": mean_of_means,
    "each chunk counts by its tokens, not by its counted targets": weighed_by_tokens,
    "it is divided by all targets, those of -1 as well": over_all_tokens,
    "it is a sum: nobody divides by how many targets count": sum_over_targets,
    "the chunks' sums are divided by how many chunks there are, not by how many targets count": over_chunks,
    "losses that are not 0 are counted: a target that is certain has a loss of 0, and counts": over_losses,
    "a target of -1 is taken for token 0, and its loss is added": partial(as_token, 0),
    "a target of -1 is taken for token 0, and counted": as_token_0_counted,
    "a target of -1 is taken for the last token, as an index of -1 is, and its loss is added": partial(
        as_token, -1
    ),
    "token 0 is not counted: it is a token, and -1 is none": without_token_0,
    "the tokens of the last chunk, which is shorter, are left out": without_the_rest,
    "the tokens of the last chunk, which is shorter, are left out, of the count as well": (
        without_the_rest_at_all
    ),
}
SCALED_TWICE = "what the forward keeps is multiplied in place: the second time it is multiplied again"
ROUNDED = (
    "something went through float32, as .float(), torch.zeros(()) and a quotient of whole numbers make it: "
    "it has no more digits"
)


@contextmanager
def telling_of_no_graph(needs: tuple[bool, bool]) -> Iterator[None]:
    """An error inside, where neither x nor weight needs a gradient, is told with that."""
    try:
        yield
    except RuntimeError as error:
        if not any(needs) and "does not require grad" in str(error):
            error.add_note(
                "neither x nor weight needs a gradient here, so what is computed from them has no graph, and "
                "backward can not be called on it: ask it for requires_grad first"
            )
        raise


@contextmanager
def telling_of_no_way() -> Iterator[None]:
    """An error inside, where the graph of a loss does not lead to x or weight, is told with that."""
    try:
        yield
    except RuntimeError as error:
        if "not have been used in the graph" in str(error):
            error.add_note(
                "torch.autograd.grad was asked for the gradients of x and weight, and the loss's graph does "
                "not lead to one of them: an autograd.Function, such as a checkpoint, reaches it by a "
                "closure. Hand it in as an argument of apply()"
            )
        raise


def step(
    rank: Any, how: str, size: int, scale: float, needs: tuple[bool, bool], twice: bool, *given: Tensor
) -> dict:
    """One forward and backward of a loss that somebody multiplies by `scale`; on request another backward."""
    x, weight, targets = (tensor.clone() for tensor in given)
    x.requires_grad_(needs[0])
    weight.requires_grad_(needs[1])
    function = rank.submission.chunked_cross_entropy if how == "mine" else whole
    with rank.record(memory=True) as recording:
        loss = function(x, weight, targets, size)
        recording.mark("after the forward")
        if loss.requires_grad:
            with telling_of_no_graph(needs):
                (loss * scale).backward(retain_graph=twice)
    gradients = [None if t.grad is None else t.grad.clone() for t in (x, weight)]
    again = None
    if twice:
        try:
            again = [g.clone() for g in torch.autograd.grad(loss * scale, (x, weight))]
        except Exception:  # who keeps gradients, or writes into what is kept, may refuse the second time
            again = None
    after = {"x": x, "weight": weight, "targets": targets}
    pairs = zip(after, after.values(), given, strict=True)
    changed = [name for name, now, before in pairs if not torch.equal(now.detach(), before)]
    return {
        "loss": loss.detach().clone(),
        "gradients": gradients,
        "again": again,
        "recording": recording,
        "changed": changed,
    }


KEPT_ONCE = "it is that of the second loss: what is kept for backward lies in memory that all calls share"
COUNTED_ONCE = "it is divided by how many targets counted in the call before"


def two_losses(rank: Any, how: str, size: int, given: tuple[Tensor, Tensor, Tensor]) -> dict:
    """Two losses of one head, the gradients of both, and the first before and after the second is there.

    In the second, fewer of as many targets count.
    """
    function = rank.submission.chunked_cross_entropy if how == "mine" else whole
    x, weight, targets = given
    one, other, weight = (tensor.clone().requires_grad_() for tensor in (x, x.flip(0), weight))
    loss = function(one, weight, targets, size)
    before = loss.detach().clone()
    fewer = targets.clone()
    fewer[::2] = -1
    another = function(other, weight, fewer, size)
    after = loss.detach().clone()
    with telling_of_no_way():
        gradients = torch.autograd.grad(loss + another, (one, other, weight))
    counted = [(each != -1).sum() for each in (targets, fewer)]
    return {
        "before": before,
        "after": after,
        "another": another.detach(),
        "gradients": gradients,
        "counted": counted,
    }


def require_two_losses(trial: Trial, seen: SimpleNamespace) -> None:
    """A loss and what it keeps for backward stay while another one is computed."""
    mine, right = (trial.run(two_losses, how, seen.size, seen.given)[0] for how in ("mine", "whole"))
    help = "Return new memory in each call, and keep new memory for backward."
    trial.close("a loss, once another one is computed,", mine["after"], mine["before"], rtol=0.0, help=help)
    before, now = right["counted"]
    trial.close(
        "a loss, of which fewer targets count than of the one before it,",
        mine["another"],
        right["another"],
        alternatives={COUNTED_ONCE: right["another"] * now / before},
        help="Count the targets of this call: numbers of tokens and chunks may be those of another one.",
    )
    names = ("x", "the second loss's x", "weight")
    for name, given, expected in zip(names, mine["gradients"], right["gradients"], strict=True):
        trial.close(
            f"the gradient of {name}, where two losses are computed before backward,",
            given,
            expected,
            alternatives={KEPT_ONCE: right["gradients"][1]} if name == "x" else {},
            help=help,
        )


def inputs(trial: Trial, tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = trial.normal(tokens, width), trial.normal(vocabulary, width)
    return x, weight, trial.tokens(vocabulary, tokens)


def observe(trial: Trial) -> SimpleNamespace:
    """Seven chunks, of which the second counts nothing, and the last is shorter; two targets are certain."""
    size = trial.integer(5, 8)
    tokens = 6 * size + trial.integer(1, 3)
    given = inputs(trial, tokens, trial.integer(9, 14), trial.integer(30, 40))
    targets = given[2]
    targets[size : 2 * size] = -1
    targets[3 * size + 1 : 4 * size] = -1
    targets[::5] = -1
    targets[targets == 0] = 1
    targets[-1] = 3  # the shorter chunk counts
    targets[1] = 0  # and so does token 0
    x, weight, _ = given
    word = weight.norm(dim=1).argmax()
    alike = weight @ weight[word]
    nearest = alike[word] - alike[torch.arange(len(weight)) != word].max()
    x[3:5], targets[3:5] = weight[word] * 115 / nearest, word  # in float32 their losses are 0, and they count
    x[4] *= 1.1
    if (targets != -1).sum().item().bit_count() == 1:
        targets[2] = -1  # 1 / count would be exact in float32, too
    scale = 1 + trial.integer(5, 100) / 50
    return SimpleNamespace(given=given, size=size, scale=scale)


def ended(
    trial: Trial,
    seen: SimpleNamespace,
    size: int,
    needs: tuple[bool, bool] = (True, True),
    dtype: torch.dtype = torch.float32,
    twice: bool = False,
) -> None:
    """Require the loss and the gradients of the whole; those of another backward too, unless refused."""
    x, weight, targets = seen.given
    given = x.to(dtype), weight.to(dtype), targets
    arguments = size, seen.scale, needs, twice, *given
    mine, right = (trial.run(step, how, *arguments)[0] for how in ("mine", "whole"))
    told = f"with chunks of {size} of {len(x)} tokens"
    told += " in float64" if dtype == torch.float64 else ""
    trial.require(
        not mine["changed"],
        f"after forward and backward {' and '.join(mine['changed'])} have other numbers: the arguments are "
        "the caller's",
        help="A slice is a view: only read it. Methods that end in _ write in place, into the whole.",
    )
    trial.close(
        f"the loss {told}",
        mine["loss"],
        right["loss"],
        alternatives=lambda: (
            rounded(mine["loss"], right["loss"])
            | {cause: slip(*given, size) for cause, slip in SLIPS.items() if size < len(x)}
        ),
        help="Add up the losses of all chunks, and divide by how many targets count in all of them.",
    )
    for number, name in enumerate(("x", "weight")):
        if not needs[number]:
            continue
        expected = right["gradients"][number]
        trial.close(
            f"the gradient of {name} {told}",
            mine["gradients"][number],
            expected,
            alternatives=rounded(mine["gradients"][number], expected)
            | of_the_loss_alone([expected], seen.scale),
            help="Gradients are those of the whole, times what comes into backward: the loss may be scaled.",
        )
        if mine["again"] is not None:
            trial.close(
                f"the gradient of {name} {told}, of a second backward through the same graph",
                mine["again"][number],
                expected,
                alternatives={SCALED_TWICE: expected * seen.scale},
                help="retain_graph=True lets backward come again: write into nothing that is kept for it.",
            )


def rounded(actual: Any, expected: Tensor) -> dict[str, Tensor | Fault]:
    """The cause of a float64 that differs from what is expected by as much as a float32 is rounded."""
    exact = isinstance(actual, Tensor) and expected.dtype == torch.float64
    step = (
        "What you widen, widen to torch.promote_types(x.dtype, torch.float32), which leaves float64 as it "
        "is. Whole numbers that are divided by each other go .to(x.dtype) before."
    )
    return {ROUNDED: Fault(actual, step)} if exact and is_close(actual, expected, rtol=1e-5) else {}


@check("chunked_cross_entropy")
def loss_and_gradients_are_those_of_the_whole(trial: Trial) -> None:
    """Loss and gradients are those of all logits at once, however targets and chunks fall, in float64 too."""
    seen = trial.once(observe)
    ended(trial, seen, seen.size, twice=True)
    ended(trial, seen, 1, dtype=torch.float64)
    for size in (len(seen.given[0]), len(seen.given[0]) + 3):
        ended(trial, seen, size)
    require_two_losses(trial, seen)
    require_nan(trial, seen)


def broken(rank: Any, size: int, *given: Tensor) -> Tensor:
    """The loss where x is NaN for one token that counts."""
    x, weight, targets = given
    x[torch.nonzero(targets != -1)[0]] = torch.nan
    return rank.submission.chunked_cross_entropy(x.requires_grad_(), weight, targets, size).detach()


def require_nan(trial: Trial, seen: SimpleNamespace) -> None:
    """A model that has broken down says so."""
    loss = trial.run(broken, seen.size, *seen.given)[0]
    trial.require(
        bool(loss.isnan().all()),
        f"x is NaN for a token that counts, and the loss is {loss.item():.6g}",
        cause="NaN is replaced or left out, where a target counts",
        help='Ask whether targets count, and not whether a loss is NaN: with reduction="sum", a chunk that '
        "counts nothing is 0.",
    )


@check("chunked_cross_entropy")
def what_needs_no_gradient_gets_none(trial: Trial) -> None:
    """x or weight may need no gradient, or both: a frozen head, or a validation."""
    seen = trial.once(observe)
    for needs in ((True, False), (False, True), (False, False)):
        ended(trial, seen, seen.size, needs)


def validate(rank: Any, size: int, *given: Tensor) -> Any:
    """A loss under no_grad, of tensors that need no gradient either."""
    with rank.record() as recording, torch.no_grad():
        rank.submission.chunked_cross_entropy(*given, size)
    return recording


X_FROZEN, WEIGHT_FROZEN = "x needs no gradient", "weight needs no gradient"
IGNORED = "every chunk has a target of -1"
ALONE = {
    X_FROZEN: "chunks are checkpointed only where x needs a gradient",
    WEIGHT_FROZEN: "chunks are checkpointed only where weight needs a gradient",
    IGNORED: "chunks are checkpointed only where all of their targets count",
}
"""A case → why in this one every chunk's logits are kept, if they are not in others."""


def observe_bytes(trial: Trial) -> SimpleNamespace:
    """Forty chunks of a head that is narrow: logits are nearly all that it makes.

    And two batches that do not divide: of one chunk and a rest, and of three and a rest; a few chunks of
    which x alone, or weight alone, needs a gradient, or each has a target of -1; and a validation.
    """
    size, width, vocabulary = trial.integer(6, 8), 4, trial.integer(3900, 4000)
    tokens = NUM_CHUNKS * size
    given = inputs(trial, tokens, width, vocabulary)

    def first(count: int) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, targets = given
        return x[:count].clone(), weight, targets[:count].clone()

    def record(how: str, count: int, needs: tuple[bool, bool] = (True, True), ignored: bool = False) -> Any:
        x, weight, targets = first(count)
        targets[: count if ignored else 0 : size] = -1
        return trial.run(step, how, size, 1.0, needs, False, x, weight, targets)[0]["recording"]

    mine, all_at_once = record("mine", tokens), record("whole", tokens)
    uneven = (size + trial.integer(2, size - 1), 3 * size + trial.integer(2, size - 1))
    cases = {X_FROZEN: ((False, True),), WEIGHT_FROZEN: ((True, False),), IGNORED: ((True, True), True)}
    recordings = {tokens: mine} | {count: record("mine", count) for count in uneven}
    return SimpleNamespace(
        mine=mine,
        whole=all_at_once,
        largest={count: recording.largest_elements for count, recording in recordings.items()},
        few={
            name: record("mine", FEW * size, *case).alive("after the forward") for name, case in cases.items()
        },
        validation=trial.run(validate, size, *first(FEW * size))[0].largest_elements,
        size=size,
        vocabulary=vocabulary,
        logits=BYTES * size * vocabulary,  # of one chunk
        gradients=BYTES * width * (tokens + vocabulary),  # of x and of weight
        states=NUM_CHUNKS * STATE_BYTES,
        product=2 * tokens * width * vocabulary,
    )


def other_cut(seen: SimpleNamespace) -> str:
    """The other way to cut that gives the largest number of tokens in every batch; "" if none does."""
    size = seen.size
    cuts = {
        f"it makes {size} chunks: chunk_size is how many tokens a chunk has": lambda n: -(-n // size),
        "the logits of all tokens exist before they are cut": lambda n: n,
        "it makes N // chunk_size chunks of equal length: where that leaves a rest, they are longer than "
        "chunk_size. Round up": lambda n: -(-n // (n // size)),
        "the last chunk takes the rest too: it is longer than chunk_size": lambda n: size + n % size,
    }
    found = {tokens: largest // seen.vocabulary for tokens, largest in seen.largest.items()}
    for text, longest in cuts.items():
        if all(longest(n) == rows or max(longest(n), rows) <= size for n, rows in found.items()):
            return text
    return ""


@check("chunked_cross_entropy")
def logits_exist_for_one_chunk_at_a_time(trial: Trial) -> None:
    """No tensor has the logits of more than one chunk, and backward makes them a chunk at a time, too."""
    seen = trial.once(observe_bytes)
    for tokens, largest in seen.largest.items():
        rows = largest // seen.vocabulary
        trial.require(
            rows <= seen.size,
            f"with chunks of {seen.size} of {tokens} tokens a tensor has {largest:,} numbers: the logits of "
            f"{rows} tokens",
            help="Cut x first, and compute the logits of a chunk: x[i : i + chunk_size] @ weight.T.",
            cause=other_cut(seen),
        )
    after, many = seen.mine.alive("after the forward"), NUM_CHUNKS * seen.logits // 2
    trial.require(
        after <= seen.gradients + seen.logits + seen.states,
        f"after the forward {after:,} bytes are alive, and one chunk's logits are {seen.logits:,}",
        help="Autograd keeps what every chunk's cross entropy needs: checkpoint the chunk.",
        cause="every chunk's logits are kept for backward" if after >= many else "",
    )
    for name, alive in seen.few.items():
        trial.require(
            alive <= seen.gradients + seen.logits + FEW * STATE_BYTES,
            f"where {name}, {alive:,} bytes are alive after the forward of {FEW} chunks, and one chunk's "
            f"logits are {seen.logits:,}",
            help="x or weight may be frozen, and targets be -1: checkpoint every chunk in each case.",
            cause=f"every chunk's logits are kept: {ALONE[name]}" if alive >= FEW * seen.logits // 2 else "",
        )
    rows = seen.validation // seen.vocabulary
    trial.require(
        rows <= seen.size,
        f"under no_grad, as in a validation, a tensor has the logits of {rows} tokens, with chunks of "
        f"{seen.size} of {FEW * seen.size}",
        help="Logits take their memory without gradients, too: cut there as everywhere.",
        cause="where no gradients are asked for, all logits are computed at once"
        if rows == FEW * seen.size
        else "",
    )
    peak, most = seen.mine.peak_bytes, 2 * seen.gradients + 5 * seen.logits + seen.states
    trial.require(
        peak <= most,
        f"at the worst moment {peak:,} bytes are alive. Five tensors of a chunk's logits, and the gradients "
        f"twice, are less than {most:,}; all logits at once make {seen.whole.peak_bytes:,}",
        help="Checkpoint each chunk by itself: what is computed again must go before the next chunk's comes.",
        cause="backward makes all chunks' logits again before it uses the first" if peak >= many else "",
    )


@check("chunked_cross_entropy")
def product_is_computed_at_most_twice(trial: Trial) -> None:
    """Forward and backward multiply at most four times: the product, once again, and two gradients."""
    seen = trial.once(observe_bytes)
    products, forward = (seen.mine.flops(after=mark) / seen.product for mark in (None, ""))
    twice = forward > 1.99 and products - forward > 1.99  # gradients of logits are left to backward
    trial.require(
        products <= 4.01,
        f"forward and backward together make {products:.1f} products of the head's size: one in the forward, "
        "one again and two for gradients are 4",
        cause=f"the forward alone makes {forward:.1f} of them, where the logits take one" if twice else "",
        help="Multiply a chunk with weight.T once, and use these logits wherever you need them."
        if twice
        else "Each chunk is computed again once. A checkpoint inside another computes it a third time.",
    )


def added_in_bfloat16(x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
    """The loss whose sum, and whose gradient of weight, are rounded with every chunk."""
    total = x.new_zeros(())
    for rows, goals in chunks(x, targets, size):
        total = total + F.cross_entropy(rows @ weight.T, goals, ignore_index=-1, reduction="sum")
    return total / (targets != -1).sum()


@check("chunked_cross_entropy", optional=True)
def small_chunks_in_bfloat16(trial: Trial) -> None:
    """In bfloat16, many small chunks round the loss and the gradient of weight no more than one does."""
    x, weight, targets = inputs(trial, 1000, 8, 40)
    given = (x / 8**0.5).bfloat16(), weight.bfloat16()
    mine = trial.run(step, "mine", 1, 1.0, (True, True), False, *given, targets)[0]

    def of(function: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in given]
        loss = function(*leaves, targets, 1)
        return loss.detach(), torch.autograd.grad(loss, leaves)[1]

    told = f"in bfloat16, with {len(x)} chunks of one token,"
    found = {f"the loss {told}": mine["loss"], f"the gradient of weight {told}": mine["gradients"][1]}
    true, rough = of(whole, torch.float64), of(added_in_bfloat16, torch.bfloat16)
    for number, (what, value) in enumerate(found.items()):
        added = ("losses", "gradients of weight")[number]
        cause = f"the chunks' {added} are added in bfloat16: once the sum is large, it hardly grows any more"
        trial.close(
            what,
            value,
            true[number],
            rtol=0.012,
            alternatives={cause: rough[number]},
            help="Add up in torch.promote_types(x.dtype, torch.float32): losses as they come, and gradients "
            "by handing each chunk a weight that is widened once, and rounded again inside.",
        )
