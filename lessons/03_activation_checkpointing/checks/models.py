"""What the checks compute with: functions and models that write down how they are run."""

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from grader.checks import Fault, Trial, is_close
from nanogpt.model import GPT, Dropout, GPTConfig, PlainAttention

STATE_BYTES = 12_000
"""What one checkpoint may keep besides tensors of the model: random states, of about 5,000 bytes each."""


Given = tuple[list[int], float]
"""The shape and the sum of an input."""


class Layers(nn.Module):
    """Two linear layers, wide in between, with dropout before and between them. Writes down every call.

    It draws before autograd keeps anything, and some of what autograd keeps is no floating-point tensor.
    """

    def __init__(self, width: int, dropout: float = 0.0, inside: int = 0, out: int = 0) -> None:
        super().__init__()
        inside, out = inside or 4 * width, out or width
        self.up, self.down = nn.Linear(width, inside), nn.Linear(inside, out)
        self.dropout = nn.Dropout(dropout)
        self.calls: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        given = list(x.shape), x.detach().double().sum().item()
        call = {**describe_call(x), "given": given, "random state": random_state(x.device)}
        self.calls.append(call)
        x = self.dropout(x)
        call["after its first draw"] = random_state(x.device)
        x = nn.functional.gelu(self.up(x))
        return self.down(self.dropout(x.masked_fill(x > 3.0, 3.0)))


def describe_call(x: Tensor) -> dict[str, Any]:
    """Under which circumstances the code that calls this runs, with this input."""
    frame, by_torch = sys._getframe(1), False
    while frame is not None:
        by_torch = by_torch or frame.f_code.co_filename.endswith("torch/utils/checkpoint.py")
        frame = frame.f_back
    device = x.device.type
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"
    return {
        "by_torch": by_torch,
        "autocast": autocast,
        "gradients": torch.is_grad_enabled(),
        "needs": x.requires_grad,
    }


def random_state(device: torch.device) -> int:
    """A number that stands for what torch draws next."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return zlib.crc32(state.numpy().tobytes())


@contextmanager
def seeing(*calls: list[dict[str, Any]]) -> Iterator[None]:
    """An error inside is told with how the later calls of a function differed from its first one."""
    try:
        yield
    except Exception as error:
        for first, *others in filter(None, calls):
            if first["gradients"] and any(not call["gradients"] for call in others):
                error.add_note(
                    "the second call ran with gradients switched off, as they are in an autograd.Function "
                    "and while autograd asks for what it kept: torch.enable_grad() belongs around it"
                )
            if first["needs"] and any(not call["needs"] for call in others):
                error.add_note(
                    "the second call got an input that needs no gradient: detach() takes requires_grad off, "
                    "x.detach().requires_grad_(x.requires_grad) keeps it"
                )
            if not first["needs"] and any(call["needs"] for call in others):
                error.add_note(
                    "the second call got an input that needs a gradient, where the first call's needs none: "
                    "the function then keeps other tensors than it did, and backward gets the wrong ones; "
                    "x.detach().requires_grad_(x.requires_grad) leaves it as it was"
                )
            for call in others:
                if call["autocast"] != first["autocast"]:
                    error.add_note(
                        f"autocast was {first['autocast']} in the first call, and {call['autocast']} in the "
                        "second: it is not remembered, or not set again"
                    )
        raise


def checkpoint_of(rank: Any, how: str) -> Callable[..., Tensor]:
    """The submission's `checkpoint`, or what a probe compares it with."""
    ways = {"plain": lambda function, *inputs: function(*inputs)}
    ways |= {told: partial(forgetful, told == STATE_KEPT) for told in (FORGOTTEN, STATE_KEPT)}
    ways |= {STATE_LATE: late, UPSTREAM_IGNORED: deaf}
    return ways.get(how) or rank.submission.checkpoint


FORGOTTEN, STATE_KEPT, STATE_LATE = "another mask", "another mask, state kept", "another mask, state of later"
ANOTHER_MASK = {
    FORGOTTEN: "the second call drew another dropout mask",
    STATE_KEPT: "the second call drew another dropout mask, each time the same",
    STATE_LATE: "the second call began with the random state of after the first: it was taken too late",
}
"""What probes call checkpoints whose second call draws other random numbers → what it looks like."""


UPSTREAM_IGNORED = "the gradient that came into backward was ignored: it began with ones"


