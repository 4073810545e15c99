"""What a step keeps in memory: the bytes alive after every operation, and what is kept for backward."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grader.beside.measure import own_storage, tensors_in


class Meter(TorchDispatchMode):
    """Inside `with`: the bytes of storages that operations have made and that are alive.

    What was there before, such as the weights, does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        """Bytes, at this moment."""
        self.history = [0]
        """`alive` at the start, after each operation and at each mark."""
        self.marks: dict[str, int] = {}
        """Name → where in the history."""
        self._sizes: dict[int, int] = {}

    @property
    def peak(self) -> int:
        """The most bytes that were alive at once."""
        return max(self.history)

    def mark(self, name: str) -> None:
        """Remember this moment by a name: what is alive now goes into the history."""
        self.marks[name] = len(self.history)
        self.history.append(self.alive)

    def at(self, name: str) -> int:
        """Bytes alive at a mark."""
        return self.history[self.marks[name]]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_key(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if _key(tensor) not in given:
                self._watch(tensor.untyped_storage())
        self.history.append(self.alive)
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.alive += storage.nbytes()
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)


@dataclass(frozen=True)
class Kept:
    """A storage that autograd keeps for backward."""

    module: str
    """Name of the module in whose forward it was kept first, "" for the outermost."""
    tensor: Tensor
    num_bytes: int
    """Of the whole storage."""


def kept_for_backward(module: nn.Module, *inputs: Any) -> list[Kept]:
    """What `module(*inputs)` keeps for backward: each storage once, parameters and buffers left out."""
    inside, kept = [""], dict[int, Kept]()
    own = {own_storage(tensor).data_ptr() for tensor in (*module.parameters(), *module.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        storage = own_storage(tensor)
        if storage.data_ptr() not in own:
            kept.setdefault(storage.data_ptr(), Kept(inside[-1], tensor, storage.nbytes()))
        return tensor

    hooks = []
    for name, child in module.named_modules():
        hooks.append(child.register_forward_pre_hook(lambda *_, name=name: inside.append(name)))
        hooks.append(child.register_forward_hook(lambda *_: inside.pop() and None))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*inputs)
    for hook in hooks:
        hook.remove()
    return list(kept.values())


def kept_bytes(module: nn.Module, *inputs: Any) -> int:
    """The bytes that `module(*inputs)` keeps for backward, without parameters and buffers."""
    return sum(kept.num_bytes for kept in kept_for_backward(module, *inputs))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
