"""What is true of the questions that the page asks, by lesson 01's formulas."""

from grader.guessing import Truth
from nanogpt.model import GPTConfig
from solutions.flops_and_memory import activation_bytes, count_parameters

GPT2 = GPTConfig(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, bias=False)


def peak_at_the_head(config: GPTConfig, rows: int, num_microbatches: int) -> int:
    """Bytes made by micro-batches of so many rows, where backward begins; tokens were there before."""
    tokens = rows * config.block_size
    kept = activation_bytes(config, rows, config.block_size)["total"] - 2 * 8 * tokens
    gradients = 4 * count_parameters(config)["total"] if num_microbatches > 1 else 0  # of those before
    return gradients + kept + 2 * 4 * tokens * config.vocab_size


def peak_at_the_end(config: GPTConfig) -> int:
    """Bytes where backward ends, from the second micro-batch on: gradients, and three token tables."""
    return 4 * (count_parameters(config)["total"] + 3 * config.vocab_size * config.n_embd)


def predictions(config: GPTConfig, b: int = 32) -> list[Truth]:
    """Section 2: the peak of b sequences in 4 micro-batches, and the least peak; a mean of means."""
    gradients = 4 * count_parameters(config)["total"] / 1e6
    few, many = (2.0, 60), (6.0, 4)  # mean loss and number of counted targets
    mean = (few[0] * few[1] + many[0] * many[1]) / (few[1] + many[1])
    mean_of_means = (few[0] + many[0]) / 2
    return [
        Truth(
            "peak_4",
            "MB at the peak, k = 4",
            peak_at_the_head(config, b // 4, 4) / 1e6,
            "MB",
            f"a quarter, and {gradients:.1f} MB of gradients from the micro-batches before",
        ),
        Truth(
            "least",
            "MB that always remain",
            peak_at_the_end(config) / 1e6,
            "MB",
            f"{gradients:.1f} MB of gradients, and at the end of backward three token tables",
        ),
        Truth(
            "off",
            "% by which the mean of means is too high",
            100 * (mean_of_means / mean - 1),
            "%",
            f"the mean is (60 · 2 + 4 · 6) / 64 = {mean}, and not (2 + 6) / 2 = {mean_of_means}",
        ),
        Truth(
            "weight",
            "times the weight in the mean of means",
            few[1] / many[1],
            "",
            "1/(2 · 4) against 1/(2 · 60)",
        ),
    ]
