"""Grouped-query attention: fewer key and value heads than query heads, as Llama 3 has it.

nanoGPT's own attention, in `model.py`, has as many of each. After Ainslie et al. 2023, "GQA: Training
Generalized Multi-Query Transformer Models from Multi-Head Checkpoints" (arXiv:2305.13245), section 2.2.
Notation as in `model.py`.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class GroupedQueryAttention(nn.Module):
    """Causal attention whose query heads share fewer key and value heads: (b, s, h) to (b, s, h).

    Of a query heads and a_kv key and value heads, query head i reads key and value head i // (a / a_kv).
    The rows of `c_attn` are all queries, all keys, all values; within each, head by head.

    Raises:
        ValueError: the heads do not divide the width, or the key heads the query heads.
    """

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, bias: bool = True) -> None:
        super().__init__()
        for what, size, over in (("width", width, num_heads), ("num_heads", num_heads, num_kv_heads)):
            if size % over:
                raise ValueError(f"{what}={size} is not divisible by {over} heads")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size = width // num_heads
        self.c_attn = nn.Linear(width, (num_heads + 2 * num_kv_heads) * self.head_size, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.c_attn(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (b, a + 2·a_kv, s, d)
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # (b, a, s, d)
        return self.c_proj(y.transpose(1, 2).flatten(2))
