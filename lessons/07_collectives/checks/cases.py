"""What the collectives of this lesson are asked: tensors of many sizes, dtypes and layouts in memory."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grader.checks import Fault, Trial, is_close
from lessons_shared.results import memory_of, results_stay

PLAIN, TRANSPOSED, SPACED = "", "transposed", "every other element"
MIXED = "transposed, but on rank 0"
CHANNELS_LAST = "channels_last, on rank 0 alone"
FILL = 77  # what stands between the elements of a spaced tensor
IN_FLOAT32 = "it went through float32, which keeps 24 bits of a number: its last digits are lost"
IN_FLOAT64 = "it went through float64, in which whole numbers above 2^53 lose their last digits"
NOT_INTO_IT = (
    "contiguous(), flatten() and reshape() give the input's own memory, where it is contiguous: receive into "
    "new memory."
)
LATE = 0.15  # seconds: the others have passed three delays by then


@dataclass(frozen=True)
class Case:
    """One call: a tensor for each rank, all of one shape and dtype."""

    values: list[Tensor]
    layout: str = PLAIN
    """How it lies in memory; with MIXED and CHANNELS_LAST, otherwise on rank 0 than on the others."""
    source: int | None = None
    """For a broadcast: the rank that has the tensor."""

    def __str__(self) -> str:
        first = self.values[0]
        dtype, shape = str(first.dtype).removeprefix("torch."), tuple(first.shape)
        told = f"{shape[0]} {dtype}" if len(shape) == 1 else f"{dtype} of shape {shape}"
        layout = f", not contiguous ({self.layout})" if self.layout else ""
        return told + layout + ("" if self.source is None else f", source {self.source}")

    @property
    def num_elements(self) -> int:
        """Of one rank's tensor."""
        return self.values[0].numel()

    @property
    def num_bytes(self) -> int:
        """Of one rank's tensor."""
        return self.num_elements * self.values[0].element_size()

    @property
    def chunk_size(self) -> int:
        """Elements of an n-th of it, rounded up."""
        return -(-self.num_elements // len(self.values))

    @property
    def total(self) -> Tensor:
        """The sum over ranks, added up in double precision or whole numbers."""
        first = self.values[0]
        wide = torch.float64 if first.is_floating_point() else torch.int64
        return torch.stack([value.to(wide) for value in self.values]).sum(0).to(first.dtype)


def draw(
    trial: Trial,
    *shape: int,
    dtype: torch.dtype = torch.float32,
    layout: str = PLAIN,
    source: int | None = None,
) -> Case:
    """A case with other numbers on each rank. Whole numbers use the width of their type."""

    def values() -> Tensor:
        if dtype == torch.bool:
            return trial.tokens(2, *shape).bool()
        if not dtype.is_floating_point:
            half = 2 ** (8 * dtype.itemsize - 5)
            return (trial.tokens(2 * half, *shape) - half).to(dtype)
        return trial.normal(*(shape or (1,)), dtype=dtype).view(shape)

    return Case([values() for _ in range(trial.num_ranks)], layout, source)


def sizes(trial: Trial) -> list[Case]:
    """Sizes that do not divide, smaller than n, of no dimension and of many."""
    n = trial.num_ranks
    return [
        draw(trial, n * trial.integer(2, 5) + 1),
        draw(trial, 3, n + 1, 5),
        draw(trial, max(n - 1, 1)),
        draw(trial, 1),
        draw(trial),
    ]


def dtypes(trial: Trial, *kinds: torch.dtype) -> list[Case]:
    """One small tensor of each dtype."""
    return [draw(trial, 3 * trial.num_ranks + 1, dtype=kind) for kind in kinds]


def layouts(trial: Trial) -> list[Case]:
    """Tensors that do not lie in one piece, or not in the same order on all ranks."""
    n = trial.num_ranks
    return [
        draw(trial, n + 2, 5, layout=TRANSPOSED),
        draw(trial, 4, 2 * n + 1, layout=SPACED),
        draw(trial, n + 1, 6, layout=MIXED),
        draw(trial, 2, 3, n, 2, layout=CHANNELS_LAST),
    ]


def lay_out(values: Tensor, layout: str, rank: int) -> tuple[Tensor, Tensor | None]:
    """The same values in another layout, and what lies between them."""
    if layout == TRANSPOSED or (layout == MIXED and rank > 0):
        return values.transpose(0, -1).contiguous().transpose(0, -1), None
    if layout == CHANNELS_LAST and rank == 0:
        return values.contiguous(memory_format=torch.channels_last), None
    if layout == SPACED:
        wide = torch.full((*values.shape, 2), FILL, dtype=values.dtype, device=values.device)
        wide[..., 0] = values
        return wide[..., 0], wide[..., 1]
    return values.clone(), None


def as_it_lies(case: Case) -> list[Tensor]:
    """What a broadcast leaves, by rank, where numbers leave in the order in which they lie in memory."""

    def memory(tensor: Tensor) -> Tensor:
        return tensor.as_strided((tensor.numel(),), (1,))

    tensors = [lay_out(value, case.layout, r)[0] for r, value in enumerate(case.values)]
    buffers = [tensor.clone() for tensor in tensors]  # which keep strides, but for gaps
    sent = memory(buffers[case.source]).clone()
    for buffer in buffers:
        memory(buffer).copy_(sent)
    return buffers


@contextmanager
def told_of_sources(rank: Any, source: int | None, before: list[int | None]) -> Iterator[None]:
    """A rank that sends to itself inside, and did not while the source was 0, is told what that means.

    In the whole world alone: in another group, a rank of the world may be taken for one in the group.
    """
    try:
        yield
    except RuntimeError as error:
        in_the_world = rank.num_ranks == dist.get_world_size()
        if source and 0 in before and in_the_world and "Pair is not connected" in str(error):
            error.add_note(
                f"it is right for source 0 alone: with source {source} a rank sends to itself, or waits for "
                "itself. Are peers counted from the source? Such a place is no rank: add the source, mod n"
            )
        raise


@contextmanager
def told_of_pieces(name: str, n: int, tensor: Tensor) -> Iterator[None]:
    """An index that is out of range inside, where chunk makes too few pieces of the tensor, is told so.

    Of a tensor without dimensions, it may be the index of its shape.
    """
    try:
        yield
    except IndexError as error:
        size, length = tensor.numel(), -(-tensor.numel() // n)
        made, is_list = -(-size // length), "index out of range" in str(error)
        if name in ("ring_reduce_scatter", "ring_all_reduce") and is_list and tensor.dim() and made < n:
            error.add_note(
                f"of a tensor of {size}, pieces of {length}, as chunk({n}) and split({length}) make them, "
                f"are {made}, and there are {n} ranks: fill it up with zeros to {n * length} first"
            )
        raise


def call(
    rank: Any,
    name: str,
    late: bool,
    values: list[Tensor],
    layouts: list[str],
    sources: list[int | None],
) -> dict[str, Any]:
    """The probe: every case in turn, each in a stretch of the recording named by its number.

    With `late`, the source of a broadcast, or rank 0 of a ring, comes after everybody else.
    """
    function = getattr(rank.submission, name)
    answers = []
    with rank.record() as recording:
        for i, (value, layout, source) in enumerate(zip(values, layouts, sources, strict=True)):
            tensor, between = lay_out(value, layout, rank.rank)
            memory = tensor.detach()  # a view of its own, which stays where it is
            arguments = [tensor] if source is None else [tensor, source]
            recording.mark(f"{i}")
            if late and rank.rank == (source or 0):
                time.sleep(LATE)
            with told_of_pieces(name, rank.num_ranks, tensor), told_of_sources(rank, source, sources[:i]):
                returned = function(*arguments, rank.group)
            recording.mark("after")
            is_tensor = isinstance(returned, Tensor)
            answers.append(
                {
                    "returned": returned.clone() if is_tensor else None,
                    "kind": "a tensor" if is_tensor else type(returned).__name__,
                    "tensor": tensor,
                    "memory": memory,
                    "between": between,
                }
            )
    return {"answers": answers, "recording": recording, "device": rank.device.type}


def ask(trial: Trial, name: str, cases: Sequence[Case], delays: bool = False) -> SimpleNamespace:
    """Call an exercise with all cases; `answers[i][r]` is what rank r made of case i."""
    results = trial.run(
        call,
        name,
        delays,
        per_rank=[
            ([c.values[r] for c in cases], [c.layout for c in cases], [c.source for c in cases])
            for r in range(trial.num_ranks)
        ],
        delays=delays,
    )
    answers = [[result["answers"][i] for result in results] for i in range(len(cases))]
    return SimpleNamespace(
        cases=list(cases),
        answers=answers,
        recordings=[result["recording"] for result in results],
        device=results[0]["device"],
    )


def through_float64(case: Case, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, Fault]:
    """What explains sums of int64 that a float64 holds, and that are as far off as it rounds."""
    if case.total.dtype != torch.int64:
        return {}
    most = len(case.values) * max(value.abs().max().item() for value in case.values) // 2**51
    wrong = [(a, e) for a, e in zip(actual, expected, strict=True) if not torch.equal(a, e)]
    if not wrong or not all(
        a.shape == e.shape and torch.equal(a.double().long(), a) and (a - e).abs().max() <= most
        for a, e in wrong
    ):
        return {}
    return {IN_FLOAT64: Fault(actual, "Send and add up whole numbers as they are, in their own dtype.")}


def require_tensors(trial: Trial, case: Case, answers: list[dict[str, Any]], key: str = "returned") -> None:
    """Every rank has a tensor of the case's dtype."""
    for r, answer in enumerate(answers):
        tensor, dtype = answer[key], case.values[0].dtype
        trial.require(
            tensor is not None,
            f"given {case} it returned {answer['kind']}, not a tensor",
            help="Is the `return` missing?",
            rank=r,
        )
        trial.require(
            tensor.dtype == dtype,
            f"given {case} it returned {str(tensor.dtype).removeprefix('torch.')}",
            help="Make new tensors with new_empty, new_zeros or empty_like: they keep dtype and device.",
            rank=r,
        )


def require_in_place(
    trial: Trial, case: Case, answers: list[dict[str, Any]], expected: Tensor, rtol: float | None = None
) -> None:
    """Whoever else looks at the tensor's memory sees what came."""
    trial.close(
        f"another view of the tensor's memory ({case}) after the call",
        [answer["memory"] for answer in answers],
        expected,
        alternatives={
            "what it held before: the tensor was given other memory, as `tensor.data = ...` does": case.values
        },
        rtol=rtol,
        help="In place is in the same memory: tensor.copy_(...).",
    )


def called_twice(rank: Any, name: str, one: Any, other: Any) -> dict[str, bool]:
    """The probe: what of a call's result, a tensor or a list of some, another call has changed.

    To it belongs whether what the other call returned lies in the same memory.
    """
    function, layer = getattr(rank.submission, name), [torch.neg] * (name == "relay_microbatches")

    def call(given: Any) -> list[Tensor]:
        returned = function(*layer, given, rank.group)
        return [returned] if isinstance(returned, Tensor) else list(returned or [])

    tensors = call(one)
    before = [tensor.clone() for tensor in tensors]
    lie_in = {memory_of(tensor) for tensor in call(other)}
    changed = [now for now, then in zip(tensors, before, strict=True) if not torch.equal(now, then)]
    return {"the output": all(memory_of(tensor) in lie_in for tensor in changed)} if changed else {}


def require_own_memory(trial: Trial, name: str, given: Callable[[], Any]) -> None:
    """Another call, with other numbers of the same shapes, leaves what was returned. `given` draws them."""
    results_stay(
        trial, trial.run(called_twice, name, per_rank=[(given(), given()) for _ in range(trial.num_ranks)])
    )


def fits_any(actual: Sequence[Tensor], known: dict[str, list[Tensor] | Tensor | Fault]) -> bool:
    """Whether one of these slips gives every rank's tensor."""
    plain = (value.values if isinstance(value, Fault) else value for value in known.values())
    every = ([value] * len(actual) if isinstance(value, Tensor) else value for value in plain)
    return any(all(is_close(a, v) for a, v in zip(actual, values, strict=True)) for values in every)


def came_into_them(case: Case, tensors: Sequence[Tensor]) -> bool:
    """Whether each tensor is as it was, or what another rank had."""
    return all(any(torch.equal(tensor, value) for value in case.values) for tensor in tensors)


def require_untouched(
    trial: Trial, seen: SimpleNamespace, partial_sums: Callable[[Case, int], list[Tensor]] | None = None
) -> None:
    """The tensors that were handed over are as they were, bit for bit.

    Args:
        partial_sums: what adding into the input leaves in it, where messages go to the next rank, or -1.
    """

    def sums(case: Case) -> dict[str, Tensor | Fault]:
        known: dict[str, Tensor | Fault] = {"it holds sums: the ring adds into the input itself": case.total}
        for way, step in ((1, "rank + 1"), (-1, "rank - 1")) if partial_sums else ():
            told = f"it holds partial sums: the ring, from rank to {step}, adds into the input itself"
            known[told] = Fault(partial_sums(case, way), on_some_ranks=True)
        return known

    for case, answers in zip(seen.cases, seen.answers, strict=True):
        tensors = [answer["tensor"] for answer in answers]
        came = {"another rank's was received into it": Fault(tensors, NOT_INTO_IT, on_some_ranks=True)}
        trial.close(
            f"the input ({case}) after the call",
            tensors,
            case.values,
            alternatives=came if came_into_them(case, tensors) else partial(sums, case),
            rtol=0.0,
            help="Add and receive into memory of your own: flatten(), view() and chunk() share the input's.",
        )


def require_between(trial: Trial, seen: SimpleNamespace) -> None:
    """What lies between the elements of a tensor belongs to somebody else."""
    for case, answers in zip(seen.cases, seen.answers, strict=True):
        for r, answer in enumerate(answers):
            trial.require(
                answer["between"] is None or bool((answer["between"] == FILL).all()),
                f"given {case} it wrote into memory between the tensor's elements",
                rank=r,
            )