def deaf(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """A checkpoint whose backward does not listen to what comes in, to tell what that slip looks like."""
    y = function(*inputs)
    if y.requires_grad:
        y.register_hook(torch.ones_like)
    return y


def forgetful(keep_state: bool, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """A checkpoint that does not set the random state back, to tell what that slip looks like."""
    contexts = (
        nullcontext(),
        torch.random.fork_rng(range(torch.cuda.device_count())) if keep_state else nullcontext(),
    )
    return torch_checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts
    )


def late(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """A checkpoint that remembers the random state of after its first call."""
    states: list[Tensor] = []

    @contextmanager
    def first() -> Iterator[None]:
        yield
        states.append(torch.get_rng_state())

    @contextmanager
    def second() -> Iterator[None]:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.set_rng_state(states[0])
            yield

    return torch_checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (first(), second()),
    )


def close_by_name(
    trial: Trial,
    names: dict[str, str],
    actual: dict[str, Tensor | None],
    expected: dict[str, Tensor],
    slips: dict[str, Callable[[], dict[str, Tensor]]],
    help: str,
    steps: dict[str, str] | None = None,
) -> None:
    """Require tensors to be equal. `slips` compute those of known mistakes, once one differs.

    Args:
        names: name of a tensor → how the learner reads it.
        steps: name of a slip → the next step for who has made it.
    """
    steps = steps or {}
    given = {name: actual[name] for name in names}
    if not all(isinstance(g, Tensor) and is_close(g, expected[name]) for name, g in given.items()):
        known = {told: compute() for told, compute in slips.items()}
        for name, told in names.items():
            alternatives = {
                cause: Fault(tensors[name], steps.get(cause, "")) for cause, tensors in known.items()
            }
            trial.close(told, given[name], expected[name], alternatives=alternatives, help=help)


def build(make: Callable[[], Any], seed: int, device: torch.device) -> Any:
    """What `make` makes with the weights that this seed gives."""
    torch.manual_seed(seed)
    return make().to(device)


def gradients(module: nn.Module | dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """Clones of all gradients by name; None where there is none. A model whose names may change is a dict."""
    named = module if isinstance(module, dict) else dict(module.named_parameters())
    return {name: None if p.grad is None else p.grad.clone() for name, p in named.items()}


def next_numbers(generator: torch.Generator) -> Tensor:
    """What it would draw next; it stays where it is."""
    return torch.rand(4, device=generator.device, generator=generator.clone_state())


def give_generators(dropouts: list[Dropout], seed: int, device: torch.device) -> list[torch.Generator]:
    """A generator of its own for each of them."""
    for i, dropout in enumerate(dropouts):
        dropout.generator = torch.Generator(device).manual_seed(seed + i)
    return [dropout.generator for dropout in dropouts]


def unaware(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """A checkpoint that knows of torch's random numbers alone, to tell what that slip looks like."""
    return torch_checkpoint(function, *inputs, use_reentrant=False)


def never_replayed(modules: list[nn.Module]) -> None:
    """Have each of them computed again by `unaware`."""
    for module in modules:
        module.forward = partial(unaware, module.forward)


def aware(
    generators: list[torch.Generator], function: Callable[..., Tensor], *inputs: Tensor, seeded: bool = False
) -> Tensor:
    """A checkpoint that knows of these generators, too, and of no others; on request it seeds them again."""
    begins = [each.clone_state() for each in generators]
    for each in begins if seeded else []:
        each.manual_seed(each.initial_seed())
    before, first = [each.get_state() for each in begins], [True]

    def run(*inputs: Tensor) -> Tensor:
        if first:
            first.clear()
            return function(*inputs)
        now = [each.get_state() for each in generators]
        try:
            for each, state in zip(generators, before, strict=True):
                each.set_state(state)
            return function(*inputs)
        finally:
            for each, state in zip(generators, now, strict=True):
                each.set_state(state)

    return torch_checkpoint(run, *inputs, use_reentrant=False)


def own_generators(module: nn.Module, skip: Sequence[nn.Module] = ()) -> list[torch.Generator]:
    """Those of all parts of a module, but of these."""
    parts = [part for part in module.modules() if part not in skip]
    return [part.generator for part in parts if getattr(part, "generator", None) is not None]


def replayed_as_of_now(modules: list[nn.Module]) -> None:
    """Have each of them computed again by a checkpoint that knows the generators it has now."""
    for module in modules:
        module.forward = partial(aware, own_generators(module), module.forward)


def replayed(modules: list[nn.Module], skip: Sequence[nn.Module] = (), seeded: bool = False) -> None:
    """Have each of them computed again with all generators but those of `skip`; on request seeded again."""
    for module in modules:

        def forward(*inputs: Tensor, module: nn.Module = module, old: Callable = module.forward) -> Tensor:
            return aware(own_generators(module, skip), old, *inputs, seeded=seeded)

        module.forward = forward


NEXT_NUMBERS = "the second run drew those generators' next numbers"
REMEMBERED = (
    "the generators of the first forward are remembered: those that the dropouts got after it drew their "
    "next numbers in the second run"
)
SEEDED = (
    "the second run began with those generators' seeds, as after generator.manual_seed(...): they had drawn "
    "before the first"
)
IN_CHECKPOINT = (
    "In `checkpoint`, get_state() of each generator before the first call, and set_state() for the second."
)
AT_THE_CHANGE = (
    "the generators were looked up once, when the model was changed: those that the dropouts got after it "
    "drew their next numbers in the second run"
)


def close_with_generators(
    trial: Trial,
    mine: dict,
    plain: dict,
    slips: dict[str, Callable[[], dict]],
    steps: dict[str, str] | None = None,
) -> None:
    """Require what passes of a model give whose dropouts have generators of their own.

    `slips` compute the gradients of known mistakes, as for `close_by_name`, and `steps` are as there.
    """
    help = (
        "Look for a `generator` among the modules that are computed again, each time that they are: it may "
        "be given to a Dropout later. `checkpoint` takes them as generators=..."
    )
    steps = {SEEDED: IN_CHECKPOINT, **(steps or {})}
    left = (
        "The second run must leave generators as it finds them. (PyTorch's checkpoint ends it with an "
        "exception: set them back in a `finally`.)"
    )
    expected = plain["gradients"]
    close_by_name(
        trial,
        {name: f"the gradient of {name}, where dropouts have generators of their own," for name in expected},
        mine["gradients"],
        expected,
        slips,
        help,
        steps,
    )
    for number, (drawn, right) in enumerate(zip(mine["drawn"], plain["drawn"], strict=True)):
        told = f"what generator {number} draws after backward"
        trial.close(told, drawn, right, help=left)


def gpt(config: GPTConfig, plain_attention: bool) -> GPT:
    """A GPT, on request with the core of attention as four plain operations."""
    model = GPT(config)
    if plain_attention:
        for block in model.transformer.h:
            block.attn.core = PlainAttention(config.dropout)
    return model


class Log:
    """Which block began to compute, in order; the first norm of a block is the first thing it runs."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.entries: list[int] = []
        for i, block in enumerate(blocks):
            block.ln_1.register_forward_pre_hook(lambda *_, i=i: self.entries.append(i))


def partly_frozen(change: Callable[[GPT], Any], model: GPT, idx: Tensor) -> str:
    """Run a GPT that was changed while block 1, and some weights of block 0, were frozen.

    The change finds it in evaluation mode, but for block 1. Returns what has another mode after it, or is
    not frozen any more; "" where nothing has.
    """
    model.transformer.h[1].requires_grad_(False)
    model.transformer.h[0].attn.c_attn.requires_grad_(False)
    model.eval().transformer.h[1].train()
    modes = [(name or "the model", part, part.training) for name, part in model.named_modules()]
    frozen = [(name, weight) for name, weight in model.named_parameters() if not weight.requires_grad]
    change(model)
    changed = [
        f"{name} was in {'training' if was else 'evaluation'} mode before, and is not after it"
        for name, part, was in modes
        if part.training != was
    ]
    changed += [f"{name} was frozen before, and is not after it" for name, w in frozen if w.requires_grad]
    model.train()
    model(idx)[0].square().mean().backward()
    return next(iter(changed), "")


def require_frozen_too(
    trial: Trial, name: str, probe: Callable[..., Any], told: Callable[[str], str], help: str
) -> None:
    """What is frozen is computed again too, and stays frozen, as modes stay.

    Args:
        probe: gives what `partly_frozen` found, and how often each block's part ran in forward and backward.
        told: what is said of the blocks, a list in words, whose part ran once.
    """
    sizes = asdict(GPTConfig(block_size=8, vocab_size=20, n_layer=3, n_head=2, n_embd=16))
    changed, times = trial.run(probe, sizes, trial.seed(), trial.tokens(20, 2, 8))[0]
    trial.require(
        not changed,
        f"{name} changes more than how a forward runs: {changed}",
        help="train(), eval() and requires_grad_() are the caller's.",
    )
    once = [i for i, count in enumerate(times) if count == 1]
    trial.require(
        not once,
        f"with block 1 frozen and some weights of block 0, {told(', '.join(map(str, once)))}",
        cause=FROZEN_RUN_AS_THEY_ARE if once in ([0, 1], [1]) else "",
        help=help,
    )


FROZEN_RUN_AS_THEY_ARE = (
    "what has frozen weights is not checkpointed: for the gradient of its input it keeps as much as others"
)
