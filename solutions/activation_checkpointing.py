"""Activation checkpointing by hand: keep less in the forward, compute it again in backward.

Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174); selective
recomputation: Korthikanti et al. 2022 (arXiv:2205.05198).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from nanogpt.model import GPT, Block
from nanogpt.technique import Checkpointing


# answer: the circumstances of a forward, and a stand-in for a kept tensor
class Circumstances:
    """What the result of a function depends on besides its inputs: random states and autocast."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self.generators = [torch.default_generator, *generators]
        devices = ["cpu"]
        if torch.cuda.is_initialized():
            self.generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
            devices.append("cuda")
        self.states = self._states()
        self.autocasts = [
            torch.autocast(
                device,
                dtype=torch.get_autocast_dtype(device),
                enabled=torch.is_autocast_enabled(device),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            for device in devices
        ]

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.generators]

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Bring them back, and at the end what was there before."""
        before = self._states()
        self._set(self.states)
        try:
            with ExitStack() as stack:
                for autocast in self.autocasts:
                    stack.enter_context(autocast)
                yield
        finally:
            self._set(before)


class Place:
    """Stands in the graph for a tensor that autograd wanted to keep; empty until backward asks for it."""

    tensor: Tensor | None = None


# end of answer


def checkpoint(
    function: Callable[..., Tensor], *inputs: Any, generators: Iterable[torch.Generator] = ()
) -> Tensor:
    """Compute `function(*inputs)` and keep only the inputs: backward calls the function once more.

    `backward()` leaves the gradients of `function(*inputs)` in `.grad`: for the inputs that need one, and
    for every leaf that the function reaches by itself, such as a module's weights, even where no input
    needs a gradient. The second call sees the random numbers of the first, and leaves the random state as
    it finds it: torch's own, and that of `generators`. It runs under the autocast of the first: on or off,
    and with its dtype. After a backward that goes through all of it and frees the graph, nothing of the
    second call is left, even while somebody holds the loss. Made by hand: `torch.utils.checkpoint` is not
    used.

    Args:
        function: returns one tensor, computes the same from the same inputs, and in backward asks once for
            each tensor that it saved.
        inputs: of any kind: tensors with and without gradient, numbers, None.
        generators: random number generators, besides torch's own, that the function draws from. An
            iterator will do, which can be gone through once.
    """
    # answer
    if not torch.is_grad_enabled():
        return function(*inputs)
    circumstances = Circumstances(generators)
    places: list[weakref.ref[Place]] = []  # weak: a place ends with the part of the graph that needs it

    def leave_out(_: Tensor) -> Place:
        place = Place()
        places.append(weakref.ref(place))
        return place

    def bring_back(place: Place) -> Tensor:
        if place.tensor is None:
            compute_again()
        if place.tensor is None:
            raise RuntimeError("the second call kept fewer tensors: the function did something else")
        return place.tensor

    def compute_again() -> None:
        waiting = iter(places)

        def fill(tensor: Tensor) -> None:
            reference = next(waiting, None)
            if reference is None:
                raise RuntimeError("the second call kept more tensors: the function did something else")
            if (place := reference()) is not None:
                place.tensor = tensor.detach()

        def refuse(_: None) -> Tensor:
            raise RuntimeError("a function that is computed again must not call backward itself")

        with circumstances.again(), torch.enable_grad(), saved_tensors_hooks(fill, refuse):
            function(*inputs)

    with saved_tensors_hooks(leave_out, bring_back):
        return function(*inputs)
    # end of answer


# answer: checkpointing for parts of a model
def in_turn(functions: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """x through one function after the other."""
    for function in functions:
        x = function(x)
    return x


def unchanged(x: Tensor) -> Tensor:
    """The forward of a block whose work is done by the first of its group."""
    return x


def generators_of(modules: list[nn.Module]) -> list[torch.Generator]:
    """Random number generators that modules, or parts of them, have of their own."""
    found = (getattr(part, "generator", None) for module in modules for part in module.modules())
    return list(dict.fromkeys(generator for generator in found if generator is not None))


def checkpoint_modules(modules: list[nn.Module], function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`checkpoint` a function that runs these modules."""
    return checkpoint(function, *inputs, generators=generators_of(modules))


# end of answer


def checkpoint_blocks(model: GPT, every: int = 1) -> GPT:
    """Have each group of `every` blocks keep only its input; backward computes a group again as a whole.

    A group that is called in evaluation mode may run as it is. Where the number of blocks is not divisible
    by `every`, one group is shorter. Loss and gradients are those of the model as it was. A `Dropout` may
    have a `generator` of its own, or get one later: it drops the same elements again, and what the
    generator draws next does not depend on checkpointing. Changes the given model in place and returns it;
    its Parameter objects stay the same. No other model changes.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.
    """
    # answer
    blocks: list[Block] = list(model.transformer.h)
    for start in range(0, len(blocks), every):
        first, *others = group = blocks[start : start + every]
        together = partial(in_turn, [block.forward for block in group])
        first.forward = partial(checkpoint_modules, group, together)
        for block in others:
            block.forward = unchanged
    return model
    # end of answer


