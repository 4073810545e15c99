"""Functions of a tensor and a group, of which the forward or the backward communicates."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from grader.checks import BACKWARD, Recording, Trial, backward, each_rank, is_close

from .cut_gpt import local
from .evaluation import evaluates_alike, in_silence, noted
from .results import overwritten, results_stay
from .wire import lie_in_one_piece

Draw = Callable[[Trial, str, torch.dtype], SimpleNamespace]
"""For a function's name: `xs` and `upstreams` by rank, and what is right, `outputs` and `gradients`."""

LAYOUT = "rank 0's stored transposed"
"""A kind of tensors: the same numbers as in the plain case, which lie differently in memory on one rank."""

KINDS = {
    LAYOUT: torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}


ONE_PIECE = (
    "Hand over contiguous tensors: x.contiguous() to read from, "
    "x.clone(memory_format=torch.contiguous_format) to write into."
)


def stored_transposed(x: Tensor) -> Tensor:
    """The same numbers, stored in another order."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def pair_probe(rank, name: str, cases: list) -> list[dict]:
    return [one_pair(rank, getattr(rank.submission, name), *case) for case in cases]


def one_pair(rank, function: Callable, x: Tensor, upstream: Tensor, transposed: bool) -> dict:
    """On a rank: forward, backward, and whether somebody's tensors were changed."""
    if transposed and rank.group.rank() == 0:
        x, upstream = stored_transposed(x), stored_transposed(upstream)
    leaf = x.clone().requires_grad_()
    handed = leaf * 1.0
    before, given = handed.detach().clone(), upstream.clone()
    told = noted("x was a single number, without dimensions") if x.dim() == 0 else contextlib.nullcontext()
    with told, rank.record() as recording:
        y = function(handed, rank.group)
        after_forward = handed.detach().clone()
        recording.mark(BACKWARD)
        backward(y, upstream)
    return {
        "output": y,
        "held": bytes_held(y),
        "gradient": leaf.grad,
        "x_changed": not torch.equal(before, after_forward),
        "upstream_changed": not torch.equal(given, upstream),
        "recording": recording,
        "again": pass_again(rank, function, handed, upstream) if handed._backward_hooks else None,
    }


def pass_again(rank, function: Callable, x: Tensor, upstream: Tensor) -> Recording:
    """On a rank: a call more with an x on which the one before has left something, and its backward."""
    with rank.record() as recording:
        y = function(x, rank.group)
        recording.mark(BACKWARD)
        if isinstance(y, Tensor) and y.requires_grad and y.shape == upstream.shape:
            torch.autograd.grad(y, x, upstream, allow_unused=True)
    return recording


def bytes_held(y: object) -> int:
    """On a rank: what a tensor keeps alive; 0 where nothing tells."""
    try:
        return local(y).untyped_storage().nbytes()
    except (AttributeError, RuntimeError):
        return 0


def twice_probe(rank, name: str, x: Tensor, upstream: Tensor) -> list[str]:
    """What a second call of a function changes of the first one's results."""
    function = getattr(rank.submission, name)
    return overwritten(lambda x: function(x, rank.group), x, upstream=upstream)


def quiet_probe(rank, name: str, x: Tensor) -> dict:
    """What a function returns under no_grad, and whether it changes x."""
    return in_silence(getattr(rank.submission, name), x, rank.group)


def left_alone(
    trial: Trial, rank: int, result: dict, where: str = "", cause: str = "", help: str = ""
) -> None:
    """On this rank neither x nor the gradient that came in was changed."""
    trial.require(
        not result["x_changed"],
        f"x itself was changed by the call{where}",
        help=help
        or "Work on a copy: a collective writes into the tensor it is given, and += on a view into what it "
        "is a view of.",
        rank=rank,
        cause=cause,
    )
    trial.require(
        not result["upstream_changed"],
        f"the gradient that came into backward was changed in place{where}",
        help=help
        or "A residual connection hands it to its other branch, too: change a copy, such as "
        "clone(memory_format=torch.contiguous_format). contiguous() is none where it is contiguous already.",
        rank=rank,
        cause=cause,
    )


