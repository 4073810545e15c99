"""A model of which only the sizes are asked, and nothing is drawn."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nanogpt.model import GPT, GPTConfig


class Undrawn(TorchFunctionMode):
    """Leaves tensors as they are where torch.nn.init would fill them.

    What has no storage could not be filled anyway, and torch takes that way through its compiler, which costs
    whoever has not imported it more than a second.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def sized_gpt(config: GPTConfig) -> GPT:
    """A GPT on "meta": its tensors have sizes and no numbers."""
    with torch.device("meta"), Undrawn():
        return GPT(config)
