"""Lesson 04 with sums: of the model's means, or of losses made from logits, divided by what counts."""

import bisect

import torch
import torch.nn.functional as F

from nanogpt.model import GPT
from solutions.flops_and_memory import activation_bytes, model_state_bytes


def summed_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")


def accumulate_gradients(model, inputs, targets, num_microbatches):
    """Micro-batches of equal size and a shorter last one, of which there may be fewer than asked for."""
    number = (targets >= 0).sum().clamp(min=1)
    rows = -(-inputs.size(0) // num_microbatches)
    total = 0.0
    for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
        here = y.ge(0).sum()
        if not here:
            continue
        loss = (model(x, y)[1] * here) / number
        loss.backward()
        total = total + loss.detach()
    return total


class Needs:
    """What a batch needs, as a sequence that bisect can search."""

    def __init__(self, config, recipe, sequence_length):
        with torch.device("meta"):
            size = sum(p.numel() for p in GPT(config).parameters())
        self.states = model_state_bytes(size, recipe)["total"]
        self.config, self.sequence_length = config, sequence_length

    def __len__(self):
        return 2**20

    def __getitem__(self, batch_size):
        if batch_size == 0:
            return 0
        kept = activation_bytes(self.config, batch_size, self.sequence_length)["total"]
        return self.states + kept + 8 * batch_size * self.sequence_length * self.config.vocab_size


def largest_microbatch(config, memory_bytes, recipe, sequence_length):
    return max(0, bisect.bisect_right(Needs(config, recipe, sequence_length), memory_bytes) - 1)


def train_epoch(model, optimizer, scheduler, microbatches, accumulate):
    """One pass over the micro-batches: sums of losses, and one division of the gradients before the step."""
    losses, total, number = [], 0.0, 0
    model.zero_grad(set_to_none=True)
    for i, (inputs, targets) in enumerate(microbatches, start=1):
        loss = summed_loss(model(inputs, targets)[0], targets)
        loss.backward()
        total, number = total + loss.item(), number + int((targets != -1).sum())
        if i % accumulate == 0 or i == len(microbatches):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= number
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad(set_to_none=True)
            scheduler.step()
            losses.append(total / number)
            total, number = 0.0, 0
    return losses
