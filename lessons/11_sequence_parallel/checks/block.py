"""One block, from this rank's tokens to this rank's tokens."""

import copy
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from grader.checks import (
    BACKWARD,
    CheckEnded,
    Recording,
    Trial,
    backward,
    check,
    drawn_alike,
    each_rank,
    exercise,
    parts,
    weights_of,
)
from lessons_shared.cut_gpt import cut_dim, describe, gradients_of, small_config
from lessons_shared.cut_gpt_checks import given_one_is_changed, matrices_are_cut
from lessons_shared.evaluation import evaluates_alike, in_evaluation, later_is_right, twice_as_long
from lessons_shared.passes import BOTH, CLEARED, HALF, after_clearing
from lessons_shared.refusals import refusal_of, refused, undividable
from lessons_shared.wire import computes_a_share, sends_at_most
from nanogpt.model import Block, GPTConfig

from .gradients import attention_gradients_are_right, block_gradients_are_right
from .masks import drop_as_seen, marked, masks_differ, watch
from .shared import (
    FEWER,
    SEVERAL,
    SIZES,
    Dropped,
    Norms,
    alive_before_backward,
    kept_bytes,
    mark_backward,
    norms_are_cut,
    run_on_tokens,
    tell_partial_use,
    used_parameters,
)
from .slips import (
    BIAS_ADDED_OFTEN,
    BLOCKS,
    SUMMED_TWICE,
    gradients_summed_twice,
    own_token_gradients,
    with_biases_added_often,
)

exercise(
    "sequence_parallel_block",
    world_sizes=SIZES,
    subgroup=True,
    hints=(
        "Begin with tensor_parallel_attention and tensor_parallel_mlp: they cut the weights. Then "
        "replace the four "
        "linear layers by ones that begin with gathered_linear, or end with reduce_scatter_sequence.",
        "CausalSelfAttention.forward reads b and s from its input. What is s there now? Give the "
        "attention a forward "
        "that reads them after c_attn, or gather before the attention begins.",
        "Which parameters has every rank, and uses for its own tokens alone? "
        "parameter.register_hook(function) is "
        "called with each backward's gradient, and may return another one.",
        "A dropout's generator: seed it with a number that all ranks agree on, plus this rank's number "
        "in the group.",
    ),
)

RATE = 0.4
CUT_ASLEEP = "the ranks share a seed, and the block was in eval mode when it was cut"
MORE_BLOCKS = 4
"""So many more are cut: what is right by chance in the dropouts of one is not in all."""


def block_probe(rank, plain: list, dropping: list) -> dict:
    return {
        "plain": [one_block(rank, *case) for case in plain],
        "dropping": [one_dropping(rank, *case) for case in dropping],
    }


def dense_block(rank, config: dict, weights: dict) -> Block:
    """On a rank: the dense block with the judge's weights."""
    block = Block(GPTConfig(**config))
    block.load_state_dict(weights)
    block.attn.core.dropout = 0.0
    return block.to(rank.device)


def one_block(rank, config: dict, weights: dict, x: Tensor, upstream: Tensor) -> dict:
    dense = dense_block(rank, config, weights)
    block = rank.submission.sequence_parallel_block(dense, rank.group)
    leaf = x.clone().requires_grad_()
    given = leaf * 1.0  # as the stream is: the norm's input counts as alive only if it is kept
    given.retain_grad()
    before = upstream.clone()
    with rank.record(memory=True) as recording:
        with Norms() as norms:
            y = block(given)
        mark_backward(recording)
        backward(y, upstream)
    held = describe(block)
    backward(block(leaf * 1.0), HALF * upstream)
    twice = gradients_of(block)
    return {
        "output": y,
        "given_back": block is dense,
        "gradient": None if given.grad is None else given.grad.clone(),
        "changed": not torch.equal(before, upstream) or not torch.equal(given, x),
        "twice": twice,
        **after_clearing(block, lambda: backward(block(leaf * 1.0), upstream)),
        "normed": norms.sizes,
        "recording": recording,
        **held,
        "evaluation": in_evaluation(block, x, upstream),
        "longer": twice_as_long(block, x),
    }


def block_use_probe(
    rank, frozen: list[str], config: dict, weights: dict, x: Tensor, upstream: Tensor
) -> list[str]:
    block = rank.submission.sequence_parallel_block(dense_block(rank, config, weights), rank.group)
    return used_parameters(block, lambda: block(x), frozen)


