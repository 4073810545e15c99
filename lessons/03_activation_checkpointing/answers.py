"""What is true of the questions that the page asks: bytes and FLOPs, by lesson 01's formulas."""

from collections.abc import Callable
from dataclasses import replace

from grader.guessing import Truth
from nanogpt.model import GPTConfig
from solutions.flops_and_memory import count_parameters, model_state_bytes, training_flops

GPT2 = GPTConfig(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, bias=False)
MEMORY_BYTES = 16e9
STATE_BYTES = model_state_bytes(count_parameters(GPT2)["total"], "fp32")["total"]

ActivationBytes = Callable[[GPTConfig, int, int], dict[str, int]]
"""Lesson 01's exercise: configuration, batch size and sequence length, to bytes by part."""


def bytes_by_part(config: GPTConfig, batch_size: int, bytes_of: ActivationBytes) -> tuple[int, int, int]:
    """What one block keeps, its input alone, and everything outside of the blocks."""
    one, two = (bytes_of(replace(config, n_layer=n), batch_size, config.block_size)["total"] for n in (1, 2))
    block = two - one
    return block, 4 * batch_size * config.block_size * config.n_embd, one - block


def kept(config: GPTConfig, batch_size: int, every: int, bytes_of: ActivationBytes) -> int:
    """Bytes after the forward, with groups of `every` blocks checkpointed; 0 checkpoints nothing."""
    block, boundary, outside = bytes_by_part(config, batch_size, bytes_of)
    groups = -(-config.n_layer // every) if every else 0
    return outside + (groups * boundary if every else config.n_layer * block)


def worst_moments(
    config: GPTConfig, batch_size: int, every: int, bytes_of: ActivationBytes
) -> dict[str, dict[str, int]]:
    """What is alive at the two moments of backward that can be the worst, besides model states."""
    block, boundary, outside = bytes_by_part(config, batch_size, bytes_of)
    inside = kept(config, batch_size, every, bytes_of) - outside
    logits = 4 * batch_size * config.block_size * config.vocab_size  # one fp32 tensor (b, s, v)
    table = 4 * config.vocab_size * config.n_embd
    return {
        "at the head": {
            "kept of the blocks": inside,
            "kept of the rest": outside,
            "gradients": 2 * logits,  # of the log-probabilities and of the logits
        },
        "in a block": {
            "kept of the blocks": inside,
            "one group, computed again": max(every * block - boundary, 0),  # its input is one of those kept
            # the stream's, one as wide as the MLP, that of the MLP's second weight, and the head's half of
            # the tied table's
            "gradients": 5 * boundary + 4 * 4 * config.n_embd**2 + table,
        },
    }


def worst_moment(config: GPTConfig, batch_size: int, every: int, bytes_of: ActivationBytes) -> int:
    """Bytes at the worse of the two moments."""
    return max(sum(parts.values()) for parts in worst_moments(config, batch_size, every, bytes_of).values())


def most_sequences(every: int, bytes_of: ActivationBytes) -> int:
    """Sequences of GPT-2 that fit, with its model states."""
    return max(
        n for n in range(1, 99) if STATE_BYTES + worst_moment(GPT2, n, every, bytes_of) <= MEMORY_BYTES
    )


def predictions(bytes_of: ActivationBytes) -> list[Truth]:
    """Section 2: what checkpointing does for GPT-2, and what it costs."""
    block, boundary, outside = bytes_by_part(GPT2, 1, bytes_of)
    left = 100 * kept(GPT2, 1, 1, bytes_of) / kept(GPT2, 1, 0, bytes_of)
    flops = {how: training_flops(GPT2, 1, 1024, how) for how in ("none", "attention", "full")}
    percent = {how: 100 * (count / flops["none"] - 1) for how, count in flops.items()}
    plain, checkpointed = (
        {when: sum(parts.values()) / 1e6 for when, parts in worst_moments(GPT2, 1, n, bytes_of).items()}
        for n in (0, 1)
    )
    told = f"a block's {block / boundary:.1f} inputs become 1; outside the blocks {outside / 1e6:.0f} MB stay"
    worst = "a sequence needs {:.0f} MB at its worst moment, which is at the head"
    return [
        Truth("left", "% of the activations left", left, "%", told),
        Truth(
            "more_flops",
            "% more FLOPs",
            percent["full"],
            "%",
            "a forward is a third, without the head's part of it",
        ),
        Truth(
            "fit_plain",
            "sequences that fit, plain",
            most_sequences(0, bytes_of),
            "",
            worst.format(plain["at the head"]),
        ),
        Truth(
            "fit_checkpointed",
            "sequences that fit, checkpointed",
            most_sequences(1, bytes_of),
            "",
            worst.format(checkpointed["at the head"]),
        ),
        Truth(
            "core_flops",
            "% more FLOPs, attention's core alone",
            percent["attention"],
            "%",
            "two products with an s × s matrix",
        ),
    ]
