"""ZeRO-1, 2 and 3 in the training loop, and PyTorch's own version of each.

With `--implementation torch`, `--parallel zero1` is DistributedDataParallel with ZeroRedundancyOptimizer,
`zero2` is `fully_shard` that keeps the weights from forward to backward, and `zero3` is `fully_shard`.
"""

import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from nanogpt.config import TrainConfig
from nanogpt.model import GPT
from nanogpt.optimizer import adamw
from nanogpt.parallel import Parallel, clip_parts


class Clip:
    """Clips a gradient of which every rank has a part: the norm is that of all parts together."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.max_norm = float("inf")
        self.norm = torch.zeros(())

    @torch.no_grad()
    def __call__(self, gradients: list[Tensor], device: torch.device) -> None:
        """Scale this rank's parts, in place, and keep the norm that there was."""
        square = sum((g.float().square().sum() for g in gradients), torch.zeros((), device=device))
        dist.all_reduce(square, group=self.group)
        self.norm = square.sqrt()
        for gradient in gradients:
            gradient.mul_((self.max_norm / (self.norm + 1e-6)).clamp(max=1.0))


class ClippedAdamW(AdamW):
    """AdamW inside a sharded optimizer: clips its share of the mean gradients, which `step` finds."""

    clip: Clip

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.clip([p.grad for p in parameters if p.grad is not None], parameters[0].device)
        return super().step(closure)


