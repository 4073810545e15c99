"""Checks of `checkpoint`: inputs of all kinds, and those of which none needs a gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks import Trial, check

from .models import Layers, build, checkpoint_of, gradients, seeing


class Table(nn.Module):
    """Functions of inputs that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, 6)
        self.layers = Layers(6)
        self.unused = nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.rows(tokens))

    def of_no_tensor(self, nothing: None, factor: int) -> Tensor:
        return self.layers(self.rows.weight) * factor


WITHOUT = {
    "of a tensor that needs no gradient": lambda table, x, tokens: (table.layers, x),
    "of tokens": lambda table, x, tokens: (table, tokens),
    "of None and a number": lambda table, x, tokens: (table.of_no_tensor, None, 3),
}


def without_gradient(rank: Any, how: str, seed: int, x: Tensor, tokens: Tensor) -> dict:
    """By case, a checkpoint of which no input needs a gradient; in "frozen" no weight does either."""
    seen = {}
    for case, call in WITHOUT.items():
        table = build(Table, seed, rank.device)
        y = checkpoint_of(rank, how)(*call(table, x, tokens))
        seen[case] = {"connected": y.requires_grad, "output": y.detach().clone(), "gradients": {}}
        if not y.requires_grad:
            break  # the check ends here
        with seeing(table.layers.calls):
            y.square().sum().backward()
        seen[case]["gradients"] = gradients(table)
    return {"cases": seen, "frozen": frozen(checkpoint_of(rank, how), seed, x)}


def frozen(checkpoint: Callable[..., Tensor], seed: int, x: Tensor) -> dict:
    """A checkpoint in which nothing needs a gradient, before a weight that does; or why that failed."""
    layers = build(lambda: Layers(6), seed, x.device).requires_grad_(False)
    scale = nn.Parameter(torch.ones(6, device=x.device))
    try:
        (checkpoint(layers, x) * scale).sin().sum().backward()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "", "gradient": scale.grad, "given": gradients(layers)}


def observe_without_gradient(trial: Trial) -> list[dict]:
    """With the checkpoint and without."""
    inputs = trial.normal(5, 6), trial.tokens(11, 5)
    seed, seeds = trial.seed(), [trial.seed()]
    return [trial.run(without_gradient, how, seed, *inputs, seeds=seeds)[0] for how in ("mine", "plain")]


@check("checkpoint")
def weights_learn_where_no_input_needs_a_gradient(trial: Trial) -> None:
    """Weights used inside get their gradients also when no input needs one, or none is a tensor."""
    all_mine, all_plain = trial.once(observe_without_gradient)
    for case, mine in all_mine["cases"].items():
        plain = all_plain["cases"][case]
        trial.require(
            mine["connected"],
            f"a checkpoint {case}: its output does not require a gradient, so the weights inside never learn",
            help="autograd calls the backward of a Function only if an input of apply() needs a gradient: "
            "hand it a tensor of your own besides, such as torch.empty(0, requires_grad=True). (The first "
            "block of a model whose embedding is frozen is such a place.)",
        )
        trial.close(f"the output of a checkpoint {case}", mine["output"], plain["output"])
        for name, expected in plain["gradients"].items():
            if expected is None:
                trial.require(
                    mine["gradients"][name] is None,
                    f"{name}, a weight that a checkpoint {case} does not use, has a gradient afterwards",
                    help="backward() leaves it at None: an optimizer skips None, and decays a weight whose "
                    "gradient is 0.",
                )
            else:
                trial.close(
                    f"the gradient of {name}, a weight inside a checkpoint {case},",
                    mine["gradients"][name],
                    expected,
                    help="torch.autograd.backward reaches all weights that the second call used, unless it "
                    "is told `inputs`; torch.autograd.grad reaches what it is asked for.",
                )


@check("checkpoint")
def nothing_inside_may_need_a_gradient(trial: Trial) -> None:
    """A checkpoint in which nothing needs a gradient, as of a frozen block, does not disturb backward."""
    mine, plain = (seen["frozen"] for seen in trial.once(observe_without_gradient))
    trial.require(
        not mine["error"],
        "backward ends in an error where neither the input nor any weight inside needs a gradient, but what "
        f"is computed with the output does: {mine['error']}",
        help="Call backward on what the second call returns only if it requires a gradient. (The first, "
        "frozen blocks of a model that is fine-tuned are such a place.)",
        cause="what the second call returns has no graph here"
        if "does not require grad" in mine["error"]
        else "",
    )
    trial.close("the gradient of a weight after a frozen checkpoint", mine["gradient"], plain["gradient"])
    given = [name for name, gradient in mine["given"].items() if gradient is not None]
    trial.require(not given, f"frozen weights inside have a gradient afterwards: {', '.join(given)}")


