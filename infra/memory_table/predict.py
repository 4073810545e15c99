"""What a rank should hold and send in one step, by the formulas that learners write in the lessons."""

from dataclasses import dataclass, replace

from infra.memory_table.ways import Way
from nanogpt.config import TrainConfig
from nanogpt.model import GPTConfig
from solutions.flops_and_memory import activation_bytes, count_parameters, model_state_bytes
from solutions.fsdp import communication_elements, state_bytes_per_rank
from solutions.sequence_parallel import block_activation_bytes

FP32 = 4
STAGES = {None: 0, "data_parallel": 0, "zero1": 1, "zero2": 2, "zero3": 3}


@dataclass(frozen=True)
class Predicted:
    """Bytes of one rank, as in `measure.Measured`."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    wire: float


def predict(way: Way, num_ranks: int, train: TrainConfig, model: GPTConfig) -> Predicted:
    """The bytes of one rank in fp32 with AdamW, without dropout, when its batch divides."""
    if way.parallel in STAGES:
        return _data_parallel(way, num_ranks, train, model)
    if way.parallel == "context_parallel":
        return _context_parallel(num_ranks, train, model)
    return _tensor_parallel(way, num_ranks, train, model)


def _data_parallel(way: Way, n: int, train: TrainConfig, model: GPTConfig) -> Predicted:
    """Lesson 09's table says how much of everything a rank keeps, lesson 01's how many bytes that is."""
    stage = STAGES[way.parallel]
    num_parameters = count_parameters(model)["total"]
    whole, share = (state_bytes_per_rank(num_parameters, ranks, stage) for ranks in (1, n))
    fp32 = model_state_bytes(num_parameters, "fp32")
    kept = {name: fp32[name] * share[name] / whole[name] for name in ("weights", "gradients", "optimizer")}
    rows = train.batch_size // train.accumulate // n
    sent = communication_elements(num_parameters, n, stage)
    return Predicted(
        **kept,
        activations=_activations(way.checkpoint, model, rows, train.block_size),
        wire=FP32 * sum(sent.values()),
    )


def _activations(checkpoint: str | None, model: GPTConfig, batch_size: int, sequence_length: int) -> float:
    """Lesson 01's bytes, or with lesson 03 those that are left of them."""
    whole = activation_bytes(model, batch_size, sequence_length)
    if checkpoint == "every":  # of a block, its input stays
        no_blocks = activation_bytes(replace(model, n_layer=0), batch_size, sequence_length)["total"]
        return no_blocks + model.n_layer * FP32 * batch_size * sequence_length * model.n_embd
    if checkpoint == "attention":  # of the core, q, k and v stay: its output is what c_proj reads
        return whole["total"] - model.n_layer * FP32 * batch_size * model.n_head * sequence_length
    return whole["total"]


def _tensor_parallel(way: Way, n: int, train: TrainConfig, model: GPTConfig) -> Predicted:
    """Lesson 10 cuts the matrices and the token table, lesson 11 also the stream between them."""
    counts, h = count_parameters(model), model.n_embd
    tokens = train.batch_size * train.block_size
    positions = model.block_size * h
    cut = counts["attention"] + counts["mlp"] + counts["embedding"] - positions
    kept = cut / n + positions + counts["norm"]
    fp32 = model_state_bytes(1, "fp32")
    whole = FP32 * tokens * h
    ring = (n - 1) / n
    # All-reduces: two a block forward, two backward, one for each end. Lesson 11 takes each apart.
    sent = (4 * model.n_layer + 2) * 2 * ring * whole
    scheme, stream = "tensor_parallel", whole
    if way.parallel == "sequence_parallel":
        scheme, stream = "gather_again", whole / n
        sent += 2 * model.n_layer * ring * whole  # what the linear layers read, gathered again in backward
        sent += FP32 * ring * (2 * counts["norm"] + positions)  # gradients that need every rank's tokens
    block = block_activation_bytes(model, train.batch_size, train.block_size, n, scheme)
    norm = stream + 2 * stream / h
    integers = 8 * tokens
    logits = FP32 * tokens * model.vocab_size / n
    return Predicted(
        weights=fp32["weights"] * kept,
        gradients=fp32["gradients"] * kept,
        optimizer=fp32["optimizer"] * kept,
        activations=model.n_layer * block + norm + whole + logits + 2 * integers,
        wire=sent,
    )


def _context_parallel(n: int, train: TrainConfig, model: GPTConfig) -> Predicted:
    """Lesson 12: 1/n of the tokens, keys and values go round forward and, with their gradients, backward."""
    counts = count_parameters(model)
    fp32 = model_state_bytes(counts["total"], "fp32")
    tokens = train.batch_size * train.block_size // n
    one_hop = FP32 * 2 * tokens * model.n_embd
    gradients = FP32 * communication_elements(counts["total"], n, 0)["all_reduce"]
    return Predicted(
        weights=fp32["weights"],
        gradients=fp32["gradients"],
        optimizer=fp32["optimizer"],
        activations=activation_bytes(model, train.batch_size, train.block_size // n)["total"],
        wire=model.n_layer * 3 * (n - 1) * one_hop + gradients,
    )
