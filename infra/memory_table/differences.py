"""Where a measurement is not the prediction, and why, in bytes: what is not named here stays unexplained."""

from dataclasses import dataclass

import torch

from infra.memory_table.ways import Way
from nanogpt.config import TrainConfig
from nanogpt.model import GPT, GPTConfig
from solutions.flops_and_memory import count_parameters

FP32, INT64, BOOL = 4, 8, 1


@dataclass(frozen=True)
class Difference:
    """Bytes of one column that the formula leaves out."""

    column: str
    reason: str
    num_bytes: float


@dataclass(frozen=True)
class Sizes:
    """The numbers that the differences are made of."""

    num_ranks: int
    layers: int
    h: int
    v: int
    s: int
    tokens: int
    """Of the whole batch."""
    own_tokens: int
    """Of a rank's micro-batch, where ranks share the batch."""
    parameters: int
    tables: int
    """Parameters of the token table and of the position table together."""

    @classmethod
    def of(cls, num_ranks: int, train: TrainConfig, model: GPTConfig) -> "Sizes":
        counts = count_parameters(model)
        tokens = train.batch_size * model.block_size
        return cls(
            num_ranks=num_ranks,
            layers=model.n_layer,
            h=model.n_embd,
            v=model.vocab_size,
            s=model.block_size,
            tokens=tokens,
            own_tokens=tokens // train.accumulate // num_ranks,
            parameters=counts["total"],
            tables=counts["embedding"],
        )

    @property
    def others(self) -> float:
        """The share that the other ranks have: what a ring sends of a tensor, once round."""
        return (self.num_ranks - 1) / self.num_ranks


def differences(way: Way, by: str, num_ranks: int, train: TrainConfig, model: GPTConfig) -> list[Difference]:
    """What to add to the prediction for `way`, made by "solutions" or by "torch"."""
    sizes = Sizes.of(num_ranks, train, model)
    of_the_loop = Difference("activations", "the loop: whether any target of the share counts", BOOL)
    return [of_the_loop, *(_in_pytorch(way, sizes, model) if by == "torch" else _in_ours(way, sizes))]


def _in_ours(way: Way, z: Sizes) -> list[Difference]:
    found = []
    if way.parallel not in ("data_parallel", "context_parallel"):
        found.append(_norm(z))
    if way.parallel == "zero3":
        reason = "tables and last norm stay gathered from forward to backward"
        found.append(Difference("wire", reason, -z.others * FP32 * (z.tables + z.h)))
    if way.parallel in ("tensor_parallel", "sequence_parallel"):
        found += [
            Difference(
                "wire",
                "the loss: a largest logit, a sum, and the target's logit for each token",
                3 * 2 * z.others * FP32 * z.tokens,
            ),
            Difference("activations", "the positions, which all sequences share", INT64 * z.s),
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
    if way.parallel == "context_parallel":
        found += [
            Difference("wire", "the loss: its sum and the number of targets", 2 * z.others * 2 * FP32),
            Difference(
                "activations",
                "the output of ring attention is kept by heads, and again by tokens for c_proj",
                FP32 * z.layers * z.tokens // z.num_ranks * z.h,
            ),
            Difference(
                "activations",
                "every rank has the whole batch, and cuts its tokens out",
                2 * INT64 * z.tokens,
            ),
            Difference("activations", "the number of targets, here and of all ranks", 2 * FP32 + INT64),
        ]
    return found


def _in_pytorch(way: Way, z: Sizes, model: GPTConfig) -> list[Difference]:
    """What PyTorch's own does otherwise."""
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in GPT(model).parameters()]
    found = _in_pytorch_sharded(way, z, shapes) + _in_pytorch_cut(way, z)
    if way.checkpoint == "attention":
        reason = "the policy keeps the products: norms (with mean and deviation) and GELU are computed again"
        found.append(Difference("activations", reason, -FP32 * z.layers * z.own_tokens * (6 * z.h + 4)))
    return found


def _in_pytorch_sharded(way: Way, z: Sizes, shapes: list[torch.Size]) -> list[Difference]:
    """ZeRO by DistributedDataParallel with ZeroRedundancyOptimizer, and by `fully_shard`."""
    if way.parallel == "zero1":
        share = 2 * FP32 * (_largest_share(shapes, z.num_ranks) - z.parameters / z.num_ranks)
        reason = "DDP sends all ranks every gradient, where a rank needs those of its share"
        return [
            Difference("optimizer", "shares are whole parameters, and not equal", share),
            Difference("wire", reason, z.others * FP32 * z.parameters),
        ]
    if way.parallel == "zero2":
        reason = "fully_shard cuts the weights as well, and gathers them once a step"
        return [
            Difference("weights", reason, -z.others * FP32 * z.parameters),
            _norm(z),
        ]
    return [_norm(z)] if way.parallel == "zero3" else []


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
    logits = "logits come back whole"
    found = [
        Difference("activations", logits, z.others * FP32 * z.tokens * z.v),
        Difference("wire", logits, z.others * FP32 * z.tokens * z.v),
        Difference("activations", "the positions, which all sequences share", INT64 * z.s),
        Difference("activations", "the number of targets", FP32),
    ]
    if way.parallel == "tensor_parallel":
        return [*found, _norm(z)]
    stream, positions = FP32 * z.tokens * z.h, z.tables - z.v * z.h
    cut = "the position table is cut, too"
    return [
        *found,
        _norm(z),
        Difference("weights", cut, -z.others * FP32 * positions),
        Difference("optimizer", cut, -z.others * 2 * FP32 * positions),
        Difference("wire", f"{cut}, and gathered", z.others * FP32 * positions),
        Difference(
            "activations", "the linear layers keep what they gathered", 2 * z.layers * z.others * stream
        ),
        Difference("wire", "and gather nothing again in backward", -2 * z.layers * z.others * stream),
    ]


def _norm(z: Sizes) -> Difference:
    """Summed over the ranks."""
    return Difference("wire", "the norm of the gradient: one number", 2 * z.others * FP32)
