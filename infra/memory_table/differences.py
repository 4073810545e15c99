"""Where a measurement is not the prediction, and why, in bytes: what is not named here stays unexplained."""

from dataclasses import dataclass

import torch

from infra.memory_table.predict import Part
from infra.memory_table.ways import Way
from nanogpt.config import TrainConfig
from nanogpt.model import GPT, GPTConfig
from solutions.flops_and_memory import count_parameters

FP32, INT64, BOOL = 4, 8, 1
CUT = ("zero1", "zero2", "zero3", "tensor_parallel", "sequence_parallel")
"""Techniques after which a rank has parts of gradients."""


@dataclass(frozen=True)
class Difference:
    """Bytes of one column that the formula leaves out."""

    column: str
    reason: str
    num_bytes: float


@dataclass(frozen=True)
class Sizes:
    """The numbers that the differences are made of."""

    part: Part
    layers: int
    h: int
    v: int
    s: int
    parameters: int
    tables: int
    """Parameters of the token table and of the position table together."""

    @classmethod
    def of(cls, way: Way, num_ranks: int, train: TrainConfig, model: GPTConfig) -> "Sizes":
        counts = count_parameters(model)
        return cls(
            part=Part.of(way, num_ranks, train, model),
            layers=model.n_layer,
            h=model.n_embd,
            v=model.vocab_size,
            s=model.block_size,
            parameters=counts["total"],
            tables=counts["embedding"],
        )

    @property
    def tokens(self) -> int:
        """Of a rank's micro-batch."""
        return self.part.rows * self.part.length

    def others(self, axis: str) -> float:
        """The share that the other ranks of an axis have: what a ring sends of a tensor, once round."""
        size = getattr(self.part, axis).size
        return (size - 1) / size


def differences(way: Way, by: str, num_ranks: int, train: TrainConfig, model: GPTConfig) -> list[Difference]:
    """What to add to the prediction for `way`, made by "solutions" or by "torch"."""
    sizes = Sizes.of(way, num_ranks, train, model)
    of_the_loop = Difference("activations", "the loop: whether any target of the share counts", BOOL)
    return [of_the_loop, *(_in_pytorch(way, sizes, model) if by == "torch" else _in_ours(sizes))]


def _in_ours(z: Sizes) -> list[Difference]:
    found = _norms(z)
    if z.part.data.technique == "zero3":
        reason = "tables and last norm stay gathered from forward to backward"
        token_table = z.v * z.h
        stay = z.tables - token_table + token_table / z.part.tensor.size + z.h
        found.append(Difference("wire data", reason, -z.others("data") * FP32 * stay))
    if z.part.tensor.technique:
        found += _of_cut_layers(z)
    if z.part.context.technique:
        found += _of_cut_sequences(z)
    return found


def _of_cut_layers(z: Sizes) -> list[Difference]:
    return [
        Difference(
            "wire tensor",
            "the loss: a largest logit, a sum, and the target's logit for each token",
            3 * 2 * z.others("tensor") * FP32 * z.tokens,
        ),
        Difference("activations", "the positions, which all sequences share", INT64 * z.part.length),
        Difference(
            "activations",
            "a table in parts: of each token its row, and whether that is elsewhere",
            (INT64 + BOOL) * z.tokens,
        ),
        Difference(
            "activations",
            "a loss in parts: of each token its row, its column, whether that is elsewhere, whether it "
            "counts, and the sum of exponentials; and how many count",
            (2 * INT64 + 2 * BOOL + FP32) * z.tokens + INT64,
        ),
    ]


def _of_cut_sequences(z: Sizes) -> list[Difference]:
    found = [
        Difference(
            "wire context", "the loss: its sum and the number of targets", 2 * z.others("context") * 2 * FP32
        ),
        Difference(
            "activations",
            "every rank has the whole batch, and cuts its tokens out",
            2 * INT64 * z.part.rows * z.s,
        ),
        *(
            [Difference("activations", "and keeps none of them, but their rows", -2 * INT64 * z.tokens)]
            if z.part.tensor.technique
            else []
        ),
        Difference("activations", "the number of targets, here and of all ranks", 2 * FP32 + INT64),
    ]
    if z.part.context.technique == "ulysses":
        heads = z.h // z.part.tensor.size
        found += [
            Difference(
                "activations",
                "attention's output is kept by heads, and again by tokens for c_proj",
                FP32 * z.layers * z.tokens * heads,
            ),
            Difference(
                "activations",
                "plain parts are views: no copy of a rank's tokens, and all positions stay",
                INT64 * (z.s - z.part.length - z.tokens),
            ),
        ]
    return found


