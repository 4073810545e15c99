"""What is true of the questions that the page asks."""

from dataclasses import replace
from itertools import count

from grader.guessing import Truth
from nanogpt.model import GPTConfig
from solutions.flops_and_memory import (
    activation_bytes,
    attainable_flops_per_second,
    count_parameters,
    model_state_bytes,
    training_flops,
    training_plan,
)

MACHINES: dict[str, tuple[float, float, float]] = {
    "A40": (149.7e12, 696e9, 48e9),
    "A100": (312e12, 2.0e12, 80e9),
    "H100": (989e12, 3.35e12, 80e9),
}
"""Dense FLOP/s in 16 bits, bytes a second of its memory, and bytes in it.

tests/published_figures.yaml has the sources (stas00/ml-engineering and NVIDIA's data sheets).
"""

LLAMAS: dict[str, tuple[float, float, float]] = {
    "Llama 3 8B": (8.03e9, 15e12, 1.3e6),
    "Llama 3 70B": (70.6e9, 15e12, 6.4e6),
    "Llama 3.1 405B": (405e9, 15.6e12, 30.84e6),
}
"""Parameters, tokens, and GPU hours on H100 as Meta's model cards give them.

The tokens of the first two are "15T+" there; those of the third are from arXiv:2407.21783, section 3.
"""


def roofline(config: GPTConfig) -> list[Truth]:
    """Section 3.6: products of one token and of many on an H100, in 16 bits."""
    peak, bandwidth, _ = MACHINES["H100"]
    h = config.n_embd
    one = attainable_flops_per_second(1, h, 4 * h, 2, peak, bandwidth)
    enough = next(t for t in count(1) if attainable_flops_per_second(t, h, 4 * h, 2, peak, bandwidth) == peak)
    return [
        Truth("one_token", "% of the peak with one token", 100 * one / peak, "%", "one FLOP a byte, of 295"),
        Truth("tokens", "tokens that reach the peak", enough, "tokens", "4·h·t / (5·t + 4·h) FLOPs a byte"),
    ]


def plan() -> list[Truth]:
    """Section 3.8: Llama 3 8B on 1,000 H100."""
    peak, _, memory = MACHINES["H100"]
    parameters, tokens, _ = LLAMAS["Llama 3 8B"]
    told = training_plan(int(parameters), int(tokens), 1000, peak, 0.4, memory)
    return [
        Truth("days", "days on 1,000 H100 at 40 %", told["days"], "days", "6 · 8.03e9 · 15e12 FLOPs"),
        Truth(
            "gpus", "H100 that hold its states", told["fewest_gpus"], "GPUs", "16 · 8.03e9 bytes, 80 GB each"
        ),
    ]


def predictions(config: GPTConfig, batch_size: int = 8) -> list[Truth]:
    """Section 2: what a GPT costs, in a batch of sequences of full length."""
    total, s = count_parameters(config)["total"], config.block_size
    table = config.vocab_size * config.n_embd
    flops_a_token = training_flops(config, 1, s) / s
    kept = activation_bytes(replace(config, dropout=0.0), batch_size, s)["total"]
    kept_with_dropout = activation_bytes(replace(config, dropout=0.1), batch_size, s)["total"]
    return [
        Truth(
            "token_table",
            "% of the parameters in the token table",
            100 * table / total,
            "%",
            f"{config.vocab_size:,} · {config.n_embd} of {total:,}",
        ),
        Truth(
            "flops",
            "FLOPs of a token's forward and backward, in P",
            flops_a_token / total,
            "P",
            "6 P counts the weights; queries times keys, and probabilities times values, have none",
        ),
        Truth(
            "states",
            "GB of weights, gradients and Adam's state",
            model_state_bytes(total, "fp32")["total"] / 1e9,
            "GB",
            "16 bytes a parameter: weight 4, gradient 4, two moments of 4",
        ),
        Truth(
            "kept",
            f"GB kept for backward by {batch_size} sequences",
            kept / 1e9,
            "GB",
            "64·b·s·h bytes a layer, 4·b·s·v of log-probabilities, and little else",
        ),
        Truth(
            "with_dropout",
            "times as much, with dropout",
            kept_with_dropout / kept,
            "times",
            "on the CPU, each head now keeps three s × s matrices",
        ),
    ]
