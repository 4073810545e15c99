"""Lesson 03 otherwise: an autograd.Function, and groups that are modules in the place of the blocks."""

from functools import partial

import torch
from torch import nn


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, function, generators, *inputs):
        ctx.function = function
        ctx.generators = [(generator, generator.get_state()) for generator in generators]
        ctx.places = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        ctx.others = [None if i in ctx.places else x for i, x in enumerate(inputs)]
        ctx.save_for_backward(*[inputs[i] for i in ctx.places])
        ctx.devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        ctx.device = next((inputs[i].device.type for i in ctx.places), "cpu")
        ctx.state = torch.get_rng_state()
        ctx.device_states = [torch.cuda.get_rng_state(device) for device in ctx.devices]
        ctx.autocast = {
            "device_type": ctx.device,
            "enabled": torch.is_autocast_enabled(ctx.device),
            "dtype": torch.get_autocast_dtype(ctx.device),
        }
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    def backward(ctx, upstream):
        inputs = list(ctx.others)
        for i, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            inputs[i] = x.detach().requires_grad_(x.requires_grad)
        with torch.random.fork_rng(ctx.devices), torch.enable_grad(), torch.autocast(**ctx.autocast):
            torch.set_rng_state(ctx.state)
            now = [(generator, generator.get_state()) for generator, _ in ctx.generators]
            for generator, state in ctx.generators:
                generator.set_state(state)
            for device, state in zip(ctx.devices, ctx.device_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            output = ctx.function(*inputs)
            for generator, state in now:
                generator.set_state(state)
        if output.requires_grad:  # nothing does in a frozen block
            torch.autograd.backward(output, upstream)
        found = [x.grad if isinstance(x, torch.Tensor) else None for x in inputs]
        return None, None, None, *found


def checkpoint(function, *inputs, generators=()):
    anchor = torch.empty(0, requires_grad=True)  # backward is called although no input may need a gradient
    return _Checkpoint.apply(anchor, function, generators, *inputs)


def generators_in(module):
    return {m.generator for m in module.modules() if getattr(m, "generator", None) is not None}


class Group(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x):
        return checkpoint(self.blocks, x, generators=generators_in(self.blocks))


def checkpoint_blocks(model, every=1):
    blocks = list(model.transformer.h)
    first = len(blocks) % every  # the group that is shorter comes first
    starts = ([0] if first else []) + list(range(first, len(blocks), every))
    ends = [*starts[1:], len(blocks)]
    groups = [Group(blocks[a:b]) for a, b in zip(starts, ends, strict=True)]
    model.transformer.h = nn.ModuleList(groups)
    return model


def best_segment_length(num_blocks, block_bytes, boundary_bytes):
    best = (float("inf"), 0)
    for k in range(1, num_blocks + 1):
        groups, rest = divmod(num_blocks, k)
        best = min(best, ((groups + (rest > 0)) * boundary_bytes + k * block_bytes, k))
    return best[1]


class Recomputed(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.core = core

    def forward(self, q, k, v):
        return checkpoint(self.core, q, k, v, generators=generators_in(self.core))


def recompute_attention(model):
    for block in model.transformer.h:
        block.attn.core = Recomputed(block.attn.core)
    return model


class _Chunks(torch.autograd.Function):
    """Gradients are computed with the loss, chunk by chunk; backward only scales them."""

    @staticmethod
    def forward(ctx, x, weight, targets, chunk_size):
        counted = (targets != -1).sum()
        total, ctx.of_x, ctx.of_weight = 0.0, torch.zeros_like(x), torch.zeros_like(weight)
        for start in range(0, len(x), chunk_size):
            rows, goals = x[start : start + chunk_size], targets[start : start + chunk_size]
            logs = (rows @ weight.T).log_softmax(1)
            chosen, there = goals.clamp(min=0)[:, None], (goals != -1)[:, None]
            total = total - (logs.gather(1, chosen) * there).sum()
            logs = (
                logs.exp_().scatter_add_(1, chosen, -torch.ones_like(chosen, dtype=x.dtype)) * there / counted
            )
            ctx.of_x[start : start + chunk_size] = logs @ weight
            ctx.of_weight += logs.T @ rows
        return total / counted

    @staticmethod
    def backward(ctx, upstream):
        needs = ctx.needs_input_grad
        return (
            ctx.of_x * upstream if needs[0] else None,
            ctx.of_weight * upstream if needs[1] else None,
            None,
            None,
        )


def chunked_cross_entropy(x, weight, targets, chunk_size):
    return _Chunks.apply(x, weight, targets, chunk_size)


def watched_forward(blocks, x, sizes):
    first = True

    def run(block, i, x):
        if first:
            sizes[i] += 0.1 * (x.detach().abs().mean() - sizes[i])
        return block(x)

    for i, block in enumerate(blocks):
        x = checkpoint(partial(run, block, i), x)
    first = False
    return x
