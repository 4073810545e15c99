"""Gradient accumulation by hand: the gradient of a batch that does not fit, a piece at a time.

Backward adds to `.grad`, and the gradient of a sum is the sum of the gradients. So a batch can be cut
into micro-batches, of which each needs memory for its own activations alone. The loss is a mean over
the targets that count, not over micro-batches: that is all there is to get wrong.

Notation: b batch, s sequence length, k micro-batches.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nanogpt.model import GPT, GPTConfig
from nanogpt.technique import Accumulation
from solutions.flops_and_memory import activation_bytes, count_parameters, model_state_bytes


def accumulate_gradients(model: nn.Module, inputs: Tensor, targets: Tensor, num_microbatches: int) -> Tensor:
    """Add the gradient of a whole batch to `.grad`, one micro-batch at a time.

    Afterwards `.grad` is what `model(inputs, targets)[1].backward()` would have made it; a frozen parameter
    keeps its None. At most one micro-batch's activations are alive at once. Inputs, targets, weights
    and the training mode are left alone.

    An extra that earns a star: hooks that take each gradient away as soon as it is in `.grad`, as ZeRO's do
    (`register_post_accumulate_grad_hook`), have taken the same in all.

    Args:
        model: called like a GPT: `model(rows, goals)` gives logits and the mean loss over those of its
            targets that are not -1. Call it once for each micro-batch; where no target counts it may be
            left out. Use the loss that it gives: it need not be the cross entropy of those logits.
        inputs, targets: tokens and next tokens (b, s); a target of -1 does not count. At least one counts; a
            micro-batch may have none.
        num_microbatches: k, at most b; where b is not divisible by it, micro-batches differ in size,
            or are fewer.

    Returns:
        The mean loss over all counted targets, detached.
    """
    # answer
    k = min(num_microbatches, len(inputs))  # a micro-batch has at least one sequence
    counted = (targets != -1).sum()
    mean = torch.zeros((), device=targets.device)
    for rows, goals in zip(inputs.tensor_split(k), targets.tensor_split(k), strict=True):
        loss = model(rows, goals)[1]  # the logits are not kept
        counted_here = (goals != -1).sum()
        # Where no target counts, the model's mean is 0/0.
        loss = torch.where(counted_here > 0, loss * counted_here / counted, 0.0)
        loss.backward()
        mean += loss.detach()
    return mean
    # end of answer


def largest_microbatch(config: GPTConfig, memory_bytes: int, recipe: str, sequence_length: int) -> int:
    """The most sequences of a micro-batch with which a whole training step fits; 0 where one does not.

    A step fits when at its worst moment, at the head, where backward begins, at most `memory_bytes` are
    needed for:

    - the model states of the recipe (`fp32`, `mixed`, `mixed_fp32_gradients`), gradients too;
    - what the forward keeps, by lesson 01's formulas: in fp32, whatever the recipe;
    - two tensors (b, s, v) more, in fp32: the gradients of the log-probabilities and of the logits.
    """
    # answer
    states = model_state_bytes(count_parameters(config)["total"], recipe)["total"]
    one, two = (activation_bytes(config, b, sequence_length)["total"] for b in (1, 2))
    each = two - one  # activations are a straight line in b
    fixed = states + one - each
    head = 2 * 4 * sequence_length * config.vocab_size
    return max(0, (memory_bytes - fixed) // (each + head))
    # end of answer


def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    microbatches: Sequence[tuple[Tensor, Tensor]],
    accumulate: int,
) -> list[float]:
    """One epoch: an optimizer step for every `accumulate` micro-batches, and one for what is left over.

    A micro-batch is a pair of tokens and next tokens (b, s); shapes differ, and so does the number of
    targets that count (-1 does not). A micro-batch may have none, where another of its step has some.
    A step is what one batch with all counted targets of its micro-batches would give: the gradient of
    their mean loss, clipped to norm 1, one step of the optimizer and one of the scheduler. The optimizer
    may hold some of the model's parameters only; the norm may count the others, or not. What stood in any
    `.grad` before the epoch does not count. The memory is that of the largest micro-batch. The training mode
    is left alone. `microbatches` stays as it is, for the next epoch.

    An extra that earns a star: a frozen parameter stays as it is, also where the optimizer holds it.

    Returns the mean loss of each step.
    """
    # answer
    losses = []
    for first in range(0, len(microbatches), accumulate):
        together = microbatches[first : first + accumulate]
        counted = sum((targets != -1).sum() for _, targets in together)
        model.zero_grad()  # the optimizer may hold fewer parameters than the norm counts
        total = 0.0
        for inputs, targets in together:
            loss = model(inputs, targets)[1]
            share = (targets != -1).sum() / counted
            loss = torch.where(share > 0, loss * share, 0.0)  # the mean over none is 0/0
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return losses
    # end of answer


# --- training ---


class MicrobatchAccumulation(Accumulation):
    """`--accumulate k`: the learner's loop over micro-batches; PyTorch has none but the plain one."""

    exercises = ("accumulate_gradients",)

    def check(self) -> None:
        """Raise a ValueError unless hooks that take each gradient away get the gradient of one pass."""
        if self.implementation is None:
            return
        model = GPT(GPTConfig(block_size=2, vocab_size=5, n_layer=1, n_head=1, n_embd=8))
        inputs, targets = torch.tensor([[[0, 1], [2, 3]], [[1, 2], [3, 4]]])
        model(inputs, targets)[1].backward()
        expected = {parameter: parameter.grad for parameter in model.parameters()}
        model.zero_grad()
        taken = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}

        def take(parameter: nn.Parameter) -> None:
            taken[parameter] += parameter.grad
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(take)
        try:
            self.implementation.accumulate_gradients(model, inputs, targets, 2)
        except Exception as error:
            error.add_note("Tried on a model whose hooks set .grad to None once backward() has added to it.")
            raise
        if not all(torch.allclose(taken[p], gradient, atol=1e-5) for p, gradient in expected.items()):
            raise ValueError(
                "--accumulate with --parallel: hooks send a gradient away once backward() has added it, and "
                "what this accumulate_gradients gives them is not the gradient of one pass: scale each "
                "micro-batch's loss before its backward(), and let backward() alone change .grad"
            )

    def accumulate(self, module: nn.Module, inputs: Tensor, targets: Tensor, num_microbatches: int) -> Tensor:
        """Add to `.grad` what one pass over all of (b, s) would add; the detached mean loss."""
        if self.implementation is None:
            return super().accumulate(module, inputs, targets, num_microbatches)
        return self.implementation.accumulate_gradients(module, inputs, targets, num_microbatches)


ACCUMULATE: dict[str, type[Accumulation]] = {"accumulate": MicrobatchAccumulation}
