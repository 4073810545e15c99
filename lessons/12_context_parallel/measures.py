"""What the page measures: attention on ranks, bytes kept, and what a ring sees of each block."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from grader import run_ranks
from lessons.page.hidden import paces
from lessons.page.memory import kept_bytes
from lessons.page.tap import Tap
from lessons.page.watch import Watch
from nanogpt.model import GPT, GPTConfig, PlainAttention
from solutions.sequence_parallel import gather_sequence, reduce_scatter_sequence

LENGTH = 192
LENGTHS = [128, 256, 512, 1024]
Attention = Callable[[Tensor, Tensor, Tensor, ProcessGroup], Tensor]
Cut = Callable[[Tensor, ProcessGroup, int], Tensor]


def plain_split(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """The r-th of n equal parts of a tensor that every rank has."""
    return x.chunk(group.size(), dim)[group.rank()]


def moved_by(attention: Any, lengths: Sequence[int], changed: int, told: bool) -> list[int]:
    """On a rank: the documents of its tokens whose outputs change with the keys and values of one document.

    Args:
        lengths: tokens of the documents of a sequence, which the number of ranks divides.
        told: whether the attention takes the documents, too.
    """
    group, length = dist.group.WORLD, sum(lengths)
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mine = torch.arange(length).chunk(group.size())[group.rank()]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, length, 8)
    extra = (documents[None],) if told else ()
    before = attention(*(x[:, :, mine] for x in (q, k, v)), *extra, group)
    k, v = (x + (documents == changed).unsqueeze(-1) for x in (k, v))
    after = attention(*(x[:, :, mine] for x in (q, k, v)), *extra, group)
    moves = (after - before).abs().amax(dim=(0, 1, 3)) > 1e-6
    return documents[mine][moves].tolist()


def on_ranks(attention: Attention, cut: Cut) -> dict[int, list[dict]]:
    """Number of ranks → what `attend` has found on each of them."""
    return {n: run_ranks(attend, attention, cut, ranks=n) for n in (1, 2, 4)}


def attend(attention: Attention, cut: Cut) -> dict[str, Any]:
    """On a rank: forward and backward of its part, how far it is from plain attention, what it cost."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    whole = [torch.randn(1, 2, LENGTH, 16) for _ in range(4)]  # q, k, v and the gradient from above
    positions = cut(torch.arange(LENGTH), group, 0)
    parts = [x[:, :, positions].requires_grad_(i < 3) for i, x in enumerate(whole)]
    with Watch() as watch:
        out = attention(*parts[:3], group)
        watch.mark("backward")
        out.backward(parts[3])
    q, k, v = (x.requires_grad_() for x in whole[:3])
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    right.backward(whole[3])
    pairs = [(out, right), *((mine.grad, x.grad) for mine, x in zip(parts, (q, k, v), strict=False))]
    return {
        "error": max((mine - x[:, :, positions]).abs().max().item() for mine, x in pairs),
        "bytes": [watch.sent_bytes("send", after) for after in ("", "backward")],
        "flops": [watch.recording.flops(after) for after in ("", "backward")],
    }


def blocks_sent(ranks: list[dict]) -> list[float]:
    """The most blocks that a rank has sent, in forward and in backward."""
    block = LENGTH // len(ranks) * 2 * 16 * 4
    return [max(rank["bytes"][way] for rank in ranks) / block for way in (0, 1)]


HEADS = 16


