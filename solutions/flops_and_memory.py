"""Lesson 01: what a GPT costs, counted exactly: parameters, FLOPs, model states, activations.

Notation: b batch, s sequence length, h width (n_embd), a heads (n_head), L layers, v vocabulary,
P parameters. Every formula is for `nanogpt.model.GPT`; a FLOP count takes 2 per multiply-add.
"""

import math

from nanogpt.model import GPT, GPTConfig


def count_parameters(config: GPTConfig) -> dict[str, int]:
    """Parameters of `GPT(config)`, by part.

    Keys: `embedding` (token and position table), `attention`, `mlp`, `norm` (the last one too),
    `head` (0: it is the token table again), `total`. Biases count with the layer they belong to.
    """
    # answer
    h, layers, bias = config.n_embd, config.n_layer, int(config.bias)
    attention = (h + bias) * 3 * h + (h + bias) * h  # c_attn and c_proj
    mlp = (h + bias) * 4 * h + (4 * h + bias) * h  # c_fc and c_proj
    norm = (1 + bias) * h
    counts = {
        "embedding": (config.vocab_size + config.block_size) * h,
        "attention": layers * attention,
        "mlp": layers * mlp,
        "norm": (2 * layers + 1) * norm,
        "head": 0,
    }
    return counts | {"total": sum(counts.values())}
    # end of answer


# answer
def attention_core_flops(config: GPTConfig, batch_size: int, sequence_length: int) -> int:
    """One layer's scores (q times k) and weighted sum of the values: 2·b·s²·h each."""
    return 2 * (2 * batch_size * sequence_length**2 * config.n_embd)


# end of answer


def forward_flops(config: GPTConfig, batch_size: int, sequence_length: int) -> dict[str, int]:
    """FLOPs of the matrix products in one forward pass with targets, by part.

    Keys: `attention` (both projections and the core, over the full s x s matrix), `mlp`, `head`,
    `total`. Adding biases, norms, softmax, GELU and the embedding look-up count as nothing, as they
    do in `torch.utils.flop_counter.FlopCounterMode`.
    """
    # answer
    h, layers = config.n_embd, config.n_layer
    tokens = batch_size * sequence_length
    projections = 2 * tokens * h * 3 * h + 2 * tokens * h * h
    flops = {
        "attention": layers * (projections + attention_core_flops(config, batch_size, sequence_length)),
        "mlp": layers * 2 * (2 * tokens * h * 4 * h),
        "head": 2 * tokens * h * config.vocab_size,
    }
    return flops | {"total": sum(flops.values())}
    # end of answer


def training_flops(config: GPTConfig, batch_size: int, sequence_length: int, recompute: str = "none") -> int:
    """FLOPs of one forward and backward pass, with what is computed again in backward.

    A product's backward is two products of its size: one for each of its inputs. Attention is the plain one:
    a fused kernel's backward computes the scores once more, whatever `recompute` says.

    Args:
        recompute: with `none` nothing is computed again;
            - with `attention` the attention core is, in every layer: "selective" in Korthikanti et al. 2022
              (arXiv:2205.05198);
            - with `full` every block runs its forward again, and the head does not.

    Raises:
        ValueError: `recompute` is another word.
    """
    # answer
    forward = forward_flops(config, batch_size, sequence_length)
    again = {
        "none": 0,
        "attention": config.n_layer * attention_core_flops(config, batch_size, sequence_length),
        "full": forward["attention"] + forward["mlp"],
    }
    if recompute not in again:
        raise ValueError(f"recompute={recompute!r}: expected one of {', '.join(again)}")
    return 3 * forward["total"] + again[recompute]
    # end of answer


