"""The course's formulas give the figures that papers, playbooks and repositories have printed."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lessons.flops_and_memory.answers import LLAMAS
from lessons.flops_and_memory.answers import MACHINES as ROOFS
from lessons.fsdp import overlap
from lessons.page.hidden import MACHINES
from lessons.sequence_parallel.answers import published_bytes
from lessons.tensor_parallel.answers import drop
from nanogpt.model import GPTConfig
from solutions.collectives import collective_time
from solutions.context_parallel import smallest_hidden_part
from solutions.data_parallel import smallest_hidden_share
from solutions.flops_and_memory import (
    count_parameters,
    forward_flops,
    model_flops_utilization,
    model_state_bytes,
    textbook_activation_bytes,
    training_flops,
    training_plan,
)
from solutions.fsdp import communication_elements, state_bytes_per_rank
from solutions.tensor_parallel import tensor_parallel_overhead

FIGURES: dict[str, dict[str, Any]] = {
    figure["id"]: figure
    for figure in yaml.safe_load(Path(__file__).with_name("published_figures.yaml").read_text())
}
GPT2 = GPTConfig(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, bias=False)


def korthikanti_config(inputs: dict[str, Any]) -> GPTConfig:
    """The model of a row of Table 5. The head size does not enter the FLOPs."""
    return GPTConfig(
        block_size=inputs["s"],
        vocab_size=inputs["v"],
        n_layer=inputs.get("layers") or inputs["L"],
        n_head=64,
        n_embd=inputs["h"],
        bias=False,
    )


def table_5_utilization(inputs: dict[str, Any], flops: int) -> float:
    """Percent of the peak of all GPUs that `flops` in one iteration come to."""
    return 100 * flops / (inputs["iter_s"] * inputs["gpus"] * inputs["peak_TF"] * 1e12)


def mfu(inputs: dict[str, Any]) -> float:
    config = korthikanti_config(inputs)
    tokens_per_second = inputs["batch"] * inputs["s"] / inputs["iter_s"] / inputs["gpus"]
    return 100 * model_flops_utilization(config, tokens_per_second, inputs["peak_TF"] * 1e12, inputs["s"])


def core_again(inputs: dict[str, Any], batch_size: int) -> int:
    """FLOPs of running the attention core once more, for the whole batch."""
    config = korthikanti_config(inputs)
    with_core = training_flops(config, batch_size, inputs["s"], "attention")
    return with_core - training_flops(config, batch_size, inputs["s"])


def hfu(inputs: dict[str, Any]) -> float:
    """As the paper counts: its s/3h adds 12·b·s²·h a layer, three times one forward of the core."""
    model_flops = training_flops(korthikanti_config(inputs), inputs["batch"], inputs["s"])
    return table_5_utilization(inputs, model_flops + 3 * core_again(inputs, inputs["batch"]))


def selective_overhead(inputs: dict[str, Any]) -> float:
    """Percent, again with the core counted three times."""
    return 100 * 3 * core_again(inputs, 1) / training_flops(korthikanti_config(inputs), 1, inputs["s"])


def textbook_score_term(inputs: dict[str, Any]) -> float:
    """The 5·a·s/h of s·b·h·(34 + 5·a·s/h)."""
    config = GPTConfig(n_layer=1, n_head=inputs["a"], n_embd=inputs["h"])
    return textbook_activation_bytes(config, 1, inputs["s"]) / (inputs["s"] * inputs["h"]) - 34


def textbook_saving(inputs: dict[str, Any]) -> float:
    """Percent of the activations that goes when the s x s matrices are computed again."""
    score_term = textbook_score_term(inputs)
    return 100 * score_term / (34 + score_term)


def layer_bytes(inputs: dict[str, Any]) -> float:
    """Of one layer on one of t ranks, as lessons 01 and 11 print it."""
    s, b, h, a, t = (inputs[letter] for letter in "sbhat")
    mode = inputs["mode"]
    if mode == "none":
        return textbook_activation_bytes(GPTConfig(n_layer=1, n_head=a, n_embd=h), b, s)
    scheme = "sequence parallel" if "_sp" in mode else "tensor parallel"
    again = ",\ncore computed again" if "selective" in mode else ""
    return published_bytes(s, b, h, a, t)[scheme + again]


def bytes_per_rank(num_parameters: float, num_ranks: int, stage: int) -> float:
    return state_bytes_per_rank(int(num_parameters), num_ranks, stage)["total"]


def largest_model(inputs: dict[str, Any]) -> float:
    """Billions of parameters of which the states fill a GPU; `mp` GPUs share a model."""
    stage = ["base", "os", "osg", "osgp"].index(inputs["partition"])
    return inputs["mp"] * inputs["gpu_GB"] / bytes_per_rank(1, inputs["dp"], stage)


def elements_of_a_step(inputs: dict[str, Any]) -> float:
    """In parameters, on so many ranks that (n - 1)/n is 1, as the paper counts."""
    return round(sum(communication_elements(1, 10**9, inputs["zero_stage"]).values()), 6)


def share_on_the_wire(op: str, num_ranks: int) -> float:
    """Of the whole tensor's bytes, what a rank sends: nccl-tests' factor from algbw to busbw."""
    kind = {"allreduce": "all_reduce"}.get(op, op)
    return collective_time(kind, num_bytes=1.0, num_ranks=num_ranks, latency=0.0, bandwidth=1.0)


def state_gigabytes(inputs: dict[str, Any], recipe: str) -> float:
    return model_state_bytes(int(inputs["params_B"] * 1e9), recipe)["total"] / 1e9


def playbook_fp32_gradients(inputs: dict[str, Any]) -> float:
    """The playbook keeps the 16-bit gradients beside the fp32 ones they are added to: 18 + 2 bytes."""
    num_parameters = int(inputs["params_B"] * 1e9)
    states = model_state_bytes(num_parameters, "mixed_fp32_gradients")
    return (states["total"] + model_state_bytes(num_parameters, "mixed")["gradients"]) / 1e9


def palm_flops() -> int:
    """PaLM's 6·N + 12·L·a·d·s a token, N without the position table."""
    num_parameters = count_parameters(GPT2)["total"] - GPT2.block_size * GPT2.n_embd
    return (6 * num_parameters + 12 * GPT2.n_layer * GPT2.n_embd * 1024) * 1024


