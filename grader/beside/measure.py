"""What a rank holds: bytes of weights, gradients and optimizer state, by distinct storages."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


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
    state: Any = optimizer.state
    return storage_bytes(
        leaf for leaf in tree_leaves(dict(state)) if isinstance(leaf, Tensor) and leaf.dim() > 0
    )