def best_segment_length(num_blocks: int, block_bytes: int, boundary_bytes: int) -> int:
    """The group length k, from 1 to num_blocks, for which the fewest bytes are alive at the worst moment.

    That moment is in backward: the inputs of all ceil(L/k) groups are alive, `boundary_bytes` each, and
    everything that one group of k blocks keeps, `block_bytes` a block. Of equally good lengths the smallest.
    Either number of bytes may be 0.
    """

    # answer
    def most_bytes(k: int) -> int:
        return -(-num_blocks // k) * boundary_bytes + k * block_bytes

    return min(range(1, num_blocks + 1), key=most_bytes)
    # end of answer


def recompute_attention(model: GPT) -> GPT:
    """Have backward compute every attention core again, and nothing else: selective recomputation.

    The core is scores, softmax, dropout and the product with the values. It keeps no more bytes
    than queries, keys and values have; the projections around it stay as they are. A core that is called in
    evaluation mode may run as it is. Loss and gradients are those of the model as it was, in training mode
    and in evaluation mode. A `Dropout` of the core may have a `generator` of its own, or get one later: it
    drops the same elements again, and what the generator draws next does not depend on recomputation.
    Changes the given model in place and returns it; its Parameter objects stay the same. No other model
    changes.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 5.
    """
    # answer
    for block in model.transformer.h:
        core = block.attn.core
        core.forward = partial(checkpoint_modules, [core], core.forward)
    return model
    # end of answer


# answer: the loss of one chunk
def summed_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropies of tokens whose logits exist here alone."""
    weight = weight.to(x.dtype)
    return F.cross_entropy(x @ weight.T, targets, ignore_index=-1, reduction="sum")


# end of answer


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
    """The mean loss of a language model's head, with the logits of `chunk_size` tokens at a time.

    Loss and gradients are those of `F.cross_entropy(x @ weight.T, targets, ignore_index=-1)`, in float64 as
    well, for those of x and weight that need one. Never more than `chunk_size` tokens have logits at once, in
    the forward and in backward. After the forward one chunk's logits may be left, and no more. The head's
    product is computed at most twice for each token. The arguments are not changed. A second backward finds
    the same gradients, or is refused.

    An extra that earns a star: in bfloat16, many small chunks round the loss and the gradient of weight no
    more than one does.

    Args:
        x: what the head reads, (N, h).
        weight: the head's, (v, h).
        targets: tokens, (N,). A target of -1 does not count; at least one counts, a chunk may have none.
        chunk_size: at least 1; where N is not divisible by it, a chunk is shorter.

    Returns:
        The mean over all counted targets, a scalar.

    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models" (arXiv:2411.09009),
    which goes further; Hsu et al. 2024, "Liger Kernel" (arXiv:2410.10989).
    """
    # answer
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = weight.to(wide)  # the chunks' gradients are added up in it
    total = x.new_zeros((), dtype=wide)
    for rows, goals in zip(x.split(chunk_size), targets.split(chunk_size), strict=True):
        total = total + checkpoint(summed_loss, rows, weight, goals)
    return (total / (targets != -1).sum()).to(x.dtype)
    # end of answer


def watched_forward(blocks: nn.ModuleList, x: Tensor, sizes: Tensor) -> Tensor:
    """x (b, s, h) through all blocks, each of which is computed again in backward.

    A block in evaluation mode may run as it is. `sizes` (L,), of x's dtype, is a running mean for the
    dashboard, changed in place. A forward, with gradients or without, moves `sizes[i]` once, a tenth of the
    way to the mean of |input of block i|. Backward leaves it alone. It never requires a gradient.
    """
    # answer
    for i, block in enumerate(blocks):
        sizes[i].lerp_(x.detach().abs().mean(), 0.1)
        with record_function(f"block {i}"):  # for the profiler
            x = torch_checkpoint(block, x, use_reentrant=False) if block.training else block(x)
    return x
    # end of answer


# --- training ---


def torch_checkpoint_modules(
    modules: list[nn.Module],
    function: Callable[..., Tensor],
    policy: Callable[..., CheckpointPolicy] | None,
    x: Tensor,
) -> Tensor:
    """`torch.utils.checkpoint` on a function that runs these modules, which may have generators."""
    if not torch.is_grad_enabled():
        return function(x)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        circumstances = Circumstances(generators_of(modules))
        keep, reuse = (
            create_selective_checkpoint_contexts(policy) if policy else (nullcontext(), nullcontext())
        )
        return keep, both(circumstances.again(), reuse)

    return torch_checkpoint(function, x, use_reentrant=False, context_fn=contexts)


@contextmanager
def both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Two contexts as one."""
    with outer, inner:
        yield


def keep_projections(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy for `torch.utils.checkpoint`: keep what the linear layers compute, recompute the rest.

    The products of attention's core are batched ones, `bmm`, or inside the fused kernel.
    """
    projections = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in projections else CheckpointPolicy.PREFER_RECOMPUTE


class BlocksCheckpointing(Checkpointing):
    """`--checkpoint every`: every block keeps its input alone."""

    exercises = ("checkpoint_blocks",)
    recomputes = "blocks"

    def apply(self, model: GPT) -> GPT:
        """With PyTorch's own: its checkpoint around the forward of each block."""
        if self.implementation is not None:
            return self.implementation.checkpoint_blocks(model)
        for block in model.transformer.h:
            block.forward = partial(torch_checkpoint_modules, [block], block.forward, None)
        return model


class AttentionCheckpointing(Checkpointing):
    """`--checkpoint attention`: the core is computed again, the matrix products around it are kept."""

    exercises = ("recompute_attention",)
    recomputes = "attention"

    def apply(self, model: GPT) -> GPT:
        """With PyTorch's own: a policy that keeps what linear layers compute, and no more of a block."""
        if self.implementation is not None:
            return self.implementation.recompute_attention(model)
        for block in model.transformer.h:
            block.forward = partial(torch_checkpoint_modules, [block], block.forward, keep_projections)
        return model


CHECKPOINT: dict[str, type[Checkpointing]] = {
    "every": BlocksCheckpointing,
    "attention": AttentionCheckpointing,
}