def block_case(trial: Trial, bias: bool) -> SimpleNamespace:
    n = trial.num_ranks
    config = small_config(trial, bias=bias)
    block = drawn_alike(Block(GPTConfig(**config)), trial)
    shape = (trial.integer(2, 3), n * trial.integer(2, 4), config["n_embd"])
    x, upstream = trial.normal(*shape), trial.normal(*shape)
    dense = copy.deepcopy(block).double()

    def run_backward(model: nn.Module) -> dict[str, Tensor]:
        leaf = x.double().requires_grad_()
        model(leaf).backward(upstream.double())
        return {"input": leaf.grad}

    causes = [cause for cause, norms in SUMMED_TWICE.items() if norms == BLOCKS]
    leaf = x.double().requires_grad_()
    y = dense(leaf)
    y.backward(upstream.double())
    longer = torch.cat([torch.cat([own, own], 1) for own in parts(x.double(), 1, n)], 1)
    return SimpleNamespace(
        longer=dense(longer).detach(),
        name="with bias" if bias else "without bias",
        config=config, weights=weights_of(block), x=x, upstream=upstream, output=y.detach(),
        x_gradient=leaf.grad, gradients={k: p.grad for k, p in dense.named_parameters()},
        biases_added_often=lambda: with_biases_added_often(dense, n)(x.double()).detach(),
        summed_twice=cache(lambda: gradients_summed_twice(dense, causes, n, run_backward)),
        own_tokens=cache(lambda: own_token_gradients(dense, n, run_backward)),
    )  # fmt: skip


def one_dropping(
    rank, config: dict, weights: dict, awake: bool, seed: int, num_more: int, x: Tensor, upstream: Tensor
) -> dict:
    rank.seed(seed)
    dense = [dense_block(rank, config, weights).train(awake) for _ in range(1 + num_more)]
    for other in dense[1:]:
        other.attn.core.dropout = RATE
    block, *more = [rank.submission.sequence_parallel_block(each, rank.group).train() for each in dense]
    rank.seed(seed + 1)
    runs = []
    for _ in range(2):
        seen, hooks = watch([block, *more])
        with Dropped() as dropped:
            y = block(x)
        for other in more:
            other(x)
        runs.append(seen)
        if len(runs) == 1:
            backward(y, upstream)
        for hook in hooks:
            hook.remove()
    return {
        "first": runs[0], "second": runs[1], "dropped": dropped.sizes, "gradients": gradients_of(block),
        "probabilities stay": [probabilities_stay(other, x) for other in more[:1]],
        "recordings": [forward_alone(rank, block.train(mode), x) for mode in (True, False)],
        "weights": describe(block)["weights"], "asleep": block.eval()(x).detach(),
    }  # fmt: skip


def probabilities_stay(block: nn.Module, x: Tensor) -> bool:
    """On a rank: whether nothing is dropped without the dropouts of the stream."""
    for branch, name in ((block.attn, "resid_dropout"), (block.mlp, "dropout")):
        getattr(branch, name, nn.Identity()).eval()
    return torch.equal(block(x), block(x))


def forward_alone(rank, block: nn.Module, x: Tensor) -> Recording:
    """On a rank: a forward, and the moment before its backward."""
    with rank.record(memory=True) as recording:
        y = block(x)
        mark_backward(recording)
    del y
    return recording


def observe_block(trial: Trial) -> SimpleNamespace:
    """`plain` and `dropping`: lists of cases with the ranks' results; the first layout has all of them."""
    n = trial.num_ranks
    plain = [block_case(trial, bias) for bias in ((True, False) if trial.in_full else (True,))]
    config = small_config(trial, dropout=RATE, bias=True, n_embd=36)
    block = drawn_alike(Block(GPTConfig(**config)), trial)
    weights = marked(weights_of(block))
    block.load_state_dict(weights)
    x, upstream = (trial.normal(2, 12, config["n_embd"]) for _ in range(2))
    base = trial.integer(1, 10**6)
    kinds = {"the ranks share a seed": [base] * n} if n in FEWER else {}
    if trial.in_full:
        kinds["with dropout, each rank seeded by itself"] = [base + 10 * r for r in range(n)]
        kinds[CUT_ASLEEP] = [base] * n
    dropping = [
        SimpleNamespace(name=name, block=block, weights=weights, x=x, upstream=upstream) for name in kinds
    ]

    def num_more(name: str) -> int:
        return MORE_BLOCKS if trial.in_full and name == "the ranks share a seed" else 0

    xs, upstreams = parts(x, 1, n), parts(upstream, 1, n)
    runs = [
        (
            [(c.config, c.weights, parts(c.x, 1, n)[r], parts(c.upstream, 1, n)[r]) for c in plain],
            [
                (config, weights, name != CUT_ASLEEP, seeds[r], num_more(name), xs[r], upstreams[r])
                for name, seeds in kinds.items()
            ],
        )
        for r in range(n)
    ]
    try:
        results = run_on_tokens(trial, block_probe, runs)
    except CheckEnded as end:
        tell_partial_use(trial, end, block_use_probe, [cases[0] for cases, _ in runs])
        raise
    for name, cases in (("plain", plain), ("dropping", dropping)):
        for number, case in enumerate(cases):
            case.results = [result[name][number] for result in results]
    return SimpleNamespace(plain=plain, dropping=dropping)


