"""The MLP, from parallel linears."""

from types import SimpleNamespace

from torch import Tensor
from torch.nn import functional as F

from grader.checks import (
    Trial,
    check,
    each_rank,
    exercise,
    stand_alone,
)
from lessons_shared.cut_gpt import (
    own_part,
    small_config,
)
from lessons_shared.cut_gpt_checks import given_one_is_changed
from lessons_shared.refusals import refused
from lessons_shared.wire import computes_a_share

from .branches import (
    BRANCHES,
    branch_case,
    branch_communication,
    branch_dropout,
    branch_in_evaluation,
    branch_output,
    branch_refusal_probe,
    run_cases,
)
from .shared import SIZES

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
        given_one_is_changed(trial, seen)
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
        wide = F.linear(seen.x.double(), w["c_fc.weight"], w.get("c_fc.bias"))
        linear = F.linear(wide, w["c_proj.weight"], w.get("c_proj.bias"))
        sums = []
        for rank in range(n):
            cut = mlp_cuts(w, rank, n)
            hidden = F.gelu(F.linear(seen.x.double(), cut["c_fc.weight"], cut.get("c_fc.bias")))
            sums.append(F.linear(hidden, cut["c_proj.weight"], cut.get("c_proj.bias")))
        return {
            "this rank's partial sum: nothing was summed over the ranks": sums,
            "there is no GELU between the layers": linear,
            "GELU is replaced by its approximation by tanh": F.linear(
                F.gelu(wide, approximate="tanh"), w["c_proj.weight"], w.get("c_proj.bias")
            ),
            "a GELU stands behind c_proj as well": F.gelu(seen.dense.output),
        }

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
        computes_a_share(trial, seen, 2 * (seen.x.numel() // h) * 8 * h * h / trial.num_ranks)


@check("tensor_parallel_mlp", world_sizes=(2, 4), subgroup=False)
def mlp_of_an_odd_width_is_cut(trial: Trial) -> None:
    """An MLP of an odd width is cut as well: 4h is divisible by 2 and by 4."""
    case = branch_case(trial, "tensor_parallel_mlp", n_head=3, n_embd=21)
    run_cases(trial, "tensor_parallel_mlp", [case])
    trial.close("the output of an MLP of width 21", each_rank(case, "output"), case.dense.output)


@check("tensor_parallel_mlp", world_sizes=(2, 1, 4), subgroup=False)
def mlp_drops_alike_on_every_rank(trial: Trial) -> None:
    """Its dropout drops the same elements on every rank, however the ranks are seeded."""
    branch_dropout(trial, "tensor_parallel_mlp")


@check("tensor_parallel_mlp", world_sizes=(3,), subgroup=False)
def mlp_refuses_what_does_not_divide(trial: Trial) -> None:
    """A hidden width that is not divisible by the ranks is a ValueError; nothing was changed."""
    width = trial.choice([4, 5, 7, 8])  # 4h is divisible by 1, 2 and 4 whatever h is
    config = small_config(trial, n_embd=width, n_head=1, dropout=0.1)
    refused(trial, 4 * width, branch_refusal_probe, "tensor_parallel_mlp", config)


@check("tensor_parallel_mlp")
def mlp_is_the_same_in_evaluation(trial: Trial) -> None:
    """In eval mode and under torch.no_grad() outputs and gradients are those of training."""
    branch_in_evaluation(trial, "tensor_parallel_mlp")
