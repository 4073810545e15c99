"""The MLP and the attention, from parallel linears."""

import copy
from types import SimpleNamespace
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import (
    BACKWARD,
    Trial,
    backward,
    check,
    drawn_alike,
    each_rank,
    exercise,
    parts,
    row_order,
    stand_alone,
    weights_of,
)
from nanogpt.model import MLP, CausalSelfAttention, GPTConfig

from .linears import computes_a_share
from .shared import SIZES, describe, error_of, one_all_reduce, own_part, refused, shape_of, undividable

exercise(
    "tensor_parallel_mlp",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "GELU works on each element alone, so it does not care how the hidden features are cut. Which layer "
        "leaves them cut, and which takes them cut?",
        "Replace mlp.c_fc and mlp.c_proj by layers from from_linear; MLP.forward stays as it is.",
        "The dropout comes after the sum: its input is the same on every rank, and so must its mask be.",
    ),
)
exercise(
    "tensor_parallel_attention",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Print c_attn.weight.shape. Its 3h rows are all the queries, then all the keys, then all the values; "
        "within each, head by head.",
        "What would rank 0 of 3 get if you gave ColumnParallelLinear.from_linear the weight as it is?",
        "Reorder the rows first, so that the r-th contiguous slice holds the r-th heads of q, of k and of v: "
        "unflatten, transpose, flatten. The bias has the same order as the rows.",
    ),
)

BRANCH = {
    "tensor_parallel_mlp": (MLP, "c_fc", "dropout"),
    "tensor_parallel_attention": (CausalSelfAttention, "c_attn", "resid_dropout"),
}


def branch_probe(rank, name: str, cases: list) -> list[dict]:
    return [one_branch(rank, name, *case) for case in cases]


def one_branch(rank, name: str, config: dict, weights: dict, x: Tensor, upstream: Tensor) -> dict:
    branch = BRANCH[name][0](GPTConfig(**config))
    branch.load_state_dict(weights)
    branch.to(rank.device)
    branch = getattr(rank.submission, name)(branch, rank.group)
    x = x.clone().requires_grad_()
    with rank.record() as recording:
        y = branch(x)
        recording.mark(BACKWARD)
        backward(y, upstream)
    return {"output": y, "gradient": x.grad, "recording": recording, **describe(branch)}


def small_config(trial: Trial, **changes) -> dict:
    """Heads that divide over 1 to 4 ranks, an odd head size, a vocabulary that 2 and 3 and 4 divide."""
    config = {
        "block_size": 16,
        "vocab_size": 48,
        "n_layer": 2,
        "n_head": 12,
        "n_embd": 12 * trial.choice([2, 3]),
        "dropout": 0.0,
        "bias": True,
    }
    return config | changes


def dense_branch(branch: nn.Module, x: Tensor, upstream: Tensor) -> SimpleNamespace:
    branch, x = copy.deepcopy(branch).double(), x.double().requires_grad_()
    y = branch(x)
    y.backward(upstream.double())
    gradients = {name: p.grad for name, p in branch.named_parameters()}
    return SimpleNamespace(output=y.detach(), x=x.grad, gradients=gradients)


def observe_branch(name: str):
    def observe(trial: Trial) -> dict[str, SimpleNamespace]:
        seen = {
            "with bias": branch_case(trial, name, bias=True),
            "without bias": branch_case(trial, name, bias=False),
        }
        cases = [(case.config, case.weights, case.x, case.upstream) for case in seen.values()]
        results = trial.run(branch_probe, name, cases)
        for number, case in enumerate(seen.values()):
            case.results = [result[number] for result in results]
        return seen

    return observe


def branch_case(trial: Trial, name: str, bias: bool) -> SimpleNamespace:
    config = small_config(trial, bias=bias)
    branch = drawn_alike(BRANCH[name][0](GPTConfig(**config)), trial)
    shape = (trial.integer(2, 3), trial.integer(3, 7), config["n_embd"])
    x, upstream = trial.normal(*shape), trial.normal(*shape)
    dense = dense_branch(branch, x, upstream)
    return SimpleNamespace(dense=dense, weights=weights_of(branch), x=x, upstream=upstream, config=config)


