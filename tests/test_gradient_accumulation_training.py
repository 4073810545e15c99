"""Gradient accumulation in the training loop: any number of micro-batches is the curve of the whole batch."""

from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from grader import run_ranks
from nanogpt.loop import Microbatches
from nanogpt.model import GPT, GPTConfig
from nanogpt.parallel import Parallel
from solutions import data_parallel, gradient_accumulation
from solutions.data_parallel import DataParallelTraining
from solutions.gradient_accumulation import MicrobatchAccumulation, accumulate_gradients

CONFIG = GPTConfig(block_size=12, vocab_size=31, n_layer=2, n_head=2, n_embd=16)
BY_HAND_AND_TORCHS = pytest.mark.parametrize(
    "implementation", [gradient_accumulation, None], ids=["by hand", "torch"]
)


def curve(
    implementation: ModuleType | None, num_microbatches: int, on_ranks: bool = False, steps: int = 50
) -> list[float]:
    """The loss at each step, as the training loop calls an accumulation."""
    torch.manual_seed(1)
    model = GPT(CONFIG)
    parallel = Parallel()
    if on_ranks:
        parallel = DataParallelTraining(data_parallel if implementation else None, dist.group.WORLD)
    module = parallel.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    accumulation = MicrobatchAccumulation(implementation)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        first = torch.randint(CONFIG.vocab_size, (8, 1), generator=generator)
        idx = (first + torch.arange(13)) % CONFIG.vocab_size  # counts up
        inputs, targets = parallel.share(idx[:, :-1]), parallel.share(idx[:, 1:])
        called = Microbatches(module, module, parallel, num_microbatches)
        loss = accumulation.accumulate(called, inputs, targets, num_microbatches)
        called.require_all_seen()
        parallel.synchronize(module)
        parallel.update(module, optimizer, 1.0)
        losses.append(parallel.mean_loss(loss).item())
    return losses


@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
@BY_HAND_AND_TORCHS
def test_the_curve_of_one_pass(implementation: ModuleType | None, num_microbatches: int) -> None:
    expected = curve(None, 1)
    assert expected[-1] < 0.9 * expected[0]
    assert (
        max(abs(a - b) for a, b in zip(curve(implementation, num_microbatches), expected, strict=True)) < 1e-4
    )


@BY_HAND_AND_TORCHS
def test_two_ranks_with_data_parallel(implementation: ModuleType | None) -> None:
    """The last micro-batch alone communicates, through either wrapper."""
    expected = curve(None, 1)
    for losses in run_ranks(curve, implementation, 4, True, ranks=2):
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-4


class Wrapper(nn.Module):
    """Promises nothing but model(inputs, targets) -> (logits, loss)."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.inside = model

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.inside(inputs, targets)


@pytest.mark.parametrize("num_microbatches", [2, 5, 9])
def test_the_reference_needs_a_call_alone(num_microbatches: int) -> None:
    """A wrapped model, also with more micro-batches than sequences, and with targets that do not count."""
    torch.manual_seed(1)
    model = GPT(CONFIG)
    inputs, targets = torch.randint(CONFIG.vocab_size, (2, 5, 12)).unbind()
    targets[1:3] = -1
    targets[3, 2:] = -1
    expected = model(inputs, targets)[1]
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.testing.assert_close(
        accumulate_gradients(Wrapper(model), inputs, targets, num_microbatches), expected.detach()
    )
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
