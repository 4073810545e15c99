"""Lesson 04 without state: losses as functions of the weights, gradients by torch.func and autograd.grad."""

import torch
from torch.func import functional_call

from solutions.flops_and_memory import activation_bytes, count_parameters, model_state_bytes


def accumulate_gradients(model, inputs, targets, num_microbatches):
    """The last micro-batch takes what does not divide; gradients are summed in float64."""
    size = max(1, inputs.shape[0] // num_microbatches)
    starts = list(range(0, inputs.shape[0], size))[:num_microbatches]
    ends = [*starts[1:], inputs.shape[0]]
    counts = [(targets[a:b] != -1).sum().item() for a, b in zip(starts, ends, strict=True)]
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {}
    mean = torch.zeros((), dtype=torch.float64)
    for a, b, count in zip(starts, ends, counts, strict=True):
        if not count:
            continue
        _, loss = functional_call(model, weights, (inputs[a:b], targets[a:b]))
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        for name, gradient in zip(weights, found, strict=True):
            if gradient is not None:
                sums[name] = sums.get(name, 0.0) + gradient.double() * count
        mean += loss.detach().double() * count
    for name, total in sums.items():
        p = weights[name]
        gradient = (total / sum(counts)).to(p.dtype)
        p.grad = gradient if p.grad is None else p.grad + gradient
    return mean / sum(counts)


def largest_microbatch(config, memory_bytes, recipe, sequence_length):
    """Double, then halve the gap."""

    def fits(b):
        states = model_state_bytes(count_parameters(config)["total"], recipe)["total"]
        logits = b * sequence_length * config.vocab_size * torch.float32.itemsize
        return states + activation_bytes(config, b, sequence_length)["total"] + 2 * logits <= memory_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
