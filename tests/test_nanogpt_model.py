"""The model: its size, its attention cores, and GPT-2's weights in it."""

import ast
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanogpt.gpt2 import load_gpt2
from nanogpt.model import GPT, FusedAttention, GPTConfig, PlainAttention

PACKAGE = Path(__file__).parent.parent / "nanogpt"
TINY = GPTConfig(block_size=16, vocab_size=40, n_layer=2, n_head=2, n_embd=16)


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file, and every dotted name that it uses."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return names


WITH_RANKS = {"launch.py", "ranks.py", "train.py", "minimal.py", "parallel.py", "combined.py", "own_model.py"}
"""Programs, which start and end a process group, and techniques on several ranks; the model and the loop know
nothing of either."""


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_imports_nothing_of_ours_and_no_ranks(path: Path) -> None:
    for name in imported(path):
        assert name.split(".")[0] not in {"solutions", "grader", "lessons", "infra", "tests"}, name
        assert path.name in WITH_RANKS or not name.startswith("torch.distributed"), name


def test_gpt2_124m_has_as_many_parameters_as_published() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50257, bias=False))
        with_bias = GPT(GPTConfig(vocab_size=50257))
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_337_664
    assert sum(parameter.numel() for parameter in model.transformer.h[0].parameters()) == 7_079_424
    assert sum(parameter.numel() for parameter in with_bias.parameters()) == 124_439_808


@pytest.mark.parametrize("s", [1, 7])
def test_plain_attention_is_fused_attention(s: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, s, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    upstream = torch.randn(2, 3, s, 4, dtype=torch.float64)
    results = []
    for core in (PlainAttention(0.0), FusedAttention(0.0)):
        out = core(q, k, v)
        results.append((out, *torch.autograd.grad(out, (q, k, v), upstream)))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(plain, fused)


def test_sequence_too_long_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="17 tokens does not fit block_size=16"):
        GPT(TINY)(torch.zeros(1, 17, dtype=torch.long))


def gpt2_tensors(config: GPTConfig) -> dict[str, Tensor]:
    """Random weights under Hugging Face's names and in its layout: Conv1D matrices are (in, out)."""
    h, tensors = config.n_embd, {}
    for block in range(config.n_layer):
        for name, shape in {
            "ln_1": (h,), "ln_2": (h,), "attn.c_attn": (h, 3 * h), "attn.c_proj": (h, h),
            "mlp.c_fc": (h, 4 * h), "mlp.c_proj": (4 * h, h),
        }.items():  # fmt: skip
            tensors[f"h.{block}.{name}.weight"] = torch.randn(shape) * 0.2
            tensors[f"h.{block}.{name}.bias"] = torch.randn(shape[-1]) * 0.2
        tensors[f"h.{block}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        tensors[f"h.{block}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["wte.weight"] = torch.randn(config.vocab_size, h)
    tensors["wpe.weight"] = torch.randn(config.block_size, h)
    tensors["ln_f.weight"], tensors["ln_f.bias"] = torch.randn(h), torch.randn(h)
    return tensors


def gpt2_logits(w: dict[str, Tensor], tokens: list[int], n_head: int) -> Tensor:
    """GPT-2's forward of one sequence, written from the paper, on the weights as the file has them."""

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def conv1d(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    s, h = len(tokens), w["wte.weight"].size(1)
    x = torch.stack([w["wte.weight"][token] + w["wpe.weight"][i] for i, token in enumerate(tokens)])
    for block in range(2):
        name = f"h.{block}"
        qkv = conv1d(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn")
        heads = []
        for head in range(n_head):
            columns = slice(head * h // n_head, (head + 1) * h // n_head)
            q, k, v = (qkv[:, i * h : (i + 1) * h][:, columns] for i in range(3))
            scores = q @ k.T / math.sqrt(h // n_head)
            scores = scores + torch.full((s, s), -torch.inf).triu(1)
            heads.append(scores.softmax(-1) @ v)
        x = x + conv1d(torch.cat(heads, dim=-1), f"{name}.attn.c_proj")
        hidden = conv1d(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + conv1d(hidden, f"{name}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("with_head", [False, True])
def test_gpt2_weights_compute_what_gpt2_computes(tmp_path: Path, prefix: str, with_head: bool) -> None:
    torch.manual_seed(0)
    tensors = gpt2_tensors(TINY)
    file = {prefix + name: tensor for name, tensor in tensors.items()}
    if with_head:
        file["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(file, tmp_path / "model.safetensors")
    model = load_gpt2(tmp_path / "model.safetensors", n_head=2)
    assert model.config == TINY
    assert model.lm_head.weight is model.transformer.wte.weight
    tokens = [3, 1, 39, 0, 7]
    logits, _ = model(torch.tensor([tokens]), torch.tensor([tokens]))
    torch.testing.assert_close(logits[0], gpt2_logits(tensors, tokens, 2), rtol=1e-4, atol=1e-4)


def test_gpt2_files_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def refused(says: str, **changes: Tensor | None) -> None:
        tensors = gpt2_tensors(TINY) | {name.replace("__", "."): value for name, value in changes.items()}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
        with pytest.raises(ValueError, match=says) as caught:
            load_gpt2(path, n_head=2)
        assert "\n" not in str(caught.value)

    refused("h.0.mlp.c_fc.weight is missing", h__0__mlp__c_fc__weight=None)
    refused(r"h.1.ln_1.bias is \(3,\) and should be \(16,\)", h__1__ln_1__bias=torch.zeros(3))
    refused("extra is not part of the model", extra=torch.zeros(3))
    refused("no matrix transformer.wte.weight", wte__weight=None)
    refused("ties the two", lm_head__weight=torch.zeros(40, 16))
    with pytest.raises(ValueError, match="n_head has to be given"):
        save_file(gpt2_tensors(TINY), path)
        load_gpt2(path)
    with pytest.raises(ValueError, match="no such file"):
        load_gpt2(tmp_path / "missing")
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_gpt2(path)