class Mixed(nn.Module):
    """A function of inputs of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7))
        self.seen: list[list[str]] = []

    def forward(self, *inputs: Any) -> Tensor:
        self.seen.append([type(each).__name__ for each in inputs])
        x, power, nothing, word, rows, fixed, z, row, mask, options, _, same = inputs
        x = x[rows].tanh() ** power * self.weight + fixed
        if word == "double" and nothing is None and options["shift"]:
            x = 2 * x + options["shift"][0]
        return torch.where(mask, x, z) * row * same.mean()


ONE_ROW = "an input of one dimension"


UNUSED = "an input that the function does not use"


@contextmanager
def told_of_unused(without: Callable[[], None]) -> Iterator[None]:
    """An error inside is told with its cause if all is well `without` the input that is not used."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):
            without()
            error.add_note(
                "an input needs a gradient, and the function does not use it: backward leaves its gradient "
                "at None, and so should this one"
            )
        raise


def all_kinds(rank: Any, how: str, seed: int, tensors: dict[str, Tensor]) -> dict:
    """A checkpoint of numbers, words, None, tensors of all dtypes, and the same tensor twice."""
    module = build(Mixed, seed, rank.device)
    a, z, row, unused = (tensors[name].requires_grad_() for name in ("x", "z", "row", UNUSED))
    fixed, mask = tensors["fixed"], tensors["mask"]
    other = a.detach().clone().requires_grad_()  # to tell what each of the two places passes back
    x, same = a * 1.5, (other if how == "plain" else a) * 1.5
    options = {"shift": [0.5]}
    inputs = (x, 2, None, "double", tensors["rows"], fixed, z, row, mask, options, unused, same)
    if how != "plain":
        inputs = (*inputs[:-1], x)
    checkpoint, upstream = checkpoint_of(rank, how), tensors["upstream"]
    with told_of_unused(lambda: checkpoint(module, *inputs[:-2], None, inputs[-1]).backward(upstream)):
        y = checkpoint(module, *inputs)
        y.backward(upstream)
    gradient = {"x": a.grad, "z": z.grad, ONE_ROW: row.grad, "the weight": module.weight.grad}
    gradient |= {"a tensor without": fixed.grad, "the last input": other.grad, UNUSED: unused.grad}
    return {"output": y.detach().clone(), "gradients": gradient, "seen": module.seen}


@check("checkpoint")
def inputs_are_of_any_kind(trial: Trial) -> None:
    """Inputs may be numbers, words, None, a dictionary, and tensors of which some need no gradient."""
    rows = trial.integer(4, 9)
    tensors = {
        "x": trial.normal(6, 7),
        "z": trial.normal(rows, 7),
        "row": trial.normal(7),
        UNUSED: trial.normal(7),
        "fixed": trial.normal(rows, 7),
        "rows": trial.tokens(6, rows),
        "mask": trial.normal(rows, 7) > 0,
        "upstream": trial.normal(rows, 7),
    }
    seed, seeds = trial.seed(), [trial.seed()]
    mine, plain = (trial.run(all_kinds, how, seed, tensors, seeds=seeds)[0] for how in ("mine", "plain"))
    trial.close("the output", mine["output"], plain["output"])
    for call in mine["seen"]:
        expected = ["Tensor" if name == "Parameter" else name for name in plain["seen"][0]]
        help = "Hand the function what you were handed, in the same places, in both calls."
        trial.equal("the kinds of inputs that the function is called with", call, expected, help=help)
    trial.require(
        mine["gradients"]["a tensor without"] is None, "a tensor that needs no gradient has one afterwards"
    )
    trial.require(
        mine["gradients"][UNUSED] is None,
        f"{UNUSED} has a gradient afterwards",
        help="backward() leaves it at None: an optimizer skips None, and decays what has a gradient of 0.",
    )
    first, last = (plain["gradients"][name] for name in ("x", "the last input"))
    places = {"that of its first place alone": first, "that of its last place alone": last}
    help = "x comes in twice: what both places pass back adds up. Return a gradient for every input."
    trial.close("the gradient of x", mine["gradients"]["x"], first + last, alternatives=places, help=help)
    help = "Return a gradient for every input that needs one, whatever its shape."
    for name in ("z", ONE_ROW, "the weight"):
        trial.close(f"the gradient of {name}", mine["gradients"][name], plain["gradients"][name], help=help)