def model_state_bytes(num_parameters: int, recipe: str) -> dict[str, int]:
    """Bytes that live from step to step under Adam: `weights`, `gradients`, `optimizer`, `total`.

    Args:
        recipe: `fp32` keeps everything in 4 bytes;
            - `mixed` keeps 16-bit weights and gradients, and an fp32 master copy of the weights, which
              counts with the optimizer: 16 bytes a parameter (ZeRO, arXiv:1910.02054, section 3.1);
            - `mixed_fp32_gradients` keeps the same with gradients in fp32: 18 bytes a parameter.

    Raises:
        ValueError: `recipe` is another word.
    """
    # answer
    moments, master = 4 + 4, 4
    recipes = {
        "fp32": (4, 4, moments),
        "mixed": (2, 2, master + moments),
        "mixed_fp32_gradients": (2, 4, master + moments),
    }
    if recipe not in recipes:
        raise ValueError(f"recipe={recipe!r}: expected one of {', '.join(recipes)}")
    sizes = dict(zip(("weights", "gradients", "optimizer"), recipes[recipe], strict=True))
    states = {name: num_parameters * size for name, size in sizes.items()}
    return states | {"total": sum(states.values())}
    # end of answer


def textbook_activation_bytes(config: GPTConfig, batch_size: int, sequence_length: int) -> int:
    """Bytes of the blocks in 16 bits with dropout: Korthikanti et al. 2022, arXiv:2205.05198, equation 1."""
    s, h, a = sequence_length, config.n_embd, config.n_head
    return config.n_layer * batch_size * (34 * s * h + 5 * a * s * s)  # L·s·b·h·(34 + 5·a·s/h)


def activation_bytes(config: GPTConfig, batch_size: int, sequence_length: int) -> dict[str, int]:
    """Bytes that autograd keeps for backward in `model(idx, targets)`, by part: the total within 1 %.

    Training mode, fp32, on the CPU, `0 <= dropout < 1`. Distinct storages, without parameters and
    buffers. Keys as in `count_parameters`: each part has what it keeps, and a storage that two parts could
    claim, such as a norm's output, counts with one of them. The parts add up to `total`.

    An extra that earns a star: the total is exact, for b >= 2 and a >= 2, with tokens, positions and
    targets, each norm's statistics, and whatever else is too small to matter.
    """
    # answer
    s, h, a, layers = sequence_length, config.n_embd, config.n_head, config.n_layer
    tokens, scores = batch_size * s, batch_size * a * s * s
    stream = 4 * tokens * h  # one fp32 tensor (b, s, h)
    mask = stream if config.dropout > 0 else 0  # the CPU keeps dropout masks in fp32
    if config.dropout > 0:
        # Dropout sends the core down the plain path: scaled q and k, v, out, and three matrices
        # (b, a, s, s): probabilities, mask, and their product.
        core = 4 * stream + 3 * 4 * scores
    else:
        core = 3 * stream + stream + 4 * batch_size * a * s  # q, k, v in one storage; out; log-sum-exp
    attention = stream + core + mask  # c_attn's input; c_proj's input is the core's `out`
    mlp = stream + 4 * stream + 4 * stream + mask  # inputs of c_fc, of the GELU and of c_proj
    norm = stream + 2 * 4 * tokens  # the input, and a mean and a deviation for each token
    integers = 8 * tokens  # int64, once for the tokens and once for the targets
    sizes = {
        "embedding": integers + 8 * s + mask,
        "attention": layers * attention,
        "mlp": layers * mlp,
        "norm": (2 * layers + 1) * norm,
        # lm_head's input, the log-probabilities, the targets, and the number of counted targets
        "head": stream + 4 * tokens * config.vocab_size + integers + 4,
    }
    return sizes | {"total": sum(sizes.values())}
    # end of answer


def attainable_flops_per_second(
    m: int, k: int, n: int, bytes_per_number: int, peak_flops_per_second: float, bytes_per_second: float
) -> float:
    """The most FLOP/s that a product of matrices (m, k) and (k, n) can reach: its roofline.

    Memory gives each factor once and takes the product once, at no more than `bytes_per_second`. Meanwhile
    the machine computes: what takes longer, bytes or FLOPs, takes all the time. The answer
    is off by a millionth of itself at most.

    Source: Williams, Waterman and Patterson 2009, "Roofline", doi:10.1145/1498765.1498785.
    """
    # answer
    flops = 2 * m * k * n
    num_bytes = bytes_per_number * (m * k + k * n + m * n)
    return min(peak_flops_per_second, flops / num_bytes * bytes_per_second)
    # end of answer


