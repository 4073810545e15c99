"""How slices start that were drawn, not copied."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from grader.checks import Trial


def start_probe(rank, kind: str, arguments: tuple, seeds: tuple[int, int], uneven: tuple) -> dict:
    """Layers built directly: two in a row, one without bias, one by another seed, and the first once more.

    And one of other sizes, `uneven`, where there are some.
    """

    def build(sizes: tuple = arguments, **options) -> nn.Module:
        return getattr(rank.submission, kind)(*sizes, group=rank.group, **options)

    def drawn(layer: nn.Module) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in layer.named_parameters()}

    rank.seed(seeds[0])
    states = [torch.get_rng_state()]
    first = drawn(build())
    seed = torch.initial_seed()
    states.append(torch.get_rng_state())
    second = drawn(build())
    began_anew = torch.equal(states[1], torch.get_rng_state()) and not torch.equal(*states)
    later = torch.rand(8)
    rank.seed(seeds[1])
    other = drawn(build())
    rank.seed(seeds[0])
    again = drawn(build())
    bare = sorted(drawn(build(bias=False))) if "bias" in first else ["weight"]
    found = {"first": first, "second": second, "other": other, "again": again, "later": later, "bare": bare}
    found |= {"uneven": drawn(build(uneven)) if uneven else {}, "began anew": began_anew, "seed": seed}
    return found


SEEDED = (
    "the constructor seeds torch's global generator, so whatever is drawn after it begins anew",
    "Leave the global stream as it goes on. For slices that differ draw the whole matrix from it, the same "
    "on every rank, and keep this rank's part.",
)
"""Cause and next step."""


def starts_as_slices(
    trial: Trial, kind: str, arguments: tuple, shape: tuple, uneven: tuple = ()
) -> list[dict]:
    """The weights of ranks that are seeded alike are slices of one random layer. Results by rank."""
    seeds = (trial.integer(1, 10**6), trial.integer(10**6 + 1, 2 * 10**6))
    results = trial.run(start_probe, kind, arguments, seeds, uneven)
    for result in results:
        trial.equal("the parameters without bias", list(result["bare"]), ["weight"])
        weight = result["first"].get("weight")
        trial.equal("the shape of weight", None if weight is None else tuple(weight.shape), shape)
    weights = {
        which: [r[which]["weight"] for r in results] for which in ("first", "second", "other", "again")
    }
    is_drawn(trial, "the initial weight", weights["first"], 0.02, arguments[0])
    no_twins(trial, "the initial weight", weights["first"])
    for which, message, help in (
        (
            "second",
            "two layers that were built one after the other start with the same numbers",
            "A stream with a seed of its own begins anew for each layer: draw from torch's global one.",
        ),
        (
            "other",
            "the initial weight is the same whatever torch.manual_seed was told",
            "Draw from torch's global stream, or seed a generator with a number from there.",
        ),
    ):
        for rank, (one, same) in enumerate(zip(weights[which], weights["first"], strict=True)):
            anew = which == "second" and results[rank]["began anew"]
            trial.require(
                not torch.equal(one, same), message, help=SEEDED[1] if anew else help, rank=rank,
                cause=SEEDED[0] if anew else "",
            )  # fmt: skip
    for rank, result in enumerate(results):
        trial.require(
            torch.equal(weights["again"][rank], weights["first"][rank]),
            "the initial weight is another one after the same torch.manual_seed",
            help="A run that cannot be repeated cannot be debugged: draw from torch's global stream.",
            rank=rank,
        )
        trial.require(
            torch.equal(result["later"], results[0]["later"]),
            "ranks that were seeded alike draw different numbers after the layer was built: what comes next, "
            "replicated or not, starts differently on each",
            help="Draw the whole layer on every rank and keep a slice; or seed a generator of the layer's "
            "own, with a number from the global stream and the rank.",
            rank=rank,
            cause="the constructor seeds torch's global generator, on each rank otherwise, and leaves it so"
            if result["seed"] != results[0]["seed"]
            else "",
        )
    return results


def is_drawn(trial: Trial, what: str, weights: Sequence[Tensor], deviation: float, in_features: int) -> None:
    """Each rank's weight has this standard deviation, about zero. `in_features` are the dense layer's."""
    for rank, weight in enumerate(weights):
        spread = weight.double().std().item()
        trial.require(
            0.8 * deviation < spread < 1.2 * deviation,
            f"{what} has a standard deviation of {spread:.3g}, where {deviation:.3g} is expected",
            help="torch.empty holds whatever was there: draw it."
            if not 1e-4 < spread < 10
            else f"tensor.normal_(std={deviation:.3g})",
            cause="it is what nn.Linear draws by itself"
            if math.isclose(spread, (3 * in_features) ** -0.5, rel_tol=0.1)
            else "",
            rank=rank,
        )
        mean = weight.double().mean().item()
        trial.require(
            abs(mean) < 6 * deviation / math.sqrt(weight.numel()),
            f"{what} has a mean of {mean:.3g}, where 0 is expected",
            rank=rank,
        )


def no_twins(trial: Trial, what: str, weights: Sequence[Tensor]) -> None:
    """No two ranks start with the same slice, or with one that follows from the other's."""
    for rank, weight in enumerate(weights):
        for other in range(rank):
            both = torch.stack([weight.double().flatten(), weights[other].double().flatten()])
            alike = torch.corrcoef(both)[0, 1].abs().item()
            trial.require(
                alike < 6 / math.sqrt(weight.numel()),
                f"ranks {other} and {rank}, which were seeded alike, have the same slice: {what} is a twin",
                help="Twins compute and learn the same, for ever. Draw the whole layer on every rank, and "
                "keep the r-th slice.",
                rank=rank,
            )


def is_zero(trial: Trial, what: str, biases: Sequence[Tensor | None], size: int) -> None:
    """A bias of this size starts at zero."""
    for rank, bias in enumerate(biases):
        trial.require(
            isinstance(bias, Tensor) and tuple(bias.shape) == (size,),
            f"{what} has shape {tuple(getattr(bias, 'shape', ()))} where {(size,)} is expected",
            rank=rank,
        )
        trial.require(not bias.any(), f"{what} is not zero", help="torch.zeros.", rank=rank)
