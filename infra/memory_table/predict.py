"""What a rank should hold and send in one step, by the formulas that learners write in the lessons."""

from dataclasses import dataclass, replace

from infra.memory_table.ways import Axis, Way
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
    by_axis: dict[str, float]
    """What it sends along each axis of the ranks."""

    @property
    def wire(self) -> float:
        """Along all axes."""
        return sum(self.by_axis.values())


@dataclass(frozen=True)
class Part:
    """What the axes leave to one rank."""

    data: Axis
    context: Axis
    tensor: Axis
    parameters: float
    """Of the layers that the tensor axis has cut, and of all that it has not."""
    rows: int
    """Sequences of a micro-batch."""
    length: int
    """Tokens of a sequence."""

    @classmethod
    def of(cls, way: Way, num_ranks: int, train: TrainConfig, model: GPTConfig) -> "Part":
        axes, counts = way.axes(num_ranks), count_parameters(model)
        cut = counts["attention"] + counts["mlp"] + counts["embedding"] - model.block_size * model.n_embd
        return cls(
            **axes,
            parameters=counts["total"] - cut + cut / axes["tensor"].size,
            rows=train.batch_size // train.accumulate // axes["data"].size,
            length=train.block_size // axes["context"].size,
        )


def predict(way: Way, num_ranks: int, train: TrainConfig, model: GPTConfig) -> Predicted:
    """The bytes of one rank in fp32 with AdamW, without dropout, when its batch divides.

    Lesson 09's table says how much of everything a rank keeps, lesson 01's how many bytes that is.
    """
    part = Part.of(way, num_ranks, train, model)
    stage, replicas = STAGES[part.data.technique], part.data.size
    whole, share = (state_bytes_per_rank(part.parameters, ranks, stage) for ranks in (1, replicas))
    fp32 = model_state_bytes(1, "fp32")
    sent = {
        "data": FP32 * sum(communication_elements(part.parameters, replicas, stage).values()),
        "context": _along_context(part, model),
        "tensor": _along_tensor(part, model),
    }
    return Predicted(
        **{
            name: fp32[name] * part.parameters * share[name] / whole[name] for name in fp32 if name != "total"
        },
        activations=_activations(way.checkpoint, part, model),
        by_axis={axis: size for axis, size in sent.items() if size},
    )


def _activations(checkpoint: str | None, part: Part, model: GPTConfig) -> float:
    """Lesson 01's bytes, or with lesson 03 those that are left of them; of cut layers, lesson 11's."""
    tokens = part.rows * part.length
    if part.tensor.size > 1:
        return _activations_of_cut_layers(part, model)
    whole = activation_bytes(model, part.rows, part.length)
    if checkpoint == "every":  # of a block, its input stays
        no_blocks = activation_bytes(replace(model, n_layer=0), part.rows, part.length)["total"]
        return no_blocks + model.n_layer * FP32 * tokens * model.n_embd
    if checkpoint == "attention":  # of the core, q, k and v stay: its output is what c_proj reads
        return whole["total"] - model.n_layer * FP32 * tokens * model.n_head
    return whole["total"]


def _activations_of_cut_layers(part: Part, model: GPTConfig) -> float:
    """Lesson 10 cuts the matrices and the token table, lesson 11 also the stream between them."""
    n, tokens = part.tensor.size, part.rows * part.length
    whole = FP32 * tokens * model.n_embd
    scheme, stream = "tensor_parallel", whole
    if part.tensor.technique == "sequence_parallel":
        scheme, stream = "gather_again", whole / n
    block = block_activation_bytes(model, part.rows, part.length, n, scheme)
    norm = stream + 2 * stream / model.n_embd
    integers = 8 * tokens
    logits = FP32 * tokens * model.vocab_size / n
    return model.n_layer * block + norm + whole + logits + 2 * integers


def _along_tensor(part: Part, model: GPTConfig) -> float:
    """All-reduces: two a block forward, two backward, one for each end. Lesson 11 takes each apart."""
    ring = (part.tensor.size - 1) / part.tensor.size
    whole = FP32 * part.rows * part.length * model.n_embd
    sent = (4 * model.n_layer + 2) * 2 * ring * whole
    if part.tensor.technique == "sequence_parallel":
        sent += 2 * model.n_layer * ring * whole  # what the linear layers read, gathered again in backward
        rest = 2 * count_parameters(model)["norm"] + part.length * model.n_embd
        sent += FP32 * ring * rest  # gradients that need every rank's tokens
    return sent


def _along_context(part: Part, model: GPTConfig) -> float:
    """Lesson 12: of 1/n of the tokens, keys and values, or all by heads; and every gradient is summed."""
    n = part.context.size
    heads = FP32 * part.rows * part.length * model.n_embd / part.tensor.size
    # Keys and values go round forward and, with their gradients, backward; or q, k, v, out and as many back.
    layer = 8 * (n - 1) / n * heads if part.context.technique == "ulysses" else 3 * (n - 1) * 2 * heads
    gradients = FP32 * communication_elements(part.parameters, n, 0)["all_reduce"]
    return model.n_layer * layer + gradients