@check("sequence_parallel_block")
def block_output_is_the_dense_one(trial: Trial) -> None:
    """Called with this rank's tokens, the block returns the dense block's output for them."""
    for seen in trial.once(observe_block).plain:
        trial.close(
            f"the output ({seen.name})",
            each_rank(seen, "output"),
            parts(seen.output, 1, trial.num_ranks),
            alternatives=lambda seen=seen: {
                BIAS_ADDED_OFTEN: parts(seen.biases_added_often(), 1, trial.num_ranks)
            },
            help="Gather before the cut products, reduce-scatter after them. And which s does attention see?",
        )
        for rank, changed in enumerate(each_rank(seen, "changed")):
            trial.require(not changed, "the input or the incoming gradient was changed in place", rank=rank)
        longer = parts(seen.longer, 1, trial.num_ranks)
        later_is_right(trial, f"the output ({seen.name})", each_rank(seen, "longer"), longer)


@check("sequence_parallel_block")
def block_input_gradient_is_the_dense_one(trial: Trial) -> None:
    """The gradient of this rank's tokens is the dense block's, complete."""
    for seen in trial.once(observe_block).plain:
        trial.close(
            f"the gradient of the input ({seen.name})",
            each_rank(seen, "gradient"),
            parts(seen.x_gradient, 1, trial.num_ranks),
            alternatives=lambda seen=seen: {
                cause: parts(doubled["input"], 1, trial.num_ranks)
                for cause, doubled in seen.summed_twice().items()
            },
            help="A gather's backward must sum: every rank's features pull at every token.",
        )


@check("sequence_parallel_block")
def block_is_cut_and_names_stay(trial: Trial) -> None:
    """Each rank has its slice of every matrix, in tensors of their own, under the dense block's names."""
    for seen in trial.once(observe_block).plain:
        given_one_is_changed(trial, seen)
        matrices_are_cut(trial, seen, ["attn."])


@check("sequence_parallel_block")
def norms_and_biases_are_summed(trial: Trial) -> None:
    """Norms and the biases after a reduce-scatter have the dense gradient, the same on every rank."""
    for seen in trial.once(observe_block).plain:
        block_gradients_are_right(trial, seen, "gradients", 1, only_replicated=True)


@check("sequence_parallel_block")
def slices_have_the_dense_gradient(trial: Trial) -> None:
    """Every slice of a matrix has its part of the dense gradient."""
    for seen in trial.once(observe_block).plain:
        block_gradients_are_right(trial, seen, "gradients", 1, only_replicated=False)
        attention_gradients_are_right(trial, seen, "gradients", "attn.")


@check("sequence_parallel_block")
def two_passes_add_up(trial: Trial) -> None:
    """A second pass, of half the size, adds half to every gradient; one after zero_grad has its own alone."""
    for seen in trial.once(observe_block).plain:
        block_gradients_are_right(trial, seen, "twice", BOTH)
        for which in CLEARED:
            block_gradients_are_right(trial, seen, which, 1)


@check("sequence_parallel_block")
def block_sends_what_tensor_parallel_sends(trial: Trial) -> None:
    """Forward two all-gathers and two reduce-scatters; backward the same, and what is gathered again."""
    for seen in trial.once(observe_block).plain:
        whole = seen.x.numel() * 4
        small = 2 * sum(4 * g.numel() for name, g in seen.gradients.items() if cut_dim(name) is None)
        help = "An all-reduce of which a part is thrown away sends twice as much as a reduce-scatter."
        means = "two all-gathers and two reduce-scatters of (b, s, h)"
        sends_at_most(trial, seen, "", 4 * whole, means, help)
        means = "four all-gathers, two reduce-scatters and the sums of norms and biases"
        sends_at_most(trial, seen, BACKWARD, 6 * whole + small, means, help)


