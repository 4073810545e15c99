"""Lesson 04 with gradients of its own: summed apart from `.grad`, on every k-th sequence, block by block."""

import torch
from torch import nn

from solutions.flops_and_memory import activation_bytes, count_parameters, model_state_bytes


def accumulate_gradients(model, inputs, targets, num_microbatches):
    """Parts of GPT instead of its forward; what stood in .grad is put aside and added in the end."""
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in trained]
    for p in trained:
        p.grad = None
    positions = torch.arange(inputs.size(1), device=inputs.device)
    total, number = torch.zeros((), device=inputs.device), 0
    for i in range(num_microbatches):
        rows, goals = inputs[i::num_microbatches], targets[i::num_microbatches]
        here = int(goals.ne(-1).sum())
        if here == 0:
            continue
        x = model.embed(rows, positions)
        for block in model.transformer.h:
            x = block(x)
        loss = model.loss(model.head(x), goals) * here
        loss.backward()
        total, number = total + loss.detach(), number + here
    with torch.no_grad():
        for p, old in zip(trained, before, strict=True):
            if p.grad is not None:
                p.grad /= number
                if old is not None:
                    p.grad += old
            else:
                p.grad = old
    return total / number


def largest_microbatch(config, memory_bytes, recipe, sequence_length):
    """Count up until it no longer fits."""
    states = model_state_bytes(count_parameters(config)["total"], recipe)["total"]
    b = 0
    head = 2 * 4 * sequence_length * config.vocab_size
    while states + activation_bytes(config, b + 1, sequence_length)["total"] + (b + 1) * head <= memory_bytes:
        b += 1
    return b


def train_epoch(model, optimizer, scheduler, microbatches, accumulate):
    """With torch.autograd.grad and lists of sums."""
    waiting, losses = list(microbatches), []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    while waiting:
        together, waiting = waiting[:accumulate], waiting[accumulate:]
        numbers = [(targets != -1).sum().item() for _, targets in together]
        sums, total = [torch.zeros_like(p) for p in parameters], 0.0
        for (inputs, targets), number in zip(together, numbers, strict=True):
            if number == 0:
                continue
            loss = model(inputs, targets)[1] * (number / sum(numbers))
            for s, g in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
                s += g
            total += loss.detach()
        for p, s in zip(parameters, sums, strict=True):
            p.grad = s
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return losses
