"""Lesson 01 without a formula: build the model and look, on the meta device where numbers do not matter."""

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nanogpt.model import GPT

PARTS = {"wte": "embedding", "wpe": "embedding", "drop": "embedding", "attn": "attention", "mlp": "mlp"}


def part_of(name):
    pieces = name.split(".")
    if any(piece.startswith("ln_") for piece in pieces):
        return "norm"
    return next((PARTS[piece] for piece in pieces if piece in PARTS), "head")


def count_parameters(config):
    with torch.device("meta"):
        model = GPT(config)
    counts = dict.fromkeys(("embedding", "attention", "mlp", "norm", "head"), np.int64(0))
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    counts["total"] = sum(parameter.numel() for parameter in model.parameters())
    return counts


def _counted(config, batch_size, sequence_length):
    with torch.device("meta"):
        model, tokens = GPT(config), torch.zeros(batch_size, sequence_length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens)
    return {name: sum(count.values()) for name, count in counter.get_flop_counts().items()}


def forward_flops(config, batch_size, sequence_length):
    counts = _counted(config, batch_size, sequence_length)
    flops = {"total": counts["GPT"], "head": counts["GPT.lm_head"], "embedding": 0, "norm": 0}
    for part, name in (("attention", "attn"), ("mlp", "mlp")):
        flops[part] = sum(count for key, count in counts.items() if key.endswith(f".{name}"))
    return flops


def training_flops(config, batch_size, sequence_length, recompute="none"):
    counts = _counted(config, batch_size, sequence_length)
    if recompute == "none":
        again = 0
    elif recompute == "attention":
        again = sum(count for name, count in counts.items() if name.endswith(".attn.core"))
    elif recompute == "full":
        again = sum(counts[f"GPT.transformer.h.{layer}"] for layer in range(config.n_layer))
    else:
        raise ValueError(f"cannot recompute {recompute!r}")
    return float(counts["GPT"] * 3 + again)


def model_state_bytes(num_parameters, recipe):
    half, full = torch.bfloat16.itemsize, torch.float32.itemsize
    match recipe:
        case "fp32":
            sizes = {"weights": full, "gradients": full, "optimizer": 2 * full}
        case "mixed":
            sizes = {"weights": half, "gradients": half, "optimizer": 3 * full}
        case "mixed_fp32_gradients":
            sizes = {"weights": half, "gradients": full, "optimizer": 3 * full}
        case _:
            raise ValueError(f"no recipe {recipe!r}")
    sizes["total"] = sum(sizes.values())
    return {name: num_parameters * size for name, size in sizes.items()}


def activation_bytes(config, batch_size, sequence_length):
    """Other parts than the reference's: a norm's output counts with the norm."""
    model = GPT(config).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    inside, kept = [], {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
        module.register_forward_hook(lambda *_: inside.pop() and None)
    norms = set()
    for module in model.modules():
        if type(module).__name__ == "LayerNorm":
            module.register_forward_hook(lambda _, __, y: norms.add(y.untyped_storage().data_ptr()))

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept.setdefault(storage.data_ptr(), (inside[-1] if inside else "", storage.nbytes()))
        return tensor

    tokens, targets = torch.zeros(2, batch_size, sequence_length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _result = model(tokens.clone(), targets.clone())
    sizes = dict.fromkeys(("embedding", "attention", "mlp", "norm", "head"), 0)
    for pointer, (name, size) in kept.items():
        sizes["norm" if pointer in norms else part_of(name)] += size
    return {**sizes, "total": sum(sizes.values())}


def model_flops_utilization(config, tokens_per_second, peak_flops_per_second, sequence_length):
    """PaLM's 6·N + 12·L·a·d·s."""
    matrices = int(count_parameters(config)["total"]) - config.block_size * config.n_embd
    core = 12 * config.n_layer * config.n_embd * sequence_length
    return tokens_per_second * (6 * matrices + core) / peak_flops_per_second


def utilization_report(model, tokens_per_second, sequence_length, datasheet, recompute="none"):
    config = model.config
    state = model.state_dict()
    if model.lm_head.weight is model.transformer.wte.weight:
        del state["lm_head.weight"]
    count = sum(tensor.numel() for tensor in state.values())
    peak = datasheet["flops_per_second"] * (0.5 if datasheet["with_sparsity"] else 1.0)
    step = training_flops(config, 1, sequence_length)
    with_recomputation = training_flops(config, 1, sequence_length, recompute)
    sequences_per_second = tokens_per_second / sequence_length
    return {
        "parameters": count,
        "model_state_gib": count / 2**26,
        "model_flops_utilization": sequences_per_second * step / peak,
        "hardware_flops_utilization": sequences_per_second * with_recomputation / peak,
    }


def attainable_flops_per_second(m, k, n, bytes_per_number, peak_flops_per_second, bytes_per_second):
    """By time, and by sums over the three matrices."""
    numbers = sum(rows * columns for rows, columns in ((m, k), (k, n), (m, n)))
    times = np.array([2 * m * k * n / peak_flops_per_second, numbers * bytes_per_number / bytes_per_second])
    return peak_flops_per_second * times[0].item() / times.max().item()


def training_plan(num_parameters, num_tokens, num_gpus, peak_flops_per_second, utilization, bytes_per_gpu):
    """By the clock: how many tokens all GPUs see in a second."""
    tokens_per_second = num_gpus * utilization * peak_flops_per_second / (6 * num_parameters)
    hours = num_tokens / tokens_per_second / 60**2
    fewest = 1
    while fewest * bytes_per_gpu < 16 * num_parameters:
        fewest += 1
    return {"fewest_gpus": fewest, "days": hours / 24, "gpu_hours": hours * num_gpus}
