"""GPT-2's published weights, read from a local safetensors file into our model."""

import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nanogpt.model import GPT, GPTConfig

# GPT-2 kept these as Conv1D, (in, out); nn.Linear keeps (out, in).
_TRANSPOSED = re.compile(r"\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
_MASKS = re.compile(r"\.attn\.(bias|masked_bias)$")  # buffers of the causal mask, not weights
_HEAD_SIZE = 64  # of every published GPT-2


def load_gpt2(path: str | os.PathLike[str], *, n_head: int | None = None, dropout: float = 0.0) -> GPT:
    """A GPT with the weights of a safetensors file as Hugging Face lays GPT-2 out.

    Sizes are read from the file. Names may start with `transformer.`; the mask buffers are ignored;
    `lm_head.weight` may be absent, since it is the token table. The file's GELU is the tanh
    approximation and ours is exact, as in nanoGPT: logits differ by about 1e-3.

    Args:
        n_head: heads, which the file does not tell; by default heads of size 64, as in every GPT-2.

    Raises:
        ValueError: one sentence: the file cannot be read, or its keys or shapes are not a GPT-2's.
    """
    path = Path(path)
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    weights = {_our_name(name): tensor for name, tensor in tensors.items() if not _MASKS.search(name)}
    weights = {name: tensor.t() if _TRANSPOSED.search(name) else tensor for name, tensor in weights.items()}
    config = _config(path, weights, n_head, dropout)
    if "lm_head.weight" not in weights:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    elif not torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"]):
        raise ValueError(f"{path}: lm_head.weight differs from wte.weight, and this model ties the two")
    model = GPT(config)
    _require_same_shapes(path, weights, model.state_dict())
    model.load_state_dict(weights)
    return model


def _our_name(name: str) -> str:
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _config(path: Path, weights: dict[str, Tensor], n_head: int | None, dropout: float) -> GPTConfig:
    for name in ("transformer.wte.weight", "transformer.wpe.weight"):
        if name not in weights or weights[name].ndim != 2:
            raise ValueError(f"{path} holds no GPT-2: it has no matrix {name}")
    vocab_size, n_embd = weights["transformer.wte.weight"].shape
    blocks = {int(match[1]) for name in weights if (match := re.match(r"transformer\.h\.(\d+)\.", name))}
    if n_head is None and n_embd % _HEAD_SIZE:
        raise ValueError(f"{path}: a width of {n_embd} is not a multiple of 64, so n_head has to be given")
    return GPTConfig(
        block_size=weights["transformer.wpe.weight"].size(0),
        vocab_size=vocab_size,
        n_layer=max(blocks, default=-1) + 1,
        n_head=n_head or n_embd // _HEAD_SIZE,
        n_embd=n_embd,
        dropout=dropout,
        bias="transformer.ln_f.bias" in weights,
    )


def _require_same_shapes(path: Path, given: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    problems = [f"{name} is missing" for name in ours.keys() - given.keys()]
    problems += [f"{name} is not part of the model" for name in given.keys() - ours.keys()]
    problems += [
        f"{name} is {tuple(given[name].shape)} and should be {tuple(ours[name].shape)}"
        for name in ours.keys() & given.keys()
        if given[name].shape != ours[name].shape
    ]
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{path} does not fit a GPT-2: {'; '.join(sorted(problems)[:3])}{more}")
