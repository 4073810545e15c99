"""Sharded training in the loop: what decays, and blocks that are computed again while they are gathered."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from grader import run_ranks
from nanogpt.config import TrainConfig
from nanogpt.model import GPT, GPTConfig
from nanogpt.technique import Checkpointing, find_technique
from solutions import fsdp
from solutions.fsdp_training import Zero3Training

CONFIG = GPTConfig(block_size=8, vocab_size=23, n_layer=4, n_head=2, n_embd=10)


class Again(torch.autograd.Function):
    """Forward that keeps its input alone, and runs again in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, function) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return function(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


class BlocksAgain(Checkpointing):
    """Every block's forward is computed again in backward."""

    def apply(self, model: GPT) -> GPT:
        for block in model.transformer.h:
            block.forward = lambda x, inner=block.forward: Again.apply(x, inner)
        return model


def sharded_steps(checkpointing: Checkpointing, micro_batches: int) -> dict:
    """Three clipped steps of FullySharded beside a dense model on the whole batch; the largest difference."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    dense = GPT(CONFIG).double()
    torch.manual_seed(0)
    training = Zero3Training(fsdp, group)
    module = training.build(GPT(CONFIG).double(), checkpointing)
    config = TrainConfig(weight_decay=0.1, learning_rate=0.01)
    optimizers = [training.optimizer(module, config), Zero3Training(None, group).optimizer(dense, config)]
    generator = torch.Generator().manual_seed(1)
    norms = []
    for _ in range(3):
        idx, targets = torch.randint(23, (2, 4 * micro_batches, 8), generator=generator)
        for rows, goals in zip(idx.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            (module(training.share(rows), training.share(goals))[1] / micro_batches).backward()
        dense(idx, targets)[1].backward()
        norms.append(
            (
                training.update(module, optimizers[0], 0.5).item(),
                nn.utils.clip_grad_norm_(dense.parameters(), 0.5).item(),
            )
        )
        optimizers[1].step()
        optimizers[1].zero_grad()
    whole = training.whole_state_dict(module)
    return {
        "weights": max((whole[name] - w).abs().max().item() for name, w in dense.state_dict().items()),
        "norms": max(abs(a - b) / b for a, b in norms),
        "names": list(whole) == list(dense.state_dict()),
    }


@pytest.mark.parametrize("checkpointing", [Checkpointing(), BlocksAgain()], ids=["kept", "again"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_sharded_steps_are_dense_steps(checkpointing: Checkpointing, micro_batches: int) -> None:
    for result in run_ranks(sharded_steps, checkpointing, micro_batches, ranks=2):
        assert result["weights"] < 1e-6
        assert result["norms"] < 1e-5
        assert result["names"]


def gradients_with_hooks() -> dict:
    """Two parameters have hooks: by weight, the largest difference to a dense model's step."""
    group = dist.group.WORLD
    times = 2.0 + group.rank()

    def scale(parameter: nn.Parameter) -> None:
        parameter.grad *= times

    def hooked(model: GPT) -> list[torch.utils.hooks.RemovableHandle]:
        table, norm = model.transformer.wte.weight, model.transformer.h[1].ln_1.weight
        table.register_hook(lambda gradient: times * gradient)
        norm.register_post_accumulate_grad_hook(scale)
        return [table.register_hook(lambda gradient: 0.0 * gradient)]

    torch.manual_seed(0)
    dense = GPT(CONFIG).double()
    sharded = GPT(CONFIG).double()
    sharded.load_state_dict(dense.state_dict())
    handles = hooked(dense) + hooked(sharded)
    module = fsdp.FullySharded(sharded, group)
    for handle in handles:
        handle.remove()  # also after the wrapping
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (module, dense)]
    torch.manual_seed(group.rank())
    idx, targets = torch.randint(23, (2, 4, 8))
    for each in (module, dense):
        each(idx, targets)[1].backward()
    for parameter in dense.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= group.size()
    for optimizer in optimizers:
        optimizer.step()
    whole = module.full_state_dict()
    return {name: (whole[name] - w).abs().max().item() for name, w in dense.state_dict().items()}