def gpt2_block(config: GPTConfig) -> int:
    counts = count_parameters(config)
    blocks = counts["attention"] + counts["mlp"] + counts["norm"] - config.n_embd  # less the last norm
    return blocks // config.n_layer


def parameters(inputs: dict[str, Any]) -> int:
    """Of a GPT with biases and learned positions."""
    return count_parameters(
        GPTConfig(
            block_size=inputs["block"],
            vocab_size=inputs["vocab"],
            n_layer=inputs["n_layer"],
            n_head=inputs["n_head"],
            n_embd=inputs["n_embd"],
            bias=True,
        )
    )["total"]


def days(inputs: dict[str, Any]) -> float:
    """Narayanan et al. count eight FLOPs a parameter and token, two of them recomputed, at the rate given."""
    num_parameters, num_tokens = int(inputs["params_B"] * 1e9), int(inputs["tokens_B"] * 1e9)
    rate = inputs["achieved_TF"] * 1e12
    return training_plan(num_parameters, num_tokens, inputs["gpus"], rate, 6 / 8, 80e9)["days"]


def petaflop_days(inputs: dict[str, Any]) -> float:
    num_parameters, num_tokens = int(inputs["params_M"] * 1e6), int(inputs["tokens_B"] * 1e9)
    return training_plan(num_parameters, num_tokens, 1, 1e15, 1.0, 80e9)["days"]


def mfu_of_throughput(inputs: dict[str, Any]) -> float:
    tokens_per_second = inputs["tokens_per_s"] / inputs["gpus"]
    config, peak = korthikanti_config(inputs), inputs["peak_TF"] * 1e12
    return 100 * model_flops_utilization(config, tokens_per_second, peak, inputs["s"])


def blocks_over_6nd(inputs: dict[str, Any]) -> float:
    """FLOPs of the blocks, over 2·N·D: a forward's share of 6·N·D."""
    flops = forward_flops(korthikanti_config(inputs), 1, inputs["s"])
    return (flops["attention"] + flops["mlp"]) / (2 * inputs["params_M"] * 1e6 * inputs["s"])


