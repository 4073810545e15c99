"""Shows what a run has learned: `python -m nanogpt.sample`, or `--prompt "def main("`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from nanogpt import checkpoint, runs
from nanogpt.cores import keep_to_quota
from nanogpt.gpt2 import load_gpt2
from nanogpt.model import GPT
from nanogpt.tokenizer import END_OF_TEXT, load_encoding


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Continue a prompt with a trained model: the last run's, if no other is named."""

    run: Path | None = None
    """Folder of a run; the last one in runs/ if not given."""
    weights: Path | None = None
    """GPT-2's weights as a local safetensors file, instead of a run."""
    prompt: str = "def "
    """Text to go on from."""
    num_samples: int = 2
    """How many continuations."""
    max_new_tokens: int = 150
    """Tokens to add; a document that ends sooner is cut there."""
    temperature: float = 0.8
    """Below 1 keeps to what is likely, above 1 dares more."""
    top_k: int = 100
    """Only the k likeliest tokens are drawn from."""
    seed: int = 1337
    """Another seed, another text."""

    def __post_init__(self) -> None:
        if self.temperature <= 0 or self.top_k < 1 or self.num_samples < 1 or self.max_new_tokens < 1:
            raise ValueError("temperature must be above 0; top_k, num_samples and max_new_tokens at least 1")
        if self.run is not None and self.weights is not None:
            raise ValueError("--run and --weights: give one of the two")


def load_run(folder: Path) -> tuple[GPT, str]:
    """The model of a run's last checkpoint, and the name of its encoding.

    Raises:
        ValueError: it is not the folder of a run, or has no checkpoint.
    """
    run = runs.read_run(folder)
    weights, _ = checkpoint.load_weights(folder)
    weights.setdefault("lm_head.weight", weights["transformer.wte.weight"])
    model = GPT(run.model)
    model.load_state_dict(weights)
    return model, run.encoding


def sample(model: GPT, encoding_name: str, config: SampleConfig) -> list[str]:
    """Continuations of the prompt, the prompt included."""
    encoding = load_encoding(encoding_name)
    prompt = encoding.encode_ordinary(config.prompt) or [encoding.eot_token]
    torch.manual_seed(config.seed)
    model.eval()
    idx = torch.tensor([prompt] * config.num_samples)
    rows = model.generate(idx, config.max_new_tokens, config.temperature, config.top_k).tolist()
    texts = []
    for row in rows:
        new = [min(token, encoding.n_vocab - 1) for token in row[len(prompt) :]]  # the table may be padded
        text = config.prompt + encoding.decode(new)
        texts.append(text.split(END_OF_TEXT)[0])
    return texts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    keep_to_quota()
    try:
        config = tyro.cli(SampleConfig, args=arguments, prog="python -m nanogpt.sample")
        if config.weights is not None:
            model, encoding = load_gpt2(config.weights), "gpt2"
        else:
            model, encoding = load_run(config.run or runs.last_run())
        texts = sample(model, encoding, config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for text in texts:
        print(text, end="\n" + "-" * 80 + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
