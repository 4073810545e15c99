"""What a module does in evaluation: the same as in training, where nothing is dropped."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import Trial, backward

from .cut_gpt import gradients_of, local


def in_evaluation(module: nn.Module, x: Tensor, upstream: Tensor | None = None) -> dict:
    """On a rank, when all else is looked at: the output under no_grad, and a pass in eval mode.

    Without an upstream gradient x is none that can have one, such as tokens.
    """
    module.eval()
    module.zero_grad()
    seen = in_silence(module, x.detach())
    if upstream is not None:
        leaf = x.detach().clone().requires_grad_()
        y = module(leaf)
        backward(y, upstream)
        seen |= {"output": _kept(y), "gradient": leaf.grad}
        seen |= {f"gradient of {name}": gradient for name, gradient in gradients_of(module).items()}
    return seen


@contextlib.contextmanager
def noted(told: str) -> Iterator[None]:
    """On a rank: an error inside is told what was special about the call."""
    try:
        yield
    except Exception as error:
        error.add_note(told)
        raise


EVALUATED = "it was a backward in evaluation mode, after eval()"
LONGER = "it was a later call, with other lengths: is something kept from the first one?"


def twice_as_long(module: nn.Module, x: Tensor) -> Any:
    """On a rank: the output of a later call, for x (b, s, h) and behind it x once more."""
    with noted(LONGER), torch.no_grad():
        return _kept(module(torch.cat([x, x], 1).detach()))


def later_is_right(trial: Trial, what: str, found: list, right: Any) -> None:
    """What a later call has made, with sequences of another length."""
    trial.close(
        f"{what} of a later call, with other lengths,",
        found,
        right,
        help="Positions and masks are those of the sequence that comes in: keep none of an earlier one.",
    )


def without_gradients(call: Callable[..., Any], *given: object) -> Any:
    """On a rank: what a call returns under no_grad."""
    with noted("it was called under torch.no_grad(), where no tensor wants a gradient"), torch.no_grad():
        return _kept(call(*given))


def in_silence(call: Callable[..., Any], *given: Any) -> dict:
    """On a rank: what a call returns under no_grad, and which of the tensors that it is given it changes."""
    before = {i: x.clone() for i, x in enumerate(given, start=1) if isinstance(x, Tensor)}
    silent = without_gradients(call, *given)
    changed = [f"argument {i}" for i, was in before.items() if not torch.equal(given[i - 1], was)]
    return {"silent": silent, "changed": changed}


def stay_in_silence(trial: Trial, found: list[dict]) -> None:
    """What `in_silence` has found by rank: nothing that was given is changed."""
    for rank, each in enumerate(found):
        trial.require(
            not each["changed"],
            f"changed by a call in evaluation, under no_grad: {', '.join(each['changed'])}",
            help="What a call is given is in use elsewhere in evaluation, too, as in a residual connection: "
            "work on a copy, whether somebody wants gradients or not.",
            rank=rank,
        )


def _kept(output: Any) -> Any:
    """A copy of what a call returned; what is no tensor stays what it is, and the checks say so."""
    if isinstance(output, tuple):
        return tuple(map(_kept, output))
    return local(output.detach()).clone() if isinstance(output, Tensor) else output


HELP = "In evaluation, and where no gradient is wanted, everything takes place as in training."


def _is_seen(output: Any) -> bool:
    """Whether there is something to compare with: NaN equals nothing."""
    return isinstance(output, Tensor) and not output.isnan().any()


def evaluates_alike(trial: Trial, results: list[dict], kind: str = "") -> None:
    """Under no_grad and in eval mode a rank has what it had in training.

    Each result has `output`, perhaps `gradient` and `gradients`, and under `evaluation` what
    `in_evaluation` or `in_silence` saw; what is wrong in training, or NaN, is another check's.
    """
    stay_in_silence(trial, [result["evaluation"] for result in results])
    told = f" ({kind})" if kind else ""
    for key, what, same_as in (
        ("output", "the output in eval mode", "output"),
        ("silent", "the output in evaluation, under no_grad,", "output"),
        ("gradient", "the gradient of x in eval mode", "gradient"),
    ):
        before = [result.get(same_as) for result in results]
        if key in results[0]["evaluation"] and all(map(_is_seen, before)):
            found = [result["evaluation"].get(key) for result in results]
            trial.close(f"{what}{told}", found, before, help=HELP)
    for name in results[0].get("gradients", {}):
        before = [result["gradients"].get(name) for result in results]
        if all(map(_is_seen, before)):
            found = [result["evaluation"].get(f"gradient of {name}") for result in results]
            trial.close(f"the gradient of {name} in eval mode{told}", found, before, help=HELP)
