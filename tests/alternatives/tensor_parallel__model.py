"""The workshop's exercise: nanogpt/model.py, edited so that `GPT(config, group)` has tensor-parallel MLPs.

What differs from the original is marked "edited". Attention, norms and the table stay whole on every rank.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist  # edited
from torch import Tensor, nn
from torch.distributed import ProcessGroup  # edited
from torch.nn import functional as F


class _Copy(torch.autograd.Function):  # edited: new, as the three classes after it
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Reduce(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ColumnParallel(nn.Module):
    """This rank's rows of a linear layer: (..., in) to (..., out/n)."""

    def __init__(self, in_features: int, out_features: int, bias: bool, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.empty(out_features // group.size(), in_features))
        self.bias = nn.Parameter(torch.zeros(out_features // group.size())) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_Copy.apply(x, self.group), self.weight, self.bias)


class RowParallel(nn.Module):
    """This rank's columns of a linear layer: (..., in/n) to (..., out)."""

    def __init__(self, in_features: int, out_features: int, bias: bool, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.empty(out_features, in_features // group.size()))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = _Reduce.apply(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT."""

    block_size: int = 1024
    """Longest sequence, in tokens: the number of learned positions."""
    vocab_size: int = 50304
    """Rows of the token table. GPT-2 has 50257; 50304 is the next multiple of 64."""
    n_layer: int = 12
    """Transformer blocks."""
    n_head: int = 12
    """Attention heads; must divide n_embd."""
    n_embd: int = 768
    """Width of the residual stream."""
    dropout: float = 0.0
    """Probability of dropping: embeddings, attention probabilities, both branches of a block."""
    bias: bool = True
    """Biases in linear layers and layer norms, as in GPT-2."""

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: "
                "every head must have the same size"
            )


class LayerNorm(nn.Module):
    """Layer norm over the last dimension, with an optional bias."""

    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Dropout(nn.Dropout):
    """Dropout whose random numbers may come from a stream of its own.

    `generator` None draws from torch's global stream, as `nn.Dropout` does. A technique that
    must have the same mask on several ranks, or surely a different one, sets a generator.
    """

    generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.generator is None or not self.training or self.p == 0.0:
            return super().forward(x)
        keep = 1.0 - self.p
        if keep == 0.0:
            return x * 0.0
        mask = torch.empty_like(x).bernoulli_(keep, generator=self.generator)
        return x * mask.div_(keep)


class FusedAttention(nn.Module):
    """Causal attention core on PyTorch's fused kernel: q, k, v (b, a, s, d) to (b, a, s, d)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class PlainAttention(nn.Module):
    """The same core as four plain operations, so that each can be seen, counted and recomputed."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.size(-2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))  # (b, a, s, s)
        future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        return self.dropout(scores.softmax(dim=-1)) @ v  # (b, a, s, d)


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention: (b, s, h) to (b, s, h).

    The number of heads is read from the weights: a layer that holds the fused projection of some
    heads only, (3·h/n, h), computes those heads.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.core: nn.Module = FusedAttention(config.dropout)
        self.resid_dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.c_attn(x).chunk(3, dim=2)
        q = q.view(b, s, -1, self.head_size).transpose(1, 2)  # (b, a, s, d)
        k = k.view(b, s, -1, self.head_size).transpose(1, 2)  # (b, a, s, d)
        v = v.view(b, s, -1, self.head_size).transpose(1, 2)  # (b, a, s, d)
        y = self.core(q, k, v)
        y = y.transpose(1, 2).contiguous().view(b, s, -1)  # (b, s, h)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two linear layers with a GELU between: (b, s, h) to (b, s, 4h) to (b, s, h)."""

    def __init__(self, config: GPTConfig, group: ProcessGroup | None = None) -> None:  # edited
        super().__init__()
        h = config.n_embd
        if group is None:
            self.c_fc: nn.Module = nn.Linear(h, 4 * h, bias=config.bias)
            self.c_proj: nn.Module = nn.Linear(4 * h, h, bias=config.bias)
        else:
            self.c_fc = ColumnParallel(h, 4 * h, config.bias, group)
            self.c_proj = RowParallel(4 * h, h, config.bias, group)
        self.gelu = nn.GELU()
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """A pre-norm transformer block: (b, s, h) to (b, s, h)."""

    def __init__(self, config: GPTConfig, group: ProcessGroup | None = None) -> None:  # edited
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config, group)  # edited

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def _draw_slice(weight: nn.Parameter, std: float, is_row: bool, group: ProcessGroup) -> None:  # edited
    """Draw the whole matrix, keep this rank's slice: ranks that are seeded alike hold one matrix together."""
    rows, columns = weight.shape
    n, rank = group.size(), group.rank()
    whole = torch.randn(rows, columns * n) if is_row else torch.randn(rows * n, columns)
    with torch.no_grad():
        weight.copy_(std * whole.chunk(n, dim=int(is_row))[rank])


class GPT(nn.Module):
    """GPT-2 with the token table tied to the head."""

    def __init__(self, config: GPTConfig, group: ProcessGroup | None = None) -> None:  # edited
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": Dropout(config.dropout),
                "h": nn.ModuleList([Block(config, group) for _ in range(config.n_layer)]),
                "ln_f": LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        # The residual stream adds up 2·n_layer branches: their last layers start smaller by that root.
        small = 0.02 / math.sqrt(2 * config.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith("mlp.c_proj.weight") and group is not None:  # edited
                _draw_slice(parameter, small, True, group)
            elif name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=small)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, ColumnParallel | RowParallel):  # edited
            _draw_slice(module.weight, 0.02, isinstance(module, RowParallel), module.group)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def embed(self, idx: Tensor, positions: Tensor) -> Tensor:
        """Tokens (b, s) at `positions` (s,), to the residual stream (b, s, h)."""
        return self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))

    def head(self, x: Tensor) -> Tensor:
        """The residual stream (b, s, h) to logits (b, s, v): last norm, then the tied table."""
        return self.lm_head(self.transformer.ln_f(x))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats of logits (b, s, v) over the targets (b, s) that are not -1."""
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits and loss for tokens idx (b, s).

        With targets (b, s): logits (b, s, v) and the mean loss. Without: the logits of the last
        position, (b, 1, v), and None.

        Raises:
            ValueError: the sequence is longer than `config.block_size`.
        """
        s = idx.size(1)
        if s > self.config.block_size:
            raise ValueError(
                f"a sequence of {s} tokens does not fit block_size={self.config.block_size}: "
                "cut it, or build the model with a larger block_size"
            )
        x = self.embed(idx, torch.arange(s, device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, self.loss(logits, targets)

    @torch.no_grad()
    def generate(
        self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None
    ) -> Tensor:
        """Continue tokens (b, s) by `max_new_tokens`, sampled: (b, s + max_new_tokens)."""
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size :])
            logits = logits[:, -1, :] / temperature  # (b, v)
            if top_k is not None:
                smallest = logits.topk(min(top_k, logits.size(-1))).values[:, [-1]]
                logits = logits.masked_fill(logits < smallest, float("-inf"))
            idx = torch.cat([idx, torch.multinomial(logits.softmax(dim=-1), 1)], dim=1)
        return idx
