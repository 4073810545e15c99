"""Where a measurement is not the prediction, and why: nearly all of ours to the byte, PyTorch's in words."""

from dataclasses import dataclass

from infra.memory_table.ways import Way
from nanogpt.config import TrainConfig
from nanogpt.model import GPTConfig
from solutions.flops_and_memory import count_parameters

FP32 = 4


@dataclass(frozen=True)
class Difference:
    """Bytes of one column that the formula leaves out."""

    column: str
    reason: str
    num_bytes: float | None = None
    """None where it is whatever is left."""


def differences(way: Way, by: str, num_ranks: int, train: TrainConfig, model: GPTConfig) -> list[Difference]:
    """What to add to the prediction for `way`, made by "solutions" or by "torch"."""
    if by == "torch":
        return _in_pytorch(way)
    ring = (num_ranks - 1) / num_ranks
    found = []
    if way.parallel not in ("data_parallel", "context_parallel"):
        found.append(Difference("wire", "the norm of the gradient: one number", 2 * ring * FP32))
    if way.parallel == "zero3":
        outside = count_parameters(model)["embedding"] + model.n_embd
        reason = "tables and last norm stay gathered from forward to backward"
        found.append(Difference("wire", reason, -ring * FP32 * outside))
    if way.parallel in ("tensor_parallel", "sequence_parallel"):
        tokens = train.batch_size * train.block_size
        reason = "the loss: a largest logit, a sum, and the target's logit for each token"
        found.append(Difference("wire", reason, 3 * 2 * ring * FP32 * tokens))
        reason = "a vocabulary in parts: for each token a few masks, places and sums"
        found.append(Difference("activations", reason))
    if way.parallel == "context_parallel":
        found.append(Difference("wire", "the loss: its sum and the number of targets", 2 * ring * 2 * FP32))
        outs = FP32 * model.n_layer * train.batch_size * train.block_size // num_ranks * model.n_embd
        reason = "the output of ring attention is kept by heads, and again by tokens for c_proj"
        found.append(Difference("activations", reason, outs))
        found.append(Difference("activations", "every rank has the whole batch, and cuts its tokens out"))
    return found


def _in_pytorch(way: Way) -> list[Difference]:
    """What PyTorch's own does otherwise."""
    one_number = "clip_grad_norm_ sums one number for each parameter"
    logits = "logits come back whole"
    return {
        "zero1": [
            Difference("optimizer", "shares are whole parameters, and not quite equal"),
            Difference("wire", "DDP all-reduces every gradient, then each owner broadcasts its weights"),
        ],
        "zero2": [
            Difference("weights", "fully_shard cuts the weights as well, and gathers them once a step"),
            Difference("wire", one_number),
        ],
        "zero3": [Difference("wire", one_number)],
        "tensor_parallel": [Difference("activations", logits), Difference("wire", logits)],
        "sequence_parallel": [
            Difference("weights", "the position table is cut, too"),
            Difference("gradients", "some are kept gathered"),
            Difference("optimizer", "the position table is cut, too"),
            Difference("activations", f"{logits}, and the linear layers keep what they gathered"),
            Difference("wire", f"{logits}, but nothing is gathered again in backward"),
        ],
    }.get(way.parallel or "", []) + (
        [Difference("activations", "the policy keeps the products: norms and GELU are computed again, too")]
        if way.checkpoint == "attention"
        else []
    )
