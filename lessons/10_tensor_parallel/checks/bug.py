"""Find the bug: multi-query attention."""

import copy
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks import (
    BACKWARD,
    Fault,
    Trial,
    backward,
    check,
    drawn_alike,
    each_rank,
    exercise,
    is_close,
    weights_of,
)
from lessons_shared.cut_gpt import describe, gradients_of, own_part
from lessons_shared.evaluation import evaluates_alike, in_evaluation, later_is_right, twice_as_long
from lessons_shared.given_weights import give_weights, require_fit
from lessons_shared.passes import (
    BOTH,
    CLEARED,
    HALF,
    after_clearing,
    require_after_clearing,
    sums_of_two_passes,
)
from lessons_shared.wire import sends_at_most

from .branches import dense_branch
from .shared import SIZES, one_all_reduce

exercise(
    "MultiQueryAttention",
    world_sizes=SIZES,
    subgroup=True,
    uses=("ColumnParallelLinear", "RowParallelLinear"),
    hints=(
        "Draw it: what is replicated, what is cut? Go along each path from replicated to cut, and ask what "
        "completes the gradient there.",
        "There are two paths from x to the heads. One leads through ColumnParallelLinear, which takes care "
        "of itself. The other leads through key_value.",
        "The hook repairs the gradient of key_value's weights, and nothing below them. Where would one "
        "all-reduce repair both?",
    ),
)


