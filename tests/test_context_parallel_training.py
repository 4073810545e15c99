"""Context parallelism in the training loop: by hand and on PyTorch's ring it is the dense model."""

import copy
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grader import run_ranks
from nanogpt.model import GPT, FusedAttention, GPTConfig
from nanogpt.parallel import Parallel
from nanogpt.technique import Checkpointing, find_technique
from solutions import context_parallel
from solutions.context_parallel_training import ContextParallelTraining, UlyssesTraining

CONFIG = GPTConfig(block_size=24, vocab_size=31, n_layer=2, n_head=6, n_embd=48)


def lend_the_cpus_kernel() -> None:
    """PyTorch's ring knows CUDA's fused attention alone: give its operations the CPU's."""
    aten = torch.ops.aten
    library = torch.library.Library("aten", "IMPL")

    def forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):
        parts = (x.contiguous() for x in (q, k, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*parts, dropout_p, is_causal, scale=scale)
        none = torch.zeros((), dtype=torch.int64)
        return out, lse, none, none, q.size(2), k.size(2), none, none, torch.zeros(())

    def backward(d_out, q, k, v, out, lse, *others, scale=None):
        parts = (x.contiguous() for x in (d_out, q, k, v, out, lse))
        dropout_p, is_causal = others[4:6]
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *parts, dropout_p, is_causal, scale=scale
        )

    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    lend_the_cpus_kernel.kept = library  # what it registers goes with it

    def core(self: FusedAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention(q, k, v, self.dropout, True)[0]

    FusedAttention.forward = core


def train_beside_dense(
    implementation: ModuleType | None, technique: type[Parallel] = ContextParallelTraining, steps: int = 3
) -> dict:
    """Trains a dense GPT and one on parts of the sequence on the same batches; the largest differences."""
    torch.manual_seed(1)
    dense = GPT(CONFIG)
    model = copy.deepcopy(dense)
    batches = torch.randint(CONFIG.vocab_size, (steps, 2, 3, CONFIG.block_size))
    batches[:, 1, :, : CONFIG.block_size // 3] = -1
    sgd = [torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)]
    expected = []
    for idx, targets in batches:
        expected.append(dense(idx, targets)[1])
        expected[-1].backward()
        sgd[0].step()
        sgd[0].zero_grad()
    if implementation is None:
        lend_the_cpus_kernel()
    training = technique(implementation, dist.group.WORLD)
    module = training.build(model, Checkpointing())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for idx, targets in batches:
        loss = module(training.share(idx), training.share(targets))[1]
        loss.backward()
        losses.append(training.mean_loss(loss).item())
        training.update(module, optimizer, float("inf"))
    whole = training.whole_state_dict(module)
    return {
        "losses": max(abs(a - b.item()) for a, b in zip(losses, expected, strict=True)),
        "weights": max((whole[name] - t).abs().max().item() for name, t in dense.state_dict().items()),
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "way",
    [(context_parallel,), (None,), (context_parallel, UlyssesTraining)],
    ids=["by hand", "PyTorch", "Ulysses"],
)
def test_trains_as_the_dense_model(way: tuple, ranks: int) -> None:
    for result in run_ranks(train_beside_dense, *way, ranks=ranks):
        assert result["losses"] < 1e-5
        assert result["weights"] < 1e-5


def last_logits() -> Tensor:
    """Without targets, of a model on parts and of a dense one: the difference."""
    torch.manual_seed(1)
    dense = GPT(CONFIG)
    model = context_parallel.context_parallelize(copy.deepcopy(dense), dist.group.WORLD)
    idx = torch.randint(CONFIG.vocab_size, (2, 12))
    return (model(idx)[0] - dense(idx)[0]).abs().max()


def test_logits_of_the_last_token_are_the_dense_models() -> None:
    assert max(run_ranks(last_logits, ranks=3)) < 1e-5


def refusals() -> list[str]:
    """What is said to PyTorch on a CPU, to a length that does not divide, to recomputed attention."""
    group = dist.group.WORLD
    attention = Checkpointing()
    attention.recomputes = "attention"
    by_hand = ContextParallelTraining(context_parallel, group)
    by_heads = UlyssesTraining(context_parallel, group)
    told = []
    for refused in (
        lambda: ContextParallelTraining(None, group).check(CONFIG, 2),
        lambda: by_hand.check(CONFIG, 5),
        lambda: by_hand.build(GPT(CONFIG), attention),
        lambda: UlyssesTraining(None, group).check(CONFIG, 2),
        lambda: by_heads.check(CONFIG, 4),
        lambda: by_heads.check(CONFIG, 5),
        lambda: by_heads.build(GPT(CONFIG), attention),
    ):
        try:
            refused()
        except ValueError as error:
            told.append(str(error))
    return told


def test_what_does_not_go_is_refused_with_a_sentence() -> None:
    on_cpu, length, checkpointing, *of_ulysses = run_ranks(refusals, ranks=2)[0]
    assert "needs CUDA" in on_cpu
    assert "block_size=24 is not divisible by 10" in length
    assert "keeps no scores" in checkpointing
    nowhere, heads, tokens, checkpointing = of_ulysses
    assert "has no --implementation torch" in nowhere
    assert "n_head=6 is not divisible by 4" in heads
    assert "block_size=24 is not divisible by 5" in tokens
    assert "attention is one function" in checkpointing


def test_the_loop_finds_it() -> None:
    assert find_technique("PARALLEL", "context_parallel") == (ContextParallelTraining, context_parallel)
    assert find_technique("PARALLEL", "ulysses") == (UlyssesTraining, context_parallel)
