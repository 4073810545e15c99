"""What a rank holds: bytes of weights, gradients and optimizer state, by distinct storages."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested dicts, lists and tuples, in their order."""
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in inner for tensor in tensors_in(each)]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors: a view counts as the whole that it keeps alive."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters."""
    return storage_bytes(module.parameters())


def gradient_bytes(module: nn.Module) -> int:
    """Bytes of the gradients that a module's parameters hold."""
    return storage_bytes(p.grad for p in module.parameters() if p.grad is not None)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state, scalars such as step counts left out."""
    return storage_bytes(tensor for tensor in tensors_in(optimizer.state) if tensor.dim() > 0)
