"""`--model FILE`: the GPT of a file, an edited copy of `model.py` whose MLPs are parallel by themselves.

`GPT(config, group)` has slices of its MLPs' matrices on each rank, and all else whole; `GPT(config)` is the
dense model, for one rank. Every rank gets the whole batch. No gradient is left to be summed: the model's own
backward has completed each of them.
"""

import inspect
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanogpt.model import GPT
from nanogpt.parallel import Parallel, clip_parts
from nanogpt.technique import Checkpointing


class OwnModel(Parallel):
    """The `GPT` of `implementation`, on the ranks of a group; without a group it is on one rank.

    It starts as the dense model does that the loop has drawn: each rank copies its slices of that. So its
    curve is one rank's, whatever the file itself draws. The ranks draw the same dropout, as nothing between
    the cut matrices is dropped.
    """

    exercises = ("GPT",)
    axis = "tensor"
    draws_alike = True

    def build(self, model: GPT, checkpointing: Checkpointing) -> nn.Module:
        """The file's model with the weights of `model`.

        Raises:
            ValueError: it takes no group, or its parameters are not slices and wholes of GPT's.
        """
        theirs = self._construct(model).to(model.lm_head.weight.device)
        self.names = list(model.state_dict())
        self.dims = self._cut_dims(dict(model.named_parameters()), dict(theirs.named_parameters()))
        with torch.no_grad():
            for name, whole in model.named_parameters():
                own = whole
                if name in self.dims:
                    own = whole.chunk(self.group.size(), self.dims[name])[self.group.rank()]
                theirs.get_parameter(name).copy_(own)
        return checkpointing.apply(theirs)

    def _construct(self, model: GPT) -> nn.Module:
        made = self.implementation.GPT
        if self.group is None:
            return made(model.config)
        try:
            inspect.signature(made).bind(model.config, self.group)
        except TypeError:
            raise ValueError(
                "--model: its GPT takes no group, so it is for one rank: give GPT.__init__, Block.__init__ "
                "and MLP.__init__ an argument group=None, and hand it down"
            ) from None
        return made(model.config, self.group)

    def _cut_dims(self, dense: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, int]:
        """Name of a parameter of which each rank has a slice → along which dimension.

        Raises:
            ValueError: the two have not the same names, or something else is cut than MLPs into n parts.
        """
        n = 1 if self.group is None else self.group.size()
        if odd := sorted(dense.keys() ^ theirs.keys()):
            raise ValueError(f"--model: its parameters are not called as GPT's: {', '.join(odd[:4])}")
        dims = {}
        for name, whole in dense.items():
            shape, own = tuple(whole.shape), tuple(theirs[name].shape)
            if own == shape:
                continue
            cuts = [d for d, k in enumerate(shape) if own == (*shape[:d], k // n, *shape[d + 1 :])]
            if ".mlp." not in name or not cuts or shape[cuts[0]] % n:
                raise ValueError(
                    f"--model: {name} is {own} on a rank and {shape} in GPT: only the MLPs' matrices may be "
                    f"cut, into {n} slices (--parallel tensor_parallel trains what tensor_parallelize cuts)"
                )
            dims[name] = cuts[0]
        if n > 1 and not dims:
            raise ValueError(
                f"--model: GPT(config, group) is the whole model on each of {n} ranks: has MLP the group?"
            )
        return dims

    def cuts(self, name: str) -> bool:
        """Matrices of MLPs, and the biases that go with a part of the outputs."""
        return name in self.dims

    def clip_gradients(self, module: nn.Module, max_norm: float) -> Tensor:
        """Slices count on every rank, what is whole counts once."""
        return clip_parts(module, max_norm, [self])

    @torch.no_grad()
    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gathers the slices; what the file's modules hold beyond GPT's weights is left out."""
        return {name: self._joined(name, weights[name]) for name in self.names}

    def _joined(self, name: str, own: Tensor) -> Tensor:
        if name not in self.dims:
            return own
        slices = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(slices, own.contiguous(), group=self.group)
        return torch.cat(slices, self.dims[name])