def model_flops_utilization(
    config: GPTConfig, tokens_per_second: float, peak_flops_per_second: float, sequence_length: int
) -> float:
    """The fraction of the peak that goes into forward and backward (PaLM, arXiv:2204.02311, appendix B).

    What is computed a second time to save memory does not count: it brings the training no further.
    An answer within 1 % is right, such as that of PaLM's formula with nanoGPT's N, which has no positions.
    """
    # answer
    flops_per_token = training_flops(config, 1, sequence_length) / sequence_length
    return tokens_per_second * flops_per_token / peak_flops_per_second
    # end of answer


def training_plan(
    num_parameters: int,
    num_tokens: int,
    num_gpus: int,
    peak_flops_per_second: float,
    utilization: float,
    bytes_per_gpu: float,
) -> dict[str, float]:
    """What a training run will take, at 6 FLOPs a parameter and token.

    Args:
        utilization: the fraction of each GPU's peak that goes into these FLOPs.

    Returns:
        - `gpu_hours`: the hours of all GPUs, added up;
        - `days`: from the first step to the last, with all of them at work;
        - `fewest_gpus`: a whole number, as many as hold 16 bytes a parameter when each keeps an equal share.

    Source: Kaplan et al. 2020, arXiv:2001.08361, whose N has no embeddings; GPT-3's table D.1 counts them.
    """
    # answer
    flops = 6 * num_parameters * num_tokens
    gpu_hours = flops / (utilization * peak_flops_per_second) / 3600
    return {
        "gpu_hours": gpu_hours,
        "days": gpu_hours / num_gpus / 24,
        "fewest_gpus": math.ceil(16 * num_parameters / bytes_per_gpu),
    }
    # end of answer


def utilization_report(
    model: GPT,
    tokens_per_second: float,
    sequence_length: int,
    datasheet: dict[str, float | bool],
    recompute: str = "none",
) -> dict[str, float]:
    """What a training run says about itself; model and datasheet are left as they are.

    Args:
        datasheet: `flops_per_second`, the figure printed on the accelerator's datasheet, and
            `with_sparsity`: whether its footnote says that the figure holds for 2:4 sparse matrices.
        recompute: `none`, or `full` when every block runs its forward again in backward.

    Returns:
        - `parameters`: of the model, frozen ones too, and a tied one once;
        - `model_state_gib`: 16 bytes a parameter, in GiB of 1,073,741,824 bytes;
        - `model_flops_utilization`: FLOPs of forward and backward, as a fraction of the dense peak;
        - `hardware_flops_utilization`: the same with what is computed again.
    """
    # answer
    config = model.config
    num_parameters = sum(parameter.numel() for parameter in model.parameters())  # a tied one once
    in_blocks = sum(parameter.numel() for parameter in model.transformer.h.parameters())
    # (in_blocks has norms and biases too, which multiply no matrix: about 1/h of it, or less.)
    blocks = 2 * in_blocks + 4 * config.n_layer * sequence_length * config.n_embd
    head = 2 * config.n_embd * config.vocab_size
    model_flops = 3 * (blocks + head)  # a token's forward and backward
    hardware_flops = model_flops + (blocks if recompute == "full" else 0)
    dense_peak = datasheet["flops_per_second"] / (2 if datasheet["with_sparsity"] else 1)
    return {
        "parameters": num_parameters,
        "model_state_gib": 16 * num_parameters / 2**30,
        "model_flops_utilization": tokens_per_second * model_flops / dense_peak,
        "hardware_flops_utilization": tokens_per_second * hardware_flops / dense_peak,
    }
    # end of answer