class Pairs:
    """How the checks of a lesson look at such functions: what they draw, and what the ranks did.

    So many leading dimensions come before the one that is cut, where two ranks are the world.
    """

    def __init__(self, draw: Draw, leading: int) -> None:
        self.draw, self.leading = draw, leading
        self._plain: dict[str, Callable[[Trial], SimpleNamespace]] = {}

    def plain(self, trial: Trial, name: str) -> SimpleNamespace:
        """The plain case, in float32; the same for all checks of a trial."""
        if name not in self._plain:
            self._plain[name] = lambda trial: self._run(
                trial, name, [self.draw(trial, name, torch.float32)], [False]
            )[0]
        return trial.once(self._plain[name])

    def _run(
        self, trial: Trial, name: str, cases: list[SimpleNamespace], transposed: list[bool]
    ) -> list[SimpleNamespace]:
        """The cases, with `results` by rank."""
        runs = [
            ([(c.xs[r], c.upstreams[r], t) for c, t in zip(cases, transposed, strict=True)],)
            for r in range(trial.num_ranks)
        ]
        results = trial.run(pair_probe, name, per_rank=runs)
        return [
            SimpleNamespace(**{**vars(case), "results": [result[number] for result in results]})
            for number, case in enumerate(cases)
        ]

    def leave_inputs_alone(self, trial: Trial, name: str) -> None:
        """Neither x nor the gradient that comes in is changed."""
        plain = self.plain(trial, name)
        for rank, result in enumerate(plain.results):
            left_alone(trial, rank, result)
        if trial.in_full:
            row = (slice(1),) * self.leading
            first = {key: [x[row] for x in getattr(plain, key)] for key in ("xs", "upstreams")}
            (alone,) = self._run(trial, name, [SimpleNamespace(**first)], [False])
            for rank, result in enumerate(alone.results):
                sizes = [tuple(case.xs[rank].shape) for case in (alone, plain)]
                where = f" where x is {sizes[0]}, and not where it is {sizes[1]}"
                cause = "contiguous() copies nothing where memory is contiguous, as a part of one row is"
                left_alone(trial, rank, result, where, cause, "clone() always copies.")

    def work_without_gradients(self, trial: Trial, name: str) -> None:
        """Under no_grad the output is the same, and x stays as it is."""
        plain = self.plain(trial, name)
        silent = trial.run(quiet_probe, name, per_rank=[(x,) for x in plain.xs])
        results = [
            {"output": result["output"], "evaluation": each}
            for result, each in zip(plain.results, silent, strict=True)
        ]
        evaluates_alike(trial, results)

    def keep_results(self, trial: Trial, name: str) -> None:
        """A second call leaves the first one's results alone."""
        plain = self.plain(trial, name)
        runs = list(zip(plain.xs, plain.upstreams, strict=True))
        results_stay(trial, trial.run(twice_probe, name, per_rank=runs))

    def take_any_kind(self, trial: Trial, name: str, more: dict[str, SimpleNamespace] | None = None) -> None:
        """Other dtypes, tensors that lie differently in memory on different ranks, and `more` cases."""
        plain = self.plain(trial, name)
        cases = {kind: plain if kind == LAYOUT else self.draw(trial, name, d) for kind, d in KINDS.items()}
        cases |= more or {}
        seen = self._run(trial, name, list(cases.values()), [kind == LAYOUT for kind in cases])
        for kind, case in zip(cases, seen, strict=True):
            dtype = KINDS.get(kind, torch.float32)
            for what, key, right in (
                ("the output", "output", case.outputs),
                ("the gradient of x", "gradient", case.gradients),
            ):
                actual = each_rank(case, key)
                if (
                    kind == LAYOUT
                    and all_close(each_rank(plain, key), right)
                    and not all_close(actual, right)
                ):
                    trial.wrong(
                        f"{what} is wrong where rank 0's tensors are stored transposed, and right where the "
                        "same numbers lie alike on all ranks",
                        help=ONE_PIECE,
                        cause="a collective takes numbers in the order in which they lie in memory. clone() "
                        "and empty_like() keep that order, whatever it is (NCCL refuses such tensors)",
                    )
                trial.close(f"{what} ({kind})", actual, [each.to(dtype) for each in right])
            lie_in_one_piece(trial, each_rank(case, "recording"), ONE_PIECE)


def all_close(actual: list[Tensor | None], expected: list[Tensor]) -> bool:
    """Whether every rank has what it should have, up to the order of sums."""
    return all(isinstance(a, Tensor) and is_close(a, e) for a, e in zip(actual, expected, strict=True))