def parts_sent(ring: Attention, ulysses: Attention) -> list[tuple[str, int, float]]:
    """On a rank: what attention sends, forward and backward: (name, heads of k and v, parts)."""
    found = []
    for a_kv in (HEADS, HEADS // 4):
        for name, attention in (("sequence", through_the_whole), ("ring", ring), ("Ulysses", ulysses)):
            q, k, v = (torch.randn(1, heads, 8, 4, requires_grad=True) for heads in (HEADS, a_kv, a_kv))
            with Watch() as watch:
                out = attention(q, k, v, dist.group.WORLD)
                out.backward(torch.ones_like(out))
            found.append((name, a_kv, watch.sent_bytes() / (q.numel() * q.element_size())))
    return found


def through_the_whole(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
    """Sequence parallel's messages: between them, attention with a/n heads of all tokens sends nothing."""
    x = q.transpose(1, 2).flatten(2)  # (b, s/n, h)
    return reduce_scatter_sequence(gather_sequence(x, group), group)


def hidden_parts(ring: Attention, ratios: Sequence[float], repeat: int = 9) -> list[float]:
    """On a rank of two: which part of the hop is hidden, where computing a block takes `ratio` times as long.

    In each round a forward without a wire tells how long the block takes that is computed beside the hop.
    """
    q, k, v = torch.randn(3, 2, 4, 256, 64)
    found: list[list[float]] = [[] for _ in ratios]
    sent = sum(entry["bytes"] for entry in _sent_in_forward(ring, q, k, v, None))

    def seconds_of_computing() -> float:
        hop = _sent_in_forward(ring, q, k, v, None)[0]
        return hop["waits"][0] - hop["start"]

    for _, computing in zip(range(repeat), paces(seconds_of_computing), strict=False):
        for parts, ratio in zip(found, ratios, strict=True):
            parts.append(_hidden(_sent_in_forward(ring, q, k, v, sent * ratio / computing)))
    return [statistics.median(parts) for parts in found]


def _sent_in_forward(
    ring: Attention, q: Tensor, k: Tensor, v: Tensor, bytes_per_second: float | None
) -> list[dict]:
    """What a rank sends in a forward, with the times when it left, was awaited and arrived."""
    dist.barrier()
    with torch.no_grad(), Tap(bytes_per_second) as tap:
        ring(q, k, v, dist.group.WORLD)
    return tap.log


def _hidden(sent: list[dict]) -> float:
    """The part of the wire's time in which nobody waited for it."""
    exposed = whole = free = 0.0
    for entry in sent:
        begin = max(entry["start"], free)
        exposed += max(0.0, entry["end"] - max(entry["waits"][0], begin))
        whole += entry["end"] - begin
        free = entry["end"]
    return 1 - exposed / whole


def small_gpt(length: int, plain: bool = False) -> GPT:
    """Two layers of width 128, with fused attention or with plain."""
    model = GPT(GPTConfig(block_size=length, vocab_size=256, n_layer=2, n_head=4, n_embd=128, bias=False))
    for block in model.transformer.h if plain else ():
        block.attn.core = PlainAttention(0.0)
    return model


def kept(model: GPT, length: int) -> int:
    """Bytes that autograd keeps for the backward of one sequence."""
    tokens = torch.zeros(1, length, dtype=torch.int64)
    return kept_bytes(model, tokens, tokens)


def kept_on_this_rank(parallelize: Any, length: int) -> int:
    """The same, on a rank."""
    torch.manual_seed(0)
    return kept(parallelize(small_gpt(length), dist.group.WORLD), length)


def pytorchs_ring(ours: Attention, cut: Cut) -> float | None:
    """On a rank: the largest difference between PyTorch's ring and ours, on zigzag parts."""
    from torch.distributed.tensor.experimental import _attention as experimental

    if not {"_cp_options", "_templated_ring_attention", "set_rotate_method"} <= vars(experimental).keys():
        return None

    def fused(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **options: Any) -> tuple:
        q, k, v = (x.contiguous() for x in (q, k, v))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, dropout_p=0.0, is_causal=is_causal)

    group = dist.group.WORLD
    torch.manual_seed(0)
    parts = [cut(torch.randn(1, 2, LENGTH, 16), group, 2) for _ in range(3)]
    experimental._cp_options.enable_load_balance = True
    experimental.set_rotate_method("alltoall")  # a ring; "allgather", the default, is none
    out = experimental._templated_ring_attention(group, 2, fused, *parts, is_causal=True)[0]
    return (out - ours(*parts, group)).abs().max().item()


def loss_as_found(logits: Tensor, tokens: Tensor, group: ProcessGroup) -> Tensor:
    """The program to repair, as it was found."""
    labels = tokens[:, 1:]
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
    sums = torch.stack([total.detach(), (labels != -1).sum().to(total.dtype)])
    dist.all_reduce(sums, group=group)
    part = total / sums[1]
    return sums[0] / sums[1] + (part - part.detach())


def loss_of_parts(loss_of: Any, length: int = 32, words: int = 50) -> tuple[float, int]:
    """On a rank: the loss of one random text, and how many of its positions got a gradient."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    logits, text = torch.randn(1, length, words), torch.randint(words, (1, length))
    logits, text = (plain_split(x, group, 1) for x in (logits, text))
    logits = logits.clone().requires_grad_()
    loss = loss_of(logits, text, group)
    loss.backward()
    return loss.item(), int((logits.grad != 0).any(-1).sum())