BRANCHES = {name: observe_branch(name) for name in BRANCH}


def branch_output(trial: Trial, name: str, partial) -> None:
    n = trial.num_ranks
    for kind, seen in trial.once(BRANCHES[name]).items():
        bias = seen.weights.get("c_proj.bias")
        alternatives = partial(seen)
        if bias is not None:
            alternatives |= {
                "the bias of c_proj was added n times": seen.dense.output + (n - 1) * bias,
                "without the bias of c_proj": seen.dense.output - bias,
            }
        trial.close(
            f"the output ({kind})", each_rank(seen, "output"), seen.dense.output, alternatives=alternatives
        )


def branch_communication(trial: Trial, name: str) -> None:
    for seen in trial.once(BRANCHES[name]).values():
        num_bytes = seen.x.numel() * 4
        help = "c_fc or c_attn stays cut (gather nothing), c_proj takes it cut and sums once."
        one_all_reduce(trial, seen, "", num_bytes, help)
        one_all_reduce(trial, seen, BACKWARD, num_bytes, "Only the gradient of x is summed, once.")


def branch_dropout_probe(rank, name: str, config: dict, weights: dict, x: Tensor, seed: int) -> dict:
    branch = BRANCH[name][0](GPTConfig(**config))
    branch.load_state_dict(weights)
    branch.to(rank.device).train()
    rank.seed(seed)
    branch = getattr(rank.submission, name)(branch, rank.group)
    rank.seed(seed + 1)
    return {"outputs": [branch(x), branch(x)], "asleep": branch.eval()(x)}


def branch_dropout(trial: Trial, name: str) -> None:
    config = small_config(trial, dropout=0.4)
    branch = drawn_alike(BRANCH[name][0](GPTConfig(**config)), trial)
    x = trial.normal(3, 5, config["n_embd"])
    base = trial.integer(1, 10**6)
    runs = [(name, config, weights_of(branch), x, base + 10 * rank) for rank in range(trial.num_ranks)]
    results = trial.run(branch_dropout_probe, per_rank=runs)
    for rank, result in enumerate(results):
        for number in range(2):
            trial.require(
                torch.equal(result["outputs"][number] == 0, results[0]["outputs"][number] == 0),
                f"ranks 0 and {rank} dropped different elements of the output, which is the same on both",
                help="The ranks are seeded differently here. share_dropout makes their masks agree.",
                rank=rank,
            )
        first, second = result["outputs"]
        trial.require(
            not torch.equal(first == 0, second == 0) and 0.1 < (first == 0).double().mean().item() < 0.8,
            "the output was not dropped at random in training mode",
            help=f"{BRANCH[name][2]} belongs after c_proj, as in the dense one.",
            rank=rank,
        )
    dense = copy.deepcopy(branch).double().eval()(x.double()).detach()
    trial.close("the output in eval mode", [r["asleep"] for r in results], dense)


def branch_refusal_probe(rank, name: str, config: dict) -> dict:
    branch = BRANCH[name][0](GPTConfig(**config))
    return {"error": error_of(getattr(rank.submission, name), branch, rank.group)}


def mlp_cuts(weights: dict, rank: int, n: int) -> dict[str, Tensor]:
    """This rank's part of each of an MLP's tensors (weights or gradients)."""
    cut = {
        "c_fc.weight": own_part(weights["c_fc.weight"], 0, rank, n),
        "c_proj.weight": own_part(weights["c_proj.weight"], 1, rank, n),
    }
    if "c_fc.bias" in weights:
        cut["c_fc.bias"] = own_part(weights["c_fc.bias"], 0, rank, n)
        cut["c_proj.bias"] = weights["c_proj.bias"]
    return cut


