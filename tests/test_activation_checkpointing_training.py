"""The adapters of lesson 03: `--checkpoint every|attention`, ours and PyTorch's."""

import copy

import pytest
import torch

from nanogpt.model import GPT, Dropout, GPTConfig, PlainAttention
from nanogpt.technique import find_technique
from solutions import activation_checkpointing

CONFIG = GPTConfig(block_size=16, vocab_size=31, n_layer=3, n_head=2, n_embd=12, dropout=0.2)


def step(model: GPT) -> dict[str, torch.Tensor]:
    """Loss and gradients of one pass, the next random number, and that of the model's own generator."""
    torch.manual_seed(1)
    idx, targets = torch.randint(31, (2, 3, 16)).unbind()
    generator = model.transformer.h[0].mlp.dropout.generator
    if generator is not None:
        generator.manual_seed(2)
    loss = model(idx, targets)[1]
    loss.backward()
    seen = {name: parameter.grad for name, parameter in model.named_parameters()}
    if generator is not None:
        seen["own number"] = torch.rand(1, generator=generator)
    return seen | {"loss": loss.detach(), "number": torch.rand(1)}


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("implementation", [activation_checkpointing, None], ids=["solutions", "torch"])
@pytest.mark.parametrize("name", ["every", "attention"])
def test_a_step_is_the_same_to_the_last_digit(name: str, implementation, own_generator: bool) -> None:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    for block in model.transformer.h:
        block.attn.core = PlainAttention(CONFIG.dropout)
    changed = copy.deepcopy(model)
    for each in (model, changed):
        generator = torch.Generator() if own_generator else None
        for module in each.modules():
            if isinstance(module, Dropout):
                module.generator = generator
    adapter, _ = find_technique("CHECKPOINT", name)
    changed = adapter(implementation).apply(changed)
    assert list(changed.state_dict()) == list(model.state_dict())
    expected = step(model)
    for key, value in step(changed).items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("implementation", [activation_checkpointing, None], ids=["solutions", "torch"])
def test_a_changed_model_samples_and_can_be_copied(implementation) -> None:
    adapter, _ = find_technique("CHECKPOINT", "every")
    model = GPT(CONFIG).eval()
    changed = adapter(implementation).apply(copy.deepcopy(model))
    idx = torch.randint(31, (2, 5))
    with torch.no_grad():
        assert torch.equal(changed(idx)[0], model(idx)[0])
    copied = copy.deepcopy(changed)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    assert not torch.equal(copied(idx)[0], changed(idx)[0])


def test_a_function_that_does_something_else_the_second_time_is_told() -> None:
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.sin() if len(calls) == 2 else x.sin().exp().cos()

    y = activation_checkpointing.checkpoint(function, torch.randn(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="fewer tensors"):
        y.sum().backward()
