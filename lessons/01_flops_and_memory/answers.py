"""What is true of the questions that the page asks."""

from dataclasses import replace

from grader.guessing import Truth
from nanogpt.model import GPTConfig
from solutions.flops_and_memory import activation_bytes, count_parameters, model_state_bytes, training_flops


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