@check("tensor_parallel_mlp")
def mlp_shards_are_slices(trial: Trial) -> None:
    """c_fc.weight is cut along dim 0, c_proj.weight along dim 1, contiguously; no views of the whole."""
    n = trial.num_ranks
    for seen in trial.once(BRANCHES["tensor_parallel_mlp"]).values():
        expected = [mlp_cuts(seen.weights, rank, n) for rank in range(n)]
        for name in expected[0]:
            trial.close(
                name,
                each_rank(seen, "weights", name),
                [e[name] for e in expected],
            )
        stand_alone(trial, seen.results)


@check("tensor_parallel_mlp")
def mlp_output_is_the_dense_one(trial: Trial) -> None:
    """The output is the dense MLP's on every rank."""

    def partial(seen: SimpleNamespace) -> dict:
        w, n = {k: v.double() for k, v in seen.weights.items()}, trial.num_ranks
        sums = []
        for rank in range(n):
            cut = mlp_cuts(w, rank, n)
            hidden = F.gelu(F.linear(seen.x.double(), cut["c_fc.weight"], cut.get("c_fc.bias")))
            sums.append(F.linear(hidden, cut["c_proj.weight"], cut.get("c_proj.bias")))
        return {"this rank's partial sum: nothing was summed over the ranks": sums}

    branch_output(trial, "tensor_parallel_mlp", partial)


@check("tensor_parallel_mlp")
def mlp_input_gradient_is_whole(trial: Trial) -> None:
    """The gradient of x is the dense MLP's on every rank."""
    for kind, seen in trial.once(BRANCHES["tensor_parallel_mlp"]).items():
        trial.close(
            f"the gradient of x ({kind})",
            each_rank(seen, "gradient"),
            seen.dense.x,
            help="Partial gradients of x leave every layer norm below with a gradient that differs by rank.",
        )


@check("tensor_parallel_mlp")
def mlp_shard_gradients_are_the_dense_ones(trial: Trial) -> None:
    """The gradient of every shard is the slice of the dense gradient, and that of c_proj.bias is whole."""
    n = trial.num_ranks
    for seen in trial.once(BRANCHES["tensor_parallel_mlp"]).values():
        expected = [mlp_cuts(seen.dense.gradients, rank, n) for rank in range(n)]
        for name in expected[0]:
            actual = [g.get(name) for g in each_rank(seen, "gradients")]
            trial.close(f"the gradient of {name}", actual, [e[name] for e in expected])


@check("tensor_parallel_mlp")
def mlp_sends_one_all_reduce_each_way(trial: Trial) -> None:
    """One all-reduce of b·s·h in the forward, one in the backward, and no other."""
    branch_communication(trial, "tensor_parallel_mlp")