def own_state_optimizer(*args: Any, **kwargs: Any) -> Optimizer:
    """PyTorch's ZeRO-1 whose `state_dict` is this rank's share, as our checkpoints want it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the package beside it is scripted
        from torch.distributed.optim import ZeroRedundancyOptimizer

    class OwnStateOptimizer(ZeroRedundancyOptimizer):
        def state_dict(self) -> dict[str, Any]:
            self._sync_param_groups(self.param_groups, self.optim.param_groups)
            return self.optim.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.optim.load_state_dict(state_dict)
            self._sync_param_groups(self.optim.param_groups, self.param_groups)

    return OwnStateOptimizer(*args, **kwargs)


class ZeroTraining(Parallel):
    """What the three stages have in common: a share of the batch on every rank."""

    def share(self, tensor: Tensor) -> Tensor:
        """This rank's rows (b/n, s) of a global batch (b, s)."""
        return tensor.tensor_split(self.group.size())[self.group.rank()]

    def mean_loss(self, loss: Tensor) -> Tensor:
        """The mean over ranks: shares are equal."""
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=self.group)
        return mean / self.group.size()

    def fully_shard(self, model: GPT, reshard_after_forward: bool) -> GPT:
        """PyTorch's own, a unit for each block."""
        mesh = DeviceMesh.from_group(self.group, model.lm_head.weight.device.type)
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
        return fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)

    def clip_gradients(self, module: nn.Module, max_norm: float) -> Tensor:
        """The norm of a DTensor's gradient is summed over the ranks when it is asked for."""
        norm = super().clip_gradients(module, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def whole(tensor: Tensor) -> Tensor:
    """A DTensor gathered; another tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Zero1Training(ZeroTraining):
    """`--parallel zero1`: whole weights and gradients on each rank, a share of the optimizer's state."""

    exercises = ("ShardedOptimizer",)
    clips_by_name = False

    def wrap(self, model: GPT) -> nn.Module:
        """The model itself: its gradients stay each rank's own until the optimizer's step."""
        self.model = model
        self.clip = Clip(self.group)
        if self.implementation is None:
            return nn.parallel.DistributedDataParallel(model, process_group=self.group)
        return model

    def optimizer(self, module: nn.Module, config: TrainConfig) -> Optimizer:
        """AdamW in nanoGPT's two groups, sharded."""
        groups = [dict(group) for group in adamw(module, config).param_groups]
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups if g["params"]]
        settings = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2)}
        if self.implementation is None:
            return own_state_optimizer(groups, AdamW, process_group=self.group, **settings)
        clipped = type("ClippedAdamW", (ClippedAdamW,), {"clip": self.clip})
        return self.implementation.ShardedOptimizer(groups, clipped, self.group, **settings)

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Ours sends nothing before the optimizer's step anyway."""
        return module.no_sync() if self.implementation is None else super().accumulating(module)

    def update(self, module: nn.Module, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Mean gradients exist inside `step` only, a share on each rank: there they are clipped."""
        if self.implementation is None:
            return super().update(module, optimizer, max_norm)
        self.clip.max_norm = max_norm
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return self.clip.norm

    def whole_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Every rank has the whole weights."""
        return {name: whole(tensor) for name, tensor in self.model.state_dict().items()}


class Zero2Training(Zero1Training):
    """`--parallel zero2`: whole weights on each rank, a share of the gradients and of the state."""

    exercises = ("ShardedOptimizer", "ShardedGradients")

    def wrap(self, model: GPT) -> nn.Module:
        """Gradients are reduced during backward."""
        self.model = model
        self.clip = Clip(self.group)
        if self.implementation is None:
            return self.fully_shard(model, reshard_after_forward=False)
        return self.implementation.ShardedGradients(model, self.group)

    def optimizer(self, module: nn.Module, config: TrainConfig) -> Optimizer:
        """PyTorch's parameters are shards: any optimizer will do."""
        return adamw(module, config) if self.implementation is None else super().optimizer(module, config)

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Every micro-batch's gradients are reduced: to keep them would need a whole gradient's memory."""
        return Parallel.accumulating(self, module)

    def synchronize(self, module: nn.Module) -> None:
        """PyTorch waits at the end of backward by itself."""
        if self.implementation is not None:
            module.finish_gradient_synchronization()


class Zero3Training(ZeroTraining):
    """`--parallel zero3`: a share of everything on each rank."""

    exercises = ("FullySharded",)

    def wrap(self, model: GPT) -> nn.Module:
        """The model in shards."""
        self.dims = {name: p.dim() for name, p in model.named_parameters(remove_duplicate=False)}
        if self.implementation is None:
            return self.fully_shard(model, reshard_after_forward=True)
        return self.implementation.FullySharded(model, self.group)

    def optimizer(self, module: nn.Module, config: TrainConfig) -> Optimizer:
        """AdamW in nanoGPT's two groups; a shard need not have the dimensions of its weight, so by its name.

        Raises:
            ValueError: weights decay, and the shards have other names than GPT's parameters.
        """
        if self.implementation is None:
            return adamw(module, config)
        trained = {name: shard for name, shard in module.named_parameters() if shard.requires_grad}
        dims = {name: self._dim(name) for name in trained}
        if config.weight_decay and None in dims.values():
            strange = next(name for name, dim in dims.items() if dim is None)
            raise ValueError(
                f"matrices decay and biases do not, and the shard {strange} has no name of a GPT's "
                "parameter that would tell which it is: use --weight-decay 0"
            )
        groups = [
            {
                "params": [shard for name, shard in trained.items() if (dims[name] or 0) >= 2],
                "weight_decay": config.weight_decay,
            },
            {
                "params": [shard for name, shard in trained.items() if (dims[name] or 0) < 2],
                "weight_decay": 0.0,
            },
        ]
        return AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))

    def _dim(self, name: str) -> int | None:
        """Of the GPT's parameter of that name, perhaps with the names of wrappers before it."""
        return next((dim for known, dim in self.dims.items() if f".{name}".endswith(f".{known}")), None)

    def clip_gradients(self, module: nn.Module, max_norm: float) -> Tensor:
        """The norm is that of all ranks' shards."""
        if self.implementation is None:
            return super().clip_gradients(module, max_norm)
        return clip_parts(module, max_norm, [self])

    def cuts(self, name: str) -> bool:
        """Every rank has a shard of everything."""
        return True

    def whole_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Gathered from all ranks."""
        if self.implementation is None:
            return {name: whole(tensor) for name, tensor in module.state_dict().items()}
        return module.full_state_dict()


PARALLEL: dict[str, type[Parallel]] = {
    "zero1": Zero1Training,
    "zero2": Zero2Training,
    "zero3": Zero3Training,
}