COMPUTED: dict[str, Callable[[dict[str, Any]], float]] = {
    r"zero_t1_.*": lambda inputs: (
        bytes_per_rank(inputs["params_B"] * 1e9, inputs["dp"], inputs["zero_stage"]) / 1e9
    ),
    r"zero_t2_.*": largest_model,
    r"zero_comm_.*": elements_of_a_step,
    r"nccl_bus_.*": lambda inputs: share_on_the_wire(inputs["op"], inputs["n"]),
    r"korth_t2_.*": layer_bytes,
    r"playbook_mem_.*_nofp32g": lambda inputs: state_gigabytes(inputs, "mixed"),
    r"playbook_mem_.*B_fp32g": playbook_fp32_gradients,
    r"playbook_bpp_bf16_no_fp32acc": lambda _: model_state_bytes(1, "mixed")["total"],
    r"playbook_bpp_bf16_fp32acc": lambda _: playbook_fp32_gradients({"params_B": 1}),
    r"playbook_70B_bf16_weights": lambda _: model_state_bytes(70 * 10**9, "mixed")["weights"] / 1e9,
    r"korth_5as_h_.*": textbook_score_term,
    r"korth_sel_saving_.*": textbook_saving,
    r"korth_sel_flops_.*": selective_overhead,
    r"korth_t5_.*_mfu": mfu,
    r"korth_t5_.*_hfu": hfu,
    r"nanogpt_params": lambda _: count_parameters(GPT2)["total"],
    r"nanogpt_block_params": lambda _: gpt2_block(GPT2),
    r"nanogpt_ckpt_est": lambda _: 12 * count_parameters(GPT2)["total"] / 1e9,
    r"nanogpt_fwd_flops": lambda _: forward_flops(GPT2, 1, 1024)["total"],
    r"nanogpt_total_flops": lambda _: training_flops(GPT2, 1, 1024),
    r"nanogpt_palm_flops": lambda _: palm_flops(),
    r"nanogpt_mfu": lambda inputs: (
        100 * model_flops_utilization(GPT2, inputs["batch"] * 1024 / inputs["iter_s"], inputs["peak"], 1024)
    ),
    r"nanogpt_train_days": lambda _: 6 * count_parameters(GPT2)["total"] * 300e9 / (8 * 312e12 * 0.3) / 86400,
    r"scalingbook_dp_tokens_.*": lambda inputs: smallest_hidden_share(
        124_337_664, inputs["TF"] * 1e12, inputs["GBps"] * 1e9
    ),
    r"playbook_tp_drop_.*": lambda inputs: drop(tensor_parallel_overhead, inputs["ranks"]),
    r"ring_t2_.*_block": lambda inputs: smallest_hidden_part(
        32, 32, inputs["TF"] * 1e12, inputs["GBps"] * 1e9
    ),
    r"roof_.*_TF": lambda inputs: ROOFS[inputs["gpu"].partition("-")[0]][0] / 1e12,
    r"roof_.*_bw_TBps": lambda inputs: ROOFS[inputs["gpu"].partition("-")[0]][1] / 1e12,
    r"roof_.*_bw_GBps": lambda inputs: ROOFS[inputs["gpu"].partition("-")[0]][1] / 1e9,
    r"llama.*_hours": lambda inputs: LLAMAS[inputs["name"]][2] / 1e6,
    r"llama.*_flops": lambda inputs: 6 * LLAMAS[inputs["name"]][0] * LLAMAS[inputs["name"]][1],
    r"hw_A100-SXM-80_bf16_TF": lambda _: MACHINES["A100, NVLink"][0] / 1e12,
    r"hw_A100-SXM-80_nvlink_uni_GBps": lambda _: MACHINES["A100, NVLink"][1] / 1e9,
    r"hw_H100-SXM_bf16_TF": lambda _: MACHINES["H100, NVLink"][0] / 1e12,
    r"hw_H100-SXM_nvlink_uni_GBps": lambda _: MACHINES["H100, NVLink"][1] / 1e9,
    r"hw_DGX-H100_node_egress_GBps": lambda _: MACHINES["H100, between machines"][1] / 1e9,
    r"hw_A100-P4d_node_egress_GBps": lambda _: MACHINES["A100, between AWS machines"][1] / 1e9,
    r"gpt3_d1_.*_params": lambda inputs: parameters(inputs) / 1e6,
    r"gpt3_d1_.*_pf_days": petaflop_days,
    r"narayanan_t1_.*_params": lambda inputs: parameters(inputs) / 1e9,
    r"narayanan_.*_days": days,
    r"palm_t3_.*_mfu|mpt_.*_mfu": mfu_of_throughput,
    r"mpt_.*_params": parameters,
    r"nanogpt_scaling_gpt2_params": lambda inputs: parameters(inputs) - inputs["block"] * inputs["n_embd"],
    r"chinchilla_a4_.*_ratio": blocks_over_6nd,
    r"scalingbook_all_gather_us": lambda inputs: (
        1e6 * collective_time("all_gather", inputs["bytes"], inputs["n"], 0.0, inputs["GBps"] * 1e9)
    ),
    r"fsdp_full_.*_elements": lambda inputs: sum(
        communication_elements(inputs["M"], inputs["W"], inputs["zero_stage"]).values()
    ),
    r"megatron_bpp_.*": lambda inputs: model_state_bytes(1, inputs["recipe"])["total"],
    r"torchtitan_llama3_8b_fsdp_.*": lambda inputs: overlap.TOKENS_PER_SECOND[inputs["gpus"]],
}


@pytest.mark.parametrize("name", FIGURES)
def test_published_figure_comes_out(name: str) -> None:
    figure = FIGURES[name]
    (compute,) = [compute for pattern, compute in COMPUTED.items() if re.fullmatch(pattern, name)]
    kind, _, size = figure["tolerance"].partition(" ")
    assert kind in ("exact", "abs", "rel")
    relative = float(size) if kind == "rel" else 1e-12
    absolute = float(size) if kind == "abs" else 0.0
    value, published = compute(figure["inputs"]), figure["value"]
    if isinstance(published, str):  # a formula of the inputs
        published = eval(published, {}, figure["inputs"])
    assert math.isclose(value, published, rel_tol=relative, abs_tol=absolute), (
        f"{figure['quantity']}: {value}, published {figure['value']} {figure['unit']}, {figure['source']}"
    )


def test_full_recomputation_is_narayanans_formula() -> None:
    """96·B·L·s·h²·(1 + s/6h + v/16Lh), arXiv:2104.04473 section 5.1: all blocks again, the head not."""
    b, s, h, layers, v = 3, 2048, 12288, 96, 51200
    config = GPTConfig(block_size=s, vocab_size=v, n_layer=layers, n_head=96, n_embd=h)
    published = 96 * b * layers * s * h * h + 16 * b * layers * s * s * h + 6 * b * s * h * v
    assert training_flops(config, b, s, "full") == published
