"""What a rank holds: bytes of weights, gradients, optimizer state and activations, by distinct storages."""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

T = TypeVar("T")
PLAIN = frozenset((Tensor, nn.Parameter))

MOMENT, AT_MOST = 0.02, 1.0
"""Seconds that the threads which carry messages are given, and how long one that has work is waited for."""


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested dicts, lists and tuples, in their order."""
    return leaves_in(value, Tensor)


def leaves_in(value: Any, kind: type[T]) -> list[T]:
    """What is of a kind in nested dicts, lists and tuples, in its order."""
    found: list[T] = []
    _collect(value, kind, found)
    return found


NO_LEAVES = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of most arguments that hold nothing."""


def _collect(value: Any, kind: type[T], found: list[T]) -> None:
    """Tensors and plain numbers go first: this runs for all arguments of all operations that are recorded."""
    if isinstance(value, kind):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            if type(each) is kind:
                found.append(each)
            elif type(each) not in NO_LEAVES:
                _collect(each, kind, found)
    elif isinstance(value, Mapping):
        for each in value.values():
            _collect(each, kind, found)


def ask(question: Callable[[Tensor], T], tensor: Tensor) -> T:
    """What torch itself says of a tensor, such as Tensor.numel: a subclass may answer as it likes."""
    if type(tensor) in PLAIN:
        return question(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return question(tensor)


@cache
def _wraps(kind: type) -> bool:
    """Whether it is torch.distributed's own, and has no memory but its parts', as DTensor."""
    home = sys.modules.get(kind.__module__)
    is_torchs = (
        kind.__module__.startswith("torch.distributed.") and getattr(home, kind.__name__, None) is kind
    )
    return is_torchs and hasattr(kind, "__tensor_flatten__")


def own_storage(tensor: Tensor) -> torch.UntypedStorage:
    """Where a tensor's numbers lie; of a DTensor those of its part on this rank."""
    while _wraps(type(tensor)):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return ask(Tensor.untyped_storage, tensor)


def graph_of(output: Tensor) -> set[Node]:
    """The nodes of the graph that a backward from here may call."""
    waiting, found = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors: a view counts as the whole that it keeps alive."""
    sizes = {}
    for tensor in tensors:
        storage = own_storage(tensor)
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def settle() -> None:
    """Let go of what nobody holds: cycles, and tensors of messages that gloo's threads have just ended."""
    gc.collect()
    time.sleep(MOMENT)
    latest = time.monotonic() + AT_MOST
    while _others_run() and time.monotonic() < latest:
        time.sleep(MOMENT / 4)


def _others_run() -> bool:
    """Whether another thread of this process has work: on a busy machine it may wait for a core."""
    own = str(threading.get_native_id())
    try:
        return any(_state(thread) == "R" for thread in os.listdir("/proc/self/task") if thread != own)
    except OSError:  # a system without /proc; there the moment has to be enough
        return False


def _state(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/stat") as file:
            return file.read().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return ""


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters."""
    return storage_bytes(module.parameters())


def gradient_bytes(module: nn.Module) -> int:
    """Bytes of the gradients that a module's parameters hold."""
    gradients = (ask(Tensor.grad.__get__, p) for p in module.parameters())
    return storage_bytes(gradient for gradient in gradients if gradient is not None)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state, scalars such as step counts left out."""
    return storage_bytes(tensor for tensor in tensors_in(optimizer.state) if ask(Tensor.dim, tensor) > 0)


def kept_for_backward(model: nn.Module, *inputs: Tensor) -> list[tuple[str, int]]:
    """The distinct storages that autograd keeps in `model(*inputs)`: which module keeps it first, and bytes.

    A module is told by its name, "" for the model itself. Parameters and buffers are left out.
    """
    running = [""]
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    weights = (*model.parameters(), *model.buffers())
    own = {own_storage(tensor).data_ptr() for tensor in weights}
    kept: dict[int, tuple[str, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = own_storage(tensor)
        if storage.data_ptr() not in own:
            kept.setdefault(storage.data_ptr(), (running[-1], storage.nbytes()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _graph = model(*inputs)  # what it keeps has to stay until all is counted
    for handle in handles:
        handle.remove()
    return list(kept.values())