class DenseMultiQueryAttention(nn.Module):
    """What the program computes, on one process, under the same names."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_size = width // num_heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * self.head_size)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.attend(x, self.key_value(x)))

    def attend(self, x: Tensor, key_value: Tensor) -> Tensor:
        """x (b, s, h) and keys beside values (b, s, 2d) to the heads' outputs side by side (b, s, h)."""
        b, s, _ = x.shape
        q = self.query(x).view(b, s, -1, self.head_size).transpose(1, 2)
        k, v = (part.unsqueeze(1).expand_as(q) for part in key_value.chunk(2, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@torch.no_grad()
def other_outputs(dense: DenseMultiQueryAttention, x: Tensor, n: int) -> dict[str, Tensor | Fault]:
    """The output (b, s, h), if each rank's heads get a wrong mask, or are mixed up with tokens."""
    dense, x = copy.deepcopy(dense).double(), x.double()
    b, s, _ = x.shape
    q = dense.query(x).view(b, s, n, -1, dense.head_size).permute(2, 0, 3, 1, 4)  # (n, b, a/n, s, d)
    k, v = (part.unsqueeze(1).expand_as(q) for part in dense.key_value(x).chunk(2, -1))
    heads, tokens = torch.arange(q.size(2)).unsqueeze(1), torch.arange(s)
    size = len(heads)

    def attended(last: Tensor, q: Tensor = q) -> Tensor:
        """Each rank's heads (n, b, a/n, s, d), where query t of head i sees the keys up to last[i, t]."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=tokens <= last.unsqueeze(-1))

    def put_back(y: Tensor) -> Tensor:
        """Each rank's heads side by side, for every token."""
        return dense.project(y.permute(1, 3, 0, 2, 4).flatten(2))

    first_head = (
        "Queries that lie head by head, (a/n, s), have the mask's s rows a/n times over: mask.repeat."
    )
    first_token = "Queries that lie token by token, (s, a/n), have each row of the mask a/n times in a row."
    order = "Split (b, s, a/n·d) into (b, s, a/n, d), and transpose heads and tokens; put them back likewise."
    causal = tokens.expand(size, s)
    split = attended(causal, q.transpose(2, 3).reshape(q.shape))

    def taken_for_tokens(y: Tensor) -> Tensor:
        """Heads (n, b, a/n, s, d) that are taken for (n, b, s, a/n, d)."""
        return y.reshape(n, b, s, size, -1).transpose(2, 3)

    unmasked = put_back(attended(torch.full_like(causal, s)))
    return {
        "nothing is masked": Fault(unmasked, "Query t sees the keys 0 to t: is_causal=True, or a mask."),
        "each row of the mask is repeated for all heads, and the queries lie head by head": Fault(
            put_back(attended((heads * s + tokens) // size)), first_head
        ),
        "the mask is repeated as a whole for each head, and the queries lie token by token": Fault(
            put_back(attended((tokens * size + heads) % s)), first_token
        ),
        "heads and tokens changed places when the heads were put back": Fault(
            put_back(taken_for_tokens(attended(causal))), order
        ),
        "heads and tokens changed places when the queries were split": Fault(put_back(split), order),
        "heads and tokens changed places when the queries were split, and when the heads were put back": (
            Fault(put_back(taken_for_tokens(split)), order)
        ),
    }


def not_copied(
    dense: DenseMultiQueryAttention, x: Tensor, upstream: Tensor, n: int
) -> dict[str, list[Tensor]]:
    """What is not copied to the group → by rank, the gradient of keys beside values (b, s, 2d)."""
    dense = copy.deepcopy(dense).double()
    key_value = dense.key_value(x.double()).detach().requires_grad_()
    y = dense.attend(x.double(), key_value)
    heads = torch.arange(y.size(-1)) // (y.size(-1) // n)  # whose heads a column is of
    of_y = upstream.double() @ dense.project.weight
    found = [torch.autograd.grad(y, key_value, of_y * (heads == r), retain_graph=True)[0] for r in range(n)]
    whole, halves = sum(found), torch.arange(key_value.size(-1)) // dense.head_size
    return {
        **{
            name: [torch.where(halves == half, own, whole) for own in found]
            for half, name in enumerate(("keys", "values"))
        },
        BOTH_HALVES: found,
    }


BOTH_HALVES = "keys and values"
MULTI_QUERY_CUTS = {"query.weight": 0, "query.bias": 0, "project.weight": 1}


def multi_query_probe(rank, width: int, num_heads: int, weights: dict, x: Tensor, upstream: Tensor) -> dict:
    layer = rank.submission.MultiQueryAttention(width, num_heads, group=rank.group).to(rank.device)
    if unfit := give_weights(layer, weights):
        return {"unfit": unfit}
    x = x.clone().requires_grad_()
    with rank.record() as recording:
        y = layer(x)
        recording.mark(BACKWARD)
        backward(y, upstream)
    held = describe(layer)
    gradient = None if x.grad is None else x.grad.clone()
    backward(layer(x), HALF * upstream)
    twice = gradients_of(layer)
    cleared = after_clearing(layer, lambda: backward(layer(x), upstream))
    evaluation = in_evaluation(layer, x, upstream)
    longer = twice_as_long(layer, x)
    return {
        "output": y, "gradient": gradient, "recording": recording, **held, "twice": twice, **cleared,
        "evaluation": evaluation, "longer": longer,
    }  # fmt: skip


def observe_multi_query(trial: Trial) -> SimpleNamespace:
    n, num_heads = trial.num_ranks, 12
    width = num_heads * trial.integer(2, 4)
    dense = drawn_alike(DenseMultiQueryAttention(width, num_heads), trial)
    weights = weights_of(dense)

    def cut(name: str, whole: Tensor, rank: int) -> Tensor:
        dim = MULTI_QUERY_CUTS.get(name)
        return whole if dim is None else own_part(whole, dim, rank, n).contiguous()

    x, upstream = (trial.normal(2, 6, width) for _ in range(2))
    shards = [{name: cut(name, w, rank) for name, w in weights.items()} for rank in range(n)]
    runs = [(width, num_heads, shard, x, upstream) for shard in shards]
    results = trial.run(multi_query_probe, per_rank=runs)
    require_fit(trial, results, shards)
    expected = dense_branch(dense, x, upstream)
    gradients = {name: [cut(name, g, rank) for rank in range(n)] for name, g in expected.gradients.items()}
    alone = not_copied(dense, x, upstream, n)
    longer = twice_as_long(copy.deepcopy(dense).double(), x.double())
    others = partial(other_outputs, copy.deepcopy(dense), x, n)
    dense.query.register_forward_pre_hook(lambda _, given: given[0].detach())
    shared = dense_branch(dense, x, upstream).x
    return SimpleNamespace(
        results=results, output=expected.output, x_gradient=expected.x, gradients=gradients, x=x, width=width,
        x_gradient_through_shared=shared, alone=alone, key_value=weights["key_value.weight"].double(),
        longer=longer, other_outputs=others,
    )  # fmt: skip


def of_what_is_not_copied(seen: SimpleNamespace, name: str, passes: float = 1.0) -> dict[str, Fault]:
    """Cause → the gradient of x, or of key_value's weight or bias, if what is named is not copied."""
    found = {}
    x = seen.x.double().flatten(0, 1)  # (b*s, h)
    through_queries = seen.x_gradient - seen.x_gradient_through_shared
    for which, by_rank in seen.alone.items():
        ways = {
            "x": lambda g: through_queries + g @ seen.key_value,
            "key_value.weight": lambda g: g.flatten(0, 1).T @ x,
            "key_value.bias": lambda g: g.sum((0, 1)),
        }
        others = "" if which == BOTH_HALVES else "values" if which == "keys" else "keys"
        told = f"through the {which} comes what this rank's heads found, and " + (
            f"through the {others} what all did" if others else "nobody sums it over the ranks"
        )
        step = f"All ranks' heads read the {which}, too: let them pass copy_to_group before heads use them."
        if name in ways:
            found[told] = Fault([passes * ways[name](g) for g in by_rank], step)
    return found


@check("MultiQueryAttention")
def forward_stays_right(trial: Trial) -> None:
    """The output is that of the dense attention (it was before, too)."""
    seen = trial.once(observe_multi_query)
    trial.close(
        "the output",
        each_rank(seen, "output"),
        seen.output,
        alternatives=seen.other_outputs,
        help="Every head has its own queries, and all read the one key head: query t sees the keys 0 to t.",
    )
    later_is_right(trial, "the output", each_rank(seen, "longer"), seen.longer)


@check("MultiQueryAttention")
def gradient_of_x_is_complete(trial: Trial) -> None:
    """The gradient of x is the dense one, the same on every rank."""
    seen = trial.once(observe_multi_query)
    more = trial.num_ranks - 1
    through_shared = seen.x_gradient_through_shared
    trial.close(
        "the gradient of x",
        each_rank(seen, "gradient"),
        seen.x_gradient,
        alternatives={
            "what comes through keys and values counts n times: summed before key_value, and after it": (
                seen.x_gradient + more * through_shared
            ),
            "what comes through the queries counts n times: ColumnParallelLinear sums it already": (
                seen.x_gradient + more * (seen.x_gradient - through_shared)
            ),
            **(of_what_is_not_copied(seen, "x") if more else {}),
        },
        help="It has one part through the queries and one through keys and values: each counts once, whole.",
    )


def summed_at_x(seen: SimpleNamespace, actual: list[Tensor | None], expected: Tensor) -> bool:
    """Whether the ranks have parts of a weight's gradient, and yet the whole gradient of x."""
    if not all(isinstance(g, Tensor) and g.shape == expected.shape for g in actual):
        return False
    whole = [is_close(g, seen.x_gradient) for g in each_rank(seen, "gradient") if isinstance(g, Tensor)]
    return all(whole) and is_close(torch.stack(actual).sum(0), expected)


@check("MultiQueryAttention")
def gradients_of_all_weights_are_complete(trial: Trial) -> None:
    """Every weight has the dense gradient, key_value's on every rank; passes add up until zero_grad."""
    seen = trial.once(observe_multi_query)
    n = trial.num_ranks
    for name, expected in seen.gradients.items():
        actual = [g.get(name) for g in each_rank(seen, "twice")]
        at_x = n > 1 and "key_value" in name and summed_at_x(seen, actual, BOTH * expected[0])
        trial.close(
            f"the gradient of {name} after two passes",
            actual,
            [BOTH * g for g in expected],
            alternatives={
                "summed twice: once in copy_to_group, and once more by the hook": [
                    BOTH * n * g for g in expected
                ],
                **sums_of_two_passes(expected, n),
                **(of_what_is_not_copied(seen, name, BOTH) if n > 1 else {}),
            },
            help="The gradient of x is whole: it is summed in front of key_value, whose own weights see this "
            "rank's part. copy_to_group belongs behind key_value, on its output."
            if at_x
            else "key_value is replicated: its gradient needs one sum over the ranks, no more and no less.",
        )
        cleared = {which: [g.get(name) for g in each_rank(seen, which)] for which in CLEARED}
        require_after_clearing(trial, f"the gradient of {name}", "", cleared, expected, n)


@check("MultiQueryAttention")
def bug_fix_sends_little(trial: Trial) -> None:
    """The forward still sends one all-reduce; the backward the gradients of x and of the one key head."""
    seen = trial.once(observe_multi_query)
    one_all_reduce(trial, seen, "", seen.output.numel() * 4, "The forward was right: leave it as it is.")
    small = sum(g[0].numel() * 4 for name, g in seen.gradients.items() if name.startswith("key_value"))
    sends_at_most(
        trial,
        seen,
        BACKWARD,
        2 * (2 * seen.x.numel() * 4 + small),
        "two all-reduces of x's gradient and one of key_value's",
        "query sums what its x gets. Keys beside values need one sum more, of their gradient.",
    )


@check("MultiQueryAttention")
def multi_query_is_the_same_in_evaluation(trial: Trial) -> None:
    """In eval mode and under torch.no_grad() outputs and gradients are those of training."""
    evaluates_alike(trial, trial.once(observe_multi_query).results)