@check("sequence_parallel_block")
def block_norms_see_this_ranks_tokens(trial: Trial) -> None:
    """What norms read are s/n tokens."""
    for seen in trial.once(observe_block).plain:
        for rank, sizes in enumerate(each_rank(seen, "normed")):
            norms_are_cut(trial, rank, sizes, seen.x.numel() // trial.num_ranks)


@check("sequence_parallel_block", world_sizes=SEVERAL)
def block_keeps_what_the_formula_says(trial: Trial) -> None:
    """Between forward and backward no more is alive than 2 + 14/n times (b, s, h), with 1/n to spare."""
    for seen in trial.once(observe_block).plain:
        b, s, h = seen.x.shape
        n = trial.num_ranks
        part = 4 * b * s * h // n
        allowed = kept_bytes(seen.config, b, s, n, masks=False)
        if trial.device.type == "cuda":  # whose fused kernels take no odd head size: probabilities are kept
            allowed += 4 * b * seen.config["n_head"] // n * s * s
        for rank, recording in enumerate(each_rank(seen, "recording")):
            alive = alive_before_backward(recording)
            trial.require(
                alive <= allowed + part + part // 2,
                f"{alive:,} bytes are alive after the forward: {allowed:,} are expected if the linear "
                "layers keep "
                f"their gathered inputs, {allowed - 2 * (n - 1) * part:,} if they gather them again "
                f"({seen.name})",
                help="Norms and the stream have s/n tokens. What else is kept whole, (b, s, h)?",
                rank=rank,
            )
    for seen in trial.once(observe_block).dropping:
        part = seen.x.numel() * 4 // trial.num_ranks
        for rank, recordings in enumerate(each_rank(seen, "recordings")):
            dropping, asleep = map(alive_before_backward, recordings)
            drops_all_tokens = seen.x.numel() in seen.results[rank]["dropped"]
            trial.require(
                dropping - asleep <= 3 * part,
                f"with dropout {dropping - asleep:,} bytes more are alive after the forward than in eval "
                f"mode: two masks of this rank's tokens have {2 * part:,}",
                help="First the reduce-scatter and the bias, then the dropout, of this rank's tokens."
                if drops_all_tokens
                else "Draw a mask for this rank's tokens alone. A view of a larger one keeps all of it.",
                rank=rank,
                cause="a dropout acts on all tokens, (b, s, h): it stands where they are not cut"
                if drops_all_tokens
                else "a dropout keeps more than a mask of this rank's tokens",
            )


@check("sequence_parallel_block")
def block_computes_its_share(trial: Trial) -> None:
    """Each rank computes 1/n of the dense block's products."""
    for seen in trial.once(observe_block).plain:
        b, s, h = seen.x.shape
        computes_a_share(trial, seen, (24 * b * s * h * h + 4 * b * s * s * h) / trial.num_ranks)


@check("sequence_parallel_block", world_sizes=FEWER)
def block_dropouts_differ_between_ranks(trial: Trial) -> None:
    """No two dropouts drop the same elements, of one rank or of two, also if the ranks share a seed."""
    for seen in trial.once(observe_block).dropping:
        masks_differ(trial, seen.results, RATE, False, seen.name)


@check("sequence_parallel_block", world_sizes=(2,), subgroup=False)
def probabilities_are_dropped_as_before(trial: Trial) -> None:
    """Attention's probabilities are dropped, too, where the dense block drops them."""
    for seen in trial.once(observe_block).dropping:
        for rank, stay in enumerate(each_rank(seen, "probabilities stay")):
            trial.require(
                not any(stay),
                "without the dropouts of the stream two calls in training mode give the same: the attention "
                "probabilities are not dropped any more",
                help="Leave attention.core as it is. Each rank drops in its own heads, as it likes.",
                rank=rank,
                cause="the dropout of attention.core was switched off",
            )


@check("sequence_parallel_block", world_sizes=FEWER)
def gradients_know_what_was_dropped(trial: Trial) -> None:
    """With dropout the gradients are the dense block's with the same elements dropped; none in eval mode."""
    for seen in trial.once(observe_block).dropping:
        dense = copy.deepcopy(seen.block).double()
        with torch.no_grad():
            expected = copy.deepcopy(dense).eval()(seen.x.double())
        asleep = parts(expected, 1, trial.num_ranks)
        trial.close(f"the output in eval mode ({seen.name})", each_rank(seen, "asleep"), asleep)
        if drop_as_seen(dense, [dense], seen, RATE, False):
            dense(seen.x.double()).backward(seen.upstream.double())
            seen.gradients = {name: p.grad for name, p in dense.named_parameters()}
            block_gradients_are_right(trial, seen, "gradients", 1)
            attention_gradients_are_right(trial, seen, "gradients", "attn.")


def refusal_probe(rank, config: dict) -> dict:
    return refusal_of(rank.submission.sequence_parallel_block, Block(GPTConfig(**config)), rank.group)


@check("sequence_parallel_block", world_sizes=(2, 4), subgroup=False)
def block_refuses_heads_that_do_not_divide(trial: Trial) -> None:
    """Heads that are not divisible by the ranks are a ValueError; nothing was changed."""
    heads = undividable(trial)
    config = small_config(trial, n_head=heads, n_embd=heads * 12, dropout=0.1)  # the width divides
    refused(trial, heads, refusal_probe, config, heads=True)


@check("sequence_parallel_block")
def block_is_the_same_in_evaluation(trial: Trial) -> None:
    """In eval mode and under torch.no_grad() outputs and gradients are those of training without dropout."""
    for seen in trial.once(observe_block).plain:
        evaluates_alike(trial, seen.results)