def test_hooks_on_parameters_survive_sharding() -> None:
    for differences in run_ranks(gradients_with_hooks, ranks=2):
        assert max(differences.values()) < 1e-12, differences


def whole_after_backward(prefetch: bool) -> list[int]:
    """The blocks that are whole after a backward which ends in the third: all below it is frozen."""
    model = GPT(CONFIG)
    *below, _, _ = model.transformer.h
    for part in (model.transformer.wte, model.transformer.wpe, *below):
        part.requires_grad_(False)
    sharded = fsdp.FullySharded(model, dist.group.WORLD, prefetch=prefetch)
    idx, targets = torch.randint(23, (2, 4, 8))
    sharded(idx, targets)[1].backward()
    buffers = [[flat.buffer.untyped_storage().nbytes() for flat in unit.flats] for unit in sharded.units]
    return [number for number, sizes in enumerate(buffers) if any(sizes)]


@pytest.mark.parametrize("prefetch", [False, True])
def test_nothing_is_gathered_where_backward_does_not_come(prefetch: bool) -> None:
    assert run_ranks(whole_after_backward, prefetch, ranks=2) == [[], []]


def steps_with_a_later_group() -> float:
    """A group that is added after a step, and the learning rate of the first changed: beside AdamW's own."""
    differences = []
    weights = [nn.Parameter(torch.arange(7.0) + k) for k in range(2)]
    dense = [nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizers = [
        fsdp.ShardedOptimizer(weights[:1], torch.optim.AdamW, dist.group.WORLD, lr=0.1),
        torch.optim.AdamW(dense[:1], lr=0.1),
    ]
    for _ in range(2):
        for optimizer, parameters in zip(optimizers, (weights, dense), strict=True):
            for parameter in parameters:
                parameter.grad = parameter.detach().cos()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.03
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": parameters[1:], "weight_decay": 0.5})
        differences += [(a - b).abs().max().item() for a, b in zip(weights, dense, strict=True)]
    return max(differences)


def test_a_group_may_be_added_to_a_sharded_optimizer() -> None:
    assert max(run_ranks(steps_with_a_later_group, ranks=2)) < 1e-6


def step_of_fully_shard() -> float:
    module = fsdp.fully_shard_gpt(GPT(CONFIG), DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    optimizer = torch.optim.AdamW(module.parameters())
    loss = module(torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long))[1]
    loss.backward()
    under_way = dist.all_reduce(torch.ones(3), async_op=True)  # while the step asks fake tensors for shapes
    optimizer.step()
    under_way.wait()
    return loss.item()


def test_pytorchs_own_is_watched_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(loss > 0 for loss in run_ranks(step_of_fully_shard, ranks=2))
    assert capsys.readouterr().out == ""


class OneShard(nn.Module):
    """A learner's FullySharded, whose shards have names of their own."""

    def __init__(self, module: GPT, group: object) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.zeros(3))


def optimizer_of_strange_shards(weight_decay: float) -> float:
    training = Zero3Training(SimpleNamespace(FullySharded=OneShard), dist.group.WORLD)
    module = training.wrap(GPT(CONFIG))
    return training.optimizer(module, TrainConfig(weight_decay=weight_decay)).param_groups[0]["lr"]


def test_strange_shards_cannot_decay() -> None:
    with pytest.raises(RuntimeError, match="use --weight-decay 0"):
        run_ranks(optimizer_of_strange_shards, 0.1, ranks=1)
    assert run_ranks(optimizer_of_strange_shards, 0.0, ranks=1) == [2e-3]


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_the_loop_finds_each_stage(name: str) -> None:
    adapter, module = find_technique("PARALLEL", name)
    assert module is fsdp
    assert all(hasattr(fsdp, exercise) for exercise in adapter.exercises)