@check("tensor_parallel_mlp")
def mlp_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the MLP's products."""
    for seen in trial.once(BRANCHES["tensor_parallel_mlp"]).values():
        h = seen.x.size(-1)
        computes_a_share(trial, seen, "", 2 * (seen.x.numel() // h) * 8 * h * h / trial.num_ranks)


@check("tensor_parallel_mlp", world_sizes=(2, 1, 4), subgroup=False)
def mlp_drops_alike_on_every_rank(trial: Trial) -> None:
    """Its dropout drops the same elements on every rank, however the ranks are seeded."""
    branch_dropout(trial, "tensor_parallel_mlp")


@check("tensor_parallel_mlp", world_sizes=(3,), subgroup=False)
def mlp_refuses_what_does_not_divide(trial: Trial) -> None:
    """A hidden width that does not divide by the ranks is a ValueError that names both numbers."""
    width = trial.choice([4, 5, 7, 8])  # 4h divides by 1, 2 and 4 whatever h is
    config = small_config(trial, n_embd=width, n_head=1)
    results = trial.run(branch_refusal_probe, "tensor_parallel_mlp", config)
    refused(trial, SimpleNamespace(results=results), 4 * width)


def heads_of(tensor: Tensor, rank: int, n: int) -> Tensor:
    """Rank's rows of a fused q|k|v tensor: the r-th heads of each, in the order q, k, v."""
    return torch.cat([own_part(part, 0, rank, n) for part in tensor.chunk(3)])


def fused_with_bias(tensors: dict) -> Tensor:
    """c_attn's weight with the bias as one more column, so that both are followed through a reordering.

    An empty tensor where the two are missing or do not fit.
    """
    weight, bias = tensors.get("c_attn.weight"), tensors.get("c_attn.bias")
    if weight is None or weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return torch.empty(0, 0)
    return weight if bias is None else torch.cat([weight, bias.unsqueeze(1)], 1)


def wrong_rows(trial: Trial, whole: dict, held: dict, rank: int) -> NoReturn:
    """End the check: say how the rows of this rank's c_attn are wrong."""
    n = trial.num_ranks
    weight = whole["c_attn.weight"]
    if row_order(held["c_attn.weight"], heads_of(weight, rank, n)) is not None:
        message = "c_attn.weight holds the right rows, and c_attn.bias does not: it was cut in another order"
        trial.wrong(message, help="Reorder the bias as you reorder the rows, then cut both.", rank=rank)
    contiguous = row_order(held["c_attn.weight"], own_part(weight, 0, rank, n)) is not None
    trial.wrong(
        "c_attn was cut contiguously, as one matrix: rank 0 got queries where it needs queries, "
        "keys and values of its heads"
        if contiguous
        else "the rows of c_attn are not this rank's heads of q, of k and of v (bias included)",
        help="Cut q, k and v each by heads, and join this rank's three parts.",
        rank=rank,
    )


@check("tensor_parallel_attention")
def heads_are_cut_by_rank(trial: Trial) -> None:
    """Rank r holds the r-th heads of queries, keys and values, and those columns of c_proj."""
    n = trial.num_ranks
    for seen in trial.once(BRANCHES["tensor_parallel_attention"]).values():
        fused = fused_with_bias(seen.weights)
        for rank, weights in enumerate(each_rank(seen, "weights")):
            h = seen.x.size(-1)
            trial.equal("the shape of c_attn.weight", shape_of(weights.get("c_attn.weight")), (3 * h // n, h))
            if "c_attn.bias" in seen.weights:
                trial.equal("the shape of c_attn.bias", shape_of(weights.get("c_attn.bias")), (3 * h // n,))
            own = fused_with_bias(weights)
            if row_order(own, heads_of(fused, rank, n)) is None:
                wrong_rows(trial, seen.weights, weights, rank)
        columns = parts(seen.weights["c_proj.weight"], 1, n)
        trial.close("c_proj.weight", each_rank(seen, "weights", "c_proj.weight"), columns)
        stand_alone(trial, seen.results)


@check("tensor_parallel_attention")
def attention_output_is_the_dense_one(trial: Trial) -> None:
    """The output is the dense attention's on every rank."""
    n = trial.num_ranks

    def by_rank(attention: nn.Module, seen: SimpleNamespace, cut) -> list[Tensor]:
        """Each rank's partial output when its c_attn is what `cut` makes of the fused tensor."""
        outputs = []
        for rank in range(n):
            layer = copy.deepcopy(attention)
            for name in ("weight", "bias"):
                fused = getattr(attention.c_attn, name)
                if fused is not None:
                    setattr(layer.c_attn, name, nn.Parameter(cut(fused.detach(), rank)))
            layer.c_proj.weight = nn.Parameter(own_part(layer.c_proj.weight.detach(), 1, rank, n))
            layer.c_proj.bias = None
            outputs.append(layer(seen.x.double()).detach())
        return outputs

    def partial(seen: SimpleNamespace) -> dict:
        attention = CausalSelfAttention(GPTConfig(**seen.config))
        attention.load_state_dict(seen.weights)
        attention = attention.double()
        bias = seen.weights.get("c_proj.bias", torch.zeros(1)).double()
        mixed = sum(by_rank(attention, seen, lambda t, rank: own_part(t, 0, rank, n))) + bias
        own = [y + bias for y in by_rank(attention, seen, lambda t, rank: heads_of(t, rank, n))]
        return {
            "queries, keys and values mixed up: the fused c_attn was cut contiguously as one matrix": mixed,
            "this rank's heads alone: nothing was summed over the ranks": own,
        }

    branch_output(trial, "tensor_parallel_attention", partial)


@check("tensor_parallel_attention")
def attention_input_gradient_is_whole(trial: Trial) -> None:
    """The gradient of x is the dense attention's on every rank."""
    for kind, seen in trial.once(BRANCHES["tensor_parallel_attention"]).items():
        trial.close(f"the gradient of x ({kind})", each_rank(seen, "gradient"), seen.dense.x)


@check("tensor_parallel_attention")
def attention_shard_gradients_are_the_dense_ones(trial: Trial) -> None:
    """The gradient of every shard is that part of the dense gradient."""
    n = trial.num_ranks
    for seen in trial.once(BRANCHES["tensor_parallel_attention"]).values():
        fused, gradient = fused_with_bias(seen.weights), fused_with_bias(seen.dense.gradients)
        actual, expected = [], []
        for rank, (weights, gradients) in enumerate(
            zip(each_rank(seen, "weights"), each_rank(seen, "gradients"), strict=True)
        ):
            order = row_order(fused_with_bias(weights), heads_of(fused, rank, n))
            if order is None:
                trial.wrong(
                    "c_attn does not hold this rank's heads, so its gradient cannot be compared", rank=rank
                )
            trial.require("c_attn.weight" in gradients, "c_attn.weight has no gradient", rank=rank)
            actual.append(fused_with_bias(gradients))
            expected.append(heads_of(gradient, rank, n)[order])
        trial.close("the gradient of c_attn (bias as last column)", actual, expected)
        columns = parts(seen.dense.gradients["c_proj.weight"], 1, n)
        trial.close("the gradient of c_proj.weight", each_rank(seen, "gradients", "c_proj.weight"), columns)
        if "c_proj.bias" in seen.weights:
            whole = seen.dense.gradients["c_proj.bias"]
            trial.close("the gradient of c_proj.bias", each_rank(seen, "gradients", "c_proj.bias"), whole)


@check("tensor_parallel_attention")
def attention_sends_one_all_reduce_each_way(trial: Trial) -> None:
    """One all-reduce of b·s·h in the forward, one in the backward, and no other."""
    branch_communication(trial, "tensor_parallel_attention")


@check("tensor_parallel_attention")
def attention_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the projections and of the heads."""
    for seen in trial.once(BRANCHES["tensor_parallel_attention"]).values():
        b, s, h = seen.x.shape
        dense = 2 * b * s * 4 * h * h + 4 * b * s * s * h
        computes_a_share(trial, seen, "", dense / trial.num_ranks)


@check("tensor_parallel_attention", world_sizes=(2, 1, 4), subgroup=False)
def attention_drops_alike_on_every_rank(trial: Trial) -> None:
    """The dropout after the sum drops the same elements on every rank, however the ranks are seeded."""
    branch_dropout(trial, "tensor_parallel_attention")


@check("tensor_parallel_attention", world_sizes=(2, 4), subgroup=False)
def attention_refuses_heads_that_do_not_divide(trial: Trial) -> None:
    """A number of heads that does not divide by the ranks is a ValueError that names both numbers."""
    heads = undividable(trial)
    config = small_config(trial, n_head=heads, n_embd=heads * 12)  # the width divides; the heads do not
    results = trial.run(branch_refusal_probe, "tensor_parallel_attention", config)
    refused(trial, SimpleNamespace(results=results), heads)
