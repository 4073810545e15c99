"""What travels from rank to rank: the tensors themselves, as they were when they left."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Messages(TorchDispatchMode):
    """Inside `with`, keeps a copy of every tensor that this rank sends to another.

    A `Watch` counts messages and their bytes; this also says what is in them, whatever function sends them.
    PyTorch's own collectives are not made of such messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, Tensor]] = []
        """The rank that it went to, counted in the world, and the tensor; in the order in which they left."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname == "send":
            tensors, group, to, *_ = args
            peer = dist.get_global_rank(dist.ProcessGroup.unbox(group), to)
            self.sent += [(peer, tensor.clone()) for tensor in tensors]
        return func(*args, **(kwargs or {}))
