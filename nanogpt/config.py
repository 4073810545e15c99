"""What a training run can be told. Each field is an option of the command line, its text the help."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanogpt.data import Dataset
from nanogpt.model import GPTConfig

_AT_LEAST_ONE = (
    *("n_layer", "n_head", "n_embd", "block_size", "batch_size", "accumulate"),
    *("max_steps", "eval_interval", "eval_batches", "checkpoint_interval"),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a GPT. Without options: a small one, on Python's own source, in about a minute."""

    dataset: Dataset = "stdlib"
    """What to learn: the source of Python's standard library, which needs no network, or a download."""
    cache: Path | None = None
    """Folder for tokens; the user's cache folder if not given."""
    openwebtext_parts: int = 1
    """How many of OpenWebText's 21 parts to use; each is a download of about 0.6 GB."""

    n_layer: int = 2
    """Transformer blocks."""
    n_head: int = 4
    """Attention heads; must divide n_embd."""
    n_embd: int = 128
    """Width of the residual stream."""
    block_size: int = 128
    """Tokens in a sequence."""
    dropout: float = 0.0
    """Probability of dropping, during training."""
    bias: bool = False
    """Biases in linear layers and layer norms."""

    max_steps: int = 1500
    """Optimizer steps of the whole run."""
    batch_size: int = 4
    """Sequences in a step, over all ranks and all micro-batches."""
    accumulate: int = 1
    """Micro-batches that a step is cut into; must divide batch_size. The curve stays the same."""
    checkpoint: Literal["every", "attention"] | None = None
    """Recompute in backward instead of keeping: every block, or the core of attention alone."""
    learning_rate: float = 2e-3
    """Highest learning rate, reached after the warm-up."""
    min_learning_rate: float = 2e-4
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 60
    """Steps in which the learning rate rises from zero."""
    decay_steps: int | None = None
    """Step at which the cosine ends; max_steps if not given."""
    weight_decay: float = 0.1
    """AdamW's decay of matrices and tables; biases and norms do not decay."""
    beta1: float = 0.9
    """AdamW's memory of the gradient."""
    beta2: float = 0.99
    """AdamW's memory of the squared gradient."""
    grad_clip: float = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    seed: int = 1337
    """Fixes the weights at the start, the order of the data and dropout."""

    device: str = "auto"
    """cpu, cuda, or auto: a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs matrix products in bf16 (autocast); weights and optimizer stay in float32."""
    compile: bool = False
    """Compile the model with torch.compile: slower to start, faster to run."""

    out_dir: Path | None = None
    """Folder of the run; runs/<date and time> if not given."""
    resume: bool = False
    """Go on with the run in out_dir, or with the last one in runs/, under its own options."""
    eval_interval: int = 250
    """Steps between validations; there is one before the first step and one after the last."""
    eval_batches: int = 32
    """Batches in a validation, the same ones each time."""
    checkpoint_interval: int = 250
    """Steps between checkpoints; there is one after the last step."""

    parallel: str | None = None
    """Technique for several ranks, which torchrun starts; or several: data_parallel=2+tensor_parallel=2."""
    model: Path | None = None
    """A file whose GPT(config, group=None) is parallel by itself: your edited copy of nanogpt/model.py."""
    implementation: str = "solutions"
    """Whose techniques: solutions, torch (PyTorch's own), lessons (your notebooks), or the path of a file."""

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} does not divide into "
                f"accumulate={self.accumulate} equal micro-batches"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")
        asked_for = self.parallel or self.checkpoint or self.accumulate > 1
        if not asked_for and self.implementation != "solutions":
            raise ValueError(
                "--implementation needs --parallel, --checkpoint or --accumulate: "
                "which technique should it be?"
            )
        if self.model is not None and (self.parallel or self.compile):
            raise ValueError(
                f"--model {self.model}: its GPT already shares its MLPs out over all ranks, "
                "and does not go with --parallel"
                if self.parallel
                else f"--model {self.model} is trained as it is written, and does not go with --compile"
            )
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head={self.n_head} does not divide n_embd={self.n_embd}")

    def model_config(self, vocab_size: int) -> GPTConfig:
        return GPTConfig(
            block_size=self.block_size,
            vocab_size=vocab_size,
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            dropout=self.dropout,
            bias=self.bias,
        )

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainConfig":
        paths = {
            name: Path(values[name]) for name in ("cache", "out_dir", "model") if values.get(name) is not None
        }
        return cls(**{**values, **paths})


# What may differ when a run is resumed, because no loss before that point depends on it.
MAY_CHANGE = {
    *("max_steps", "resume", "out_dir", "cache", "device", "implementation", "eval_interval"),
    *("eval_batches", "checkpoint_interval", "compile"),
}


# What no loss depends on: a run that differs in nothing else must follow the same curve.
SAME_CURVE = {*MAY_CHANGE, "parallel", "model", "checkpoint", "accumulate"} - {"max_steps"}


def same_curve(one: TrainConfig, other: TrainConfig) -> bool:
    """Whether two runs must have the same losses, whatever the technique."""
    names = {field.name for field in dataclasses.fields(TrainConfig)} - SAME_CURVE
    return all(getattr(one, name) == getattr(other, name) for name in names)


def require_same_run(before: TrainConfig, now: TrainConfig) -> None:
    """Raises a ValueError if the options of a resumed run would make it another run."""
    for field in dataclasses.fields(TrainConfig):
        old, new = getattr(before, field.name), getattr(now, field.name)
        if old != new and field.name not in MAY_CHANGE:
            raise ValueError(
                f"{field.name} was {old} when this run started and cannot become {new}: "
                "resume without that option, or start a new run"
            )