def _in_pytorch(way: Way, z: Sizes, model: GPTConfig) -> list[Difference]:
    """What PyTorch's own does otherwise."""
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in GPT(model).parameters()]
    found = _in_pytorch_sharded(way, z, shapes) + _in_pytorch_cut(way, z)
    if way.checkpoint == "attention":
        reason = "the policy keeps the products: norms (with mean and deviation) and GELU are computed again"
        found.append(Difference("activations", reason, -FP32 * z.layers * z.tokens * (6 * z.h + 4)))
    return found


def _in_pytorch_sharded(way: Way, z: Sizes, shapes: list[torch.Size]) -> list[Difference]:
    """ZeRO by DistributedDataParallel with ZeroRedundancyOptimizer, and by `fully_shard`."""
    if way.parallel == "zero1":
        share = 2 * FP32 * (_largest_share(shapes, z.part.data.size) - z.parameters / z.part.data.size)
        reason = "DDP sends all ranks every gradient, where a rank needs those of its share"
        return [
            Difference("optimizer", "shares are whole parameters, and not equal", share),
            Difference("wire data", reason, z.others("data") * FP32 * z.parameters),
        ]
    if way.parallel == "zero2":
        reason = "fully_shard cuts the weights as well, and gathers them once a step"
        return [
            Difference("weights", reason, -z.others("data") * FP32 * z.parameters),
            *_norms(z),
        ]
    return _norms(z) if way.parallel == "zero3" else []


def _largest_share(shapes: list[torch.Size], num_ranks: int) -> int:
    """Elements of the fullest rank if each parameter goes to the emptiest: matrices first, and large ones."""
    filled = [0] * num_ranks
    for shape in sorted(shapes, key=lambda shape: (len(shape) < 2, -shape.numel())):
        filled[filled.index(min(filled))] += shape.numel()
    return max(filled)


def _in_pytorch_cut(way: Way, z: Sizes) -> list[Difference]:
    """Tensor and sequence parallelism by DTensor."""
    if way.parallel not in ("tensor_parallel", "sequence_parallel"):
        return []
    others, logits = z.others("tensor"), "logits come back whole"
    found = [
        Difference("activations", logits, others * FP32 * z.tokens * z.v),
        Difference("wire tensor", logits, others * FP32 * z.tokens * z.v),
        Difference("activations", "the positions, which all sequences share", INT64 * z.s),
        Difference("activations", "the number of targets", FP32),
        *_norms(z),
    ]
    if way.parallel == "tensor_parallel":
        return found
    stream, positions = FP32 * z.tokens * z.h, z.tables - z.v * z.h
    cut = "the position table is cut, too"
    return [
        *found,
        Difference("weights", cut, -others * FP32 * positions),
        Difference("optimizer", cut, -others * 2 * FP32 * positions),
        Difference("wire tensor", f"{cut}, and gathered", others * FP32 * positions),
        Difference(
            "activations", "the linear layers keep what they gathered", 2 * z.layers * others * stream
        ),
        Difference("wire tensor", "and gather nothing again in backward", -2 * z.layers * others * stream),
    ]


def _norms(z: Sizes) -> list[Difference]:
    """Summed along every axis that cuts gradients: for each, whether the others cut them, too."""
    axes = [
        name for name, axis in (("data", z.part.data), ("tensor", z.part.tensor)) if axis.technique in CUT
    ]
    numbers = 2 ** (len(axes) - 1) if axes else 0
    reason = (
        "the norm of the gradient: one number" if numbers == 1 else "the norm of the gradient: two numbers"
    )
    return [Difference(f"wire {name}", reason, 2 * z.others(name) * FP32 * numbers) for name in axes]
